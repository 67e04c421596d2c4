"""Numbers, flags and activations that mean nothing are sentences."""

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import models, nn, ops

CELLS = [(0, i, j, k) for i in range(4) for j in range(4) for k in range(2)]
COORDS, N = mx.array(CELLS), len(CELLS)
X = ml.SparseTensor(COORDS, mx.random.normal((N, 4)))
Y = ml.SparseTensor(COORDS, mx.ones((N, 5)))
BOXES, ONES = mx.ones((2, 7)), mx.ones(2)
Q, KEYS = mx.ones((1, 2, 1, 4)), mx.ones((1, 5, 1, 4))
W = mx.ones((8, 3, 3, 3, 4))
ROWS = mx.ones((N, 1, 4))
FLAT = ml.SparseTensor(
    mx.array([(0, 1, 3, 3)]), mx.ones((1, 4)), spatial_shape=(2, 6, 6)
)


def crossed(lengths):
    return ops.cross_attention(Q, KEYS, KEYS, lengths=lengths)


def suppressed(*scores, **more):
    return ops.nms_rotated(BOXES, mx.array(scores or (1.0, 1.0)), 0.5, **more)


def tensor(**place):
    return ml.SparseTensor(COORDS, X.feats, **place)


def kept(coords):
    return ml.SparseTensor(coords, X.feats, manager=X.manager, key=X.key)


def dense(mask):
    return ml.SparseTensor.from_dense(mx.ones((1, 2, 2, 3)), mask)


def serialized(patch, **more):
    return ops.serialized_attention(ROWS, ROWS, ROWS, X, patch, **more)


FOUND = ops.radius_neighbours(X, 1)


def edges(in_rows, *limits):
    return ml.Relation.from_edges(in_rows, [0], [0], *limits)


def problem(**facts):
    return ml.Problem.forward(**{"c_in": 4, "c_out": 8, "n_in": 5, **facts})


