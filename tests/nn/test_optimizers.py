"""Optimizers in few launches: each step against float64, on every backend here."""

import os
import warnings

import mlx.core as mx
import mlx.nn
import mlx.optimizers as theirs
import numpy as np
import pytest
from contractions import exact
from cuda_emulation import CAN_COMPILE, HAS_GPU
from emulated_cuda import EmulatedCuda
from mlx.utils import tree_flatten, tree_map
from places import HERE

from mlx_lattice import LatticeWarning, registry
from mlx_lattice import optimizers as ours

GIVEN = [
    ("SGD", {}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.5, "dampening": 0.3}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.2}),
    ("Adam", {"eps": 1e-2}),
    ("Adam", {"betas": (0.8, 0.9), "eps": 1e-3, "bias_correction": True}),
    ("AdamW", {"weight_decay": 0.3, "bias_correction": True}),
]
kinds = pytest.mark.parametrize("name, given", GIVEN, ids=str)
DTYPES = mx.float32, mx.float16, mx.bfloat16
TOLERANCES = dict(zip(DTYPES, (1e-5, 1e-2, 8e-2), strict=True))
# Two vectors, an odd end, three blocks, a scalar, many axes.
SHAPES = (16,), (2, 3, 5), (17001,), (), (3,), (4, 3, 3, 3, 8)


PLACES = {place.name: place for place in HERE if place.name in registry.UPDATES}
# Not beside Metal's, which are MLX's kernels then.
IS_METAL = os.environ.get("MLX_LATTICE_METAL") == "host"
HAS_EMULATOR = CAN_COMPILE and not HAS_GPU and not IS_METAL
registry.serving()  # puts Metal onto the CPU, before checks of launches do for a while
NAMES = [*PLACES, *["aligned", "views"] * HAS_EMULATOR]


@pytest.fixture(scope="module")
def emulated(cuda_programs):
    each = "aligned", "views"
    return {name: EmulatedCuda(cuda_programs, name == "views") for name in each}


@pytest.fixture(params=NAMES)
def place(request, emulated):
    return PLACES.get(request.param) or emulated[request.param]


def tree(dtype=mx.float32, scale=1.0) -> dict:
    """Arrays of all shapes, in lists, tuples and dicts; the learned ones of a net."""
    made = [scale * mx.random.normal(shape).astype(dtype) for shape in SHAPES]
    last = tuple(made[3:])
    return {"layers": [{"weight": made[0]}, {"other": made[1:3]}], "last": last}


