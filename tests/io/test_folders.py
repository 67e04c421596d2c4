"""Folders of nets: written, read back, refused; repositories without a network."""

import json
import sys
import types

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_lattice import models, nn
from mlx_lattice.io import CheckpointError

ABOUT = models.About(
    models.VoxelRecipe(0.5, ("ones", "height")),
    ("low", "high"),
    ((1, 2, 3), (4, 5, 6)),
    "a test",
    "CC BY 4.0",
)
NETS = {
    "SpUNet": lambda: models.SpUNet(2, 3, 32, (32, 64, 64, 32), (1, 1, 1, 1)),
    "encoder": lambda: models.SpUNet(2, 0, 32, (32, 32), layers=(1, 1), enc_mode=True),
    "MinkUNet14": lambda: models.MinkUNet14(2, 3, plan="A"),
    "MinkUNet": lambda: models.MinkUNet(2, 3, (32,) * 8, (1,) * 8, stem=(3, 3)),
    "MinkUNetTorchSparse": lambda: models.MinkUNetTorchSparse(2, 3, width=0.5),
    "SPVCNN": lambda: models.SPVCNN(2, 3, 0.5, 0.5),
    "SparseResNet14": lambda: models.SparseResNet14(2, 3),
    "SparseVAEDecoder": lambda: models.SparseVAEDecoder(
        model_channels=(64, 32),
        latent_channels=8,
        num_blocks=(1, 1),
        dtype=mx.float16,
    ),
}


def same(a, b) -> bool:
    a, b = dict(tree_flatten(a.parameters())), dict(tree_flatten(b.parameters()))
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and mx.array_equal(a[n], b[n]).item() for n in a
    )


@pytest.mark.parametrize("bits", (None, 8, 4))
@pytest.mark.parametrize("name", NETS)
def test_a_net_is_read_as_it_was_written(name, bits, tmp_path):
    net = NETS[name]()
    net.about = ABOUT
    if bits:
        mlx.nn.quantize(net, 32, bits, class_predicate=nn.keep_float())
    net.save_pretrained(tmp_path / "net")
    read = type(net).from_pretrained(tmp_path / "net")
    assert type(read) is type(net) and same(read, net) and read.about == ABOUT
    assert not read.training
    assert same(models.from_pretrained(str(tmp_path / "net")), net)
    config = json.loads((tmp_path / "net" / "config.json").read_text())
    assert config["model"] == type(net).__name__
    packing = config.get("quantization")
    assert (packing is None) == (bits is None)
    if bits:
        assert (packing["bits"], packing["group_size"]) == (bits, 32)
        left = {p for p, m in net.named_modules() if hasattr(m, "bits")}
        assert left and not left & set(packing["float"])


def test_a_net_is_written_over_the_files_that_it_reads(tmp_path):
    net = NETS["SpUNet"]()
    net.save_pretrained(tmp_path)
    read = models.from_pretrained(tmp_path)  # whose arrays are still in the file
    read.save_pretrained(tmp_path)
    assert same(models.from_pretrained(tmp_path), net)


def test_weights_in_parts(tmp_path):
    net = NETS["SpUNet"]()
    net.save_pretrained(tmp_path)
    arrays = list(mx.load(str(tmp_path / "model.safetensors")).items())
    (tmp_path / "model.safetensors").unlink()
    for i in range(2):
        part = tmp_path / f"model-0000{i + 1}-of-00002.safetensors"
        mx.save_safetensors(str(part), dict(arrays[i::2]))
    assert same(models.from_pretrained(tmp_path), net)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(arrays[:1]))
    with pytest.raises(CheckpointError, match="and in another file"):
        models.from_pretrained(tmp_path)


class MyNet(models.Pretrained):
    def __init__(self, width, factor=2.0, *, extra=None):
        super().__init__()
        self.conv = nn.SubmConv3d(width, width, 3)
        self.factor, self.extra = factor, extra


def test_nets_of_others(tmp_path):
    net = MyNet(4, extra=(1, (2, 3)))
    net.save_pretrained(tmp_path)
    read = MyNet.from_pretrained(tmp_path)
    assert same(read, net) and read.extra == (1, (2, 3))
    with pytest.raises(TypeError, match="extra of MyNet is a set, which a config"):
        MyNet(4, extra={1}).save_pretrained(tmp_path / "other")
    with pytest.raises(TypeError, match="about must be an About; got str"):
        net.about = "a net"
    with pytest.raises(TypeError, match=r"about must be an About, as models.About\("):
        net.about = {"classes": ("a", "b")}
    with pytest.raises(TypeError, match="voxels must be a VoxelRecipe; got float"):
        models.About(0.1)
    with pytest.raises(TypeError, match=r'classes must be .*\("wall",\); got a string'):
        models.About(classes="wall")
    with pytest.raises(TypeError, match=r'features must be .*\("ones",\); got a str'):
        models.VoxelRecipe(0.1, "ones")


class Options(MyNet):
    def __init__(self, *widths, **options):
        super().__init__(sum(widths or (options.pop("width", 4),)), **options)


def test_options_that_a_net_hands_on(tmp_path):
    net = Options(factor=3.0, extra="more")
    net.save_pretrained(tmp_path)
    read = Options.from_pretrained(tmp_path)
    assert same(read, net) and (read.factor, read.extra) == (3.0, "more")
    with pytest.raises(TypeError, match=r"takes \*widths, and a config has arguments"):
        Options(2, 3).save_pretrained(tmp_path)
    assert same(models.from_pretrained(tmp_path), net)  # that is there still


