"""Coordinate look-up and relation views by CUDA kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from .. import geometry, order
from ..geometry import UniqueRows
from .cuda_kernels import kernel, run

_FILES = ("geometry.cu",)
_THREADS = 256
_MOST_BLOCKS = 1 << 16  # kernels over elements stride over the rest
EDGE_CHUNK = 4096


def _blocks(elements: int) -> int:
    return max(1, min(_MOST_BLOCKS, -(-elements // _THREADS)))


def unique_rows(coords: mx.array) -> UniqueRows:
    """Return the sorted unique rows and the place of each row among them."""
    return geometry.unique_rows(coords)


def cell_rows(coords: mx.array, stride: Sequence[int]) -> mx.array:
    """Return the sorted unique ``floor(row / stride)``."""
    return geometry.unique_rows(geometry.cells(coords, stride)).rows


def reached_rows(coords: mx.array, offsets, stride) -> mx.array:
    """Return the sorted unique rows that some input reaches; all fit into int32."""
    rows = geometry.reached_rows(coords, offsets, stride)
    return geometry.unique_rows(rows.astype(mx.int32)).rows


def expanded_rows(coords: mx.array, offsets, stride) -> mx.array:
    """Return the sorted unique ``in * stride + offset_k``; all fit into int32."""
    rows = geometry.expanded_rows(coords, offsets, stride)
    return geometry.unique_rows(rows.astype(mx.int32)).rows


@lru_cache(maxsize=1024)
def _constant(*values: int) -> mx.array:
    """Return int32 values on the device: from the host they take 0.4 ms each time."""
    array = mx.array(values, dtype=mx.int32) + 0
    mx.eval(array)
    return array


def bounds(coords: mx.array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the least and the greatest value of every column of (N, 1 + D) int32."""
    columns = coords.shape[1]
    build = kernel(
        f"column_bounds_{columns}",
        _FILES,
        ("lows", "highs"),
        ("bounds",),
        f"lattice::column_bounds<{columns}>(lows, highs, bounds, lows_shape[0]);",
        threads=_THREADS,
    )
    blocks = min(264, _blocks(coords.shape[0]))
    parts = [((2, blocks, columns), mx.int32)]
    part = run(build, [coords, coords], blocks, _THREADS, parts)[0]
    # MLX reads arrays of up to 8 bytes at once; larger ones move to host memory first.
    names = tuple(f"bound{i}" for i in range(2 * columns))
    join = kernel(
        f"join_bounds_{columns}",
        _FILES,
        ("lows", "highs"),
        names,
        f"__shared__ int both[{2 * columns}];\n"
        f"lattice::column_bounds<{columns}>(lows, highs, both, lows_shape[0]);\n"
        "__syncthreads();\nif (threadIdx.x == 0) {\n"
        + "".join(f"  {name}[0] = both[{i}];\n" for i, name in enumerate(names))
        + "}",
        threads=_THREADS,
    )
    scalars = [((1,), mx.int32)] * len(names)
    found = run(join, [part[0], part[1]], 1, _THREADS, scalars)
    mx.eval(found)
    values = tuple(scalar.item() for scalar in found)
    return values[:columns], values[columns:]


def first_duplicate(coords: mx.array) -> tuple[int, int] | None:
    """Return the earliest pair of equal rows, or None. Reads one number."""
    n, dims = coords.shape[0], coords.shape[1] - 1
    if n < 2:
        return None
    later = int(hash_rows(coords)[1].item())
    if later >= n:
        return None
    row = coords[later : later + 1]
    first = neighbour_table(coords, row, [[0] * dims], [1] * dims, False)
    return int(first.item()), later


def hash_rows(coords: mx.array) -> tuple[mx.array, mx.array]:
    """Return the hash table of (N, 1 + D) rows, N at least 1, and the first repeat.

    Returns:
        slots: int32 row numbers in open addressing, -1 where empty.
        repeat: (1,) uint32: the least row that equals an earlier one, or 2^32 - 1.
    """
    n, columns = coords.shape
    capacity = max(16, 1 << (4 * n - 1).bit_length())
    build = kernel(
        f"hash_rows_{columns}",
        _FILES,
        ("coords", "space"),
        ("slots", "repeat"),
        f"lattice::hash_rows<{columns}>(coords, slots, "
        "reinterpret_cast<unsigned*>(repeat), coords_shape[0], space[0]);",
        threads=_THREADS,
    )
    inputs = [coords, _constant(capacity)]
    outputs = [((capacity,), mx.int32), ((1,), mx.int32)]
    slots, repeat = run(build, inputs, _blocks(n), _THREADS, outputs, fill=-1)
    return slots, repeat.view(mx.uint32)


def _is_mirrored(offsets) -> bool:
    reversed_ = [tuple(-v for v in offset) for offset in reversed(offsets)]
    return [tuple(offset) for offset in offsets] == reversed_


