"""Nets written by hand: a norm, a sum and an activation that are called one by one are
the convolution's before them, and nobody can tell but by the launches.
"""

import copy
import gc

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from contractions import exact

import mlx_lattice as ml
from mlx_lattice import contraction, nn, ops, pending, settings
from mlx_lattice.geometry import sync
from mlx_lattice.numerics import asked_precision
from mlx_lattice.ops import fusion
from mlx_lattice.pending import Pending

C = 8


def tensor(channels=C, dtype=mx.float32, seed=0):
    coords = cases.geometry("batches", 3, 80)
    feats = mx.array(cases.features(len(coords), channels, seed)).astype(dtype)
    return ml.SparseTensor(mx.array(coords), feats)


class Block(nn.Module):
    """A residual block, and the ways in which one is written."""

    def __init__(self, bias=True):
        super().__init__()
        mx.random.seed(0)
        self.conv1, self.norm1 = nn.SubmConv3d(C, C, 3, bias=bias), nn.BatchNorm(C)
        self.conv2, self.norm2 = nn.SubmConv3d(C, C, 3, bias=bias), nn.BatchNorm(C)
        self.down, self.relu = nn.Conv3d(C, C, 2, stride=2), nn.ReLU()
        self.up, self.norm3 = nn.ConvTranspose3d(C, C, 2, stride=2), nn.BatchNorm(C)
        keys = iter(mx.random.split(mx.random.key(1), 12))
        for norm in (self.norm1, self.norm2, self.norm3):
            for name in ("weight", "running_var"):
                norm[name] = mx.random.uniform(0.5, 2, (C,), key=next(keys))
            for name in ("bias", "running_mean"):
                norm[name] = mx.random.normal((C,), key=next(keys))

    def rebound(self, x):
        out = self.conv1(x)
        out = self.norm1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.norm2(out)
        out += x
        return self.relu(out)

    def nested(self, x):
        out = ops.gelu(self.norm1(self.conv1(x)))
        return ops.silu(x + self.norm2(self.conv2(out)))

    def onto_a_skip(self, x):
        out = self.norm3(self.up(self.down(x), x))
        return self.relu(out + x)


BLOCKS = {"rebound": 2, "nested": 2, "onto_a_skip": 2}


def told(call):
    """What a call returns, the parts of its norms, and its contractions."""
    seen = []
    with fusion.observe(seen.append), ml.trace() as trace:
        result = call()
    return result, [norm.parts for norm in seen if norm.launches == 0], len(trace)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_written_by_hand(name, bias, dtype):
    net, x = Block(bias), tensor(dtype=getattr(mx, dtype))
    net.set_dtype(getattr(mx, dtype))
    net.eval()
    block = getattr(net, name)
    y, parts, count = told(lambda: block(x))
    assert count == BLOCKS[name]
    assert any("residual" in each and len(each) == 3 for each in parts)
    with pending.apart():
        wanted, parts, count = told(lambda: block(x))
    assert not parts and count == BLOCKS[name]
    most = 1e-5 if dtype == "float32" else 0.05
    np.testing.assert_allclose(exact(y.feats), exact(wanted.feats), most, most)


def test_quantised_layers_too():
    net, x = Block(), tensor(32)
    net.conv1 = nn.SubmConv3d(32, C, 3).to_quantized(group_size=32, bits=4)
    net.eval()
    call = lambda: net.relu(net.norm1(net.conv1(x)))  # noqa: E731
    y, parts, _ = told(call)
    assert parts == [("BatchNorm", "ReLU")]
    with pending.apart():
        np.testing.assert_allclose(exact(y.feats), exact(call().feats), 1e-5, 1e-5)


def test_what_is_held_is_computed_once():
    net, x = Block(), tensor()
    net.eval()

    def held():
        y = net.conv1(x)
        z = net.relu(net.norm1(y))
        return y, z + y

    (y, z), parts, count = told(held)
    assert not parts and count == 1
    a = net.conv1(x).feats
    np.testing.assert_array_equal(exact(y.feats), exact(a))
    np.testing.assert_allclose(exact(z.feats), exact(net.relu(net.norm1(a)) + a), 1e-5)

    def last_first():
        y = net.conv1(x)
        z = net.relu(net.norm1(y))
        mx.eval(z.feats)
        return y.feats, net.norm1(y).feats

    (_, again), parts, count = told(last_first)
    assert not parts and count == 1
    np.testing.assert_allclose(exact(again), exact(net.norm1(a)), 1e-5)
    y = net.conv1(x)
    mx.eval(y.feats)  # read: a norm of it begins there
    parts, count = told(lambda: net.norm1(y))[1:]
    assert not parts and count == 0


