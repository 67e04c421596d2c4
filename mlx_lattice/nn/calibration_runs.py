"""A float model over batches, with every call of every layer shown to calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass

import mlx.core as mx
import mlx.nn
from mlx.nn import Module
from mlx.utils import tree_map_with_path

from ..problem import FORWARD
from ..relation import Relation
from ..routes import launch
from ..tensor import SparseTensor
from .fused import unfused
from .watching import Tap


def call_of_model(model: Module, batch: object) -> object:
    """Call a model with a batch; a tuple is several arguments."""
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def run(
    model: Module,
    layers: dict[str, Module],
    batches: list,
    see: Callable[[Module, mx.array, Relation | None, mx.array], None],
    call: Callable[[Module, object], object] = call_of_model,
) -> None:
    """Call ``see(layer, rows, relation, result)`` for every call of every layer."""
    known = {id(layer): layer for layer in layers.values()}

    def observer(launched: launch.Launch) -> None:
        layer = known.get(id(launched.scope))
        # Linear layers are seen by their taps, wherever they run.
        if layer is None or isinstance(layer, mlx.nn.Linear):
            return
        if launched.problem.pass_ != FORWARD:
            return
        # What ``see`` contracts itself belongs to no layer.
        with launch.scope(None):
            see(layer, launched.inputs[0], launched.relation, launched.result)

    # What a layer returns is compared, not what a norm after it makes of that.
    tapped, observed = _tapped(model, known, see), launch.observe(observer)
    with _evaluating(model), unfused(), tapped, observed:
        for batch in batches:
            mx.eval(list(_arrays(call(model, batch))))


def _arrays(tree: object) -> Iterator[mx.array]:
    """Yield the arrays of a result: tensors, arrays, and what holds them."""
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


@contextmanager
def _tapped(model: Module, known: dict[int, Module], see) -> Iterator[None]:
    leaves = model.leaf_modules()

    def tap(_, module):
        linear = isinstance(module, mlx.nn.Linear) and id(module) in known
        return Tap(module, see) if linear else module

    model.update_modules(tree_map_with_path(tap, leaves, is_leaf=Module.is_module))
    try:
        yield
    finally:
        model.update_modules(leaves)
