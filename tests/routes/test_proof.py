"""A matrix kernel proves itself before its first launch; a wrong one never serves.

Kernels run on the CPU by metal/host. A mutant is the text of a kernel with a fault
that was seen on a chip, or could be: it must be refused, and the net be right.
"""

import json
import warnings
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from metal_checks import host
from mutants import (
    FLOAT,
    HALF,
    LANES,
    a_new_machine,
    assert_right,
    kept,
    layers,
    on_metal,
)
from planted import counting

import mlx_lattice as ml
from mlx_lattice import devices, nn
from mlx_lattice.epilogue import EpilogueFacts
from mlx_lattice.integer_facts import ARRAYS, IntegerFacts
from mlx_lattice.problem import FORWARD, INPUT_GRAD, WEIGHT_GRAD
from mlx_lattice.routes import RouteError, named, proof
from mlx_lattice.routes.plan import Plan

host.require()


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """Nothing is known of the kernels."""
    with a_new_machine(tmp_path) as made:
        yield made


INTEGERS = IntegerFacts(ARRAYS[:-1], "relu")
RIGHT = (
    ("sorted_implicit_gemm", FORWARD, "float32", {}),
    ("sorted_implicit_gemm", INPUT_GRAD, "bfloat16", {"layout": "mlx"}),
    ("sorted_implicit_gemm", FORWARD, "float16", {"c_in": 2048}),  # in slices
    ("dense_channel", FORWARD, "float16", {"c_in": 32, "c_out": 64}),
    ("dense_channel", INPUT_GRAD, "float32", {"c_in": 32, "c_out": 64}),
    ("cout16", FORWARD, "bfloat16", {"c_out": 16}),
    ("grouped_gemm", WEIGHT_GRAD, "float32", {}),
    ("tensor_ops", FORWARD, "bfloat16", {"c_out": 100}),
    ("tensor_ops", INPUT_GRAD, "float16", {}),
    ("tensor_ops", FORWARD, "float16", {"c_in": 64, "c_out": 96, "n_in": 90_000}),
    ("tensor_ops", WEIGHT_GRAD, "float16", {}),
    ("tensor_ops", WEIGHT_GRAD, "bfloat16", {"c_in": 200, "c_out": 64}),
    ("quantized_sorted", FORWARD, "bfloat16", {"bits": 8, "group_size": 128}),
    ("quantized_sorted", FORWARD, "float16", {"bits": 4, "group_size": 32}),
    ("quantized_tensor_ops", FORWARD, "float16", {"bits": 4, "group_size": 64}),
    (
        "quantized_tensor_ops",
        FORWARD,
        "bfloat16",
        {"bits": 8, "group_size": 32, "c_in": 64},
    ),
    ("int8_tensor_ops", FORWARD, "float16", {"bits": 8, "integer": INTEGERS}),
    (
        "int8_tensor_ops",
        FORWARD,
        "float32",
        {"bits": 4, "group_size": 32, "integer": IntegerFacts(), "c_in": 128},
    ),
    ("quantized_sorted", FORWARD, "bfloat16", {"bits": 8, "integer": INTEGERS}),
)


@pytest.mark.parametrize("chip", ("whole", "split"))
@pytest.mark.parametrize(
    "route, pass_, dtype, facts", RIGHT, ids=lambda v: v if isinstance(v, str) else ""
)
def test_right_kernels_pass(route, pass_, dtype, facts, chip):
    facts = {"c_in": 24, "c_out": 40, "n_in": 3000, "edges": 20_000} | facts
    p = replace(ml.Problem.forward(dtype=dtype, **facts), pass_=pass_)
    with on_metal(chip=chip):
        plan = named(route).plan(p, devices.current())
        assert proof.check(plan, pass_ == FORWARD) is None


