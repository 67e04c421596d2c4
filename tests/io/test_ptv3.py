"""Point Transformer V3: published checkpoints give their features.

Reads `shared/oracle/nets` beside the checkout: weights and outputs of the nets.
"""

import json

import mlx.core as mx
import numpy as np
import pytest
from published_cases import assert_close, case_of, difference, weights_of

import mlx_lattice as ml
from mlx_lattice import cli, models, ops
from mlx_lattice.io import import_checkpoint, load_state

FORMS = {"ptv3m1": "m1", "ptv3m2": "m2", "sonata_enc": "m2", "utonia_enc": "m3"}


def imported(name: str, prefix: str = ""):
    """The net with its published weights, a tensor, positions and the case's arrays."""
    case, config = case_of(name)
    net = models.PTv3.of_config(config, FORMS[name]).eval()
    state = load_state(weights_of(name))
    state = {prefix + key: array for key, array in state.items()}
    assert import_checkpoint(state, net, "spconv").complete
    x = ml.SparseTensor(mx.array(case["coords"]), mx.array(case["feats"]))
    return net, x, mx.array(case["coord"]), case


def close(actual, expected, order=slice(None)):
    """Within the error that the cases allow; rows of ``expected`` put in order."""
    assert_close(actual, np.asarray(expected)[order])


def sorted_rows(coords):
    return np.lexsort(coords.T[::-1])


@pytest.mark.parametrize("name", ("ptv3m1", "ptv3m2"))
def test_scores_of_the_published_net(name):
    net, x, places, case = imported(name)
    y = net(x, places)
    assert y.key == x.key
    close(y.feats, case["out/logits"])


@pytest.mark.parametrize("name", ("sonata_enc", "utonia_enc"))
def test_features_of_the_published_encoder(name):
    net, x, places, case = imported(name)
    y = net(x, places)
    order = sorted_rows(case["out/coords"])
    assert np.array_equal(np.array(y.coords), case["out/coords"][order])
    close(y.feats, case["out/y"], order)
    close(net.upcast(net.encode(x, places)).feats, case["out/upcast"])


@pytest.mark.parametrize("name", FORMS)
def test_each_level_of_the_published_net(name):
    """Cells, curves and features of the encoder's levels, matched row by row."""
    net, x, places, case = imported(name)
    levels = net._levels(x, places)
    for s, (level, y) in enumerate(zip(levels, net.encode(x, places), strict=True)):
        coords = case[f"mid/enc{s}/coords"]
        order = sorted_rows(coords) if s else np.arange(len(coords))
        assert np.array_equal(np.array(y.coords), coords[order])
        close(y.feats, case[f"mid/enc{s}/feats"], order)
        assert level.bits == case[f"mid/enc{s}/depth"]
        for i, curve in enumerate(net.order):
            along = ops.curve_order(y, curve, bits=level.bits)
            published = case[f"mid/enc{s}/order"][i]
            assert np.array_equal(order[np.array(along)], published)
            # Theirs is 32 bits here; the batch is above the place.
            code = np.array(ops.curve_code(y, curve, bits=level.bits))
            code += coords[order][:, 0].astype(np.int64) << 3 * level.bits
            assert np.array_equal(code, case[f"mid/enc{s}/code"][i][order])


LEGACY = "ptv3_v151"  # by the code that the released weights were trained with


def test_a_folder_of_weights_of_pointcept_1_5_1(tmp_path, capsys):
    """As ``--about`` says, or ``--legacy``; without either the scores are others."""
    case, config = case_of(LEGACY)
    config = {k: v for k, v in config.items() if k not in ("family", "variant")}
    path, folder = tmp_path / "config.json", tmp_path / "net"
    path.write_text(json.dumps(config))
    line = f"convert {weights_of(LEGACY)} {folder} --library spconv --model ptv3-m1"
    command = [*line.split(), "--config", str(path)]
    x = ml.SparseTensor(mx.array(case["coords"]), mx.array(case["feats"]))

    def error() -> float:
        y = models.from_pretrained(folder)(x).feats
        return difference(y, case["out/feat"])

    assert cli.main([*command, "--legacy"]) == 0 and error() < 1e-6
    net = models.from_pretrained(folder)
    net.save_pretrained(folder)
    assert error() < 1e-6
    assert cli.main(command) == 0 and error() > 0.1
    net = models.PTv3.of_config(config, "m1", legacy=True).eval()
    import_checkpoint(weights_of(LEGACY), net, "spconv")
    assert difference(net(x).feats, case["out/feat"]) < 1e-6
    file = [*command[:2], str(tmp_path / "a.safetensors"), *command[3:]]
    assert cli.main([*file, "--legacy"]) == 2
    assert "--legacy is for folders" in capsys.readouterr().err


def test_the_names_of_a_module_on_several_gpus():
    net, x, places, case = imported("ptv3m1", "module.")
    close(net(x, places).feats, case["out/logits"])


def test_a_folder_of_a_published_checkpoint(tmp_path, capsys):
    """The command line, with the configuration that was published."""
    net, x, places, case = imported("ptv3m2")
    config, folder = tmp_path / "config.json", tmp_path / "net"
    config.write_text(str(case["config"]))
    line = f"convert {weights_of('ptv3m2')} {folder} --library spconv"
    command = [*line.split(), "--model", "ptv3-m2", "--config", str(config)]
    assert cli.main([*command, "--about", "ptv3-scannet"]) in (0, None)
    assert "models.from_pretrained" in capsys.readouterr().out
    read = models.from_pretrained(folder)
    assert read.variant == "m2" and read.about.voxels.from_zero
    close(read(x).feats, case["out/logits"])
