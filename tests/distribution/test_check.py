"""The check of built archives finds each fault that is planted in one."""

import io
import sys
import tarfile
import zipfile
from pathlib import Path

import build_environment
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
        (
            PURE,
            "mlx_lattice/inspect/templates/trace.html",
            "missing: mlx_lattice/inspect/templates/trace.html",
        ),
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
        (
            PURE,
            "mlx_lattice/metal/host/launch.py",
            "should not be there: mlx_lattice/metal/host/launch.py",
        ),
        (
            PURE,
            "mlx_lattice-0.6.3.dist-info/METADATA",
            "should not be there: mlx_lattice-0.6.3.dist-info/METADATA",
        ),
        (PURE, EXTENSION, "_cpu is wanted"),
        (NATIVE, EXTENSION.replace("311", "312"), "_cpu is wanted"),
        (NATIVE, "mlx_sparse_lattice.libs/libmlx.so", "_cpu is wanted"),
    ),
)
def test_a_file_too_many_is_named(tag, name, sentence, tmp_path):
    assert sentence in faults(tmp_path, tag, contents(tag) | {name: ""})


@pytest.mark.parametrize(
    "name, text, sentence",
    (
        (
            METADATA_NAME,
            METADATA.replace(distribution.NAME, distribution.ANOTHERS),
            "metadata says ('mlx-lattice'",
        ),
        (METADATA_NAME, METADATA.replace("text/markdown", "text/plain"), "text/plain"),
        (
            METADATA_NAME,
            METADATA.replace("; extra ==", "; python =="),
            "mlx alone is wanted",
        ),
        (METADATA_NAME, METADATA.replace("mlx<", "mlx-cpu<"), "mlx alone is wanted"),
        (METADATA_NAME, METADATA.replace("<0.32.5,", ""), "with two bounds"),
        (
            f"{RECORD}/entry_points.txt",
            "[console_scripts]\n",
            "the command is not there",
        ),
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


def test_other_files_are_no_archives(tmp_path):
    assert check.faults_of(tmp_path / "a.zip") == ["it is neither a wheel nor an sdist"]


@pytest.mark.parametrize(
    "system, machine, tag, fit",
    (
        ("linux", "x86_64", "cp{0}-cp{0}-manylinux_2_28_x86_64", True),
        ("linux", "x86_64", "cp{0}-cp{0}-linux_x86_64", True),
        ("linux", "x86_64", "cp{0}-cp{0}-manylinux_2_28_aarch64", False),
        ("linux", "x86_64", "cp39-cp39-manylinux_2_28_x86_64", False),
        ("darwin", "arm64", "cp{0}-cp{0}-macosx_14_0_arm64", True),
        ("darwin", "arm64", "cp{0}-cp{0}-manylinux_2_28_aarch64", False),
        ("darwin", "arm64", "py3-none-any", True),
    ),
)
def test_wheels_that_fit_this_machine(system, machine, tag, fit, monkeypatch):
    monkeypatch.setattr(check.sys, "platform", system)
    monkeypatch.setattr(check.platform, "machine", lambda: machine)
    python = "{}{}".format(*sys.version_info)
    assert check.fits(Path(f"a-0.1.0-{tag.format(python)}.whl")) == fit


def test_wheels_are_built_with_what_the_project_names():
    needed = build_environment.requirements()
    mlx = {r.partition("==")[2].partition(";")[0] for r in needed if "mlx" in r}
    assert len(needed) == 4 and len(mlx) == 1
    (version,) = mlx
    for system, machine, library, tag in (
        ("Linux", "aarch64", "mlx-cpu", "manylinux_2_35_aarch64"),
        ("Darwin", "arm64", "mlx-metal", "macosx_14_0_arm64"),
    ):
        tools, unpack = build_environment.commands(system, machine)
        assert {r for r in needed if "mlx" not in r} < set(tools)
        assert unpack[-2:] == [f"mlx=={version}", f"{library}=={version}"]
        assert unpack[unpack.index("--platform") + 1] == tag
