"""Rows and rules for the extension's geometry, and what the oracle makes of them."""

import itertools

import mlx.core as mx
import numpy as np
import reference as ref
from hypothesis import strategies as st
from native import cpu

INT = np.iinfo(np.int32)
# Boxes that a bitmap serves, that keys serve, and that neither does.
SPREADS = {"near": 12, "wide": 50_000, "whole": 2**31 - 9}


def coordinates(rng, n, dims, extent=6, batch=2, unique=True):
    """Random rows, negative coordinates included, in random order."""
    rows = rng.integers(-extent, extent, (n, 1 + dims)).astype(np.int32)
    rows[:, 0] = rng.integers(0, batch, n)
    if unique:
        rows = np.unique(rows, axis=0)
        rng.shuffle(rows)
    return rows


def grid(size, dilation=1, start=None):
    axes = []
    for n in size:
        first = -(n // 2) * dilation if n % 2 and start is None else (start or 0)
        axes.append([first + j * dilation for j in range(n)])
    return list(itertools.product(*axes))


def led_to(rows, offsets, stride):
    """The oracle's sorted unique cells, reached and expanded rows."""
    moves = np.array(offsets, np.int64).reshape(-1, len(stride))
    made = (
        ref.cell_rows(rows, stride),
        ref.reach_rows(rows, moves, stride),
        ref.generative_rows(rows, moves, stride),
    )
    return [ref.as_coords(each, len(stride)) for each in made]


def assert_led_to(rows, offsets, stride, expected_sets=None):
    """The native sets, or their refusal of what no int32 holds."""
    c, dims = mx.array(rows), len(stride)
    built = (
        lambda: cpu.cells(c, stride),
        lambda: cpu.reach(c, offsets, stride),
        lambda: cpu.expand(c, offsets, stride),
    )
    # A refusal goes by the ranges of rows and offsets, axis by axis.
    moves, step = np.array(offsets, np.int64).reshape(-1, dims), np.array(stride)
    ends = [np.zeros(0, np.int64)] * 3
    if len(rows) and len(moves):
        sites = rows[:, 1:].astype(np.int64)
        low, high = sites.min(0), sites.max(0)
        down, up = (low - moves.max(0)) // step - 1, (high - moves.min(0)) // step + 1
        ends[1] = np.concatenate([down, up])
        ends[2] = np.concatenate(
            [low * step + moves.min(0), high * step + moves.max(0)]
        )
    expected_sets = expected_sets or led_to(rows, offsets, stride)
    for build, expected, reached in zip(built, expected_sets, ends, strict=True):
        try:
            got = build()
        except ValueError as error:
            assert "int32 cannot" in str(error)
            assert ((reached < INT.min) | (reached > INT.max)).any()
        else:
            assert got.shape == expected.shape
            np.testing.assert_array_equal(np.array(got), expected)


@st.composite
def any_sets(draw):
    """Two sets of a few rows, offsets and strides: small, large, at the ends."""
    dims = draw(st.integers(1, 4))
    value = draw(
        st.sampled_from(
            (
                st.integers(-3, 3),
                st.integers(-70_000, 70_000),
                st.one_of(
                    st.integers(-2, 2),
                    st.integers(INT.min, INT.min + 3),
                    st.integers(INT.max - 3, INT.max),
                ),
            )
        )
    )
    row = st.tuples(st.integers(0, 2), *[value] * dims)
    sets = [draw(st.lists(row, max_size=12)) for _ in range(2)]
    step = st.one_of(st.integers(-3, 3), value)
    offsets = draw(st.lists(st.tuples(*[step] * dims), max_size=6, unique=True))
    stride = draw(
        st.tuples(*[st.sampled_from((1, 1, 2, 3, 7, 5000, int(INT.max)))] * dims)
    )
    return [np.array(s, np.int32).reshape(-1, 1 + dims) for s in sets], offsets, stride
