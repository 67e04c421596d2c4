"""The check of built archives finds each fault that is planted in one."""

import io
import tarfile
import zipfile
from pathlib import Path

import check
import pytest

from mlx_lattice import distribution

RECORD = f"mlx_sparse_lattice-{distribution.__version__}.dist-info"
PURE, NATIVE = "py3-none-any", "cp311-cp311-manylinux_2_28_x86_64"
EXTENSION = "mlx_lattice/_cpu.cpython-311-x86_64-linux-gnu.so"
METADATA = f"""Metadata-Version: 2.4
Name: {distribution.NAME}
Version: {distribution.__version__}
Requires-Dist: mlx<0.32.5,>=0.32.4
Requires-Dist: numpy>=1.24; extra == "io"
Description-Content-Type: text/markdown
"""


def contents(tag: str) -> dict[str, str]:
    """Names and texts of a wheel that is right."""
    files = dict.fromkeys(check.package_files(), "")
    if tag == NATIVE:
        files[EXTENSION] = ""
    files |= {f"{RECORD}/{name}": "" for name in ("RECORD", "WHEEL")}
    files[f"{RECORD}/licenses/LICENSE"] = ""
    files[f"{RECORD}/METADATA"] = METADATA
    command = "[console_scripts]\nmlx-lattice = mlx_lattice.cli:main\n"
    return files | {f"{RECORD}/entry_points.txt": command}


def faults(folder: Path, tag: str, files: dict[str, str]) -> str:
    path = folder / f"mlx_sparse_lattice-{distribution.__version__}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return "; ".join(check.faults_of(path))


METADATA_NAME = f"{RECORD}/METADATA"


@pytest.mark.parametrize("tag", (PURE, NATIVE))
def test_a_right_wheel_passes(tag, tmp_path):
    assert faults(tmp_path, tag, contents(tag)) == ""


@pytest.mark.parametrize(
    "tag, name, sentence",
    (
        (PURE, "mlx_lattice/py.typed", "missing: mlx_lattice/py.typed"),
        (PURE, "mlx_lattice/cuda/rows.cuh", "missing: mlx_lattice/cuda/rows.cuh"),
        (NATIVE, EXTENSION, "_cpu is wanted"),
    ),
)
def test_a_missing_file_is_named(tag, name, sentence, tmp_path):
    files = contents(tag)
    del files[name]
    assert sentence in faults(tmp_path, tag, files)


@pytest.mark.parametrize(
    "tag, name, sentence",
    (
        (PURE, "tests/conftest.py", "should not be there: tests/conftest.py"),
        (PURE, EXTENSION, "_cpu is wanted"),
        (NATIVE, "mlx_sparse_lattice.libs/libmlx.so", "_cpu is wanted"),
    ),
)
def test_a_file_too_many_is_named(tag, name, sentence, tmp_path):
    assert sentence in faults(tmp_path, tag, contents(tag) | {name: ""})


@pytest.mark.parametrize(
    "name, text, sentence",
    (
        (METADATA_NAME, METADATA.replace("text/markdown", "text/plain"), "text/plain"),
        (METADATA_NAME, METADATA.replace("mlx<", "mlx-cpu<"), "mlx alone is wanted"),
        (METADATA_NAME, METADATA.replace("<0.32.5,", ""), "with two bounds"),
        (f"{RECORD}/entry_points.txt", "[a]\n", "the command is not there"),
    ),
)
def test_wrong_metadata_is_named(name, text, sentence, tmp_path):
    assert sentence in faults(tmp_path, PURE, contents(PURE) | {name: text})


@pytest.mark.parametrize("fault", ("", "README.md", "cpu/simd.h", "extra"))
def test_an_sdist_has_the_files_of_the_checkout(fault, tmp_path, monkeypatch):
    files = {"README.md", "cpu/simd.h", "mlx_lattice/__init__.py"}
    monkeypatch.setattr(check, "tracked_files", lambda: files)
    top = f"mlx_sparse_lattice-{distribution.__version__}"
    names = (files - {fault}) | {"PKG-INFO"} | ({"x.so"} if fault == "extra" else set())
    with tarfile.open(tmp_path / f"{top}.tar.gz", "w:gz") as archive:
        for name in names:
            text = METADATA.encode() if name == "PKG-INFO" else b""
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    found = check.faults_of(tmp_path / f"{top}.tar.gz")
    wanted = {"": [], "extra": ["should not be there: x.so"]}
    assert found == wanted.get(fault, [f"missing: {fault}"])
