"""The route table: complete, ordered, explained; forcing; problems; devices."""

import itertools
from dataclasses import replace

import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import devices, routes
from mlx_lattice.devices import BACKENDS, PROFILES
from mlx_lattice.dtypes import DTYPES
from mlx_lattice.problem import PASSES, Problem
from mlx_lattice.relation_form import KINDS
from mlx_lattice.routes import TABLE, RouteError, measure, select

pytestmark = pytest.mark.usefixtures("portable_only", "unforced")

# Name, passes, backends: the table of the design.
DECLARED = {
    "pointwise": (PASSES, BACKENDS),
    "relation_traversal": (PASSES, BACKENDS),
    "gather_gemm_scatter": (PASSES, BACKENDS),
    "dense_channel": (("forward", "input_grad"), ("metal",)),
    "cout16": (("forward",), ("metal",)),
    "vec4": (("forward",), ("metal",)),
    "fp16_gather": (("forward", "input_grad"), ("metal",)),
    "fp32_atomic": (("forward", "input_grad"), ("metal",)),
    "sorted_implicit_gemm": (PASSES, ("metal", "cuda")),
    "device_weights_gemm": (("forward", "input_grad"), ("metal",)),
    "tensor_ops": (PASSES, ("metal",)),
    "grouped_gemm": (("forward", "weight_grad"), BACKENDS),
    "quantized_traversal": (("forward",), BACKENDS),
    "quantized_sorted": (("forward",), BACKENDS),
    "quantized_tensor_ops": (("forward",), ("metal",)),
    "int8_tensor_ops": (("forward",), ("metal",)),
    "blocked_gather_gemm": (PASSES, ("cpu",)),
}


def problem(pass_="forward", **facts):
    facts = dict(c_in=64, c_out=64, n_in=50_000, dtype="float16") | facts
    return replace(Problem.forward(**facts), pass_=pass_)


def reasons(choice):
    return dict(choice.rejected) | dict(choice.below)


VIEWS = ("none", "edges", "out_in", "output_csr", "sorted", "kernel_csr")


@pytest.mark.parametrize("name", DECLARED)
def test_every_route_of_the_design_is_declared(name):
    route = routes.named(name)
    passes, backends = DECLARED[name]
    assert set(passes) <= set(route.passes)
    assert set(route.on) == set(backends)
    assert route.idea


def test_every_plan_is_of_its_row_and_names_the_view_that_it_reads():
    for name, device in itertools.product(routes.NAMES, PROFILES.values()):
        for pass_, table in itertools.product(routes.named(name).passes, (True, False)):
            for facts in (
                {},
                {"kernel_size": 1, "edges": 50_000},
                {"groups": 64},
                {"bits": 4, "group_size": 32},
                {"dtype": "float32", "deterministic": False, "c_in": 4},
                {"c_out": 16},
            ):
                p = problem(pass_, table=table, **{"edges": 400_000, **facts})
                route = routes.named(name)
                if route.refusal(p, device, forced=True):
                    continue
                plan = route.plan(p, device)
                assert plan.kernel == name and plan.view in VIEWS
                assert plan.problem == p and plan.backend in (device.backend, "mlx")
                assert table or plan.view not in ("out_in", "sorted")


@pytest.mark.parametrize(
    "facts, text",
    [
        ({"n_in": -1}, "n_in must be 0 to 2147483647.*got -1"),
        ({"kind": "forward", "n_out": -2}, "n_out must be 0 to 2147483647.*got -2"),
        ({"n_in": 2**31}, "numbered in int32; got 2147483648"),
        ({"kind": "submanifold", "n_out": 7}, "keeps its rows, .*got 50000 -> 7"),
        ({"kind": "submanifold", "stride": 2}, "its stride is 1; got 2"),
        ({"n_in": 5, "edges": 136}, "submanifold relation must be 0 to .* = 135"),
        ({"kind": "general", "edges": -1}, "general relation must be 0 or more"),
    ],
)
def test_facts_that_no_layer_has_are_refused(facts, text):
    with pytest.raises(ValueError, match=text):
        problem(**facts)


def test_facts_that_look_odd_and_are_none():
    repeated = problem(kind="general", n_in=5, edges=1000)
    assert ml.explain(repeated, device="m4").problem.edges == 1000
    assert problem(n_in=2**31 - 1, n_out=0).kind == "forward"
    assert problem(stride=2).kind == problem(n_out=7).kind == "forward"
    assert problem(edges=27 * 50_000).kind == problem().kind == "submanifold"


