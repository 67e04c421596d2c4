"""Nets written by hand: a norm, a sum and an activation that are called one by one are
the convolution's before them, and nobody can tell but by the launches.
"""

import copy
import gc

import cases
import mlx.core as mx
import numpy as np
import pytest
from contractions import exact
from waiting import BLOCKS, Block, C, tensor, told

import mlx_lattice as ml
from mlx_lattice import contraction, nn, ops, pending, settings
from mlx_lattice.numerics import asked_precision
from mlx_lattice.ops import fusion
from mlx_lattice.pending import Pending


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
