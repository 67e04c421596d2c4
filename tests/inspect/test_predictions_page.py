"""The model of Apple GPUs in benchmarks/: its page, and its arithmetic by hand."""

import sys
from pathlib import Path

import pytest

from mlx_lattice import devices

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        import apple_model
        import decodes
        import predictions

        yield predictions, decodes, apple_model


def test_the_page_is_what_the_benchmark_writes(scripts):
    predictions, *_ = scripts
    run = "run: python benchmarks/predictions.py"
    assert predictions.PAGE.read_text() == predictions.page(), run


def test_a_decode_has_the_operations_of_its_layers(scripts):
    """Another sum over the stages agrees, and stays below the chip's peak rate."""
    decodes, voxels = scripts[1], 10**6
    (fine, coarse), rows = decodes.sample()[0], decodes.level_rows(voxels)
    edges = [n * coarse.n_edges / coarse.n_out for n in rows[:-1]]
    edges.append(rows[-1] * fine.n_edges / fine.n_out)
    widths, blocks = (1024, 512, 256, 128, 64), (4, 16, 8, 4, 0)
    flops = 2 * rows[0] * 32 * 1024 + 2 * rows[-1] * 64 * 7
    for n, e, c, times in zip(rows, edges, widths, blocks, strict=True):
        flops += times * (2 * e * c * c + 16 * n * c * c)
    for at, c in enumerate(widths[:-1]):
        flops += 2 * edges[at] * c * 4 * c + 2 * edges[at + 1] * (c / 2) ** 2
        flops += 16 * rows[at] * c
    decode = decodes.Decode("m4-max", voxels)
    assert decode.flops == pytest.approx(flops, rel=1e-4)
    peak = 1e12 * devices.profile("m4-max").half_tflops
    assert 0.4 < flops / peak / decode.seconds[0] < 1


def test_bounds_by_hand(scripts):
    facts = scripts[2].KernelFacts(
        9_728, 64, 128, 200.0, 0.5, 0.01, 2.0, 0.0, 8.0, 4.0, 50.0, 0.5
    )
    chip, cycles, done = devices.profile("m1"), 2.6e12 / 256, 512 * 1e6
    slow, fast = (facts.bounds(done, chip, end) for end in range(2))
    assert slow["threadgroup memory"] == pytest.approx(1e6 * 200 / 64 / cycles)
    lanes = 2 * 100 + 8 * 4 + 4 * 16
    assert slow["integer"] == pytest.approx(1e6 * lanes / 128 / cycles)
    # Six threadgroups of four simdgroups fit 60 KB of threadgroup memory and 208 KB.
    assert facts.simdgroups(chip) == 24 and facts.filled(chip) == 1
    assert slow["barrier"] == pytest.approx(1e6 * 0.01 * 48 / 6 / cycles)
    assert slow["cache"] == pytest.approx(1e6 * 0.5 * 128 / 32 / cycles)
    assert fast["cache"] == pytest.approx(1e6 * 0.5 * 128 / 64 / cycles)


def test_the_order_of_tiles_by_hand(scripts):
    step = scripts[2].sort_step(1_000_000, 27, 28672)
    # Keys, a sort of 14 blocks in four merges, the table in order.
    assert step.launches == 3 + 1 + 2 * 4 + 1
    keys = 35 * 28672
    assert step.moved == 1_000_000 * (27 * 12 + 4) + keys * (4 + 4 + 8 + 2 * 4 * 8)
