"""U-nets of MinkowskiEngine and torchsparse: published checkpoints give their features.

Reads `shared/oracle/nets` beside the checkout: weights and outputs of the nets.
"""

import json

import foreign_arrays
import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import models
from mlx_lattice.io import import_checkpoint, load_state

NETS = foreign_arrays.FOLDER / "nets"


def minkowski(config):
    planes, layers = config["PLANES"], config["LAYERS"]
    options = {"stem_channels": config["INIT_DIM"], "dims": config["D"]}
    sizes = config["in_channels"], config["out_channels"], planes, layers
    return models.MinkUNet(*sizes, **options), "minkowski"


def torchsparse(config):
    net = models.MinkUNetTorchSparse(4, config["num_classes"], config["cr"])
    return net, "torchsparse"


def spvcnn(config):
    # Its points are counted in voxels of pres, its voxels are of vres.
    size = config["vres"] / config["pres"]
    net = models.SPVCNN(4, config["num_classes"], size, config["cr"])
    return net, "torchsparse"


CASES = {"minkunet14a": minkowski, "ts_minkunet": torchsparse, "spvcnn": spvcnn}


@pytest.mark.parametrize("name", CASES)
def test_features_of_the_published_net(name):
    if not (NETS / f"{name}.npz").exists():
        pytest.skip("no shared/oracle/nets beside the checkout")
    with np.load(NETS / f"{name}.npz") as file:
        case = dict(file)
    net, library = CASES[name](json.loads(str(case["config"])))
    state = load_state(NETS / f"{name}.safetensors")
    assert import_checkpoint(state, net.eval(), library).complete
    coords, feats = mx.array(case["coords"]), mx.array(case["feats"])
    if name == "spvcnn":
        y = net(coords[:, 1:].astype(mx.float32), feats, coords[:, 0])
    else:
        x = ml.SparseTensor(coords, feats)
        y = net(x)
        assert y.key == x.key
        y = y.feats
    expected = case["out/y"].astype(np.float64)
    apart = np.array(y, np.float64) - expected
    assert np.linalg.norm(apart) <= 2e-5 * np.linalg.norm(expected)
