"""Activations, sparse pixel shuffle, means of neighbouring channels, and repeats.

Pixel shuffle adds and multiplies nothing: both directions are one gather, and each is
the other's transpose, so derivatives of every order are again one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx
import mlx.nn

from .. import devices, epilogue, registry, sync
from ..channel_kernels import activation
from ..checks import INT32_LIMIT, array_of, real, whole
from ..coordinate_set import CoordinateKey, CoordinateSet, OfPairs, finer
from ..epilogue import ACTIVATIONS, NONE, Activation, named
from ..geometry import lattice
from ..geometry.lattice import true_positions
from ..kernel_spec import IntOrTuple, per_axis
from ..memory import assembled
from ..reductions import inverted, linear, move_rows
from ..tensor import Features, SparseTensor, expect_tensor, features_of
from ..transformations import zeros_of
from .convolution import target_key

__all__ = [
    "celu", "channel_avg_pool", "channel_repeat", "channel_to_space", "elu", "gelu",
    "gelu_approx", "gelu_fast_approx", "glu", "hard_tanh", "hardswish", "leaky_relu",
    "log_sigmoid", "log_softmax", "mish", "on_features", "prelu", "relu", "relu2",
    "relu6", "selu", "sigmoid", "silu", "softmax", "softplus", "softsign",
    "space_to_channel", "tanh",
]  # fmt: skip


# MLX's digits, of Klambauer et al., "Self-Normalizing Neural Networks", 2017.
SELU_ALPHA, SELU_SCALE = 1.67326, 1.0507


def on_features(
    function: Callable[..., mx.array], x: Features, *args: Any, **kwargs: Any
) -> Features:
    """Apply a function that keeps the rows to the features of a tensor or an array.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> ops.on_features(mx.tanh, x).shape
        (64, 8)
    """
    y = function(features_of(x), *args, **kwargs)
    return x.replace(y) if isinstance(x, SparseTensor) else y


def by_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of separate rows that also takes (0, C).

    MLX's compiled kernels on CUDA divide by zero there. One row tells the shape.
    """

    @wraps(function)
    def of_rows(feats, *args, **kwargs):
        if feats.size:
            return function(feats, *args, **kwargs)
        row = function(mx.zeros((1, *feats.shape[1:]), feats.dtype), *args, **kwargs)
        return zeros_of([feats], (0, *row.shape[1:]), row.dtype)

    return of_rows


class RowFunction(Protocol):
    """A function that applies to the features of a tensor, or to an array."""

    def __call__(self, x: Features, *args: Any, **kwargs: Any) -> Features:
        """Return a tensor on the same rows, or an array."""
        ...


def _of_features(function: Callable, formula: str = "") -> RowFunction:
    """Return an activation of MLX that takes tensors too, described by its formula."""
    rows = by_rows(function)

    @wraps(function)
    def activation(x, *args, **kwargs):
        return on_features(rows, x, *args, **kwargs)

    activation.__doc__ = f"Apply {formula}."
    return activation


def activated(x: Features, act: Activation) -> Features:
    """Return an activation that kernels compute, of a tensor or an array."""
    return on_features(activation, x, act)


def elu(x: Features, alpha: float = 1.0) -> Features:
    """Apply ELU: ``x`` above zero, ``alpha * (exp(x) - 1)`` below.

    Examples:
        >>> ops.elu(mx.array([-1.0, 2.0]))
        array([-0.632121, 2], dtype=float32)
    """
    alpha = real(alpha, "alpha")
    act = epilogue.elu(alpha)
    return _elu(x, alpha) if act is None else activated(x, act)


def gelu(x: Features) -> Features:
    """Apply GELU by the error function: ``x * Phi(x)``.

    Examples:
        >>> ops.gelu(mx.array([-1.0, 2.0]))
        array([-0.158655, 1.9545], dtype=float32)
    """
    return activated(x, ACTIVATIONS["gelu"])


def gelu_approx(x: Features) -> Features:
    """Apply GELU by tanh.

    ``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2``.

    Examples:
        >>> ops.gelu_approx(mx.array([-1.0, 2.0]))
        array([-0.158808, 1.9546], dtype=float32)
    """
    return activated(x, ACTIVATIONS["gelu_tanh"])


