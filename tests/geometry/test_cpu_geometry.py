"""The native geometry against oracles written from the scalar rule."""

import threading

import cases
import mlx.core as mx
import native
import numpy as np
import reference as ref
from hypothesis import given, settings
from hypothesis import strategies as st
from native import cpu
from reference_rows import table_of

cpu_device = native.cpu_device
INT = np.iinfo(np.int32)


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


@given(any_sets())
@settings(max_examples=300)
def test_any_rows_offsets_and_strides(drawn):
    (a, b), offsets, stride = drawn
    assert_led_to(a, offsets, stride)
    expected, first, inverse = np.unique(
        a, axis=0, return_index=True, return_inverse=True
    )
    got = [np.array(v) for v in cpu.unique_rows(mx.array(a))]
    np.testing.assert_array_equal(got[0], expected)
    np.testing.assert_array_equal(got[1], inverse.reshape(-1))
    np.testing.assert_array_equal(got[2], first)
    pairs = [(a.tolist().index(row), j) for j, row in enumerate(a.tolist())]
    repeats = [pair for pair in pairs if pair[0] < pair[1]]
    assert cpu.first_duplicate(mx.array(a)) == (repeats[0] if repeats else None)
    unique = mx.array(a[np.sort(first)])
    for transposed in (False, True):
        table = cpu.neighbour_table(unique, mx.array(b), offsets, stride, transposed)
        np.testing.assert_array_equal(
            np.array(table).reshape(len(b), len(offsets)),
            table_of(np.array(unique), b, offsets, stride, transposed),
        )


def test_threads_of_python_share_the_pool():
    a, stride = cases.geometry("negative", 3, 3000), (1, 1, 1)
    offsets = list(map(tuple, ref.kernel_offsets(3, 3).tolist()))
    expected = np.array(cpu.neighbour_table(mx.array(a), mx.array(a), offsets, stride))
    wrong = []

    def work():
        for _ in range(5):
            c = mx.array(a)
            got = np.array(cpu.neighbour_table(c, c, offsets, stride, stream=mx.cpu))
            rows = np.array(cpu.unique_rows(c)[0])
            if (got != expected).any() or len(rows) != len(a):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
