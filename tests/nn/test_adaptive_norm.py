"""Cross-attention, adaptive norms and their block as modules."""

import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from mlx.utils import tree_flatten
from training import every_parameter_gets_a_gradient, lowers_the_loss

import mlx_lattice as ml
from mlx_lattice import nn
from mlx_lattice.models import trellis2


def tensor(sizes=(6, 3), channels=16):
    batch = mx.array(np.repeat(np.arange(len(sizes)), sizes).astype(np.int32))
    places = mx.arange(len(batch), dtype=mx.int32)
    coords = mx.stack([batch, places, places // 2, places // 3], axis=1)
    feats = mx.random.normal((len(batch), channels))
    return ml.SparseTensor(coords, feats, batch_size=len(sizes))


def test_cross_attention_of_rows_and_of_sequences():
    """The same numbers for a tensor and for sequences, of tokens of three forms."""
    net, x = nn.CrossAttention(16, 2, 8, qk_rms_norm=True), tensor((4, 4))
    tokens = tensor((5, 2), 8)
    padded, lengths = ml.ops.to_sequences(tokens)
    y = net(x, tokens)
    assert y.key == x.key
    for context, counts in ((padded, lengths), (padded + 0, mx.array([5, 2]))):
        assert mx.array_equal(net(x, context, counts).feats, y.feats).item()
    dense = net(x.feats.reshape(2, 4, 16), padded, lengths)
    assert mx.allclose(dense.reshape(8, 16), y.feats, atol=1e-6).item()
    names = {name for name, _ in tree_flatten(net.parameters())}
    assert {"to_q.weight", "to_kv.bias", "k_rms_norm.gamma"} < names
    with pytest.raises(ValueError, match="has its own lengths"):
        net(x, tokens, lengths)
    with pytest.raises(ValueError, match=r"shape \(B, M, C\); got \(5, 8\)"):
        net(x, padded[0])
    with pytest.raises(ValueError, match=r"heads \(3\) must divide the channels"):
        nn.CrossAttention(16, 3)


@pytest.mark.parametrize("affine", (False, True))
@pytest.mark.parametrize("sizes", ((9,), (6, 3)))
def test_one_shift_and_scale_are_those_of_the_norm(sizes, affine):
    """The same as by ``modulate``, and so are the gradients."""
    net, x = nn.AdaptiveLayerNorm(16, affine=affine), tensor(sizes)
    if affine:
        net.weight, net.bias = mx.random.normal((2, 16))
    shift, scale = mx.random.normal((1, 16)), mx.random.normal((1, 16))

    def apart(feats, shift, scale):
        return ml.ops.modulate(
            nn.LayerNorm.__call__(net, x.replace(feats)), shift, scale
        )

    def whole(feats, shift, scale):
        return net(x.replace(feats), shift, scale)

    given, dy = [x.feats, shift, scale], [mx.random.normal((9, 16))]
    found, wanted = (
        mx.vjp(lambda *a, f=f: f(*a).feats, given, dy) for f in (whole, apart)
    )
    for a, b in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True):
        ref.assert_close(a, ref.to_numpy(b))


def test_adaptive_layer_norm():
    net, x = nn.AdaptiveLayerNorm(16), tensor()
    shift, scale = mx.random.normal((2, 16)), mx.random.normal((2, 16))
    y = net(x, shift, scale)
    feats = np.array(x.feats, np.float64)
    feats = feats - feats.mean(axis=1, keepdims=True)
    feats /= np.sqrt((feats**2).mean(axis=1, keepdims=True) + 1e-6)
    batch = np.array(x.coords[:, 0])
    expected = feats * (1 + np.array(scale)[batch]) + np.array(shift)[batch]
    ref.assert_close(y.feats, expected)
    assert not tree_flatten(net.parameters())
    for rows in (6, 4):  # as many columns as lie in whole vectors, and not
        dense = net(x.feats[None, :rows], shift[:1], scale[:1])[0]
        assert mx.allclose(dense, y.feats[:rows], atol=1e-6).item()


@pytest.mark.parametrize("share_mod", (False, True))
def test_the_block(share_mod):
    net = nn.ModulatedTransformerBlock(
        16, 2, 8, share_mod=share_mod, rope=True, qk_rms_norm=True
    )
    x, tokens = tensor(), mx.random.normal((2, 5, 8))
    condition = mx.random.normal((2, 96 if share_mod else 16))
    names = {name for name, _ in tree_flatten(net.parameters())}
    own = {"modulation"} if share_mod else {"adaLN_modulation.1.weight"}
    assert own < names and "norm2.weight" in names and "norm1.weight" not in names
    if not share_mod:  # zeros at first: nothing passes but the attention to tokens
        y = x + net.cross_attn(net.norm2(x), tokens)
        assert mx.allclose(net(x, condition, tokens).feats, y.feats, atol=1e-6).item()
        net.adaLN_modulation[1].weight = 0.3 * mx.random.normal((96, 16))

    def objective(net):
        return (net(x, condition, tokens).feats - mx.ones((9, 16))).square().mean()

    every_parameter_gets_a_gradient(net, objective)
    lowers_the_loss(net, objective)


def test_places_that_are_added():
    net = trellis2.SLatFlowModel(8, 4, 20, 8, 4, 1, 2)
    net.out_layer.weight = mx.random.normal((4, 20))
    x, tokens = tensor(channels=4), mx.zeros((2, 3, 8))
    moved = ml.SparseTensor(x.coords + mx.array([0, 1, 0, 0]), x.feats)
    y, other = net(x, 500.0, tokens), net(moved, 500.0, tokens)
    assert y.shape == (9, 4) and not mx.allclose(y.feats, other.feats).item()
    features = trellis2.transformer.place_features(x.coords[:, 1:], 20)
    at = np.array(x.coords[:, 1:], np.float64)[:, :, None]
    angle = at * 10000.0 ** (-np.arange(3) / 3)
    expected = np.concatenate([np.sin(angle), np.cos(angle)], axis=2).reshape(9, 18)
    ref.assert_close(features[:, :18], expected)
    assert not mx.any(features[:, 18:]).item()
