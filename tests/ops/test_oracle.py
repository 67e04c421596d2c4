"""Arrays that other libraries made, reproduced through the public API.

Every file of `shared/oracle`, beside the checkout, is a test id, and so is every case
inside the files of a library. Rows are matched by coordinates.
"""

import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from foreign_arrays import (
    OWN_SITES,
    TARGET_SITES,
    arrays,
    check,
    compare,
    library_weight,
    names,
    needs_folder,
    peer,
    peer_cases,
)

import mlx_lattice as ml
from mlx_lattice import ops


@pytest.mark.parametrize("layout", ("mlx", "flat"))
@pytest.mark.parametrize("file", names("dense_*.npz"))
def test_dense(file, layout):
    if layout == "mlx" or not file.startswith("dense_p"):
        check(arrays(file), "dense", layout, ordered=True)


@pytest.mark.parametrize(("file", "name"), peer_cases())
def test_peer(file, name):
    case = peer(file, name)
    sites = "dense" if case["same_set"] else OWN_SITES[file]
    if (file, name) in TARGET_SITES:
        sites = "target"
    check(case, sites, "flat")


@pytest.mark.parametrize("file", names("published_paddle_*.npz"))
def test_published_paddle(file):
    check(arrays(file), "dense", "mlx")


@needs_folder
@pytest.mark.parametrize(
    "file", ("dense_subm_k135", "dense_subm_k1", "published_paddle_subm2d_k133")
)
def test_subm_in_2d(file):
    """A kernel of extent 1 on the first axis is a 2D one on each of its planes."""
    case = arrays(file)
    b, i, j, k = case["coords"].T
    extent = int(case["spatial_shape"][0])
    coords = mx.array(np.stack([b * extent + i, j, k], axis=1))
    shape = tuple(case["spatial_shape"][1:].tolist())
    size = tuple(case["kernel"][1:].tolist())
    weight = mx.array(library_weight(case["w"][0], "mlx"))

    def run(feats, weight):
        x = ml.SparseTensor(coords, feats, spatial_shape=shape)
        return ops.subm_conv2d(x, weight, kernel_size=size).feats

    def loss(feats, weight):
        return (run(feats, weight) * mx.array(case["dy"])).sum()

    feats = mx.array(case["x"])
    tolerance = float(case["tol"]) if "tol" in case else None
    dx, dw = mx.grad(loss, argnums=(0, 1))(feats, weight)
    compare(run(feats, weight), case["y"], tolerance, "y")
    compare(dx, case["dx"], tolerance, "dx")
    compare(dw, library_weight(case["dw"][0], "mlx"), tolerance, "dw")


@needs_folder
def test_published_paddle_max_pool_in_2d():
    case = arrays("published_paddle_maxpool_k133_s2")
    coords = mx.array(case["coords"][:, [0, 2, 3]])
    x = ml.SparseTensor(coords, mx.array(case["x"]), spatial_shape=(4, 4))
    y = ops.max_pool2d(x, 3, stride=2, padding=0, support="reach")
    assert np.array(y.coords).tolist() == case["out_coords"][:, [0, 2, 3]].tolist()
    compare(y.feats, case["y"], float(case["tol"]), "y")


@needs_folder
@pytest.mark.parametrize(("name", "kernel"), (("33", (3, 3)), ("32", (3, 2))))
def test_published_minkowski_region(name, kernel):
    """The sites that a kernel covers around one centre, whatever their order."""
    case = arrays("published_me_region")
    centre = mx.array(case["center"][None].astype(np.int32))
    relation = ml.CoordinateManager().generative_relation(
        centre, kernel_size=kernel, stride=1
    )
    ref.by_coordinates(relation.out_coords, case[f"ks{name}_regions"])


@needs_folder
def test_published_minkowski_negative_stride():
    """Negative coordinates go down to the next multiple, in one dimension."""
    case = arrays("published_me_region")
    x = ml.SparseTensor(mx.array(case["neg_coords"]), mx.ones((7, 1)))
    y = ops.conv1d(x, mx.ones((1, 2, 1)), kernel_size=2, stride=2)
    expected = case["neg_stride2_out"] // [1, 2]
    assert np.array(y.coords).tolist() == expected.tolist()
    assert y.feats.sum().item() == 7, "with k = s every input is used once"


@pytest.mark.parametrize("channels", ((2, 4), (3, 3), (3, 9)), ids=str)
@pytest.mark.parametrize("d", (1, 2, 3))
def test_mlx_dense_convolution(d, channels):
    """MLX's own convolution on a full grid, with its own weight, is the last peer.

    With C_out = 3 or 9 the first axis of the weight is as long as the kernel's volume:
    that must not be taken for the layout (K, C_in, C_out).
    """
    shape, (c_in, c_out) = (5, 4, 6)[:d], channels
    rng = np.random.default_rng(d)
    grid = mx.array(rng.normal(size=(2, *shape, c_in)).astype(np.float32))
    weight = mx.array(rng.normal(size=(c_out, *(3,) * d, c_in)).astype(np.float32))
    dense = {1: mx.conv1d, 2: mx.conv2d, 3: mx.conv3d}[d]
    coords = mx.array(np.argwhere(np.ones((2, *shape))).astype(np.int32))
    x = ml.SparseTensor(coords, grid.reshape(-1, c_in), spatial_shape=shape)

    y = getattr(ops, f"subm_conv{d}d")(x, weight, kernel_size=3)
    expected = dense(grid, weight, padding=1).reshape(-1, c_out)
    ref.assert_close(y.feats, ref.to_numpy(expected), "float32", "submanifold")

    y = getattr(ops, f"conv{d}d")(
        x, weight, kernel_size=3, stride=2, padding=1, support="reach"
    )
    expected = dense(grid, weight, stride=2, padding=1).reshape(-1, c_out)
    ref.assert_close(y.feats, ref.to_numpy(expected), "float32", "strided")