def test_blanks_in_the_names_of_routes():
    text = " forward = explicit_gemm , weight_grad =grouped_gemm"
    wanted = {"forward": "explicit_gemm", "weight_grad": "grouped_gemm"}
    assert routes.parse_only(text) == wanted


@pytest.mark.parametrize("given", (None, 5, ["vec4"]))
def test_what_is_no_text_names_no_route(given):
    with pytest.raises(TypeError, match="forced by its name; got"):
        routes.parse_only(given)


@pytest.mark.parametrize("text", (",", " ", ", ,"))
def test_text_that_names_no_route_is_refused(text, monkeypatch):
    with pytest.raises(ml.RouteError, match=f"forced by name, .*got '{text}'"):
        routes.parse_only(text)
    monkeypatch.setenv("MLX_LATTICE_ROUTE", text)
    with pytest.raises(ml.RouteError, match="forced by name"):
        ml.explain(problem(), device="m4")


def test_names_are_unique():
    assert len(set(routes.NAMES)) == len(TABLE)


@pytest.mark.parametrize("device", PROFILES)
def test_the_last_row_of_every_pass_always_admits(device):
    for pass_ in PASSES:
        last = [r for r in TABLE if pass_ in r.passes][-1]
        for dtype in DTYPES:
            for kind in KINDS:
                for extra in (
                    {},
                    {"table": False},
                    {"groups": 32},
                    {"bits": 4, "group_size": 32},
                    {"kernel_size": 1},
                    {"n_in": 0},
                ):
                    p = problem(pass_, dtype=dtype, kind=kind, **extra)
                    assert last.refusal(p, PROFILES[device]) is None
                    choice = select(p, device=device)
                    assert device in choice.device.name
                    assert choice.route.code(choice.device.backend, pass_)


def test_rows_that_nothing_runs_are_never_selected_and_say_so():
    for device in PROFILES.values():
        for pass_ in PASSES:
            for bits in (None, 4):
                choice = select(problem(pass_, bits=bits), device=device)
                assert choice.route.code(device.backend, pass_)
    fake = replace(routes.named("grouped_gemm"), mlx=None)
    reason = fake.refusal(problem("forward"), PROFILES["h200"])
    assert reason == "it has no forward pass on cuda"


def test_select_runs_nothing(monkeypatch):
    def fail(*args):
        raise AssertionError("select asked for a device")

    monkeypatch.setattr(devices, "current", fail)
    monkeypatch.setattr(mx, "eval", fail)
    assert select(problem(), device="m5-max").device.name == "m5-max"


def test_the_first_admissible_row_wins_and_every_other_row_has_a_reason():
    for device in ("m4-max", "m5-max", "h200", "cpu"):
        for pass_ in PASSES:
            p = problem(pass_)
            choice = select(p, device=device)
            at = TABLE.index(choice.route)
            assert [name for name, _ in choice.rejected] == list(routes.NAMES[:at])
            for name, reason in choice.rejected:
                assert reason == routes.named(name).refusal(p, PROFILES[device])
            assert [name for name, _ in choice.below] == [
                r.name for r in TABLE[at + 1 :] if pass_ in r.passes
            ]
            assert all(reason for _, reason in choice.below)


REFUSALS = [
    ("pointwise", {}, "m4", "the kernel is 3x3x3 (submanifold), not 1x1x1"),
    ("pointwise", {"kernel_size": 1, "bits": 4}, "m4", "the weight is packed int4"),
    ("quantized_sorted", {}, "m4", "the weight is float16, not packed"),
    ("quantized_sorted", {"bits": 8, "groups": 2}, "m4", "groups = 2, not 1"),
    ("tensor_ops", {}, "m4-max", "m4-max has no neural accelerators (M5 or later"),
    ("tensor_ops", {}, "h200", "it runs on metal, not on cuda"),
    ("tensor_ops", {"n_in": 100, "c_in": 16}, "m5", "N_out = 100 is below 240"),
    ("blocked_gather_gemm", {"table": False}, "cpu", "there is no neighbour table"),
    ("cout16", {}, "m4", "C_out = 64, not 16"),
    ("cout16", {"c_out": 16, "kernel_size": 2}, "m4", "K = 8 is below 16"),
    ("dense_channel", {"c_in": 3}, "m4", "C_in = 3 is not one of (16, 32, 64)"),
    ("vec4", {}, "m4", "features are float16, not float32"),
    ("vec4", {"dtype": "float32", "c_out": 6}, "m4", "C_out = 6 is not a multiple"),
    ("fp16_gather", {"dtype": "float32"}, "m4", "features are float32, not float16"),
    ("fp32_atomic", {"dtype": "float32"}, "m4", "not deterministic"),
    ("explicit_gemm", {}, "cpu", "C_in = 64 is above"),
    ("explicit_gemm", {"c_in": 4, "n_in": 10**7}, "cpu", "its gathered matrix would"),
    ("grouped_gemm", {"kernel_size": 1, "stride": 2}, "m4", "K = 1 is below"),
]


