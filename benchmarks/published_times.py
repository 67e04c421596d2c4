"""Times and rates of Apple GPUs that other projects published."""

from __future__ import annotations

from typing import NamedTuple

# mtlgemm (pedronaugusto/mtlgemm, commit 269e3b8): submanifold 3x3x3 of a shell (see
# doctor.shell), C_in = C_out, bias, float16, map kept, mean of 50 calls after 5, Python
# and PyTorch included. Its commits name an M4 Pro and an M3 Max for the same times; by
# their rates it was an M3 Max.
SHELL_SOURCE = "mtlgemm 269e3b8, M3 Max (inferred; one of its commits says M4 Pro)"


class Shell(NamedTuple):
    """A shell's side and channels, and mtlgemm's milliseconds."""

    resolution: int
    channels: int
    masked_ms: float
    dense_ms: float


SHELLS = (
    Shell(16, 64, 0.205, 0.428),
    Shell(32, 64, 0.213, 0.216),
    Shell(32, 128, 0.488, 0.503),
    Shell(64, 128, 1.572, 1.993),
    Shell(64, 256, 5.642, 7.339),
    Shell(128, 256, 19.603, 30.052),
)

# Dense matmuls of others: (chip, what, TFLOP/s from, to, source).
MATMULS = (
    ("m1-max", "metal-flash-attention", 8.8, 9.1, "83 to 86% of 10.6"),
    ("m1-max", "llama.cpp, 4096 x 4096", 9.3, 9.3, "llama.cpp 2615"),
    ("m2-max", "MPSGraph", 9.5, 9.5, "Metal.jl 829"),
    ("m2-ultra", "MLX float32, 4096 x 4096", 20.5, 20.7, "mlx 424, 1518"),
    ("m3-ultra", "MLX bfloat16, 60 cores", 16.4, 18.9, "mlx 3196"),
    ("m3-ultra", "MPSGraph bfloat16, 60 cores", 18.8, 19.6, "mlx 3196"),
    ("m5", "MLX half, accelerators", 15.4, 15.4, "mlx 3925"),
    ("m5-max", "MLX half, accelerators", 52.7, 59.6, "mlx 3211"),
)
# Memory rates of others: (chip, GB/s from, to, source).
MEMORY = (
    ("m1-max", 340, 350, "llama.cpp 2248"),
    ("m2", 92.8, 92.8, "Metal.jl 910, a copy"),
    ("m4-max", 400, 405, "duckdbgpumetaldbram, sums"),
)
# Convolutions of others: (chip, what, ms, source).
LAYERS = (
    (
        "m4-max",
        "3x3x3, 9 600 rows, 128 channels, gathers and matmuls by MLX",
        1.48,
        "trellis2-mlx 9b8d3e3",
    ),
    ("m4-max", "neighbour table of 49 152 rows, NumPy on the CPU", 95.0, "440fd0e"),
    ("m1-pro", "dense conv2d 3x3, 56 x 56, 64 to 128", 0.391, "tract 2549"),
    (
        "m5",
        "dense conv3d 3x3x3, 1280 to 1280, half, 7 904 outputs",
        461.6,
        "llama.cpp 28070",
    ),
)
