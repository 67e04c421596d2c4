"""IntegerTensor: a sparse tensor of int8 features, with the scale of their values.

Its integers are no values, so it has no ``feats``: what computes in float raises
instead of taking the one for the other. Integer layers read ``values`` and ``scale``.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn

import mlx.core as mx

from . import registry
from .backends import cpu
from .channel_kernels import beside
from .checks import FLOATS, dtype_name
from .contraction import check_features, check_groups
from .coordinate_set import CoordinateKey
from .coordinates import CoordinateManager
from .devices import CPU
from .epilogue import named
from .problem import ARRAYS, FORWARD, MOST, IntegerFacts, to_int8
from .quantized import IntegerWeight
from .relation import Relation, expect_relation
from .routes import launch
from .routes.launch import Layer, Request
from .settings import FLOAT32
from .tensor import SparseTensor, expect_tensor
from .transformations import Function

TINY = 1e-38


class IntegerTensor(SparseTensor):
    """Int8 features on active cells: ``values * scale`` is what they stand for.

    Integer layers make them, and take them as they are; ``rounded`` makes one of a
    float tensor. ``dequantized()`` is the float tensor of one.

    Args:
        coords: as for ``SparseTensor``.
        values: (N, C) int8 of -127 ... 127.
        scale: (1,) float32.
        float_dtype: of the floats that they stand for. Default: float32.
        **options: those of ``SparseTensor``.

    Attributes:
        known: the scale as a number where it was read from the device before, or None.

    Raises:
        TypeError: values are not int8, or the scale is not float32.
        ValueError: shapes do not fit.
    """

    known: float | None = None

    def __init__(
        self,
        coords: mx.array,
        values: mx.array,
        scale: mx.array,
        *,
        float_dtype: mx.Dtype = mx.float32,
        **options,
    ):
        placed = SparseTensor(coords, mx.zeros((len(coords), 1)), **options)
        self._set(placed, values, scale, float_dtype)

    @classmethod
    def on(
        cls,
        manager: CoordinateManager,
        key: CoordinateKey,
        coords: mx.array,
        values: mx.array,
        scale: mx.array,
        float_dtype: mx.Dtype,
        known: float | None = None,
    ) -> IntegerTensor:
        """Put together what is known to fit; nothing is checked."""
        made = cls.__new__(cls)
        own = made.__dict__
        own["manager"], own["key"], own["coords"] = manager, key, coords
        own["values"], own["scale"], own["float_dtype"] = values, scale, float_dtype
        own["known"] = known
        return made

    @classmethod
    def rounded(
        cls,
        x: SparseTensor,
        scale: mx.array | float,
        *,
        inverse: mx.array | None = None,
        known: float | None = None,
    ) -> IntegerTensor:
        """Round a float tensor: ``clip(round(x / scale), -127, 127)``, halves to even.

        Args:
            x: float tensor.
            scale: above 0; (1,) float32, or a number.
            inverse: one over the scale, (1,) float32, where it was computed before.
            known: the scale as a number, where it was read from the device before.
        """
        expect_tensor(x)
        if not isinstance(scale, mx.array):
            scale = mx.array([scale], dtype=mx.float32)
        made = cls.__new__(cls)
        made._set(x, as_int8(x.feats, scale, inverse), scale, x.dtype)
        made.known = known
        return made

    def _set(self, x: SparseTensor, values, scale, float_dtype) -> None:
        dtype_name(float_dtype)
        if values.ndim != 2 or values.shape[0] != len(x):
            raise ValueError(
                f"values must have shape (N, C) with N = {len(x)}, the rows of coords; "
                f"got {tuple(values.shape)}"
            )
        if tuple(scale.shape) != (1,):
            raise ValueError(f"scale must have shape (1,); got {tuple(scale.shape)}")
        if values.dtype != mx.int8 or scale.dtype != mx.float32:
            raise TypeError(
                "an IntegerTensor takes int8 values and a float32 scale; got "
                f"{values.dtype} and {scale.dtype}"
            )
        place = {"manager": x.manager, "key": x.key, "coords": x.coords}
        self.__dict__.update(place)
        self.values, self.scale, self.float_dtype = values, scale, float_dtype

    def _state(self) -> tuple[type, dict]:
        kind, state = super()._state()
        return kind, state | {"float_dtype": dtype_name(self.float_dtype)}

    def __setstate__(self, state: dict) -> None:
        """Take what a copy has beside its rows: dtypes are pickled by their names."""
        self.__dict__.update(state, float_dtype=getattr(mx, state["float_dtype"]))

    @property
    def feats(self) -> NoReturn:
        """What a float tensor has; of integers it raises."""
        raise TypeError(
            "these features are int8 with a scale: integer layers take them as they "
            "are, all else takes x.dequantized(); x.values are the integers"
        )

    @property
    def channels(self) -> int:
        """Number of feature channels."""
        return self.values.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, C)."""
        return tuple(self.values.shape)

    @property
    def dtype(self) -> mx.Dtype:
        """int8."""
        return self.values.dtype

    def dequantized(self, dtype: mx.Dtype | None = None) -> SparseTensor:
        """Return ``values * scale`` in float, by default in ``float_dtype``."""
        floats = self.values.astype(mx.float32) * self.scale
        feats = floats.astype(self.float_dtype if dtype is None else dtype)
        return SparseTensor.trusted(self.manager, self.key, self.coords, feats)

    def astype(self, dtype: mx.Dtype) -> SparseTensor:
        """Return the float tensor in a dtype."""
        dtype_name(dtype)
        return self.dequantized(dtype)

    def arrays(self) -> dict[str, mx.array]:
        """Return {"coords", "values", "scale"}."""
        return {"coords": self.coords, "values": self.values, "scale": self.scale}

    @classmethod
    def from_arrays(cls, arrays: dict[str, mx.array], **kwargs) -> IntegerTensor:
        """Rebuild a tensor from ``arrays()`` and the constructor's other arguments."""
        return cls(arrays["coords"], arrays["values"], arrays["scale"], **kwargs)

    def __repr__(self) -> str:
        return super().__repr__().replace("SparseTensor", "IntegerTensor", 1)


