"""Layers and functions that norms and epilogues compute: what each of them is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import mlx.nn

from ..activations import ACTIVATIONS, NONE, Activation, elu, leaky_relu, named
from . import activation as functions

Layer = TypeVar("Layer", bound=type[mlx.nn.Module])
BY_TANH = "precise", "tanh"  # what GELU by tanh is called

_FUNCTIONS = {
    id(function): ACTIVATIONS[name]
    for name in ("relu", "silu", "gelu", "leaky_relu", "elu")
    for function in (getattr(mlx.nn, name), getattr(functions, name))
} | {
    id(function): ACTIVATIONS["gelu_tanh"]
    for function in (mlx.nn.gelu_approx, functions.gelu_approx)
}


def _gelu(layer: mlx.nn.GELU) -> Activation | None:
    by = "gelu_tanh" if layer._approx in BY_TANH else "gelu"
    return None if layer._approx == "fast" else ACTIVATIONS[by]


# By the class itself: a subclass may mean something else.
_LAYERS: dict[type, Callable[..., Activation | None]] = {
    mlx.nn.ReLU: lambda _: ACTIVATIONS["relu"],
    mlx.nn.SiLU: lambda _: ACTIVATIONS["silu"],
    mlx.nn.GELU: _gelu,
    mlx.nn.LeakyReLU: lambda layer: leaky_relu(layer._negative_slope),
    mlx.nn.ELU: lambda layer: elu(layer._alpha),
}


def as_its_base(kind: Layer) -> Layer:
    """Decorate a layer that computes what its base of mlx.nn does."""
    _LAYERS[kind] = _LAYERS[kind.__base__]
    return kind


def fused_activation(layer: object) -> Activation | None:
    """Return what a norm computes instead of a layer or function, or None."""
    function = _FUNCTIONS.get(id(layer))  # each is held by its module
    if function is not None:
        return function
    find = _LAYERS.get(type(layer))
    return None if find is None else find(layer)


def activation_of(activation: str | Activation | Callable | None) -> Activation:
    """Return an activation by its name, or of a layer or function.

    Raises:
        TypeError: it is none of these, or a layer or function that no kernel computes.
        ValueError: kernels compute none of this name.
    """
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
