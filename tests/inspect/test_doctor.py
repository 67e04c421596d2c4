"""doctor: what it proves, times, writes, compares, and how it keeps to its time."""

import json
import re
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from places import leave_the_host

from metal import host
from mlx_lattice import cli, devices, routes
from mlx_lattice.backends import cpu_extension, first_use
from mlx_lattice.inspect.doctor import (
    clock,
    command,
    compare,
    examine,
    features,
    layers,
    machine,
    proofs,
    published,
    report,
    report_page,
    timings,
)
from mlx_lattice.inspect.doctor.examine import Examination
from mlx_lattice.inspect.doctor.layers import Build, Layer, Scene
from mlx_lattice.problem import FORWARD, PASSES
from mlx_lattice.routes import measure, proof_results
from mlx_lattice.routes.plan import Plan

SHELL = Scene("shell", 9)
SMALL = (
    Layer(SHELL, 16, 24, passes=PASSES, quick=True, published=0.5),
    Layer(SHELL, 16, 24, bits=4),
    Layer(SHELL, 16, 32, kind="inverse", dtype="float32", quick=True),
)


@pytest.fixture(autouse=True)
def nothing_kept(unforced, monkeypatch, tmp_path):
    # The command sets it; MLX reads it once, maybe here first.
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    if not devices.metal_on_host():  # whose compiled kernels are kept there
        monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path / "cache"))
    yield
    layers.forget()
    proofs._kept.clear()


@pytest.fixture(params=("here", "metal host"))
def place(request, monkeypatch):
    """The device that MLX runs on, and Metal's kernels on the CPU."""
    if request.param == "metal host":
        host.require()
        with monkeypatch.context() as patched:
            patched.setenv("MLX_LATTICE_METAL", "host")
            patched.setenv("MLX_LATTICE_CACHE", "")
            yield examine.on_here()
        leave_the_host()
        return
    yield examine.on_here()


@pytest.fixture
def small(monkeypatch):
    """A list that takes a second."""
    monkeypatch.setattr(layers, "LAYERS", SMALL)
    monkeypatch.setattr(layers, "BUILDS", (Build(SHELL, quick=True), Build(SHELL)))
    points = proofs.points
    monkeypatch.setattr(proofs, "points", lambda device: points(device)[:8])
    monkeypatch.setattr(features, "CHECKS", features.CHECKS[:2])


# What is proved.


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
        found = proofs.points(device)
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
    for point in proofs.points(device):
        with proofs.whole_tiles(point.whole):
            plan = point.route.plan(point.problem, device)
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


def test_alternating_points_begin_with_every_route():
    found = proofs.points(devices.profile("m5-max"))
    routes_ = {p.route.name for p in found}
    assert {p.route.name for p in found[:25]} == routes_


def test_kernels_are_proved(place):
    found = proofs.points(place)[: 25 if place.name == "metal-host" else None]
    done = list(proofs.proofs(place, told(found), clock.Budget(200)))
    assert proofs.summary(done)["wrong"] == 0 and len(done) == len(found) > 20
    assert [p for p in done if not p.good] == []
    assert any(p.error > 0 for p in done), "float64 is not what was compared with"


def told(points):
    return [(point, lambda: None) for point in points]


def a_point(pass_=FORWARD, dtype="float16"):
    device = devices.current()
    return next(
        p
        for p in proofs.points(device)
        if p.problem.pass_ == pass_
        and p.problem.dtype == dtype
        and not p.problem.pointwise
        and p.problem.groups == 1
    )


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(
    "plant",
    [
        lambda y: y.at[mx.array([3])].multiply(mx.array(0.0).astype(y.dtype)),
        lambda y: mx.concatenate([y[:, :1], y[:, 2:], y[:, 1:2]], axis=1),
        lambda y: y + mx.array(float("nan"), dtype=y.dtype),
        lambda y: mx.concatenate([y[1:], y[:1]]),
    ],
    ids=("a row is lost", "columns are moved", "NaN", "rows are moved"),
)
def test_a_wrong_kernel_is_found(plant, pass_, monkeypatch):
    point, called = a_point(pass_), Plan.__call__
    assert proofs.prove(point, devices.current()).good
    monkeypatch.setattr(
        Plan, "__call__", lambda plan, *given: plant(called(plan, *given))
    )
    proof = proofs.prove(point, devices.current())
    assert not proof.good and json.dumps(proof.as_dict(), allow_nan=False)


