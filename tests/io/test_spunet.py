"""Pointcept's SpUNet, built here: a published spconv checkpoint gives its features.

Reads `shared/oracle/nets` beside the checkout: weights and outputs of the net itself.
"""

import json

import foreign_arrays
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import nn, ops
from mlx_lattice.io import import_checkpoint, load_state

NETS = foreign_arrays.FOLDER / "nets"


def norm(channels: int) -> nn.BatchNorm:
    return nn.BatchNorm(channels, eps=1e-3)


def conv(c_in: int, c_out: int, size: int) -> nn.SubmConv3d:
    return nn.SubmConv3d(c_in, c_out, size, bias=False)


class Block(mlx.nn.Module):
    """Two convolutions beside a shortcut, which has a 1x1x1 where widths differ."""

    def __init__(self, c_in: int, c_out: int):
        super().__init__()
        self.conv1, self.bn1 = conv(c_in, c_out, 3), norm(c_out)
        self.conv2, self.bn2 = conv(c_out, c_out, 3), norm(c_out)
        if c_in != c_out:
            self.proj = nn.Sequential(conv(c_in, c_out, 1), norm(c_out))

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        y = self.bn2(self.conv2(ops.relu(self.bn1(self.conv1(x)))))
        return ops.relu(y + (self.proj(x) if "proj" in self else x))


class Stage(mlx.nn.Module):
    """Blocks, called block0, block1, ..."""

    def __init__(self, c_in: int, c_out: int, count: int):
        super().__init__()
        self.count = count
        for i in range(count):
            self[f"block{i}"] = Block(c_in if i == 0 else c_out, c_out)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        for i in range(self.count):
            x = self[f"block{i}"](x)
        return x


class SpUNet(mlx.nn.Module):
    """Pointcept's SpUNet-v1m1, by the names of its checkpoint."""

    def __init__(self, in_channels, num_classes, base_channels, channels, layers):
        super().__init__()
        first, stages = base_channels, len(channels) // 2
        self.conv_input = nn.Sequential(
            conv(in_channels, first, 5), norm(first), nn.ReLU()
        )
        encoder, back = [first, *channels[:stages]], channels[::-1]
        self.down, self.enc, self.up, self.dec = [], [], [], []
        for i in range(stages):
            fine, coarse = encoder[i], encoder[i + 1]
            down = nn.Conv3d(fine, coarse, 2, 2, bias=False)
            self.down.append(nn.Sequential(down, norm(coarse), nn.ReLU()))
            self.enc.append(Stage(coarse, coarse, layers[i]))
            up = nn.ConvTranspose3d(back[i + 1], back[i], 2, 2, bias=False)
            self.up.append([up, norm(back[i])])
            self.dec.append(Stage(back[i] + fine, back[i], layers[-1 - i]))
        self.final = nn.SubmConv3d(back[0], num_classes, 1)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        x = self.conv_input(x)
        skips = []
        for down, stage in zip(self.down, self.enc, strict=True):
            skips.append(x)
            x = stage(down(x))
        for (up, after), stage in zip(self.up[::-1], self.dec[::-1], strict=True):
            skip = skips.pop()
            x = stage(ops.cat([ops.relu(after(up(x, skip))), skip]))
        return self.final(x)


def imported(name: str, **options) -> tuple[SpUNet, dict]:
    """The net with its published weights, and the case's arrays."""
    if not (NETS / f"{name}.npz").exists():
        pytest.skip("no shared/oracle/nets beside the checkout")
    with np.load(NETS / f"{name}.npz") as file:
        case = dict(file)
    net = SpUNet(**json.loads(str(case["config"]))).eval()
    state = load_state(NETS / f"{name}.safetensors")
    assert import_checkpoint(state, net, "spconv", **options).complete
    return net, case


def error(net: SpUNet, case: dict) -> float:
    """Relative error of the net's features at the rows."""
    x = ml.SparseTensor(mx.array(case["coords"]), mx.array(case["feats"]))
    y = net(x)
    assert mx.array_equal(y.coords, x.coords)
    expected = case["out/y"].astype(np.float64)
    difference = np.array(y.feats, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", ("spunet", "spunet_far"))
def test_features_of_the_published_net(name):
    net, case = imported(name)
    assert error(net, case) <= 2e-5


def test_its_unit_kernels_taken_as_shaped_are_wrong():
    net, case = imported("spunet", unit_as_shaped=True)
    assert error(net, case) > 0.1
