"""Wrong arguments are refused in a sentence: what was expected, what came."""

import inspect

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from conftest import Numbers, pair

import mlx_lattice as ml
from mlx_lattice import io, models, nn, ops

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
HEADS = mx.ones((N, 4, 12))
LINE = ml.SparseTensor(mx.array([[0, 1]]), mx.ones((1, 8)))
TWICE = ml.SparseTensor(mx.array([[0, 1], [0, 1]]), mx.ones((2, 2)))
EDGE = ml.SparseTensor(mx.array([[0, 2**30]]), mx.ones((1, 2)))
POOLED = ops.max_pool3d(X, return_indices=True)
CROSS = nn.hyper_cross(3)
# With 8 channels.
X8 = X.replace(mx.random.normal((N, 8)))
Q8, KEYS8 = mx.random.normal((N, 2, 12)), mx.zeros((1, 5, 2, 12))
W8 = mx.zeros((8, 3, 3, 3, 8))
FACTS = {"c_in": 4, "c_out": 4, "n_in": 10}
LINEAR = {"weight": mx.zeros((2, 2)), "bias": mx.zeros(2)}
HALF, WHOLE = (ROWS[:, 0].astype(d) for d in (mx.float16, mx.int32))
RELATION, _ = pair(cases.Case("forward", 3, 2, 2))
AT = Numbers(RELATION, 4, 4)
HALF_DY = AT.dy.astype(mx.float16)


def load(state, model=None, mapping=None):
    model = nn.Linear(2, 2) if model is None else model
    return io.import_checkpoint(state, model, "spconv", mapping)


def crossed(lengths):
    return ops.cross_attention(Q, KEYS, KEYS, lengths=lengths)


def suppressed(*scores, **more):
    return ops.nms_rotated(BOXES, mx.array(scores or (1.0, 1.0)), 0.5, **more)


def kept(coords):
    return ml.SparseTensor(coords, X.feats, manager=X.manager, key=X.key)


def dense(mask):
    return ml.SparseTensor.from_dense(mx.ones((1, 2, 2, 3)), mask)


def serialized(patch, **more):
    return ops.serialized_attention(ROWS, ROWS, ROWS, X, patch, **more)


def edge_lists(*columns):
    return ml.Relation.from_edges(*columns, 2, 2, 3)


def attended(q, keys):
    return ops.cross_attention(q, keys, keys, X8)


def fine(**arguments):
    return ops.channel_to_space(X8, **arguments)


def sampled(points=BOXES[None, :, :3], **arguments):
    return ops.grid_sample_3d(X, points, **arguments)


def subm(shape, **arguments):
    return ops.subm_conv3d(X, mx.ones(shape), **arguments)


def forced(text, call=lambda: None):
    with ml.routes.only(text):
        call()


