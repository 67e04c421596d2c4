"""A matrix kernel proves itself before its first launch; a wrong one never serves.

Kernels run on the CPU by metal/host. A mutant is the text of a kernel with a fault
that was seen on a chip, or could be: it must be refused, and the net be right.
"""

import json
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import cases
import mlx.core as mx
import numpy as np
import pytest
from metal_checks import host
from places import MetalHost
from planted import counting

import mlx_lattice as ml
from mlx_lattice import devices, machine, nn
from mlx_lattice.backends import gpu_kernel, signatures
from mlx_lattice.devices import METAL
from mlx_lattice.epilogue import EpilogueFacts
from mlx_lattice.problem import FORWARD, INPUT_GRAD, WEIGHT_GRAD
from mlx_lattice.routes import RouteError, named, proof, proof_results, selection
from mlx_lattice.routes.proof_problem import Trial

host.require()

COORDS = cases.geometry("surface", 3, 1500, 0)
METAL_HOST = MetalHost()


def forget():
    """Drop kernels, plans and what is known of a machine, as a new process would."""
    signatures.kept.cache_clear()
    selection._select.cache_clear()
    proof_results._of.cache_clear()
    machine._chip.cache_clear()


@pytest.fixture(autouse=True)
def a_new_machine(tmp_path):
    """Nothing is known of the kernels."""
    forget()
    with ml.cache(tmp_path), ml.proof():
        yield tmp_path
    forget()


@contextmanager
def on_metal(*mutations, chip=""):
    """Run on Metal's emulator, with texts of files replaced: (file, old, new)."""
    source = gpu_kernel.source

    def mutated(backend, file):
        text = source(backend, file)
        for name, old, new in mutations:
            if backend == METAL and file == f"{name}.metal":
                assert text.count(old) == 1, f"{file} has {text.count(old)} of {old}"
                text = text.replace(old, new)
        return text

    with ExitStack() as stack:
        stack.enter_context(METAL_HOST.inside(chip))
        stack.enter_context(patch.object(gpu_kernel, "source", mutated))
        forget()
        try:
            yield
        finally:
            forget()


def layers(dtype, c_in=24, c_out=40, **options):
    """Features, a layer, and what it makes of them by MLX operations."""
    mx.random.seed(0)
    coords = mx.array(COORDS)
    x = ml.SparseTensor(coords, mx.random.normal((len(COORDS), c_in)).astype(dtype))
    layer = nn.SubmConv3d(c_in, c_out, 3, **options)
    layer.set_dtype(dtype)
    with ml.backends.portable_only(), mx.stream(mx.cpu):
        plain = ml.SparseTensor(coords, x.feats.astype(mx.float32))
        twin = nn.SubmConv3d(c_in, c_out, 3, **options)
        twin.update(layer.parameters())
        twin.set_dtype(mx.float32)
        wanted = twin(plain).feats
        mx.eval(wanted)
    return x, layer, np.array(wanted)


def assert_right(y, wanted, dtype):
    y = np.array(y.astype(mx.float32))
    most = 1e-5 if dtype == mx.float32 else 2e-3
    assert np.linalg.norm(y - wanted) <= most * np.linalg.norm(wanted)


def kept(folder) -> dict:
    """What the file of the machine says, {kernel: why it is refused}."""
    (file,) = (folder / "proofs").iterdir()
    return dict(json.loads(file.read_text())["kernels"].values())


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
    ("tensor_ops", WEIGHT_GRAD, "float16", {}),
    ("quantized_sorted", FORWARD, "bfloat16", {"bits": 8, "group_size": 128}),
    ("quantized_sorted", FORWARD, "float16", {"bits": 4, "group_size": 32}),
    ("quantized_tensor_ops", FORWARD, "float16", {"bits": 4, "group_size": 64}),
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


LANES = (
    "tensor_ops",
    "row((lane / 4 & 4) | (lane / 2 & 3))",
    "row((lane / 4 & 4) | (lane & 3))",
)
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
    "      if (start + r >= n || c >= width) continue;",
    "      if (start + r >= n - n % 8 || c >= width) continue;",
)
LAST_CHANNELS = "matrix_tiles", "if (j < left) to.v[j] = from[j];", ""
NOT_METAL = (
    "tensor_ops",
    "UNROLL for (int j = 0; j < 4; ++j) to[4",
    "nonesuch; for (int j = 0; j < 4; ++j) to[4",
)  # noqa: E501
RAISES = (
    "tensor_ops",
    "METAL_FUNC void start(int lane) thread { own.clear(lane); }",
    "METAL_FUNC void start(int lane) thread { own.clear(lane); "
    "if (lane < 7) simdgroup_barrier(mem_flags::mem_none); }",
)
HALF, FLOAT = mx.float16, mx.float32
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
def test_a_mutant_is_refused_and_the_net_is_right(name, a_new_machine, monkeypatch):
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
        assert [why for why in kept(a_new_machine).values() if why] == [reasons[route]]


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