def cat_integers(tensors: list[IntegerTensor]) -> IntegerTensor:
    """Concatenate channels of aligned tensors, in the greatest of their scales."""
    first, known = tensors[0], [x.known for x in tensors]
    if None in known:
        most, scale = None, first.scale
        for x in tensors[1:]:
            scale = scale if x.scale is scale else mx.maximum(scale, x.scale)
        same = [x.scale is scale for x in tensors]
    else:  # then nothing is computed for those that have it
        most = max(known)
        scale = tensors[known.index(most)].scale
        same = [each == most for each in known]
    values = [
        x.values if is_same else rescaled(x.values, x.scale, scale)
        for x, is_same in zip(tensors, same, strict=True)
    ]
    place = first.manager, first.key, first.coords, beside(values)
    return IntegerTensor.on(*place, scale, first.float_dtype, most)


def rescaled(values: mx.array, scale: mx.array, to: mx.array) -> mx.array:
    """Return int8 of one scale in another, both (1,): rounded, and at 127 cut off."""
    if not values.size or registry.serving() == CPU:
        return _rescaled(values, scale, to)
    return _RESCALED(values, scale.reshape(()), to.reshape(()))


def inverse_of(scale: mx.array) -> mx.array:
    """Return what floats are multiplied by: one over the scale, 0 where that is 0."""
    return mx.where(scale > 0, 1 / scale, 0)


def as_int8(x: mx.array, scale: mx.array, inverse: mx.array | None = None) -> mx.array:
    """Return ``to_int8(x, inverse_of(scale))``, in one kernel; a scale of 0 gives 0.

    ``inverse`` is ``inverse_of(scale)``, if known: on CUDA the kernel that divides
    takes seven times as long.
    """
    if not x.size:
        return x.astype(mx.int8)
    if _on_cpu(x) and scale.shape == (1,):
        return cpu.quantise(x, scale)
    # MLX's kernels take four numbers a thread beside scalars without an axis alone.
    if inverse is not None:
        return _BY_INVERSE(x, inverse.reshape(()))
    return _DIVIDED(x, scale.reshape(()) if scale.shape == (1,) else scale)


