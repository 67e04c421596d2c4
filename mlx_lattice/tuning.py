"""Thresholds as tables: a row per chip family, a safe default row for the rest."""

from __future__ import annotations

from . import devices
from .devices import Device

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

# Seconds that one Metal dispatch may hold the slowest Apple GPU: the watchdog kills
# what holds a GPU for long, callers then see empty results, and the screen waits.
DISPATCH_SECONDS = 0.1

# Work of a Metal dispatch: what a unit takes of the peak that bounds it, operations or
# bytes, and the share of the peak that kernels reach where they do worst. More work
# than the slowest chip does in 100 ms is cut, mostly into rows.
DISPATCH = {
    # Simdgroup matrices, which are bounded by the chip they run on instead.
    "matrices": {"operations": 2, "share": 1 / 4},
    # Sums in one thread, both operands from cache every time.
    "multiply_adds": {"operations": 2, "share": 1 / 20},
    # Features and table entries of at most 4 bytes, gathered row by row.
    "elements": {"bytes": 4, "share": 1 / 2},
    # Look-ups in a hash table: a slot and a row, each a cache line of 128 bytes.
    "probes": {"bytes": 256, "share": 1 / 2},
}

# How Metal cuts what one thread or one table would be too long for. All depend on sizes
# only, so that sums have one order.
METAL_CUTS = {
    # Edges of one part of a weight gradient that are worth writing a partial sum, and
    # the most that one thread may add up.
    "part_edges": 512,
    "thread_edges": 1 << 18,
    "parts": 256,
    "partial_elements": 1 << 26,  # of partial sums at a time: 256 MB
    # Entries of a segment or edges of a row that one thread may add up, and of the
    # pieces of longer ones: a thread alone adds about ten million a second.
    "longest": 1024,
    "piece": 256,
    # Rows that one thread lists edges of: few enough to fill the GPU, and the counts of
    # all blocks stay small.
    "edge_block": 64,
    # Candidates of one hash table of generated rows: 256 MB of slots.
    "candidates": 1 << 25,
}


def dispatch_limit(work: str) -> int:
    """Return how much of a kind of work one Metal dispatch may do, on every chip."""
    takes, least = DISPATCH[work], []
    for chip in devices.PROFILES.values():
        if chip.backend == devices.METAL:
            peaks = {"operations": 1e12 * chip.tflops, "bytes": 1e9 * chip.bandwidth}
            least += [
                rate / takes[peak] for peak, rate in peaks.items() if peak in takes
            ]
    return max(1, int(DISPATCH_SECONDS * takes["share"] * min(least)))


def value(table: dict[str, int], device: Device) -> int:
    """Return the family's entry of a table, or the safe default."""
    return table.get(device.family, table["*"])


def rows(route: str, pass_: str, device: Device) -> int:
    """Return the least rows from which a route pays on a device."""
    return value(ROWS[route, pass_], device)


def region_rows(row_bytes: int, device: Device) -> int:
    """Return the rows that are sorted by mask together, for rows of some bytes."""
    row = next((r for r in REGION_ROWS if r != "more" and row_bytes <= int(r)), "more")
    return value(REGION_ROWS[row], device)


def matrix_limit(device: Device) -> int:
    """Return the multiply-adds of one dispatch of matrix tiles on a chip."""
    takes = DISPATCH["matrices"]
    rate = takes["share"] * 1e12 * device.tflops / takes["operations"]
    return max(1, int(DISPATCH_SECONDS * rate))
