"""CUDA reductions against float64 loops, and that their bits never change."""

import cases
import mlx.core as mx
import numpy as np
import pytest
from conftest import bits
from reduction_checks import Checks, ReductionTests

import mlx_lattice as ml

if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
    pytest.skip("MLX has no CUDA device here", allow_module_level=True)

from mlx_lattice.backends.cuda_reductions import CudaReductions  # noqa: E402

CHANNELS = (3, 16)  # one channel a thread, and 16 bytes of them


class TestCuda(ReductionTests):
    checks = Checks(CudaReductions())
    channels = CHANNELS


@pytest.mark.parametrize("channels", CHANNELS)
def test_same_bits_every_time(channels):
    """Voxelising, pooling, interpolating, global pooling, and their gradients."""
    rng = np.random.default_rng(0)
    points = mx.array(rng.standard_normal((20000, 3)).astype(np.float32))
    values = mx.array(cases.features(len(points), channels))

    def everything(values):
        x = ml.SparseTensor.from_points(points, values, voxel_size=0.2)
        inside = ml.ops.interpolate(x, mx.pad(points[:500] * 5, [(0, 0), (1, 0)]))
        pooled = ml.ops.avg_pool3d(ml.ops.max_pool3d(x, 3, 2), 3, 1)
        whole = ml.ops.global_avg_pool(x), ml.ops.global_max_pool(x)
        return x.feats, inside, pooled.feats, *whole

    def total(values):
        return sum((part * mx.sin(part)).sum() for part in everything(values))

    first = None
    for _ in range(4):
        now = [bits(part) for part in (*everything(values), mx.grad(total)(values))]
        assert first in (None, now)
        first = now


def test_a_slice_at_an_odd_address_is_read():
    flat = mx.array(cases.features(1, 33).ravel())[1:].reshape(2, 16)
    table = mx.array([[0, 1], [1, -1]], dtype=mx.int32)
    y = CudaReductions().gather_sum(flat, table)
    expected = np.stack([np.array(flat).sum(axis=0), np.array(flat)[1]])
    np.testing.assert_allclose(np.array(y), expected, rtol=1e-6)
