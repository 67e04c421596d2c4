"""The model of a tile's steps beside executed launches and published figures."""

import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from metal import host
from mlx_lattice import devices

host.require()

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, BENCHMARKS)
    try:
        import metal_counts
        import tile_model
        import tile_steps
    finally:
        sys.path.remove(BENCHMARKS)
    return metal_counts, tile_model, tile_steps


@pytest.mark.parametrize("channels", [(8, 24), (40, 16), (72, 136)])
def test_the_model_gives_what_a_launch_does(scripts, channels):
    metal_counts, tile_model, _ = scripts
    coords = np.random.default_rng(sum(channels)).integers(0, 7, (90, 3))
    built = metal_counts.relation(np.unique(coords, axis=0))
    with tile_model.on(devices.profile("m1")):
        models = metal_counts.models(built)
        # Raises SystemExit where a count of the launch is not the model's.
        counted = metal_counts.execute(built, models, *channels)
    for pass_ in metal_counts.PASSES:
        assert counted[pass_]["products_a_load"] > 0
        # What begins a split or a range of rows is found in 32 bits.
        assert counted[pass_]["divisions"][1] == 0


def test_a_model_that_is_wrong_stops_the_script(scripts, monkeypatch):
    metal_counts, tile_model, tile_steps = scripts
    right = tile_steps.conv_steps

    def one_more(*given):
        steps = right(*given)
        return tile_steps.Steps(**asdict(steps) | {"barriers": steps.barriers + 1})

    monkeypatch.setattr(metal_counts, "conv_steps", one_more)
    built = metal_counts.relation(np.arange(30).reshape(10, 3))
    with (
        tile_model.on(devices.profile("m1")),
        pytest.raises(SystemExit, match="the model gives"),
    ):
        metal_counts.execute(built, metal_counts.models(built), 16, 16)


def test_simdgroups_of_a_core(scripts):
    _, tile_model, tile_steps = scripts
    # 64 columns: 19 456 bytes, so three threadgroups on M1, registers for more.
    memory, registers = tile_model.gemm_tile(64, False)
    assert memory == 19_456
    assert tile_steps.simdgroups(memory, registers, "m1") == 12
    assert tile_steps.simdgroups(memory // 2, registers, "m1") == 24
    assert tile_steps.simdgroups(memory, registers, "m3") > 12
    assert tile_steps.simdgroups(1, 1, "m1") == tile_steps.MOST_SIMDGROUPS


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
        assert found["bounds_ms"][found["bound"]] == max(found["bounds_ms"].values())
    # On accelerators the same bytes stand beside a fifth of the cycles.
    per_chip = [facts[c]["threadgroup_cycles"] for c in ("m1", "m5-max")]
    assert per_chip[1] > 3 * per_chip[0]
