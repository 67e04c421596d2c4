"""ml.compile: the same results, and a trace for each coordinate set."""

import gc
import math
import re
from functools import partial
from threading import Event, Thread
from weakref import ref

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np
import pytest
from conftest import drawn
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import nn, ops

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
tensor = partial(drawn, "surface", n=200, channels=4)


def small_net(classes=3):
    mx.random.seed(7)
    net = nn.Sequential(
        nn.SubmConv3d(4, 8, 3, bias=False),
        nn.BatchNorm(8),
        nn.ReLU(),
        # A bias before a norm has no gradient but rounding, which AdamW makes large.
        nn.Conv3d(8, 8, 2, stride=2, bias=False),
        nn.BatchNorm(8),
        nn.ConvTranspose3d(8, classes),
    )
    mx.eval(net.parameters())
    return net


class Counting:
    """A function, and how often Python runs it."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


def test_the_function_runs_once_a_coordinate_set_and_sees_new_weights():
    net = small_net().eval()
    count = Counting(net)
    fast = ml.compile(count, inputs=[net.state])
    x = tensor()
    for _ in range(3):
        fast(x)
    assert count.calls == 1
    net.layers[0].weight = net.layers[0].weight * 2
    np.testing.assert_allclose(fast(x).feats, net(x).feats, **TOLERANCE)
    assert count.calls == 1
    net.train()
    fast(x)
    assert count.calls == 2 and len(fast) == 2
    with ml.routes.only("gather_gemm_scatter"):
        fast(x)
    assert count.calls == 3 and len(fast) == 3
    fast(x.astype(mx.float32))
    assert count.calls == 3  # in training, for the second time
    fast.clear()
    assert len(fast) == 0


def test_a_thread_waits_while_another_one_traces():
    x, other, net = tensor(), tensor(seed=1), small_net().eval()
    begun, done, found = Event(), Event(), []

    class Net(mlx.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def __call__(self, given):
            if given.key == x.key and not found:  # its trace
                begun.set()
                done.wait(0.5)
            return self.net(given)

    def call():
        begun.wait(600)
        found.append(np.array(fast(other).feats))
        done.set()

    expected = [np.array(net(each).feats) for each in (x, other)]
    mx.eval(x.arrays(), other.arrays())
    fast = ml.compile(Net().eval())
    thread = Thread(target=call)
    thread.start()
    y = np.array(fast(x).feats)
    thread.join(600)
    assert len(found) == 1 and done.is_set()
    for a, b in zip([y, *found], expected, strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)


def test_the_oldest_trace_is_dropped():
    net = small_net().eval()
    count = Counting(net)
    fast = ml.compile(count, inputs=[net.state], keep=2)
    a, b, c = (tensor(seed=seed) for seed in range(3))
    for x in (a, a, b, b, a):
        fast(x)
    assert count.calls == 2
    fast(c)  # in the place of b
    assert len(fast) == 2 and count.calls == 3
    fast(a)
    assert count.calls == 3
    fast(b)
    assert count.calls == 4 and len(fast) == 2


@pytest.mark.parametrize("dtype", (mx.float32, mx.float16, mx.bfloat16))
def test_every_call_has_the_bits_of_the_first(dtype):
    def function(x):
        y = net(x)
        return y.replace(mx.exp(y.feats * 0.1) / 3 + mx.sigmoid(y.feats) * 1.7)

    net = small_net().eval()
    net.set_dtype(dtype)
    fast, x = ml.compile(function), tensor().astype(dtype)
    first = np.array(fast(x).feats.astype(mx.float32))
    for _ in range(2):
        assert np.array_equal(np.array(fast(x).feats.astype(mx.float32)), first)


def test_trees_of_tensors_and_arrays_come_and_go():
    def function(pair, shift, *, name, both=None):
        a, b = pair["a"], pair["b"][0]
        up = ops.relu(a + shift)
        return [up, (b + a.feats, None, name)], {"sum": (up + b).feats.sum()}

    fast, x = ml.compile(function), tensor()
    for step in range(3):
        pair = {"a": x, "b": (x.replace(x.feats * step),)}
        given = (pair, mx.array(0.5 * step))
        y, expected = (f(*given, name="n", both=[]) for f in (fast, function))
        assert type(y) is tuple and y[0][1][1:] == (None, "n")
        assert y[0][0].key == x.key and y[0][0].coords is x.coords
        np.testing.assert_allclose(y[0][0].feats, expected[0][0].feats, **TOLERANCE)
        np.testing.assert_allclose(y[0][1][0].feats, expected[0][1][0].feats)
        np.testing.assert_allclose(y[1]["sum"], expected[1]["sum"], rtol=1e-4)
    assert len(fast) == 1
    fast(pair, mx.array(1.0), name="other")
    assert len(fast) == 2


def test_other_devices_shapes_and_dtypes_are_new():
    count = Counting(lambda a, factor: a * factor)
    fast = ml.compile(count)
    a = mx.arange(6)
    for _ in range(3):
        assert fast(a, 2).tolist() == [0, 2, 4, 6, 8, 10]
        assert fast(a, 2.0).dtype == mx.float32
        assert fast(a[:3], True).tolist() == [0, 1, 2]
        assert fast(a.astype(mx.int16), 1).dtype == mx.int16
    assert len(fast) == 4 and count.calls == 4


def test_gradients_go_through_a_compiled_net():
    net = small_net().eval()
    fast, x = ml.compile(net), tensor()

    def gradient(net):
        return mx.grad(lambda f: net(x.replace(f)).feats.square().sum())(x.feats)

    expected = gradient(net)
    fast(x)
    for _ in range(3):
        np.testing.assert_allclose(gradient(fast), expected, rtol=1e-4, atol=1e-4)


def test_constants_are_told_apart_by_their_bits():
    x, passed = tensor(), []

    def function(x, value):
        passed.append(value)
        return x.feats * math.copysign(1.0, value)

    run = ml.compile(function)
    for value in (0.0, -0.0, 0.0, -0.0, math.nan, math.nan, math.nan):
        sign = math.copysign(1.0, value)
        np.testing.assert_array_equal(np.array(run(x, value)), np.array(x.feats * sign))
    assert len(run) == 3


def test_what_cannot_be_compiled_raises_and_says_what_to_do():
    x = tensor()
    with pytest.raises(TypeError, match="takes a function"):
        ml.compile(3)
    with pytest.raises(ValueError, match="keep must be an int of 1 or more; got 0"):
        ml.compile(small_net(), keep=0)
    with pytest.raises(TypeError, match="a module's own state is captured"):
        ml.compile(small_net(), inputs=[])
    fast = ml.compile(lambda x, *_: x)
    with pytest.raises(TypeError, match="arguments .* got ndarray"):
        fast(x, np.zeros(3))
    with pytest.raises(TypeError, match="no modules"):
        fast(x, small_net())
    with pytest.raises(TypeError, match="results .* got set"):
        ml.compile(lambda x: {1})(x)
    pruned = ml.compile(lambda x: ops.prune(x, x.feats[:, 0] > 0))
    with pytest.raises(ValueError, match="it chooses rows by features"):
        pruned(x)
    assert fast(x).key == x.key


def test_errors_of_the_function_are_its_own():
    x, net = tensor(), small_net().eval()

    def careful(x):
        if calls.append(None) or len(calls) > 1:
            raise ValueError("call net.eval() first")
        return net(x)

    calls = []
    fast = ml.compile(careful)
    fast(x)
    with pytest.raises(ValueError, match="^call net.eval.. first$"):
        fast(tensor(seed=1))
    assert len(fast) == 1
    fast = ml.compile(ml.models.MinkUNet14(4, 3).eval())
    said = pytest.raises(RuntimeError, match="^memory_limit bounds forward passes")
    with ml.memory_limit("8GB"), said:
        fast(x)


@pytest.mark.parametrize("fails", ("reads", "raises"))
def test_state_is_whole_after_a_trace_that_failed(fails):
    """A net, an optimizer and random numbers are what they were, and go on."""
    x, net, optimizer = tensor(), small_net(), optim.AdamW(0.1)
    optimizer.init(net.trainable_parameters())
    loss = mlx.nn.value_and_grad(net, lambda net, x: net(x).feats.square().sum())
    state, failing = [net.state, optimizer.state, mx.random.state], False

    def step(x):
        value, gradients = loss(net, x)
        mx.random.uniform()
        if failing and fails == "reads":
            ops.prune(x, x.feats[:, 0] > 0)
        elif failing:
            raise KeyError("of the function")
        optimizer.update(net, gradients)
        return value

    fast = ml.compile(step, inputs=state, outputs=state)
    mx.eval(fast(x), state)
    failing, other = True, tensor(seed=1)
    state, key = state[:2], mx.random.state[0].tolist()
    before = [a.tolist() for _, a in tree_flatten(state)]
    error, said = (ValueError, "chooses") if fails == "reads" else (KeyError, "of the")
    for _ in range(2):
        with pytest.raises(error, match=said):
            fast(other)
        assert mx.random.state[0].tolist() == key
    assert [a.tolist() for _, a in tree_flatten(state)] == before
    if fails == "reads":
        assert mx.isfinite(step(other)).item()


def test_modes_of_a_net_that_a_function_calls_are_noticed():
    """Its weights are constants, as nothing is said of them."""
    net, x = nn.Sequential(nn.SubmConv3d(4, 8, 3), nn.Dropout(0.5)).eval(), tensor()
    state = [mx.random.state]
    fast = ml.compile(lambda x: mx.abs(net(x).feats), state, state)
    plain = np.abs(np.array(net(x).feats))
    for training in (False, True, False):
        net.train(training)
        for _ in range(3):
            assert ((np.array(fast(x)) == 0).mean() > 0.3) == training
    np.testing.assert_allclose(fast(x), plain, rtol=1e-4, atol=1e-5)
    assert len(fast) == 2


class Noisy(mlx.nn.Module):
    """Adds noise in evaluation too."""

    def __call__(self, x):
        return x.replace(x.feats + mx.random.normal(x.shape))


@pytest.mark.parametrize("part", (nn.Dropout(0.5).train(), Noisy()))
def test_every_call_draws_other_numbers(part):
    net = nn.Sequential(nn.SubmConv3d(4, 8, 3), nn.ReLU(), mlx.nn.Module())
    net.eval().layers[2] = part
    fast, x = ml.compile(net), tensor()
    found = [np.array(fast(x).feats) for _ in range(5)]
    assert all((a != b).any() for a, b in zip(found[1:], found, strict=False))
    mx.random.seed(3)
    again = np.array(fast(x).feats)
    mx.random.seed(3)
    assert (again == fast(x).feats).all()
    mx.eval(mx.random.uniform())  # MLX's key is no stand-in


def operations(function, x, file):
    """The names of what a graph does that ``mx.compile`` traced at its first call."""
    run = mx.compile(lambda feats: function(x.replace(feats=feats)))
    mx.export_to_dot(str(file), run(x.feats))
    return sorted(re.findall(r'label ="([^"]*)", shape=rectangle', file.read_text()))


def test_a_trace_ends_with_its_coordinates():
    net = small_net().eval()
    fast = ml.compile(net)
    keep, x = tensor(seed=1), tensor()
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


def assert_same_state(a, b):
    flat = [dict(tree_flatten(net.parameters())) for net in (a, b)]
    assert flat[0].keys() == flat[1].keys()
    for name, array in flat[0].items():
        np.testing.assert_allclose(array, flat[1][name], **TOLERANCE, err_msg=name)


@pytest.mark.parametrize("training", (False, True, "one norm"))
def test_a_net_gives_the_same_and_keeps_its_statistics(training):
    net, same = small_net(), small_net()
    for each in (net, same):
        each.train(training is True).layers[1].train(bool(training))
    fast, scenes = ml.compile(net), [tensor(), tensor(seed=1)]
    for step in range(4):
        for x in scenes:
            x = x.replace(x.feats + step)
            y, expected = fast(x), same(x)
            assert y.key == expected.key and y.manager is x.manager
            np.testing.assert_allclose(y.feats, expected.feats, **TOLERANCE)
        assert_same_state(net, same)
    assert len(fast) == 2


def training_step(net, optimizer):
    def loss(x, labels):
        logits = net(x).feats
        return mlx.nn.losses.cross_entropy(logits, labels, reduction="mean")

    gradients = mlx.nn.value_and_grad(net, loss)

    def step(x, labels, *, scale=1.0):
        value, grads = gradients(x, labels)
        optimizer.update(net, grads)
        return {"loss": value * scale, "rows": len(x)}

    return step


@pytest.mark.parametrize("make", (optim.SGD, optim.AdamW))
def test_a_training_step_is_the_uncompiled_one(make):
    scenes = [tensor(n=150 + 10 * seed, seed=seed) for seed in range(3)]
    labels = [mx.arange(len(x)) % 3 for x in scenes]
    results = []
    for compiled in (False, True):
        net = small_net()
        options = {"momentum": 0.9} if make is optim.SGD else {}
        optimizer = make(learning_rate=1e-2, **options)
        step = training_step(net, optimizer)
        state = [net.state, optimizer.state, mx.random.state]
        if compiled:
            step = ml.compile(step, inputs=state, outputs=state)
        made = []
        for _ in range(4):
            for x, y in zip(scenes, labels, strict=True):
                out = step(x, y, scale=2.0)
                mx.eval(state)
                assert out["rows"] == len(x)
                made.append(out["loss"].item())
        results.append((net, made))
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-4)
    assert_same_state(results[0][0], results[1][0])
    assert made[0] > made[-1]
    assert len(step) == 3
