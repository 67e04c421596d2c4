"""One value that is not finite costs one point, and never the scan."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_lattice import cli, io, models
from mlx_lattice.io.points import write_ply

N = 2000
RNG = np.random.default_rng(0)
POINTS = RNG.uniform(-6, 6, (N, 3)).astype("f4")
ATTRIBUTES = {
    "intensity": RNG.uniform(0, 1, N).astype("f4"),
    "colours": RNG.uniform(0, 255, (N, 3)).astype("f4"),
}
RECIPE = models.VoxelRecipe(
    0.3, ("colours", "intensity", "height"), reduce="mean", centred=True
)
GRID = models.GridRecipe(
    (0.4, 0.4, 0.25),
    (-6.4, -6.4, -6, 6.4, 6.4, 6),
    ("x", "y", "z", "intensity"),
    5,
    16_000,
)
FAULTS = {
    "intensity": ("intensity", 7),
    "a colour": ("colours", (7, 1)),
    "a coordinate": ("points", (7, 2)),
}


@pytest.fixture(params=(np.nan, np.inf, -np.inf), ids=str, name="value")
def each_value(request):
    return request.param


def with_fault(fault, value, dtype=np.float32):
    name, at = FAULTS[fault]
    scan = {"points": POINTS, **ATTRIBUTES}
    scan = {key: array.astype(dtype) for key, array in scan.items()}
    scan[name][at] = value
    return scan.pop("points"), scan


def without(row):
    keep = np.arange(N) != row
    return POINTS[keep], {name: array[keep] for name, array in ATTRIBUTES.items()}


def same(x, y):
    return mx.array_equal(x.coords, y.coords) and mx.array_equal(x.feats, y.feats)


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
@pytest.mark.parametrize("fault", FAULTS)
def test_voxels_are_those_without_the_point(fault, value, dtype):
    points, attributes = with_fault(fault, value, dtype)
    with pytest.warns(UserWarning, match="1 of 2,000 points left out: not finite in"):
        voxels = RECIPE(points, attributes)
    x, rows = voxels
    wanted = RECIPE(
        *(np.asarray(a, dtype) if i == 0 else a for i, a in enumerate(without(7)))
    )
    assert same(x, wanted.x) and voxels.dropped == 1 and wanted.dropped == 0
    assert rows[7].item() == -1
    assert np.array_equal(np.delete(np.array(rows), 7), np.array(wanted.rows))


@pytest.mark.parametrize("max_points", (5, None))
@pytest.mark.parametrize("fault", ("intensity", "a coordinate"))
def test_voxels_of_a_grid(fault, value, max_points):
    grid = models.GridRecipe(
        GRID.voxel_size, GRID.point_range, GRID.features, max_points, None
    )
    with pytest.warns(UserWarning, match="1 of 2,000 points left out: not finite in"):
        x = grid(*with_fault(fault, value))
    assert same(x, grid(*without(7)))


def test_all_points_may_be_left_out():
    with pytest.warns(UserWarning, match="2,000 of 2,000 points left out"):
        voxels = RECIPE(np.full((N, 3), np.nan), ATTRIBUTES)
    assert len(voxels.x) == 0 and voxels.dropped == N
    assert (np.array(voxels.rows) == -1).all()
    with pytest.warns(UserWarning, match="2,000 of 2,000 points left out"):
        assert len(GRID(POINTS, {"intensity": np.full(N, np.nan)})) == 0


def segmentor():
    mx.random.seed(0)
    net = models.SpUNet(5, 3, 8, (8, 8), layers=(1, 1)).eval()
    net.about = models.About(RECIPE)
    return net


def detector():
    mx.random.seed(0)
    decoding = {"max_boxes": 30, "limit_range": GRID.point_range}
    heads = (("car",), ("person",))
    return models.VoxelNeXt(GRID, heads, (8,) * 5, 8, decoding=decoding).eval()


@pytest.mark.parametrize("fault", FAULTS)
def test_scores_of_points_name_the_point(fault, value):
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(ValueError, match="intensity.* must be finite.*; point 7 and 0"),
    ):
        segmentor().score_points(*with_fault(fault, value))


def test_boxes_are_those_without_the_point(value):
    net = detector()
    with pytest.warns(UserWarning, match="left out"):
        found = net.detect_points(*with_fault("intensity", value))
    wanted = net.detect_points(*without(7))
    assert len(found.scores)
    for ours, theirs in zip(found, wanted, strict=True):
        assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("make", (segmentor, detector))
def test_scores_that_are_nan_raise(make):
    net = make()
    net.update(tree_map(lambda a: a * mx.nan, net.parameters()))
    call = getattr(net, "score_points", None) or net.detect_points
    with pytest.raises(ValueError, match="the net's scores are NaN"):
        call(POINTS, ATTRIBUTES)


@pytest.mark.parametrize("make", (segmentor, detector))
def test_the_commands_count_the_points(make, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    command = "segment" if make is segmentor else "detect"
    make().save_pretrained(tmp_path / "net")
    points, attributes = with_fault("intensity", np.nan)
    np.savez(tmp_path / "scan.npz", points=points, **attributes)
    given = ["scan.npz", "--model", "net", "--out", "out"]
    given = [str(tmp_path / g) if g[0] != "-" else g for g in given]
    assert cli.main([command, *given]) == 0
    printed = capsys.readouterr().err
    assert "scan.npz: 1 points left out" in printed and "1,999 points ->" in printed
    np.savez(tmp_path / "scan.npz", points=points * np.nan, **attributes)
    assert cli.main([command, *given]) == 1
    assert "no points" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ("npy", "npz", "csv", "bin", "pcd", "ply"))
def test_files(kind, value, tmp_path):
    """Each format; the points, the count, and each attribute of the others."""
    path = tmp_path / f"scan.{kind}"
    intensity = ATTRIBUTES["intensity"][:20].copy()
    intensity[7] = value
    table = np.column_stack([POINTS[:20], intensity])
    if kind == "npy":
        np.save(path, table)
    elif kind == "npz":
        np.savez(path, points=table[:, :3], intensity=intensity.astype("f8"))
    elif kind == "csv":
        np.savetxt(path, table, delimiter=",", header="x,y,z,intensity")
    elif kind == "bin":
        table.tofile(path)
    elif kind == "pcd":
        header = "VERSION 0.7\nFIELDS x y z intensity\nSIZE 4 4 4 4\nTYPE F F F F\n"
        header += "WIDTH 20\nHEIGHT 1\nPOINTS 20\nDATA binary\n"
        path.write_bytes(header.encode() + table.tobytes())
    else:
        names = [*"xyz", "intensity"]
        write_ply(path, dict(zip(names, table.T, strict=True)))
    cloud = io.read_points(path)
    assert cloud.dropped == 1 and len(cloud) == 19
    keep = np.arange(20) != 7
    assert np.allclose(cloud.points, POINTS[:20][keep])
    assert np.allclose(cloud.attributes["intensity"], intensity[keep])