@pytest.mark.parametrize("reads", ("zy", "yz", "z", "zyz"))
def test_a_norm_that_is_held_too_is_computed_once(reads):
    """As of a block that adds its norm to a later branch."""
    net, x = Block(), tensor()
    net.eval()

    def held():
        y = net.norm1(net.conv1(x))
        made = {"y": y, "z": net.relu(y) + y}
        return [made[name].feats for name in reads]

    feats, parts, count = told(held)
    assert parts == [("BatchNorm",)] and count == 1
    y = exact(net.norm1(net.conv1(x).feats))
    wanted = {"y": y, "z": np.maximum(y, 0) + y}
    for name, found in zip(reads, feats, strict=True):
        np.testing.assert_allclose(exact(found), wanted[name], 1e-5, 1e-5)


def test_a_name_that_is_bound_again_holds_nothing():
    net, x = Block(), tensor()
    net.eval()

    def before(x):
        out = net.conv1(x)
        out = net.conv2(net.relu(net.norm1(out)))
        return net.relu(out + x)

    y, parts, count = told(lambda: before(x))
    assert parts == [("BatchNorm", "ReLU")] and count == 2
    with pending.apart():
        wanted = before(x)
    np.testing.assert_allclose(exact(y.feats), exact(wanted.feats), 1e-5, 1e-5)


def test_a_norm_of_what_is_held_has_its_activation():
    net, x, seen = Block(), tensor(), []
    net.eval()
    with fusion.observe(seen.append), ml.trace() as trace:
        y = net.conv1(x)
        z = net.conv2(net.relu(net.norm1(y))) + y
    assert [(norm.parts, norm.launches == 0) for norm in seen] == [
        (("BatchNorm", "ReLU"), False)
    ]
    assert len(trace) == 2
    with pending.apart():
        wanted = net.conv2(net.relu(net.norm1(net.conv1(x)))) + y
    np.testing.assert_allclose(exact(z.feats), exact(wanted.feats), 1e-5, 1e-5)


@pytest.mark.parametrize("follow", ("conv2", "down", "relu"))
def test_what_several_wait_for_is_computed_once(follow):
    net, x = Block(), tensor()
    net.eval()

    def both():
        y = net.relu(net.norm1(net.conv1(x)))
        return net.conv2(y), getattr(net, follow)(y)

    found, parts, count = told(both)
    assert parts == [("BatchNorm", "ReLU")] and count == 2 + (follow != "relu")
    with pending.apart():
        wanted = both()
    for got, each in zip(found, wanted, strict=True):
        np.testing.assert_allclose(exact(got.feats), exact(each.feats), 1e-5, 1e-5)


def test_never_a_whole_net_waits():
    conv, y = nn.SubmConv3d(C, C, 1, bias=False), tensor()
    conv.weight = mx.eye(C).reshape(C, 1, 1, 1, C)
    wanted = exact(y.feats)
    for _ in range(400):
        y = conv(y)
    np.testing.assert_allclose(exact(y.feats), wanted, 1e-5)


def test_what_follows_is_of_the_features_that_there_were():
    net, x = Block(), tensor()
    net.eval()
    y = net.conv1(x)
    wanted = [exact(net.relu(y.feats)), exact(net.relu(net.norm1(y.feats)))]
    y = net.conv1(x)
    found = [net.relu(y), net.relu(net.norm1(y)), net.conv2(y)]
    y.feats = mx.ones(y.shape)
    for got, each in zip(found, wanted, strict=False):
        np.testing.assert_allclose(exact(got.feats), each, 1e-5, 1e-5)
    again = net.conv2(y.replace(net.conv1(x).feats))
    np.testing.assert_allclose(exact(found[2].feats), exact(again.feats), 1e-5, 1e-5)
    assert (y.feats == 1).all().item() and (net.relu(y).feats == 1).all().item()


