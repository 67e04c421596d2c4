"""Reductions of every backend that is here against float64 loops.

MLX operations, the extension, Metal and CUDA fulfil one protocol: one list of checks.
"""

from functools import partial

import cases
import mlx.core as mx
import numpy as np
import pytest
from conftest import KINDS, pair
from contractions import moved
from metal_checks import checked
from places import HERE, MetalHost, agreed
from reduction_checks import Checks

from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.registry import REDUCTIONS

SHAPES = ((30, 1, 12), (25, 8, 9), (7, 3, 40), (1, 2, 1))
# A thread's, less and more; more than the lanes of a register.
CHANNELS = (1, 3, 4, 9, 37)
GPUS = "metal", "cuda"
places = pytest.mark.parametrize("place", HERE, ids=lambda place: place.name)


def checks(place) -> Checks:
    """The checks of a place's reductions."""
    # MLX's own scatters add by atomics on CUDA, where the library's kernels do not.
    steady = place.name != "mlx" or not mx.cuda.is_available()
    return Checks(REDUCTIONS[place.name], partial(agreed, place, steady=steady))


def launched(place, count: int) -> None:
    """Assert that a place's last call launched so many kernels, where they are seen."""
    assert not isinstance(place, MetalHost) or checked.launches == count


@pytest.fixture(params=(0, 2, 5), ids=("whole", "pieces of 2", "pieces of 5"))
def short(request, place, monkeypatch):
    """Segments are whole or, on a GPU, cut into pieces of pieces."""
    if request.param:
        if place.name not in GPUS:
            pytest.skip("segments are cut on GPUs only")
        monkeypatch.setitem(gpu_kernel.SEGMENT_CUTS, "piece", request.param)
        monkeypatch.setitem(gpu_kernel.SEGMENT_CUTS, "longest", 4)
    return request.param


@places
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_sums_and_products(place, dtype, shape, weighted):
    for channels in CHANNELS:
        checks(place).tables(dtype, shape, weighted, channels)


@places
@pytest.mark.parametrize("weighted", (False, True))
def test_scattered_sums_in_pieces(place, weighted, short):
    for channels in CHANNELS:
        checks(place).tables("float16", (25, 8, 9), weighted, channels)
        checks(place).tables("float32", (40, 3, 2), weighted, channels)


@places
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_max_kinds(place, case):
    checks(place).max(pair(case), 3)


@places
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_max(place, dtype):
    for channels in CHANNELS:
        checks(place).max(pair(KINDS[2], "batches"), channels, dtype)


@places
@pytest.mark.parametrize("geometry", ("empty", "one"))
def test_max_of_few_rows(place, geometry):
    checks(place).max(pair(KINDS[3], geometry), 3)


@places
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_segments(place, dtype, short):
    of = np.random.default_rng(0).integers(0, 7, 60)
    of[of == 3] = 2  # an empty segment
    for channels in CHANNELS:
        checks(place).segments(of, 8, channels, dtype)
        checks(place).segments(np.sort(of), 9, channels, dtype)
        launched(place, {0: 1, 2: 5, 5: 3}[short])


@places
@pytest.mark.parametrize(
    "of", ([], [0], [2, 2], [1, 0, 1], [0] * 40, [2] * 21), ids=str
)
def test_few_rows_and_one_segment(place, of, short):
    for channels in (2, 3):
        checks(place).segments(of, 3, channels)
        if not of:
            launched(place, 0)


@places
def test_one_segment_that_holds_almost_all(place):
    of = np.r_[np.zeros(1500, int), np.arange(1, 20)]
    of = np.random.default_rng(2).permutation(of)
    for channels in (1, 3):
        checks(place).segments(of, 20, channels)
        launched(place, 2)


@places
def test_nan_wins_and_the_first_of_equals(place, short):
    checks(place).nan_and_ties()


@places
def test_negative_maxima_are_not_zero(place, short):
    checks(place).negative_maxima()


@places
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_inputs_of_one_element(place, dtype):
    """MLX may pass each of them as a constant."""
    for channels in CHANNELS:
        checks(place).tables(dtype, (1, 1, 1), True, channels)
    checks(place).max(pair(KINDS[0], "one"), 1, dtype)
    checks(place).segments([0], 1, 1, dtype)


@places
@pytest.mark.parametrize("n, rows, channels", ((0, 3, 2), (3, 0, 2), (3, 2, 0)))
def test_nothing_comes_of_nothing(place, n, rows, channels):
    names = []
    for name in checks(place).nothing(n, rows, channels):
        names.append(name)
        launched(place, 0)
    assert len(names) == 5


@places
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_features_may_begin_anywhere(place, dtype):
    x = moved(mx.array(cases.features(2, 16)).astype(getattr(mx, dtype)))
    table = moved(mx.array([[0, 1], [1, -1]], dtype=mx.int32))
    y = agreed(place, REDUCTIONS[place.name].gather_sum, x, table)
    exact = np.array(x.astype(mx.float32))
    wanted = np.stack([exact.sum(axis=0), exact[1]])
    np.testing.assert_allclose(np.array(y.astype(mx.float32)), wanted, 1e-2, 1e-2)


@places
@pytest.mark.parametrize(
    "dtype, before", (("float32", 4), ("float16", 1), ("bfloat16", 8))
)
def test_maxima_of_features_that_begin_anywhere(place, dtype, before):
    """Whole blocks of 16 bytes, and odd channels; views at multiples of 16, and not."""
    kind, reduce = getattr(mx, dtype), REDUCTIONS[place.name]
    table = np.random.default_rng(before).integers(-1, 9, (11, 3)).astype(np.int32)
    back = mx.array(np.random.default_rng(1).integers(-1, 11, (9, 2)).astype(np.int32))
    for channels in (7, 16):
        x = moved(mx.array(cases.features(9, channels)).astype(kind), before)
        y, won = agreed(place, reduce.gather_max, x, mx.array(table))
        exact = np.array(x.astype(mx.float32))
        held = np.where(table[..., None] >= 0, exact[table], -np.inf)
        best = np.take_along_axis(table, held.argmax(axis=1), axis=1)
        none = (table < 0).all(axis=1)[:, None]
        np.testing.assert_array_equal(np.array(won), np.where(none, -1, best))
        most = np.where(none, 0, held.max(axis=1))
        np.testing.assert_array_equal(np.array(y.astype(mx.float32)), most)
        dy = moved(mx.ones((11, channels), dtype=kind), before)
        names = moved(won, 1)
        dx = agreed(place, reduce.max_pool_backward, dy, names, back)
        there, held = np.array(back)[..., None], np.array(won)[np.array(back)]
        hits = (there >= 0) & (held == np.arange(9)[:, None, None])
        np.testing.assert_array_equal(np.array(dx.astype(mx.float32)), hits.sum(axis=1))
