"""Tiles of rows of one edge on Hopper: each that the tables name, of one row and of
several tiles a block, with all that they write besides.
"""

from collections.abc import Iterable
from typing import NamedTuple

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
from mlx_lattice.backends import cuda_tile_choice
from mlx_lattice.devices import CUDA
from mlx_lattice.epilogue import Moments
from mlx_lattice.problem import FORWARD, INPUT_GRAD, LAYOUTS, MLX_LAYOUT
from mlx_lattice.routes import (
    cuda_shapes,
    cuda_small_tiles,
    cuda_tile_kinds,
    launch,
    selection,
    thresholds,
)

if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
    pytest.skip("MLX has no CUDA device here", allow_module_level=True)

SORTED = "sorted_implicit_gemm"
FEW = ", few offsets, few edges"
# Rows that feed themselves, by pass, and rows that one of a few offsets feeds.
ITSELF = dict.fromkeys((FORWARD, INPUT_GRAD), "pointwise")
ONE_OF = {FORWARD: "inverse", INPUT_GRAD: "strided"}
STAY, SMALL = cuda_shapes.RESIDENT_TILES, cuda_small_tiles.SMALL_TILES
# Part of a stage, one, two and a part, and several: those that a tile has room for.
SUMMED = 20, 64, 136, 320
COUNTS = "one", "65", "many"


def tiles(tables: Iterable[dict]) -> set[tuple[int, cuda_tile_kinds.Shape]]:
    """Each width with each tile that tables name for it."""
    return {
        (width, tile)
        for table in tables
        for width, named in table.items()
        for _, tile in named
    }


LOW = tiles([cuda_small_tiles.ITSELF_TILES])
RESIDENT = {(width, tile) for width in STAY for tile in STAY[width]}
SHORT = {
    (width, tile)
    for width, tile in tiles(t for k, t in SMALL.items() if FEW in k)
    if isinstance(tile, cuda_tile_kinds.ShortTile)
}


class Given(NamedTuple):
    """What all rows take: of one tile alone, however many they are."""

    width: int
    variant: str
    scenes: dict[str, str]  # by pass


@pytest.fixture(
    params=[(ITSELF, *each) for each in sorted(LOW) + sorted(RESIDENT)]
    + [(ONE_OF, *each) for each in sorted(SHORT)],
    ids=lambda param: f"{param[0][FORWARD]} {param[1:]}",
)
def given(request, monkeypatch):
    """Output channels, for which the tables name one tile alone, however many rows."""
    scenes, width, tile = request.param
    only, variant = ((cuda_shapes.ANY, tile),), "wide"
    low, stay = dict.fromkeys(cuda_small_tiles.ITSELF_TILES, ()), {}
    if isinstance(tile, cuda_tile_kinds.ResidentTile):
        variant, stay = "resident", {width: (tile,)}
        monkeypatch.setattr(cuda_shapes, "DEEP_ELEMENTS", cuda_shapes.ANY)
    elif scenes is ITSELF:
        low = low | {width: only}
    if isinstance(tile, cuda_tile_kinds.ShortTile):
        variant = "short"
    for key, table in SMALL.items():
        if scenes is ONE_OF and FEW in key:
            monkeypatch.setitem(SMALL, key, table | {width: only})
    monkeypatch.setattr(cuda_small_tiles, "ITSELF_TILES", low)
    monkeypatch.setattr(cuda_shapes, "RESIDENT_TILES", stay)
    monkeypatch.setattr(thresholds, "MOST_SPLITS", 1)
    monkeypatch.setitem(thresholds.ONE_LAUNCH_NORM, CUDA, 0)
    selection._settled.cache_clear()
    yield Given(width, variant, scenes)
    selection._settled.cache_clear()


def points(width: int, pass_: str, scene: str) -> list[Point]:
    """Each count of rows with each of summed channels, in one dtype or the other."""
    found = []
    for at, summed in enumerate(SUMMED):
        shape = (summed, width, 1) if pass_ == FORWARD else (width, summed, 1)
        half = ("float16", "bfloat16")[(at + (pass_ == FORWARD)) % 2]
        for turn, count in enumerate(COUNTS):
            moved = "x w dy bias 1" if turn == at % 3 else ""
            name = f"{scene}_{count}"
            found.append(Point(name, shape, half, bias=pass_ == FORWARD, moved=moved))
    return found


def test_both_passes(given):
    """By weights in either layout; the last 16 bytes of a row are full, or not."""
    tried = 0
    for pass_, scene_ in given.scenes.items():
        for written in (given.width, given.width - 3):
            for at, point in enumerate(points(written, pass_, scene_)):
                of = work.__wrapped__(point, pass_)  # large, and asked for once
                x = of.dy if pass_ == INPUT_GRAD else of.x
                relation = of.relation.T if pass_ == INPUT_GRAD else of.relation
                layout = LAYOUTS[at % 2]
                turned = layout == MLX_LAYOUT
                w = of.w.transpose(2, 0, 1) if turned else of.w
                plan = plan_of(SORTED, pass_, of.relation, x, w, layout=layout)
                if plan.variant != given.variant:  # where channels do not fit
                    assert given.variant in ("resident", "short")
                    continue
                y = plan(relation, x, w, of.bias)
                ref.assert_close(y, of.wanted, point.dtype, str(point))
                assert bits(y) == bits(plan(relation, x, w, of.bias))
                tried += 1
    assert tried >= 12


def test_epilogues_and_statistics(given):
    tried = 0
    for point in points(given.width, FORWARD, given.scenes[FORWARD]):
        of = work.__wrapped__(point, FORWARD)
        relation, _ = scene.__wrapped__(point.scene)  # no plan is kept of it
        after = epilogue(relation.n_out, given.width, point.dtype)
        asked, planned, facts = Moments(), [], {"bias": of.bias}
        with ml.routes.only(f"forward={SORTED}"), launch.observe(planned.append):
            plain = ml.conv(of.x, of.w, relation, epilogue=after)
            y = ml.conv(of.x, of.w, relation, epilogue=asked, **facts)
        if {run.choice.plan.variant for run in planned} != {given.variant}:
            assert given.variant in ("resident", "short")
            continue
        sums = of.wanted - ref.to_numpy(of.bias)
        ref.assert_close(plain, oracle(sums, after), point.dtype, str(point))
        ref.assert_close(y, of.wanted, point.dtype, str(point))
        for found, wanted in zip(joined(asked.lines), moments(y), strict=True):
            most = 1e-5 * (1 + np.abs(ref.to_numpy(y)).max())
            np.testing.assert_allclose(found, wanted, 1e-4, most)
        tried += 1
    assert tried >= 3


def test_the_tables_take_them():
    """Weights stay for many rows; few have the low tiles."""
    for rows, variant in ((100, "short"), (200_000, "resident")):
        problem = ml.Problem.forward(
            c_in=64, c_out=64, n_in=rows, kernel_size=1, dtype="float16"
        )
        of = problem.layer, ml.devices.current(), False, lambda tile: tile
        assert cuda_tile_choice.tile_chooser(*of)(problem).itself
        assert ml.select(problem).plan.variant == variant