def wanted(name: str, given: dict, rate: float, parameter, gradients):
    """The parameter after some steps in float64, kept in its dtype between them."""

    def kept(a):
        return exact(mx.array(a.astype(np.float32)).astype(parameter.dtype))

    p, first, second = exact(parameter), 0.0, 0.0
    decay, momentum = given.get("weight_decay", 0.0), given.get("momentum", 0.0)
    (b1, b2), eps = given.get("betas", (0.9, 0.999)), given.get("eps", 1e-8)
    for step, g in enumerate(map(exact, gradients), start=1):
        if name == "SGD":
            g = g + decay * p
            first = momentum * first + (1 - given.get("dampening", 0.0)) * g
            by = g + momentum * first if given.get("nesterov") else first
            p, first = kept(p - rate * (by if momentum else g)), kept(first)
            continue
        first, second = b1 * first + (1 - b1) * g, b2 * second + (1 - b2) * g * g
        c1, c2 = 1.0, 1.0
        if given.get("bias_correction"):
            c1, c2 = 1 / (1 - b1**step), (1 - b2**step) ** -0.5
        p = p - rate * decay * p
        p = kept(p - rate * c1 * first / (np.sqrt(second) * c2 + eps))
        first, second = kept(first), kept(second)
    return p


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@kinds
def test_steps(place, name, given, dtype):
    if isinstance(place, EmulatedCuda) and dtype != DTYPES[len(given) % 3]:
        return  # each kernel takes a second to compile there
    parameters, gradients = tree(dtype), [tree(dtype, 0.5) for _ in range(3)]

    def run():
        optimizer, found = getattr(ours, name)(0.1, **given), parameters
        for each in gradients:
            found = optimizer.apply_gradients(each, found)
        return [a for _, a in tree_flatten([found, optimizer.state])]

    (results,) = place.run(run).values()
    assert all(map(mx.array_equal, *results[:2]))
    each = [[a for _, a in tree_flatten(t)] for t in (parameters, *gradients)]
    for a, p, *g in zip(results[0], *each, strict=False):  # then the state
        assert a.dtype == dtype and a.shape == p.shape
        right = wanted(name, given, 0.1, p, g)
        np.testing.assert_allclose(exact(a), right, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@kinds
def test_master_weights(place, name, given, dtype):
    """Steps that half precision does not tell apart add up; a set parameter stays."""
    if isinstance(place, EmulatedCuda) and dtype != DTYPES[1 + len(given) % 2]:
        return
    parameters, gradients = tree(dtype), [tree(dtype, 0.5) for _ in range(4)]
    others, rate = tree_map(lambda a: a + 1, parameters), 1e-4

    def run():
        optimizer = getattr(ours, name)(rate, **given, master_weights=True)
        found = parameters
        for each in gradients[:3]:
            found = optimizer.apply_gradients(each, found)
        # Of another net: its masters are not those of the state.
        again = optimizer.apply_gradients(gradients[3], others)
        made = found, optimizer.state, again
        return [a for _, a in tree_flatten(made)], optimizer.state

    (results,) = place.run(run).values()
    state = results[0][1]
    masters = [a for n, a in tree_flatten(state) if n.endswith("master")]
    assert all(a.dtype == mx.float32 for a in masters)
    besides = [a for n, a in tree_flatten(state) if n.rpartition(".")[2] in "mv"]
    assert all(a.dtype == mx.float32 for a in besides)
    each = [[a for _, a in tree_flatten(t)] for t in (parameters, *gradients)]
    assert len(masters) == len(each[0])
    again = results[0][0][-len(masters) :]
    for a, master, p, *g in zip(again, masters, *each, strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(exact(master.astype(dtype)), exact(a))
        if name == "SGD" and not given.get("momentum"):  # it has no state besides
            right = wanted(name, given, rate, (p + 1).astype(mx.float32), g[3:])
            np.testing.assert_allclose(exact(master), right, rtol=0, atol=1e-6)
    for a, p, *g in zip(results[0][0], *each, strict=False):
        right = wanted(name, given, rate, p.astype(mx.float32), g[:3])
        rounded = exact(mx.array(right.astype(np.float32)).astype(dtype))
        unit = np.spacing(np.abs(rounded).astype(np.float16)).astype(np.float64)
        unit = unit if dtype == mx.float16 else 8 * unit
        assert (np.abs(exact(a) - rounded) <= unit).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@kinds
def test_steps_without_kernels(name, given, dtype, monkeypatch):
    """They compute half in float32 and round once, as kernels do."""
    monkeypatch.setattr(registry, "updates", lambda: None)
    given = {key: value for key, value in given.items() if key != "eps"}
    parameters = tree(dtype)
    gradient = tree_map(lambda a: mx.full(a.shape, 1e-4).astype(dtype), parameters)
    optimizer = getattr(ours, name)(0.01, **given)
    found = optimizer.apply_gradients(gradient, parameters)
    each = (tree_flatten(t) for t in (found, parameters, gradient))
    for (_, a), (_, p), (_, g) in zip(*each, strict=True):
        right = wanted(name, given, 0.01, p, [g])
        unit = mx.maximum(mx.abs(p), 1) * mx.finfo(dtype).eps
        assert (np.abs(exact(a) - right) <= 2 * exact(unit) + 1e-6).all()


def test_adam_warns_of_squares_that_float16_does_not_hold():
    half = {"weight": mx.ones((3,), dtype=mx.float16)}
    for kind in (ours.Adam, ours.AdamW):
        with pytest.warns(LatticeWarning, match=f"{kind.__name__} keeps .* float16"):
            kind(0.1).init(half)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.AdamW(0.1, master_weights=True).init(half)
        ours.AdamW(0.1, eps=1e-3).init(half)
        ours.AdamW(0.1).init({"weight": mx.ones((3,), dtype=mx.bfloat16)})
        ours.SGD(0.1, momentum=0.9).init(half)


def test_states_are_mlx_s_own(place):
    """Their state goes on here, and ours there, as their own; schedules too."""
    rate = theirs.exponential_decay(0.1, 0.5)
    parameters, gradients = tree(), [tree() for _ in range(4)]

    def run(*classes):
        found, state = parameters, None
        for kind, gradient in zip(classes, gradients, strict=True):
            optimizer = kind.AdamW(rate)
            if state is None:
                optimizer.init(found)
            else:
                optimizer.state = state
            found = optimizer.apply_gradients(gradient, found)
            state = optimizer.state
        return tree_flatten([found, state])

    right = run(theirs, theirs, theirs, theirs)
    mx.eval(right)
    with place.inside():
        made = run(ours, theirs, ours, theirs)
        mx.eval(made)
    assert [name for name, _ in made] == [name for name, _ in right]
    for (name, a), (_, b) in zip(made, right, strict=True):
        assert a.dtype == b.dtype, name
        np.testing.assert_allclose(np.array(a), np.array(b), 1e-4, 1e-6, err_msg=name)


def test_in_a_net_and_compiled():
    """One step of a net by ``update``, as of MLX's optimizer; in a compiled one too."""
    states = []
    for kind, compiled in ((theirs, False), (ours, False), (ours, True)):
        mx.random.seed(0)
        net = mlx.nn.Sequential(mlx.nn.Linear(3, 9), mlx.nn.ReLU(), mlx.nn.Linear(9, 2))
        optimizer = kind.Adam(theirs.step_decay(0.1, 0.9, 2))
        optimizer.init(net.trainable_parameters())
        state = [net.state, optimizer.state]

        def step(x, net=net, optimizer=optimizer):
            loss, gradients = mlx.nn.value_and_grad(net, lambda x: net(x).sum())(x)
            optimizer.update(net, gradients)
            return loss

        if compiled:
            step = mx.compile(step, inputs=state, outputs=state)
        for _ in range(3):
            mx.eval(step(mx.random.normal((5, 3))), state)
        states.append(tree_flatten(net.parameters()))
    for other in states[1:]:
        for (name, a), (_, b) in zip(states[0], other, strict=True):
            np.testing.assert_allclose(np.array(a), np.array(b), 1e-4, 1e-5, name)


@kinds
def test_what_was_frozen_begins_when_it_is_trained(place, name, given):
    """It has no state until then; what has one goes on with it."""
    parameters, gradients = tree(), tree()
    first = {"layers": [{}, gradients["layers"][1]]}
    optimizer, alone = (getattr(ours, name)(1e-2, **given) for _ in range(2))
    with place.inside():
        for each in (optimizer, alone):
            each.apply_gradients(first, parameters)
        whole = optimizer.apply_gradients(gradients, parameters)
        wanted = alone.apply_gradients(first, parameters)["layers"][1]
        mx.eval(whole, wanted)
    found = tree_flatten(whole["layers"][1])
    for (path, one), (_, other) in zip(found, tree_flatten(wanted), strict=True):
        assert mx.array_equal(one, other), path
    moved = zip(tree_flatten(whole), tree_flatten(parameters), strict=True)
    assert not any(mx.array_equal(new, old) for (_, new), (_, old) in moved)