def test_what_is_read_holds_nothing_that_it_was_computed_from():
    net, x = Block(), tensor()
    net.eval()
    y = net.nested(x)
    result = y._result
    assert result.epilogue.residual is not None and result.before is not None
    mx.eval(y.feats)
    held = {name for name in result.__slots__ if getattr(result, name) is not None}
    held -= {"is_awaited", "is_norm", "is_of_trace", "is_used"}
    assert held == {"feats", "tensor"}


def test_a_result_is_of_the_arrays_that_there_were():
    net, x = Block(), tensor()
    net.eval()
    with pending.apart():
        wanted = exact(net.relu(net.norm1(net.conv1(x))).feats)
    y = net.norm1(net.conv1(x))
    net.conv1.weight, net.norm1.bias = net.conv1.weight * 2, net.norm1.bias + 1
    y = net.relu(y)
    net.norm1.running_mean, net.norm1.eps = net.norm1.running_mean + 1, 1.0
    x.feats = x.feats * 3
    net.train()
    np.testing.assert_allclose(exact(y.feats), wanted, 1e-5, 1e-5)


def change(array):
    array *= -3  # the same object is another array then
    array[0] = 7


def of_residual(net, x, y):
    return net.relu(net.norm1(net.conv1(x)) + y)


IN_PLACE = {
    "weight": (lambda net, x, y: net.conv1(x), lambda net, x, y: net.conv1.weight),
    "bias": (lambda net, x, y: net.conv1(x), lambda net, x, y: net.conv1.bias),
    "features": (lambda net, x, y: net.conv1(x), lambda net, x, y: x.feats),
    "residual": (of_residual, lambda net, x, y: y.feats),
    "statistics": (of_residual, lambda net, x, y: net.norm1.running_mean),
    "scale": (of_residual, lambda net, x, y: net.norm1.weight),
    "norm": (lambda net, x, y: net.norm1(x), lambda net, x, y: x.feats),
    "norm's": (lambda net, x, y: net.norm1(x), lambda net, x, y: net.norm1.bias),
    "groups": (lambda net, x, y: net.groups(x), lambda net, x, y: net.groups.weight),
    "gate": (lambda net, x, y: ops.gate(x, net.by), lambda net, x, y: net.by),
    "sum": (lambda net, x, y: y + net.copied(x), lambda net, x, y: y.feats),
    "linear": (lambda net, x, y: net.linear(x), lambda net, x, y: net.linear.weight),
    "rows": (lambda net, x, y: net.rows(x), lambda net, x, y: net.rows.weight),
}


@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_result_is_of_arrays_as_they_were(name, training):
    net = Block()
    net.train(training)
    net.groups, net.rows = nn.GroupNorm(2, C), nn.LayerNorm(C)
    net.linear, net.by = nn.Linear(C, C), mx.random.normal((5, C))
    net.copied = lambda x: net.conv2(x)
    run, changed = IN_PLACE[name]

    def result(later=None):
        x, y = tensor(), tensor(seed=1)
        y = net.conv2(y)
        y.feats  # noqa: B018 (computed as it is read)
        made = run(net, x, y)
        if later is not None:
            later(changed(net, x, y))
        return exact(made.feats)

    wanted = result()
    np.testing.assert_array_equal(result(change), wanted)


def test_a_layer_reads_what_was_there_when_it_was_called():
    net, x = Block(), tensor()
    net.eval()
    y = net.conv1(x)
    z, deep = net.relu(y), net.conv2(y)
    wanted = [exact(net.relu(net.conv1(x).feats)), exact(net.conv2(net.conv1(x)).feats)]
    y.feats += 1
    np.testing.assert_allclose(exact(z.feats), wanted[0], 1e-6, 1e-6)
    np.testing.assert_allclose(exact(deep.feats), wanted[1], 1e-5, 1e-5)
    np.testing.assert_allclose(exact(y.feats), exact(net.conv1(x).feats) + 1, 1e-6)


