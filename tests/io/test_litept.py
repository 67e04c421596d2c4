"""LitePT gives the outputs and gradients of its own code.

`data/litept.npz` is from prs-eth/LitePT at 0797098, `litept/model.py`, run in float64
on the CPU with small sizes, every level's curves in their order, and attention in
float64 where that code casts to half. Its spconv, torch_scatter, flash_attn and
PointROPE were replaced by their definitions. Weights are `weights_of` the names and
shapes of its state dict; gradients are of ``(y * dy).sum()``.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from foreign_nets import filled
from mlx.utils import tree_flatten
from published_cases import assert_close, assert_gradients, difference

import mlx_lattice as ml
from mlx_lattice import cli, models
from mlx_lattice.io import import_checkpoint

CASES = ("segment", "instance")
WITHIN, GRADIENTS = 1e-6, 5e-6


def case_of(name):
    with np.load(Path(__file__).parent / "data/litept.npz") as file:
        case = {k.partition("/")[2]: file[k] for k in file if k.startswith(f"{name}/")}
    about = json.loads(str(case.pop("about")))
    state = filled(about["shapes"], CASES.index(name))
    state = {k: v * 0.5 if v.ndim > 1 else v for k, v in state.items()}
    x = ml.SparseTensor(mx.array(case["coords"]), mx.array(case["feats"]))
    return case, about, state, x


def imported(config, state):
    net = models.LitePT.of_config(config)
    assert import_checkpoint(state, net, "spconv").complete
    return net.eval()


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_of_the_published_net(name):
    case, about, state, x = case_of(name)
    net = imported(about["config"], state)
    assert_close(net(x).feats, case["y"], WITHIN)

    def loss(parameters, feats):
        net.update(parameters)
        return (net(x.replace(feats)).feats * mx.array(case["dy"])).sum()

    parameters = net.trainable_parameters()
    found, dx = mx.grad(loss, argnums=(0, 1))(parameters, x.feats)
    assert_close(dx, case["dx"], GRADIENTS)
    found = {k.replace(".layers.", "."): v for k, v in tree_flatten(found)}
    assert_gradients(found, about["grads"], GRADIENTS)


@pytest.mark.parametrize("name", CASES)
def test_the_encoder_of_a_segmentor_s_checkpoint(name):
    case, about, state, x = case_of(name)
    state = {f"backbone.{k}": v for k, v in state.items() if not k.startswith("dec.")}
    net = imported(about["config"] | {"enc_mode": True}, state)
    y = net(x)
    assert np.array_equal(np.array(y.coords), case["enc_coords"])
    assert_close(y.feats, case["enc"], WITHIN)
    assert net.upcast(net.encode(x)).channels == sum(about["config"]["enc_channels"])


def test_a_folder_by_the_command(tmp_path):
    case, about, state, x = case_of("segment")
    head = {"weight": mx.ones((3, 12)), "bias": mx.zeros((3,))}
    state = {f"module.backbone.{name}": value for name, value in state.items()}
    state |= {f"module.seg_head.{name}": value for name, value in head.items()}
    mx.save_safetensors(str(tmp_path / "a.safetensors"), state)
    config = tmp_path / "config.json"
    backbone = about["config"] | {"type": "LitePT", "pre_norm": True, "attn_drop": 0.0}
    config.write_text(json.dumps({"num_classes": 3, "backbone": backbone}))
    line = f"convert {tmp_path / 'a.safetensors'} {tmp_path / 'net'} --library spconv"
    assert cli.main([*line.split(), "--model", "litept", "--config", str(config)]) == 0
    net = models.from_pretrained(tmp_path / "net")
    assert isinstance(net, models.LitePT) and net.dtype == mx.float32
    sums = case["y"].sum(axis=1, keepdims=True)
    assert difference(net(x).feats, np.repeat(sums, 3, axis=1)) < 1e-5


# Parameters of the published configurations' backbones, by that code.
PARAMETERS = {
    "small": 12_712_932,
    "small*": 15_988_716,
    "base": 45_112_788,
    "large": 85_880_448,
}


@pytest.mark.parametrize("size", PARAMETERS)
def test_the_published_sizes(size):
    net = models.LitePT(6, size=size)
    assert (
        sum(p.size for _, p in tree_flatten(net.trainable_parameters()))
        == (PARAMETERS[size])
    )


def test_training_shuffles_curves_and_drops_branches():
    _, about, state, x = case_of("segment")
    net = imported(about["config"], state).train()
    assert difference(net(x).feats, np.array(net(x).feats)) > 1e-3
    net.eval()
    assert mx.array_equal(net(x).feats, net(x).feats)


def test_what_is_refused():
    with pytest.raises(TypeError, match="LitePT has no enc_width; settings of levels"):
        models.LitePT(4, enc_width=(1,))
    with pytest.raises(ValueError, match="size must be one of"):
        models.LitePT(4, size="tiny")
    with pytest.raises(ValueError, match="a multiple of 6 channels; level 3 has 250"):
        models.LitePT(4, enc_channels=(36, 72, 144, 250, 504))
    with pytest.raises(ValueError, match="5 entries in the encoder and 4"):
        models.LitePT(4, enc_conv=(True,))
    with pytest.raises(ValueError, match="LitePT does not do pre_norm=False"):
        models.LitePT.of_config({"pre_norm": False})
    x = ml.SparseTensor(mx.array([[0, -1, 0, 0]]), mx.ones((1, 4)))
    with pytest.raises(ValueError, match="count from 0"):
        models.LitePT(4)(x)
