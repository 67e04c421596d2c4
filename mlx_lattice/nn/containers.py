"""Sequential, for layers of tensors and layers of mlx.nn alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import mlx.core as mx
import mlx.nn

from ..ops.activation import fused_activation
from ..tensor import SparseTensor
from .elementwise import Dropout
from .fused import FUSING, called, convolved, is_followed, normalized, plain
from .integer import FoldedNorm

__all__ = ["ConvNormAct", "Sequential"]


class Sequential(mlx.nn.Sequential):
    """Calls its layers in order.

    Layers and functions of MLX itself are applied to a tensor's features; all others
    get the tensor. After a global pooling they all get its array. A norm and the
    activation after it are one call, in float32 and rounded once; in evaluation a
    BatchNorm after a convolution, and the activation after that, are the convolution's,
    and so is an activation alone: ReLU and LeakyReLU always, the others where no
    gradient may be asked for. After a linear layer they are that layer's if it is an
    integer one, or on a CPU. A subclass of any is called as it is.

    Args:
        modules (tuple of Callables): The modules to call in order, or one dict of them
            by name, as an OrderedDict in PyTorch's: its keys are then in the
            parameters' names. Numbers as names are places.
        **named (Callables): Modules by name, as spconv's takes them, instead.
    """

    def __init__(self, *modules: Callable | Mapping[str, Callable], **named: Callable):
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
        if any("." in name or not name for name in named):
            raise ValueError(
                "names of modules are parts of their parameters' names: none is empty "
                f"or has a dot; got {', '.join(map(repr, named))}"
            )
        if named and all(name.isdecimal() for name in named):
            # In names of weights MLX takes numbers for places of a list.
            if list(named) != [str(i) for i in range(len(named))]:
                raise ValueError(
                    "numbers as names of modules are their places, 0 to "
                    f"{len(named) - 1} in order; got {', '.join(named)}"
                )
            modules, named = tuple(named.values()), {}
        for layer in (*modules, *named.values()):
            if not callable(layer) and not isinstance(layer, mlx.nn.Module):
                raise TypeError(
                    "a Sequential takes layers and functions, each an argument; got "
                    f"{type(layer).__name__}. Of a list write Sequential(*layers)"
                )
        super().__init__(*modules)
        if named:
            self.layers = named

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Call the layers in order."""
        return in_order(layers_of(self), x)

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.get("layers", ()))

    def __iter__(self):
        raise TypeError(
            "a Sequential is a dict, as all modules of MLX: write "
            "for layer in net.layers"
        )

    def __getitem__(self, key: object):
        """Return a layer by its index, layers by a slice, or an item of the module."""
        if isinstance(key, int | slice):
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
    """Calls a convolution, a norm and an activation: ``act(norm(conv(x)) + residual)``.

    It is one launch if the norm's statistics are fixed (a ``BatchNorm`` in evaluation)
    and the convolution's kernel has an epilogue. Otherwise the norm, the residual and
    the activation are one launch after the convolution. ``explain`` and the trace say
    which. Parameters are named ``conv.*`` and ``norm.*``.

    Args:
        conv (Module): The convolution, or a linear layer.
        norm (Module, optional): The norm of its output channels.
        activation (Callable, optional): A layer or function of features.

    Example:
        >>> conv = nn.SubmConv3d(8, 8, 3, bias=False)
        >>> block = nn.ConvNormAct(conv, nn.BatchNorm(8), nn.ReLU())
        >>> y = block(x, residual=x)
    """

    def __init__(
        self,
        conv: Callable,
        norm: Callable | None = None,
        activation: Callable | None = None,
    ):
        super().__init__()
        self.conv, self.norm, self.activation = conv, norm, activation

    def __call__(
        self, x: SparseTensor, *coordinates, residual: SparseTensor | None = None
    ) -> SparseTensor:
        """Return features on the convolution's rows.

        Args:
            x: input.
            *coordinates: output rows, as the convolution takes them.
            residual: features that are added before the activation.
        """
        # As items, which a module finds faster than attributes.
        conv, norm = self["conv"], self.get("norm")
        after = {"activation": self.activation, "residual": residual}
        return convolved(conv, norm, x, *coordinates, **after)


def layers_of(sequential: mlx.nn.Sequential) -> Iterable[Callable]:
    """Return a Sequential's layers, whether it has them as a list or by name."""
    layers = sequential.layers
    return layers.values() if isinstance(layers, Mapping) else layers


def in_order(
    layers: Iterable[Callable],
    x: SparseTensor | mx.array,
    residual: SparseTensor | mx.array | None = None,
) -> SparseTensor | mx.array:
    """Call layers as a Sequential of them does, and add a residual to the result."""
    layers = [layer for layer in _flat(layers) if not _passes(layer)]
    at = 0
    while at < len(layers):
        layer, norm, act = layers[at], None, None
        follows, fuses = is_followed(layer), type(layer) in FUSING
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
    """Whether a layer returns what it gets: dropout in evaluation."""
    return type(layer) in (mlx.nn.Dropout, Dropout) and not layer.training


def _following(layers: list) -> tuple[Callable | None, ...]:
    """Return the norm and the activation that follow a layer, if they are fused."""
    norm, *rest = layers or [None]
    if type(norm) in FUSING or type(norm) is FoldedNorm:
        return norm, _activation(rest)
    return None, _activation(layers)


def _activation(layers: list) -> Callable | None:
    """Return the first layer if it is an activation that is fused, else None."""
    return layers[0] if layers and fused_activation(layers[0]) else None


_CALLS = mlx.nn.Sequential.__call__, Sequential.__call__


def _flat(layers: Iterable[Callable]) -> Iterator[Callable]:
    for layer in layers:
        if isinstance(layer, mlx.nn.Sequential) and type(layer).__call__ in _CALLS:
            yield from _flat(layers_of(layer))
        else:
            yield layer
