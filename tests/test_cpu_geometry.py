"""The native geometry against oracles written from the scalar rule."""

import itertools
import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

cpu = pytest.importorskip("mlx_lattice._cpu")

THREADS = (1, 2, 5)
INT = np.iinfo(np.int32)


@pytest.fixture(autouse=True)
def _cpu_device():
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)
    cpu.set_num_threads(0)


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


def oracle_table(in_coords, out_coords, offsets, stride, transposed):
    at = {tuple(map(int, row)): i for i, row in enumerate(in_coords)}
    table = np.full((len(out_coords), len(offsets)), -1, np.int32)
    for o, row in enumerate(out_coords.astype(object)):
        for k, offset in enumerate(offsets):
            if transposed:
                shifted = [int(v) - d for v, d in zip(row[1:], offset, strict=True)]
                if any(v % s for v, s in zip(shifted, stride, strict=True)):
                    continue
                wanted = [v // s for v, s in zip(shifted, stride, strict=True)]
            else:
                wanted = [
                    int(v) * s + d
                    for v, s, d in zip(row[1:], stride, offset, strict=True)
                ]
            table[o, k] = at.get((int(row[0]), *wanted), -1)
    return table


KERNELS = [
    ("1d3", 1, grid((3,)), (1,)),
    ("2d3", 2, grid((3, 3)), (1, 1)),
    ("3d3", 3, grid((3, 3, 3)), (1, 1, 1)),
    ("3d3-dilated", 3, grid((3, 3, 3), dilation=2), (1, 1, 1)),
    ("3d2", 3, grid((2, 2, 2)), (2, 2, 2)),
    ("3d313", 3, grid((3, 1, 3)), (1, 2, 3)),
    ("3d-even-unit", 3, grid((2, 3, 2)), (1, 1, 1)),
    ("3d-cross", 3, [(0, 0, 0), (1, 0, 0), (0, -1, 0), (0, 0, 2)], (1, 1, 1)),
    ("3d3-stride2", 3, grid((3, 3, 3), start=-1), (2, 2, 2)),
    ("4d2", 4, grid((2, 2, 2, 2)), (2, 1, 2, 1)),
    ("4d3", 4, grid((3, 3, 3, 3)), (1, 1, 1, 1)),
    ("none", 3, [], (1, 1, 1)),
]


@pytest.mark.parametrize("far", (False, True), ids=("near", "far"))
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("same", (False, True))
@pytest.mark.parametrize("name,dims,offsets,stride", KERNELS, ids=lambda v: str(v)[:12])
def test_neighbour_table(name, dims, offsets, stride, same, transposed, far):
    rng = np.random.default_rng(len(offsets) + dims)
    a = coordinates(rng, 400, dims, extent=3 if dims == 4 else 5)
    b = a if same else coordinates(rng, 300, dims, extent=4)
    if far:  # rows at the ends of int32, whose ranges no 64-bit key holds
        ends = np.full((2, 1 + dims), INT.max, np.int32)
        ends[1] = INT.min
        a = np.concatenate([a, ends]) if not same else np.concatenate([ends, a])
        b = a if same else b
    expected = oracle_table(a, b, offsets, stride, transposed)
    in_coords = mx.array(a)
    out_coords = in_coords if same else mx.array(b)
    for threads in THREADS:
        cpu.set_num_threads(threads)
        table = cpu.neighbour_table(in_coords, out_coords, offsets, stride, transposed)
        assert table.shape == expected.shape
        np.testing.assert_array_equal(np.array(table), expected)


def test_neighbour_table_takes_arrays_and_is_lazy_in_compile():
    rng = np.random.default_rng(3)
    a = coordinates(rng, 200, 3)
    offsets, stride = grid((3, 3, 3)), (1, 1, 1)
    expected = oracle_table(a, a, offsets, stride, False)
    got = cpu.neighbour_table(
        mx.array(a), mx.array(a), mx.array(offsets), mx.array(stride)
    )
    np.testing.assert_array_equal(np.array(got), expected)
    table = mx.compile(
        lambda c: cpu.neighbour_table(c, c, offsets, stride), shapeless=True
    )
    for n in (200, 50):
        part = a[:n]
        np.testing.assert_array_equal(
            np.array(table(mx.array(part))),
            oracle_table(part, part, offsets, stride, False),
        )


def test_full_int32_range():
    edge = np.array([INT.min, INT.min + 1, -1, 0, 1, INT.max - 1, INT.max], np.int32)
    a = np.array(list(itertools.product((0, 5), edge, edge, edge)), np.int32)
    np.random.default_rng(0).shuffle(a)
    for stride, transposed in (
        ((1, 1, 1), False),
        ((2, 2, 2), False),
        ((2, 1, 2), True),
    ):
        offsets = grid((3, 3, 3))
        got = cpu.neighbour_table(mx.array(a), mx.array(a), offsets, stride, transposed)
        expected = oracle_table(a, a, offsets, stride, transposed)
        np.testing.assert_array_equal(np.array(got), expected)
    repeated = np.concatenate([a, a[::3]])
    rows, inverse, first = (np.array(v) for v in cpu.sort_unique(mx.array(repeated)))
    np.testing.assert_array_equal(rows, np.unique(a, axis=0))
    np.testing.assert_array_equal(rows[inverse], repeated)
    np.testing.assert_array_equal(repeated[first], rows)
    assert cpu.first_duplicate(mx.array(repeated)) == (0, len(a))
    with pytest.raises(ValueError, match="int32 cannot"):
        cpu.expand(mx.array(a), offsets, (1, 1, 1))
    with pytest.raises(ValueError, match="int32 cannot"):
        cpu.reach(mx.array(a), offsets, (1, 1, 1))
    inner = a[(np.abs(a.astype(np.int64)[:, 1:]) < INT.max).all(1)]
    got = np.array(cpu.expand(mx.array(inner), [(0, 0, 0), (0, 1, 0)], (1, 1, 1)))
    moved = inner + np.array([0, 0, 1, 0], np.int32)
    np.testing.assert_array_equal(
        got, np.unique(np.concatenate([inner, moved]), axis=0)
    )


@pytest.mark.parametrize("n", (0, 1, 2, 700, 40_000))
@pytest.mark.parametrize("dims", (1, 2, 3, 4))
def test_sort_unique(n, dims):
    rng = np.random.default_rng(n + dims)
    rows = coordinates(rng, n, dims, extent=9, batch=3, unique=False)
    expected, index, inverse = np.unique(
        rows, axis=0, return_index=True, return_inverse=True
    )
    for threads in THREADS:
        cpu.set_num_threads(threads)
        got, got_inverse, first = cpu.sort_unique(mx.array(rows))
        np.testing.assert_array_equal(np.array(got), expected)
        np.testing.assert_array_equal(np.array(got_inverse), inverse.reshape(-1))
        np.testing.assert_array_equal(np.array(first), index)


def led_to(rows, offsets, stride):
    """The sorted unique cells, reached and expanded rows, in 64 bits."""
    rows, step = rows.astype(np.int64), np.array((1, *stride), np.int64)
    moves = [np.array((0, *offset), np.int64) for offset in offsets]
    shifted = [rows - move for move in moves]
    none = np.zeros((0, rows.shape[1]), np.int64)
    reached = [s[(s % step == 0).all(1)] // step for s in shifted]
    expanded = [rows * step + move for move in moves]
    return [
        np.unique(np.concatenate([none, *found]), axis=0)
        for found in ([rows // step], reached, expanded)
    ]


def assert_led_to(rows, offsets, stride):
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
    expected_sets = led_to(rows, offsets, stride)
    for build, expected, reached in zip(built, expected_sets, ends, strict=True):
        try:
            got = build()
        except ValueError as error:
            assert "int32 cannot" in str(error)
            assert ((reached < INT.min) | (reached > INT.max)).any()
        else:
            assert got.shape == expected.shape
            np.testing.assert_array_equal(np.array(got), expected)


@pytest.mark.parametrize("name,dims,offsets,stride", KERNELS, ids=lambda v: str(v)[:12])
def test_reach_expand_cells(name, dims, offsets, stride):
    a = coordinates(np.random.default_rng(dims), 300, dims)
    for threads in THREADS:
        cpu.set_num_threads(threads)
        assert_led_to(a, offsets, stride)


# Boxes that a bitmap serves, that keys serve, and that neither does.
SPREADS = {"near": 12, "wide": 50_000, "whole": 2**31 - 9}


@pytest.mark.parametrize("dims", (1, 2, 3, 4))
@pytest.mark.parametrize("spread", SPREADS)
def test_many_rows_of_every_spread(spread, dims):
    rng = np.random.default_rng(dims)
    extent = SPREADS[spread] if dims > 1 or spread == "whole" else 50 * SPREADS[spread]
    a = coordinates(rng, 9000, dims, extent, batch=3)
    ordered = np.unique(a, axis=0)
    offsets, stride = grid((3,) * dims), (3, 2, 1, 2)[:dims]
    wanted = np.concatenate([a[::2] // np.array((1, *stride)), a[:50]])
    wanted = rng.permutation(np.unique(wanted, axis=0)).astype(np.int32)
    twice = np.concatenate([a, a[5:9]])
    expected = oracle_table(a, wanted, offsets[::4], stride, False)
    for threads in (1, 3):
        cpu.set_num_threads(threads)
        for rows in (a, ordered):
            assert_led_to(rows, offsets[::4], stride)
            assert cpu.first_duplicate(mx.array(rows)) is None
        assert cpu.first_duplicate(mx.array(twice)) == (5, len(a))
        low, high = cpu.bounds(mx.array(a))
        assert (low, high) == (a.min(0).tolist(), a.max(0).tolist())
        rows, inverse, first = (np.array(v) for v in cpu.sort_unique(mx.array(twice)))
        np.testing.assert_array_equal(rows, ordered)
        np.testing.assert_array_equal(rows[inverse], twice)
        np.testing.assert_array_equal(twice[first], rows)
        assert first.max() < len(a)
        got = cpu.neighbour_table(
            mx.array(a), mx.array(wanted), offsets[::4], stride, False
        )
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
    got = [np.array(v) for v in cpu.sort_unique(mx.array(a))]
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
            oracle_table(np.array(unique), b, offsets, stride, transposed),
        )


@pytest.mark.parametrize("n_out,n_in", ((0, 0), (0, 4), (1, 1), (900, 700)))
@pytest.mark.parametrize("volume", (1, 8, 27, 64, 65, 343))
def test_transpose_edges_mask_sort(n_out, n_in, volume):
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

    def rank(row):
        mask = sum(1 << int(j) for j in np.nonzero(row >= 0)[0])
        out = 0
        while mask:
            out ^= mask
            mask >>= 1
        return out

    ranks = [rank(row) for row in table]
    by_rank = sorted(range(n_out), key=lambda r: (ranks[r], r))
    for threads in THREADS:
        cpu.set_num_threads(threads)
        t = mx.array(table)
        np.testing.assert_array_equal(np.array(cpu.transpose_table(t, n_in)), back)
        edges, counts = cpu.edges(t)
        np.testing.assert_array_equal(np.array(edges).reshape(-1, 3), listed)
        np.testing.assert_array_equal(np.array(counts), (table >= 0).sum(0))
        assert np.array(cpu.mask_sort(t)).tolist() == by_rank


def test_first_duplicate():
    rng = np.random.default_rng(1)
    rows = coordinates(rng, 3000, 3, extent=8)
    for threads in THREADS:
        cpu.set_num_threads(threads)
        assert cpu.first_duplicate(mx.array(rows)) is None
        assert cpu.first_duplicate(mx.array(rows[:0])) is None
        twice = np.concatenate([rows, rows[7:9], rows[3:4]])
        assert cpu.first_duplicate(mx.array(twice)) == (7, len(rows))
        thrice = np.concatenate([rows[5:6], rows, rows[5:6]])
        assert cpu.first_duplicate(mx.array(thrice)) == (0, 6)


def test_empty_everywhere():
    none = mx.zeros((0, 4), mx.int32)
    some = mx.array([[0, 1, 2, 3]], dtype=mx.int32)
    offsets, stride = grid((3, 3, 3)), (1, 1, 1)
    assert cpu.neighbour_table(none, none, offsets, stride).shape == (0, 27)
    table = cpu.neighbour_table(none, some, offsets, stride)
    assert (np.array(table) == -1).all() and table.shape == (1, 27)
    assert np.array(cpu.neighbour_table(some, none, offsets, stride)).shape == (0, 27)
    assert cpu.reach(none, offsets, stride).shape == (0, 4)
    assert cpu.expand(none, offsets, stride).shape == (0, 4)
    assert cpu.cells(none, stride).shape == (0, 4)
    edges, counts = cpu.edges(mx.zeros((0, 27), mx.int32))
    assert edges.shape == (0, 3) and np.array(counts).tolist() == [0] * 27
    edges, counts = cpu.edges(mx.zeros((5, 0), mx.int32))
    assert edges.shape == (0, 3) and counts.shape == (0,)


def test_errors_are_sentences():
    c = mx.zeros((3, 4), mx.int32)
    with pytest.raises(ValueError, match="coords must be int32"):
        cpu.sort_unique(mx.zeros((3, 4)))
    with pytest.raises(ValueError, match="2 to 5 columns"):
        cpu.sort_unique(mx.zeros((3, 6), mx.int32))
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
            rows = np.array(cpu.sort_unique(c)[0])
            if (got != expected).any() or len(rows) != len(a):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
