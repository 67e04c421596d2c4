"""doctor: its proofs, its times, its report, its exit codes."""

import json
import re
import threading
import time
from dataclasses import replace

import mlx.core as mx
import pytest
from places import leave_the_host

from metal import host
from mlx_lattice import cli, devices, routes
from mlx_lattice.backends import cpu_extension, first_use, kernel_sources
from mlx_lattice.inspect import doctor
from mlx_lattice.inspect.doctor import Doctor, Layer
from mlx_lattice.problem import FORWARD, PASSES
from mlx_lattice.routes import measure, proof_results
from mlx_lattice.routes.plan import MLX, Plan

PLENTY = 1e6  # seconds: no budget ends, however busy the machine is
SMALL = (
    Layer("shell", 9, 16, 24, passes=PASSES, quick=True),
    Layer("shell", 9, 16, 24, bits=4),
    Layer("shell", 9, 16, 32, kind="inverse", dtype="float32", quick=True),
)


@pytest.fixture(autouse=True)
def idle(unforced, monkeypatch, tmp_path):
    """An idle machine; the suite's other processes do not count."""
    # The doctor sets it; MLX reads it once, maybe here first.
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    monkeypatch.setattr(doctor, "busy", lambda: None)
    if not devices.metal_on_host():  # whose compiled kernels stay in the cache
        monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path / "cache"))
    clear()
    yield
    clear()


def clear():
    doctor._relation.cache_clear()
    doctor._reference.cache_clear()


@pytest.fixture(params=("here", "metal host"))
def place(request, monkeypatch):
    """The device that MLX runs on, and Metal's kernels on the CPU."""
    if request.param == "metal host":
        host.require()
        with monkeypatch.context() as patched:
            patched.setenv("MLX_LATTICE_METAL", "host")
            patched.setenv("MLX_LATTICE_CACHE", "")
            yield doctor.current_device()
        leave_the_host()
        return
    yield doctor.current_device()


@pytest.fixture
def small(monkeypatch):
    """Lists that take a second."""
    monkeypatch.setattr(doctor, "LAYERS", SMALL)
    points = doctor.points
    monkeypatch.setattr(doctor, "points", lambda device: points(device)[:8])
    monkeypatch.setattr(doctor, "CHECKS", doctor.CHECKS[:2])


def plant(monkeypatch, fault):
    """Change the result of every kernel, and leave MLX operations right."""
    called = Plan.__call__

    def wrong(plan, *given):
        y = called(plan, *given)
        return y if plan.backend == MLX else fault(y)

    monkeypatch.setattr(Plan, "__call__", wrong)


def timed(layers=SMALL, quick=False):
    found = Doctor(quick, PLENTY, layers=layers)
    found.machine["on_host"] = False
    found.time_layers()
    return found


# Which kernels are proved.


def multiplies_matrices(plan):
    files = plan.gpu.files if plan.gpu else ()
    texts = (kernel_sources.source("metal", f"{file}.metal") for file in files)
    return any("simdgroup_multiply" in text for text in texts)


def test_on_the_gpu_of_a_virtual_machine_no_kernel_multiplies_matrices():
    real = devices.profile("m1")
    virtual = replace(real, matrices=False)
    routes_of = {}
    for device in (real, virtual):
        found = [(p, p.route.plan(p.problem, device)) for p in doctor.points(device)]
        routes_of[device] = {p.route.name for p, y in found if multiplies_matrices(y)}
        for point, _ in found:
            choice = routes.select(point.problem, device=virtual)
            assert not multiplies_matrices(choice.plan)
            why = point.route.refusal(point.problem, virtual, forced=True) or ""
            assert device == real or not why
    assert {"sorted_implicit_gemm", "grouped_gemm"} <= routes_of[real]
    assert routes_of[virtual] == set()


