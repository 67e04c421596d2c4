"""Geometry on CUDA: look-ups of rows, neighbour tables and their views, sets.

Everything is launched without waiting for the device. What Python must know of a new
set or relation it reads once, through ``sync.read``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from ... import sync
from ...geometry import lattice
from ...geometry.lattice import (
    KEY_LIMIT,
    Bounds,
    Offsets,
    Rule,
    UniqueRows,
    bounds_of,
    cell_count,
    is_empty,
    negated,
)
from ...geometry.tables import (
    BoxedRows,
    Geometry,
    Keep,
    RelationViews,
    RowIndex,
    Rows,
    SearchedRows,
)
from ...kernel_spec import KernelSpec
from ..gpu.kernel import GpuKernel
from ..gpu.nvrtc import rehearsal
from . import thresholds
from .sort import (
    CELLS,
    HEADER,
    KEY_BITS,
    KEYS,
    SORT_THREADS,
    THREADS,
    NewRows,
    cleared,
    constant,
    curve_order,
    digits_of,
    geometry_kernel,
    key_bits,
    key_dtype,
    multiprocessors,
    ranges_of,
    run,
    scratch_words,
    start_rows,
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
# Rules of look-ups, as `enum Rule` of `cuda/table_sources.cuh` says.
PART_OFFSETS, GROUP, PARTS_AT = 64, 3, 12
# How offsets are applied; with stride 1 either rule is an addition.
KINDS = FORWARD, TRANSPOSED, UNIT = "FORWARD", "TRANSPOSED", "UNIT"
WIDE = 1 << 30  # beyond it sums are made in 64 bits

_TABLE_FILES = ("rows.cuh", "table_sources.cuh", "neighbour_table.cu")
_TILES_FILES = (*_TABLE_FILES, "radix_sort.cu", "sort_table.cu", "relation_tiles.cu")
_VIEWS = ("rows.cuh", "sort_table.cu", "relation_views.cu")


# Look-ups of coordinate rows


def rule_kind(
    offsets: Offsets, stride: tuple[int, ...], transposed: bool
) -> tuple[str, Offsets]:
    """Return the kind of a rule, and the offsets in its sense."""
    if max(stride) > 1:
        return (TRANSPOSED if transposed else FORWARD), offsets
    return UNIT, negated(offsets) if transposed else offsets


def rule_words(offsets: Offsets, stride: tuple[int, ...], kind: str) -> list[int]:
    """Return the words of a rule: a header, groups, pairs, and the plain offsets."""
    shifts = [s.bit_length() - 1 if s & (s - 1) == 0 else -1 for s in stride]
    scaled = [(o, (0,) * len(o)) for o in offsets]
    if kind == TRANSPOSED:
        scaled = [
            (
                tuple(-(v // s) for v, s in zip(o, stride, strict=True)),
                tuple(v % s for v, s in zip(o, stride, strict=True)),
            )
            for o in offsets
        ]
    is_wide = any(abs(v) >= WIDE for at, _ in scaled for v in at)
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


def _groups(scaled: list, k0: int, kind: str) -> list[list[int]]:
    """Return the groups of a part: up to three offsets that differ in the last axis."""
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


def _filled(values: Sequence[int], length: int = 4) -> list[int]:
    return [*values, *(0,) * (length - len(values))]


class RowTable(RowIndex):
    """Finds the rows of one coordinate set by value, through a hash table."""

    order: mx.array
    is_sorted: Any

    def __init__(self, coords: mx.array):
        self.coords: mx.array = coords
        self._facts = []
        n, columns = coords.shape
        if not n:
            return
        blocks = min(HASH_BLOCKS, -(-n // THREADS))
        slots = max(16, 1 << (2 * n - 1).bit_length())
        # The kernel writes this input, which no other array shares. The value is on
        # the device already; a number would be fetched from the CPU's memory.
        beside = TABLE_WORDS + 2 * columns * blocks
        self.slots: mx.array = mx.full((2 * slots + beside,), constant(-1))
        outputs = [((slots + n,), mx.int32), *[((2,), mx.int32)] * (1 + columns)]
        inputs = [coords, self.slots]
        self.order, *self._facts = run(_hash_rows(columns), inputs, blocks, outputs)

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that ``find`` and ``table`` read, and ``facts``."""
        read = [self.slots, self.order] if self.coords.shape[0] else []
        return [self.coords, *read, *self._facts]

    @property
    def ranges(self) -> Sequence[mx.array]:
        """(2,) int32 each: the least and greatest of each column, of any rows."""
        return self._facts[1:]

    def facts(self) -> list[mx.array]:
        """Return small arrays: (first repeat or -1, whether rows ascend), ranges."""
        return self._facts

    def settle(self, facts: list[Any]) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        (later, self.is_sorted), *ranges = facts
        low, high = zip(*ranges, strict=True)
        if later < 0:
            return (low, high), None
        first = self.find(self.coords[later : later + 1])
        return (low, high), (sync.read(first)[0][0], later)

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
        """Return the (N_out, K) table; with it counts of its edges, and tiles."""
        n_out, volume = out.coords.shape[0], len(offsets)
        if self.coords.shape[0] * n_out * volume == 0:
            return mx.full((n_out, volume), -1, dtype=mx.int32)
        offsets = tuple(map(tuple, offsets))
        code, rule = _rule(self.coords.shape[1], offsets, tuple(stride), transposed)
        inputs = self.coords, self.slots, self.order, out.coords, rule
        source = Source(code, inputs, n_out, volume)
        made = counted_table(source, tiled=bool(keep) and wanted == TILES)
        table, counts, tiles = made
        if keep:
            keep(COUNTS, counts)
        if tiles:
            keep(TILES, tiles)
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
    return geometry_kernel(
        "hash_rows",
        ("rows.cuh", "hash_rows.cu"),
        "HashRows",
        ("coords", "slots"),
        ("order", "repeat", *ranges),
        arguments=(
            ("slots", "const_cast<int*>(slots)"),
            ("order", f"repeat, {{{', '.join(ranges)}}}, order"),
            *((name, "") for name in ("repeat", *ranges)),
        ),
        template=(("COLUMNS", columns),),
        blocks_per_multiprocessor=4,
    )


