"""calibrate() for int8 features: scales, folded norms, and chains that stay in int8.

The float net runs twice. The first run samples magnitudes of features, and traces which
norms follow a layer and which layers read its result. The second run compares each
layer's integer result with its float one, on the same float input. What rounding adds
to the mean of an output channel is subtracted from its shift (Nagel et al., "Data-Free
Quantization Through Weight Equalization and Bias Correction", 2019).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx
import mlx.nn
from mlx.nn import Module

from ..int8 import TINY, inverse_of
from ..ops import observed
from ..ops.coordinates import joined
from ..problem import MOST, to_int8
from ..quantized import IntegerWeight, fits_int32, integer_weight, module_layout, padded
from ..relation import Relation
from ..routes import launch
from ..tensor import SparseTensor
from .calibration import Calibration, LayerError, observable_layers, observe_calls
from .fused import tracing
from .linear import each_row, has_twin, twin_holding
from .quantized import (
    FoldedNorm,
    contract_integers,
    integers_of,
    put,
    rounded,
    set_output_scale,
    tie_scales,
    usable,
)

SAMPLES = 1 << 15  # magnitudes that are sampled of a call
SHARE = 0.9999  # of magnitudes that a percentile does not clip
# By one scale, normal features of one size are 0.9% off; beside others 4 times as large
# 3.5%, and 16 times 14%. A call that is more off than MOST_OFF, and TIMES as much as by
# a scale of its own, needs another scale. Rows with their own scales are 0.6% off.
MOST_OFF, TIMES = 0.04, 3
# Shares of the greatest magnitude that the searches try.
FEATURES = tuple(1 - at / 40 for at in range(33))
WEIGHTS = {8: (1.0, 0.95, 0.9), 4: (1.0, 0.93, 0.86, 0.79, 0.72, 0.65)}


def calibrate_integers(
    model: Module,
    batches: list,
    chosen: list[str],
    kept: dict[str, str],
    bits: int,
    group_size: int | None,
    method: str,
    call: Callable[[Module, object], object],
) -> tuple[Module, Calibration]:
    """Return an integer copy of a model, and its errors; see ``calibrate``.

    ``chosen`` are paths of the layers to make integer, ``kept`` why others stay float.
    """
    model = copy.deepcopy(model)
    at: dict[str, LayerRecord] = {}
    known: dict[int, LayerRecord] = {}
    for path, (module, layer) in observable_layers(model, chosen).items():
        if id(layer) not in known:
            known[id(layer)] = LayerRecord.of(module, layer, bits, group_size)
        at[path] = known[id(layer)]
        at[path].paths.append(path)
    layers = [layer.module for layer in known.values()]
    results: dict[int, Samples] = {}
    calls: Counter[tuple[str, int]] = Counter()  # in a run of the model

    def counted_call(model: Module, batch: object) -> object:
        calls.clear()
        return call(model, batch)

    def next_call(what: str, module: Module) -> int:
        calls[what, id(module)] += 1
        return calls[what, id(module)] - 1

    def sample(module: Module, feats: mx.array) -> None:
        turn = next_call("result", module)
        results.setdefault(id(module), Samples()).add(feats, turn)

    def gather(module: Module, x: mx.array, relation, y) -> None:
        known[id(module)].gather(x, next_call("features", module))

    def compare(module: Module, x: mx.array, relation: Relation | None, y) -> None:
        known[id(module)].compare(x, relation, y, next_call("compared", module))

    tracer = Tracer(set(known), sample)
    with tracing(tracer), observed.norms.observe(tracer.normed):
        observe_calls(model, layers, batches, gather, counted_call)
    for layer in known.values():
        layer.choose(method)
    # A linear layer that is called by itself gives floats there in any case.
    tracer.keep_float(
        key
        for key, layer in known.items()
        if not isinstance(layer.module, mlx.nn.Linear)
        and not tracer.is_always_followed(key, layer.calls)
    )
    tracer.keep_float(_results_that_differ(tracer, known, results, method))
    paths = {id(module): path for path, module in model.named_modules()}
    writes = _int8_results(tracer, known, results, method, paths)
    _share_input_scales(tracer, known, writes)
    observe_calls(model, layers, batches, compare, counted_call)
    folded = _foldable(tracer, known)
    errors = tuple(
        at[path].error(path, id(at[path].module) in writes) for path in chosen
    )
    norms = {id(norm) for norm in folded.values()}
    names = sorted(path for path, m in model.named_modules() if id(m) in norms)
    made = _integer_model(model, known, writes, folded)
    return made, Calibration(bits, group_size, errors, kept, 8, method, tuple(names))


def not_integer(module: Module) -> str | None:
    """Return why a layer cannot multiply integers, or None if it can."""
    if hasattr(module, "float_layer"):  # a FakeQuant
        return None
    if not has_twin(module):
        return f"{type(module).__name__} has no integer form"
    volume = prod(module.weight.shape[1:-1])
    if not fits_int32(volume, padded(module.weight.shape[-1], 128)):
        return "its sums could leave int32"
    return None


# Scales of features and of weights


class Samples:
    """Magnitudes of features: evenly spaced ones of each call, and the greatest."""

    def __init__(self):
        self._kept: dict[int, list[mx.array]] = {}

    def add(self, x: mx.array, call: int = 0) -> None:
        """Sample (N, C) features of a call; ``call`` is its place in a run."""
        if not x.size:
            return
        flat = mx.abs(x.astype(mx.float32)).reshape(-1)
        step = -(-flat.size // SAMPLES)
        kept = mx.concatenate([flat[::step], flat.max(keepdims=True)])
        mx.eval(kept)
        self._kept.setdefault(call, []).append(kept)

    def scale(self, method: str) -> mx.array:
        """Return the (1,) float32 scale that a method of ``METHODS`` chooses."""
        return _chosen([each for kept in self._kept.values() for each in kept], method)

    def worst(self, scale: mx.array, method: str) -> str:
        """Describe the call that needs another scale the most; "" if none does.

        As "call 2 of 3 16.2% off (its own 0.9%)": errors by this scale, and by the one
        that the method chooses for the call alone.
        """
        text, most, calls = "", MOST_OFF, len(self._kept)
        for call, kept in self._kept.items() if calls > 1 else ():
            x = mx.concatenate(kept)
            error = _error(x, scale)
            if error <= most:
                continue
            own = _error(x, _chosen(kept, method))
            if error > TIMES * own:
                most = error
                text = f"call {call + 1} of {calls} {error:.1%} off (its own {own:.1%})"
        return text


def _chosen(kept: list[mx.array], method: str) -> mx.array:
    if not kept:
        return mx.array([0.0], dtype=mx.float32)
    return METHODS[method](mx.concatenate(kept)).reshape(1).astype(mx.float32)


def _error(x: mx.array, scale: mx.array) -> float:
    off = to_int8(x, inverse_of(scale)).astype(mx.float32) * scale - x
    return (mx.linalg.norm(off) / mx.maximum(mx.linalg.norm(x), TINY)).item()


def _least_squares(x: mx.array) -> mx.array:
    scales = x.max() / MOST * mx.array(FEATURES)
    errors = []
    for at in range(len(FEATURES)):
        scale = scales[at : at + 1]
        off = to_int8(x, inverse_of(scale)).astype(mx.float32) * scale - x
        errors.append(mx.square(off).sum())
        mx.eval(errors[-1])
    return scales[mx.argmin(mx.stack(errors))]


METHODS: dict[str, Callable[[mx.array], mx.array]] = {
    "least squares": _least_squares,
    "percentile": lambda x: mx.sort(x)[min(x.size - 1, int(SHARE * x.size))] / MOST,
    "greatest": lambda x: x.max() / MOST,
}


def _searched_weight(layer: Module, bits: int, group_size: int | None, squares):
    """Return a layer's weight in integers, each output channel by its best scale.

    ``squares``: (C_in,) float32 mean squares of the features, which weight the errors;
    None for equal weights.
    """
    given = {
        "bits": bits,
        "group_size": group_size,
        "layout": module_layout(layer.weight),
    }
    plain = integer_weight(layer.weight, **given)
    c_out, c_in = layer.weight.shape[0], layer.weight.shape[-1]
    w = layer.weight.astype(mx.float32).reshape(c_out, -1, c_in)
    if squares is None:
        squares = mx.ones(c_in)
    else:  # of each output channel's own group
        groups = squares.size // c_in
        squares = mx.repeat(squares.reshape(groups, c_in), c_out // groups, axis=0)
        squares = squares.reshape(c_out, 1, c_in)
    least, scale = mx.array(mx.inf), plain.scale
    for share in WEIGHTS[bits]:
        tried = plain.scale * share
        made = integer_weight(layer.weight, scale=tried, **given)
        error = (mx.square(made.dense().transpose(2, 0, 1) - w) * squares).sum((1, 2))
        scale = mx.where(error < least, tried, scale)
        least = mx.minimum(error, least)
        mx.eval(least, scale)
    return integer_weight(layer.weight, scale=scale, **given)


@dataclass(eq=False)
class LayerRecord:
    """What calibration records of one layer.

    Attributes:
        module: the float layer.
        bits, group_size: of its weight.
        fixed: whether it was trained with ``FakeQuant``: then nothing is searched.
        trained: its scale of features from that training, or None.
        paths: its paths in the model.
        inputs: magnitudes of features.
        squares, rows: sums of squares of the input channels, and number of rows.
        calls: number of calls of the layer.
        scale, weight: of features and in integers, as chosen.
        by_row: whether each row has its own scale, since the calls differ too much.
        notes: the report's notes.
        plain: weight and scale by the greatest magnitudes.
        compared: by the place of a call in a run, over all batches: the squares of the
            plain error, of the chosen one and of the output; (float result - integer
            result) of each output channel; and the number of rows.
    """

    module: Module
    bits: int
    group_size: int | None
    fixed: bool = False
    trained: mx.array | None = None
    paths: list[str] = field(default_factory=list)
    inputs: Samples = field(default_factory=Samples)
    squares: mx.array | None = None
    rows: int = 0
    calls: int = 0
    scale: mx.array | None = None
    weight: IntegerWeight | None = None
    by_row: bool = False
    notes: list[str] = field(default_factory=list)
    plain: tuple[IntegerWeight, mx.array | None] | None = None
    compared: dict[int, tuple] = field(default_factory=dict)

    @classmethod
    def of(cls, module: Module, layer: Module, bits: int, group_size) -> LayerRecord:
        """Return the record of a layer that stands for a module of the model."""
        if hasattr(module, "float_layer"):
            trained = True, module.get("input_scale")
            return cls(layer, module.bits, module.group_size, *trained)
        return cls(layer, bits, group_size)

    def gather(self, x: mx.array, call: int) -> None:
        """Record the features of a call."""
        self.inputs.add(x, call)
        squares = mx.square(x.astype(mx.float32)).sum(axis=0)
        self.squares = squares if self.squares is None else self.squares + squares
        self.rows += x.shape[0]
        self.calls += 1
        mx.eval(self.squares)

    def choose(self, method: str) -> None:
        """Choose the scale of features and the weight."""
        given, path = (self.bits, self.group_size), self.paths[0]
        plain = integers_of(self.module, *given)
        self.plain = plain, usable(self.inputs.scale("greatest"), path)
        if self.fixed:
            self.scale, self.weight = usable(self.trained, path), plain
            return
        self.scale = usable(self.inputs.scale(method), path)
        worst = "" if self.scale is None else self.inputs.worst(self.scale, method)
        if worst:
            self.scale, self.by_row = None, True
            self.notes.append(f"by row, as one scale makes features of {worst}")
        mean = None if self.squares is None else self.squares / max(1, self.rows)
        self.weight = _searched_weight(self.module, *given, mean)

    def compare(self, x: mx.array, relation: Relation | None, y, call: int) -> None:
        """Add the errors of a call: of plain rounding and of the chosen scales."""
        y = y.astype(mx.float32)
        relation = each_row(x.shape[0]) if relation is None else relation
        linear = isinstance(self.module, mlx.nn.Linear)
        bias, groups = self.module.get("bias"), 1 if linear else self.module.groups
        sums = []
        for weight, scale in (self.plain, (self.weight, self.scale)):
            held = rounded(x.astype(mx.float32), scale)
            scales = weight.scale if scale is None else weight.scale * scale
            made = contract_integers(held, weight, relation, scales, bias, groups)
            sums.append(mx.square(y - made).sum())
        errors = mx.stack([*sums, mx.square(y).sum()])
        found = errors, (y - made).sum(axis=0), y.shape[0]
        before = self.compared.get(call)
        self.compared[call] = found if before is None else _added(found, before)
        mx.eval(self.compared[call][:2])

    @property
    def whole(self) -> tuple | None:
        """The sums of all calls."""
        total = None
        for each in self.compared.values():
            total = each if total is None else _added(each, total)
        return total

    @property
    def mean(self) -> mx.array | None:
        """The shift of each output channel's mean by rounding, which is added back.

        None if no rows were seen, if the layer was trained with ``FakeQuant``, and if
        calls differ: the mean of large features is wrong for small ones.
        """
        whole = self.whole
        if self.fixed or self.by_row or whole is None or not whole[2]:
            return None
        return whole[1] / whole[2]

    @property
    def after(self) -> float | None:
        """The error with the chosen scales, after the mean is added back."""
        return None if self.whole is None else _relative(self.whole, 1, self.mean)

    def error(self, path: str, writes_int8: bool) -> LayerError:
        """Return the layer's line of the report."""
        before = None if self.whole is None else _relative(self.whole, 0)
        calls = [
            _relative(self.compared[at], 1, self.mean) for at in sorted(self.compared)
        ]
        calls = tuple(calls) if len(calls) > 1 else ()
        notes = "; ".join(self.notes)
        return LayerError(path, before, self.after, writes_int8, calls, notes)


