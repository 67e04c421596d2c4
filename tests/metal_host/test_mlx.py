"""MLX's own kernel headers, unmodified, run right on the host and without findings."""

import struct

import numpy as np
import pytest
from metal_checks import threads

from metal import host

host.require()

MODES = ("fast", "checked")


def headers(*names):
    return "".join(f'#include "mlx/backend/metal/kernels/{n}.h"\n' for n in names)


def to_bfloat(x):
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("instance", "dtype", "columns", "group", "tolerance"),
    [
        ("softmax_single_row<float>", np.float32, 1000, 256, 1e-6),
        ("softmax_single_row<half, float>", np.float16, 1000, 256, 2e-3),
    ],
)
def test_softmax(instance, dtype, columns, group, tolerance, mode):
    entry = host.compile_source(
        headers("defines", "softmax"), mode=mode, instances=[("softmax", instance)]
    )["softmax"]
    x = 3 * np.random.default_rng(0).standard_normal((7, columns)).astype(dtype)
    out = np.empty_like(x)
    report = host.launch(
        entry, [x, out, np.int32(columns)], **threads(7 * group, group), order="random"
    )
    assert report.faults == ()
    exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    np.testing.assert_allclose(out, exact, atol=tolerance)


def matmul(entry, dtype, shape, tile, groups, transposes=(False, False), block=16):
    """Runs one of MLX's fused GEMM kernels; gives its error and its report."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    if dtype == "bfloat":
        a, b = to_bfloat(a), to_bfloat(b)
        exact = from_bfloat(a).astype(np.float64) @ from_bfloat(b)
    else:
        a, b = a.astype(dtype), b.astype(dtype)
        exact = a.astype(np.float64) @ b
    a = np.ascontiguousarray(a.T) if transposes[0] else a
    b = np.ascontiguousarray(b.T) if transposes[1] else b
    out = np.empty((m, n), a.dtype)
    rows, columns = -(-m // tile[0]), -(-n // tile[1])
    # GEMMParams: m, n, k, three leading dimensions, tiles, batch strides, and so on.
    leading = (a.shape[1], b.shape[1], n)
    parameters = struct.pack(
        "8i3q3i4x", m, n, k, *leading, columns, rows, 0, 0, 0, 0, k // block, 1
    )
    # What only a kernel with an addend or batches needs, but clang may load early.
    unused = np.zeros(64, np.uint8)
    buffers = [a, b, unused, out, np.frombuffer(parameters, np.uint8), *[unused] * 3]
    aligned = {200: m % tile[0] == 0, 201: n % tile[1] == 0, 202: k % block == 0}
    report = host.launch(
        entry,
        buffers[: len(entry.buffers)],
        grid=(columns * 32, rows * groups[0], groups[1]),
        threadgroup=(32, *groups),
        order="random",
        constants={10: False, 100: False, 110: False} | aligned,
    )
    out = from_bfloat(out) if dtype == "bfloat" else out
    return np.abs(out - exact).max() / np.abs(exact).max(), report


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("instance", "dtype", "tile", "transposed", "block", "tolerance"),
    [
        ("half, 64, 64, 16, 2, 2, false, false", np.float16, (64, 64), False, 16, 1e-3),
        ("float, 32, 32, 16, 2, 2, false, true", np.float32, (32, 32), True, 16, 1e-5),
        ("bfloat, 64, 32, 32, 2, 2, false, true", "bfloat", (64, 32), True, 32, 5e-3),
    ],
)
def test_steel_gemm(instance, dtype, tile, transposed, block, tolerance, mode):
    entry = host.compile_source(
        headers("steel/gemm/gemm", "steel/gemm/kernels/steel_gemm_fused"),
        mode=mode,
        instances=[("gemm", f"gemm<{instance}, float>")],
    )["gemm"]
    error, report = matmul(
        entry, dtype, (150, 104, 72), tile, (2, 2), (False, transposed), block
    )
    assert report.faults == ()
    assert error < tolerance
    # Whole tiles are multiplied, and k in blocks.
    rows, columns = -(-150 // tile[0]) * tile[0], -(-104 // tile[1]) * tile[1]
    flop = 2 * rows * columns * (-(-72 // block) * block)
    assert report.counts.matrix_flop == flop


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("instance", "tile", "rows", "transposes"),
    [
        ("64, 64, 64, 2, 2, false, true", (64, 64), 2, (False, True)),
        ("32, 64, 64, 1, 2, true, false", (32, 64), 1, (True, False)),
    ],
)
def test_neural_accelerator_gemm(instance, tile, rows, transposes, mode):
    entry = host.compile_source(
        headers("steel/gemm/gemm_nax", "steel/gemm/kernels/steel_gemm_fused_nax"),
        mode=mode,
        instances=[("gemm", f"gemm<half, {instance}, float>")],
    )["gemm"]
    m, n, k = shape = 150, 104, 72
    error, report = matmul(
        entry, np.float16, shape, tile, (2, rows), transposes, block=64
    )
    assert report.faults == ()
    assert error < 1e-3
    assert report.counts.matrix_flop >= 2 * m * n * k
