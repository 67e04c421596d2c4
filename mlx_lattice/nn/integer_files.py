"""Integer layers of a file: what its names, dtypes and shapes say of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, prod
from pathlib import Path

import mlx.core as mx
from mlx.nn import Module

from ..quantized import IntegerWeight
from .linear import has_twin, twin_holding
from .quantized import FoldedNorm, check_scale, put, set_output_scale

__all__ = ["integer_like"]

# Parameters that not every integer layer has beside its weight and scales.
OPTIONAL = "bias", "input_scale", "output_scale", "output_inverse"


ROUNDED = 0.02  # two bfloat16 numbers, and more, may be off their product by


def integer_like(
    model: Module,
    arrays: Mapping[str, mx.array] | str | Path,
    *,
    by_row: Iterable[str] | None = None,
) -> tuple[str, ...]:
    """Give a float model the integer layers of a file that a calibrated one wrote.

    Layers get their twins, norms that the file has folded are replaced, and
    layers that write int8 get their scale. Then ``model.load_weights`` reads the
    file, strictly too.

    The ``scales`` of a calibrated layer have its ``input_scale`` in them. So a file
    with any scale of features, or with a folded norm, has one for every integer layer,
    but for those in ``by_row``: layers whose calls differed too much for one, or whose
    features calibration saw no value of.

    Args:
        model: float, of the file's net; changed in place.
        arrays: parameters by name, or the file.
        by_row: paths of the integer layers whose rows have scales of their own; by
            default all of them in a file that was not calibrated, else none.

    Returns:
        Paths of the integer layers.

    Raises:
        ValueError: arrays of the file do not fit one another or the layers, or one is
            missing.
    """
    if isinstance(arrays, str | Path):
        arrays = mx.load(str(arrays))
    floats = [
        (path, module)
        for path, module in model.named_modules()
        if has_twin(module) and "scales" not in module
    ]
    twins = {p: _twin(p, m, arrays) for p, m in floats if is_integer_in(arrays, p)}
    folded = [
        (path, module)
        for path, module in (model.named_modules() if twins else ())
        if "running_mean" in module and f"{path}.running_mean" not in arrays
    ]
    _check_input_scales(twins, arrays, by_row, bool(folded))
    for path, module in floats:
        if path in twins:
            put(model, path, twins[path])
        elif f"{path}.output_scale" in arrays:
            set_output_scale(module, _output_scale(path, arrays))
    for path, module in folded:
        put(model, path, FoldedNorm(type(module).__name__))
    return tuple(twins)


def is_integer_in(arrays: Mapping[str, mx.array], path: str) -> bool:
    """Return whether a file has an integer layer at a path."""
    return f"{path}.scales" in arrays and f"{path}.biases" not in arrays


def _check_input_scales(
    twins: Mapping[str, Module],
    arrays: Mapping[str, mx.array],
    by_row: Iterable[str] | None,
    is_folded: bool,
) -> None:
    """Raise unless the layers without a scale of features are those that have none."""
    without = {path for path, twin in twins.items() if "input_scale" not in twin}
    if by_row is None:
        ends = (".input_scale", ".output_scale")
        is_calibrated = is_folded or any(name.endswith(ends) for name in arrays)
        wanted = set() if is_calibrated else without
    else:
        wanted = set(by_row)
    if missing := sorted(without - wanted):
        raise ValueError(
            f"{missing[0]}.input_scale is missing: the scales of a calibrated layer "
            "have that of its features in them, and are wrong without it. Take a whole "
            "file; a layer whose rows have scales of their own is named in by_row"
        )
    if other := sorted(wanted - without):
        what = f"{other[0]}.input_scale is there"
        what = what if other[0] in twins else f"{other[0]} is no integer layer there"
        raise ValueError(
            f"the rows of {other[0]} are said to have scales of their own, but {what}"
        )


def _scale(path: str, name: str, arrays: Mapping[str, mx.array]) -> mx.array | None:
    scale = arrays.get(f"{path}.{name}")
    if scale is None:
        return None
    check_scale(f"{path}.{name}", scale)
    if not 0 < (value := scale.item()) < inf:
        raise ValueError(f"{path}.{name} must be finite and above 0; got {value}")
    return scale


def _output_scale(path: str, arrays: Mapping[str, mx.array]) -> mx.array | None:
    scale = _scale(path, "output_scale", arrays)
    inverse = _scale(path, "output_inverse", arrays)
    if (scale is None) != (inverse is None):
        there, missing = "output_scale", "output_inverse"
        if scale is None:
            there, missing = missing, there
        raise ValueError(f"{path}.{there} is there without {path}.{missing}")
    if scale is not None and abs(scale.item() * inverse.item() - 1) > ROUNDED:
        raise ValueError(
            f"{path}.output_inverse must be one over output_scale, "
            f"{1 / scale.item():g}; got {inverse.item():g}"
        )
    return scale


def _twin(path: str, module: Module, arrays: Mapping[str, mx.array]) -> Module:
    names = "weight", "multipliers", "scales", "bias"
    held = {name: arrays.get(f"{path}.{name}") for name in names}
    weight, multipliers = held["weight"], held["multipliers"]
    if weight is None:
        raise ValueError(f"{path}.scales is there without {path}.weight")
    if multipliers is None and weight.dtype == mx.uint32:
        raise ValueError(
            f"{path}.weight has packed words, but neither {path}.biases, of a packed "
            f"layer, nor {path}.multipliers, of an int4 one for int8 features, is there"
        )
    c_out, *axes, c_in = module.weight.shape
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
    if w.shape != (prod(axes), c_in, c_out):
        raise ValueError(
            f"{path}.weight is of {w.shape[0]} offsets and {w.shape[2]} output "
            f"channels; the layer has {prod(axes)} and {c_out}"
        )
    twin = twin_holding(module, w)
    bias = held["bias"]
    if bias is not None and tuple(bias.shape) != (c_out,):
        raise ValueError(
            f"{path}.bias must have shape {(c_out,)}; got {tuple(bias.shape)}"
        )
    scale = _scale(path, "input_scale", arrays)
    for name, array in (("bias", bias), ("input_scale", scale)):
        if array is not None:
            twin[name] = array
    if (scale := _output_scale(path, arrays)) is not None:
        set_output_scale(twin, scale)
    twin.freeze()
    return twin
