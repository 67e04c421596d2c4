"""What calibration shares: the layers it packs, its runs, its searches, its report."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn
from mlx.nn import Module

from ..integer_facts import MOST, to_int8
from ..integer_tensor import TINY, inverse_of
from ..integer_weight import IntegerWeight, integer_weight
from ..problem import FORWARD
from ..quantized import module_layout
from ..relation import Relation
from ..routes import launch
from ..tensor import SparseTensor
from .fused import unfused
from .integer import put
from .linear import LinearCall, linear_calls, observable, why_no_twin

__all__ = ["keep_float"]

# Layers that stay in float

# Words in the paths of the layers that a net's result or its rows come from.
HEADS = (
    "head", "classifier", "logits", "final", "output_layer", "to_subdiv", "out_layer",
    "to_latent",
)  # fmt: skip


class keep_float:  # noqa: N801 - reads as the predicate it is
    """A ``class_predicate`` of ``mlx.nn.quantize`` that keeps stems and heads in float.

    Layers with few input channels (stems, depthwise kernels) have nothing to pack, and
    layers with few outputs are what the net's result is made of; a subclass with a call
    of its own has no packed twin. Printed afterwards, it says which layers it kept and
    why; ``kept`` has the same as a dict.

    Args:
        few_inputs (int): Keep layers with fewer input channels a group. Default:
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
        """Return whether a layer is to be packed; a kept one is noted."""
        if not hasattr(module, "to_quantized") or "scales" in module:
            return False
        reason = self._reason(path, module)
        if reason is None:
            self.kept.pop(path, None)
        else:
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


def wants_packing(
    predicate: Callable[[str, Module], bool], path: str, module: Module
) -> bool:
    """Return whether a predicate wants a layer to be packed.

    Raises:
        TypeError: it gives options of a layer's own, as ``mlx.nn.quantize`` takes.
    """
    wanted = predicate(path, module)
    if isinstance(wanted, dict):
        raise TypeError(
            f"class_predicate must return True or False here; got {wanted} for {path}: "
            "all layers are packed alike"
        )
    return bool(wanted)


# The report


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
        activations: bits of features, 8 or None for floats.
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


# Runs of the model


def call_of_model(model: Module, batch: object) -> object:
    """Call a model with a batch; a tuple is several arguments."""
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def observable_copy(
    model: Module, paths: Iterable[str]
) -> tuple[Module, dict[str, Module]]:
    """Return a deep copy of a model, and its layers at some paths.

    Linear layers of MLX at these paths become ``nn.Linear``, whose calls are observed.
    """
    model = copy.deepcopy(model)
    modules = dict(model.named_modules())
    made: dict[int, Module] = {}
    found: dict[str, Module] = {}
    for path in paths:
        layer = modules[path]
        found[path] = made.setdefault(id(layer), observable(layer))
        if found[path] is not layer:
            put(model, path, found[path])
    return model, found


def observe_calls(
    model: Module,
    layers: dict[str, Module],
    batches: list,
    see: Callable[[Module, mx.array, Relation | None, mx.array], None],
    call: Callable[[Module, object], object] = call_of_model,
) -> None:
    """Call ``see(layer, rows, relation, result)`` for every call of every layer.

    Args:
        model: a copy that ``observable_copy`` made.
        layers: its layers that are observed, by path.
        batches: its inputs.
        see: the observer; the relation of a linear layer is None.
        call: runs the model on a batch.
    """
    known = {id(layer): layer for layer in layers.values()}

    def observer(launched: launch.Launch) -> None:
        layer = known.get(id(launched.scope))
        # Not every device launches a contraction for a linear layer.
        if layer is None or isinstance(layer, mlx.nn.Linear):
            return
        if launched.problem.pass_ != FORWARD:
            return
        # Contractions of ``see`` itself belong to no layer.
        with launch.scope(None):
            see(layer, launched.inputs[0], launched.relation, launched.result)

    def linear_observer(called: LinearCall) -> None:
        if id(called.layer) in known:
            with launch.scope(None):
                see(called.layer, called.rows, None, called.result)

    # The layer's own result is compared, without the norm after it.
    linears = linear_calls.observe(linear_observer)
    with _evaluating(model), unfused(), linears, launch.observe(observer):
        for batch in batches:
            mx.eval(list(_arrays(call(model, batch))))


def _arrays(tree: object) -> Iterator[mx.array]:
    """Yield the arrays of a result: of tensors, arrays and containers of them."""
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


# Scales of int8 features and of integer weights

