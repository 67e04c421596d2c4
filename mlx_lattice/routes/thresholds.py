"""Thresholds as tables: a row per chip family, a safe default row for the rest."""

from __future__ import annotations

from typing import NamedTuple

from ..devices import CUDA, Device

_FILLING_ROWS = {"*": 1024, "m1": 1024, "m2": 1216, "m3": 1280, "m4": 640, "m5": 640}

# Least number of rows from which a route is worth its set-up, by (route, pass).
# "*" is the safe default. The Metal values come from executed counts.
ROWS = {
    # Four tiles. They come after sorted_implicit_gemm: rows in their own order do 1.6
    # (W1) to 2.2 (a thin surface) of the useful operations, sorted ones 1.11 to 1.14,
    # and at 16 to 64 channels the predicted time is 1.4 to 1.9 times as long on every
    # chip. So they serve below its threshold, where the traversals ask the caches for
    # ten times as much. Their weight gradient is its kernel, with tiles of as few
    # channels: one of their own would multiply and read the same.
    ("dense_channel", "forward"): {"*": 256},
    ("dense_channel", "input_grad"): {"*": 256},
    ("dense_channel", "weight_grad"): {"*": 256},
    ("cout16", "forward"): {"*": 512},
    ("cout16", "weight_grad"): {"*": 512},
    # Fewest rows that fill the family's largest GPU, of 64, 76, 80, 40 and 40 cores,
    # four threadgroups a core: tiles of 64 rows, each cut into at most 16 splits.
    ("sorted_implicit_gemm", "forward"): _FILLING_ROWS,
    ("sorted_implicit_gemm", "input_grad"): _FILLING_ROWS,
    # Some 10 thousand edges: parts worth their partial sums fill a small GPU.
    ("sorted_implicit_gemm", "weight_grad"): {"*": 1024},
    # The tiles of sorted_implicit_gemm, so its thresholds.
    ("tensor_ops", "forward"): _FILLING_ROWS,
    ("tensor_ops", "input_grad"): _FILLING_ROWS,
    ("tensor_ops", "weight_grad"): {"*": 1024},
    ("quantized_sorted", "forward"): _FILLING_ROWS,
    ("quantized_tensor_ops", "forward"): _FILLING_ROWS,
}

# Threadgroups that fill a family's largest GPU, four a core. Where there are fewer,
# sums are cut into parts, each written and read once more; those of a row into at most
# SPLITS.
FILLING = {"*": 320, "m4": 160, "m5": 160}
SPLITS = {"*": 16}

# Rows that are sorted by mask together, by bytes of a feature row, up to which a row of
# the table holds. More rows share more masks, so less is multiplied in vain; fewer keep
# their features in a cache of 8 MB while all their masks pass. Up to 256 bytes (128
# half channels) many rows do both: 1.2 (a thin surface) to 1.5 times the compulsory
# bytes (W1). Up to 512 bytes, 7168 rows keep to 1.5 for 4 to 8 of a hundred operations;
# TensorOps, which skip 16 rows at a time, would pay up to 12 and pass 1.25 times the
# useful ones. Beyond, the fewest bytes of any order tried are 5 to 15 times the
# compulsory ones, for 8 to 9 of a hundred operations, while multiplications bound every
# chip: so all that counts is to waste few of them.
REGION_ROWS = {
    "256": {"*": 28672},
    "512": {"*": 7168, "m5": 28672},
    "more": {"*": 28672},
}

# Bytes of a feature row from which its channels are cut into slices, each summed over
# all offsets before the next: 128 columns of its weights stay in cache.
SLICE_BYTES = {"*": 1024}

# Weights that stay in cache while tiles of rows pass. Larger ones are read by the
# columns of a tile, for each region of rows in turn.
CACHED_WEIGHTS = {"*": 4 << 20}

# In a weight gradient: features of the rows that all offsets pass together, so that
# they are read from memory once.
CACHED_FEATURES = {"*": 6_500_000}

# Edges of an offset that are worth writing a partial sum, and the partial sums that a
# weight gradient holds at a time.
PART_EDGES = {"*": 512}
PARTIAL_BYTES = {"*": 1 << 28}

# Input channels a group up to which im2col beats a multiply per offset: below them
# the inner dimension of each offset's product is too short to fill a matmul.
IM2COL_CHANNELS = {"*": 4, "cpu": 8}

# Bytes that the im2col matrix may take before explicit GEMM is refused.
IM2COL_BYTES = {"*": 1 << 30, "cpu": 1 << 29}

# Kernel offsets from which one dispatch over all offsets beats one per offset.
GROUPED_OFFSETS = {"*": 8, "cpu": 64}

# How far two routes' results may differ, relative to the norm of the output.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


