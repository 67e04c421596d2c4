"""Metal reductions against float64 loops, on the CPU and with every check."""

import cases
import numpy as np
import pytest
from conftest import KINDS, pair
from metal_checks import bounded, checked, host
from reduction_checks import SHAPES, Checks

from mlx_lattice import tuning
from mlx_lattice.backends import metal

host.require()

CHANNELS = (1, 3, 4, 9)
CHECKS = Checks(metal, checked)


# By tables


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_sums_and_products(dtype, shape, weighted):
    for channels in CHANNELS:
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


# By segments


@pytest.fixture(params=(0, 2, 5))
def short(request, monkeypatch):
    """Segments are whole, or cut into pieces of pieces."""
    if request.param:
        monkeypatch.setitem(tuning.SEGMENT_CUTS, "piece", request.param)
        monkeypatch.setitem(tuning.SEGMENT_CUTS, "longest", 4)
    return request.param


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_segments(dtype, channels, short):
    rng = np.random.default_rng(0)
    of = rng.integers(0, 7, 60)
    of[of == 3] = 2  # an empty segment
    CHECKS.segments(of, 8, channels, dtype)
    CHECKS.segments(np.sort(of), 9, channels, dtype)
    assert checked.launches == {0: 1, 2: 7, 5: 3}[short]


@pytest.mark.parametrize(
    "of", ([], [0], [2, 2], [1, 0, 1], [0] * 40, [2] * 21), ids=str
)
def test_few_rows_and_one_segment(of, short):
    CHECKS.segments(of, 3, 2)
    if not of:
        assert checked.launches == 0


def test_one_segment_that_holds_almost_all():
    of = np.r_[np.zeros(3000, int), np.arange(1, 20)]
    CHECKS.segments(np.random.default_rng(2).permutation(of), 20, 1)
    assert checked.launches == 2


@pytest.mark.parametrize("weighted", (False, True))
def test_scattered_sums_in_pieces(weighted, short):
    test_sums_and_products("float16", (25, 8, 9), weighted)
    test_sums_and_products("float32", (40, 3, 2), weighted)


# Values, limits, nothing at all


def test_nan_wins_and_the_first_of_equals(short):
    CHECKS.nan_and_ties()


def test_negative_maxima_are_not_zero(short):
    CHECKS.negative_maxima()


def test_work_is_cut_into_bounded_dispatches(monkeypatch):
    bounded(monkeypatch, "elements", 50)
    CHECKS.max(pair(KINDS[0]), 3)
    assert checked.launches > 3
    test_sums_and_products("float32", (25, 8, 9), True)
    assert checked.launches > 3
    CHECKS.segments([0, 2, 1, 1] * 40, 3, 4)
    assert checked.launches > 2


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_inputs_of_one_element(dtype):
    # MLX would pass each of them as a constant.
    test_sums_and_products(dtype, (1, 1, 1), True)
    CHECKS.max(pair(KINDS[0], "one"), 1, dtype)
    CHECKS.segments([0], 1, 1, dtype)


@pytest.mark.parametrize("n, rows, channels", ((0, 3, 2), (3, 0, 2), (3, 2, 0)))
def test_nothing_is_launched_for_nothing(n, rows, channels):
    for name in CHECKS.nothing(n, rows, channels):
        if name != "row_products" or not channels:
            assert checked.launches == 0