def test_every_kernel_of_the_table_is_a_point():
    native = ("cpu",) if cpu_extension.usable() else ()
    for name in ("m1", "m5-max", "h200", "a100", *native):
        device = devices.profile(name)
        expected = {
            (route.name, pass_)
            for route in routes.TABLE
            for pass_ in route.passes
            if route.planner(device.backend, pass_)
        }
        found = doctor.points(device)
        seen = {(point.route.name, point.problem.pass_) for point in found}
        lacking = {e for e in expected - seen if device.backend != "cpu"}
        able = {
            (r, p)
            for r, p in lacking
            if not (r.endswith("tensor_ops") and not device.neural_accelerators)
        }
        # Its weight gradient wins over many rows only, but is forced on small ones.
        assert not able - {("sorted_implicit_gemm", "weight_grad")}, name
        assert {p.problem.dtype for p in found} == {"float32", "float16", "bfloat16"}
        assert {p.problem.layout for p in found} == {"mlx", "kernel_major"}


def test_points_have_every_tile_width_and_both_kinds_of_sums():
    device, seen = devices.profile("m5-max"), set()
    for point in doctor.points(device):
        plan = point.plan(device)
        template = dict(plan.gpu.template)
        if point.route.name == "sorted_implicit_gemm":
            facts = "T", "COLUMNS", "TRANSPOSED"
            out = template["OUT"] == mx.float32
            seen.add((*(template[f] for f in facts), plan.splits > 1, out))
    for dtype in (mx.float16, mx.bfloat16):
        for columns in (16, 32, 64, 128):
            for transposed in (False, True):
                assert (dtype, columns, transposed, True, True) in seen
                assert (dtype, columns, transposed, False, False) in seen


def test_packed_kernels_have_every_group_size_that_users_choose():
    native = ("cpu",) if cpu_extension.usable() else ()
    for name in ("m1", "m5-max", "h200", *native):
        found = doctor.points(devices.profile(name))
        packed = [p for p in found if p.problem.group_size]
        for route in {p.route.name for p in packed}:
            own = [p.problem for p in packed if p.route.name == route]
            for dtype in ("float32", "float16", "bfloat16"):
                for bits in {p.bits for p in own}:
                    some = {
                        p.group_size for p in own if (p.dtype, p.bits) == (dtype, bits)
                    }
                    # What unpacks integers once is the same for every dtype.
                    assert some in ({32, 64, 128}, set()), (name, route, dtype, bits)
        integers = {p.problem.group_size for p in packed if p.problem.integer}
        assert integers == {32, 64, 128}, name
        # Each takes a compilation, which the doctor's minutes are for.
        counts = [sum(p.problem.group_size == s for p in packed) for s in (64, 128)]
        assert counts[1] < 0.7 * counts[0], name


def test_alternating_points_begin_with_every_route():
    found = doctor.points(devices.profile("m5-max"))
    routes_ = {p.route.name for p in found}
    assert {p.route.name for p in found[:25]} == routes_


# What a proof finds.


def test_kernels_are_proved(place):
    found = doctor.points(place)[: 25 if place.name == "metal-host" else None]
    done = [doctor.prove(point, place) for point in found]
    assert [p for p in done if not p.good] == [] and len(done) > 20
    assert any(p.error > 0 for p in done), "the reference is another computation"


def a_point(pass_=FORWARD, dtype="float16"):
    device = devices.current()
    return next(
        p
        for p in doctor.points(device)
        if p.problem.pass_ == pass_
        and p.problem.dtype == dtype
        and not p.problem.pointwise
        and p.problem.groups == 1
    )


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
    point = a_point(pass_)
    assert doctor.prove(point, devices.current()).good
    plant(monkeypatch, fault)
    proof = doctor.prove(point, devices.current())
    assert not proof.good and json.dumps(proof.as_dict(), allow_nan=False)


def test_a_kernel_that_does_not_compile_is_a_sentence(monkeypatch):
    def fail(plan, *given):
        raise RuntimeError("error in /Users/somebody/mlx/kernel.metal:3: no such type")

    monkeypatch.setattr(Plan, "__call__", fail)
    proof = doctor.prove(a_point(), devices.current())
    assert not proof.good and proof.error is None
    assert proof.note == "RuntimeError: error in <kernel.metal>:3: no such type"


