"""The native geometry against oracles written from the scalar rule."""

import threading

import mlx.core as mx
import native
import numpy as np
import pytest
from hypothesis import given, settings
from native import THREADS, cpu
from native_rows import (
    SPREADS,
    any_sets,
    assert_led_to,
    coordinates,
    grid,
    led_to,
)
from reference_rows import table_of

cpu_device = native.cpu_device


@pytest.mark.parametrize("dims", (1, 2, 3, 4))
@pytest.mark.parametrize("spread", SPREADS)
def test_many_rows_of_every_spread(spread, dims):
    rng = np.random.default_rng(dims)
    extent = SPREADS[spread] if dims > 1 or spread == "whole" else 50 * SPREADS[spread]
    a = coordinates(rng, 6000, dims, extent, batch=3)
    ordered = np.unique(a, axis=0)
    offsets, stride = grid((3,) * dims), (3, 2, 1, 2)[:dims]
    wanted = np.concatenate([a[::2] // np.array((1, *stride)), a[:50]])
    wanted = rng.permutation(np.unique(wanted, axis=0)).astype(np.int32)
    twice = np.concatenate([a, a[5:9]])
    expected = table_of(a, wanted, offsets[::4], stride, False)
    sets = led_to(a, offsets[::4], stride)
    for threads in (1, 3):
        cpu.set_num_threads(threads)
        for rows in (a, ordered):
            assert_led_to(rows, offsets[::4], stride, sets)
            assert cpu.first_duplicate(mx.array(rows)) is None
        assert cpu.first_duplicate(mx.array(twice)) == (5, len(a))
        low, high = cpu.bounds(mx.array(a))
        assert (low, high) == (a.min(0).tolist(), a.max(0).tolist())
        rows, inverse, first = (np.array(v) for v in cpu.unique_rows(mx.array(twice)))
        np.testing.assert_array_equal(rows, ordered)
        np.testing.assert_array_equal(rows[inverse], twice)
        np.testing.assert_array_equal(twice[first], rows)
        assert first.max() < len(a)
        got = cpu.neighbour_table(
            mx.array(a), mx.array(wanted), offsets[::4], stride, False
        )
        np.testing.assert_array_equal(np.array(got), expected)


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


@pytest.mark.parametrize("n_out,n_in", ((0, 0), (0, 4), (1, 1), (900, 700)))
@pytest.mark.parametrize("volume", (1, 8, 27, 64, 65, 343))
def test_transposed_tables_and_edges(n_out, n_in, volume):
    rng = np.random.default_rng(volume)
    table = np.full((n_out, volume), -1, np.int32)
    for k in range(volume):  # each (i, k) at most once
        take = min(n_in, n_out) // 2
        table[rng.permutation(n_out)[:take], k] = rng.permutation(n_in)[:take]
    back = np.full((n_in, volume), -1, np.int32)
    o, k = np.nonzero(table >= 0)
    back[table[o, k], k] = o
    order = np.lexsort((o, k))
    listed = np.stack([table[o, k], o, k], 1)[order].astype(np.int32)

    for threads in THREADS:
        cpu.set_num_threads(threads)
        t = mx.array(table)
        np.testing.assert_array_equal(np.array(cpu.transpose_table(t, n_in)), back)
        edges, counts = cpu.edges(t)
        np.testing.assert_array_equal(np.array(edges).reshape(-1, 3), listed)
        np.testing.assert_array_equal(np.array(counts), (table >= 0).sum(0))


def test_errors_are_sentences():
    c = mx.zeros((3, 4), mx.int32)
    with pytest.raises(ValueError, match="coords must be int32"):
        cpu.unique_rows(mx.zeros((3, 4)))
    with pytest.raises(ValueError, match="2 to 5 columns"):
        cpu.unique_rows(mx.zeros((3, 6), mx.int32))
    with pytest.raises(ValueError, match="stride must have 3 values"):
        cpu.neighbour_table(c, c, [(0, 0, 0)], (1, 1))
    with pytest.raises(ValueError, match="every offset must have 3 values"):
        cpu.neighbour_table(c, c, [(0, 0)], (1, 1, 1))
    with pytest.raises(ValueError, match="strides must be at least 1"):
        cpu.cells(c, (1, 0, 1))
    with pytest.raises(RuntimeError, match="names input row 9"):
        mx.eval(cpu.transpose_table(mx.array([[9]], dtype=mx.int32), 3))


def test_threads_of_python_share_the_pool():
    rng = np.random.default_rng(9)
    a = coordinates(rng, 3000, 3, extent=12)
    offsets, stride = grid((3, 3, 3)), (1, 1, 1)
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