CASES = (
    (lambda: ml.quantize_weight(None), "must be an mlx array; got NoneType"),
    (lambda: ml.dequantize_weight(W8), "takes a QuantizedWeight; got array"),
    (lambda: ml.calibrate(None, [X]), "calibrate takes a model; got NoneType"),
    (lambda: ml.calibrate(nn.Sequential(), X8), "a list of .* got one SparseTensor"),
    (lambda: ops.full_attention("Q", Q8, Q8, X8), "q must be an array .* got str"),
    (lambda: ml.Problem.forward(**FACTS, groups=2.0), "groups must be an int; got 2.0"),
    (
        lambda: ops.full_attention(Q8, Q8, Q8, X8.coords),
        "like must be a SparseTensor; got",
    ),
    (lambda: load({"weight": np.zeros((2, 2))}), "weight must be an mlx array; got nd"),
    (lambda: load(LINEAR, mapping=lambda _: 3), "the mapping makes 3 of weight"),
    (lambda: ml.quantize_weight(W8, group_size=32.0), "32, 64 or 128; got 32.0"),
    (lambda: nn.Upsample3d(2, mode="none"), r"mode must be one of \('linear',"),
    (lambda: ml.KernelSpec.of(3.0), "dims must be 1, 2, 3 or 4, .* got 3.0"),
    (
        lambda: ml.calibrate(nn.Sequential(nn.SubmConv3d(8, 8, 3)), [X]),
        "to be packed; kept in float:\n  layers.0: 8 input channels a group, fewer",
    ),
    (lambda: nn.SparseAttention(8, 2, order="spiral"), "order must be one of"),
    (lambda: nn.SparseAttention(8, 2, shift=1), "shift = 1 needs a window or a patch"),
    (lambda: models.MinkUNet(3, 5, stem=5), "stem must have a kernel size .* got 5"),
    (lambda: load(LINEAR | {"weight": mx.zeros((2, 2)) + 1j}), "it is complex64"),
    (
        lambda: load(LINEAR, nn.Linear(2, 2).to_quantized(32, 8)),
        "the model is quantised; import into the float model",
    ),
    (lambda: suppressed(labels=mx.ones(3)), r"labels must be \(2,\), one a box"),
    (lambda: suppressed(pre=2.5), "pre must be an int; got 2.5"),
    (lambda: ops.nms_rotated(BOXES, ONES, mx.ones(3)), r"threshold must be .*\(2,\)"),
    (lambda: crossed(mx.array([1.5])), r"lengths must have shape \(1,\), integers"),
    (lambda: ops.batch_norm(X, eps=-1), "eps must be 0 or more; got -1"),
    (lambda: ops.rms_norm(X, eps="a"), "eps must be a number; got 'a'"),
    (lambda: ops.layer_norm(X, mx.ones(3)), r"weight and bias must have shape \(4,\)"),
    (lambda: ops.prelu(X, mx.ones(5)), r"alpha must have shape \(1,\) or \(4,\)"),
    (lambda: ops.cat(X), "cat takes a list of tensors; got SparseTensor"),
    (lambda: ops.batch([]), "batch needs at least one tensor; got none"),
    (lambda: serialized(2**31), "patch must be below 2.31 and shift below patch; got"),
    (lambda: nn.BatchNorm(4.0), "num_features must be an int; got 4.0"),
    (lambda: nn.Dropout(1), "p must be from 0 to below 1; got 1"),
    (lambda: nn.Conv3d(4, 8, 3, dilation=2**31), "less than 2\\^31 cells"),
    (lambda: models.PTv3(4, 5, order=()), "order must name one curve or more"),
    (lambda: nn.SubmConv3d(4, 8, offsets=[(0.9, 0, 0), (1, 0, 0)]), "tuples of ints"),
    (lambda: ml.SparseTensor(None, X.feats), "coords must be an array of MLX or NumPy"),
    (lambda: kept(COORDS + 1), "is the key of other coordinates, .*Leave the key out"),
    (lambda: dense(mx.ones((1, 2, 2))), r"mask must have shape \(1, 2, 2\), bool; got"),
    (lambda: ml.select(X), "select takes a Problem, .*; got SparseTensor"),
    (lambda: ml.integer_weight(W, scale=[1.0]), r"scale must have shape \(8,\), one"),
    (lambda: ops.union(X, Y), "union needs tensors of equal channels; got 4 and 5"),
    (lambda: X.to_dense((2**31, 4, 4)), "1 x 2147483648 x 4 x 4 cells has 2\\^31 or"),
    (lambda: nn.Linear(5, 3)(X), r"in_channels = 5; got features of shape \(32, 4\)"),
    (
        lambda: X.replace(ONES),
        r"feats must have shape .* N = 32, the rows of .* \(2,\)",
    ),
    (lambda: ops.subm_conv3d(X.replace(HALF), W), r"\(float16\) .* \(float32\) must"),
    (lambda: subm((4, 3, 3, 3, 4), bias=HALF[0]), r"bias \(float16\) must have one"),
    (lambda: subm((4, 3, 3, 3, 5)), "4 channels do not fit .* groups = 1: .* C_in = 5"),
    (lambda: subm((4, 3, 3, 3, 4), groups=2), "groups = 2: expected C_in = 8"),
    (lambda: subm((4, 2, 2, 2, 4)), r"\(2, 2, 2\) is not kernel_size \(3, 3, 3\)"),
    (
        lambda: subm((8, 4, 4)),
        "the weight has 8 offsets, the kernel 27; expected shape",
    ),
    (lambda: subm((4, 3, 3, 3, 4), bias=mx.zeros(3)), r"bias must have shape \(4,\)"),
    (lambda: subm((2, 4, 4), offsets=[(0, 0, 1)] * 2), r"\(0, 0, 1\) comes twice"),
    (lambda: ops.subm_conv2d(X, W), "subm_conv2d got a tensor with 3 .* the 3d name"),
    (lambda: ml.weight_grad(AT.x, HALF_DY, RELATION), r"dy \(float16\) must have one"),
    (lambda: ml.conv(AT.x, AT.w, RELATION, groups=3), "groups = 3"),
    (lambda: ml.conv(AT.dy, AT.w, RELATION), r"features must have shape \(N, C\) with"),
    (lambda: ml.weight_grad(AT.x, AT.x, RELATION), r"dy must have shape \(N, C\) with"),
    (lambda: ml.conv(AT.x, AT.w[:7], RELATION), r"with K = 8, .* got \(7, 4, 4\)"),
    (lambda: ml.conv(AT.x, AT.w, mx.zeros((5, 27))), "relation must be a Relation"),
    (lambda: edge_lists([0, 1], [0], [0, 0]), "one entry an edge; got lengths 2, 1"),
    (lambda: edge_lists([0, 2], [0, 1], [0, 0]), r"in_rows must lie in \[0, 2\)"),
    (lambda: edge_lists([0, 1], [-1, 1], [0, 0]), r"out_rows must lie in .* -1 to 1"),
    (lambda: edge_lists([0, 1], [0, 1], [0, 3]), r"offsets must lie in .* got 0 to 3"),
    (lambda: edge_lists([0.5, 1], [0, 1], [0, 0]), "1-D integer arrays; .*float32"),
    (
        lambda: forced("pointwise", lambda: ml.conv(AT.x, AT.w, RELATION)),
        "route pointwise was forced but cannot run the forward of",
    ),
    (lambda: nn.Conv3d(5, 4, 3, groups=2), "input channels .5."),
    (lambda: nn.Conv3d(4, 4, 3, support="dense"), "support must be"),
    (lambda: nn.Conv2d(4, 4, 3)(X), "Conv2d got a tensor with 3 .* use the 3d name"),
    (
        lambda: nn.SubmConv3d(4, 4, 3)(ml.SparseTensor(X.coords[:, 1:], X.feats)),
        "2 spatial axes; .* The first column of coords is the batch index",
    ),
    # Attention
    (
        lambda: ops.full_attention(HEADS.astype(mx.float16), HEADS, HEADS, X),
        "one dtype",
    ),
    (lambda: ops.full_attention(HEADS, None, None, X), "in one array must have shape"),
    (lambda: ops.full_attention(HEADS[1:], HEADS, HEADS, X), "must have shapes"),
    (
        lambda: ops.full_attention(HEADS, HEADS[:, :3], HEADS[:, :3], X),
        "divisor of head",
    ),
    (lambda: serialized(4, table=mx.zeros((15, 3))), "table must have shape"),
    (lambda: ops.rotary(HEADS[..., :5], X), "even head dimension"),
    (lambda: ops.rotary(HEADS[..., :8], X, pairs="halves"), "multiple of 6 channels"),
    (
        lambda: ops.rotary(HEADS, X, positions=mx.zeros((N, 2))),
        "positions must have sh",
    ),
    (lambda: attended(Q8[1:], KEYS8), r"shapes \(32, heads, D\)"),
    (
        lambda: attended(Q8, KEYS8[:0]),
        "1 batch elements, and there are sequences for 0",
    ),
    (
        lambda: ops.modulate(X, mx.ones((3, 4)), mx.ones((2, 4))),
        r"expected \(1, 4\) for",
    ),
    (lambda: nn.CrossAttention(16, 3), r"heads \(3\) must divide the channels \(16\)"),
    # Channels, pooling and neighbours
    (lambda: ops.channel_avg_pool(X, 3), "divisor of the 4"),
    (lambda: ops.channel_to_space(X), "multiple of 8 channels"),
    (lambda: ops.space_to_channel(X, order="xyz"), "order must be one of"),
    (lambda: fine(subdivision=mx.ones((N, 8))), "8\\) bool"),
    (lambda: fine(subdivision=X8.feats > 0, coordinates=X8), "not both"),
    (lambda: fine(coordinates=[[0, 1, 2]]), r"must have shape \(M, 4\), a batch index"),
    (lambda: fine(coordinates=LINE), "spatial axes, the tensor"),
    (lambda: ops.space_to_channel(TWICE), "must be unique"),
    (lambda: ops.channel_to_space(EDGE, subdivision=[[True, True]]), "beyond int32"),
    (lambda: ops.sum_pool_transpose3d(X), "no coordinates of stride"),
    (lambda: ops.max_unpool(X, POOLED[1]), "features on the pooled rows"),
    (lambda: ops.radius_neighbours(X, np.inf), "radius must be finite; got inf"),
    (lambda: ops.knn(ROWS[:, 0], 1, mx.zeros((2, 3))), "as many columns; got 4 and 3"),
    (lambda: ops.knn(ROWS[:, 0], 1, COORDS), "both be integers or both floats"),
    (lambda: ops.knn(ROWS[:, 0] / 0, 1), "must be finite"),
    (lambda: ops.knn(ROWS[:, 0] + 0.5, 1), "put a column of zeros before"),
    # Interpolation and dense maps
    (lambda: ops.interpolate(X, ONES, mode="cubic"), "mode must be"),
    (lambda: ops.interpolate(X, mx.zeros((2, 3))), r"\(Q, 4\)"),
    (lambda: ops.interpolate(X, mx.full((2, 4), np.nan)), "finite and within int32"),
    (lambda: sampled(mx.ones((2, 5, 2))), r"\(B, \.\.\., 3\)"),
    (lambda: sampled(mx.ones((9, 3))), r"got \(9, 3\), and x has 1: .* points\[None\]"),
    (lambda: ops.grid_sample_3d(LINE, mx.ones((1, 5, 3))), "1 spatial axes"),
    (lambda: nn.ToBEV()(X), "needs the extents of the map"),
    # Offsets of a kernel
    (
        lambda: nn.SubmConv3d(4, 6, 3, offsets=CROSS),
        "offsets replace kernel_size and dilation",
    ),
    (lambda: nn.SubmConv3d(4, 6), "needs kernel_size or offsets"),
)


