"""prepare(): relations and views are there before the net runs, and nothing changes."""

from functools import partial
from importlib import import_module
from threading import Event, Thread, current_thread

import cases
import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
import pytest
from conftest import bits
from cuda_recorder import recording
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import devices, models, nn, ops, registry
from mlx_lattice.compiled import reached
from mlx_lattice.models import MinkUNet14, MinkUNetTorchSparse, SparseResNet14
from mlx_lattice.nn.layers import ModuleCache
from mlx_lattice.prepare import ModuleSnapshot

preparation = import_module("mlx_lattice.prepare")  # ml.prepare is the function

NETS = {
    "minkunet": lambda: MinkUNet14(3, 5),
    "two stems": lambda: MinkUNetTorchSparse(3, 5, width=0.25),
    "resnet": lambda: SparseResNet14(3, 5),
    "pools": lambda: nn.Sequential(
        nn.Conv3d(3, 8, 3, stride=(1, 2, 2)), nn.BatchNorm(8), nn.MaxPool3d(2)
    ),
    "strides": lambda: nn.Sequential(
        nn.Conv3d(3, 8, 2, stride=2), nn.Conv3d(8, 8, 3, stride=3, padding=1)
    ),
}


def tensor(name="surface", n=400, channels=3):
    coords = mx.array(cases.geometry(name, 3, n)) if n else mx.zeros((0, 4), mx.int32)
    return ml.SparseTensor(coords, mx.random.normal((len(coords), channels)))


def views(x):
    """What was built, by relation and name; facts of problems are no views.

    On CUDA a table is made again from tiles where something else than a route asks.
    """
    return {
        (at, *key)
        for at, relation in enumerate(x.manager.relations)
        for key in relation.built
        if isinstance(key[0], str)
        and not (key[0] == "table" and mx.cuda.is_available())
    }


def loss(net):
    def of(x):
        return total(net(x)) ** 2

    return mlx.nn.value_and_grad(net, of)


@pytest.mark.parametrize("training", (False, True), ids=("inference", "training"))
@pytest.mark.parametrize("name", NETS)
class TestWholeNets:
    def test_the_call_builds_no_more(self, name, training):
        net, x = NETS[name](), tensor()
        made = ml.prepare(net, x, training=training)
        before = views(x)
        assert before and len(made.relations) == len(x.manager.relations)
        net.train(training)  # where kernels are compiled, a net prepares itself
        run = loss(net) if training else net
        run(x)
        assert views(x) == before
        assert [rows for _, rows in made.levels] == [len(s) for s in x.manager.sets]

    def test_the_bits_are_the_same(self, name, training):
        net, x = NETS[name](), tensor("negative", 150)
        prepared = ml.SparseTensor(x.coords, x.feats)
        ml.prepare(net, prepared, training=training)
        run = loss(net) if training else (lambda x: (total(net(x)), {}))
        for before, after in zip(run(x), run(prepared), strict=True):
            for a, b in zip(arrays(before), arrays(after), strict=True):
                assert bits(a.flatten()) == bits(b.flatten())


def arrays(tree):
    return [tree] if isinstance(tree, mx.array) else [a for _, a in tree_flatten(tree)]


@pytest.mark.parametrize("training", (False, True))
def test_nothing_of_the_net_changes(training):
    net, x = NETS["minkunet"](), tensor()
    drawn = nn.Sequential(net, mlx.nn.Dropout(0.5))
    before = dict(tree_flatten(drawn.parameters()))
    random, flags = mx.random.state[0].tolist(), net.training
    with ml.trace() as trace:
        ml.prepare(drawn, x, training=training)
    after = dict(tree_flatten(drawn.parameters()))
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert mx.random.state[0].tolist() == random and net.training == flags
    assert not trace.records, "what is only planned is not traced"