CASES = (
    (lambda: suppressed(labels=mx.ones(3)), r"labels must be \(2,\), one a box"),
    (lambda: suppressed(post=-1), "post must be 0 or more; got -1"),
    (lambda: suppressed(pre=2.5), "pre must be an int; got 2.5"),
    (lambda: ops.nms_rotated(BOXES, ONES, mx.ones(3)), r"threshold must be .*\(2,\)"),
    (lambda: crossed([9]), "lengths must lie from 0 to 5"),
    (lambda: crossed(np.array([-1])), "lengths must lie from 0 to 5"),
    (lambda: crossed(mx.array([1.5])), r"lengths must have shape \(1,\), integers"),
    (lambda: ops.batch_norm(X, eps=-1), "eps must be 0 or more; got -1"),
    (lambda: ops.layer_norm(X, eps=-1.0), "eps must be 0 or more"),
    (lambda: ops.rms_norm(X, eps="a"), "eps must be a number; got 'a'"),
    (lambda: ops.group_norm(X, 2, eps=np.inf), "eps must be finite; got inf"),
    (lambda: ops.instance_norm(X, eps=np.nan), "eps must be finite; got nan"),
    (lambda: ops.layer_norm(X, mx.ones(3)), r"weight and bias must have shape \(4,\)"),
    (lambda: ops.batch_norm(X, weight=mx.ones(3)), r"bias must have shape \(4,\)"),
    (lambda: ops.batch_norm(X, ONES, ONES), r"bias must have shape \(4,\), one value"),
    (lambda: ops.batch_norm(X.coords), "must be float32, float16 or bfloat16; got int"),
    (lambda: nn.BatchNorm(4)(X.coords), "must be float32, float16 or bfloat16"),
    (lambda: ops.batch_stats(X.feats[0]), r"features must have shape \(N, C\)"),
    (lambda: ops.prelu(X, mx.ones(5)), r"alpha must have shape \(1,\) or \(4,\)"),
    (lambda: nn.PReLU(5)(X), r"alpha must have shape \(1,\) or \(4,\), one value"),
    (lambda: nn.PReLU(5)(X.feats), r"alpha must have shape .*; got \(5,\)"),
    (lambda: ops.cat(X), "cat takes a list of tensors; got SparseTensor"),
    (lambda: ops.cat([X, X.feats]), "each tensor must be a SparseTensor; got array"),
    (lambda: ops.batch(3), "batch takes a list of tensors; got int"),
    (lambda: ops.batch([]), "batch needs at least one tensor; got none"),
    (lambda: ops.knn(X, 2.5), "k must be an int; got 2.5"),
    (lambda: ops.knn(X, 1, radius=np.nan), "radius must be finite; got nan"),
    (lambda: ops.full_attention(*[ROWS] * 3, X, scale="a"), "scale must be a number"),
    (lambda: ops.cross_attention(Q, KEYS, KEYS, scale=np.inf), "scale must be finite"),
    (lambda: ops.leaky_relu(X, "0.1"), "negative_slope must be a number; got '0.1'"),
    (lambda: ops.elu(X, None), "alpha must be a number; got None"),
    (lambda: ops.curve_order(X, bits=True), "bits must be an int from 0 to 62; got T"),
    (lambda: FOUND.padded("1"), "width must be an int; got '1'"),
    (lambda: FOUND.padded(1.5), "width must be an int; got 1.5"),
    (lambda: FOUND.relation(by_rank=True, ranks=8.5), "ranks must be an int; got 8.5"),
    (lambda: serialized(2**31), "patch must be below 2.31 and shift below patch; got"),
    (lambda: serialized(4, shift=1.0), "shift must be an int; got 1.0"),
    (lambda: ops.curve_order(X, bits=99), "bits must be an int from 0 to 62; got 99"),
    (lambda: ops.top_k(X, X.feats[:, 0], 2.5), "k must be an int; got 2.5"),
    (lambda: nn.BatchNorm(4.0), "num_features must be an int; got 4.0"),
    (lambda: nn.BatchNorm(4, eps=-1.0), "eps must be 0 or more"),
    (lambda: nn.BatchNorm(4, momentum=None), "momentum must be a number; got None"),
    (lambda: nn.BatchNorm(4, affine=mx.ones(4)), "affine must be True or False"),
    (lambda: nn.Linear(0, 3), "input_dims must be 1 or more; got 0"),
    (lambda: nn.Linear(4, 2.5), "output_dims must be an int; got 2.5"),
    (lambda: nn.Linear(4, 3, mx.zeros(3)), "bias must be True or False; got array"),
    (lambda: nn.PReLU(None), "num_parameters must be an int; got None"),
    (lambda: nn.Dropout(np.nan), "p must be finite; got nan"),
    (lambda: nn.Dropout(1), "p must be from 0 to below 1; got 1"),
    (lambda: nn.DropPath("a"), "p must be a number; got 'a'"),
    (lambda: nn.SparseAttention(4, 2.0), "num_heads must be an int; got 2.0"),
    (lambda: nn.SparseAttention(0, 1), "dims must be 1 or more; got 0"),
    (lambda: nn.SparseAttention(6, 1, rope=True, rope_base="a"), "rope_base must be a"),
    (lambda: nn.SparseTransformerBlock(4, 2, None), "mlp_ratio must be a number"),
    (lambda: nn.SparseTransformerBlock(4, 2, 0), "output_dims must be 1 or more"),
    (lambda: ops.rotary(ROWS, X, frequency="a"), "frequency must be a number"),
    (lambda: ops.prune_by_logits(X, X.feats[:, 0], np.nan), "threshold must be finite"),
    (lambda: nn.LayerNorm((4,)), r"dims must be an int; got \(4,\)"),
    (lambda: nn.RMSNorm(4.0), "dims must be an int; got 4.0"),
    (lambda: nn.InstanceNorm(0), "dims must be 1 or more; got 0"),
    (lambda: nn.GroupNorm(2, 4.0), "dims must be an int; got 4.0"),
    (lambda: nn.Conv3d(4, 8, 3, dilation=2**31), "less than 2\\^31 cells"),
    (lambda: nn.Conv3d(4, 8, 3, padding=10**10), "less than 2\\^31 cells"),
    (lambda: nn.Conv3d(4, 8, 3, groups=2.0), "groups must be an int; got 2.0"),
    (lambda: nn.Conv3d(4, 8, 3, bias=mx.zeros(8)), "bias must be True or False; got"),
    (lambda: nn.Conv3d(4.0, 8, 3), "in_channels must be an int; got 4.0"),
    (lambda: models.PTv3(4, 5, order=()), "order must name one curve or more"),
    (lambda: nn.SubmConv3d(4, 8, offsets=[(0.9, 0, 0), (1, 0, 0)]), "tuples of ints"),
    (lambda: nn.SubmConv3d(4, 8, offsets=5), "of 3-tuples of ints; got 5"),
    (lambda: ops.subm_conv3d(X, mx.ones((8, 1, 4)), offsets=5), "tuples of ints"),
    (lambda: ml.SparseTensor(None, X.feats), "coords must be an array of MLX or NumPy"),
    (lambda: tensor(manager=X), "manager must be a CoordinateManager, as x.manager is"),
    (
        lambda: tensor(manager=X.manager, key=X),
        "key must be a CoordinateKey of the man",
    ),
    (lambda: kept(COORDS + 1), "is the key of other coordinates, .*Leave the key out"),
    (lambda: kept(COORDS[:5]), r"of other coordinates, \(32, 4\); got \(5, 4\)"),
    (lambda: ml.SparseTensor.from_dense(X), "array must be an array of MLX or NumPy"),
    (lambda: dense(mx.ones((1, 2, 2))), r"mask must have shape \(1, 2, 2\), bool; got"),
    (lambda: dense([[[2, 0], [0, 1]]]), r"bool; got \(1, 2, 2\) of mlx.core.int32"),
    (lambda: ml.select(X), "select takes a Problem, .*; got SparseTensor"),
    (lambda: ml.integer_weight(W, scale=1), "scale must be an array of MLX or NumPy"),
    (lambda: ml.integer_weight(W, scale=[1.0]), r"scale must have shape \(8,\), one"),
    (lambda: problem(c_in=2.5), "c_in must be an int; got 2.5"),
    (lambda: problem(n_in=np.nan), "n_in must be an int; got nan"),
    (lambda: edges(None, 2, 2, 1), "in_rows must be an array of MLX or NumPy"),
    (lambda: edges([0], 1.5, 2, 1), "n_in must be an int; got 1.5"),
    (lambda: edges([0], 2, 2, np.nan), "K must be an int; got nan"),
    (lambda: ml.KernelSpec.of(0), "must be 1, 2, 3 or 4, .*; got 0"),
    (lambda: ml.KernelSpec.of(5), "must be 1, 2, 3 or 4, .*; got 5"),
    (lambda: ops.union(X, Y), "union needs tensors of equal channels; got 4 and 5"),
    (lambda: ops.intersection(X, Y), "tensors of equal channels; got 4 and 5"),
    (lambda: ops.batch([X, Y]), "batch needs tensors of equal channels; got 4 and 5"),
    (lambda: ops.subm_conv3d(X, W, groups=[1]), r"groups must be an int; got \[1\]"),
    (lambda: X.to_dense((2**31, 4, 4)), "1 x 2147483648 x 4 x 4 cells has 2\\^31 or"),
    (lambda: X.to_dense(50_000), "x 50000 cells has 2\\^31 or more; crop"),
    (lambda: nn.Linear(5, 3)(X), r"in_channels = 5; got features of shape \(32, 4\)"),
    (lambda: nn.Linear(5, 3).to_quantized(32, 8)(X), "in_channels = 5; got features"),
)


