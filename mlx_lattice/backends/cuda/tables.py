"""Neighbour tables of relations on CUDA, and the views that routes read of them.

Everything is launched without waiting for the device. What Python must know it reads
once, through ``sync.read``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx

from ... import sync
from ...geometry import curves
from ...geometry.keys import Bounds, Offsets, bounds_of
from ...geometry.lattice import negated
from ...geometry.protocol import Keep, RelationViews, Rows
from ...sync import built_by_one
from ..gpu.kernel import GpuKernel
from ..gpu.sort import (
    HEADER,
    KEYS,
    SCRATCH,
    SORT_THREADS,
    THREADS,
    cleared,
    constant,
    digits_of,
    geometry_kernel,
    key_dtype,
    multiprocessors,
    run,
    scratch_words,
    sorts,
    striding_blocks,
)

TILES, COUNTS = "cuda_sorted", "band_counts"  # names of a relation's views
BAND = 64  # rows of one count of edges
COUNTING_BLOCKS, TILING_BLOCKS = 4, 2  # of the two kernels, on a multiprocessor
MASK_OFFSETS, RANKED_OFFSETS = 64, 63  # of a mask, and of a rank if there are more
ROW_ALIGNMENT = 384  # heights of WideTile divide it: 64, 128, 192
TILE_SCRATCH = 4 * (SORT_THREADS // 32) * 32 * 33  # bytes of shared memory
EDGE_ROWS = 256  # rows of a block that writes edges: four bands
STAGE_PAIRS = 32, 64  # of a stage of a weight gradient
HASH_BLOCKS = 1056  # at most: each writes bounds
TABLE_WORDS = 8  # after the slots of a hash, before the bounds: BOUNDS of rows.cuh
FIRST_OFFSETS = 27  # of the first tiles, whose scratch is cleared with the hash
SCRATCH_STEP = 1 << 10  # words; each size of scratch is a constant on the device
_TABLE_FILES = ("rows.cuh", "table_sources.cuh", "neighbour_table.cu")
TILES_FILES = (*_TABLE_FILES, "radix_sort.cu", "sort_table.cu", "relation_tiles.cu")
_VIEWS = ("rows.cuh", "sort_table.cu", "relation_views.cu")


# Rules of look-ups, as `enum Rule` of `cuda/table_sources.cuh` says


PART_OFFSETS, GROUP, PARTS_AT = 64, 3, 12
# How offsets are applied; with stride 1 either rule is an addition. Rows whose only
# neighbour is themselves are not looked up.
KINDS = FORWARD, TRANSPOSED, UNIT, ITSELF = "FORWARD", "TRANSPOSED", "UNIT", "ITSELF"
_WIDE = 1 << 30  # beyond it sums are made in 64 bits
RuleOffsets = tuple[tuple[int, ...], ...]


def rule_kind(
    offsets: RuleOffsets, stride: tuple[int, ...], transposed: bool
) -> tuple[str, RuleOffsets]:
    """Return the kind of a rule, and the offsets in its sense."""
    if max(stride) > 1:
        return (TRANSPOSED if transposed else FORWARD), offsets
    return UNIT, negated(offsets) if transposed else offsets


def rule_words(offsets: RuleOffsets, stride: tuple[int, ...], kind: str) -> list[int]:
    """Return the words of a rule: a header, groups, pairs, and the plain offsets."""
    shifts = [s.bit_length() - 1 if s & (s - 1) == 0 else -1 for s in stride]
    if kind == TRANSPOSED:
        scaled = [
            (
                tuple(-(v // s) for v, s in zip(o, stride, strict=True)),
                tuple(v % s for v, s in zip(o, stride, strict=True)),
            )
            for o in offsets
        ]
    else:
        scaled = [(o, (0,) * len(o)) for o in offsets]
    is_wide = any(abs(v) >= _WIDE for at, _ in scaled for v in at)
    if is_wide:  # then the kernel goes by the plain offsets
        scaled = [((0,) * len(stride),) * 2] * len(offsets)
    parts, records = [], []
    for k0 in range(0, len(offsets), PART_OFFSETS):
        parts.append(len(records))
        records += _groups(scaled[k0 : k0 + PART_OFFSETS], k0, kind)
    parts.append(len(records))
    groups_at = -(-(PARTS_AT + len(parts)) // 4) * 4
    pairs_at = groups_at + 12 * len(records)
    offsets_at = pairs_at + 2 * len(offsets)
    return [
        *_filled(stride),
        *_filled(shifts),
        *(-int(is_wide), groups_at, pairs_at, offsets_at),
        *_filled(parts, groups_at - PARTS_AT),
        *(v for record in records for v in record),
        *(v for at, rest in scaled for v in (at[-1], rest[-1])),
        *(v for offset in offsets for v in offset),
    ]


def _groups(scaled, k0: int, kind: str) -> list[list[int]]:
    """Return the groups of a part: up to three offsets that differ in the last axis.

    Their last coordinates go by one step, except if remainders are compared.
    """
    groups, k = [], 0
    while k < len(scaled):
        (at, rest), count = scaled[k], 1
        step = 0
        for other, left in scaled[k + 1 : k + GROUP]:
            if (other[:-1], left[:-1]) != (at[:-1], rest[:-1]):
                break
            apart = other[-1] - scaled[k + count - 1][0][-1]
            if kind != TRANSPOSED and count > 1 and apart != step:
                break
            step, count = apart, count + 1
        groups.append(
            [k0 + k, count, at[-1], step, *_filled(at[:-1]), *_filled(rest[:-1])]
        )
        k += count
    return groups


def _filled(values, length: int = 4) -> list[int]:
    return [*values, *(0,) * (length - len(values))]


# Tables, made with counts of their edges, and tiles, in one launch


class BandCounts(NamedTuple):
    """Edges counted while a table is made.

    Attributes:
        bands: (K, bands) int32: edges of each offset in each band of 64 rows.
        edges: (1,) int64: all edges.
    """

    bands: mx.array
    edges: mx.array


class Sorted(NamedTuple):
    """A relation's rows by the Gray-code rank of their masks, laid out for tiles.

    If there are more than 64 offsets, the last 63 rank.

    Attributes:
        table: (K, pitch) int32.
        rows: (N_out,) int32.
        masks: (pitch / 32, words) uint32: the offsets that any of 32 rows uses.
        mirrored: whether offset k stands for K - 1 - k.
    """

    table: mx.array
    rows: mx.array
    masks: mx.array
    mirrored: bool = False


class Code(NamedTuple):
    """How a kernel gets the entries of a table.

    Attributes:
        type: C++ type of their source.
        inputs: names of its inputs.
        values: what the source is made of: inputs, and extents of them.
        rows: the extent that is the number of rows.
        is_new: whether the kernel makes the table; else it is the first input.
    """

    type: str
    inputs: tuple[str, ...]
    values: tuple[str, ...]
    rows: str
    is_new: bool


class Source(NamedTuple):
    """Where the entries of an (n, K) table come from: code and its inputs."""

    code: Code
    inputs: tuple[mx.array, ...]
    n: int
    volume: int


_READ = Code(
    "Read",
    ("neighbours",),
    ("neighbours", "neighbours_shape[1]"),
    "neighbours_shape[0]",
    False,
)


def rank_bits(volume: int) -> int:
    """Return the bits of a rank, by which the radix sort orders rows."""
    return volume if volume <= MASK_OFFSETS else RANKED_OFFSETS


def table_source(table: mx.array) -> Source:
    """Return the source that reads an existing table with rows and offsets."""
    return Source(_READ, (table,), *table.shape)


def counted_table(source: Source, clear=cleared) -> tuple[mx.array, BandCounts]:
    """Return the table of a source, and what was counted."""
    n, volume = source.n, source.volume
    kernel = _table_kernel(
        "band_counts",
        _TABLE_FILES,
        source.code,
        volume,
        threads=THREADS,
        blocks_per_multiprocessor=COUNTING_BLOCKS,
    )
    inputs = [*source.inputs, constant(volume, 0, 0, 0), clear(HEADER)]
    blocks = min(multiprocessors() * COUNTING_BLOCKS, -(-n // BAND))
    *made, counts, edges = run(kernel, inputs, blocks, _outputs(source))
    return made[0] if made else source.inputs[0], BandCounts(counts, edges)


def relation_tiles(
    source: Source, clear=cleared
) -> tuple[mx.array, BandCounts, Sorted]:
    """Return the table of a source, what was counted, and its tiles: one launch."""
    n, volume = source.n, source.volume
    passes, bits = digits_of(rank_bits(volume))
    kernel = _table_kernel(
        "relation_tiles",
        TILES_FILES,
        source.code,
        volume,
        ("rows", "sorted", "masks", "work"),
        threads=SORT_THREADS,
        blocks_per_multiprocessor=TILING_BLOCKS,
        shared_bytes=TILE_SCRATCH,
    )
    work = -(-3 * n * key_dtype(rank_bits(volume)).size // 16), 4
    *made, counts, edges, rows, table, masks, _ = run(
        kernel,
        [
            *source.inputs,
            constant(volume, bits, passes, 0),
            clear(scratch_words(n, passes)),
        ],
        min(multiprocessors() * TILING_BLOCKS, -(-n // BAND)),
        [
            *_outputs(source),
            ((n,), mx.int32),
            *_tiles_outputs(n, volume),
            (work, mx.uint32),
        ],
    )
    tiles = Sorted(table, rows, masks)
    return made[0] if made else source.inputs[0], BandCounts(counts, edges), tiles


def identity_tiles(rows: mx.array) -> Sorted:
    """Return tiles of rows whose only neighbour is themselves.

    ``rows`` is an array of as many, at least one; its values are not read.
    """
    n = len(rows)
    kernel = geometry_kernel(
        "identity_tiles",
        ("rows.cuh", "sort_table.cu"),
        "IdentityTiles",
        ("fed",),
        ("rows", "sorted", "masks"),
        arguments=(("fed", ""),),
    )
    outputs = [((n,), mx.int32), *_tiles_outputs(n, 1)]
    rows, table, masks = run(kernel, [rows], striding_blocks(pitch_of(n)), outputs)
    return Sorted(table, rows, masks)


def pitch_of(n: int) -> int:
    """Return the rows that tiles of n rows are padded to."""
    return -(-n // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _tiles_outputs(n: int, volume: int) -> list:
    """Return shapes and dtypes of the table and masks of tiles."""
    pitch = pitch_of(n)
    masks = pitch // 32, -(-volume // 32)
    return [((volume, pitch), mx.int32), (masks, mx.uint32)]


def _outputs(source: Source) -> list:
    """Return shapes and dtypes of the table, if it is new, of counts and of edges."""
    n, volume = source.n, source.volume
    counted = ((volume, -(-n // BAND)), mx.int32), ((1,), mx.int64)
    return [*[((n, volume), mx.int32)] * source.code.is_new, *counted]


@cache
def _table_kernel(
    symbol: str,
    files: tuple[str, ...],
    code: Code,
    volume: int,
    outputs: tuple[str, ...] = (),
    **more: int,
) -> GpuKernel:
    """Return a kernel over the rows of a source.

    ``outputs`` are its own, after a new table, its counts and edges.
    """
    key, inputs = key_dtype(rank_bits(volume)), (*code.inputs, "digits", "scratch")
    # A table that is made, or one that is read in the order of its rows.
    edges = "reinterpret_cast<long long*>(edges)"
    passed = ["neighbours" if code.is_new else "nullptr", "counts", edges]
    if outputs:
        work = "reinterpret_cast<KEY*>(work)"
        passed = ["neighbours", *passed, *outputs[:-1], work]
    made = *["neighbours"] * code.is_new, "counts", "edges", *outputs
    return geometry_kernel(
        symbol,
        files,
        "Table",
        inputs,
        made,
        template=(("KEY", KEYS[key]), ("SOURCE", code.type)),
        arguments=(
            *dict.fromkeys((*inputs, *made), "").items(),
            ("scratch", f"source, {SCRATCH}"),
            (made[0], ", ".join(passed)),
        ),
        before=f"""const int n = {code.rows};
  const int* facts = digits;
  const SOURCE source{{{", ".join(code.values)}}};""",
        **more,
    )


# Look-ups of coordinate rows


class RowTable:
    """Finds the rows of one coordinate set by value, through a hash table.

    Args:
        coords: (N, 1 + D) int32, any values. Of equal rows the first is found.
        is_checked: whether the set was checked: nobody will ask for ``facts``.
    """

    is_sorted = False

    def __init__(self, coords: mx.array, is_checked: bool = False):
        self.coords, self.found, self._is_checked = coords, [], is_checked
        self.scratch, self._taken = None, 0  # words of 0, and how many were taken
        (n, columns), (digits, _) = coords.shape, digits_of(FIRST_OFFSETS)
        if not n:
            return
        words = HEADER + scratch_words(n, digits)  # of a look-up, and of tiles
        if not is_checked:  # and of rows that are not sorted
            words += scratch_words(n, 0)
        words = -(-words // SCRATCH_STEP) * SCRATCH_STEP
        blocks = min(HASH_BLOCKS, -(-n // THREADS))
        slots = max(16, 1 << (2 * n - 1).bit_length())
        # The kernel writes this input, which nobody else holds. The value is on the
        # device already; a number would be fetched from the CPU's memory.
        beside = TABLE_WORDS + 2 * columns * blocks
        self.slots = mx.full((2 * slots + beside,), constant(-1))
        outputs = [((slots + n,), mx.int32), ((words,), mx.uint32)]
        outputs += [((2,), mx.int32)] * (1 + columns)
        inputs = [coords, self.slots, constant(words, 0, 0, 0)]
        made = run(_hash_rows(columns), inputs, blocks, outputs)
        self.order, self.scratch, *self.found = made

    @built_by_one
    def take_scratch(self, words: int) -> mx.array:
        """Return an even number of words of 0 that nobody has taken.

        The words that were cleared with the hash serve once, and a traced graph would
        use them at every call. They go with the first relation whose rows are put in
        order, or when the set is checked.
        """
        scratch, begin, end = self.scratch, self._taken, self._taken + words
        if self._is_checked and words > HEADER:
            self.scratch = None
        if scratch is None or scratch.size < end or sync.is_transforming():
            return cleared(words)
        self._taken = end
        return scratch[begin:end]

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that ``find`` and ``table`` read, and ``facts``."""
        read = [self.slots, self.order] if self.coords.shape[0] else []
        scratch = [] if self.scratch is None else [self.scratch]
        return [self.coords, *read, *scratch, *self.found]

    @property
    def ranges(self) -> Sequence[mx.array]:
        """(2,) int32 each: the least and greatest of each column, of any rows."""
        return self.found[1:]

    def facts(self) -> list[mx.array]:
        """Return small arrays: (first repeat or -1, whether rows ascend), ranges."""
        return self.found

    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        self.scratch = None
        (later, self.is_sorted), *ranges = facts
        low, high = zip(*ranges, strict=True)
        if later < 0:
            return (low, high), None
        first = self.find(self.coords[later : later + 1])
        return (low, high), (sync.read(first)[0][0], later)

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each of the (Q, 1 + D) int32 rows its (Q,) int32 place, or -1."""
        dims = rows.shape[1] - 1
        return self._table(rows, [(0,) * dims], (1,) * dims)[:, 0]

    def table(
        self,
        out: Rows,
        offsets: Offsets,
        stride: Sequence[int],
        *,
        transposed: bool = False,
        mirrored: bool = False,
        keep: Keep | None = None,
        wanted: str | None = None,
    ) -> mx.array:
        """Return the (N_out, K) int32 neighbour table, -1 if there is no edge.

        Args:
            out: the output rows.
            offsets: K offsets of D integers.
            stride: D integers.
            transposed: whether ``out = in * stride + offset_k``, not
                ``in = out * stride + offset_k``.
            mirrored: not used: a search of half of the offsets scatters the other half.
            keep: called with a name and what is made with the table: its
                ``BandCounts``, and its tiles if wanted.
            wanted: ``TILES`` if these are wanted too.
        """
        return self._table(out.coords, offsets, stride, transposed, keep, wanted)

    def _table(
        self, out_coords, offsets, stride, transposed=False, keep=None, wanted=None
    ) -> mx.array:
        n_out, volume = out_coords.shape[0], len(offsets)
        if self.coords.shape[0] * n_out * volume == 0:
            return mx.full((n_out, volume), -1, dtype=mx.int32)
        offsets = tuple(map(tuple, offsets))
        code, rule = _rule(self.coords.shape[1], offsets, tuple(stride), transposed)
        inputs = self.coords, self.slots, self.order, out_coords, rule
        source = Source(code, inputs, n_out, volume)
        if keep and wanted == TILES and sorts(n_out):
            table, counts, tiles = relation_tiles(source, self.take_scratch)
            keep(TILES, tiles)
        else:
            table, counts = counted_table(source, self.take_scratch)
        if keep:
            keep(COUNTS, counts)
        return table


def bounds(coords: mx.array) -> Bounds:
    """Return the least and the greatest value of every column of (N, 1 + D) int32."""
    if coords.shape[0] == 0:
        return bounds_of(coords)
    _, *ranges = sync.read(*RowTable(coords).facts())  # rows may repeat
    return tuple(zip(*ranges, strict=True))


@lru_cache(maxsize=256)
def _rule(
    columns: int, offsets: tuple, stride: tuple[int, ...], transposed: bool
) -> tuple[Code, mx.array]:
    """Return how a kernel looks offsets up, and what it reads of them."""
    kind, offsets = rule_kind(offsets, stride, transposed)
    inputs = "coords", "slots", "order", "out_rows", "rule"
    values, rows = (*inputs, "coords_shape[0]"), "out_rows_shape[0]"
    code = Code(f"Find<{columns}, {kind}>", inputs, values, rows, True)
    return code, constant(*rule_words(offsets, stride, kind))


def _hash_rows(columns: int) -> GpuKernel:
    ranges = tuple(f"range{c}" for c in range(columns))
    scratch = "reinterpret_cast<unsigned*>(scratch)"
    return geometry_kernel(
        "hash_rows",
        ("rows.cuh", "hash_rows.cu"),
        "HashRows",
        ("coords", "slots", "words"),
        ("order", "scratch", "repeat", *ranges),
        template=(("COLUMNS", columns),),
        arguments=(
            ("slots", "const_cast<int*>(slots)"),
            *dict.fromkeys(("words", "scratch", "repeat", *ranges), "").items(),
            ("order", f"repeat, {{{', '.join(ranges)}}}, order, {scratch}"),
        ),
        blocks_per_multiprocessor=4,
    )


# Views of a relation, from its table and what was counted with it


def transpose_table(table: mx.array, n_in: int) -> mx.array:
    """Return (N_in, K) int32: the row of ``table`` that holds each entry, or -1."""
    shape = n_in, table.shape[1]
    if table.size == 0 or n_in == 0:
        return mx.full(shape, -1, dtype=mx.int32)
    face = "transpose_table", _VIEWS, "TransposeTable", ("neighbours",), ("swapped",)
    blocks, outputs = striding_blocks(table.size), [(shape, mx.int32)]
    return run(geometry_kernel(*face), [table], blocks, outputs, fill=-1)[0]


def band_counts_of(table: mx.array) -> BandCounts:
    """Return the counts of a table with rows that was made without them."""
    return counted_table(table_source(table))[1]


def gray_order(table: mx.array) -> mx.array:
    """Return the (N,) order of rows by the Gray-code rank of their mask."""
    n, volume = table.shape
    if table.size and sorts(n) and volume <= MASK_OFFSETS:
        return relation_tiles(table_source(table))[2].rows
    return curves.gray_order(table >= 0)


def sorted_table(table: mx.array, rows: mx.array) -> tuple[mx.array, mx.array]:
    """Return the (K, pitch) table of rows in sorted order, and a mask per 32 rows."""
    inputs, made = ("neighbours", "rows"), ("sorted", "masks")
    kernel = geometry_kernel("sort_table", _VIEWS, "SortTable", inputs, made, 128)
    outputs, blocks = _tiles_outputs(*table.shape), pitch_of(len(table)) // 128
    return tuple(run(kernel, [table, rows], blocks, outputs))


def sorted_rows(relation: RelationViews) -> Sorted:
    """Return the relation's tiles. A mirrored relation and its transpose share them."""
    straight = not (relation.mirrored and relation.is_transposed)
    base = relation if straight else relation.T
    view = base.view(TILES, lambda: _tiles(base))
    return view if straight else view._replace(mirrored=True)