@pytest.mark.parametrize("made", ("minkunet", "resnet"))
def test_the_nets_prepare_themselves_where_kernels_are_compiled(made, monkeypatch):
    """Once for a dtype and a mode, whether or not it is asked for besides."""
    net = NETS["minkunet"]() if made == "minkunet" else SparseResNet14(3, 5)
    real, calls = preparation._prepare, []

    def prepare(net, call, inputs, training, options):
        calls.append((inputs[0].dtype, training))
        return real(net, call, inputs, training, options)

    monkeypatch.setattr(preparation, "_prepare", prepare)
    monkeypatch.setattr(preparation.cuda_compile, "compiles", lambda: False)
    net(tensor(n=100))
    assert not calls
    monkeypatch.setattr(preparation.cuda_compile, "compiles", lambda: True)
    monkeypatch.setattr(preparation.cuda_geometry, "rehearse", lambda dims: None)
    real(net, net, (tensor(),), False, {})
    assert not calls
    x = tensor(n=100)
    for _ in range(2):
        loss_of = mlx.nn.value_and_grad(net, lambda x: total(net(x)))
        mx.eval(loss_of(x))
        net(x)
    net.eval()
    net(x)
    net(tensor(n=100))
    # In a gradient norms are no parts of convolutions, so evaluation is prepared apart.
    apart = [(mx.float32, False)] if devices.has_extension() else []
    assert calls == [(mx.float32, True), *apart]
    calls.clear()
    net.set_dtype(mx.float16)
    net.train()(tensor(n=100).astype(mx.float16))
    net.eval()(tensor(n=100).astype(mx.float16))
    assert calls == [(mx.float16, True)], "evaluation is prepared with training"


FLOW = {
    "resolution": 4,
    "in_channels": 6,
    "model_channels": 16,
    "cond_channels": 8,
    "out_channels": 6,
    "num_blocks": 1,
    "num_heads": 2,
}
TOKENS = mx.array([500.0]), mx.ones((1, 5, 8))
# Nets that make their tensors, or whose rows depend on features.
OTHERS = {
    "encoder": (lambda: models.SparseVAEEncoder(6, (8, 16), 4, (0, 1)), ()),
    "decoder": (lambda: models.SparseVAEDecoder(7, (16, 8), 6, (1, 0)), ()),
    "latent flow": (lambda: models.SLatFlowModel(**FLOW), TOKENS),
    "structure flow": (lambda: models.SparseStructureFlowModel(**FLOW), TOKENS),
    "structure": (lambda: models.SparseStructureDecoder(1, 6, 1, (16, 8), 1), ()),
    "points": (lambda: models.SPVCNN(6, 3, 1.0, planes=(8,) * 9, dropout=0.0), ()),
}


@pytest.mark.parametrize("training", (False, True), ids=("inference", "training"))
@pytest.mark.parametrize("name", OTHERS)
def test_a_net_that_prepares_itself_computes_the_same(name, training, monkeypatch):
    make, more = OTHERS[name]
    real, calls, found = preparation._prepare, [], []
    monkeypatch.setattr(
        preparation, "_prepare", lambda *given: calls.append(0) or real(*given)
    )
    monkeypatch.setattr(preparation.cuda_geometry, "rehearse", lambda dims: None)
    for compiles in (False, True):
        monkeypatch.setattr(preparation.cuda_compile, "compiles", lambda c=compiles: c)
        mx.random.seed(0)
        net = make().train(training)
        x = tensor(n=100)
        x = x.replace(mx.random.normal((len(x), 6)))
        given = (x,)
        if name.startswith("structure"):
            given = (mx.random.normal((1, 6, 4, 4, 4)),)
        if name == "points":
            given = x.coords[:, 1:].astype(mx.float32) + 0.3, x.feats
        y = net(*given, *more)
        found.append(getattr(y, "feats", y))
        assert len(calls) == compiles
    assert mx.array_equal(*found).item()


def total(y):
    return (y.feats if isinstance(y, ml.SparseTensor) else y).sum()


def test_an_error_leaves_the_net_as_it_was():
    net, x = NETS["minkunet"](), tensor(channels=4)
    before = dict(tree_flatten(net.parameters()))
    with pytest.raises(ValueError, match="channels"):
        ml.prepare(net, x)
    after = dict(tree_flatten(net.parameters()))
    assert all(before[name] is after[name] for name in before)


@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("n", (0, 1))
def test_few_rows(n, training):
    net, x = NETS["minkunet"](), tensor("negative", n)
    said = str(ml.prepare(net, x, training=training))
    assert f"{n} rows" in said and len(net(x)) == n


