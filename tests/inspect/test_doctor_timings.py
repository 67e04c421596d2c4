"""doctor: which layers it times, on which routes, and what it leaves out."""

import re
from dataclasses import replace

import pytest
from doctor_cases import (  # noqa: F401 (fixtures)
    PLENTY,
    SHELL,
    SMALL,
    each_place,
    nothing_kept,
    short_list,
    told,
)

from mlx_lattice import devices
from mlx_lattice.backends import first_use
from mlx_lattice.inspect.doctor import clock, layers, proofs, published, timings
from mlx_lattice.inspect.doctor.examine import Examination
from mlx_lattice.inspect.doctor.layers import Build, Layer, Scene
from mlx_lattice.problem import FORWARD, PASSES
from mlx_lattice.routes import measure
from mlx_lattice.routes.plan import Plan


def test_every_route_of_a_layer_is_timed_and_checked(place):
    timer = timings.Timer(place, None, quick=False)
    rows = list(timer.time(SMALL[0], clock.Budget(PLENTY)))
    assert all(isinstance(row, timings.Row) for row in rows)
    assert {row.pass_ for row in rows} == set(PASSES)
    for pass_ in PASSES:
        some = [row for row in rows if row.pass_ == pass_]
        assert [row.chosen for row in some] == [True] + [False] * (len(some) - 1)
        assert {"gather_gemm_scatter", "relation_traversal"} <= {r.route for r in some}
    for row in rows:
        assert row.good and row.ms > 0 and row.runs > 0 and row.tflops > 0
        assert row.error is not None and row.roofline_ms > 0
        assert bool(row.predicted) == (place.backend == "metal")
        assert row.published_ms in (None, 0.5)
    assert len(timer.kept) == 3 and len(timer.kept[0].times) > 1


def test_the_quick_form_times_the_chosen_route_alone():
    timer = timings.Timer(devices.current(), None, quick=True)
    rows = list(timer.time(SMALL[2], clock.Budget(PLENTY)))
    assert len(rows) == 1 and rows[0].chosen and not timer.kept


def test_a_wrong_route_is_said(monkeypatch):
    device, real = devices.current(), timings._runner

    def runner(problem, route, device, given):
        call = real(problem, route, device, given)
        return (lambda: call() * 1.5) if route.name == "relation_traversal" else call

    monkeypatch.setattr(timings, "_runner", runner)
    timer = timings.Timer(device, None, quick=False)
    rows = list(timer.time(SMALL[2], clock.Budget(PLENTY)))
    wrong = {row.route for row in rows if not row.good}
    assert wrong == ({"relation_traversal"} & {row.route for row in rows}) != set()
    assert timer.kept[0].times["relation_traversal"] is None


def test_what_is_too_large_or_too_late_is_left_out_and_said():
    device = devices.current()
    large = Layer(Scene("thin", 2_300_000), 128, 512)
    found = list(timings.Timer(device, 8e9, False).time(large, clock.Budget(PLENTY)))
    assert len(found) == 1 and re.match(r"it takes \d+\.\d GB of 8", found[0].why)
    late = list(timings.Timer(device, None, False).time(SMALL[0], clock.Budget(0)))
    assert [s.why for s in late] == ["no time was left"]
    assert timings.built(Build(SHELL), clock.Budget(0), 0.1).why == "no time was left"
    slow = Layer(SHELL, 512, 512)
    timer = timings.Timer(replace(device, tflops=1e-6, half_tflops=1e-6), None, True)
    (found,) = timer.time(slow, clock.Budget(PLENTY))
    assert "are estimated" in found.why


def test_budgets_count_down():
    now = [0.0]
    whole = clock.Budget(10, lambda: now[0])
    part = whole.part(20)
    assert part.fits(10) and not part.fits(10.1)
    now[0] = 4.0
    assert whole.left == 6 and part.left == 6 and whole.part(2).left == 2
    now[0] = 11.0
    assert whole.left == 0 and not whole.fits(0.001)


def test_the_fixed_list():
    shells = [la for la in layers.LAYERS if la.published]
    assert [la.published for la in shells] == [s.masked_ms for s in published.SHELLS]
    assert {la.bits for la in layers.LAYERS} == {None, 4, 8}
    assert {la.kind for la in layers.LAYERS} == set(layers.KINDS)
    assert {la.dtype for la in layers.LAYERS} == {"float16", "float32", "bfloat16"}
    assert {(1024, 1024), (1024, 4096), (128, 512)} <= {
        (la.c_in, la.c_out) for la in layers.LAYERS
    }
    assert any("weight_grad" in la.passes for la in layers.LAYERS if la.quick)
    some, builds = layers.chosen(True, False)
    assert all(la.quick for la in some) and all(b.quick for b in builds)
    assert [la.work for la in some] == sorted(la.work for la in some)
    tiny, _ = layers.chosen(False, True)
    assert len(tiny) == len(set(tiny))
    assert max(max(la.c_in, la.c_out) for la in tiny) <= layers.HOST_CHANNELS
    assert max(la.scene.rows for la in tiny) <= 300


def test_cuda_compiles_side_by_side_first(small, monkeypatch):
    """What is rehearsed are the kernels that are proved and timed, once each."""
    h200 = devices.profile("h200")
    began, finished, planned = [], [], []
    monkeypatch.setattr(first_use, "compiles", lambda: True)
    monkeypatch.setattr(first_use, "finish", lambda: finished.append(len(planned)))
    monkeypatch.setattr(first_use, "rehearse_geometry", began.append)
    monkeypatch.setattr(
        Plan, "__call__", lambda plan, *given: planned.append((plan.backend, plan))
    )
    timer = timings.Timer(h200, None, quick=True)
    quick, _ = layers.chosen(True, False)
    timer.prepare(quick, clock.Budget(PLENTY))
    assert finished == [len(planned)] == [sum(len(la.passes) for la in quick)]
    assert {backend for backend, _ in planned} == {"cuda"}
    planned.clear()
    monkeypatch.setattr(proofs, "TOGETHER", 5)
    list(proofs.proofs(h200, told(proofs.points(h200)), clock.Budget(PLENTY)))
    assert len(finished) == 3  # five and three of eight
    assert len(planned) >= 16  # rehearsed, and proved


def test_times_are_kept_as_tuning(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path))
    examination = Examination(seconds=PLENTY)
    problem = layers.described(
        SMALL[0], FORWARD, layers.relation_of(SHELL, "pointwise")
    )
    problem = replace(problem, pointwise=False)
    times = {"relation_traversal": 0.1234567891, "gather_gemm_scatter": None}
    examination.kept = [timings.Kept(problem, times)]
    examination.report.machine = {**examination.report.machine, "on_host": False}
    assert examination.keep() == 1
    kept = measure.measured(problem, examination.device)
    assert kept == (("relation_traversal", 0.123457), ("gather_gemm_scatter", None))
    examination.report.machine = {**examination.report.machine, "on_host": True}
    with pytest.raises(ValueError, match="mean nothing"):
        examination.keep()
