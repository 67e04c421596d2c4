"""Errors of coordinates and points: what was expected, what came, what to do."""

import operator

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import ops

MOST = 2**31 - 1
PAIR = ((0, 0, 0, 0), (0, 1, 2, 3))
TWICE = [(0, 5, 5, 5), (0, 1, 2, 3), (1, 1, 2, 3), (0, 0, 0, 0), (0, 1, 2, 3)]
W3, W2 = mx.ones((4, 3, 3, 3, 4)), mx.ones((4, 2, 2, 2, 4))


def tensor(coords=PAIR, **facts) -> ml.SparseTensor:
    return ml.SparseTensor(mx.array(coords), mx.ones((len(coords), 4)), **facts)


def points(*values, **options) -> ml.SparseTensor:
    return ml.SparseTensor.from_points(
        mx.array(values), **{"voxel_size": 1.0} | options
    )


def relation(coords, kind="kernel", *target, options=None, **facts) -> ml.Relation:
    manager = ml.CoordinateManager()
    method = getattr(manager, f"{kind}_relation")
    key = manager.insert(mx.array(coords), **facts)
    return method(key, *map(mx.array, target), **(options or {}))


def kind_of(coords):
    return lambda: ml.SparseTensor(coords, mx.ones((3, 1)))


def from_dense(*arguments):
    return lambda: ml.SparseTensor.from_dense(*arguments)


def sums(rows, **facts):
    return ops.unique_sum(mx.array(rows), mx.ones((len(rows), 4)), **facts)


REPEAT = (
    r"must be unique; rows 1 and 4 are both \(0, 1, 2, 3\).*from_points, which merges "
    "points of one voxel, or drop the repeats"
)
NEGATIVE = r"batch indices \(column 0\) must be 0 or more; got -1 to 0"
BEYOND = r"batch indices \(column 0\) must be below batch_size 2; got 0 to 3"
LOW, HIGH = [(-1, 1, 2, 3), (0, 1, 2, 3), (-1, 1, 2, 3)], [(0, 1, 2, 3), (3, 1, 2, 3)]
RATIO = "stride must be a positive int or Fraction, or one for each of 3 axes; got "

