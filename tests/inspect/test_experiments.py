"""The experiments of the doctor: they run where they can, and compute what is right."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from conftest import KINDS, pair
from doctor_cases import PLENTY
from metal_checks import checked, host
from places import leave_the_host

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.inspect.doctor import (
    chip_experiments,
    experiments,
    kernel_experiments,
    lab,
    layers,
    machine,
    rates,
    report,
    variants,
)
from mlx_lattice.inspect.doctor.clock import Budget
from mlx_lattice.inspect.doctor.examine import Examination, on_here
from mlx_lattice.inspect.doctor.lab import Lab
from mlx_lattice.inspect.doctor.variants import Variant
from mlx_lattice.routes import measure, measured_tiles, thresholds

host.require()


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    """The suite's other process does not count as a busy machine."""
    monkeypatch.setattr(machine, "busy", lambda: None)


VARIANTS = (
    Variant(),
    Variant(buffers=1),
    Variant(depth=16),
    Variant(buffers=1, depth=16),
    Variant(skips=False),
    Variant(in_float=True),
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(lab, "HOST_SHELLS", dict.fromkeys((16, 32, 64, 128), 5))
    monkeypatch.setattr(lab, "HOST_SIZES", (60,))
    yield
    layers.forget()


@pytest.fixture
def on_host(monkeypatch):
    if devices.current().backend != "cpu":
        pytest.skip("Metal's emulation is tested on machines without a GPU")
    with monkeypatch.context() as patched:
        patched.setenv("MLX_LATTICE_METAL", "host")
        yield
    leave_the_host()


# The variants of the tiles.


def expected(relation, x, w):
    """By the edges, in float64."""
    x, w = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (x, w))
    y = np.zeros((relation.n_out, w.shape[2]))
    for i, o, k in np.array(relation.edges):
        y[o] += x[i] @ w[k]
    return y


# Rows and channels of the output. Of the variants, dtypes change one: it is in float.
TILED = [(v, *of, "float16") for v in VARIANTS for of in ((1, 64), (200, 64))]
TILED += [
    (variant, 70, 128, dtype)
    for variant in (VARIANTS[0], VARIANTS[-1])
    for dtype in ("float16", "bfloat16")
]


@pytest.mark.parametrize("variant, rows, c_y, dtype", TILED, ids=str)
def test_a_variant_of_the_tiles(variant, rows, c_y, dtype):
    relation = pair(KINDS[0], n=rows)[0]
    kind, c_x = getattr(mx, dtype), 64
    x = mx.random.normal((relation.n_in, c_x), key=mx.random.key(1)).astype(kind)
    w = mx.random.normal((27, c_x, c_y), key=mx.random.key(2)).astype(kind)
    right = expected(relation, x, w)
    for all_live in (False, True):
        y = checked(variant.run, relation, x, w, all_live=all_live)
        off = np.linalg.norm(np.array(y.astype(mx.float32)) - right)
        assert off <= thresholds.TOLERANCE[dtype] * np.linalg.norm(right)


def test_strided_relations_too():
    relation = pair(KINDS[2], n=150)[0]
    x = mx.random.normal((relation.n_in, 64), key=mx.random.key(1)).astype(mx.float16)
    w = mx.random.normal((relation.volume, 64, 64), key=mx.random.key(2))
    w = w.astype(mx.float16)
    right = expected(relation, x, w)
    mx.eval(relation.out_in)  # built by kernels that are none of these
    y = checked(Variant().run, relation, x, w)
    off = np.linalg.norm(np.array(y.astype(mx.float32)) - right)
    assert off <= 2e-3 * np.linalg.norm(right)


