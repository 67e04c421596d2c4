"""A net of every kind of layer that may be of integers, and what it is compared by."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np

import mlx_lattice as ml
from mlx_lattice import models, nn, ops

PACK_ALL = nn.keep_float(few_inputs=1, few_outputs=1, names=())


def batch(seed=0, channels=20, n=120):
    coords = cases.geometry("surface", 3, n, seed)
    feats = np.random.default_rng(seed).normal(size=(len(coords), channels))
    return ml.SparseTensor(mx.array(coords), mx.array(feats.astype(np.float32)))


class Net(mlx.nn.Module):
    """Everything that decides whether a result may be int8."""

    def __init__(self):
        super().__init__()
        block, conv = models.blocks.BasicBlock, models.blocks.conv_norm
        self.first = conv(nn.SubmConv3d(20, 32, 3, bias=False))
        self.block = block(32, 32)
        self.down = nn.Sequential(nn.Conv3d(32, 32, 2, 2), nn.BatchNorm(32), nn.ReLU())
        self.up = conv(nn.ConvTranspose3d(32, 32, bias=False))
        self.mixed = nn.Sequential(nn.SubmConv3d(64, 24, 3), nn.ReLU())
        self.line = nn.Linear(24, 24)
        self.added = nn.SubmConv3d(24, 24, 1)
        self.last = nn.SubmConv3d(24, 24, 3)

    def __call__(self, x):
        x = self.block(self.first(x))
        y = self.up(self.down(x), x)
        y = self.line(self.mixed(ops.cat([y, x])))
        y = y + self.added(y)  # which no integer layer does
        return self.last(y)


def distance(y, z) -> float:
    y, z = (getattr(a, "feats", a) for a in (y, z))
    return (mx.linalg.norm(y - z) / mx.linalg.norm(z)).item()


def integers(net):
    return {p: m for p, m in net.named_modules() if getattr(m, "mode", "") == "integer"}


def of_layers():
    layers = nn.SubmConv3d(20, 32, 3), nn.BatchNorm(32), nn.ReLU()
    return nn.Sequential(*layers, nn.SubmConv3d(32, 32, 3)).eval()