def test_arguments_are_those_of_the_call(tmp_path):
    """Lists that change afterwards do not, and NumPy's numbers are numbers."""
    extra = [1, {"a": [2]}]
    net = MyNet(np.int64(4), np.float32(0.5), extra=extra)
    extra[1]["a"].append(3)
    net.save_pretrained(tmp_path)
    read = MyNet.from_pretrained(tmp_path)
    assert same(read, net) and read.extra == (1, {"a": (2,)})
    assert read.factor == 0.5


def test_the_card(tmp_path):
    net = NETS["SpUNet"]()
    net.about = ABOUT
    net.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    for line in (
        "license: cc-by-4.0",
        "Licence: CC BY 4.0.",
    ):
        assert line in text.splitlines(), line


@pytest.mark.parametrize("name", NETS)
def test_the_card_s_lines_load_the_net(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = NETS[name]()
    net.save_pretrained("a net")
    code = (tmp_path / "a net/README.md").read_text().split("```python\n")[1]
    names = {}
    exec(code.split("```")[0], names)
    assert type(names["net"]) is type(net) and same(names["net"], net)


# Folders that are none


@pytest.fixture
def folder(tmp_path):
    net = NETS["SpUNet"]()
    net.about = ABOUT
    net.save_pretrained(tmp_path / "net")
    return tmp_path / "net"


def changed(folder, **new):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | new))


def test_another_class(folder):
    said = "is of a SpUNet, not of a MinkUNet: call SpUNet.from_pretrained"
    with pytest.raises(CheckpointError, match=said):
        models.MinkUNet.from_pretrained(folder)


@pytest.mark.parametrize(
    ("new", "said"),
    (
        ({"model": "Unet"}, "holds a Unet, which this version of mlx_lattice"),
        ({"model": 3}, 'not a JSON object with the name of a "model"'),
        ({"arguments": []}, '"arguments" must be an object'),
        ({"arguments": {"in_channels": 2, "classes": 3}}, "make no SpUNet: .*classes"),
        ({"arguments": {"in_channels": 2**40, "num_classes": 3}}, "make no SpUNet"),
        ({"about": {"voxels": {"voxel_size": -1}}}, '"about" in its config'),
        ({"about": 5}, '"about" must be an object of names'),
        ({"quantization": {"bits": 5, "group_size": 32}}, "quantization: "),
        (
            {"quantization": {"bits": 4, "float": ["enc.9"]}},
            "names enc.9, which is not a layer",
        ),
        ({"quantization": {"bits": 4, "group_size": 32}}, "do not fit its config"),
    ),
)
def test_configs_that_are_none(folder, new, said):
    changed(folder, **new)
    with pytest.raises(CheckpointError, match=said):
        models.from_pretrained(folder)


def test_weights_that_do_not_fit(folder):
    path = folder / "model.safetensors"
    arrays = mx.load(str(path))
    bias = arrays.pop("final.bias")
    mx.save_safetensors(str(path), arrays | {"other.bias": bias})
    said = "final.bias is missing; other.bias is left over"
    with pytest.raises(CheckpointError, match=said):
        models.from_pretrained(folder)
    mx.save_safetensors(str(path), arrays | {"final.bias": bias[:1]})
    with pytest.raises(CheckpointError, match=r"final.bias has the shape \(1,\), exp"):
        models.from_pretrained(folder)
    mx.save_safetensors(str(path), arrays | {"final.bias": bias.astype(mx.float16)})
    assert models.from_pretrained(folder).final.bias.dtype == mx.float16
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        models.from_pretrained(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="has no model.safetensors"):
        models.from_pretrained(folder)


def test_folders_that_are_none(folder, tmp_path):
    with pytest.raises(NotADirectoryError, match="is a file; name the folder that"):
        models.from_pretrained(folder / "model.safetensors")
    with pytest.raises(FileNotFoundError, match="there is no folder .*a/b/c; expected"):
        models.from_pretrained(str(tmp_path / "a/b/c"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no config.json"):
        models.from_pretrained(tmp_path / "empty")
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not a JSON object"):
        models.from_pretrained(folder)
    with pytest.raises(NotADirectoryError, match="is a file; name a folder"):
        NETS["SpUNet"]().save_pretrained(folder / "config.json")


# Repositories: the hub's package is stood in for, so that nothing is fetched.


def hub(monkeypatch, download):
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_repository(folder, monkeypatch):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(folder)

    hub(monkeypatch, download)
    net = models.SpUNet.from_pretrained("someone/spunet", revision="v1")
    assert net.about == ABOUT
    patterns = ["config.json", "*.safetensors", "README.md"]
    assert asked == [("someone/spunet", "v1", patterns)]


def test_a_repository_that_is_out_of_reach(monkeypatch):
    def download(name, **options):
        raise OSError("no connection\nand a long tail")

    hub(monkeypatch, download)
    said = "someone/spunet, and the repository .* within reach: no connection$"
    with pytest.raises(FileNotFoundError, match=said):
        models.from_pretrained("someone/spunet")


def test_the_hub_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"huggingface_hub is needed; .*\[hub\]"):
        models.from_pretrained("someone/spunet")
