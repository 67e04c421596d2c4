"""space_to_channel and channel_to_space against a loop over rows, and their laws."""

from fractions import Fraction
from itertools import product
from math import prod

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import drawn
from hypothesis import given
from hypothesis import strategies as st

import mlx_lattice as ml
from mlx_lattice import ops

SHAPES = ((1, 2), (1, (4,)), (2, 3), (2, (1, 2)), (3, 2), (3, (2, 1, 3)), (4, 2))
shapes = pytest.mark.parametrize("d, factor", SHAPES, ids=str)
orders = pytest.mark.parametrize("order", ("last", "first"))


class Cells:
    """The definition: cells of a factor, their offsets as an order counts them."""

    def __init__(self, factor, d, order="last"):
        self.d, self.factor = d, ref.per_axis(factor, d)
        self.offsets = list(product(*map(range, self.factor)))
        if order == "first":
            self.offsets.sort(key=lambda offset: offset[::-1])

    def place(self, row):
        """The cell of a fine row, and the number of its offset."""
        pairs = list(zip(row[1:], self.factor, strict=True))
        inside = tuple(v % f for v, f in pairs)
        return (row[0], *(v // f for v, f in pairs)), self.offsets.index(inside)

    def gathered(self, coords, feats):
        """Coarse rows and features."""
        coarse = ref.cell_rows(coords, self.factor)
        width = feats.shape[1]
        out = np.zeros((len(coarse), len(self.offsets) * width), feats.dtype)
        for row, values in zip(coords.tolist(), feats, strict=True):
            cell, k = self.place(row)
            out[coarse.index(cell), k * width : (k + 1) * width] = values
        return ref.as_coords(coarse, self.d), out

    def spread(self, coords, feats, fine):
        """Features on fine rows; zero without their cell."""
        width, index = feats.shape[1] // len(self.offsets), ref.rows_of(coords)
        out = np.zeros((len(fine), width), feats.dtype)
        for o, row in enumerate(fine.tolist()):
            cell, k = self.place(row)
            if cell in index:
                out[o] = feats[index.index(cell), k * width : (k + 1) * width]
        return out

    def children(self, coords, mask):
        """Sorted fine rows of the chosen offsets."""
        rows = []
        for at, k in np.argwhere(mask):
            corner = coords[at, 1:] * self.factor
            rows.append((coords[at, 0], *(corner + self.offsets[k])))
        return ref.as_coords(sorted(rows), self.d)


def tensor(*draw, **facts):
    x = drawn(*draw, **facts)
    return x, np.array(x.coords), ref.to_numpy(x.feats)


def same(actual, expected):
    np.testing.assert_array_equal(ref.to_numpy(actual), expected)


@orders
@pytest.mark.parametrize("name", ("negative", "batches", "far", "empty", "one"))
@shapes
def test_space_to_channel(d, factor, name, order):
    x, coords, feats = tensor(name, d)
    y = ops.space_to_channel(x, factor, order=order)
    rows, expected = Cells(factor, d, order).gathered(coords, feats)
    same(y.coords, rows)
    same(y.feats, expected)


@orders
@pytest.mark.parametrize("name", ("batches", "far", "empty", "one"))
@shapes
def test_channel_to_space(d, factor, name, order):
    """By subdivision, or to every cell, as a generative convolution goes."""
    cells = Cells(factor, d, order)
    volume = prod(cells.factor)
    x, coords, feats = tensor(name, d, 20, 2 * volume)
    some = np.random.default_rng(d).random((len(coords), volume)) < 0.4
    for mask in (some, None):
        subdivision = None if mask is None else mx.array(mask)
        y = ops.channel_to_space(x, factor, subdivision=subdivision, order=order)
        fine = cells.children(coords, np.ones_like(some) if mask is None else mask)
        same(y.coords, fine)
        same(y.feats, cells.spread(coords, feats, fine))
        assert y.batch_size == x.batch_size


@shapes
def test_fine_rows_keep_their_order_and_may_lack_a_cell(d, factor):
    cells = Cells(factor, d)
    x, coords, feats = tensor("scattered", d, 12, 2 * prod(cells.factor))
    fine = cases.geometry("negative", d, 50)
    y = ops.channel_to_space(x, factor, coordinates=mx.array(fine))
    same(y.coords, fine)
    expected = cells.spread(coords, feats, fine)
    same(y.feats, expected)
    assert (expected == 0).all(axis=1).any()


@given(cases.coordinate_sets(), st.integers(1, 3), st.sampled_from(("last", "first")))
def test_round_trip(coords, factor, order):
    feats = cases.features(len(coords), 2)
    x = ml.SparseTensor(mx.array(coords), mx.array(feats))
    y = ops.space_to_channel(x, factor, order=order)
    back = ops.channel_to_space(y, factor, coordinates=x, order=order)
    assert back.key == x.key
    assert mx.array_equal(back.feats, x.feats).item()
    # And by the subdivision that the occupied cells are.
    ones = x.replace(mx.ones((len(x), 1)))
    occupied = ops.space_to_channel(ones, factor, order=order).feats > 0
    again = ops.channel_to_space(y, factor, subdivision=occupied, order=order)
    assert mx.array_equal(ops.align(again, x).feats, x.feats).item()


def test_dense_is_pixel_unshuffle():
    dense = np.random.default_rng(0).normal(size=(2, 4, 6, 2, 3)).astype(np.float32)
    y = ops.space_to_channel(ml.SparseTensor.from_dense(mx.array(dense)))
    blocks = dense.reshape(2, 2, 2, 3, 2, 1, 2, 3).transpose(0, 1, 3, 5, 2, 4, 6, 7)
    same(y.to_dense(), blocks.reshape(2, 2, 3, 1, 24))
    assert y.spatial_shape == (2, 3, 1)
    for subdivision in (None, mx.ones((12, 8), dtype=mx.bool_)):
        back = ops.channel_to_space(y, subdivision=subdivision)
        assert back.spatial_shape == (4, 6, 2)
        same(back.to_dense(), dense)


def test_keys_and_strides_are_those_of_a_strided_convolution():
    x, _, _ = tensor(channels=4)
    y = ops.space_to_channel(x)
    pooled = ops.max_pool3d(x, 2, 2)
    assert y.key == pooled.key and y.stride == (2, 2, 2)
    up = ops.conv_transpose3d(y, mx.ones((1, 2, 2, 2, 32)))  # finds the fine set
    assert up.key == x.key
    mask = mx.ones((len(x), 8), dtype=mx.bool_)
    wide = x.replace(mx.ones((len(x), 8)))
    assert ops.channel_to_space(wide, subdivision=mask).stride == (Fraction(1, 2),) * 3
    wide = x.replace(mx.ones((len(x), 27)))
    third = ops.channel_to_space(wide, 3, coordinates=mx.array([[0, 0, 0, 0]]))
    assert third.stride == (Fraction(1, 3),) * 3


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_dtypes_keep_their_bits(dtype):
    x, coords, feats = tensor(dtype=dtype)
    y = ops.space_to_channel(x)
    assert y.dtype == x.dtype
    same(y.feats, Cells(2, 3).gathered(coords, feats)[1])
    assert mx.array_equal(ops.channel_to_space(y, coordinates=x).feats, x.feats).item()


@pytest.mark.parametrize("way", ("down", "up"))
def test_gradients_of_every_order(way):
    x, _, _ = tensor(n=20)
    y = ops.space_to_channel(x)

    def linear(f):
        if way == "down":
            return ops.space_to_channel(x.replace(f)).feats
        return ops.channel_to_space(y.replace(f), coordinates=x).feats

    def cubes(f):
        return (linear(f) ** 3).sum()

    at = x.feats if way == "down" else y.feats
    dx = mx.array(cases.features(*at.shape, 5))
    (value,), (tangent,) = mx.jvp(linear, [at], [dx])
    assert mx.array_equal(value, linear(at)).item()
    assert mx.array_equal(tangent, linear(dx)).item()
    dy = mx.array(cases.features(*value.shape, 6))
    (pulled,) = mx.vjp(linear, [at], [dy])[1]
    left, right = (tangent * dy).sum().item(), (dx * pulled).sum().item()
    assert left == pytest.approx(right, rel=1e-4)
    second = mx.grad(lambda f: (mx.grad(cubes)(f) * dx).sum())(at)
    expected = 6 * mx.vjp(linear, [at], [value * linear(dx)])[1][0]
    assert mx.allclose(second, expected, atol=1e-5).item()


@pytest.mark.parametrize("of_features", (False, True))
def test_gradient_by_subdivision_is_zero_elsewhere(of_features):
    x, coords, feats = tensor(channels=8, n=10)
    mask = np.random.default_rng(1).random(feats.shape) < 0.5

    def total(f):
        chosen = f > 0 if of_features else mx.array(mask)
        return ops.channel_to_space(x.replace(f), subdivision=chosen).feats.sum()

    expected = feats > 0 if of_features else mask
    same(mx.grad(total)(x.feats), expected.astype(np.float32))
