"""What the steps of matrix tiles on Metal take beside their products.

Loads of matrices, barriers and bytes through threadgroup memory of a launch, without
executing it. ``metal_counts.py`` compares the counts with executed ones. What they take
on a chip ``apple_model.py`` says.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from apple_model import MATRICES, PRODUCT, STAGED
from tile_model import EIGHT, ITEM, SIMDGROUPS, TILE, ceil_div, eights, shape_of

MATRIX = EIGHT * EIGHT
# Cycles of a core for a product of 8 x 8 x 8: in simdgroup matrices, and on M5's
# accelerators, where 512 lanes are worth it.
ON_LANES, ON_ACCELERATORS = PRODUCT / (128 * MATRICES), PRODUCT / 512


@dataclass(frozen=True)
class Steps:
    """A launch beside its products.

    Attributes:
        products: of 8 x 8 x 8, absent edges and padding too.
        loads: of matrices, over simdgroups; 0 for TensorOps, whose lanes read them.
        barriers: over threadgroups.
        written, read: bytes through threadgroup memory.
        fed: bytes of operands that lanes read from device memory, which is to say from
            the caches; 0 where they are staged.
    """

    products: int
    loads: int
    barriers: int
    written: int
    read: int
    fed: int = 0

    @property
    def staged(self):
        """Bytes through threadgroup memory."""
        return self.written + self.read

    def cycles(self, accelerated):
        """Cycles of threadgroup memory for a cycle of products."""
        products = self.products * (ON_ACCELERATORS if accelerated else ON_LANES)
        return self.staged / STAGED / max(products, 1)

    def fed_cycles(self):
        """Cycles in which lanes are fed for a cycle of accelerators' products."""
        return self.fed / STAGED / max(self.products * ON_ACCELERATORS, 1)

    def facts(self, accelerated):
        """The ratios in the results."""
        return {
            "threadgroup_cycles": self.cycles(accelerated),
            "fed_cycles": self.fed_cycles(),
            "threadgroup_bytes": self.staged,
            "barriers_a_product": self.barriers / max(self.products, 1),
            "products_a_load": self.products / self.loads if self.loads else None,
        }


def conv_steps(model, c_x, c_y):
    """The Steps of a Conv in one split by simdgroup matrices."""
    row, columns = model.plan(c_x, c_y)
    _, (fine, _, tiles), _ = model.sorted_table(row)
    (width, step), groups = shape_of(columns), SIMDGROUPS
    depth, across, beside = step // ITEM, ceil_div(c_y, columns), columns // width
    used, blocks = int(tiles.sum()), int(fine.sum())
    steps = used * ceil_div(c_x, depth) * across
    threadgroups = ceil_div(model.n, TILE) * across
    rows = blocks * EIGHT * depth * ceil_div(c_x, depth) * across
    sums = threadgroups * TILE * columns * 4
    # A simdgroup loads weights where any of its blocks is multiplied: every second or
    # fourth one.
    down = groups // beside
    own = fine.reshape(-1, TILE // EIGHT // down, down, fine.shape[1])
    right = int(own.any(axis=1).sum()) * eights(c_y)
    loads = eights(c_x) * (right + blocks * beside * across)
    return Steps(
        products=blocks * eights(c_x) * eights(c_y),
        loads=loads,
        barriers=threadgroups + steps * 2,
        written=(rows + steps * depth * columns) * ITEM + sums,
        read=loads * MATRIX * ITEM + model.n * 4 * ceil_div(c_y, 4) * 4,
    )


def grad_steps(model, c_in, c_out):
    """The Steps of a Grad by simdgroup matrices."""
    high, wide, splits = model.plan(c_in, c_out)
    tile = model.tile(c_in, c_out)
    tall, across = ceil_div(c_in, high), ceil_div(c_out, wide)
    lengths = np.diff(model.bounds(splits), axis=1)
    by_eight = int(ceil_div(lengths, EIGHT).sum())
    steps = int(ceil_div(lengths, tile.depth).sum()) * tall * across
    threadgroups = len(lengths) * tall * across
    loads = by_eight * tile.loads(c_in, c_out)
    # Sums pass by 16 rows; those of shares are added between barriers.
    sums = threadgroups * 4 * tile.rows * tile.width * 4
    added = len(lengths) * c_in * 4 * ceil_div(c_out, 4) * 4 * tile.shares
    waits = threadgroups * 2 * (tile.rows // 16) * (tile.shares > 1)
    return Steps(
        products=by_eight * eights(c_in) * eights(c_out),
        loads=loads,
        barriers=2 * steps + waits,
        written=steps * tile.depth * (high + wide) * ITEM + sums,
        read=loads * MATRIX * ITEM + added,
    )


def uneven(lengths, tiles, places):
    """The busiest place on a GPU over the mean one, in a weight gradient.

    Threadgroups run one after another, each where a place is free first.

    Args:
        lengths: edges of each unit, in the order of launch.
        tiles: threadgroups of a unit.
        places: threadgroups that the GPU holds.
    """
    busy = [0] * places
    for length in np.repeat(lengths, tiles).tolist():
        heapq.heapreplace(busy, busy[0] + length)
    return max(busy) * places / max(1, sum(busy))


def sort_passes(rows, key_bytes, region=None):
    """(launches' passes, bytes) of MLX's argsort of keys, in regions of so many rows.

    Blocks of 2048 keys, or 1024 of 8 bytes, are sorted and then merged two by two; each
    pass reads and writes keys and places of 4 bytes.
    """
    block = 1024 if key_bytes > 4 else 2048
    region = min(region or rows, rows)
    merges = max(0, ceil_div(region, block) - 1).bit_length()
    rows = ceil_div(rows, max(region, 1)) * region
    pair = key_bytes + 4
    return 1 + merges, rows * (key_bytes + pair + 2 * merges * pair)
