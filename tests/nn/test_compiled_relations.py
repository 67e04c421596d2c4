"""ml.compile and relations: what a trace builds, takes in, serves, and lets go."""

import gc
import re
from collections import Counter
from weakref import ref

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np
import pytest
from compiled_cases import TOLERANCE, small_net, tensor

import mlx_lattice as ml
from mlx_lattice import availability, devices, nn, sync
from mlx_lattice.backends.cuda import sort as cuda_sort


def operations(function, x, file):
    """The names of what a graph does that ``mx.compile`` traced at its first call."""
    run = mx.compile(lambda feats: function(x.replace(feats=feats)))
    mx.export_to_dot(str(file), run(x.feats))
    return sorted(re.findall(r'label ="([^"]*)", shape=rectangle', file.read_text()))


@pytest.mark.parametrize("training", (False, True))
def test_a_traced_graph_does_no_work_of_relations(tmp_path, training):
    """Whatever of them is built during the trace: it would be done at every call."""
    if training and devices.current().backend != devices.CPU:
        pytest.skip("within a vjp MLX starts nothing; ml.prepare builds before it")

    def results(x):
        net = small_net().train(training)
        if not training:
            return net(x).feats
        loss = lambda: mx.square(net(x).feats).sum()  # noqa: E731
        return mlx.nn.value_and_grad(net, loss)()

    known = tensor()
    mx.eval(known.coords, known.feats)
    fresh, prepared = (ml.SparseTensor(known.coords + 0, known.feats) for _ in "ab")
    mx.eval(results(prepared))
    found = Counter(operations(results, fresh, tmp_path / "a.dot"))
    wanted = Counter(operations(results, prepared, tmp_path / "b.dot"))
    views = [(str(r), sorted(map(str, r.built))) for r in fresh.manager.relations]
    assert found == wanted, (found - wanted, wanted - found, views)


@pytest.mark.skipif(availability.extension is None, reason="the extension does it")
def test_constants_of_a_gradient_are_none_of_what_is_traced_later():
    """MLX marks what a vjp rule makes; constants are kept beyond it."""
    held = {}

    @mx.custom_function
    def double(x):
        return 2 * x

    @double.vjp
    def back(x, dy, _):
        held["kept"] = cuda_sort.constant(5, 2, 17_001)
        held["marked"] = mx.array([5, 2, 17_001]) + 0
        mx.eval(held["marked"])
        return 2 * dy

    mx.eval(mx.grad(lambda x: double(x).sum())(mx.ones((3,))))
    started = {}

    def traced(x):
        for name, array in held.items():
            try:
                sync.start_all([array * 2])
                started[name] = True
            except ValueError:
                started[name] = False
        return x + 1

    mx.compile(traced)(mx.ones((3,)))
    assert started["kept"] and held["kept"].tolist() == [5, 2, 17_001]
    assert not started["marked"], "MLX marks nothing: this is not needed any longer"


def test_a_compiled_training_step_may_build_its_relations():
    """Forward and back, of several levels: the graph does it again at every call."""
    results = []
    for compiled in (False, True):
        x, net = tensor(n=400), small_net(8)
        coarse = nn.Conv3d(8, 8, 2, stride=2), nn.SubmConv3d(8, 8, 3), nn.ReLU()
        net = nn.Sequential(net, *coarse, nn.Conv3d(8, 8, 3, stride=2), nn.ReLU())
        net = nn.Sequential(net, nn.SubmConv3d(8, 8, 3), nn.ConvTranspose3d(8, 3))
        mx.random.seed(1)
        net.apply(lambda p: 0.3 * mx.random.normal(p.shape))
        optimizer = optim.SGD(learning_rate=1e-3)
        optimizer.init(net.trainable_parameters())
        state = [net.state, optimizer.state]
        mx.eval(state, x.feats)

        def run(feats, net=net, x=x, optimizer=optimizer):
            def loss(net):
                return mx.square(net(x.replace(feats)).feats - 1).mean()

            value, grads = mlx.nn.value_and_grad(net, loss)(net)
            optimizer.update(net, grads)
            return value

        if compiled:
            run = mx.compile(run, inputs=state, outputs=state)
        results.append([])
        for _ in range(4):
            results[-1].append(run(x.feats).item())
            mx.eval(state)
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4)
    assert results[0][0] > results[0][-1]


@pytest.mark.parametrize("route", (None, "relation_traversal", "gather_gemm_scatter"))
def test_relations_that_a_trace_built_serve_outside_of_it(route):
    """The first call is traced: plans and views are kept of then."""
    net = small_net()
    net.eval()
    with ml.routes.only(route or ""):
        x, same = tensor(), tensor()
        step = mx.compile(lambda f: net(x.replace(f)).feats, inputs=[net.state])
        expected = net(same).feats
        for run in (step, lambda f: net(x.replace(f)).feats, step):
            np.testing.assert_allclose(run(x.feats), expected, **TOLERANCE)
        dx, other = (
            mx.grad(lambda f, x=x: net(x.replace(f)).feats.square().sum())(x.feats)
            for x in (x, same)
        )
        np.testing.assert_allclose(dx, other, **TOLERANCE)


def test_a_trace_ends_with_its_coordinates():
    net = small_net()
    net.eval()
    fast = ml.compile(net)
    keep, x = tensor(1), tensor()
    for _ in range(2):
        mx.eval(fast(keep).feats, fast(x).feats)
    manager = ref(x.manager)
    table = ref(x.manager.relations[0])
    assert len(fast) == 2
    gc.collect()
    gc.disable()
    try:
        del x
        assert manager() is None and table() is None
    finally:
        gc.enable()
    assert len(fast) == 1