# Tables, made with counts of their edges, and tiles, in one launch


class BandCounts(NamedTuple):
    """Edges counted while a table is made."""

    bands: mx.array  # (K, bands) int32: edges of each offset in each band of 64 rows
    edges: mx.array  # (1,) int64: all edges


class Sorted(NamedTuple):
    """A relation's rows by the Gray-code rank of their masks, laid out for tiles."""

    table: mx.array  # (K, pitch) int32
    rows: mx.array  # (N_out,) int32
    masks: mx.array  # (pitch / 32, words) uint32: the offsets that any of 32 rows uses
    mirrored: bool = False  # whether offset k stands for K - 1 - k


class Code(NamedTuple):
    """How a kernel gets the entries of a table."""

    type: str  # C++ type of their source
    inputs: tuple[str, ...]  # names of its inputs
    values: tuple[str, ...]  # what the source is made of: inputs, and extents of them
    rows: str  # the extent that is the number of rows
    is_new: bool  # whether the kernel makes the table; else it is the first input


class Source(NamedTuple):
    """Where the entries of an (n, K) table come from: code and its inputs."""

    code: Code
    inputs: tuple[mx.array, ...]
    n: int
    volume: int


def table_source(table: mx.array) -> Source:
    """Return the source that reads an existing table with rows and offsets."""
    shape = "neighbours_shape[0]", "neighbours_shape[1]"
    code = Code("Read", ("neighbours",), ("neighbours", shape[1]), shape[0], False)
    return Source(code, (table,), *table.shape)


def rank_bits(volume: int) -> int:
    """Return the bits of a rank, by which the radix sort orders rows."""
    return volume if volume <= MASK_OFFSETS else RANKED_OFFSETS


