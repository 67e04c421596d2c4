"""Every CUDA kernel against the float64 oracle: dtypes, odd channels, relations."""

from dataclasses import replace

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, Numbers, bits, multi_edges, pair

from mlx_lattice.backends import mlx_ops

if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
    pytest.skip("MLX has no CUDA device here", allow_module_level=True)

from mlx_lattice import devices  # noqa: E402
from mlx_lattice.backends import cuda, cuda_sorted, cuda_weight_grad  # noqa: E402
from mlx_lattice.routes import thresholds  # noqa: E402

# Each tile width and depth, below, at and above: (C_in, C_out).
CHANNELS = (
    (1, 1),
    (3, 5),
    (16, 16),
    (33, 31),
    (64, 64),
    (96, 40),
    (128, 136),
    (64, 264),
)
SUBMANIFOLD = cases.Case("submanifold", 3, 3)
EDGES = ("sorted_implicit_gemm", "grouped_gemm", "relation_traversal")  # need no table


@pytest.fixture(params=("split", "whole", "few"))
def spread(request, monkeypatch):
    """Few rows in shares of the offsets, in one piece, or on two processors."""
    caches = cuda_sorted._plan, cuda_weight_grad._grouped_plan
    if request.param == "whole":
        monkeypatch.setattr(thresholds, "MOST_SPLITS", 1)
    elif request.param == "few":
        device = replace(devices.current(), cores=2)
        for module in (cuda_sorted, cuda_weight_grad):
            monkeypatch.setattr(module, "current", lambda: device)
    for each in caches:
        each.cache_clear()
    yield request.param
    for each in caches:
        each.cache_clear()


def check_conv(route, relation, expected, c_in, c_out, dtype, groups=1, code=cuda):
    n = Numbers(relation, c_in, c_out, groups, dtype)
    x, w, dy = n.exact
    y = code.CONV[route](n.x, n.w, relation, groups, False)
    assert y.dtype == n.x.dtype
    ref.assert_close(y, ref.conv(x, w, expected, groups=groups), dtype, "y")
    dx = code.CONV[route](n.dy, n.w, relation.T, groups, True)
    wanted = ref.input_grad(dy, w, expected, groups=groups)
    ref.assert_close(dx, wanted, dtype, "dx")


def check_weight_grad(
    route, relation, expected, c_in, c_out, dtype, groups=1, code=cuda
):
    n = Numbers(relation, c_in, c_out, groups, dtype)
    x, _, dy = n.exact
    dw = code.WEIGHT_GRAD[route](n.x, n.dy, relation, groups)
    wanted = ref.weight_grad(x, dy, expected, groups=groups)
    ref.assert_close(dw, wanted, dtype, "dW")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
def test_sorted_implicit_gemm(channels, dtype, spread):
    rows = 3000 if spread == "few" else 400
    check_conv(
        "sorted_implicit_gemm", *pair(SUBMANIFOLD, "surface", rows), *channels, dtype
    )


@pytest.mark.parametrize("channels", ((32, 32), *CHANNELS[4:], (40, 136)), ids=str)
def test_tiles_of_few_edges_a_row(channels, spread, monkeypatch):
    monkeypatch.setattr(thresholds, "THIN_EDGES", 1000)
    relation, expected = pair(SUBMANIFOLD, "surface", 900)
    assert relation.n_edges and cuda_sorted.is_thin(relation)
    check_conv("sorted_implicit_gemm", relation, expected, *channels, "float16")


@pytest.mark.parametrize("wide", (False, True))
@pytest.mark.parametrize("channels", ((64, 128), (128, 200), (64, 256)), ids=str)
def test_both_kernels_of_wide_channels(channels, wide, spread, monkeypatch):
    if not wide:
        monkeypatch.setattr(thresholds, "WIDE_TILES", {})
    relation, expected = pair(SUBMANIFOLD, "surface", 900)
    check_conv("sorted_implicit_gemm", relation, expected, *channels, "bfloat16")


def check_bias(route, relation, expected, c_in, c_out, dtype, groups=1):
    """Both ways round: each adds as many values as it writes channels."""
    n = Numbers(relation, c_in, c_out, groups, dtype)
    x, w, dy = n.exact
    flipped = ref.input_grad(dy, w, expected, groups=groups)
    both = (
        (n.x, relation, False, ref.conv(x, w, expected, groups=groups)),
        (n.dy, relation.T, True, flipped),
    )
    for rows, edges, transposed, wanted in both:
        bias = mx.random.normal((wanted.shape[1],)).astype(n.x.dtype)
        y = cuda.CONV[route](rows, n.w, edges, groups, transposed, bias=bias)
        wanted = wanted + np.array(bias.astype(mx.float32))
        ref.assert_close(y, wanted, dtype, f"{route}, transposed: {transposed}")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
