"""Nets, scans that are new to them, and what a net keeps of what it was asked."""

import cases
import mlx.core as mx
import mlx.nn
import pytest

import mlx_lattice as ml
from mlx_lattice import models, relations_ahead
from mlx_lattice.geometry import sync


def net(kind=models.MinkUNet14, dtype=mx.float32):
    mx.random.seed(0)
    made = kind(4, 3)
    made.set_dtype(dtype)
    made.eval()
    mx.eval(made.parameters())
    return made


def scan(seed, rows=250, dtype=mx.float32):
    """A new scan each time, rows and all."""
    coords = mx.array(cases.geometry("surface", 3, rows, seed))
    feats = mx.random.normal((len(coords), 4), key=mx.random.key(seed)).astype(dtype)
    return ml.SparseTensor(coords, feats)


@pytest.fixture(name="starts")
def counted_starts(monkeypatch):
    """How many arrays each start has, or evaluation of views."""
    seen = []

    def counted(real):
        def call(arrays):
            if arrays:
                seen.append(len(arrays))
            real(arrays)

        return call

    for name in ("start_all", "compute"):
        monkeypatch.setattr(sync, name, counted(getattr(sync, name)))
    return seen


def asked(net):
    """What the layer keeps that is asked first."""
    (found,) = {
        id(m._asked): m._asked for m in net.modules() if hasattr(m, "_asked")
    }.values()
    return found


def last(net):
    """What the last scan was asked, of every dtype and mode."""
    return {
        facts: relations_ahead.Reads.of(record, record.first)
        for facts, record in asked(net)._last.items()
    }


def views(x):
    """The views of a scan's relations: names, and what they hold."""
    return [
        (str(relation), sorted(map(str, relation.built)))
        for relation in x.manager.relations
    ]


class OwnUNet(mlx.nn.Module):
    """A net as users write them, of which nothing is known."""

    def __init__(self, size=3, halves=2):
        super().__init__()
        self.stem = ml.nn.SubmConv3d(4, 16, size)
        self.down = [ml.nn.Conv3d(16, 16, 2, stride=2) for _ in range(halves)]
        self.deep = ml.nn.SubmConv3d(16, 16, 3)
        self.up = [ml.nn.ConvTranspose3d(16, 16, 2, stride=2) for _ in range(halves)]
        self.head = ml.nn.SubmConv3d(16, 3, 1)

    def __call__(self, x):
        x = self.stem(x)
        for layer in (*self.down, self.deep, *self.up):
            x = layer(x)
        return self.head(x)