SAMPLES = 1 << 15  # magnitudes that are kept of a call
SHARE = 0.9999  # of magnitudes that a percentile keeps unclipped
# Normal features of one size are 0.9% off, beside others 4 times as large 3.5%, and 16
# times 14%; where a call is more off than this by a common scale, and by its own this
# many times less, it gets another: rows scaled by themselves are 0.6% off at any size.
MOST_OFF, TIMES = 0.04, 3
# Shares of the greatest magnitude that the searches try.
FEATURES = tuple(1 - at / 40 for at in range(33))
WEIGHTS = {8: (1.0, 0.95, 0.9), 4: (1.0, 0.93, 0.86, 0.79, 0.72, 0.65)}


class Worst(NamedTuple):
    """The call that a common scale rounds worst.

    Attributes:
        call: its place in a run of the model, from 0 on.
        calls: how many there are.
        error: norm of the error over that of the features, by the common scale.
        own: the same by a scale of its own.
    """

    call: int
    calls: int
    error: float
    own: float

    def __str__(self) -> str:
        """Return "call 2 of 3 16.2% off (its own 0.9%)"."""
        at = f"call {self.call + 1} of {self.calls}"
        return f"{at} {self.error:.1%} off (its own {self.own:.1%})"


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

    def worst(self, scale: mx.array, method: str) -> Worst | None:
        """Return the call that a scale rounds worst, or None if all errors are small.

        An error is large if it is above ``MOST_OFF``, and above ``TIMES`` the error of
        the scale that the method chooses for this call alone.
        """
        found = None
        for call, kept in self._kept.items() if len(self._kept) > 1 else ():
            error = _error(mx.concatenate(kept), scale)
            if error > max(MOST_OFF, found.error if found else 0.0):
                own = _error(mx.concatenate(kept), _chosen(kept, method))
                if error > TIMES * own:
                    found = Worst(call, len(self._kept), error, own)
        return found


def _chosen(kept: list[mx.array], method: str) -> mx.array:
    if not kept:
        return mx.array([0.0], dtype=mx.float32)
    return METHODS[method](mx.concatenate(kept)).reshape(1).astype(mx.float32)


def _error(x: mx.array, scale: mx.array) -> float:
    """Return the norm of the rounding error of magnitudes over their norm."""
    off = to_int8(x, inverse_of(scale)).astype(mx.float32) * scale - x
    return (mx.linalg.norm(off) / mx.maximum(mx.linalg.norm(x), TINY)).item()


def _greatest(x: mx.array) -> mx.array:
    return x.max() / MOST


def _percentile(x: mx.array) -> mx.array:
    at = min(x.size - 1, int(SHARE * x.size))
    return mx.sort(x)[at] / MOST


def _least_squares(x: mx.array) -> mx.array:
    most = x.max() / MOST
    scales = most * mx.array(FEATURES)
    errors = []
    for at in range(len(FEATURES)):
        scale = scales[at : at + 1]
        rounded = to_int8(x, inverse_of(scale))
        errors.append(mx.square(rounded.astype(mx.float32) * scale - x).sum())
        mx.eval(errors[-1])
    return scales[mx.argmin(mx.stack(errors))]


METHODS: dict[str, Callable[[mx.array], mx.array]] = {
    "least squares": _least_squares,
    "percentile": _percentile,
    "greatest": _greatest,
}


