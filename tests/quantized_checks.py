"""Packed weights against the oracle: what a route for them must give."""

import cases
import mlx.core as mx
import numpy as np
import reference as ref

import mlx_lattice as ml


def floats(array: mx.array) -> np.ndarray:
    return ref.to_numpy(array).astype(np.float64)


def problem(relation, c_in, c_out, bits, size, groups=1, dtype="float32"):
    """Features and a packed weight."""
    kind = getattr(mx, dtype)
    x = mx.array(cases.features(relation.n_in, c_in)).astype(kind)
    w = mx.array(cases.weights(relation.volume, c_in // groups, c_out)).astype(kind)
    return x, ml.quantize_weight(w, bits=bits, group_size=size)


def check_packed(
    run, both, c_in, c_out, bits=4, size=32, groups=1, dtype="float32", name=""
):
    """``run(x, packed, relation, groups)`` gives what the oracle gives, dequantised."""
    relation, expected = both
    x, q = problem(relation, c_in, c_out, bits, size, groups, dtype)
    y = run(x, q, relation, groups)
    assert y.dtype == x.dtype
    wanted = ref.conv(floats(x), floats(q.dense()), expected, groups=groups)
    ref.assert_close(y, wanted, dtype, name)