@pytest.mark.parametrize(("call", "sentence"), CASES)
def test_sentences(call, sentence):
    kinds = TypeError, ValueError, ml.RouteError
    with pytest.raises(kinds, match=f"(?s){sentence}"):
        call()


def test_a_nan_is_the_least_score():
    assert suppressed(np.nan, 1.0).tolist() == [1]
    assert ops.sort_scores(mx.array([np.nan, -np.inf, 1.0])).tolist() == [2, 0, 1]


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


# Any function or layer

FUNCTIONS = [name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))]


def called(function, first) -> None:
    """Call with ``first``, and arrays for whatever else has no default."""
    asked = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    function(first, *(mx.ones((8, 3, 3, 3, 4)) for _ in asked[1:]))


def kind(value) -> str:
    """An id that is the same in every process."""
    return type(value).__name__


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("first", (None, "rows", 3.5, object()), ids=kind)
def test_functions(name, first):
    with pytest.raises((TypeError, ValueError)) as caught:
        called(getattr(ops, name), first)
    message = str(caught.value)
    assert "incompatible function" not in message, message
    assert "unsupported operand" not in message, message
    assert "has no " not in message and "not subscriptable" not in message, message


LAYERS = (
    nn.Conv3d(4, 8, 3),
    nn.SubmConv3d(4, 8, 3),
    nn.ConvTranspose3d(4, 8),
    nn.GenerativeConvTranspose3d(4, 8),
    nn.MaxPool3d(2),
    nn.GroupNorm(2, 4),
)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_layers_want_a_tensor(layer):
    with pytest.raises(TypeError, match="x must be a SparseTensor; got array"):
        layer(mx.ones((5, 4)))


