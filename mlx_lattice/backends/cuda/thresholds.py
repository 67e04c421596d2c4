"""CUDA: thresholds, most of them timed on an H200. "*" is the default of other GPUs."""

from __future__ import annotations

# CUDA, int8: microseconds of a stage for each element of the tile, by kernel. Fitted to
# every tile and split of MinkUNet34's layers with 100 000 and 400 000 rows on an H200.
INT8_US = {"mma": 3.7e-5, "wide": 3.7e-5, "hopper": 2.8e-5}

# Elements of the output up to which float32 takes the tiles of mma.sync, which need no
# prepared weights.
FLOAT_ELEMENTS = 1 << 19
FEW_OFFSETS = 8

# Elements of the output up to which transposed weights are read as they are, by the
# tiles of mma.sync: preparing weights takes 2 us, or 7 at 256 channels.
TURNED_ELEMENTS = 1 << 15

# Offsets that a tile uses beyond its first one, over K times the share of a row's edges
# beyond its first: see cuda_tiles.used_offsets.
USED_OFFSETS = 0.7

# Fewest output rows for which a launch unpacks packed weights once a call, by variant
# and width of the tiles, or by the width alone for rows with few edges. With fewer
# rows, and for other widths, every tile unpacks its weights. Timed on an H200
# (benchmarks/results/gpu-unpack.jsonl).
UNPACK_ROWS = {
    "mma": {64: 1 << 14},
    "hopper": {32: 1 << 16, 64: 1 << 15},
    "wide": {128: 1 << 12, 256: 1 << 10},
    "few edges": {64: 1 << 17, 128: 1 << 15},
}

# Most bytes of the unpacked weights during a call; more if the output takes more.
UNPACK_BYTES = 64 << 20

# Most splits of the offsets, if tiles are too few to fill the GPU.
MOST_SPLITS = 32

# For the number of splits: microseconds of a stage in a tile of at most 64 x 128, by
# kernel. Fitted to the timings of INT8_US.
STAGE_US = {"mma": 0.55, **dict.fromkeys(("hopper", "wide"), 0.26)}
# STAGE_US for int8 features.
INT8_STAGE_US = {"mma": 0.55, "hopper": 0.22, "wide": 0.22}
# For the number of splits: microseconds of an offset, of adding splits and of a split,
# and bytes of partial sums in a microsecond.
SPLIT_US: dict[str, float] = {
    "offset": 0.075,
    "adding": 1.3,
    "split": 0.07,
    "bytes": 8_000_000,
}
# SPLIT_US for int8 features.
INT8_SPLIT_US: dict[str, float] = SPLIT_US | {"adding": 2.0}

# Weight gradients: when one block processes all edges of an offset. Pairs of (elements
# of dW for each multiprocessor, most stages of the longest offset): a pair holds from
# its elements on. Kernels with few offsets are "even". Timed on an H200 against splits
# of all edges, with 1 000 to 120 000 rows of surfaces and 16 to 512 channels.
WHOLE_GRAD: dict[str, tuple[tuple[int, int], ...]] = {
    "even": ((0, 14), (200, 19), (500, 36), (900, 46), (2000, 90), (3500, 130),
             (8000, 200)),
    "uneven": ((0, 20), (400, 24), (800, 33), (1500, 38), (3000, 63), (7000, 75),
               (24_000, 400), (40_000, 190)),
}  # fmt: skip

# Fewest blocks for each multiprocessor, if such tiles are wider than 64.
WHOLE_GRAD_BLOCKS = 0.7

# float32: sides of the square tiles of dW over edges; the largest that both channels
# fill to more than half is taken.
FLOAT_GRAD_SIDES = (64, 128)

# Weight gradients: most edges for which a tile is half as wide, by its channels.
NARROW_GRAD_EDGES = {128: 1 << 15, 256: 1 << 14}
# Weight gradients: most edges for ``FEW_EDGES_GRAD_TILES``.
LOW_GRAD_EDGES = 3 << 17

# Weight gradients: stages of a split of the edges, if there are more than ``least``
# splits.
GRAD_SPLIT = {"stages": 3, "least": 96}

# Weight gradients over sorted rows: most input channels, those of a warpgroup.
SORTED_GRAD_CHANNELS = 64

# Fewest mean edges a row for which weight gradients over sorted rows beat grouped_gemm,
# by the most input channels. From layers with 4 to 128 channels and 40 000 to 400 000
# rows on an H200.
SORTED_GRAD_EDGES: dict[int, float] = {16: 8, 32: 14.5, SORTED_GRAD_CHANNELS: 23.5}

# The tile of weight gradients over sorted rows: consumer warpgroups of 64 rows of dW,
# stages, and most splits for each multiprocessor. In blocks of 64 rows: the least of
# each of several splits, and the fewest and most of a single one.
SORTED_GRAD = {
    "consumers": 4,
    "stages": 4,
    "splits": 3,
    "least": 32,
    "fewest": 8,
    "most": 1024,
}

# Most mean partial sums of an element that one warp adds: ``least`` if dW has fewer
# blocks for each multiprocessor than ``blocks``, else ``most``.
SHARED_SUMS: dict[str, float] = {"most": 16, "least": 4, "blocks": 1.5}

# Depthwise weight gradients: splits for each multiprocessor, fewest stages of a split.
DEPTHWISE_GRAD = {"splits": 4, "stages": 4}
# Weight gradients of traversals: splits for each multiprocessor, fewest edges of a
# split.
TRAVERSAL_GRAD = {"splits": 8, "least": 256}

# Rows of a set up to which CUDA makes all its levels in one launch.
CUDA_ROWS_TOGETHER = 1 << 20

# Families with wgmma.
HOPPER = ("h100", "h200")
# Mean edges of a row below which a relation has few; and the same of kernels with at
# most FEW_OFFSETS offsets.
FEW_EDGES, FEW_EDGES_OF_FEW_OFFSETS = 4, 2
# One TF32 product: sides of the tiles; edges times the narrower channels from which the
# largest side that fits is taken, else the smallest; and edges from which three blocks
# of 64 lie side by side. A tile of wgmma was 31 to 40% slower at 64 channels.
TF32_GRAD_SIDES, TF32_NARROW_GRAD, TF32_MANY_EDGES = (64, 96, 128), 1 << 22, 1 << 16
