"""What of a net is packed; training with FakeQuant; files of integer layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn import Module
from mlx.utils import tree_map_with_path

from ..int8 import as_int8, inverse_of, row_scales
from ..problem import MOST, in_device_memory
from ..quantized import IntegerWeight, integer_group_size, integer_weight
from ..tensor import SparseTensor, features_of
from ..transformations import Function
from .linear import (
    INTEGER,
    FoldedNorm,
    Packable,
    check_mode,
    has_twin,
    pack,
    set_output_scale,
    twin_holding,
    why_no_twin,
)

__all__ = [
    "FakeQuant", "fake_quantize", "integer_like", "keep_float", "tie_scales",
    "unpack_int4",
]  # fmt: skip

# Parameters that not every integer layer has beside its weight and scales.
OPTIONAL = "bias", "input_scale", "output_scale", "output_inverse"


# Words in the paths of layers that compute a net's result or choose its rows.
HEADS = (
    "head", "classifier", "logits", "final", "output_layer", "to_subdiv", "out_layer",
    "to_latent",
)  # fmt: skip


def put(model: Module, path: str, module: Module) -> None:
    """Put a module at a path of a model."""
    *above, last = path.split(".")
    for name in above:
        model = model[int(name)] if isinstance(model, list) else model[name]
    model[int(last) if isinstance(model, list) else last] = module


def usable(scale: mx.array | None, path: str) -> mx.array | None:
    """Return a scale of features; None if they were all zero, or none was seen."""
    value = 0.0 if scale is None else scale.item()
    finite(value, path)
    return scale if value else None


def finite(value: float, path: str) -> None:
    """Raise unless what was computed of a layer's features and results is finite."""
    if not isfinite(value):
        raise ValueError(
            f"features or results at {path} are not all finite; calibrate on others"
        )


def tie_scales(model: Module) -> None:
    """Make equal scales of features one array, so that no layer rescales them.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 64)))
        >>> net = nn.Sequential(nn.SubmConv3d(64, 64, 3), nn.SubmConv3d(64, 64, 3))
        >>> small, _ = ml.calibrate(net, [x], bits=8, activations=8)
        >>> nn.tie_scales(small)
        >>> small.layers[0].output_scale is small.layers[1].input_scale
        True
    """
    scales = [
        (module, name, module[name])
        for module in model.modules()
        for name in ("output_scale", "input_scale", "output_inverse")
        if name in module
    ]
    mx.eval([scale for *_, scale in scales])
    tied: dict[float, mx.array] = {}
    inverses: dict[float, mx.array] = {}
    for module, name, scale in scales:
        value = scale.item()
        if value not in tied:
            tied[value] = in_device_memory(mx.array([value], dtype=mx.float32))
        module[name] = tied[value]
        if name == "input_scale":
            if value not in inverses:
                inverses[value] = in_device_memory(inverse_of(tied[value]))
            facts = tied[value], inverses[value]  # not a parameter
            object.__setattr__(module, "_tied_input", facts)


def unpack_int4(model: Module) -> tuple[str, ...]:
    """Store the int4 weights of integer layers as int8, in place.

    GPUs multiply int8 features with int8 weights, and unpack int4 weights at every
    call, in one more launch. Unpacked once, the weights take twice the memory and are
    as fast as int8 weights. Results do not change. Returns the paths of the layers that
    had int4 weights.

    Examples:
        >>> net = nn.Sequential(nn.SubmConv3d(64, 64, 3))
        >>> mlx.nn.quantize(net, bits=4, mode="integer")
        >>> nn.unpack_int4(net)
        ('layers.0',)
    """
    paths = []
    for path, module in model.named_modules():
        if getattr(module, "mode", None) == INTEGER and module.bits == 4:
            module._hold(module.packed_weight().unpacked())
            paths.append(path)
    mx.eval(model.parameters())
    return tuple(sorted(paths))


# What is packed, and training for it