def test_a_second_process_reads_what_the_first_found(a_new_machine, monkeypatch):
    x, layer, wanted = layers(HALF)
    with on_metal(LANES), pytest.warns(RuntimeWarning, match="is refused"):
        mx.eval(layer(x).feats)
    before = kept(a_new_machine)
    assert None in before.values()  # the row that served
    monkeypatch.setattr(proof, "check", None)  # nothing is tried again
    with on_metal(LANES), warnings.catch_warnings():
        warnings.simplefilter("error")
        again = ml.SparseTensor(x.coords, x.feats)
        assert_right(layer(again).feats, wanted, HALF)
    assert kept(a_new_machine) == before


def test_another_text_proves_itself_anew():
    x, layer, wanted = layers(HALF)
    with on_metal(LANES), pytest.warns(RuntimeWarning, match="is refused"):
        mx.eval(layer(x).feats)
    with on_metal():
        again = ml.SparseTensor(x.coords, x.feats)
        assert_right(layer(again).feats, wanted, HALF)
        assert ml.explain(again, layer).choice.route.name == "tensor_ops"


def test_another_machine_proves_itself_anew(a_new_machine, monkeypatch):
    x, layer, _ = layers(HALF)
    with on_metal(LANES), pytest.warns(RuntimeWarning, match="is refused"):
        mx.eval(layer(x).feats)
    monkeypatch.setattr(mx, "__version__", "0.99.0")
    with on_metal():
        assert ml.explain(x, layer).choice.route.name == "tensor_ops"
    assert len(list((a_new_machine / "proofs").iterdir())) == 2


def test_it_can_be_turned_off(monkeypatch, a_new_machine):
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
                layer(fresh)
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


def test_in_a_compiled_step():
    x, layer, wanted = layers(HALF)

    def total(feats):
        return (layer(x.replace(feats)).feats.astype(FLOAT) * wanted).sum()

    with on_metal(LANES), pytest.warns(RuntimeWarning, match="is refused"):
        got = mx.compile(mx.value_and_grad(total))(x.feats)
        mx.eval(got)
    assert abs(got[0].item() / np.square(wanted).sum() - 1) < 1e-3


def test_prepare_proves_and_plans_anew(a_new_machine):
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


@pytest.mark.parametrize(
    "text", ("", "{", "[]", '{"version": 1}', '{"version": 1, "machine": 3}')
)
def test_a_broken_file_is_ignored_and_written_anew(text, a_new_machine):
    x, layer, wanted = layers(FLOAT)
    with on_metal():
        path = proof_results.current().path
        path.parent.mkdir()
        path.write_text(text)
        forget()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_right(layer(x).feats, wanted, FLOAT)
        warned = any("prove themselves again" in str(w.message) for w in caught)
        assert warned == (text != '{"version": 1, "machine": 3}')
    assert list(kept(a_new_machine).values()) == [None]


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "file").write_text("")
    with ml.cache(tmp_path / "file"), on_metal():
        x, layer, wanted = layers(FLOAT)
        with pytest.warns(RuntimeWarning, match="cannot be kept") as caught:
            assert_right(layer(x).feats, wanted, FLOAT)
            mx.eval(nn.SubmConv3d(24, 100, 3)(x).feats)  # another tile
        assert len(caught) == 1
        assert len(proof_results.current().kernels) > 1


def test_a_dead_device_says_nothing_of_a_kernel(monkeypatch, a_new_machine):
    x, layer, _ = layers(FLOAT)

    def dead(*_):
        raise RuntimeError("the device is gone")

    with on_metal():
        with monkeypatch.context() as patched:
            patched.setattr(Trial, "run", dead)
            patched.setattr(mx, "eval", dead)
            with pytest.raises(RuntimeError, match="the device is gone"):
                layer(x)
        assert not (a_new_machine / "proofs").exists()
        mx.eval(layer(x).feats)