def leaky_relu(x: Features, negative_slope: float = 0.01) -> Features:
    """Apply leaky ReLU: ``max(negative_slope * x, x)``.

    Examples:
        >>> ops.leaky_relu(mx.array([-1.0, 2.0]))
        array([-0.01, 2], dtype=float32)
    """
    negative_slope = real(negative_slope, "negative_slope")
    act = epilogue.leaky_relu(negative_slope)
    return _leaky_relu(x, negative_slope) if act is None else activated(x, act)


def relu(x: Features) -> Features:
    """Apply ReLU: ``max(x, 0)``.

    Examples:
        >>> ops.relu(mx.array([-1.0, 2.0]))
        array([0, 2], dtype=float32)
    """
    return activated(x, ACTIVATIONS["relu"])


def selu(x: Features) -> Features:
    """Apply SELU: 1.0507 times an ELU with an alpha of 1.67326.

    MLX's own gradient is NaN where ``exp(x)`` overflows, from 11.1 in float16.

    Examples:
        >>> ops.selu(mx.array([-1.0, 2.0]))
        array([-1.11133, 2.1014], dtype=float32)
    """
    return elu(x, SELU_ALPHA) * SELU_SCALE


def silu(x: Features) -> Features:
    """Apply SiLU: ``x * sigmoid(x)``.

    Examples:
        >>> ops.silu(mx.array([-1.0, 2.0]))
        array([-0.268941, 1.76159], dtype=float32)
    """
    return activated(x, ACTIVATIONS["silu"])


def prelu(x: Features, alpha: mx.array) -> Features:
    """Apply PReLU: ``max(0, x) + alpha * min(0, x)``.

    ``alpha`` has one value, or one for each channel.

    Raises:
        ValueError: alpha has another shape.

    Examples:
        >>> ops.prelu(mx.array([[-2.0, 3.0]]), mx.array([0.5]))
        array([[-1, 3]], dtype=float32)
    """
    feats, alpha = features_of(x), array_of(alpha, "alpha")
    # MLX's is compiled for any shapes, and reads beyond what does not broadcast.
    if alpha.shape != feats.shape[-1:] and (alpha.size != 1 or alpha.ndim > feats.ndim):
        raise ValueError(
            f"alpha must have shape (1,) or {feats.shape[-1:]}, one value a channel; "
            f"got {tuple(alpha.shape)}"
        )
    return _prelu(x, alpha)


# Of parameters that kernels do not take.
_prelu = _of_features(mlx.nn.prelu)
_elu, _leaky_relu = _of_features(mlx.nn.elu), _of_features(mlx.nn.leaky_relu)
celu: RowFunction = _of_features(
    mlx.nn.celu, "CELU: ``max(x, 0) + min(alpha * (exp(x / alpha) - 1), 0)``"
)
gelu_fast_approx: RowFunction = _of_features(
    mlx.nn.gelu_fast_approx, "GELU by the logistic function: ``x * sigmoid(1.702 * x)``"
)
glu: RowFunction = _of_features(
    mlx.nn.glu, "GLU: half of the channels times ``sigmoid`` of the other half"
)
hard_tanh: RowFunction = _of_features(
    mlx.nn.hard_tanh, "HardTanh: ``min(max(x, min_val), max_val)``"
)
hardswish: RowFunction = _of_features(
    mlx.nn.hardswish, "Hardswish: ``x * min(max(x + 3, 0), 6) / 6``"
)
log_sigmoid: RowFunction = _of_features(
    mlx.nn.log_sigmoid, "LogSigmoid: ``log(sigmoid(x))``"
)
log_softmax: RowFunction = _of_features(
    mlx.nn.log_softmax, "LogSoftmax over the channels: ``x - log(sum(exp(x)))``"
)
mish: RowFunction = _of_features(mlx.nn.mish, "Mish: ``x * tanh(softplus(x))``")
relu2: RowFunction = _of_features(mlx.nn.relu2, "ReLU squared: ``max(x, 0) ** 2``")
relu6: RowFunction = _of_features(mlx.nn.relu6, "ReLU6: ``min(max(x, 0), 6)``")
sigmoid: RowFunction = _of_features(
    mlx.nn.sigmoid, "the logistic function: ``1 / (1 + exp(-x))``"
)
softmax: RowFunction = _of_features(
    mlx.nn.softmax, "softmax over the channels: ``exp(x) / sum(exp(x))``"
)
softplus: RowFunction = _of_features(mlx.nn.softplus, "softplus: ``log(1 + exp(x))``")
softsign: RowFunction = _of_features(mlx.nn.softsign, "softsign: ``x / (1 + abs(x))``")
tanh: RowFunction = _of_features(mlx.nn.tanh, "the hyperbolic tangent: ``tanh(x)``")


