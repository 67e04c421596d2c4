"""The two contractions, forward and weight gradient, with their transformations.

All passes derive from one trilinear form, ``T(x, W, y) = sum over edges of x[i] . W[k]
. y[o]``: the forward pass is its derivative by y (by x, over the transposed relation),
and the weight gradient its derivative by W. So every vjp and jvp is one of these passes
again, to any order. ``conv`` checks a call, and ``routes.launch`` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from . import settings
from .channel_kernels import activation_gradient, column_sums
from .checks import dtype_name, whole
from .epilogue import Epilogue, EpilogueFacts, Moments, finished
from .problem import FORWARD, INPUT_GRAD, MLX_LAYOUT, WEIGHT_GRAD, weight_axes
from .quantized import QuantizedWeight
from .relation import Relation, expect_relation
from .routes import launch
from .routes.launch import Layer, Request
from .settings import requested_precision
from .sync import is_transforming
from .transformations import Function, Linear, constant, filled


class _Checked(NamedTuple):
    """A checked call, shared by calls with equal shapes, dtypes and settings."""

    request: Request
    flat: tuple[int, int, int] | None  # (C_out, K, C_in) of a weight in MLX's layout
    cast: EpilogueFacts | None  # set if kernels need the epilogue's arrays cast


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

    Differentiable to any order in ``x``, ``w``, ``bias`` and the epilogue's arrays.
    ``relation`` and a packed weight are constants.

    Args:
        x: (N_in, C_in) float32, float16 or bfloat16.
        w: of the same dtype, (K, C_in / groups, C_out) or MLX's own (C_out, spatial...,
            C_in / groups); or packed with scales of that dtype.
        relation: the edges.
        groups: channel groups; both channel counts must be multiples of it.
        bias: (C_out,) of the same dtype, added to every output row.
        epilogue: operations after the contraction: a norm with fixed statistics, a
            residual, an activation. Or ``Moments``, which get the sums that the kernel
            computes for a norm.

    Returns:
        (N_out, C_out) in the same dtype, accumulated in float32.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: shapes do not fit the relation or the groups.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> relation = x.manager.submanifold_kernel_relation(x.key, kernel_size=3)
        >>> ml.conv(x.feats, mx.random.normal((27, 8, 16)), relation).shape
        (64, 16)
    """
    if type(relation) is not Relation:
        expect_relation(relation)
    if type(groups) is not int:
        check_groups(groups)  # before it becomes part of the key
    key, checked, packed = None, None, isinstance(w, QuantizedWeight)
    if type(x) is mx.array:
        key = (
            x.shape,
            x.dtype,
            (w.packing, w.weight.shape, w.dtype) if packed else (w.shape, w.dtype),
            groups,
            None if bias is None else (bias.shape, bias.dtype),
            None if epilogue is None else epilogue.key,
            settings.version(),
        )
        checked = relation.plans.get(key)
    residual = epilogue and epilogue.residual
    if checked is None or not (
        residual is None or residual.shape == (relation.n_out, checked.request.layer[1])
    ):
        checked = _checked(x, w, relation, groups, bias, epilogue)
        relation.plans[key] = checked
    request, flat, cast = checked
    if packed:
        weights = constant(*w.arrays)
    else:
        weights = (w if flat is None else w.reshape(flat),)
    run = contracted if is_transforming() else launch.run
    if epilogue is None or type(epilogue) is Moments:
        added = () if bias is None else (bias,)
        result = run(request, relation, x, *weights, *added)
        if isinstance(result, mx.array):
            return result
        y, epilogue.lines = result
        return y
    after = epilogue if bias is None else epilogue.biased(bias)
    added = after.arrays if cast is None else after.as_kernels_take(cast)
    return run(request, relation, x, *weights, *added)


def contracted(request: Request, relation: Relation, *arrays: mx.array) -> Any:
    """Run a pass as ``launch.run`` does, with rules for transformations."""
    if not is_transforming():
        return launch.run(request, relation, *arrays)
    scope = launch.current_scope() if launch.observed() else None
    pass_ = _Composed if request.epilogue else _Moments if request.moments else _Pass
    return pass_(request, relation, scope)(*arrays)


