"""ml.compile: the same results, and a trace for each coordinate set."""

import math
from threading import Event, Thread

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from compiled_cases import TOLERANCE, Counting, small_net, tensor
from cuda_recorder import recording

import mlx_lattice as ml
from mlx_lattice import ops


def test_the_function_runs_once_a_coordinate_set_and_sees_new_weights():
    net = small_net()
    net.eval()
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
    x, other, net = tensor(), tensor(1), small_net().eval()
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
    net = small_net()
    net.eval()
    count = Counting(net)
    fast = ml.compile(count, inputs=[net.state], keep=2)
    a, b, c = (tensor(seed) for seed in range(3))
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
    net = small_net()
    net.eval()
    fast, x = ml.compile(net), tensor()

    def gradient(net):
        return mx.grad(lambda f: net(x.replace(f)).feats.square().sum())(x.feats)

    expected = gradient(net)
    fast(x)
    for _ in range(3):
        np.testing.assert_allclose(gradient(fast), expected, rtol=1e-4, atol=1e-4)


def test_observed_launches_are_all_seen():
    net = small_net()
    net.eval()
    fast, x = ml.compile(net), tensor()
    for _ in range(3):
        fast(x)
    with ml.trace() as t:
        fast(x)
    assert [record.problem.pass_ for record in t] == ["forward"] * 3


def test_no_rows_are_not_compiled_on_cuda():
    """MLX's compiled functions divide by the size of arrays there."""
    net = small_net().eval()
    step, none = ml.compile(Counting(net)), tensor(n=0)
    for count in (1, 2, 3):
        with recording("h200"):
            assert step(none).shape == (0, 3) and step.function.calls == count
    assert len(step) == 0


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
