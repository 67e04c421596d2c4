"""Which weight gradients one launch writes on CUDA, from facts alone."""

import pytest

from mlx_lattice.problem import LAYOUTS, Problem
from mlx_lattice.routes import select


def plan(n_in=2000, edges=32_000, **facts):
    given = {"c_in": 96, "c_out": 96, "dtype": "float16"} | facts
    problem = Problem.weight_grad(n_in=n_in, edges=edges, **given)
    return select(problem, device="h200").plan


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_edges_leave_no_partial_sums(layout):
    few = plan(layout=layout)
    assert few.variant == "whole" and few.add is None and few.partials == ()
    assert few.scratch == 0 and few.layout == layout


def test_narrow_gradients_are_whole_where_every_offset_is_short():
    assert plan(c_in=64, c_out=64).partials
    assert plan(700, 8_000, c_in=64, c_out=64).variant == "whole"


def test_long_offsets_are_split():
    assert plan(120_000, 2_000_000).partials
    assert plan(10_000, 40_000).partials  # the offset in the middle has one a row
    assert plan(dtype="float32").variant == "mma"


@pytest.mark.parametrize(
    "channels, tile",
    [
        ((96, 96), (64, 64)),
        ((128, 96), (64, 64)),
        ((192, 256), (64, 64)),
        ((256, 256), (128, 128)),
        ((512, 384), (128, 128)),
        ((512, 32), (64, 32)),
        ((512, 40), (64, 48)),
    ],
)
def test_wide_gradients_take_wide_tiles(channels, tile):
    c_in, c_out = channels
    chosen = plan(c_in=c_in, c_out=c_out)
    assert chosen.variant == "whole" and chosen.tile == tile
    blocks = 27 * -(-c_in // tile[0]) * -(-c_out // tile[1])
    assert chosen.dispatches[0].grid == (blocks * chosen.gpu.threads,)


@pytest.mark.parametrize(
    "channels, edges, side",
    [
        ((64, 64), 2_000_000, 64),
        ((32, 48), 2_000_000, 64),
        ((96, 96), 4_000, 96),  # 64 and 128 would take 128
        ((80, 90), 2_000_000, 96),
        ((192, 192), 8_000, 64),
        ((192, 192), 2_000_000, 96),
        ((128, 128), 8_000, 64),
        ((128, 256), 2_000_000, 128),
    ],
)
def test_gradients_in_tf32_take_tiles_that_their_channels_fill(channels, edges, side):
    c_in, c_out = channels
    facts = dict(c_in=c_in, c_out=c_out, dtype="float32", precision="tf32")
    chosen = plan(120_000, edges, **facts)
    assert chosen.variant == "mma" and chosen.tile == (side, side)
    blocks = 1 if side == 128 else 3 if side == 64 and edges > 1 << 16 else 2
    assert chosen.gpu.blocks_per_multiprocessor == blocks
    assert plan(120_000, edges, **facts | {"precision": "float32"}).tile != (96, 96)