def test_what_is_wrong_with_rows_is_said():
    rows = mx.array([(0, 1, 2, 3), (0, 4, 4, 4), (0, 4, 4, 4)], dtype=mx.int32)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rows 1 and 2 are both \(0, 4, 4, 4\)"):
            ml.prepare(NETS["minkunet"](), ml.SparseTensor(rows, mx.zeros((3, 3))))


def test_a_function_of_several_tensors():
    x, y = tensor(), tensor("negative")
    conv = nn.SubmConv3d(3, 4, 3)

    def net(pair, *, scale):
        return {"sum": conv(pair[0]).feats.sum() + conv(pair[1]).feats.sum() * scale}

    made = ml.prepare(net, (x, y), scale=2.0)
    assert len(made.levels) == 2 and len(made.relations) == 2
    assert len(x.manager.relations) == len(y.manager.relations) == 1


def test_gradients_are_those_of_a_module():
    with pytest.raises(TypeError, match="training=True takes the module whose"):
        ml.prepare(lambda x: x, tensor(), training=True)


def test_rows_that_features_choose_end_it_early():
    x, conv = tensor(), nn.SubmConv3d(3, 1, 3, bias=False)

    def net(x):
        scores = conv(x)
        return conv(ops.prune(x, scores.feats[:, 0] > 0))

    made = ml.prepare(net, x)
    assert [rows for _, rows in made.levels] == [len(x), 0]
    assert len(net(x)) > 0


def in_thread(call) -> Thread:
    thread = Thread(target=call)
    thread.start()
    return thread


def test_two_threads_that_prepare_a_net_leave_it_its_weights():
    first_in, second_in = Event(), Event()

    class Net(mlx.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.SubmConv3d(3, 4, 3)

        def __call__(self, x):
            if first_in.is_set():  # it ends after the first has given back what it took
                second_in.set()
                if current_thread() is not first:
                    first.join(600)
            first_in.set()
            second_in.wait(0.5)
            return self.conv(x)

    net = Net()
    mx.eval(net.parameters())
    held = dict(tree_flatten(net.parameters()))
    first = in_thread(lambda: ml.prepare(net, tensor(), training=True))
    assert first_in.wait(600)
    second = in_thread(lambda: ml.prepare(net, tensor(), training=True))
    first.join(600), second.join(600)
    assert all(held[name] is a for name, a in tree_flatten(net.parameters()))


def test_a_first_call_waits_for_the_preparation_of_another_thread(monkeypatch):
    net, calls, begun, sums = NETS["minkunet"]().eval(), [], Event(), []
    mx.eval(net.parameters())

    def slow(net, *inputs, **options):
        calls.append(net)
        with preparation.unchanged(net):
            begun.set()
            second.join(0.5)

    monkeypatch.setattr(preparation.cuda_compile, "compiles", lambda: True)
    monkeypatch.setattr(preparation, "_prepare", slow)

    def call():
        sums.append(mx.abs(net(tensor()).feats).sum().item())

    second = in_thread(lambda: (begun.wait(600), call()))
    first = in_thread(call)
    first.join(600), second.join(600)
    assert len(calls) == 1 and len(sums) == 2 and min(sums) > 0


def test_a_frozen_net_is_prepared_to_train():
    net = nn.Sequential(nn.SubmConv3d(3, 8, 3), nn.BatchNorm(8)).freeze()
    assert len(ml.prepare(net, tensor(), training=True).relations) == 1


@pytest.mark.parametrize("more", (None, 3, "name", mx.array(2)))
def test_other_results_have_no_gradient(more):
    class Net(mlx.nn.Module):
        def __init__(self, call):
            super().__init__()
            self.conv, self._call = nn.SubmConv3d(3, 8, 3), call

        def __call__(self, x):
            return self._call(self.conv(x))

    net = Net(lambda y: {"y": y, "more": [more]})
    assert len(ml.prepare(net, tensor(), training=True).relations) == 1
    with pytest.raises(TypeError, match="returns tensors or arrays, .* got list"):
        ml.prepare(Net(lambda y: [y and more]), tensor(), training=True)


def test_without_a_tensor_there_is_nothing_to_prepare():
    with pytest.raises(TypeError, match="sparse tensors .* got array"):
        ml.prepare(nn.SubmConv3d(3, 4, 3), mx.zeros((3, 3)))
    with pytest.raises(TypeError, match="got none"):
        ml.prepare(nn.SubmConv3d(3, 4, 3))


@pytest.mark.skipif(not devices.has_extension(), reason="its relations are the CPU's")
@pytest.mark.parametrize("training", (False, True))
def test_all_kernels_of_the_plans_are_seen(training):
    with recording() as launches:
        net, x = NETS["minkunet"](), tensor("surface", 3000)
        net.set_dtype(mx.float16)
        x = x.astype(mx.float16)
        made = ml.prepare(net, x, training=training)
        prepared = {(each.name, each.text) for each in launches}
        launches.clear()
        (loss(net) if training else net)(x)
        assert launches and {(each.name, each.text) for each in launches} <= prepared
    assert "sorted_implicit_gemm" in made.kernels


@pytest.mark.skipif(not devices.has_extension(), reason="its relations are the CPU's")
@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16, mx.float32), ids=str)
def test_a_step_of_training_leaves_evaluation_its_kernels(dtype):
    """Those that a step or its preparation compiled, and those of before."""

    def kernels(launches):
        found = {(each.name, each.text) for each in launches}
        launches.clear()
        return found

    with recording() as launches:
        net, x = NETS["minkunet"](), tensor("surface", 3000).astype(dtype)
        net.set_dtype(dtype)
        mx.eval(net.eval()(x).feats)
        x = ml.SparseTensor(x.coords, x.feats)
        launches.clear()
        mx.eval(net(x).feats)
        before = kernels(launches)
        ml.prepare(net.train(), x, training=True)
        prepared = kernels(launches)
        _, gradients = loss(net)(x)
        mlx.optimizers.SGD(1e-3).update(net, gradients)
        mx.eval(net.parameters())
        assert kernels(launches) <= prepared
        mx.eval(net.eval()(x).feats)
        after = kernels(launches)
    assert any("Epilogue" in name for name, _ in after)
    assert after <= before and after <= prepared


