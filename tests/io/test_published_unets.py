"""U-nets of MinkowskiEngine and torchsparse: published checkpoints give their features.

Reads `shared/oracle/nets` beside the checkout: weights and outputs of the nets.
"""

import mlx.core as mx
import pytest
from published_cases import assert_close, case_of, weights_of

import mlx_lattice as ml
from mlx_lattice import models
from mlx_lattice.io import import_checkpoint, load_state


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
    case, config = case_of(name)
    net, library = CASES[name](config)
    state = load_state(weights_of(name))
    assert import_checkpoint(state, net.eval(), library).complete
    coords, feats = mx.array(case["coords"]), mx.array(case["feats"])
    if name == "spvcnn":
        y = net(coords[:, 1:].astype(mx.float32), feats, coords[:, 0])
    else:
        x = ml.SparseTensor(coords, feats)
        y = net(x)
        assert y.key == x.key
        y = y.feats
    assert_close(y, case["out/y"])
