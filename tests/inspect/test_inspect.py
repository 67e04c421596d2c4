"""explain: the Choice that runs, and its cost."""

import cases
import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import devices, nn, ops, routes
from mlx_lattice.problem import PASSES, Problem
from mlx_lattice.routes import launch

pytestmark = pytest.mark.usefixtures("unforced")


def tensor(channels=8, n=200, dtype=mx.float32, seed=0):
    coords = cases.in_grid((8, 8, 8), n, seed)
    feats = cases.features(len(coords), channels, seed).astype(np.float32)
    return ml.SparseTensor(mx.array(coords), mx.array(feats).astype(dtype))


def weight(*shape, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(1)).astype(dtype)


def launches(function):
    seen = []
    with launch.observe(seen.append):
        mx.eval(function())
    return seen


def executed(call, x):
    """The Choice of each pass of the real call and its gradients."""

    def loss(feats):
        return call(x.replace(feats)).feats.square().sum()

    return {
        seen.problem.pass_: seen for seen in launches(lambda: mx.grad(loss)(x.feats))
    }


MODULES = [
    nn.SubmConv3d(8, 16, 3),
    nn.SubmConv3d(8, 4, 1),
    nn.SubmConv3d(8, 16, 3, groups=4),
    nn.Conv3d(8, 16, 2, stride=2),
    nn.Conv3d(8, 16, 3, stride=2, padding=1, support="reach"),
    nn.GenerativeConvTranspose3d(8, 4, 2, 2),
]


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("module", MODULES, ids=str)
def test_the_choice_explained_is_the_one_executed(module, pass_):
    x = tensor()
    explained = ml.explain(x, module, pass_=pass_)
    seen = executed(module, x)[pass_]
    assert explained.choice == seen.choice
    assert explained.choice == ml.select(seen.problem)
    assert explained.choice == ml.select(explained.problem)
    assert explained.facts.edges == seen.relation.n_edges
    assert explained.layer == type(module).__name__


@pytest.mark.parametrize(
    "kind, shape, arguments, function",
    [
        ("submanifold", (16, 3, 3, 3, 8), {"kernel_size": 3}, ops.subm_conv3d),
        ("submanifold", (27, 8, 16), {"dilation": 2}, ops.subm_conv3d),
        ("forward", (8, 8, 4), {"kernel_size": 2, "stride": 2}, ops.conv3d),
        ("transposed", (27, 8, 4), {"kernel_size": 3, "stride": 1}, "T"),
        ("generative", (8, 8, 4), {"kernel_size": 2}, ops.generative_conv_transpose3d),
    ],
)
def test_weights_are_explained_like_the_functions(kind, shape, arguments, function):
    function = ops.conv_transpose3d if function == "T" else function
    x, w = tensor(), weight(*shape)
    for pass_ in PASSES:
        explained = ml.explain(x, w, kind=kind, pass_=pass_, **arguments)
        seen = executed(lambda t: function(t, w, **arguments), x)[pass_]
        assert explained.choice == seen.choice
        assert explained.problem.kind == seen.problem.kind == kind
        assert explained.problem.pass_ == pass_


def test_target_needs_its_rows():
    x, w = tensor(), weight(27, 8, 4)
    explained = ml.explain(x, w, kind="target", coordinates=x.coords[:50])
    assert (explained.problem.kind, explained.problem.n_out) == ("target", 50)
    module = ml.explain(x, nn.Conv3d(8, 4, 3), coordinates=x.coords[:50])
    assert (module.problem.kind, module.problem.n_out) == ("target", 50)
    with pytest.raises(ValueError, match="target.*coordinates="):
        ml.explain(x, w, kind="target")


def test_a_problem_needs_no_device(monkeypatch):
    def fail():
        raise AssertionError("explain asked for the device")

    monkeypatch.setattr(devices, "current", fail)
    problem = Problem.forward(c_in=64, c_out=64, n_in=500_000, dtype="float16")
    explained = ml.explain(problem, device="m5-max")
    assert explained.choice == ml.select(problem, device="m5-max")
    assert explained.problem is problem
    assert ml.explain(problem, device="h200", pass_="weight_grad").problem.pass_ == (
        "weight_grad"
    )


