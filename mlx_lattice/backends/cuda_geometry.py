"""Coordinate sets on CUDA: hash look-ups, neighbour tables, sorted unique rows.

Everything is launched without waiting for the device; what the host must know it reads
once, through ``host.read``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import mlx.core as mx

from .. import geometry, host
from .. import made_rows as rules
from ..devices import current
from ..geometry import Bounds, UniqueRows
from ..made_rows import CELL, EXPAND, ITSELF, REACH
from .cuda_kernels import kernel, run

THREADS = 256
BINS = 512  # of a digit of the radix sort, at most
BAND = 64  # rows of one count of edges
SORT_THREADS = 512
SORT_TILE = 8 * SORT_THREADS  # keys of one block of the radix sort
SURVEYS = 6  # blocks of a survey that share a multiprocessor
HASH_BLOCKS = 1056
HEADER = 16  # words of scratch before the histograms
SPARE_OFFSETS = 27  # of the relation that a new set is ready for
RANKED_OFFSETS = 64  # offsets of a mask that has a rank of one word
MOST_OFFSETS = 2048  # whose masks fit in a block's shared memory
MOST_KEYS = 1 << 30  # that counts beside two flags in a word can number
KEYS = {mx.uint32: "unsigned", mx.uint64: "unsigned long long"}

# How offsets are applied; on stride 1 either rule is an addition.
FORWARD, TRANSPOSED, UNIT = "FORWARD", "TRANSPOSED", "UNIT"

_TABLE = ("rows.cuh", "neighbour_table.cu")
_SORT = ("rows.cuh", "radix_sort.cu")
_UNIQUE = (*_SORT, "unique_rows.cu")


@lru_cache(maxsize=1024)
def constant(*values: int, dtype: mx.Dtype = mx.int32) -> mx.array:
    """Return integers on the device, where a kernel reads them fast; kept."""
    array = mx.array(values, dtype=dtype) + 0
    mx.eval(array)
    return array


@lru_cache(maxsize=256)
def rule_constant(offsets: tuple, stride: tuple) -> mx.array:
    """Return the offsets one after another, then the strides."""
    return constant(*(v for offset in offsets for v in offset), *stride, 0, 0)


@cache
def multiprocessors() -> int:
    """Return how many the device has."""
    return current().cores


def blocks_for(elements: int, per_multiprocessor: int = 8) -> int:
    """Return how many blocks of THREADS stride over some elements."""
    most = multiprocessors() * per_multiprocessor
    return max(1, min(most, -(-elements // THREADS)))


class RowTable:
    """Finds the rows of one coordinate set by value, through a hash table.

    Args:
        coords: (N, 1 + D) int32, any values. Of equal rows the first is found.
    """

    def __init__(self, coords: mx.array):
        self.coords, (n, columns) = coords, coords.shape
        if n == 0:
            return
        capacity = max(16, 1 << (4 * n - 1).bit_length())
        blocks = min(HASH_BLOCKS, -(-n // THREADS))
        shared = 2 + 2 * columns * blocks
        # Written by the kernel, and so by no other: nobody else holds it.
        self.slots = mx.full((capacity + shared,), -1, dtype=mx.int32)
        # Cleared beside, for the survey of the set's first relation.
        words = scratch_words(n, *digits_of(SPARE_OFFSETS)[:1])
        outputs = [((2,), mx.int32)] * (1 + columns) + [((words,), mx.uint32)]
        inputs = [coords, self.slots, constant(words, 0, 0, 0)]
        *self.found, self.spare = run(
            _hash_rows(columns), inputs, blocks, THREADS, outputs
        )

    def _take_spare(self, words: int) -> mx.array:
        spare, self.spare = self.spare, None
        if spare is None or spare.size < words:
            return mx.zeros((words,), dtype=mx.uint32)
        return spare

    def facts(self) -> list[mx.array]:
        """Return small arrays: (first repeat or -1, 0), then each column's range."""
        return self.found if self.coords.shape[0] else []

    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        (later, _), *ranges = facts
        low, high = zip(*ranges, strict=True)
        if later < 0:
            return (low, high), None
        first = self.find(self.coords[later : later + 1])
        return (low, high), (host.read(first)[0][0], later)

    def find(self, rows: mx.array) -> mx.array:
        """Return for each of the (Q, 1 + D) int32 rows its (Q,) int32 place, or -1."""
        dims = rows.shape[1] - 1
        return self.table(rows, [(0,) * dims], (1,) * dims)[:, 0]

    def table(
        self,
        out_coords: mx.array,
        offsets: Sequence[Sequence[int]],
        stride: Sequence[int],
        transposed: bool = False,
        keep=None,
    ) -> mx.array:
        """Return the (N_out, K) int32 input row of each output row and offset, or -1.

        Args:
            out_coords: (N_out, 1 + D) int32.
            offsets: K offsets of D integers.
            stride: D integers.
            transposed: whether ``out = in * stride + offset_k``, not
                ``in = out * stride + offset_k``.
            keep: called with a name and the table's survey, which comes with it.
        """
        (n_in, columns), n_out = self.coords.shape, out_coords.shape[0]
        volume = len(offsets)
        if n_in == 0 or n_out == 0:
            return mx.full((n_out, volume), -1, dtype=mx.int32)
        if volume > MOST_OFFSETS:
            parts = [
                self.table(
                    out_coords, offsets[k : k + MOST_OFFSETS], stride, transposed
                )
                for k in range(0, volume, MOST_OFFSETS)
            ]
            return mx.concatenate(parts, axis=1)
        survey = Survey.blank(n_out, volume, self._take_spare)
        kind = UNIT if max(stride) == 1 else TRANSPOSED if transposed else FORWARD
        offsets = tuple(map(tuple, offsets))
        if kind == UNIT and transposed:
            offsets = geometry.negated(offsets)
        rule = rule_constant(offsets, tuple(stride))
        inputs = [self.coords, self.slots, self.found[0], out_coords, rule]
        table, *surveyed = run(
            _neighbour_table(columns, kind, volume),
            [*inputs, survey.digits, survey.scratch],
            survey.blocks,
            THREADS,
            [((n_out, volume), mx.int32), *survey.outputs],
        )
        if keep is not None:
            keep("survey", survey.with_(*surveyed))
        return table


