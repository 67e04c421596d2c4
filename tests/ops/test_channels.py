"""space_to_channel and channel_to_space against a loop over rows, and their laws."""

import gc
import weakref
from fractions import Fraction
from itertools import product
from math import prod

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from hypothesis import given
from hypothesis import strategies as st

import mlx_lattice as ml
from mlx_lattice import ops

FACTORS = {1: (2, 3, (4,)), 2: (2, 3, (1, 2)), 3: (2, 3, (2, 1, 3)), 4: (2,)}
SHAPES = [(d, f) for d, factors in FACTORS.items() for f in factors]


def numbers(factor, order):
    """The offset of each number, as the definition counts them."""
    offsets = list(product(*(range(f) for f in factor)))
    return offsets if order == "last" else sorted(offsets, key=lambda o: o[::-1])


def gathered(coords, feats, factor, order="last"):
    """Coarse rows and features, in NumPy."""
    factor = ref.per_axis(factor, coords.shape[1] - 1)
    offsets = numbers(factor, order)
    coarse = ref.cell_rows(coords, factor)
    width = feats.shape[1]
    out = np.zeros((len(coarse), len(offsets) * width), feats.dtype)
    for row, values in zip(coords.tolist(), feats, strict=True):
        cell = [v // f for v, f in zip(row[1:], factor, strict=True)]
        inside = tuple(v % f for v, f in zip(row[1:], factor, strict=True))
        k = offsets.index(inside)
        out[coarse.index((row[0], *cell)), k * width : (k + 1) * width] = values
    return ref.as_coords(coarse, coords.shape[1] - 1), out


def spread(coords, feats, fine, factor, order="last"):
    """Features on given fine rows, in NumPy."""
    factor = ref.per_axis(factor, coords.shape[1] - 1)
    offsets = numbers(factor, order)
    width, index = feats.shape[1] // len(offsets), ref.rows_of(coords)
    out = np.zeros((len(fine), width), feats.dtype)
    for o, row in enumerate(np.asarray(fine).tolist()):
        cell = (row[0], *(v // f for v, f in zip(row[1:], factor, strict=True)))
        k = offsets.index(tuple(v % f for v, f in zip(row[1:], factor, strict=True)))
        if cell in index:
            out[o] = feats[index.index(cell), k * width : (k + 1) * width]
    return out


def children(coords, mask, factor, order="last"):
    """Sorted fine rows of the chosen cells."""
    offsets = numbers(factor, order)
    rows = [
        (row[0], *(v * f + o for v, f, o in zip(row[1:], factor, offset, strict=True)))
        for row, some in zip(coords.tolist(), mask, strict=True)
        for offset, chosen in zip(offsets, some, strict=True)
        if chosen
    ]
    return ref.as_coords(sorted(rows), coords.shape[1] - 1)


def tensor(name="negative", d=3, channels=3, n=40, dtype="float32", **options):
    coords = cases.geometry(name, d, n)
    feats = cases.features(len(coords), channels)
    x = ml.SparseTensor(
        mx.array(coords), mx.array(feats).astype(getattr(mx, dtype)), **options
    )
    return x, coords, ref.to_numpy(x.feats)


def same(actual, expected):
    np.testing.assert_array_equal(ref.to_numpy(actual), expected)


@pytest.mark.parametrize("order", ("last", "first"))
@pytest.mark.parametrize("name", ("negative", "batches", "far", "empty", "one"))
@pytest.mark.parametrize("d, factor", SHAPES, ids=str)
def test_space_to_channel(d, factor, name, order):
    x, coords, feats = tensor(name, d)
    y = ops.space_to_channel(x, factor, order=order)
    rows, expected = gathered(coords, feats, factor, order)
    same(y.coords, rows)
    same(y.feats, expected)


@pytest.mark.parametrize("order", ("last", "first"))
@pytest.mark.parametrize("d, factor", SHAPES, ids=str)
def test_channel_to_space_by_subdivision(d, factor, order):
    factor = ref.per_axis(factor, d)
    volume = prod(factor)
    x, coords, feats = tensor("batches", d, 2 * volume, n=20)
    mask = np.random.default_rng(d).random((len(coords), volume)) < 0.4
    y = ops.channel_to_space(x, factor, subdivision=mx.array(mask), order=order)
    fine = children(coords, mask, factor, order)
    same(y.coords, fine)
    same(y.feats, spread(coords, feats, fine, factor, order))
    assert y.batch_size == x.batch_size


@pytest.mark.parametrize("name", ("negative", "batches", "far", "empty", "one"))
@pytest.mark.parametrize("d, factor", SHAPES, ids=str)
def test_every_cell(d, factor, name):
    """Without rows or subdivision: those of a generative convolution."""
    factor = ref.per_axis(factor, d)
    x, coords, feats = tensor(name, d, prod(factor), n=20)
    y = ops.channel_to_space(x, factor)
    fine = children(coords, np.ones((len(coords), prod(factor)), bool), factor)
    same(y.coords, fine)
    same(y.feats, spread(coords, feats, fine, factor))


@pytest.mark.parametrize("d, factor", SHAPES, ids=str)
def test_given_rows_keep_their_order_and_may_lack_a_cell(d, factor):
    volume = prod(ref.per_axis(factor, d))
    x, coords, feats = tensor("scattered", d, 2 * volume, n=12)
    fine = cases.geometry("negative", d, 50)
    y = ops.channel_to_space(x, factor, coordinates=mx.array(fine))
    same(y.coords, fine)
    expected = spread(coords, feats, fine, factor)
    same(y.feats, expected)
    assert (expected == 0).all(axis=1).any()


def test_given_rows_as_tensor_key_or_array():
    x, _, _ = tensor()
    coarse = ops.space_to_channel(x)
    elsewhere = ml.SparseTensor(x.coords, x.feats)
    for coordinates in (x, x.key, x.coords, elsewhere):
        back = ops.channel_to_space(coarse, coordinates=coordinates)
        assert mx.array_equal(back.feats, x.feats).item()
        assert mx.array_equal(back.coords, x.coords).item()
    assert ops.channel_to_space(coarse, coordinates=x).key == x.key


@given(cases.coordinate_sets(), st.integers(1, 3), st.sampled_from(("last", "first")))
def test_round_trip(coords, factor, order):
    feats = cases.features(len(coords), 2)
    x = ml.SparseTensor(mx.array(coords), mx.array(feats))
    y = ops.space_to_channel(x, factor, order=order)
    back = ops.channel_to_space(y, factor, coordinates=x, order=order)
    assert back.key == x.key
    assert mx.array_equal(back.feats, x.feats).item()
    # And by the subdivision that the occupied cells are.
    width = factor**x.dims
    ones = x.replace(mx.ones((len(x), 1)))
    occupied = ops.space_to_channel(ones, factor, order=order).feats > 0
    assert occupied.shape == (len(y), width)
    again = ops.channel_to_space(y, factor, subdivision=occupied, order=order)
    assert mx.array_equal(ops.align(again, x).feats, x.feats).item()


def test_dense_is_pixel_unshuffle():
    dense = np.random.default_rng(0).normal(size=(2, 4, 6, 2, 3)).astype(np.float32)
    x = ml.SparseTensor.from_dense(mx.array(dense))
    y = ops.space_to_channel(x)
    blocks = dense.reshape(2, 2, 2, 3, 2, 1, 2, 3).transpose(0, 1, 3, 5, 2, 4, 6, 7)
    same(y.to_dense(), blocks.reshape(2, 2, 3, 1, 24))
    assert y.spatial_shape == (2, 3, 1)
    back = ops.channel_to_space(y)
    assert back.spatial_shape == (4, 6, 2)
    same(back.to_dense(), dense)
    chosen = ops.channel_to_space(y, subdivision=mx.ones((12, 8), dtype=mx.bool_))
    assert chosen.spatial_shape == (4, 6, 2)
    same(chosen.to_dense(), dense)


def test_orders_are_numbers_of_one_offset():
    """(0, 0, 1) is offset 1 of "last" and 4 of "first", as TRELLIS.2 counts."""
    x = ml.SparseTensor(mx.array([[0, 4, 6, -1]]), mx.ones((1, 1)))
    assert mx.argmax(ops.space_to_channel(x).feats).item() == 1
    assert mx.argmax(ops.space_to_channel(x, order="first").feats).item() == 4


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


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_dtypes_keep_their_bits(dtype):
    x, coords, feats = tensor(dtype=dtype)
    y = ops.space_to_channel(x)
    assert y.dtype == x.dtype
    same(y.feats, gathered(coords, feats, 2)[1])
    assert mx.array_equal(ops.channel_to_space(y, coordinates=x).feats, x.feats).item()


def test_gradients_of_every_order():
    x, coords, _ = tensor(n=20)
    y = ops.space_to_channel(x)
    down = lambda f: ops.space_to_channel(x.replace(f)).feats  # noqa: E731
    up = lambda f: ops.channel_to_space(y.replace(f), coordinates=x).feats  # noqa: E731
    for function, at in ((down, x.feats), (up, y.feats)):
        dx = mx.array(cases.features(*at.shape, 5))
        (value,), (tangent,) = mx.jvp(function, [at], [dx])
        assert mx.array_equal(value, function(at)).item()
        assert mx.array_equal(tangent, function(dx)).item()
        dy = mx.array(cases.features(*value.shape, 6))
        (pulled,) = mx.vjp(function, [at], [dy])[1]
        left, right = (tangent * dy).sum().item(), (dx * pulled).sum().item()
        assert left == pytest.approx(right, rel=1e-4)
        cube = lambda f, g=function: (g(f) ** 3).sum()  # noqa: E731
        slope = lambda f, c=cube, d=dx: (mx.grad(c)(f) * d).sum()  # noqa: E731
        used = function(at) ** 2
        expected = 6 * mx.vjp(function, [at], [function(at) * function(dx)])[1][0]
        second = mx.grad(slope)(at)
        assert mx.allclose(second, expected, atol=1e-5).item() and used.size


def test_gradient_by_subdivision_skips_what_was_not_chosen():
    x, coords, _ = tensor(channels=8, n=10)
    mask = np.random.default_rng(1).random((len(coords), 8)) < 0.5
    total = lambda f: (  # noqa: E731
        ops.channel_to_space(x.replace(f), subdivision=mx.array(mask)).feats.sum()
    )
    same(mx.grad(total)(x.feats), mask.astype(np.float32))


def test_gradient_where_the_mask_depends_on_the_features():
    x, _, feats = tensor(channels=8, n=10)

    def total(f):
        return ops.channel_to_space(x.replace(f), subdivision=f > 0).feats.sum()

    same(mx.grad(total)(x.feats), (feats > 0).astype(np.float32))


def test_no_rows():
    for d in (1, 2, 3, 4):
        x, _, _ = tensor("empty", d, 2**d)
        assert ops.space_to_channel(x).shape == (0, 4**d)
        none = mx.zeros((0, 2**d), dtype=mx.bool_)
        for y in (
            ops.channel_to_space(x),
            ops.channel_to_space(x, subdivision=none),
            ops.channel_to_space(x, coordinates=x),
        ):
            assert y.shape == (0, 1)
        grad = mx.grad(lambda f, x=x: ops.space_to_channel(x.replace(f)).feats.sum())
        assert grad(x.feats).shape == x.shape
    x, _, _ = tensor(channels=8)
    none = mx.zeros((len(x), 8), dtype=mx.bool_)
    y = ops.channel_to_space(x, subdivision=none)
    assert y.shape == (0, 1) and y.batch_size == x.batch_size
    grad = mx.grad(
        lambda f: ops.channel_to_space(x.replace(f), subdivision=none).feats.sum()
    )
    assert not grad(x.feats).any().item()


def test_mistakes_are_named():
    x, _, _ = tensor(channels=12)
    wide = x.replace(mx.ones((len(x), 8)))
    with pytest.raises(ValueError, match="multiple of 8 channels"):
        ops.channel_to_space(x)
    with pytest.raises(ValueError, match="order must be one of"):
        ops.space_to_channel(x, order="xyz")
    with pytest.raises(ValueError, match="at least 1"):
        ops.space_to_channel(x, 0)
    for mask in (mx.ones((len(x), 8)), mx.ones((3, 8), dtype=mx.bool_)):
        with pytest.raises(ValueError, match="8\\) bool"):
            ops.channel_to_space(wide, subdivision=mask)
    mask = mx.ones((len(x), 8), dtype=mx.bool_)
    with pytest.raises(ValueError, match="not both"):
        ops.channel_to_space(wide, subdivision=mask, coordinates=x)
    with pytest.raises(ValueError, match=r"must have shape \(M, \d\), a batch index"):
        ops.channel_to_space(wide, coordinates=mx.array([[0, 1, 2]]))
    with pytest.raises(ValueError, match="spatial axes, the tensor"):
        flat = ml.SparseTensor(mx.array([[0, 1, 2]]), mx.ones((1, 8)))
        ops.channel_to_space(wide, coordinates=flat)
    twice = ml.SparseTensor(mx.array([[0, 1], [0, 1]]), mx.ones((2, 2)))
    pair = mx.ones((2, 2), dtype=mx.bool_)
    for mistake in (
        lambda: ops.space_to_channel(twice),
        lambda: ops.channel_to_space(twice),
        lambda: ops.channel_to_space(twice, subdivision=pair),
        lambda: ops.channel_to_space(wide, coordinates=mx.array([[0, 1, 2, 3]] * 2)),
    ):
        with pytest.raises(ValueError, match="must be unique"):
            mistake()
    edge = ml.SparseTensor(mx.array([[0, 2**30]]), mx.ones((1, 2)))
    with pytest.raises(ValueError, match="beyond int32"):
        ops.channel_to_space(edge, subdivision=mx.array([[True, True]]))


def test_what_is_kept_dies_with_the_coordinates():
    x, _, _ = tensor()
    y = ops.space_to_channel(x)
    ops.channel_to_space(y, coordinates=x)
    held = weakref.ref(x.manager[y.key])
    del x, y
    gc.collect()
    assert held() is None