def searched_weight(
    layer: Module, bits: int, group_size: int | None, squares: mx.array | None
) -> IntegerWeight:
    """Return a layer's weight in integers, each output channel by its best scale.

    Args:
        layer: float: a convolution or a linear layer.
        bits, group_size: of the weight.
        squares: (C_in,) float32 mean squares of the features, which weight the errors;
            None for equal weights.
    """
    layout = module_layout(layer.weight)
    given = {"bits": bits, "group_size": group_size, "layout": layout}
    plain = integer_weight(layer.weight, **given)
    c_out, c_in = layer.weight.shape[0], layer.weight.shape[-1]
    w = layer.weight.astype(mx.float32).reshape(c_out, -1, c_in)
    if squares is None:
        squares = mx.ones(c_in)
    else:  # of each output channel's own group
        groups = squares.size // c_in
        squares = mx.repeat(squares.reshape(groups, c_in), c_out // groups, axis=0)
        squares = squares.reshape(c_out, 1, c_in)
    least, scale = None, plain.scale
    for share in WEIGHTS[bits]:
        tried = plain.scale * share
        made = integer_weight(layer.weight, scale=tried, **given)
        wrong = mx.square(made.dense().transpose(2, 0, 1) - w) * squares
        error = wrong.sum(axis=(1, 2))
        if least is None:
            least = error
        scale = mx.where(error < least, tried, scale)
        least = mx.minimum(error, least)
        mx.eval(least, scale)
    return integer_weight(layer.weight, scale=scale, **given)


# Records of a layer


class CallCounter:
    """Counts the calls of each layer in a run of the model."""

    def __init__(self):
        self._made: Counter[tuple[str, int]] = Counter()

    def start(self) -> None:
        """Begin a run."""
        self._made.clear()

    def next(self, what: str, module: Module) -> int:
        """Return the place of a call, from 0 on, counted for each ``what`` apart."""
        key = what, id(module)
        self._made[key] += 1
        return self._made[key] - 1


class ComparedCalls:
    """Sums over the results of one call of a layer, in all batches.

    Args:
        errors: (3,) float32: of the plain error, of the chosen one, of the output;
            squared.
        shift: (C_out,) float32 (float result - integer result).
        rows: count of rows.
    """

    def __init__(self, errors: mx.array, shift: mx.array, rows: int):
        self.errors, self.shift, self.rows = errors, shift, rows

    def __add__(self, other: ComparedCalls | None) -> ComparedCalls:
        """Return the sums of both, evaluated."""
        made = self
        if other is not None:
            errors, shift = self.errors + other.errors, self.shift + other.shift
            made = ComparedCalls(errors, shift, self.rows + other.rows)
        mx.eval(made.errors, made.shift)
        return made

    def error(self, chosen: bool, mean: mx.array | None = None) -> float:
        """Return the norm of an error over that of the output.

        Args:
            chosen: the error of what was chosen, else of the plain rounding.
            mean: (C_out,), what the layer adds to its results.
        """
        plain, wrong, whole = self.errors.tolist()
        wrong = wrong if chosen else plain
        if mean is not None:
            moved = self.rows * mx.square(mean) - 2 * mean * self.shift
            wrong = max(0.0, wrong + moved.sum().item())
        return (wrong / (whole or 1.0)) ** 0.5


@dataclass(eq=False)
class LayerRecord:
    """What calibration records of one layer.

    Attributes:
        module: the float layer.
        paths: its paths in the model.
        bits, group_size: of its weight.
        trained: its scale of features from training with ``FakeQuant``, or None.
        fixed: whether it was trained with ``FakeQuant``: then nothing is searched.
        inputs: magnitudes of features.
        squares: sums of squares of the input channels, and count of rows.
        rows: count of rows of the features.
        calls: number of calls of the layer.
        scale, weight: of features and in integers, as chosen.
        by_row: whether each row has its own scale, since the calls differ too much.
        notes: the report's notes.
        plain: weight and scale by the greatest magnitudes.
        compared: results, by the place of the call in a run.
    """

    module: Module
    paths: list[str]
    bits: int
    group_size: int | None
    trained: mx.array | None = None
    fixed: bool = False
    inputs: Samples = field(default_factory=Samples)
    squares: mx.array | None = None
    rows: int = 0
    calls: int = 0
    scale: mx.array | None = None
    weight: IntegerWeight | None = None
    by_row: bool = False
    notes: list[str] = field(default_factory=list)
    plain: tuple[IntegerWeight, mx.array] | None = None
    compared: dict[int, ComparedCalls] = field(default_factory=dict)

    @property
    def whole(self) -> ComparedCalls | None:
        """The sums over all calls."""
        total = None
        for each in self.compared.values():
            total = each + total
        return total

    @property
    def mean(self) -> mx.array | None:
        """The shift of each output channel's mean by rounding, which is added back.

        None if no rows were seen, if the layer was trained with ``FakeQuant``, and if
        calls differ: the mean of large features is wrong for small ones.
        """
        whole = self.whole
        if self.fixed or self.by_row or whole is None or not whole.rows:
            return None
        return whole.shift / whole.rows

    @property
    def after(self) -> float | None:
        """The error with the chosen scales, after the mean is added back."""
        whole = self.whole
        return None if whole is None else whole.error(True, self.mean)

    def layer_error(self, path: str, writes_int8: bool) -> LayerError:
        """Return the layer's line of the report."""
        whole, mean = self.whole, self.mean
        before = None if whole is None else whole.error(False)
        calls = [
            self.compared[turn].error(True, mean) for turn in sorted(self.compared)
        ]
        calls = calls if len(calls) > 1 else []
        facts = before, self.after, writes_int8, tuple(calls), "; ".join(self.notes)
        return LayerError(path, *facts)