class keep_float:  # noqa: N801 - reads as the predicate it is
    """Choose the layers that ``mlx.nn.quantize`` packs: all but stems and heads.

    Packing saves little in layers with few input channels, such as stems and depthwise
    kernels. Layers with few outputs compute the result of the net. A subclass with its
    own ``__call__`` has no packed twin. Print the predicate afterwards to see the
    layers that it kept, and why; ``kept`` is the same as a dict.

    Args:
        few_inputs (int): Keep layers with fewer input channels in a group. Default:
            ``16``.
        few_outputs (int): Keep layers with fewer output channels. Default: ``8``.
        names (tuple of str): Keep layers with one of these words in their path.
            Default: the heads of the ``models``, and the layers that choose rows.

    Examples:
        >>> net = nn.Sequential(nn.SubmConv3d(4, 64, 3), nn.SubmConv3d(64, 64, 3))
        >>> mlx.nn.quantize(net, class_predicate=nn.keep_float())
        >>> [type(layer).__name__ for layer in net.layers]
        ['SubmConv3d', 'QuantizedSubmConv3d']
    """

    def __init__(
        self, few_inputs: int = 16, few_outputs: int = 8, names: Sequence[str] = HEADS
    ):
        self.few_inputs: int = few_inputs
        self.few_outputs: int = few_outputs
        self.names: tuple[str, ...] = (
            (names,) if isinstance(names, str) else tuple(names)
        )
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


def wants(predicate: Callable[..., Any], path: str, module: Module) -> bool:
    wanted = predicate(path, module)
    if isinstance(wanted, dict):
        raise TypeError(
            f"class_predicate must return True or False here; got {wanted} for {path}: "
            "all layers are packed alike"
        )
    return bool(wanted)


