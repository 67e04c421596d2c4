"""What a manager holds: sets and relations die with the tensors that have the rows."""

import gc
from weakref import ref

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import nn, ops


def tensor(rows=400, channels=4, seed=0, **facts):
    draw = np.random.default_rng(seed)
    coords = np.unique(draw.integers(-8, 9, (rows, 4)), axis=0).astype(np.int32)
    coords[:, 0] = coords[:, 0] > 0
    coords = np.unique(coords, axis=0)
    feats = draw.normal(size=(len(coords), channels)).astype(np.float32)
    return ml.SparseTensor(mx.array(coords), mx.array(feats), **facts)


def held(manager):
    """Return how many sets and relations a manager has."""
    return len(manager.sets), len(manager.relations)


class Pruning(mlx.nn.Module):
    """Makes voxels and prunes them, twice, as decoders do."""

    def __init__(self, channels=4):
        super().__init__()
        self.down = nn.Conv3d(channels, channels, 2, stride=2)
        self.up = nn.GenerativeConvTranspose3d(channels, channels, 2, stride=2)
        self.conv = nn.SubmConv3d(channels, channels, 3)

    def __call__(self, x):
        y = self.down(self.down(x))
        for _ in range(2):
            y = self.conv(self.up(y))
            y = ops.prune(y, y.feats[:, 0] > 0)
            y = self.conv(y)
        return y


CHOSEN = "prune", "top_k", "crop", "union", "subdivide", "upsample"


@pytest.mark.parametrize("chosen", CHOSEN)
def test_rows_chosen_by_features_die_with_their_tensors(chosen):
    x, other = tensor(), tensor(seed=1)
    conv, wide = nn.SubmConv3d(4, 4, 3), nn.Conv3d(4, 16, 1)
    below = ops.avg_pool3d(x, 2)

    def made(step):
        if chosen == "prune":
            return ops.prune(x, mx.arange(len(x)) % 5 != step)
        if chosen == "upsample":  # onto rows that come and go
            y = ops.prune(x, mx.arange(len(x)) % 5 != step)
            return ops.upsample_linear3d(below, coordinates=y) + y
        if chosen == "top_k":
            return ops.top_k(x, x.feats[:, step % 4], 50 + step)
        if chosen == "crop":
            return ops.crop(x, -7 + step, 6)
        if chosen == "union":
            return ops.union(x, ops.prune(other, mx.arange(len(other)) % 5 != step))
        cells = mx.arange(8 * len(x)).reshape(-1, 8) % 5 == step
        return ops.channel_to_space(wide(x), subdivision=cells)

    counts, kept = [], []
    for step in range(5):
        y = made(step)
        relation = conv(y) if chosen != "subdivide" else y
        mx.eval(relation.feats)
        kept.append(ref(x.manager[y.key]))
        counts.append(held(x.manager))
        del y, relation
    gc.collect()
    assert counts[-1] == counts[2]
    assert [each() is not None for each in kept] == [False] * 4 + [True]


def test_passes_of_a_kept_scan_hold_what_one_does():
    x, net = tensor(3000), Pruning()
    first, counts, bytes_held = net(x).feats, [], []
    for _ in range(6):
        again = net(x).feats
        mx.eval(again)
        assert mx.array_equal(first, again)
        del again
        gc.collect()
        counts.append(held(x.manager))
        bytes_held.append(mx.get_active_memory())
    # A pass has some 200 kB of rows and relations; a GPU's allocator rounds.
    assert counts[0] == counts[-1] and abs(bytes_held[-1] - bytes_held[1]) < 2**15


def test_rows_of_what_is_left_are_kept_with_what_they_were_made_of():
    x, conv = tensor(), nn.Conv3d(4, 4, 2, stride=2)
    y = ops.prune(x, x.feats[:, 0] > 0)
    rows, size = y.coords, len(y)
    coarse = conv(y)
    del y
    for step in range(3):  # others come and go
        mx.eval(conv(ops.prune(x, mx.arange(len(x)) % 3 != step)).feats)
    up = nn.ConvTranspose3d(4, 4, 2, stride=2)(coarse)
    assert len(up) == size and mx.array_equal(up.coords, rows)
    assert x.manager.finer(coarse.key, (2, 2, 2)) is up.key


def test_a_target_of_several_sets_stays_ambiguous_when_they_are_gone():
    x, conv = tensor(), nn.Conv3d(4, 4, 2, stride=2)
    given = conv(tensor())
    target = ml.SparseTensor(given.coords, given.feats, stride=2)
    coarse = [ops.prune(x, mx.arange(len(x)) % 4 != step) for step in range(3)]
    onto, up = [conv(y, target) for y in coarse], nn.ConvTranspose3d(4, 4, 2, stride=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="several coordinate sets"):
            up(onto[-1])
        coarse.clear()
        ops.prune(x, x.feats[:, 0] > 0)  # rows that come let those go