def test_bias(channels, dtype, spread):
    both = pair(SUBMANIFOLD, "surface", 400)
    check_bias("sorted_implicit_gemm", *both, *channels, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("geometry", ("surface", "empty", "one"))
def test_bias_of_traversals(geometry, dtype):
    both = pair(cases.Case("forward", 3, 2, 2), geometry, 200)
    check_bias("relation_traversal", *both, 6, 10, dtype, 2)
    check_bias("relation_traversal", *multi_edges(), 5, 7, dtype)
    for shape in ((5, 5), (16, 16), (3, 6)):
        check_bias("depthwise", *both, *shape, dtype, shape[0])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize("route", ("grouped_gemm", "relation_traversal"))
def test_weight_grad(route, channels, dtype, spread):
    rows = 3000 if spread == "few" else 400
    check_weight_grad(route, *pair(SUBMANIFOLD, "surface", rows), *channels, dtype)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize(
    "channels", ((1, 1), (16, 24), (24, 40), (33, 31), (64, 64), (64, 136)), ids=str
)
def test_sorted_weight_grad(channels, dtype, monkeypatch):
    monkeypatch.setattr(thresholds, "SORTED_GRAD_ROWS", 0)
    relation, expected = pair(SUBMANIFOLD, "surface", 400)
    for each, wanted in ((relation, expected), (relation.T, expected.T)):
        check_weight_grad("sorted_implicit_gemm", each, wanted, *channels, dtype)


@pytest.mark.parametrize("case", KINDS, ids=str)
@pytest.mark.parametrize("route", cuda.CONV)
def test_every_kind(route, case):
    both, groups = pair(case, "negative", 100), 16 if route == "depthwise" else 1
    check_conv(route, *both, 16, 16, "float16", groups)


# One channel a thread and 16 bytes of them, few and many of these, and a multiplier.
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", ((5, 5), (16, 16), (264, 264), (3, 6)), ids=str)
def test_depthwise(shape, dtype):
    both = pair(SUBMANIFOLD, "surface", 400)
    check_conv("depthwise", *both, *shape, dtype, groups=shape[0])
    check_weight_grad("depthwise", *both, *shape, dtype, groups=shape[0])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", cases.GROUPS, ids=str)
def test_groups(shape, dtype):
    relation, expected = pair(SUBMANIFOLD, "surface", 100)
    check_conv("relation_traversal", relation, expected, *shape[:2], dtype, shape[2])
    check_weight_grad(
        "relation_traversal", relation, expected, *shape[:2], dtype, shape[2]
    )


@pytest.mark.parametrize("channels", ((1, 1), (3, 5), (16, 16), (64, 24)), ids=str)
def test_grouped_gemm_in_mlx_operations(channels):
    """MLX's gathered and segmented products are right for the strides that we give."""
    both = pair(SUBMANIFOLD, "surface", 400)
    check_conv("grouped_gemm", *both, *channels, "float32", code=mlx_ops)
    check_weight_grad("grouped_gemm", *both, *channels, "float32", code=mlx_ops)


def test_relation_without_a_table():
    relation, expected = multi_edges(n_in=40, n_out=30, n_edges=500)
    check_conv("relation_traversal", relation, expected, 5, 7, "float32")
    for route in EDGES:
        check_weight_grad(route, relation, expected, 5, 7, "float32")


def test_many_offsets():
    relation, expected = pair(cases.Case("submanifold", 3, 9), "block", 120)
    check_conv("sorted_implicit_gemm", relation, expected, 8, 8, "float16")


@pytest.mark.parametrize("geometry", ("empty", "one"))
def test_few_rows(geometry):
    both = pair(SUBMANIFOLD, geometry, 1)
    for route in cuda.CONV:
        groups = 8 if route == "depthwise" else 1
        check_conv(route, *both, 8, 8, "float16", groups)
    for route in cuda.WEIGHT_GRAD:
        groups = 8 if route == "depthwise" else 1
        check_weight_grad(route, *both, 8, 8, "float16", groups)


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_same_bits_every_time(dtype):
    relation, _ = pair(SUBMANIFOLD, "surface", 2000)
    n = Numbers(relation, 64, 64, dtype=dtype)
    first = None
    for _ in range(5):
        y = cuda.CONV["sorted_implicit_gemm"](n.x, n.w, relation, 1, False)
        dw = cuda.WEIGHT_GRAD["grouped_gemm"](n.x, n.dy, relation, 1)
        now = bits(y), bits(dw)
        assert first in (None, now)
        first = now


def test_general_kernels_on_hopper(monkeypatch):
    """What older and newer GPUs run in 16 bits."""
    for module in (cuda_sorted, cuda_weight_grad):
        monkeypatch.setattr(module, "is_hopper", lambda: False)
    relation, expected = pair(SUBMANIFOLD, "surface", 300)
    for dtype in ("float16", "bfloat16"):
        check_conv("sorted_implicit_gemm", relation, expected, 40, 72, dtype)
        check_weight_grad("grouped_gemm", relation, expected, 40, 72, dtype)
