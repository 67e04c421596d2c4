"""A CUDA kernel's name stands for one text on one set of dtypes: MLX compiles by name.

Runs anywhere: kernels are recorded, not compiled.
"""

import re
from collections import defaultdict
from pathlib import Path

import cuda_launches
import pytest
from cuda_contractions import contractions
from cuda_recorder import no_small_tiles, recording

from mlx_lattice import devices
from mlx_lattice.backends.cuda import thresholds as cuda_thresholds
from mlx_lattice.backends.gpu import kernel as gpu_kernel

if not devices.has_extension():
    pytest.skip("relations are built by the CPU's extension", allow_module_level=True)


def test_no_name_is_used_for_two_kernels(monkeypatch):
    unpacked = {key: dict(value) for key, value in cuda_thresholds.UNPACK_ROWS.items()}
    monkeypatch.setattr(cuda_thresholds, "UNPACK_ROWS", unpacked)
    with recording() as launches:
        contractions()
        no_small_tiles(monkeypatch)
        for most in (8, 1):  # splits, and none
            monkeypatch.setattr(cuda_thresholds, "MOST_SPLITS", most)
            contractions()
        for by_width in cuda_thresholds.UNPACK_ROWS.values():
            by_width.update(dict.fromkeys((32, 64, 128, 256), 0))
        contractions()
        cuda_launches.geometry()
        cuda_launches.orders()
        cuda_launches.views()
        cuda_launches.norms()
        cuda_launches.row_norms()
        cuda_launches.updates()
        cuda_launches.joins()
        cuda_launches.points()
        cuda_launches.patches()
        cuda_launches.before_attention()
        cuda_launches.reductions()
        monkeypatch.setitem(gpu_kernel.SEGMENT_CUTS, "longest", 4)
        monkeypatch.setitem(gpu_kernel.SEGMENT_CUTS, "piece", 2)
        cuda_launches.reductions()
        cuda_launches.library()
    with recording("a100") as older:
        contractions()
    meanings, headers = defaultdict(set), set()
    for launch in (*launches, *older):
        meanings[launch.name].add(launch[1:4])
        headers.add(launch.text[0])
    lines = {line for text in headers for line in re.findall(r'#include "(.+)"', text)}
    assert all(map(Path.is_file, map(Path, lines))), lines
    used = {Path(line).name for line in lines}
    assert {path.name for path in devices.source_folder("cuda").glob("*.cu*")} <= used
    twice = {name: found for name, found in meanings.items() if len(found) > 1}
    assert not twice, "\n".join(
        f"{name}: {[(inputs, outputs) for inputs, outputs, _ in found]}"
        for name, found in sorted(twice.items())
    )
