"""Int8 features by the extension: every instruction set and number of threads, bit for
bit; what its own function refuses."""

from types import SimpleNamespace

import mlx.core as mx
import native
import numpy as np
import pytest
import reference_integers as ref
from epilogues import ACTIVATIONS, FUNCTIONS
from native import cpu, isas, random_table

from mlx_lattice.epilogue import named
from mlx_lattice.problem import to_int8

cpu_device = native.cpu_device
each_isa = pytest.mark.parametrize("isa", isas())


# What follows the sums, and the dtype of a float residual and result.
AFTER = (
    ((), "", "float32"),
    (("shift", "residual"), "relu", "float16"),
    (("shift", "residual", "residual_scale", "out_inverse"), "relu", "float32"),
    (("residual", "out_inverse"), "", "bfloat16"),
    (("shift", "residual", "row_scales"), "", "bfloat16"),
    (("row_scales", "out_inverse"), "relu", "float32"),
)


def made(size, bits=8):
    """Numbers of every kind of argument, as NumPy; the weight padded, and of int4
    (words, multipliers) beside its values."""
    n_in, n_out, volume, c_in, c_out = size
    rng = np.random.default_rng(size)
    table = random_table(rng, n_out, n_in, volume)
    x = rng.integers(-127, 128, (n_in, c_in)).astype(np.int8)
    x[::7] = 127
    x[1::9] = 0
    stored = -(-c_in // 32) * 32
    values = rng.integers(-127, 128, (volume, c_out, stored)).astype(np.int8)
    values[:, ::3] = -127
    stored_arrays = ()
    if bits == 4:
        nibbles = rng.integers(-7, 8, (volume, c_out, stored))
        nibbles[..., c_in:] = 0
        multipliers = rng.integers(1, 19, (volume, c_out, stored // 32))
        values = (nibbles * np.repeat(multipliers, 32, -1)).astype(np.int8)
        words = (nibbles & 15).reshape(volume, c_out, stored // 8, 8)
        words = words << 4 * np.arange(8)
        stored_arrays = words.sum(-1).astype(np.uint32), multipliers.astype(np.int8)
    values[..., c_in:] = 0
    arrays = {
        "scale": rng.uniform(1e-4, 1e-3, c_out).astype(np.float32),
        "shift": rng.normal(size=c_out).astype(np.float32),
        "residual": rng.normal(size=(n_out, c_out)).astype(np.float32),
        "residual_scale": np.float32([0.03]),
        "out_inverse": np.float32([16.0]),
        "row_scales": rng.uniform(0, 2, n_in).astype(np.float32),
    }
    return table, x, values, stored_arrays, arrays


def wanted(table, x, values, arrays, activation, groups=1):
    o, k = np.nonzero(table >= 0)
    order = np.lexsort((o, k))
    edges = [(table[o[e], k[e]], o[e], k[e]) for e in order]
    relation = SimpleNamespace(edges=edges, out_coords=table)
    values = values[..., : x.shape[1] // groups].swapaxes(1, 2)
    arrays = dict(arrays)
    rows = arrays.pop("row_scales", None)
    sums = ref.integer_sums(x, values, relation, groups, rows)
    return ref.finished(sums, **arrays, activation=activation)


# (N_in, N_out, K, C_in / groups, C_out, groups): parts of steps and of vectors, words
# that are read where they stand, a group a channel; no table where N_out is None.
GROUPS = (
    (150, 170, 5, 3, 10, 2),
    (90, 80, 27, 32, 32, 4),
    (40, 30, 3, 1, 6, 6),
    (90, 120, 8, 1, 70, 70),
    (33, 20, 3, 1, 12, 6),
    (70, None, 1, 66, 130, 1),
    (300, None, 1, 64, 40, 1),
    (61, None, 1, 5, 9, 3),
    (0, None, 1, 16, 16, 2),
    (40, 300, 3, 66, 130, 1),
    (0, 9, 3, 16, 16, 1),
    (9, 0, 3, 16, 16, 1),
    (9, 9, 0, 16, 16, 1),
)


@each_isa
@pytest.mark.parametrize("size", GROUPS, ids=str)
def test_groups_and_rows_without_a_table(size, isa):
    n_in, n_out, volume, c_in, c_out, groups = size
    cpu.set_isa(isa)
    for bits in (8, 4):
        shape = n_in, n_in if n_out is None else n_out, volume, c_in, c_out
        table, _, values, packed, arrays = made(shape, bits)
        rng = np.random.default_rng(bits)
        x = rng.integers(-127, 128, (n_in, groups * c_in)).astype(np.int8)
        if n_out is None:
            table = np.arange(n_in, dtype=np.int32)[:, None]
        for there, activation, dtype in AFTER[1::2] + AFTER[-2:]:
            given = {n: mx.array(arrays[n]) for n in ("scale", *there)}
            kind = getattr(mx, dtype)
            if "residual" in there:
                given["residual"] = given["residual"].astype(kind)
            as_numpy = {n: np.array(a.astype(mx.float32)) for n, a in given.items()}
            expected = wanted(table, x, values, as_numpy, activation, groups)
            expected = mx.array(expected)
            if "out_inverse" not in there:
                expected = expected.astype(kind)
            w, *multipliers = [mx.array(a) for a in packed or (values,)]
            given |= {"multipliers": multipliers[0]} if multipliers else {}
            given |= {
                "activation": named(activation).code,
                "dtype": kind,
                "groups": groups,
            }
            cpu.set_num_threads(1 + (bits == 4))
            edges = None if n_out is None else mx.array(table)
            y = cpu.int8_blocked(mx.array(x), w, edges, **given)
            assert y.dtype == expected.dtype and y.shape == expected.shape
            native.same_bits([y, expected])


@each_isa
def test_the_greatest_sums_and_ties(isa):
    """As many products as int32 holds, each the greatest; halves go to even."""
    cpu.set_isa(isa)
    volume, c_in = 64, 2048  # 131,072 products of at most 133,144
    table = mx.zeros((3, volume), dtype=mx.int32)
    x = mx.full((1, c_in), -127, dtype=mx.int8)
    for sign in (1, -1):
        w = mx.full((volume, 20, c_in), 127 * sign, dtype=mx.int8)
        y = cpu.int8_blocked(x, w, table, mx.ones(20))
        assert (np.array(y) == np.float32(-sign * volume * c_in * 127**2)).all()
    w = mx.zeros((1, 16, 32), dtype=mx.int8)
    w[0, :, 0] = mx.arange(-8, 8)
    y = cpu.int8_blocked(
        mx.ones((1, 32), dtype=mx.int8),
        w,
        mx.zeros((1, 1), dtype=mx.int32),
        mx.full(16, 0.5),
        out_inverse=mx.ones(1),
    )
    assert y.dtype == mx.int8
    np.testing.assert_array_equal(np.array(y)[0], np.rint(np.arange(-8, 8) / 2))
    scale = mx.array([1e30, -1e30] * 8)
    y = cpu.int8_blocked(
        mx.ones((1, 32), dtype=mx.int8),
        mx.ones((1, 16, 32), dtype=mx.int8),
        mx.zeros((1, 1), dtype=mx.int32),
        scale,
        out_inverse=mx.ones(1),
    )
    assert np.array(y).tolist() == [[127, -127] * 8]


@each_isa
def test_activations(isa):
    """They are those of floats."""
    cpu.set_isa(isa)
    table, x, values, _, arrays = made((90, 80, 27, 32, 64))
    given = [mx.array(a) for a in (x, values, table, arrays["scale"])]
    v = cpu.int8_blocked(*given)
    for name in ACTIVATIONS:
        y = cpu.int8_blocked(*given, activation=named(name).code)
        wanted = FUNCTIONS[name](np.array(v, np.float64))
        np.testing.assert_allclose(np.array(y), wanted, rtol=2e-5, atol=2e-6)


@native.each_isa
@native.each_dtype
def test_rounding_is_that_of_mlx_operations(dtype, isa):
    """Values, ties, what is clipped, rows of zeros and scales of zero."""
    cpu.set_isa(isa)
    rng = np.random.default_rng(0)
    for rows, channels in ((300, 37), (1, 1), (5, 600), (0, 8), (8, 0)):
        x = rng.normal(size=(rows, channels)) * 3
        x[::3] = np.round(x[::3] * 2) / 2
        x[1::5] = 0
        x = mx.array(x.astype(np.float32)).astype(dtype)
        for scale in (1.0, 0.013, 0.0):
            scale = mx.array([scale])
            wanted = to_int8(x, mx.where(scale > 0, 1 / scale, 0))
            assert mx.array_equal(cpu.quantise(x, scale), wanted)
        if not x.size:
            continue
        scales = mx.abs(x).max(axis=1).astype(mx.float32) / 127
        inverse = mx.where(scales > 0, 1 / scales, 0)
        values, found = cpu.quantise_rows(x)
        assert mx.array_equal(found, scales)
        assert mx.array_equal(values, to_int8(x, inverse[:, None]))
    with pytest.raises(ValueError, match=r"scale must have shape \(1,\)"):
        cpu.quantise(x, mx.ones(2))
