"""Small detectors, and a scene of two elements for them."""

import mlx.core as mx
import numpy as np

import mlx_lattice as ml
from mlx_lattice import models

GRID = models.GridRecipe((0.5, 0.5, 0.25), (0, 0, -3, 16, 16, 3), max_points=5)
HEADS = (("car", "van"), ("man",))
BRANCHES = tuple((n, c, 2) for n, c in (("center", 2), ("center_z", 1), ("dim", 3)))
BRANCHES += (("rot", 2, 2), ("vel", 2, 2))
WIDTHS = (3, 4, 4, 5, 5)
NETS = {
    "CenterPoint": lambda **more: models.CenterPoint(
        GRID,
        HEADS,
        WIDTHS,
        layer_nums=(1, 1),
        num_filters=(4, 5),
        num_upsample_filters=(4, 3),
        shared_channels=6,
        **({"branches": BRANCHES} | more),
    ),
    "VoxelNeXt": lambda **more: models.VoxelNeXt(
        GRID, HEADS, WIDTHS, 6, **({"branches": BRANCHES} | more)
    ),
}


def randomised(net):
    """Norms that differ from one another, and running statistics."""
    for name, module in net.named_modules():
        if "running_var" in module:
            shape = module.weight.shape
            module.weight = mx.random.uniform(0.5, 1.5, shape)
            module.bias = 0.3 * mx.random.normal(shape)
            module.running_var = mx.random.uniform(0.5, 2, shape)
            module.running_mean = 0.3 * mx.random.normal(shape)
        assert name is not None
    return net


def scene(count=150):
    """A batch of two, elements contiguous."""
    rng = np.random.default_rng(0)
    cells = rng.permutation(2 * np.prod(GRID.spatial_shape))[:count]
    coords = np.stack(np.unravel_index(np.sort(cells), (2, *GRID.spatial_shape)), 1)
    feats = rng.normal(size=(count, 4))
    x = ml.SparseTensor(
        mx.array(coords.astype(np.int32)),
        mx.array(feats.astype(np.float32)),
        spatial_shape=GRID.spatial_shape,
        batch_size=2,
    )
    return coords, feats.astype(np.float32).astype(np.float64), x
