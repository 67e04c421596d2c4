"""Rotary positions of queries and keys, against float64."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from attending import heads
from reference_attention import tensor, turned

import mlx_lattice as ml
from mlx_lattice import ops


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("d, dim", ((1, 2), (2, 12), (3, 20), (3, 6), (4, 8)))
def test_rotary(d, dim, dtype):
    x = tensor("negative", d=d)
    q = heads(x, dim=dim, dtype=dtype)[0]
    y = ops.rotary(q, x, base=100.0, frequency=0.7)
    assert y.dtype == q.dtype
    exact = ref.to_numpy(q).astype(np.float64)
    ref.assert_close(y, turned(exact, np.array(x.coords), 100.0, 0.7), dtype)


def test_rotary_far_from_the_origin():
    x = tensor("negative")
    moved = ml.SparseTensor(x.coords + mx.array([0, 2**29, -(2**29), 12345]), x.feats)
    q = heads(x)[0]
    assert mx.array_equal(ops.rotary(q, x), ops.rotary(q, moved)).item()


def test_rotary_scores_depend_on_differences():
    coords = [[0, 0, 5, 1], [0, 2, 4, 8], [0, 2, 5, 3], [0, 4, 4, 10]]
    x = ml.SparseTensor(mx.array(coords), mx.ones((4, 1)))
    q = mx.broadcast_to(mx.array(cases.features(1, 12)), (4, 1, 12))
    k = mx.broadcast_to(mx.array(cases.features(1, 12, 1)), (4, 1, 12))
    q, k = ops.rotary(q, x), ops.rotary(k, x)
    first, second = (q[0] * k[1]).sum().item(), (q[2] * k[3]).sum().item()
    assert first == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rotary_of_positions_and_halves(dtype):
    """Of an axis' channels j and j + n / 2 turn together, by the places given."""
    x = tensor()
    q = heads(x, dim=12, dtype=dtype)[0]
    at = cases.features(len(x), 3, 8)
    options = {"base": 50.0, "positions": mx.array(at)}
    y = ops.rotary(q, x, pairs="halves", **options)
    assert y.dtype == q.dtype
    exact = ref.to_numpy(q).astype(np.float64)
    wanted = np.zeros_like(exact)
    for axis in range(3):
        for j in range(2):
            a, b = 4 * axis + j, 4 * axis + j + 2
            turn = np.exp(1j * at[:, axis].astype(np.float64) * 50.0 ** (-j / 2))
            z = (exact[..., a] + 1j * exact[..., b]) * turn[:, None]
            wanted[..., a], wanted[..., b] = z.real, z.imag
    ref.assert_close(y, wanted, dtype)
    cells = x.coords[:, 1:] - x.coords[:, 1:].min(axis=0)
    same = ops.rotary(q, x, positions=cells.astype(mx.float32))
    ref.assert_close(same, ref.to_numpy(ops.rotary(q, x)), dtype)
