"""The two contractions as functions: arguments checked, and what calls share found."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from .checks import whole
from .contraction_layer import MOMENTS, Layer, layer_of
from .dtypes import dtype_name
from .epilogue import Epilogue, EpilogueFacts, Moments
from .numerics import asked_precision
from .problem import FORWARD, KERNEL_MAJOR, WEIGHT_GRAD, weight_axes
from .quantized import QuantizedWeight
from .relation import Relation, expect_relation
from .routes import launch


def conv(
    x: mx.array,
    w: mx.array | QuantizedWeight,
    relation: Relation,
    *,
    groups: int = 1,
    bias: mx.array | None = None,
    epilogue: Epilogue | Moments | None = None,
) -> mx.array:
    """Return ``y[o] = sum over edges (i, o, k) of x[i] @ w[k] + bias``.

    Differentiable to any order in ``x``, ``w``, ``bias`` and the epilogue's arrays;
    ``relation`` is constant data, and so is a packed weight.

    Args:
        x: (N_in, C_in) float32, float16 or bfloat16.
        w: of the same dtype, (K, C_in / groups, C_out) or MLX's own (C_out, spatial...,
            C_in / groups) with K cells in at least two axes; or packed with scales of
            that dtype.
        relation: the edges.
        groups: channel groups; both channel counts must be multiples of it.
        bias: (C_out,) of the same dtype, added to every output row: before the sum is
            rounded on routes that can, else after.
        epilogue: what follows: a norm with fixed statistics, a residual, an
            activation; added as a bias is. Its derivatives are the composed form's.
            Or ``Moments``, which get what the kernel sums for a norm.

    Returns:
        (N_out, C_out) in the same dtype, accumulated in float32.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: shapes do not fit the relation or the groups.
    """
    expect_relation(relation)
    if type(groups) is not int:
        check_groups(groups)  # before it is part of a key
    if launch.observed() or type(x) is not mx.array:
        known = _looked_up(x, w, relation, groups, bias, epilogue, None)
    else:
        packed = isinstance(w, QuantizedWeight)
        key = (
            x.dtype,
            (w.packing, w.weight.shape, w.dtype) if packed else (w.shape, w.dtype),
            groups,
            asked_precision(),
            None if bias is None else (bias.shape, bias.dtype),
            None if epilogue is None else epilogue.key,
        )
        known = relation.calls.get(key)
        if known is None or not known.fits(x, epilogue):
            known = _looked_up(x, w, relation, groups, bias, epilogue, key)
    weights = known.layer.weights(w)
    if epilogue is None or type(epilogue) is Moments:
        made = known.run(x, *weights, *(() if bias is None else (bias,)))
        if isinstance(made, mx.array):
            return made
        y, epilogue.lines = made
        return y
    after, cast = epilogue if bias is None else epilogue.biased(bias), known.cast
    arrays = after.arrays if cast is None else after.as_kernels_take(cast)
    return known.run(x, *weights, *arrays)


class _Known(NamedTuple):
    """What calls over a relation with arrays of such shapes and dtypes share.

    Attributes:
        layer: the contractions.
        run: what is called with the arrays.
        cast: facts of an epilogue whose arrays come in other dtypes than kernels take.
        shapes: of features, and of a residual.
    """

    layer: Layer
    run: Callable[..., mx.array]
    cast: EpilogueFacts | None
    shapes: tuple[tuple[int, int], tuple[int, int]]

    def fits(self, x: mx.array, epilogue: Epilogue | Moments | None) -> bool:
        """Whether features and residual have the rows of the relation."""
        if x.shape != self.shapes[0]:
            return False
        residual = epilogue and epilogue.residual
        return residual is None or residual.shape == self.shapes[1]


def _looked_up(x, w, relation: Relation, groups: int, bias, epilogue, key) -> _Known:
    """Return what calls share: of a relation of another scan, or after checks.

    ``key``: what they have in common, under which it is kept; None where it is not.
    """
    kept = relation.form.known.get(key)
    if kept is not None:
        key, facts = kept  # one key for all scans: of those that are alike one is held
        known = _of_facts(relation, *facts)
        if known.fits(x, epilogue):
            relation.calls[key] = known
            return known
    layer, after, cast = _checked(x, w, relation, groups, bias), None, None
    if type(epilogue) is Moments:
        after = MOMENTS
    elif epilogue is not None:
        epilogue.check((relation.n_out, layer[1]), x.dtype)
        given = epilogue if bias is None else epilogue.biased(bias)
        after = given.facts
        cast = None if given.is_as_kernels_take(after) else after
    facts = layer, after, cast
    scope = launch.current_scope() if launch.observed() else None
    known = _of_facts(relation, *facts, scope)
    if key is not None:
        relation.form.keep(key, (key, facts))
        relation.calls[key] = known
    return known


def _of_facts(
    relation: Relation,
    facts: tuple,
    after: EpilogueFacts | str | None,
    cast: EpilogueFacts | None,
    scope: object = None,
) -> _Known:
    layer = layer_of(relation, facts, scope)
    is_epilogue = isinstance(after, EpilogueFacts)
    run = layer.then(after) if is_epilogue else layer.function(after or FORWARD)
    shapes = (relation.n_in, facts[0]), (relation.n_out, facts[1])
    return _Known(layer, run, cast, shapes)


def _checked(x, w, relation: Relation, groups: int, bias) -> tuple:
    """Return the facts of a contraction's layer, after checks of what is given."""
    check_features(x, "features", relation.n_in)
    check_groups(groups)
    shape = tuple(w.shape)
    if len(shape) < 3 or weight_axes(shape)[1] != relation.volume:
        raise ValueError(
            f"the weight must have shape (K, C_in / groups, C_out) with K = "
            f"{relation.volume}, or (C_out, spatial..., C_in / groups) with as many "
            f"cells; got {shape}"
        )
    layout, _, c_in, c_out = weight_axes(shape)
    if x.shape[1] != c_in * groups or c_out % groups:
        raise ValueError(
            f"features of {x.shape[1]} channels do not fit a weight of shape "
            f"{shape} with groups = {groups}: expected C_in = "
            f"{c_in * groups} and C_out a multiple of {groups}"
        )
    same_dtype(x, w, "the weight")
    if bias is not None:
        if tuple(bias.shape) != (c_out,):
            raise ValueError(
                f"bias must have shape ({c_out},), one value an output channel; "
                f"got {tuple(bias.shape)}"
            )
        same_dtype(x, bias, "the bias")
    packing = w.packing if isinstance(w, QuantizedWeight) else None
    return x.shape[1], c_out, x.dtype, groups, asked_precision(), packing, layout


