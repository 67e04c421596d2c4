"""calibrate(): quantised copies of models, with scales chosen by batches.

``calibrate`` runs a copy of the float net twice. The first run records what the
features of each layer are, and for int8 features which norms follow a layer and which
layers read its result. The second run compares each layer's quantised result with its
float result, on the same float input.

Packed weights: the output error of a layer is, offset by offset,
``sum of |x (W - Q)|^2``: a quadratic form of the weight's error in the second moments
of its input rows. For each group of channels the search tries narrower ranges, fits
scale and bias to the resulting levels by least squares in that form, and keeps the
best.

Int8 features: scales have the least squared error on samples of the features. What
rounding adds to the mean of an output channel is subtracted from its shift (Nagel et
al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.nn import Module
from mlx.utils import tree_flatten

from .. import contraction
from ..channel_kernels import Fused, norm_observers
from ..int8 import inverse_of
from ..ops.coordinates import joined
from ..problem import FORWARD, MOST, to_int8
from ..quantized import (
    DEFAULT_GROUP_SIZE,
    QuantizedWeight,
    check_packing,
    fits_int32,
    integer_group_size,
    levels,
    padded,
)
from ..quantized import pack as packed_words
from ..relation import Relation
from ..routes import launch
from ..tensor import SparseTensor
from .fused import tracing, unfused
from .int8 import FakeQuant, finite, keep_float, put, tie_scales, usable, wants
from .linear import (
    INTEGER,
    FoldedNorm,
    LinearCall,
    contract_integers,
    each_row,
    has_twin,
    linear_calls,
    observable,
    pack,
    rounded,
    set_output_scale,
    twin_holding,
    why_no_twin,
)

__all__ = ["Calibration", "LayerError", "calibrate"]

# Shares of the range of a group of packed weights that the search tries.
RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)
# Shares of the greatest magnitude of int8 features that the search tries.
FEATURES = tuple(1 - at / 40 for at in range(33))
SAMPLES = 1 << 15  # magnitudes that are sampled of a call
# With one scale, normal features of one size are 0.9% off; beside features 4 times as
# large 3.5%, 16 times 14%. A call needs another scale if it is more than MOST_OFF off,
# and TIMES as much as with a scale of its own. Rows with their own scales are 0.6% off.
MOST_OFF, TIMES = 0.04, 3


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
        note: what was done if the layer's calls differ too much for one scale.
    """

    path: str
    before: float | None
    after: float | None
    writes_int8: bool = False
    note: str = ""

    def __str__(self) -> str:
        """Return "0.412% plain 0.305% calibrated, to int8"."""
        if self.before is None:
            return "not reached by the batches"
        text = f"{self.before:8.3%} plain {self.after:8.3%} calibrated"
        text += ", to int8" if self.writes_int8 else ""
        return f"{text}; {self.note}" if self.note else text


