"""Kernels of the experiments: Metal tiles in variants, and divisions of coordinates."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ...backends.dispatch_bounds import ceil_div
from ...backends.gpu_kernel import GpuKernel, Interface
from ...backends.metal_matrix import SIMDGROUP_FILES
from ...backends.metal_plans import TILE_PLACE
from ...backends.metal_tiles import THREADS, TILE_ROWS, tiles
from ...backends.signatures import SORTED_TILES, finishing
from ...devices import METAL
from ...relation import Relation
from ...routes import thresholds

_TILES = Interface(
    "ExperimentTiles",
    ("x", "w", "table", "rows", "masks"),
    ("y",),
    tuple((name, "0") for name in ("rows", "volume", "c_x", "c_y")),
)
_DIVISION = Interface(
    "ExperimentDivision",
    ("coords",),
    ("quotients",),
    (("stride", "0"), ("shift", "0")),
)


@dataclass(frozen=True)
class Variant:
    """One way to write the tiles of sorted_implicit_gemm.

    Attributes:
        buffers: 2 or 1 of a step in threadgroup memory.
        depth: channels of a step.
        skips: whether blocks of eight rows without an edge are passed over.
        in_float: whether matrices are multiplied in float32, converted when loaded.
    """

    buffers: int = 2
    depth: int = 32
    skips: bool = True
    in_float: bool = False

    def __str__(self) -> str:
        """Return what differs from the route's own tiles."""
        facts = (
            ("one buffer", self.buffers == 1),
            (f"depth {self.depth}", self.depth != 32),
            ("no skipping", not self.skips),
            ("in float", self.in_float),
        )
        return ", ".join(name for name, there in facts if there) or "two buffers"

    def kernel(self, dtype: mx.Dtype, columns: int) -> GpuKernel:
        """Return the kernel for features of a dtype and tiles of 64 or 128 columns."""
        template = {
            "T": dtype,
            "M": mx.float32 if self.in_float else dtype,
            "COLUMNS": columns,
            "STEP": self.depth,
            "BUFFERS": self.buffers,
            "SKIPS": self.skips,
        }
        return GpuKernel(
            METAL,
            "experiment_tiles",
            (*SIMDGROUP_FILES, "experiment_tiles"),
            _TILES,
            tuple(template.items()),
            place=TILE_PLACE,
            memory="ExperimentTile<T, COLUMNS, STEP, BUFFERS>::FLOATS",
            also=(finishing(SORTED_TILES),),
        )

    def run(
        self,
        relation: Relation,
        x: mx.array,
        w: mx.array,
        *,
        all_live: bool = False,
        threadgroup: int = THREADS,
    ) -> mx.array:
        """Return y of a forward pass, (N_out, C_y).

        Args:
            relation: has a neighbour table.
            x: (N_in, C_x); C_x is a multiple of the depth.
            w: (K, C_x, C_y); C_y is a multiple of 64.
            all_live: whether masks say that every block uses every offset.
            threadgroup: threads; more than the kernel has make MLX say how many fit.
        """
        volume, c_x, c_y = w.shape
        columns = 128 if c_y % 128 == 0 else 64
        region = thresholds.REGION_ROWS["more"]["*"]
        table, rows, masks = tiles(relation, region)
        if all_live:
            masks = mx.full(masks.shape, (1 << min(volume, 32)) - 1, masks.dtype)
        count = ceil_div(relation.n_out, TILE_ROWS) * (c_y // columns)
        (y,) = self.kernel(x.dtype, columns)(
            [x, w, table, rows, masks],
            [((relation.n_out, c_y), x.dtype)],
            (count * threadgroup, 1, 1),
            (threadgroup, 1, 1),
            rows=relation.n_out,
            volume=volume,
            c_x=c_x,
            c_y=c_y,
        )
        return y


def divided(coords: mx.array, stride: int, how: int) -> mx.array:
    """Return the floor division of int32 numbers by a power of two.

    Args:
        coords: of any shape.
        stride: the power of two.
        how: bits of the division, 64 or 32; 0 for a shift.
    """
    kernel = GpuKernel(
        METAL,
        "experiment_division",
        ("experiment_division",),
        _DIVISION,
        (("HOW", how),),
        place="thread_position_in_grid.x",
    )
    (quotients,) = kernel(
        [coords],
        [(coords.shape, mx.int32)],
        (coords.size, 1, 1),
        stride=stride,
        shift=stride.bit_length() - 1,
    )
    return quotients
