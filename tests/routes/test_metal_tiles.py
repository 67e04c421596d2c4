"""How Metal's planner cuts tiles, sorts rows by region and splits weight gradients."""

import cases
import numpy as np
import pytest
from conftest import KINDS, pair
from metal_checks import checked, host

from mlx_lattice.backends import dispatch_bounds, metal_tiles
from mlx_lattice.routes import thresholds

host.require()


@pytest.mark.parametrize("share", (0.6, 0.2), ids=("whole", "cut"))
def test_regions_are_dispatched_whole_where_they_fit(share, monkeypatch):
    both = pair(cases.Case("submanifold", 2, 3), "block", 300)
    work = both[0].n_edges * 3 * 6
    monkeypatch.setattr(
        dispatch_bounds, "matrix_limit", lambda device: int(share * work)
    )
    monkeypatch.setitem(thresholds.REGION_ROWS, "256", {"*": 128})
    monkeypatch.setitem(thresholds.FILLING, "*", 1)
    count = -(-both[0].n_out // 64)
    pieces, cut = metal_tiles.dispatches(count, 6, work)
    assert cut == (share == 0.2) and sum(length for _, length in pieces) == count
    assert cut or all(first % 2 == 0 for first, _ in pieces)
    assert len(pieces) > 1


def test_rows_are_sorted_by_region(monkeypatch):
    monkeypatch.setitem(thresholds.REGION_ROWS, "256", {"*": 64})
    relation, _ = pair(KINDS[0], n=200)
    view = checked(metal_tiles.tiles, relation, 16)
    rows = np.array(view.rows)
    assert (np.sort(rows) == np.arange(relation.n_out)).all()
    assert (np.diff(rows // 64) >= 0).all()
    np.testing.assert_array_equal(view.table, np.array(relation.out_in)[rows])


def test_parts_of_a_weight_gradient():
    def parts(edges, rows, channels):
        shape, tiles = (27, channels, channels), (-(-channels // 64)) ** 2
        return metal_tiles.grad_parts(edges, 4 * rows * channels, shape, tiles)

    assert parts(100, 10, 64) == 1, "too few edges for a partial"
    assert parts(1_667_340, 100_000, 64) == 11, "as fill the GPU"
    assert parts(1_667_340, 100_000, 128) == 8, "as keep features in cache"
    assert parts(1_667_340, 100_000, 1024) == 28, "partials of 8 times the features"
    features = 97_000 * (512 + 2048) * 2
    wide = metal_tiles.grad_parts(957_000, features, (27, 512, 2048), 4 * 32)
    assert wide == 16, "as keep one offset's narrower side in cache"
