"""Thresholds of routes that no backend owns. "*" is the default of other chips."""

from __future__ import annotations

from ..backends.metal.thresholds import FILLING_ROWS
from ..devices import CUDA, Device, entry

# Fewest rows from which a route pays, by (route, pass); see ANY_ROWS. Values for Metal
# come from executed counts.
ROWS = {
    # They come after sorted_implicit_gemm in the table: unsorted tiles execute 1.6 to
    # 2.2 times the useful operations, sorted ones 1.11 to 1.14.
    ("dense_channel", "forward"): {"*": 256},
    ("dense_channel", "input_grad"): {"*": 256},
    ("cout16", "forward"): {"*": 512},
    ("sorted_implicit_gemm", "forward"): FILLING_ROWS,
    ("sorted_implicit_gemm", "input_grad"): FILLING_ROWS,
    ("grouped_gemm", "weight_grad"): {"*": 1},
    ("tensor_ops", "forward"): FILLING_ROWS,
    ("tensor_ops", "input_grad"): FILLING_ROWS,
    ("tensor_ops", "weight_grad"): {"*": 1024},
    ("quantized_sorted", "forward"): FILLING_ROWS,
    ("quantized_tensor_ops", "forward"): FILLING_ROWS,
}

# Channels of the narrower side from which tiles take any number of rows. A traversal
# reads W[k] once a row; with 256 channels it takes 1.2 ms for 200 rows on an H200.
ANY_ROWS = {
    ("sorted_implicit_gemm", "forward"): {"*": 32, "h100": 8, "h200": 8},
    ("sorted_implicit_gemm", "input_grad"): {"*": 32, "h100": 8, "h200": 8},
    ("tensor_ops", "forward"): {"*": 32},
    ("tensor_ops", "input_grad"): {"*": 32},
    ("quantized_sorted", "forward"): {"*": 32},
    ("quantized_tensor_ops", "forward"): {"*": 32},
}

# CPU: multiply-adds that cost as much as a step from one group of an edge to the next.
GROUP_PRODUCTS = 640

# Channels of a group up to which im2col beats a matmul per offset.
IM2COL_CHANNELS = {"*": 4, "cpu": 8}

# Most bytes of the im2col matrix in explicit GEMM.
IM2COL_BYTES = {"*": 1 << 30, "cpu": 1 << 29}

# Kernel offsets from which one dispatch over all offsets beats one per offset.
GROUPED_OFFSETS = {"*": 8, "cpu": 64}

# CUDA, as ROWS. On an H200 the floor takes 7 us for 300 rows of 4 channels, tiles 9; at
# 8 channels the floor takes 8 us, tiles 5.
CUDA_ROWS = {
    ("sorted_implicit_gemm", "forward"): {"*": 1024},
    ("sorted_implicit_gemm", "input_grad"): {"*": 1024},
    # Over sorted rows; below it grouped_gemm serves, over edges.
    ("sorted_implicit_gemm", "weight_grad"): {"*": 1 << 14},
    ("quantized_sorted", "forward"): {"*": 256},
}


def rows(route: str, pass_: str, channels: tuple[int, int], device: Device) -> int:
    """Return the least rows from which a route pays on a device."""
    wide = ANY_ROWS.get((route, pass_))
    if wide is not None and min(channels) >= entry(wide, device):
        return 1
    own = device.backend == CUDA and (route, pass_) in CUDA_ROWS
    return entry((CUDA_ROWS if own else ROWS).get((route, pass_), {"*": 0}), device)
