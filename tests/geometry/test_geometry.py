"""Coordinate operations against sets of Python integers, over the whole of int32."""

import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from hypothesis import given
from hypothesis import strategies as st

from mlx_lattice.geometry import lattice
from mlx_lattice.geometry.lattice import Rule
from mlx_lattice.geometry.tables import SortedIndex

LEAST, MOST = -(2**31), 2**31 - 1


@st.composite
def rows(draw, d=None, unique=False, max_size=20):
    """Rows whose spatial values lie anywhere in int32, often at its ends."""
    d = draw(st.integers(1, 4)) if d is None else d
    value = st.one_of(
        st.integers(-3, 3),
        st.integers(LEAST, LEAST + 3),
        st.integers(MOST - 3, MOST),
        st.integers(LEAST, MOST),
    )
    row = st.tuples(st.integers(0, 3), *[value] * d)
    return draw(st.lists(row, max_size=max_size, unique=unique)), d


def array(drawn, d) -> mx.array:
    return mx.array(np.array(drawn, np.int32).reshape(-1, 1 + d))


def wide(drawn, d) -> mx.array:
    return mx.array(np.array(drawn, np.int64).reshape(-1, 1 + d))


def index_of(coords: mx.array) -> SortedIndex:
    return SortedIndex.of(coords, lattice.bounds_of(coords))


@pytest.mark.parametrize("by", (1, 2, 3, 5, 7, 2**20))
def test_floor_divide(by):
    values = [LEAST, LEAST + 1, -by - 1, -by, -1, 0, 1, by, by + 1, MOST - 1, MOST]
    values = [v for v in values if LEAST <= v <= MOST]
    got = lattice.floor_divide(mx.array(values, dtype=mx.int32), by)
    assert got.tolist() == [v // by for v in values]
    assert got.dtype == mx.int32


@given(rows(), st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_cells(drawn, stride):
    (given_rows, d), stride = drawn, stride[: drawn[1]]
    got = lattice.unique_rows(lattice.cells(array(given_rows, d), stride)).rows
    assert ref.rows_of(got) == ref.cell_rows(given_rows, stride)


@given(st.lists(st.booleans(), max_size=50))
def test_true_positions(flags):
    got = lattice.true_positions(mx.array(flags, dtype=mx.bool_))
    assert got.tolist() == [i for i, flag in enumerate(flags) if flag]
    assert got.dtype == mx.int32


@pytest.mark.parametrize("n", (1, 2, 7))
def test_true_positions_of_a_column(n):
    """One row of a column keeps the stride that it had: a matrix's width."""
    column = mx.arange(5 * n).reshape(n, 5)[:, -1]
    assert lattice.true_positions(column >= 0).tolist() == [*range(n)]
    columns = lattice.running_sums(mx.arange(5).reshape(5, 1)[:, ::-1], axis=1)
    assert columns.tolist() == [[i] for i in range(5)]


@given(rows())
def test_keys_compare_as_rows_do(drawn):
    given_rows, d = drawn
    coords = array(given_rows, d)
    listed = lattice.row_keys(coords, lattice.bounds_of(coords)).tolist()
    rank = {row: r for r, row in enumerate(sorted(set(given_rows)))}
    order = {key: r for r, key in enumerate(sorted(set(listed)))}
    assert [order[key] for key in listed] == [rank[row] for row in given_rows]


@given(rows(d=3, unique=True), rows(d=3))
def test_find(held, wanted):
    held, wanted = held[0], wanted[0] + held[0][::2]
    got = index_of(array(held, 3)).find(array(wanted, 3))
    where = {row: i for i, row in enumerate(held)}
    assert got.tolist() == [where.get(row, -1) for row in wanted]
    assert got.dtype == mx.int32


@given(rows(unique=True), st.data())
def test_columns_near_the_ends_of_int32_do_not_wrap(drawn, data):
    held, d = drawn
    offset = st.tuples(*[st.sampled_from((-2, -1, 0, 1, 2, MOST, LEAST))] * d)
    offsets = data.draw(st.lists(offset, min_size=1, max_size=4, unique=True))
    coords = array(held, d)
    columns = index_of(coords).columns(coords, lattice.bounds_of(coords), offsets)
    where = {row: i for i, row in enumerate(held)}
    for offset, column in zip(offsets, columns, strict=True):
        moved = [ref.fine_site(row, offset, (1,) * d) for row in held]
        assert column.tolist() == [where.get(row, -1) for row in moved]


@given(rows(unique=True), st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_a_scaled_index_finds_only_lattice_rows(drawn, stride):
    (held, d), stride = drawn, stride[: drawn[1]]
    index = index_of(array(held, d)).scaled(stride)
    on = [ref.fine_site(row, (0,) * d, stride) for row in held]
    off = [(row[0], row[1] + 1, *row[2:]) for row in on]
    where = {row: i for i, row in enumerate(on)}
    got = index.find(wide(on + off, d))
    assert got.tolist() == [where.get(row, -1) for row in on + off]


def test_the_box_is_cut_to_the_grid():
    given_rows = [(0, -1, 0), (0, 0, 0), (0, 2, 3), (0, 3, 3), (1, 2, 4), (2, 1, 1)]
    box = lattice.cut(((0, -1, 0), (2, 3, 4)), (3, 4))
    assert box == ((0, 0, 0), (2, 2, 3))
    facts = [(0, 0)], (1, 1)
    made = lattice.made_rows
    got = made(Rule.ITSELF, array(given_rows, 2), *facts, box)
    assert ref.rows_of(got) == [r for r in given_rows if ref.inside(r, (3, 4))]
    nothing = lattice.cut(((0, 5, 0), (2, 7, 4)), (3, 4))
    assert lattice.is_empty(nothing)
    none = made(Rule.ITSELF, array([], 2), *facts, nothing)
    assert none.shape == (0, 3)


def test_the_ends_of_int32_are_inside_and_one_more_is_not():
    ends = wide([(0, LEAST), (0, MOST)], 1)
    assert ref.rows_of(lattice.as_int32(ends, "x")) == [(0, LEAST), (0, MOST)]
    for past, shown in (((0, MOST + 1), "2147483648"), ((0, LEAST - 1), "-2147483649")):
        with pytest.raises(ValueError, match=f"x would reach .*{shown}.*beyond int32"):
            lattice.as_int32(wide([past], 1), "x")


@pytest.mark.parametrize("rule", (Rule.REACH, Rule.EXPAND))
def test_a_box_beyond_int32_raises_only_where_a_row_is(rule):
    ends = array([(0, MOST, 0), (0, LEAST, 1)], 2)
    bounds, steps = lattice.bounds_of(ends), [(1, 0), (-1, 0)]
    with pytest.raises(ValueError, match="beyond int32"):
        lattice.int32_box(rule, ends, bounds, steps, (1, 1))
    # The box is wider than what is reached: the offsets move no row outwards.
    inner = array([(0, MOST - 1, 0), (0, 0, 1)], 2)
    box = (0, 0, 0), (0, MOST, 1)
    got = lattice.int32_box(rule, inner, box, steps, (1, 1))
    assert got == ((0, -1, 0), (0, MOST, 1))
