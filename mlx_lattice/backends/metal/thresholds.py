"""Metal: thresholds and tile shapes. "*" is the default of chips without an entry."""

from __future__ import annotations

from ... import devices
from ...devices import METAL


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

# TensorOps: height of a simdgroup, by the mean rows that share an offset's weights from
# which it pays, as in MLX's gathers on M5; and simdgroups that fill a core.
SHARED_ROWS = {64: 48, 32: 24}

TENSOR_FILLING = {"*": 8}

# Rows of a region, which is sorted by mask as a whole. In larger regions more rows
# share a mask, so tiles multiply fewer absent edges; smaller ones fit a cache.
REGION_ROWS = {"*": 28672}

# Type of the matrices in which bfloat16 is multiplied. M1 and M2 have no bfloat16
# arithmetic (1.1 to 1.8 times the time of half); float matrices are as fast as half.
BFLOAT_MATRICES = {"*": "float32", "m3": "bfloat16", "m4": "bfloat16", "m5": "bfloat16"}

# Elements of an array from which indices need 64 bits.
FAR_ELEMENTS = {"*": 1 << 32}

# Bytes of weights that fit the cache: tiles of larger weights have fewer columns.
CACHED_WEIGHTS = {"*": 4 << 20}

# Weight gradients: bytes of features of the rows that all offsets process together.
CACHED_FEATURES = {"*": 7_400_000}

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


# Rows of candidates of levels that are made at once on Metal: 300 bytes a row more are
# read, in fewer launches. Not timed.
METAL_CANDIDATES_TOGETHER = 1 << 19