@pytest.mark.parametrize("lies", ("by column", "by row"))
def test_rows_are_kept_one_after_the_other(lies):
    """Kernels would copy rows that lie by column, as np.argwhere's, at every launch."""
    sites = np.argwhere(np.ones((2, 3, 3, 3))).astype(np.int32)
    assert sites.flags.f_contiguous
    given = mx.array(sites if lies == "by column" else np.ascontiguousarray(sites))
    x = ml.SparseTensor(given, mx.ones((len(sites), 1)))
    mx.eval(x.coords)
    assert memoryview(x.coords).strides == (16, 4)
    assert mx.array_equal(x.coords, given)
    again = ml.SparseTensor(given, x.feats, manager=x.manager)
    assert again.key is x.key
    given[0] = 7  # a change in place is not seen
    assert x.coords[0].tolist() == [0, 0, 0, 0]


CHANGED = {
    "conv": lambda x, _: nn.SubmConv3d(4, 4, 3)(x).feats,
    "down": lambda x, _: nn.Conv3d(4, 4, 2, stride=2)(x).feats,
    "target": lambda x, y: nn.Conv3d(4, 4, 3)(y, x).feats,
    "target tensor of two": lambda x, y: (nn.Conv3d(4, 4, 3)(y, x) + x).feats,
    "cells": lambda x, _: nn.Conv3d(4, 4, 2, stride=2)(x).coords,
    "dense": lambda x, _: x.to_dense((40, 40, 40)),
    "bev": lambda x, _: nn.ToBEV()(x),
    "aligned": lambda x, y: (x + y).feats,
    "aligned to": lambda x, y: (y + x).feats,
    "union": lambda x, y: ops.union(x, y).feats,
    "crop": lambda x, _: ops.crop(x, 12, 18).coords,
    "prune": lambda x, _: ops.prune(x, x.feats[:, 0] > 0).coords,
    "top_k": lambda x, _: ops.top_k(x, x.feats[:, 0], 9).coords,
    "batch": lambda x, y: ops.batch([x, y]).coords,
    "unbatch": lambda x, _: ops.unbatch(x)[1].coords,
    "unique_sum": lambda x, _: ops.unique_sum(x).coords,
    "curve": lambda x, _: ops.curve_order(x),
    "code": lambda x, _: ops.curve_code(x),
    "neighbours": lambda x, y: ops.knn(x, 3, y).rows,
    "lookup": lambda x, y: ops.lookup(x, y.coords),
    "relation": lambda x, _: x.manager.kernel_relation(x.coords, stride=2).edges,
}


@pytest.mark.parametrize("what", CHANGED)
def test_rows_that_were_changed_in_place_are_not_those_of_the_set(what):
    """MLX's in-place changes make the same object another array."""
    results = []
    for is_changed in (False, True):
        mx.random.seed(0)
        base = tensor().coords + mx.array([0, 10, 10, 10])
        order = mx.arange(len(base))[::-1]
        x = ml.SparseTensor(base, tensor().feats, spatial_shape=(40, 40, 40))
        y = ml.SparseTensor(base[order], x.feats, spatial_shape=(40, 40, 40))
        if is_changed:
            rows = x.coords
            rows[:, 1:] *= 2
            assert mx.array_equal(rows[:, 1:], 2 * base[:, 1:])
        results.append(CHANGED[what](x, y))
    assert mx.array_equal(*results)


def test_rows_of_a_relation_that_were_changed_in_place_are_its_own():
    x, conv = tensor(), nn.Conv3d(4, 4, 2, stride=2)
    coarse, again = conv(x), conv(tensor())
    relation = x.manager.kernel_relation(x.key, kernel_size=2, stride=2)
    before = relation.edges + 0
    for rows in (relation.in_coords, relation.out_coords, coarse.coords):
        rows[:] = 0
    del relation
    x.manager.relations[0].release()
    edges = x.manager.kernel_relation(x.key, kernel_size=2, stride=2).edges
    assert mx.array_equal(edges, before)
    assert mx.array_equal(conv(coarse).coords, conv(again).coords)
    assert x.manager.key_of(coarse.coords) is coarse.key


def test_a_dropped_key_is_an_error_that_says_what_there_is():
    x = tensor()
    y = ops.prune(x, x.feats[:, 0] > 0)
    relation = x.manager.submanifold_kernel_relation(y.key)
    del y
    ops.prune(x, x.feats[:, 0] > 1)
    with pytest.raises(KeyError, match="not a coordinate set of this manager"):
        x.manager[relation.keys[0]]
    assert relation.n_edges > 0  # a relation that is held works on


def test_inserted_sets_that_nobody_holds_are_freed():
    manager = ml.CoordinateManager()

    def rows(step):
        return mx.array([[0, step, 0, 0], [0, step, 1, 0]])

    kept_array = rows(1000)
    manager.insert(kept_array)
    kept_key = manager.insert(rows(1001))
    x = ml.SparseTensor(rows(1002), mx.ones((2, 1)), manager=manager)
    for step in range(50):
        relation = manager.kernel_relation(
            manager.insert(rows(step)), kernel_size=2, stride=2
        )
        manager.relation(rows(step), rows(step + 1).tolist(), offsets=[(0, 1, 0)])
    assert len(manager.sets) < 10 and len(manager.relations) < 10
    assert manager.key_of(kept_array) in manager and kept_key in manager
    assert x.key in manager and len(relation.out_coords) == 1
    stale = manager.insert(rows(0)).serial
    manager.insert(rows(1))
    assert stale not in [each.serial for each in manager.sets]
