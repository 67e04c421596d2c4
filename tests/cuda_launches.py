"""Launches of every kernel of CUDA's but contractions, with all that it may take."""

import itertools
from types import SimpleNamespace
from unittest.mock import patch

import cases
import mlx.core as mx
import numpy as np
from conftest import KINDS, pair

import mlx_lattice as ml
from mlx_lattice import devices, registry
from mlx_lattice.backends.cuda import geometry as cuda_geometry
from mlx_lattice.backends.cuda.geometry import CudaGeometry
from mlx_lattice.backends.gpu import optimizers as gpu_optimizers
from mlx_lattice.backends.gpu.reductions import GpuReductions
from mlx_lattice.epilogue import Activation
from mlx_lattice.geometry.lattice import CURVES, Rule, curve_of
from mlx_lattice.geometry.tables import BoxedRows
from mlx_lattice.registry import Fit, RowSegments

BOOLEANS = (False, True)
DTYPES = tuple(getattr(mx, name) for name in cases.DTYPES)


def geometry():
    """Sets, tables, views and orders, in every dimension and width of key."""
    made = CudaGeometry()
    for dims, extent in itertools.product((1, 2, 3, 4), (5, 1 << 20)):
        rows = np.random.default_rng(dims).integers(-extent, extent, (50, 1 + dims))
        coords = mx.array(rows.astype(np.int32))
        box = rows.min(axis=0).tolist(), rows.max(axis=0).tolist()
        unit, ones = [(0,) * dims, (1,) * dims], (1,) * dims
        with patch.object(cuda_geometry, "bounds", lambda coords, box=box: box):
            made.unique_rows(coords)
        made.rule_rows(Rule.EXPAND, coords, unit, (2,) * dims, box, 100)
        for rule in (Rule.CELL, Rule.REACH, Rule.EXPAND):
            steps = unit[:1] if rule == Rule.CELL else unit
            made.rule_rows(rule, coords, steps, (2,) * dims, box)
        for levels in (2, 3):
            strides = [(2**k,) * dims for k in range(1, 1 + levels)]
            made.start_levels(BoxedRows(coords, box), strides, [box] * levels)
        index = made.index(coords)
        index.find(coords)
        many = [(k, *(0,) * (dims - 1)) for k in range(70)]
        for stride, transposed, wanted, volume in itertools.product(
            (ones, (2,) * dims), BOOLEANS, (None, "cuda_sorted"), (1, 40, 70)
        ):
            offsets = many[:volume]
            index.table(
                BoxedRows(coords, box),
                offsets,
                stride,
                transposed=transposed,
                keep=lambda *_: None,
                wanted=wanted,
            )
    for volume in (1, 9, 27, 32, 33, 64, 65, 600):
        table = mx.zeros((40, volume), dtype=mx.int32)
        cuda_geometry.counted_table(cuda_geometry.table_source(table), tiled=True)
        made.edges(table)
        made.transpose_table(table, 40)


def views():
    """The views of relations, by the very calls that contractions make."""
    made = CudaGeometry()
    for case in KINDS:
        relation = pair(case)[0]
        for each in (relation, relation.T):
            cuda_geometry.sorted_rows(each)
            cuda_geometry.offset_starts(each)
            made.start(each)


def reductions():
    """By tables and by segments, whole and in pieces."""
    made = GpuReductions("cuda")
    rng = np.random.default_rng(0)
    table = mx.array(rng.integers(-1, 9, (40, 4)).astype(np.int32))
    weights, rows = mx.zeros(table.shape), mx.zeros((40, 1), dtype=mx.int32)
    for dtype, channels in itertools.product(DTYPES, (3, 16)):
        x, dy = mx.zeros((9, channels), dtype), mx.zeros((40, channels), dtype)
        for given in (weights, None):
            made.gather_sum(x, table, given)
            made.gather_sum(x, table, given, rows[:, 0])
            made.scatter_sum(dy, table, 9, given)
        made.max_pool_backward(dy, made.gather_max(x, table)[1], table)
        made.scatter_sum(dy, rows, 9)
        made.scatter_sum(dy, rows, 9, divisors=rows[:9, 0])
        made.scatter_max(dy, rows, 9)
        for order in (None, mx.arange(40, dtype=mx.int32)):
            batch = SimpleNamespace(starts=(0, 30, 40), order=order)
            made.segment_max(dy, batch)


def norms():
    """Of all rows and of batch elements, with every activation and array or none."""
    kernels, of = registry.NORMS["cuda"], mx.zeros((40,), dtype=mx.int32)
    segments = [RowSegments((0, 30, 40), of, order) for order in (None, of)]
    for dtype, channels in itertools.product(DTYPES, (3, 16)):
        x, line = mx.zeros((40, channels), dtype), mx.zeros((channels,))
        kernels.moments(x, None, (line, line), 0.1)
        kinds = range(5), (None, mx.float32, dtype), (None, *segments)
        for kind, parameters, held in itertools.product(*kinds):
            lines = 1 if held is None else held.size
            weight = None
            if parameters is not None:
                weight = mx.zeros((lines, channels), parameters)
            mean, var, *_ = kernels.moments(x, held)
            act = Activation(kind=kind, slope=0.0)
            fit = Fit(mean, var, weight, weight, 1e-5, act, held)
            for residual in (None, x):
                kernels.normalize(x, fit, residual)
                terms = kernels.gradient_sums(x, x, fit, residual)[1]
                for given in (None, terms):
                    kernels.gradient(x, x, fit, residual, given)
            for residual, moved in itertools.product((None, x), (None, (line, line))):
                if held is None:
                    kernels.batch_norm(x, fit, residual, moved, 0.1)
                    kernels.batch_norm_gradient(x, x, fit, residual)


