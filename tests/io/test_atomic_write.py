"""Every writer keeps the old files if the disk is full or a write fails half-way."""

import errno
import os
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest
from cases import geometry

import mlx_lattice as ml
from mlx_lattice import cache_files, cli, models, nn
from mlx_lattice.cache_files import atomic_write
from mlx_lattice.commands import generate
from mlx_lattice.commands.convert import MODELS, Net
from mlx_lattice.io.points import PointCloud, write_ply
from mlx_lattice.io.safetensors import read_safetensors, write_safetensors
from mlx_lattice.models.trellis2.pipeline import Generated

resource = pytest.importorskip("resource", reason="only POSIX limits sizes of files")
POINTS = np.random.default_rng(0).uniform(-4, 4, (400, 3)).astype("f4")
LABELS = np.arange(400) % 3
GRID = models.GridRecipe((0.4, 0.4, 0.25), (-4, -4, -4, 4, 4, 4), ("x", "y", "z"))
SIZES = {"base_channels": 8, "channels": (8, 8), "layers": (1, 1)}


def net() -> models.SpUNet:
    return models.SpUNet(3, 3, **SIZES)


def pretrained(folder):
    net().save_pretrained(folder)


def converted(folder, name):
    given = folder.parent / "given.safetensors"
    if not given.exists():
        net().save_weights(str(given))
    MODELS["small"] = Net("SpUNet", (), {"in_channels": 3, "num_classes": 3, **SIZES})
    command = ["convert", str(given), str(folder / name), "--library", "spconv"]
    try:
        code = cli.main([*command, "--model", "small"])
    finally:
        del MODELS["small"]
    if code:
        raise OSError("the command's exit code says so")


def cloud(folder):
    write_ply(folder / "a.ply", {"x": np.arange(9000, dtype=np.float32)})


def traced(folder):
    pytest.importorskip("jinja2")
    coords = mx.array(geometry("surface", 3, 60, 0))
    x = ml.SparseTensor(coords, mx.ones((coords.shape[0], 4)))
    with ml.trace() as t:
        nn.SubmConv3d(4, 4, 3)(x)
    t.save(folder / "run.html")


def segmented(folder):
    segment = pytest.importorskip("mlx_lattice.commands.segment")
    palette = np.eye(3, dtype=np.uint8) * 200
    segment.draw(PointCloud(POINTS), LABELS, palette, net(), folder / "a.png")


def detected(folder):
    detect = pytest.importorskip("mlx_lattice.commands.detect")
    found = models.VoxelNeXt(GRID, (("car",),), (8,) * 5, 8)
    boxes, scores = np.ones((40, 7)), np.ones(40)
    rows = detect.described(found, boxes, LABELS[:40] * 0, scores, np.zeros(3))
    document = detect.described_net(found, rows, "net")
    detect.write(found, document, folder / "a.csv", folder / "a.json")


def latents(folder):
    coords = mx.array(geometry("surface", 3, 60, 0))
    x = ml.SparseTensor(coords, mx.ones((coords.shape[0], 32)))
    generate.write(folder / "a.safetensors", Generated(x, None, 512))


def mesh(folder, name):
    mesh = pytest.importorskip("mlx_lattice.mesh", exc_type=ImportError)
    n = 400
    faces = np.arange(3 * n).reshape(n, 3)
    surface = mesh.Surface(np.random.default_rng(0).random((3 * n, 3)), faces)
    texture = mesh.Texture(
        np.arange(3 * n),
        faces,
        np.random.default_rng(1).random((3 * n, 2)),
        np.full((16, 16, 4), 255, np.uint8),
        np.zeros((16, 16, 2), np.uint8),
    )
    mesh.save(folder / name, surface, texture)


def kept(folder):
    cache_files.write_whole(folder / "a.json", b"x" * 9000)


WRITERS = {
    "save_pretrained": pretrained,
    "convert to a file": lambda folder: converted(folder, "a.safetensors"),
    "convert to a folder": lambda folder: converted(folder, "."),
    "PLY": cloud,
    "trace, page": traced,
    "segment, picture": segmented,
    "detect, tables": detected,
    "generate": latents,
    "GLB": lambda folder: mesh(folder, "a.glb"),
    "OBJ": lambda folder: mesh(folder, "a.obj"),
    "caches and the doctor": kept,
}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*")}


@contextmanager
def files_of_at_most(size):
    """Have writes beyond so many bytes of a file fail, as Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_a_write_that_fails_in_the_middle(writer, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    writer(folder)
    held = contents(folder)
    assert held and all(held.values())
    with files_of_at_most(40), pytest.raises(OSError):
        writer(folder)
    assert contents(folder) == held


def test_the_error_names_the_file(tmp_path):
    path = tmp_path / "a.ply"
    with files_of_at_most(0), pytest.raises(OSError) as error:
        cloud(tmp_path)
    assert error.value.filename == str(path) and error.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError) as error:
        cloud(tmp_path / "none")
    assert error.value.filename == str(tmp_path / "none" / "a.ply")


@pytest.mark.parametrize("kind", (ValueError, KeyboardInterrupt))
def test_a_block_that_raises(kind, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(kind), atomic_write(path) as draft:
        draft.write_text("new")
        raise kind
    assert contents(tmp_path) == {"a.txt": b"old"}


@pytest.mark.parametrize("step", ("fsync", "replace"))
def test_an_error_after_the_last_write(step, tmp_path, monkeypatch):
    """Network disks report a failed write no earlier than this."""
    pretrained(tmp_path)
    held = contents(tmp_path)

    def fail(*_):
        raise OSError(errno.EIO, "the disk is gone")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="is gone"):
        patched.setattr(os, step, fail)
        pretrained(tmp_path)
    assert contents(tmp_path) == held


def test_permissions_stay_and_links_are_replaced(tmp_path):
    path, blob = tmp_path / "a.txt", tmp_path / "blob"
    path.write_text("old")
    path.chmod(0o640)
    with atomic_write(path) as draft:
        draft.write_text("new")
    assert path.stat().st_mode & 0o777 == 0o640
    blob.write_text("of a cache")
    (tmp_path / "link").symlink_to(blob)
    with atomic_write(tmp_path / "link") as draft:
        draft.write_text("new")
    assert blob.read_text() == "of a cache"
    with (
        pytest.raises(OSError, match="is not a regular file"),
        atomic_write("/dev/null") as draft,
    ):
        draft.write_text("new")


def test_a_file_that_cannot_be_replaced_keeps_all(tmp_path):
    pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    held = contents(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match="is not a regular file"):
        pretrained(tmp_path)
    (tmp_path / "model.safetensors").rmdir()
    assert contents(tmp_path) == held


@pytest.mark.parametrize("dtype", (mx.bfloat16, mx.float32, mx.complex64, mx.bool_))
def test_safetensors_are_those_of_mlx(dtype, tmp_path):
    arrays = {"a": (mx.random.normal((3, 5)) > 0).astype(dtype), "b": mx.zeros((0, 2))}
    write_safetensors(tmp_path / "a.safetensors", arrays)
    for read in (mx.load(str(tmp_path / "a.safetensors")), None):
        read = read or read_safetensors(tmp_path / "a.safetensors")
        assert read.keys() == arrays.keys()
        assert all(mx.array_equal(read[name], arrays[name]) for name in arrays)
        assert read["a"].dtype == dtype
