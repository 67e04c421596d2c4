"""Thresholds as tables: a row per chip family, a safe default row for the rest."""

from __future__ import annotations

from . import devices
from .devices import Device

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

# Seconds that one Metal dispatch may hold the slowest Apple GPU: the watchdog kills
# what holds a GPU for long, callers then see empty results, and the screen waits.
DISPATCH_SECONDS = 0.1

# Work of a Metal dispatch: what a unit takes of the peak that bounds it, operations or
# bytes, and the share of the peak that kernels reach where they do worst. More work
# than the slowest chip does in 100 ms is cut, mostly into rows.
DISPATCH = {
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
