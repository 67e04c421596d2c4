"""The route table: complete, ordered, explained."""

import mlx.core as mx
import pytest
from problems import problem, reasons

import mlx_lattice as ml
from mlx_lattice import devices, routes
from mlx_lattice.checks import DTYPES
from mlx_lattice.devices import PROFILES
from mlx_lattice.problem import KINDS, PASSES
from mlx_lattice.routes import TABLE, RouteError, select

pytestmark = pytest.mark.usefixtures("portable_only", "unforced")


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
    ("quantized_sorted", {}, "m4", "the weight is float16, not packed"),
    ("quantized_sorted", {"bits": 8, "groups": 2}, "m4", "groups = 2, not 1"),
    ("tensor_ops", {}, "h200", "it runs on metal, not on cuda"),
    ("blocked_gather_gemm", {"table": False}, "cpu", "there is no neighbour table"),
    ("dense_channel", {"c_in": 3}, "m4", "C_in = 3 is not one of (16, 32, 64)"),
    ("vec4", {"dtype": "float32", "c_out": 6}, "m4", "C_out = 6 is not a multiple"),
    ("fp32_atomic", {"dtype": "float32"}, "m4", "not deterministic"),
    ("explicit_gemm", {}, "cpu", "C_in = 64 is above"),
    ("grouped_gemm", {"kernel_size": 1, "stride": 2}, "m4", "K = 1 is below"),
]


@pytest.mark.parametrize("name, facts, device, text", REFUSALS)
def test_refusals_say_why(name, facts, device, text):
    reason = routes.named(name).refusal(problem(**facts), PROFILES[device])
    assert text in reason


# Routes that are forced: by a block, by the environment; and never in silence.


@pytest.mark.parametrize("given", (None, 5, ["vec4"]))
def test_what_is_no_text_names_no_route(given):
    with pytest.raises(TypeError, match="forced by its name; got"):
        routes.parse_only(given)


@pytest.mark.parametrize("text", (",", " ", ", ,"))
def test_text_that_names_no_route_is_refused(text, monkeypatch):
    with pytest.raises(ml.RouteError, match=f"forced by name, .*got '{text}'"):
        routes.parse_only(text)
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_ROUTE", text)
    with pytest.raises(ml.RouteError, match="forced by name"):
        ml.explain(problem(), device="m4")


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
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_ROUTE", text)
    with pytest.raises(RouteError, match=match):
        select(problem(), device="cpu")


def test_the_environment_forces_and_a_block_goes_before_it(monkeypatch):
    monkeypatch.setitem(
        ml.settings.environment, "MLX_LATTICE_ROUTE", "forward=grouped_gemm"
    )
    assert select(problem(), device="cpu").route.name == "grouped_gemm"
    assert not select(problem("weight_grad"), device="cpu").forced
    with routes.only("gather_gemm_scatter"):
        assert select(problem(), device="cpu").route.name == "gather_gemm_scatter"
    named = select(problem(n_in=1000), device="cpu", only="explicit_gemm")
    assert named.route.name == "explicit_gemm"


def test_rows_passed_over_by_force_say_so():
    choice = select(problem(kernel_size=1), device="cpu", only="gather_gemm_scatter")
    assert reasons(choice)["pointwise"] == "admissible; another route was forced"
