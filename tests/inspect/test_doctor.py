"""doctor: its proofs, its times, its report, its exit codes."""

import json
import time

import mlx.core as mx
import pytest
from places import leave_the_host

from metal import host
from mlx_lattice import cli, devices, routes, settings
from mlx_lattice.commands import doctor as command
from mlx_lattice.inspect import doctor
from mlx_lattice.inspect.doctor import Case, Doctor, Layer
from mlx_lattice.problem import FORWARD, MLX, PASSES, Plan

PLENTY = 1e6  # seconds: no budget ends, however busy the machine is
SMALL = (Layer(9, 16, 24, passes=PASSES), Layer(9, 16, 24, bits=4))
INVERSE = Layer(9, 16, 32, kind="inverse", dtype="float32")


@pytest.fixture(autouse=True)
def idle(unforced, monkeypatch, tmp_path):
    """An idle machine; the suite's other processes do not count."""
    # The doctor sets it; MLX reads it once, maybe here first.
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    if not devices.metal_on_host():  # whose compiled kernels stay in the cache
        monkeypatch.setitem(
            settings.environment, "MLX_LATTICE_CACHE", str(tmp_path / "cache")
        )
    clear()
    yield
    clear()


def clear():
    doctor._small_relation.cache_clear()
    doctor._reference.cache_clear()


@pytest.fixture(params=("here", "metal host"))
def place(request, monkeypatch):
    """The device that MLX runs on, and Metal's kernels on the CPU."""
    if request.param == "metal host":
        host.require()
        with monkeypatch.context() as patched:
            patched.setitem(settings.environment, "MLX_LATTICE_METAL", "host")
            patched.setitem(settings.environment, "MLX_LATTICE_CACHE", "")
            yield Doctor().device
        leave_the_host()
        return
    yield Doctor().device


@pytest.fixture
def small(monkeypatch):
    """Lists that take a second."""
    monkeypatch.setattr(doctor, "QUICK_LAYERS", SMALL[1:])
    monkeypatch.setattr(doctor, "LAYERS", SMALL)
    kernels, operations = doctor.kernel_cases, doctor.operation_cases
    monkeypatch.setattr(doctor, "kernel_cases", lambda device: kernels(device)[:8])
    monkeypatch.setattr(doctor, "operation_cases", lambda: operations()[:2])


def plant(monkeypatch, fault):
    """Change the result of every kernel, and leave MLX operations right."""
    called = Plan.__call__

    def wrong(plan, *given):
        y = called(plan, *given)
        return y if plan.backend == MLX else fault(y)

    monkeypatch.setattr(Plan, "__call__", wrong)


def timed(layers, monkeypatch, quick=False):
    monkeypatch.setattr(doctor, "QUICK_LAYERS" if quick else "LAYERS", layers)
    made = Doctor(quick, seconds=PLENTY)
    made.time_layers()
    return made.report


# Which kernels are proved.


def test_every_kernel_of_the_table_is_proved():
    native = ("cpu",) if devices.has_extension() else ()
    for name in ("m1", "m5-max", "h200", "a100", *native):
        device = devices.profile(name)
        expected = {
            (route.name, pass_)
            for route in routes.TABLE
            for pass_ in route.passes
            if route.planner(device.backend, pass_)
        }
        cases = doctor.kernel_cases(device)
        problems = [case.plan.problem for case in cases]
        seen = {(case.name, case.plan.problem.pass_) for case in cases}
        lacking = {e for e in expected - seen if device.backend != "cpu"}
        able = {
            (r, p)
            for r, p in lacking
            if not (r.endswith("tensor_ops") and not device.neural_accelerators)
        }
        # Its weight gradient wins over many rows only, but is forced on small ones.
        assert not able - {("sorted_implicit_gemm", "weight_grad")}, name
        assert {p.dtype for p in problems} == {"float32", "float16", "bfloat16"}
        assert {p.layout for p in problems} == {"mlx", "kernel_major"}


# What a proof finds.


def test_kernels_are_proved(place):
    cases = doctor.kernel_cases(place)[: 25 if place.name == "metal-host" else None]
    done = [doctor.prove(case) for case in cases]
    assert [p for p in done if p["wrong"]] == [] and len(done) > 20
    assert any(p["error"] > 0 for p in done), "the reference is another computation"


def a_case(pass_=FORWARD):
    for case in doctor.kernel_cases(devices.current()):
        p = case.plan.problem
        facts = p.pass_, p.dtype, p.pointwise, p.groups
        if facts == (pass_, "float16", False, 1):
            return case


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(
    "fault",
    [
        lambda y: y.at[mx.array([3])].multiply(mx.array(0.0).astype(y.dtype)),
        lambda y: mx.concatenate([y[:, :1], y[:, 2:], y[:, 1:2]], axis=1),
        lambda y: y + mx.array(float("nan"), dtype=y.dtype),
        lambda y: mx.concatenate([y[1:], y[:1]]),
    ],
    ids=("a row is lost", "columns are moved", "NaN", "rows are moved"),
)
def test_a_wrong_kernel_is_found(fault, pass_, monkeypatch):
    case = a_case(pass_)
    assert not doctor.prove(case)["wrong"]
    plant(monkeypatch, fault)
    entry = doctor.prove(case)
    assert entry["wrong"] and json.dumps(entry, allow_nan=False)


