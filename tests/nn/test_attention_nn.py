"""nn.SparseAttention and its block: what they compute, names, training, half, int8."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from mlx.utils import tree_flatten
from reference_attention import dense, tensor, turned

from mlx_lattice import nn, ops

LAYERS = {
    "full": {},
    "window": {"window": 3, "shift": 1, "rope": True},
    "patch": {"patch": 7, "order": "morton", "qk_rms_norm": True, "bias": False},
}


def wide(name="batches", channels=16):
    x = tensor(name)
    return x.replace(mx.array(cases.features(len(x), channels)))


def test_module_is_what_it_says():
    x = wide()
    for options in LAYERS.values():
        layer = nn.SparseAttention(16, 2, **options)
        for norm in ("q_rms_norm", "k_rms_norm"):
            if norm in layer:
                layer[norm].gamma = mx.array(cases.features(2, 8) ** 2)
        qkv = np.array(layer.to_qkv(x).feats, np.float64).reshape(-1, 3, 2, 8)
        q, k, v = qkv.transpose(1, 0, 2, 3)
        if "q_rms_norm" in layer:
            q, k = (
                a / np.sqrt((a**2).mean(-1, keepdims=True)) * np.array(layer[n].gamma)
                for a, n in ((q, "q_rms_norm"), (k, "k_rms_norm"))
            )
        coords = np.array(x.coords)
        if options.get("rope"):
            q, k = turned(q, coords), turned(k, coords)
        found = [(b,) for b in coords[:, 0].tolist()]
        if "window" in options:
            cells = np.floor_divide(coords + [0, 1, 1, 1], [1, 3, 3, 3])
            found = [tuple(c) for c in cells.tolist()]
        if "patch" in options:
            along, seen = np.array(ops.curve_order(x, "morton")), {}
            for row in along.tolist():
                b = coords[row, 0]
                seen[b] = seen.get(b, -1) + 1
                found[row] = (b, seen[b] // 7)
        y = dense(q, k, v, found)[0].reshape(len(x), 16)
        out = layer.to_out
        weight, bias = (np.array(p, np.float64) for p in (out.weight, out.bias))
        ref.assert_close(layer(x).feats, y @ weight.T + bias)
        assert layer(x).key == x.key


@pytest.mark.parametrize("kind", LAYERS)
def test_block_trains_saves_and_takes_few_rows(kind, tmp_path):
    block = nn.SparseTransformerBlock(16, 2, **LAYERS[kind])
    loss = lambda net, x: (net(x).feats - 1).square().mean()  # noqa: E731
    step = mlx.nn.value_and_grad(block, loss)
    _, grads = step(block, wide())
    flat = dict(tree_flatten(grads))
    assert flat.keys() == dict(tree_flatten(block.trainable_parameters())).keys()
    for path, grad in flat.items():
        assert mx.isfinite(grad).all().item(), path
        # A bias of the keys moves all scores of a row alike.
        assert mx.abs(grad).max().item() > 0, path
    for rows in ("empty", "one"):
        x = wide(rows)
        assert block(x).shape == x.shape
        grads = mx.grad(lambda f, x=x: block(x.replace(f)).feats.sum())(x.feats)
        assert mx.isfinite(grads).all().item()
    path = str(tmp_path / "block.safetensors")
    block.save_weights(path)
    other = nn.SparseTransformerBlock(16, 2, **LAYERS[kind])
    other.load_weights(path, strict=True)
    assert mx.array_equal(other(wide()).feats, block(wide()).feats).item()


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_block_in_half_precision(dtype):
    block = nn.SparseTransformerBlock(16, 2, window=3, rope=True, qk_rms_norm=True)
    x = wide()
    expected = np.array(block(x).feats)
    block.set_dtype(getattr(mx, dtype))
    y = block(x.astype(getattr(mx, dtype)))
    assert y.dtype == getattr(mx, dtype)
    ref.assert_close(y.feats, expected, "bfloat16")
    large = x.replace(mx.full(x.shape, 3e4)).astype(getattr(mx, dtype))
    assert mx.isfinite(block(large).feats).all().item()


def test_block_is_quantised_and_wrong_arguments_are_refused():
    x = wide(channels=32)
    block = nn.SparseTransformerBlock(32, 2, patch=8)
    expected = np.array(block(x).feats)
    mlx.nn.quantize(block, group_size=32, bits=8)
    assert isinstance(block.attn.to_qkv, nn.QuantizedLinear)
    assert np.abs(np.array(block(x).feats) - expected).max() < 0.1
    with pytest.raises(ValueError, match="must divide"):
        nn.SparseAttention(16, 3)
    with pytest.raises(ValueError, match="not both"):
        nn.SparseAttention(16, 2, window=2, patch=2)
