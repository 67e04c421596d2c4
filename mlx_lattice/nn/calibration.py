"""What calibration shares: which layers it packs, its report, and runs of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass

import mlx.core as mx
import mlx.nn
from mlx.nn import Module

from ..problem import FORWARD
from ..relation import Relation
from ..routes import launch
from ..tensor import SparseTensor
from .fused import unfused
from .linear import LinearCall, linear_calls, observable, why_no_twin
from .quantized import put

__all__ = ["keep_float"]

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


def observable_layers(
    model: Module, paths: Iterable[str]
) -> dict[str, tuple[Module, Module]]:
    """Return the module at each path of a model, and the layer put in its place.

    The layer of a ``FakeQuant`` is its float layer. Linear layers of MLX become
    ``nn.Linear``, whose calls are observed.
    """
    modules, made, found = dict(model.named_modules()), {}, {}
    for path in paths:
        module = modules[path]
        layer = module.float_layer() if hasattr(module, "float_layer") else module
        found[path] = made.setdefault(id(module), (module, observable(layer)))
        put(model, path, found[path][1])
    return found


def observe_calls(
    model: Module,
    layers: Iterable[Module],
    batches: list,
    see: Callable[[Module, mx.array, Relation | None, mx.array], None],
    call: Callable[[Module, object], object],
) -> None:
    """Run a model on batches; ``see(layer, rows, relation, result)`` of every call.

    The model runs in evaluation mode. The relation of a linear layer is None.
    """
    known = {id(layer) for layer in layers}

    def observer(launched: launch.Launch) -> None:
        layer = launched.scope
        # Not every device launches a contraction for a linear layer.
        if id(layer) not in known or isinstance(layer, mlx.nn.Linear):
            return
        if launched.problem.pass_ == FORWARD:
            with launch.scope(None):  # launches of ``see`` belong to no layer
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