def test_relations_norms_and_pools_are_proved(place):
    done = [doctor.prove(case) for case in doctor.operation_cases()]
    assert [p for p in done if p["wrong"]] == []


@pytest.mark.parametrize(
    "planted, text",
    [
        (lambda: mx.array([1, 2]), "its integers are wrong"),
        (lambda: mx.array([1]), "the result is (1,)"),
        (lambda: mx.array([1.0, float("nan")]), "NaN"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_relation_is_found(planted, text):
    right = mx.array([1.0, 3.0]) if text == "NaN" else mx.array([1, 3])
    entry = doctor.prove(Case("x", "y", lambda: [planted()], lambda: [right]))
    assert text in entry["wrong"]


# Layers and times.


def test_every_route_of_a_layer_is_timed_and_checked(monkeypatch):
    report = timed(SMALL[:1], monkeypatch)
    build, *rows = report["layers"]
    assert build["pass"] == "relation" and build["ms"] > 0
    assert build["edges"] > build["rows"]
    for pass_ in PASSES:
        some = [row for row in rows if row["pass"] == pass_]
        assert sum(row["chosen"] for row in some) == 1
        names = {row["route"] for row in some}
        assert {"gather_gemm_scatter", "relation_traversal"} <= names
    for row in rows:
        assert row["wrong"] is None and row["error"] is not None
        assert row["ms"] > 0 and row["tflops"] > 0 and row["roofline_ms"] > 0
    assert not report["wrong"] and not report["left_out"]


def test_a_wrong_route_is_reported(monkeypatch):
    called = Plan.__call__

    def wrong(plan, *given):
        y = called(plan, *given)
        return y * 1.5 if plan.kernel == "relation_traversal" else y

    monkeypatch.setattr(Plan, "__call__", wrong)
    report = timed((INVERSE,), monkeypatch)
    bad = {row["route"] for row in report["layers"] if row.get("wrong")}
    assert bad == {"relation_traversal"}
    assert "its result is off by 5.0e-01" in "\n".join(report["wrong"])
    assert "WRONG 5e-01" in command.report(report)


@pytest.mark.parametrize("seconds", (0.5, 3.0, PLENTY))
def test_what_does_not_fit_into_its_time_is_left_out(seconds, small, monkeypatch):
    """An evaluation takes 0.05 s of a clock that nothing else moves."""
    evaluate, taken = mx.eval, []
    monkeypatch.setattr(mx, "eval", lambda *args: (evaluate(*args), taken.append(0.05)))
    monkeypatch.setattr(time, "perf_counter", lambda: sum(taken))
    monkeypatch.setattr(devices, "metal_on_host", lambda: False)
    report = Doctor(seconds=seconds)().report
    whole = seconds == PLENTY
    assert (not report["left_out"]) == whole
    assert ("LEFT OUT" in command.report(report)) != whole
    # Nothing begins when no time is left; the longest part has about 30 evaluations.
    assert whole or report["seconds"] < seconds + 1.5


# The report, its files and the command.


def test_a_run_and_its_file(small, place, tmp_path):
    result = command.run(tmp_path / "out")
    out = result.text
    assert result.code == 0
    assert "nothing wrong" in out
    found = json.loads((tmp_path / "out" / "doctor.json").read_text())
    assert found["wrong"] == [] and found["unfinished"] is None
    assert found["device"]["name"] == place.name
    on_host = place.name == "metal-host"
    assert found["machine"]["on_host"] == on_host
    assert ("nothing was timed" in out) == on_host
    assert len(found["proofs"]) == 10 and bool(found["layers"]) != on_host


def test_no_path_is_in_the_report(small, tmp_path, monkeypatch):
    monkeypatch.setitem(
        settings.environment, "MLX_LATTICE_CACHE", str(tmp_path / "jane.doe")
    )

    def fail(plan, *given):
        raise RuntimeError(
            "in /Users/jane.doe/Secret plan/k.metal: and ~/x/y.h, "
            r"and C:\Users\jane.doe\z.cu"
        )

    monkeypatch.setattr(Plan, "__call__", fail)
    report = Doctor(True, seconds=PLENTY)().report
    text = json.dumps(report) + command.report(report)
    assert report["wrong"]
    for private in ("jane", "doe.", "Users", "~/x", "Secret", str(tmp_path)):
        assert private not in text, private
    assert "k.metal" in text and "z.cu" in text


def test_the_command(small, tmp_path, capsys):
    given = ["doctor", "--quick", "--out", str(tmp_path)]
    assert cli.main(given) == 0
    assert "nothing wrong" in capsys.readouterr().out
    assert cli.main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "doctor.json").read_text())