class FakeQuant(Packable, Module):
    """Compute a convolution or ``Linear`` in float on rounded features and weights.

    Rounding is that of the integer layer, so ``ml.calibrate``, or ``mlx.nn.quantize``
    with ``quantize_input=True``, keeps the net's values and its trained scales.
    Gradients pass straight through (Jacob et al., "Quantization and Training of Neural
    Networks for Efficient Integer-Arithmetic-Only Inference", 2018); clipped features
    have a gradient of 0. Parameters have the names of the wrapped layer.

    Args:
        layer (nn.Module): The float layer.
        bits (int): Bits of its weight: 8 or 4. Default: ``8``.
        group_size (int, optional): Groups of a 4-bit weight. Default: ``64``.
        momentum (float, optional): How far a batch moves the scale of the features,
            which is their greatest magnitude over 127. With ``None`` every row has its
            own scale. Default: ``0.1``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> layer = nn.FakeQuant(nn.SubmConv3d(8, 16, 3))
        >>> layer(x).shape
        (64, 16)
    """

    never_trained: Iterable[str] = ("input_scale",)  # it follows the features

    def __init__(
        self,
        layer: Module,
        bits: int = 8,
        group_size: int | None = None,
        momentum: float | None = 0.1,
    ):
        super().__init__()
        group_size = integer_group_size(bits, group_size)
        if not has_twin(layer) or "scales" in layer:
            raise TypeError(
                "FakeQuant takes a float convolution or Linear; got "
                f"{type(layer).__name__}"
            )
        self.bits: int = bits
        self.group_size: int | None = group_size
        self.momentum: float | None = momentum
        for name in ("weight", "bias"):
            if name in layer:
                self[name] = layer[name]
        # Its arrays are those of this module: it is not part of the tree.
        object.__setattr__(self, "_layer", layer)
        if momentum is not None:
            self.input_scale: mx.array = mx.zeros((1,))

    def _extra_repr(self) -> str:
        groups = f", group_size={self.group_size}" if self.group_size else ""
        return f"{self._layer}, bits={self.bits}{groups}, momentum={self.momentum}"

    def float_layer(self) -> Module:
        """Return the wrapped float layer, with the current parameters."""
        for name in ("weight", "bias"):
            if name in self:
                self._layer[name] = self[name]
        return self._layer

    def __call__(self, x: SparseTensor | mx.array, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with rounded features and weight."""
        feats = self._rounded(features_of(x))
        x = x.replace(feats) if isinstance(x, SparseTensor) else feats
        layer = self.float_layer()
        layer["weight"] = _round_weight(self.bits, self.group_size)(self["weight"])
        try:
            return layer(x, *args, **kwargs)
        finally:
            self.float_layer()

    def _rounded(self, x: mx.array) -> mx.array:
        feats = mx.stop_gradient(x)
        if self.momentum is None:
            rows = row_scales(feats.reshape(-1, x.shape[-1]))
            return _round_features(x, rows.reshape(*x.shape[:-1], 1))
        if not x.size:
            return x
        batch, old = mx.abs(feats).max().astype(mx.float32) / MOST, self["input_scale"]
        if self.training:
            moved = old + self.momentum * (batch - old)
            self["input_scale"] = mx.where(old > 0, moved, batch)
        # Before any training the features have the scale of the batch.
        scale = self["input_scale"]
        return _round_features(x, mx.where(scale > 0, scale, batch))

    def to_quantized(
        self,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        quantize_input: bool = False,
    ) -> Module:
        """Return the trained integer layer, or a layer with a packed weight."""
        layer = self.float_layer()
        if check_mode(mode, quantize_input) != INTEGER:
            return twin_holding(layer, pack(layer, group_size, bits))
        packing = bits or self.bits, group_size or self.group_size
        if packing != (self.bits, self.group_size):
            raise ValueError(
                f"the layer was trained for int{self.bits} weights in groups of "
                f"{self.group_size}; got bits={bits}, group_size={group_size}"
            )
        w = pack(layer, self.group_size, self.bits, INTEGER)
        scale = usable(self.get("input_scale"), str(layer))
        return twin_holding(layer, w).calibrated(scale)


def _unclipped(x: mx.array, scale: mx.array) -> mx.array:
    return (mx.abs(x.astype(mx.float32)) <= (MOST + 0.5) * scale).astype(x.dtype)


_round_features = Function(
    lambda x, scale: (as_int8(x, scale).astype(mx.float32) * scale).astype(x.dtype),
    vjp=lambda at, dy, _: (dy * _unclipped(*at), mx.zeros_like(at[1])),
    jvp=lambda at, by: by[0] * _unclipped(*at),
)


@cache
def _round_weight(bits: int, group_size: int | None) -> Function:
    """Return what rounds a weight as integers hold it, in its shape and dtype."""

    def forward(weight):
        options = {"bits": bits, "group_size": group_size, "layout": "module"}
        w = integer_weight(weight, **options).dense(weight.dtype)
        return w.transpose(2, 0, 1).reshape(weight.shape)

    return Function(forward, vjp=lambda _, dy, __: dy, jvp=lambda _, tangent: tangent)


def fake_quantize(
    model: Module,
    bits: int = 8,
    group_size: int | None = None,
    *,
    momentum: float | None = 0.1,
    class_predicate: Callable[[str, Module], bool] | None = None,
) -> None:
    """Wrap the convolutions and linear layers of a model in ``FakeQuant``, in place.

    A layer that is used twice stays one layer.

    Args:
        model: a float model.
        bits, group_size, momentum: those of ``FakeQuant``.
        class_predicate: as in ``ml.calibrate``; by default ``keep_float()``.

    Examples:
        >>> net = nn.Sequential(nn.SubmConv3d(16, 16, 3), nn.ReLU())
        >>> nn.fake_quantize(net)
        >>> type(net.layers[0]).__name__
        'FakeQuant'
    """
    predicate = keep_float() if class_predicate is None else class_predicate
    wrapped: dict[int, FakeQuant] = {}

    def wrap(path: str, module: Module) -> Module:
        able = has_twin(module) and "scales" not in module
        if not able or not wants(predicate, path, module):
            return module
        if id(module) not in wrapped:
            wrapped[id(module)] = FakeQuant(module, bits, group_size, momentum)
        return wrapped[id(module)]

    leaves = model.leaf_modules()
    model.update_modules(tree_map_with_path(wrap, leaves, is_leaf=Module.is_module))


# Files


def integer_like(
    model: Module,
    arrays: Mapping[str, mx.array] | str | Path,
    *,
    by_row: Iterable[str] | None = None,
) -> tuple[str, ...]:
    """Give a float model the integer layers of a calibrated model's file.

    Convolutions and linear layers become their integer layers, folded norms are
    replaced, and layers that return int8 get an output scale. Then
    ``model.load_weights`` reads the file, also with ``strict=True``. Returns the paths
    of the integer layers.

    If a file has any scale of features, or a folded norm, every integer layer in it has
    an ``input_scale``, except those in ``by_row``.

    Args:
        model: the file's net in float; changed in place.
        arrays: parameters by name, or the file.
        by_row: paths of the integer layers that have a scale for each row. Calibration
            gives a layer such scales if its calls differ too much, or if its features
            were all zero. By default all integer layers of a file without calibration,
            else none.

    Raises:
        ValueError: arrays of the file do not fit each other or the layers, or an array
            is missing.

    Examples:
        >>> net = nn.Sequential(nn.SubmConv3d(64, 64, 3), nn.ReLU())
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 64)))
        >>> small, _ = ml.calibrate(net, [x], bits=8, activations=8)
        >>> small.save_weights("small.safetensors")
        >>> nn.integer_like(net, "small.safetensors")
        ('layers.0',)
        >>> net.load_weights("small.safetensors")(x).shape
        (64, 64)
    """
    if isinstance(arrays, str | Path):
        arrays = mx.load(str(arrays))
    floats = {
        path: module
        for path, module in model.named_modules()
        if has_twin(module) and "scales" not in module
    }
    integer = [
        p for p in floats if f"{p}.scales" in arrays and f"{p}.biases" not in arrays
    ]
    twins = {path: _twin_in(arrays, path, floats[path]) for path in integer}
    folded = [
        (path, module)
        for path, module in (model.named_modules() if twins else ())
        if "running_mean" in module and f"{path}.running_mean" not in arrays
    ]
    _check_input_scales(twins, arrays, by_row, bool(folded))
    for path, module in floats.items():
        if path in twins:
            put(model, path, twins[path])
        elif (scale := _scale_in(arrays, f"{path}.output_scale")) is not None:
            set_output_scale(module, scale)
    for path, module in folded:
        put(model, path, FoldedNorm(type(module).__name__))
    return tuple(twins)


def _check_input_scales(
    twins: Mapping[str, Module],
    arrays: Mapping[str, mx.array],
    by_row: Iterable[str] | None,
    is_folded: bool,
) -> None:
    without = {path for path, twin in twins.items() if "input_scale" not in twin}
    if by_row is None:
        ends = (".input_scale", ".output_scale")
        is_calibrated = is_folded or any(name.endswith(ends) for name in arrays)
        by_row = () if is_calibrated else without
    if missing := sorted(without - {*by_row}):
        raise ValueError(
            f"{missing[0]}.input_scale is missing: the scales of a calibrated layer "
            "include the scale of its features, and are wrong without it. Take a whole "
            "file, or name a layer whose rows have scales of their own in by_row"
        )
    if other := sorted({*by_row} - without):
        raise ValueError(
            f"by_row names {other[0]}, which is not an integer layer without "
            "input_scale"
        )


def _scale_in(arrays: Mapping[str, mx.array], name: str) -> mx.array | None:
    scale = arrays.get(name)
    if scale is not None and (scale.size != 1 or not 0 < scale.item() < inf):
        raise ValueError(
            f"{name} must be one finite number above 0; got {scale.tolist()}"
        )
    return scale


def _twin_in(arrays: Mapping[str, mx.array], path: str, module: Module) -> Module:
    names = "weight", "multipliers", "scales"
    weight, multipliers, scales = (arrays.get(f"{path}.{name}") for name in names)
    if weight is None:
        raise ValueError(f"{path}.scales is there without {path}.weight")
    if multipliers is None and weight.dtype == mx.uint32:
        raise ValueError(
            f"{path}.weight has packed words, but the file has neither {path}.biases, "
            f"of a packed layer, nor {path}.multipliers, of an int4 layer for int8 "
            "features"
        )
    c_out, *axes, c_in = module.weight.shape
    if not axes:
        weight = weight[None]
        multipliers = None if multipliers is None else multipliers[None]
    bits, size = 8, None
    if multipliers is not None:
        bits, size = 4, 8 * weight.shape[-1] // max(1, multipliers.shape[-1])
    try:
        w = IntegerWeight(weight, multipliers, scales, c_in, bits, size)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if w.shape != (prod(axes), c_in, c_out):
        raise ValueError(
            f"{path}.weight is of {w.shape[0]} offsets and {w.shape[2]} output "
            f"channels; the layer has {prod(axes)} and {c_out}"
        )
    twin = twin_holding(module, w)
    if f"{path}.bias" in arrays:  # of a folded norm; load_weights checks its shape
        twin.bias = mx.zeros((c_out,))
    if (scale := _scale_in(arrays, f"{path}.input_scale")) is not None:
        twin.input_scale = scale
    if (scale := _scale_in(arrays, f"{path}.output_scale")) is not None:
        set_output_scale(twin, scale)
    twin.freeze()
    return twin