@pytest.mark.parametrize("name, facts, device, text", REFUSALS)
def test_refusals_say_why(name, facts, device, text):
    reason = routes.named(name).refusal(problem(**facts), PROFILES[device])
    assert text in reason


def test_a_missing_pass_is_a_reason():
    reason = routes.named("vec4").refusal(problem("weight_grad"), PROFILES["m4"])
    assert reason == "it has no weight_grad pass"


def test_choices_are_equal_by_value():
    assert select(problem(), device="m4") == select(problem(), device="m4")
    assert select(problem(), device="m4") != select(problem(), device="m3")
    assert hash(select(problem(), device="m4")) == hash(select(problem(), device="m4"))
    assert str(select(problem(), device="m4").route) in routes.NAMES


def test_a_1x1_kernel_is_a_matmul_where_there_are_no_kernels():
    for device in PROFILES:
        assert select(problem(kernel_size=1), device=device).route.name == "pointwise"


# Forcing.


def test_only_forces_a_bare_name_for_each_of_its_passes():
    with routes.only("gather_gemm_scatter"):
        for pass_ in PASSES:
            choice = select(problem(pass_, kernel_size=1), device="cpu")
            assert choice.route.name == "gather_gemm_scatter" and choice.forced
    assert select(problem(kernel_size=1), device="cpu").route.name == "pointwise"


def test_only_per_pass_and_nested():
    p = [problem(pass_, c_in=4, c_out=4) for pass_ in PASSES]
    with routes.only("forward=grouped_gemm,weight_grad=explicit_gemm"):
        names = [select(q, device="cpu").route.name for q in p]
        assert names[0] == "grouped_gemm" and names[2] == "explicit_gemm"
        assert not select(p[1], device="cpu").forced
        with routes.only("forward=gather_gemm_scatter"):
            names = [select(q, device="cpu").route.name for q in p]
            assert names[0] == "gather_gemm_scatter" and names[2] == "explicit_gemm"
        assert select(p[0], device="cpu").route.name == "grouped_gemm"


def test_forcing_passes_over_thresholds_but_not_over_needs():
    # Refused for its many channels only: forced, it runs.
    p = problem(n_in=1000)
    assert "C_in = 64" in reasons(select(p, device="cpu"))["explicit_gemm"]
    assert select(p, device="cpu", only="explicit_gemm").route.name == "explicit_gemm"
    with pytest.raises(RouteError, match=r"explicit_gemm was forced .* groups = 2"):
        select(problem(groups=2), device="cpu", only="explicit_gemm")


def test_forced_and_inadmissible_raises_with_the_reason():
    with (
        routes.only("forward=vec4"),
        pytest.raises(RouteError, match="forced .* float16, not float32"),
    ):
        select(problem(), device="m4")
    with pytest.raises(RouteError, match="it runs on metal, not on cpu"):
        select(problem(), device="cpu", only="vec4")
    with pytest.raises(RouteError, match="it has no weight_grad pass"):
        select(problem("weight_grad"), device="m4", only="vec4")


def test_forced_calls_raise_and_do_not_fall_back():
    x = ml.SparseTensor(mx.array([[0, 0, 0, 0], [0, 0, 0, 1]]), mx.ones((2, 4)))
    w = mx.ones((27, 4, 4))
    with routes.only("pointwise"), pytest.raises(RouteError, match="3x3x3"):
        ml.ops.subm_conv3d(x, w)


