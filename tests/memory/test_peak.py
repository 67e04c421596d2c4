"""The predicted peak of a pass is what MLX's allocator then shows."""

import gc
import os
import subprocess
import sys

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import devices, nn
from mlx_lattice.backends import cpu_extension
from mlx_lattice.memory import cuda_graphs, flight
from mlx_lattice.memory.stages import boundary, evaluating

pytestmark = [
    pytest.mark.usefixtures("freed"),
    pytest.mark.skipif(
        cpu_extension.extension is None, reason="reads MLX's graph by the extension"
    ),
]
on_cpu = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="a GPU's peak depends on the host's speed"
)
natively = pytest.mark.skipif(
    mx.default_device() != mx.cpu or devices.metal_on_host(),
    reason="whole nets: the CPU's own kernels",
)


def scan(rows: int = 4000, channels: int = 4, dtype=mx.float32) -> ml.SparseTensor:
    """A tensor on a surface, two elements of the batch."""
    rng = np.random.default_rng(5)
    sites = np.unique(rng.integers(0, 40, (rows, 3)) // (1, 1, 8), axis=0)
    coords = np.insert(sites, 0, np.arange(len(sites)) % 2, axis=1)
    feats = mx.random.normal((len(coords), channels)).astype(dtype)
    return ml.SparseTensor(mx.array(coords.astype(np.int32)), feats)


def measured(run, repeats: int = 3) -> int:
    """The largest peak of some runs, evaluated."""
    peaks = []
    for _ in range(repeats):
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        mx.eval(run())
        mx.synchronize()
        peaks.append(mx.get_peak_memory())
    return max(peaks)


def agree(peak: ml.Peak, shown: int) -> None:
    """The bounds hold, but for small buffers, and the prediction is within 10%."""
    slack = (64 << 10) + shown // 50  # where in MLX's queue a pass begins
    assert peak.least - slack <= shown <= peak.bytes + slack, (peak, shown)
    assert abs(peak.bytes / shown - 1) < 0.1, (peak, shown)


@natively
@pytest.mark.parametrize("bits", (None, 8, 4))
@pytest.mark.parametrize("dtype", (mx.float32, mx.float16), ids=str)
def test_a_net(dtype, bits):
    net = ml.models.MinkUNet14(4, 8)
    net.set_dtype(dtype)
    if bits:
        mlx.nn.quantize(net, group_size=32, bits=bits)
    mx.eval(net.eval().parameters())
    x = scan(dtype=dtype)
    peak = ml.predict_peak(net, x)
    shown = measured(lambda: net(x).feats)
    agree(peak, shown)
    parts = peak.weights + peak.relations + peak.features + peak.other
    assert parts == peak.bytes and peak.features > 0 and peak.stages == 1
    assert peak.largest[0].bytes <= peak.features and peak.backend == "cpu"


@natively
@pytest.mark.parametrize("name", ("attention", "training"))
def test_other_nets(name):
    if name == "attention":
        sizes = {"channels": (16, 32), "num_head": (1, 2), "depths": (1, 1)}
        enc = {f"enc_{name}": size for name, size in sizes.items()}
        dec = {f"dec_{name}": size[:1] for name, size in sizes.items()}
        patches = {"enc_patch_size": (256, 256), "dec_patch_size": (256,)}
        net = ml.models.PTv3(4, 5, stride=(2,), **enc, **dec, **patches)
        net, x = net.eval(), scan()
    else:
        net, x = ml.models.MinkUNet14(4, 8), scan()
    mx.eval(net.parameters())
    before = [np.array(v) for _, v in mlx.utils.tree_flatten(net.parameters())]
    peak = ml.predict_peak(net, x)
    after = [np.array(v) for _, v in mlx.utils.tree_flatten(net.parameters())]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    agree(peak, measured(lambda: net(x).feats))


@natively
@pytest.mark.parametrize("name", ("input gradient", "step", "compiled"))
def test_functions_of_nets(name):
    """Their modules stay as they are, and what a gradient leaves out counts nowhere."""
    net, x = ml.models.MinkUNet14(4, 8), scan()
    mx.eval(net.train(name == "step").parameters())

    def loss(feats):
        return net(x.replace(feats=feats)).feats.square().sum()

    gradients = mlx.nn.value_and_grad(net, loss)
    function, given = {
        "input gradient": (lambda feats: mx.grad(loss)(feats), x.feats),
        "step": (lambda feats: gradients(feats), x.feats),
        "compiled": (ml.compile(net), x),
    }[name]
    gc.collect()  # of tests before: what is allocated at the pass counts
    peak = ml.predict_peak(function, given)
    assert peak.weights > 0
    mx.eval(net.state)  # running statistics have values
    agree(peak, measured(lambda: arrays(function(given)), repeats=1))


def arrays(tree) -> list[mx.array]:
    return [x for _, x in mlx.utils.tree_flatten(getattr(tree, "feats", tree))]


@on_cpu
def test_functions_of_arrays():
    """Buffers that are reused, shared, broadcast, copied, and held by the caller."""
    a, kept = mx.random.normal((1000, 300)), []

    def f(x):
        y = mx.exp(x) * 2 + 1  # in place after the first
        z = (y.T @ y).reshape(-1) + mx.arange(90_000) / 7
        w = mx.concatenate([y, x[::2, :].astype(mx.float16)], axis=0)
        kept.append(y)
        return mx.softmax(w, axis=-1).sum() + z.sum() + y[:, None, :].max()

    mx.eval(a)
    peak = ml.predict_peak(f, a)
    kept.clear()

    def run():
        kept.clear()
        return f(a)

    agree(peak, measured(run))


@on_cpu
def test_stages_are_evaluated_where_they_end():
    """With boundaries less is held, and what Python holds across them counts."""
    a = mx.random.normal((1000, 200))
    mx.eval(a)

    def f(x):
        first = x
        for step in range(6):
            x = mx.tanh(x @ mx.ones((200, 200)) * 0.01) + first
            boundary(x)
            if step == 2:
                first = x
        return x

    free = ml.predict_peak(f, a)
    agree(free, measured(lambda: f(a)))
    with evaluating():
        staged = ml.predict_peak(f, a)
        agree(staged, measured(lambda: f(a)))
    assert staged.stages == 7 and free.stages == 1
    assert staged.bytes <= free.bytes


@on_cpu
def test_parameters_that_the_pass_computes():
    """They were counted twice, so that less than nothing was left for the rest."""
    x = scan(400)
    net = nn.Sequential(nn.SubmConv3d(4, 32, 3), nn.SubmConv3d(32, 8, 3)).eval()
    lazy = ml.predict_peak(net, x)
    mx.eval(net.parameters())
    computed = ml.predict_peak(net, x)
    assert lazy.weights < computed.weights and lazy.features > computed.features
    for peak in (lazy, computed):
        assert peak.other >= x.feats.nbytes
        parts = peak.weights + peak.relations + peak.features + peak.other
        assert parts == peak.bytes


def test_values_of_features_are_not_read():
    x = scan(200)

    def prune(x):
        return x.feats[: int((x.feats[:, 0] > 0).sum().item())]

    with pytest.raises(ValueError, match="reads values of features"):
        ml.predict_peak(prune, x)
    agree_after = ml.predict_peak(lambda x: x.replace(feats=x.feats * 2), x)
    assert agree_after.bytes > 0


def test_without_the_extension_it_says_so(monkeypatch):
    monkeypatch.setattr(cpu_extension, "extension", None)
    monkeypatch.setattr(cpu_extension, "absence", "it is not installed")
    with pytest.raises(RuntimeError, match="it is not installed"):
        ml.predict_peak(lambda x: x, scan(100))


@on_cpu
def test_a_layer_on_any_backend():
    net, x = ml.nn.SubmConv3d(4, 16, 3), scan(500)
    mx.eval(net.parameters())
    peak = ml.predict_peak(net, x)
    agree(peak, measured(lambda: net(x).feats, repeats=1))


def test_it_prints_as_a_table():
    x = scan(500)
    net = ml.nn.SubmConv3d(4, 16, 3)
    text = str(ml.predict_peak(net, x))
    assert text.startswith("peak ") and "relations" in text and "SubmConv3d" in text


@pytest.mark.parametrize(
    ("backend", "nbytes", "counted"),
    (
        ("cpu", 5, 5),
        ("metal", 16384, 16384),
        ("metal", 16385, 32768),
        ("metal", 100, 100),
        ("cuda", 4, 8),
        ("cuda", 100, 128),
        ("cuda", 128, 128),
        ("cuda", 20000, 32768),
        ("cuda", 0, 0),
    ),
)
def test_allocators_round(backend, nbytes, counted):
    assert flight.Flight(backend, 10, None).rounded(nbytes) == counted


@pytest.mark.parametrize("given", cuda_graphs.SETTINGS)
def test_the_user_decides_how_graphs_of_cuda_are_kept(given):
    told = {given: "50"}
    cuda_graphs.tell_mlx(told, "linux")
    assert told == cuda_graphs.SETTINGS | {given: "50"}
    metal = {}
    cuda_graphs.tell_mlx(metal, "darwin")
    assert metal == {}, "Metal keeps MLX's own"


TOLD = """
import os, sys
import mlx.core as mx
import mlx_lattice
from mlx_lattice.memory.cuda_graphs import SETTINGS
print(*(os.environ.get(name) for name in SETTINGS))
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal keeps MLX's own")
def test_importing_the_package_tells_mlx_how_graphs_of_cuda_are_kept():
    first, second = cuda_graphs.SETTINGS
    without = {k: v for k, v in os.environ.items() if k not in cuda_graphs.SETTINGS}
    run = [sys.executable, "-c", TOLD]
    for given, found in (({}, "10 0"), ({first: "50", second: "1"}, "50 1")):
        said = subprocess.check_output(run, env=without | given, text=True)
        assert said.strip() == found
