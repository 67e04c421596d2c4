"""What layers do, in MLX's float64 operations on the CPU, over the oracle's relations.

Differentiable to any order, by MLX's own rules alone. Nothing here imports the library.
"""

from functools import cached_property

import mlx.core as mx
import numpy as np
import reference as ref


def doubled(array) -> mx.array:
    """An array in float64."""
    if isinstance(array, mx.array):
        array = np.array(array.astype(mx.float32), copy=False)
    return mx.array(np.asarray(array, np.float64), dtype=mx.float64)


def indices(values) -> mx.array:
    """Places of rows."""
    return mx.array(np.asarray(values, np.int32))


def taken(x, at):
    """Return rows of places; MLX's own rule for the gradient of none of them raises."""
    return x[indices(at)] if len(at) else mx.zeros((0, x.shape[1]), dtype=mx.float64)


def added(rows, at, count: int):
    """Return (count, C) sums of rows at places."""
    zeros = mx.zeros((count, rows.shape[1]), dtype=mx.float64)
    return zeros.at[indices(at)].add(rows) if len(at) else zeros


class Rows:
    """A coordinate set, and its relations to others."""

    def __init__(self, coords, batches: int):
        self.coords = np.asarray(coords, np.int64)
        self.batches = batches
        self._relations = {}

    def __len__(self) -> int:
        return len(self.coords)

    @property
    def batch(self) -> np.ndarray:
        """The batch index of each row."""
        return self.coords[:, 0]

    @cached_property
    def counts(self) -> mx.array:
        """(B, 1) rows of each batch element, at least 1."""
        found = np.bincount(self.batch, minlength=self.batches)
        return doubled(np.maximum(found, 1))[:, None]

    @cached_property
    def places(self) -> dict:
        """The row of each site."""
        return {row: i for i, row in enumerate(ref.rows_of(self.coords))}

    def of(self, coords) -> "Rows":
        """Another set of the same batch."""
        return Rows(coords, self.batches)

    def relation(self, kind: str, target: "Rows | None" = None, **facts):
        """Return (edges of each offset, output rows); kept."""
        key = kind, id(target), *sorted((k, str(v)) for k, v in facts.items())
        if key not in self._relations:
            to = None if target is None else target.coords
            made = ref.relation(kind, self.coords, target=to, **facts)
            volume, edges = len(made.offsets), made.edges
            by = [edges[edges[:, 2] == k, :2] for k in range(volume)]
            self._relations[key] = by, made.out_coords, target
        return self._relations[key][:2]


def contracted(x, w, relation, bias=None):
    """``y[o] = sum of x[i] @ W[k]``; w: (C_out, ..., C_in / groups)."""
    per_offset, out = relation
    c_out, c_in = w.shape[0], w.shape[-1]
    groups, w = x.shape[1] // c_in, w.reshape(c_out, -1, c_in)
    y = mx.zeros((len(out), c_out), dtype=mx.float64)
    for k, edges in enumerate(per_offset):
        if not len(edges):
            continue
        rows = taken(x, edges[:, 0])
        parts = [
            a @ b.T
            for a, b in zip(
                mx.split(rows, groups, 1), mx.split(w[:, k], groups, 0), strict=True
            )
        ]
        y = y + added(mx.concatenate(parts, 1), edges[:, 1], len(out))
    return y if bias is None else y + bias


def pooled(x, relation, mode: str):
    """The greatest, sum or mean over the edges of each output row."""
    per_offset, out = relation
    edges = np.concatenate(per_offset)
    return reduced(taken(x, edges[:, 0]), edges[:, 1], len(out), mode)


def reduced(x, segments, count: int, mode: str):
    """Rows by segments; equal greatest values share the gradient."""
    if mode != "max":
        total = added(x, segments, count)
        sizes = np.maximum(np.bincount(segments, minlength=count), 1)
        return total if mode == "sum" else total / doubled(sizes)[:, None]
    if not len(segments):
        return added(x, segments, count)
    best = (
        mx.full((count, x.shape[1]), -np.inf, dtype=mx.float64)
        .at[indices(segments)]
        .maximum(x)
    )
    is_best = mx.stop_gradient((x == taken(best, segments)).astype(mx.float64))
    shares = is_best / taken(added(is_best, segments, count), segments)
    return added(x * mx.stop_gradient(shares), segments, count)


def normalised(x, rows: Rows, kind: str, parameters: dict, training: bool):
    """A norm, by its kind: "batch", "instance", "group 2", "layer" or "rms"."""
    name, _, groups = kind.partition(" ")
    channels = x.shape[1]
    if name == "rms":
        mean, var = 0, mx.square(x).mean(1, keepdims=True)
    elif name == "layer":
        mean = x.mean(1, keepdims=True)
        var = mx.square(x - mean).mean(1, keepdims=True)
    elif name == "batch" and not training:
        mean, var = parameters["running_mean"], parameters["running_var"]
    elif name == "batch":
        mean = x.mean(0)
        var = mx.square(x - mean).mean(0)
    else:
        per = channels // int(groups or channels)

        def means(values):
            lines = reduced(values, rows.batch, rows.batches, "mean")
            lines = lines.reshape(rows.batches, -1, per).mean(-1)
            return taken(mx.repeat(lines, per, axis=1), rows.batch)

        mean = means(x)
        var = means(mx.square(x - mean))
    return affine((x - mean) / mx.sqrt(var + 1e-5), parameters)


def affine(y, parameters: dict):
    """By a weight and a bias, where they are."""
    y = y * parameters["weight"] if "weight" in parameters else y
    return y + parameters["bias"] if "bias" in parameters else y


def linear(x, parameters: dict):
    """One matrix for all rows."""
    y = x @ parameters["weight"].T
    return y + parameters["bias"] if "bias" in parameters else y


def attended(x, heads: int, windows):
    """Softmax attention of (N, 3 C) queries, keys and values among rows of a window."""
    q, k, v = (
        mx.swapaxes(a.reshape(len(a), heads, -1), 0, 1) for a in mx.split(x, 3, 1)
    )
    scores = q @ mx.swapaxes(k, 1, 2) / np.sqrt(q.shape[-1])
    apart = mx.array((windows[:, None] != windows).any(-1))
    scores = mx.where(apart, -np.inf, scores)
    shares = mx.exp(scores - mx.stop_gradient(scores.max(-1, keepdims=True)))
    y = (shares / shares.sum(-1, keepdims=True)) @ v
    return mx.swapaxes(y, 0, 1).reshape(len(x), -1)


ACTIVATIONS = {
    "relu": lambda x: mx.maximum(x, 0),
    "silu": lambda x: x * mx.sigmoid(x),
    "gelu": lambda x: x * (1 + mx.erf(x / np.sqrt(2))) / 2,
    "leaky_relu": lambda x: mx.maximum(x, 0.01 * x),
    "elu": lambda x: mx.where(x > 0, x, mx.exp(mx.minimum(x, 0)) - 1),
    "sigmoid": mx.sigmoid,
    "tanh": mx.tanh,
    None: lambda x: x,
}