@pytest.mark.parametrize(
    "text, match",
    [
        ("nothing", "no route is named 'nothing'; there are native_pointwise"),
        ("forward=nothing", "no route is named 'nothing'"),
        ("weight_grad=vec4", "vec4 has no weight_grad pass; it has forward"),
        ("sideways=vec4", "vec4 has no 'sideways' pass"),
    ],
)
def test_bad_forcing_is_named(text, match, monkeypatch):
    with pytest.raises(RouteError, match=match), routes.only(text):
        pass
    monkeypatch.setenv("MLX_LATTICE_ROUTE", text)
    with pytest.raises(RouteError, match=match):
        select(problem(), device="cpu")


def test_the_environment_forces_and_a_block_goes_before_it(monkeypatch):
    monkeypatch.setenv("MLX_LATTICE_ROUTE", "forward=grouped_gemm")
    assert select(problem(), device="cpu").route.name == "grouped_gemm"
    assert not select(problem("weight_grad"), device="cpu").forced
    with routes.only("gather_gemm_scatter"):
        assert select(problem(), device="cpu").route.name == "gather_gemm_scatter"
    named = select(problem(n_in=1000), device="cpu", only="explicit_gemm")
    assert named.route.name == "explicit_gemm"


def test_rows_passed_over_by_force_say_so():
    choice = select(problem(kernel_size=1), device="cpu", only="gather_gemm_scatter")
    assert reasons(choice)["pointwise"] == "admissible; another route was forced"


def test_measured_choices_rank_what_can_run(monkeypatch):
    times = (("grouped_gemm", 1.0), ("gather_gemm_scatter", 2.0), ("pointwise", None))
    monkeypatch.setattr(measure, "measured", lambda *_: times)
    with ml.tune():
        choice = select(problem(), device="cpu")
    assert choice.route.name == "grouped_gemm"
    assert choice.measured == times[:2], "what cannot run is left out"
    assert "2 ms, grouped_gemm at 1 ms" in reasons(choice)["gather_gemm_scatter"]
    assert not select(problem(), device="cpu").measured


# Problems.


@pytest.mark.parametrize(
    "facts, error, match",
    [
        ({"pass_": "sideways"}, ValueError, "pass must be one of"),
        ({"dtype": "int32"}, TypeError, "float32, float16 or bfloat16; got int32"),
        ({"c_in": 0}, ValueError, "c_in must be a positive multiple"),
        ({"c_out": -4}, ValueError, "c_out must be a positive multiple"),
        ({"groups": 3}, ValueError, "multiple of groups = 3"),
    ],
)
def test_a_problem_checks_its_facts(facts, error, match):
    with pytest.raises(error, match=match):
        problem(**facts)


def test_operations_of_edges_that_nobody_counted():
    """A pointwise layer has one a row, whoever asks."""
    p = ml.Problem.forward(c_in=8, c_out=16, n_in=100, kernel_size=1)
    assert p.pointwise and p.edges is None
    assert p.useful_flops == ml.explain(p, device="m4").cost.useful_flops == 25_600
    assert problem(edges=None).useful_flops is None


def test_a_problem_counts_and_prints():
    p = problem(edges=1000, n_in=100, c_in=8, c_out=16)
    assert p.useful_flops == 2 * 1000 * 8 * 16
    assert p.itemsize == 2
    assert str(p) == (
        "submanifold 3x3x3, 8 -> 16, float16, 100 rows, 1,000 edges (10.0 a row)"
    )
    assert problem(kernel_size=1).pointwise and not problem(stride=2).pointwise
    grad = Problem.input_grad(c_in=3, c_out=4, n_in=10, n_out=5, kind="forward")
    assert (grad.pass_, grad.rows_written) == ("input_grad", 10)
    assert Problem.weight_grad(c_in=3, c_out=4, n_in=10).rows_written == 27


# Devices.


def metal(architecture="applegpu_g16s", name="Apple M4 Max", darwin="25.2.0"):
    info = {"architecture": architecture, "device_name": name}
    return devices.from_metal_info(info, darwin)


