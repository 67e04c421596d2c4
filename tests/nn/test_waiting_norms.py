"""Norms, and shifts, scales and gates by batch element, called by hand: what follows is
part of their launch, in training too, and nobody can tell but by the launches.
"""

import re
from contextlib import nullcontext
from io import StringIO

import cases
import mlx.core as mx
import mlx.utils
import numpy as np
import pytest
import reference as ref
from contractions import exact

import mlx_lattice as ml
from mlx_lattice import backends, devices, nn, ops, pending
from mlx_lattice.ops import fusion

C, B = 8, 3
RELU = nn.ReLU()
# Of few a BatchNorm is one launch on GPUs.
ROWS = 2200, 300


def tensor(rows=2200, batches=B, dtype="float32", seed=0, channels=C):
    """Rows of several elements, one of them empty; not in order."""
    rng = np.random.default_rng(seed)
    of = rng.choice([b for b in range(batches) if b != 1 or batches == 1], rows)
    coords = np.stack([of, np.arange(rows), np.arange(rows) % 7, -of], axis=1)
    feats = mx.array(cases.features(rows, channels, seed) + 1).astype(
        getattr(mx, dtype)
    )
    coords = mx.array(coords.astype(np.int32))
    return ml.SparseTensor(coords, feats, batch_size=batches)


class Net(nn.Module):
    """Layers that are called one after the other, in several ways."""

    def __init__(self, batches=B):
        super().__init__()
        mx.random.seed(0)
        self.batch, self.group = nn.BatchNorm(C), nn.GroupNorm(2, C)
        self.plain = nn.GroupNorm(4, C, affine=False)
        self.instance = nn.InstanceNorm(C, affine=True)
        self.linear = nn.Linear(C, C)
        self.scale, self.shift = mx.random.normal((2, batches, C))
        for name in ("batch", "group", "instance"):
            self[name].weight = mx.random.uniform(0.5, 2, (C,))
            self[name].bias = mx.random.normal((C,))

    def batch_norm(self, x):
        return RELU(self.batch(self.linear(x)) + x)

    def group_norm(self, x):
        return ops.silu(x + self.group(x))

    def instance_norm(self, x):
        return ops.gelu(self.instance(x))

    def modulated(self, x):
        return ops.silu(ops.modulate(self.plain(x), self.shift, self.scale))

    def modulated_twice(self, x):
        x = ops.modulate(self.group(x), self.shift, self.scale)
        return ops.modulate(x, self.scale, self.shift) + x

    def gated_norm(self, x):
        return ops.gate(self.instance(x), self.scale) + x

    def gated(self, x):
        return RELU(ops.gate(x, self.scale) + x)

    def shifted(self, x):
        return ops.modulate(x, self.shift, self.scale)


# The norms that run, and what was fused into each.
WAYS = {
    "batch_norm": [("BatchNorm", "residual", "ReLU")],
    "group_norm": [("GroupNorm", "residual", "SiLU")],
    "instance_norm": [("InstanceNorm", "GELU")],
    "modulated": [("GroupNorm", "SiLU")],
    "modulated_twice": [("GroupNorm",), ("modulate", "residual")],
    "gated_norm": [("InstanceNorm", "residual")],
    "gated": [("gate", "residual", "ReLU")],
    "shifted": [("modulate",)],
}


def told(call):
    seen = []
    with fusion.observe(seen.append):
        result = call()
    return result, [norm.parts for norm in seen if norm.pass_ == "forward"]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("batches", (1, B))
@pytest.mark.parametrize("dtype", ("float32", "float16"))
@pytest.mark.parametrize("name", WAYS)
def test_what_follows_is_part_of_it(name, dtype, batches, rows):
    net, x = Net(batches), tensor(rows, batches, dtype)
    net.set_dtype(x.dtype)
    y, parts = told(lambda: getattr(net, name)(x))
    assert parts == WAYS[name] and y.dtype == x.dtype
    with pending.apart():
        wanted, parts = told(lambda: getattr(net, name)(x))
    assert len(parts) >= len(WAYS[name])
    most = 1e-5 if dtype == "float32" else 0.02
    np.testing.assert_allclose(exact(y.feats), exact(wanted.feats), most, most)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("batches", (1, B))