def neighbour_table(in_coords, out_coords, offsets, stride, transposed) -> mx.array:
    """Return (N_out, K) int32 input rows, or -1; see ``geometry.forward_table``."""
    n_in, n_out, volume = in_coords.shape[0], out_coords.shape[0], len(offsets)
    shape = n_out, volume
    if n_in == 0 or n_out == 0:
        return mx.full(shape, -1, dtype=mx.int32)
    columns = in_coords.shape[1]
    slots = hash_rows(in_coords)[0]
    steps = _constant(*(v for offset in offsets for v in offset))
    mirrored = set(stride) == {1} and volume > 1 and _is_mirrored(offsets)
    if mirrored and in_coords is out_coords:
        build = kernel(
            f"mirrored_table_{columns}",
            _FILES,
            ("coords", "slots", "offsets"),
            ("neighbours",),
            f"lattice::mirrored_table<{columns}>(coords, slots, offsets, neighbours, "
            f"coords_shape[0], offsets_shape[0] / {columns - 1}, slots_shape[0]);",
            threads=_THREADS,
        )
        probes = n_out * (volume // 2 + 1)
        inputs, fill = [in_coords, slots, steps], -1
    else:
        rule = "true" if transposed else "false"
        build = kernel(
            f"neighbour_table_{columns}_{rule}",
            _FILES,
            ("in_coords", "slots", "out_rows", "offsets", "strides_of"),
            ("neighbours",),
            f"lattice::neighbour_table<{columns}, {rule}>(in_coords, slots, out_rows, "
            f"offsets, strides_of, neighbours, out_rows_shape[0], "
            f"offsets_shape[0] / {columns - 1}, slots_shape[0]);",
            threads=_THREADS,
        )
        probes = n_out * volume
        inputs = [in_coords, slots, out_coords, steps, _constant(*stride)]
        fill = None
    outputs = [(shape, mx.int32)]
    return run(build, inputs, _blocks(probes), _THREADS, outputs, fill=fill)[0]


def transpose_table(table: mx.array, n_in: int) -> mx.array:
    """Return (N_in, K) int32: the row of ``table`` that holds each entry, or -1."""
    shape = n_in, table.shape[1]
    if table.size == 0 or n_in == 0:
        return mx.full(shape, -1, dtype=mx.int32)
    build = kernel(
        "transpose_table",
        _FILES,
        ("neighbours",),
        ("swapped",),
        "lattice::transpose_table(neighbours, swapped, neighbours_shape[0], "
        "neighbours_shape[1]);",
        threads=_THREADS,
    )
    outputs = [(shape, mx.int32)]
    return run(build, [table], _blocks(table.size), _THREADS, outputs, fill=-1)[0]


def edges(table: mx.array) -> mx.array:
    """Return the kernel-major (E, 3) edges of a table. Reads one size."""
    n, volume = table.shape
    if table.size == 0:
        return mx.zeros((0, 3), dtype=mx.int32)
    columns = mx.contiguous(table.T)
    chunks = -(-n // EDGE_CHUNK)
    count = kernel(
        "count_edges",
        _FILES,
        ("columns",),
        ("counts",),
        "const int n = columns_shape[1];\n"
        "lattice::count_edges(columns, counts, n, "
        "(n + lattice::EDGE_CHUNK - 1) / lattice::EDGE_CHUNK);",
        threads=_THREADS,
    )
    blocks = volume * chunks
    sizes = [((blocks,), mx.int32)]
    counts = run(count, [columns], blocks, _THREADS, sizes)[0]
    ends = mx.cumsum(counts.astype(mx.int64))
    total = int((ends[-1] + 0).item())  # the sum is small; the slice is not
    if total == 0:
        return mx.zeros((0, 3), dtype=mx.int32)
    write = kernel(
        "write_edges",
        _FILES,
        ("columns", "ends"),
        ("edges",),
        "const int n = columns_shape[1];\n"
        "lattice::write_edges(columns, reinterpret_cast<const long long*>(ends), "
        "edges, n, (n + lattice::EDGE_CHUNK - 1) / lattice::EDGE_CHUNK);",
        threads=_THREADS,
    )
    return run(write, [columns, ends], blocks, _THREADS, [((total, 3), mx.int32)])[0]


def gray_order(table: mx.array) -> mx.array:
    """Return the (N,) order of rows by the Gray-code rank of their mask."""
    n, volume = table.shape
    if volume > 64 or table.size == 0:
        return order.gray_order(table >= 0)
    bits = 32 if volume <= 32 else 64
    integer = "unsigned" if bits == 32 else "unsigned long long"
    build = kernel(
        f"gray_keys_{bits}",
        _FILES,
        ("neighbours",),
        ("ranks",),
        f"using Key = {integer};\n"
        "lattice::gray_keys<Key>(neighbours, reinterpret_cast<Key*>(ranks), "
        "neighbours_shape[0], neighbours_shape[1]);",
        threads=_THREADS,
    )
    outputs = [((n,), mx.uint32 if bits == 32 else mx.uint64)]
    ranks = run(build, [table], _blocks(n), _THREADS, outputs)[0]
    return mx.argsort(ranks).astype(mx.int32)


def sorted_table(table: mx.array, rows: mx.array, pitch: int):
    """Return the (K, pitch) table of rows in sorted order, and a mask per 32 rows."""
    n, volume = table.shape
    build = kernel(
        "sort_table",
        _FILES,
        ("neighbours", "rows"),
        ("sorted", "masks"),
        "lattice::sort_table(neighbours, rows, sorted, masks, rows_shape[0], "
        "(int)(gridDim.x * blockDim.x), neighbours_shape[1]);",
        threads=128,
    )
    outputs = [
        ((volume, pitch), mx.int32),
        ((pitch // 32, -(-volume // 32)), mx.uint32),
    ]
    return run(build, [table, rows], pitch // 128, 128, outputs)
