"""Thresholds as tables: a row per chip family, a safe default row for the rest."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from .. import devices
from ..devices import CUDA, METAL, Device

_Entry = TypeVar("_Entry")


def _by_cores(each: int) -> dict[str, int]:
    """Return so many for each core of every Apple GPU; of an unknown one, the least."""
    chips = {
        d.name: each * d.cores for d in devices.PROFILES.values() if d.backend == METAL
    }
    return {"*": min(chips.values()), **chips}


# Threadgroups of four simdgroups that fill an Apple GPU, six a core: M1's reach their
# full rate with 24 simdgroups a core, metal-flash-attention plans six to nine. Where
# tiles are fewer, each is split (split-K) into at most SPLITS partial sums, written and
# read once more.
FILLING = _by_cores(6)
SPLITS = {"*": 16}
# What decides how many pay: the share of its peak that a GPU full of tiles reaches,
# bytes that a partial sum moves, and seconds that the launch which adds them waits.
FULL_SHARE = {"*": 0.6}
PARTIAL_ITEM = {"*": 8}
SPLIT_WAIT = {"*": 15e-6}

# Fewest rows that fill it: tiles of 64 rows, each in at most 16 splits.
FILLING_ROWS = _by_cores(6 * 64 // 16)

# Least number of rows from which a route is worth its set-up, by (route, pass), but see
# ANY_ROWS. "*" is the safe default. The Metal values come from executed counts.
ROWS = {
    # Four tiles of rows. These routes come after sorted_implicit_gemm: tiles of rows in
    # their own order execute 1.6 (W1) to 2.2 times (a surface) the useful operations,
    # sorted rows 1.11 to 1.14; at 16 to 64 channels the predicted time is 1.4 to 1.9
    # times as long on every chip. Below its threshold they win over the traversals,
    # which read ten times the bytes through the caches.
    ("dense_channel", "forward"): {"*": 256},
    ("dense_channel", "input_grad"): {"*": 256},
    ("cout16", "forward"): {"*": 512},
    # By the chip's own cores.
    ("sorted_implicit_gemm", "forward"): FILLING_ROWS,
    ("sorted_implicit_gemm", "input_grad"): FILLING_ROWS,
    ("grouped_gemm", "weight_grad"): {"*": 1},
    # As sorted_implicit_gemm, whose tiles these are.
    ("tensor_ops", "forward"): FILLING_ROWS,
    ("tensor_ops", "input_grad"): FILLING_ROWS,
    ("tensor_ops", "weight_grad"): {"*": 1024},
    ("quantized_sorted", "forward"): FILLING_ROWS,
    ("quantized_tensor_ops", "forward"): FILLING_ROWS,
}

# Channels, of the narrower side, from which tiles take any number of rows. A traversal
# reads W[k] once a row, from its caches; a tile reads it once, and its splits fill a
# GPU: with 256 channels, a traversal over 200 rows takes 1.2 ms on an H200.
ANY_ROWS = {
    ("sorted_implicit_gemm", "forward"): {"*": 32, "h100": 8, "h200": 8},
    ("sorted_implicit_gemm", "input_grad"): {"*": 32, "h100": 8, "h200": 8},
    ("tensor_ops", "forward"): {"*": 32},
    ("tensor_ops", "input_grad"): {"*": 32},
    ("quantized_sorted", "forward"): {"*": 32},
    ("quantized_tensor_ops", "forward"): {"*": 32},
}

# Rows that share an offset's weights, on average, above which a simdgroup of TensorOps
# has so many rows: those of MLX's gathers on M5. And simdgroups that fill a core, one
# that reads beside one that multiplies on each of its four units: where there are
# fewer, lower ones are taken, and then sums are split.
SHARED_ROWS = {64: 48, 32: 24}
TENSOR_FILLING = {"*": 8}

# Rows of a region, which is sorted by mask as a whole, by bytes of a feature row: an
# entry holds up to its number. In larger regions more rows share a mask, so tiles
# multiply fewer absent edges; the features of smaller regions fit a cache of 8 MB while
# all masks are processed. Up to 256 bytes (128 half channels) large regions do both:
# 1.2 (a surface) to 1.5 times (W1) the compulsory bytes. Up to 512 bytes, 7168 rows
# hold 1.5 times for 4 to 8% more operations; TensorOps, which skip 16 rows at a time,
# would need up to 12% more and exceed 1.25 times the useful ones. Beyond, the best
# order tried moves 5 to 15 times the compulsory bytes for 8 to 9% more operations;
# multiplications bound every chip there, so the fewest operations win.
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


# Metal, by the columns of a tile. Up to 64 columns M1 and M2 hold 24 to 36 simdgroups a
# core, which have pools of 208 KB of registers and 60 KB of threadgroup memory: one
# buffer, and 32 x 32 sums a simdgroup in place of 64 x 16, which load a quarter less.
# At 128 columns registers stop at 16, so a second buffer costs nothing. From M3 on
# there is one pool. There two simdgroups of 64 x 32, with the most products a load,
# serve where MLX's own kernels have them, on base chips and Ultras; four on Pro, Max.
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
# The same where weights are read across, as a forward pass reads MLX's layout and
# packed ones: of each line of weights a step takes as much as of a row, so 64 bytes, in
# one buffer. Float matrices leave no room for that in the registers of M1 and M2.
ACROSS_SHAPES = {128: {"*": _FOUR}}
FLOAT_ACROSS_SHAPES = {128: {"*": TileShape(4, 32, 32, 1), "m3": _FOUR, "m4": _FOUR}}

# Type of the matrices that bfloat16 is multiplied in. M1 and M2 have no bfloat16
# arithmetic: others measured 1.1 to 1.8 times the time of half there. Float matrices
# take as long as half ones on every chip, and elements are converted when loaded; never
# to half, whose range is smaller.
BFLOAT_MATRICES = {"*": "float32", "m3": "bfloat16", "m4": "bfloat16", "m5": "bfloat16"}

# Elements of an array from which its places need 64 bits.
FAR_ELEMENTS = {"*": 1 << 32}

# Bytes of a feature row from which its channels are summed in slices, one slice over
# all offsets before the next: then 128 columns of a slice's weights fit the cache.
SLICE_BYTES = {"*": 1024}

# Bytes of weights that fit the cache while tiles of rows read them. Larger weights are
# read by tile columns: all rows of a region use the same columns before the next.
CACHED_WEIGHTS = {"*": 4 << 20}

# In a weight gradient: bytes of features of the rows that all offsets process together,
# so that the rows are read from memory once.
CACHED_FEATURES = {"*": 7_400_000}
# The same where they process one slice of channels after another: with the edges.
CACHED_WINDOW = {"*": 8_000_000}

# In a weight gradient: threadgroups that a core holds; and the most of the edges that
# fall to the place of one that the longest range of one offset may have. All others
# would wait for a longer one at the end: with ranges of any length a base chip would
# take 1.9 times as long for 64 channels, a Max 3.6 times.
GRAD_FILLING = {"*": 6}
LONGEST_RANGE = {"*": 0.5}

# Least edges of an offset for which a split is worth its partial sum, and most bytes of
# partial sums that a weight gradient holds at a time.
SPLIT_EDGES = {"*": 512}
PARTIAL_BYTES = {"*": 1 << 28}

# Groups from which Metal's threads that walk edges are faster than matrix tiles of a
# block-diagonal weight: (y or dx, dW). Predicted for 64 channels and 120 000 rows of a
# surface; M1 and M2 break even at two thirds of these.
GROUPS = {"half": (5, 3), "float32": (10, 4), "accelerated": (16, 11)}
# Multiply-adds that take as long as a CPU's step from one group of an edge to the next.
GROUP_PRODUCTS = 640

# Channels of a group up to which im2col beats a matmul per offset, whose inner
# dimension is then too short to be efficient.
IM2COL_CHANNELS = {"*": 4, "cpu": 8}

# Bytes that the im2col matrix may take before explicit GEMM is refused.
IM2COL_BYTES = {"*": 1 << 30, "cpu": 1 << 29}

# Kernel offsets from which one dispatch over all offsets beats one per offset.
GROUPED_OFFSETS = {"*": 8, "cpu": 64}

# Greatest difference of two routes' results, relative to the norm of the output.
# "tf32": float32 features that are multiplied in TF32; tensor cores may cut off both
# operands at 11 bits, each by 2^-10 at most.
TOLERANCE = {"float32": 1e-5, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 1.6e-2}


# As ROWS, for tiles on tensor cores. On an H200, the floor takes 7 us for 300 rows of 4
# channels, which tiles pad first; they take 9. With 8 channels they take 5, it takes 8.
CUDA_ROWS = {
    ("sorted_implicit_gemm", "forward"): {"*": 1024},
    ("sorted_implicit_gemm", "input_grad"): {"*": 1024},
    # Over sorted rows; below it grouped_gemm serves, over edges.
    ("sorted_implicit_gemm", "weight_grad"): {"*": 1 << 14},
    ("quantized_sorted", "forward"): {"*": 256},
}

# What decides between a lower tile and that of many rows: us of a stage and an element
# of the tile, by kernel, of the multiprocessor that has most. Fitted to every tile and
# split of MinkUNet34's layers at 100 000 and 400 000 rows, on an H200.
INT8_US = {"mma": 3.7e-5, "wide": 3.7e-5, "hopper": 2.8e-5}
# Elements of the output up to which float32 takes the tiles of mma.sync: they are lower
# and need no prepared weights.
FLOAT_ELEMENTS = 1 << 19
# Mean edges of a row below which a relation has few. Of few offsets an inverse 2x2x2
# has one edge a row, and one with stride 2 two to four, which the rows of a tile share.
FEW_EDGES, FEW_EDGES_OF_FEW_OFFSETS = 4, 2
FEW_OFFSETS = 8  # of a kernel, at most
# Elements of the output up to which weights that have to be turned are read by the
# tiles of mma.sync, which take them as they are: preparing them takes 2 us, or 7 at 256
# channels. At 2000 rows of 32 channels preparing pays already.
TURNED_ELEMENTS = 1 << 15
# Of K times the part of a row's edges beyond the first: how many offsets more than one
# a tile uses, see cuda_splits.used_offsets.
USED_OFFSETS = 0.7
# Output rows from which packed weights are unpacked once a call, in one more launch,
# instead of in every tile: by the variant that would unpack there and the width of its
# tiles, or by the width alone where rows have few edges. Timed on an H200, on the
# scenes of benchmarks/gpu.py and on 500 to 30 000 rows of W1 (benchmarks/results/
# gpu-unpack.jsonl). Other widths never are: those whose input channels are no multiple
# of 64, for which tiles unpack faster than they copy floats, and 32 channels of few
# edges a row, where the launch is dear.
UNPACK_ROWS = {
    "mma": {64: 1 << 14},
    "hopper": {32: 1 << 16, 64: 1 << 15},
    "wide": {128: 1 << 12, 256: 1 << 10},
    "few edges": {64: 1 << 17, 128: 1 << 15},
}
# Most bytes of these floats during a call; more where the output takes more.
UNPACK_BYTES = 64 << 20
# Most splits of the offsets, where tiles are too few to fill the GPU.
MOST_SPLITS = 32
# What decides how many there are: us of a stage by kernel, in a tile of 64 x 128 or
# less, and more with the root of its size; of an offset besides; of adding splits up at
# all; of a split; and bytes of partial sums, written and read, in a us. Fitted to the
# same timings.
STAGE_US = {"mma": 0.55, **dict.fromkeys(("hopper", "wide", "short", "resident"), 0.26)}
INT8_STAGE_US = {"mma": 0.55, "hopper": 0.22, "wide": 0.22}
SPLIT_US = {"offset": 0.075, "adding": 1.3, "split": 0.07, "bytes": 8_000_000}
INT8_SPLIT_US = SPLIT_US | {"adding": 2.0}
# Weight gradients whose blocks have all edges of an offset: (elements of dW a
# multiprocessor, stages of the longest offset up to which it pays from so many on). Few
# offsets have evenly many edges: stages of one on average. Timed on an H200 on 1 000 to
# 120 000 rows of surfaces and 16 to 512 channels, against splits of all edges.
WHOLE_GRAD = {
    "even": ((0, 14), (200, 19), (500, 36), (900, 46), (2000, 90), (3500, 130),
             (8000, 200)),
    "uneven": ((0, 20), (400, 24), (800, 33), (1500, 38), (3000, 63), (7000, 75),
               (24_000, 400), (40_000, 190)),
}  # fmt: skip
# Its tiles: those wider than 64 need so many blocks a multiprocessor; of more stages
# than these a block takes several splits of the edges.
WHOLE_GRAD_TILES = {"blocks": 0.7, "stages": 5}
# Sides of the square tiles of dW over edges in float32: the largest that both channels
# fill to more than half.
FLOAT_GRAD_SIDES = (64, 128)
# Edges up to which tiles of so many channels become ones of half as many; and up to
# which they are ``FEW_EDGES_GRAD_TILES``.
NARROW_GRAD_EDGES = {128: 1 << 15, 256: 1 << 14}
LOW_GRAD_EDGES = 3 << 17
# In one TF32 product: sides, of which those that both channels fill best; edges times
# the narrower channels from which it is the largest of these, else the smallest; and
# edges from which three blocks of 64 lie side by side. Timed as TF32_WHOLE_TILES: a
# tile of wgmma, whose operands have to be turned, was slower at 64 channels, by 31 to
# 40%.
TF32_GRAD_SIDES, TF32_NARROW_GRAD, TF32_MANY_EDGES = (64, 96, 128), 1 << 22, 1 << 16
# Stages of a split of the edges, where there are more than some splits in all.
GRAD_SPLIT = {"stages": 3, "least": 96}
# Most input channels of the weight gradient over sorted rows: those of a warpgroup.
SORTED_GRAD_CHANNELS = 64
# Edges of a row from which it takes less than grouped_gemm, by input channels at most:
# it multiplies what a tile's rows lack, and reads dy once for all offsets. From layers
# of 4 to 128 channels, 40 000 to 400 000 rows of 9.6 to 26 edges, on an H200.
SORTED_GRAD_EDGES = {16: 8, 32: 14.5, SORTED_GRAD_CHANNELS: 23.5}
# Its tile: consumer warpgroups, of 64 rows of dW each, and stages; its splits of a
# multiprocessor, at most; the blocks of 64 rows that each of several has at least, that
# one has at least, and at most.
SORTED_GRAD = {
    "consumers": 4,
    "stages": 4,
    "splits": 3,
    "least": 32,
    "fewest": 8,
    "most": 1024,
}
# Partial sums of an element, on average, from which several warps share them: from the
# least on where dW has fewer blocks a multiprocessor than these, else from the most.
SHARED_SUMS = {"most": 16, "least": 4, "blocks": 1.5}
# Splits of a multiprocessor in other weight gradients, and the least stages or edges of
# one.
DEPTHWISE_GRAD = {"splits": 4, "stages": 4}
TRAVERSAL_GRAD = {"splits": 8, "least": 256}
# Bytes of a channel, over all rows, up to which a BatchNorm is one launch each way: a
# block then has all rows. CUDA's threads hold no more in registers, and it was timed on
# an H200. On Metal nobody has timed it: 32 reads of a thread, where two launches more
# that wait for each other take 60 us.
ONE_LAUNCH_NORM = {METAL: 2048, CUDA: 4096}
# Rows from which kernels add up columns, where MLX takes one launch for fewer; and up
# to which CUDA's take one, timed on an H200.
SUMMED_ROWS, ONE_LAUNCH_SUMS = 256, 2048
# Rows of a set up to which CUDA makes all its levels in one launch.
CUDA_ROWS_TOGETHER = 1 << 20
# Candidates of levels, rows of each, that are made at once on Metal: made of all rows
# they read some 300 bytes a row more (counted), which of more rows should outweigh the
# waits (nobody timed it).
METAL_CANDIDATES_TOGETHER = 1 << 19
# Families with wgmma.
HOPPER = ("h100", "h200")


def value(table: dict[str, _Entry], device: Device) -> _Entry:
    """Return the chip's entry of a table, its family's, or the safe default."""
    return table.get(device.name, table.get(device.family, table["*"]))


def rows(route: str, pass_: str, channels: tuple[int, int], device: Device) -> int:
    """Return the least rows from which a route pays on a device.

    Args:
        route: its name.
        pass_: the pass.
        channels: of both sides.
        device: the profile.
    """
    wide = ANY_ROWS.get((route, pass_))
    if wide is not None and min(channels) >= value(wide, device):
        return 1
    own = device.backend == CUDA and (route, pass_) in CUDA_ROWS
    return value((CUDA_ROWS if own else ROWS).get((route, pass_), {"*": 0}), device)


def is_one_launch(rows: int, item: int, backend: str) -> bool:
    """Return whether a BatchNorm of so many rows is one launch each way.

    It then reads them once, and nobody has to sum statistics of them before.

    Args:
        rows: that a block has of each of its channels.
        item: bytes of an element.
        backend: a GPU's.
    """
    return rows * item <= ONE_LAUNCH_NORM[backend]


def region_rows(row_bytes: int, device: Device) -> int:
    """Return the rows of a region, for feature rows of ``row_bytes``."""
    row = next((r for r in REGION_ROWS if r != "more" and row_bytes <= int(r)), "more")
    return value(REGION_ROWS[row], device)
