"""Contractions in float64, by MLX's CPU, which the doctor's proofs compare with."""

from __future__ import annotations

import mlx.core as mx

from ...integer_weight import IntegerWeight
from ...problem import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Problem
from ...quantized import QuantizedWeight
from ...relation import Relation


def by_edges(
    problem: Problem,
    relation: Relation,
    a: mx.array,
    b: mx.array | QuantizedWeight | IntegerWeight,
    scale: mx.array | None = None,
) -> mx.array:
    """Contract offset by offset in float64, on MLX's CPU: call it in its stream.

    Args:
        problem: the facts.
        relation: the layer's (untransposed) one.
        a: what the pass gathers: x, or dy for an input gradient.
        b: the weight, in the problem's layout, or dy for a weight gradient.
        scale: of integer sums.
    """
    p, groups = problem, problem.groups
    if isinstance(b, IntegerWeight):
        b = b.integers()[..., : b.in_channels].swapaxes(1, 2)
    elif isinstance(b, QuantizedWeight):
        b = b.dense(mx.float32)
    elif p.pass_ != WEIGHT_GRAD and p.layout == "mlx":
        b = b.transpose(1, 2, 0)
    a, b = a.astype(mx.float64), b.astype(mx.float64)
    edges, counts = relation.edges, relation.edge_counts
    shape = (p.volume, p.c_in // groups, groups, p.c_out // groups)
    rows = {FORWARD: (p.n_out, p.c_out), INPUT_GRAD: (p.n_in, p.c_in)}
    # The edges of an offset stand together.
    parts, first = [], 0
    if p.pass_ != WEIGHT_GRAD:
        y = mx.zeros(rows[p.pass_], dtype=mx.float64)
    for k, count in enumerate(counts):
        i, o = edges[first : first + count, 0], edges[first : first + count, 1]
        first += count
        if p.pass_ == WEIGHT_GRAD:
            parts.append(_grad(a[i], b[o], groups) if count else mx.zeros(shape[1:]))
            continue
        if not count:
            continue
        w = b[k].reshape(shape[1:])
        if p.pass_ == FORWARD:
            y = y.at[o].add(_times(a[i], w))
        else:
            y = y.at[i].add(_times(a[o], w.transpose(2, 1, 0)))
        mx.eval(y)
    if p.pass_ != WEIGHT_GRAD:
        return y if scale is None else y * scale.astype(mx.float64)
    y = mx.stack([part.astype(mx.float64) for part in parts])
    y = y.reshape(p.volume, p.c_in // groups, p.c_out)
    return y.transpose(2, 0, 1) if p.layout == "mlx" else y


def _times(rows: mx.array, w: mx.array) -> mx.array:
    """Return rows of (inputs, groups, outputs)."""
    inputs, groups, outputs = w.shape
    if groups == 1:
        return rows @ w[:, 0]
    each = rows.reshape(len(rows), groups, 1, inputs).transpose(1, 0, 2, 3)
    found = (each @ w.transpose(1, 0, 2)[:, None]).transpose(1, 0, 2, 3)
    return found.reshape(len(rows), groups * outputs)


def _grad(x: mx.array, dy: mx.array, groups: int) -> mx.array:
    """Return the (inputs, groups, outputs) of an offset's weight gradient."""
    x = x.reshape(len(x), groups, -1).transpose(1, 2, 0)
    dy = dy.reshape(len(dy), groups, -1).transpose(1, 0, 2)
    return (x @ dy).transpose(1, 0, 2)
