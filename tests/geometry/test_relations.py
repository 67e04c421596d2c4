"""Relations of every kind against the scalar rule: rows, order, edges, identity."""

from dataclasses import replace

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, assert_same, bits, build, multi_edges, pair
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_lattice as ml

LEAST, MOST = -(2**31), 2**31 - 1


@pytest.mark.parametrize("name", ("negative", "batches", "far", "one", "empty"))
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_every_case(case, name):
    assert_same(*pair(case, name, n=30))


@given(cases.convolutions(kinds=tuple(k.kind for k in KINDS if k.kind != "general")))
@settings(max_examples=300)
def test_any_kernel_over_any_rows(drawn):
    case, coords, target = drawn
    assert_same(build(case, coords, target), case.reference(coords, target))


@given(cases.relation_cases(kinds=("forward", "generative")), st.data())
@settings(max_examples=150)
def test_any_kernel_on_a_dense_grid(case, data):
    """Outputs are cut to PyTorch's grid, and so is what follows on them."""
    shape = tuple(data.draw(st.integers(1, 6)) for _ in range(case.d))
    case = replace(case, spatial_shape=shape)
    coords = cases.in_grid(shape, 20, data.draw(st.integers(0, 99)))
    manager = ml.CoordinateManager()
    facts = shape, case.kernel_size, case.stride, case.padding, case.dilation
    by_reach = case.kind == "forward" and case.support == "reach" and not case.offsets
    if by_reach and 0 in ref.conv_shape(*facts):  # as PyTorch refuses it
        with pytest.raises(ValueError, match="the kernel reaches over"):
            build(case, coords, manager=manager)
        return
    relation = build(case, coords, manager=manager)
    assert_same(relation, case.reference(coords))
    if case.kind == "generative":
        made = ref.conv_transpose_shape(*facts)
    elif case.support == "reach":
        made = ref.conv_shape(*facts)
    else:
        made = tuple(-(-n // s) for n, s in zip(shape, case.stride, strict=True))
    assert manager[relation.keys[1]].spatial_shape == made


def corners(d: int, seed: int = 0, inset: int = 0) -> np.ndarray:
    """Small clusters at the corners of int32: boxes of 2^(32 d) cells."""
    rng = np.random.default_rng([seed, d])
    ends = np.where(rng.random((40, d)) < 0.5, LEAST + inset + 2, MOST - inset - 2)
    sites = ends + rng.integers(-2, 3, (40, d))
    rows = np.column_stack([rng.integers(0, 2, 40), sites])
    return rng.permutation(np.unique(rows, axis=0)).astype(np.int32)


@pytest.mark.parametrize("d", (1, 2, 3, 4))
@pytest.mark.parametrize("stride", (1, 2, 3))
@pytest.mark.parametrize("kind", ("submanifold", "cell", "reach", "target", "general"))
def test_the_whole_of_int32(kind, stride, d):
    coords = corners(d, inset=9 if kind == "reach" else 0)
    if kind == "submanifold":
        case = cases.Case(kind, d, 3, dilation=stride)
    elif kind == "general":
        case = cases.Case(kind, d, offsets=cases.CROSS[d], stride=stride)
    elif kind == "target":
        case = cases.Case(kind, d, 3, stride)
    else:
        case = cases.Case("forward", d, 2, stride, support=kind)
    target = None
    if case.needs_target:
        target = ref.as_coords(ref.cell_rows(coords, (stride,) * d), d)[::-1]
        target = target.astype(np.int32).copy()
    assert_same(build(case, coords, target), case.reference(coords, target))


@pytest.mark.parametrize("d", (1, 2, 3, 4))
@pytest.mark.parametrize("kernel", (2, 3))
def test_up_to_the_ends_of_int32(kernel, d):
    """A generative convolution to the ends, and a transposed one back onto it."""
    coords = np.unique(corners(d) // np.array([1] + [3] * d), axis=0).astype(np.int32)
    coords = np.clip(coords, LEAST // 3 + 2, MOST // 3 - 2)
    coords = np.unique(coords, axis=0).astype(np.int32)
    made = cases.Case("generative", d, kernel, 3)
    assert_same(build(made, coords), made.reference(coords))
    target = made.reference(coords).out_coords[::-1].astype(np.int32)
    case = cases.Case("transposed", d, kernel, 3)
    assert_same(build(case, coords, target), case.reference(coords, target))


# Row order


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_rows_that_the_library_makes_do_not_depend_on_the_order_given(case):
    coords = cases.for_case(case, "batches", 40)
    relation = build(case, coords, case.target(coords) if case.needs_target else None)
    if relation.out_coords is relation.in_coords or case.needs_target:
        return
    rows = ref.rows_of(relation.out_coords)
    assert rows == sorted(set(rows))
    shuffled = build(case, coords[::-1].copy())
    assert ref.rows_of(shuffled.out_coords) == rows


@pytest.mark.parametrize("kind", ("submanifold", "forward"))
@pytest.mark.parametrize("kernel", (2, 3, 4), ids=lambda k: f"k{k}")
def test_a_convolution_on_its_own_rows_keeps_the_key(kind, kernel):
    manager, coords = ml.CoordinateManager(), mx.array(cases.geometry("negative"))
    relation = build(cases.Case(kind, 3, kernel), coords, manager=manager)
    key = manager.insert(coords)
    assert relation.keys == (key, key)
    assert relation.out_coords is relation.in_coords


CORNERS = ((1, 1), (0, 0), (2, 0), (0, 1), (2, 1), (1, 0))  # all of a cell, shuffled
HALVED = cases.Case("forward", 3, 2, 2, support="reach")
EVERY_ROW_IN_A_CELL = (
    HALVED,
    replace(HALVED, support="cell"),
    replace(HALVED, padding=0),
    replace(HALVED, spatial_shape=(8, 4, 6)),
    cases.Case("forward", 2, offsets=CORNERS, stride=(3, 2)),
)


@pytest.mark.parametrize("case", EVERY_ROW_IN_A_CELL, ids=str)
def test_cells_that_hold_every_row_need_no_count(case):
    relation, expected = pair(case, n=60)
    assert relation.counted == len(expected.edges) == relation.n_in
    assert relation.T.counted == relation.n_in


def test_target_rows_keep_their_order():
    manager = ml.CoordinateManager()
    key = manager.insert(mx.array(cases.geometry("negative")))
    target = mx.array(cases.geometry("batches")[::-1].copy())
    relation = manager.target_kernel_relation(key, target, stride=2)
    assert bits(relation.out_coords) == bits(target)
    assert relation.keys[1] == manager.insert(target)
    assert relation.keys[1] == manager.insert(relation.out_coords)


# Caching and identity


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_relation_is_built_once(case):
    manager = ml.CoordinateManager()
    coords = mx.array(cases.for_case(case, "negative"))
    target = mx.array(case.target(np.array(coords))) if case.needs_target else None
    relation = build(case, coords, target, manager)
    assert build(case, coords, target, manager) is relation
    assert relation.out_in is relation.out_in and relation.T.out_in is relation.in_out


# The target of a transposed convolution


def pyramid(stride=2):
    manager = ml.CoordinateManager()
    fine = manager.insert(mx.array(cases.geometry("negative", 3, 80)))
    down = manager.kernel_relation(fine, kernel_size=stride, stride=stride)
    return manager, fine, down


@pytest.mark.parametrize("stride", (2, 3, (1, 2, 4)), ids=str)
def test_a_transposed_convolution_finds_what_the_strided_one_consumed(stride):
    manager, fine, down = pyramid(stride)
    up = manager.transposed_kernel_relation(
        down.keys[1], kernel_size=stride, stride=stride
    )
    assert up.keys == down.keys[::-1] and up.out_coords is down.in_coords
    np.testing.assert_array_equal(np.array(up.edges), np.array(down.T.edges))
    np.testing.assert_array_equal(np.array(up.out_in), np.array(down.in_out))


def test_a_set_that_merely_has_the_stride_is_no_target():
    manager = ml.CoordinateManager()
    coarse = manager.insert(mx.array(cases.geometry("negative")), stride=2)
    for _ in range(3):
        with pytest.raises(ValueError, match="no coordinates of stride 1 are known"):
            manager.transposed_kernel_relation(coarse)
        manager.insert(mx.array(cases.geometry("batches")))


def test_a_set_computed_from_two_needs_the_target_to_be_named():
    manager, fine, down = pyramid()
    coarse = down.keys[1]
    other = manager.insert(mx.array(cases.geometry("batches")))
    assert manager.transposed_kernel_relation(coarse).keys[1] == fine
    manager.target_kernel_relation(other, coarse, stride=2)
    with pytest.raises(
        ValueError, match="several coordinate sets of stride 1 .* pass coordinates="
    ):
        manager.transposed_kernel_relation(coarse)
    assert manager.transposed_kernel_relation(coarse, other).keys[1] == other


def test_steps_over_several_levels_go_back_to_the_first():
    manager, fine, down = pyramid()
    made = manager.kernel_relation(down.keys[1], kernel_size=2, stride=2).keys[1]
    wide = manager.kernel_relation(made, padding=1, support="reach").keys[1]
    manager.insert(mx.array(cases.geometry("batches")))
    for key in (made, wide):
        up = manager.transposed_kernel_relation(key, kernel_size=4, stride=4)
        assert up.keys[1] == fine
        assert manager.finer(key, (2, 2, 2)) == down.keys[1]


def test_no_target_is_an_error_that_says_what_to_do():
    manager = ml.CoordinateManager()
    coarse = manager.insert(mx.array(cases.geometry("negative")), stride=4)
    with pytest.raises(ValueError, match="no coordinates of stride 2 .* generative"):
        manager.transposed_kernel_relation(coarse)


def test_strides_divide_on_the_way_up():
    manager = ml.CoordinateManager()
    key = manager.insert(mx.array(cases.geometry("one")), stride=(2, 4, 1))
    made = manager.generative_relation(key).keys[1]
    assert [str(s) for s in made.stride] == ["1", "2", "1/2"]
    back = manager.kernel_relation(made, kernel_size=2, stride=2)
    assert back.keys[1].stride == (2, 4, 1)


# Edges given by the caller


@pytest.mark.parametrize("seed", range(4))
def test_from_edges_sorts_them(seed):
    relation, expected = multi_edges(seed)
    np.testing.assert_array_equal(np.array(relation.edges), expected.edges)
    assert relation.kind == "general" and relation.n_edges == len(expected.edges)
    assert relation.in_coords is None and not relation.is_identity


def test_from_edges_keeps_repeated_edges():
    columns = mx.array([1, 1, 0]), mx.array([0, 0, 0]), mx.array([2, 2, 2])
    relation = ml.Relation.from_edges(*columns, 2, 1, 3)
    assert relation.edges.tolist() == [[0, 0, 2], [1, 0, 2], [1, 0, 2]]
    assert relation.edge_counts == (0, 0, 3) and not relation.has_table
