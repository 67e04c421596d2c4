"""Arrays that begin anywhere: slices of flat ones reach kernels as they are, uncopied.

They are aligned to an element and to no more, so nothing may be read 16 bytes at once
without a look at where it stands. On the host, kernels of Metal run with all checks.
"""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
import reference_rows as ref_rows
from conftest import (
    KINDS,
    assert_same,
    build,
)
from contractions import moved

import mlx_lattice as ml
from mlx_lattice import devices, ops
from mlx_lattice.geometry.points import reduce_segments

POOLS = {"max": ops.max_pool3d, "sum": ops.sum_pool3d, "avg": ops.avg_pool3d}


@pytest.fixture(autouse=True)
def checked():
    """Nothing is read from where a vector may not stand."""
    if not devices.metal_on_host():
        yield
        return
    from metal_checks import host

    with host.recording(checked=True) as record:
        yield
    assert not record.report.faults, "\n".join(map(str, record.report.faults[:5]))


def exact(array: mx.array) -> np.ndarray:
    return ref.to_numpy(array).astype(np.float64)


def features(n, channels, dtype, seed=0):
    """Features as a view, and in float64."""
    x = moved(mx.array(cases.features(n, channels, seed)).astype(getattr(mx, dtype)))
    return x, exact(x)


# Reductions


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("channels", (3, 16))
@pytest.mark.parametrize("mode", POOLS)
def test_pooling(mode, channels, dtype):
    coords = cases.geometry("negative", 3, 60)
    rng = np.random.default_rng(0)
    # Distinct in every dtype, so that no maximum is tied.
    values = [rng.permutation(len(coords)) - 20.0 for _ in range(channels)]
    values = mx.array(np.stack(values, axis=1)).astype(getattr(mx, dtype))
    x = ml.SparseTensor(mx.array(coords), moved(values))
    relation = ref.relation("forward", coords, kernel_size=3, stride=2)
    dy, dy_exact = features(len(relation.out_coords), channels, dtype, 1)

    def pooled(feats):
        return POOLS[mode](x.replace(feats), 3, 2).feats

    (y,), (dx,) = mx.vjp(pooled, [x.feats], [dy])
    ref.assert_close(y, ref_rows.pool(exact(values), relation, mode), dtype)
    wanted = ref_rows.pool_grad(exact(values), dy_exact, relation, mode)
    ref.assert_close(dx, wanted, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("channels", (3, 16))
def test_segments(channels, dtype):
    of = np.random.default_rng(0).integers(0, 7, 60).astype(np.int32)
    x, values = features(len(of), channels, dtype)
    rows = moved(of)
    members = [values[of == s] for s in range(7)]
    for reduce in ("sum", "mean", "max"):
        y = reduce_segments(x, rows, 7, reduce)
        wanted = np.array([getattr(np, reduce)(m, axis=0) for m in members])
        ref.assert_close(y, wanted, dtype, reduce)
    dy, dy_exact = features(7, channels, dtype, 1)
    _, (dx,) = mx.vjp(lambda x: reduce_segments(x, rows, 7, "sum"), [x], [dy])
    ref.assert_close(dx, dy_exact[of], dtype)
    ref.assert_close(ops.devoxelize(dy, rows), dy_exact[of], dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_voxelising(dtype):
    rng = np.random.default_rng(0)
    points = rng.standard_normal((200, 3)).astype(np.float32)
    batch = rng.integers(0, 3, 200).astype(np.int32)
    feats, values = features(len(points), 16, dtype)
    x = ml.SparseTensor.from_points(
        moved(points), feats, voxel_size=0.5, batch=moved(batch)
    )
    coords, means, *_ = ref_rows.voxelise(points, values, voxel_size=0.5, batch=batch)
    np.testing.assert_array_equal(np.array(x.coords), coords)
    ref.assert_close(x.feats, means, dtype)


# Index tables and coordinates


@pytest.mark.parametrize("before", (1, 2, 3))
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_coordinates(case, before):
    coords = cases.for_case(case, "negative", 60)
    target = case.target(coords) if case.needs_target else None
    sets = [moved(coords, before)] + ([] if target is None else [moved(target, before)])
    assert_same(build(case, *sets), case.reference(coords, target))
