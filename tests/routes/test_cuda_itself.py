"""Tiles of rows that feed themselves, of 1x1 kernels on Hopper: each that the tables
name, of one row and of several tiles a block, with all that they write besides.
"""

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
from mlx_lattice.backends import cuda_tiles
from mlx_lattice.devices import CUDA
from mlx_lattice.epilogue import Moments
from mlx_lattice.problem import FORWARD, INPUT_GRAD, LAYOUTS, MLX_LAYOUT
from mlx_lattice.routes import cuda_shapes, launch, selection, thresholds

if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
    pytest.skip("MLX has no CUDA device here", allow_module_level=True)

SORTED = "sorted_implicit_gemm"
LOW = {
    (width, tile)
    for width, tiles in cuda_shapes.ITSELF_TILES.items()
    for _, tile in tiles
}
STAY = cuda_shapes.RESIDENT_TILES
RESIDENT = {(width, tile) for width in STAY for tile in STAY[width]}
# Part of a stage, one, two and a part, and several: of weights that stay, what fits.
SUMMED = 20, 64, 136, 320
SCENES = "pointwise_one", "pointwise_65", "pointwise_many"


@pytest.fixture(params=sorted(LOW) + sorted(RESIDENT), ids=str)
def width(request, monkeypatch):
    """Output channels, for which the tables name one tile alone, however many rows."""
    width, tile = request.param
    low = dict.fromkeys(cuda_shapes.ITSELF_TILES, ())
    stay = {width: (tile,)}
    if isinstance(tile, cuda_shapes.Tile):
        low, stay = low | {width: ((cuda_shapes.ANY, tile),)}, {}
    else:
        monkeypatch.setattr(cuda_shapes, "DEEP_ELEMENTS", cuda_shapes.ANY)
    monkeypatch.setattr(cuda_shapes, "ITSELF_TILES", low)
    monkeypatch.setattr(cuda_shapes, "RESIDENT_TILES", stay)
    monkeypatch.setattr(thresholds, "MOST_SPLITS", 1)
    monkeypatch.setitem(thresholds.ONE_LAUNCH_NORM, CUDA, 0)
    selection._settled.cache_clear()
    yield width, "wide" if low[width] else "resident"
    selection._settled.cache_clear()


def points(width: int, pass_: str) -> list[Point]:
    """Each count of rows with each of summed channels, in one dtype or the other."""
    found = []
    for at, summed in enumerate(SUMMED):
        shape = (summed, width, 1) if pass_ == FORWARD else (width, summed, 1)
        half = ("float16", "bfloat16")[(at + (pass_ == FORWARD)) % 2]
        for turn, name in enumerate(SCENES):
            moved = "x w dy bias 1" if turn == at % 3 else ""
            found.append(Point(name, shape, half, bias=pass_ == FORWARD, moved=moved))
    return found


def test_both_passes(width):
    """By weights in either layout; the last 16 bytes of a row are full, or not."""
    width, variant = width
    tried = 0
    for pass_ in (FORWARD, INPUT_GRAD):
        for written in (width, width - 3):
            for at, point in enumerate(points(written, pass_)):
                given = work.__wrapped__(point, pass_)  # large, and asked for once
                x = given.dy if pass_ == INPUT_GRAD else given.x
                relation = given.relation.T if pass_ == INPUT_GRAD else given.relation
                layout = LAYOUTS[at % 2]
                turned = layout == MLX_LAYOUT
                w = given.w.transpose(2, 0, 1) if turned else given.w
                plan = plan_of(SORTED, pass_, given.relation, x, w, layout=layout)
                if plan.variant != variant:
                    assert variant == "resident"  # where its weights do not fit
                    continue
                y = plan(relation, x, w, given.bias)
                ref.assert_close(y, given.wanted, point.dtype, str(point))
                assert bits(y) == bits(plan(relation, x, w, given.bias))
                tried += 1
    assert tried >= 12


def test_epilogues_and_statistics(width):
    width, variant = width
    tried = 0
    for point in points(width, FORWARD):
        given = work.__wrapped__(point, FORWARD)
        relation, _ = scene.__wrapped__(point.scene)  # no plan is kept of it
        after = epilogue(relation.n_out, width, point.dtype)
        asked, planned, facts = Moments(), [], {"bias": given.bias}
        with ml.routes.only(f"forward={SORTED}"), launch.observe(planned.append):
            plain = ml.conv(given.x, given.w, relation, epilogue=after)
            y = ml.conv(given.x, given.w, relation, epilogue=asked, **facts)
        variants = {run.choice.plan.variant for run in planned}
        if variants != {variant}:
            assert variant == "resident"
            continue
        sums = given.wanted - ref.to_numpy(given.bias)
        ref.assert_close(plain, oracle(sums, after), point.dtype, str(point))
        ref.assert_close(y, given.wanted, point.dtype, str(point))
        for found, wanted in zip(joined(asked.lines), moments(y), strict=True):
            most = 1e-5 * (1 + np.abs(ref.to_numpy(y)).max())
            np.testing.assert_allclose(found, wanted, 1e-4, most)
        tried += 1
    assert tried >= 3


def test_the_tables_take_them():
    """Weights stay for many rows; few have the low tiles."""
    for rows, variant in ((100, "wide"), (200_000, "resident")):
        problem = ml.Problem.forward(
            c_in=64, c_out=64, n_in=rows, kernel_size=1, dtype="float16"
        )
        of = problem.layer, ml.devices.current(), False, lambda tile: tile
        assert cuda_tiles.tile_chooser(*of)(problem).itself
        assert ml.select(problem).plan.variant == variant
