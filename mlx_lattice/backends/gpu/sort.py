"""The radix sort on CUDA, and what geometry orders or selects with it.

Sizes that change from set to set come as an array on the device, ``digits``: kernels
are not compiled for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import count

import mlx.core as mx

from ... import sync
from ...devices import CUDA, current
from ...geometry import curves, unique
from ...geometry.curves import Curve
from ...geometry.unique import INFINITE, KeptRows
from .kernel import GpuKernel, Interface, Output

_DIGITS = (
    ("volume", "digits[0]"),
    ("digit_bits", "digits[1]"),
    ("passes", "digits[2]"),
)
_TABLE = ("rows", "neighbours_shape[0]"), ("volume", "neighbours_shape[1]")
# The fields of each struct of sizes, and how a kernel reads them.
SIZES = {
    "HashRows": (
        ("rows", "coords_shape[0]"),
        ("scratch_words", "words[0]"),
        ("block", "blockIdx.x"),
        ("blocks", "gridDim.x"),
    ),
    "Table": (
        ("rows", "n"),
        ("volume", "facts[0]"),
        ("digit_bits", "facts[1]"),
        ("passes", "facts[2]"),
        ("chunk_rows", "chunk_rows_of(n, facts[0], gridDim.x)"),
    ),
    "RadixSort": (("keys", "keys_shape[0]"), *_DIGITS[1:]),
    "PackKeys": (("rows", "coords_shape[0]"), *_DIGITS),
    "RowKeys": (("places", "table_shape[0]"), *_DIGITS[1:]),
    "RowStarts": (("places", "keys_shape[0]"),),
    "CutPieces": (("starts", "starts_shape[0]"),),
    "CurveKeys": (("rows", "coords_shape[0]"), *_DIGITS[1:]),
    "ScoreKeys": (("rows", "scores_shape[0]"), ("least", "digits[0]"), *_DIGITS[1:]),
    "MarkBest": (
        ("rows", "keys_shape[0]"),
        ("score_bits", "facts[0]"),
        ("k", "facts[1]"),
    ),
    "UniqueKeys": (("keys", "keys_shape[0]"), ("passes", "digits[2]")),
    "UnpackKeys": (("keys", "unique_shape[0]"),),
    "KeptPlaces": (("rows", "mask_shape[0]"),),
    "KeptRows": (("rows", "places_shape[0]"),),
    "TransposeTable": _TABLE,
    "SortTable": (
        ("rows", "rows_shape[0]"),
        ("pitch", "gridDim.x * blockDim.x"),
        ("volume", "neighbours_shape[1]"),
    ),
    "IdentityTiles": (("rows", "fed_shape[0]"),),
    "UnsortTable": (
        ("rows", "rows_shape[0]"),
        ("pitch", "sorted_shape[1]"),
        ("volume", "sorted_shape[0]"),
    ),
    "ScanCounts": (("bands", "counts_shape[1]"),),
    "WriteEdges": (*_TABLE, ("bands", "starts_shape[1]"), ("listed", "sums_shape[0]")),
}
# Words that kernels share, in an array that MLX takes for an input.
SCRATCH = "reinterpret_cast<unsigned*>(const_cast<uint32_t*>(scratch))"
# How kernels take keys, of the type KEY of their template.
READ_KEYS = ("keys", "reinterpret_cast<const KEY*>(keys)")
_WRITTEN_KEYS = (
    ("digits", ""),
    ("scratch", SCRATCH),
    ("keys", "reinterpret_cast<KEY*>(keys)"),
)
THREADS, STRIDING_BLOCKS = 256, 8  # of a block, and on a multiprocessor
BINS = 512  # of a digit, at most
HEADER = 32  # words of scratch before the histograms
SORT_THREADS, SORT_BLOCKS = 512, 2  # of a block, and on a multiprocessor
SORT_TILE = 8 * SORT_THREADS  # keys of one block of the sort
MOST_KEYS = 1 << 30  # of a sort; the kernel's sums are below SUM_OF_TILE
KEYS = {mx.uint32: "unsigned", mx.uint64: "unsigned long long"}
SORT = ("rows.cuh", "radix_sort.cu")
_BEST, _KEPT = (*SORT, "best_rows.cu"), (*SORT, "kept_rows.cu")


def structs(but: str = "") -> tuple[Interface, ...]:
    """Return an interface for every struct of sizes: files name several."""
    return tuple(
        Interface(name, (), (), sizes) for name, sizes in SIZES.items() if name != but
    )


@cache
def geometry_kernel(
    symbol: str,
    files: tuple[str, ...],
    struct: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    threads: int = THREADS,
    **more: object,
) -> GpuKernel:
    """Return a kernel of geometry, one object for equal arguments.

    Args:
        symbol: the function.
        files: its sources.
        struct: the name of its sizes, one of ``SIZES`` if it has any.
        inputs: names of the inputs.
        outputs: names of the outputs.
        threads: of a block.
        more: other fields of GpuKernel.
    """
    face = Interface(struct, inputs, outputs, SIZES.get(struct, ()))
    facts = {"also": structs(but=struct), "threads": threads, "geometry": True, **more}
    return GpuKernel(CUDA, symbol, files, face, **facts)


def run(
    kernel: GpuKernel,
    inputs: Sequence[mx.array],
    blocks: int,
    outputs: Sequence[Output],
    fill: int | None = None,
) -> list[mx.array]:
    """Launch so many blocks."""
    threads = kernel.threads
    return kernel(inputs, outputs, (blocks * threads,), (threads,), fill=fill)


@lru_cache(maxsize=1024)
def constant(*values: int, dtype: mx.Dtype = mx.int32) -> mx.array:
    """Return cached integers on the device, where a kernel reads them fast."""
    array = mx.array(values, dtype=dtype) + 0
    sync.compute([array])
    return array


def cleared(words: int) -> mx.array:
    """Return words of 0; the value is read on the device.

    ``mx.compile`` makes one array of arrays that are made alike, which launches would
    then share. In a graph that may be traced, each has a zero of its own.
    """
    place = next(_places) % len(_zeros()) if sync.is_transforming() else 0
    return mx.full((words,), _zeros()[place])


_places = count()


@cache
def _zeros() -> list[mx.array]:
    """Return more arrays of one 0 than a graph has launches that need scratch."""
    zeros = mx.split(mx.zeros((1024,), dtype=mx.uint32), 1024)
    sync.compute(zeros)
    return zeros


@lru_cache(maxsize=256)
def rule_constant(offsets: tuple, stride: tuple) -> mx.array:
    """Return the offsets one after another, then the strides."""
    return constant(*(v for offset in offsets for v in offset), *stride, 0, 0)


@cache
def multiprocessors() -> int:
    """Return how many multiprocessors the device has."""
    return current().cores


def striding_blocks(elements: int) -> int:
    """Return how many blocks of THREADS stride over some elements."""
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
    """Whether the sort takes so many keys: their count lies beside two flags."""
    return n <= MOST_KEYS


def key_dtype(bits: int) -> mx.Dtype:
    """Return the dtype of keys of so many bits."""
    return mx.uint32 if bits <= 32 else mx.uint64


def sort_keys(
    keys: mx.array, digits: mx.array, scratch: mx.array, *, rows: bool, keep: bool
) -> tuple[mx.array, mx.array | None]:
    """Sort (N,) keys whose histograms stand in scratch, in one launch; stable.

    Args:
        keys: uint32 or uint64.
        digits: constant (anything, bits of a digit, passes, 0).
        scratch: ``scratch_words`` words, used up by this.
        rows: whether to sort their places along.
        keep: whether the sorted keys are wanted.

    Returns:
        (sorted keys, or anything if not kept; (N,) int32 places, or None)
    """
    n, numeric = keys.shape[0], KEYS[keys.dtype]
    outputs = "sorted_keys", "work_keys", "sorted_rows", "work_rows"
    kernel = geometry_kernel(
        "radix_sort",
        SORT,
        "RadixSort",
        ("keys", "digits", "scratch"),
        outputs if rows else outputs[:2],
        SORT_THREADS,
        template=(("KEY", numeric), ("ROWS", rows), ("KEEP", keep)),
        arguments=(
            READ_KEYS,
            *_WRITTEN_KEYS[:2],
            ("sorted_keys", "reinterpret_cast<KEY*>(sorted_keys)"),
            (
                "work_keys",
                "reinterpret_cast<KEY*>(work_keys)" + ", nullptr" * 2 * (not rows),
            ),
        ),
        blocks_per_multiprocessor=SORT_BLOCKS,
    )
    blocks = min(multiprocessors() * SORT_BLOCKS, -(-n // SORT_TILE))
    made = [((n,), keys.dtype)] * 2 + [((n,), mx.int32)] * 2 * rows
    sorted_keys, _, *places = run(kernel, [keys, digits, scratch], blocks, made)
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
        keep: whether the sorted keys are wanted; otherwise they are anything.
    """
    passes, each = digits_of(bits)
    dtype = key_dtype(bits)
    digits, scratch = constant(fact, each, passes, 0), cleared(scratch_words(n, passes))
    given, made = [*inputs, digits, scratch], [((n,), dtype)]
    (keys,) = run(make_keys(KEYS[dtype]), given, striding_blocks(n), made)
    return sort_keys(keys, digits, scratch, rows=True, keep=keep)


