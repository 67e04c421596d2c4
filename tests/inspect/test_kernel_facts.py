"""Counted facts of kernels: they are those of the text that runs, and bound it."""

import importlib.util
import sys
from dataclasses import astuple, replace
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_lattice as ml
from metal import host
from mlx_lattice import devices
from mlx_lattice.inspect import bounds, cost, kernel_facts
from mlx_lattice.inspect.kernel_facts import KernelFacts
from mlx_lattice.integer_facts import IntegerFacts

ROOT = Path(__file__).parents[2]
FACTS = KernelFacts(9_728, 64, 128, 200.0, 0.5, 0.01, 2.0, 0.0, 8.0, 4.0, 50.0, 0.5)


@pytest.fixture(scope="module")
def script():
    where = ROOT / "benchmarks" / "kernel_facts.py"
    spec = importlib.util.spec_from_file_location("kernel_facts_script", where)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("route", ("relation_traversal", "dense_channel", "vec4"))
def test_kept_facts_are_those_of_the_kernel(script, route):
    host.require()
    built = script.relation()
    dtype = mx.float32 if route == "vec4" else mx.float16
    p = ml.Problem.of("forward", built, 16, 16, dtype, layout="mlx")
    plan = ml.select(p, device=devices.profile("m1"), only=route).plan
    kept = kernel_facts.of(plan.gpu)
    if not kernel_facts.is_current(plan.gpu):
        pytest.skip("its text changed since: run python benchmarks/kernel_facts.py")
    # Where arrays begin in a line is not the same in every run.
    found = astuple(script.counted(plan, built))
    assert found == pytest.approx(astuple(kept), rel=0.05)


def test_it_says_of_which_text_facts_are(monkeypatch):
    p = ml.Problem.forward(c_in=64, c_out=64, n_in=5000, edges=60_000)
    plan = ml.select(p, device=devices.profile("m1"), only="relation_traversal").plan
    assert kernel_facts.is_current(plan.gpu)
    monkeypatch.setattr(kernel_facts, "digest", lambda files: "another")
    choice = ml.select(p, device=devices.profile("m1"), only="relation_traversal")

    def said():
        found = cost.cost(p, devices.profile("m1"), choice=choice).predicted
        return found.simdgroups, str(found)

    simdgroups, text = said()
    assert simdgroups and "counted of an older text" in text
    monkeypatch.setattr(kernel_facts, "kept", dict)
    simdgroups, text = said()
    assert simdgroups is None and "steps are not counted" in text


def test_bounds_by_hand():
    chip = devices.profile("m1")
    cycles = 2.6e12 / 256
    done = 512 * 1e6
    slow, fast = (bounds.beside(FACTS, done, chip, end) for end in range(2))
    assert slow["threadgroup memory"] == pytest.approx(1e6 * 200 / 64 / cycles)
    lanes = 2 * 100 + 8 * 4 + 4 * 16
    assert slow["integer"] == pytest.approx(1e6 * lanes / 128 / cycles)
    # Six threadgroups of four simdgroups fit 60 KB of threadgroup memory and 208 KB.
    assert bounds.held(FACTS, chip) == 24
    assert slow["barrier"] == pytest.approx(1e6 * 0.01 * 48 / 6 / cycles)
    assert slow["cache"] == pytest.approx(1e6 * 0.5 * 128 / 32 / cycles)
    assert fast["cache"] == pytest.approx(1e6 * 0.5 * 128 / 64 / cycles)


def test_few_simdgroups_are_slower_on_fixed_pools_only():
    crowded = replace(FACTS, memory=20_480)
    assert bounds.filled(FACTS, devices.profile("m2")) == 1
    assert bounds.filled(crowded, devices.profile("m2")) == pytest.approx(0.5**0.5)
    assert bounds.filled(crowded, devices.profile("m3")) == 1


