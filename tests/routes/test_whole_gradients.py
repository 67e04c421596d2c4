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
    assert plan(3000, 48_000, c_in=64, c_out=64).partials
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
