"""Write the pages of whole nets that the docs link to, from a trace of each.

    python docs/traces.py [FOLDER]

writes NAME.html into docs/traces, or into FOLDER: a forward pass over 100 000 voxels,
in float32, on the device that is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NETS = ("spunet", "ptv3")


def main(folder: Path) -> None:
    """Write a page for each net."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import mlx.core as mx
    import nets

    import mlx_lattice as ml

    folder.mkdir(parents=True, exist_ok=True)
    for name in NETS:
        steps = nets.Steps(name, nets.batch(100_000, None), mx.float32)
        steps.net.eval()
        with ml.trace(steps.net) as seen:
            steps.net(steps.x)
        seen.save(folder / f"{name}.html")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]) if sys.argv[1:] else Path(__file__).parent / "traces")
