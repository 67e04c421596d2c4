"""CUDA reductions against float64 loops, and that their bits never change."""

import cases
import mlx.core as mx
import numpy as np
import pytest
from conftest import KINDS, bits, pair
from reduction_checks import Checks

import mlx_lattice as ml

if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
    pytest.skip("MLX has no CUDA device here", allow_module_level=True)

from mlx_lattice import tuning  # noqa: E402
from mlx_lattice.backends import cuda  # noqa: E402

CHECKS = Checks(cuda)
CHANNELS = (3, 16)  # one channel a thread, and 16 bytes of them


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("shape", ((30, 1, 12), (25, 8, 9)), ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_sums_and_products(dtype, shape, weighted, channels):
    CHECKS.tables(dtype, shape, weighted, channels)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_max_kinds(case):
    CHECKS.max(pair(case), 3)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_max(dtype, channels):
    CHECKS.max(pair(KINDS[2], "batches"), channels, dtype)


@pytest.mark.parametrize("geometry", ("empty", "one"))
def test_max_of_few_rows(geometry):
    CHECKS.max(pair(KINDS[3], geometry), 3)


@pytest.fixture(params=(0, 2), ids=("whole", "pieces"))
def short(request, monkeypatch):
    """Segments are whole, or cut into pieces of pieces."""
    if request.param:
        monkeypatch.setitem(tuning.SEGMENT_CUTS, "piece", request.param)
        monkeypatch.setitem(tuning.SEGMENT_CUTS, "longest", 4)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_segments(dtype, channels, short):
    of = np.random.default_rng(0).integers(0, 7, 60)
    of[of == 3] = 2  # an empty segment
    CHECKS.segments(of, 8, channels, dtype)
    CHECKS.segments(np.sort(of), 9, channels, dtype)


@pytest.mark.parametrize("of", ([], [0], [1, 0, 1], [0] * 40), ids=str)
def test_few_rows_and_one_segment(of, short):
    CHECKS.segments(of, 3, 3)


def test_one_segment_that_holds_almost_all():
    of = np.r_[np.zeros(3000, int), np.arange(1, 20)]
    CHECKS.segments(np.random.default_rng(2).permutation(of), 20, 3)


def test_nan_wins_and_the_first_of_equals(short):
    CHECKS.nan_and_ties()


def test_negative_maxima_are_not_zero(short):
    CHECKS.negative_maxima()


@pytest.mark.parametrize("n, rows, channels", ((0, 3, 2), (3, 0, 2), (3, 2, 0)))
def test_nothing_comes_of_nothing(n, rows, channels):
    assert len(list(CHECKS.nothing(n, rows, channels))) == 6


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
    y = cuda.gather_sum(flat, table)
    expected = np.stack([np.array(flat).sum(axis=0), np.array(flat)[1]])
    np.testing.assert_allclose(np.array(y), expected, rtol=1e-6)
