"""SparseVAEDecoder: TRELLIS.2's rules in float64, its names, the smallest inputs."""

import math

import cases
import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
import pytest
import reference as ref
import reference_rows as ref_rows
from foreign_decoder import COUNTS, LATENT, OUT, WIDTHS, latents, published
from mlx.utils import tree_flatten
from training import every_parameter_gets_a_gradient, lowers_the_loss

import mlx_lattice as ml
from mlx_lattice import io, models, nn
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


class Exact:
    """The decoder in float64: rows as tuples, TRELLIS.2's published rules."""

    def __init__(self, net):
        self.p = {
            name: ref.to_numpy(p).astype(np.float64)
            for name, p in tree_flatten(net.parameters())
        }

    def linear(self, name, x):
        return x @ self.p[f"{name}.weight"].T + self.p[f"{name}.bias"]

    def norm(self, name, x, eps=1e-6):
        y = ref_rows.layer_norm(x, eps)
        return y * self.p.get(f"{name}.weight", 1) + self.p.get(f"{name}.bias", 0)

    def conv(self, name, rows, x):
        relation = ref.relation("submanifold", rows, kernel_size=3)
        weight = ref.weight_kio(self.p[f"{name}.weight"])
        return ref.conv(x, weight, relation, self.p[f"{name}.bias"])

    def up(self, name, rows, x):
        logits = self.linear(f"{name}.to_subdiv", x)
        h = self.conv(f"{name}.conv1", rows, silu(self.norm(f"{name}.norm1", x)))
        fine, parent, cell = [], [], []
        for i, row in enumerate(rows.tolist()):
            for c in np.flatnonzero(logits[i] > 0).tolist():
                # The first axis counts fastest.
                inside = c % 2, c // 2 % 2, c // 4 % 2
                inside = [2 * v + o for v, o in zip(row[1:], inside, strict=True)]
                fine.append((row[0], *inside))
                parent.append(i), cell.append(c)
        order = sorted(range(len(fine)), key=fine.__getitem__)
        fine = ref.as_coords([fine[i] for i in order], 3)
        parent, cell = (np.array(a, int)[order] for a in (parent, cell))
        h = h.reshape(len(x), 8, -1)[parent, cell]
        skip = x.reshape(len(x), 8, -1)[parent, cell]
        skip = np.repeat(skip, h.shape[1] // skip.shape[1], axis=1)
        h = self.conv(f"{name}.conv2", fine, silu(self.norm("none", h)))
        return fine, h + skip, logits

    def __call__(self, rows, x):
        x, subdivisions = self.linear("from_latent", x), []
        for at, count in enumerate(COUNTS):
            for block in range(count):
                name = f"blocks.{at}.{block}"
                h = self.norm(f"{name}.norm", self.conv(f"{name}.conv", rows, x))
                h = silu(self.linear(f"{name}.mlp.0", h))
                x = x + self.linear(f"{name}.mlp.2", h)
            if at + 1 < len(COUNTS):
                rows, x, logits = self.up(f"blocks.{at}.{count}", rows, x)
                subdivisions.append(logits)
        return (
            rows,
            self.linear("output_layer", ref_rows.layer_norm(x, 1e-5)),
            subdivisions,
        )


def silu(x):
    return x / (1 + np.exp(-x))


def loss(net, x, **options):
    return net(x, **options).feats.square().sum()


@pytest.mark.parametrize("name", ("negative", "batches", "one"))
def test_is_the_published_decoder(name):
    net, x = decoder(), latents(name)
    y, subdivisions = net(x, return_subdivisions=True)
    rows, expected, logits = Exact(net)(np.array(x.coords), np.array(x.feats))
    np.testing.assert_array_equal(np.array(y.coords), rows)
    ref.assert_close(y.feats, expected)
    assert len(subdivisions) == 2 and subdivisions[0].key == x.key
    for found, wanted in zip(subdivisions, logits, strict=True):
        ref.assert_close(found.feats, wanted)
    assert y.batch_size == x.batch_size


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
    """Half checkpoints too: the stages then run in half, as published."""
    state = {
        name: mx.array(cases.features(math.prod(shape), 1, i).reshape(shape) * 0.05)
        for i, (name, shape) in enumerate(
            published(WIDTHS, COUNTS, LATENT, OUT).items()
        )
    }
    half = [n for n in state if n.startswith("blocks") and "norm" not in n]
    state |= {n: state[n].astype(getattr(mx, dtype)) for n in half}
    net = decoder().load_weights(list(state.items()), strict=True)
    x = latents()
    y = net(x)
    rows, expected, _ = Exact(net)(np.array(x.coords), np.array(x.feats))
    assert y.dtype == mx.float32
    np.testing.assert_array_equal(np.array(y.coords), rows)
    ref.assert_close(y.feats, expected, dtype)
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


def test_training_on_true_rows_lowers_the_loss():
    net, x = decoder(), latents()
    finest, chosen = decoder(5)(x, return_subdivisions=True)
    rows = [chosen[1].key, finest.key]
    truth = [s.feats > 0 for s in chosen]

    def objective(net, x):
        y, logits = net(x, coordinates=rows, return_subdivisions=True)
        bce = sum(
            mlx.nn.losses.binary_cross_entropy(
                s.feats, t.astype(mx.float32), reduction="mean"
            )
            for s, t in zip(logits, truth, strict=True)
        )
        return (y.feats - 1).square().mean() + bce

    lowers_the_loss(net, objective, x, rate=3e-3)


def test_every_parameter_gets_a_gradient():
    net = decoder()

    def objective(net, x):
        y, logits = net(x, return_subdivisions=True)
        return y.feats.square().sum() + sum(s.feats.square().sum() for s in logits)

    every_parameter_gets_a_gradient(net, objective, latents())


@pytest.mark.parametrize("dtype", ("float32", "float16"))
@pytest.mark.parametrize("rows", ("empty", "one"))
def test_few_rows(rows, dtype):
    net, x = decoder(dtype=getattr(mx, dtype)), latents(rows, batch_size=2)
    value, grads = mlx.nn.value_and_grad(net, loss)(net, x)
    assert mx.isfinite(value).item()
    for path, grad in tree_flatten(grads):
        assert mx.isfinite(grad).all().item(), path


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


def test_the_other_elements_of_a_batch_do_not_matter():
    net, x = decoder(), latents("batches")
    y = net(x)
    batch = np.array(x.coords)[:, 0]
    rows = mx.array(np.flatnonzero(batch == 2))
    alone = net(ml.SparseTensor(x.coords[rows], x.feats[rows]))
    mine = np.flatnonzero(np.array(y.coords)[:, 0] == 2)
    np.testing.assert_array_equal(np.array(alone.coords), np.array(y.coords)[mine])
    ref.assert_close(alone.feats, np.array(y.feats)[mine])


def test_saves_and_quantises(tmp_path):
    net, x = decoder(), latents()
    path = str(tmp_path / "net.safetensors")
    net.save_weights(path)
    other = decoder(1)
    other.load_weights(path, strict=True)
    assert mx.array_equal(other(x).feats, net(x).feats).item()
    wide = models.SparseVAEDecoder(OUT, (64, 32), 32, (1, 0))
    linear = lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0  # noqa: E731
    mlx.nn.quantize(wide, group_size=32, bits=8, class_predicate=linear)
    assert isinstance(wide.blocks[0][0].mlp[0], nn.QuantizedLinear)
    x = x.replace(mx.array(cases.features(len(x), 32)))
    assert mx.isfinite(wide(x).feats).all().item()
    wide.cast_torso(mx.float16)
    assert mx.isfinite(wide(x).feats).all().item()


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


def test_impossible_plans_are_refused():
    with pytest.raises(ValueError, match="one entry for each stage"):
        models.SparseVAEDecoder(7, (16, 8), 4, (1,))
    with pytest.raises(ValueError, match="multiple of 8"):
        models.SparseVAEDecoder(7, (12, 8), 4, (1, 1))