@dataclass(frozen=True)
class Calibration:
    """Report the error of every layer that ``calibrate`` packed. Prints as a table.

    Attributes:
        bits, group_size: the packing of the weights.
        layers: the error of each packed layer, in the model's order.
        kept: path and reason of each layer that is still in float.
        activations: bits of features: 8, or None for floats.
        folded: paths of the norms that were folded into the convolution before them.
    """

    bits: int
    group_size: int | None
    layers: tuple[LayerError, ...]
    kept: dict[str, str]
    activations: int | None = None
    folded: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a row for each layer: its error before and after."""
        names = [e.path for e in self.layers] + list(self.kept)
        width = max(map(len, names), default=0)
        head = f"int{self.bits}"
        head += f" in groups of {self.group_size}" if self.group_size else ""
        head += f", int{self.activations} features" if self.activations else ""
        lines = [f"{head}: error of outputs"]
        lines += [f"  {e.path:<{width}}  {e}" for e in self.layers]
        lines += [f"  {path:<{width}}  float: {why}" for path, why in self.kept.items()]
        return "\n".join(lines)

    __repr__ = __str__


def calibrate(
    model: Module,
    batches: Iterable[Any],
    bits: int = 4,
    group_size: int | None = None,
    *,
    activations: int | None = None,
    class_predicate: Callable[[str, Module], bool] | None = None,
    call: Callable[[Module, Any], object] | None = None,
) -> tuple[Module, Calibration]:
    """Return a quantised copy of a model, and the error of each of its layers.

    A copy of the model runs twice over the batches, in evaluation mode and in float;
    the model is not changed. The same model and batches give the same bits. If the
    search does not lower the true output error of a layer, the layer keeps the plain
    packing.

    With ``activations=8`` features are int8 too, with one scale for each layer. A
    BatchNorm that follows every call of a layer is folded into the layer. Results that
    only integer layers read stay int8, with the activation and the residual before
    them. Scales that were trained with ``nn.FakeQuant`` are kept. If a layer is called
    on features too different for one scale, each row has its own scale, and the report
    says so.

    Args:
        model: a float model with this package's convolutions and linear layers.
        batches: inputs of the model; a tuple holds several arguments.
        bits: 4 or 8.
        group_size: input channels that share a scale: 32, 64 or 128; by default 64.
            8-bit weights for int8 features have no groups.
        activations: 8 for int8 features; None leaves them in float.
        class_predicate: as in ``mlx.nn.quantize``, a bool for each (path, module); by
            default ``nn.keep_float()``.
        call: a function that runs the model on a batch, ``call(model, batch)``; by
            default the model is called.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 64)))
        >>> net = nn.Sequential(nn.SubmConv3d(64, 64, 3), nn.ReLU())
        >>> packed, report = ml.calibrate(net, [x], bits=8)
        >>> packed(x).shape, len(report.layers)  # print(report) shows the errors
        ((64, 64), 1)
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
    layers: dict[int, _Layer] = {}
    kind = _IntegerLayer if activations else _PackedLayer
    for path, (module, layer) in _observable_layers(model, paths).items():
        if id(layer) not in layers:
            layers[id(layer)] = kind(module, layer, bits, group_size)
        layers[id(layer)].paths.append(path)
    tracer = _Tracer(model, layers) if activations else None
    run = _call if call is None else call
    with nullcontext() if tracer is None else tracer.observing():
        _observe_calls(model, layers, batches, kind.gather, run)
    for layer in layers.values():
        layer.choose()
    if tracer is not None:
        tracer.choose()
    _observe_calls(model, layers, batches, kind.compare, run)
    folded = () if tracer is None else tracer.fold()
    errors = {}
    for layer in layers.values():
        error, twin = layer.error(), layer.twin()
        for path in layer.paths:
            errors[path] = LayerError(path, **error)
            put(model, path, twin)
    if tracer is not None:
        tie_scales(model)
    mx.eval(model.parameters())
    facts = tuple(errors[path] for path in paths), kept, activations, folded
    return model, Calibration(bits, group_size, *facts)


def _call(model: Module, batch: object) -> object:
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _layers_to_pack(
    model: Module, predicate, group_size: int | None, activations: int | None
) -> tuple[list[str], dict[str, str]]:
    """Return the paths of layers to pack, and why other layers are kept."""
    paths, kept = [], {}
    for path, module in tree_flatten(model.leaf_modules(), is_leaf=Module.is_module):
        packable = hasattr(module, "to_quantized") and "scales" not in module
        if not packable or not wants(predicate, path, module):
            continue
        why = why_no_twin(module)
        if why is None and activations:
            why = _not_integer(module)
        elif why is None and type(module).__module__.startswith("mlx."):
            channels = module.weight.shape[-1]
            if channels % group_size:
                why = f"{channels} channels, and MLX's own layers pack whole groups"
        if why is None:
            paths.append(path)
        else:
            kept[path] = why
    return paths, kept


