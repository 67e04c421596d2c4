"""What the parameters of a layer may be set to, and which of them are not trained."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from ..checks import array_of

NAMES = frozenset(("weight", "bias", "running_mean", "running_var"))


class ModuleCache(dict):
    """What a layer derived from its arrays; copies and pickles of a layer are empty."""

    def __reduce__(self) -> tuple:
        """Return an empty one."""
        return type(self), ()


class Parameters:
    """A layer whose arrays are set to arrays, of MLX or NumPy, or to lists of numbers.

    MLX's Module makes an attribute beside its parameters of what is none of its own
    arrays, and the layer, which asks for its parameters, would go on without.

    Attributes:
        never_trained: names of arrays that stay frozen. MLX's ``unfreeze`` of a net
            asks no layer inside of it, and would train running statistics.
    """

    never_trained: Iterable[str] = ()

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_no_grad":
            value = Frozen(value, self.never_trained)
        elif value is not None:
            is_array = name in NAMES or isinstance(self.get(name), mx.array)
            value = array_of(value, name) if is_array else value
        super().__setattr__(name, value)


class Frozen(set):
    """The names of a module's arrays that are not trained, some of which never are."""

    def __init__(self, names: Iterable[str] = (), never: Iterable[str] = ()):
        super().__init__((*names, *never))
        self.never = frozenset(never)

    def clear(self) -> None:
        """Unfreeze all that may be trained."""
        super().clear()
        self.update(self.never)

    def difference_update(self, *names: Iterable[str]) -> None:
        """Unfreeze these, but for what is never trained."""
        super().difference_update(*names)
        self.update(self.never)
