"""Every CUDA kernel against the float64 oracle: dtypes, odd channels, relations."""

from dataclasses import replace

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, Numbers, bits, multi_edges, pair
from planned import run

if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
    pytest.skip("MLX has no CUDA device here", allow_module_level=True)

from mlx_lattice import devices  # noqa: E402
from mlx_lattice.backends import portable_only  # noqa: E402
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
# Routes by what their kernels run.
CONV = ("depthwise", "sorted_implicit_gemm", "relation_traversal")
WEIGHT_GRAD = (*CONV, "grouped_gemm")
EDGES = ("sorted_implicit_gemm", "grouped_gemm", "relation_traversal")  # need no table


@pytest.fixture(params=("split", "whole", "few"))
def device(request, monkeypatch):
    """What is planned for: few rows are split, in one piece, or on two processors."""
    if request.param == "whole":
        monkeypatch.setattr(thresholds, "MOST_SPLITS", 1)
    here = devices.current()
    return replace(here, cores=2) if request.param == "few" else here


def check_conv(route, relation, expected, c_in, c_out, dtype, groups=1, **planning):
    n = Numbers(relation, c_in, c_out, groups, dtype)
    x, w, dy = n.exact
    y = run(route, "forward", relation, n.x, n.w, groups, **planning)
    assert y.dtype == n.x.dtype
    ref.assert_close(y, ref.conv(x, w, expected, groups=groups), dtype, "y")
    dx = run(route, "input_grad", relation, n.dy, n.w, groups, **planning)
    wanted = ref.input_grad(dy, w, expected, groups=groups)
    ref.assert_close(dx, wanted, dtype, "dx")


def check_weight_grad(
    route, relation, expected, c_in, c_out, dtype, groups=1, **planning
):
    n = Numbers(relation, c_in, c_out, groups, dtype)
    x, _, dy = n.exact
    dw = run(route, "weight_grad", relation, n.x, n.dy, groups, **planning)
    wanted = ref.weight_grad(x, dy, expected, groups=groups)
    ref.assert_close(dw, wanted, dtype, "dW")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
def test_sorted_implicit_gemm(channels, dtype, device):
    both = pair(SUBMANIFOLD, "surface", 3000 if device.cores == 2 else 400)
    check_conv("sorted_implicit_gemm", *both, *channels, dtype, device=device)


@pytest.mark.parametrize("channels", ((32, 32), *CHANNELS[4:], (40, 136)), ids=str)
def test_tiles_of_few_edges_a_row(channels, device):
    both = pair(SUBMANIFOLD, "surface", 900)
    check_conv(
        "sorted_implicit_gemm", *both, *channels, "float16", device=device, edges=1
    )


@pytest.mark.parametrize("wide", (False, True))
@pytest.mark.parametrize("channels", ((64, 128), (128, 200), (64, 256)), ids=str)
def test_both_kernels_of_wide_channels(channels, wide, device, monkeypatch):
    if not wide:
        monkeypatch.setattr(thresholds, "WIDE_TILES", {})
    both = pair(SUBMANIFOLD, "surface", 900)
    check_conv("sorted_implicit_gemm", *both, *channels, "bfloat16", device=device)


def check_bias(route, relation, expected, c_in, c_out, dtype, groups=1, **planning):
    """Both ways round: each adds as many values as it writes channels."""
    n = Numbers(relation, c_in, c_out, groups, dtype)
    x, w, dy = n.exact
    flipped = ref.input_grad(dy, w, expected, groups=groups)
    both = (
        (n.x, "forward", ref.conv(x, w, expected, groups=groups)),
        (n.dy, "input_grad", flipped),
    )
    for rows, pass_, wanted in both:
        bias = mx.random.normal((wanted.shape[1],)).astype(n.x.dtype)
        y = run(route, pass_, relation, rows, n.w, groups, bias, **planning)
        wanted = wanted + np.array(bias.astype(mx.float32))
        ref.assert_close(y, wanted, dtype, f"{route}, {pass_}")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
def test_bias(channels, dtype, device):
    both = pair(SUBMANIFOLD, "surface", 400)
    check_bias("sorted_implicit_gemm", *both, *channels, dtype, device=device)


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
def test_weight_grad(route, channels, dtype, device):
    both = pair(SUBMANIFOLD, "surface", 3000 if device.cores == 2 else 400)
    check_weight_grad(route, *both, *channels, dtype, device=device)


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
@pytest.mark.parametrize("route", CONV)
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
    with portable_only():
        check_conv("grouped_gemm", *both, *channels, "float32")
        check_weight_grad("grouped_gemm", *both, *channels, "float32")


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
    for route in CONV:
        groups = 8 if route == "depthwise" else 1
        check_conv(route, *both, 8, 8, "float16", groups)
    for route in WEIGHT_GRAD:
        groups = 8 if route == "depthwise" else 1
        check_weight_grad(route, *both, 8, 8, "float16", groups)


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_same_bits_every_time(dtype):
    relation, _ = pair(SUBMANIFOLD, "surface", 2000)
    n = Numbers(relation, 64, 64, dtype=dtype)
    first = None
    for _ in range(5):
        y = run("sorted_implicit_gemm", "forward", relation, n.x, n.w)
        dw = run("grouped_gemm", "weight_grad", relation, n.x, n.dy)
        now = bits(y), bits(dw)
        assert first in (None, now)
        first = now


def test_general_kernels_on_hopper():
    """What older and newer GPUs run in 16 bits."""
    older = {"device": devices.PROFILES["a100"]}
    both = pair(SUBMANIFOLD, "surface", 300)
    for dtype in ("float16", "bfloat16"):
        check_conv("sorted_implicit_gemm", *both, 40, 72, dtype, **older)
        check_weight_grad("grouped_gemm", *both, 40, 72, dtype, **older)