class _Pass(Linear):
    """A pass without an epilogue, with its vjp, jvp and vmap rules."""

    def __init__(self, request: Request, relation: Relation, scope: object):
        self.request, self.relation, self.scope = request, relation, scope

    @property
    def operands(self) -> int:
        return self.request.count

    def forward(self, *arrays: mx.array):
        return launch.run(self.request, self.relation, *arrays)

    def rows(self, primals: Sequence[mx.array]) -> int:
        return self.relation.n_out

    def run(self, pass_: str, *arrays: mx.array) -> mx.array:
        """Run another pass of the same layer."""
        request = Request(pass_, self.request.layer)
        return _Pass(request, self.relation, self.scope)(*arrays)

    def linear(self, *arrays: mx.array) -> mx.array:
        return self.run(self.request.pass_, *arrays)

    def vjp(self, primals, cotangent, _):
        if isinstance(cotangent, (tuple, list)):  # of y, and of its statistics
            cotangent = cotangent[0]
        if self.scope is None:
            return self.derivatives(primals, cotangent)
        with launch.scope(self.scope):
            return self.derivatives(primals, cotangent)

    def derivatives(self, primals, cotangent) -> Sequence[mx.array]:
        """Return the derivatives with respect to all arguments."""
        pass_, run = self.request.pass_, self.run
        if self.request.layer.packing is not None:  # linear in x and a bias
            packed, bias = primals[1:4], primals[4:]
            back = INPUT_GRAD if pass_ == FORWARD else FORWARD
            zeros = [mx.zeros_like(a) for a in packed]
            dx = run(back, cotangent, *packed)
            return dx, *zeros, *[column_sums(cotangent, b) for b in bias]
        if pass_ == INPUT_GRAD:
            (dy, w), ddx = primals, cotangent
            return run(FORWARD, ddx, w), run(WEIGHT_GRAD, ddx, dy)
        if pass_ == WEIGHT_GRAD:
            (x, dy), ddw = primals, cotangent
            return run(INPUT_GRAD, dy, ddw), run(FORWARD, x, ddw)
        (x, w, *bias), dy = primals, cotangent
        dx, dw = run(INPUT_GRAD, dy, w), run(WEIGHT_GRAD, x, dy)
        return dx, dw, *[column_sums(dy, b) for b in bias]


class _Moments(_Pass):
    """A forward pass that may return statistics of its rows after y."""

    def jvp(self, primals, tangents):
        return self._with_lines(super().jvp(primals, tangents))

    def vmap(self, inputs, axes):
        y, axis = super().vmap(inputs, axes)
        result = self._with_lines(y, y.shape[0])
        return (result, axis) if result is y else (result, (axis, 0))

    def _with_lines(self, y: mx.array, *mapped: int):
        """Return y, with zeros after it if the pass returns statistics."""
        lines = launch.moments_shape(self.request, self.relation)
        return y if lines is None else (y, mx.zeros((*mapped, *lines)))


