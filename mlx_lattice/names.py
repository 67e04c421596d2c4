"""Names for 1 to 4 spatial axes, as ``Conv3d``, and names that are unknown."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps

from .checks import AXES
from .tensor import SparseTensor, expect_tensor


def expect_axes(x: SparseTensor, dims: int, name: str) -> None:
    """Raise unless ``x`` is a tensor with ``dims`` spatial axes."""
    expect_tensor(x)
    if x.dims != dims:
        raise ValueError(
            f"{name} got a tensor with {x.dims} spatial axes; use the {x.dims}d name"
        )


def numbered_functions(module: str, *functions: Callable) -> dict[str, Callable]:
    """Return each function of a tensor under four names, 1d to 4d.

    A numbered function refuses a tensor with another number of axes.
    """
    return {
        f"{function.__name__}{dims}d": _numbered_function(module, function, dims)
        for function in functions
        for dims in AXES
    }


def _numbered_function(module: str, function: Callable, dims: int) -> Callable:
    name = f"{function.__name__}{dims}d"

    @wraps(function)
    def numbered(x, *args, **kwargs):
        expect_axes(x, dims, name)
        return function(x, *args, **kwargs)

    numbered.__name__ = numbered.__qualname__ = name
    numbered.__module__ = module
    return numbered


def numbered_classes(module: str, *bases: type) -> dict[str, type]:
    """Return each class under four names, 1d to 4d: subclasses with fixed ``dims``."""
    return {
        f"{base.__name__}{dims}d": _numbered_class(module, base, dims)
        for base in bases
        for dims in AXES
    }


def _numbered_class(module: str, base: type, dims: int) -> type:
    @wraps(base.__init__)
    def __init__(self, *args, **kwargs):
        base.__init__(self, *args, dims=dims, **kwargs)

    signature = inspect.signature(base.__init__)
    parameters = [p for name, p in signature.parameters.items() if name != "dims"]
    __init__.__signature__ = signature.replace(parameters=parameters)
    body = {"__init__": __init__, "__doc__": base.__doc__, "__module__": module}
    return type(f"{base.__name__}{dims}d", (base,), body)


def unknown_name(name: str, module: str) -> None:
    """Raise the AttributeError of a name that a module does not have."""
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}; docs/coming_from.md has the "
        "names of other libraries"
    )