def _not_integer(module: Module) -> str | None:
    """Return why a layer cannot multiply integers, or None if it can."""
    if isinstance(module, FakeQuant):
        return None
    if not has_twin(module):
        return f"{type(module).__name__} has no integer form"
    volume = prod(module.weight.shape[1:-1])
    if not fits_int32(volume, padded(module.weight.shape[-1], 128)):
        return "its sums could leave int32"
    return None


# Runs of the model


def _observable_layers(
    model: Module, paths: Iterable[str]
) -> dict[str, tuple[Module, Module]]:
    """Return the module at each path, and the layer with observers put in its place."""
    modules, pairs, layers = dict(model.named_modules()), {}, {}
    for path in paths:
        module = modules[path]
        layer = module.float_layer() if isinstance(module, FakeQuant) else module
        layers[path] = pairs.setdefault(id(module), (module, observable(layer)))
        put(model, path, layers[path][1])
    return layers


def _observe_calls(
    model: Module,
    layers: Mapping[int, _Layer],
    batches: list,
    see: Callable[..., None],
    run: Callable[[Module, object], object],
) -> None:
    """Run a model; ``see(layer, rows, relation, result, call)`` gets every call."""
    counts = Counter()

    def tell(layer: Module, x: mx.array, relation: Relation, y: mx.array) -> None:
        with launch.scope(None):  # launches of ``see`` belong to no layer
            see(layers[id(layer)], x, relation, y, counts[id(layer)])
        counts[id(layer)] += 1

    def on_launch(launched: launch.Launch) -> None:
        layer = launched.scope
        # Not every device launches a contraction for a linear layer.
        if id(layer) not in layers or isinstance(layer, mlx.nn.Linear):
            return
        if launched.problem.pass_ == FORWARD:
            tell(layer, launched.inputs[0], launched.relation, launched.result)

    def on_linear(called: LinearCall) -> None:
        if id(called.layer) in layers:
            tell(called.layer, called.rows, each_row(len(called.rows)), called.result)

    # Unfused, so that a layer's own result is seen, without the norm after it.
    linears = linear_calls.observe(on_linear)
    with _evaluating(model), unfused(), linears, launch.observe(on_launch):
        for batch in batches:
            counts.clear()
            mx.eval(list(_arrays(run(model, batch))))


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


# One layer


class _Layer:
    """What calibration records and chooses for one layer of the copy."""

    def __init__(
        self, module: Module, layer: Module, bits: int, group_size: int | None
    ):
        self.layer, self.bits, self.group_size = layer, bits, group_size
        self.groups = getattr(layer, "groups", 1)
        self.paths: list[str] = []
        # Of all calls: squares of the plain error, of the chosen one and of the output;
        # (float - quantised result) of each output channel; number of rows.
        self.errors: mx.array | None = None
        self.moved: mx.array | None = None
        self.rows = 0

    def compare(self, x: mx.array, relation: Relation, y: mx.array, _: int) -> None:
        """Add the errors of a call: of plain rounding, and of what was chosen."""
        y = y.astype(mx.float32)
        plain, chosen = (y - z for z in self.results(x, relation))
        errors = mx.stack([mx.square(a).sum() for a in (plain, chosen, y)])
        moved = chosen.sum(axis=0)
        if self.errors is not None:
            errors, moved = errors + self.errors, moved + self.moved
        self.errors, self.moved, self.rows = errors, moved, self.rows + len(y)
        mx.eval(errors, moved)

    def error(self, moved: float = 0.0) -> dict[str, object]:
        """Return errors; a shift adds ``moved`` to the squares of the chosen one."""
        if self.errors is None:
            return {"before": None, "after": None}
        plain, chosen, norm = self.errors.tolist()
        finite(plain + chosen + norm, self.paths[0])
        chosen, norm = max(0.0, chosen + moved), norm or 1.0
        return {"before": (plain / norm) ** 0.5, "after": (chosen / norm) ** 0.5}


