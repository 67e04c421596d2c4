"""Errors of coordinates and points are sentences: what was expected, came, is to do."""

import operator

import mlx.core as mx
import numpy as np
import pytest
from refusals import refused, tensor

import mlx_lattice as ml
from mlx_lattice import nn, ops

MOST = 2**31 - 1


@pytest.mark.parametrize("kind", ("submanifold", "forward", "generative", "dense"))
def test_duplicates_show_both_rows(kind):
    rows = [(0, 5, 5, 5), (0, 1, 2, 3), (1, 1, 2, 3), (0, 0, 0, 0), (0, 1, 2, 3)]
    x = tensor(rows)
    call = {
        "submanifold": lambda: ops.subm_conv3d(x, mx.ones((4, 3, 3, 3, 4))),
        "forward": lambda: ops.conv3d(x, mx.ones((4, 3, 3, 3, 4)), stride=2),
        "generative": lambda: ops.generative_conv_transpose3d(
            x, mx.ones((4, 2, 2, 2, 4))
        ),
        "dense": x.to_dense,
    }[kind]
    sentence = (
        r"must be unique; rows 1 and 4 are both \(0, 1, 2, 3\).*from_points, which "
        "merges points of one voxel, or drop the repeats"
    )
    refused(ValueError, sentence, call)


def test_a_duplicate_target_row_is_an_error_too():
    manager = ml.CoordinateManager()
    relation = manager.target_kernel_relation
    target = mx.array([(0, 1), (0, 1)])
    sentence = r"rows 0 and 1 are both \(0, 1\)"
    refused(ValueError, sentence, lambda: relation(mx.array([(0, 1)]), target))


@pytest.mark.parametrize(
    ("coords", "sentence"),
    (
        (mx.zeros((3, 4)), "coords must be int32; got .*float32.*from_points"),
        (mx.zeros((3, 4), dtype=mx.bool_), "coords must be int32; got .*bool"),
        (
            mx.zeros((3,), dtype=mx.int32),
            r"must have shape \(N, 1 \+ D\).*got .*\(3,\)",
        ),
        (mx.zeros((3, 1), dtype=mx.int32), r"1 to 4 spatial.*got shape \(3, 1\)"),
        (mx.zeros((3, 6), dtype=mx.int32), r"1 to 4 spatial.*got shape \(3, 6\)"),
        (
            mx.array([[0, MOST + 1]] * 3, dtype=mx.int64),
            "coords would reach coordinates 0 to 2147483648, beyond int32",
        ),
    ),
    ids=("float", "bool", "vector", "0d", "5d", "int64"),
)
def test_coordinates_of_the_wrong_kind(coords, sentence):
    refused(ValueError, sentence, lambda: ml.SparseTensor(coords, mx.ones((3, 1))))


def relation_of(**facts):
    coords = facts.pop("coords")
    manager = ml.CoordinateManager()
    key = manager.insert(mx.array(coords), **facts)
    return manager.submanifold_kernel_relation(key)


@pytest.mark.parametrize(
    ("facts", "sentence"),
    (
        (
            {"coords": [(0, 1), (-1, 2)]},
            r"batch indices \(column 0\) must be 0 or more; got -1 to 0",
        ),
        (
            {"coords": [(0, 1), (3, 2)], "batch_size": 2},
            r"batch indices \(column 0\) must be below batch_size 2; got 0 to 3",
        ),
        (
            {"coords": [(0, 1, 1), (0, 2, 5)], "spatial_shape": (4, 5)},
            r"axis 1 must lie in \[0, 5\), the spatial_shape; got 1 to 5",
        ),
        (
            {"coords": [(0, -1, 1), (0, 2, 4)], "spatial_shape": 5},
            r"axis 0 must lie in \[0, 5\), the spatial_shape; got -1 to 2",
        ),
    ),
    ids=("negative-batch", "batch-size", "outside-shape", "negative-in-shape"),
)
def test_ranges(facts, sentence):
    refused(ValueError, sentence, lambda: relation_of(**facts))


