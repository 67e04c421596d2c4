"""Thresholds as tables: an entry for each chip that differs from the default, "*"."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from .. import devices
from ..devices import CUDA, METAL, Device

_Entry = TypeVar("_Entry")


def _by_cores(each: int) -> dict[str, int]:
    """Return ``each`` times the cores of every Apple GPU; "*" is the least of these."""
    chips = {
        d.name: each * d.cores for d in devices.PROFILES.values() if d.backend == METAL
    }
    return {"*": min(chips.values()), **chips}


# Metal: threadgroups of four simdgroups that fill a GPU, six a core, as M1 needs. With
# fewer tiles, each sum is split (split-K) into at most SPLITS partial sums.
FILLING = _by_cores(6)
SPLITS = {"*": 16}
# Metal, for the number of splits: share of its peak that a full GPU reaches, bytes that
# a partial sum moves, and seconds that the launch which adds the splits waits.
FULL_SHARE = {"*": 0.6}
PARTIAL_ITEM = {"*": 8}
SPLIT_WAIT = {"*": 15e-6}

# Fewest rows that fill a GPU: tiles of 64 rows, each in at most 16 splits.
FILLING_ROWS = _by_cores(6 * 64 // 16)

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

# TensorOps: height of a simdgroup, by the mean rows that share an offset's weights from
# which it pays, as in MLX's gathers on M5; and simdgroups that fill a core.
SHARED_ROWS = {64: 48, 32: 24}
TENSOR_FILLING = {"*": 8}

# Rows of a region, which is sorted by mask as a whole, by the most bytes of a feature
# row. In larger regions more rows share a mask, so tiles multiply fewer absent edges;
# the features of smaller regions fit a cache of 8 MB. Up to 256 bytes large regions do
# both. Up to 512 bytes, 7168 rows move 1.5 times the compulsory bytes for 4 to 8% more
# operations; TensorOps would need up to 12% more. Beyond, multiplications bound every
# chip, so the fewest operations win.
REGION_ROWS = {
    "256": {"*": 28672},
    "512": {"*": 7168, "m5": 28672},
    "more": {"*": 28672},
}


class TileShape(NamedTuple):
    """Shape of simdgroup matrices in a tile of 64 rows, in ``sorted_implicit_gemm``.

    Attributes:
        simdgroups: of a threadgroup.
        width: columns of each; it has as many rows as that leaves it.
        step: bytes of a feature row that are staged at a time.
        buffers: of a step, in threadgroup memory.
    """

    simdgroups: int
    width: int
    step: int
    buffers: int


# Metal, by the columns of a tile. M1 and M2 have pools of 208 KB of registers and 60 KB
# of threadgroup memory a core. Up to 64 columns that holds 24 to 36 simdgroups with one
# buffer; at 128 columns registers allow 16, so a second buffer costs nothing. From M3
# on there is one pool, and base chips take two simdgroups of 64 x 32, as MLX does.
_FOUR, _PAIR = TileShape(4, 32, 64, 1), TileShape(2, 32, 64, 1)
TILE_SHAPES = {
    16: {"*": TileShape(4, 16, 64, 1)},
    32: {"*": TileShape(4, 16, 64, 1)},
    64: {
        "*": _FOUR,
        "m3": _PAIR,
        "m3-pro": _FOUR,
        "m3-max": _FOUR,
        "m4": _PAIR,
        "m4-pro": _FOUR,
        "m4-max": _FOUR,
    },
    128: {"*": TileShape(4, 32, 32, 2), "m3": _FOUR, "m4": _FOUR},
}
# The same if weights are read across (MLX's layout in a forward pass, packed weights):
# a step takes 64 bytes of each line of weights, in one buffer. With float matrices the
# registers of M1 and M2 leave no room for that.
ACROSS_SHAPES = {128: {"*": _FOUR}}
FLOAT_ACROSS_SHAPES = {128: {"*": TileShape(4, 32, 32, 1), "m3": _FOUR, "m4": _FOUR}}

# Type of the matrices in which bfloat16 is multiplied. M1 and M2 have no bfloat16
# arithmetic (1.1 to 1.8 times the time of half); float matrices are as fast as half.
BFLOAT_MATRICES = {"*": "float32", "m3": "bfloat16", "m4": "bfloat16", "m5": "bfloat16"}

# Elements of an array from which indices need 64 bits.
FAR_ELEMENTS = {"*": 1 << 32}

# Bytes of a feature row from which its channels are summed in slices, one slice over
# all offsets at a time, so that 128 columns of a slice's weights fit the cache.
SLICE_BYTES = {"*": 1024}

# Bytes of weights that fit the cache. Larger weights are read by tile columns: all rows
# of a region use the same columns before the next.
CACHED_WEIGHTS = {"*": 4 << 20}

# Weight gradients: bytes of features of the rows that all offsets process together; and
# the same with the edges, if they process one slice of channels after another.
CACHED_FEATURES = {"*": 7_400_000}
CACHED_WINDOW = {"*": 8_000_000}

# Weight gradients: threadgroups that a core holds; and the largest range of one offset,
# as a share of the edges of one threadgroup. Without that limit a base chip would take
# 1.9 times as long for 64 channels, a Max 3.6 times.
GRAD_FILLING = {"*": 6}
LONGEST_RANGE = {"*": 0.5}

# Weight gradients: fewest edges of an offset for which a split pays, and most bytes of
# partial sums at a time.
SPLIT_EDGES = {"*": 512}
PARTIAL_BYTES = {"*": 1 << 28}

# Groups from which Metal's threads that walk edges are faster than matrix tiles of a
# block-diagonal weight: (y or dx, dW). Predicted for 64 channels and 120 000 rows.
GROUPS = {"half": (5, 3), "float32": (10, 4), "accelerated": (16, 11)}
# CPU: multiply-adds that cost as much as a step from one group of an edge to the next.
GROUP_PRODUCTS = 640

# Channels of a group up to which im2col beats a matmul per offset.
IM2COL_CHANNELS = {"*": 4, "cpu": 8}

# Most bytes of the im2col matrix in explicit GEMM.
IM2COL_BYTES = {"*": 1 << 30, "cpu": 1 << 29}

# Kernel offsets from which one dispatch over all offsets beats one per offset.
GROUPED_OFFSETS = {"*": 8, "cpu": 64}

# Greatest error relative to the norm of the output. "tf32": float32 features multiplied
# in TF32, which cuts both operands at 11 bits.
TOLERANCE = {"float32": 1e-5, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 1.6e-2}


# CUDA, as ROWS. On an H200 the floor takes 7 us for 300 rows of 4 channels, tiles 9; at
# 8 channels the floor takes 8 us, tiles 5.
CUDA_ROWS = {
    ("sorted_implicit_gemm", "forward"): {"*": 1024},
    ("sorted_implicit_gemm", "input_grad"): {"*": 1024},
    # Over sorted rows; below it grouped_gemm serves, over edges.
    ("sorted_implicit_gemm", "weight_grad"): {"*": 1 << 14},
    ("quantized_sorted", "forward"): {"*": 256},
}

# CUDA, int8: us of a stage and an element of the tile, by kernel. Fitted to every tile
# and split of MinkUNet34's layers at 100 000 and 400 000 rows on an H200.
INT8_US = {"mma": 3.7e-5, "wide": 3.7e-5, "hopper": 2.8e-5}
# Elements of the output up to which float32 takes the tiles of mma.sync, which need no
# prepared weights.
FLOAT_ELEMENTS = 1 << 19
# Mean edges of a row below which a relation has few; and the same of kernels with at
# most FEW_OFFSETS offsets.
FEW_EDGES, FEW_EDGES_OF_FEW_OFFSETS = 4, 2
FEW_OFFSETS = 8
# Elements of the output up to which transposed weights are read as they are, by the
# tiles of mma.sync: preparing weights takes 2 us, or 7 at 256 channels.
TURNED_ELEMENTS = 1 << 15
# Offsets that a tile uses beyond its first one, over K times the share of a row's edges
# beyond its first: see cuda_tiles.used_offsets.
USED_OFFSETS = 0.7
# Output rows from which packed weights are unpacked once a call, in one more launch,
# instead of in every tile: by the tiles' variant and width, or by the width alone for
# rows of few edges. Other widths always unpack in tiles. Timed on an H200
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
# For the number of splits: us of a stage by kernel in a tile of at most 64 x 128; us of
# an offset, of adding splits up and of a split; bytes of partial sums a us. Fitted to
# the same timings.
STAGE_US = {"mma": 0.55, **dict.fromkeys(("hopper", "wide"), 0.26)}
INT8_STAGE_US = {"mma": 0.55, "hopper": 0.22, "wide": 0.22}
SPLIT_US = {"offset": 0.075, "adding": 1.3, "split": 0.07, "bytes": 8_000_000}
INT8_SPLIT_US = SPLIT_US | {"adding": 2.0}
# Weight gradients whose blocks have all edges of an offset: (elements of dW a
# multiprocessor, most stages of the longest offset for which it pays from so many on).
# Kernels of few offsets have evenly many edges. Timed on an H200 on 1 000 to 120 000
# rows of surfaces and 16 to 512 channels, against splits of all edges.
WHOLE_GRAD = {
    "even": ((0, 14), (200, 19), (500, 36), (900, 46), (2000, 90), (3500, 130),
             (8000, 200)),
    "uneven": ((0, 20), (400, 24), (800, 33), (1500, 38), (3000, 63), (7000, 75),
               (24_000, 400), (40_000, 190)),
}  # fmt: skip
# Its tiles: fewest blocks a multiprocessor for tiles wider than 64, and stages beyond
# which a block takes several splits of the edges.
WHOLE_GRAD_TILES = {"blocks": 0.7, "stages": 5}
# float32: sides of the square tiles of dW over edges; the largest that both channels
# fill to more than half is taken.
FLOAT_GRAD_SIDES = (64, 128)
# Edges up to which tiles of so many channels are replaced by tiles of half as many; and
# edges up to which ``FEW_EDGES_GRAD_TILES`` are taken.
NARROW_GRAD_EDGES = {128: 1 << 15, 256: 1 << 14}
LOW_GRAD_EDGES = 3 << 17
# One TF32 product: sides of the tiles; edges times the narrower channels from which the
# largest side that fits is taken, else the smallest; and edges from which three blocks
# of 64 lie side by side. A tile of wgmma was 31 to 40% slower at 64 channels.
TF32_GRAD_SIDES, TF32_NARROW_GRAD, TF32_MANY_EDGES = (64, 96, 128), 1 << 22, 1 << 16
# Stages of a split of the edges, if there are more than ``least`` splits in all.
GRAD_SPLIT = {"stages": 3, "least": 96}
# Weight gradients over sorted rows: most input channels, those of a warpgroup.
SORTED_GRAD_CHANNELS = 64
# The same: edges of a row from which it beats grouped_gemm, by input channels at most.
# From layers of 4 to 128 channels, 40 000 to 400 000 rows, on an H200.
SORTED_GRAD_EDGES = {16: 8, 32: 14.5, SORTED_GRAD_CHANNELS: 23.5}
# Its tile: consumer warpgroups of 64 rows of dW and stages; most splits of a
# multiprocessor; blocks of 64 rows that each of several splits has at least, and that a
# single one has at least and at most.
SORTED_GRAD = {
    "consumers": 4,
    "stages": 4,
    "splits": 3,
    "least": 32,
    "fewest": 8,
    "most": 1024,
}
# Mean partial sums of an element from which several warps share them: the least if dW
# has fewer blocks a multiprocessor than ``blocks``, else the most.
SHARED_SUMS = {"most": 16, "least": 4, "blocks": 1.5}
# Other weight gradients: splits of a multiprocessor; fewest stages or edges of one.
DEPTHWISE_GRAD = {"splits": 4, "stages": 4}
TRAVERSAL_GRAD = {"splits": 8, "least": 256}
# Bytes of a channel, over all rows, up to which a BatchNorm is one launch each way, in
# which a block has all rows. Timed on an H200; not on Metal.
ONE_LAUNCH_NORM = {METAL: 2048, CUDA: 4096}
# Rows from which kernels of this library sum columns, instead of MLX; and rows up to
# which CUDA sums them in one launch, timed on an H200.
SUMMED_ROWS, ONE_LAUNCH_SUMS = 256, 2048
# Rows of a set up to which CUDA makes all its levels in one launch.
CUDA_ROWS_TOGETHER = 1 << 20
# Rows of candidates of levels that are made at once on Metal: 300 bytes a row more are
# read, in fewer launches. Not timed.
METAL_CANDIDATES_TOGETHER = 1 << 19
# Families with wgmma.
HOPPER = ("h100", "h200")


def value(table: dict[str, _Entry], device: Device) -> _Entry:
    """Return the chip's entry of a table, its family's, or the safe default."""
    return table.get(device.name, table.get(device.family, table["*"]))


def rows(route: str, pass_: str, channels: tuple[int, int], device: Device) -> int:
    """Return the least rows from which a route pays on a device."""
    wide = ANY_ROWS.get((route, pass_))
    if wide is not None and min(channels) >= value(wide, device):
        return 1
    own = device.backend == CUDA and (route, pass_) in CUDA_ROWS
    return value((CUDA_ROWS if own else ROWS).get((route, pass_), {"*": 0}), device)


def is_one_launch(rows: int, item: int, backend: str) -> bool:
    """Return whether a BatchNorm of so many rows is one launch each way.

    It then reads them once, without a sum of statistics before it. ``rows``: those that
    a block has of each of its channels; ``item``: bytes of an element.
    """
    return rows * item <= ONE_LAUNCH_NORM[backend]


def region_rows(row_bytes: int, device: Device) -> int:
    """Return the rows of a region, for feature rows of ``row_bytes``."""
    row = next((r for r in REGION_ROWS if r != "more" and row_bytes <= int(r)), "more")
    return value(REGION_ROWS[row], device)
