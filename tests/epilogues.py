"""Epilogues of random arrays, and what they make of sums, in float64."""

import mlx.core as mx
import numpy as np
import reference_norms
from contractions import exact, moved

from mlx_lattice.epilogue import ARRAYS, STATISTICS, Epilogue

# Activations of float64 by name; of those with a slope, one that is not the default.
FUNCTIONS = {
    "": lambda v: v,
    "leaky_relu(0.2)": lambda v: np.where(v < 0, 0.2 * v, v),
    "elu(0.5)": lambda v: np.where(v < 0, 0.5 * np.expm1(np.minimum(v, 0)), v),
    **{
        name: function
        for name, (function, _) in reference_norms.ACTIVATIONS.items()
        if name not in (None, "leaky_relu", "elu")
    },
}
ACTIVATIONS = tuple(FUNCTIONS)
EPS = 1e-3


def epilogue(n, channels, dtype, activation="relu", parts=ARRAYS, before=0, seed=5):
    """An epilogue of random arrays, which begin ``before`` elements into others.

    A net's norms are float32 (here with 2 or 3 parts), of the features' dtype (with 5),
    or, after training, have float32 statistics beside (with 4).
    """
    rng = np.random.default_rng(seed)
    kind = getattr(mx, dtype)
    given = {}
    for name in ARRAYS:
        values = rng.normal(size=(n, channels) if name == "residual" else channels)
        values = np.abs(values) + 0.1 if name == "var" else values
        small = name == "residual" or len(parts) in (1, 5)
        small = small or (len(parts) == 4 and name not in STATISTICS)
        array = mx.array(values, mx.float32).astype(kind if small else mx.float32)
        if name in parts:
            given[name] = moved(array, before) if before else array
    mx.eval(list(given.values()))
    return Epilogue(**given, activation=activation, eps=EPS, norm="BatchNorm")


def oracle(sums: np.ndarray, after: Epilogue) -> np.ndarray:
    """An epilogue of float64 sums."""
    if after.mean is not None:
        sums = sums - exact(after.mean)
    if after.var is not None:
        sums = sums / np.sqrt(exact(after.var) + after.eps)
    if after.scale is not None:
        sums = sums * exact(after.scale)
    if after.shift is not None:
        sums = sums + exact(after.shift)
    if after.residual is not None:
        sums = sums + exact(after.residual)
    return FUNCTIONS[after.activation](sums)
