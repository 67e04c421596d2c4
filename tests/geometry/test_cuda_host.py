"""CUDA's geometry kernels, run on the CPU by `cuda_host`, against the oracle."""

import itertools
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cuda_emulation import (
    CAN_COMPILE,
    HOST,
    compiled,
    kept_folder,
    on_host,
    runtime,
)
from reference_rows import table_of, tile_order

from mlx_lattice import cache_files
from mlx_lattice.backends.cuda import sort as cuda_sort
from mlx_lattice.backends.cuda.geometry import (
    KINDS,
    pitch_of,
    rank_bits,
    rule_kind,
    rule_words,
)
from mlx_lattice.backends.cuda.sort import digits_of
from mlx_lattice.backends.cuda.weight_grad import ADD_PARTIALS

KERNELS = Path(__file__).parents[2] / "cuda"

pytestmark = pytest.mark.skipif(
    not CAN_COMPILE,
    reason="running CUDA's kernels on the CPU needs Linux and a C++ compiler",
)


@pytest.fixture(scope="module")
def programs():
    """The kernels, compiled for the CPU: called with a program's name and its input."""
    every = sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")])
    files = {path.name: on_host(path.read_text()) for path in every}
    faces = *cuda_sort.structs(), ADD_PARTIALS["firsts"]
    structs = "".join(face.struct for face in faces)
    files["interfaces.h"] = f"namespace lattice {{\n{structs}}}\n"
    folder = kept_folder(*files, *files.values())
    for name, text in files.items():
        cache_files.write_whole(folder / name, text.encode())

    @cache
    def built(name):
        source, linked = HOST / f"{name}.cpp", (runtime(folder),)
        return compiled(source, folder / name, f"-I{folder}", linked=linked)

    def call(name, *arrays):
        sent = b"".join(np.asarray(a, np.int32).tobytes() for a in arrays)
        done = subprocess.run(
            [built(name)], input=sent, capture_output=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def run(programs, rows, out, offsets, stride, transposed, chunk_rows=64, start=0):
    """What the kernels make of a rule between two sets, by name."""
    offsets = tuple(map(tuple, np.asarray(offsets).tolist()))
    kind, turned = rule_kind(offsets, stride, transposed)
    words = rule_words(turned, stride, kind)
    volume, n, columns = len(offsets), len(out), rows.shape[1]
    passes, bits = digits_of(rank_bits(volume))
    sizes = KINDS.index(kind), columns, len(rows), n, volume, len(words)
    sizes = np.int32([*sizes, bits, passes, chunk_rows, start])
    arrays = np.zeros(start), rows, out, words + [0] * (-len(words) % 4)
    made = programs("relations", sizes, *arrays)
    got, at = {}, 0

    def take(name, shape, dtype=np.int32):
        nonlocal at
        count = int(np.prod(shape))
        got[name] = np.frombuffer(made, dtype, count, at).reshape(shape)
        at += got[name].nbytes

    take("repeat", 2), take("ranges", (columns, 2)), take("ordered", 1)
    take("table", (n, volume)), take("counts", (volume, -(-n // 64)))
    take("edges", 1, np.int64)
    for name in ("", "again_"):
        take(name + "rows", n), take(name + "sorted", (volume, pitch_of(n)))
        take(name + "masks", (pitch_of(n) // 32, -(-volume // 32)), np.uint32)
        take(name + "edges_of_tiles", 1, np.int64)
    take("new_table", (n, volume))
    take("listed", (max(1, int(got["edges"][0])), 3)), take("starts", volume + 1)
    assert at == len(made)
    return got


def check(got, rows, expected):
    """What was made is what the table asks for."""
    n, volume = expected.shape
    used = expected >= 0
    np.testing.assert_array_equal(got["ranges"].T, [rows.min(axis=0), rows.max(axis=0)])
    np.testing.assert_array_equal(got["table"], expected)
    bands = np.add.reduceat(used, np.arange(0, n, 64), axis=0)
    np.testing.assert_array_equal(got["counts"], bands.T)
    assert got["edges"] == used.sum()
    k, o = np.nonzero(used.T)
    edges = np.stack([expected[o, k], o, k], axis=1)
    np.testing.assert_array_equal(got["listed"][: len(edges)], edges)
    starts = np.searchsorted(k, np.arange(volume + 1))
    np.testing.assert_array_equal(got["starts"], starts)
    at = tile_order(used)
    padded = np.full((pitch_of(n), volume), -1)
    padded[:n] = expected[at]
    live = (padded >= 0).reshape(-1, 32, volume).any(axis=1)
    np.testing.assert_array_equal(got["new_table"], expected)
    for name in ("", "again_"):
        np.testing.assert_array_equal(got[name + "rows"], at)
        np.testing.assert_array_equal(got[name + "sorted"], padded.T)
        assert got[name + "edges_of_tiles"] == used.sum()
        for k in range(volume):
            bit = got[name + "masks"][:, k // 32] >> (k % 32) & 1
            np.testing.assert_array_equal(bit, live[:, k])


def sets(rng, count, extent, columns=4):
    """Rows in random order, negative ones too, and their cells."""
    rows = rng.integers(-extent, extent, (count, columns))
    rows[:, 0] %= 2
    rows = rng.permutation(np.unique(rows, axis=0)).astype(np.int32)
    cells = np.unique(rows // ([1, 2, 1, 2, 1][:columns]), axis=0)
    return rows, rng.permutation(cells).astype(np.int32)


CUBE = tuple(itertools.product((-1, 0, 1), repeat=3))
OFFSETS = {
    "point": [(0, 0, 0)],
    "pair": list(itertools.product((0, 1), repeat=3)),
    "cube": CUBE,
    "dilated": [tuple(3 * v for v in o) for o in CUBE],
    "plane": list(itertools.product((0,), range(-3, 4), range(-3, 3))),
    "five": list(itertools.product(range(-2, 3), repeat=3)),
}
# More than one mask holds: one bit of the last, all of it, and some.
WIDE = {
    "65": list(itertools.product((0, 1), range(-2, 3), range(-6, 7)))[:65],
    "128": list(itertools.product(range(2), range(-4, 4), range(-4, 4))),
    "343": list(itertools.product(range(-3, 4), repeat=3)),
}


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("stride", ((1, 1, 1), (2, 2, 2), (3, 1, 4)), ids=str)
@pytest.mark.parametrize("name", OFFSETS)
def test_tables_tiles_and_edges(programs, name, stride, transposed):
    rng = np.random.default_rng(len(name))
    rows, out = sets(rng, 700, 6)
    offsets = rng.permutation(OFFSETS[name]) if name == "plane" else OFFSETS[name]
    got = run(
        programs, rows, out, offsets, stride, transposed, start=int(name == "pair")
    )
    assert got["repeat"][0] == -1
    check(got, rows, table_of(rows, out, offsets, stride, transposed))


@pytest.mark.parametrize(
    ("name", "count"), [("65", 1), ("65", 6000), ("128", 6000), ("343", 300)]
)
def test_wide_masks_are_ranked_by_their_end(programs, name, count):
    """Of one row, and of several tiles of the sort: equal ranks keep their order."""
    rows, _ = sets(np.random.default_rng(0), count, 4 if count < 1000 else 9)
    assert (len(rows) > 4096) == (count > 1000)
    got = run(programs, rows, rows, WIDE[name], (1, 1, 1), False)
    check(got, rows, table_of(rows, rows, WIDE[name], (1, 1, 1), False))


@pytest.mark.parametrize("chunk_rows", (64, 128, 256))
def test_several_tiles_of_a_sort(programs, chunk_rows):
    """Blocks wait for the tiles of others."""
    rows, _ = sets(np.random.default_rng(0), 9000, 12)
    got = run(programs, rows, rows, CUBE, (1, 1, 1), False, chunk_rows)
    check(got, rows, table_of(rows, rows, CUBE, (1, 1, 1), False))


@pytest.mark.parametrize("columns", (2, 5))
def test_other_dimensions(programs, columns):
    rows, out = sets(np.random.default_rng(columns), 400, 4, columns)
    size = (3,) * (columns - 1) if columns == 2 else (1, 2, 3, 2)
    offsets = list(itertools.product(*map(range, size)))
    for stride in ((1,) * (columns - 1), (2, 3, 1, 2)[: columns - 1]):
        for transposed in (False, True):
            got = run(programs, rows, out, offsets, stride, transposed)
            check(got, rows, table_of(rows, out, offsets, stride, transposed))


@pytest.mark.parametrize("in_order", (False, True))
@pytest.mark.parametrize("density", (0.02, 0.6, 1))
def test_lines(programs, density, in_order):
    """Long columns: lines that one row has, that are full, that two warps fill."""
    rng = np.random.default_rng(0)
    grid = np.array(list(itertools.product((0, 1), range(3), range(4), range(-90, 90))))
    rows = grid[rng.random(len(grid)) < density].astype(np.int32)
    rows = rows if in_order else rng.permutation(rows)
    out = rows[:1000]
    for offsets, stride in ((CUBE, (1, 1, 1)), (OFFSETS["dilated"], (1, 1, 2))):
        got = run(programs, rows, out, offsets, stride, False, start=int(in_order))
        assert (got["ordered"][0] == -1) == in_order
        check(got, rows, table_of(rows, out, offsets, stride, False))


def test_lines_further_apart_than_a_group_reaches(programs):
    rows = np.array([(0, 0, 0, z) for z in range(-300, 300, 7)], np.int32)
    for offsets in ([(0, 0, -70), (0, 0, 0), (0, 0, 70)], [(0, 0, 35), (0, 0, -280)]):
        for transposed, stride in ((False, 1), (True, 1), (True, 7)):
            got = run(programs, rows, rows, offsets, (1, 1, stride), transposed)
            check(got, rows, table_of(rows, rows, offsets, (1, 1, stride), transposed))


def test_more_lines_than_a_block_defers(programs):
    """Each group of each row meets three: a chunk has 2304 groups, and defers 1024."""
    rng = np.random.default_rng(0)
    grid = np.array(list(itertools.product((0,), range(3), range(3), range(-99, 99))))
    rows = grid[rng.random(len(grid)) < 0.7].astype(np.int32)
    offsets = [(x, y, 40 * z) for x, y, z in CUBE]
    got = run(programs, rows, rows, offsets, (1, 1, 1), False, chunk_rows=256)
    check(got, rows, table_of(rows, rows, offsets, (1, 1, 1), False))


@pytest.mark.parametrize("at", ((1, -3, 0, 31), (0, 0, 0, 0)))
def test_one_row(programs, at):
    row = np.array([at], np.int32)
    got = run(programs, row, row, CUBE, (1, 1, 1), False)
    assert got["repeat"][0] == -1
    check(got, row, table_of(row, row, CUBE, (1, 1, 1), False))


def test_the_ends_of_int32(programs):
    low, high = -(2**31), 2**31 - 1
    ends = [[0, low, low, 5], [0, high, high, 5], [0, high, low, 5], [0, 0, 0, 0]]
    rows = np.array(ends, np.int32)
    offsets = [(0, 0, 0), (low, low, 0), (high, 1, 0), (0, -1, 0), (2, 3, 1)]
    for stride, transposed in itertools.product(((1, 1, 1), (3, 3, 3)), (False, True)):
        if transposed and max(stride) == 1:
            continue  # an offset turned would leave int32
        got = run(programs, rows, rows, offsets, stride, transposed)
        check(got, rows, table_of(rows, rows, offsets, stride, transposed))


@pytest.mark.parametrize("in_order", (False, True))
def test_equal_rows_are_one(programs, in_order):
    rows, _ = sets(np.random.default_rng(1), 500, 5)
    first = len(rows)
    if in_order:
        rows, first = rows[np.lexsort(rows.T[::-1])], 21
        rows = np.insert(rows, [21, 21, 200], rows[[20, 20, 199]], axis=0)
    else:
        rows = np.concatenate([rows, rows[[30, 20, 20]]])
    got = run(programs, rows, rows, CUBE, (1, 1, 1), False)
    assert got["repeat"][0] == first
    check(got, rows, table_of(rows, rows, CUBE, (1, 1, 1), False))


@pytest.mark.parametrize("mirrored", (False, True))
@pytest.mark.parametrize("ranges", (1, 7, 66))
@pytest.mark.parametrize("density", (0.0002, 0.002, 0.3, 1))
def test_ranges_sum_every_edge_once(programs, density, ranges, mirrored):
    """As the weight gradient shares them out; some offsets have none, some ranges."""
    rng = np.random.default_rng(ranges)
    n, volume = 3000, 30
    used = rng.random((n, volume)) < density * rng.random(volume)
    used[:, 3:9] = used[:, -2:] = False
    k, o = np.nonzero(used.T)
    pairs, counts = np.stack([rng.integers(0, 50, len(k)), o], 1), used.sum(axis=0)
    rows = [np.bincount(k, weights=i, minlength=volume) for i in pairs.T]
    ends = np.cumsum(counts)
    spans, times = np.stack([ends - counts, ends], 1), 1
    if mirrored:
        # As many offsets more, whose edges are those of the first ones turned round.
        turned = spans[::-1] ^ [-1, 0]
        spans, times = np.concatenate([spans, turned]), 2
        rows = [np.concatenate([rows[0], rows[1][::-1]])]
        counts, volume = np.concatenate([counts, counts[::-1]]), 2 * volume
    blocks = np.append(0, np.cumsum(-(-counts // 32)))
    out = programs("walks", (len(pairs), volume, ranges), pairs, spans, blocks)
    assert (np.frombuffer(out, np.int32, len(pairs)) == times).all()
    sums = np.frombuffer(out, np.float32, 2 * volume, 4 * len(pairs)).reshape(-1, 2)
    np.testing.assert_array_equal(sums, np.stack([rows[0], counts], axis=1))


@pytest.mark.parametrize("splits", (4, 300))
@pytest.mark.parametrize("c_in, c_out", ((1, 1), (3, 40), (64, 33)))
def test_partial_sums_are_added_into_the_layout_of_mlx(programs, c_in, c_out, splits):
    volume, rng = 5, np.random.default_rng(c_out)
    shape = c_in, c_out
    firsts = np.array([0, 3, 3, 9, 10, 17]) * (splits // 4)
    slots = rng.integers(-9, 9, (splits + volume, *shape))
    whole = rng.integers(-9, 9, (splits, volume, *shape))
    out = programs("transposed_sums", (splits, volume, *shape), firsts, slots, whole)
    sums, added, *shared = np.frombuffer(out, np.float32).reshape(6, -1)
    span = -(-firsts[-1] // splits)
    wanted = np.zeros((volume, *shape))
    for k, (first, last) in enumerate(itertools.pairwise(firsts)):
        for g in range(splits):
            if first < min(last, (g + 1) * span) and g * span < last:
                wanted[k] += slots[g + k]
    np.testing.assert_array_equal(sums.reshape(wanted.shape), wanted)
    for found, sum_ in (
        (added, whole.sum(axis=0)),
        *((each, wanted) for each in shared),
    ):
        np.testing.assert_array_equal(
            found.reshape(c_out, volume, c_in), sum_.transpose(2, 0, 1)
        )
