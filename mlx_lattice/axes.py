"""The 1d to 4d names of functions and classes that are written once for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from .tensor import SparseTensor, expect_tensor

AXES = (1, 2, 3, 4)

P, R, T = ParamSpec("P"), TypeVar("R"), TypeVar("T")


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

    Each refuses a tensor with another number of axes.

    Args:
        function: what any number of axes calls.
        name: what comes before "1d"; by default the function's own name.
        doc: the docstring; by default the function's own.
        **fixed: arguments that the name decides; signatures leave them out.
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


def classes(
    cls: type[T], **each: tuple[object, ...]
) -> tuple[type[T], type[T], type[T], type[T]]:
    """Return the 1d to 4d subclasses of a class that reads its own ``dims``.

    Args:
        cls: what any number of axes shares; its docstring is theirs.
        **each: class attributes, one value for each of the four.
    """

    def over(at: int, dims: int) -> type[T]:
        body = {name: values[at] for name, values in each.items()}
        body |= {"dims": dims, "__doc__": cls.__doc__, "__module__": cls.__module__}
        return type(f"{cls.__name__}{dims}d", (cls,), body)

    return tuple(over(at, dims) for at, dims in enumerate(AXES))
