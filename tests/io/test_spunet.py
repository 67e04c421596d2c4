"""Pointcept's SpUNet: a published spconv checkpoint gives its features.

Reads `shared/oracle/nets` beside the checkout: weights and outputs of the net itself.
"""

import mlx.core as mx
import numpy as np
import pytest
from published_cases import case_of, difference, weights_of

import mlx_lattice as ml
from mlx_lattice import models
from mlx_lattice.io import import_checkpoint, load_state

NAMES = ("spunet", "spunet_far", "spunet_enc")


def imported(name: str, prefix: str = "", **options) -> tuple[models.SpUNet, dict]:
    """The net with its published weights, and the case's arrays."""
    case, config = case_of(name)
    net = models.SpUNet(**config).eval()
    state = load_state(weights_of(name))
    state = {prefix + key: array for key, array in state.items()}
    assert import_checkpoint(state, net, "spconv", **options).complete
    return net, case


def error(net: models.SpUNet, case: dict) -> float:
    """Relative error of the net's output, at the rows or of the elements."""
    x = ml.SparseTensor(mx.array(case["coords"]), mx.array(case["feats"]))
    y = net(x)
    if not net.enc_mode:
        assert mx.array_equal(y.coords, x.coords)
        y = y.feats
    assert tuple(y.shape) == case["out/y"].shape
    return difference(y, case["out/y"])


@pytest.mark.parametrize("name", NAMES)
def test_output_of_the_published_net(name):
    net, case = imported(name)
    assert error(net, case) <= 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_each_level_of_the_published_net(name):
    """Stages' features at their coordinates, matched row by row."""
    net, case = imported(name)
    x = ml.SparseTensor(mx.array(case["coords"]), mx.array(case["feats"]))
    y, seen = net.conv_input(x), {}
    for i, (down, stage) in enumerate(zip(net.down, net.enc, strict=True)):
        y = stage(down(y))
        seen[f"enc{i}"] = y
    assert {f"mid/{level}/feats" for level in seen} <= set(case)
    for level, y in seen.items():
        coords = case[f"mid/{level}/coords"]
        order = np.lexsort(coords.T[::-1])
        assert np.array_equal(np.array(y.coords), coords[order])
        assert difference(y.feats, case[f"mid/{level}/feats"][order]) <= 2e-5


@pytest.mark.parametrize("prefix", ("backbone.", "module.backbone."))
def test_the_names_of_a_segmentor(prefix):
    """Pointcept saves a segmentor, on several GPUs a module of it."""
    net, case = imported("spunet_far", prefix)
    assert error(net, case) <= 2e-5


def test_its_unit_kernels_taken_as_shaped_are_wrong():
    net, case = imported("spunet", unit_as_shaped=True)
    assert error(net, case) > 0.1
