"""Families: functions and classes for 1 to 4 spatial axes that are written once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from .checks import AXES
from .tensor import SparseTensor, expect_tensor

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")


def expect_axes(x: SparseTensor, dims: int, name: str) -> None:
    """Raise unless ``x`` is a tensor with so many spatial axes."""
    expect_tensor(x)
    if x.dims != dims:
        raise ValueError(
            f"{name} got a tensor with {x.dims} spatial axes; use the {x.dims}d name"
        )


def functions(
    function: Callable[P, R], name: str = "", doc: str = "", **fixed: object
) -> tuple[Callable[P, R], Callable[P, R], Callable[P, R], Callable[P, R]]:
    """Return the 1d to 4d forms of a function whose first argument is a tensor.

    Each refuses a tensor with another number of axes. ``fixed`` are arguments that the
    name decides; signatures leave them out.
    """
    signature = inspect.signature(function)
    left = [p for p in signature.parameters.values() if p.name not in fixed]

    def over(dims: int) -> Callable[P, R]:
        full = f"{name or function.__name__}{dims}d"

        @wraps(function)
        def named(x, *args, **kwargs):
            expect_axes(x, dims, full)
            return function(x, *args, **kwargs, **fixed)

        named.__name__ = named.__qualname__ = full
        named.__doc__ = doc or function.__doc__
        named.__signature__ = signature.replace(parameters=left)
        return named

    return tuple(over(dims) for dims in AXES)


class Family:
    """Base of classes that differ by their number of axes: ``Conv1d`` to ``Conv4d``."""

    dims: int


def classes(
    base: type[C], prefix: str = "", mixin: type | None = None
) -> tuple[type[C], type[C], type[C], type[C]]:
    """Return the classes of a base for 1 to 4 axes.

    With a ``mixin`` they inherit from it first; ``prefix`` begins their names.
    """
    bases = (base,) if mixin is None else (mixin, base)
    body = {"__doc__": (mixin or base).__doc__, "__module__": base.__module__}
    return tuple(
        type(f"{prefix}{base.__name__}{dims}d", bases, {**body, "dims": dims})
        for dims in AXES
    )
