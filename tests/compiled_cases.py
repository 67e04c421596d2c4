"""What tests of ml.compile share: a scan, a small net, a function that is counted."""

import cases
import mlx.core as mx

import mlx_lattice as ml
from mlx_lattice import nn

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def tensor(seed=0, n=200, channels=4):
    coords = mx.array(cases.geometry("surface", 3, n, seed))
    feats = mx.random.normal((len(coords), channels), key=mx.random.key(seed))
    return ml.SparseTensor(coords, feats)


def small_net(classes=3):
    mx.random.seed(7)
    net = nn.Sequential(
        nn.SubmConv3d(4, 8, 3, bias=False),
        nn.BatchNorm(8),
        nn.ReLU(),
        # A bias before a norm has no gradient but rounding, which AdamW makes large.
        nn.Conv3d(8, 8, 2, stride=2, bias=False),
        nn.BatchNorm(8),
        nn.ConvTranspose3d(8, classes),
    )
    mx.eval(net.parameters())
    return net


class Counting:
    """A function, and how often Python runs it."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)
