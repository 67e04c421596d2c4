"""Which weight gradients one launch writes on CUDA, from facts alone."""

import pytest

from mlx_lattice.problem import LAYOUTS, Problem
from mlx_lattice.routes import select, thresholds


def plan(n_in=2000, edges=32_000, **facts):
    given = {"c_in": 64, "c_out": 64, "dtype": "float16"} | facts
    problem = Problem.weight_grad(n_in=n_in, edges=edges, **given)
    return select(problem, device="h200").plan


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_edges_leave_no_partial_sums(layout):
    few = plan(layout=layout)
    assert few.variant == "whole" and few.add is None and few.partials == ()
    assert few.scratch == 0 and few.layout == layout


def test_long_offsets_are_split():
    assert plan(120_000, 2_000_000).partials
    assert plan(10_000, 40_000).partials  # the offset in the middle has one a row
    assert plan(dtype="float32").variant == "mma"


@pytest.mark.parametrize("most, blocks", ((1, 1), (3, 2), (8, 4)))
def test_clusters_are_whole_powers_that_fit(most, blocks, monkeypatch):
    tile = thresholds.Tile(1, 128, 32, 6, 3)
    monkeypatch.setattr(thresholds, "WHOLE_TILES", (tile,))
    monkeypatch.setitem(thresholds.WHOLE_GRAD, "cluster", most)
    chosen = plan(bits=None, layout="mlx")
    assert chosen.gpu.cluster == blocks
    threads = chosen.dispatches[0].grid[0]
    assert threads == blocks * 27 * 2 * chosen.gpu.threads