@pytest.mark.parametrize("name", WAYS)
def test_gradients_and_running_statistics(name, batches, training, rows):
    x, found = tensor(rows, batches), []
    by = mx.array(cases.features(len(x), C, 9))

    def step(net):
        def loss(parameters, feats):
            net.update(parameters)
            return (getattr(net, name)(x.replace(feats)).feats * by).sum()

        made = mx.value_and_grad(loss, argnums=(0, 1))
        return made(net.trainable_parameters(), x.feats), net.parameters()

    for is_apart in (False, True):
        net = Net(batches).train(training)
        if is_apart:
            with pending.apart():
                found.append(step(net))
        else:
            found.append(step(net))
    pairs = zip(*(mlx.utils.tree_flatten(each) for each in found), strict=True)
    for (at, got), (_, wanted) in pairs:
        most = 1e-4 * (1 + np.abs(exact(wanted)).max())
        np.testing.assert_allclose(exact(got), exact(wanted), 1e-3, most, err_msg=at)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    "rows, channels, batches", ((2200, C, 1), (2200, C, B), (1, 5, B), (300, 5, B))
)
def test_shifts_scales_and_gates(rows, channels, batches, dtype):
    """Against float64, forward and back, of odd channels and one row too."""
    x = tensor(rows, batches, dtype, channels=channels)
    of = np.array(x.coords)[:, 0]
    lines = cases.features(2 * batches, channels, 4).reshape(2, batches, channels)
    scales, shifts = (mx.array(a.astype(np.float32)) for a in lines)
    values, scale, shift = map(exact, (x.feats, scales, shifts))
    by = mx.array(cases.features(rows, channels, 9).astype(np.float32))
    by = by.astype(x.dtype)
    dy = exact(by)

    def run(feats, shift, scale):
        y = ops.modulate(x.replace(feats), shift, scale)
        return ops.gate(y, scale).feats

    given = [x.feats, shifts, scales]
    (y,), (dx, dshift, dscale) = mx.vjp(run, given, [by])
    a, b = scale[of], shift[of]
    v = values * (1 + a) + b

    def summed(rows):
        return np.stack([rows[of == e].sum(axis=0) for e in range(batches)])

    for got, wanted in (
        (y, v * a),
        (dx, dy * a * (1 + a)),
        (dshift, summed(dy * a)),
        (dscale, summed(dy * (v + a * values))),
    ):
        ref.assert_close(got, wanted, dtype)


@pytest.mark.parametrize("name", ("batch_norm", "modulated", "gated"))
def test_what_was_read_before_is_not_computed_again(name):
    net, x = Net(), tensor()
    norms = {
        "batch_norm": net.batch,
        "modulated": lambda x: ops.modulate(net.plain(x), net.shift, net.scale),
        "gated": lambda x: ops.gate(x, net.scale),
    }

    def call():
        y = norms[name](x)
        return y.feats, RELU(y)

    (feats, y), parts = told(call)
    assert len(parts) == 1 and "ReLU" not in parts[0]
    np.testing.assert_array_equal(exact(y.feats), np.maximum(exact(feats), 0))


