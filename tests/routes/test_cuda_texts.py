"""CUDA's kernels compile: NVCC names a compiler, such as nvcc, and needs no GPU."""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_cuda_names as names
from cuda_recorder import no_small_tiles, recording

from mlx_lattice.backends.cuda_compile import PRELUDE, Kernel

NVCC = os.environ.get("NVCC")
pytestmark = pytest.mark.skipif(not NVCC, reason="NVCC names no compiler")
# nvcc has these of its own.
INTEGERS = re.compile(r"using u?int\d+_t = .*;\n")


def text(launch) -> str:
    """What a compiler is given for a launch."""
    inputs, outputs = [[each[0] for each in given] for given in launch[1:3]]
    header, body = launch.text
    kernel = Kernel(None, launch.name, inputs, outputs, header, body, (128, 1), 0)
    source = kernel.source(*([each[1] for each in given] for given in launch[1:3]))
    return source.replace(
        PRELUDE, "#include <cstdint>\n" + INTEGERS.sub("", PRELUDE), 1
    )


@pytest.mark.parametrize("chip, code", (("h200", "90a"), ("a100", "80")))
def test_one_kernel_of_each_symbol_and_tile(chip, code, tmp_path, monkeypatch):
    with recording(chip) as launches:
        names.contractions()
        no_small_tiles(monkeypatch)
        names.contractions()
        names.geometry()
        names.views()
        names.reductions()
        names.norms()
    kinds = {}
    for launch in launches:
        files = tuple(re.findall(r'#include "(.+)"', launch.text[0]))
        kinds[files, launch.text[1].rpartition("lattice::")[2]] = launch

    def compiled(launch) -> str:
        source = tmp_path / f"{launch.name}.cu"
        source.write_text(text(launch))
        options = f"-gencode=arch=compute_{code},code=sm_{code}", "-std=c++17", "-w"
        command = [NVCC, *options, "-ptx", source, "-o", source.with_suffix(".ptx")]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode and f"{launch.name}: {done.stderr}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [said for said in pool.map(compiled, kinds.values()) if said]
    assert len(kinds) > 20 and not wrong, "\n".join(wrong)