@pytest.mark.parametrize(
    ("facts", "sentence"),
    (
        ({"stride": 0}, "stride must be positive"),
        ({"stride": (1, 2)}, "stride must be positive, one value for each of 1 axes"),
        ({"spatial_shape": (4, 4)}, "spatial_shape must be an int or 1 ints"),
        ({"spatial_shape": -1}, "spatial_shape must be at least 0"),
    ),
    ids=str,
)
def test_facts_of_a_set(facts, sentence):
    refused(ValueError, sentence, lambda: relation_of(coords=[(0, 1)], **facts))


@pytest.mark.parametrize(
    "stride",
    ("2", 0.1, 1 / 3, float("nan"), float("inf"), None, True, 1j, ["a"], {}, mx.inf),
    ids=str,
)
def test_strides_that_are_no_ratios(stride):
    sentence = r"stride must be an int or a Fraction, or one for each of 3 axes; got "
    refused(ValueError, sentence, lambda: tensor(stride=stride))


@pytest.mark.parametrize("stride", (0, -1, 0.0, (1, 2), (1, 0, 1), mx.array([1, 2])))
def test_strides_that_are_not_positive(stride):
    sentence = "stride must be positive, one value for each of 3 axes; got "
    refused(ValueError, sentence, lambda: tensor(stride=stride))


@pytest.mark.parametrize(
    "size",
    (2.0, True, "2", np.bool_(1), mx.array(True), mx.array([2]), [2], np.float32(2)),
    ids=str,
)
def test_a_batch_size_that_is_no_integer(size):
    sentence = "batch_size must be an int, or None .* batch index . 1; got "
    refused(TypeError, sentence, lambda: tensor(batch_size=size))
    refused(TypeError, sentence, lambda: points([[0.0]], batch_size=size))


def test_a_batch_size_that_is_negative():
    sentence = "batch_size must be 0 or more; got -1"
    refused(ValueError, sentence, lambda: tensor(batch_size=-1))


@pytest.mark.parametrize("given", ("tensor", "rows"))
def test_unique_sum_checks_ranges_as_a_convolution_does(given):
    rows, facts = [(-1, 1, 2, 3), (0, 1, 2, 3), (-1, 1, 2, 3)], {"batch_size": 2}

    def sums(rows, **facts):
        if given == "tensor":
            return ops.unique_sum(tensor(rows, **facts))
        return ops.unique_sum(mx.array(rows), mx.ones((len(rows), 4)), **facts)

    sentence = r"batch indices \(column 0\) must be 0 or more; got -1 to 0"
    refused(ValueError, sentence, lambda: sums(rows))
    refused(ValueError, sentence, lambda: sums(rows, **facts))
    sentence = r"batch indices \(column 0\) must be below batch_size 2; got 0 to 3"
    rows = [(0, 1, 2, 3), (3, 1, 2, 3)]
    refused(ValueError, sentence, lambda: sums(rows, **facts))
    assert sums(rows, batch_size=4).batch_size == 4


OPERATORS = (
    *(operator.add, operator.sub, operator.mul, operator.truediv),
    *(lambda a, b: b + a, lambda a, b: b - a, lambda a, b: b * a, lambda a, b: b / a),
)


@pytest.mark.parametrize("other", (None, "a", [1.0] * 4, {}, object()), ids=type)
@pytest.mark.parametrize("waits", (False, True))
def test_what_cannot_be_added(other, waits):
    x = ops.subm_conv3d(tensor(), mx.ones((4, 3, 3, 3, 4)))
    x = nn.SubmConv3d(4, 4, 3)(x) if waits else x
    sentence = f"another one, an array .* or a number; got {type(other).__name__}"
    for operation in OPERATORS:
        refused(TypeError, sentence, lambda at=operation: at(x, other))


