"""The two contractions, on the routes that the table chooses. See test_table.py too."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, Numbers, bits, build, multi_edges, pair

import mlx_lattice as ml

POINTWISE = cases.Case("submanifold", 3, 1)


def passes(numbers: Numbers, relation, groups=1) -> dict[str, mx.array]:
    """The results of all three passes."""

    def forward(x):
        return ml.conv(x, numbers.w, relation, groups=groups)

    (y,), (dx,) = mx.vjp(forward, [numbers.x], [numbers.dy])
    dw = ml.weight_grad(numbers.x, numbers.dy, relation, groups=groups)
    return {"y": y, "dx": dx, "dw": dw}


def check(relation, expected, c_in, c_out, groups=1, dtype="float32") -> None:
    """All three passes against the oracle, in the dtype that was given."""
    numbers = Numbers(relation, c_in, c_out, groups, dtype)
    x, w, dy = numbers.exact
    wanted = {
        "y": ref.conv(x, w, expected, groups=groups),
        "dx": ref.input_grad(dy, w, expected, groups=groups),
        "dw": ref.weight_grad(x, dy, expected, groups=groups),
    }
    for what, got in passes(numbers, relation, groups).items():
        assert got.dtype == numbers.x.dtype
        ref.assert_close(got, wanted[what], dtype, what)


@pytest.mark.parametrize("case", (*KINDS, POINTWISE), ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_route_that_the_table_chooses(case, dtype):
    for channels in ((1, 1), (33, 31), (6, 6, 6), (4, 8, 2)):
        check(*pair(case, "surface", 60), *channels, dtype=dtype)


# Relations that were given as edges


@pytest.mark.parametrize("route", ("gather_gemm_scatter", "grouped_gemm"))
def test_the_order_in_which_edges_are_given_does_not_matter(route):
    relation, expected = multi_edges(2)
    mixed = np.random.default_rng(0).permutation(expected.edges).astype(np.int32)
    columns = [mx.array(c.copy()) for c in mixed.T]
    sizes = relation.n_in, relation.n_out, relation.volume
    other = ml.Relation.from_edges(*columns, *sizes)
    numbers = Numbers(relation, 5, 3)
    with ml.routes.only(route):
        first, second = passes(numbers, relation), passes(numbers, other)
    assert {k: bits(v) for k, v in first.items()} == {
        k: bits(v) for k, v in second.items()
    }


# Nothing to do


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", (*KINDS, POINTWISE), ids=str)
def test_no_rows(case, dtype):
    check(*pair(case, "empty"), 3, 4, dtype=dtype)


@pytest.mark.parametrize("sizes", ((0, 3), (3, 0), (3, 4)), ids=str)
def test_no_edges(sizes):
    relation = ml.Relation.from_edges([], [], [], *sizes, 5)
    numbers = Numbers(relation, 3, 4)
    results = passes(numbers, relation)
    assert [r.shape for r in results.values()] == [
        (sizes[1], 4),
        (sizes[0], 3),
        (5, 3, 4),
    ]
    assert not any(r.any().item() for r in results.values())


def test_rows_without_edges_are_zero():
    case = cases.Case("target", 3, 3)
    coords = cases.geometry("negative")
    target = np.concatenate([[[0, 900, 900, 900]], coords[:5]]).astype(np.int32)
    relation = build(case, coords, target)
    numbers = Numbers(relation, 4, 4)
    y = ml.conv(numbers.x, numbers.w, relation)
    assert not y[0].any().item() and y[1:].any(axis=1).all().item()


# Promises about numbers


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", (*KINDS, POINTWISE), ids=str)
def test_the_same_input_gives_the_same_bits(case, dtype):
    runs = []
    for _ in range(2):
        relation, _ = pair(case, "surface", 80)
        numbers = Numbers(relation, 8, 8, dtype=dtype)
        runs.append({k: bits(v) for k, v in passes(numbers, relation).items()})
    assert runs[0] == runs[1]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_input_gradient_is_conv_over_the_transpose(case):
    relation, expected = pair(case)
    numbers = Numbers(relation, 6, 7)
    dx = ml.conv(numbers.dy, numbers.w.swapaxes(1, 2), relation.T)
    _, w, dy = numbers.exact
    ref.assert_close(dx, ref.input_grad(dy, w, expected))
    ref.assert_close(dx, np.array(passes(numbers, relation)["dx"]))