@pytest.mark.parametrize(("call", "sentence"), CASES)
def test_sentences(call, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()


def test_numbers_of_numpy():
    mine = serialized(np.int64(4), shift=np.int32(1))
    assert mx.array_equal(mine, serialized(4, shift=1)).item()
    curve = ops.curve_order(X, bits=np.int64(3))
    assert mx.array_equal(curve, ops.curve_order(X, bits=3)).item()
    assert FOUND.padded(np.int64(2)).rows.shape == (N, 2)


def test_coordinates_of_a_key():
    for coords in (X.coords, np.array(COORDS), mx.array(COORDS.tolist()), None):
        assert kept(coords).key == X.key


def test_a_nan_is_the_least_score():
    assert suppressed(np.nan, 1.0).tolist() == [1]
    assert ops.sort_scores(mx.array([np.nan, -np.inf, 1.0])).tolist() == [2, 0, 1]


def test_offsets_of_numpy():
    layer = nn.SubmConv3d(4, 8, offsets=np.array([(0, 0, 0), (1, 0, 0)]))
    assert layer.offsets == ((0, 0, 0), (1, 0, 0))


def test_joins_of_other_widths_by_a_function_of_them():
    y = ops.union(X, Y, lambda a, b: mx.concatenate([a, b], axis=1))
    assert y.channels == 9
    one = X.replace(X.feats[:, :1])
    assert ops.intersection(X, one).channels == 4


def test_a_kernel_taller_than_its_grid():
    shape = (3, 1, 1), (2, 1, 1)
    layer = nn.Conv3d(4, 4, *shape, padding=0, support="reach")
    sentence = "reaches over 3 cells on axis 0, and the grid has 2 there"
    with pytest.raises(ValueError, match=sentence):
        layer(FLAT)
    padded = nn.Conv3d(4, 4, *shape, padding=(1, 0, 0), support="reach")
    assert padded(FLAT).spatial_shape == (1, 6, 6)
    spec = ml.KernelSpec.of(3, kernel_size=3, padding=0)
    assert spec.output_shape((0, 6, 6), "reach") == (0, 4, 4)


# Activations of norms

KNOWN = (
    ("relu", nn.ReLU()),
    ("relu", mlx.nn.ReLU()),
    ("relu", mlx.nn.relu),
    ("relu", ops.relu),
    ("silu", nn.SiLU()),
    ("gelu", mlx.nn.gelu),
    ("gelu_tanh", nn.GELU("tanh")),
    ("leaky_relu(0.2)", nn.LeakyReLU(0.2)),
    ("elu(0.5)", mlx.nn.ELU(0.5)),
)
NORMS = (nn.BatchNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm(4), nn.LayerNorm(4))


def called(value) -> str:
    """An id that is the same in every process."""
    return getattr(value, "__name__", type(value).__name__)


@pytest.mark.parametrize("norm", NORMS, ids=called)
@pytest.mark.parametrize(("name", "layer"), KNOWN, ids=called)
def test_activations_by_name_or_by_layer(norm, name, layer):
    expected, found = (norm(X, activation=a).feats for a in (name, layer))
    assert mx.array_equal(expected, found)


@pytest.mark.parametrize("norm", NORMS, ids=called)
@pytest.mark.parametrize(
    "other",
    (mlx.nn.mish, nn.Tanh(), nn.GELU("fast"), 5),
    ids=("mish", "tanh", "fast", "int"),
)
def test_other_activations_are_refused(norm, other):
    with pytest.raises(TypeError, match="activation must be one of 'relu', .*; got"):
        norm(X, activation=other)
