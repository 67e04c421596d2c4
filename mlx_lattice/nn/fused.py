"""Fuse a norm with the residual and the activation behind it, in one call of the norm.

If the norm's statistics are fixed, all of them are computed by the convolution, or the
integer linear layer, before them.

Only layers of this package and of mlx.nn are fused. A subclass may compute something
else, so it is called as it is; of a convolution, if it has a ``__call__`` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn

from .. import sync
from ..channel_kernels import norm_observers, tell_epilogue
from ..epilogue import NONE, Epilogue, Moments
from ..int8 import IntegerTensor
from ..ops import on_features
from ..ops.channels import fused_activation
from ..tensor import Features, SparseTensor, features_of
from . import linear as linears
from .convolution import Convolution, SubmConv
from .layers import Dropout
from .linear import FoldedNorm, as_float32, is_integer
from .normalization import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, SyncBatchNorm

__all__ = ["ConvNormAct", "Sequential"]


# Norms that have fixed statistics in evaluation.
FIXED = frozenset((BatchNorm, SyncBatchNorm))
# Norms whose calls take ``residual`` and ``activation``.
FUSING: frozenset[type[Any]] = FIXED | {GroupNorm, InstanceNorm, LayerNorm}
# Layers that may compute the operations behind them in their own launch.
LINEARS: frozenset[type[Any]] = frozenset(
    (mlx.nn.Linear, linears.Linear, linears.QuantizedLinear)
)
CONVOLUTION_CALLS = frozenset((Convolution.__call__, SubmConv.__call__))
_is_fused: ContextVar[bool] = ContextVar("is_fused", default=True)


# Of ``nn.calibrate``: its ``convolved`` is given each layer with what follows it.
_tracer: ContextVar[Any] = ContextVar("tracer", default=None)


@contextmanager
def _during(variable: ContextVar, value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def tracing(tracer: object) -> AbstractContextManager[object]:
    """Trace the layers that are called inside the block."""
    return _during(_tracer, tracer)


def unfused() -> AbstractContextManager[object]:
    """Call each layer by itself inside the block, so that its result is seen."""
    return _during(_is_fused, False)


def normalized(
    norm: Callable[..., Any] | None,
    x: Features,
    activation: Callable[..., Any] | None = None,
    residual: Features | None = None,
    lines: mx.array | None = None,
) -> Features:
    """Return ``activation(norm(x) + residual)``, in one call if it can be."""
    summed = {} if lines is None else {"lines": lines}
    act = None if activation is None else fused_activation(activation)
    computes = activation is None or act is not None
    if type(norm) in FUSING and computes and _adds(x, residual):
        return norm(x, residual=residual, activation=act, **summed)
    y = x if norm is None else norm(x, **summed)
    y = y if residual is None else y + residual
    return y if activation is None else called(activation, y)


def convolved(
    conv: Callable[..., Any],
    norm: Callable[..., Any] | None,
    x: SparseTensor,
    *coordinates: Any,
    activation: Callable[..., Any] | None = None,
    residual: SparseTensor | None = None,
) -> SparseTensor:
    """Return ``activation(norm(conv(x)) + residual)``, in one call if it can be.

    For (N, C) features of linear layers the result may be a tensor without coordinates.
    """
    if isinstance(x, SparseTensor):
        able = _takes_epilogue(conv)
    else:
        able = type(conv) in LINEARS and isinstance(x, mx.array) and x.ndim == 2
    tracer = _tracer.get() if able else None
    if tracer is not None:
        with tracer.paused():
            operands = conv, norm, x, activation, residual
            fits = _epilogue(*operands, integer=True) is not None
            y = normalized(norm, called(conv, x, *coordinates), activation, residual)
        return tracer.convolved(conv, norm, x, residual, fits, _as_tensor(y))
    y = None
    if able and _is_fused.get():
        y = _in_one_call(conv, norm, x, coordinates, activation, residual)
    if y is None:
        if isinstance(residual, IntegerTensor):
            residual = residual.dequantized()
        y = normalized(norm, called(conv, x, *coordinates), activation, residual)
    return _as_written(conv, y) if able else y


def _in_one_call(
    conv: Callable,
    norm: Callable | None,
    x: Features,
    coordinates,
    activation,
    residual,
) -> Features | None:
    """Return a layer with the operations behind it fused; None if it cannot be."""
    integer = is_integer(conv)
    if not integer and not _is_convolution(conv):
        return _of_rows(conv, norm, x, activation, residual)
    if not integer and type(norm) in FIXED and norm.is_by_rows:
        if isinstance(residual, IntegerTensor):
            residual = residual.dequantized()
        moments = Moments()
        y = conv(x, *coordinates, epilogue=moments)
        return normalized(norm, y, activation, residual, moments.lines)
    after = _epilogue(conv, norm, x, activation, residual, integer)
    if after is None:
        return None
    y = conv(_as_tensor(x), *coordinates, epilogue=after)
    # An integer layer may write int8 by itself, with nothing fused into it.
    alone = norm is None and activation is None and residual is None
    if norm_observers and not alone:
        feats = y.values if isinstance(y, IntegerTensor) else y.feats
        tell_epilogue(conv if norm is None else norm, after, feats)
    return y


def linear(
    layer: Callable[..., Any],
    x: mx.array,
    activation: Callable[..., Any] | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """Return ``activation(layer(x) + residual)``, in one call if it can be.

    Without a residual it may be a tensor without coordinates, as of ``convolved``.
    """
    if _tracer.get() is not None or is_integer(layer):
        if residual is None:
            return convolved(layer, None, x, activation=activation)
        y = plain(convolved(layer, None, x)) + residual
        return y if activation is None else called(activation, y)
    act = NONE if activation is None else fused_activation(activation)
    if act is not None and _is_fused.get() and linears.takes_more(layer, x):
        return linears.followed(layer, x, residual, act)
    y = layer(x)
    y = y if residual is None else y + residual
    return y if activation is None else called(activation, y)


def _of_rows(
    layer: Callable, norm: Callable | None, x: Features, activation, residual
) -> Features | None:
    """Return a linear layer with what follows, in one launch; None if it cannot be."""
    act = NONE if activation is None else fused_activation(activation)
    feats = features_of(x)
    if act is None or not linears.takes_more(layer, feats):
        return None
    if norm is None and residual is None and not act.changes:
        return None
    if not linears.is_contraction(feats):
        packed = isinstance(layer, linears.QuantizedLinear)
        if not packed or norm is not None or not _adds(x, residual, len(layer.weight)):
            return None
        residual = None if residual is None else features_of(residual)
        y = linears.followed(layer, feats, residual, act)
        return x.replace(y) if isinstance(x, SparseTensor) else y
    after = None
    # Under ``ml.memory_limit`` blocks of rows add it apart; the bits must be the same.
    if residual is not None:
        return None
    if norm is None:
        # The vjp of other activations would multiply again for the sums.
        if act.is_of_result or not sync.is_differentiating():
            after = Epilogue(activation=act.called)
    elif type(norm) in FIXED and not (
        norm.is_by_rows or sync.is_known_to_differentiate()
    ):
        after = norm.as_epilogue(feats.dtype, act.called)
    if after is None:
        return None
    y = linears.contracted(layer, feats, after)
    if norm is not None and norm_observers:
        tell_epilogue(norm, after, y)
    return x.replace(y) if isinstance(x, SparseTensor) else y


def _as_written(conv: Callable, y: Features) -> Features:
    """Return what a float layer writes for integer layers, rounded once."""
    is_module = isinstance(conv, mlx.nn.Module)
    if not is_module or "output_scale" not in conv or isinstance(y, IntegerTensor):
        return y
    scale, inverse = map(as_float32, (conv["output_scale"], conv["output_inverse"]))
    return IntegerTensor.rounded(_as_tensor(y), scale, inverse=inverse)


def _as_tensor(x: Features) -> SparseTensor:
    """Return (N, C) features as a tensor without coordinates; a tensor as it is."""
    if isinstance(x, SparseTensor):
        return x
    return SparseTensor.trusted(None, None, x[:, :0], x)


def plain(x: Features) -> Features:
    """Return the features of a tensor without coordinates; all else as it is."""
    return x.feats if isinstance(x, SparseTensor) and x.manager is None else x


def _epilogue(
    conv, norm, x: SparseTensor, activation, residual, integer: bool
) -> Epilogue | None:
    """Return what a convolution computes instead of what follows it, or None."""
    act = None if activation is None else fused_activation(activation)
    if act is None and activation is not None:
        return None
    if type(norm) in FIXED:
        # A gradient would multiply again for what the norm read.
        if norm.is_by_rows or (sync.is_known_to_differentiate() and not integer):
            return None
    elif integer:
        if not (norm is None or type(norm) is FoldedNorm):
            return None
    elif norm is not None or (act is None and residual is None):
        return None
    elif act is not None and not act.is_of_result and sync.is_differentiating():
        return None  # a gradient would multiply again for what the activation read
    operands, name = {}, "" if act is None else act.called
    if residual is not None:
        keeps = isinstance(conv, SubmConv)  # the rows of its input
        keeps = keeps and isinstance(residual, SparseTensor) and residual.key == x.key
        if not keeps or residual.channels != conv.channels[1]:
            return None
        if integer and isinstance(residual, IntegerTensor):
            operands = {"residual": residual.values, "residual_scale": residual.scale}
        elif residual.dtype == (x.float_dtype if type(x) is IntegerTensor else x.dtype):
            operands = {"residual": residual.feats}
        else:
            return None
    if integer:
        operands["activation"] = name
        if type(norm) is FoldedNorm:
            operands["norm"] = norm.kind
        elif norm is not None:
            scale, shift = norm.scale_shift()
            operands |= {"scale": scale, "shift": shift, "norm": "BatchNorm"}
        return Epilogue(**operands)
    residual = operands.get("residual")
    if norm is None:
        return Epilogue(residual=residual, activation=name)
    after = norm.as_epilogue(x.dtype, name)
    if after is None or residual is None:
        return after
    return after._replace(residual=residual)


def called(layer: Callable[..., Any], x: Features, *coordinates: Any) -> Features:
    """Call a layer: those of MLX itself, which know no tensors, on the features."""
    # Of an instance this is its class's module, so subclasses elsewhere are not MLX's.
    of_mlx = str(getattr(layer, "__module__", "")).startswith("mlx.")
    if not of_mlx:
        return layer(x, *coordinates)
    return on_features(layer, x)


def _is_convolution(layer: Callable) -> bool:
    return type(layer).__call__ in CONVOLUTION_CALLS


def _takes_epilogue(layer: Callable) -> bool:
    return type(layer) in LINEARS or _is_convolution(layer)


def _adds(x: Features, residual: Features | None, channels: int | None = None) -> bool:
    """Whether a residual has the rows and dtype of ``x``, and its channels."""
    if residual is None:
        return True
    if isinstance(x, SparseTensor) != isinstance(residual, SparseTensor):
        return False
    if isinstance(x, SparseTensor) and x.key != residual.key:
        return False
    a, b = features_of(x), features_of(residual)
    shape = *a.shape[:-1], channels or a.shape[-1]
    return tuple(b.shape) == shape and a.dtype == b.dtype


class Sequential(mlx.nn.Sequential):
    """Call layers in order.

    Layers and functions of MLX are applied to a tensor's features; other layers get the
    tensor. After a global pooling all layers get its array.

    Some layers run as one call. A norm and the activation after it are computed in
    float32 and rounded once. In evaluation a convolution also computes the BatchNorm
    and the activation that follow it. Without a norm it computes a following ReLU or
    LeakyReLU, and other activations if no gradient is needed. Linear layers do the same
    if they are integer layers, or on a CPU. Subclasses of layers are called as they
    are.

    Args:
        modules (tuple of Callables): The layers to call in order, or one dict of layers
            by name. Names become parts of the parameters' names, as with an OrderedDict
            in PyTorch. A name must not be a number or contain a dot.
        **named (Callables): Layers by name instead, as in spconv.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> net = nn.Sequential(nn.SubmConv3d(8, 16, 3), nn.BatchNorm(16), nn.ReLU())
        >>> net(x).shape
        (64, 16)
    """

    layers: Any  # a list, or a dict of layers by name

    def __init__(
        self,
        *modules: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        **named: Callable[..., Any],
    ):
        # A module is a dict too.
        first = modules[0] if len(modules) == 1 else None
        if isinstance(first, Mapping) and not isinstance(first, mlx.nn.Module):
            if named or not all(isinstance(name, str) for name in first):
                raise TypeError("a dict of modules must have names, and be alone")
            modules, named = (), dict(first)
        if modules and named:
            raise TypeError(
                "a Sequential takes modules, or modules by name, not both; got "
                f"{len(modules)} and {', '.join(named)}"
            )
        # In names of weights MLX takes numbers for places of a list.
        if any("." in name or not name or name.isdecimal() for name in named):
            raise ValueError(
                "names of modules are parts of their parameters' names: none is empty, "
                f"a number or has a dot; got {', '.join(map(repr, named))}"
            )
        for layer in (*modules, *named.values()):
            _expect_layer(layer, "a Sequential")
        super().__init__(*modules)
        if named:
            self.layers = named

    def __call__(self, x: Features) -> Features:
        """Call the layers in order."""
        return in_order(layers_of(self), x)

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.get("layers", ()))

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "a Sequential is a dict, as all modules of MLX: write "
            "for layer in net.layers"
        )

    def __getitem__(self, key: object) -> Any:
        """Return a layer, a Sequential of a slice, or an item of the module."""
        if isinstance(key, slice):
            return Sequential(*list(layers_of(self))[key])
        if isinstance(key, int):
            return list(layers_of(self))[key]
        return super().__getitem__(key)

    def __setitem__(self, key: object, value: object) -> None:
        """Replace a layer by its index, or set an item of the module."""
        if not isinstance(key, int | slice):
            super().__setitem__(key, value)
        elif not isinstance(self.layers, dict):
            self.layers[key] = value
        elif isinstance(key, int):
            self.layers[list(self.layers)[key]] = value
        else:
            raise TypeError("layers with names are set one by one")


class ConvNormAct(mlx.nn.Module):
    """Call a convolution, a norm and an activation: ``act(norm(conv(x)) + residual)``.

    This is one launch if the norm's statistics are fixed (a ``BatchNorm`` in
    evaluation) and the convolution's kernel has an epilogue. Otherwise the norm,
    residual and activation take one more launch. Parameters are named ``conv.*`` and
    ``norm.*``.

    Args:
        conv (Module): The convolution, or a linear layer.
        norm (Module, optional): The norm of its output channels.
        activation (Callable, optional): A layer or function of features.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> conv = nn.SubmConv3d(8, 8, 3, bias=False)
        >>> block = nn.ConvNormAct(conv, nn.BatchNorm(8), nn.ReLU())
        >>> block(x, residual=x).shape
        (64, 8)
    """

    def __init__(
        self,
        conv: Callable[..., Any],
        norm: Callable[..., Any] | None = None,
        activation: Callable[..., Any] | None = None,
    ):
        super().__init__()
        for layer in (conv, norm, activation):
            if layer is not None:
                _expect_layer(layer, "a ConvNormAct")
        self.conv: Callable[..., Any] = conv
        self.norm: Callable[..., Any] | None = norm
        self.activation: Callable[..., Any] | None = activation

    def __call__(
        self, x: SparseTensor, *coordinates: Any, residual: SparseTensor | None = None
    ) -> SparseTensor:
        """Return features on the convolution's rows.

        ``coordinates`` are output rows, as the convolution takes them; ``residual`` is
        added before the activation.
        """
        # As items, which a module finds faster than attributes.
        conv, norm = self["conv"], self.get("norm")
        after = {"activation": self.activation, "residual": residual}
        return convolved(conv, norm, x, *coordinates, **after)


def _expect_layer(layer: object, name: str) -> None:
    """Raise unless a layer can be called. A class is not a layer: ``nn.ReLU()`` is."""
    if isinstance(layer, type):
        raise TypeError(
            f"{name} got the class {layer.__name__}; write an instance: "
            f"{layer.__name__}(...)"
        )
    if not callable(layer) and not isinstance(layer, mlx.nn.Module):
        hint = ". For a list, write Sequential(*layers)" * isinstance(
            layer, list | tuple
        )
        raise TypeError(
            f"{name} takes layers and functions, each an argument; got "
            f"{type(layer).__name__}{hint}"
        )


def layers_of(sequential: mlx.nn.Sequential) -> Iterable[Callable[..., Any]]:
    """Return a Sequential's layers, whether it has them as a list or by name."""
    layers = sequential.layers
    return layers.values() if isinstance(layers, Mapping) else layers


