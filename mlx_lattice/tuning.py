"""Thresholds as tables: a row per chip family, a safe default row for the rest."""

from __future__ import annotations

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


def value(table: dict[str, int], device: Device) -> int:
    """Return the family's entry of a table, or the safe default."""
    return table.get(device.family, table["*"])


def rows(route: str, pass_: str, device: Device) -> int:
    """Return the least rows from which a route pays on a device."""
    return value(ROWS[route, pass_], device)