@pytest.mark.parametrize(
    "changed, bound",
    (
        ({"staged": 1e5}, "threadgroup memory"),
        ({"divisions64": 50.0}, "integer"),
        ({"barriers": 10.0}, "barrier"),
        ({"lines": 100.0}, "cache"),
        ({}, "compute"),
    ),
)
def test_the_largest_bound_is_said(changed, bound, monkeypatch):
    facts = replace(FACTS, **changed)
    monkeypatch.setattr(kernel_facts, "of", lambda kernel: facts)
    chip = replace(devices.profile("m3-max"), bandwidth=1e6)
    p = ml.Problem.forward(c_in=128, c_out=128, n_in=200_000, edges=3_000_000)
    choice = ml.select(p, device=chip, only="sorted_implicit_gemm")
    found = cost.cost(p, chip, choice=choice).predicted
    assert found.bound == bound and dict(found.bounds_ms)[bound] <= found.slow_ms
    assert f"{bound}-bound" in str(found)
    assert f"{found.simdgroups} simdgroups a core" in str(found)
    assert found.as_dict()["bounds_ms"].keys() >= {"compute", "memory", bound}


# A relation's making


def made(n, device, kind="submanifold", **facts):
    p = ml.Problem.forward(
        kind=kind, c_in=64, c_out=64, n_in=n, edges=13 * n, dtype="float16", **facts
    )
    device = devices.profile(device)
    return cost.cost(p, device, choice=ml.select(p, device=device)).made


def test_a_relation_by_hand():
    found = made(1_000_000, "m4-max")
    assert found.bound == "memory" and [n for n, _ in found.steps] == [
        "hash",
        "table",
        "order of tiles",
    ]
    # 13 look-ups a row, a line each, and both halves of the table.
    lines = 1.03 * 13e6 * 128
    moved = 1e6 * (2 * 4 * 27 + 2 * 16)
    slow = 1e3 * (lines + moved) / (0.73 * 546e9) + 2 * 0.03
    assert dict(found.steps)["table"] == pytest.approx(slow)
    assert found.slow_ms == pytest.approx(sum(ms for _, ms in found.steps))
    assert found.fast_ms < found.slow_ms and "made once" in str(found)


def test_the_sort_of_tiles_is_that_of_regions():
    from mlx_lattice.inspect.making import sort_step

    step = sort_step(1_000_000, 27, 28672)
    # Keys, a sort of 14 blocks in four merges, the table in order.
    assert step.launches == 3 + 1 + 2 * 4 + 1
    keys = 35 * 28672
    assert step.moved == 1_000_000 * (27 * 12 + 4) + keys * (4 + 4 + 8 + 2 * 4 * 8)
    assert sort_step(1000, 27, 28672).launches == 3 + 1
    assert sort_step(1000, 125, 28672).launches > sort_step(1000, 60, 28672).launches


def test_small_relations_are_bound_by_launches_and_others_make_none():
    assert made(2000, "m3-max").bound == "launch"
    assert made(2000, "h200") is None and made(2000, "cpu") is None
    assert made(2000, "m3", table=False) is None
    p = ml.Problem.forward(c_in=64, c_out=64, n_in=9000, edges=90_000, dtype="float16")
    said = str(ml.explain(p, device="m2"))
    assert "  relation made once: predicted " in said
    assert "made once" not in str(ml.explain(p, device="h200"))


def test_the_order_of_int8_tiles_is_that_of_the_halves_they_are_multiplied_as():
    """A row of 128 channels has 256 bytes there, whatever floats the layer has else."""
    facts = {"c_in": 128, "c_out": 128, "n_in": 200_000, "edges": 2_000_000}
    half = ml.Problem.forward(dtype="float16", **facts)
    wide = ml.Problem.forward(dtype="float32", bits=8, **facts)
    int8 = replace(wide, integer=IntegerFacts())
    found = [ml.explain(p, device="m1") for p in (half, int8)]
    plans = [each.choice.plan for each in found]
    routes = ["sorted_implicit_gemm", "quantized_sorted"]
    assert [plan.kernel for plan in plans] == routes
    assert [plan.region for plan in plans] == [28672, 28672]
    assert found[0].cost.made.steps == found[1].cost.made.steps
