"""Published weights fit their nets by names and shapes, and are found by name.

`data/published_states.json.xz` has the names and shapes of the state dicts that the
foreign code makes with the published configurations (`published_states.py`). That nets
of these classes give that code's results is tested where they are: Pointcept 1.5.1
and later, SpUNet, MinkUNet, SPVCNN and the detectors in `test_published_nets.py` and
`test_detectors.py`, torch-pointcloud's in `test_torch_pointcloud.py`, TRELLIS.2's in
`test_trellis2.py`.
"""

import json
import lzma
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from published_cases import case_of, difference, weights_of

import mlx_lattice as ml
from mlx_lattice import cli, io, models
from mlx_lattice.io.checkpoints import ArrayState, match
from mlx_lattice.models import ptv3
from mlx_lattice.models.catalogue import entries, record

DATA = Path(__file__).parent / "data/published_states.json.xz"
STATES = json.loads(lzma.decompress(DATA.read_bytes()))
# Pointcept's own files of entries that torch-pointcloud's repositories serve.
ORIGINALS = {name: name.replace(".model_best", "") for name in STATES}


def zeros(name):
    return {n: mx.zeros(shape) for n, shape in STATES[name].items()}


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_foreign_state_fits(name):
    entry = models.published(ORIGINALS[name])
    report, _ = match(ArrayState(zeros(name)), entry.build(), entry.library)
    assert report.complete, str(report)
    unread = ["mask_token", "inv_freq", "rope_phases", "global_step"]
    # Layers that are never called, and SECOND's heads.
    unread += ["point_transforms."] * name.startswith("minkunet")
    unread += ["backbone.", "head."] * name.startswith("second")
    assert all(any(part in left for part in unread) for left in report.ignored)


def test_every_entry_is_whole():
    assert {ORIGINALS[name] for name in STATES} == {*models.list()}
    for name in models.list():
        entry, net = models.published(name), models.published(name).build()
        assert entry.name == name and entry.sources and entry.files
        assert all(file.startswith("https://") for file in entry.files)
        assert net.about == entry.about
        assert net.about.version or "dales" in name
        text = str(entry)
        assert all(source in text for source in (*entry.files, *entry.sources))
        if classes := entry.arguments.get("num_classes"):
            assert len(entry.about.classes) == classes
        if entry.about.voxels:
            assert entry.about.voxels.channels == entry.arguments["in_channels"]


def test_semantics_of_pointcept_151():
    """The released weights of the first form are legacy; no others are."""
    legacy = {n for n in models.list() if models.published(n).about.legacy}
    assert legacy == {n for n in models.list("ptv3.*.pointcept")}
    net = models.published("ptv3.scannet20.pointcept").build()
    assert net.legacy and "1.5.1" in net.about.version
    assert net.about.voxels.colour_range == (-1, 1)
    net = models.published("sonata-small.pretrain.fair").build()
    assert not net.legacy and net.about.voxels.colour_range == (0, 1)


def test_results_of_pointcept_151(monkeypatch):
    """A small net of the released form gives what the code of that version gave."""
    case, config = case_of("ptv3_v151")
    config = {k: v for k, v in config.items() if k not in ("family", "variant")}
    entry = replace(
        models.published("ptv3.scannet20.pointcept"),
        arguments=ptv3.published_arguments(config, "m1"),
    )
    monkeypatch.setitem(entries._ENTRIES, entry.name, entry)
    net = models.create(entry.name, weights_of("ptv3_v151"))
    x = ml.SparseTensor(mx.array(case["coords"]), mx.array(case["feats"]))
    assert difference(net(x).feats, case["out/feat"]) < 1e-6


def test_names():
    assert models.list("utonia-*") == [
        "utonia-tiny.pretrain.pointcept",
        "utonia-small.pretrain.pointcept",
        "utonia-base.pretrain.pointcept",
        "utonia-base-lp.scannet20.pointcept",
    ]
    message = "did you mean ptv3.scannet20.pointcept"
    with pytest.raises(ValueError, match=message):
        models.create("ptv3-base.scannet20.pointcept")


