"""Integer layers of a file: what its names, dtypes and shapes say of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
from mlx.nn import Module

from ..integer_weight import IntegerWeight
from .integer import FoldedNorm, put, set_output_scale
from .linear import has_twin, twin_holding

__all__ = ["integer_like"]


def integer_like(
    model: Module, arrays: Mapping[str, mx.array] | str | Path
) -> tuple[str, ...]:
    """Give a float model the integer layers of a file that a calibrated one wrote.

    Layers get their twins, norms that the file has folded are replaced, and
    layers that write int8 get their scale. Then ``model.load_weights`` reads the
    file, strictly too.

    Args:
        model: float, of the file's net; changed in place.
        arrays: parameters by name, or the file.

    Returns:
        Paths of the integer layers.

    Raises:
        ValueError: arrays of the file do not fit one another.
    """
    if isinstance(arrays, str | Path):
        arrays = mx.load(str(arrays))
    found = []
    for path, module in list(model.named_modules()):
        if not has_twin(module) or "scales" in module:
            continue
        if is_integer_in(arrays, path):
            put(model, path, _twin(path, module, arrays))
            found.append(path)
        elif f"{path}.output_scale" in arrays:
            set_output_scale(module, arrays[f"{path}.output_scale"])
    for path, module in list(model.named_modules() if found else ()):
        if "running_mean" in module and f"{path}.running_mean" not in arrays:
            put(model, path, FoldedNorm(type(module).__name__))
    return tuple(found)


def is_integer_in(arrays: Mapping[str, mx.array], path: str) -> bool:
    """Return whether a file has an integer layer at a path."""
    return f"{path}.scales" in arrays and f"{path}.biases" not in arrays


def _twin(path: str, module: Module, arrays: Mapping[str, mx.array]) -> Module:
    """Return the twin of a float layer, with the arrays of a file."""
    names = "weight", "multipliers", "scales", "bias", "input_scale", "output_scale"
    held = {name: arrays.get(f"{path}.{name}") for name in names}
    weight, multipliers = held["weight"], held["multipliers"]
    if weight is None:
        raise ValueError(f"{path}.scales is there without {path}.weight")
    c_in = module.weight.shape[-1]
    is_linear = module.weight.ndim == 2
    if is_linear:
        weight = weight[None]
        multipliers = None if multipliers is None else multipliers[None]
    size = None
    if multipliers is not None:
        size = 8 * weight.shape[-1] // max(1, multipliers.shape[-1])
    kernel = () if is_linear else module.kernel_size
    facts = c_in, 8 if multipliers is None else 4, size, kernel
    try:
        w = IntegerWeight(weight, multipliers, held["scales"], *facts)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    twin = twin_holding(module, w)
    for name in ("bias", "input_scale"):
        if held[name] is not None:
            twin[name] = held[name]
    if held["output_scale"] is not None:
        set_output_scale(twin, held["output_scale"])
    twin.freeze()
    return twin