class _Composed(Function):
    """A forward pass with an epilogue; its rules compose both operations."""

    def __init__(self, request: Request, relation: Relation, scope: object):
        self.request, self.epilogue = request, request.epilogue
        self.sums = _Pass(request._replace(epilogue=None), relation, scope)
        self.constants = 0 if request.layer.packing is None else 3  # packed arrays

    def forward(self, *arrays: mx.array) -> mx.array:
        return launch.run(self.request, self.sums.relation, *arrays)

    def split(self, arrays: Sequence) -> tuple[Sequence, list]:
        """Split arrays into the convolution's and the epilogue's, None if absent."""
        count = max(2, 1 + self.constants)
        return arrays[:count], self.epilogue.named(arrays[count:])

    def composed(self, *arrays: mx.array) -> mx.array:
        inputs, after = self.split(arrays)
        with launch.scope(self.sums.scope or launch.current_scope()):
            sums = self.sums.linear(*inputs)
        return finished(sums, self.epilogue, *after)

    def of_result(self, primals, dy, y) -> Sequence[mx.array]:
        """Return the derivatives from y, without computing the sums again."""
        if self.epilogue.activation:
            dy = activation_gradient(dy, y, self.epilogue.act)
        inputs, (shift, *_, residual) = self.split(primals)
        inputs = inputs if shift is None else (*inputs, shift)
        gradients = self.sums.vjp(inputs, dy, None)
        return gradients if residual is None else (*gradients, dy)

    def variables(self, arrays: Sequence) -> list:
        return [arrays[0], *arrays[1 + self.constants :]]

    def of_variables(self, primals: Sequence[mx.array]) -> Callable[..., mx.array]:
        packed = primals[1 : 1 + self.constants]
        return lambda x, *rest: self.composed(x, *packed, *rest)

    def vjp(self, primals, dy, y):
        if self.epilogue.is_of_result:
            return self.of_result(primals, dy, y)
        at, packed = self.variables(primals), primals[1 : 1 + self.constants]
        _, (dx, *rest) = mx.vjp(self.of_variables(primals), at, [dy])
        return dx, *[mx.zeros_like(a) for a in packed], *rest

    def jvp(self, primals, tangents):
        at = self.variables(primals)
        along = filled(at, self.variables(tangents))
        return mx.jvp(self.of_variables(primals), at, along)[1][0]

    def vmap(self, inputs, axes):
        return mx.vmap(self.composed, tuple(axes))(*inputs), 0


def _checked(
    x, w, relation: Relation, groups: int, bias, epilogue: Epilogue | Moments | None
) -> _Checked:
    """Check the arguments of ``conv`` and return the call."""
    check_features(x, "features", relation.n_in)
    check_groups(groups)
    shape, volume = tuple(w.shape), 0
    if len(shape) >= 3:
        layout, volume, c_in, c_out = weight_axes(shape)
    if volume != relation.volume:
        raise ValueError(
            f"the weight must have shape (K, C_in / groups, C_out) with K = "
            f"{relation.volume}, or (C_out, spatial..., C_in / groups) with as many "
            f"cells; got {shape}"
        )
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
                f"bias must have shape ({c_out},), one value per output channel; "
                f"got {tuple(bias.shape)}"
            )
        same_dtype(x, bias, "the bias")
    packing = w.packing if isinstance(w, QuantizedWeight) else None
    facts = x.shape[1], c_out, x.dtype, groups, requested_precision(), packing, layout
    after = cast = None
    if isinstance(epilogue, Epilogue):
        epilogue.check((relation.n_out, c_out), x.dtype)
        whole_epilogue = epilogue if bias is None else epilogue.biased(bias)
        after = whole_epilogue.facts
        cast = None if whole_epilogue.is_as_kernels_take(after) else after
    moments = isinstance(epilogue, Moments)
    request = Request(FORWARD, Layer(*facts), after, moments=moments)
    flat = (c_out, volume, c_in) if layout == MLX_LAYOUT else None
    return _Checked(request, flat, cast)


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

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> relation = x.manager.submanifold_kernel_relation(x.key, kernel_size=3)
        >>> ml.weight_grad(x.feats, mx.ones((64, 16)), relation).shape
        (27, 8, 16)
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
    layer = Layer(x.shape[1], dy.shape[1], x.dtype, groups, requested_precision())
    return contracted(Request(WEIGHT_GRAD, layer), relation, x, dy)


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
    """Raise unless ``groups`` is a positive int."""
    if type(groups) is not int or groups < 1:
        whole(groups, "groups", 1)


def same_dtype(x: mx.array, other: mx.array, name: str) -> None:
    """Raise a TypeError if features and the array ``name`` differ in dtype."""
    if x.dtype != other.dtype:
        raise TypeError(
            f"features ({dtype_name(x.dtype)}) and {name} ({dtype_name(other.dtype)}) "
            "must have one dtype; cast one with .astype"
        )
