"""integer_conv: the contraction of int8 features with integer weights."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from .activations import named
from .contraction import check_features, check_groups
from .dtypes import dtype_name
from .integer_facts import ARRAYS, IntegerFacts
from .numerics import FLOAT32
from .problem import FORWARD
from .quantized import IntegerWeight
from .relation import Relation, expect_relation
from .routes import launch
from .routes.launch import Layer, Request
from .transformations import Function


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
