"""The radix sort on CUDA, and what geometry's launches share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import count

import mlx.core as mx

from ..devices import current
from ..geometry import sync
from .cuda_interfaces import SCRATCH, geometry_kernel, run
from .gpu_kernel import GpuKernel

THREADS, STRIDING_BLOCKS = 256, 8  # of a block, and on a multiprocessor
BINS = 512  # of a digit, at most
HEADER = 32  # words of scratch before the histograms
SORT_THREADS, SORT_BLOCKS = 512, 2  # of a block, and on a multiprocessor
SORT_TILE = 8 * SORT_THREADS  # keys of one block of the sort
MOST_KEYS = 1 << 30  # of a sort; the kernel's sums are below SUM_OF_TILE
KEYS = {mx.uint32: "unsigned", mx.uint64: "unsigned long long"}
SORT = ("rows.cuh", "radix_sort.cu")


@lru_cache(maxsize=1024)
def constant(*values: int, dtype: mx.Dtype = mx.int32) -> mx.array:
    """Return integers on the device, where a kernel reads them fast; kept."""
    array = mx.array(values, dtype=dtype) + 0
    sync.compute([array])
    return array


def cleared(words: int) -> mx.array:
    """Return words of 0; the value is read on the device.

    ``mx.compile`` makes one array of those that are made alike, so that launches would
    share it: in a graph that may be traced each has a zero of its own.
    """
    place = next(_places) % len(_zeros()) if sync.is_transforming() else 0
    return mx.full((words,), _zeros()[place])


_places = count()


@cache
def _zeros() -> list[mx.array]:
    """Return more arrays of one 0 than a graph has launches that are cleared for."""
    zeros = mx.split(mx.zeros((1024,), dtype=mx.uint32), 1024)
    sync.compute(zeros)
    return zeros


@lru_cache(maxsize=256)
def rule_constant(offsets: tuple, stride: tuple) -> mx.array:
    """Return the offsets one after another, then the strides."""
    return constant(*(v for offset in offsets for v in offset), *stride, 0, 0)


@cache
def multiprocessors() -> int:
    """Return how many the device has."""
    return current().cores


def striding_blocks(elements: int) -> int:
    """Return how many blocks of THREADS stride over some elements: few for many."""
    most = multiprocessors() * STRIDING_BLOCKS
    return max(1, min(most, -(-elements // THREADS)))


def digits_of(bits: int) -> tuple[int, int]:
    """Return into how many digits the radix sort cuts a key, and their bits."""
    passes = -(-bits // 9)
    return passes, -(-bits // passes)


def scratch_words(n: int, passes: int) -> int:
    """Return the words that the passes of a sort of n keys share; even."""
    tiles = -(-n // SORT_TILE)
    return HEADER + passes * (1 + tiles) * BINS + tiles + tiles % 2


def sorts(n: int) -> bool:
    """Whether the sort takes so many keys: counts of them lie beside two flags."""
    return n <= MOST_KEYS


def key_dtype(bits: int) -> mx.Dtype:
    """Return the dtype of keys of so many bits."""
    return mx.uint32 if bits <= 32 else mx.uint64


def sort_keys(
    keys: mx.array,
    digits: mx.array,
    scratch: mx.array,
    *,
    rows: bool,
    keep: bool,
) -> tuple[mx.array, mx.array | None]:
    """Sort (N,) keys whose histograms stand in scratch, in one launch; stable.

    Args:
        keys: uint32 or uint64.
        digits: constant (anything, bits of a digit, passes, 0).
        scratch: ``scratch_words`` words, used up by this.
        rows: whether to sort their places along.
        keep: whether the sorted keys are wanted.

    Returns:
        (sorted keys, or anything where not kept; (N,) int32 places, or None)
    """
    n, numeric = keys.shape[0], KEYS[keys.dtype]
    sorted_keys, _, *places = run(
        _radix_sort(numeric, rows, keep),
        [keys, digits, scratch],
        min(multiprocessors() * SORT_BLOCKS, -(-n // SORT_TILE)),
        SORT_THREADS,
        [((n,), keys.dtype)] * 2 + [((n,), mx.int32)] * 2 * rows,
    )
    return sorted_keys, places[0] if rows else None


def sorted_places(
    make_keys: Callable[[str], GpuKernel],
    inputs: Sequence[mx.array],
    n: int,
    bits: int,
    *,
    fact: int = 0,
    keep: bool,
) -> tuple[mx.array, mx.array]:
    """Return the keys and the (N,) int32 places that a kernel's keys are sorted to.

    Two launches and a fill; stable.

    Args:
        make_keys: the kernel of keys of a type, and of the histograms of their digits;
            it reads ``inputs``, digits and scratch.
        inputs: arrays.
        n: keys, at least one, as many as it ``sorts``.
        bits: of a key, at least 1.
        fact: the first of the digits' numbers, for the kernel.
        keep: whether the sorted keys are wanted; they are anything where not.
    """
    passes, each = digits_of(bits)
    dtype = key_dtype(bits)
    digits, scratch = constant(fact, each, passes, 0), cleared(scratch_words(n, passes))
    given, made = [*inputs, digits, scratch], [((n,), dtype)]
    (keys,) = run(make_keys(KEYS[dtype]), given, striding_blocks(n), THREADS, made)
    return sort_keys(keys, digits, scratch, rows=True, keep=keep)


@cache
def _radix_sort(numeric: str, rows: bool, keep: bool):
    outputs = "sorted_keys", "work_keys", "sorted_rows", "work_rows"
    keys = "reinterpret_cast<KEY*>({})"
    return geometry_kernel(
        "radix_sort",
        SORT,
        "RadixSort",
        ("keys", "digits", "scratch"),
        outputs if rows else outputs[:2],
        template=(("KEY", numeric), ("ROWS", rows), ("KEEP", keep)),
        arguments=(
            ("keys", "reinterpret_cast<const KEY*>(keys)"),
            ("digits", ""),
            ("scratch", SCRATCH),
            ("sorted_keys", keys.format("sorted_keys")),
            ("work_keys", keys.format("work_keys") + ", nullptr" * 2 * (not rows)),
        ),
        threads=SORT_THREADS,
        blocks_per_multiprocessor=SORT_BLOCKS,
    )
