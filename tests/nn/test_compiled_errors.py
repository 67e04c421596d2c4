"""ml.compile: what it refuses, and what is left when a trace fails."""

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np
import pytest
from compiled_cases import small_net, tensor
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import ops


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
        fast(tensor(1))
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
    failing, other = True, tensor(1)
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


def test_a_first_trace_that_fails_leaves_an_optimizer_as_it_was():
    x, net, optimizer = tensor(), small_net(), optim.AdamW(0.1)
    loss = mlx.nn.value_and_grad(net, lambda net, x: net(x).feats.square().sum())

    def step(x):
        optimizer.update(net, loss(net, x)[1])
        raise KeyError("of the function")

    state = [net.state, optimizer.state]
    names, before = dict(tree_flatten(state)), optimizer.state.keys() - {"step"}
    with pytest.raises(KeyError, match="of the function"):
        ml.compile(step, inputs=state, outputs=state)(x)
    assert dict(tree_flatten(state)).keys() == names.keys()
    assert optimizer.state.keys() - {"step"} == before
    mx.eval(state)


def test_an_error_of_the_function_stays_its_own():
    def function(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ml.compile(function)(tensor())
