"""Rows of greatest score of each batch element on Metal: keys, MLX's sort, a mask."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..devices import METAL
from ..geometry import unique as portable
from ..geometry.curves import WORD
from ..geometry.unique import INFINITE
from .dispatch_bounds import dispatch_limit
from .gpu_kernel import GpuKernel, Interface
from .metal_unique import by_places

_SIZES = ("first", "0"), ("least", "0"), ("row_bits", "0")
_KEYS = Interface("ScoreKeys", ("coords", "scores"), ("keys",), _SIZES)
_BEST = Interface(
    "MarkBest", ("keys",), ("kept",), (("k", "0"), ("low_bits", "0"), ("row_bits", "0"))
)


def best_rows(
    scores: mx.array, coords: mx.array, batches: tuple[int, int], k: int
) -> mx.array:
    """Return (N,) bool: which rows are the best of their element. See ``Geometry``."""
    scores = scores if scores.dtype in INFINITE else scores.astype(mx.float32)
    infinite, word = INFINITE[scores.dtype]
    n, width = coords.shape
    row_bits, (least, greatest) = n.bit_length(), batches
    low_bits = row_bits + 8 * word.size
    fits = low_bits + (greatest - least).bit_length() <= WORD
    if not fits or n > dispatch_limit("elements"):
        return portable.best_rows(scores, coords, batches, k)
    keys = by_places(
        _score_keys(width, infinite),
        [coords, scores.view(word)],
        mx.int64,
        least=least,
        row_bits=row_bits,
    )
    sizes = {"k": k, "low_bits": low_bits, "row_bits": row_bits}
    return _mark_best()([mx.sort(keys)], [((n,), mx.bool_)], (n,), **sizes)[0]


@cache
def _score_keys(width: int, infinite: int) -> GpuKernel:
    return GpuKernel(
        METAL,
        "score_keys",
        ("best_rows",),
        _KEYS,
        (("WIDTH", width), ("INFINITE", infinite)),
        also=(_BEST,),
        place="thread_position_in_grid.x",
    )


@cache
def _mark_best() -> GpuKernel:
    return GpuKernel(
        METAL,
        "mark_best",
        ("best_rows",),
        _BEST,
        also=(_KEYS,),
        place="thread_position_in_grid.x",
    )