def test_a_kernel_that_does_not_compile_is_a_sentence(monkeypatch):
    def fail(plan, *given):
        raise RuntimeError("error in /Users/somebody/mlx/kernel.metal:3: no such type")

    monkeypatch.setattr(Plan, "__call__", fail)
    proof = proofs.prove(a_point(), devices.current())
    assert not proof.good and proof.error is None
    assert proof.note == "RuntimeError: error in <kernel.metal>:3: no such type"


def test_what_is_found_is_what_select_refuses(place, monkeypatch, tmp_path):
    """On a GPU, a matrix kernel that is wrong here is not taken here."""
    points = [p for p in proofs.points(place) if p.route.name == "grouped_gemm"]
    point = next((p for p in points if plan_of(p, place).proof), None)
    if point is None:
        pytest.skip("no kernel of this backend proves itself")
    monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path / "proofs"))
    monkeypatch.setenv("MLX_LATTICE_PROOF", "1")
    right, called = list(prove(point, place)), Plan.__call__
    assert right[0].good and not proof_results.current().refused
    monkeypatch.setattr(
        Plan, "__call__", lambda plan, *given: called(plan, *given) * 1.5
    )
    (wrong,) = prove(point, place)
    assert not wrong.good and wrong.note
    assert proof_results.current().refused.reason(plan_of(point, place).gpu)
    monkeypatch.setattr(Plan, "__call__", called)
    (again,) = prove(point, place)  # what is known does not count
    assert again.good and not proof_results.current().refused


def plan_of(point, device):
    with proofs.whole_tiles(point.whole):
        return point.route.plan(point.problem, device)


