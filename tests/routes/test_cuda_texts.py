"""CUDA's kernels compile: NVCC names a compiler, such as nvcc, and needs no GPU."""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import cuda_launches
import pytest
from cuda_contractions import contractions
from cuda_recorder import no_small_tiles, recording

from mlx_lattice import devices
from mlx_lattice.backends.gpu.nvrtc import PRELUDE, Kernel

if not devices.has_extension():
    pytest.skip("relations are built by the CPU's extension", allow_module_level=True)

NVCC = os.environ.get("NVCC")
pytestmark = pytest.mark.skipif(not NVCC, reason="NVCC names no compiler")
# What tells the tiles of a kernel apart.
TILES = re.compile(
    r"using TILE = (.+);|constexpr int ((?:CONSUMERS|WIDTH|SPLITS) = .+);"
)
BOUNDS = re.compile(r"__launch_bounds__\((\d+), (\d+)\)")
# nvcc has these of its own.
INTEGERS = re.compile(r"using u?int\d+_t = .*;\n")


def text(launch) -> str:
    """What a compiler is given for a launch."""
    inputs, outputs = [[each[0] for each in given] for given in launch[1:3]]
    header, body = launch.text
    bounds = BOUNDS.search(header).groups()
    kernel = Kernel(None, launch.name, inputs, outputs, header, body, bounds, 0)
    source = kernel.source(*([each[1] for each in given] for given in launch[1:3]))
    return source.replace(
        PRELUDE, "#include <cstdint>\n" + INTEGERS.sub("", PRELUDE), 1
    )


@pytest.mark.parametrize("chip, code", (("h200", "90a"), ("a100", "80")))
def test_one_kernel_of_each_symbol_and_tile(chip, code, tmp_path, monkeypatch):
    with recording(chip) as launches:
        contractions()
        no_small_tiles(monkeypatch)
        contractions()
        cuda_launches.geometry()
        cuda_launches.views()
        cuda_launches.reductions()
        cuda_launches.norms()
    kinds = {}
    for launch in launches:
        header, body = launch.text
        files = tuple(re.findall(r'#include "(.+)"', header))
        call, tile = body.rpartition("lattice::")[2], tuple(TILES.findall(body))
        kinds[files, call, tile] = launch

    def compiled(launch) -> str:
        source = tmp_path / f"{launch.name[:200]}.cu"  # files have no longer names
        source.write_text(text(launch))
        options = f"-gencode=arch=compute_{code},code=sm_{code}", "-std=c++17", "-w"
        made = "-cubin", "-Xptxas=-v", source, "-o", source.with_suffix(".cubin")
        done = subprocess.run([NVCC, *options, *made], capture_output=True, text=True)
        # A product that is waited for before the next one starts costs a third.
        wrong = done.returncode or "are serialized" in done.stderr
        return wrong and f"{launch.name}: {done.stderr}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [said for said in pool.map(compiled, kinds.values()) if said]
    assert len(kinds) > 20 and not wrong, "\n".join(wrong)