def _added(a: tuple, b: tuple) -> tuple:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _relative(sums: tuple, which: int, mean: mx.array | None = None) -> float:
    """Return the norm of the plain error (0), or the chosen one (1), over the output's.

    ``mean``: (C_out,), what the layer adds to its results.
    """
    errors, shift, rows = sums
    values = errors.tolist()
    wrong, whole = values[which], values[2]
    if mean is not None:
        moved = rows * mx.square(mean) - 2 * mean * shift
        wrong = max(0.0, wrong + moved.sum().item())
    return (wrong / (whole or 1.0)) ** 0.5


# The traced run


@dataclass(eq=False)
class Node:
    """One result of a layer, or of ``cat``.

    Attributes:
        layer: id of the layer that wrote it; None for joined tensors.
        is_float: whether a reader needs floats.
        readers: ids of the integer layers that read it as features.
        is_residual: whether an integer layer adds it.
        parts: the results of layers that were joined.
        is_joined: whether it is part of a joined tensor.
    """

    layer: int | None = None
    is_float: bool = False
    readers: set[int] = field(default_factory=set)
    is_residual: bool = False
    parts: tuple[Node, ...] = ()
    is_joined: bool = False

    @property
    def written(self) -> tuple[Node, ...]:
        """The results of layers that it is of."""
        return self.parts or (self,)