Layer = TypeVar("Layer", bound=type[mlx.nn.Module])
BY_TANH = "precise", "tanh"  # what GELU by tanh is called

_FUNCTIONS = {
    id(function): ACTIVATIONS[name]
    for name, functions in {
        "relu": (relu, mlx.nn.relu),
        "silu": (silu, mlx.nn.silu),
        "gelu": (gelu, mlx.nn.gelu),
        "gelu_tanh": (gelu_approx, mlx.nn.gelu_approx),
        "leaky_relu": (leaky_relu, mlx.nn.leaky_relu),
        "elu": (elu, mlx.nn.elu),
    }.items()
    for function in functions
}


def _gelu(layer: mlx.nn.GELU) -> Activation | None:
    by = "gelu_tanh" if layer._approx in BY_TANH else "gelu"
    return None if layer._approx == "fast" else ACTIVATIONS[by]


# By the class itself: a subclass may mean something else.
_LAYERS: dict[type, Callable[..., Activation | None]] = {
    mlx.nn.ReLU: lambda _: ACTIVATIONS["relu"],
    mlx.nn.SiLU: lambda _: ACTIVATIONS["silu"],
    mlx.nn.GELU: _gelu,
    mlx.nn.LeakyReLU: lambda layer: epilogue.leaky_relu(layer._negative_slope),
    mlx.nn.ELU: lambda layer: epilogue.elu(layer._alpha),
}


def as_its_base(kind: Layer) -> Layer:
    """Decorate a layer that computes what its base class in mlx.nn computes."""
    _LAYERS[kind] = _LAYERS[kind.__base__]
    return kind


def fused_activation(layer: object) -> Activation | None:
    """Return the activation that a layer or function computes; None for others."""
    function = _FUNCTIONS.get(id(layer))  # each is held by its module
    if function is not None:
        return function
    find = _LAYERS.get(type(layer))
    return None if find is None else find(layer)


def activation_of(
    activation: str | Activation | Callable[..., Any] | None,
) -> Activation:
    """Return an activation by its name, or that of a layer or function."""
    if activation is None:
        return NONE
    if isinstance(activation, Activation):
        return activation
    if isinstance(activation, str):
        return named(activation)
    known = fused_activation(activation)
    if known is None:
        raise TypeError(
            f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, or a "
            f"layer or function of these in nn, ops or mlx.nn; got {activation!r}. "
            "Call another on the result"
        )
    return known


ORDERS = ("last", "first")


class Slots(NamedTuple):
    """Fine rows in the slots ``coarse row * K + offset``, of which each holds one."""

    slot: mx.array  # (N_fine,) the slot of each fine row, or -1; int32 if that holds
    row: mx.array  # (N_coarse * K,) int32: the fine row of each slot, or -1
    whole: bool  # whether every fine row is known to have a slot


_slots = OfPairs()  # of the coarse and the fine set, by factor and order


def space_to_channel(
    x: SparseTensor, factor: IntOrTuple = 2, *, order: str = "last"
) -> SparseTensor:
    """Gather the rows of each coarse cell into the channels of one row.

    The sparse form of PyTorch's ``pixel_unshuffle``, and TRELLIS.2's Spatial2Channel.

    Args:
        x: (N, C) features in 1 to 4 spatial axes.
        factor: fine cells in a coarse one, int or one per axis; K is their product.
        order: which axis of a fine cell's offset counts fastest: "last", as in kernels
            and dense arrays, or "first", as in TRELLIS.2.

    Returns:
        (M, K * C) features in the same dtype on the sorted unique cells
        ``floor(row / factor)``: channel ``k * C + c`` is channel c of the fine cell at
        offset k, or 0 where that is not active. Coordinates and key are those of a
        convolution with that stride.

    Raises:
        ValueError: ``factor`` or ``order`` is not valid.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> ops.space_to_channel(x, factor=2).shape
        (8, 64)
    """
    factor = _check(x, factor, order)
    relation = x.manager.kernel_relation(
        x.key, kernel_size=factor, stride=factor, padding=0
    )
    fine, coarse = relation.keys
    slots = _slots_of(x, coarse, fine, factor, order, whole=True)
    feats = move_rows(x.feats, slots.row, slots.slot)
    width = prod(factor) * x.channels
    cells = x.manager[coarse]
    return SparseTensor.of(x.manager, coarse, feats.reshape(len(cells), width))


