"""What waits under gradients and compiled, and sums and activations without a norm."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from contractions import exact
from waiting import BLOCKS, Block, C, epilogues, tensor, told

import mlx_lattice as ml
from mlx_lattice import nn, ops, pending
from mlx_lattice.geometry import sync
from mlx_lattice.ops import fusion
from mlx_lattice.pending import Pending


def test_compiled_nets():
    net, x = Block(), tensor()
    net.eval()
    compiled = mx.compile(lambda feats: net.rebound(x.replace(feats)).feats)
    for scale in (1, 2):
        given = x.replace(x.feats * scale)
        wanted = exact(net.rebound(given).feats)
        np.testing.assert_allclose(exact(compiled(given.feats)), wanted, 1e-4, 1e-4)


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_and_running_statistics(name, training):
    x, found = tensor(), []
    for is_apart in (False, True):
        net = Block()
        net.train(training)

        def loss(parameters, feats, net=net):
            net.update(parameters)
            return mx.square(getattr(net, name)(x.replace(feats)).feats).sum()

        def step(net=net, loss=loss):
            made = mx.value_and_grad(loss, argnums=(0, 1))
            return made(net.trainable_parameters(), x.feats)

        if is_apart:
            with pending.apart():
                found.append((step(), net.parameters()))
        else:
            found.append((step(), net.parameters()))
    pairs = zip(*(mlx.utils.tree_flatten(each) for each in found), strict=True)
    for (name, got), (_, wanted) in pairs:
        # Some are 0, but for what rounding leaves of sums over rows.
        most = 2e-4 * (1 + np.abs(exact(wanted)).max())
        np.testing.assert_allclose(exact(got), exact(wanted), 1e-3, most, err_msg=name)


ALONE = {
    "ReLU": nn.ReLU(),
    "LeakyReLU": nn.LeakyReLU(0.2),
    "ELU": lambda y: ops.elu(y, 0.5),
    "SiLU": nn.Sequential(mlx.nn.SiLU()),
    "GELU": ops.gelu,
    "GELU(tanh)": nn.GELU("tanh"),
}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", ALONE)
def test_an_activation_without_a_norm(name, dtype):
    net, x, act = Block(bias=False), tensor(dtype=getattr(mx, dtype)), ALONE[name]
    net.set_dtype(getattr(mx, dtype))
    call = lambda: net.norm1(act(net.conv1(x))).feats  # noqa: E731
    for training in (True, False):
        net.train(training)
        y, after = epilogues(call)
        assert after == [f"+ {name}"]
        with pending.apart():
            wanted, after = epilogues(call)
        assert after == [""]
        most = 1e-5 if dtype == "float32" else 0.05
        np.testing.assert_allclose(exact(y), exact(wanted), most, most)


@pytest.mark.parametrize("name", ALONE)
def test_a_gradient_does_not_multiply_again_for_an_activation(name):
    net, x, act = Block(), tensor(), ALONE[name]

    def total(feats, weight, bias):
        net.conv1.weight, net.conv1.bias = weight, bias
        return mx.sin(act(net.conv1(x.replace(feats))).feats).sum()

    given = x.feats, net.conv1.weight, net.conv1.bias

    def back():
        return mx.grad(total, (0, 1, 2))(*given)

    by_result = name.startswith(("ReLU", "LeakyReLU"))
    found, after = epilogues(back)
    assert after == [f"+ shift + {name}" * by_result, "", ""]
    with pending.apart():
        wanted, others = epilogues(back)
    assert others == ["", "", ""]
    for got, each in zip(found, wanted, strict=True):
        most = 1e-5 * (1 + np.abs(exact(each)).max())
        np.testing.assert_allclose(exact(got), exact(each), 1e-4, most)

    def twice():
        slopes = lambda *a: sum(mx.square(d).sum() for d in mx.grad(total, (0, 1))(*a))  # noqa: E731
        return mx.grad(slopes)(*given)

    got = twice()
    with pending.apart():
        each = twice()
    most = 1e-4 * (1 + np.abs(exact(each)).max())
    np.testing.assert_allclose(exact(got), exact(each), 1e-3, most)


@pytest.mark.parametrize("norm", (False, True))
@pytest.mark.parametrize("may_come", (False, True))
def test_what_is_compiled_waits_where_no_gradient_may_come(may_come, norm, monkeypatch):
    """On a GPU MLX says so."""
    net, x = Block().eval(), tensor()

    def function(feats):
        between = net.norm1 if norm else lambda y: y
        return ops.silu(between(net.conv1(x.replace(feats)))).feats

    wanted = exact(function(x.feats))
    for name in ("is_differentiating", "is_known_to_differentiate"):
        monkeypatch.setattr(sync, name, lambda: may_come)
    y, after = epilogues(lambda: mx.compile(function)(x.feats))
    alone = "+ BatchNorm + SiLU" if norm else "+ shift + SiLU"
    assert after == ["" if may_come else alone]
    np.testing.assert_allclose(exact(y), wanted, 1e-5, 1e-5)


def test_a_sum_has_the_rows_of_what_is_added_to():
    net, x = Block(), tensor()
    net.eval()
    part = ml.SparseTensor(x.coords[::-1], x.feats[::-1], manager=x.manager)
    for add in (
        lambda y: part + y,
        lambda y: y + part,
        lambda y: x + y,
        lambda y: 2 + y,
        lambda y: y.replace(y.feats) + y,
    ):
        for follow in (lambda y: y, net.norm1):
            y = add(follow(net.conv1(x)))
            with pending.apart():
                wanted = add(follow(net.conv1(x)))
            assert y.key == wanted.key
            np.testing.assert_allclose(exact(y.feats), exact(wanted.feats), 1e-5, 1e-5)


@pytest.mark.parametrize("training", (False, True))
def test_what_waits_is_added_to_what_was_read(training):
    """On whichever side it stands: the block's input was a layer's result, too."""
    net, x = Block(), tensor()
    net.train(training)

    def block(first):
        skip = net.relu(net.norm1(net.conv1(x)))
        out = net.norm2(net.conv2(skip))
        return net.relu(skip + out if first else out + skip)

    seen = []
    for first in (False, True):
        with fusion.observe(seen.append):
            y = block(first)
            y.feats  # noqa: B018 (computed as it is read)
        assert seen[-1].parts == ("BatchNorm", "residual", "ReLU")
        with pending.apart():
            wanted = block(first)
        np.testing.assert_allclose(exact(y.feats), exact(wanted.feats), 1e-5, 1e-5)


def test_a_sum_may_be_of_what_it_waits_for():
    net, x = Block(), tensor()
    net.eval()

    def own():
        y = net.conv1(x)
        return net.relu(net.norm1(y)) + y, y

    total, y = own()
    with pending.apart():
        wanted, _ = own()
    np.testing.assert_allclose(exact(total.feats), exact(wanted.feats), 1e-5, 1e-5)
    np.testing.assert_array_equal(exact(y.feats), exact(net.conv1(x).feats))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_sum_of_what_was_read_waits_for_an_activation(dtype):
    net, x = Block(), tensor(dtype=getattr(mx, dtype))
    net.set_dtype(x.dtype)
    parts = [net.conv1(x), net.conv2(x), x]
    mx.eval([part.feats for part in parts])
    a, b, c = parts
    most = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    for total in (
        lambda: a + b,
        lambda: net.relu(a + b),
        lambda: ops.silu(a + c),
        lambda: ops.gelu(c + a + b),
        lambda: ops.elu(a + b + c) + a,
        lambda: net.relu(a + b) + (a + b),
    ):
        got = total()
        assert type(got) is Pending
        with pending.apart():
            wanted = total()
        assert got.dtype == x.dtype and got.key == wanted.key
        limit = most * np.abs(exact(wanted.feats)).max()
        np.testing.assert_allclose(exact(got.feats), exact(wanted.feats), 0, limit)


@pytest.mark.parametrize("rows", (0, 1))
@pytest.mark.parametrize("channels", (1, 7))
def test_sums_of_few_rows_and_odd_channels(rows, channels):
    coords = mx.array([[3, -5, 0, -9]] * rows, dtype=mx.int32).reshape(rows, 4)
    feats = mx.array(cases.features(2 * rows, channels, 4)).reshape(2, rows, channels)
    x = ml.SparseTensor(coords, feats[0])
    conv = nn.SubmConv3d(channels, channels, 3)
    a, b = conv(x), x.replace(feats[1])
    a.feats  # noqa: B018 (computed as it is read)
    for total in (lambda: a + b, lambda: ops.silu(b + a), lambda: ops.relu(a + b + x)):
        got = total()
        with pending.apart():
            wanted = total()
        assert type(got) is Pending and got.shape == (rows, channels)
        np.testing.assert_allclose(exact(got.feats), exact(wanted.feats), 1e-6, 1e-6)


def test_gradients_of_sums():
    net, x = Block(), tensor()
    by = mx.array(cases.features(len(x), C, 9))

    def total(feats):
        a = net.conv1(x.replace(feats))
        a.feats  # noqa: B018 (computed as it is read)
        return (ops.silu(a + x.replace(feats) + a).feats * by).sum()

    dx = mx.grad(total)(x.feats)
    with pending.apart():
        wanted = mx.grad(total)(x.feats)
    np.testing.assert_allclose(exact(dx), exact(wanted), 1e-5, 1e-5)


def test_under_a_memory_limit_nothing_waits():
    with ml.memory_limit("1 GB"):
        assert type(nn.SubmConv3d(C, C, 3)(tensor())) is ml.SparseTensor
    assert type(nn.SubmConv3d(C, C, 3)(tensor())) is Pending


def test_what_follows_but_is_no_epilogue():
    net, x = Block(), tensor()
    net.eval()
    for follow in (
        lambda y: net.norm2(net.norm1(y)),
        lambda y: net.relu(net.relu(net.norm1(y))) + x,
        lambda y: net.norm1(y) + x + x,
        lambda y: net.norm1(y) + 1,
        lambda y: net.norm1(y) + x.astype(mx.float16),
        lambda y: nn.LeakyReLU()(net.norm1(y)),
        lambda y: nn.GroupNorm(2, C)(y),
        lambda y: net.norm1(y) * x - y,
    ):
        y = follow(net.conv1(x))
        with pending.apart():
            wanted = follow(net.conv1(x))
        np.testing.assert_allclose(exact(y.feats), exact(wanted.feats), 1e-5, 1e-5)


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_a_sum_without_a_norm(dtype, bias):
    """It is the convolution's, in training too, where its gradient is that of both."""
    net, x = Block(bias), tensor(dtype=getattr(mx, dtype))
    net.set_dtype(x.dtype)
    by = mx.array(cases.features(len(x), C, 9))

    def step(feats, weight):
        net.conv1.weight = weight
        given = x.replace(feats)
        return ((net.conv1(given) + given).feats * by).sum()

    def run():
        return mx.value_and_grad(step, (0, 1))(x.feats, net.conv1.weight)

    (_, (dx, dw)), _, count = told(run)
    assert count == 3
    with ml.trace() as trace:
        run()
    assert "residual" in str(trace.records[0].choice.plan.problem.epilogue)
    with pending.apart():
        (_, (dx_wanted, dw_wanted)) = run()
    most = 1e-5 if dtype == "float32" else 0.02
    for got, wanted in ((dx, dx_wanted), (dw, dw_wanted)):
        limit = most * (1 + np.abs(exact(wanted)).max())
        np.testing.assert_allclose(exact(got), exact(wanted), most, limit)


def test_a_sum_and_an_activation_without_a_norm():
    """Where a gradient may come SiLU is not the convolution's, and ReLU is."""
    net, x = Block(), tensor()
    both = lambda: net.relu(net.conv1(x) + x)  # noqa: E731
    _, _, count = told(both)
    with ml.trace() as trace:
        y = both()
    assert count == 1
    assert trace.records[0].choice.plan.problem.epilogue.parts == (
        "shift", "residual", "ReLU",
    )  # fmt: skip
    with pending.apart():
        np.testing.assert_allclose(exact(y.feats), exact(both().feats), 1e-5, 1e-5)
    for act, there in ((net.relu, "relu"), (ops.silu, "")):

        def total(feats, act=act):
            return act(net.conv1(x.replace(feats)) + x).feats.sum()

        with ml.trace() as trace:
            mx.grad(total)(x.feats)
        parts = [record.problem.epilogue for record in trace]
        assert [each and each.activation for each in parts] == [there, None, None]