def prove(point, device):
    return proofs.proofs(device, told([point]), clock.Budget(60))


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("groups", (1, 4))
@pytest.mark.parametrize("kind", ("surface", "edges"))
@pytest.mark.parametrize("layout", ("mlx", "kernel_major"))
def test_the_reference_is_the_sum_over_edges(layout, kind, groups, pass_):
    p = proofs._problem(pass_, kind, (8, 12), "float32", groups=groups, layout=layout)
    relation = proofs.relation_of(kind)
    given = layers.operands(p, relation)
    with mx.stream(mx.cpu):
        found = proofs.by_edges(p, relation, *given[1:])
        mx.eval(found)
    assert found.dtype == mx.float64
    a, b = (np.array(v.astype(mx.float32)).astype(np.float64) for v in given[1:])
    if pass_ != "weight_grad" and layout == "mlx":
        b = b.transpose(1, 2, 0)
    y = np.zeros(found.shape if pass_ != "weight_grad" else (p.volume, 8 // groups, 12))
    inner, outer = 8 // groups, 12 // groups
    for i, o, k in np.array(relation.edges):
        for g in range(groups):
            x, z = slice(g * inner, (g + 1) * inner), slice(g * outer, (g + 1) * outer)
            if pass_ == "forward":
                y[o, z] += a[i, x] @ b[k, :, z]
            elif pass_ == "input_grad":
                y[i, x] += b[k, :, z] @ a[o, z]
            else:
                y[k, :, z] += np.outer(a[i, x], b[o, z])
    if pass_ == "weight_grad" and layout == "mlx":
        y = y.transpose(2, 0, 1)
    assert np.allclose(np.array(found), y, rtol=1e-12, atol=1e-9)


def test_relations_norms_and_pools_are_proved(place):
    done = list(features.proofs(clock.Budget(200)))
    assert len(done) == len(features.CHECKS) and all(p.good for p in done)


@pytest.mark.parametrize(
    "planted, text",
    [
        (lambda: [mx.array([1, 2])], None),
        (lambda: [mx.array([1])], "the result is (1,)"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_relation_is_found(planted, text):
    calls = iter((lambda: [mx.array([1, 3])], planted))
    proof = features._prove("x", "y", lambda: next(calls)())
    assert not proof.good
    assert text is None or text in proof.note


# Layers.


def test_every_route_of_a_layer_is_timed_and_checked(place):
    timer = timings.Timer(place, None, quick=False)
    rows = list(timer.time(SMALL[0], clock.Budget(300)))
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
    rows = list(timer.time(SMALL[2], clock.Budget(60)))
    assert len(rows) == 1 and rows[0].chosen and not timer.kept


def test_a_wrong_route_is_said(monkeypatch):
    device, real = devices.current(), timings._runner

    def runner(problem, route, device, given):
        call = real(problem, route, device, given)
        return (lambda: call() * 1.5) if route.name == "relation_traversal" else call

    monkeypatch.setattr(timings, "_runner", runner)
    timer = timings.Timer(device, None, quick=False)
    rows = list(timer.time(SMALL[2], clock.Budget(60)))
    wrong = {row.route for row in rows if not row.good}
    assert wrong == ({"relation_traversal"} & {row.route for row in rows}) != set()
    assert timer.kept[0].times["relation_traversal"] is None


def test_what_is_too_large_or_too_late_is_left_out_and_said():
    device = devices.current()
    large = Layer(Scene("thin", 2_300_000), 128, 512)
    found = list(timings.Timer(device, 8e9, False).time(large, clock.Budget(300)))
    assert len(found) == 1 and re.match(r"it takes \d+\.\d GB of 8", found[0].why)
    late = list(timings.Timer(device, None, False).time(SMALL[0], clock.Budget(0)))
    assert [s.why for s in late] == ["no time was left"]
    assert timings.built(Build(SHELL), clock.Budget(0), 0.1).why == "no time was left"
    slow = Layer(SHELL, 512, 512)
    timer = timings.Timer(replace(device, tflops=1e-6, half_tflops=1e-6), None, True)
    (found,) = timer.time(slow, clock.Budget(100))
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


# The run, its files and its text.


def test_a_run_and_its_files(small, place, tmp_path, capsys):
    code = command.run(tmp_path / "out", seconds=240, keep=False)
    out = capsys.readouterr().out
    assert code == 0 and "nothing wrong" in out
    found = json.loads((tmp_path / "out" / "doctor.json").read_text())
    assert found == compare.read(tmp_path / "out" / "doctor.json")
    assert (found["format"], found["version"]) == ("mlx_lattice.doctor", 1)
    assert found["wrong"] == [] and found["unfinished"] is None
    assert found["device"]["name"] == place.name
    assert found["machine"]["on_host"] == (place.name == "metal-host")
    assert ("mean nothing" in out) == (place.name == "metal-host")
    assert len(found["proofs"]["kernels"]) == 8 and found["layers"]
    assert {r["unit"] for r in found["rates"]} == {"TFLOP/s", "GB/s"}
    assert "of matmul" in out or place.backend == "cpu"
    pytest.importorskip("jinja2")
    page = (tmp_path / "out" / "doctor.html").read_text()
    assert not re.search(r"https?:|@import|url\(", page)
    for row in found["layers"]:
        assert row["layer"] in page and row["route"] in page


def test_a_wrong_kernel_makes_the_exit_code_1(small, tmp_path, capsys, monkeypatch):
    called = Plan.__call__
    monkeypatch.setattr(
        Plan, "__call__", lambda plan, *given: called(plan, *given) * 1.5
    )
    assert command.run(tmp_path, quick=True, seconds=60) == 1
    out = capsys.readouterr().out
    assert "WRONG: " in out and re.search("off float64 by 5.0e-01|its proof", out)
    assert "wrong" in (tmp_path / "doctor.html").read_text()


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
    timer.prepare(quick, clock.Budget(60))
    assert finished == [len(planned)] == [sum(len(la.passes) for la in quick)]
    assert {backend for backend, _ in planned} == {"cuda"}
    planned.clear()
    monkeypatch.setattr(proofs, "TOGETHER", 5)
    list(proofs.proofs(h200, told(proofs.points(h200)), clock.Budget(60)))
    assert len(finished) == 3  # five and three of eight
    assert len(planned) >= 16  # rehearsed, and proved


@pytest.mark.parametrize("seconds", (1.0, 3.0))
def test_it_takes_no_longer_than_it_may(seconds, tmp_path):
    """The whole list, far too long for it: what does not fit is left out."""
    if mx.cuda.is_available() and seconds < 3:
        pytest.skip("one kernel of CUDA takes seconds to compile")
    examination = Examination(quick=True, seconds=seconds)
    found = examination()
    most = 4 if mx.cuda.is_available() else 2
    assert found.seconds < most * seconds + 1, "one part cannot be cut"
    assert found.skipped or None in found.proofs
    said = str(found)
    assert "left out" in said
    for skip in found.skipped:
        assert skip.why


def test_nothing_of_the_owner_is_in_the_report(small, tmp_path, monkeypatch):
    monkeypatch.setattr(machine.getpass, "getuser", lambda: "jane.doe")
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "janes-mac.local")
    monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path / "jane.doe"))
    machine._private.cache_clear()

    def fail(plan, *given):
        raise RuntimeError(
            "jane.doe on janes-mac: /Users/jane.doe/Secret plan/k.metal: and ~/x/y.h, "
            r"and C:\Users\jane.doe\z.cu"
        )

    monkeypatch.setattr(Plan, "__call__", fail)
    try:
        found = Examination(quick=True, seconds=30)()
        text = json.dumps(found.as_dict()) + str(found)
        text += report_page.page(found.as_dict())
    finally:
        machine._private.cache_clear()
    assert found.wrong
    for private in ("jane", "doe", "Users", "~/x", "Secret", str(tmp_path)):
        assert private not in text, private
    assert "k.metal" in text and "z.cu" in text


def test_scrubbing_leaves_what_is_said():
    said = "shape (3, 4) is not (4, 3): a/b = 0.5; float16, 3x3x3, and/or"
    assert machine.scrubbed(said) == said


def test_variables_that_times_hang_on_are_said(monkeypatch):
    monkeypatch.setenv("MLX_LATTICE_THREADS", "1")
    monkeypatch.setenv("MLX_LATTICE_CACHE", "/home/jane")
    found = machine.facts(devices.current())["environment"]
    assert found["MLX_LATTICE_THREADS"] == "1" and "MLX_LATTICE_CACHE" not in found


def a_report(**facts):
    found = Examination(quick=True, seconds=10).report
    row = timings.Row(
        layer="shell 64, 128 to 128, float16",
        pass_="forward",
        route="sorted_implicit_gemm",
        chosen=True,
        plan="Metal",
        rows=10,
        edges=100,
        ms=2.0,
        first_ms=9.0,
        runs=9,
        tflops=3.0,
        error=1e-4,
        good=True,
        roofline_ms=0.5,
        predicted=(0.83, 0.97),
        published_ms=1.572,
    )
    found.layers = [replace(row, **facts)]
    found.rates = [
        examine.rates.Rate("matmul float16, 8 x 8", 6.0, "TFLOP/s", 14.2),
    ]
    found.device = devices.profile("m3-max")
    return found


def test_the_table_has_prediction_and_publication():
    line = next(li for li in str(a_report()).splitlines() if "shell 64" in li)
    for text in ("2.000", "50%", "0.830 to 0.970", "500 us", "1.572", "1e-04"):
        assert text in line.replace("0.5 ms", "500 us")
    assert "published" in report_page.page(a_report().as_dict())
    wrong = a_report(good=False, ms=None, error=None, tflops=None, note="Error: <b>")
    assert "WRONG failed" in str(wrong) and "Error: <b>" in str(wrong)
    assert "Error: &lt;b&gt;" in report_page.page(wrong.as_dict())


def test_two_reports_are_compared(tmp_path, capsys):
    a, b = a_report(), a_report(ms=1.0, good=False, error=0.5)
    a.machine = dict(a.machine, chip="Apple M3 Max")
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for found, path in zip((a, b), paths, strict=True):
        found.save(path)
    assert cli.main(["doctor", "--compare", *map(str, paths)]) == 0
    out = capsys.readouterr().out
    assert "chip: Apple M3 Max | " in out
    line = next(li for li in out.splitlines() if "sorted_implicit_gemm" in li)
    assert line.split()[-3:] == ["2.000", "1.000", "2.00"]
    assert "wrong in b only: forward of shell 64" in out
    assert "MLX matmul float16: 6 | 6 TFLOP/s" in out


@pytest.mark.parametrize(
    "text, said",
    [
        ("{}", "is no doctor.json of mlx_lattice"),
        ("nonsense", "is no doctor.json"),
        ("[1]", "is no doctor.json"),
        ('{"format": "mlx_lattice.doctor", "version": 99}', "has version 99"),
    ],
)
def test_other_files_are_refused(text, said, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert cli.main(["doctor", "--compare", str(path), str(path)]) == 2
    assert said in capsys.readouterr().err


def test_times_are_kept_as_tuning(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path))
    examination = Examination(seconds=60)
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


def test_a_kernel_that_hangs_is_given_up(tmp_path, capsys):
    examination = Examination(seconds=0.1)
    examination._tell("layers", 0, 1, "the one that hangs")
    left = threading.Event()
    codes = []

    def leave(code):
        codes.append(code)
        left.set()

    with command.given_up(examination, tmp_path / "doctor.json", leave):
        assert left.wait(20)
    assert codes == [command.HUNG]
    assert "in layers: the one that hangs" in capsys.readouterr().err
    found = compare.read(tmp_path / "doctor.json")
    assert found["unfinished"] == "layers: the one that hangs"
    assert "Stopped in: layers" in report.text_of(found)
    with command.given_up(examination, tmp_path / "x.json", codes.append, grace=100):
        pass
    assert codes == [command.HUNG] and not (tmp_path / "x.json").exists()


def test_the_report_is_written_while_it_runs(tmp_path):
    examination = SimpleNamespace(report=a_report())
    examination.report.unfinished = "proofs: vec4"
    heard = []
    path = tmp_path / "doctor.json"
    watch = command._saving(lambda *told: heard.append(told), examination, path)
    watch("proofs", 0, 9, "vec4")
    assert heard == [("proofs", 0, 9, "vec4")]
    assert compare.read(path)["unfinished"] == "proofs: vec4"


def test_progress_on_no_terminal_is_a_line_a_part(capsys):
    with command.progress() as watch:
        for at in range(3):
            watch("proofs", at, 3, "name")
        watch("layers", 0, 1, "name")
    assert capsys.readouterr().err == "proofs: 3\nlayers: 1\n"


def test_it_needs_neither_rich_nor_jinja2(small, tmp_path, monkeypatch, capsys):
    for name in ("rich", "rich.progress", "rich.console", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)
    assert command.run(tmp_path, quick=True, seconds=30) == 0
    assert "no page: writing a page needs jinja2" in capsys.readouterr().out
    assert (tmp_path / "doctor.json").exists()


def test_the_command(tmp_path):
    line = [sys.executable, "-m", "mlx_lattice.cli", "doctor", "--quick"]
    # A single kernel of CUDA may take seconds to compile.
    line += ["--seconds", "30" if mx.cuda.is_available() else "3"]
    line += ["--out", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "nothing wrong" in done.stdout and "proofs: " in done.stderr
    assert (tmp_path / "doctor.json").exists()


@pytest.mark.parametrize("seconds", ("0", "-3", "1e9", "nan"))
def test_senseless_seconds_are_refused(seconds, capsys):
    assert cli.main(["doctor", "--seconds", seconds]) == 2
    assert "--seconds takes 1 to 3600" in capsys.readouterr().err
