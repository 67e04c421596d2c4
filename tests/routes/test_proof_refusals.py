"""A kernel that is wrong on a machine never serves there, and the net is right.

Kernels run on the CPU by metal/host. A mutant is the text of a kernel with a fault
that was seen on a chip, or could be: it must be refused, and the net be right.
"""

import json
import warnings

import mlx.core as mx
import pytest
from metal_checks import host
from mutants import (  # noqa: F401 (a fixture)
    FLOAT,
    HALF,
    LANES,
    assert_right,
    kept,
    layers,
    new_folder,
    on_metal,
)
from planted import counting

import mlx_lattice as ml
from mlx_lattice.problem import Plan
from mlx_lattice.routes import RouteError

host.require()

COLUMN_0 = (
    "sorted_implicit_gemm",
    "simdgroup_store(sums[i][n], to + 8 * (i % 2) * WIDTH + 8 * n, WIDTH);",
    "simdgroup_store(sums[i][0], to + 8 * (i % 2) * WIDTH + 8 * n, WIDTH);",
)
TAIL = (
    "sorted_implicit_gemm",
    "      if (at >= n || c >= width) continue;",
    "      if (at >= n - n % 8 || c >= width) continue;",
)
NOT_METAL = (
    "tensor_ops",
    "UNROLL for (int j = 0; j < 4; ++j) to[j]",
    "nonesuch; for (int j = 0; j < 4; ++j) to[j]",
)
RAISES = (
    "tensor_ops",
    "own.start();",
    "own.start(); if (lane < 7) simdgroup_barrier(mem_flags::mem_none);",
)
MUTANTS = {
    "another row of a lane": (HALF, LANES, "tensor_ops", "values are wrong"),
    "column 0 for all": (FLOAT, COLUMN_0, "sorted_implicit_gemm", "values are wrong"),
    "rows lost at a tail": (FLOAT, TAIL, "sorted_implicit_gemm", "values are wrong"),
    "does not compile": (HALF, NOT_METAL, "tensor_ops", "nonesuch"),
    "raises in mx.eval": (HALF, RAISES, "tensor_ops", "RuntimeError"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_refused_and_the_net_is_right(name, folder, monkeypatch):
    dtype, mutation, route, said = MUTANTS[name]
    x, layer, wanted = layers(dtype)
    with on_metal(mutation):
        counts = counting(monkeypatch)
        with pytest.warns(
            ml.LatticeWarning, match=f"route {route} is refused"
        ) as caught:
            y = layer(x).feats
            assert_right(y, wanted, dtype)
        assert sum("is refused" in str(each.message) for each in caught) == 1
        counts.clear()
        assert_right(layer(x).feats, wanted, dtype)
        assert route not in counts
        explained = ml.explain(x, layer)
        reasons = dict(explained.choice.rejected)
        assert said in reasons[route] and reasons[route] in str(explained)
        assert "failed its proof on this machine" in reasons[route]
        with ml.trace() as trace:
            layer(x)
        (record,) = trace.as_dict()["records"]
        assert {"route": route, "reason": reasons[route]} in record["rejected"]
        forced = pytest.raises(RouteError, match="failed its proof on this machine")
        with forced, ml.routes.only(route):
            layer(x)
        assert [why for why in kept(folder).values() if why] == [reasons[route]]


def test_it_can_be_turned_off(monkeypatch, folder):
    x, layer, wanted = layers(HALF)
    with on_metal(LANES), pytest.warns(ml.LatticeWarning, match="is refused"):
        mx.eval(layer(x).feats)
    with on_metal(LANES):
        fresh = ml.SparseTensor(x.coords, x.feats)
        with ml.proof(False):
            y = layer(fresh).feats
            assert ml.explain(fresh, layer).choice.route.name == "tensor_ops"
            with pytest.raises(AssertionError):
                assert_right(y, wanted, HALF)
        # A plan that is kept is not taken where kernels prove themselves.
        assert_right(layer(fresh).feats, wanted, HALF)
        with monkeypatch.context() as patched, ml.settings.block(proved=None):
            patched.setitem(ml.settings.environment, "MLX_LATTICE_PROOF", "0")
            assert ml.explain(fresh, layer).choice.route.name == "tensor_ops"
            patched.setitem(ml.settings.environment, "MLX_LATTICE_PROOF", "no")
            ml.settings.note_change()
            with pytest.raises(ValueError, match="MLX_LATTICE_PROOF must be 0 or 1"):
                mx.eval(layer(fresh).feats)


TRACES = {
    "compile": lambda run: mx.compile(run),
    "vjp": lambda run: lambda f: mx.vjp(run, [f], [mx.zeros((len(f), 40), HALF)])[0][0],
    "jvp": lambda run: lambda f: mx.jvp(run, [f], [mx.zeros_like(f)])[0][0],
    "checkpoint": lambda run: mx.checkpoint(run),
}


@pytest.mark.parametrize("mutation", (LANES, NOT_METAL), ids=("wrong", "no compile"))
@pytest.mark.parametrize("trace", TRACES)
def test_in_traces_of_mlx(trace, mutation):
    x, layer, wanted = layers(HALF)
    run = TRACES[trace](lambda feats: layer(x.replace(feats)).feats)
    with on_metal(mutation), pytest.warns(ml.LatticeWarning, match="is refused"):
        y = run(x.feats)
        mx.async_eval(y)
        assert_right(y, wanted, HALF)


def test_another_folder_is_seen_at_once(folder, tmp_path, monkeypatch):
    """What is explained there is what runs, of layers that ran before, too."""
    x, layer, wanted = layers(FLOAT)
    with on_metal():
        assert_right(layer(x).feats, wanted, FLOAT)
        route = ml.explain(x, layer).choice.route
    other = tmp_path / "other"
    (file,) = (folder / "proofs").glob("*.json")
    held = json.loads(file.read_text())
    held["entries"] = {k: [name, "made up"] for k, (name, _) in held["entries"].items()}
    (other / "proofs").mkdir(parents=True)
    (other / "proofs" / file.name).write_text(json.dumps(held))
    ran, bound = [], Plan.bound
    monkeypatch.setattr(
        Plan, "bound", lambda plan, *a: ran.append(plan.kernel) or bound(plan, *a)
    )
    with on_metal(), ml.cache(other):
        explained = ml.explain(x, layer).choice
        assert_right(layer(x).feats, wanted, FLOAT)
        assert explained.route != route and ran == [explained.plan.kernel]


def test_tuning_leaves_out_what_is_refused():
    x, layer, wanted = layers(HALF)
    with on_metal(LANES), ml.tune(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ml.LatticeWarning)
        with ml.tune(False):
            mx.eval(layer(x).feats)
        assert_right(layer(x).feats, wanted, HALF)
        choice = ml.explain(x, layer).choice
        assert "tensor_ops" not in dict(choice.measured)
        assert "failed its proof" in dict(choice.rejected)["tensor_ops"]
