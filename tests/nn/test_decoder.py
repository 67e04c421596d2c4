"""SparseVAEDecoder: names, guides, the smallest inputs. io/ has published results."""

import math

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from foreign_decoder import COUNTS, LATENT, OUT, WIDTHS, latents, published
from mlx.utils import tree_flatten
from training import every_parameter_gets_a_gradient

from mlx_lattice import io, models
from mlx_lattice.models.trellis2 import ConvNeXtBlock, UpBlock


def decoder(seed=0, **options):
    """A small one whose zero-initialised parameters are not zero."""
    mx.random.seed(seed)
    net = models.SparseVAEDecoder(OUT, WIDTHS, LATENT, COUNTS, **options)
    weights = []
    for name, p in tree_flatten(net.parameters()):
        scale = 0.3 if p.ndim == 1 else 1.2 * math.prod(p.shape[1:]) ** -0.5
        noise = mx.random.normal(p.shape) * scale
        weights.append((name, (noise + ("norm" in name)).astype(p.dtype)))
    return net.load_weights(weights)


def loss(net, x, **options):
    return net(x, **options).feats.square().sum()


def test_published_names_and_shapes():
    """Nothing is evaluated: the shape decoder has some 470 million parameters."""
    plan = (1024, 512, 256, 128, 64), (4, 16, 8, 4, 0), 32
    for net, out, predicted in (
        (models.SparseVAEDecoder(), 7, True),
        (models.SparseVAEDecoder(6, pred_subdiv=False), 6, False),
    ):
        shapes = {name: p.shape for name, p in tree_flatten(net.parameters())}
        assert shapes == published(*plan, out, predicted)


@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_a_state_dict_loads_as_it_is(dtype):
    """Half checkpoints too, whose stages become the net's dtype."""
    state = {
        name: mx.array(cases.features(math.prod(shape), 1, i).reshape(shape) * 0.05)
        for i, (name, shape) in enumerate(
            published(WIDTHS, COUNTS, LATENT, OUT).items()
        )
    }
    half = [n for n in state if n.startswith("blocks") and "norm" not in n]
    state |= {n: state[n].astype(getattr(mx, dtype)) for n in half}
    net = decoder().load_weights(list(state.items()), strict=True)
    assert net(latents()).dtype == mx.float32
    other = decoder(1)
    report = io.import_checkpoint(state, other, "trellis2")
    assert report.complete
    for name, p in tree_flatten(other.parameters()):
        assert mx.array_equal(p, state[name].astype(p.dtype)).item(), name


def test_blocks_start_as_nothing():
    """Zero-initialised branches: a ConvNeXt block is the identity, as published."""
    x = latents().replace(mx.array(cases.features(len(latents()), 16)))
    assert mx.array_equal(ConvNeXtBlock(16)(x).feats, x.feats).item()
    y, logits = UpBlock(16, 4)(x)
    sums = x.feats.reshape(len(x), 8, 2).sum(axis=2)
    kept = mx.where(logits.feats > 0, sums, 0).sum()
    assert (y.feats.sum() / 2).item() == pytest.approx(kept.item(), rel=1e-4)


def test_another_decoder_is_guided():
    """The texture decoder makes the rows that the shape decoder chose."""
    shape, x = decoder(), latents()
    y, subdivisions = shape(x, return_subdivisions=True)
    texture = decoder(2, pred_subdiv=False)
    elsewhere = latents()  # equal rows, another manager
    colours = texture(elsewhere, subdivisions=subdivisions)
    assert mx.array_equal(colours.coords, y.coords).item()
    masks = [s.feats > 0 for s in subdivisions]
    again = texture(x, subdivisions=masks)
    assert mx.array_equal(again.feats, colours.feats).item()
    fine = subdivisions[1].key  # rows of the first up-sampling
    by_rows = texture(x, coordinates=[fine, y])
    assert by_rows.key == y.key
    ref.assert_close(by_rows.feats, np.array(colours.feats))
    with pytest.raises(ValueError, match="does not predict"):
        texture(x)
    with pytest.raises(ValueError, match="predicts no subdivisions"):
        texture(x, subdivisions=masks, return_subdivisions=True)
    with pytest.raises(ValueError, match="2 entries"):
        shape(x, coordinates=[y])


def test_every_parameter_gets_a_gradient():
    def objective(net, x):
        y, logits = net(x, return_subdivisions=True)
        return y.feats.square().sum() + sum(s.feats.square().sum() for s in logits)

    every_parameter_gets_a_gradient(decoder(), objective, latents())


def test_nothing_left_is_legal():
    net = decoder()
    net.blocks[0][-1].to_subdiv.bias = mx.full((8,), -1e4)
    value, grads = mlx.nn.value_and_grad(net, loss)(net, latents())
    assert value.item() == 0 and net(latents()).shape == (0, OUT)
    for path, grad in tree_flatten(grads):
        assert not grad.any().item(), path


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_half_precision(dtype):
    net, x = decoder(), latents()
    masks = [s.feats > 0 for s in net(x, return_subdivisions=True)[1]]
    expected = np.array(net(x).feats)
    net.cast_torso(getattr(mx, dtype))
    for name, p in tree_flatten(net.parameters()):
        torso = name.startswith("blocks") and "norm" not in name
        assert p.dtype == (getattr(mx, dtype) if torso else mx.float32), name
    y = net(x, subdivisions=masks)
    assert y.dtype == mx.float32
    error = np.linalg.norm(np.array(y.feats) - expected)
    assert error < 3 * ref.TOLERANCE[dtype] * np.linalg.norm(expected)
    # Latents whose squares are beyond float16: a norm in half would give NaN.
    y = net(x.replace(x.feats * 2000))
    assert mx.isfinite(y.feats).all().item()
    whole = decoder()
    whole.set_dtype(getattr(mx, dtype))  # everything, the norms' parameters too
    y = whole(latents(dtype=dtype))
    assert y.dtype == getattr(mx, dtype) and mx.isfinite(y.feats).all().item()


def test_dual_grid_heads():
    y = latents().replace(mx.array(cases.features(len(latents()), 7)))
    parts = models.dual_grid(y, margin=0.5)
    f = np.array(y.feats, np.float64)
    ref.assert_close(parts.vertices.feats, 2 / (1 + np.exp(-f[:, :3])) - 0.5)
    ref.assert_close(parts.intersected.feats, f[:, 3:6])
    ref.assert_close(parts.split.feats, np.log1p(np.exp(f[:, 6:])))
    assert parts.vertices.key == y.key
    with pytest.raises(ValueError, match="7 channels"):
        models.dual_grid(latents())
