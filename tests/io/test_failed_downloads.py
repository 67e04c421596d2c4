"""Pointers, web pages and pipes under the names of checkpoints and point files."""

import os

import pytest

from mlx_lattice.cli import main
from mlx_lattice.io import CheckpointError, PointFileError, load_state, read_points
from mlx_lattice.io.folders import read_weights
from mlx_lattice.io.safetensors import read_object

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    f"oid sha256:{'a' * 64}\nsize 948712345\n"
)
PAGES = (
    "<!doctype html><title>Quota exceeded</title>",
    "\ufeff\r\n  <HTML><body>Sign in</body></HTML>",
    '<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "<!-- proxy --><html></html>",
)
CHECKPOINTS = ("a.safetensors", "a.pt", "a.pth", "a.ckpt", "a.bin")
BINARY = ("a.las", "a.laz", "a.npy", "a.npz")
POINTS = (*BINARY, "a.ply", "a.pcd", "a.bin", "a.pcd.bin", "a.vtk", "a.csv", "a.xyz")
READERS = [(load_state, name, CheckpointError) for name in CHECKPOINTS]
READERS += [(read_points, name, PointFileError) for name in POINTS]


@pytest.mark.parametrize(("read", "name", "error"), READERS)
def test_the_sentence_says_what_the_file_is(tmp_path, read, name, error):
    path = tmp_path / name
    for text, sentence in (
        (POINTER, "is a Git LFS pointer, .*git lfs pull"),
        (POINTER.replace("\noid", "\next-0-x sha256:b\noid"), "is a Git LFS pointer"),
        *((page, r"is a web page \(HTML or XML\).*begins with '.*<") for page in PAGES),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(error, match=f"^{name} {sentence}"):
            read(path)


@pytest.mark.parametrize(("read", "name", "error"), READERS)
def test_paths_that_name_no_regular_file(tmp_path, read, name, error):
    os.mkfifo(tmp_path / name)  # which nobody writes to: opening it would not return
    with pytest.raises(error, match="is a pipe or a device, expected a regular file"):
        read(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(error, match="is a folder, expected a regular file"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", (*CHECKPOINTS, *BINARY))
def test_text_under_the_name_of_a_binary_file(tmp_path, name):
    point = name in BINARY
    read, error = (
        (read_points, PointFileError) if point else (load_state, CheckpointError)
    )
    path = tmp_path / name
    path.write_text("Entry not found")
    with pytest.raises(error, match="holds text, .*begins with 'Entry not found'"):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(error, match="is empty"):
        read(path)


def test_folders_and_configurations(tmp_path):
    (tmp_path / "model.safetensors").write_text(POINTER)
    with pytest.raises(CheckpointError, match="is a Git LFS pointer"):
        read_weights(tmp_path)
    (tmp_path / "a.json").write_text(PAGES[0])
    with pytest.raises(CheckpointError, match="is a web page"):
        read_object(tmp_path / "a.json")


def test_names_do_not_steer_a_terminal(tmp_path, capsys):
    path = tmp_path / "\x1b]0;owned\x07.csv"
    path.write_text("\x1b[2J,y,\u202ez\n1,2,3\n")
    with pytest.raises(PointFileError) as caught:
        read_points(path)
    assert str(caught.value).isprintable() and r"\x1b[2j" in str(caught.value)
    assert main(["segment", str(path), "--model", str(tmp_path)]) == 1
    assert "\x1b" not in capsys.readouterr().err


def test_a_long_path_on_the_command_line(capsys):
    assert main(["convert", f"{'x' * 5000}.pt", "b.safetensors", "--library", "ocnn"])
    error = capsys.readouterr().err
    assert "5,003" in error and len(error) < 400
