"""Wrong types, shapes and dtypes are sentences: packing, attention, nets, importers."""

import cases
import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import io, models, nn, ops


def tensor(channels=8, n=20):
    coords = cases.geometry("negative", 3, n)
    feats = mx.array(cases.features(len(coords), channels))
    return ml.SparseTensor(mx.array(coords), feats)


X = tensor()
N = len(X)
Q = mx.array(cases.features(N, 24).reshape(N, 2, 12))
KEYS = mx.zeros((X.batch_size, 5, 2, 12))
W = mx.zeros((8, 3, 3, 3, 8))
FACTS = {"c_in": 4, "c_out": 4, "n_in": 10}
PACKED = ml.quantize_weight(W, bits=8, group_size=32)
LINEAR = {"weight": mx.zeros((2, 2)), "bias": mx.zeros(2)}


def load(state, model=None, mapping=None):
    model = nn.Linear(2, 2) if model is None else model
    return io.import_checkpoint(state, model, "spconv", mapping)


def crossed(q, keys):
    return ops.cross_attention(q, keys, keys, X)


def decoder(**options):
    return models.SparseVAEDecoder(7, (16, 8), 8, (1, 0), **options)


TYPES = (
    (lambda: ml.quantize_weight(None), "must be an mlx array; got NoneType"),
    (lambda: ml.quantize_weight(np.zeros((8, 8))), "be an mlx array; got ndarray"),
    (lambda: ml.dequantize_weight(W), "takes a QuantizedWeight; got array"),
    (lambda: ml.dequantize_weight(PACKED, mx.int32), "must be float32, .*got int32"),
    (lambda: PACKED.holding(None, None, None), "must be mlx arrays; got NoneType"),
    (lambda: ml.calibrate(None, [X]), "calibrate takes a model; got NoneType"),
    (lambda: ml.calibrate(nn.Sequential(), X), "a list of .* got one SparseTensor"),
    (lambda: ops.full_attention("Q", Q, Q, X), "q must be an array .* got str"),
    (lambda: ml.Problem.forward(**FACTS, groups=2.0), "groups must be an int; got 2.0"),
    (lambda: ops.subm_conv3d(X, W, groups=2.0), "groups must be an int; got 2.0"),
    (lambda: ops.full_attention(Q, None, Q, X), "k and v must be arrays.* got None"),
    (lambda: ops.full_attention(Q, Q, Q, X.coords), "like must be a SparseTensor; got"),
    (lambda: ops.window_attention(Q, Q, Q, X.coords, 2), "like must be a SparseTensor"),
    (lambda: ops.full_attention(*[Q.astype(mx.int32)] * 3, X), "got int32"),
    (lambda: ops.rotary(Q.astype(mx.int32), X), "got int32"),
    (lambda: nn.SparseAttention(8, 2)(X.feats), "x must be a SparseTensor; got array"),
    (lambda: ops.space_to_channel(X.feats), "x must be a SparseTensor; got array"),
    (lambda: ops.grid_sample_3d(X.feats, mx.zeros((1, 3))), "must be a SparseTensor"),
    (lambda: ops.prune_by_logits(X, None), "logits must be an array .* got NoneType"),
    (lambda: ops.prune_by_logits(X, X.feats[:, 0], keep=3), "keep must be an array"),
    (lambda: models.dual_grid(X.feats), "y must be a SparseTensor; got array"),
    (lambda: decoder()(X.feats), "x must be a SparseTensor; got array"),
    (lambda: decoder(dtype=mx.int32), "got int32"),
    (lambda: load({"weight": np.zeros((2, 2))}), "weight must be an mlx array; got nd"),
    (lambda: io.import_checkpoint({}, None, "spconv"), "must be a module; got NoneT"),
    (lambda: load(LINEAR, mapping=3), "a dict of prefixes or a function .* got int"),
    (lambda: load(LINEAR, mapping={"weight": 3}), "the mapping makes 3 of weight"),
    (lambda: load(LINEAR, mapping=lambda _: 3), "the mapping makes 3 of weight"),
    (lambda: io.convert_weight("a", "spconv", 3), "must be an mlx array; got str"),
    (lambda: ops.serialized_attention(Q, Q, Q, X, "a"), "patch must be an int .* 'a'"),
)
VALUES = (
    (lambda: ml.quantize_weight(W, bits="4"), "bits must be 4 or 8; got '4'"),
    (lambda: ml.quantize_weight(W, bits=4.0), "bits must be 4 or 8; got 4.0"),
    (lambda: ml.quantize_weight(W, group_size=32.0), "32, 64 or 128; got 32.0"),
    (lambda: ml.integer_weight(W, bits=4.0), "bits must be 4 or 8; got 4.0"),
    (lambda: ml.integer_weight(W, bits=8.0), "bits must be 4 or 8; got 8.0"),
    (
        lambda: ml.integer_weight(W, bits=4, group_size=32.0),
        "32, 64 or 128; got 32.0",
    ),
    (lambda: nn.AvgPool3d(2, count="none"), r"count must be one of \('active',"),
    (lambda: nn.Upsample3d(2, mode="none"), r"mode must be one of \('linear',"),
    (lambda: ml.KernelSpec.of(3.0), "dims must be 1, 2, 3 or 4, .* got 3.0"),
    (lambda: ml.KernelSpec.of(True), "dims must be 1, 2, 3 or 4, .* got True"),
    (lambda: models.MinkUNet14(3, 5, dims=3.0), "dims must be 1, 2, .* got 3.0"),
    (lambda: models.MinkUNet14(3, 5, dims=True), "dims must be 1, 2, .* got True"),
    (lambda: ml.QuantizedWeight(*PACKED.arrays, "8", 8, 32), "in_channels .* got '8'"),
    (lambda: ml.QuantizedWeight(*PACKED.arrays, 0, 8, 32), "in_channels must be .* 0"),
    (
        lambda: ml.calibrate(nn.Sequential(nn.SubmConv3d(8, 8, 3)), [X]),
        "to be packed; kept in float:\n  layers.0: 8 input channels a group, fewer",
    ),
    (lambda: ops.full_attention(*[Q[:, :0]] * 3, X), "heads, D.*got .*0, 12"),
    (lambda: ops.full_attention(*[Q[..., :0]] * 3, X), "heads, D.*got .*2, 0"),
    (lambda: crossed(Q[:, :0], KEYS), "heads, D.*got .*0, 12"),
    (lambda: crossed(Q[..., :0], KEYS[..., :0]), "heads, D.*got .*2, 0"),
    (lambda: crossed(Q, KEYS[:, :, :0]), "kv_heads a divisor of heads; got"),
    (lambda: ml.Problem.forward(**FACTS, groups=0), "groups must be 1 or more; got 0"),
    (lambda: ml.Problem.forward(**FACTS, groups=-1), "groups must be 1 or more"),
    (lambda: ops.subm_conv3d(X, W, groups=0), "groups must be 1 or more; got 0"),
    (lambda: io.convert_weight(W, "spconv", 3.0), "kernel_size must be an int or 3"),
    (lambda: io.convert_weight(W, "spconv", (3, 0, 3)), "kernel_size must be at least"),
    (lambda: ops.rotary(Q, X, base=0), "base must be above 0; got 0"),
    (lambda: nn.SparseAttention(8, 2, order="spiral"), "order must be one of"),
    (lambda: nn.SparseAttention(8, 2, shift=1), "shift = 1 needs a window or a patch"),
    (lambda: models.MinkUNet14(3, 5, dims=5), "dims must be 1, 2, 3 or 4, .* got 5"),
    (lambda: models.MinkUNet(3, 5, stem=5), "stem has a kernel size .* got 5"),
    (lambda: models.SparseVAEDecoder(7, (16, 8), 8, (-1, 0)), r"got .* \(-1, 0\)"),
    (lambda: models.SparseVAEDecoder(7, (), 8, ()), "one entry for each stage"),
    (lambda: load(LINEAR | {"weight": mx.zeros((2, 2)) + 1j}), "it is complex64"),
    (
        lambda: load(LINEAR, nn.Linear(2, 2).to_quantized(32, 8)),
        "the model is quantised; import into the float model",
    ),
)


@pytest.mark.parametrize(("call", "sentence"), TYPES)
def test_types(call, sentence):
    with pytest.raises(TypeError, match=sentence):
        call()


@pytest.mark.parametrize(("call", "sentence"), VALUES)
def test_values(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_groups_are_an_int_of_any_library():
    w, groups = mx.array(cases.features(8 * 27, 4).reshape(8, 27, 4)), np.int64(2)
    w = w.reshape(8, 3, 3, 3, 4)
    y = ops.subm_conv3d(X, w, groups=groups).feats
    assert mx.array_equal(y, ops.subm_conv3d(X, w, groups=2).feats)
    assert type(ml.Problem.forward(**FACTS, groups=groups).groups) is int
