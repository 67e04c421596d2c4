"""Relations, norms and pools by this machine's kernels, against MLX operations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import mlx.core as mx
import mlx.nn

from ... import nn, ops
from ...backends.availability import portable_only
from ...coordinates import CoordinateManager
from ...dtypes import DTYPES
from ...relation import Relation
from ...routes import thresholds
from ...routes.measure import relative_error
from ...tensor import SparseTensor
from . import scenes
from .clock import Budget
from .layers import KINDS, build
from .machine import sentence
from .proofs import Proof

# What is computed by kernels, and again by MLX operations.
Check = Callable[[], list[mx.array]]
CHANNELS = 24


def _arrays(relation: Relation) -> list[mx.array]:
    return [relation.out_coords, relation.out_in, relation.edges, relation.sorted.rows]


def _relations() -> Iterator[tuple[str, str, Check]]:
    for kind in KINDS:
        yield (
            f"{kind} relation",
            "3D",
            lambda kind=kind: _arrays(build(scenes.shell(10), kind)),
        )
    for dims in (1, 2, 4):
        yield "submanifold relation", f"{dims}D", lambda dims=dims: _of_dims(dims)
    yield "forward relation, every row reached", "3D", lambda: _reached()


def _of_dims(dims: int) -> list[mx.array]:
    """A relation over cells on a lattice's diagonal lines, in any dimension."""
    at = mx.arange(-60, 60, dtype=mx.int32)
    axes = [at // (axis + 1) for axis in range(dims)]
    coords = mx.stack([mx.zeros_like(at), *axes], axis=1)
    manager = CoordinateManager()
    return _arrays(manager.submanifold_kernel_relation(coords, kernel_size=3))


def _reached() -> list[mx.array]:
    manager = CoordinateManager()
    relation = manager.kernel_relation(
        scenes.shell(9), kernel_size=3, stride=2, padding=1, support="reach"
    )
    return _arrays(relation)


def _features() -> Iterator[tuple[str, str, Check]]:
    modules = {
        "BatchNorm": nn.BatchNorm,
        "GroupNorm": lambda channels: nn.GroupNorm(4, channels),
        "InstanceNorm": nn.InstanceNorm,
    }
    for dtype in DTYPES:
        for name, made in modules.items():
            yield (
                name,
                f"{dtype}, with gradients",
                lambda made=made, d=dtype: _graded(made(CHANNELS), d),
            )
        yield "max_pool3d", dtype, lambda d=dtype: _pooled(ops.max_pool3d, d)
        yield "avg_pool3d", dtype, lambda d=dtype: _pooled(ops.avg_pool3d, d)
        yield "convolution, norm and ReLU", dtype, lambda d=dtype: _fused(d)


def _tensor(dtype: str) -> SparseTensor:
    coords = scenes.shell(9)
    shape = len(coords), CHANNELS
    feats = mx.random.normal(shape, key=mx.random.key(3)).astype(DTYPES[dtype])
    return SparseTensor(coords, feats)


def _graded(norm: mlx.nn.Module, dtype: str) -> list[mx.array]:
    x = _tensor(dtype)
    weights = mx.random.normal(x.feats.shape, key=mx.random.key(4))

    def loss(feats: mx.array) -> mx.array:
        return (norm(x.replace(feats)).feats.astype(mx.float32) * weights).sum()

    return [norm(x).feats, mx.grad(loss)(x.feats)]


def _pooled(pool: Callable, dtype: str) -> list[mx.array]:
    x = _tensor(dtype)

    def pooled(feats: mx.array) -> mx.array:
        return pool(x.replace(feats), kernel_size=2, stride=2).feats

    return [pooled(x.feats), mx.grad(lambda f: pooled(f).square().sum())(x.feats)]


def _fused(dtype: str) -> list[mx.array]:
    """A net in evaluation, whose norm may be the convolution's epilogue."""
    convolution = nn.SubmConv3d(CHANNELS, 32, 3, bias=False)
    key, shape = mx.random.key(5), convolution.weight.shape
    convolution.weight = mx.random.normal(shape, key=key) / 16
    net = nn.Sequential(convolution, nn.BatchNorm(32), nn.ReLU())
    net.eval()
    net.set_dtype(DTYPES[dtype])
    return [net(_tensor(dtype)).feats]


CHECKS = (*_relations(), *_features())


def proofs(budget: Budget) -> Iterator[Proof | None]:
    """Yield the proof of each, None where the budget has no room for it."""
    longest = 0.0
    for check in CHECKS:
        if not budget.fits(longest):
            yield None
            continue
        proof = _prove(*check)
        longest = max(longest, proof.seconds)
        yield proof


def _prove(name: str, facts: str, check: Check) -> Proof:
    begun, tolerance = time.perf_counter(), 0.0
    try:
        with portable_only():
            expected = check()
            mx.eval(expected)
        found = check()
        mx.eval(found)
        error, note = 0.0, None
        for a, b in zip(found, expected, strict=True):
            if mx.issubdtype(a.dtype, mx.floating):
                dtype = str(a.dtype).rpartition(".")[2]
                tolerance = max(tolerance, thresholds.TOLERANCE[dtype])
            error = max(error, _error(a, b))
    except Exception as raised:  # whatever a compiler or driver raises
        error, note = None, sentence(raised)
    took = time.perf_counter() - begun
    return Proof(name, "", facts, error, tolerance, took, note)


def _error(a: mx.array, b: mx.array) -> float:
    if a.shape != b.shape:
        raise ValueError(f"the result is {a.shape}, MLX operations give {b.shape}")
    if not mx.issubdtype(a.dtype, mx.floating):
        return 0.0 if mx.array_equal(a, b).item() else 1.0
    error = relative_error(a, b)[0]
    if not math.isfinite(error):
        raise ValueError("the result holds NaN or infinity where MLX's does not")
    return error
