"""QuantizedWeight: MLX's packing of every layout and any number of channels."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from packings import PACKINGS, exact, packed, unpacked

import mlx_lattice as ml


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("bits, size", PACKINGS)
@pytest.mark.parametrize("c_in", (1, 3, 31, 32, 33, 64, 130))
def test_packing(c_in, bits, size, dtype):
    w = mx.array(cases.weights(5, c_in, 7)).astype(getattr(mx, dtype))
    q = ml.quantize_weight(w, bits=bits, group_size=size)
    groups = -(-c_in // size)
    assert q.weight.shape == (5, 7, groups * size * bits // 32)
    assert q.scales.shape == q.biases.shape == (5, 7, groups)
    assert q.weight.dtype == mx.uint32 and q.scales.dtype == w.dtype == q.dtype
    assert q.shape == w.shape and q.nbytes == sum(a.nbytes for a in q.arrays)
    values = unpacked(q)
    np.testing.assert_allclose(np.array(q.dense()), values, rtol=1e-5, atol=1e-6)
    # Of float weights: off by at most the step of the group, and by half on average.
    step = np.abs(np.repeat(ref.to_numpy(q.scales), size, axis=-1))
    step = step[..., :c_in].swapaxes(1, 2).astype(np.float64)
    error = np.abs(values - exact(w))
    rounding = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    assert (error <= step + rounding * np.abs(exact(w))).all()
    assert error.mean() <= 0.5 * step.mean() + rounding


@pytest.mark.parametrize("bits, size", PACKINGS)
def test_packing_is_that_of_mlx(bits, size):
    w = mx.array(cases.weights(3, 128, 8))
    q = ml.quantize_weight(w, bits=bits, group_size=size)
    wanted = mx.quantize(w.swapaxes(1, 2), group_size=size, bits=bits)
    for got, want in zip(q.arrays, wanted, strict=True):
        assert mx.array_equal(got, want).item()


def test_padding_widens_no_range():
    """Padded by zeros, a group of weights around 5 would lose most of its levels."""
    w = 5 + 0.01 * mx.array(cases.weights(1, 33, 8))
    error = mx.abs(ml.dequantize_weight(ml.quantize_weight(w)) - w).max()
    assert error.item() < 0.01


@pytest.mark.parametrize(
    "shape, layout",
    [
        ((6, 20), None),
        ((27, 20, 6), None),
        ((6, 3, 20), "module"),
        ((6, 3, 3, 20), None),
        ((6, 3, 3, 3, 20), None),
        ((6, 1, 2, 3, 2, 20), None),
    ],
    ids=str,
)
def test_layouts(shape, layout):
    w = mx.random.normal(shape, key=mx.random.key(0))
    q = ml.quantize_weight(w, bits=8, group_size=32, layout=layout)
    back = ml.dequantize_weight(q)
    assert back.shape == shape and back.dtype == w.dtype
    assert mx.abs(back - w).max().item() < 0.02
    major = w if layout is None and w.ndim == 3 else None
    if major is None:
        major = w.reshape(shape[0], -1, shape[-1]).transpose(1, 2, 0)
    again = ml.quantize_weight(major, bits=8, group_size=32)
    assert mx.array_equal(again.dense(), q.dense()).item()
    assert q.astype(mx.float16).dtype == mx.float16
    assert "int8" in repr(q) and f"{q.nbytes:,} bytes" in repr(q)


W = mx.zeros((27, 20, 6))


@pytest.mark.parametrize(
    "call, kind, text",
    [
        (lambda: ml.quantize_weight(W.astype(mx.int32)), TypeError, "got int32"),
        (lambda: ml.quantize_weight(W[0, 0]), ValueError, "must have shape"),
        (lambda: ml.quantize_weight(W, layout="rows"), ValueError, "layout must be"),
        (lambda: ml.quantize_weight(W[:, :0]), ValueError, "must have shape"),
    ],
)
def test_what_cannot_be_packed(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


def test_arrays_that_do_not_fit_one_another():
    q = packed(27, 20, 6)
    words, scales, biases = q.arrays
    for arrays, kind, text in (
        ((words[..., :2], scales, biases), ValueError, r"weight must be \(27, 6, 4\)"),
        ((words, scales[:5], biases), ValueError, "scales must be"),
        ((words, scales, biases[..., :0]), ValueError, "biases must be"),
        (
            (words, scales, biases.astype(mx.float16)),
            TypeError,
            "float32 .* got .* float16",
        ),
        ((words.astype(mx.int32), scales, biases), TypeError, "uint32"),
        ((words, scales.astype(mx.int32), biases), TypeError, "got int32"),
    ):
        with pytest.raises(kind, match=text):
            q.holding(*arrays)