@pytest.mark.parametrize("how", (64, 32, 0))
@pytest.mark.parametrize("stride", (1, 2, 8))
def test_divisions_are_floor_divisions(stride, how):
    coords = mx.array([-(2**31), -9, -8, -7, -1, 0, 1, 7, 8, 9, 2**31 - 1, 5])
    y = checked(variants.divided, coords.astype(mx.int32), stride, how)
    assert y.tolist() == [value // stride for value in coords.tolist()]


# All of them.

NUMBERS = sorted(range(1, 13))
ON_EVERY_BACKEND = {1, 4, 9, 10, 11}


def test_there_are_twelve():
    assert sorted(e[0] for e in experiments.EXPERIMENTS) == NUMBERS
    everywhere = {e[0] for e in experiments.EXPERIMENTS if not e[1]}
    assert everywhere == ON_EVERY_BACKEND


def test_they_run_on_the_host_and_are_right(on_host):
    found = Examination(seconds=PLENTY).experiment()
    assert sorted(e.number for e in found.experiments) == NUMBERS
    for e in found.experiments:
        assert e.wrong is None, (e.number, e.wrong)
        assert e.rows and e.result and len(e.columns) == len(e.rows[0])
        assert all(len(row) == len(e.columns) for row in e.rows)
        if e.number != 2:
            assert e.result == lab.ON_HOST
    text = str(found)
    assert "mean nothing" in text and "2. registers" in text
    pytest.importorskip("jinja2")
    from mlx_lattice.inspect.doctor.report_page import page

    assert "weights from the device" in page(found.as_dict())


def test_elsewhere_those_of_metal_are_not_asked(monkeypatch):
    if devices.current().backend == "metal":
        pytest.skip("it asks them all on Metal")
    monkeypatch.setattr(Lab, "shell", lambda self, resolution: shell())
    monkeypatch.setattr(Lab, "channels", (64, 128))
    monkeypatch.setattr(
        chip_experiments, "Scene", lambda name, size: layers.Scene(name, 90)
    )
    found = Examination(seconds=PLENTY).experiment().experiments
    for e in found:
        assert e.wrong is None
        assert (e.result == experiments.ON_METAL) == (e.number not in ON_EVERY_BACKEND)
        assert bool(e.rows) == (e.number in ON_EVERY_BACKEND)


def shell():
    return layers.relation_of(layers.Scene("shell", 6), "submanifold")


def alone(monkeypatch, number):
    wanted = [e for e in experiments.EXPERIMENTS if e[0] == number]
    monkeypatch.setattr(experiments, "EXPERIMENTS", tuple(wanted))


def run_one(number, seconds=PLENTY, monkeypatch=None):
    place = on_here()
    room = Lab(place, devices.metal_on_host(), Budget(seconds))
    alone(monkeypatch, number)
    (found,) = experiments.experiments(room, lambda at, title: None)
    return found


def test_a_wrong_variant_is_said(on_host, monkeypatch):
    run = Variant.run

    def planted(self, *given, **options):
        y = run(self, *given, **options)
        return y * 2 if self.buffers == 1 else y

    monkeypatch.setattr(Variant, "run", planted)
    found = run_one(3, monkeypatch=monkeypatch)
    assert "one of 32 is off by 1.0e+00" in found.wrong
    said = report.experiment_text(found.as_dict())
    assert "-> WRONG: " in said


@pytest.fixture
def fast(on_host, monkeypatch, tmp_path):
    """Return what has the doctor ask one experiment, where one of its calls wins."""
    taken = Lab.compared

    def of(number, winner):
        def compared(self, calls, expected):
            taken(self, calls, expected)
            return [0.5 if name == winner else 1.0 for name, _ in calls]

        monkeypatch.setattr(Lab, "compared", compared)
        alone(monkeypatch, number)

    some = {n: s for n, s in measured_tiles.SHAPES.items() if "of 64" in n}
    monkeypatch.setattr(rates, "rates", lambda *given: [])
    monkeypatch.setattr(kernel_experiments, "SHAPES", some)
    monkeypatch.setattr(kernel_experiments, "LAYOUTS", ("mlx",))
    monkeypatch.setattr(Lab, "channels", (64,))
    with ml.cache(tmp_path):  # compiled kernels stay where they are
        yield of


@pytest.fixture
def direct_is_faster(fast):
    fast(6, kernel_experiments.DIRECT)


def kept_choice(wrong=None):
    """Experiment 6 with its times kept; the choice then, and its explanation."""
    examination = Examination(seconds=PLENTY)
    (found,) = examination.experiment().experiments
    assert found.wrong is None or wrong in found.wrong
    with pytest.raises(ValueError, match="mean nothing"):
        examination.keep()
    examination.report.machine["on_host"] = False
    assert examination.keep() == len(found.rows) == 1
    problem, device = examination.kept[0].problem, examination.device
    before = ml.select(problem, device=device)
    reason = dict(before.rejected + before.below)[kernel_experiments.DIRECT]
    assert "not yet measured on a Mac" in reason and not before.measured
    with ml.tune():
        return ml.select(problem, device=device)


def test_the_faster_weights_are_kept_as_tuning(direct_is_faster):
    choice = kept_choice()
    assert choice.route.name == kernel_experiments.DIRECT
    assert choice.measured[0] == (kernel_experiments.DIRECT, 0.5)
    assert choice.plan.gpu.symbol == kernel_experiments.DIRECT
    reasons = dict(choice.rejected) | dict(choice.below)
    slower = "measured at 1 ms, device_weights_gemm at 0.5 ms"
    assert reasons[kernel_experiments.ROUTE] == slower


def test_a_wrong_result_is_not_kept_as_faster(direct_is_faster, monkeypatch):
    plan = Lab.plan

    def planted(self, problem, route):
        found = plan(self, problem, route)
        if route != kernel_experiments.DIRECT:
            return found
        return lambda *given: found(*given) * 2

    monkeypatch.setattr(Lab, "plan", planted)
    choice = kept_choice("device_weights_gemm is off by 1.0e+00")
    assert choice.route.name != kernel_experiments.DIRECT
    assert (kernel_experiments.DIRECT, None) in choice.measured


# Tiles: the experiment, which of its calls wins, and what is kept then.
TILES = (
    (12, "two of 64 x 32", "sorted_implicit_gemm", {"SIDE": 32, "GROUPS": 2}),
    (7, "32 rows", "tensor_ops", {"HEIGHT": 32}),
)


def tiles_kept():
    """The examination of an experiment whose tiles are kept, and its problem."""
    examination = Examination(seconds=PLENTY)
    (found,) = examination.experiment().experiments
    examination.report.machine["on_host"] = False
    examination.keep()
    return examination, examination.kept[0].problem, found


def template(choice):
    return dict(choice.plan.gpu.template)


@pytest.mark.parametrize("number, winner, route, expected", TILES)
def test_the_fastest_tile_is_kept_as_tuning(fast, number, winner, route, expected):
    fast(number, winner)
    examination, problem, found = tiles_kept()
    assert found.wrong is None
    device = examination.device
    if route == "sorted_implicit_gemm":  # M1 to M4
        device = replace(device, neural_accelerators=False)
    usual = ml.select(problem, device=device)
    assert usual.route.name == route and "measured" not in usual.plan.variant
    with ml.tune():
        choice = ml.select(problem, device=device)
        said = str(ml.explain(problem, device=device))
    assert expected.items() <= template(choice).items()
    assert choice.route == usual.route and not choice.measured
    assert "fastest when measured here" in said and "fastest" not in str(usual)
    others = replace(problem, n_in=9000, n_out=9000), replace(problem, dtype="float32")
    with ml.tune():
        for other in others:
            assert "fastest" not in str(ml.select(other, device=device))


def test_a_kept_tile_is_what_a_layer_launches(fast, monkeypatch):
    monkeypatch.setattr(measure, "record", lambda *given: None)  # the table decides
    relation = layers.relation_of(layers.Scene("shell", 5), "submanifold")
    problem = ml.Problem.of("forward", relation, 64, 64, mx.float16, table=True)
    pair_ = measured_tiles.SHAPES["two of 64 x 32"]
    measured_tiles.keep(problem, devices.current(), "shape", {pair_: 1.0})
    _, x, w = layers.operands(problem, relation)
    results, kernels = [], []
    for tuned in (False, True):
        with ml.tune(tuned), ml.trace() as t, host.recording(checked=True) as record:
            results.append(ml.conv(x, w, relation))
            mx.eval(results[-1])
        (choice,) = (r.choice for r in t.records)
        assert choice.route.name == "sorted_implicit_gemm"
        assert ("fastest when measured here" in str(choice)) == tuned
        ran = [r for r in record.report.launches if choice.route.name in r.kernel]
        kernels.append({r.kernel for r in ran})
    assert mx.array_equal(*results), "the same sums in the same order"
    (usual,), (tuned,) = kernels
    assert "_32_4_64_1_" in usual and "_32_2_64_1_" in tuned


def test_a_wrong_tile_is_not_kept(fast, monkeypatch):
    wrong = "16 rows"
    plan = Lab.plan

    def planted(self, problem, route, tile=0):
        found = plan(self, problem, route, tile)
        if f"{tile} rows" != wrong:
            return found
        return lambda *given: found(*given) * 2

    fast(7, wrong)
    monkeypatch.setattr(Lab, "plan", planted)
    examination, problem, found = tiles_kept()
    assert f"{wrong} is off by 1.0e+00" in found.wrong
    with ml.tune():
        choice = ml.select(problem, device=examination.device)
    assert template(choice)["HEIGHT"] == 64
    nothing = dict.fromkeys(measured_tiles.HEIGHTS)
    facts = problem, devices.profile("m5"), "height", nothing
    assert measured_tiles.keep(*facts) is None
    assert measured_tiles.own(*facts[:2]) == ()


@pytest.mark.parametrize(
    "change, said",
    (
        ({"version": 2}, "was written by"),
        ({"mlx": "0.1"}, "was written by"),
        ({"entries": {"a": {"shape": [4, 32, 48, 1]}}}, "not a tile that kernels"),
        ({"entries": {"a": {"height": True}}}, "not a tile that kernels"),
        ({"entries": {"a": {"depth": 32}}}, "not a tile that kernels"),
    ),
)
def test_tiles_of_an_unknown_file_are_refused(change, said, monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path))
    p, m5 = ml.Problem.forward(c_in=64, c_out=64, n_in=100), devices.profile("m5")
    kept = measured_tiles.keep(p, m5, "height", {64: 2.0, 32: 1.0, 16: None})
    assert measured_tiles.own(p, m5) == (("tensor_ops", kept),) == (("tensor_ops", 32),)
    file = tmp_path / "tiles.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.warns(UserWarning, match=said):
        assert measured_tiles.own(p, m5) == ()


