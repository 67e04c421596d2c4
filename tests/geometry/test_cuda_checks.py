"""What CUDA's geometry, emulated, reads of a set: its check, its levels, its parts."""

import itertools

import cases
import mlx.core as mx
import numpy as np
import pytest
from cuda_emulation import emulated, emulating
from cuda_sets import counted_reads, whole_emulator  # noqa: F401 (fixtures)
from reference_rows import table_of

import mlx_lattice as ml
from mlx_lattice import ops, registry
from mlx_lattice.backends.cuda import geometry as cuda_geometry

pytestmark = emulated


@pytest.mark.parametrize("n", (1, 300))
@pytest.mark.parametrize("dims", (1, 2, 3, 4))
def test_levels_of_a_set_that_nobody_has_read(emulator, reads, dims, n):
    """In every dimension, in two batches, with negative rows in any order."""
    rng = np.random.default_rng(dims)
    strides = np.array([(2, 3, 1, 2)[:dims], (3, 1, 2, 2)[:dims]])
    steps = list(map(tuple, strides.cumprod(axis=0).tolist()))
    all_rows = rng.integers(-90, 90, (n, 1 + dims))
    all_rows[:, 0] %= 2
    all_rows = np.unique(all_rows, axis=0).astype(np.int32)
    rows = rng.permutation(all_rows)
    with emulating(emulator):
        manager = ml.CoordinateManager()
        key = manager.insert(mx.array(rows))
        chain = manager.cells(key, list(map(tuple, strides.tolist())))
        assert reads == [dims + 4], "the set's check with the sizes of its levels"
        for step, level in zip(steps, chain, strict=True):
            cells = np.unique(rows // np.array([1, *step]), axis=0)
            np.testing.assert_array_equal(np.array(manager[level].coords), cells)


def test_a_pruned_set_is_read_once(emulator, reads):
    """Its size, with the check of the set that it is of; what is made of it is read."""
    rows = np.random.default_rng(0).permutation(cases.geometry("negative", 3, 200))
    keep = np.arange(len(rows)) % 3 > 0
    with emulating(emulator):
        x = ml.SparseTensor(mx.array(rows.astype(np.int32)), mx.ones((len(rows), 2)))
        y = ops.prune(x, mx.array(keep))
        assert reads == [6], "the bounds, whether rows repeat, and the size"
        table = y.manager.submanifold_kernel_relation(y.key).out_in
        assert len(reads) == 1
        cube = np.array(list(itertools.product((-1, 0, 1), repeat=3)))
        given = rows[keep], rows[keep], cube, (1, 1, 1), False
        np.testing.assert_array_equal(np.array(table), table_of(*given))


def test_bounds_of_rows_that_repeat_are_one_read(emulator, reads):
    """Which row repeats is not looked for: to merge rows nobody asks."""
    rows = np.repeat(cases.geometry("negative", 3, 80), 3, axis=0).astype(np.int32)
    with emulating(emulator):
        made = registry.geometry().unique_rows(mx.array(rows))
        np.testing.assert_array_equal(np.array(made.rows), np.unique(rows, axis=0))
        assert len(reads) == 2  # the bounds, and how many there are
        assert not any("band_counts" in name for name in emulator.launches)
        box = cuda_geometry.bounds(mx.array(rows))
        assert box == (tuple(rows.min(axis=0)), tuple(rows.max(axis=0)))


def test_the_check_of_a_set_tells_whether_its_rows_are_sorted(emulator, reads):
    """So that joins, alignments and batch elements need not look."""
    rows = np.unique(cases.geometry("batches", 3, 700), axis=0).astype(np.int32)
    mixed = rows.copy()
    mixed[[300, 301]] = rows[[301, 300]]
    with emulating(emulator):
        for given, is_sorted in ((rows, True), (mixed, False), (rows[:1], True)):
            x = ml.SparseTensor(mx.array(given), mx.ones((len(given), 2)))
            held = x.coordinate_set
            assert not held.is_sorted
            held.index  # noqa: B018
            assert held.is_sorted is is_sorted and reads == [5]
            reads.clear()