class _PackedLayer(_Layer):
    moments: mx.array | None = None

    def gather(self, x: mx.array, relation: Relation, y: mx.array, _: int) -> None:
        seen = _moments(x, relation, self.groups, self.group_size)
        self.moments = seen if self.moments is None else seen + self.moments
        mx.eval(self.moments)

    def choose(self) -> None:
        self.plain = self.weight = pack(self.layer, self.group_size, self.bits)
        if self.moments is not None:
            w = _storage(self.layer, self.plain)
            self.weight = _search(self.plain, w, self.moments)

    def results(self, x: mx.array, relation: Relation) -> Iterator[mx.array]:
        for weight in (self.plain, self.weight):
            options = {"groups": self.groups, "bias": self.layer.get("bias")}
            y = contraction.conv(x, weight, relation, **options)
            yield y.astype(mx.float32)

    def error(self) -> dict[str, object]:
        error = super().error()
        if error["before"] is not None and error["after"] >= error["before"]:
            self.weight, error["after"] = self.plain, error["before"]
        return error

    def twin(self) -> Module:
        if has_twin(self.layer):
            return twin_holding(self.layer, self.weight)
        return self.layer.to_quantized(self.group_size, self.bits)  # an embedding, say


def _moments(x: mx.array, relation: Relation, groups: int, size: int) -> mx.array:
    """Return (groups, channel blocks, size, size): sum over edges of x x^T."""
    x = x.astype(mx.float32)
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
    m_at, m_one = form.times(at), form.times(mx.ones_like(at))
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


class _IntegerLayer(_Layer):
    """Chooses the scales of a layer that multiplies int8 features."""

    def __init__(
        self, module: Module, layer: Module, bits: int, group_size: int | None
    ):
        super().__init__(module, layer, bits, group_size)
        # The scale of a ``FakeQuant`` stays: nothing is searched.
        self.is_trained = isinstance(module, FakeQuant)
        self.trained = module.get("input_scale") if self.is_trained else None
        if self.is_trained:
            self.bits, self.group_size = module.bits, module.group_size
        self.weight = pack(layer, self.group_size, self.bits, INTEGER)
        self.samples = _Samples()
        self.calls = self.last_call = 0  # number of calls, place in the batch
        self.scale: mx.array | None = None
        self.by_row = False
        self.notes: list[str] = []
        self.norm: Module | None = None  # is folded
        self.output_scale: mx.array | None = None

    def gather(self, x: mx.array, relation, y: mx.array, call: int) -> None:
        self.samples.add(x, call)
        self.calls, self.last_call = self.calls + 1, call

    def choose(self) -> None:
        path = self.paths[0]
        self.plain_scale = usable(self.samples.all().max(keepdims=True) / MOST, path)
        if self.is_trained:
            self.scale = usable(self.trained, path)
            return
        self.scale = usable(_least_squares(self.samples.all()), path)
        if self.scale is not None and not self.samples.fit(self.scale):
            self.scale, self.by_row = None, True
            self.notes.append("by row, as its calls need scales of their own")

    def results(self, x: mx.array, relation: Relation) -> Iterator[mx.array]:
        bias, x = self.layer.get("bias"), x.astype(mx.float32)
        for scale in (self.plain_scale, self.scale):
            w, feats = self.weight, rounded(x, scale)
            scales = w.scale if scale is None else w.scale * scale
            yield contract_integers(feats, w, relation, scales, bias, self.groups)

    @property
    def mean(self) -> mx.array | None:
        """The shift of each output channel's mean by rounding, which is added back."""
        # If calls differ, the mean of large features is wrong for small ones.
        if self.is_trained or self.by_row or not self.rows:
            return None
        return self.moved / self.rows

    def error(self) -> dict[str, object]:
        mean, moved = self.mean, 0.0
        if mean is not None:
            moved = self.rows * mx.square(mean) - 2 * mean * self.moved
            moved = moved.sum().item()
        more = {"writes_int8": self.output_scale is not None}
        return super().error(moved) | more | {"note": "; ".join(self.notes)}

    def twin(self) -> Module:
        """Return the integer layer, with the norm that is folded into it."""
        twin = twin_holding(self.layer, self.weight)
        shift, mean = self.layer.get("bias"), self.mean
        shift = None if shift is None else shift.astype(mx.float32)
        if mean is not None:
            shift = mean if shift is None else shift + mean
        if self.norm is not None:
            scale, moved = self.norm.scale_shift()
            twin.scales = twin.scales * scale
            shift = moved if shift is None else shift * scale + moved
        if shift is not None:
            twin.bias = shift
        return twin.calibrated(self.scale, self.output_scale, self.error()["after"])


