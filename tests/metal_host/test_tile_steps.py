"""The model of a tile's steps beside executed launches and published figures."""

import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from metal import host
from mlx_lattice import devices
from mlx_lattice.backends.metal import weight_grad as metal_weight_grad

host.require()

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, BENCHMARKS)
    try:
        import apple_model
        import metal_counts
        import tile_model
        import tile_steps
        import tile_times
    finally:
        sys.path.remove(BENCHMARKS)
    return metal_counts, tile_model, tile_steps, tile_times, apple_model


@pytest.mark.parametrize(
    "chip, channels",
    [("m1", (8, 24)), ("m1", (72, 136)), ("m5", (72, 136))],
)
def test_the_model_gives_what_a_launch_does(scripts, chip, channels):
    metal_counts, tile_model, *_ = scripts
    coords = np.random.default_rng(sum(channels)).integers(0, 7, (90, 3))
    built = metal_counts.relation(np.unique(coords, axis=0))
    with tile_model.on(devices.profile(chip)):
        models = metal_counts.models(built)
        # Raises SystemExit where a count of the launch is not the model's.
        counted = metal_counts.execute(built, models, *channels)
    for pass_ in metal_counts.PASSES:
        assert (counted[pass_]["products_a_load"] or 0) > -(chip == "m5")
        assert chip == "m1" or counted[pass_]["barriers"] == 0
        # What begins a split or a range of rows is found in 32 bits.
        assert counted[pass_]["divisions"][1] == 0


def test_a_model_that_is_wrong_stops_the_script(scripts, monkeypatch):
    metal_counts, tile_model, tile_steps, tile_times, _ = scripts
    right = tile_steps.conv_steps

    def one_more(*given):
        steps = right(*given)
        return tile_steps.Steps(**asdict(steps) | {"barriers": steps.barriers + 1})

    monkeypatch.setattr(tile_times, "conv_steps", one_more)
    built = metal_counts.relation(np.arange(30).reshape(10, 3))
    with (
        tile_model.on(devices.profile("m1")),
        pytest.raises(SystemExit, match="the model gives"),
    ):
        metal_counts.execute(built, metal_counts.models(built), 16, 16)


def test_simdgroups_of_a_core(scripts):
    _, tile_model, *_, apple_model = scripts
    # 64 columns: one buffer of 9728 bytes, so six threadgroups on M1; with two, three.
    with tile_model.on(devices.profile("m1")):
        memory, registers = tile_model.gemm_tile(64, False)
    assert memory == 9728
    assert apple_model.simdgroups(memory, registers, 128, "m1") == 24
    assert apple_model.simdgroups(2 * memory, registers, 128, "m1") == 12
    assert apple_model.simdgroups(2 * memory, registers, 128, "m3") > 12


@pytest.mark.parametrize("chip", ("m1", "m2-ultra"))
@pytest.mark.parametrize("item, matrix", ((2, 2), (2, 4), (4, 4)))
@pytest.mark.parametrize("transposed", (False, True))
def test_narrow_tiles_fill_the_cores_of_m1_and_m2(
    scripts, chip, item, matrix, transposed
):
    _, tile_model, *_, apple_model = scripts
    family = devices.profile(chip).family
    for columns, least in ((16, 24), (32, 24), (64, 24), (128, 16)):
        with tile_model.on(devices.profile(chip)):
            held = tile_model.gemm_tile(columns, transposed, item=item, matrix=matrix)
            each = 32 * tile_model.SIMDGROUPS
        assert apple_model.simdgroups(*held, each, family) >= least, columns


def test_simdgroups_of_weight_gradients(scripts):
    """At least 24 on M1, where full rate begins, but where sums take the registers."""
    _, tile_model, *_, apple_model = scripts
    for high in metal_weight_grad.GRAD_HEIGHTS:
        for wide in metal_weight_grad.GRAD_WIDTHS:
            tile = tile_model.GradTile(high, wide)
            held = apple_model.simdgroups(tile.memory, tile.registers, 128, "m1")
            least = 20 if high == 128 and wide > 16 else 24
            assert held >= least, (high, wide)
            loads = tile.loads(high, wide)
            products = tile_model.eights(high) * tile_model.eights(wide)
            assert products >= loads, (high, wide)
    assert tile_model.GradTile(64, 64).loads(64, 64) == 32


def test_one_long_unit_holds_a_gpu_up(scripts):
    uneven = scripts[2].uneven
    assert uneven([4] * 8, 1, 4) == 1
    assert uneven([12, 1, 1, 1, 1], 1, 4) == 3
    assert uneven([1, 1, 1, 1, 12], 1, 4) == 13 * 4 / 16
    assert uneven([12, 1, 1, 1, 1], 4, 4) < 1.1


def test_passes_and_bytes_of_a_sort(scripts):
    sort_passes = scripts[2].sort_passes
    # A million rows: ten merges of 8-byte keys, nine of 4-byte ones.
    assert sort_passes(1_000_000, 8) == (11, 260_000_000)
    assert sort_passes(1_000_000, 4) == (10, 156_000_000)
    assert sort_passes(1000, 8) == (1, 20_000)
    assert sort_passes(0, 8) == (1, 0)
    in_regions = 35 * 28672  # 35 regions; the last is filled up
    assert sort_passes(1_000_000, 4, 28672) == (5, in_regions * (4 + 8 + 2 * 4 * 8))
    assert sort_passes(1000, 4, 28672) == sort_passes(1000, 4)


def test_the_slower_end_is_slower_and_the_largest_bound_decides(scripts):
    metal_counts, *_ = scripts
    coords = np.stack(np.meshgrid(*[np.arange(9)] * 3), -1).reshape(-1, 3)
    model = metal_counts.models(metal_counts.relation(coords))["forward"]
    facts = metal_counts.bounded(model, 64, 64, ("m1", "m3-max", "m5-max"))
    for found in facts.values():
        assert 0 < found["fast_ms"] <= found["slow_ms"]
        most = max(found["bounds_ms"], key=found["bounds_ms"].get)
        assert found["bound"] in (most, "launch")
    # On accelerators nothing passes through it: lanes are fed from the caches.
    assert facts["m1"]["threadgroup_cycles"] > 0 == facts["m1"]["fed_cycles"]
    assert facts["m5-max"]["threadgroup_cycles"] == 0 < facts["m5-max"]["fed_cycles"]
