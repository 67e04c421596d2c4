"""IntegerCalibration: scales of int8 features, folded norms, and chains in int8.

``calibrate`` runs the float net twice. The first run samples magnitudes of features,
and traces which norms follow a layer and which layers read its result. The second run
compares each layer's integer result with its float result, on the same float input.
What rounding adds to the mean of an output channel is subtracted from its shift (Nagel
et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx
import mlx.nn
from mlx.nn import Module

from ..channel_kernels import Fused, norm_observers
from ..int8 import TINY, inverse_of
from ..ops.coordinates import joined
from ..problem import MOST, to_int8
from ..quantized import IntegerWeight, fits_int32, integer_weight, padded
from ..relation import Relation
from ..routes import launch
from ..tensor import SparseTensor
from .fused import tracing
from .int8 import FakeQuant, put, tie_scales, usable
from .linear import each_row, has_twin, twin_holding
from .quantized import (
    INTEGER,
    FoldedNorm,
    contract_integers,
    pack,
    rounded,
    set_output_scale,
)

SAMPLES = 1 << 15  # magnitudes that are sampled of a call
SHARE = 0.9999  # of magnitudes that a percentile does not clip
# With one scale, normal features of one size are 0.9% off; beside features 4 times as
# large 3.5%, 16 times 14%. A call needs another scale if it is more than MOST_OFF off,
# and TIMES as much as with a scale of its own. Rows with their own scales are 0.6% off.
MOST_OFF, TIMES = 0.04, 3
# Shares of the greatest magnitude that the searches try.
FEATURES = tuple(1 - at / 40 for at in range(33))
WEIGHTS = {8: (1.0, 0.95, 0.9), 4: (1.0, 0.93, 0.86, 0.79, 0.72, 0.65)}


def not_integer(module: Module) -> str | None:
    """Return why a layer cannot multiply integers, or None if it can."""
    if isinstance(module, FakeQuant):
        return None
    if not has_twin(module):
        return f"{type(module).__name__} has no integer form"
    volume = prod(module.weight.shape[1:-1])
    if not fits_int32(volume, padded(module.weight.shape[-1], 128)):
        return "its sums could leave int32"
    return None


# Scales of features and of weights


class Samples:
    """Magnitudes of features: evenly spaced samples of each call, and the greatest."""

    def __init__(self):
        self._calls: dict[int, list[mx.array]] = {}

    def add(self, x: mx.array, call: int = 0) -> None:
        """Sample (N, C) features of a call; ``call`` is its place in a run."""
        if not x.size:
            return
        flat = mx.abs(x.astype(mx.float32)).reshape(-1)
        step = -(-flat.size // SAMPLES)
        sample = mx.concatenate([flat[::step], flat.max(keepdims=True)])
        mx.eval(sample)
        self._calls.setdefault(call, []).append(sample)

    def scale(self, method: str) -> mx.array:
        """Return the (1,) float32 scale that a method of ``METHODS`` chooses."""
        return _chosen([x for call in self._calls.values() for x in call], method)

    def worst(self, scale: mx.array, method: str) -> str:
        """Describe the call that needs another scale the most; "" if none does.

        As "call 2 of 3 16.2% off (its own 0.9%)": errors with this scale, and with the
        one that the method chooses for the call alone.
        """
        text, most, count = "", MOST_OFF, len(self._calls)
        for call, samples in self._calls.items() if count > 1 else ():
            x = mx.concatenate(samples)
            error = _error(x, scale)
            if error <= most:
                continue
            alone = _error(x, _chosen(samples, method))
            if error > TIMES * alone:
                most = error
                text = f"call {call + 1} of {count} {error:.1%} off"
                text += f" (its own {alone:.1%})"
        return text


def _chosen(samples: list[mx.array], method: str) -> mx.array:
    if not samples:
        return mx.array([0.0], dtype=mx.float32)
    return METHODS[method](mx.concatenate(samples)).reshape(1).astype(mx.float32)


def _off(x: mx.array, scale: mx.array) -> mx.array:
    return to_int8(x, inverse_of(scale)).astype(mx.float32) * scale - x


def _error(x: mx.array, scale: mx.array) -> float:
    norm = mx.linalg.norm(_off(x, scale)) / mx.maximum(mx.linalg.norm(x), TINY)
    return norm.item()


def _least_squares(x: mx.array) -> mx.array:
    scales = x.max() / MOST * mx.array(FEATURES)
    errors = []
    for at in range(len(FEATURES)):
        errors.append(mx.square(_off(x, scales[at : at + 1])).sum())
        mx.eval(errors[-1])
    return scales[mx.argmin(mx.stack(errors))]


METHODS: dict[str, Callable[[mx.array], mx.array]] = {
    "least squares": _least_squares,
    "percentile": lambda x: mx.sort(x)[min(x.size - 1, int(SHARE * x.size))] / MOST,
    "greatest": lambda x: x.max() / MOST,
}


def _searched_weight(
    layer: Module, plain: IntegerWeight, squares: mx.array | None
) -> IntegerWeight:
    """Return a layer's weight in integers, each output channel with its best scale.

    ``squares``: (C_in,) float32 mean squares of the features, which weight the errors;
    None for equal weights.
    """
    c_out, c_in = layer.weight.shape[0], layer.weight.shape[-1]
    w = layer.weight.astype(mx.float32).reshape(c_out, -1, c_in)
    if squares is None:
        squares = mx.ones(c_in)
    else:  # those of each output channel's own group
        groups = squares.size // c_in
        squares = mx.repeat(squares.reshape(groups, c_in), c_out // groups, axis=0)
        squares = squares.reshape(c_out, 1, c_in)

    def rounded_by(scale: mx.array) -> IntegerWeight:
        packing = {"bits": plain.bits, "group_size": plain.group_size}
        return integer_weight(layer.weight, scale=scale, layout="module", **packing)

    least, best = mx.array(mx.inf), plain.scale
    for share in WEIGHTS[plain.bits]:
        scale = plain.scale * share
        off = rounded_by(scale).dense().transpose(2, 0, 1) - w
        error = (mx.square(off) * squares).sum((1, 2))
        best = mx.where(error < least, scale, best)
        least = mx.minimum(error, least)
        mx.eval(least, best)
    return rounded_by(best)


@dataclass(eq=False)
class LayerRecord:
    """What calibration records and chooses for one layer."""

    module: Module  # the float layer
    bits: int
    group_size: int | None
    fixed: bool = False  # trained with FakeQuant: nothing is searched
    trained: mx.array | None = None  # the scale of features of that training
    paths: list[str] = field(default_factory=list)
    inputs: Samples = field(default_factory=Samples)
    squares: mx.array | None = None  # sums over the rows, by input channel
    rows: int = 0
    calls: int = 0
    scale: mx.array | None = None  # the chosen one of the features
    weight: IntegerWeight | None = None
    by_row: bool = False  # each row has its own scale, since the calls differ too much
    notes: list[str] = field(default_factory=list)
    plain: tuple[IntegerWeight, mx.array | None] | None = None  # by the greatest
    # By the place of a call in a run, over all batches: squares of the plain error, of
    # the chosen one and of the output; (float - integer result) of each output channel;
    # number of rows.
    compared: dict[int, tuple] = field(default_factory=dict)

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
        path = self.paths[0]
        weight = pack(self.module, self.group_size, self.bits, INTEGER)
        self.plain = weight, usable(self.inputs.scale("greatest"), path)
        if self.fixed:
            self.scale, self.weight = usable(self.trained, path), weight
            return
        self.scale = usable(self.inputs.scale(method), path)
        worst = "" if self.scale is None else self.inputs.worst(self.scale, method)
        if worst:
            self.scale, self.by_row = None, True
            self.notes.append(f"by row, as one scale makes features of {worst}")
        mean = None if self.squares is None else self.squares / max(1, self.rows)
        self.weight = _searched_weight(self.module, weight, mean)

    def compare(self, x: mx.array, relation: Relation | None, y, call: int) -> None:
        """Add the errors of a call: of plain rounding and of the chosen scales."""
        y = y.astype(mx.float32)
        relation = each_row(x.shape[0]) if relation is None else relation
        linear = isinstance(self.module, mlx.nn.Linear)
        bias, groups = self.module.get("bias"), 1 if linear else self.module.groups
        sums = []
        for weight, scale in (self.plain, (self.weight, self.scale)):
            feats = rounded(x.astype(mx.float32), scale)
            scales = weight.scale if scale is None else weight.scale * scale
            z = contract_integers(feats, weight, relation, scales, bias, groups)
            sums.append(mx.square(y - z).sum())
        errors = mx.stack([*sums, mx.square(y).sum()])
        added = errors, (y - z).sum(axis=0), y.shape[0]
        if call in self.compared:
            added = _added(added, self.compared[call])
        mx.eval(added[:2])
        self.compared[call] = added

    @property
    def total(self) -> tuple | None:
        """The sums of all calls."""
        total = None
        for sums in self.compared.values():
            total = sums if total is None else _added(sums, total)
        return total

    @property
    def mean(self) -> mx.array | None:
        """The shift of each output channel's mean by rounding, which is added back.

        None if no rows were seen, if the layer was trained with ``FakeQuant``, and if
        calls differ: the mean of large features is wrong for small ones.
        """
        total = self.total
        if self.fixed or self.by_row or total is None or not total[2]:
            return None
        return total[1] / total[2]

    def error(self) -> dict[str, object]:
        """Return errors of the layer's output, as ``LayerError`` has them."""
        total, mean = self.total, self.mean
        if total is None:
            return {"before": None, "after": None}
        calls = [_relative(self.compared[at], 1, mean) for at in sorted(self.compared)]
        return {
            "before": _relative(total, 0),
            "after": _relative(total, 1, mean),
            "calls": tuple(calls) if len(calls) > 1 else (),
            "note": "; ".join(self.notes),
        }


