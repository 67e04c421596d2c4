"""Peak memory and time of ``mlx-lattice segment`` over scans of more and more points.

Each run is a process of its own on a LAZ file of an aerial scan that was made up: a
strip of hills, 300 metres wide, with 20 points a square metre and trees on a fifth of
it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import laspy
import mlx.core as mx
import numpy as np
from written import write_line

from mlx_lattice import cli, models

WIDTH, DENSITY = 300.0, 20.0  # metres, points a square metre
PIECE = 1_000_000


def write_scan(path: Path, millions: int) -> None:
    """Write a strip of so many million points, a million at a time."""
    header = laspy.LasHeader(point_format=7, version="1.4")
    header.scales, header.offsets = (0.001,) * 3, (432_000, 5_300_000, 0)
    rng, length = np.random.default_rng(0), PIECE / WIDTH / DENSITY
    with laspy.open(path, "w", header=header) as writer:
        for i in range(millions):
            made = laspy.ScaleAwarePointRecord.zeros(PIECE, header=header)
            x = (i + rng.random(PIECE)) * length
            y = rng.random(PIECE) * WIDTH
            tree = rng.random(PIECE) < 0.2
            z = 10 * np.sin(x / 90) + 7 * np.cos(y / 70) + tree * rng.uniform(0, 15)
            made.x, made.y, made.z = x + 432_000, y + 5_300_000, z + 50
            made.intensity = rng.integers(0, 65536, PIECE)
            made.gps_time = np.arange(PIECE, dtype=float)
            writer.write_points(made)


def write_net(folder: Path) -> None:
    """Write a SpUNet of 0.5 m voxels, with the strides of the published one."""
    mx.random.seed(0)
    net = models.SpUNet(2, 8, 16, (16, 32, 32, 32, 32, 32, 16, 16), layers=(1,) * 8)
    net.about = models.About(models.VoxelRecipe(0.5, ("intensity", "height")))
    net.save_pretrained(folder)


def measure(scan: Path, net: Path, *options: str) -> dict[str, float]:
    """Segment a scan in this process; return seconds and bytes a point."""
    begun, out = time.perf_counter(), scan.with_name("labelled.laz")
    words = ["segment", str(scan), "--model", str(net), "--out", str(out), *options]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.main(words)
    if code:
        raise SystemExit(f"segment failed: {printed.getvalue()}")
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": round(time.perf_counter() - begun, 1),
        "start_mb": round(before * unit / 1e6),
        "peak_mb": round(peak * unit / 1e6),
        "mlx_peak_mb": round(mx.get_peak_memory() / 1e6),
        "file_mb": round(scan.stat().st_size / 1e6),
    }


def main() -> None:
    """Run each case in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--options", default="--tile 50", help="options of segment")
    parser.add_argument("--out", type=Path, help="JSON lines are added to this file")
    parser.add_argument("--run", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = given.options.split()
    if given.run:
        print(json.dumps(measure(*given.run, *options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        net, scan = Path(folder) / "net", Path(folder) / "scan.laz"
        write_net(net)
        for millions in given.millions:
            write_scan(scan, millions)
            run = [sys.executable, __file__, f"--options={given.options}"]
            line = [*run, "--run", str(scan), str(net)]
            found = subprocess.run(line, check=True, stdout=subprocess.PIPE).stdout
            row = {"millions": millions, "options": given.options}
            write_line(row | json.loads(found), given.out)


if __name__ == "__main__":
    main()
