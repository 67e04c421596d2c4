"""Thresholds as tables: a row per chip family, a safe default row for the rest."""

from __future__ import annotations

from typing import NamedTuple

from .devices import CUDA, Device

# Least number of rows from which a route is worth its set-up, by (route, pass).
# "*" is the safe default. The Metal values are what the nearest peer ships, until
# counts and measurements move them.
ROWS = {
    ("dense_channel", "forward"): {"*": 4096},
    ("dense_channel", "input_grad"): {"*": 4096},
    ("dense_channel", "weight_grad"): {"*": 4096},
    ("cout16", "forward"): {"*": 4096},
    ("cout16", "weight_grad"): {"*": 4096},
    # Fewest rows that fill the family's largest GPU, four threadgroups a core: tiles of
    # 64 rows, each cut into at most 16 splits. M1 to M3 have Ultras of 64 to 80 cores.
    ("sorted_implicit_gemm", "forward"): {"*": 1024, "m4": 640, "m5": 640},
    ("sorted_implicit_gemm", "input_grad"): {"*": 1024, "m4": 640, "m5": 640},
    ("sorted_implicit_gemm", "weight_grad"): {"*": 1024},
    # The tiles of sorted_implicit_gemm, so its thresholds.
    ("tensor_ops", "forward"): {"*": 1024, "m5": 640},
    ("tensor_ops", "input_grad"): {"*": 1024, "m5": 640},
    ("tensor_ops", "weight_grad"): {"*": 1024},
    ("quantized_sorted", "forward"): {"*": 1024},
    ("quantized_tensor_ops", "forward"): {"*": 1024},
}

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