def test_select_refuses_a_matrix_kernel_that_is_wrong(place, monkeypatch, tmp_path):
    points = [p for p in doctor.points(place) if p.route.name == "grouped_gemm"]
    point = next((p for p in points if p.plan(place).proof), None)
    if point is None:
        pytest.skip("no kernel of this backend proves itself")
    monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path / "proofs"))
    monkeypatch.setenv("MLX_LATTICE_PROOF", "1")
    assert doctor.prove(point, place).good and not proof_results.current().refused
    with monkeypatch.context() as patched:
        plant(patched, lambda y: y * 1.5)
        wrong = doctor.prove(point, place)
    assert not wrong.good and wrong.note
    assert proof_results.current().refused.reason(point.plan(place).gpu)
    # What is known does not count.
    assert doctor.prove(point, place).good and not proof_results.current().refused


def test_relations_norms_and_pools_are_proved(place):
    done = [doctor.prove_check(*check) for check in doctor.CHECKS]
    assert [p for p in done if not p.good] == []


@pytest.mark.parametrize(
    "planted, text",
    [
        (lambda: [mx.array([1, 2])], None),
        (lambda: [mx.array([1])], "the result is (1,)"),
        (lambda: [mx.array([1.0, float("nan")])], "NaN"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_relation_is_found(planted, text):
    right = mx.array([1.0, 3.0]) if text == "NaN" else mx.array([1, 3])
    calls = iter((lambda: [right], planted))
    proof = doctor.prove_check("x", "y", lambda: next(calls)())
    assert not proof.good
    assert text is None or text in proof.note


def test_cuda_compiles_side_by_side(small, monkeypatch):
    finished, planned = [], []
    monkeypatch.setattr(first_use, "compiles", lambda: True)
    monkeypatch.setattr(first_use, "finish", lambda: finished.append(len(planned)))
    monkeypatch.setattr(first_use, "rehearse_geometry", lambda dims: None)
    monkeypatch.setattr(
        Plan, "__call__", lambda plan, *given: planned.append(plan.backend)
    )
    monkeypatch.setattr(doctor, "COMPILED_TOGETHER", 5)
    found = Doctor(True, PLENTY)
    found.device = devices.profile("h200")
    found.prove(1.0)
    assert len(finished) == 2 and finished[0] == 5  # five and three of eight
    assert "cuda" in planned


# Scenes and times.


@pytest.mark.parametrize(
    "resolution, rows, edges", [(16, 848, 10544), (32, 3840, 50304)]
)
def test_shells_are_the_published_ones(resolution, rows, edges):
    coords = doctor.shell(resolution)
    built = doctor.build_relation(coords, "submanifold")
    assert (len(coords), built.n_edges) == (rows, edges)


@pytest.mark.parametrize("name, least, most", [("scan", 16, 18.5), ("thin", 8, 13)])
def test_sheets_have_the_edges_of_scans(name, least, most):
    coords = doctor.SCENES[name](4000)
    assert 3500 < len(coords) < 4500
    flat = coords.tolist()
    assert flat == sorted(flat) and len({tuple(row) for row in flat}) == len(flat)
    built = doctor.build_relation(coords, "submanifold")
    assert least < built.n_edges / built.n_out < most


def test_the_fixed_list():
    found = doctor.LAYERS
    assert {la.bits for la in found} == {None, 4, 8}
    assert {la.kind for la in found} == set(doctor.KINDS)
    assert {la.dtype for la in found} == {"float16", "float32", "bfloat16"}
    assert any("weight_grad" in la.passes for la in found if la.quick)
    assert len({str(la) for la in found}) == len(found)


def test_every_route_of_a_layer_is_timed_and_checked():
    found = timed(SMALL[:1])
    build, *rows = found.rows
    assert build.pass_ == doctor.RELATION and build.ms > 0 and build.edges > build.rows
    for pass_ in PASSES:
        some = [row for row in rows if row.pass_ == pass_]
        assert [row.chosen for row in some] == [True] + [False] * (len(some) - 1)
        assert {"gather_gemm_scatter", "relation_traversal"} <= {r.route for r in some}
    for row in rows:
        assert row.note is None and row.ms > 0 and row.tflops > 0
        assert row.error is not None and row.roofline_ms > 0
    assert not found.wrong and not found.skipped


def test_the_quick_form_times_the_chosen_route_alone():
    found = timed(SMALL[2:], quick=True)
    build, row = found.rows
    assert row.chosen and build.route == "" and not found._times


def test_a_wrong_route_is_reported_and_not_kept(monkeypatch):
    called = Plan.__call__

    def wrong(plan, *given):
        y = called(plan, *given)
        return y * 1.5 if plan.kernel == "relation_traversal" else y

    monkeypatch.setattr(Plan, "__call__", wrong)
    found = timed(SMALL[2:])
    assert {r.route for r in found.rows if r.note} == {"relation_traversal"}
    assert "off the floor route's by 5.0e-01" in "\n".join(found.wrong)
    ((_, times),) = found._times
    assert times["relation_traversal"] is None and len(times) > 1
    assert "WRONG 5e-01" in doctor.report(found.as_dict())


def test_what_is_too_large_or_too_late_is_left_out_and_named():
    found = Doctor(False, PLENTY, layers=[Layer("thin", 2_300_000, 128, 512)])
    found.machine["memory_gb"] = 8
    found.time_layers()
    assert re.match(r"it takes \d+\.\d GB of 8", found.skipped[0][1]) and not found.rows
    late = Doctor(False, 1e-9, layers=SMALL)
    late.time_layers()
    assert {why for _, why in late.skipped} == {"no time was left"} and not late.rows
    slow = Doctor(True, PLENTY, layers=[replace(SMALL[0], c_in=512, c_out=512)])
    slow.device = replace(slow.device, tflops=1e-6, half_tflops=1e-6)
    slow.time_layers()
    assert "s are estimated" in slow.skipped[0][1]


@pytest.mark.parametrize("seconds", (0.5, 3.0, PLENTY))
def test_what_does_not_fit_into_its_time_is_left_out(seconds, small, monkeypatch):
    """An evaluation takes 0.05 s of a clock that nothing else moves."""
    evaluate, taken = mx.eval, []
    monkeypatch.setattr(mx, "eval", lambda *args: (evaluate(*args), taken.append(0.05)))
    monkeypatch.setattr(time, "perf_counter", lambda: sum(taken))
    monkeypatch.setattr(devices, "metal_on_host", lambda: False)
    found = Doctor(True, seconds)()
    whole = seconds == PLENTY
    assert (not found.skipped and not found.left_out) == whole
    assert ("left out" in doctor.report(found.as_dict())) != whole
    # No part begins when nothing is left; the longest takes about 30 evaluations.
    assert whole or found.seconds - found.left < seconds + 1.5


def test_times_are_kept_as_tuning():
    found = timed(SMALL[:1])
    assert found.keep() == len(PASSES)
    problem, times = found._times[0]
    kept = dict(measure.measured(problem, found.device))
    assert kept.keys() == times.keys()
    found.machine["on_host"] = True
    with pytest.raises(ValueError, match="times mean nothing: nothing was kept"):
        found.keep()


# A busy machine.


@pytest.mark.parametrize(
    "ticks, average, said",
    [
        ([(1000, 500), (1040, 536)], 9.0, None),
        ([(1000, 500), (1040, 520)], 0.0, "50%"),
        ([(0, 0), (0, 0)], 0.7, None),
        ([(0, 0), (0, 0)], 9.0, "100%"),
    ],
)
def test_a_busy_machine_is_detected(ticks, average, said, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "_ticks", iter(ticks).__next__)
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (average, 0, 0))
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 2)
    found = doctor.busy()
    assert found == (said and f"other programs use {said} of the processors' time")


@pytest.mark.parametrize("when", (0, 1))
def test_no_times_of_a_busy_machine_are_kept(when, small, monkeypatch):
    answers = iter([None] * when + ["other programs use 90%"])
    monkeypatch.setattr(doctor, "busy", lambda: next(answers))
    monkeypatch.setattr(devices, "metal_on_host", lambda: False)
    found = Doctor(True, PLENTY)()
    text = doctor.report(found.as_dict())
    assert "nothing wrong" not in text
    assert "no wrong results, not timed: the machine is busy" in text.splitlines()[0]
    assert "The machine is busy: other programs use 90%" in text
    assert found.proofs and not found.rows and found.as_dict()["layers"] == []
    with pytest.raises(ValueError, match=r"busy \(other programs use 90%\): nothing"):
        found.keep()


def test_a_wrong_result_counts_on_a_busy_machine_too(small, monkeypatch):
    answers = iter([None, "other programs use 90%"])
    monkeypatch.setattr(doctor, "busy", lambda: next(answers))
    monkeypatch.setattr(devices, "metal_on_host", lambda: False)
    plant(monkeypatch, lambda y: y + mx.array(float("nan"), dtype=y.dtype))
    found = Doctor(True, PLENTY)()
    assert found.rows and all(r.note and r.ms is None for r in found.rows)


# The report, its files and the command.


def test_a_run_and_its_file(small, place, tmp_path, capsys):
    code = doctor.run(tmp_path / "out", seconds=PLENTY)
    captured = capsys.readouterr()
    assert code == 0 and "nothing wrong" in captured.out
    assert captured.err.startswith("relations, norms and pools: 2\nkernels: 8\n")
    found = doctor.read(tmp_path / "out" / "doctor.json")
    assert found["wrong"] == [] and found["unfinished"] is None
    assert found["device"]["name"] == place.name
    on_host = place.name == "metal-host"
    assert found["machine"]["on_host"] == on_host
    assert ("mean nothing" in captured.out) == on_host
    assert len(found["proofs"]) == 10 and bool(found["layers"]) != on_host


def test_a_wrong_kernel_makes_the_exit_code_1(small, tmp_path, capsys, monkeypatch):
    plant(monkeypatch, lambda y: mx.concatenate([y[1:], y[:1]]))
    assert doctor.run(tmp_path, quick=True, seconds=PLENTY) == 1
    assert "WRONG: " in capsys.readouterr().out


def test_the_macos_that_metal_compiles_for_is_shown():
    found = Doctor(True, PLENTY)
    for target in (None, 150000):
        found.machine["metal_target"] = target
        text = doctor.report(found.as_dict())
        said = f"__ENVIRONMENT_OS_VERSION_MIN_REQUIRED__ = {target}; " in text
        assert said == (target is not None)
    host.require()
    with host.recording():
        assert doctor.metal_target() == 260200


def test_a_kernel_that_hangs_ends_the_process(tmp_path, capsys):
    found = Doctor(seconds=0.1)
    found._start("layers", 0, 1, "the one that hangs")
    left = threading.Event()
    codes = []

    def leave(code):
        codes.append(code)
        left.set()

    path = tmp_path / "doctor.json"
    with doctor.hang_guard(found, path, leave):
        left.wait()
    assert codes == [doctor.HUNG]
    assert "in layers: the one that hangs" in capsys.readouterr().err
    assert doctor.read(path)["unfinished"] == "layers: the one that hangs"
    assert "Stopped in: layers" in doctor.report(doctor.read(path))
    with doctor.hang_guard(found, tmp_path / "x.json", codes.append, grace=100):
        pass
    assert codes == [doctor.HUNG] and not (tmp_path / "x.json").exists()


def test_the_report_is_written_while_it_runs(tmp_path):
    found = Doctor(True, PLENTY, tmp_path / "doctor.json")
    found._start("kernels", 0, 9, "vec4")
    assert doctor.read(found.path)["unfinished"] == "kernels: vec4"


def test_nothing_of_the_owner_is_in_the_report(small, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.getpass, "getuser", lambda: "jane.doe")
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "janes-mac.local")
    monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path / "jane.doe"))
    doctor._private_names.cache_clear()

    def fail(plan, *given):
        raise RuntimeError(
            "jane.doe on janes-mac: /Users/jane.doe/Secret plan/k.metal: and ~/x/y.h, "
            r"and C:\Users\jane.doe\z.cu"
        )

    monkeypatch.setattr(Plan, "__call__", fail)
    try:
        found = Doctor(True, PLENTY)().as_dict()
        text = json.dumps(found) + doctor.report(found)
    finally:
        doctor._private_names.cache_clear()
    assert found["wrong"]
    for private in ("jane", "doe.", "Users", "~/x", "Secret", str(tmp_path)):
        assert private not in text, private
    assert "k.metal" in text and "z.cu" in text


