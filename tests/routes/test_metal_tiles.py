"""How Metal's planner cuts tiles, sorts rows by region and splits weight gradients."""

import numpy as np
from conftest import KINDS, pair
from metal_checks import checked, host

from mlx_lattice import devices
from mlx_lattice.backends.metal import tiles as metal_tiles
from mlx_lattice.backends.metal import weight_grad as metal_weight_grad

host.require()


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
