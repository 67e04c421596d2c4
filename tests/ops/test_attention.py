"""Sparse attention against dense masked attention in float64, and its laws."""

from contextlib import nullcontext

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from attending import KINDS, gradients, heads, labels, run
from reference_attention import dense, tensor

import mlx_lattice as ml
from mlx_lattice import backends, ops, registry
from mlx_lattice.devices import PROFILES as DEVICES
from mlx_lattice.ops import attention_calls


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", ("batches", "negative", "block", "far", "one"))
@pytest.mark.parametrize("kind", KINDS)
def test_is_dense_masked_attention(kind, name, dtype):
    x = tensor(name)
    q, k, v = heads(x, dtype=dtype)
    y = run(kind, q, k, v, x)
    assert y.dtype == q.dtype
    ref.assert_close(y, dense(q, k, v, labels(x, kind))[0], dtype)


@pytest.mark.parametrize("d", (1, 2, 4))
def test_other_dimensions(d):
    x = tensor(d=d)
    q, k, v = heads(x)
    cells = np.floor_divide(np.array(x.coords), [1] + [2] * d)
    found = [tuple(row) for row in cells.tolist()]
    y = ops.window_attention(q, k, v, x, 2)
    ref.assert_close(y, dense(q, k, v, found)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_queries_and_scale(kind):
    x = tensor()
    q, k, v = heads(x, count=4, kv=2)
    y = run(kind, q, k, v, x, scale=0.3)
    ref.assert_close(y, dense(q, k, v, labels(x, kind), 0.3)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    x = tensor(n=40)
    q, k, v = heads(x)
    dy = cases.features(len(x), 20, 9).reshape(len(x), 4, 5)
    expected = gradients(q, k, v, labels(x, kind), dy)
    _, grads = mx.vjp(lambda *a: run(kind, *a, x), [q, k, v], [mx.array(dy)])
    for grad, wanted in zip(grads, expected, strict=True):
        ref.assert_close(grad, wanted)


@pytest.mark.parametrize("device", ("cpu", "h200"))
@pytest.mark.parametrize("portable", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_queries_keys_and_values_in_one_array(kind, portable, device, monkeypatch):
    """They are moved together, and their gradient is one array; padded as on a GPU."""
    padding = attention_calls.PADDING
    monkeypatch.setitem(padding, "cpu", padding[DEVICES[device].backend])
    x = tensor(n=150)
    q, k, v = heads(x, value=6)
    dy = cases.features(len(x), 24, 9).reshape(len(x), 4, 6)
    found = labels(x, kind)
    with backends.portable_only() if portable else nullcontext():
        all_three = lambda a: run(kind, a, None, None, x)  # noqa: E731
        given = mx.stack([q, k, v], axis=1)
        (y,), (grad,) = mx.vjp(all_three, [given], [mx.array(dy)])
        ref.assert_close(y, dense(q, k, v, found)[0])
        wanted = np.stack(gradients(q, k, v, found, dy), axis=1)
        ref.assert_close(grad, wanted)
        _, (tangent,) = mx.jvp(all_three, [given], [mx.ones_like(given)])
        dot = (grad.sum() - (tangent * mx.array(dy)).sum()).item()
    assert abs(dot) < 1e-3 * np.abs(wanted).sum()


def test_gradients_of_gradients_and_forward_mode():
    x = tensor(n=20)
    q, k, v = heads(x)
    dq = mx.array(cases.features(len(x), 24, 3).reshape(q.shape))
    total = lambda q: (run("window", q, k, v, x) ** 2).sum()  # noqa: E731
    slope = lambda q: (mx.grad(total)(q) * dq).sum()  # noqa: E731
    second, step = mx.grad(slope)(q), 1e-2
    expected = (mx.grad(total)(q + step * dq) - mx.grad(total)(q - step * dq)) / (
        2 * step
    )
    ref.assert_close(second, np.array(expected), "float16")
    (value,), (tangent,) = mx.jvp(total, [q], [dq])
    assert value.item() == pytest.approx(total(q).item(), rel=1e-5)
    assert tangent.item() == pytest.approx((mx.grad(total)(q) * dq).sum().item(), 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_crosses_a_group(kind):
    """NaN in one group leaves every bit of the others."""
    x = tensor()
    q, k, v = heads(x)
    found = labels(x, kind)
    bad = mx.array([label == found[0] for label in found])[:, None, None]
    before = run(kind, q, k, v, x)
    after = run(kind, *(mx.where(bad, mx.nan, a) for a in (q, k, v)), x)
    good = ~np.array(bad)[:, 0, 0]
    np.testing.assert_array_equal(np.array(after)[good], np.array(before)[good])
    assert np.isnan(np.array(after)[~good]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_bounded_size(kind, monkeypatch):
    """Splitting groups and queries to bound a call changes nothing."""
    x = tensor(n=80)
    q, k, v = heads(x)
    whole = run(kind, q, k, v, x)
    for limit in (1, 500, 3000):
        monkeypatch.setattr(attention_calls, "SCORES", limit)
        ref.assert_close(run(kind, q, k, v, x), np.array(whole))


@pytest.mark.parametrize("kind", [*KINDS, "filled"])
def test_an_element_alone_has_the_same_bits_on_the_cpu(kind):
    """Its groups are then attended as they are, whatever the others are like."""
    x = tensor(n=120)
    if registry.serving() != "cpu":
        pytest.skip("elsewhere groups are padded to the longest of their bucket")
    function, options = KINDS.get(kind, (ops.serialized_attention, {"patch": 16}))
    if kind == "filled":
        options = options | {"last_patch": "fill", "bits": 5}
        coords = np.unique(np.abs(np.array(x.coords)), axis=0)
        x = ml.SparseTensor(mx.array(coords), mx.ones((len(coords), 1)))
    q, k, v = heads(x)
    both = function(q, k, v, x, **options)
    for b in range(2):
        rows = mx.array(np.flatnonzero(np.array(x.coords)[:, 0] == b))
        coords = x.coords[rows] - mx.array([b, 0, 0, 0])
        alone = ml.SparseTensor(coords, mx.ones((rows.size, 1)))
        y = function(q[rows], k[rows], v[rows], alone, **options)
        assert mx.array_equal(y, both[rows]).item()


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind):
    x = tensor("empty")
    q, k, v = heads(x)
    assert run(kind, q, k, v, x).shape == (0, 4, 5)
    grad = mx.grad(lambda v: run(kind, q, k, v, x).sum())(v)
    assert grad.shape == v.shape
    x = tensor(batch_size=40)  # empty elements, the last ones among them
    q, k, v = heads(x)
    ref.assert_close(run(kind, q, k, v, x), dense(q, k, v, labels(x, kind))[0])
