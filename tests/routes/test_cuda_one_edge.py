"""Tiles of 1x1 kernels on Hopper: each that the tables name, with all its results."""

import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import bits
from contractions import Point, scene, work
from epilogues import epilogue, oracle
from norm_checks import joined, moments
from planned import plan_of

import mlx_lattice as ml
from mlx_lattice.backends.cuda import thresholds as cuda_thresholds
from mlx_lattice.backends.cuda import tiles as cuda_tiles
from mlx_lattice.backends.gpu import norms as gpu_norms
from mlx_lattice.epilogue import Moments
from mlx_lattice.problem import FORWARD, INPUT_GRAD, LAYOUTS, MLX_LAYOUT
from mlx_lattice.routes import (
    launch,
)

if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
    pytest.skip("MLX has no CUDA device here", allow_module_level=True)

SORTED = "sorted_implicit_gemm"
PASSES = FORWARD, INPUT_GRAD
# Part of a stage, one, two and a part, and several: those that a tile has room for.
SUMMED = 20, 64, 136, 320
COUNTS = "one", "65", "many"


TILES = {
    (width, tile)
    for width, named in cuda_tiles.SMALL_TILES["identity"].items()
    for _, tile in named
}


@pytest.fixture(params=sorted(TILES), ids=str)
def width(request, monkeypatch):
    """Output channels, for which the tables name one tile alone, however many rows."""
    width, tile = request.param
    monkeypatch.setattr(cuda_tiles, "small_shape", lambda p: tile)
    monkeypatch.setattr(cuda_thresholds, "MOST_SPLITS", 1)
    monkeypatch.setattr(gpu_norms, "ONE_LAUNCH_NORM", 0)
    ml.settings.note_change()
    yield width
    ml.settings.note_change()


def points(width: int, pass_: str) -> list[Point]:
    """Each count of rows with each of summed channels, in one dtype or the other."""
    found = []
    for at, summed in enumerate(SUMMED):
        shape = (summed, width, 1) if pass_ == FORWARD else (width, summed, 1)
        half = ("float16", "bfloat16")[(at + (pass_ == FORWARD)) % 2]
        for turn, count in enumerate(COUNTS):
            moved = "x w dy bias 1" if turn == at % 3 else ""
            name = f"pointwise_{count}"
            found.append(Point(name, shape, half, bias=pass_ == FORWARD, moved=moved))
    return found


def test_both_passes(width):
    """By weights in either layout; the last 16 bytes of a row are full, or not."""
    tried = 0
    for pass_ in PASSES:
        for written in (width, width - 3):
            for at, point in enumerate(points(written, pass_)):
                of = work.__wrapped__(point, pass_)  # large, and asked for once
                x = of.dy if pass_ == INPUT_GRAD else of.x
                relation = of.relation.T if pass_ == INPUT_GRAD else of.relation
                layout = LAYOUTS[at % 2]
                turned = layout == MLX_LAYOUT
                w = of.w.transpose(2, 0, 1) if turned else of.w
                plan = plan_of(SORTED, pass_, of.relation, x, w, layout=layout)
                assert plan.variant == "wide"
                y = plan(relation, x, w, of.bias)
                ref.assert_close(y, of.wanted, point.dtype, str(point))
                assert bits(y) == bits(plan(relation, x, w, of.bias))
                tried += 1
    assert tried >= 12


def test_epilogues_and_statistics(width):
    tried = 0
    for point in points(width, FORWARD):
        of = work.__wrapped__(point, FORWARD)
        relation, _ = scene.__wrapped__(point.scene)  # no plan is kept of it
        after = epilogue(relation.n_out, width, point.dtype)
        asked, planned, facts = Moments(), [], {"bias": of.bias}
        with ml.routes.only(f"forward={SORTED}"), launch.observe(planned.append):
            plain = ml.conv(of.x, of.w, relation, epilogue=after)
            y = ml.conv(of.x, of.w, relation, epilogue=asked, **facts)
        assert {run.choice.plan.variant for run in planned} == {"wide"}
        sums = of.wanted - ref.to_numpy(of.bias)
        ref.assert_close(plain, oracle(sums, after), point.dtype, str(point))
        ref.assert_close(y, of.wanted, point.dtype, str(point))
        for found, wanted in zip(joined(asked.lines), moments(y), strict=True):
            most = 1e-5 * (1 + np.abs(ref.to_numpy(y)).max())
            np.testing.assert_allclose(found, wanted, 1e-4, most)
        tried += 1
    assert tried >= 3


def test_the_tables_take_them():
    for rows in (100, 10_000):
        problem = ml.Problem.forward(
            c_in=64, c_out=64, n_in=rows, kernel_size=1, dtype="float16"
        )
        assert cuda_tiles.sorted_tile(problem, ml.devices.current()).itself
        assert ml.select(problem).plan.variant == "wide"
