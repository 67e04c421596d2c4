"""What the parameters of a layer may be set to."""

from __future__ import annotations

import mlx.core as mx

from ..arrays import array_of

NAMES = frozenset(("weight", "bias", "running_mean", "running_var"))


class Parameters:
    """A layer whose arrays are set to arrays, of MLX or NumPy, or to lists of numbers.

    MLX's Module makes an attribute beside its parameters of what is none of its own
    arrays, and the layer, which asks for its parameters, would go on without.
    """

    def __setattr__(self, name: str, value: object) -> None:
        is_array = name in NAMES or isinstance(self.get(name), mx.array)
        if is_array and value is not None:
            value = array_of(value, name)
        super().__setattr__(name, value)