def row_norms():
    """By parts of a warp, a warp and several vectors a thread; arrays or none."""
    kernels = registry.NORMS["cuda"]
    for dtype, channels, act in itertools.product(DTYPES, (16, 128, 512), range(3)):
        x, line = mx.zeros((40, channels), dtype), mx.zeros((channels,))
        for weight, bias in itertools.product((None, line), (None, line)):
            for kind in (mx.float32, dtype):
                given = [a if a is None else a.astype(kind) for a in (weight, bias)]
                fit = Fit(None, None, *given, 1e-5, Activation(kind=act))
                assert kernels.normalizes_rows(x, fit)
                for residual in (None, x):
                    kernels.layer_norm(x, fit, residual)
                    kernels.layer_norm_gradient(x, x, fit, residual)


def library():
    """What the library's own functions hand to reductions, gradients too."""
    points = mx.array(np.random.default_rng(0).random((200, 3)), mx.float32)
    batch = mx.array(np.random.default_rng(1).integers(0, 3, 200).astype(np.int32))
    at = mx.pad(9 * points, [(0, 0), (1, 0)])
    pools = ml.ops.max_pool3d, ml.ops.avg_pool3d, ml.ops.sum_pool3d

    def total(values, reduce):
        x = ml.SparseTensor.from_points(
            points, values, batch=batch, voxel_size=0.1, reduce=reduce
        )
        parts = [pool(x, 2, 2).feats for pool in pools]
        parts += [pool(x, 3, 1).feats for pool in pools]
        parts += [ml.ops.interpolate(x, at, mode=m) for m in ("linear", "nearest")]
        parts.append(ml.ops.devoxelize(x, mx.arange(len(x), dtype=mx.uint32)))
        parts += [ml.ops.global_avg_pool(x), ml.ops.global_max_pool(x)]
        return sum(part.astype(mx.float32).sum() for part in parts)

    for dtype, reduce in itertools.product(DTYPES, ("mean", "sum", "max")):
        mx.eval(mx.grad(total)(mx.ones((200, 16), dtype), reduce))


def updates():
    """Of one parameter and of more than a launch takes, by every rule."""
    rules = (
        gpu_optimizers.SGD,
        gpu_optimizers.MOMENTUM,
        gpu_optimizers.NESTEROV,
        gpu_optimizers.ADAM,
    )
    kernels, rates = gpu_optimizers.GpuUpdates(devices.CUDA), mx.zeros((8,))
    for dtype, rule, count in itertools.product(DTYPES, rules, (1, 2, 67)):
        given, wide = (mx.zeros((3,), dtype),) * 2, mx.zeros((3,))
        each = (wide.astype(dtype),) * len(rule.states)
        kernels.step(rule, rates, [(*given, *each)] * count)
        if dtype != mx.float32:
            each = (wide,) * (1 + len(rule.states))
            kernels.step(rule.with_master, rates, [(*given, *each)] * count)


def joins():
    """Of channels that fill 16 bytes, and not; of few rows a block and many."""
    kernels = registry.JOINS["cuda"]
    for dtype, channels in itertools.product(
        (*DTYPES, mx.int8), ((16, 32), (12, 20), (3, 5), (9000, 16))
    ):
        kernels.join(*[mx.zeros((7, c), dtype) for c in channels])
        kernels.split(mx.zeros((7, sum(channels)), dtype), channels[0])


def points():
    """Weights of the cells around points, by all that points may come with."""
    kernels = registry.POINTS["cuda"]
    for dims in (1, 2, 3, 4):
        at, step = mx.zeros((9, dims)), (1.0,) * dims
        cells = mx.zeros((9, 1 + dims), mx.int32)
        table = mx.zeros((9, 2**dims), mx.int32)
        for given, size in itertools.product((None, cells), (None, step)):
            for renormalise in BOOLEANS:
                kernels.corner_weights(at, size, given, table, renormalise)


def patches():
    """Some filled, and none."""
    kernels, order = registry.PATCHES["cuda"], mx.zeros((9,), mx.int32)
    elements, extents = mx.zeros((2, 8), mx.int32), mx.zeros((8,), mx.int32)
    for is_filling in BOOLEANS:
        kernels.filled(order, elements, extents, (12, 10), is_filling)


def before_attention():
    """Heads that fill lanes, and not, with all that is done to them and without."""
    kernels = registry.HEADS["cuda"]
    angles = [mx.zeros((9, 1, 32))] * 2
    for dtype, kind in itertools.product(DTYPES, DTYPES):
        for parts, channels in ((3, 64), (1, 96)):
            x, turned = mx.zeros((9, parts, 2, channels), dtype), min(parts, 2)
            scales = [mx.zeros((2, channels), kind)] * turned
            for given in ((scales, ()), ((), angles), (scales, angles)):
                kernels.turned(x, turned, *given)
                kernels.gradient(x, x, turned, *given)
        for shape in ((9, 7), (9, 16), (3000, 7), (3000, 64)):
            registry.NORMS["cuda"].column_sums(mx.zeros(shape, dtype), kind)


def orders():
    """Along every curve, of keys of one word and of two."""
    for dims, extent in itertools.product((1, 2, 3, 4), (1 << 6, 1 << 14)):
        low, high = [0] * (1 + dims), [1] + [extent] * dims
        for name in CURVES if dims > 1 else ("hilbert", "morton"):
            coords = mx.zeros((7, 1 + dims), dtype=mx.int32)
            CudaGeometry.curve_order(coords, curve_of(name, (low, high)))