def test_the_report_says_what_there_is():
    x = tensor()
    made = ml.prepare(NETS["minkunet"](), x)
    assert made.bytes == sum(held for _, _, held in made.relations) > 0
    for words in ("relations of 5 coordinate sets", "stride 16", "submanifold 5x5x5"):
        assert words in str(made)
    up, down = (
        next(r for r in made.relations if r[0].startswith(f"Relation({kind} 2x2x2"))
        for kind in ("transposed", "forward")
    )
    # On CUDA tiles hold what the table does.
    held = "cuda_sorted" if mx.cuda.is_available() else "table"
    assert held in up[1] and f"{held} of its transpose" in down[1]
    if held == "table":
        tables = [r.out_in for r in x.manager.relations if r.volume > 1]
        assert made.bytes >= sum({id(each): each.nbytes for each in tables}.values())


class OwnUNet(mlx.nn.Module):
    """A U-net as users write them."""

    strides = 2, 2

    def __init__(self):
        super().__init__()
        self.stem = nn.SubmConv3d(3, 16, 3)
        self.down = [nn.Conv3d(16, 16, 2, stride=2) for _ in range(2)]
        self.up = [nn.ConvTranspose3d(16, 16, 2, stride=2) for _ in range(2)]

    def __call__(self, x):
        x = self.stem(x)
        for layer in (*self.down, *self.up):
            x = layer(x)
        return x


@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("make", (NETS["minkunet"], OwnUNet))
def test_levels_are_one_read_and_edge_counts_another(make, training, monkeypatch):
    net, x, reads = make(), tensor(), []
    ml.prepare(net, tensor(), training=training)  # kernels prove themselves
    real = preparation.sync.read
    monkeypatch.setattr(
        preparation.sync, "read", lambda *a: reads.append(a) or real(*a)
    )
    ml.prepare(net, x, training=training)
    if registry.serving() in ("metal", "cuda"):
        # A portable route reads the edges of each offset: 8 of a 2x2x2 kernel.
        reads = [each for each in reads if [a.shape for a in each] != [(8,)]]
        assert len(reads) == 1 + training


def test_a_scan_is_prepared_once():
    net, x = NETS["minkunet"](), tensor()
    preparation.prepare_scan(net, x)
    made = x.manager.sets
    assert len(made) == 5, "the levels alone"
    preparation.prepare_scan(net, x)
    assert x.manager.sets == made and len(x.manager.prepared) == 1


