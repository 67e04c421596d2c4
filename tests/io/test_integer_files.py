"""Integer nets in files and folders: written, read, refused."""

import json

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import models, nn
from mlx_lattice.io import CheckpointError


def scene(channels=3, n=200):
    rng = np.random.default_rng(1)
    points = mx.array(rng.normal(size=(n, 3)).astype(np.float32))
    feats = mx.array(rng.normal(size=(n, channels)).astype(np.float32))
    return ml.SparseTensor.from_points(points, feats, voxel_size=0.4)


def make():
    return models.MinkUNet(3, 5, (16,) * 8, (1,) * 8, stem_channels=16)


def calibrated(bits=8, **options):
    made, _ = ml.calibrate(make().eval(), [scene()], bits, activations=8, **options)
    return made


def same(a, b) -> bool:
    return mx.array_equal(a(scene()).feats, b(scene()).feats).item()


def written(net, folder):
    net.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("bits", (8, 4))
def test_a_folder_is_read_as_it_was_written(bits, tmp_path):
    net = calibrated(bits)
    config = written(net, tmp_path / "net")["quantization"]
    usual = config["bits"], config["group_size"], config["activations"]
    assert usual == (bits, 64 if bits == 4 else None, 8)
    assert set(config["float"]) == {"stem.layers.0.conv", "head"}
    norms = [p for p, m in net.named_modules() if isinstance(m, nn.FoldedNorm)]
    assert config["folded"] == sorted(norms) and norms
    read = models.from_pretrained(tmp_path / "net")
    assert str(read) == str(net) and same(read, net)
    layer = read.encoder[0].down.conv
    assert layer.rounding_error == net.encoder[0].down.conv.rounding_error > 0
    # Equal scales are one array again, so that none is divided by another.
    stem = read.stem.layers[0].conv
    assert layer.input_scale is stem.output_scale


def test_a_net_by_rows_and_one_of_every_kind(tmp_path):
    net, kinds = make().eval(), {0: {"group_size": 32, "bits": 8}}
    kinds[1] = {"quantize_input": True, "bits": 4}

    def predicate(path, module):
        if not hasattr(module, "to_quantized") or "head" in path or "stem" in path:
            return False
        return kinds.get(len(path) % 3, True)

    mlx.nn.quantize(net, bits=8, quantize_input=True, class_predicate=predicate)
    config = written(net, tmp_path / "net")["quantization"]
    assert config["layers"] and "folded" not in config
    assert same(models.from_pretrained(tmp_path / "net"), net)
    net = make().eval()
    options = {"quantize_input": True, "class_predicate": nn.keep_float()}
    mlx.nn.quantize(net, bits=8, **options)
    assert written(net, tmp_path / "net")["quantization"]["activations"] == 8
    assert same(models.from_pretrained(tmp_path / "net"), net)


def test_a_bare_file(tmp_path):
    net, file = calibrated(4), str(tmp_path / "net.safetensors")
    net.save_weights(file)
    read = make().eval()
    layers = nn.integer_like(read, file)
    read.load_weights(file, strict=True)
    assert same(read, net) and "encoder.0.down.conv" in layers
    nn.tie_scales(read)
    assert same(read, net)
    plain = make().eval()
    assert nn.integer_like(plain, dict(tree_flatten(plain.parameters()))) == ()


CONV = "encoder.0.down.conv"


@pytest.mark.parametrize(
    "name, value, text",
    (
        ("input_scale", None, f"{CONV}.input_scale is missing: the scales of a calibr"),
        ("input_scale", mx.ones(1, mx.int32), "input_scale must be floating"),
        ("input_scale", mx.zeros(1), "must be one finite number above 0; got .0.0"),
        ("output_scale", mx.ones(2), "output_scale must be one finite number above"),
        ("multipliers", None, "packed words, but .* neither .*biases.* nor .*mult"),
        ("scales", mx.ones(3), "scale must be"),
        ("weight", None, "scales is there without"),
    ),
)
def test_bare_files_that_lack_or_bend_an_array_are_refused(name, value, text):
    net = calibrated(4, group_size=32)
    held = dict(tree_flatten(net.parameters()))
    path = f"{CONV}.{name}"
    assert path in held
    held = {k: v for k, v in held.items() if k != path}
    held |= {} if value is None else {path: value}
    plain = make()
    with pytest.raises(ValueError, match=text):
        nn.integer_like(plain, held)
    assert "scales" not in plain.encoder[0].down.conv  # it stays as it was


def test_bare_files_of_other_kernels_are_refused():
    def net(size, c_out):
        return nn.Sequential(nn.SubmConv3d(3, c_out, size))

    made = net(3, 8)
    mlx.nn.quantize(made, bits=8, quantize_input=True)
    held = dict(tree_flatten(made.parameters()))
    text = "layers.0.weight is of 27 offsets and 8 output channels; the layer has "
    for other, has in ((net(5, 8), "125 and 8"), (net(3, 4), "27 and 4")):
        with pytest.raises(ValueError, match=text + has):
            nn.integer_like(other, held)


def test_layers_by_row_in_a_calibrated_file_are_named():
    def net():
        return nn.Sequential(nn.SubmConv3d(3, 8, 3, bias=False), nn.SubmConv3d(8, 8, 3))

    float_net, every = net(), nn.keep_float(1, 1, ())
    float_net.layers[0].weight = 0 * float_net.layers[0].weight  # features are zeros
    made, _ = ml.calibrate(
        float_net, [scene()], 8, activations=8, class_predicate=every
    )
    assert "input_scale" in made.layers[0] and "input_scale" not in made.layers[1]
    held = dict(tree_flatten(made.parameters()))
    with pytest.raises(ValueError, match="layers.1.input_scale is missing"):
        nn.integer_like(net(), held)
    read = net()
    nn.integer_like(read, held, by_row=["layers.1"])
    read.load_weights(list(held.items()))
    assert same(read, made)
    for path in ("layers.0", "no"):
        with pytest.raises(ValueError, match=f"by_row names {path}, which is not"):
            nn.integer_like(net(), held, by_row=["layers.1", path])


@pytest.mark.parametrize("name", ("input_scale", "bias"))
def test_a_folder_that_lacks_an_array_is_refused(name, tmp_path):
    net, file = calibrated(), tmp_path / "net" / "model.safetensors"
    config = written(net, tmp_path / "net")["quantization"]
    assert name in config["arrays"]
    held = dict(tree_flatten(net.parameters()))
    lacking = {k: v for k, v in held.items() if not k.endswith(f".{name}")}
    lacking |= {k: v for k, v in held.items() if k == "head.bias"}
    mx.save_safetensors(str(file), lacking)
    with pytest.raises(CheckpointError, match=f"{name}"):
        models.from_pretrained(tmp_path / "net")


@pytest.mark.parametrize(
    "change, text",
    (
        ({"activations": 4}, "activations must be 8; got 4"),
        ({"rounding_errors": [1]}, "has no attribute 'items'"),
        ({"float": []}, "differ in whether .* is an integer"),
        ({"bits": 4, "layers": {}}, "config says bits = 4, the arrays 8"),
        (
            {"arrays": ["bias"], "layers": {}},
            "by_row names .*, which is not an integer layer without input_scale",
        ),
    ),
)
def test_configs_that_do_not_fit_are_refused(change, text, tmp_path):
    config = written(calibrated(), tmp_path / "net")
    config["quantization"] |= change
    (tmp_path / "net" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=text):
        models.from_pretrained(tmp_path / "net")
