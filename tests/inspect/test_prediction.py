"""Predicted times on Apple GPUs: the arithmetic, where they are said, and the page."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import cli, devices
from mlx_lattice.inspect import cost, prediction
from mlx_lattice.inspect.doctor import shell
from mlx_lattice.problem import PASSES, WEIGHT_GRAD
from mlx_lattice.routes.selection import candidates

ROOT = Path(__file__).parents[2]
CHIPS = [d for d in devices.PROFILES.values() if d.backend == "metal"]


@pytest.fixture(scope="module")
def relation():
    manager = ml.CoordinateManager()
    key = manager.insert(shell(32))
    return manager.submanifold_kernel_relation(key, kernel_size=3)


def predicted(problem, device, relation=None, only=None):
    choice = ml.select(problem, device=device, only=only)
    return cost.cost(problem, choice.device, choice=choice, relation=relation).predicted


def test_tiles_by_hand(relation):
    assert (relation.n_out, relation.n_edges) == (3840, 50304)
    p = ml.Problem.of("forward", relation, 128, 128, mx.float16)
    chip = replace(devices.profile("m3-max"), bandwidth=1e6)  # compute alone
    found = predicted(p, chip, relation)
    assert found.counted and found.bound == "compute"
    executed = found.operations / (2 * 50304 * 128 * 128)
    assert executed == pytest.approx(1.29, abs=0.005)  # by 8 rows in Gray order
    fastest = 1e3 * found.operations / (0.69 * 0.88 * 14.2e12)
    slowest = 1e3 * found.operations / (0.69 * 0.75 * 14.2e12)
    assert found.fast_ms == pytest.approx(fastest)
    # Splits are added by one more launch, which waits.
    splits = ml.select(p, device=chip).plan.splits
    assert found.slow_ms == pytest.approx(slowest + 0.03 * (splits > 1))


def test_memory_and_caches_bound_what_they_bound(relation):
    p = ml.Problem.of("forward", relation, 128, 128, mx.float16)
    thin = replace(devices.profile("m3-max"), bandwidth=1.0)
    assert predicted(p, thin, relation).bound == "memory"
    walked = predicted(p, devices.profile("m3-max"), relation, "relation_traversal")
    assert walked.bound == "cache"
    # 5/4 half elements a multiply-add, at 64 bytes a cycle of 256 operations.
    fed = 50304 * 128 * 128 * 1.25 * 2 / (64 / 256 * 14.2e12)
    assert walked.fast_ms == pytest.approx(1e3 * fed)
    assert walked.slow_ms == pytest.approx(2e3 * fed)


def test_m5_has_two_peaks(relation):
    p = ml.Problem.of("forward", relation, 256, 256, mx.float16)
    fast, slow = (predicted(p, "m5-max", relation, r).operations for r in TILES)
    assert fast >= slow  # 16 rows at a time
    on_units, on_cores = (predicted(p, "m5-max", relation, r).slow_ms for r in TILES)
    assert 2 < on_cores / on_units < 3.5
    # float32 stays on the cores.
    wide = ml.Problem.of("forward", relation, 256, 256, mx.float32)
    found = predicted(wide, "m5-max", relation)
    assert found.rate == pytest.approx((0.69 * 0.75, 0.69 * 0.88))


PACKED = ("quantized_sorted", "quantized_traversal")


@pytest.mark.parametrize("route", PACKED)
def test_unpacking_by_hand(route, relation):
    facts = {"bits": 4, "group_size": 32}
    p = ml.Problem.of("forward", relation, 64, 64, mx.float16, **facts)
    chip = replace(devices.profile("m3-max"), bandwidth=1e6, tflops=1.0)
    choice = ml.select(p, device=chip, only=route)
    tiles, useful = choice.plan.tile, 50304 * 64 * 64
    unpacked = choice.plan.weights_unpacked(relation)
    if tiles:  # of each offset that 64 rows use
        assert useful / 64 < unpacked < useful / 16 and unpacked % 64**2 == 0
    else:
        assert unpacked == useful
    found = predicted(p, chip, relation, route)
    # In cycles of lanes: conversions, beside products and the rest of unpacking.
    done = found.operations / 2 / (102 / 128 if tiles else 1)
    cycles = max(8 * unpacked, done + 2 * unpacked)
    compute = found.operations / 2 / (0.69 * 0.88 if tiles else 1)
    assert found.fast_ms == pytest.approx(max(cycles, compute) / (1e9 / 2))
    assert found.bound == ("compute" if tiles else "unpacking")
    # Without a relation every tile uses every offset, if its edges are known.
    counted = (
        ml.select(replace(p, edges=n), device=chip, only=route).plan
        for n in (None, relation.n_edges)
    )
    unknown, every = (plan.weights_unpacked(None) for plan in counted)
    assert unknown is None and every >= unpacked


@pytest.mark.parametrize("dims", (16, 32))
@pytest.mark.parametrize("chip", ("m1", "m2-pro", "m3-max", "m4-pro"))
@pytest.mark.parametrize("bits", (4, 8))
def test_packed_layers_are_not_predicted_slower_than_half(bits, chip, dims):
    """But below what MLX takes to evaluate one operation."""
    manager = ml.CoordinateManager()
    key = manager.insert(shell(dims))
    relation = manager.submanifold_kernel_relation(key, kernel_size=3)
    for channels in (16, 24, 32, 64, 96, 128, 256):
        facts = "forward", relation, channels, channels, mx.float16
        half = predicted(ml.Problem.of(*facts), chip, relation)
        p = ml.Problem.of(*facts, bits=bits, group_size=64)
        found = predicted(p, chip, relation)
        floor = prediction.EVALUATION.fast
        assert found.fast_ms <= max(half.fast_ms, floor)
        assert found.slow_ms <= max(half.slow_ms, floor)


TILES = "tensor_ops", "sorted_implicit_gemm"
# Bounds of one rate, which others did not see a range of.
ONE_RATE = "unpacking", "integer", "threadgroup memory", "barrier"


@pytest.mark.parametrize("chip", CHIPS, ids=lambda d: d.name)
@pytest.mark.parametrize("pass_", PASSES)
def test_every_metal_route_and_chip_has_one(pass_, chip, relation):
    seen = set()
    for dtype in (mx.float16, mx.float32):
        for facts in ({}, {"groups": 64}, {"bits": 4, "group_size": 32}):
            if facts.get("bits") and pass_ != "forward":
                continue
            p = ml.Problem.of(pass_, relation, 64, 64, dtype, **facts)
            for route in candidates(replace(p, deterministic=False), chip):
                p_ = replace(p, deterministic=route.name != "fp32_atomic")
                found = predicted(p_, chip, relation, route.name)
                assert 0 < found.fast_ms <= found.slow_ms
                largest = max(found.bounds_ms, key=lambda pair: pair[1])[0]
                assert found.fast_ms < found.slow_ms or largest in ONE_RATE
                assert found.chip == chip.name and "predicted" in str(found)
                seen.add(route.name)
    assert {"relation_traversal", "gather_gemm_scatter", "depthwise"} <= seen
    expected = "grouped_gemm" if pass_ == WEIGHT_GRAD else "sorted_implicit_gemm"
    assert expected in seen and ("tensor_ops" in seen) == chip.neural_accelerators


def test_where_it_is_not_known_there_is_none(relation):
    p = ml.Problem.of("forward", relation, 64, 64, mx.float16)
    assert predicted(p, "h200", relation) is None
    assert predicted(p, "cpu", relation) is None
    assert cost.cost(p, devices.profile("m4"), relation=relation).predicted is None
    bare = ml.Problem.forward(c_in=64, c_out=64, n_in=3840)
    assert predicted(bare, "m4") is None  # edges are not counted
    counted = predicted(replace(bare, edges=50304), "m4")
    assert not counted.counted and "not counted" in str(counted)
    empty = ml.Problem.forward(c_in=4, c_out=4, n_in=0, edges=0)
    assert predicted(empty, "m4").fast_ms >= 0


def test_small_layers_are_bound_by_mlx_itself():
    p = ml.Problem.forward(c_in=16, c_out=16, n_in=100, edges=500)
    assert predicted(p, "m4-max").bound == "launch"
    assert "evaluate one operation" in str(predicted(p, "m4-max"))


def test_explain_and_traces_say_it(relation, capsys):
    p = ml.Problem.of("forward", relation, 64, 64, mx.float16)
    said = str(ml.explain(replace(p, edges=relation.n_edges), device="m4-pro"))
    lines = said.splitlines()
    assert any(line.startswith("  time     predicted ") for line in lines)
    walk = next(line for line in lines if " relation_traversal" in line)
    assert re.search(r"; predicted [\d.]+ to [\d.]+ ms$", walk)
    assert "predicted" not in str(ml.explain(p, device="h200"))
    line = "explain --channels 64 64 --rows 9000 --edges 90000 --device m2"
    assert cli.main(line.split()) == 0
    assert "not measured" in capsys.readouterr().out


def test_a_trace_has_a_column_where_there_are_predictions():
    x = ml.SparseTensor(shell(16), mx.ones((848, 8)))
    with ml.trace() as t:
        ml.ops.subm_conv3d(x, mx.ones((27, 8, 8)))
    here = t.device.backend == "metal"
    assert ("predicted" in t.table().splitlines()[0].split()) == here
    assert bool(t.as_dict()["records"][0]["cost"]["predicted"]) == here
    found = replace(
        t.records[0].cost,
        predicted=prediction.Prediction(
            "m1", 1.0, 2.0, "compute", 5e9, True, prediction.DENSE
        ),
    )
    t.records[0] = replace(t.records[0], cost=found)
    assert "1.00 to 2.00 ms" in t.table()
    assert t.as_dict()["records"][0]["cost"]["predicted"]["fast_ms"] == 1.0
    pytest.importorskip("jinja2")
    assert "1.00 to 2.00 ms, compute-bound" in ml.inspect.page.page(t)


# The benchmark and the page.


def benchmark(name="shells"):
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with patch.object(sys, "path", [str(path.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module


def test_the_page_has_what_the_benchmark_prints():
    page, shells = (ROOT / "docs" / "predictions.md").read_text(), benchmark()
    rows = [shells.row(shell, shells.CHIPS) for shell in shells.SHELLS]
    table = shells.markdown([name for name, _ in shells.columns(shells.CHIPS)], rows)
    assert table in page, "run: python benchmarks/shells.py --markdown"


def test_the_benchmark_prints_a_table(monkeypatch, capsys):
    shells = benchmark()
    monkeypatch.setattr(sys, "argv", ["shells.py", "--chips", "m1", "m3-max"])
    monkeypatch.setattr(shells, "SHELLS", shells.SHELLS[:2])
    shells.main()
    out = capsys.readouterr().out
    assert "0.205" in out and "m3-max" in out and "predicted" in out


def test_the_page_has_whole_decodes():
    page, decodes = (ROOT / "docs" / "predictions.md").read_text(), benchmark("decodes")
    ports = [decodes.port_row(port) for port in decodes.PORTS]
    command = "run: python benchmarks/decodes.py --markdown"
    assert decodes.markdown(decodes.PORT_COLUMNS, ports) in page, command
    assert decodes.markdown(*decodes.chip_table(1.6)) in page, command


def test_a_decode_has_the_operations_of_its_layers():
    """By another sum over the stages; and no more than the chip's peak in its time."""
    decodes, voxels = benchmark("decodes"), 10**6
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
    assert sum(part[1] for part in decode.parts.values()) == decode.seconds[1]


def test_the_page_has_every_chip():
    page = (ROOT / "docs" / "predictions.md").read_text()
    for d in CHIPS:
        facts = d.name, d.cores, f"{d.tflops:g}", f"{d.half_tflops:.3g}"
        row = " | ".join(map(str, (*facts, f"{d.bandwidth:g}")))
        assert f"| {row} |" in page


def test_what_others_published_is_within_the_peaks():
    published = benchmark("published_times")
    for chip, _, low, high, source in published.MATMULS:
        peak = devices.profile(chip).half_tflops
        assert 0.5 * peak < low <= high < peak and source
    for chip, low, high, _ in published.MEMORY:
        assert 0.7 * devices.profile(chip).bandwidth < low <= high
        assert high < devices.profile(chip).bandwidth