REHEARSALS = {
    "prepare": ml.prepare,
    "prepare to train": partial(ml.prepare, training=True),
}


def scan(channels=8):
    coords = mx.array(cases.geometry("surface", 3, 120, 1))
    feats = 1 + mx.random.normal((len(coords), channels), key=mx.random.key(1))
    return ml.SparseTensor(coords, feats)


class FromData(mlx.nn.Module):
    """Its factors are those of the first features that it sees."""

    def __init__(self):
        super().__init__()
        self.ready, self.factors = False, mx.ones(8)

    def __call__(self, x):
        if not self.ready:
            self.factors, self.ready = 1 / mx.abs(x.feats).mean(0), True
        return x.replace(x.feats * self.factors)


class Late(mlx.nn.Module):
    """Makes its layer at its first call."""

    def __call__(self, x):
        if "layer" not in self:
            self.layer = nn.Linear(x.channels, 8)
        return self.layer(x)


class Log(mlx.nn.Module):
    """Counts its calls, in three ways, and keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.calls, self.count, self._seen = 0, mx.array(0), {"means": []}

    def __call__(self, x):
        self.calls += 1
        self.count += 1
        self._seen["means"].append(x.feats.mean())
        self.last = x
        return x


def net_of(part):
    return nn.Sequential(nn.SubmConv3d(8, 8, 3), nn.BatchNorm(8), part, nn.ReLU())


@pytest.fixture(params=REHEARSALS)
def rehearse(request):
    """Something that calls a net and computes nothing."""
    return REHEARSALS[request.param]


@pytest.mark.parametrize("wrap", (lambda f: f, lambda f: lambda x: f(x), ml.compile))
@pytest.mark.parametrize("training", (False, True))
def test_running_statistics_stay(training, wrap):
    net, x = net_of(nn.BatchNorm(8)).train(), scan()
    before = [np.array(a) for _, a in tree_flatten(net.parameters())]
    ml.prepare(net if training else wrap(net), x, training=training)
    after = [a for _, a in tree_flatten(net.parameters())]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_a_module_takes_from_data_is_of_its_first_call(rehearse):
    net, x = net_of(FromData()), scan()
    rehearse(net, x)
    found = net.layers[2]
    assert not found.ready and (np.array(found.factors) == 1).all()
    seen = net.layers[1](net.layers[0](x)).feats
    net(x)
    wanted = 1 / np.abs(np.array(seen)).mean(0)
    np.testing.assert_allclose(found.factors, wanted, rtol=1e-4)


def test_what_is_made_is_made_at_its_first_call(rehearse):
    net, x = net_of(Late()), scan()
    names = [name for name, _ in tree_flatten(net.parameters())]
    rehearse(net, x)
    assert names == [name for name, _ in tree_flatten(net.parameters())]
    mx.eval(net(x).feats)


def test_counts_and_lists_stay(rehearse):
    net, x = net_of(Log()), scan()
    net(x)
    log, last = net.layers[2], net.layers[2].last
    rehearse(net, x)
    assert log.calls == log.count.item() == 1 and log.last is last
    assert np.isfinite(np.array(log._seen["means"])).all()
    assert len(log._seen["means"]) == 1


def test_what_the_library_keeps_stays():
    net = net_of(Log())
    snapshot, norm = ModuleSnapshot([net]), net.layers[1]
    norm._found, norm._kept, norm.more = [1], ModuleCache(a=1), mx.ones(3)
    net.layers.append(nn.ReLU())
    net.eval(), norm.freeze()
    del net.layers[0]["bias"]
    snapshot.restore()
    assert "_found" not in vars(norm) and "more" not in norm and norm._kept == {"a": 1}
    assert len(net.layers) == 4 and net.layers[1].training and "bias" in net.layers[0]
    assert set(norm.trainable_parameters()) == {"weight", "bias"}


def test_modules_are_reached_by_what_a_function_asks_for():
    net = net_of(nn.ReLU())
    calls = net, net.__call__, partial(net), lambda x: [net(x)], ml.compile(net)
    for call in calls:
        assert net in list(reached(call))