@pytest.mark.parametrize("far", (MOST, -(2**31)))
def test_a_generative_result_beyond_int32(far):
    manager = ml.CoordinateManager()
    coords = mx.array([(0, far // 2 + 1 if far > 0 else far // 2 - 1)])
    sentence = (
        r"the generative convolution would reach .*, beyond int32; move the input"
    )
    refused(ValueError, sentence, lambda: manager.generative_relation(coords))


def test_a_reach_beyond_int32():
    manager, coords = ml.CoordinateManager(), mx.array([(0, MOST)])
    sentence = "the convolution would reach coordinates .*2147483648, beyond int32"
    relation = manager.kernel_relation
    refused(ValueError, sentence, lambda: relation(coords, support="reach"))
    assert relation(coords).n_edges == 1, "its own cell is inside"


def test_an_unknown_key_lists_the_keys_there_are():
    manager, other = ml.CoordinateManager(), ml.CoordinateManager()
    mine = manager.insert(mx.array([(0, 1)]))
    theirs = other.insert(mx.array([(0, 1)]), stride=2)
    sentence = f"{theirs!r} is not a coordinate set of this manager, .*{mine!r}"
    relation = manager.submanifold_kernel_relation
    refused(KeyError, sentence, lambda: relation(theirs))
    empty = ml.CoordinateManager().submanifold_kernel_relation
    refused(KeyError, "which has: none", lambda: empty(theirs))


def test_support_and_dimensions():
    manager, coords = ml.CoordinateManager(), mx.array([(0, 1, 1)])
    sentence = 'support must be "cell" or "reach"; got \'dense\''
    relation = manager.kernel_relation
    refused(ValueError, sentence, lambda: relation(coords, support="dense"))
    sentence = "the target has 1 spatial axes, the input 2"
    relation = manager.target_kernel_relation
    refused(ValueError, sentence, lambda: relation(coords, mx.array([(0, 1)])))


def points(values, **arguments):
    arguments = {"voxel_size": 1.0, **arguments}
    return ml.SparseTensor.from_points(mx.array(values), **arguments)


@pytest.mark.parametrize(
    ("values", "arguments", "sentence"),
    (
        (
            [[0.0, 0.0], [np.nan, 1.0]],
            {},
            r"points must be finite; point 1 is \(nan, 1.0",
        ),
        ([[np.inf, 0.0]], {}, r"points must be finite; point 0 is \(inf"),
        ([[3e9, 0.0]], {}, "voxels would reach .*, beyond int32; use a larger voxel"),
        ([0.0, 1.0], {}, r"points must have shape \(P, D\), D from 1 to 4; got \(2,\)"),
        ([[0.0] * 5], {}, r"D from 1 to 4; got \(1, 5\)"),
        ([[0.0]], {"voxel_size": 0.0}, "voxel_size must be positive; got 0.0"),
        ([[0.0]], {"voxel_size": (1, 1)}, r"voxel_size must be one number or 1; got"),
        ([[0.0]], {"reduce": "median"}, "reduce must be one of .*'first'.*'median'"),
        ([[0.0]], {"feats": mx.ones((2, 1))}, r"with P = 1, the points; got \(2, 1\)"),
        ([[0.0]], {"batch": mx.array([0, 1])}, r"batch must be \(1,\) integers"),
        ([[0.0]], {"batch": mx.array([0.5])}, r"integers, one a point.*float32"),
        ([[0.0]], {"batch": mx.array([-1])}, "batch indices must be 0 or more; got -1"),
    ),
    ids=(
        *("nan", "inf", "far", "vector", "5d", "zero-size", "sizes", "reduce"),
        *("feats", "batch-length", "batch-float", "batch-negative"),
    ),
)
def test_points(values, arguments, sentence):
    refused(ValueError, sentence, lambda: points(values, **arguments))


def test_dense_arrays():
    dense = ml.SparseTensor.from_dense
    sentence = r"\(B, spatial..., C\) with 1 to 4 spatial axes; got \(2, 3\)"
    refused(ValueError, sentence, lambda: dense(mx.ones((2, 3))))
    mask = mx.ones((1, 3), dtype=mx.bool_)
    sentence = r"mask must have shape \(1, 2\), bool; got \(1, 3\)"
    refused(ValueError, sentence, lambda: dense(mx.ones((1, 2, 4)), mask))
