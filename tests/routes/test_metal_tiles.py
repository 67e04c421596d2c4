"""How Metal's planner cuts tiles, sorts rows by region and splits weight gradients."""

import cases
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, bits, pair
from contractions import Point, work
from metal_checks import checked, host
from places import MetalHost

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.metal import thresholds as metal_thresholds
from mlx_lattice.backends.metal import tiles as metal_tiles
from mlx_lattice.backends.metal import weight_grad as metal_weight_grad

host.require()

METAL = MetalHost()


@pytest.mark.parametrize("share", (0.6, 0.2), ids=("whole", "cut"))
def test_regions_are_dispatched_whole_where_they_fit(share, monkeypatch):
    both = pair(cases.Case("submanifold", 2, 3), "block", 300)
    work = both[0].n_edges * 3 * 6
    monkeypatch.setattr(gpu_kernel, "matrix_limit", lambda device: int(share * work))
    count = -(-both[0].n_out // 64)
    rows, chip = both[0].n_out, devices.profile("m1")
    pieces, placed = metal_tiles.tile_dispatches(rows, 128, work, chip)
    cut = not placed
    assert cut == (share == 0.2) and sum(length for _, length in pieces) == count
    assert cut or all(first % 2 == 0 for first, _ in pieces)
    assert len(pieces) > 1


def test_rows_are_sorted_by_region():
    relation, _ = pair(KINDS[0], n=200)
    table, rows, _ = checked(metal_tiles.tiles, relation, 64)
    rows = np.array(rows)
    assert (np.sort(rows) == np.arange(relation.n_out)).all()
    assert (np.diff(rows // 64) >= 0).all()
    np.testing.assert_array_equal(table, np.array(relation.out_in)[rows])


def test_splits_of_a_weight_gradient():
    m1 = devices.profile("m1")

    def splits(edges, rows, channels, chip=m1):
        tile, shape = (
            metal_weight_grad.grad_tile(channels, channels),
            (27, channels, channels),
        )
        features = 4 * rows * channels
        found = edges, min(edges, rows), features, shape, tile, 2
        cut = metal_weight_grad.grad_cut(*found, chip)
        assert not cut.sliced
        return cut.splits

    assert splits(100, 10, 64) == 1, "too few edges for a partial"
    assert splits(1_667_340, 100_000, 64) == 6, "as keep 48 places even"
    assert splits(1_667_340, 100_000, 128) == 7, "as keep features in cache"
    larger = devices.profile("m3-max")
    assert splits(1_667_340, 100_000, 64, larger) == 29, "five times the places"
    assert splits(1_667_340, 100_000, 1024) == 28, "partials of 8 times the features"
    features = 97_000 * (512 + 2048) * 2
    shape = 27, 512, 2048
    for edges, cut in (
        (180_000, (14, False)),  # as keep one offset's narrower side in cache
        (957_000, (17, True)),  # and slices of the other
    ):
        facts = edges, 97_000, features, shape, (128, 64), 2
        assert metal_weight_grad.grad_cut(*facts, m1) == cut


@pytest.mark.parametrize("shape", ((256, 256), (512, 128), (128, 256)), ids=str)
def test_a_weight_gradient_slice_by_slice(shape):
    """Longer ranges: all of one side and two slices of the other fit the cache."""
    m1, rows, edges = devices.profile("m1"), 100_000, 786_000
    c_in, c_out = shape
    features = 2 * rows * (c_in + c_out)
    facts = edges, rows, features, (27, *shape), (128, 64), 2
    cut = metal_weight_grad.grad_cut(*facts, m1)
    whole = -(-features // metal_thresholds.CACHED_FEATURES["*"])
    narrow, slice_ = min(shape), 64 if c_in <= c_out else 128
    held = 2 * rows * (narrow + 2 * slice_) + 12 * edges
    assert cut.sliced and cut.splits < whole
    assert cut.splits == -(-held // metal_thresholds.CACHED_WINDOW["*"])
    p = ml.Problem.weight_grad(
        c_in=c_in, c_out=c_out, n_in=rows, edges=edges, dtype="float16"
    )
    plan = ml.select(p, device=m1).plan
    assert plan.splits == cut.splits and "slice by slice" in str(plan)
    lines = 27 * c_in
    for d in plan.dispatches:
        assert d.first % lines == 0 == d.count % lines, "whole ranges"
    few = metal_weight_grad.grad_cut(*facts, devices.profile("m2-ultra"))
    assert few.splits > cut.splits and not few.sliced, "as fill so many cores"


def test_a_range_that_takes_too_long_for_a_dispatch_is_not_sliced(monkeypatch):
    p = ml.Problem.weight_grad(
        c_in=256, c_out=256, n_in=100_000, edges=786_000, dtype="float16"
    )
    m1, most = devices.profile("m1"), 786_000 * 256 * 256 // 11
    for limit, sliced in ((most + 1000, True), (most // 2, False)):
        monkeypatch.setattr(gpu_kernel, "matrix_limit", lambda device, n=limit: n)
        plan = ml.routes.named("grouped_gemm").plan(p, m1)
        assert ("slice by slice" in str(plan)) == sliced
        assert max(d.count for d in plan.dispatches) <= 27 * 256


# Sides of which either has two tiles and a tail; several slices, one offset of them.
SLICED = (
    ("grouped_gemm", Point("129_rows", (8, 200, 1), "float16"), "m1"),
    ("grouped_gemm", Point("submanifold", (264, 8, 1), "float32"), "m3"),
    ("tensor_ops", Point("129_rows", (16, 200, 1), "bfloat16"), "m5"),
)


@pytest.mark.parametrize("route, point, chip", SLICED, ids=str)
def test_slices_give_the_same_bits(route, point, chip, monkeypatch):
    given, results = work(point, "weight_grad"), []
    for sliced in (False, True):
        cut = metal_weight_grad.GradCut(3, sliced)
        monkeypatch.setattr(metal_weight_grad, "grad_cut", lambda *facts, c=cut: c)
        plan = ml.routes.named(route).plan(
            point.problem("weight_grad"), devices.profile(chip)
        )
        assert plan.splits == 3 and ("slice by slice" in str(plan)) == sliced
        run = given.forced(route, "weight_grad")
        (y,) = METAL.run(run, steady=False, chip=chip)[""]
        ref.assert_close(y, given.wanted, point.dtype, str(sliced))
        results.append(bits(y))
    assert results[0] == results[1]
