"""Features of more than 2^31 elements: the last rows are those of a part alone.

A solid cube is cut: what its last planes give does not depend on planes before their
neighbours, so that a tensor of the last few planes has to give the same rows.
"""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import devices, nn, ops

CHANNELS = 128
PLANES, INNER = 4, 2  # of the part, and those of it whose neighbours it has
REPEATED = 997  # rows of features, over and over: a prime shifts them at every plane


def sides():
    """A cube that shows the test itself to be right, and one beyond int32."""
    gpu = mx.default_device() == devices.GPU and not devices.metal_on_host()
    info = mx.device_info(devices.GPU) if gpu else {}
    memory = max(info.get(key, 0) for key in ("memory_size", "total_memory"))
    why = "takes 22 GB of a GPU's memory"
    small = pytest.mark.skipif(memory < 60 << 30, reason=why)
    return 12, pytest.param(258, marks=small)


def features(first: int, count: int, seed: int = 0) -> mx.array:
    """Rows from the first on, each by its place in the cube."""
    rows = np.random.default_rng(seed).standard_normal((REPEATED, CHANNELS))
    places = mx.arange(first, first + count, dtype=mx.int32) % REPEATED
    return mx.array(rows.astype(np.float16))[places]


def planes(side: int, first: int) -> ml.SparseTensor:
    """The planes of a cube from one on."""
    count = (side - first) * side**2
    at = mx.arange(first * side**2, side**3, dtype=mx.int32)
    axes = at // side**2, at // side % side, at % side
    coords = mx.stack([mx.zeros((count,), dtype=mx.int32), *axes], axis=1)
    return ml.SparseTensor(coords, features(first * side**2, count))


@cache
def cut(side: int) -> tuple[ml.SparseTensor, ml.SparseTensor]:
    return planes(side, 0), planes(side, side - PLANES)


def half(module):
    module.set_dtype(mx.float16)
    return module.eval()


def gradient_of(layer):
    """The gradient of the features, by rows of it that are as random as they are."""

    def run(x: ml.SparseTensor) -> mx.array:
        side, count = round(float(x.coords[-1, 1].item())) + 1, len(x)
        given = features(side**3 - count, count, seed=1)
        return mx.vjp(lambda f: layer(x.replace(f)).feats, [x.feats], [given])[1][0]

    return run


def layers() -> dict:
    mx.random.seed(0)
    conv, norm = (
        half(nn.SubmConv3d(CHANNELS, CHANNELS, 3)),
        half(nn.BatchNorm(CHANNELS)),
    )
    depthwise = half(nn.SubmConv3d(CHANNELS, CHANNELS, 3, groups=CHANNELS))
    down = half(nn.Conv3d(CHANNELS, CHANNELS, 2, stride=2))
    up = half(nn.ConvTranspose3d(CHANNELS, CHANNELS, 2, stride=2))
    line, pointwise = half(nn.LayerNorm(CHANNELS)), half(nn.Linear(CHANNELS, CHANNELS))
    packed = nn.SubmConv3d(CHANNELS, CHANNELS, 3).to_quantized(bits=4)
    return {
        "conv": conv,
        "block": lambda x: nn.ReLU()(norm(conv(x)) + x),
        "depthwise": depthwise,
        "down and up": lambda x: up(down(x)),
        "pool": lambda x: up(nn.MaxPool3d(2, stride=2)(x)),
        "layer norm": line,
        "linear": pointwise,
        "packed": half(packed),
        "gradient of conv": gradient_of(conv),
        "gradient of depthwise": gradient_of(depthwise),
        "gradient of layer norm": gradient_of(line),
        "gradient of linear": gradient_of(pointwise),
    }


def last(made: ml.SparseTensor | mx.array, rows: int) -> np.ndarray:
    made = made.feats if isinstance(made, ml.SparseTensor) else made
    return np.array(made[-rows:].astype(mx.float32))


@pytest.mark.parametrize("side", sides())
@pytest.mark.parametrize("name", layers())
def test_the_last_rows_are_those_of_their_part(name, side):
    layer, (whole, part) = layers()[name], cut(side)
    want = last(layer(part), INNER * side**2)
    got = last(layer(whole), len(want))
    mx.clear_cache()
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3 * np.abs(want).max())


@pytest.mark.parametrize("side", sides())
def test_the_gradient_of_the_weight_takes_the_last_rows(side):
    layer, made = layers()["conv"], []
    for x in cut(side):
        count = len(x)
        given = features(side**3 - count, count, seed=1)
        inner = (mx.arange(count) >= count - INNER * side**2)[:, None]
        given, weight = mx.where(inner, given, 0), layer.weight

        def run(weight, x=x):
            layer.weight = weight
            return layer(x).feats

        made.append(np.array(mx.vjp(run, [weight], [given])[1][0].astype(mx.float32)))
        layer.weight = weight
        mx.clear_cache()
    got, want = made
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3 * np.abs(want).max())


@pytest.mark.parametrize("side", sides())
def test_statistics_are_of_all_rows(side):
    """Each row of features stands in the cube as often as its place says."""
    rows = np.array(features(0, REPEATED).astype(mx.float32)).astype(np.float64)
    share = np.bincount(np.arange(side**3) % REPEATED, minlength=REPEATED) / side**3
    mean = share @ rows
    spread = np.sqrt(share @ (rows - mean) ** 2 + 1e-5)
    whole, _ = cut(side)
    norm = nn.BatchNorm(CHANNELS)
    got = last(norm(whole), side**2)
    own = np.array(features(side**3 - side**2, side**2).astype(mx.float32))
    np.testing.assert_allclose(got, (own - mean) / spread, atol=5e-3)
    pooled = np.array(ops.global_avg_pool(whole).astype(mx.float32))
    np.testing.assert_allclose(pooled, mean[None], atol=1e-3)
