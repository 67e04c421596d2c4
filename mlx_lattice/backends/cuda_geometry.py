"""Coordinate sets on CUDA: hash look-ups, neighbour tables and their surveys.

Everything is launched without waiting for the device; what the host must know it reads
once, through ``host.read``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from .. import geometry, host
from ..geometry import Bounds
from .cuda_kernels import kernel, run
from .cuda_sort import (
    SCRATCH,
    THREADS,
    constant,
    digits_of,
    multiprocessors,
    rule_constant,
    scratch_words,
)

BAND = 64  # rows of one count of edges
HASH_BLOCKS = 1056
SURVEYS = 6  # blocks of a survey that share a multiprocessor
SPARE_OFFSETS = 27  # of the relation that a new set is ready for
RANKED_OFFSETS = 64  # offsets of a mask that has a rank of one word
MOST_OFFSETS = 2048  # whose masks fit in a block's shared memory

# How offsets are applied; on stride 1 either rule is an addition.
FORWARD, TRANSPOSED, UNIT = "FORWARD", "TRANSPOSED", "UNIT"

_TABLE = ("rows.cuh", "neighbour_table.cu")


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
