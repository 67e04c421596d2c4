"""A layer that a net has twice: one layer, whatever is made of the net."""

import copy
import pickle

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import pytest

import mlx_lattice as ml
from mlx_lattice import nn


class Twice(mlx.nn.Module):
    """Calls one convolution and one norm twice, and has them under three names."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.SubmConv3d(8, 8, 3), nn.BatchNorm(8)
        self.stages = [{"conv": self.conv, "norm": self.norm}, [self.conv, self.norm]]

    def __call__(self, x):
        x = self.norm(self.conv(x))
        stage, (conv, norm) = self.stages
        return norm(conv(stage["norm"](stage["conv"](x))))

    def parts(self):
        stage, (conv, norm) = self.stages
        return [self.conv, stage["conv"], conv], [self.norm, stage["norm"], norm]


def scan():
    coords = mx.array([[0, i, j, 0] for i in range(5) for j in range(4)], mx.int32)
    return ml.SparseTensor(coords, mx.random.normal((20, 8), key=mx.random.key(1)))


def fake(net):
    nn.fake_quantize(net, class_predicate=lambda *_: True)
    return net


MADE = {
    "copied": copy.deepcopy,
    "pickled": lambda net: pickle.loads(pickle.dumps(net)),
    "fake": fake,
    "synchronised": nn.convert_sync_batchnorm,
}


@pytest.mark.parametrize("how", MADE)
def test_it_stays_one_and_trains_as_one(how):
    net = MADE[how](Twice())
    for same in net.parts():
        assert len(set(map(id, same))) == 1
    x, optimizer = scan(), optim.SGD(0.1)
    step = mlx.nn.value_and_grad(net, lambda x: mx.square(net(x).feats - 1).mean())
    losses = []
    for _ in range(5):
        loss, grads = step(x)
        optimizer.update(net, grads)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for same in net.parts():
        assert all(mx.array_equal(same[0].weight, each.weight) for each in same)
