"""Gray, Morton and Hilbert orders against scalar implementations."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference_curves
from hypothesis import given
from hypothesis import strategies as st

import mlx_lattice as ml
from mlx_lattice import ops, registry
from mlx_lattice.geometry import lattice
from mlx_lattice.geometry.lattice import bounds_of

# In MLX operations, and by what serves here.
BUILDERS = {
    "mlx": lambda: lattice.curve_order,
    "kernels": lambda: registry.geometry().curve_order,
}


def ordered(name: str, coords: np.ndarray, by: str = "kernels") -> mx.array:
    rows = mx.array(coords)
    if len(coords) == 0:
        x = ml.SparseTensor(rows, mx.zeros((0, 1)))
        return ops.curve_order(x, name)
    return BUILDERS[by]()(rows, lattice.curve_of(name, bounds_of(rows)))


def scalar_order(coords, curve) -> list[int]:
    """The order by the scalar curve, counted from the least coordinates."""
    if not len(coords):
        return []
    cells = coords.astype(np.int64) - coords.min(axis=0).astype(np.int64)
    bits = int(cells[:, 1:].max()).bit_length()
    return reference_curves.order(curve, cells, bits)


@pytest.mark.parametrize("by", BUILDERS)
@pytest.mark.parametrize("curve", ("morton", "hilbert"))
@pytest.mark.parametrize("d", (1, 2, 3, 4))
@pytest.mark.parametrize("name", cases.GEOMETRIES)
def test_curves(curve, d, name, by):
    coords = cases.geometry(name, d, 80)
    got = ordered(curve, coords, by)
    assert got.dtype == mx.int32
    assert got.tolist() == scalar_order(coords, curve)


@pytest.mark.parametrize("by", BUILDERS)
@pytest.mark.parametrize("curve", ("morton", "hilbert"))
@given(st.integers(1, 4), st.data())
def test_curves_over_the_whole_of_int32(curve, by, d, data):
    row = st.tuples(st.integers(0, 2), *[st.integers(-(2**31), 2**31 - 1)] * d)
    rows = data.draw(st.lists(row, max_size=12, unique=True))
    coords = np.array(rows, np.int32).reshape(-1, 1 + d)
    wanted = scalar_order(coords, curve)
    assert ordered(curve, coords, by).tolist() == wanted


@pytest.mark.parametrize("by", BUILDERS)
@pytest.mark.parametrize("curve", lattice.CURVES)
@pytest.mark.parametrize(("d", "extent"), ((2, 2**31), (3, 2**20), (3, 2**9), (4, 99)))
def test_curves_of_many_rows(curve, by, d, extent):
    """Keys of one word and of two, with row numbers below them and without."""
    rng = np.random.default_rng(d)
    rows = rng.integers(-extent // 2, extent // 2, (3000, 1 + d))
    rows[:, 0] = rng.integers(3, 7, 3000)
    coords = rng.permutation(np.unique(rows, axis=0)).astype(np.int32)
    assert ordered(curve, coords, by).tolist() == scalar_order(coords, curve)


@given(st.integers(1, 150), st.integers(0, 40), st.integers(0, 99))
def test_gray_order(volume, n, seed):
    occupied = np.random.default_rng(seed).random((n, volume)) < 0.3
    occupied[n // 2 :] = occupied[: n - n // 2]  # ties, which keep their order

    def rank(row: int) -> int:
        mask = sum(1 << k for k in np.flatnonzero(occupied[row]).tolist())
        rank = 0
        while mask:
            rank, mask = rank ^ mask, mask >> 1
        return rank

    got = lattice.gray_order(mx.array(occupied)).tolist()
    assert got == sorted(range(n), key=lambda row: (rank(row), row))


@pytest.mark.parametrize("n", (1, 2, 7))
def test_true_positions_of_a_column(n):
    """One row of a column keeps the stride that it had: a matrix's width."""
    column = mx.arange(5 * n).reshape(n, 5)[:, -1]
    assert lattice.true_positions(column >= 0).tolist() == [*range(n)]
    columns = lattice.running_sums(mx.arange(5).reshape(5, 1)[:, ::-1], axis=1)
    assert columns.tolist() == [[i] for i in range(5)]


# Curves by name, of given bits


@pytest.mark.parametrize("curve", lattice.CURVES)
@pytest.mark.parametrize("bits", (3, 4, 7))
def test_curves_of_given_bits(curve, bits):
    coords = np.random.default_rng(bits).integers(0, 8, (40, 4)).astype(np.int32)
    coords = np.unique(coords % [2, 8, 8, 8], axis=0).astype(np.int32)
    x = ml.SparseTensor(mx.array(coords), mx.ones((len(coords), 1)))
    along = ops.curve_order(x, curve, bits=bits)
    assert along.tolist() == reference_curves.order(curve, coords, bits)
    codes = ops.curve_code(x, curve, bits=bits)
    places = [reference_curves.place(curve, row[1:], bits) for row in coords]
    assert codes.tolist() == places and codes.dtype == mx.int64


@pytest.mark.parametrize("curve", ("hilbert", "morton"))
@pytest.mark.parametrize("bits", (31, 32, 33, 61))
def test_more_bits_than_coordinates_have(curve, bits):
    coords = np.array([[0, v] for v in (5, 2**31 - 1, 0, 1 << 30)], np.int32)
    x = ml.SparseTensor(mx.array(coords), mx.ones((len(coords), 1)))
    along = ops.curve_order(x, curve, bits=bits)
    assert along.tolist() == reference_curves.order(curve, coords, bits)


def test_mistakes_of_curves():
    x = ml.SparseTensor(mx.array([[0, 0, 9], [0, 3, 1]]), mx.ones((2, 1)))
    with pytest.raises(ValueError, match="order must be one of"):
        ops.curve_order(x, "peano")
    with pytest.raises(ValueError, match="from 0 to 7; got 0 to 9"):
        ops.curve_order(x, bits=3)
    with pytest.raises(ValueError, match="bits must be an int"):
        ops.curve_order(x, bits=-1)
    line = ml.SparseTensor(mx.array([[0, 4]]), mx.ones((1, 1)))
    with pytest.raises(ValueError, match="swaps two axes"):
        ops.curve_order(line, "z-trans")
    far = ml.SparseTensor(mx.array([[0, 0, 0, 0], [0, 1 << 30, 1, 1]]), mx.ones((2, 1)))
    assert ops.curve_order(far).tolist() == [0, 1]
    with pytest.raises(ValueError, match="at most 62 bits"):
        ops.curve_code(far)
    none = ml.SparseTensor(mx.zeros((0, 4), mx.int32), mx.zeros((0, 1)))
    assert ops.curve_code(none).shape == ops.curve_order(none).shape == (0,)
