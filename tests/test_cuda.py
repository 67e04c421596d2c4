"""Every CUDA kernel against the float64 oracle: dtypes, odd channels, relations."""

from dataclasses import replace

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, Numbers, assert_same, bits, multi_edges, pair

import mlx_lattice as ml
from mlx_lattice import portable

if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
    pytest.skip("MLX has no CUDA device here", allow_module_level=True)

from mlx_lattice import devices, tuning  # noqa: E402
from mlx_lattice.backends import (  # noqa: E402
    cuda,
    cuda_sorted,
    cuda_views,
    cuda_weight_grad,
)

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
PEOPLE = ("negative", "surface", "batches", "far")


@pytest.fixture(params=("split", "whole", "few"))
def spread(request, monkeypatch):
    """Few rows in shares of the offsets, in one piece, or on two processors."""
    caches = cuda_sorted._plan, cuda_weight_grad._grouped_plan
    if request.param == "whole":
        monkeypatch.setattr(tuning, "MOST_SPLITS", 1)
    elif request.param == "few":
        device = replace(devices.current(), cores=2)
        for module in (cuda_sorted, cuda_weight_grad):
            monkeypatch.setattr(module, "current", lambda: device)
    for each in caches:
        each.cache_clear()
    yield request.param
    for each in caches:
        each.cache_clear()


@pytest.mark.parametrize("case", KINDS, ids=str)
@pytest.mark.parametrize("geometry", PEOPLE)
def test_relations(case, geometry):
    relation, expected = pair(case, geometry, 300)
    assert_same(relation, expected)
    np.testing.assert_array_equal(np.array(relation.in_out), expected.in_out)


@pytest.mark.parametrize("d", (1, 2, 3, 4))
def test_dimensions(d):
    for case in (cases.Case("submanifold", d, 3), cases.Case("forward", d, 2, 2)):
        assert_same(*pair(case, "negative", 200))


def test_coordinates_at_the_ends_of_int32():
    low, high = -(2**31), 2**31 - 1
    rows = np.array([[0, low, low], [0, high, high], [0, high, low], [0, 0, 0]])
    coords = mx.array(rows.astype(np.int32))
    table = cuda.neighbour_table(coords, coords, [[1, 0], [0, 0]], [1, 1], False)
    assert table.tolist() == [[-1, 0], [-1, 1], [-1, 2], [-1, 3]]


def test_duplicates_are_found():
    rows = np.arange(4000, dtype=np.int32).reshape(1000, 4)
    assert cuda.first_duplicate(mx.array(rows)) is None
    rows[[700, 900]] = rows[30]
    assert cuda.first_duplicate(mx.array(rows)) == (30, 700)


@pytest.mark.parametrize("volume", (1, 5, 27, 32, 33, 64, 70))
def test_orders_and_edges(volume):
    rng = np.random.default_rng(volume)
    table = rng.integers(-400, 500, (5000, volume)).clip(-1).astype(np.int32)
    order = np.array(cuda.gray_order(mx.array(table)))
    expected = np.array(ml.order.gray_order(mx.array(table >= 0)))
    np.testing.assert_array_equal(order, expected)
    o, k = np.nonzero(table >= 0)
    by = np.lexsort((o, k))
    edges = np.stack([table[o, k], o, k], 1)[by]
    np.testing.assert_array_equal(np.array(cuda.edges(mx.array(table))), edges)
    pitch = 5376
    ordered, masks = cuda_views.sorted_table(mx.array(table), mx.array(order), pitch)
    padded = np.full((pitch, volume), -1, np.int32)
    padded[:5000] = table[order]
    np.testing.assert_array_equal(np.array(ordered), padded.T)
    used = (padded >= 0).reshape(-1, 32, volume).any(1)
    got = np.array(masks)
    for k in range(volume):
        np.testing.assert_array_equal(got[:, k // 32] >> (k % 32) & 1, used[:, k])


@pytest.mark.parametrize("n", (4096, 4097, 300_000))
def test_the_order_of_many_rows(n):
    """The ranks ascend, and equal ones keep their order."""
    rng = np.random.default_rng(n)
    used = rng.random((n, 27)) < rng.random(27) ** 2
    rank = used @ (1 << np.arange(27))
    for by in (1, 2, 4, 8, 16):
        rank ^= rank >> by
    table = mx.array(np.where(used, 7, -1).astype(np.int32))
    got = np.array(cuda.gray_order(table))
    np.testing.assert_array_equal(got, np.argsort(rank, kind="stable"))


@pytest.mark.parametrize("d", (1, 3, 4))
@pytest.mark.parametrize("extent", (6, 500, 1 << 20), ids=("dense", "sparse", "wide"))
def test_sets_of_many_tiles(extent, d):
    """Keys of 32 and of 64 bits, more of them than a block of the sort takes."""
    rng = np.random.default_rng(d)
    extent = min(extent, 1 << 57 // d)  # so that 64 bits number the box
    rows = rng.integers(-extent, extent, (30_000, 1 + d)).astype(np.int32)
    rows[:, 0] = rng.integers(0, 3, len(rows))
    unique = cuda.unique_rows(mx.array(rows))
    expected, inverse = np.unique(rows, axis=0, return_inverse=True)
    np.testing.assert_array_equal(np.array(unique.rows), expected)
    np.testing.assert_array_equal(np.array(unique.inverse), inverse.ravel())
    cells = rows // np.array([1] + [3] * d)
    np.testing.assert_array_equal(
        np.array(cuda.cell_rows(mx.array(rows), (3,) * d)), np.unique(cells, axis=0)
    )


def test_tiles_and_edges_of_both_ways_round():
    for case in (SUBMANIFOLD, cases.Case("forward", 3, 3, 2)):
        relation, expected = pair(case, "surface", 9000)
        for each, wanted in ((relation, expected), (relation.T, expected.T)):
            view = cuda.sorted_rows(each)
            n, table = each.n_out, np.array(each.out_in)
            placed = np.array(view.table)[:, :n].T
            placed = placed[:, ::-1] if view.mirrored else placed
            rows = np.array(view.rows)
            if not view.mirrored:
                np.testing.assert_array_equal(rows, np.array(each.sorted.rows))
            np.testing.assert_array_equal(placed, table[rows])
            np.testing.assert_array_equal(np.array(each.edges), wanted.edges)
            starts = np.searchsorted(wanted.edges[:, 2], np.arange(each.volume + 1))
            np.testing.assert_array_equal(np.array(cuda.offset_starts(each)), starts)


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
    monkeypatch.setattr(tuning, "THIN_EDGES", 1000)
    relation, expected = pair(SUBMANIFOLD, "surface", 900)
    assert relation.n_edges and cuda_sorted.is_thin(relation)
    check_conv("sorted_implicit_gemm", relation, expected, *channels, "float16")


@pytest.mark.parametrize("wide", (False, True))
@pytest.mark.parametrize("channels", ((64, 128), (128, 200), (64, 256)), ids=str)
def test_both_kernels_of_wide_channels(channels, wide, spread, monkeypatch):
    if not wide:
        monkeypatch.setattr(tuning, "WIDE_TILES", {})
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
    monkeypatch.setattr(tuning, "SORTED_GRAD_ROWS", 0)
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
    check_conv("grouped_gemm", *both, *channels, "float32", code=portable)
    check_weight_grad("grouped_gemm", *both, *channels, "float32", code=portable)


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
