"""Sets and relations by CUDA's geometry, emulated: where it runs, what is looked at."""

import numpy as np
import pytest
from cuda_emulation import Emulator
from reference_rows import tile_order

from mlx_lattice import sync
from mlx_lattice.backends.cuda import geometry as cuda_geometry

STRIDES = (2, (1, 2, 2), 3, 2)


@pytest.fixture(name="emulator")
def whole_emulator(cuda_programs):
    """For blocks of ``emulating``: what is expected is of the CPU."""
    return Emulator(cuda_programs)


@pytest.fixture(name="reads")
def counted_reads(monkeypatch):
    real, seen = sync.read, []

    def read(*arrays):
        seen.append(len(arrays))
        return real(*arrays)

    monkeypatch.setattr(sync, "read", read)
    return seen


def check_tiles(relation):
    """Sorted rows are the table's, in the order of their Gray ranks."""
    view, table = cuda_geometry.sorted_rows(relation), np.array(relation.out_in)
    order, placed = np.array(view.rows), np.array(view.table)[:, : len(table)].T
    placed = placed[:, ::-1] if view.mirrored else placed
    np.testing.assert_array_equal(placed, table[order])
    if not view.mirrored:
        np.testing.assert_array_equal(order, tile_order(table >= 0))
