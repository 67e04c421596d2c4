"""Gray, Morton and Hilbert orders against scalar implementations."""

from itertools import product

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from hypothesis import given
from hypothesis import strategies as st

from mlx_lattice.geometry import curves


def cube(d: int, bits: int, shift: int = 0) -> np.ndarray:
    """Every cell of a cube of 2^bits cells an axis, shuffled."""
    rows = [(0, *(v + shift for v in c)) for c in product(range(1 << bits), repeat=d)]
    return np.random.default_rng(0).permutation(rows).astype(np.int32)


def morton_key(cell, bits: int) -> int:
    """Bits interleaved, highest first, the first axis leading."""
    key = 0
    for bit in reversed(range(bits)):
        for value in cell:
            key = key << 1 | value >> bit & 1
    return key


def hilbert_key(cell, bits: int) -> int:
    """Skilling's transform, written out for one cell."""
    axes, d = list(cell), len(cell)
    bit = 1 << bits - 1
    while bit > 1:
        low = bit - 1
        for a in range(d):
            if axes[a] & bit:
                axes[0] ^= low
            else:
                swap = (axes[0] ^ axes[a]) & low
                axes[0] ^= swap
                axes[a] ^= swap
        bit >>= 1
    for a in range(1, d):
        axes[a] ^= axes[a - 1]
    flip, bit = 0, 1 << bits - 1
    while bit > 1:
        if axes[-1] & bit:
            flip ^= bit - 1
        bit >>= 1
    return morton_key([axis ^ flip for axis in axes], bits)


CURVES = {
    "morton": (curves.morton_order, morton_key),
    "hilbert": (curves.hilbert_order, hilbert_key),
}


def scalar_order(coords, key) -> list[int]:
    rows = ref.rows_of(coords)
    if not rows:
        return []
    low = [min(axis) for axis in zip(*rows, strict=True)][1:]
    cells = [[v - w for v, w in zip(row[1:], low, strict=True)] for row in rows]
    bits = max(1, max(v for cell in cells for v in cell).bit_length())
    keys = [(row[0], key(c, bits)) for row, c in zip(rows, cells, strict=True)]
    return sorted(range(len(rows)), key=keys.__getitem__)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("d", (1, 2, 3, 4))
@pytest.mark.parametrize("name", cases.GEOMETRIES)
def test_curves(curve, d, name):
    ordered, key = CURVES[curve]
    coords = cases.geometry(name, d, 80)
    got = ordered(mx.array(coords))
    assert got.tolist() == scalar_order(coords, key) and got.dtype == mx.int32


@pytest.mark.parametrize("curve", CURVES)
@given(st.integers(1, 4), st.data())
def test_curves_over_the_whole_of_int32(curve, d, data):
    ordered, key = CURVES[curve]
    row = st.tuples(st.integers(0, 2), *[st.integers(-(2**31), 2**31 - 1)] * d)
    rows = data.draw(st.lists(row, max_size=12, unique=True))
    coords = np.array(rows, np.int32).reshape(-1, 1 + d)
    assert ordered(mx.array(coords)).tolist() == scalar_order(coords, key)


@pytest.mark.parametrize(
    ("d", "bits"), ((1, 5), (2, 1), (2, 4), (3, 1), (3, 3), (4, 2))
)
@pytest.mark.parametrize("shift", (0, -3))
def test_consecutive_cells_of_the_hilbert_curve_touch(d, bits, shift):
    coords = cube(d, bits, shift)
    walk = coords[np.array(curves.hilbert_order(mx.array(coords)))][:, 1:]
    steps = np.abs(np.diff(walk, axis=0)).sum(axis=1)
    assert set(steps.tolist()) == {1}


def test_the_morton_curve_of_a_square():
    coords = mx.array([(0, x, y) for x in range(2) for y in range(2)][::-1])
    walk = coords[curves.morton_order(coords)].tolist()
    assert walk == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("curve", CURVES)
def test_batches_stay_together(curve):
    coords = cases.geometry("batches", 3, 100)
    ordered = coords[np.array(CURVES[curve][0](mx.array(coords)))]
    assert ordered[:, 0].tolist() == sorted(coords[:, 0].tolist())


@given(st.integers(1, 150), st.integers(0, 40), st.integers(0, 99))
def test_gray_order(volume, n, seed):
    occupied = np.random.default_rng(seed).random((n, volume)) < 0.3
    occupied[n // 2 :] = occupied[: n - n // 2]  # ties, which keep their order

    def rank(row: int) -> int:
        mask = sum(1 << k for k in np.flatnonzero(occupied[row]).tolist())
        rank = 0
        while mask:
            rank, mask = rank ^ mask, mask >> 1
        return rank

    got = curves.gray_order(mx.array(occupied)).tolist()
    assert got == sorted(range(n), key=lambda row: (rank(row), row))


@given(st.integers(1, 100), st.integers(0, 40), st.sampled_from((1, 4, 16, 32)))
def test_mask_words(volume, n, block):
    occupied = np.random.default_rng(volume).random((n, volume)) < 0.2
    words = np.array(curves.mask_words(mx.array(occupied), block)).reshape(
        -1, -(-volume // 32)
    )
    for b in range(-(-n // block)):
        used = occupied[b * block : (b + 1) * block].any(axis=0)
        bits = [bool(words[b, k // 32] >> k % 32 & 1) for k in range(volume)]
        assert bits == used.tolist()
    assert len(words) == -(-n // block)