class Tracer:
    """Traces which layers read the results of others while the float model runs.

    A layer may write int8 if only integer layers read its result: as features, as the
    residual of a convolution, or joined with others by ``cat`` for such readers.

    Args:
        layers: ids of the layers that are to multiply integers.
        sample: called with a layer and the features of its result, after what is
            fused into an integer layer, or after all that follows a float one.
    """

    def __init__(self, layers: set[int], sample: Callable[[Module, mx.array], None]):
        self.layers, self._sample = layers, sample
        self.nodes: list[Node] = []
        self.norms: dict[int, list[Module | None]] = {}  # by layer, for each call
        self.called_alone: set[int] = set()  # norms
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Trace nothing inside the block."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def normed(self, norm: observed.Fused) -> None:
        """Record a norm that was called by itself."""
        if not self.is_paused:
            self.called_alone.add(id(norm.scope))

    def read(self, node: Node, layer: int) -> None:
        """Record that a layer, or what has no layer, reads features."""
        if self.is_paused:
            return
        if layer in self.layers:
            node.readers.add(layer)
        else:
            node.is_float = True

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
        integer = id(conv) in self.layers
        if isinstance(x, TracedTensor):
            self.read(x.node, id(conv))
        if isinstance(residual, TracedTensor):
            residual.node.is_residual = True
            residual.node.is_float |= not (integer and fits)
        self.norms.setdefault(id(conv), []).append(norm if fits else None)
        if not fits and norm is not None:
            self.called_alone.add(id(norm))
        if integer and not fits:
            return y  # what follows reads floats
        self._sample(conv, y.feats)
        return TracedTensor.of_node(y, self, Node(id(conv)))

    def is_always_followed(self, layer: int, calls: int) -> bool:
        """Whether all calls of a layer were calls of ``fused.convolved``."""
        return len(self.norms.get(layer, ())) == calls

    def keep_float(self, layers: Iterable[int]) -> None:
        """Mark all results of layers as float."""
        kept = set(layers)
        for node in self.nodes:
            node.is_float |= node.layer in kept

    def writers(self) -> list[int]:
        """Return the layers whose results may be int8, in order."""
        count, marked = -1, 0
        while count < marked:
            self._spread()
            count, marked = marked, sum(node.is_float for node in self.nodes)
        found = (node.layer for node in self.nodes if not node.is_float)
        return list(dict.fromkeys(layer for layer in found if layer is not None))

    def _spread(self) -> None:
        """Mark the nodes that must be float because others are."""
        for node in self.nodes:
            node.is_float |= not (node.readers or node.is_residual or node.is_joined)
            if node.is_float or any(part.is_float for part in node.parts):
                for each in (node, *node.parts):
                    each.is_float = True
        self.keep_float({node.layer for node in self.nodes if node.is_float} - {None})