def weight_grad(
    x: mx.array, dy: mx.array, relation: Relation, *, groups: int = 1
) -> mx.array:
    """Return ``dW[k] = sum over edges (i, o, k) of x[i]^T dy[o]``.

    Args:
        x: (N_in, C_in) float32, float16 or bfloat16.
        dy: (N_out, C_out) of the same dtype.
        relation: the edges.
        groups: channel groups.

    Returns:
        (K, C_in / groups, C_out) in the same dtype, accumulated in float32.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: shapes do not fit the relation or the groups.
    """
    expect_relation(relation)
    check_features(x, "features", relation.n_in)
    check_features(dy, "dy", relation.n_out)
    check_groups(groups)
    if x.shape[1] % groups or dy.shape[1] % groups:
        raise ValueError(
            f"channels {x.shape[1]} and {dy.shape[1]} must be multiples of groups = "
            f"{groups}"
        )
    same_dtype(x, dy, "dy")
    asked, layout = asked_precision(), KERNEL_MAJOR
    facts = x.shape[1], dy.shape[1], x.dtype, groups, asked, None, layout
    scope = launch.current_scope() if launch.observed() else None
    return layer_of(relation, facts, scope).function(WEIGHT_GRAD)(x, dy)


def check_features(
    x: mx.array, name: str, rows: int, dtypes: tuple[mx.Dtype, ...] = ()
) -> None:
    """Raise unless ``x`` is (rows, C), floating or of one of ``dtypes``."""
    if not isinstance(x, mx.array):
        raise TypeError(f"{name} must be an mx.array; got {type(x).__name__}")
    if not dtypes:
        dtype_name(x.dtype)
    elif x.dtype not in dtypes:
        raise TypeError(f"{name} must be {dtypes[0]}; got {x.dtype}")
    if x.ndim != 2 or x.shape[0] != rows:
        raise ValueError(
            f"{name} must have shape (N, C) with N = {rows}, the rows of the "
            f"relation; got {tuple(x.shape)}"
        )


def check_groups(groups: int) -> None:
    """Raise unless there is a group."""
    if type(groups) is not int or groups < 1:
        whole(groups, "groups", 1)


def same_dtype(x: mx.array, other: mx.array, name: str) -> None:
    """Raise where features and another array, of that name, are of two dtypes."""
    if x.dtype != other.dtype:
        raise TypeError(
            f"features ({dtype_name(x.dtype)}) and {name} ({dtype_name(other.dtype)}) "
            "must have one dtype; cast one with .astype"
        )
