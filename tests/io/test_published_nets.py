"""Published segmentation nets: their checkpoints give their features.

Reads `shared/oracle/nets` beside the checkout: weights and outputs of the nets.
"""

import json

import mlx.core as mx
import numpy as np
import pytest
from published_cases import assert_close, case_of, difference, weights_of

import mlx_lattice as ml
from mlx_lattice import cli, models
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


def spunet(config):
    return models.SpUNet(**config), "spconv"


def ptv3(variant):
    return lambda config: (models.PTv3.of_config(config, variant), "spconv")


NETS = {"minkunet14a": minkowski, "ts_minkunet": torchsparse, "spvcnn": spvcnn}
NETS |= dict.fromkeys(("spunet", "spunet_far", "spunet_enc"), spunet)
PTV3 = {"ptv3m1": "m1", "ptv3m2": "m2", "sonata_enc": "m2", "utonia_enc": "m3"}
NETS |= {name: ptv3(variant) for name, variant in PTV3.items()}
ENCODERS = "sonata_enc", "utonia_enc"


def imported(name, prefix="", **options):
    """A net with its published weights, the case's arrays and a tensor of them."""
    case, config = case_of(name)
    net, library = NETS[name](config)
    state = load_state(weights_of(name))
    state = {prefix + key: array for key, array in state.items()}
    assert import_checkpoint(state, net.eval(), library, **options).complete
    x = ml.SparseTensor(mx.array(case["coords"]), mx.array(case["feats"]))
    return net, case, x


def output(net, case, x):
    """The net's output for a case: features of rows, or of batch elements."""
    if isinstance(net, models.SPVCNN):
        return net(x.coords[:, 1:].astype(mx.float32), x.feats, x.coords[:, 0])
    positions = [mx.array(case["coord"])] if isinstance(net, models.PTv3) else []
    y = net(x, *positions)
    if isinstance(y, mx.array):
        return y
    assert y.key == x.key
    return y.feats


def expected(case):
    return case["out/logits" if "out/logits" in case else "out/y"]


def sorted_rows(coords):
    return np.lexsort(coords.T[::-1])


@pytest.mark.parametrize("name", [name for name in NETS if name not in ENCODERS])
def test_output_of_the_published_net(name):
    net, case, x = imported(name)
    assert_close(output(net, case, x), expected(case))


@pytest.mark.parametrize("name", ENCODERS)
def test_features_of_the_published_encoder(name):
    net, case, x = imported(name)
    places = mx.array(case["coord"])
    y, order = net(x, places), sorted_rows(case["out/coords"])
    assert np.array_equal(np.array(y.coords), case["out/coords"][order])
    assert_close(y.feats, case["out/y"][order])
    assert_close(net.upcast(net.encode(x, places)).feats, case["out/upcast"])


@pytest.mark.parametrize(
    ("name", "prefix"),
    (
        ("spunet_far", "backbone."),
        ("spunet_far", "module.backbone."),
        ("ptv3m1", "module."),
    ),
)
def test_the_names_of_a_segmentor(name, prefix):
    """Pointcept saves a segmentor, on several GPUs a module of it."""
    net, case, x = imported(name, prefix)
    assert_close(output(net, case, x), expected(case))


def test_spunet_s_unit_kernels_taken_as_shaped_are_wrong():
    net, case, x = imported("spunet", unit_as_shaped=True)
    assert difference(output(net, case, x), expected(case)) > 0.1


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
    assert "--legacy needs a folder as TARGET" in capsys.readouterr().err


def test_a_folder_of_a_published_checkpoint(tmp_path, capsys):
    """The command line, with the configuration that was published."""
    _, case, x = imported("ptv3m2")
    config, folder = tmp_path / "config.json", tmp_path / "net"
    config.write_text(str(case["config"]))
    line = f"convert {weights_of('ptv3m2')} {folder} --library spconv"
    command = [*line.split(), "--model", "ptv3-m2", "--config", str(config)]
    assert cli.main([*command, "--about", "ptv3-scannet"]) in (0, None)
    assert "models.from_pretrained" in capsys.readouterr().err
    read = models.from_pretrained(folder)
    assert read.variant == "m2" and read.about.voxels.from_zero
    assert_close(read(x).feats, case["out/logits"])
