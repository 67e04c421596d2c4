"""The numbers by which matrix kernels prove themselves: the same in every process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from math import prod

import mlx.core as mx

POOL = 8191  # values, a prime: lines of no array begin with the same ones


@cache
def _pool(name: str) -> mx.array:
    draw = random.Random(name)
    values = mx.array(draw.choices((-1.0, 0.0, 1.0), k=POOL))
    mx.eval(values)
    return values


def drawn(name: str, shape: Sequence[int], pool: mx.array | None = None) -> mx.array:
    """Return values of a pool, -1, 0 and 1 or what is given, one after another."""
    pool, size = _pool(name) if pool is None else pool, prod(shape)
    return mx.concatenate([pool] * -(-size // POOL))[:size].reshape(shape)
