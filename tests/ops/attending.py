"""Heads of attention, groups of rows by their definition, and both called."""

import cases
import mlx.core as mx
import numpy as np
from reference_attention import dense

from mlx_lattice import ops
from mlx_lattice.ops import attention_calls

PADDING = attention_calls.PADDING["cpu"]


KINDS = {
    "full": (ops.full_attention, {}),
    "window": (ops.window_attention, {"window": 3}),
    "shifted": (ops.window_attention, {"window": (2, 5, 3), "shift": (1, -2, 7)}),
    "hilbert": (ops.serialized_attention, {"patch": 9}),
    "morton": (
        ops.serialized_attention,
        {"patch": 20, "order": "morton", "shift": 13},
    ),
}


def heads(x, count=4, kv=4, dim=6, value=5, dtype="float32"):
    shapes = (count, dim), (kv, dim), (kv, value)
    arrays = [
        mx.array(cases.features(len(x), a * b, seed).reshape(len(x), a, b))
        for seed, (a, b) in enumerate(shapes)
    ]
    return [a.astype(getattr(mx, dtype)) for a in arrays]


def labels(x, kind):
    """What a row's group is called, by the definition."""
    coords = np.array(x.coords)
    options = KINDS[kind][1]
    if "patch" in options:
        along = np.array(ops.curve_order(x, options.get("order", "hilbert")))
        seen, found = {}, [None] * len(coords)
        for row in along.tolist():
            b = int(coords[row, 0])
            at = seen.get(b, options.get("shift", 0))
            found[row], seen[b] = (b, at // options["patch"]), at + 1
        return found
    cells = coords[:, 1:] * 0
    if "window" in options:
        cells = np.floor_divide(
            coords[:, 1:] + np.array(options.get("shift", 0)), options["window"]
        )
    return [(int(b), *map(int, c)) for b, c in zip(coords[:, 0], cells, strict=True)]


def run(kind, q, k, v, x, **more):
    function, options = KINDS[kind]
    return function(q, k, v, x, **options, **more)


def gradients(q, k, v, found, dy):
    """Those of queries, keys and values, in float64."""
    exact = [np.array(a, np.float64) for a in (q, k, v)]
    _, p = dense(q, k, v, found)
    dp = np.einsum("ihd,jhd->hij", dy, exact[2])
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * q.shape[2] ** -0.5
    return (
        np.einsum("hij,jhd->ihd", ds, exact[1]),
        np.einsum("hij,ihd->jhd", ds, exact[0]),
        np.einsum("hij,ihd->jhd", p, dy),
    )