def test_scrubbing_leaves_other_texts():
    said = "shape (3, 4) is not (4, 3): a/b = 0.5; float16, 3x3x3, and/or"
    assert doctor.scrub(said) == said


def test_variables_that_change_times_are_in_the_report(monkeypatch):
    monkeypatch.setenv("MLX_LATTICE_THREADS", "1")
    monkeypatch.setenv("MLX_LATTICE_CACHE", "/home/jane")
    found = doctor.machine_facts(devices.current())["environment"]
    assert found["MLX_LATTICE_THREADS"] == "1" and "MLX_LATTICE_CACHE" not in found


def test_two_reports_are_compared(tmp_path, capsys):
    row = doctor.Row(
        "shell 64, 128 to 128, float16", FORWARD, "vec4", True, 10, 100, ms=2.0
    )
    a, b = Doctor(True, PLENTY), Doctor(True, PLENTY)
    a.rows, b.rows = [row], [replace(row, ms=1.0, note="off by 0.5")]
    a.machine = dict(a.machine, chip="Apple M3 Max")
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for found, path in zip((a, b), paths, strict=True):
        found.save(path)
    assert cli.main(["doctor", "--compare", *map(str, paths)]) == 0
    out = capsys.readouterr().out
    assert "chip: Apple M3 Max | " in out
    line = next(li for li in out.splitlines() if "vec4" in li)
    assert line.split()[-3:] == ["2.000", "1.000", "2.00"]
    assert "wrong in b only: forward of shell 64" in out


