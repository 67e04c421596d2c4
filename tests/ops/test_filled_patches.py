"""Patches that are filled, and tables of relative positions, against float64."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
import reference_curves
from attending import heads
from reference_attention import tensor

from mlx_lattice import ops


def filled_by_hand(q, k, v, x, patch, curve, dy=None):
    """Each row's result in its own patch, in float64; with ``dy`` the gradients."""
    q, k, v = (np.array(a, np.float64) for a in (q, k, v))
    low = x.coords.min(axis=0)
    cells = np.array(x.coords - mx.concatenate([mx.zeros_like(low[:1]), low[1:]]))
    bits = max(1, int(cells[:, 1:].max()).bit_length())
    along = reference_curves.order(curve, cells, bits)
    patches = reference_curves.filled(along, cells[:, 0].tolist(), patch)
    y, done = np.zeros((*q.shape[:2], v.shape[2])), set()
    grads = [np.zeros_like(a) for a in (q, k, v)]
    for rows in patches:
        own = [row for row in rows if row not in done]
        done |= set(own)
        scores = np.einsum("ihd,jhd->hij", q[own], k[rows]) * q.shape[2] ** -0.5
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        y[own] = np.einsum("hij,jhd->ihd", p, v[rows])
        if dy is None:
            continue
        dp = np.einsum("ihd,jhd->hij", dy[own], v[rows])
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * q.shape[2] ** -0.5
        grads[0][own] += np.einsum("hij,jhd->ihd", ds, k[rows])
        grads[1][rows] += np.einsum("hij,ihd->jhd", ds, q[own])
        grads[2][rows] += np.einsum("hij,ihd->jhd", p, dy[own])
    return y if dy is None else grads


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", ("batches", "negative", "far", "one"))
@pytest.mark.parametrize("patch, curve", ((7, "z-trans"), (1, "z"), (16, "hilbert")))
def test_filled_patches(patch, curve, name, dtype):
    x = tensor(name)
    q, k, v = heads(x, dtype=dtype)
    y = ops.serialized_attention(q, k, v, x, patch, order=curve, last_patch="fill")
    exact = (ref.to_numpy(a) for a in (q, k, v))
    ref.assert_close(y, filled_by_hand(*exact, x, patch, curve), dtype)


@pytest.mark.parametrize("patch", (4, 9, 100))
def test_gradients_of_filled_patches(patch):
    """A row that two patches see has the gradients of both."""
    x = tensor(n=50)
    q, k, v = heads(x)
    dy = cases.features(len(x), 20, 9).reshape(len(x), 4, 5)
    options = {"order": "hilbert-trans", "last_patch": "fill"}
    run = lambda *a: ops.serialized_attention(*a, x, patch, **options)  # noqa: E731
    grads = mx.vjp(run, [q, k, v], [mx.array(dy)])[1]
    for grad, wanted in zip(
        grads, filled_by_hand(q, k, v, x, patch, "hilbert-trans", dy), strict=True
    ):
        ref.assert_close(grad, wanted)
    tangents = [mx.array(cases.features(len(x), a[0].size, 4)) for a in (q, k, v)]
    tangents = [t.reshape(a.shape) for t, a in zip(tangents, (q, k, v), strict=True)]
    value = (mx.jvp(run, [q, k, v], tangents)[1][0] * mx.array(dy)).sum()
    dot = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    assert value.item() == pytest.approx(dot.item(), rel=1e-3)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("last", ("short", "fill"))
@pytest.mark.parametrize("name", ("batches", "far", "one"))
def test_a_table_of_relative_positions(name, last, dtype):
    """Scores and gradients by the definition; cells as far as int32 goes."""
    x, bound = tensor(name), 2
    q, k, v = heads(x, count=4, kv=2, dtype=dtype)
    table = cases.features(3 * (2 * bound + 1), 4, 7)
    given = mx.array(table).astype(q.dtype)
    options = {"patch": 9, "last_patch": last}

    def run(q, k, v, table):
        return ops.serialized_attention(q, k, v, x, table=table, **options)

    exact, cells = ref.to_numpy(given).astype(np.float64), np.array(x.coords)[:, 1:]
    apart = np.clip(cells[:, None].astype(np.int64) - cells[None], -bound, bound)
    entry = apart + bound + np.arange(3) * (2 * bound + 1)
    bias = exact[entry].sum(axis=2).transpose(2, 0, 1)
    dy = cases.features(len(x), 20, 9).reshape(len(x), 4, 5)
    (y,), grads = mx.vjp(run, [q, k, v, given], [mx.array(dy).astype(q.dtype)])
    wanted, dbias = with_bias(q, k, v, x, 9, last, bias, dy)
    ref.assert_close(y, wanted, dtype)
    slope = np.zeros(table.shape)
    for axis in range(3):
        np.add.at(slope, entry[..., axis], dbias.transpose(1, 2, 0))
    if dtype == "float32":
        ref.assert_close(grads[3], slope)
    assert grads[3].dtype == q.dtype and mx.isfinite(grads[3]).all().item()


def with_bias(q, k, v, x, patch, last, bias, dy):
    """y, and the gradient of the (heads, N, N) bias, in float64."""
    q, k, v = (ref.to_numpy(a).astype(np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, 2, axis=1) for a in (k, v))
    along = ops.curve_order(x).tolist()
    batch = np.array(x.coords)[:, 0].tolist()
    found, done = [], set()
    if last == "fill":
        found = reference_curves.filled(along, batch, patch)
    else:
        for b in sorted(set(batch)):
            rows = [row for row in along if batch[row] == b]
            found += [rows[i : i + patch] for i in range(0, len(rows), patch)]
    y, dbias = np.zeros((*q.shape[:2], v.shape[2])), np.zeros(bias.shape)
    for rows in found:
        own = [row for row in rows if row not in done]
        done |= set(own)
        scores = np.einsum("ihd,jhd->hij", q[own], k[rows]) * q.shape[2] ** -0.5
        scores += bias[:, own][:, :, rows]
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        y[own] = np.einsum("hij,jhd->ihd", p, v[rows])
        dp = np.einsum("ihd,jhd->hij", dy[own], v[rows])
        dbias[np.ix_(range(4), own, rows)] = p * (dp - (p * dp).sum(-1, keepdims=True))
    return y, dbias