class SortedTile(NamedTuple):
    """Shape of ``sorted_implicit_gemm_hopper``: its template's first parameters.

    Attributes:
        groups: warpgroups that multiply.
        blocks: blocks of 64 rows of each.
        teams: warpgroups that copy.
        width: output channels.
        stages: of 64 summed channels, in shared memory.
        per_multiprocessor: blocks of threads side by side.
    """

    groups: int
    blocks: int
    teams: int
    width: int
    stages: int
    per_multiprocessor: int

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.groups * self.blocks

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.groups + self.teams)


class Tile(NamedTuple):
    """Shape of the other Hopper kernels: a warpgroup has 64 rows, ``copiers`` copy."""

    groups: int
    copiers: int
    width: int
    stages: int
    per_multiprocessor: int

    @property
    def rows(self) -> int:
        """Rows (of the output, or of dW) of a tile."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.groups + self.copiers


def shared_bytes(tile: SortedTile | Tile) -> int:
    """Return the dynamic shared memory of a block."""
    return tile.stages * 128 * (tile.rows + tile.width) + 1024


# As ROWS, where tiles go through tensor cores: on an H200, at 64 channels, the floor
# takes 63 us forward and 540 backward for 1000 rows of 27 edges, the tiles 25 and 46
# for 200 000 rows of 1.3 edges.
CUDA_ROWS = {
    ("sorted_implicit_gemm", "forward"): {"*": 256},
    ("sorted_implicit_gemm", "input_grad"): {"*": 256},
    ("sorted_implicit_gemm", "weight_grad"): {"*": 256},
    ("quantized_sorted", "forward"): {"*": 256},
}

# CUDA, Hopper: tiles by their width in output channels, the best of those timed on the
# surface scenes of benchmarks/gpu.py, on an H200 (benchmarks/results/gpu-tiles.jsonl).
# What bounds them is the way from the L2 cache, about 30 bytes a cycle and
# multiprocessor, and how fast warps issue copies.
SORTED_TILES = {
    32: SortedTile(2, 2, 2, 32, 6, 1),
    64: SortedTile(2, 2, 2, 64, 5, 1),
    128: SortedTile(2, 2, 1, 128, 4, 1),
    256: SortedTile(2, 1, 1, 256, 4, 1),
}
# The same of sorted_implicit_gemm_wide, at widths where it is faster.
WIDE_TILES = {
    128: Tile(3, 128, 128, 5, 1),
    256: Tile(2, 128, 256, 4, 1),
}
# Where rows have few edges, tiles are short work: low ones, timed on the random scene.
THIN_TILES = {
    32: SortedTile(1, 1, 1, 32, 4, 4),
    64: SortedTile(1, 1, 1, 64, 3, 4),
    128: SortedTile(1, 1, 1, 128, 4, 2),
    256: SortedTile(2, 1, 1, 256, 4, 1),
}
THIN_EDGES = 4  # mean edges of a row below which relations count as thin
# Output rows from which packed weights are unpacked once a call, in one launch more,
# and not in every tile: by the kernel that would unpack there and the width of its
# tiles, or by the width alone where relations are thin. Timed on an H200, on the scenes
# of benchmarks/gpu.py and on 500 to 30 000 rows of W1 (benchmarks/results/
# gpu-unpack.jsonl). Other widths never are: those whose input channels are no multiple
# of 64, for which tiles unpack faster than they copy floats, and 32 channels of a thin
# relation, where the launch is dear.
UNPACK_ROWS = {
    "sorted_implicit_gemm": {64: 1 << 14},
    "sorted_implicit_gemm_hopper": {32: 1 << 16, 64: 1 << 15},
    "sorted_implicit_gemm_wide": {128: 1 << 12, 256: 1 << 10},
    "thin": {64: 1 << 17, 128: 1 << 15},
}
# Room that these floats may take for the length of a call, where outputs take less.
UNPACK_BYTES = 64 << 20
# Most shares of the offsets, where tiles are too few to fill the GPU: more of them cost
# more in adding up than they gain.
MOST_SPLITS = 8
# grouped_gemm_hopper, by the width of the wider side, timed in the same way.
GRAD_TILES = {
    32: Tile(1, 128, 32, 4, 4),
    64: Tile(1, 128, 64, 4, 3),
    128: Tile(2, 64, 128, 3, 2),
    256: Tile(2, 128, 256, 4, 1),
}
SORTED_GRAD_ROWS = 1 << 18  # rows from which the sorted weight gradient pays


def value(table: dict[str, int], device: Device) -> int:
    """Return the family's entry of a table, or the safe default."""
    return table.get(device.family, table["*"])


def rows(route: str, pass_: str, device: Device) -> int:
    """Return the least rows from which a route pays on a device."""
    own = device.backend == CUDA and (route, pass_) in CUDA_ROWS
    return value((CUDA_ROWS if own else ROWS)[route, pass_], device)


def region_rows(row_bytes: int, device: Device) -> int:
    """Return the rows that are sorted by mask together, for rows of some bytes."""
    row = next((r for r in REGION_ROWS if r != "more" and row_bytes <= int(r)), "more")
    return value(REGION_ROWS[row], device)
