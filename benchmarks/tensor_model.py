"""The work of TensorOps' launches on M5, without executing them.

As ``tile_model`` and ``tile_steps``, whose scenes and caches it takes: simdgroups read
both operands from device memory, and threadgroup memory is used where those of a narrow
weight gradient add their sums.
"""

from dataclasses import replace

import numpy as np
from tile_model import EIGHT, ITEM, TILE, Conv, Grad, ceil_div, chip
from tile_steps import Steps

from mlx_lattice.backends.metal import tiles as metal_tiles
from mlx_lattice.backends.metal import weight_grad as metal_weight_grad
from mlx_lattice.backends.metal.tiles import TENSOR_WIDTH as WIDTH

SIXTEEN = 2 * EIGHT
# Registers of a lane beside its sums and operands: where two of each 16 rows begin;
# entries of the table, masks, sizes and loops, about.
PLACES, OTHERS = 2, 24


def up(count, multiple):
    """The count, up to a multiple."""
    return ceil_div(count, multiple) * multiple


def registers(tall, deep):
    """Registers of a lane of a simdgroup of ``tall`` x 32, by declaration."""
    operands = (deep * 16 + deep * 8) * ITEM // 4
    return tall + operands + tall // 16 * PLACES + OTHERS


class TensorConv(Conv):
    """The forward pass, or the input gradient, by TensorOps."""

    def __init__(self, other):
        super().__init__(other.relation, other.transposed, other.scale)
        self.tables, self.known = other.tables, other.known

    def tile(self, c_x, c_y):
        """The SortedTile that is planned."""
        rows = int(self.scale * self.n)  # edges are not counted before a forward pass
        return metal_tiles.tensor_tile(rows, rows, (c_x, c_y), self.volume, chip())

    def plan(self, c_x, c_y):
        """(bytes of a row, columns of a tile)."""
        return c_x * ITEM, self.tile(c_x, c_y).columns

    def held(self, columns):
        """No threadgroup memory; registers depend on the step, see counts."""
        return 0, 0

    def used(self, row, height):
        """How often a simdgroup's rows use an offset."""
        blocks = self.sorted_table(row)[1][1]
        blocks = np.pad(blocks, ((0, -len(blocks) % (TILE // SIXTEEN)), (0, 0)))
        return int(blocks.reshape(-1, height // SIXTEEN, self.volume).any(1).sum())

    def executed(self, c_x, c_y):
        """Operations and bytes by buffer, as metal/host counts them."""
        row, _ = self.plan(c_x, c_y)
        blocks, beside = self.sorted_table(row)[1][1], ceil_div(c_y, WIDTH)
        rows = np.clip(self.n - SIXTEEN * np.arange(len(blocks)), 0, SIXTEEN)
        done = int(blocks.sum()) * SIXTEEN * up(c_x, SIXTEEN) * up(c_y, WIDTH)
        return {
            "matrix_flop": 2 * done,
            "x": self.edges * c_x * ITEM * beside,
            "w": self.used(row, self.tile(c_x, c_y).height) * c_x * c_y * ITEM,
            "table": int((blocks * rows[:, None]).sum()) * 4 * beside,
        }

    def counts(self, c_x, c_y):
        """The Counts of a pass from c_x to c_y channels."""
        tile, counts = self.tile(c_x, c_y), super().counts(c_x, c_y)
        held = registers(tile.height, tile.step // SIXTEEN)
        return replace(
            counts,
            coarse=counts.done,
            memory=0,
            registers=held,
            plan=f"{tile.height}x{WIDTH} of {counts.plan}, steps of {tile.step}",
        )

    def steps(self, c_x, c_y):
        """The Steps: nothing passes through threadgroup memory."""
        asked = self.executed(c_x, c_y)
        return Steps(
            products=asked["matrix_flop"] // (2 * EIGHT**3),
            loads=0,
            barriers=0,
            written=0,
            read=0,
            fed=asked["x"] + asked["w"],
        )


class TensorGrad(Grad):
    """The weight gradient by TensorOps."""

    def __init__(self, other):
        vars(self).update(vars(other))
        self.known = {}

    def plan(self, c_in, c_out):
        """(height and width of a tile, ranges of rows)."""
        high, wide, _ = metal_weight_grad.tensor_grad_tile(c_in, c_out)
        return high, wide, self.splits(c_in, c_out, high, wide)

    def executed(self, c_in, c_out):
        """Operations and bytes by buffer, as metal/host counts them."""
        splits = self.plan(c_in, c_out)[2]
        tall = metal_weight_grad.tensor_grad_tile(c_in, c_out)[2]
        lengths = np.diff(self.bounds(splits), axis=1)
        edges = SIXTEEN * int(ceil_div(lengths, SIXTEEN).sum())
        return {
            "matrix_flop": 2 * edges * up(c_in, SIXTEEN) * up(c_out, WIDTH),
            "x": self.edges * c_in * ITEM * ceil_div(c_out, WIDTH),
            "dy": self.edges * c_out * ITEM * ceil_div(c_in, tall),
        }

    def helping(self, c_in, c_out):
        """Simdgroups of a threadgroup that give their sums to others."""
        high, wide, tall = metal_weight_grad.tensor_grad_tile(c_in, c_out)
        return metal_tiles.THREADS // metal_tiles.LANES - high // tall * wide // WIDTH

    def counts(self, c_in, c_out):
        """The Counts of the pass."""
        tall = metal_weight_grad.tensor_grad_tile(c_in, c_out)[2]
        counts, helping = super().counts(c_in, c_out), self.helping(c_in, c_out)
        return replace(
            counts,
            memory=helping * SIXTEEN * WIDTH * 4,
            registers=registers(tall, 1) + tall // 4,
            plan=f"{tall}x{WIDTH} of {counts.plan}",
        )

    def steps(self, c_in, c_out):
        """The Steps: sums of simdgroups that share a part pass once."""
        asked, (high, wide, splits) = self.executed(c_in, c_out), self.plan(c_in, c_out)
        tall = metal_weight_grad.tensor_grad_tile(c_in, c_out)[2]
        threadgroups = splits * self.volume * ceil_div(c_in, high)
        threadgroups *= ceil_div(c_out, wide)
        helping = self.helping(c_in, c_out)
        given = threadgroups * helping * tall * WIDTH * 4
        return Steps(
            products=asked["matrix_flop"] // (2 * EIGHT**3),
            loads=0,
            barriers=threadgroups * 2 * tall // SIXTEEN * (helping > 0),
            written=given,
            read=given,
            fed=asked["x"] + asked["dy"],
        )


def of(model):
    """The model of the same pass by TensorOps, one for each."""
    made = vars(model).setdefault("by_tensor_ops", None)
    if made is None:
        made = TensorGrad(model) if isinstance(model, Grad) else TensorConv(model)
        model.by_tensor_ops = made
    return made
