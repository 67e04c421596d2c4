"""calibrate(): packed weights whose scales are chosen by the activations they meet.

The output error of a layer is, offset by offset, ``sum of |x (W - Q)|^2``: a quadratic
form of the weight's error in the second moments of its input rows. For each group of
channels the search tries narrower ranges, fits scale and bias to the levels that come
out by least squares in that form, and keeps the best.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.nn import Module
from mlx.utils import tree_flatten

from .. import contraction
from ..quantized import (
    DEFAULT_GROUP_SIZE,
    QuantizedWeight,
    check_packing,
    integer_groups,
    levels,
)
from ..quantized import pack as packed_words
from ..relation import Relation
from ..tensor import SparseTensor
from .calibration import (
    Calibration,
    LayerError,
    keep_float,
    observable_layers,
    observe_calls,
    wants_packing,
)
from .integer_calibration import METHODS, calibrate_integers, not_integer
from .linear import packed_linear, why_no_twin
from .quantized import pack

# Shares of a group's range that the search tries.
RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)


def calibrate(
    model: Module,
    batches: Iterable,
    bits: int = 4,
    group_size: int | None = None,
    *,
    activations: int | None = None,
    method: str = "least squares",
    class_predicate: Callable[[str, Module], bool] | None = None,
    call: Callable[[Module, Any], object] | None = None,
) -> tuple[Module, Calibration]:
    """Return a quantised copy of a model, and the error of each of its layers.

    A copy of the model runs twice over the batches, in evaluation mode and in float;
    the model is not changed. The same model and batches give the same bits. A layer
    keeps the plain packing if the search did not lower its true output error.

    With ``activations=8`` features are int8 too, by one scale a layer. A BatchNorm
    that follows a layer wherever that is called is folded into it, and results
    that integer layers alone read stay int8, with the activation and the residual
    before them. Scales that were trained with ``nn.FakeQuant`` are kept. Where a layer
    is called several times, on features too different for one scale, each row has its
    own, and the report says so.

    Args:
        model: a float model of this package's convolutions and of linear layers.
        batches: inputs of the model; a tuple is several arguments.
        bits: 4 or 8.
        group_size: input channels that share a scale: 32, 64 or 128; by default 64.
            Weights of 8 bits for int8 features have none.
        activations: 8 for int8 features; None leaves them in float.
        method: how scales of int8 features are chosen: "least squares" of their
            error, "percentile" (99.99 of magnitudes are not clipped) or "greatest".
        class_predicate: as in ``mlx.nn.quantize``, a bool for each (path, module); by
            default ``nn.keep_float()``.
        call: runs the model that it is given on a batch: ``call(model, batch)``.

    Raises:
        TypeError: ``class_predicate`` gives a layer options of its own.
        ValueError: there is no batch, no layer to pack, features are not finite, or
            bits and group size cannot be packed.
    """
    if activations is None:
        group_size = DEFAULT_GROUP_SIZE if group_size is None else group_size
        check_packing(bits, group_size)
    elif activations != 8:
        raise ValueError(
            f"activations must be 8, or None for floats; got {activations}"
        )
    else:
        group_size = integer_groups(bits, group_size)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    if not isinstance(model, Module):
        raise TypeError(f"calibrate takes a model; got {type(model).__name__}")
    call = _call if call is None else call
    if isinstance(batches, SparseTensor | mx.array):
        raise TypeError(
            "batches are a list of the model's inputs; got one "
            f"{type(batches).__name__}"
        )
    batches = list(batches)
    if not batches:
        raise ValueError("calibrate needs at least one batch of the model's inputs")
    predicate = keep_float() if class_predicate is None else class_predicate
    layers, kept = _to_pack(model, predicate, group_size, activations)
    if not layers:
        why = f"; {predicate}" if isinstance(predicate, keep_float) else ""
        raise ValueError(f"no layer of the model is to be packed{why}")
    if isinstance(predicate, keep_float):
        kept = {**predicate.kept, **kept}
    if activations:
        given = kept, bits, group_size, method, call
        return calibrate_integers(model, batches, list(layers), *given)

    observed = copy.deepcopy(model)
    layers = {p: made for p, (_, made) in observable_layers(observed, layers).items()}
    moments: dict[int, mx.array] = {}

    def gather(layer: Module, x: mx.array, relation: Relation | None, y) -> None:
        seen = _moments(layer, x, relation, group_size)
        moments[id(layer)] = seen + moments.get(id(layer), 0)
        mx.eval(moments[id(layer)])

    observe_calls(observed, layers.values(), batches, gather, call)
    plain, best = {}, {}
    for layer in layers.values():
        plain[id(layer)] = q = pack(layer, group_size, bits)
        if id(layer) in moments:
            best[id(layer)] = _search(q, _storage(layer, q), moments[id(layer)])

    totals: dict[int, mx.array] = {}

    def compare(layer: Module, x: mx.array, relation: Relation | None, y) -> None:
        y = y.astype(mx.float32)
        errors = [
            mx.square(_apply(layer, x, relation, q[id(layer)]) - y).sum()
            for q in (plain, best)
        ]
        now = mx.stack([*errors, mx.square(y).sum()])
        totals[id(layer)] = now + totals.get(id(layer), 0)
        mx.eval(totals[id(layer)])

    observe_calls(observed, layers.values(), batches, compare, call)
    found, chosen = [], {}
    for path, layer in layers.items():
        before = after = None
        chosen[path] = plain[id(layer)]
        if id(layer) in totals:
            wrong, less, norm = totals[id(layer)].tolist()
            if not isfinite(wrong + norm):
                raise ValueError(
                    f"the batches have no error at {path}: its features or its results "
                    "are not all finite; calibrate on others"
                )
            if less < wrong:
                chosen[path] = best[id(layer)]
            scale = norm or 1.0
            before, after = ((e / scale) ** 0.5 for e in (wrong, min(wrong, less)))
        found.append(LayerError(path, before, after))
    report = Calibration(bits, group_size, tuple(found), kept)
    return _quantized_copy(model, chosen, bits, group_size), report


def _call(model: Module, batch: object) -> object:
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _to_pack(
    model: Module, predicate, group_size: int | None, activations: int | None
) -> tuple[dict[str, Module], dict[str, str]]:
    """Return the layers to pack, and why others that could be are not, by path."""
    layers, kept = {}, {}
    for path, module in tree_flatten(model.leaf_modules(), is_leaf=Module.is_module):
        packable = hasattr(module, "to_quantized") and "scales" not in module
        if not packable or not wants_packing(predicate, path, module):
            continue
        why = why_no_twin(module)
        if why is None and activations:
            why = not_integer(module)
        elif why is None and type(module).__module__.startswith("mlx."):
            channels = module.weight.shape[-1]
            if channels % group_size:
                why = f"{channels} channels, and MLX's own layers pack whole groups"
        if why is None:
            layers[path] = module
        else:
            kept[path] = why
    return layers, kept


def _quantized_copy(
    model: Module, chosen: dict[str, QuantizedWeight], bits: int, group_size: int
) -> Module:
    twin = copy.deepcopy(model)
    mlx.nn.quantize(
        twin, group_size, bits, class_predicate=lambda path, _: path in chosen
    )
    modules = dict(twin.named_modules())
    for path, q in chosen.items():
        layer = modules[path]
        # A linear twin holds the same arrays without the axis of offsets.
        layer.weight = q.weight.reshape(layer.weight.shape)
        layer.scales = q.scales.reshape(layer.scales.shape)
        layer.biases = q.biases.reshape(layer.biases.shape)
    mx.eval(twin.parameters())
    return twin


# What a layer meets


def _apply(layer, x: mx.array, relation: Relation | None, q: QuantizedWeight):
    bias = layer.bias if "bias" in layer else None
    if relation is None:
        y = packed_linear(x, q)
        y = y if bias is None else y + bias
    else:
        y = contraction.conv(x, q, relation, groups=layer.groups, bias=bias)
    return y.astype(mx.float32)


def _moments(layer, x: mx.array, relation: Relation | None, size: int) -> mx.array:
    """Return (groups, channel blocks, size, size): sum over edges of x x^T."""
    groups = 1 if relation is None else layer.groups
    x = x.astype(mx.float32)
    if relation is not None:
        # A row counts once for every edge that reads it.
        reads = mx.zeros(x.shape[0])
        if relation.n_edges:
            reads = reads.at[relation.edges[:, 0]].add(1.0)
        x = x * mx.sqrt(reads)[:, None]
    rows, channels = x.shape[0], x.shape[1] // groups
    tail = -channels % size
    x = mx.pad(x.reshape(rows, groups, channels), [(0, 0), (0, 0), (0, tail)])
    x = x.reshape(rows, groups, (channels + tail) // size, size).transpose(1, 2, 0, 3)
    return x.swapaxes(2, 3) @ x


# The search


def _storage(layer: Module, q: QuantizedWeight) -> mx.array:
    """Return the float weight as (K, C_out, blocks, size) float32."""
    c_out, c_in = layer.weight.shape[0], q.in_channels
    w = layer.weight.astype(mx.float32).reshape(c_out, -1, c_in).swapaxes(0, 1)
    padding = q.padded_channels - c_in
    w = mx.concatenate([w, mx.repeat(w[..., -1:], padding, axis=-1)], axis=-1)
    return w.reshape(*w.shape[:2], -1, q.group_size)


def _search(q: QuantizedWeight, w: mx.array, moments: mx.array) -> QuantizedWeight:
    """Return the packing with the least error in the form that the moments define."""
    form = _Form(moments, w.shape)
    scales, biases = (a.astype(mx.float32) for a in (q.scales, q.biases))
    least = form.error(w - _values(w, scales, biases, q.bits))
    low, high = w.min(axis=-1), w.max(axis=-1)
    for share in RANGES:
        step = (high - low) * share / (2**q.bits - 1)
        start = low * share + (1 - share) * mx.clip(mx.zeros_like(low), low, high)
        for s, b in _fitted(form, w, step, start, q):
            error = form.error(w - _values(w, s, b, q.bits))
            better = error < least
            least = mx.where(better, error, least)
            scales, biases = mx.where(better, s, scales), mx.where(better, b, biases)
        mx.eval(least, scales, biases)
    scales, biases = scales.astype(q.dtype), biases.astype(q.dtype)
    flat = w.reshape(*w.shape[:2], -1)
    return q.holding(
        packed_words(flat, scales, biases, q.bits, q.group_size), scales, biases
    )


def _values(w, scales, biases, bits: int) -> mx.array:
    scales, biases = scales[..., None], biases[..., None]
    return scales * levels(w, scales, biases, bits) + biases


def _fitted(form, w, step, start, q: QuantizedWeight):
    """Yield (scales, biases) of a range, and those that fit its levels best."""

    def stored(a: mx.array) -> mx.array:
        return a.astype(q.dtype).astype(mx.float32)

    step, start = stored(step), stored(start)
    yield step, start
    at = levels(w, step[..., None], start[..., None], q.bits)
    m_at, ones = form.times(at), mx.ones_like(at)
    m_one = form.times(ones)
    aa, a1, ll = (at * m_at).sum(-1), m_at.sum(-1), m_one.sum(-1)
    aw, lw = (m_at * w).sum(-1), (m_one * w).sum(-1)
    whole = aa * ll - a1 * a1
    fits = whole > 1e-6 * aa * ll
    whole = mx.where(fits, whole, 1)
    s, b = (aw * ll - lw * a1) / whole, (lw * aa - aw * a1) / whole
    yield stored(mx.where(fits, s, step)), stored(mx.where(fits, b, start))


class _Form:
    """The quadratic form of the moments, on blocks of (K, C_out, blocks, size)."""

    def __init__(self, moments: mx.array, shape: tuple[int, ...]):
        self.groups, self.blocks, self.size = moments.shape[:3]
        self.shape = tuple(shape)
        # A little of the identity keeps channels that no row uses near their weight.
        trace = mx.diagonal(moments, axis1=2, axis2=3).mean(axis=(1, 2), keepdims=True)
        floor = 1e-4 * mx.maximum(trace, 1e-12)[..., None]
        self.moments = moments + floor * mx.eye(self.size)

    def times(self, a: mx.array) -> mx.array:
        volume, c_out = self.shape[:2]
        a = a.reshape(volume, self.groups, c_out // self.groups, self.blocks, self.size)
        a = a.transpose(1, 3, 0, 2, 4)
        y = a.reshape(self.groups, self.blocks, -1, self.size) @ self.moments
        y = y.reshape(a.shape).transpose(2, 0, 3, 1, 4)
        return y.reshape(self.shape)

    def error(self, a: mx.array) -> mx.array:
        return (a * self.times(a)).sum(axis=-1)
