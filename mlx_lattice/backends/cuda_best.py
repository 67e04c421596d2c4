"""Rows of greatest score of each batch element on CUDA: keys, a sort, and a mask."""

from __future__ import annotations

from functools import cache, partial

import mlx.core as mx

from ..geometry import unique as portable
from ..geometry.unique import INFINITE
from .cuda_interfaces import SCRATCH, geometry_kernel, run
from .cuda_sort import (
    KEYS,
    SORT,
    THREADS,
    constant,
    sorted_places,
    sorts,
    striding_blocks,
)

_BEST = (*SORT, "best_rows.cu")


def best_rows(
    scores: mx.array, coords: mx.array, batches: tuple[int, int], k: int
) -> mx.array:
    """Return (N,) bool: which rows are the best of their element. See ``Geometry``."""
    n, columns = coords.shape
    if not sorts(n):
        return portable.best_rows(scores, coords, batches, k)
    scores = scores if scores.dtype in INFINITE else scores.astype(mx.float32)
    infinite, word = INFINITE[scores.dtype]
    score_bits, (least, greatest) = 8 * word.size, batches
    bits = score_bits + (greatest - least).bit_length()
    make_keys = partial(_score_keys, columns, infinite)
    inputs = scores.view(word), coords
    keys, rows = sorted_places(make_keys, inputs, n, bits, fact=least, keep=True)
    given, made = [keys, rows, constant(score_bits, k)], [((n,), mx.bool_)]
    kernel = _mark_best(KEYS[keys.dtype])
    return run(kernel, given, striding_blocks(n), THREADS, made)[0]


@cache
def _score_keys(columns: int, infinite: int, numeric: str):
    return geometry_kernel(
        "score_keys",
        _BEST,
        "ScoreKeys",
        ("scores", "coords", "digits", "scratch"),
        ("keys",),
        template=(("COLUMNS", columns), ("INFINITE", infinite), ("KEY", numeric)),
        arguments=(
            ("digits", ""),
            ("scratch", SCRATCH),
            ("keys", "reinterpret_cast<KEY*>(keys)"),
        ),
        threads=THREADS,
    )


@cache
def _mark_best(numeric: str):
    return geometry_kernel(
        "mark_best",
        _BEST,
        "MarkBest",
        ("keys", "rows", "facts"),
        ("kept",),
        template=(("KEY", numeric),),
        arguments=(("keys", "reinterpret_cast<const KEY*>(keys)"), ("facts", "")),
        threads=THREADS,
    )