def channel_to_space(
    x: SparseTensor,
    factor: IntOrTuple = 2,
    *,
    subdivision: mx.array | None = None,
    coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    order: str = "last",
) -> SparseTensor:
    """Move the channels of each row to its fine cells.

    The sparse form of PyTorch's ``pixel_shuffle``, and TRELLIS.2's Channel2Spatial. It
    is the inverse of ``space_to_channel`` if ``coordinates`` are the rows that went
    into that.

    Args:
        x: (N, K * C) features in 1 to 4 spatial axes.
        factor: fine cells in a coarse one, int or one per axis; K is their product.
        subdivision: (N, K) bool: the fine cells that each row becomes. Reads their
            number.
        coordinates: the fine rows, as a tensor, a key or (M, 1 + D) int32 rows; they
            keep their order. Without ``coordinates`` and ``subdivision`` every row
            becomes K rows.
        order: as for ``space_to_channel``.

    Returns:
        (M, C) features in the same dtype; rows that the library makes are sorted and
        unique. A row of ``coordinates`` whose coarse cell is not active is 0.

    Raises:
        ValueError: K does not divide the channels, shapes do not fit, both sets are
            given, or a row would lie beyond int32.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> y = ops.space_to_channel(x)
        >>> ops.channel_to_space(y, coordinates=x).shape
        (64, 8)
    """
    volume = prod(_check(x, factor, order))
    if x.channels % volume:
        raise ValueError(
            f"channel_to_space needs a multiple of {volume} channels for factor "
            f"{factor}; got {x.channels}"
        )
    fine, slots = fine_slots(
        x, factor, subdivision=subdivision, coordinates=coordinates, order=order
    )
    parts = x.feats.reshape(len(x) * volume, x.channels // volume)
    feats = move_rows(parts, slots.slot, slots.row, slots.whole)
    return SparseTensor.of(x.manager, fine, feats)


def fine_slots(
    x: SparseTensor,
    factor: IntOrTuple = 2,
    *,
    subdivision: mx.array | None = None,
    coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    order: str = "last",
) -> tuple[CoordinateKey, Slots]:
    """Return the key and slots of ``channel_to_space``, without reading features."""
    factor = _check(x, factor, order)
    if subdivision is not None and coordinates is not None:
        raise ValueError("pass subdivision or coordinates, not both")
    if subdivision is not None:
        fine, slots = _subdivide(x, subdivision, factor, order)
    elif coordinates is not None:
        fine = _fine_key(x, coordinates, factor)
        slots = _slots_of(x, x.key, fine, factor, order)
    else:
        relation = x.manager.generative_relation(
            x.key, kernel_size=factor, stride=factor, padding=0
        )
        fine = relation.out_key
        slots = _slots_of(x, x.key, fine, factor, order, whole=True)
    return fine, slots


def forget_slots(coarse: CoordinateSet) -> None:
    """Drop what is kept of a coarse set's slots; it is found again when asked for."""
    _slots.forget(coarse)


def _check(x: SparseTensor, factor: IntOrTuple, order: str) -> tuple[int, ...]:
    expect_tensor(x, flags=True)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}; got {order!r}")
    return per_axis(factor, x.dims, "factor")


def _steps(factor: tuple[int, ...], order: str) -> list[int]:
    if order == "first":
        return [prod(factor[:axis]) for axis in range(len(factor))]
    return [prod(factor[axis + 1 :]) for axis in range(len(factor))]