@pytest.fixture
def small(monkeypatch):
    """An entry of two files: a small encoder, and its head."""
    entry = replace(
        models.published("sonata-base-lp.scannet20.fair"),
        name="small",
        arguments=dict(
            in_channels=9,
            num_classes=20,
            variant="m2",
            stride=(2,),
            enc_depths=(1, 1),
            enc_channels=(8, 16),
            enc_num_head=(1, 2),
            enc_patch_size=(16, 16),
            enc_mode=True,
        ),
    )
    monkeypatch.setitem(entries._ENTRIES, "small", entry)
    return entry


@pytest.fixture
def files(small, tmp_path):
    """Files of the small entry, in spconv's layout, which ours is."""
    found = tmp_path / "model.safetensors", tmp_path / "head.safetensors"
    parts = {path: {} for path in found}
    for name, array in tree_flatten(small.build().parameters()):
        at = found[name.startswith("seg_head")]
        name = name.replace("layers.", "")
        parts[at][name] = mx.random.normal(array.shape)
    for path, arrays in parts.items():
        mx.save_safetensors(str(path), arrays)
    return found, {k: v for part in parts.values() for k, v in part.items()}


def same(net, state):
    return all(
        mx.array_equal(array, state[name.replace("layers.", "")])
        for name, array in tree_flatten(net.parameters())
    )


def test_from_files(files):
    paths, state = files
    net = models.create("small", paths)
    assert same(net, state) and not net.training
    assert net.about.licence == "CC-BY-NC-4.0" and len(net.about.classes) == 20
    with pytest.raises(ValueError, match="small is in 2 files; got 1"):
        models.create("small", paths[0])
    with pytest.raises(io.CheckpointError, match="missing"):
        models.create("small", [paths[0], paths[0]])


def test_from_the_hub(files, small, monkeypatch):
    paths, state = files
    asked = []

    def download(repository, file, *, revision, local_files_only):
        asked.append((repository, file, revision, local_files_only))
        return str(paths["head" in file])

    hub = SimpleNamespace(hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert same(models.create("small", download=False), state)
    revision = "df99897472c09f91ba9288da0a034aacffc0b010"
    assert asked == [
        ("facebook/sonata", file, revision, True)
        for file in ("model.safetensors", "sonata_linear_prob_head_sc.pth")
    ]


def test_out_of_reach(monkeypatch):
    """The text says from where to download by hand."""

    def download(*args, **options):
        raise OSError("no network\nmore")

    name = "ptv3.scannet20.pointcept"
    [file] = models.published(name).files
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="huggingface_hub is needed") as error:
        models.create(name)
    assert file in str(error.value) and "path=" in str(error.value)
    hub = SimpleNamespace(hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(FileNotFoundError, match=r"\(no network\)") as error:
        models.create(name)
    assert file in str(error.value) and "path=" in str(error.value)
    with pytest.raises(FileNotFoundError, match="not on Hugging Face") as error:
        models.create("voxelnext.argo2.openpcdet")
    assert "https://drive.google.com/" in str(error.value)
    assert record.HUB_FILE.fullmatch(file)[1].startswith("torch-pointcloud/")


def test_the_command(files, tmp_path, capsys):
    paths, state = files
    assert cli.main(["models"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in models.list())
    assert cli.main(["models", "ptv3.scannet20.pointcept"]) == 0
    out = capsys.readouterr().out
    assert "Pointcept 1.5.1" in out and "colour_range=(-1.0, 1.0)" in out
    folder = str(tmp_path / "net")
    given = ["--path", *map(str, paths), "--out", folder]
    assert cli.main(["models", "small", *given]) == 0
    assert "from_pretrained" in capsys.readouterr().err
    net = models.from_pretrained(folder)
    assert same(net, state) and net.about == models.published("small").about
    assert cli.main(["models", "nothing"]) == 2
    assert "there are no published weights nothing" in capsys.readouterr().err
    assert cli.main(["models", "--out", folder]) == 2
