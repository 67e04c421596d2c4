"""Every CUDA kernel family once, small, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python tests/sanitize/cuda_kernels.py [PART ...]

It fails too where a sum is wrong and, unless parts are named (see ``PARTS``), where a
source in ``cuda/`` was not run.
"""

import argparse
import os
import sys
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("MLX_ENABLE_TF32", "0")
os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")  # a launch is a launch
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "routes")]

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import reference as ref  # noqa: E402
from conftest import KINDS, Numbers, assert_same, multi_edges, pair  # noqa: E402
from quantized_checks import check_packed  # noqa: E402
from reduction_checks import Checks  # noqa: E402
from test_misaligned import check as check_views  # noqa: E402

from mlx_lattice.backends import (  # noqa: E402
    cuda,
    cuda_kernels,
    cuda_sorted,
    cuda_views,
    cuda_weight_grad,
    dispatch_bounds,
    gpu_kernel,
)
from mlx_lattice.backends.cuda_geometry import CudaGeometry  # noqa: E402
from mlx_lattice.backends.cuda_reductions import CudaReductions  # noqa: E402
from mlx_lattice.geometry import sync  # noqa: E402
from mlx_lattice.problem import PASSES  # noqa: E402
from mlx_lattice.routes import thresholds  # noqa: E402

used: set[str] = set()
source, header = cuda_kernels.source, gpu_kernel.GpuKernel.header


def recorded(files, whole):
    """Note which sources a kernel is made of."""
    used.update(files)
    return source(files, whole)


def recorded_too(kernel, whole=True):
    """Note which sources a kernel of the one launcher is made of."""
    used.update(kernel.files)
    return header(kernel, whole)


cuda_kernels.source, gpu_kernel.GpuKernel.header = recorded, recorded_too
SUBMANIFOLD = pair(KINDS[0], "surface", 300)


def geometry() -> None:
    """Relations of every kind, their transposes, edges and orders."""
    for case in KINDS:
        relation, expected = pair(case, "surface", 300)
        assert_same(relation, expected)
        np.testing.assert_array_equal(np.array(relation.in_out), expected.in_out)
        mx.eval(*cuda_views.sorted_rows(relation)[:3])
    rows = np.arange(4000, dtype=np.int32).reshape(1000, 4)
    rows[900] = rows[30]
    index = CudaGeometry().index(mx.array(rows))
    assert index.settle(sync.read(*index.facts()))[1] == (30, 900)


def contraction(both, route, shape, dtype, groups=1) -> None:
    """One route forward and backward, as far as it has these passes."""
    relation, expected = both
    n = Numbers(relation, *shape, groups, dtype)
    x, w, dy = n.exact
    if route in cuda.CONV:
        y = cuda.CONV[route](n.x, n.w, relation, groups, False)
        ref.assert_close(y, ref.conv(x, w, expected, groups=groups), dtype, route)
        dx = cuda.CONV[route](n.dy, n.w, relation.T, groups, True)
        wanted = ref.input_grad(dy, w, expected, groups=groups)
        ref.assert_close(dx, wanted, dtype, route)
    if route in cuda.WEIGHT_GRAD:
        dw = cuda.WEIGHT_GRAD[route](n.x, n.dy, relation, groups)
        wanted = ref.weight_grad(x, dy, expected, groups=groups)
        ref.assert_close(dw, wanted, dtype, route)


def contractions() -> None:
    """Every float route: whole tiles and cut ones."""
    for route in sorted({*cuda.CONV, *cuda.WEIGHT_GRAD}):
        for dtype in ("float16", "float32"):
            for shape in ((64, 64), (40, 136)):
                if route == "depthwise":
                    contraction(SUBMANIFOLD, route, shape[:1] * 2, dtype, shape[0])
                else:
                    contraction(SUBMANIFOLD, route, shape, dtype)
    contraction(multi_edges(), "relation_traversal", (5, 7), "float32")


def views() -> None:
    """Arrays that begin in the middle of a word, by every route.

    Few rows take the sorted weight gradient here too.
    """
    with patch.object(thresholds, "SORTED_GRAD_ROWS", 0):
        for pass_ in PASSES:
            for shape in ((16, 16), (64, 128)):
                check_views(pass_, SUBMANIFOLD, shape, "float16")
        contraction(SUBMANIFOLD, "sorted_implicit_gemm", (64, 128), "float16")


def packed() -> None:
    """Both routes of packed weights."""
    for route, run in cuda.QUANTIZED.items():
        for levels, dtype in ((4, "float16"), (8, "float16"), (4, "float32")):
            check_packed(run, SUBMANIFOLD, 72, 40, levels, dtype=dtype, name=route)


def reductions() -> None:
    """Sums and maxima by tables and by segments, whole and in pieces."""
    checks = Checks(CudaReductions())
    of = np.random.default_rng(0).integers(0, 7, 60)
    for channels in (3, 16):
        checks.tables("float16", (25, 8, 9), True, channels)
        checks.max(pair(KINDS[2], "batches"), channels, "float16")
        checks.segments(of, 8, channels)
    dispatch_bounds.SEGMENT_CUTS.update(piece=2, longest=4)
    checks.segments(of, 8, 3)


def before_hopper() -> None:
    """The tiles of GPUs without wgmma."""
    with (
        patch.object(cuda_sorted, "is_hopper", lambda: False),
        patch.object(cuda_weight_grad, "is_hopper", lambda: False),
    ):
        contraction(SUBMANIFOLD, "sorted_implicit_gemm", (40, 72), "float16")
        contraction(SUBMANIFOLD, "grouped_gemm", (40, 72), "float16")
        packed()


PARTS = (geometry, contractions, views, packed, before_hopper, reductions)


def main() -> None:
    parts = {part.__name__: part for part in PARTS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    asked = parser.parse_args().parts
    if unknown := set(asked) - set(parts):
        parser.error(f"no part is named {', '.join(unknown)}; see --help")
    for name in asked or parts:
        parts[name]()
        print(f"{name} done", flush=True)
    left = {path.name for path in cuda_kernels.folder().glob("*.cu")} - used
    assert asked or not left, f"nothing ran {', '.join(sorted(left))}"
    print(f"ran kernels of {', '.join(sorted(used))}")


if __name__ == "__main__":
    main()