def _slots_of(
    x: SparseTensor,
    coarse: CoordinateKey,
    fine: CoordinateKey,
    factor: tuple[int, ...],
    order: str,
    whole: bool = False,
) -> Slots:
    """Return the slots of a fine in a coarse set; computed once for each pair."""
    above, below = x.manager[coarse], x.manager[fine]
    cached, key = _slots.of(above, below), (factor, order)
    if key not in cached:
        below.index  # noqa: B018 (two equal rows would want one slot)
        cells = lattice.cells(below.coords, factor)
        inside = below.coords[:, 1:] - cells[:, 1:] * mx.array(factor)
        offset = (inside * mx.array(_steps(factor, order))).sum(axis=1)
        place = above.index.find(cells).astype(mx.int64)
        slot = mx.where(place >= 0, place * prod(factor) + offset, -1)
        cached[key] = _invert(slot, len(above) * prod(factor), whole)
    return cached[key]


def _invert(slot: mx.array, count: int, whole: bool) -> Slots:
    row = inverted(slot, count)
    slot = slot if count > INT32_LIMIT else slot.astype(mx.int32)
    return sync.complete(Slots(slot, row, whole))


def _subdivide(
    x: SparseTensor, subdivision: mx.array, factor: tuple[int, ...], order: str
) -> tuple[CoordinateKey, Slots]:
    """Return a new set of the chosen fine cells, and their slots."""
    source, volume = x.coordinate_set, prod(factor)
    subdivision = array_of(subdivision, "subdivision")
    if tuple(subdivision.shape) != (len(x), volume) or subdivision.dtype != mx.bool_:
        raise ValueError(
            f"subdivision must be ({len(x)}, {volume}) bool, one value for each fine "
            f"cell of a row; got {tuple(subdivision.shape)} of {subdivision.dtype}"
        )
    source.index  # noqa: B018 (equal rows would make equal cells)
    # Where the mask depends on what is differentiated, it still is a choice.
    at = true_positions(mx.stop_gradient(subdivision).flatten())
    offset, steps = at % volume, _steps(factor, order)
    digits = [offset // s % f for s, f in zip(steps, factor, strict=True)]
    digits = mx.stack([mx.zeros_like(offset), *digits], axis=1)
    rows = lattice.scaled(source.coords, factor)[at // volume] + digits
    unique = registry.geometry().unique_rows(lattice.as_int32(rows, "channel_to_space"))
    shape = source.spatial_shape
    if shape is not None:
        shape = tuple(n * f for n, f in zip(shape, factor, strict=True))
    fine = x.manager.inserted(
        unique.rows,
        finer(x.stride, factor),
        spatial_shape=shape,
        batch_size=x.batch_size,
        trusted=True,
    )
    # Cells of distinct rows are distinct: the inverse is a permutation.
    slot = at[mx.argsort(unique.inverse)]
    slots = _invert(slot, len(x) * volume, whole=True)
    _slots.of(source, fine)[factor, order] = slots
    return fine.key, slots


def _fine_key(x: SparseTensor, coordinates, factor: tuple[int, ...]) -> CoordinateKey:
    key = target_key(x, coordinates, factor, is_finer=True)
    columns = x.manager[key].coords.shape[1]
    if columns != 1 + x.dims:
        raise ValueError(
            f"coordinates have {columns - 1} spatial axes, the tensor {x.dims}; both "
            "must have the same number"
        )
    return key


def fine_rows(
    parts: Iterator[tuple[int, mx.array]],
    slots: Slots,
    volume: int,
    finish: Callable[[mx.array], mx.array],
) -> mx.array:
    """Return ``finish`` of the (M, C) fine rows of wide ones, by blocks of these."""
    count = slots.slot.shape[0]

    def blank(part: mx.array) -> mx.array:
        return finish(mx.zeros((1, part.shape[1]), dtype=part.dtype))

    return assembled(_fine_parts(parts, slots, volume, finish), count, blank)


def _fine_parts(
    parts, slots: Slots, volume: int, finish
) -> Iterator[tuple[int | mx.array, mx.array]]:
    """Yield (rows, features) of the fine rows of each block that has some."""
    count, total = slots.slot.shape[0], slots.row.shape[0] // volume
    is_empty = True
    for first, part in parts:
        length, width = part.shape[0], part.shape[1] // volume
        part = part.reshape(length * volume, width)
        if length == total:
            yield 0, finish(rows_of(part, slots, 0, count))
            return
        rows = slots.row[first * volume : (first + length) * volume]
        at = true_positions(rows >= 0)
        if at.size:
            done, is_empty = finish(part[at]), False
            del part
            yield rows[at], done
            del done
    if is_empty:
        zeros = mx.zeros((1, width), dtype=part.dtype)
        yield 0, mx.broadcast_to(finish(zeros), (count, width))


def rows_of(parts: mx.array, slots: Slots, first: int, last: int) -> mx.array:
    """Return the (slots, C) parts of fine rows, zeros for rows without a slot."""
    at = slots.slot[first:last]
    if slots.whole:
        return parts[at]
    if not parts.shape[0]:
        return mx.zeros((last - first, parts.shape[1]), dtype=parts.dtype)
    zero = mx.zeros((), dtype=parts.dtype)
    return mx.where((at >= 0)[:, None], parts[mx.maximum(at, 0)], zero)


def channel_avg_pool(x: Features, channels: int) -> Features:
    """Return fewer channels, each the mean of neighbouring ones.

    The result is ``feats.reshape(N, channels, -1).mean(-1)``, added up in float32.
    TRELLIS.2 uses it for the shortcut of its down-sampling blocks.

    Args:
        x: (N, C) features, of a tensor or an array.
        channels: the number of output channels, a divisor of C.

    Returns:
        (N, channels) features in the same dtype.

    Raises:
        ValueError: ``channels`` does not divide C.

    Examples:
        >>> ops.channel_avg_pool(mx.array([[1.0, 3.0, 5.0, 7.0]]), 2)
        array([[2, 6]], dtype=float32)
    """
    if isinstance(x, SparseTensor):
        expect_tensor(x)
    width, channels = features_of(x).shape[-1], whole(channels, "channels", 1)
    if width % channels:
        raise ValueError(
            f"channel_avg_pool needs a divisor of the {width} channels; got {channels}"
        )
    share = width // channels
    return on_features(_sums, x, share, 1 / share)


def channel_repeat(x: Features, times: int) -> Features:
    """Return each channel several times, one beside the other.

    The result is ``mx.repeat(feats, times, axis=1)``. Its gradient is added up in
    float32.

    Args:
        x: (N, C) features, of a tensor or an array.
        times: the number of copies, 1 or more.

    Returns:
        (N, C * times) features in the same dtype.

    Raises:
        ValueError: ``times`` is below 1.

    Examples:
        >>> ops.channel_repeat(mx.array([[1.0, 2.0]]), 2)
        array([[1, 1, 2, 2]], dtype=float32)
    """
    times = whole(times, "times", 1)
    return on_features(_repeats, x, times, 1)


def _sums(feats: mx.array, share: int, scale: float) -> mx.array:
    """Return (N, C / share) sums of neighbours, times a number; differentiable."""
    facts = {"share": share, "scale": scale}
    turned, itself = partial(_repeats, **facts), partial(_sums, **facts)
    return linear(partial(_summed, **facts), turned, itself)(feats)


def _repeats(feats: mx.array, share: int, scale: float) -> mx.array:
    """Return (N, C * share): the transpose of ``_sums``; differentiable."""
    facts = {"share": share, "scale": scale}
    turned, itself = partial(_sums, **facts), partial(_repeats, **facts)
    return linear(partial(_repeated, **facts), turned, itself)(feats)


def _repeated(feats: mx.array, share: int, scale: float) -> mx.array:
    return mx.repeat(feats if scale == 1 else feats * scale, share, axis=1)


def _summed(feats: mx.array, share: int, scale: float) -> mx.array:
    shape = feats.shape[0], feats.shape[1] // share, share
    parts = feats.astype(mx.float32).reshape(shape)
    if devices.current().backend == devices.CUDA:
        total = by_halves(parts)
    else:
        total = parts.sum(axis=2)
    return (total if scale == 1 else total * scale).astype(feats.dtype)


def by_halves(parts: mx.array) -> mx.array:
    """Return (N, C) sums over a short last axis; MLX has a CUDA block for each sum."""
    while parts.shape[2] % 2 == 0:
        first, second = mx.split(parts, 2, axis=2)
        parts = first + second
    total, *others = (parts[:, :, at] for at in range(parts.shape[2]))
    for other in others:
        total = total + other
    return total
