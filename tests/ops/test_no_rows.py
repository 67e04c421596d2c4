"""A gradient goes through what has no rows: where processes exchange within a backward
pass, as those of ``nn.SyncBatchNorm`` do, all wait for one that leaves that out.
"""

import cases
import mlx.core as mx
import numpy as np
import pytest
from conftest import mappable

import mlx_lattice as ml
from mlx_lattice import nn, ops

C, HEADS = 8, 2
OTHER = np.array([[0, 0, 0, 0], [1, 2, 2, 2]], np.int32)
HALF = np.array([0, 0.5, 0.5, 0.5])
ACTIVATIONS = (
    "celu", "elu", "gelu", "gelu_fast_approx", "glu", "hard_tanh", "hardswish",
    "leaky_relu", "log_softmax", "mish", "relu", "relu6", "selu", "sigmoid", "silu",
    "softmax", "softplus", "softsign", "tanh",
)  # fmt: skip


def attended(x):
    q = x.feats.reshape(-1, HEADS, C // HEADS)
    return ops.full_attention(q, q, q, x)


def up_and_down(x):
    down = nn.Conv3d(C, C, 2, stride=2)
    return nn.ConvTranspose3d(C, C, 2)(down(x), x)


def beside(layer):
    """What is added to a layer's result, and follows another one."""
    return lambda x: ops.relu(layer(x.replace(feats=x.feats * 0 + 1)) + x)


def on_a_plane(x):
    shape = {"spatial_shape": (6, 6, 6), "batch_size": 2}
    return nn.ToBEV()(ml.SparseTensor(x.coords, x.feats, **shape))


def residual(norm):
    return lambda x: norm(x.replace(feats=mx.stop_gradient(x.feats)), residual=x)


CALLS = {
    "Linear": nn.Linear(C, 6),
    "SubmConv3d": nn.SubmConv3d(C, 6, 3),
    "depthwise": nn.SubmConv3d(C, C, 3, groups=C),
    "Conv3d": nn.Conv3d(C, 6, 3, stride=2, padding=1),
    "generative": nn.GenerativeConvTranspose3d(C, 6, 2),
    "up and down": up_and_down,
    "beside a convolution": beside(nn.SubmConv3d(C, C, 3)),
    "AvgPool3d": nn.AvgPool3d(2, 2),
    "MaxPool3d": nn.MaxPool3d(2, 2),
    "global_avg_pool": ops.global_avg_pool,
    "upsample_linear3d": lambda x: ops.upsample_linear3d(nn.AvgPool3d(2, 2)(x), 2, x),
    "interpolate": lambda x: ops.interpolate(x, mx.array(OTHER + HALF)),
    "prune": lambda x: ops.prune(x, mx.zeros((len(x),), mx.bool_)),
    "union": lambda x: ops.union(x, ml.SparseTensor(mx.array(OTHER), mx.ones((2, C)))),
    "top_k": lambda x: ops.top_k(x, x.feats[:, 0], 3),
    "cat": lambda x: ops.cat([x, x]),
    "to_sequences": lambda x: ops.to_sequences(x)[0],
    "to_dense": lambda x: x.to_dense((6, 6, 6)),
    "ToBEV": on_a_plane,
    "GridPooling": nn.GridPooling(C, 6, 2),
    "LayerNorm": nn.LayerNorm(C),
    "GroupNorm": nn.GroupNorm(HEADS, C),
    "BatchNorm": nn.BatchNorm(C),
    "beside BatchNorm": residual(nn.BatchNorm(C)),
    "SparseAttention": nn.SparseAttention(C, HEADS),
    "full_attention": attended,
    "CrossAttention": lambda x: nn.CrossAttention(C, HEADS)(x, mx.ones((2, 4, C))),
    **{name: getattr(ops, name) for name in ACTIVATIONS},
}


@pytest.mark.parametrize("rows", (0, 30))
@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_goes_through(name, rows):
    coords, asked = mx.array(cases.in_grid((6, 6, 6), 30, 0)[:rows]), []
    x = ml.SparseTensor(coords, mx.ones((len(coords), C)), batch_size=2)
    before = mx.custom_function(lambda x: x * 1)

    @before.vjp
    def vjp(x, dy, _):
        asked.append(dy)
        return dy

    def loss(feats):
        y = CALLS[name](x.replace(feats=before(feats)))
        return (y.feats if isinstance(y, ml.SparseTensor) else y).sum()

    gradient = mx.grad(loss)(x.feats)
    assert gradient.shape == x.feats.shape and mx.isfinite(gradient).all()
    assert asked


W, W2 = mx.ones((8, 3, 3, 3, 8)), mx.ones((8, 2, 2, 2, 8))
NONE = ml.SparseTensor(mx.zeros((0, 4), dtype=mx.int32), mx.zeros((0, 8)), batch_size=2)
SOME = ml.SparseTensor(mx.array([[0, 1, 2, 3], [1, 0, 0, 0]]), mx.ones((2, 8)))
MAPPED = {
    "subm": lambda x: ops.subm_conv3d(x, W),
    "strided": lambda x: ops.conv3d(x, W2, kernel_size=2, stride=2),
    "generative": lambda x: ops.generative_conv_transpose3d(x, W2),
    "packed": lambda x: ops.subm_conv3d(
        x, ml.quantize_weight(W, bits=8, group_size=32)
    ),
    "max": lambda x: ops.max_pool3d(x, 2),
    "unpool": lambda x: ops.max_unpool(*ops.max_pool3d(x, 2, return_indices=True)),
    "global max": ops.global_max_pool,
    "union": lambda x: ops.union(x, SOME),
    "channels": lambda x: ops.space_to_channel(x, 2),
    "interpolate": lambda x: ops.interpolate(x, mx.zeros((3, 4))),
    "devoxelize": lambda x: ops.devoxelize(x, mx.array([-1, -1])),
    "upsample": lambda x: ops.upsample_linear3d(ops.max_pool3d(x, 2), 2, NONE),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap(name):
    """MLX takes no element of an array without numbers."""

    def call(feats):
        made = MAPPED[name](NONE.replace(feats))
        return getattr(made, "feats", made)

    one = call(NONE.feats)
    with mappable():
        y = mx.vmap(call)(mx.zeros((3, 0, 8)))
        grads = mx.vmap(mx.grad(lambda f: call(f).sum()))(mx.zeros((3, 0, 8)))
    assert y.shape == (3, *one.shape) and grads.shape == (3, 0, 8)
    assert all(mx.array_equal(each, one) for each in y)


@pytest.mark.parametrize("rows", (SOME, NONE), ids=("rows", "no rows"))
@pytest.mark.parametrize("name", ("subm", "interpolate", "devoxelize", "upsample"))
def test_vmap_over_nothing(name, rows):
    """The shapes of what a call gives, of which there are none."""
    if name == "subm" and len(rows) and ml.devices.current().backend != "cpu":
        pytest.skip("convolutions of rows are mapped on the CPU alone")

    def call(feats):
        made = MAPPED[name](rows.replace(feats))
        return getattr(made, "feats", made)

    one = call(rows.feats)
    with mappable():
        y = mx.vmap(call)(mx.zeros((0, *rows.feats.shape)))
    assert y.shape == (0, *one.shape) and y.dtype == one.dtype
