"""calibrate(): quantised copies of models, and which layers of a model are packed.

Packed weights: the output error of a layer is, offset by offset,
``sum of |x (W - Q)|^2``: a quadratic form of the weight's error in the second moments
of its input rows. For each group of channels the search tries narrower ranges, fits
scale and bias to the resulting levels by least squares in that form, and keeps the
best. int8_calibration.py has the calibration of int8 features.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from math import isfinite
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.nn import Module
from mlx.utils import tree_flatten, tree_map_with_path

from .. import contraction
from ..problem import FORWARD
from ..quantized import (
    DEFAULT_GROUP_SIZE,
    QuantizedWeight,
    check_packing,
    integer_group_size,
    levels,
)
from ..quantized import pack as packed_words
from ..relation import Relation
from ..routes import launch
from ..tensor import SparseTensor
from .fused import unfused
from .int8 import FakeQuant, put
from .int8_calibration import METHODS, IntegerCalibration, not_integer
from .linear import (
    LinearCall,
    has_twin,
    linear_calls,
    observable,
    packed_linear,
    twin_holding,
    why_no_twin,
)
from .quantized import pack

__all__ = ["fake_quantize", "keep_float"]

# Shares of a group's range that the search tries.
RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)

# Words in the paths of layers that compute a net's result or choose its rows.
HEADS = (
    "head", "classifier", "logits", "final", "output_layer", "to_subdiv", "out_layer",
    "to_latent",
)  # fmt: skip


class keep_float:  # noqa: N801 - reads as the predicate it is
    """A ``class_predicate`` of ``mlx.nn.quantize`` that keeps stems and heads in float.

    Packing saves little in layers with few input channels (stems, depthwise kernels),
    and layers with few outputs compute the net's result. A subclass with a call of its
    own has no packed twin. Printed afterwards, it lists the layers that it kept, and
    why; ``kept`` is the same as a dict.

    Args:
        few_inputs (int): Keep layers with fewer input channels in a group. Default:
            ``16``.
        few_outputs (int): Keep layers with fewer output channels. Default: ``8``.
        names (tuple of str): Keep layers with one of these words in their path.
            Default: the heads of the ``models``, and the layers that choose rows.
    """

    def __init__(
        self,
        few_inputs: int = 16,
        few_outputs: int = 8,
        names: Sequence[str] = HEADS,
    ):
        self.few_inputs, self.few_outputs = few_inputs, few_outputs
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self.kept: dict[str, str] = {}

    def __call__(self, path: str, module: Module) -> bool:
        """Return whether a layer is to be packed; the reason is noted if it is not."""
        if not hasattr(module, "to_quantized") or "scales" in module:
            return False
        self.kept.pop(path, None)
        if reason := self._reason(path, module):
            self.kept[path] = reason
        return reason is None

    def _reason(self, path: str, module: Module) -> str | None:
        for name in self.names:
            if name in path.lower().split("."):
                return f'"{name}" in its path'
        why = why_no_twin(module)
        if why is not None:
            return why
        c_out, *_, c_in = module.weight.shape
        if c_in < self.few_inputs:
            return f"{c_in} input channels a group, fewer than {self.few_inputs}"
        if c_out < self.few_outputs:
            return f"{c_out} output channels, fewer than {self.few_outputs}"
        return None

    def __str__(self) -> str:
        """Return a line for each layer that was kept."""
        if not self.kept:
            return "kept in float: none"
        rows = (f"  {path}: {reason}" for path, reason in self.kept.items())
        return "\n".join(["kept in float:", *rows])

    __repr__ = __str__


def _wants(predicate, path: str, module: Module) -> bool:
    """Return whether a predicate wants a layer to be packed.

    Raises:
        TypeError: it returns options of a layer, as ``mlx.nn.quantize`` takes them.
    """
    wanted = predicate(path, module)
    if isinstance(wanted, dict):
        raise TypeError(
            f"class_predicate must return True or False here; got {wanted} for {path}: "
            "all layers are packed alike"
        )
    return bool(wanted)


def fake_quantize(
    model: Module,
    bits: int = 8,
    group_size: int | None = None,
    *,
    momentum: float | None = 0.1,
    class_predicate: Callable[[str, Module], bool] | None = None,
) -> None:
    """Put ``FakeQuant`` around a model's convolutions and linear layers, in place.

    A layer that a model has twice stays one, and trains as one.

    Args:
        model: a float model.
        bits, group_size, momentum: those of ``FakeQuant``.
        class_predicate: as in ``ml.calibrate``; by default ``keep_float()``.
    """
    predicate = keep_float() if class_predicate is None else class_predicate
    wrapped: dict[int, FakeQuant] = {}

    def wrap(path: str, module: Module) -> Module:
        able = has_twin(module) and "scales" not in module
        if not able or not _wants(predicate, path, module):
            return module
        if id(module) not in wrapped:
            wrapped[id(module)] = FakeQuant(module, bits, group_size, momentum)
        return wrapped[id(module)]

    leaves = model.leaf_modules()
    model.update_modules(tree_map_with_path(wrap, leaves, is_leaf=Module.is_module))


@dataclass(frozen=True)
class LayerError:
    """What quantisation does to one layer's output on the batches.

    Attributes:
        path: the layer's path in the model.
        before: norm of the output's error over the norm of the output, if weights and
            features are rounded by their greatest magnitudes; None if no batch reached
            the layer.
        after: the same error with the scales that calibration chose.
        writes_int8: whether the layer's result stays int8 for the next layer.
        calls: ``after`` of each call, if the model calls the layer several times.
        note: what was done, and why, if the calls differ too much for one scale.
    """

    path: str
    before: float | None
    after: float | None
    writes_int8: bool = False
    calls: tuple[float, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        """Return "0.412% plain 0.305% calibrated, to int8, worst of 2 calls 0.5%"."""
        if self.before is None:
            return "not reached by the batches"
        text = f"{self.before:8.3%} plain {self.after:8.3%} calibrated"
        text += ", to int8" if self.writes_int8 else ""
        if self.calls:
            text += f", worst of {len(self.calls)} calls {max(self.calls):.1%}"
        return f"{text}; {self.note}" if self.note else text


@dataclass(frozen=True)
class Calibration:
    """Errors of every layer that was packed. Prints as a table.

    Attributes:
        bits, group_size: how weights were packed.
        layers: the error of each packed layer, in the model's order.
        kept: path and reason of each layer that stays in float.
        activations: bits of features: 8, or None for floats.
        method: how scales of features were chosen, "" for floats.
        folded: paths of the norms that are in the convolution before them.
    """

    bits: int
    group_size: int | None
    layers: tuple[LayerError, ...]
    kept: dict[str, str]
    activations: int | None = None
    method: str = ""
    folded: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a row for each layer: its error before and after."""
        names = [e.path for e in self.layers] + list(self.kept)
        width = max(map(len, names), default=0)
        head = f"int{self.bits}"
        head += f" in groups of {self.group_size}" if self.group_size else ""
        if self.activations:
            head += f", int{self.activations} features by {self.method}"
        lines = [f"{head}: error of outputs"]
        lines += [f"  {e.path:<{width}}  {e}" for e in self.layers]
        lines += [f"  {path:<{width}}  float: {why}" for path, why in self.kept.items()]
        return "\n".join(lines)

    __repr__ = __str__


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

    With ``activations=8`` features are int8 too, with one scale for each layer. A
    BatchNorm that follows every call of a layer is folded into it, and results that
    only integer layers read stay int8, with the activation and the residual before
    them. Scales that were trained with ``nn.FakeQuant`` are kept. If a layer is called
    several times, on features too different for one scale, each row has its own, and
    the report says so.

    Args:
        model: a float model of this package's convolutions and of linear layers.
        batches: inputs of the model; a tuple is several arguments.
        bits: 4 or 8.
        group_size: input channels that share a scale: 32, 64 or 128; by default 64.
            8-bit weights for int8 features have no groups.
        activations: 8 for int8 features; None leaves them in float.
        method: how scales of int8 features are chosen: "least squares" of their
            error, "percentile" (99.99 of magnitudes are not clipped) or "greatest".
        class_predicate: as in ``mlx.nn.quantize``, a bool for each (path, module); by
            default ``nn.keep_float()``.
        call: runs the model that it gets on a batch: ``call(model, batch)``.

    Raises:
        TypeError: ``class_predicate`` returns options of a layer.
        ValueError: there is no batch, no layer to pack, features are not finite, or
            bits and group size cannot be packed.
    """
    if activations not in (None, 8):
        raise ValueError(
            f"activations must be 8, or None for floats; got {activations}"
        )
    if activations:
        group_size = integer_group_size(bits, group_size)
    else:
        group_size = DEFAULT_GROUP_SIZE if group_size is None else group_size
        check_packing(bits, group_size)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    if not isinstance(model, Module):
        raise TypeError(f"calibrate takes a model; got {type(model).__name__}")
    if isinstance(batches, SparseTensor | mx.array):
        raise TypeError(
            "batches are a list of the model's inputs; got one "
            f"{type(batches).__name__}"
        )
    batches = list(batches)
    if not batches:
        raise ValueError("calibrate needs at least one batch of the model's inputs")
    predicate = keep_float() if class_predicate is None else class_predicate
    paths, kept = _layers_to_pack(model, predicate, group_size, activations)
    if not paths:
        why = f"; {predicate}" if isinstance(predicate, keep_float) else ""
        raise ValueError(f"no layer of the model is to be packed{why}")
    if isinstance(predicate, keep_float):
        kept = {**predicate.kept, **kept}

    model = copy.deepcopy(model)
    layers = _observable_layers(model, paths)
    kind = IntegerCalibration if activations else PackedCalibration
    calibration = kind(model, layers, bits, group_size, method)
    watched = [layer for _, layer in layers.values()]
    call = _call if call is None else call
    with calibration.observing():
        _observe_calls(model, watched, batches, calibration.gather, call)
    calibration.choose()
    _observe_calls(model, watched, batches, calibration.compare, call)
    errors = calibration.finish()
    errors = tuple(LayerError(path, **errors[path]) for path in paths)
    facts = (activations, method, calibration.folded) if activations else ()
    return model, Calibration(bits, group_size, errors, kept, *facts)


def _call(model: Module, batch: object) -> object:
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _layers_to_pack(
    model: Module, predicate, group_size: int | None, activations: int | None
) -> tuple[list[str], dict[str, str]]:
    """Return the paths of layers to pack, and why other layers are kept."""
    paths, kept = [], {}
    for path, module in tree_flatten(model.leaf_modules(), is_leaf=Module.is_module):
        packable = hasattr(module, "to_quantized") and "scales" not in module
        if not packable or not _wants(predicate, path, module):
            continue
        why = why_no_twin(module)
        if why is None and activations:
            why = not_integer(module)
        elif why is None and type(module).__module__.startswith("mlx."):
            channels = module.weight.shape[-1]
            if channels % group_size:
                why = f"{channels} channels, and MLX's own layers pack whole groups"
        if why is None:
            paths.append(path)
        else:
            kept[path] = why
    return paths, kept


# Runs of the model


def _observable_layers(
    model: Module, paths: Iterable[str]
) -> dict[str, tuple[Module, Module]]:
    """Return the module at each path of a model, and the layer put in its place.

    The layer of a ``FakeQuant`` is its float layer. Linear layers of MLX become
    ``nn.Linear``, whose calls are observed.
    """
    modules, pairs, layers = dict(model.named_modules()), {}, {}
    for path in paths:
        module = modules[path]
        layer = module.float_layer() if isinstance(module, FakeQuant) else module
        layers[path] = pairs.setdefault(id(module), (module, observable(layer)))
        put(model, path, layers[path][1])
    return layers


def _observe_calls(
    model: Module,
    layers: Iterable[Module],
    batches: list,
    see: Callable[..., None],
    call: Callable[[Module, object], object],
) -> None:
    """Run a model on batches; ``see(layer, rows, relation, result, call)`` every call.

    The model runs in evaluation mode. The relation of a linear layer is None; the last
    argument counts the calls of the layer in this run from 0.
    """
    watched, counts = {id(layer) for layer in layers}, Counter()

    def tell(layer: Module, x: mx.array, relation: Relation | None, y) -> None:
        with launch.scope(None):  # launches of ``see`` belong to no layer
            see(layer, x, relation, y, counts[id(layer)])
        counts[id(layer)] += 1

    def on_launch(launched: launch.Launch) -> None:
        layer = launched.scope
        # Not every device launches a contraction for a linear layer.
        if id(layer) not in watched or isinstance(layer, mlx.nn.Linear):
            return
        if launched.problem.pass_ == FORWARD:
            tell(layer, launched.inputs[0], launched.relation, launched.result)

    def on_linear(called: LinearCall) -> None:
        if id(called.layer) in watched:
            tell(called.layer, called.rows, None, called.result)

    # Unfused, so that a layer's own result is seen, without the norm after it.
    linears = linear_calls.observe(on_linear)
    with _evaluating(model), unfused(), linears, launch.observe(on_launch):
        for batch in batches:
            counts.clear()
            mx.eval(list(_arrays(call(model, batch))))


def _arrays(tree: object) -> Iterator[mx.array]:
    if isinstance(tree, SparseTensor):
        yield tree.feats
    elif isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _arrays(each)
    elif is_dataclass(tree):
        yield from _arrays(vars(tree))


@contextmanager
def _evaluating(model: Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module._training = mode


# Packed weights


class PackedCalibration:
    """Chooses the packed weights of a model; ``calibrate`` runs the model for it.

    Arguments as for ``IntegerCalibration``; features have no scale.
    """

    def __init__(
        self,
        model: Module,
        layers: Mapping[str, tuple[Module, Module]],
        bits: int,
        group_size: int,
        method: str,
    ):
        self.model, self.bits, self.group_size = model, bits, group_size
        self.layers = {path: layer for path, (_, layer) in layers.items()}
        # By the layer's id:
        self.moments: dict[int, mx.array] = {}
        self.plain: dict[int, QuantizedWeight] = {}
        self.searched: dict[int, QuantizedWeight] = {}
        self.errors: dict[int, mx.array] = {}  # squares: plain, searched, the output's

    def observing(self):
        """Return the block of the first run."""
        return nullcontext()

    def gather(self, layer: Module, x: mx.array, relation, y, call: int) -> None:
        """Add the moments of a call's features."""
        seen = _moments(layer, x, relation, self.group_size)
        self.moments[id(layer)] = seen + self.moments.get(id(layer), 0)
        mx.eval(self.moments[id(layer)])

    def choose(self) -> None:
        """Search the weight of every layer that a batch reached."""
        for key, layer in {id(each): each for each in self.layers.values()}.items():
            self.plain[key] = q = pack(layer, self.group_size, self.bits)
            if key in self.moments:
                w = _storage(layer, q)
                self.searched[key] = _search(q, w, self.moments[key])

    def compare(self, layer: Module, x: mx.array, relation, y, call: int) -> None:
        """Add the errors of a call: of the plain weight and of the searched one."""
        y, key = y.astype(mx.float32), id(layer)
        errors = [
            mx.square(_apply(layer, x, relation, weights[key]) - y).sum()
            for weights in (self.plain, self.searched)
        ]
        errors = mx.stack([*errors, mx.square(y).sum()])
        self.errors[key] = errors + self.errors.get(key, 0)
        mx.eval(self.errors[key])

    def finish(self) -> dict[str, dict[str, object]]:
        """Put the packed layers into the model; return the errors by path."""
        errors, twins = {}, {}
        for path, layer in self.layers.items():
            key = id(layer)
            weight, before, after = self.plain[key], None, None
            if key in self.errors:
                plain, searched, norm = self.errors[key].tolist()
                if not isfinite(plain + norm):
                    raise ValueError(
                        f"the batches have no error at {path}: its features or its "
                        "results are not all finite; calibrate on others"
                    )
                if searched < plain:
                    weight = self.searched[key]
                before = (plain / (norm or 1.0)) ** 0.5
                after = (min(plain, searched) / (norm or 1.0)) ** 0.5
            if key not in twins and has_twin(layer):
                twins[key] = twin_holding(layer, weight)
            elif key not in twins:  # an embedding, say
                twins[key] = layer.to_quantized(self.group_size, self.bits)
            put(self.model, path, twins[key])
            errors[path] = {"before": before, "after": after}
        mx.eval(self.model.parameters())
        return errors


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
    words = packed_words(flat, scales, biases, q.bits, q.group_size)
    return q.holding(words, scales, biases)


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