CASES = (
    # Rows that repeat
    (lambda: ops.subm_conv3d(tensor(TWICE), W3), REPEAT),
    (lambda: tensor(TWICE).to_dense(), REPEAT),
    (
        lambda: relation([(0, 1)], "target_kernel", [(0, 1), (0, 1)]),
        r"rows 0 and 1 are both \(0, 1\)",
    ),
    # Coordinates of the wrong kind
    (kind_of(mx.zeros((3, 4))), "coords must be int32; got .*float32.*from_points"),
    (kind_of(mx.zeros((3, 4), dtype=mx.bool_)), "coords must be int32; got .*bool"),
    (
        kind_of(mx.zeros((3,), dtype=mx.int32)),
        r"must have shape \(N, 1 \+ D\).*got .*\(3,\)",
    ),
    (kind_of(mx.zeros((3, 1), dtype=mx.int32)), r"1 to 4 spatial.*shape \(3, 1\)"),
    (
        kind_of(mx.array([[0, MOST + 1]] * 3, dtype=mx.int64)),
        "coords would reach coordinates 0 to 2147483648, beyond int32",
    ),
    # Ranges
    (lambda: relation([(0, 1), (-1, 2)]), NEGATIVE),
    (lambda: relation([(0, 1), (3, 2)], batch_size=2), BEYOND),
    (
        lambda: relation([(0, 1, 1), (0, 2, 5)], spatial_shape=(4, 5)),
        r"axis 1 must lie in \[0, 5\), the spatial_shape; got 1 to 5",
    ),
    (lambda: sums(LOW), NEGATIVE),
    (lambda: sums(HIGH, batch_size=2), BEYOND),
    (
        lambda: relation([(0, MOST // 2 + 1)], "generative"),
        "the generative convolution would reach .*, beyond int32; move the input",
    ),
    (
        lambda: relation([(0, MOST)], options={"support": "reach"}),
        "the convolution would reach coordinates .*2147483648, beyond int32",
    ),
    # Facts of a set
    (lambda: relation([(0, 1)], stride=(1, 2)), "or one for each of 1 axes"),
    (
        lambda: relation([(0, 1)], spatial_shape=(4, 4)),
        "spatial_shape must be an int or 1 ints",
    ),
    (lambda: relation([(0, 1)], spatial_shape=-1), "spatial_shape must be at least 0"),
    (lambda: tensor(batch_size=-1), "batch_size must be 0 or more; got -1"),
    (
        lambda: relation([(0, 1, 1)], options={"support": "dense"}),
        'support must be "cell" or "reach"; got \'dense\'',
    ),
    (
        lambda: relation([(0, 1, 1)], "target_kernel", [(0, 1)]),
        "the target has 1 spatial axes, the input 2",
    ),
    # Points and dense arrays
    (
        lambda: points([0.0, 0.0], [np.nan, 1.0]),
        r"points must be finite; point 1 is \(nan, 1.0",
    ),
    (lambda: points([3e9, 0.0]), "would reach .*, beyond int32; use a larger voxel"),
    (lambda: points(0.0, 1.0), r"must have shape \(P, D\), D from 1 to 4; got \(2,\)"),
    (lambda: points([0.0], voxel_size=0.0), "voxel_size must be positive; got 0.0"),
    (lambda: points([0.0], reduce="median"), "reduce must be .*'first'.*'median'"),
    (
        lambda: points([0.0], feats=mx.ones((2, 1))),
        r"with P = 1, the points; got \(2, 1\)",
    ),
    (lambda: points([0.0], batch=mx.array([0, 1])), r"batch must be \(1,\) integers"),
    (
        lambda: points([0.0], batch=mx.array([0.5])),
        "integers, one for each point.*float32",
    ),
    (
        from_dense(mx.ones((2, 3))),
        r"\(B, spatial..., C\) with 1 to 4 spatial axes; got \(2, 3\)",
    ),
    (
        from_dense(mx.ones((1, 2, 4)), mx.ones((1, 3), dtype=mx.bool_)),
        r"mask must have shape \(1, 2\), bool; got \(1, 3\)",
    ),
    *(
        (lambda stride=stride: tensor(stride=stride), RATIO)
        for stride in ("2", 0.1, float("nan"), mx.inf, None, True, 1j, ["a"], {})
    ),
    *(
        (lambda stride=stride: tensor(stride=stride), RATIO)
        for stride in (0, -1, 0.0, (1, 2), (1, 0, 1), mx.array([1, 2]))
    ),
)


@pytest.mark.parametrize(("call", "sentence"), CASES)
def test_sentences(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_values_inside_of_the_ranges():
    assert sums(HIGH, batch_size=4).batch_size == 4
    assert relation([(0, MOST)]).n_edges == 1, "its own cell is inside"


@pytest.mark.parametrize(
    "size",
    (2.0, True, "2", np.bool_(1), mx.array(True), mx.array([2]), [2], np.float32(2)),
    ids=str,
)
def test_a_batch_size_that_is_no_integer(size):
    for call in (tensor, lambda **facts: points([0.0], **facts)):
        with pytest.raises(
            TypeError, match="batch_size must be an int, or None .*; got "
        ):
            call(batch_size=size)


@pytest.mark.parametrize("other", (None, "a", [1.0] * 4, {}, object()), ids=type)
def test_what_cannot_be_added(other):
    x = tensor()
    sentence = f"another one, an array .* or a number; got {type(other).__name__}"
    for operation in (operator.add, operator.sub, operator.mul, operator.truediv):
        for pair in ((x, other), (other, x)):
            with pytest.raises(TypeError, match=sentence):
                operation(*pair)


def test_an_unknown_key_lists_the_known_keys():
    managers = [ml.CoordinateManager() for _ in range(3)]
    mine = managers[0].insert(mx.array([(0, 1)]))
    foreign = managers[1].insert(mx.array([(0, 1)]), stride=2)
    sentence = f"{foreign!r} is not a coordinate set of this manager, .*{mine!r}"
    for manager, expected in ((managers[0], sentence), (managers[2], "has: none")):
        with pytest.raises(KeyError, match=expected):
            manager.submanifold_kernel_relation(foreign)