class _Samples:
    """Magnitudes of features: evenly spaced samples of each call, and the greatest."""

    def __init__(self):
        self._calls: dict[int, list[mx.array]] = {}  # by their place in a batch

    def add(self, x: mx.array, call: int = 0) -> None:
        if not x.size:
            return
        flat = mx.abs(x.astype(mx.float32)).reshape(-1)
        step = -(-flat.size // SAMPLES)
        sample = mx.concatenate([flat[::step], flat.max(keepdims=True)])
        mx.eval(sample)
        self._calls.setdefault(call, []).append(sample)

    def all(self) -> mx.array:
        """Return the samples of all calls; one of 0 if there was no feature."""
        samples = [x for call in self._calls.values() for x in call]
        return mx.concatenate(samples or [mx.zeros(1)])

    def fit(self, scale: mx.array) -> bool:
        """Return whether each call is about as exact with a scale as with its own."""
        for samples in self._calls.values() if len(self._calls) > 1 else ():
            x = mx.concatenate(samples)
            errors = (_off(x, each) for each in (scale, _least_squares(x)))
            error, own = (mx.linalg.norm(each).item() for each in errors)
            if error > max(MOST_OFF * mx.linalg.norm(x).item(), TIMES * own):
                return False
        return True


def _off(x: mx.array, scale: mx.array) -> mx.array:
    return to_int8(x, inverse_of(scale)).astype(mx.float32) * scale - x


def _least_squares(x: mx.array) -> mx.array:
    """Return the (1,) scale with the least squared error on samples."""
    scales = x.max() / MOST * mx.array(FEATURES)
    errors = []
    for scale in scales:
        errors.append(mx.square(_off(x, scale)).sum())
        mx.eval(errors[-1])
    return scales[mx.argmin(mx.stack(errors))].reshape(1)


# Chains of layers that stay in int8

Origin = tuple[int, ...]  # the layers whose results are in a tensor; several after cat


class _Tracer:
    """Traces which layers read the results of others, and chooses what stays in int8.

    A layer may return int8 if only integer layers read its results: as features, as the
    residual of a convolution, or joined with others by ``cat`` for such readers. Layers
    and norms are known by their ids.
    """

    def __init__(self, model: Module, layers: dict[int, _IntegerLayer]):
        self.model, self.layers = model, layers
        # After what is fused into an integer layer, or all that follows a float one.
        self.results: dict[int, _Samples] = {}
        self.floats: set[int] = set()  # layers whose results are read as floats
        self.reads: dict[int, list[Origin]] = {}  # what each integer layer reads
        self.residuals: list[Origin] = []  # what integer layers add
        self.joins: list[Origin] = []  # joined tensors
        self.norms: dict[int, list[Module | None]] = {}  # after each call of a layer
        self.norms_alone: set[int] = set()  # norms that were called by themselves
        self.scales: dict[int, mx.array] = {}  # of layers that return int8
        self.is_paused = False

    @contextmanager
    def observing(self) -> Iterator[None]:
        with tracing(self), norm_observers.observe(self._normed):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.is_paused = self.is_paused, True
        yield
        self.is_paused = before

    def _normed(self, norm: Fused) -> None:
        if not self.is_paused:
            self.norms_alone.add(id(norm.scope))

    def read(self, origin: Origin, layer: object) -> None:
        """Record that a layer, or code outside layers, reads features."""
        if self.is_paused:
            return
        if id(layer) in self.layers:
            self.reads.setdefault(id(layer), []).append(origin)
        else:
            self.floats.update(origin)

    def convolved(
        self,
        conv: Module,
        norm: Module | None,
        x: SparseTensor,
        residual: SparseTensor | None,
        fits: bool,
        y: SparseTensor,
    ) -> SparseTensor:
        """Record a layer with what follows it; return its result, traced.

        ``fits``: whether an integer layer computes all that follows in its launch.
        """
        if launch.is_planning():  # the results are zeros
            return y
        layer = self.layers.get(id(conv))
        if isinstance(x, TracedTensor):
            self.read(x.origin, conv)
        if isinstance(residual, TracedTensor):
            self.residuals.append(residual.origin)
            if not (layer and fits):
                self.floats.update(residual.origin)
        self.norms.setdefault(id(conv), []).append(norm if fits else None)
        if not fits and norm is not None:
            self.norms_alone.add(id(norm))
        if layer and not fits:
            self.floats.add(id(conv))  # what follows reads floats
            return y
        samples = self.results.setdefault(id(conv), _Samples())
        samples.add(y.feats, layer.last_call if layer else 0)
        return TracedTensor.traced(y, self, (id(conv),))

    def _is_always_followed(self, key: int) -> bool:
        """Whether all calls of a layer were calls of ``fused.convolved``."""
        return len(self.norms.get(key, ())) == self.layers[key].calls

    def _readers(self, key: int) -> set[int]:
        return {
            reader
            for reader, origins in self.reads.items()
            if any(key in origin for origin in origins)
        }

    def _writers(self) -> list[int]:
        """Return the layers whose results may be int8, in order."""
        count = -1
        while count < len(self.floats):  # a joined tensor is float if one part is
            count = len(self.floats)
            for origin in self.joins:
                if not self.floats.isdisjoint(origin):
                    self.floats.update(origin)
        read = {key for origin in self._origins() for key in origin}
        return [key for key in self.results if key in read - self.floats]

    def _origins(self) -> list[Origin]:
        reads = [origin for origins in self.reads.values() for origin in origins]
        return [*self.residuals, *reads]

    def choose(self) -> None:
        """Choose which results stay in int8, and their scales."""
        for key, layer in self.layers.items():
            # A linear layer that is called by itself gives floats there in any case.
            is_linear = isinstance(layer.layer, mlx.nn.Linear)
            if not is_linear and not self._is_always_followed(key):
                self.floats.add(key)
        trained = {key for key, layer in self.layers.items() if layer.is_trained}
        for key in self._writers():
            if key in trained or trained & self._readers(key):
                continue  # the reader's trained scale rounds it
            samples = self.results[key]
            if not samples.fit(_least_squares(samples.all())):
                self.floats.add(key)
                if key in self.layers:
                    note = "writes floats, as its calls need scales of their own"
                    self.layers[key].notes.append(note)
        self._choose_output_scales(trained)
        for key, origins in self.reads.items():
            # A layer that reads only int8 results of one scale has that scale.
            scale, *others = map(self._greatest, origins)
            is_one = scale is not None and all(other is scale for other in others)
            if is_one and not self.layers[key].by_row:
                self.layers[key].scale = scale
        for key, scale in self.scales.items():
            if key in self.layers:
                self.layers[key].output_scale = scale

    def _choose_output_scales(self, trained: set[int]) -> None:
        """Choose a scale for each layer that returns int8.

        It is the scale that readers were trained for, if all readers of the result, and
        of results joined with it, have the same.
        """
        writers = self._writers()
        paths = {id(module): path for path, module in self.model.named_modules()}
        groups = {key: {key} for key in writers}  # results that cat joins
        for origin in self.joins:
            if self.floats.isdisjoint(origin):
                group = set().union(*(groups.get(key, {key}) for key in origin))
                groups |= {key: group for key in group}
        residuals = {key for origin in self.residuals for key in origin}
        for key in writers:
            readers = set().union(*map(self._readers, groups[key]))
            if not trained & (readers | groups[key]):
                scale = _least_squares(self.results[key].all())
            else:
                scales = [self.layers[reader].trained for reader in readers]
                values = {None if each is None else each.item() for each in scales}
                is_one = len(values) == 1 and not residuals & groups[key]
                scale = scales[0] if is_one else None
            scale = usable(scale, paths[key])
            if scale is not None:
                self.scales[key] = scale
        # Results that are only joined with others get the greatest of their scales: cat
        # would round them to it again.
        apart = {origin[0] for origin in self._origins() if len(origin) == 1}
        greatest: dict[int, list[mx.array]] = {}
        for origin in self.joins:
            if (scale := self._greatest(origin)) is not None:
                for key in origin:
                    greatest.setdefault(key, []).append(scale)
        for key, (scale, *others) in greatest.items():
            if key not in apart and all(other is scale for other in others):
                self.scales[key] = scale

    def _greatest(self, origin: Origin) -> mx.array | None:
        """Return the greatest scale of joined results; None if one is float."""
        scales = [self.scales.get(key) for key in origin]
        if any(scale is None for scale in scales):
            return None
        return max(scales, key=mx.array.item)

    def fold(self) -> tuple[str, ...]:
        """Fold norms into the layers before them; return the paths of the norms.

        A norm is folded if it follows each call of its layer, and is called nowhere
        else.
        """
        modules, folded = list(self.model.named_modules()), []
        users: dict[int, set[int]] = {}
        for key, norms in self.norms.items():
            for norm in norms:
                users.setdefault(id(norm), set()).add(key)
        for key, (norm, *others) in self.norms.items():
            if norm is None or any(other is not norm for other in others):
                continue
            if users[id(norm)] != {key} or id(norm) in self.norms_alone:
                continue
            # A bare call of the layer must not compute the norm.
            if key not in self.layers or not self._is_always_followed(key):
                continue
            self.layers[key].norm = norm
            for path in [path for path, module in modules if module is norm]:
                put(self.model, path, FoldedNorm(type(norm).__name__))
                folded.append(path)
        for _, module in modules:
            if id(module) in self.scales and id(module) not in self.layers:
                set_output_scale(module, self.scales[id(module)])
        return tuple(sorted(folded))


class TracedTensor(SparseTensor):
    """A layer's result during the traced run: the tracer records who reads it."""

    tracer: _Tracer
    origin: Origin

    @classmethod
    def traced(cls, x: SparseTensor, tracer: _Tracer, origin: Origin) -> TracedTensor:
        """Return a tensor, traced."""
        y = cls.__new__(cls)
        place = {"manager": x.manager, "key": x.key, "coords": x.coords}
        y.__dict__.update(place, _feats=x.feats, tracer=tracer, origin=origin)
        return y

    def _state(self) -> tuple[type, dict]:
        """Copy and pickle as a plain tensor."""
        return SparseTensor, {"feats": self.feats}

    @property
    def feats(self) -> mx.array:
        """The features; the tracer records who reads them."""
        self.tracer.read(self.origin, launch.current_scope())
        return self._feats

    # The same without a reader.
    shape: property = property(lambda self: tuple(self._feats.shape))
    channels: property = property(lambda self: self._feats.shape[1])
    dtype: property = property(lambda self: self._feats.dtype)


@joined.register
def _(first: TracedTensor, tensors: list[SparseTensor]) -> SparseTensor:
    if not all(isinstance(x, TracedTensor) for x in tensors):
        return first.replace(mx.concatenate([x.feats for x in tensors], axis=1))
    feats = mx.concatenate([x._feats for x in tensors], axis=1)
    y = SparseTensor.trusted(first.manager, first.key, first.coords, feats)
    origin = tuple(key for x in tensors for key in x.origin)
    first.tracer.joins.append(origin)
    return TracedTensor.traced(y, first.tracer, origin)