def test_only_and_blocks_are_obeyed():
    x, w = tensor(), weight(27, 8, 16)
    for pass_ in PASSES:
        explained = ml.explain(x, w, pass_=pass_, only="grouped_gemm")
        assert explained.choice.forced
        assert explained.choice.route.name == "grouped_gemm"
    with routes.only("gather_gemm_scatter"):
        assert (
            ml.explain(x, w).choice
            == executed(lambda t: ops.subm_conv3d(t, w), x)["forward"].choice
        )
    with pytest.raises(ml.RouteError, match="not 1x1x1"):
        ml.explain(x, w, only="pointwise")


def test_it_prints_the_table():
    problem = Problem.forward(
        c_in=64, c_out=64, n_in=503_214, dtype="float16", edges=8_421_377
    )
    lines = str(ml.explain(problem, device="m4-max")).splitlines()
    assert lines[0] == (
        "forward: submanifold 3x3x3, 64 -> 64, float16, 503,214 rows, 8,421,377 edges "
        "(16.7 a row), on m4-max"
    )
    assert lines[1].startswith("  route    ")
    assert lines[2] == "  reads    sorted"
    assert lines[3].startswith("  cost     69 GFLOP useful")
    assert "183 MB must move (explicit GEMM: 2.34 GB)" in lines[3]
    assert "compute-bound (estimated)" in lines[3]
    assert lines[4].startswith("  refused  native_pointwise ")
    text = "\n".join(lines)
    assert "m4-max has no neural accelerators (M5 or later, macOS 26.2)" in text
    assert "\n  below    " in text
    for name in routes.NAMES:
        assert name in text


@pytest.mark.parametrize("pass_", ("forward", "input_grad"))
@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("kind", ("submanifold", "target"))
def test_a_problem_described_is_that_of_a_relation(kind, size, pass_):
    x = tensor()
    if kind == "target":
        target = x.manager.insert(x.coords[: len(x) // 2])
        relation = x.manager.target_kernel_relation(x.key, target, kernel_size=size)
    else:
        relation = x.manager.submanifold_kernel_relation(x.key, kernel_size=size)
    made = Problem.of(pass_, relation, 8, 8, mx.float32)
    rows = {"n_in": relation.n_in, "n_out": relation.n_out}
    facts = {"kind": kind, "kernel_size": size, "c_in": 8, "c_out": 8, **rows}
    described = getattr(Problem, pass_)(**facts, edges=made.edges)
    assert described == made
    assert ml.select(described).route == ml.select(made).route


def test_bad_arguments_are_sentences():
    x, w = tensor(), weight(27, 8, 16)
    problem = Problem.forward(c_in=4, c_out=4, n_in=10)
    square = weight(27, 8, 8)

    def twice(t):
        return ops.subm_conv3d(ops.subm_conv3d(t, square), square)

    for error, match, call in [
        (ValueError, "pass_ must be one of", lambda: ml.explain(x, w, pass_="back")),
        (ValueError, "kind must be one of", lambda: ml.explain(x, w, kind="odd")),
        (ValueError, "explained alone", lambda: ml.explain(problem, w)),
        (ValueError, "a module or a weight", lambda: ml.explain(x)),
        (TypeError, "SparseTensor or a Problem", lambda: ml.explain(w, w)),
        (TypeError, "groups", lambda: ml.explain(x, MODULES[0], groups=2)),
        (ValueError, "no device profile", lambda: ml.explain(x, w, device="m9")),
        (ValueError, "runs 0 forward", lambda: ml.explain(x, lambda t: t)),
        (
            ValueError,
            r"runs 2 forward contractions.*with ml\.trace\(net\)",
            lambda: ml.explain(x, twice),
        ),
    ]:
        with pytest.raises(error, match=match):
            call()
