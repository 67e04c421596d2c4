"""Integer nets in files and folders: written, read, refused; convert --activations."""

import json

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from foreign import minkunet_state
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import cli, devices, models, nn
from mlx_lattice.io import CheckpointError, read_points


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
    card = (tmp_path / "net" / "README.md").read_text()
    assert f"| packed | {bits} bits" in card and "features of 8 bits |" in card
    numbers = sum(a.size for _, a in tree_flatten(make().parameters()))
    said = int(card.split("| parameters | ")[1].split(" |")[0].replace(",", ""))
    assert 0.9 * numbers < said < 5 * numbers  # with padding


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
        ({"rounding_errors": [1]}, '"rounding_errors" must be an object'),
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


# convert


@pytest.fixture
def given(tmp_path):
    """A published net, a scan with colours, and the command without its target."""
    source = models.MinkUNet14(3, 20, "B")
    mx.save_safetensors(str(tmp_path / "me.safetensors"), minkunet_state(source))
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 0.6, size=(400, 3))
    colours = rng.integers(0, 255, size=(400, 3))
    rows = [
        " ".join(map(str, (*p.round(4), *c)))
        for p, c in zip(points, colours, strict=True)
    ]
    names = [f"property float {axis}" for axis in "xyz"]
    names += [f"property uchar {name}" for name in ("red", "green", "blue")]
    head = ["ply", "format ascii 1.0", f"element vertex {len(rows)}", *names]
    (tmp_path / "scan.ply").write_text("\n".join([*head, "end_header", *rows]) + "\n")
    options = ["--library", "minkowski", "--model", "minkunet14", "--plan", "B"]
    options += ["--channels", "3", "20", "--bits", "8", "--about", "minkunet-scannet"]
    return source, tmp_path, [str(tmp_path / "me.safetensors"), *options]


def run(given, target, *more) -> int:
    _, folder, (file, *options) = given
    return cli.main(["convert", file, str(folder / target), *options, *more])


@pytest.mark.skipif(
    devices.metal_on_host(), reason="a net of this size takes a minute off the GPU"
)
def test_convert_calibrates(given, capsys):
    source, folder, _ = given
    scan = str(folder / "scan.ply")
    assert run(given, "net", "--activations", "8", "--calibrate", scan) == 0
    said = capsys.readouterr().out
    assert ", int8 features" in said and "to int8" in said
    net = models.from_pretrained(folder / "net")
    layers = [m for m in net.modules() if getattr(m, "mode", "") == "integer"]
    assert layers and all("input_scale" in m for m in layers)
    voxels = net.recipe()(*_cloud(scan))
    y, z = (n.eval().score_voxels(voxels) for n in (net, source))
    assert mx.linalg.norm(y - z) / mx.linalg.norm(z) < 0.1
    assert run(given, "rows", "--activations", "8") == 0
    rows = models.from_pretrained(folder / "rows")
    assert "input_scale" not in rows.encoder[0].down.conv
    assert mx.linalg.norm(rows.score_voxels(voxels) - z) / mx.linalg.norm(z) < 0.1


def _cloud(scan):
    cloud = read_points(scan)
    return cloud.points, cloud.attributes


def test_convert_says_what_is_missing(given, capsys):
    _, folder, command = given
    (folder / "bare.xyz").write_text("0 0 0\n1 1 1\n")
    for more, text in (
        (["--calibrate", str(folder / "bare.xyz")], "have no colours"),
        (["--activations", "4"], "invalid choice: 4"),
    ):
        try:
            code = run(given, "net", "--activations", "8", *more)
        except SystemExit as end:
            code = end.code
        assert code == 2 and text in capsys.readouterr().err
    at = command.index("--bits")
    del command[at : at + 2]
    assert run(given, "net", "--activations", "8") == 2
    assert "need --bits, of the weights" in capsys.readouterr().err
    command += ["--bits", "8"]
    at = command.index("--about")
    del command[at : at + 2]
    scan = str(folder / "scan.ply")
    assert run(given, "net", "--activations", "8", "--calibrate", scan) == 2
    assert "--calibrate needs --about" in capsys.readouterr().err
