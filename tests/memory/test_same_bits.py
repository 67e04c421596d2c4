"""Under a limit that forces many blocks, nets give the bits that they give without."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from foreign_decoder import COUNTS, LATENT, OUT, WIDTHS, latents
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import devices, memory, models, nn
from mlx_lattice.routes import launch


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch):
    """Blocks of a few rows, no table kept, whatever the limit; nothing is refused."""
    for share in ("WHOLE", "BLOCK", "TABLE"):
        monkeypatch.setattr(memory, share, 1e-9)
    monkeypatch.setattr(memory, "LEAST_ROWS", {"*": 7})


def random_weights(net):
    """Of a size that keeps features near 1, and no parameter zero."""
    for name, p in tree_flatten(net.parameters()):
        scale = 0.3 if p.ndim == 1 else 1.2 * np.prod(p.shape[1:]) ** -0.5
        noise = mx.random.normal(p.shape) * scale
        if "norm" in name or "var" in name:
            noise = mx.abs(noise) + 1
        net.load_weights([(name, noise.astype(p.dtype))], strict=False)
    return net.eval()


def decoder(dtype):
    net = models.SparseVAEDecoder(OUT, WIDTHS, LATENT, COUNTS, dtype=dtype)
    return random_weights(net)


def packed_decoder(dtype):
    net = models.SparseVAEDecoder(OUT, (64, 64, 32), LATENT, (1, 1, 0), dtype=dtype)
    random_weights(net)
    mlx.nn.quantize(net, group_size=64, bits=8, class_predicate=nn.keep_float())
    return net


DECODERS = {"decoder": decoder, "packed decoder": packed_decoder}


def counted(run):
    """What a function returns, and how many contractions it launched."""
    found = []
    with launch.observe(found.append):
        y = run()
    return y, len(found)


def assert_same(y, plain, dtype):
    """Bit for bit; on GPUs MLX sums blocks of so few rows in orders of their own."""
    if devices.current().backend == devices.CPU:
        assert mx.array_equal(y, plain)
    else:  # their blocks are no smaller than ``memory.LEAST_ROWS`` says
        expected = ref.to_numpy(plain).astype(np.float64)
        ref.assert_close(y, expected, dtype, slack=4)


@pytest.mark.parametrize("dtype", (mx.float32, mx.float16))
@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("given", (False, True))
def test_decoders(kind, dtype, given):
    net, x = DECODERS[kind](dtype), latents("batches", 40)
    (y, cells), plain = counted(lambda: net(x, return_subdivisions=True))
    options = {"coordinates": [cells[1].coords, y.coords]} if given else {}
    if given:  # rows in another order, and some without a coarse cell
        finest = mx.concatenate(
            [y.coords[::-1], y.coords[:3] + mx.array([0, 90, 0, 0])]
        )
        options["coordinates"][1] = finest
        x = x.replace(x.feats)
        y = net(x, **options)
    again = ml.SparseTensor(x.coords + 0, x.feats)
    with ml.memory_limit("1GB"):
        z, cut = counted(lambda: net(again, **options))
        twice = net(again, **options)
    assert len(z) > 200 and mx.array_equal(y.coords, z.coords)
    assert_same(z.feats, y.feats, dtype)
    assert_same(twice.feats, y.feats, dtype)
    if devices.current().backend == devices.CPU:
        assert cut > 3 * plain


def test_a_decoder_of_no_rows():
    net = decoder(mx.float32)
    x = ml.SparseTensor(mx.zeros((0, 4), mx.int32), mx.zeros((0, LATENT)))
    with ml.memory_limit("1GB"):
        assert net(x).shape == (0, OUT)


NETS = {
    "minkunet": lambda: models.MinkUNet14(3, 5),
    "spunet": lambda: models.SpUNet(3, 5, 8, (8, 16, 16, 8), (1, 1, 1, 1)),
    "ptv3": lambda: models.PTv3(
        3,
        5,
        stride=(2, 2),
        enc_depths=(1, 1, 1),
        enc_channels=(8, 16, 16),
        enc_num_head=(1, 2, 2),
        enc_patch_size=(16, 16, 16),
        dec_depths=(1, 1),
        dec_channels=(8, 8),
        dec_num_head=(1, 1),
        dec_patch_size=(16, 16),
    ),
}


@pytest.mark.parametrize("dtype", (mx.float32, mx.bfloat16))
@pytest.mark.parametrize("kind", NETS)
def test_nets(kind, dtype):
    net = random_weights(NETS[kind]())
    net.set_dtype(dtype)
    coords = cases.geometry("batches", 3, 120)
    coords[:, 1:] -= coords[:, 1:].min(0)
    feats = mx.array(cases.features(len(coords), 3)).astype(dtype)
    x = ml.SparseTensor(mx.array(coords), feats)
    y, plain = counted(lambda: net(x))
    with ml.memory_limit("1GB"):
        z, cut = counted(lambda: net(ml.SparseTensor(mx.array(coords), feats)))
    assert not mx.isnan(y.feats).any()
    assert_same(z.feats, y.feats, dtype)
    if devices.current().backend == devices.CPU:
        assert cut > 2 * plain


def test_a_gradient_says_that_it_is_not_bounded():
    net, x = decoder(mx.float32), latents()
    with ml.memory_limit("1GB"), pytest.raises(RuntimeError, match="forward passes"):
        mlx.nn.value_and_grad(net, lambda x: net(x).feats.sum())(x)