@pytest.mark.parametrize(
    "text, said",
    [
        ("{}", "is not a doctor.json of mlx_lattice"),
        ("nonsense", "is not a doctor.json"),
        ("[1]", "is not a doctor.json"),
        ('{"format": "mlx_lattice.doctor", "version": 99}', "has version 99"),
    ],
)
def test_other_files_are_refused(text, said, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert cli.main(["doctor", "--compare", str(path), str(path)]) == 2
    assert said in capsys.readouterr().err


def test_the_command(small, tmp_path, capsys):
    line = ["doctor", "--quick", "--seconds", "3600", "--out", str(tmp_path)]
    assert cli.main(line) == 0
    captured = capsys.readouterr()
    assert "nothing wrong" in captured.out and "kernels: " in captured.err
    assert (tmp_path / "doctor.json").exists()


@pytest.mark.parametrize(
    "options, said",
    (
        (["--seconds", "0"], "--seconds takes 1 to 3600"),
        (["--seconds", "-3"], "--seconds takes 1 to 3600"),
        (["--seconds", "1e9"], "--seconds takes 1 to 3600"),
        (["--seconds", "nan"], "--seconds takes 1 to 3600"),
        (["--keep", "--quick"], "--keep needs the times of every route"),
    ),
)
def test_senseless_options_are_refused(options, said, capsys):
    assert cli.main(["doctor", *options]) == 2
    assert said in capsys.readouterr().err
