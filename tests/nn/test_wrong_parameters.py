"""Parameters of other shapes, as a checkpoint of another net has them: a sentence.

On every backend: kernels of a GPU would read beyond them.
"""

import cases
import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import nn

NORMS = {
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
@pytest.mark.parametrize("name", NORMS)
def test_norms(name, training, size):
    conv = nn.SubmConv3d(8, 8, 3)
    for rows in (20, 400):
        x = scan(rows)
        for parameter in NORMS[name](8).parameters():
            norm = NORMS[name](8).train(training)
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