def test_what_raises_is_a_sentence(on_host, monkeypatch):
    def fail(*given, **options):
        raise RuntimeError("no such kernel in /Users/me/x.metal")

    monkeypatch.setattr(Variant, "run", fail)
    found = run_one(3, monkeypatch=monkeypatch)
    assert found.wrong == "RuntimeError: no such kernel in <x.metal>"


def test_without_time_nothing_runs(monkeypatch):
    found = run_one(10, seconds=0.0, monkeypatch=monkeypatch)
    assert found.result == "No time was left for all of it." and found.wrong is None


@pytest.mark.parametrize(
    "message, most",
    [
        ("Maximum threads per threadgroup is 832 but requested 2048 for k.", 832),
        (
            "Thread group size (2048) is greater than  the maximum allowed threadgroup "
            "size (640).",
            640,
        ),
        ("something else", None),
    ],
)
def test_the_threads_of_a_pipeline_are_read(message, most):
    def call(threads):
        assert threads == 2048
        raise ValueError(message)

    assert kernel_experiments._most_threads(call) == most
    assert kernel_experiments._most_threads(lambda threads: mx.zeros((1,))) is None


def test_splits_are_as_asked():
    m1 = devices.profile("m1")
    p = ml.Problem.forward(c_in=64, c_out=64, n_in=1000, dtype="float16")
    usual = ml.select(p, device=m1, only="sorted_implicit_gemm").plan.splits
    for count in (1, 2, 8):
        with lab.splits_of(count):
            plan = ml.routes.named("sorted_implicit_gemm").plan(p, m1)
        assert plan.splits == count
    plan = ml.routes.named("sorted_implicit_gemm").plan(p, m1)
    assert plan.splits == usual, "the tables are as they were"