def sorted_arrays(relation: RelationViews) -> tuple[mx.array, ...]:
    """Return the arrays of the relation's tiles, as contractions read them."""
    view = sorted_rows(relation)
    return view.table, view.rows, view.masks


def _tiles(relation: RelationViews) -> Sorted:
    if relation.is_identity and relation.n_out:  # rows are in order
        rows = relation.in_coords  # of any array that has as many
        tiles = identity_tiles(relation.out_in if rows is None else rows)
    else:
        table = relation.table_with(TILES)
        tiles = relation.kept(TILES)
        if tiles is None and sorts(table.shape[0]):
            _, counts, tiles = relation_tiles(table_source(table))
            relation.keep(COUNTS, counts)
        elif tiles is None:
            rows = gray_order(table)
            sorted_, masks = sorted_table(table, rows)
            tiles = Sorted(sorted_, rows, masks)
    relation.release_table(lambda: table_of(tiles))
    return tiles


def release_table(relation: RelationViews) -> None:
    """Drop a table beside tiles, which hold the same entries."""
    if tiles := relation.kept(TILES):
        relation.release_table(lambda: table_of(tiles))


def table_of(tiles: Sorted) -> mx.array:
    """Return the (N, K) table that tiles were made of."""
    n, volume = len(tiles.rows), len(tiles.table)
    if n == 0:
        return mx.zeros((0, volume), dtype=mx.int32)
    inputs = "sorted", "rows"
    kernel = geometry_kernel(
        "unsort_table", _VIEWS, "UnsortTable", inputs, ("table",), 128
    )
    given, outputs = [tiles.table, tiles.rows], [((n, volume), mx.int32)]
    return run(kernel, given, -(-n // 128), outputs)[0]


def band_counts(relation: RelationViews) -> BandCounts:
    """Return the counts of a relation's table."""
    counts = relation.kept(COUNTS)
    if counts is None:
        table = relation.out_in  # may bring its BandCounts
        return relation.view(COUNTS, lambda: band_counts_of(table))
    return counts


def start(relation: RelationViews) -> mx.array | None:
    """Build the table and, if matrix routes will read them, the tiles.

    Returns:
        The number of edges: to be read together with the check of the set.
    """
    if relation.n_out * relation.n_in == 0:
        return None
    # Edges of a large kernel are counted sooner without tiles, which are made of the
    # table then: 0.11 ms instead of 0.25 for 5x5x5 and 100 000 rows.
    if 1 < relation.volume <= MASK_OFFSETS:
        relation.table_with(TILES)
    counts = band_counts(relation)
    release_table(relation)
    return counts.edges


def edges(table: mx.array, relation: RelationViews | None = None) -> mx.array:
    """Return the kernel-major (E, 3) edges of a table.

    Reads their number, unless the table is a relation's that knows it.
    """
    if table.size == 0:
        return mx.zeros((0, 3), dtype=mx.int32)
    if relation is None:
        counts = band_counts_of(table)
        total = sync.read(counts.edges)[0][0]
    else:
        counts, total = band_counts(relation), relation.n_edges
    made, starts = listed(table, counts, 3, table.shape[1], total)
    if relation is not None:
        relation.keep("cuda_starts", starts)
        release_table(relation)
    return made


def listed(
    table: mx.array, counts: BandCounts, words: int, offsets: int, total: int
) -> tuple[mx.array, ...]:
    """Return the edges of the first offsets of a table, and arrays of their places.

    With three words: where the edges of each offset start. With two: the spans, those
    of the transpose, and the first stages; see ``Pairs``.

    Args:
        table: (N, K) int32.
        counts: of it.
        words: 3 of (i, o, k), or 2 of (i, o).
        offsets: how many.
        total: their edges.
    """
    n, volume = table.shape
    lines = offsets, -(-n // BAND)
    scanned = "starts", "sums"
    scan = geometry_kernel(
        "scan_counts", _VIEWS, "ScanCounts", ("counts",), scanned, 1024
    )
    outputs = [(lines, mx.int32), ((offsets,), mx.int32)]
    starts, sums = run(scan, [counts.bands], offsets, outputs)
    outputs, names = [((max(1, total), words), mx.int32)], ("edges", "offset_starts")
    if words == 2:
        names = "edges", "spans", "turned", *(f"firsts_{n}" for n in STAGE_PAIRS)
        outputs += [((volume, 2), mx.int32)] * 2
        outputs += [((volume + 1,), mx.int32)] * len(STAGE_PAIRS)
    else:
        outputs.append(((offsets + 1,), mx.int32))
    inputs, template = ("neighbours", *scanned), (("WORDS", words),)
    write = geometry_kernel(
        "write_edges", _VIEWS, "WriteEdges", inputs, names, template=template
    )
    made, *places = run(write, [table, starts, sums], -(-n // EDGE_ROWS), outputs)
    return made if total else made[:0], *places


# Pairs of rows by offset: the edges as weight gradients read them


class Pairs(NamedTuple):
    """The edges of a relation by offset, as weight gradients read them.

    Attributes:
        rows: (P, 2) int32 of (i, o). A mirrored relation has those of the first half of
            its offsets: an edge (i, o, K - 1 - k) is one (o, i, k).
        spans: (K, 2) int32, where the pairs of each offset begin and end; ~begin if
            they are (o, i).
        turned: the spans of the transpose, or None if they were not written.
        firsts: for stages of each of ``STAGE_PAIRS``, (K + 1,) int32: the first stage
            of each offset, and how many there are; () if they were not written.
    """

    rows: mx.array
    spans: mx.array
    turned: mx.array | None = None
    firsts: tuple[mx.array, ...] = ()

    @property
    def of_transpose(self) -> Pairs:
        """The same of the transpose."""
        turned = self.turned
        if turned is None:
            turned = self.spans ^ mx.array([-1, 0])
        return Pairs(self.rows, turned, self.spans, self.firsts)


def pairs(relation: RelationViews) -> Pairs:
    """Return the relation's edges by offset. Its transpose shares them."""

    def build() -> Pairs:
        other = relation.T.kept("cuda_pairs")
        found = _pairs(relation) if other is None else other.of_transpose
        release_table(relation)
        return found

    return relation.view("cuda_pairs", build)


def pair_arrays(relation: RelationViews) -> tuple[mx.array, mx.array]:
    """Return rows and spans of the relation's pairs."""
    found = pairs(relation)
    return found.rows, found.spans


@cache
def stages_of(size: int) -> Callable[[RelationViews], tuple[mx.array, ...]]:
    """Return what reads pairs, spans, and the first stages of ``size`` pairs."""

    def read(relation: RelationViews) -> tuple[mx.array, ...]:
        def build() -> tuple[mx.array, ...]:
            return *pair_arrays(relation), first_stages(relation, size)

        return relation.view(f"cuda_stages_{size}", build)

    return read


def first_stages(relation: RelationViews, size: int) -> mx.array:
    """Return the first stage of ``size`` pairs of each offset, and how many, int32."""
    found = pairs(relation)
    if found.firsts:
        return found.firsts[STAGE_PAIRS.index(size)]
    if relation.volume == 1:
        return _up_to(-(-len(found.rows) // size))
    begin, end = found.spans[:, 0], found.spans[:, 1]
    stages = (end - mx.maximum(begin, ~begin) + (size - 1)) // size
    return mx.pad(mx.cumsum(stages), (1, 0)).astype(mx.int32)


def _pairs(relation: RelationViews) -> Pairs:
    """List the edges by offset, from the table if there is one."""
    if relation.is_identity and relation.n_out:
        rows = sorted_rows(relation).rows  # in order
        rows = mx.contiguous(mx.broadcast_to(rows[:, None], (len(rows), 2)))
        return Pairs(rows, _up_to(len(rows))[None])
    volume, n, total = relation.volume, relation.n_out, relation.n_edges
    if n * relation.n_in == 0 or relation.lists_edges:
        rows, starts = mx.contiguous(relation.edges[:, :2]), offset_starts(relation)
        if volume == 1:
            return Pairs(rows, _up_to(len(rows))[None])
        return Pairs(rows, mx.stack([starts[:-1], starts[1:]], axis=1))
    offsets = volume
    if relation.mirrored and volume > 1:
        # The offset in the middle, if there is one, leads each row to itself.
        offsets = (volume + 1) // 2
        total = (total + n * (volume % 2)) // 2
    made = listed(relation.out_in, band_counts(relation), 2, offsets, total)
    if volume == 1:
        return Pairs(made[0], _up_to(len(made[0]))[None])
    rows, spans, turned, *firsts = made
    return Pairs(rows, spans, turned, tuple(firsts))


def _up_to(end: int) -> mx.array:
    """Return (2,) int32 of 0 and ``end``, a part of a larger array.

    Made on the device: MLX may take the memory of an array from the host for the
    device's, and copies it first. MLX keeps arrays of up to 8 bytes in a pool that its
    CPU stream shares: one that was just computed has been seen as zeros.
    """
    made = mx.arange(0, 4 * end, end, dtype=mx.int32) if end else mx.zeros(4, mx.int32)
    return made[:2]


def offset_starts(relation: RelationViews) -> mx.array:
    """Return (K + 1,) int32: where the edges of each offset start."""
    listed = relation.edges  # may bring its starts

    def build() -> mx.array:
        ends = mx.arange(relation.volume + 1, dtype=mx.int32)
        return mx.searchsorted(mx.contiguous(listed[:, 2]), ends).astype(mx.int32)

    return relation.view("cuda_starts", build)
