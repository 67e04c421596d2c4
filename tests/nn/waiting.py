"""A residual block whose layers wait, and what is seen of it."""

import cases
import mlx.core as mx

import mlx_lattice as ml
from mlx_lattice import nn, ops
from mlx_lattice.ops import observed

C = 8


def tensor(channels=C, dtype=mx.float32, seed=0):
    coords = cases.geometry("batches", 3, 80)
    feats = mx.array(cases.features(len(coords), channels, seed)).astype(dtype)
    return ml.SparseTensor(mx.array(coords), feats)


class Block(nn.Module):
    """A residual block, and the ways in which one is written."""

    def __init__(self, bias=True):
        super().__init__()
        mx.random.seed(0)
        self.conv1, self.norm1 = nn.SubmConv3d(C, C, 3, bias=bias), nn.BatchNorm(C)
        self.conv2, self.norm2 = nn.SubmConv3d(C, C, 3, bias=bias), nn.BatchNorm(C)
        self.down, self.relu = nn.Conv3d(C, C, 2, stride=2), nn.ReLU()
        self.up, self.norm3 = nn.ConvTranspose3d(C, C, 2, stride=2), nn.BatchNorm(C)
        keys = iter(mx.random.split(mx.random.key(1), 12))
        for norm in (self.norm1, self.norm2, self.norm3):
            for name in ("weight", "running_var"):
                norm[name] = mx.random.uniform(0.5, 2, (C,), key=next(keys))
            for name in ("bias", "running_mean"):
                norm[name] = mx.random.normal((C,), key=next(keys))

    def rebound(self, x):
        out = self.conv1(x)
        out = self.norm1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.norm2(out)
        out += x
        return self.relu(out)

    def nested(self, x):
        out = ops.gelu(self.norm1(self.conv1(x)))
        return ops.silu(x + self.norm2(self.conv2(out)))

    def onto_a_skip(self, x):
        out = self.norm3(self.up(self.down(x), x))
        return self.relu(out + x)


BLOCKS = {"rebound": 2, "nested": 2, "onto_a_skip": 2}


def told(call):
    """What a call returns, the parts of its norms, and its contractions."""
    seen = []
    with observed.norms.observe(seen.append), ml.trace() as trace:
        result = call()
    return result, [norm.parts for norm in seen if norm.launches == 0], len(trace)


def epilogues(call):
    """What a call returns, and what its contractions compute besides sums."""
    with ml.trace() as trace:
        result = call()
    return result, [str(record.problem.epilogue or "") for record in trace]
