"""CUDA's relations against the oracle: tables, tiles, orders, edges, unique rows."""

import mlx.core as mx
import numpy as np
import pytest
from reference_rows import table_of, tile_order

import mlx_lattice as ml
from mlx_lattice.geometry.tables import BoxedRows

if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
    pytest.skip("MLX has no CUDA device here", allow_module_level=True)

from mlx_lattice.backends.cuda import geometry as cuda_geometry  # noqa: E402
from mlx_lattice.backends.cuda.geometry import CudaGeometry  # noqa: E402

cuda = CudaGeometry()


def tiled(table):
    """The tiles of a table, by NumPy: sorted table, order, masks."""
    n, volume = table.shape
    rows = tile_order(table >= 0)
    padded = np.full((-(-n // 384) * 384, volume), -1)
    padded[:n] = table[rows]
    used = (padded >= 0).reshape(-1, 32, volume).any(1)
    words = np.zeros((len(used), -(-volume // 32)), np.uint32)
    for k in range(volume):
        words[:, k // 32] |= used[:, k].astype(np.uint32) << np.uint32(k % 32)
    return padded.T, rows, words


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("stride", ((1, 1, 1), (2, 2, 2), (3, 1, 4)), ids=str)
@pytest.mark.parametrize("volume", (1, 2, 9, 27, 32, 33, 64, 65, 130))
def test_tables_and_tiles_of_any_offsets(volume, stride, transposed):
    """Offsets in any order: groups of every length and step, parts of 64."""
    rng = np.random.default_rng(volume)
    rows = np.unique(rng.integers(-9, 9, (3000, 4)), axis=0).astype(np.int32)
    rows[:, 0] %= 2
    rows = rng.permutation(np.unique(rows, axis=0))
    out = rng.permutation(np.unique(rows // np.array([1, 2, 1, 2]), axis=0))
    grid = np.stack(np.meshgrid(*[range(-3, 4)] * 3, indexing="ij"), -1).reshape(-1, 3)
    start = rng.integers(0, len(grid) - volume)
    offsets = grid[start : start + volume]
    if volume % 2:
        offsets = rng.permutation(offsets)
    expected = table_of(rows, out, offsets, stride, transposed)
    found = cuda.index(mx.array(rows))
    kept = {}
    table = found.table(
        BoxedRows(mx.array(out.astype(np.int32)), None),
        offsets.tolist(),
        stride,
        transposed=transposed,
        keep=kept.__setitem__,
        wanted=cuda_geometry.TILES,
    )
    np.testing.assert_array_equal(np.array(table), expected)
    counts = kept["band_counts"]
    assert counts.edges.item() == (expected >= 0).sum()
    bands = np.add.reduceat(expected >= 0, np.arange(0, len(out), 64), axis=0)
    np.testing.assert_array_equal(np.array(counts.bands), bands.T)
    both = (
        kept[cuda_geometry.TILES],
        cuda_geometry.counted_table(cuda_geometry.table_source(table), tiled=True)[2],
    )
    for tiles in both:
        for got, wanted in zip(tiles, tiled(expected), strict=False):
            np.testing.assert_array_equal(np.array(got), wanted)


@pytest.mark.parametrize("n", (1, 63, 64, 65, 4096, 4097, 70_000, 300_000))
def test_tiles_of_many_rows(n):
    """One launch whose blocks wait for each other, in every length of a chunk."""
    rng = np.random.default_rng(n)
    extent = max(2, round((n / 4) ** (1 / 3)) * 2)
    rows = np.unique(rng.integers(0, extent, (2 * n, 3)), axis=0)[:n]
    rows = np.concatenate([np.zeros((len(rows), 1)), rows], 1).astype(np.int32)
    manager = ml.CoordinateManager()
    relation = manager.submanifold_kernel_relation(manager.insert(mx.array(rows)))
    table = np.array(relation.out_in)
    assert relation.n_edges == (table >= 0).sum()
    for got, wanted in zip(
        cuda_geometry.sorted_rows(relation), tiled(table), strict=False
    ):
        np.testing.assert_array_equal(np.array(got), wanted)
    centre = table[:, 13]
    np.testing.assert_array_equal(centre, np.arange(len(rows)))