def pitch_of(n: int) -> int:
    """Return the rows that tiles of n rows are padded to."""
    return -(-n // ROW_ALIGNMENT) * ROW_ALIGNMENT


def counted_table(
    source: Source, tiled: bool = False
) -> tuple[mx.array, BandCounts, Sorted | None]:
    """Return the table of a source, its counts, and its tiles if ``tiled``."""
    code, inputs, n, volume = source
    passes, bits = digits_of(rank_bits(volume)) if tiled else (0, 0)
    words = scratch_words(n, passes) if tiled else HEADER
    outputs = [((n, volume), mx.int32)] * code.is_new
    outputs += [((volume, -(-n // BAND)), mx.int32), ((1,), mx.int64)]
    if tiled:
        work = -(-3 * n * key_dtype(rank_bits(volume)).size // 16), 4
        pitch, words_each = pitch_of(n), -(-volume // 32)
        outputs += [((n,), mx.int32), ((volume, pitch), mx.int32)]
        outputs += [((pitch // 32, words_each), mx.uint32), (work, mx.uint32)]
    blocks = multiprocessors() * (TILING_BLOCKS if tiled else COUNTING_BLOCKS)
    made = run(
        _table_kernel(code, volume, tiled),
        [*inputs, constant(volume, bits, passes, 0), cleared(words)],
        min(blocks, -(-n // BAND)),
        outputs,
    )
    table = made.pop(0) if code.is_new else inputs[0]
    counts, tiles = BandCounts(*made[:2]), None
    if tiled:
        rows, sorted_table, masks = made[2:5]
        tiles = Sorted(sorted_table, rows, masks)
    return table, counts, tiles


@cache
def _table_kernel(code: Code, volume: int, tiled: bool) -> GpuKernel:
    """Return the kernel of a table, counts and tiles over the rows of a source."""
    inputs = *code.inputs, "digits", "scratch"
    outputs = *["neighbours"] * code.is_new, "counts", "edges"
    # A table that is made, or one that is read in the order of its rows.
    passed = ["neighbours" if code.is_new else "nullptr", "counts"]
    passed.append("reinterpret_cast<long long*>(edges)")
    symbol, files = "band_counts", _TABLE_FILES
    more = {"threads": THREADS, "blocks_per_multiprocessor": COUNTING_BLOCKS}
    if tiled:
        symbol, files = "relation_tiles", _TILES_FILES
        made = "rows", "sorted", "masks", "work"
        outputs = *outputs, *made
        work = "reinterpret_cast<KEY*>(work)"
        passed = ["neighbours", *passed, *made[:-1], work]
        more = {"threads": SORT_THREADS, "blocks_per_multiprocessor": TILING_BLOCKS}
        more["shared_bytes"] = TILE_SCRATCH
    scratch = "reinterpret_cast<unsigned*>(const_cast<uint32_t*>(scratch))"
    return geometry_kernel(
        symbol,
        files,
        "Table",
        inputs,
        outputs,
        arguments=(
            *((name, "") for name in (*inputs, *outputs)),
            ("scratch", f"source, {scratch}"),
            (outputs[0], ", ".join(passed)),
        ),
        template=(("KEY", KEYS[key_dtype(rank_bits(volume))]), ("SOURCE", code.type)),
        before=f"""const int n = {code.rows};
  const int* facts = digits;
  const SOURCE source{{{", ".join(code.values)}}};""",
        **more,
    )


# Views of a relation, from its table and what was counted with it


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
    table = relation.table_with(TILES)
    tiles = relation.cached_view(TILES)
    if tiles is None:
        _, counts, tiles = counted_table(table_source(table), tiled=True)
        relation.cache_view(COUNTS, counts)
    return tiles


def band_counts(relation: RelationViews) -> BandCounts:
    """Return the counts of a relation's table."""
    counts = relation.cached_view(COUNTS)
    if counts is None:
        table = relation.out_in  # may bring its BandCounts
        build = lambda: counted_table(table_source(table))[1]  # noqa: E731
        return relation.view(COUNTS, build)
    return counts


def _listed(
    table: mx.array, counts: BandCounts, words: int, offsets: int, total: int
) -> tuple[mx.array, mx.array]:
    """Return the edges of the first offsets of a table, and where each one's start."""
    n, volume = table.shape
    lines, scanned = (offsets, -(-n // BAND)), ("starts", "sums")
    scan = geometry_kernel(
        "scan_counts", _VIEWS, "ScanCounts", ("counts",), scanned, 1024
    )
    outputs = [(lines, mx.int32), ((offsets,), mx.int32)]
    starts, sums = run(scan, [counts.bands], offsets, outputs)
    names = ("neighbours", *scanned), ("edges", "starts_of")
    write = geometry_kernel(
        "write_edges", _VIEWS, "WriteEdges", *names, template=(("WORDS", words),)
    )
    places = (volume, 2) if words == 2 else (offsets + 1,)
    outputs = [((max(1, total), words), mx.int32), (places, mx.int32)]
    edges, places = run(write, [table, starts, sums], -(-n // EDGE_ROWS), outputs)
    return edges if total else edges[:0], places


def offset_starts(relation: RelationViews) -> mx.array:
    """Return (K + 1,) int32: where the edges of each offset start."""
    edges = relation.edges  # may bring its starts

    def build() -> mx.array:
        ends = mx.arange(relation.volume + 1, dtype=mx.int32)
        return mx.searchsorted(mx.contiguous(edges[:, 2]), ends).astype(mx.int32)

    return relation.view("cuda_starts", build)


# Pairs of rows by offset: the edges as weight gradients read them


class Pairs(NamedTuple):
    """The edges of a relation by offset, as weight gradients read them."""

    # (P, 2) int32 of (i, o). A mirrored relation has those of the first half of its
    # offsets: an edge (i, o, K - 1 - k) is one (o, i, k).
    rows: mx.array
    spans: mx.array  # (K, 2) int32: begin and end; ~begin if the pairs are (o, i)


def pairs(relation: RelationViews) -> Pairs:
    """Return the relation's edges by offset. Its transpose shares them."""

    def build() -> Pairs:
        other = relation.T.cached_view("cuda_pairs")
        if other is None:
            found = _pairs(relation)
        else:
            found = Pairs(other.rows, other.spans ^ mx.array([-1, 0]))
        return found

    return relation.view("cuda_pairs", build)


@cache
def stages_of(size: int) -> Callable[[RelationViews], tuple[mx.array, ...]]:
    """Return what reads pairs, spans, and the first stages of ``size`` pairs."""

    def read(relation: RelationViews) -> tuple[mx.array, ...]:
        def build() -> tuple[mx.array, ...]:
            return *pairs(relation), first_stages(relation, size)

        return relation.view(f"cuda_stages_{size}", build)

    return read


def first_stages(relation: RelationViews, size: int) -> mx.array:
    """Return the first stage of ``size`` pairs of each offset, and how many, int32."""
    rows, spans = pairs(relation)
    if relation.volume == 1:
        return _up_to(-(-len(rows) // size))
    begin, end = spans[:, 0], spans[:, 1]
    stages = (end - mx.maximum(begin, ~begin) + (size - 1)) // size
    return mx.pad(mx.cumsum(stages), (1, 0)).astype(mx.int32)


def _pairs(relation: RelationViews) -> Pairs:
    """List the edges by offset, from the table if there is one."""
    volume, n, total = relation.volume, relation.n_out, relation.n_edges
    if relation.is_identity and n:
        rows = mx.broadcast_to(mx.arange(n, dtype=mx.int32)[:, None], (n, 2))
        rows, spans = mx.contiguous(rows), None
    elif n * relation.n_in == 0 or relation.lists_edges:
        rows, starts = mx.contiguous(relation.edges[:, :2]), offset_starts(relation)
        spans = mx.stack([starts[:-1], starts[1:]], axis=1)
    else:
        offsets = volume
        if relation.mirrored and volume > 1:
            # The offset in the middle, if there is one, leads each row to itself.
            offsets = (volume + 1) // 2
            total = (total + n * (volume % 2)) // 2
        facts = band_counts(relation), 2, offsets, total
        rows, spans = _listed(relation.out_in, *facts)
    return Pairs(rows, _up_to(len(rows))[None] if volume == 1 else spans)


def _up_to(end: int) -> mx.array:
    """Return (2,) int32 of 0 and ``end``, a part of a larger array.

    Made on the device: MLX may take the memory of an array from the host for the
    device's, and copies it first. MLX keeps arrays of up to 8 bytes in a pool that its
    CPU stream shares: one that was just computed has been seen as zeros.
    """
    made = mx.arange(0, 4 * end, end, dtype=mx.int32) if end else mx.zeros(4, mx.int32)
    return made[:2]


class CudaGeometry(Geometry):
    """The geometry of CUDA's kernels; see ``Geometry``."""

    bounds = staticmethod(bounds)
    curve_order = staticmethod(curve_order)

    def index(self, coords: mx.array, box: Bounds | None = None) -> RowTable:
        """Return the look-up of (N, 1 + D) int32 rows, launched."""
        return RowTable(coords)

    def unique_rows(
        self, coords: mx.array, box: Bounds | None = None, count: int | None = None
    ) -> UniqueRows:
        """Return the sorted unique rows and the place of each row among them."""
        dims, box = coords.shape[1] - 1, box or bounds(coords)
        if coords.shape[0] == 0 or cell_count(box) >= KEY_LIMIT:
            return lattice.unique_rows(coords, box, count)
        still, bits = ([(0,) * dims], (1,) * dims), cell_count(box).bit_length()
        made = start_rows(
            coords, Rule.ITSELF, *still, bits, ranges_of(box), places=True
        )
        counts = sync.read(*made.counts) if count is None else [[count]]
        return UniqueRows(made.all_rows(counts), made.places)

    def rule_rows(
        self,
        rule: Rule,
        coords: mx.array,
        offsets: Offsets,
        stride: Sequence[int],
        box: Bounds,
        count: int | None = None,
    ) -> mx.array:
        """Return the sorted unique int32 rows that a rule makes within a box."""
        candidates = coords.shape[0] * len(offsets)
        if candidates == 0 or is_empty(box):
            return mx.zeros((0, coords.shape[1]), dtype=mx.int32)
        if cell_count(box) >= KEY_LIMIT:
            return lattice.rule_rows(rule, coords, offsets, stride, box, count)
        bits, ranges = cell_count(box).bit_length(), ranges_of(box)
        facts, is_distinct = (coords, rule, offsets, stride), count == candidates
        made = start_rows(*facts, bits, ranges, is_distinct=is_distinct)
        counts = sync.read(*made.counts) if count is None else [[count]]
        return made.all_rows(counts)

    def start_levels(
        self,
        source: SearchedRows,
        strides: Sequence[tuple[int, ...]],
        boxes: Sequence[Bounds] | None,
    ) -> NewRows | None:
        """Launch the cells of each stride."""
        n = len(source.coords)
        if len(strides) < 2 or not 0 < n <= thresholds.CUDA_ROWS_TOGETHER:
            return None
        if boxes is not None:
            bits, ranges = key_bits(boxes), ranges_of(source.box)
        elif isinstance(source.lookup, RowTable):
            bits, ranges = KEY_BITS, source.lookup.ranges
        else:
            return None
        if bits > KEY_BITS:
            return None
        ones = (1,) * len(strides[0])
        return start_rows(source.coords, CELLS, strides, ones, bits, ranges)

    def transpose_table(self, table: mx.array, n_in: int) -> mx.array:
        """Return (n_in, K) int32: the row of ``table`` that holds each entry, or -1."""
        shape = n_in, table.shape[1]
        if table.size == 0 or n_in == 0:
            return mx.full(shape, -1, dtype=mx.int32)
        names = ("neighbours",), ("swapped",)
        kernel = geometry_kernel("transpose_table", _VIEWS, "TransposeTable", *names)
        blocks, outputs = striding_blocks(table.size), [(shape, mx.int32)]
        return run(kernel, [table], blocks, outputs, fill=-1)[0]

    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the kernel-major (E, 3) edges of a table."""
        if table.size == 0:
            return mx.zeros((0, 3), dtype=mx.int32)
        if relation is None:
            counts = counted_table(table_source(table))[1]
            total = sync.read(counts.edges)[0][0]
            return _listed(table, counts, 3, table.shape[1], total)[0]
        facts = band_counts(relation), 3, table.shape[1], relation.n_edges
        made, starts = _listed(table, *facts)
        relation.cache_view("cuda_starts", starts)
        return made

    def start(self, relation: RelationViews) -> mx.array | None:
        """Build the table and, if matrix routes will read them, the tiles."""
        if relation.n_out * relation.n_in == 0:
            return None
        # Edges of a large kernel are counted sooner without tiles, which are made of
        # the table then: 0.11 ms instead of 0.25 for 5x5x5 and 100 000 rows.
        if 1 < relation.volume <= MASK_OFFSETS:
            relation.table_with(TILES)
        counts = band_counts(relation)
        return counts.edges

    edge_count = start


# Size and stride of kernels, and whether they are transposed.
_COMMON = (5, 1, False), (3, 1, False), (2, 2, False), (2, 2, True)
_LEVELS = 4  # that are made at once


def rehearse(dims: int) -> None:
    """Compile the kernels of common relations in ``dims`` dimensions, side by side."""
    # Sizes are nominal: rows are not computed.
    coords, geometry = mx.zeros((64, 1 + dims), dtype=mx.int32), CudaGeometry()
    rows = BoxedRows(coords, None)
    with rehearsal("all"):
        index = RowTable(coords)
        for size, stride, transposed in _COMMON:
            spec = KernelSpec.of(dims, kernel_size=size, stride=stride)
            table = index.table(
                rows,
                spec.offsets,
                spec.stride,
                transposed=transposed,
                keep=lambda name, view: None,
                wanted=TILES if size < 5 else None,
            )
            if size == 5:  # of a stem, of which a net has one: see ``start``
                counted_table(table_source(table), tiled=True)
        for extent in (1 << 4, 1 << 14):  # keys of one word and of two
            box = (0,) * (1 + dims), (extent,) * (1 + dims)
            facts = coords, [(0,) * dims], spec.stride, box
            geometry.rule_rows(Rule.CELL, *facts, count=1)  # so that nothing is read
            strides = [(2**k,) * dims for k in range(1, 1 + _LEVELS)]
            geometry.start_levels(BoxedRows(coords, box), strides, [box] * _LEVELS)
        swapped = geometry.transpose_table(table, len(coords))
        counted_table(table_source(swapped), tiled=True)
        counts = counted_table(table_source(swapped))[1]
        _listed(swapped, counts, 2, swapped.shape[1], 1)