def _added(a: tuple, b: tuple) -> tuple:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _relative(sums: tuple, which: int, mean: mx.array | None = None) -> float:
    """Return the norm of the plain error (0), or the chosen one (1), over the output's.

    ``mean``: (C_out,), which the layer adds to its results.
    """
    errors, shift, rows = sums
    *wrong, norm = errors.tolist()
    wrong = wrong[which]
    if mean is not None:
        moved = rows * mx.square(mean) - 2 * mean * shift
        wrong = max(0.0, wrong + moved.sum().item())
    return (wrong / (norm or 1.0)) ** 0.5


# The traced run

Origin = tuple[int, ...]  # the layers whose results are in a tensor; several after cat


class Tracer:
    """Traces which layers read the results of others while the float model runs.

    A layer may return int8 if only integer layers read its results: as features, as the
    residual of a convolution, or joined with others by ``cat`` for such readers. Layers
    and norms are known by their ids.
    """

    def __init__(self, layers: set[int]):
        self.layers = layers  # those that are to multiply integers
        # After what is fused into an integer layer, or all that follows a float one.
        self.results: dict[int, Samples] = {}
        self.floats: set[int] = set()  # layers whose results are read as floats
        self.reads: dict[int, list[Origin]] = {}  # what each integer layer reads
        self.residuals: list[Origin] = []  # what integer layers add
        self.joins: list[Origin] = []  # joined tensors
        self.norms: dict[int, list[Module | None]] = {}  # after each call of a layer
        self.norms_alone: set[int] = set()  # norms that were called by themselves
        self.calls: dict[int, int] = {}  # the place of a layer's last call in a run
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Trace nothing inside the block."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def normed(self, norm: Fused) -> None:
        """Record a norm that was called by itself."""
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
        is_integer = id(conv) in self.layers
        if isinstance(x, TracedTensor):
            self.read(x.origin, conv)
        if isinstance(residual, TracedTensor):
            self.residuals.append(residual.origin)
            if not (is_integer and fits):
                self.floats.update(residual.origin)
        self.norms.setdefault(id(conv), []).append(norm if fits else None)
        if not fits and norm is not None:
            self.norms_alone.add(id(norm))
        if is_integer and not fits:
            self.floats.add(id(conv))  # what follows reads floats
            return y
        samples = self.results.setdefault(id(conv), Samples())
        samples.add(y.feats, self.calls.get(id(conv), 0))
        return TracedTensor.traced(y, self, (id(conv),))

    def is_always_followed(self, layer: int, calls: int) -> bool:
        """Whether all calls of a layer were calls of ``fused.convolved``."""
        return len(self.norms.get(layer, ())) == calls

    def readers(self, layer: int) -> set[int]:
        """Return the integer layers that read results of a layer."""
        return {
            key
            for key, origins in self.reads.items()
            if any(layer in origin for origin in origins)
        }

    def writers(self) -> list[int]:
        """Return the layers whose results may be int8, in order."""
        count = -1
        while count < len(self.floats):  # a joined tensor is float if one part is
            count = len(self.floats)
            for origin in self.joins:
                if not self.floats.isdisjoint(origin):
                    self.floats.update(origin)
        read = {key for origin in self.origins() for key in origin}
        return [key for key in self.results if key in read - self.floats]

    def origins(self) -> list[Origin]:
        """Return the origins of all features and residuals of integer layers."""
        reads = [origin for origins in self.reads.values() for origin in origins]
        return [*self.residuals, *reads]