# (file, old, new), and the plan whose kernel has it.
FAULTS = {
    "a matrix that is not turned": (
        (
            "grouped_gemm",
            "Load::template load<true>(",
            "Load::template load<false>(",
        ),
        ("grouped_gemm", WEIGHT_GRAD, "float16", {}),
    ),
    "the last edge of an offset": (
        ("grouped_gemm", "e < ALL && edge < left &&", "e < ALL && edge < left - 1 &&"),
        ("grouped_gemm", WEIGHT_GRAD, "float32", {}),
    ),
    "the other half of dy": (
        (
            "tensor_ops_weight_grad",
            "side + 2 * place.column, 4);",
            "side + 2 * place.column, 0);",
        ),
        ("tensor_ops", WEIGHT_GRAD, "bfloat16", {}),
    ),
    "weights that are not turned": (
        ("dense_channel", "load<TRANSPOSED>(b, weights", "load<false>(b, weights"),
        ("dense_channel", INPUT_GRAD, "float16", {"c_in": 32, "c_out": 64}),
    ),
    "another offset's rows": (
        (
            "dense_channel",
            "from = owns ? neighbours[k] : -1;",
            "from = owns ? neighbours[k == 26 ? 25 : k] : -1;",
        ),
        ("cout16", FORWARD, "float16", {"c_out": 16}),
    ),
    "rows that are skipped": (
        (
            "matrix_tiles",
            "bits |= (each[b] >> (k % 32) & 1u) << b;",
            "bits |= (b == 7 ? 0u : each[b] >> (k % 32) & 1u) << b;",
        ),
        ("sorted_implicit_gemm", FORWARD, "float16", {"n_in": 90_000}),
    ),
    "a step lost between splits": (
        (
            "sorted_implicit_gemm",
            "steps = split_start(total, split + 1, splits) - from;",
            "steps = split_start(total, split + 1, splits) - from - split % 2;",
        ),
        ("sorted_implicit_gemm", FORWARD, "float32", {"n_in": 300, "edges": 8000}),
    ),
    "another group's scale": (
        (
            "quantized_sorted",
            "to.scale = scales[share + Index(first.at / GROUP)];",
            "to.scale = scales[share];",
        ),
        ("quantized_sorted", FORWARD, "float16", {"bits": 4, "group_size": 32}),
    ),
    "channels of another lane": (
        (
            "tensor_ops",
            "return line / 4 * (4 * COUNT) + line % 4;",
            "return line / 4 * 4 + line % 4;",
        ),
        ("tensor_ops", FORWARD, "float16", {"c_in": 64}),
    ),
    "the second word of packed weights": (
        (
            "quantized_tensor_ops",
            "packed.words[word + f / 2] >> (16 * (f % 2))",
            "packed.words[word] >> (16 * (f % 2))",
        ),
        (
            "quantized_tensor_ops",
            FORWARD,
            "float16",
            {"bits": 4, "group_size": 64, "c_in": 64, "n_in": 300, "edges": 2000},
        ),
    ),
    "another four of a word of int8": (
        ("tensor_ops", "(words.v[f] >> (8 * j))", "(words.v[f] >> (8 * (j & 2)))"),
        ("int8_tensor_ops", FORWARD, "float16", {"bits": 8, "integer": INTEGERS}),
    ),
    "weights without a sign": (
        (
            "quantized_sorted_int8",
            "(word << (24 - 8 * j)) >> 24",
            "(word >> 8 * j & 255)",
        ),
        ("quantized_sorted", FORWARD, "float16", {"bits": 8, "integer": INTEGERS}),
    ),
    "no residual scale": (
        ("integer_epilogue", "more = more * residual_scale[0];", ""),
        ("int8_tensor_ops", FORWARD, "float16", {"bits": 8, "integer": INTEGERS}),
    ),
    "sums in half": (
        (
            "tensor_ops",
            "UNROLL for (int i = 0; i < 16; ++i) sums[i] = result[i];",
            "UNROLL for (int i = 0; i < 16; ++i) sums[i] = float(half(result[i]));",
        ),
        ("tensor_ops", FORWARD, "float16", {"n_in": 300, "edges": 2000}),
    ),
    "products of 11 bits": (
        (
            "matrix_tiles",
            "if (left >= 4) {\n    to = *(const device Four<T>*)(from);",
            "if (left >= 4) {\n    for (int j = 0; j < 4; ++j)\n"
            "      to.v[j] = as_type<T>(as_type<uint>(from[j]) & 0xffffe000u);",
        ),
        ("sorted_implicit_gemm", FORWARD, "float32", {}),
    ),
    "no mean": (
        ("epilogue", "if (mean) v -= float(mean[c + j]);", ""),
        (
            "sorted_implicit_gemm",
            FORWARD,
            "float16",
            {"n_in": 90_000, "epilogue": EpilogueFacts(("mean", "var"), "relu")},
        ),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_anywhere_shows(name):
    mutation, (route, pass_, dtype, facts) = FAULTS[name]
    facts = {"c_in": 24, "c_out": 40, "n_in": 3000, "edges": 20_000} | facts
    p = replace(ml.Problem.forward(dtype=dtype, **facts), pass_=pass_)
    with on_metal(mutation):
        plan = named(route).plan(p, devices.current())
        assert "values are wrong" in proof.check(plan)


def test_an_epilogue_is_part_of_the_proof():
    there = "shift", "scale", "mean", "var", "residual"
    with on_metal(chip="whole"):
        for activation, dtype in (("relu", "float16"), ("gelu", "bfloat16")):
            after = EpilogueFacts(there, activation, "BatchNorm", 1e-5)
            p = ml.Problem.forward(
                c_in=24, c_out=40, n_in=9000, dtype=dtype, epilogue=after
            )
            plan = named("sorted_implicit_gemm").plan(p, devices.current())
            assert plan.epilogue == "in the kernel"
            assert proof.check(plan) is None


BLOCKS = (
    "tensor_ops",
    "column(((lane / 4 & 2) | (lane & 1)) * 4)",
    "column((lane / 8) * 4)",
)
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
LAST_CHANNELS = "matrix_tiles", "if (j < left) to.v[j] = from[j];", ""
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
    "another column of a lane": (HALF, BLOCKS, "tensor_ops", "values are wrong"),
    "column 0 for all": (FLOAT, COLUMN_0, "sorted_implicit_gemm", "values are wrong"),
    "rows lost at a tail": (FLOAT, TAIL, "sorted_implicit_gemm", "values are wrong"),
    "channels lost at a tail": (
        FLOAT,
        LAST_CHANNELS,
        "sorted_implicit_gemm",
        "values are wrong",
    ),
    "does not compile": (HALF, NOT_METAL, "tensor_ops", "nonesuch"),
    "raises in mx.eval": (HALF, RAISES, "tensor_ops", "RuntimeError"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_refused_and_the_net_is_right(name, folder, monkeypatch):
    dtype, mutation, route, said = MUTANTS[name]
    x, layer, wanted = layers(dtype)
    with on_metal(mutation):
        counts = counting(monkeypatch)
        with pytest.warns(RuntimeWarning, match=f"route {route} is refused") as caught:
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


@pytest.mark.parametrize("name", MUTANTS)
def test_gradients_are_right_too(name):
    """Of a mutant in what the passes share, each pass is refused apart."""
    dtype, mutation, _, _ = MUTANTS[name]
    x, layer, _ = layers(dtype)

    def loss(feats, weight):
        layer.weight = weight
        return layer(x.replace(feats)).feats.astype(mx.float32).square().sum()

    def gradients():
        return mx.grad(loss, (0, 1))(x.feats, weight)

    weight = layer.weight
    with ml.backends.portable_only():
        wanted = gradients()
        mx.eval(wanted)
    with on_metal(mutation), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        x = ml.SparseTensor(x.coords, x.feats)
        for got, right in zip(gradients(), wanted, strict=True):
            assert_right(got, np.array(right.astype(mx.float32)), HALF)


def test_it_can_be_turned_off(monkeypatch, folder):
    x, layer, wanted = layers(HALF)
    with on_metal(LANES), pytest.warns(RuntimeWarning, match="is refused"):
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
        with monkeypatch.context() as patched:
            token = ml.settings.proved.set(None)
            patched.setenv("MLX_LATTICE_PROOF", "0")
            assert ml.explain(fresh, layer).choice.route.name == "tensor_ops"
            patched.setenv("MLX_LATTICE_PROOF", "no")
            with pytest.raises(ValueError, match="MLX_LATTICE_PROOF must be 0 or 1"):
                mx.eval(layer(fresh).feats)
            ml.settings.proved.reset(token)


def test_a_kernel_is_tried_once_and_calls_ask_no_more(monkeypatch):
    x, layer, _ = layers(FLOAT)
    tried, asked = [], []
    check, prove = proof.check, proof.prove
    monkeypatch.setattr(proof, "check", lambda *a: tried.append(a) or check(*a))
    monkeypatch.setattr(proof, "prove", lambda *a: asked.append(a) or prove(*a))
    with on_metal():
        for _ in range(3):
            mx.eval(layer(x).feats)
        assert len(tried) == len(asked) == 1
        again = ml.SparseTensor(x.coords, x.feats)  # another relation
        mx.eval(layer(again).feats)
        assert len(tried) == 1 and len(asked) == 2


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
    with on_metal(mutation), pytest.warns(RuntimeWarning, match="is refused"):
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
    held["kernels"] = {k: [name, "made up"] for k, (name, _) in held["kernels"].items()}
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


def test_in_a_compiled_step():
    x, layer, wanted = layers(HALF)

    def total(feats):
        return (layer(x.replace(feats)).feats.astype(FLOAT) * wanted).sum()

    with on_metal(LANES), pytest.warns(RuntimeWarning, match="is refused"):
        got = mx.compile(mx.value_and_grad(total))(x.feats)
        mx.eval(got)
    assert abs(got[0].item() / np.square(wanted).sum() - 1) < 1e-3


def test_prepare_proves_and_plans_anew(folder):
    mx.random.seed(0)
    x, *_ = layers(HALF)
    net = nn.Sequential(nn.SubmConv3d(24, 40, 3), nn.ReLU(), nn.SubmConv3d(40, 24, 3))
    net.set_dtype(HALF)
    with on_metal(LANES):
        with pytest.warns(RuntimeWarning, match="tensor_ops is refused"):
            made = ml.prepare(net, x, training=True)
        assert made.kernels and not any("tensor_ops" in k for k in made.kernels)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mx.eval(mx.grad(lambda f: net(x.replace(f)).feats.sum())(x.feats))


def test_tuning_leaves_out_what_is_refused():
    x, layer, wanted = layers(HALF)
    with on_metal(LANES), ml.tune(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with ml.tune(False):
            mx.eval(layer(x).feats)
        assert_right(layer(x).feats, wanted, HALF)
        choice = ml.explain(x, layer).choice
        assert "tensor_ops" not in dict(choice.measured)
        assert "failed its proof" in dict(choice.rejected)["tensor_ops"]


def test_profiles_of_other_machines_refuse_nothing():
    x, layer, _ = layers(HALF)
    with on_metal(LANES), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mx.eval(layer(x).feats)
        assert ml.explain(x, layer, device="m5").choice.route.name == "tensor_ops"
