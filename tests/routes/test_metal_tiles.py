"""How Metal's planner cuts tiles, sorts rows by region and splits weight gradients."""

import cases
import numpy as np
import pytest
from conftest import KINDS, pair
from metal_checks import checked, host

from mlx_lattice import devices
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.metal import tiles as metal_tiles
from mlx_lattice.backends.metal import weight_grad as metal_weight_grad

host.require()


@pytest.mark.parametrize("share", (0.6, 0.2), ids=("whole", "cut"))
def test_regions_are_dispatched_whole_where_they_fit(share, monkeypatch):
    both = pair(cases.Case("submanifold", 2, 3), "block", 300)
    work = both[0].n_edges * 3 * 6
    monkeypatch.setattr(gpu_kernel, "matrix_limit", lambda device: int(share * work))
    count = -(-both[0].n_out // 64)
    rows, chip = both[0].n_out, devices.profile("m1")
    pieces, placed = metal_tiles.tile_dispatches(rows, 128, work, chip)
    cut = not placed
    assert cut == (share == 0.2) and sum(length for _, length in pieces) == count
    assert cut or all(first % 2 == 0 for first, _ in pieces)
    assert len(pieces) > 1


def test_rows_are_sorted_by_region():
    relation, _ = pair(KINDS[0], n=200)
    table, rows, _ = checked(metal_tiles.tiles, relation, 64)
    rows = np.array(rows)
    assert (np.sort(rows) == np.arange(relation.n_out)).all()
    assert (np.diff(rows // 64) >= 0).all()
    np.testing.assert_array_equal(table, np.array(relation.out_in)[rows])


def test_splits_of_a_weight_gradient():
    m1 = devices.profile("m1")

    def splits(edges, rows, channels, chip=m1):
        tile, shape = (
            metal_weight_grad.grad_tile(channels, channels),
            (27, channels, channels),
        )
        features = 4 * rows * channels
        found = edges, min(edges, rows), features, shape, tile, 2
        return metal_weight_grad.grad_splits(*found, chip)

    assert splits(100, 10, 64) == 1, "too few edges for a partial"
    assert splits(1_667_340, 100_000, 64) == 6, "as keep 48 places even"
    assert splits(1_667_340, 100_000, 128) == 7, "as keep features in cache"
    larger = devices.profile("m3-max")
    assert splits(1_667_340, 100_000, 64, larger) == 29, "five times the places"
    assert splits(1_667_340, 100_000, 1024) == 28, "partials of 8 times the features"
    features = 97_000 * (512 + 2048) * 2
    facts = 180_000, 97_000, features, (27, 512, 2048), (128, 64), 2
    assert metal_weight_grad.grad_splits(*facts, m1) == 14, (
        "as keep one offset's narrower side in cache"
    )