@pytest.mark.parametrize("rows", ROWS)
def test_running_statistics_move_at_the_call(rows):
    net, x = nn.BatchNorm(C), tensor(rows)
    y = net(x)
    values = exact(x.feats)
    np.testing.assert_allclose(exact(net.running_mean), 0.1 * values.mean(axis=0), 1e-5)
    wanted = 0.9 + 0.1 * values.var(axis=0, ddof=1)
    np.testing.assert_allclose(exact(net.running_var), wanted, 1e-5)
    np.testing.assert_allclose(exact(y.feats).mean(axis=0), 0, atol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_running_statistics_that_move_have_no_gradient(rows):
    """As of ``mx.grad`` over all parameters, of features that it does not follow."""
    net, x = nn.BatchNorm(C), tensor(rows)

    def loss(mean, var):
        net.running_mean, net.running_var = mean, var
        return mx.square(net(x).feats).sum()

    for gradient in mx.grad(loss, argnums=(0, 1))(mx.zeros(C), mx.ones(C)):
        assert gradient.shape == (C,) and not exact(gradient).any()


@pytest.mark.skipif(devices.current().backend == devices.CPU, reason="of GPUs")
def test_a_norm_of_few_rows_and_what_follows_are_one_launch():
    """Of running statistics too, which were moved before more followed."""
    net, x = nn.BatchNorm(C), tensor(300)
    y, written = RELU(net(x) + x).feats, StringIO()
    mx.export_to_dot(written, y, net.running_mean, net.running_var)
    names = re.findall(r'label ="(\w+)', written.getvalue())
    assert sum("Kernel" in name for name in names) == 1
    assert not {"Add", "Maximum"}.intersection(names)


@pytest.mark.parametrize("rows", ROWS)
def test_running_statistics_are_of_the_launch_that_has_what_follows(rows):
    """Those of rows that many calls move, and of a norm that reads another's result."""
    x, found = tensor(rows), []
    other = x.replace(x.feats * 2 - 1)

    def twice(net):
        a, b = net(x), net(other)
        return [RELU(each + x).feats for each in (b, a)]

    def once(net):
        return [RELU(net(x) + x).feats]

    for call in (twice, once):
        for block in (nullcontext, pending.apart):
            net = nn.BatchNorm(C)
            with block():
                made = call(net)
            found.append([*made, net.running_mean, net.running_var])
        for got, wanted in zip(*found[-2:], strict=True):
            np.testing.assert_allclose(exact(got), exact(wanted), 1e-5, 1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_a_compiled_function_leaves_running_statistics_that_are_not_its(rows):
    net, x = nn.BatchNorm(C), tensor(rows)
    y, moved = net(x), net.running_mean
    got = mx.compile(lambda scale: RELU(y).feats * scale)(mx.array(2.0))
    assert net.running_mean is moved
    wanted = RELU(nn.BatchNorm(C)(x)).feats
    np.testing.assert_allclose(exact(got), 2 * exact(wanted), 1e-5, 1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_a_compiled_step_moves_running_statistics(rows):
    x, found = tensor(rows), []
    for is_compiled in (True, False):
        net = nn.BatchNorm(C)

        def step(feats, net=net):
            return RELU(net(x.replace(feats)) + x).feats

        if is_compiled:
            step = mx.compile(step, inputs=net.state, outputs=net.state)
        y = [step(x.feats * scale) for scale in (1, 2, 3)]
        mx.eval(y, net.state)
        found.append([*y, net.running_mean, net.running_var])
    for got, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(exact(got), exact(wanted), 1e-5, 1e-5)


@pytest.mark.parametrize("name", WAYS)
def test_second_derivatives_compiled_and_no_rows(name):
    net, x = Net().eval(), tensor(90)

    def total(feats):
        return mx.square(getattr(net, name)(x.replace(feats)).feats).sum()

    by = mx.array(cases.features(len(x), C, 5))
    twice = mx.grad(lambda feats: (mx.grad(total)(feats) * by).sum())
    with pending.apart():
        wanted, plain = twice(x.feats), total(x.feats)
    most = 1e-3 * (1 + np.abs(exact(wanted)).max())
    np.testing.assert_allclose(exact(twice(x.feats)), exact(wanted), 1e-3, most)
    for scale in (1, 1):
        got = mx.compile(total)(x.feats * scale)
        np.testing.assert_allclose(exact(got), exact(plain), 1e-4)
    none = ml.SparseTensor(x.coords[:0], x.feats[:0], batch_size=B)
    assert getattr(net, name)(none).feats.shape == (0, C)


def test_lines_of_a_group_norm():
    """A weight and a bias for each element, handed over at once."""
    net, x = Net(), tensor()
    y = ops.group_norm(x, 4, 1 + net.scale, net.shift, activation="silu")
    np.testing.assert_allclose(
        exact(y.feats), exact(net.modulated(x).feats), 1e-5, 1e-5
    )
    with pytest.raises(ValueError, match="each batch element has its values: expected"):
        ops.group_norm(x, 4, mx.ones((B + 1, C)))


@pytest.mark.parametrize("sequential", (True, False))
def test_a_gradient_through_fixed_statistics_multiplies_once(sequential):
    """Forward and twice back, and the norm by its kernels: nothing of running ones."""
    mx.random.seed(0)
    x = tensor(300)
    net = nn.Sequential(nn.SubmConv3d(C, C, 3), nn.BatchNorm(C), nn.ReLU()).eval()
    conv, norm, relu = net.layers
    norm.running_mean, norm.running_var = mx.random.uniform(0.5, 2, (2, C))

    def total(parameters, feats):
        net.update(parameters)
        given = x.replace(feats)
        y = net(given) if sequential else relu(norm(conv(given)))
        return mx.square(y.feats).sum()

    def step():
        made = mx.value_and_grad(total, argnums=(0, 1))
        return made(net.trainable_parameters(), x.feats)

    with ml.trace() as trace:
        (_, found), parts = told(step)
    assert [str(record.problem.epilogue or "") for record in trace] == [""] * 3
    assert parts == [("BatchNorm", "ReLU")]
    with pending.apart(), backends.portable_only():
        _, wanted = step()
    pairs = zip(*map(mlx.utils.tree_flatten, (found, wanted)), strict=True)
    for (at, got), (_, each) in pairs:
        most = 1e-4 * (1 + np.abs(exact(each)).max())
        np.testing.assert_allclose(exact(got), exact(each), 1e-3, most, err_msg=at)
