"""Points to voxels, by the generators of spconv 2 and 1."""

import numpy as np
import pytest
from torch_scenes import torch

from mlx_lattice.compat.cumm import tensorview as tv
from mlx_lattice.compat.spconv import utils
from mlx_lattice.compat.spconv.pytorch.utils import (
    PointToVoxel,
    gather_features_by_pc_voxel_id,
)

SIZE, BOX = [0.5, 1.0, 2.0], [-2.0, -3.0, -4.0, 2.0, 3.0, 4.0]


def points_of(count=400, seed=0, columns=4):
    rng = np.random.default_rng(seed)
    points = rng.uniform(-4.5, 4.5, (count, columns)).astype(np.float32)
    points[::7] = points[3]  # a full voxel
    return points


def one_by_one(points, most_voxels, most_points, mean=False):
    """The definition: a point after another."""
    low, high, size = np.array(BOX[:3]), np.array(BOX[3:]), np.array(SIZE)
    extents, known, voxels, ids = np.round((high - low) / size), {}, [], []
    for point in points:
        cell = np.floor((point[:3] - low.astype("f")) / size.astype("f"))
        key = tuple(int(c) for c in cell[::-1])
        if (cell < 0).any() or (cell >= extents).any():
            ids.append(-1)
            continue
        if key not in known:
            if len(known) == most_voxels:
                ids.append(-1)
                continue
            known[key] = len(known)
            voxels.append([])
        ids.append(known[key])
        if len(voxels[known[key]]) < most_points:
            voxels[known[key]].append(point)
    filled = np.zeros((len(voxels), most_points, points.shape[1]), np.float32)
    for row, some in zip(filled, voxels, strict=True):
        row[: len(some)] = some
        if mean:
            row[len(some) :] = np.mean(some, axis=0)
    cells = np.array(list(known), dtype=np.int32).reshape(-1, 3)
    return filled, cells, np.array([len(v) for v in voxels]), np.array(ids)


@pytest.mark.parametrize("most", ((1000, 5), (20, 3), (1, 1)))
@pytest.mark.parametrize("mean", (False, True))
def test_points_to_voxels(most, mean):
    points = points_of()
    made = PointToVoxel(SIZE, BOX, 4, *most, device=torch.device("cpu"))
    assert made.grid_size == [4, 6, 8] and made.vsize == SIZE[::-1]
    found = made.generate_voxel_with_id(torch.from_numpy(points), empty_mean=mean)
    for got, expected in zip(found, one_by_one(points, *most, mean), strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert [a.dtype for a in found] == [
        torch.float32, torch.int32, torch.int32, torch.int64,
    ]  # fmt: skip
    assert len(made(torch.from_numpy(points))) == 3


def test_results_go_back_to_points():
    points = points_of()
    made = PointToVoxel(SIZE, BOX, 4, 15, 5)
    voxels, _, _, ids = made.generate_voxel_with_id(torch.from_numpy(points))
    values = torch.randn(len(voxels), 3)
    found = gather_features_by_pc_voxel_id(values, ids)
    assert torch.equal(found[ids >= 0], values[ids[ids >= 0]])
    assert (found[ids < 0] == 0).all()
    other = gather_features_by_pc_voxel_id(values.argmax(1), ids, invalid_value=-1)
    assert (other[ids < 0] == -1).all()


def test_the_generator_of_tensorviews():
    points = points_of()
    made = utils.Point2VoxelCPU3d(
        vsize_xyz=SIZE,
        coors_range_xyz=BOX,
        num_point_features=4,
        max_num_points_per_voxel=5,
        max_num_voxels=1000,
    )
    assert made.grid_size == [4, 6, 8]
    for mean, name in ((False, "point_to_voxel"), (True, "point_to_voxel_empty_mean")):
        found = getattr(made, name)(tv.from_numpy(points))
        expected = one_by_one(points, 1000, 5, mean)
        for got, other in zip(found, expected[:3], strict=True):
            np.testing.assert_allclose(got.numpy(), other, rtol=1e-5, atol=1e-6)
    flat = utils.Point2VoxelCPU2d([1.0, 1.0], [0.0, 0, 3, 2], 2, 10, 2)
    cells = flat.point_to_voxel(np.array([[2.5, 0.5], [0.1, 1.9]]))[1]
    assert cells.numpy().tolist() == [[0, 2], [1, 0]]


def test_the_generators_of_spconv_1():
    points = points_of()
    expected = one_by_one(points, 1000, 5)
    made = utils.VoxelGeneratorV2(
        voxel_size=SIZE, point_cloud_range=BOX, max_num_points=5, max_voxels=1000
    )
    found = made.generate(points)
    names = "voxels", "coordinates", "num_points_per_voxel"
    for name, other in zip(names, expected[:3], strict=True):
        assert isinstance(found[name], np.ndarray)
        np.testing.assert_allclose(found[name], other)
    assert found["voxel_num"] == len(expected[0])
    assert found["voxel_point_mask"].sum() == expected[2].sum()
    assert made.grid_size.tolist() == [8, 6, 4] and made.max_num_points_per_voxel == 5
    assert len(made.generate(points, max_voxels=7)["voxels"]) == 7
    old = utils.VoxelGenerator(SIZE, BOX, 5, 1000, full_mean=False)
    for got, other in zip(old.generate(points), expected[:3], strict=True):
        np.testing.assert_allclose(got, other)


def test_no_points_and_points_that_are_not_finite():
    made = PointToVoxel(SIZE, BOX, 3, 10, 5)
    found = made.generate_voxel_with_id(torch.zeros(0, 3))
    assert [len(a) for a in found] == [0] * 4
    points = torch.tensor([[float("nan"), 0, 0], [float("inf"), 0, 0], [0, 0, 0]])
    assert made.generate_voxel_with_id(points)[3].tolist() == [-1, -1, 0]


def test_errors():
    made = PointToVoxel(SIZE, BOX, 3, 10, 5)
    with pytest.raises(ValueError, match=r"must have shape \(N, 3\)"):
        made(torch.zeros(4, 2))
    with pytest.raises(AssertionError, match="made for cpu"):
        made(torch.zeros(4, 3, device="meta"))
    with pytest.raises(ValueError, match="6 values"):
        PointToVoxel(SIZE, BOX[:3], 3, 10, 5)
    with pytest.raises(NotImplementedError, match="block_filtering"):
        utils.VoxelGeneratorV2(SIZE, BOX, 5, block_filtering=True)
    with pytest.raises(NotImplementedError, match="torch.zeros"):
        tv.zeros([2], device=0)
    assert tv.zeros([2, 3]).shape == (2, 3)
