"""IntegerTensor, the rounding of features to int8, and contractions of int8 features.

An ``IntegerTensor`` has ``values`` and a ``scale`` instead of ``feats``: layers that
compute in float raise instead of using the integers as features.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

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
    """Hold int8 features on active cells, with float values ``values * scale``.

    Integer layers take and return integer tensors. ``rounded`` rounds a float tensor,
    ``dequantized()`` returns a float tensor.

    Args:
        coords: as for ``SparseTensor``.
        values: (N, C) int8 of -127 ... 127.
        scale: (1,) float32.
        float_dtype: dtype of the float values. Default: float32.
        **options: options of ``SparseTensor``.
    """

    def __init__(
        self,
        coords: mx.array,
        values: mx.array,
        scale: mx.array,
        *,
        float_dtype: mx.Dtype = mx.float32,
        **options: Any,
    ):
        x = SparseTensor(coords, mx.zeros((len(coords), 1)), **options)
        self.__dict__.update(manager=x.manager, key=x.key, coords=x.coords)
        self.values: mx.array = values
        self.scale: mx.array = scale
        self.float_dtype: mx.Dtype = float_dtype
        self._check()

    @classmethod
    def on(
        cls,
        manager: CoordinateManager,
        key: CoordinateKey,
        coords: mx.array,
        values: mx.array,
        scale: mx.array,
        float_dtype: mx.Dtype,
    ) -> IntegerTensor:
        """Return a tensor of these attributes, without checks."""
        x = cls.__new__(cls)
        x.__dict__.update(
            manager=manager, key=key, coords=coords, values=values, scale=scale,
            float_dtype=float_dtype,
        )  # fmt: skip
        return x

    @classmethod
    def rounded(
        cls,
        x: SparseTensor,
        scale: mx.array | float,
        *,
        inverse: mx.array | None = None,
    ) -> IntegerTensor:
        """Round a float tensor: ``clip(round(x / scale), -127, 127)``, halves to even.

        ``scale`` is a number or (1,) float32, and so is ``inverse``, one over it.
        """
        expect_tensor(x)
        if not isinstance(scale, mx.array):
            scale = mx.array([scale], dtype=mx.float32)
        values = as_int8(x.feats, scale, inverse)
        rounded = cls.on(x.manager, x.key, x.coords, values, scale, x.dtype)
        rounded._check()
        return rounded

    def _check(self) -> None:
        values, scale = self.values, self.scale
        dtype_name(self.float_dtype)
        if values.ndim != 2 or values.shape[0] != len(self):
            raise ValueError(
                f"values must have shape (N, C) with N = {len(self)}, the rows of "
                f"coords; got {tuple(values.shape)}"
            )
        if tuple(scale.shape) != (1,):
            raise ValueError(f"scale must have shape (1,); got {tuple(scale.shape)}")
        if values.dtype != mx.int8 or scale.dtype != mx.float32:
            raise TypeError(
                "an IntegerTensor takes int8 values and a float32 scale; got "
                f"{values.dtype} and {scale.dtype}"
            )

    def _state(self) -> tuple[type, dict]:
        kind, state = super()._state()
        return kind, state | {"float_dtype": dtype_name(self.float_dtype)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy; dtypes are pickled by their names."""
        self.__dict__.update(state, float_dtype=getattr(mx, state["float_dtype"]))

    @property
    def feats(self) -> NoReturn:
        """Raise an error: int8 features are not float features."""
        raise TypeError(
            "these features are int8 with a scale: integer layers take them, all other "
            "layers take x.dequantized(); x.values are the integers"
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
    def from_arrays(cls, arrays: dict[str, mx.array], **kwargs: Any) -> IntegerTensor:
        """Rebuild a tensor from ``arrays()`` and other arguments of the constructor."""
        return cls(arrays["coords"], arrays["values"], arrays["scale"], **kwargs)

    def __repr__(self) -> str:
        return super().__repr__().replace("SparseTensor", "IntegerTensor", 1)


def cat_integers(tensors: list[IntegerTensor]) -> IntegerTensor:
    """Concatenate channels of aligned tensors, in the greatest of their scales."""
    first, *others = tensors
    scale = first.scale
    for x in others:
        scale = scale if x.scale is scale else mx.maximum(scale, x.scale)
    values = [
        x.values if x.scale is scale else rescaled(x.values, x.scale, scale)
        for x in tensors
    ]
    place = first.manager, first.key, first.coords, beside(values)
    return IntegerTensor.on(*place, scale, first.float_dtype)


def inverse_of(scale: mx.array) -> mx.array:
    """Return one over the scale, by which floats are multiplied; 0 for a scale of 0."""
    return (_inverse if registry.serving() == CPU else _ONE_KERNEL_INVERSE)(scale)


def _inverse(scale: mx.array) -> mx.array:
    return mx.where(scale > 0, 1 / scale, 0)


def rescaled(values: mx.array, scale: mx.array, to: mx.array) -> mx.array:
    """Return int8 values with another scale, both (1,): rounded and clipped."""
    return _rounded(values, scale / mx.maximum(to, TINY))


def as_int8(x: mx.array, scale: mx.array, inverse: mx.array | None = None) -> mx.array:
    """Return ``clip(round(x / scale), -127, 127)`` as int8; a scale of 0 gives 0."""
    if x.size and scale.shape == (1,) and _by_extension(x):
        return cpu.quantise(x, scale)
    return _rounded(x, inverse_of(scale) if inverse is None else inverse)


def rows_as_int8(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return (N, C) int8 with a scale for each row, and the (N,) float32 scales."""
    if x.size and _by_extension(x):
        return cpu.quantise_rows(x)
    scales = row_scales(x)
    return as_int8(x, scales[:, None]), scales


def row_scales(x: mx.array) -> mx.array:
    """Return the (N,) float32 scales of rows: the greatest magnitude over 127."""
    if not x.size:
        return mx.zeros(x.shape[:1], dtype=mx.float32)
    return mx.abs(x).max(axis=1).astype(mx.float32) / MOST


def _by_extension(x: mx.array) -> bool:
    """Whether the extension rounds floats; MLX's operations use one thread there."""
    return x.dtype in FLOATS and x.ndim == 2 and registry.serving() == CPU


def _rounded(x: mx.array, inverse: mx.array) -> mx.array:
    """Return ``to_int8(x, inverse)``, in one kernel on GPUs."""
    if not x.size:
        return x.astype(mx.int8)
    if registry.serving() == CPU:
        return to_int8(x, inverse)
    # MLX's kernels read four numbers a thread beside a scalar without axes only.
    return _ONE_KERNEL(x, inverse.reshape(()) if inverse.size == 1 else inverse)


_ONE_KERNEL = mx.compile(to_int8, shapeless=True)
_ONE_KERNEL_INVERSE = mx.compile(_inverse, shapeless=True)


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
        w: (K, C_in / groups, C_out) integers; the scale of ``w`` is not applied.
        relation: the edges.
        scale: (C_out,) float32: the scale of the features times that of the weight.
        shift: (C_out,) float32, or None.
        residual: (N_out, C_out) in ``dtype``, or int8 with ``residual_scale``.
        residual_scale: (1,) float32, the scale of an int8 residual.
        activation: the name of an activation, as for ``ops.batch_norm``, or "".
        out_inverse: (1,) float32: the result is ``round(v * out_inverse)``, halves to
            even, within -127 ... 127 as int8.
        row_scales: (N_in,) float32, a scale for each input row beside ``scale``. The
            sum of an offset is multiplied by it in float32, offsets in order.
        groups: channel groups.
        dtype: dtype of a float result: float32, float16 or bfloat16.

    Returns:
        (N_out, C_out), in ``dtype`` or int8.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> relation = x.manager.submanifold_kernel_relation(x.key, kernel_size=3)
        >>> w = ml.integer_weight(mx.random.normal((16, 3, 3, 3, 8)))
        >>> values = mx.ones((64, 8), dtype=mx.int8)  # features / 0.1
        >>> ml.integer_conv(values, w, relation, scale=0.1 * w.scale).shape
        (64, 16)
    """
    expect_relation(relation)
    after = scale, shift, residual, residual_scale, out_inverse, row_scales
    request = None
    try:
        kinds = [a if a is None else (a.shape, a.dtype) for a in after]
        weight = w.values.shape, w.in_channels, w.bits, w.group_size
        key = x.shape, x.dtype, weight, groups, dtype, activation, *kinds
        request = relation.plans.get(key)
    except (AttributeError, TypeError):
        pass  # an argument is not an array: the check says which
    if request is None:
        arrays = dict(zip(ARRAYS, after, strict=True))
        _check(x, w, relation, arrays, activation, groups, dtype)
        names = tuple(name for name, a in arrays.items() if a is not None)
        packing = w.packing._replace(kernel=None)  # contractions do not need it
        facts = w.shape[1] * groups, w.shape[2], dtype, groups, FLOAT32, packing
        integer = IntegerFacts(names, activation)
        request = Request(FORWARD, Layer(*facts), integer=integer)
        relation.plans[key] = request
    run, rule = partial(launch.run, request, relation), _no_gradient
    function = Function(run, vjp=rule, jvp=rule)
    return function(x, *w.arrays, *[a for a in after if a is not None])


def _no_gradient(*_):
    raise ValueError(
        "a contraction of int8 features has no gradient: their values are rounded. "
        "Train the float net with nn.FakeQuant, and calibrate it afterwards"
    )


def _check(x, w, relation: Relation, arrays: dict, activation, groups, dtype) -> None:
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
    is_int8 = arrays["residual_scale"] is not None
    if is_int8 and arrays["residual"] is None:
        raise ValueError("residual_scale needs a residual")
    shapes = {
        "scale": ((c_out,), mx.float32),
        "shift": ((c_out,), mx.float32),
        "residual": ((relation.n_out, c_out), mx.int8 if is_int8 else dtype),
        "residual_scale": ((1,), mx.float32),
        "out_inverse": ((1,), mx.float32),
        "row_scales": ((relation.n_in,), mx.float32),
    }
    for name, (shape, kind) in shapes.items():
        array = arrays[name]
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