def curve_order(coords: mx.array, curve: Curve) -> mx.array:
    """Return the (N,) int32 order of rows by batch, then along a curve."""
    n, columns = coords.shape
    if not curve.is_numbered or not sorts(n):
        return curves.curve_order(coords, curve)
    make_keys = partial(_curve_keys, columns, curve.is_hilbert, curve.is_swapped)
    inputs = coords, _frame((*curve.low, curve.bits))
    return sorted_places(make_keys, inputs, n, curve.of_key, keep=False)[1]


@lru_cache(maxsize=256)
def _frame(values: tuple[int, ...]) -> mx.array:
    """Return what cells are counted from, cached: its first read is slow."""
    return mx.array(values, dtype=mx.int32)


def _curve_keys(columns: int, is_hilbert: bool, is_swapped: bool, numeric: str):
    return geometry_kernel(
        "curve_keys",
        (*SORT, "curve_keys.cu"),
        "CurveKeys",
        ("coords", "frame", "digits", "scratch"),
        ("keys",),
        template=(
            ("COLUMNS", columns),
            ("HILBERT", is_hilbert),
            ("SWAPPED", is_swapped),
            ("KEY", numeric),
        ),
        arguments=_WRITTEN_KEYS,
    )


class StartedRows:
    """Rows that a mask keeps, launched; see ``geometry.protocol.StartedRows``."""

    def __init__(self, mask: mx.array, coords: mx.array):
        n = mask.size
        tiles, self._coords = -(-n // SORT_TILE), coords
        kernel = geometry_kernel(
            "kept_places",
            _KEPT,
            "KeptPlaces",
            ("mask", "scratch"),
            ("places", "found"),
            SORT_THREADS,
            arguments=(("scratch", SCRATCH),),
        )
        made = [((n,), mx.int32), ((1,), mx.int32)]
        self._places, self.count = run(kernel, [mask, cleared(1 + tiles)], tiles, made)

    def kept(self, count: int) -> KeptRows:
        """Return the rows."""
        if not count:
            return unique.none_of(self._coords, self._places)
        n, columns = self._coords.shape
        kernel = geometry_kernel(
            "kept_rows",
            _KEPT,
            "KeptRows",
            ("places", "coords"),
            ("rows", "kept"),
            template=(("COLUMNS", columns),),
        )
        made = [((count,), mx.int32), ((count, columns), mx.int32)]
        given = [self._places, self._coords]
        rows, kept = run(kernel, given, striding_blocks(n), made)
        return KeptRows(rows, self._places, kept)


def start_kept(mask: mx.array, coords: mx.array) -> StartedRows | unique.StartedRows:
    """Launch the rows that a mask keeps. See ``Geometry``."""
    kind = StartedRows if sorts(mask.size) else unique.StartedRows
    return kind(mask, coords)


def best_rows(
    scores: mx.array, coords: mx.array, batches: tuple[int, int], k: int
) -> mx.array:
    """Return (N,) bool: which rows are the best of their element. See ``Geometry``."""
    n, columns = coords.shape
    if not sorts(n):
        return unique.best_rows(scores, coords, batches, k)
    scores = scores if scores.dtype in INFINITE else scores.astype(mx.float32)
    infinite, word = INFINITE[scores.dtype]
    score_bits, (least, greatest) = 8 * word.size, batches
    bits = score_bits + (greatest - least).bit_length()
    make_keys = partial(_score_keys, columns, infinite)
    inputs = scores.view(word), coords
    keys, rows = sorted_places(make_keys, inputs, n, bits, fact=least, keep=True)
    kernel = geometry_kernel(
        "mark_best",
        _BEST,
        "MarkBest",
        ("keys", "rows", "facts"),
        ("kept",),
        template=(("KEY", KEYS[keys.dtype]),),
        arguments=(READ_KEYS, ("facts", "")),
    )
    given, made = [keys, rows, constant(score_bits, k)], [((n,), mx.bool_)]
    return run(kernel, given, striding_blocks(n), made)[0]


def _score_keys(columns: int, infinite: int, numeric: str):
    return geometry_kernel(
        "score_keys",
        _BEST,
        "ScoreKeys",
        ("scores", "coords", "digits", "scratch"),
        ("keys",),
        template=(("COLUMNS", columns), ("INFINITE", infinite), ("KEY", numeric)),
        arguments=_WRITTEN_KEYS,
    )