def rows_as_int8(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return (N, C) int8 by a scale a row, and these (N,) float32 scales.

    The scale of a row is its greatest magnitude over 127.
    """
    if not x.size:
        return x.astype(mx.int8), mx.zeros(x.shape[:1], dtype=mx.float32)
    if _on_cpu(x):
        return cpu.quantise_rows(x)
    rows = row_scales(x)
    return as_int8(x, rows[:, None]), rows


def row_scales(x: mx.array) -> mx.array:
    """Return the (N,) float32 scales of rows: the greatest magnitude over 127."""
    if not x.size:
        return mx.zeros(x.shape[:1], dtype=mx.float32)
    return mx.abs(x).max(axis=1).astype(mx.float32) / MOST


def _on_cpu(x: mx.array) -> bool:
    """Whether the extension rounds it; MLX's operations take one thread there."""
    return x.dtype in FLOATS and x.ndim == 2 and registry.serving() == CPU


def _rescaled(values: mx.array, scale: mx.array, to: mx.array) -> mx.array:
    return to_int8(values, scale / mx.maximum(to, TINY))


def _divided(x: mx.array, scale: mx.array) -> mx.array:
    return to_int8(x, inverse_of(scale))


_RESCALED = mx.compile(_rescaled, shapeless=True)
_DIVIDED = mx.compile(_divided, shapeless=True)
_BY_INVERSE = mx.compile(to_int8, shapeless=True)


def integer_conv(
    x: mx.array,
    w: IntegerWeight,
    relation: Relation,
    *,
    scale: mx.array,
    shift: mx.array | None = None,
    residual: mx.array | None = None,
    residual_scale: mx.array | None = None,
    activation: str = "",
    out_inverse: mx.array | None = None,
    row_scales: mx.array | None = None,
    groups: int = 1,
    dtype: mx.Dtype = mx.float16,
) -> mx.array:
    """Contract int8 features with an integer weight over a relation.

    ``v[o, c] = (sum over edges (i, o, k) of x[i] . w[k, c]) * scale[c] + shift[c] +
    residual[o, c]``, then an activation. Sums are int32 and exact, and each float32
    operation after them is rounded by itself: the same bits on every backend and route
    without an activation, with ReLU and with LeakyReLU.

    Args:
        x: (N_in, C_in) int8.
        w: (K, C_in / groups, C_out) integers; its own scale is not applied.
        relation: the edges.
        scale: (C_out,) float32: that of the features times that of the weight.
        shift: (C_out,) float32, or None.
        residual: (N_out, C_out), of ``dtype``, or int8 with ``residual_scale``.
        residual_scale: (1,) float32, of an int8 residual.
        activation: "", "relu", "gelu" (by the error function), "silu", "gelu_tanh",
            "leaky_relu", "elu", or with another slope "leaky_relu(0.2)", "elu(0.5)".
        out_inverse: (1,) float32: the result is ``round(v * out_inverse)``, halves to
            even, within -127 ... 127 as int8.
        row_scales: (N_in,) float32, a scale an input row beside ``scale``: what an
            offset adds is multiplied by it, in float32, offsets in order.
        groups: channel groups.
        dtype: of a float result: float32, float16 or bfloat16.

    Returns:
        (N_out, C_out), of ``dtype`` or int8.

    Raises:
        TypeError: a dtype is another one.
        ValueError: shapes do not fit; or a gradient is asked for.
    """
    expect_relation(relation)
    given = scale, shift, residual, residual_scale, out_inverse, row_scales
    request = None
    try:
        kinds = [a if a is None else (a.shape, a.dtype) for a in given]
        of_weight = w.values.shape, w.in_channels, w.bits, w.group_size
        key = x.shape, x.dtype, of_weight, groups, dtype, activation, *kinds
        request = relation.plans.get(key)
    except (AttributeError, TypeError):
        pass  # not arrays: their check says so
    if request is None:
        named_arrays = dict(zip(ARRAYS, given, strict=True))
        _check(x, w, relation, named_arrays, activation, groups, dtype)
        there = tuple(n for n, a in named_arrays.items() if a is not None)
        packing = w.packing._replace(kernel=None)  # which contractions do not need
        facts = w.shape[1] * groups, w.shape[2], dtype, groups, FLOAT32, packing
        integer = IntegerFacts(there, activation)
        request = Request(FORWARD, Layer(*facts), integer=integer)
        relation.plans[key] = request
    function = Function(partial(launch.run, request, relation))
    function.vjp(_refuse), function.jvp(_refuse)
    return function(x, *w.arrays, *[a for a in given if a is not None])


def _refuse(*_):
    raise ValueError(
        "a contraction of int8 features has no gradient: their values are rounded. "
        "Train the float net, with nn.FakeQuant for what rounding does to it, and "
        "make its integers afterwards"
    )


def _check(x, w, relation: Relation, given: dict, activation, groups, dtype) -> None:
    if not isinstance(w, IntegerWeight):
        raise TypeError(
            f"integer_conv takes an IntegerWeight; got {type(w).__name__}. "
            "ml.integer_weight makes one"
        )
    dtype_name(dtype)
    check_features(x, "features", relation.n_in, (mx.int8,))
    check_groups(groups)
    volume, c_in, c_out = w.shape
    if volume != relation.volume or x.shape[1] != c_in * groups or c_out % groups:
        raise ValueError(
            f"features of {x.shape[1]} channels and a relation of {relation.volume} "
            f"offsets do not fit a weight (K, C_in / groups, C_out) = {w.shape} with "
            f"groups = {groups}"
        )
    named(activation)
    is_int8 = given["residual_scale"] is not None
    if is_int8 and given["residual"] is None:
        raise ValueError("there is a residual_scale and no residual")
    shapes = {
        "scale": ((c_out,), mx.float32),
        "shift": ((c_out,), mx.float32),
        "residual": ((relation.n_out, c_out), mx.int8 if is_int8 else dtype),
        "residual_scale": ((1,), mx.float32),
        "out_inverse": ((1,), mx.float32),
        "row_scales": ((relation.n_in,), mx.float32),
    }
    for name, (shape, kind) in shapes.items():
        array = given[name]
        if array is None and name != "scale":
            continue
        if not isinstance(array, mx.array):
            raise TypeError(f"{name} must be an mx.array; got {type(array).__name__}")
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}; got {array.shape}")
        if array.dtype != kind:
            hint = ""
            if name == "residual" and array.dtype == mx.int8:
                hint = "; an int8 residual needs its residual_scale"
            raise TypeError(f"{name} must be {kind}; got {array.dtype}{hint}")