class TracedTensor(SparseTensor):
    """A layer's result during the traced run: the tracer records who reads it."""

    tracer: Tracer
    node: Node

    @classmethod
    def of_node(cls, x: SparseTensor, tracer: Tracer, node: Node) -> TracedTensor:
        """Return a tensor, traced."""
        tracer.nodes.append(node)
        made = cls.__new__(cls)
        place = {"manager": x.manager, "key": x.key, "coords": x.coords}
        made.__dict__.update(place, _feats=x.feats, tracer=tracer, node=node)
        return made

    def _state(self) -> tuple[type, dict]:
        """Copy and pickle as a plain tensor."""
        return SparseTensor, {"feats": self.feats}

    @property
    def feats(self) -> mx.array:
        """The features; the tracer records who reads them."""
        self.tracer.read(self.node, id(launch.current_scope()))
        return self._feats

    @property
    def shape(self) -> tuple[int, int]:
        """(N, C)."""
        return tuple(self._feats.shape)

    @property
    def channels(self) -> int:
        """Number of feature channels."""
        return self._feats.shape[1]

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the features."""
        return self._feats.dtype


@joined.register
def _(first: TracedTensor, tensors: list[SparseTensor]) -> SparseTensor:
    if not all(isinstance(x, TracedTensor) for x in tensors):
        return first.replace(mx.concatenate([x.feats for x in tensors], axis=1))
    feats = mx.concatenate([x._feats for x in tensors], axis=1)
    for x in tensors:
        x.node.is_joined = True
    y = SparseTensor.trusted(first.manager, first.key, first.coords, feats)
    parts = tuple(part for x in tensors for part in x.node.written)
    return TracedTensor.of_node(y, first.tracer, Node(parts=parts))


# What stays in int8, and what is folded


def _int8_results(
    tracer: Tracer,
    known: dict[int, LayerRecord],
    results: dict[int, Samples],
    method: str,
    paths: dict[int, str],
) -> dict[int, mx.array]:
    """Return the scale of each layer that writes int8, by its id.

    If readers were trained with ``FakeQuant``, it is their scale, provided that all
    readers of the result, and of results joined with it, have the same scale.
    """
    writers = tracer.writers()
    shared = {key: {key} for key in writers}
    readers: dict[int, set[int]] = {}
    added = set()
    for node in tracer.nodes:
        if not node.is_float and node.parts:
            together = set().union(*(shared[part.layer] for part in node.parts))
            shared |= {key: together for key in together}
        for part in node.written:
            readers.setdefault(part.layer, set()).update(node.readers)
            if node.is_residual:
                added.add(part.layer)
    scales: dict[int, mx.array] = {}
    for key in writers:
        together = shared[key]
        read = set().union(*(readers.get(each, set()) for each in together))
        if any(known[each].fixed for each in {*read, *together} if each in known):
            scale = None if added & together else _trained_scale(known, read)
        else:
            scale = results[key].scale(method)
        scale = usable(scale, paths[key])
        if scale is not None:
            scales[key] = scale
    _share_output_scales(tracer, scales)
    return scales


def _trained_scale(known: dict[int, LayerRecord], readers: set[int]):
    scales = [known[key].trained for key in readers]
    if any(scale is None for scale in scales):
        return None
    return scales[0] if len({scale.item() for scale in scales}) == 1 else None


def _results_that_differ(
    tracer: Tracer,
    known: dict[int, LayerRecord],
    results: dict[int, Samples],
    method: str,
) -> list[int]:
    """Return the layers whose results in several calls differ too much for one scale.

    Results that a reader trained with ``FakeQuant`` rounds are left out.
    """
    fixed = {key for key, layer in known.items() if layer.fixed}
    trained = set(fixed)
    for node in tracer.nodes:
        if node.readers & fixed:
            trained |= {part.layer for part in node.written}
    found = []
    for key in tracer.writers():
        if key in trained:
            continue
        worst = results[key].worst(results[key].scale(method), method)
        if worst:
            found.append(key)
            if key in known:
                text = f"writes floats, as one scale makes results of {worst}"
                known[key].notes.append(text)
    return found


def _share_output_scales(tracer: Tracer, scales: dict[int, mx.array]) -> None:
    """Give results that are only joined with others the greatest of their scales.

    ``cat`` would round them to that scale; so they are rounded once, by their layer.
    """
    met: dict[int, list[mx.array]] = {}
    apart = set()
    for node in tracer.nodes:
        parts = [part.layer for part in node.parts]
        if parts and all(layer in scales for layer in parts):
            most = max((scales[layer] for layer in parts), key=mx.array.item)
            for layer in parts:
                met.setdefault(layer, []).append(most)
        if not parts and (node.readers or node.is_residual):
            apart.add(node.layer)
    for layer in met.keys() - apart:
        first = met[layer][0]
        if all(most is first for most in met[layer]):
            scales[layer] = first


def _share_input_scales(
    tracer: Tracer, known: dict[int, LayerRecord], writes: dict[int, mx.array]
) -> None:
    """Give layers that read only int8 results of one scale that scale.

    A joined tensor has the greatest scale of its parts.
    """
    met: dict[int, list[mx.array | None]] = {}
    for node in tracer.nodes:
        layers, scale = [part.layer for part in node.written], None
        if all(layer in writes for layer in layers):
            scale = max((writes[layer] for layer in layers), key=mx.array.item)
        for reader in node.readers:
            met.setdefault(reader, []).append(scale)
    for reader, scales in met.items():
        is_one = scales[0] is not None and all(each is scales[0] for each in scales)
        if is_one and not known[reader].by_row:
            known[reader].scale = scales[0]


def _foldable(tracer: Tracer, known: dict[int, LayerRecord]) -> dict[int, Module]:
    """Return the norms that can be folded into the layer before them, by layer.

    The norm follows each call of the layer, and is called nowhere else.
    """
    users: dict[int, set[int]] = {}
    for key, norms in tracer.norms.items():
        for norm in norms:
            users.setdefault(id(norm), set()).add(key)
    found = {}
    for key, norms in tracer.norms.items():
        norm = norms[0]
        if norm is None or any(each is not norm for each in norms):
            continue
        if users[id(norm)] != {key} or id(norm) in tracer.called_alone:
            continue
        # A bare call of the layer must not compute the norm.
        if key in known and tracer.is_always_followed(key, known[key].calls):
            found[key] = norm
    return found


def _integer_model(
    model: Module,
    known: dict[int, LayerRecord],
    writes: dict[int, mx.array],
    folded: dict[int, Module],
) -> Module:
    """Put integer twins into the model, and a ``FoldedNorm`` for each folded norm."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        paths.setdefault(id(module), []).append(path)
    for key, layer in known.items():
        twin = twin_holding(layer.module, layer.weight)
        shift, mean = layer.module.get("bias"), layer.mean
        shift = None if shift is None else shift.astype(mx.float32)
        if mean is not None:
            shift = mean if shift is None else shift + mean
        if key in folded:
            norm = folded[key]
            scale, moved = norm.scale_shift()
            twin.scales = twin.scales * scale
            shift = moved if shift is None else shift * scale + moved
            for path in paths[id(norm)]:
                put(model, path, FoldedNorm(type(norm).__name__))
        if shift is not None:
            twin.bias = shift
        twin.calibrated(layer.scale, writes.get(key), layer.after)
        for path in layer.paths:
            put(model, path, twin)
    for module in model.modules():  # float stems, which round their results
        if id(module) in writes and id(module) not in known:
            set_output_scale(module, writes[id(module)])
    tie_scales(model)
    mx.eval(model.parameters())
    return model