def in_order(
    layers: Iterable[Callable[..., Any]],
    x: Features,
    residual: Features | None = None,
) -> Features:
    """Call layers as a Sequential of them does, and add a residual to the result."""
    layers = [layer for layer in _flat(layers) if not _passes(layer)]
    at = 0
    while at < len(layers):
        layer, norm, act = layers[at], None, None
        follows, fuses = _takes_epilogue(layer), type(layer) in FUSING
        if follows:
            norm, act = _following(layers[at + 1 : at + 3])
        elif fuses:
            act = _activation(layers[at + 1 : at + 2])
        at += 1 + (norm is not None) + (act is not None)
        # Activations come after a residual, so the last one stays apart from it.
        is_last = at == len(layers) and act is None and (follows or fuses)
        added, residual = (residual, None) if is_last else (None, residual)
        if follows:
            x = convolved(layer, norm, x, activation=act, residual=added)
        elif fuses:
            x = normalized(layer, plain(x), act, added)
        else:
            x = called(layer, plain(x))
    x = plain(x)
    return x if residual is None else x + residual


def _passes(layer: Callable) -> bool:
    return type(layer) in (mlx.nn.Dropout, Dropout) and not layer.training


def _following(layers: list) -> tuple[Callable | None, ...]:
    """Return the norm and the activation that follow a layer, if they are fused."""
    norm, *rest = layers or [None]
    if type(norm) in FUSING or type(norm) is FoldedNorm:
        return norm, _activation(rest)
    return None, _activation(layers)


def _activation(layers: list) -> Callable | None:
    return layers[0] if layers and fused_activation(layers[0]) else None


_CALLS = mlx.nn.Sequential.__call__, Sequential.__call__


def _flat(layers: Iterable[Callable]) -> Iterator[Callable]:
    for layer in layers:
        if isinstance(layer, mlx.nn.Sequential) and type(layer).__call__ in _CALLS:
            yield from _flat(layers_of(layer))
        else:
            yield layer