class TracedTensor(SparseTensor):
    """A layer's result during the traced run: the tracer records who reads it."""

    tracer: Tracer
    origin: Origin

    @classmethod
    def traced(cls, x: SparseTensor, tracer: Tracer, origin: Origin) -> TracedTensor:
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
    y = SparseTensor.trusted(first.manager, first.key, first.coords, feats)
    origin = tuple(key for x in tensors for key in x.origin)
    first.tracer.joins.append(origin)
    return TracedTensor.traced(y, first.tracer, origin)


# What stays in int8, and what is folded


class IntegerCalibration:
    """Chooses the integer layers of a model; ``calibrate`` runs the model for it.

    The model is a copy, which becomes the integer one. ``layers`` are (module of the
    float model, its observable layer) by path.
    """

    def __init__(
        self,
        model: Module,
        layers: Mapping[str, tuple[Module, Module]],
        bits: int,
        group_size: int | None,
        method: str,
    ):
        self.model, self.method = model, method
        self.records: dict[int, LayerRecord] = {}
        for path, (module, layer) in layers.items():
            if id(layer) not in self.records:
                facts = layer, bits, group_size
                if isinstance(module, FakeQuant):
                    trained = True, module.get("input_scale")
                    facts = layer, module.bits, module.group_size, *trained
                self.records[id(layer)] = LayerRecord(*facts)
            self.records[id(layer)].paths.append(path)
        self.tracer = Tracer(set(self.records))
        self.int8_scales: dict[int, mx.array] = {}  # of layers that return int8
        self.folded: tuple[str, ...] = ()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Trace the run of the model inside the block."""
        with tracing(self.tracer), norm_observers.observe(self.tracer.normed):
            yield

    def gather(self, layer: Module, x: mx.array, relation, y, call: int) -> None:
        """Record a call of a layer in the first run."""
        self.tracer.calls[id(layer)] = call
        self.records[id(layer)].gather(x, call)

    def compare(self, layer: Module, x, relation, y, call: int) -> None:
        """Record the errors of a call of a layer in the second run."""
        self.records[id(layer)].compare(x, relation, y, call)

    def choose(self) -> None:
        """Choose the scales, and which results stay in int8."""
        tracer, records = self.tracer, self.records
        for key, record in records.items():
            record.choose(self.method)
            # A linear layer that is called by itself gives floats there in any case.
            is_linear = isinstance(record.module, mlx.nn.Linear)
            if not is_linear and not tracer.is_always_followed(key, record.calls):
                tracer.floats.add(key)
        fixed = {key for key, record in records.items() if record.fixed}
        for key in tracer.writers():
            if key in fixed or fixed & tracer.readers(key):
                continue  # the reader's trained scale rounds it
            samples = tracer.results[key]
            worst = samples.worst(samples.scale(self.method), self.method)
            if worst:
                tracer.floats.add(key)
            if worst and key in records:
                note = f"writes floats, as one scale makes results of {worst}"
                records[key].notes.append(note)
        self._choose_output_scales(fixed)
        self._choose_input_scales()

    def _choose_output_scales(self, fixed: set[int]) -> None:
        """Choose a scale for each layer that returns int8.

        If readers were trained with ``FakeQuant``, it is their scale, provided that all
        readers of the result, and of results joined with it, have the same scale.
        """
        tracer, writers = self.tracer, self.tracer.writers()
        paths = {id(module): path for path, module in self.model.named_modules()}
        groups = {key: {key} for key in writers}  # results that cat joins
        for origin in tracer.joins:
            if tracer.floats.isdisjoint(origin):
                group = set().union(*(groups.get(key, {key}) for key in origin))
                groups |= {key: group for key in group}
        residuals = {key for origin in tracer.residuals for key in origin}
        for key in writers:
            readers = set().union(*map(tracer.readers, groups[key]))
            if not fixed & (readers | groups[key]):
                scale = tracer.results[key].scale(self.method)
            else:
                trained = [self.records[reader].trained for reader in readers]
                values = {None if each is None else each.item() for each in trained}
                is_one = len(values) == 1 and not residuals & groups[key]
                scale = trained[0] if is_one else None
            scale = usable(scale, paths[key])
            if scale is not None:
                self.int8_scales[key] = scale
        # Results that are only joined with others get the greatest of their scales: cat
        # would round them to it again.
        apart = {origin[0] for origin in tracer.origins() if len(origin) == 1}
        greatest: dict[int, list[mx.array]] = {}
        for origin in tracer.joins:
            if (scale := self._greatest(origin)) is not None:
                for key in origin:
                    greatest.setdefault(key, []).append(scale)
        for key, (scale, *others) in greatest.items():
            if key not in apart and all(other is scale for other in others):
                self.int8_scales[key] = scale

    def _choose_input_scales(self) -> None:
        """Give layers that read only int8 results of one scale that scale."""
        for reader, origins in self.tracer.reads.items():
            scale, *others = map(self._greatest, origins)
            is_one = scale is not None and all(other is scale for other in others)
            if is_one and not self.records[reader].by_row:
                self.records[reader].scale = scale

    def _greatest(self, origin: Origin) -> mx.array | None:
        """Return the greatest scale of joined results; None if one is float."""
        scales = [self.int8_scales.get(key) for key in origin]
        if any(scale is None for scale in scales):
            return None
        return max(scales, key=mx.array.item)

    def _foldable(self) -> dict[int, Module]:
        """Return the norms that can be folded into the layer before them, by layer.

        The norm follows each call of the layer, and is called nowhere else.
        """
        users: dict[int, set[int]] = {}
        for key, norms in self.tracer.norms.items():
            for norm in norms:
                users.setdefault(id(norm), set()).add(key)
        foldable = {}
        for key, (norm, *others) in self.tracer.norms.items():
            if norm is None or any(other is not norm for other in others):
                continue
            if users[id(norm)] != {key} or id(norm) in self.tracer.norms_alone:
                continue
            # A bare call of the layer must not compute the norm.
            record = self.records.get(key)
            if record and self.tracer.is_always_followed(key, record.calls):
                foldable[key] = norm
        return foldable

    def finish(self) -> dict[str, dict[str, object]]:
        """Put the integer layers into the model; return the errors by path.

        A ``FoldedNorm`` takes the place of each folded norm.
        """
        foldable, folded, errors = self._foldable(), [], {}
        modules = list(self.model.named_modules())
        for key, record in self.records.items():
            twin = twin_holding(record.module, record.weight)
            shift, mean = record.module.get("bias"), record.mean
            shift = None if shift is None else shift.astype(mx.float32)
            if mean is not None:
                shift = mean if shift is None else shift + mean
            if key in foldable:
                norm = foldable[key]
                scale, moved = norm.scale_shift()
                twin.scales = twin.scales * scale
                shift = moved if shift is None else shift * scale + moved
                for path in [path for path, module in modules if module is norm]:
                    put(self.model, path, FoldedNorm(type(norm).__name__))
                    folded.append(path)
            if shift is not None:
                twin.bias = shift
            error = record.error()
            twin.calibrated(record.scale, self.int8_scales.get(key), error["after"])
            error["writes_int8"] = key in self.int8_scales
            for path in record.paths:
                put(self.model, path, twin)
                errors[path] = error
        for _, module in modules:  # float layers that round their results
            if id(module) in self.int8_scales and id(module) not in self.records:
                set_output_scale(module, self.int8_scales[id(module)])
        self.folded = tuple(sorted(folded))
        tie_scales(self.model)
        mx.eval(self.model.parameters())
        return errors