class Survey(NamedTuple):
    """What the views of a table start from, counted while it was made.

    Attributes:
        shape: (N, K) of the table.
        digits: constant (volume, bits of a digit, passes, 0).
        scratch: words that the kernels of the sort share.
        ranks: (N,) Gray rank of each row's mask; of no meaning where K > 64.
        counts: (K, bands) int32: edges of each offset and band of rows.
        edges: (1,) int64: all edges.
    """

    shape: tuple[int, int]
    digits: mx.array
    scratch: mx.array
    ranks: mx.array | None = None
    counts: mx.array | None = None
    edges: mx.array | None = None

    @classmethod
    def blank(cls, n: int, volume: int, cleared=None) -> Survey:
        """Return the inputs of a survey of a table of n rows.

        ``cleared(words)`` returns words of 0; by default new ones.
        """
        passes, bits = digits_of(volume if volume <= RANKED_OFFSETS else 1)
        words = scratch_words(n, passes)
        cleared = cleared or (lambda words: mx.zeros((words,), dtype=mx.uint32))
        scratch = cleared(words)
        return cls((n, volume), constant(volume, bits, passes, 0), scratch)

    @property
    def blocks(self) -> int:
        """Blocks of the kernel that surveys."""
        return min(multiprocessors() * SURVEYS, -(-self.shape[0] // BAND))

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Shapes and dtypes of ranks, counts and edges."""
        n, volume = self.shape
        key = mx.uint32 if volume <= 32 else mx.uint64
        ranks = n if volume <= RANKED_OFFSETS else 1
        bands = -(-n // BAND)
        return [((ranks,), key), ((volume, bands), mx.int32), ((1,), mx.int64)]

    def with_(self, ranks: mx.array, counts: mx.array, edges: mx.array) -> Survey:
        """Return the survey with what the kernel found."""
        return self._replace(ranks=ranks, counts=counts, edges=edges)


def digits_of(bits: int) -> tuple[int, int]:
    """Return into how many digits the radix sort cuts a key, and their bits."""
    passes = -(-bits // 9)
    return passes, -(-bits // passes)


def scratch_words(n: int, passes: int) -> int:
    """Return the words that the passes of a sort of n keys share."""
    tiles = -(-n // SORT_TILE)
    return HEADER + passes * (1 + tiles) * BINS + tiles


def neighbour_table(in_coords, out_coords, offsets, stride, transposed) -> mx.array:
    """Return (N_out, K) int32 input rows, or -1; see ``geometry.forward_table``."""
    return RowTable(in_coords).table(out_coords, offsets, stride, transposed)


def first_duplicate(coords: mx.array) -> tuple[int, int] | None:
    """Return the earliest pair of equal rows, or None."""
    if coords.shape[0] < 2:
        return None
    rows = RowTable(coords)
    return rows.settle(host.read(*rows.facts()))[1]


def bounds(coords: mx.array) -> Bounds:
    """Return the least and the greatest value of every column of (N, 1 + D) int32."""
    rows = RowTable(coords)
    return rows.settle(host.read(*rows.facts()))[0]


SCRATCH = "reinterpret_cast<unsigned*>(const_cast<uint32_t*>(scratch))"


def survey_kernel(
    name: str, files, inputs, call: str, sizes: str, volume: int, outs=()
):
    """Return a kernel that surveys a table.

    Args:
        name: of the kernel, before what depends on the volume.
        files: sources.
        inputs: names before ``digits`` and ``scratch``.
        call: the function up to its template arguments, and those before ``WORDS``;
            a "(", and its arguments before the survey's.
        sizes: its arguments before ``digits``.
        volume: K.
        outs: names of outputs before the survey's.
    """
    words = 0 if volume > RANKED_OFFSETS else 1 if volume <= 32 else 2
    key = "unsigned" if volume <= 32 else "unsigned long long"
    template, arguments = call.split("(")
    define, suffix = "", f"_{words}"
    if volume > 512:
        most = 1 << (volume - 1).bit_length()
        define, suffix = f"#define LATTICE_MAX_OFFSETS {most}", f"_k{most}"
    return kernel(
        name + suffix,
        files,
        (*inputs, "digits", "scratch"),
        (*outs, "ranks", "counts", "edges"),
        f"lattice::{template}{words}>({arguments}, "
        f"reinterpret_cast<{key}*>(ranks), counts, {SCRATCH}, "
        f"reinterpret_cast<long long*>(edges), {sizes}, digits);",
        threads=THREADS,
        blocks_per_multiprocessor=SURVEYS,
        define=define,
    )


@cache
def _neighbour_table(columns: int, rule: str, volume: int):
    return survey_kernel(
        f"neighbour_table_{columns}_{rule}",
        _TABLE,
        ("coords", "slots", "hashed", "out_rows", "rule"),
        f"neighbour_table<{columns}, lattice::{rule}, "
        "(coords, slots, out_rows, rule, neighbours",
        "coords_shape[0], out_rows_shape[0]",
        volume,
        ("neighbours",),
    )


@cache
def _hash_rows(columns: int):
    names = [f"range{c}" for c in range(columns)]
    return kernel(
        f"hash_rows_{columns}",
        ("rows.cuh", "hash_rows.cu"),
        ("coords", "slots", "words"),
        ("repeat", *names, "spare"),
        f"int* const ranges[] = {{{', '.join(names)}}};\n"
        f"lattice::hash_rows<{columns}>(coords, const_cast<int*>(slots), repeat, "
        "ranges, reinterpret_cast<unsigned*>(spare), coords_shape[0], words[0]);",
        threads=THREADS,
    )


# Sorted unique rows


def unique_rows(coords: mx.array, *, bounds: Bounds | None = None) -> UniqueRows:
    """Return the sorted unique rows and the place of each row among them.

    Reads one size, and the bounds where they are not given.
    """
    box = bounds or geometry.bounds_of(coords)
    dims = coords.shape[1] - 1
    made = _made_rows(coords, ITSELF, [(0,) * dims], (1,) * dims, box, places=True)
    return UniqueRows(*made) if made else geometry.unique_rows(coords)


def cell_rows(coords, stride, *, bounds=None) -> mx.array:
    """Return the sorted unique ``floor(row / stride)``. Reads one size."""
    return _ruled(coords, CELL, [(0,) * len(stride)], stride, None, bounds)


def reached_rows(coords, offsets, stride, *, spatial_shape=None, bounds=None):
    """Return the sorted unique rows that some input reaches; all fit into int32.

    Reads one size. ``spatial_shape`` keeps only the rows in ``[0, spatial_shape)``.
    """
    return _ruled(coords, REACH, offsets, stride, spatial_shape, bounds)


def expanded_rows(coords, offsets, stride, *, spatial_shape=None, bounds=None):
    """Return the sorted unique ``in * stride + offset_k``; all fit into int32.

    Takes what ``reached_rows`` does.
    """
    return _ruled(coords, EXPAND, offsets, stride, spatial_shape, bounds)


def _ruled(coords, rule, offsets, stride, shape, bounds) -> mx.array:
    bounds = bounds or geometry.bounds_of(coords)
    box = rules.cut(rules.box_of(rule, bounds, offsets, stride), shape)
    made = _made_rows(coords, rule, offsets, stride, box)
    return made[0] if made else rules.made_rows(coords, rule, offsets, stride, box)


def _made_rows(coords, rule, offsets, stride, box, places=False):
    """Return (rows, places or None), or None where keys cannot number the box."""
    n, columns = coords.shape
    extents = [high - low + 1 for low, high in zip(*box, strict=True)]
    candidates, cells = n * len(offsets), prod(extents)
    if candidates == 0 or min(extents) <= 0:
        none = mx.zeros((0,), dtype=mx.int32)
        return mx.zeros((0, columns), dtype=mx.int32), none
    if cells >= geometry.KEY_LIMIT or candidates > MOST_KEYS:
        return None
    bits = cells.bit_length()
    passes, each = digits_of(bits)
    key = mx.uint32 if bits <= 32 else mx.uint64
    digits = constant(len(offsets), each, passes, 0)
    ranges = [mx.array(pair, dtype=mx.int32) for pair in zip(*box, strict=True)]
    scratch = mx.zeros((scratch_words(candidates, passes),), dtype=mx.uint32)
    numbers = [((candidates,), key)]
    numeric = KEYS[key]
    constants = rule_constant(tuple(map(tuple, offsets)), tuple(stride))
    keys = run(
        _pack_keys(columns, rule, numeric),
        [coords, constants, *ranges, digits, scratch],
        blocks_for(candidates),
        THREADS,
        numbers,
    )[0]
    keys, rows = sort_keys(keys, digits, scratch, passes, rows=places, keep=True)
    tiles = -(-candidates // SORT_TILE)
    outputs = [*numbers, ((1,), mx.int64)]
    if places:
        outputs.append(((candidates,), mx.int32))
    unique, found, *place = run(
        _unique_keys(columns, numeric, places),
        [keys, keys if rows is None else rows, *ranges, digits, scratch],
        tiles,
        SORT_THREADS,
        outputs,
    )
    count = host.read(found)[0][0]
    made = run(
        _unpack_keys(columns, numeric),
        [unique, found, *ranges],
        blocks_for(count),
        THREADS,
        [((count, columns), mx.int32)],
    )[0]
    return made, place[0] if places else None


def sort_keys(keys, digits, scratch, passes: int, *, rows: bool, keep: bool):
    """Sort (N,) keys whose histograms stand in scratch; stable.

    Args:
        keys: uint32 or uint64.
        digits: constant (anything, bits of a digit, passes, 0).
        scratch: ``scratch_words`` words, used up by this.
        passes: digits of a key.
        rows: whether to sort their places along.
        keep: whether the sorted keys are wanted.

    Returns:
        (sorted keys, or anything where not kept; (N,) int32 places, or None)
    """
    n, numeric = keys.shape[0], KEYS[keys.dtype]
    place = keys
    for number in range(passes):
        outputs = [((n,), keys.dtype)] + ([((n,), mx.int32)] if rows else [])
        if not keep and number == passes - 1:
            outputs[0] = (1,), keys.dtype
        keys, *places = run(
            _radix_pass(numeric, rows, keep),
            [keys, place, digits, constant(number, 0, 0, 0), scratch],
            -(-n // SORT_TILE),
            SORT_THREADS,
            outputs,
        )
        place = places[0] if rows else keys
    return keys, place if rows else None


def _ranges(columns: int) -> tuple[list[str], str]:
    names = [f"range{c}" for c in range(columns)]
    return names, f"const int* const ranges[] = {{{', '.join(names)}}};\n"


@cache
def _radix_pass(numeric: str, rows: bool, keep: bool):
    flags = f"{str(rows).lower()}, {str(keep).lower()}"
    name = f"radix_pass_{numeric.split()[-1]}_{flags.replace(', ', '_')}"
    return kernel(
        f"{name}_{len(numeric)}",
        _SORT,
        ("keys", "places", "digits", "which", "scratch"),
        ("sorted_keys", "sorted_rows") if rows else ("sorted_keys",),
        f"using Key = {numeric};\n"
        f"lattice::radix_pass<Key, {flags}>(reinterpret_cast<const Key*>(keys), "
        "reinterpret_cast<const int*>(places), digits, which, "
        "reinterpret_cast<Key*>(sorted_keys), "
        f"{'sorted_rows' if rows else 'nullptr'}, {SCRATCH}, keys_shape[0]);",
        threads=SORT_THREADS,
        blocks_per_multiprocessor=2,
    )


@cache
def _pack_keys(columns: int, rule: str, numeric: str):
    names, ranges = _ranges(columns)
    return kernel(
        f"pack_keys_{columns}_{rule}_{len(numeric)}",
        _UNIQUE,
        ("coords", "rule", *names, "digits", "scratch"),
        ("keys",),
        f"using Key = {numeric};\n{ranges}"
        f"lattice::pack_keys<{columns}, lattice::{rule}>(coords, rule, ranges, digits, "
        f"reinterpret_cast<Key*>(keys), {SCRATCH}, coords_shape[0]);",
        threads=THREADS,
    )


@cache
def _unique_keys(columns: int, numeric: str, places: bool):
    names, ranges = _ranges(columns)
    return kernel(
        f"unique_keys_{columns}_{len(numeric)}_{places}",
        _UNIQUE,
        ("keys", "rows", *names, "digits", "scratch"),
        ("unique", "found", "places") if places else ("unique", "found"),
        f"using Key = {numeric};\n{ranges}"
        f"lattice::unique_keys<{columns}, Key, {str(places).lower()}>("
        "reinterpret_cast<const Key*>(keys), reinterpret_cast<const int*>(rows), "
        "ranges, digits, reinterpret_cast<Key*>(unique), "
        "reinterpret_cast<long long*>(found), "
        f"{'places' if places else 'nullptr'}, {SCRATCH}, keys_shape[0]);",
        threads=SORT_THREADS,
    )


@cache
def _unpack_keys(columns: int, numeric: str):
    names, ranges = _ranges(columns)
    return kernel(
        f"unpack_keys_{columns}_{len(numeric)}",
        _UNIQUE,
        ("unique", "found", *names),
        ("rows",),
        f"using Key = {numeric};\n{ranges}"
        f"lattice::unpack_keys<{columns}>(reinterpret_cast<const Key*>(unique), "
        "reinterpret_cast<const long long*>(found), ranges, rows);",
        threads=THREADS,
    )