@pytest.mark.parametrize(
    "architecture, name, darwin, profile, accelerated",
    [
        ("applegpu_g13g", "Apple M1", "23.0.0", "m1", False),
        ("applegpu_g14s", "Apple M2 Max", "24.1.0", "m2-max", False),
        ("applegpu_g15d", "Apple M3 Ultra", "25.2.0", "m3-ultra", False),
        ("applegpu_g16s", "Apple M4 Max", "25.3.0", "m4-max", False),
        ("applegpu_g17g", "Apple M5", "25.2.0", "m5", True),
        ("applegpu_g17s", "Apple M5 Max", "25.10.0", "m5-max", True),
        ("applegpu_g17s", "Apple M5 Max", "27.0.0", "m5-max", True),
        ("applegpu_g17s", "Apple M5 Max", "25.1.0", "m5-max", False),
        ("applegpu_g17s", "Apple M5 Max", "24.6.0", "m5-max", False),
        ("applegpu_g17p", "Apple A19 Pro", "25.2.0", "m5", False),
        ("applegpu_g18p", "Apple A20", "25.2.0", "m5", True),
    ],
)
def test_metal_profiles(architecture, name, darwin, profile, accelerated):
    device = metal(architecture, name, darwin)
    assert (device.name, device.neural_accelerators) == (profile, accelerated)
    assert device.backend == "metal"


@pytest.mark.parametrize(
    "release, macos, accelerated",
    [
        ("25.2.0", "16.2", True),  # macOS 26.2, Python built against an older SDK
        ("25.2.0", "26.2", True),
        ("25.1.0", "16.1", False),
        ("24.6.0", "26.2", False),
    ],
)
def test_the_darwin_release_is_asked(monkeypatch, release, macos, accelerated):
    info = {"architecture": "applegpu_g17s", "device_name": "Apple M5 Max"}
    monkeypatch.setattr(devices.mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(devices.mx, "device_info", lambda device: info)
    monkeypatch.setattr(devices.platform, "release", lambda: release)
    monkeypatch.setattr(devices.platform, "mac_ver", lambda: (macos, ("",) * 3, ""))
    # The function behind the cache: what it finds here is of no real device.
    assert devices._gpu.__wrapped__().neural_accelerators == accelerated


@pytest.mark.parametrize(
    "info, darwin",
    [
        ({}, ""),
        ({"architecture": None, "device_name": None}, "25.2.0"),
        ({"architecture": "", "device_name": 7}, "not.a.version"),
        ({"architecture": "applegpu", "device_name": "Apple"}, "25"),
        ({"architecture": ["g17s"], "device_name": {}}, ""),
        ({"architecture": "applegpu_g17s"}, ""),
        ({"architecture": "applegpu_g17s"}, "beta"),
    ],
)
def test_garbage_gives_a_profile_without_accelerators(info, darwin):
    device = devices.from_metal_info(info, darwin)
    assert device.backend == "metal" and not device.neural_accelerators
    assert select(problem(), device=device).route.name


@pytest.mark.parametrize(
    "name, profile",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "cuda"),
        ("", "cuda"),
    ],
)
def test_cuda_profiles(name, profile):
    assert devices.from_cuda_name(name).name == profile


def test_an_unknown_profile_is_named():
    with pytest.raises(ValueError, match="no device profile is named 'm9'.*m5-max"):
        select(problem(), device="m9")


def test_thresholds_have_a_safe_row_and_name_routes():
    from mlx_lattice.routes import thresholds

    for (name, pass_), rows in thresholds.ROWS.items():
        assert pass_ in routes.named(name).passes
        assert "*" in rows
    for table in (
        thresholds.IM2COL_BYTES,
        thresholds.IM2COL_CHANNELS,
        thresholds.GROUPED_OFFSETS,
    ):
        assert thresholds.value(table, PROFILES["m3"]) == table.get("m3", table["*"])
    assert set(thresholds.TOLERANCE) == {*DTYPES, "tf32"}


class _WithoutRows(ml.Problem):
    """Facts of a layer; its rows and edges are not to be looked at."""

    def __getattribute__(self, name):
        assert name not in ("n_in", "n_out", "edges", "rows_written", "useful_flops")
        return super().__getattribute__(name)


@pytest.mark.parametrize("route", routes.TABLE, ids=str)
def test_needs_that_are_not_of_rows_do_not_look_at_them(route):
    for pass_, dtype, bits in itertools.product(
        route.passes, ("float32", "float16"), (None, 4)
    ):
        p = ml.Problem.forward(c_in=64, c_out=64, n_in=9, dtype=dtype, bits=bits)
        p = replace(p, pass_=pass_, layout="mlx").layer
        hidden = object.__new__(_WithoutRows)
        vars(hidden).update(vars(p))
        for device in devices.PROFILES.values():
            for need in (*route.needs, *route.pays):
                if not hasattr(need, "of_rows"):
                    assert need(hidden, device) == need(p, device)