@pytest.mark.parametrize(
    "run",
    (
        lambda x: ops.subm_conv3d(x, mx.ones((4, 3, 3, 3, 4))),
        lambda x: ops.max_pool3d(x, 2, 2),
        lambda x: ops.avg_pool3d(x, 2, 2),
        ops.global_sum_pool,
        lambda x: ops.group_norm(x, 2),
        ops.instance_norm,
        ops.unique_sum,
        lambda x: ops.channel_avg_pool(x, 2),
        lambda x: ops.interpolate(x, mx.zeros((1, 4))),
    ),
)
def test_flags_are_not_added_up(run):
    sentence = "x must have floating features; got bool. Cast them with .astype"
    with pytest.raises(TypeError, match=sentence):
        run(X.replace(X.feats > 0))


# Parameters of other shapes, on every backend: kernels of a GPU would read beyond them

NORM_LAYERS = {
    "batch": nn.BatchNorm,
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "group": lambda c: nn.GroupNorm(2, c),
    "instance": lambda c: nn.InstanceNorm(c, affine=True),
}


def scan(rows):
    coords = mx.array(cases.geometry("surface", 3, rows, 1))
    feats = mx.random.normal((len(coords), 8), key=mx.random.key(1))
    return ml.SparseTensor(coords, feats)


@pytest.mark.parametrize("size", (1, 5, 16))
@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("name", NORM_LAYERS)
def test_norms(name, training, size):
    conv = nn.SubmConv3d(8, 8, 3)
    for rows in (20, 400):
        x = scan(rows)
        for parameter in NORM_LAYERS[name](8).parameters():
            norm = NORM_LAYERS[name](8).train(training)
            norm[parameter] = mx.ones((size,))
            for given in (x, conv(x)):
                with pytest.raises(ValueError, match=rf"(\(8,\)|, 8\)).*\({size},\)"):
                    mx.eval(norm(given).feats)


@pytest.mark.parametrize("shape", ((1,), (4,), (2, 5), (8,)))
@pytest.mark.parametrize("of", ("q_rms_norm", "k_rms_norm"))
def test_scales_of_heads(of, shape):
    sentence = "2 heads of 4 channels must have shape"
    attention, x = nn.SparseAttention(8, 2, qk_rms_norm=True), scan(20)
    attention[of].gamma = mx.ones(shape)
    with pytest.raises(ValueError, match=sentence):
        attention(x)
    across = nn.CrossAttention(8, 2, 8, qk_rms_norm=True)
    across[of].gamma = mx.ones(shape)
    with pytest.raises(ValueError, match=sentence):
        across(x, mx.ones((1, 3, 8)))