def test_a_result_is_of_the_settings_that_there_were(monkeypatch):
    net, x, seen = Block(), tensor(), []
    net.eval()
    conv = contraction.conv

    def noted(*arrays, **given):
        stream = mx.default_stream(mx.default_device())
        seen.append((asked_precision(), settings.deterministic.get(), stream))
        return conv(*arrays, **given)

    monkeypatch.setattr(contraction, "conv", noted)
    usual = mx.default_stream(mx.default_device())
    with ml.waive_determinism(), ml.precision("tf32"):
        y = net.norm1(net.conv1(x))
    with ml.trace() as trace:
        mx.eval(y.feats)
    assert seen == [("tf32", False, usual)]
    assert not len(trace) and not trace.norms  # they are not of this block
    stream = mx.new_stream(mx.default_device())
    with mx.stream(stream):
        y = net.norm1(net.conv1(x))
    assert type(y) is Pending and y.feats.shape == (len(x), C)
    assert seen[1:] == [("float32", True, stream)]


def test_a_route_that_cannot_run_raises_at_once():
    with ml.routes.only("pointwise"), pytest.raises(ml.RouteError):
        nn.SubmConv3d(C, C, 3)(tensor())


def test_bad_input_raises_at_once():
    conv = nn.SubmConv3d(C, C, 3)
    with pytest.raises(ValueError, match="channels"):
        conv(tensor(5))
    with pytest.raises(TypeError, match="float16"):
        conv(tensor(dtype=mx.float16))
    with pytest.raises(ValueError, match="expected features of shape"):
        nn.BatchNorm(5).eval()(conv(tensor()))


def test_sizes_are_known_without_it():
    y = nn.SubmConv3d(C, 5, 3)(tensor())
    n = len(tensor())
    assert (y.channels, y.dtype, y.shape, len(y)) == (5, mx.float32, (n, 5), n)
    assert type(y) is Pending and repr(y).startswith(f"SparseTensor({n} rows x 5")
    assert y.F is y.feats and not y._waits()
    y.feats = y.feats * 2  # not a way to do it, but a tensor's
    assert mx.array_equal(y.astype(mx.float16).feats, y.feats.astype(mx.float16))


def test_copies():
    conv, x = nn.SubmConv3d(C, C, 3), tensor()
    other = copy.copy(conv(x))
    np.testing.assert_array_equal(exact(other.feats), exact(conv(x).feats))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        conv(x).nothing  # noqa: B018


def test_a_trace_has_what_nobody_reads():
    net, x = Block(), tensor()
    net.eval()
    with ml.trace(net) as trace:
        net.conv1(x)
        y = net.norm1(net.conv2(x))
    assert [record.layer for record in trace] == ["conv1", "conv2"]
    assert not y._waits()
    assert ml.explain(x, net.conv1).choice == trace.records[0].choice


@pytest.mark.parametrize("followed", (False, True))
def test_a_block_that_observes_holds_nothing_that_was_used(followed):
    net, x = Block().eval(), tensor()
    act = net.relu if followed else lambda y: y

    def chain():
        y = x
        for _ in range(20):
            y = act(net.conv1(y))
            mx.eval(y.feats)
        mx.synchronize()
        return y

    chain()
    gc.collect()  # of tests before, which would be freed meanwhile
    with fusion.observe(lambda _: None):
        before = mx.get_active_memory()
        y = chain()
        held = mx.get_active_memory() - before
    assert y.feats.nbytes <= held < 5 * y.feats.nbytes


def test_a_compiled_function_may_read_it_first():
    net, x = Block(), tensor()
    net.eval()
    y, wanted = net.norm1(net.conv1(x)), exact(net.norm1(net.conv1(x)).feats)
    for _ in range(2):
        got = mx.compile(lambda scale: y.feats * scale)(mx.array(2.0))
        np.testing.assert_allclose(exact(got), 2 * wanted, 1e-5, 1e-5)
    np.testing.assert_allclose(exact(y.feats), wanted, 1e-5, 1e-5)


@pytest.mark.parametrize("training", (True, False))
def test_a_compiled_norm_of_it_has_one_convolution(training):
    net, x = Block(), tensor()
    net.train(training)
    wanted = exact(Block().train(training).norm1(net.conv1(x)).feats)

    def call():
        y = net.conv1(x)
        return mx.compile(lambda scale: net.norm1(y).feats * scale)(mx.array(2.0))

    got, _, count = told(call)
    np.testing.assert_allclose(exact(got), 2 * wanted, 1e-4, 1e-4)
    assert count == 1


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


def epilogues(call):
    """What a call returns, and what its contractions compute besides sums."""
    with ml.trace() as trace:
        result = call()
    return result, [str(record.problem.epilogue or "") for record in trace]


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
