"""prepare(): relations and views are there before the net runs, and nothing changes."""

from functools import partial
from threading import Event, Thread, current_thread

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from conftest import bits, drawn
from cuda_recorder import recording
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import devices, nn, ops
from mlx_lattice.models import MinkUNet14, MinkUNetTorchSparse, SparseResNet14

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
    return drawn(name if n else "empty", n=n, channels=channels)


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


def test_the_report_says_what_there_is():
    made = ml.prepare(NETS["minkunet"](), tensor())
    assert made.bytes == sum(held for _, _, held in made.relations) > 0
    for words in ("relations of 5 coordinate sets", "stride 16", "submanifold 5x5x5"):
        assert words in str(made)


REHEARSALS = {
    "prepare": ml.prepare,
    "prepare to train": partial(ml.prepare, training=True),
}


class FromData(mlx.nn.Module):
    """Its factors are those of the first features that it sees."""

    def __init__(self):
        super().__init__()
        self.ready, self.factors = False, mx.ones(8)

    def __call__(self, x):
        if not self.ready:
            self.factors, self.ready = 1 / mx.abs(x.feats).mean(0), True
        return x.replace(x.feats * self.factors)


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
    net, x = net_of(nn.BatchNorm(8)).train(), tensor(channels=8)
    before = [np.array(a) for _, a in tree_flatten(net.parameters())]
    ml.prepare(net if training else wrap(net), x, training=training)
    after = [a for _, a in tree_flatten(net.parameters())]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_a_module_takes_from_data_is_of_its_first_call(rehearse):
    net, x = net_of(FromData()), tensor(channels=8)
    rehearse(net, x)
    found = net.layers[2]
    assert not found.ready and (np.array(found.factors) == 1).all()
    seen = net.layers[1](net.layers[0](x)).feats
    net(x)
    wanted = 1 / np.abs(np.array(seen)).mean(0)
    np.testing.assert_allclose(found.factors, wanted, rtol=1e-4)


def test_counts_and_lists_stay(rehearse):
    net, x = net_of(Log()), tensor(channels=8)
    net(x)
    log, last = net.layers[2], net.layers[2].last
    rehearse(net, x)
    assert log.calls == log.count.item() == 1 and log.last is last
    assert np.isfinite(np.array(log._seen["means"])).all()
    assert len(log._seen["means"]) == 1
