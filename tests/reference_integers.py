"""The oracle of int8 features: int64 sums, then float32 a rounded operation at a time.

Nothing here imports the library.
"""

import numpy as np

MOST = 127


def integer_sums(x, values, relation, groups=1, row_scales=None) -> np.ndarray:
    """(N_out, C_out) int64 of (N_in, C_in) and (K, C_in / groups, C_out) integers.

    With a scale an input row float32, offsets in order, each operation rounded.
    """
    volume, c_in, c_out = values.shape
    x, values = np.asarray(x, np.int64), np.asarray(values, np.int64)
    kind = np.int64 if row_scales is None else np.float32
    y = np.zeros((len(relation.out_coords), c_out), kind)
    width = c_out // groups
    for i, o, k in relation.edges:  # by offset
        dot = np.empty(c_out, np.int64)
        for g in range(groups):
            of = slice(g * width, (g + 1) * width)
            dot[of] = x[i, g * c_in : (g + 1) * c_in] @ values[k][:, of]
        if row_scales is None:
            y[o] += dot
        else:
            y[o] += dot.astype(np.float32) * np.float32(row_scales[i])
    return y


def activated(v: np.ndarray, activation: str) -> np.ndarray:
    """What every backend makes of floats alike."""
    if activation == "relu":
        return np.maximum(v, np.float32(0))
    slope = {"": 1, "leaky_relu(0.2)": 0.2}[activation]
    return np.where(v < 0, np.float32(slope) * v, v)


def finished(
    sums,
    scale,
    shift=None,
    residual=None,
    residual_scale=None,
    activation="",
    out_inverse=None,
) -> np.ndarray:
    """What follows the sums: float32, or int8 where there is ``out_inverse``."""
    v = sums.astype(np.float32) * scale
    if shift is not None:
        v = v + shift
    if residual is not None:
        added = np.asarray(residual).astype(np.float32)
        v = v + (added if residual_scale is None else added * residual_scale)
    v = activated(v, activation)
    assert v.dtype == np.float32
    if out_inverse is None:
        return v
    return np.clip(np.rint(v * out_inverse), -MOST, MOST).astype(np.int8)
