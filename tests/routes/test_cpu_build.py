"""The extension as a guest: its build, its absence, its threads, its choice of CPU."""

import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import devices as cpu
from mlx_lattice import ops

ROOT = Path(__file__).parents[2]
native = pytest.mark.skipif(cpu.extension is None, reason=f"{cpu.extension_absence}")


def run(code: str, **environment) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Another MLX, a broken file, no file: portable routes, said once.


def small_conv():
    coords = mx.array([[0, 0, 0, 0], [0, 0, 0, 1], [0, 2, 0, 1]], dtype=mx.int32)
    x = ml.SparseTensor(coords, mx.arange(6, dtype=mx.float32).reshape(3, 2))
    weight = mx.ones((3, 3, 3, 3, 2))
    return ops.subm_conv3d(x, weight).feats


MISMATCH = """
import warnings
import mlx.core as mx
mx.__version__ = "99.1.0"
mx.set_default_device(mx.cpu)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import mlx_lattice as ml
    from mlx_lattice import ops
    coords = mx.array([[0, 0, 0, 0], [0, 0, 0, 1]], dtype=mx.int32)
    for _ in range(3):
        x = ml.SparseTensor(coords, mx.ones((2, 2)))
        y = ops.subm_conv3d(x, mx.ones((4, 3, 3, 3, 2)))
        assert y.feats.tolist() == [[4.0] * 4] * 2
for w in caught:
    print(w.message)
print("INFO", dict(ml.backend_info().backends)["cpu"])
"""


@native
def test_an_extension_of_another_mlx_is_left_out_with_one_warning():
    lines = run(MISMATCH).splitlines()
    assert len(lines) == 2, lines
    for line in lines:
        assert "was built for MLX" in line and "this is 99.1.0" in line
        assert 'run: pip install "mlx' in line
    assert lines[1].startswith("INFO (False, ")


@pytest.mark.parametrize(
    "error, sentence",
    (
        ("No module named 'mlx_lattice._cpu'", "it is not installed"),
        ("undefined symbol: x", "it does not load: undefined symbol: x"),
    ),
)
def test_an_extension_that_does_not_load_says_why(error, sentence, monkeypatch):
    def fail(name):
        raise ImportError(error)

    monkeypatch.setattr(cpu.importlib, "import_module", fail)
    extension, absence, repair = cpu._load()
    assert (extension, absence) == (None, sentence)
    assert repair.startswith("with a C++ compiler at hand run in the project's folder")


def test_without_the_extension_one_warning_and_the_same_values(monkeypatch):
    expected = small_conv()
    mx.eval(expected)
    monkeypatch.setattr(cpu, "extension", None)
    monkeypatch.setattr(cpu, "extension_absence", "it is not installed")
    monkeypatch.setattr(cpu, "extension_repair", "do this")
    monkeypatch.setattr(cpu, "_warned", False)
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                assert mx.allclose(small_conv(), expected)
    finally:
        mx.set_default_device(device)
    assert [str(w.message).endswith("To get it, do this") for w in caught] == [True]


# CMake's own checks.

CMAKE = shutil.which("cmake")
needs_cmake = pytest.mark.skipif(CMAKE is None, reason="apt install cmake")


def configure(folder: Path, **environment) -> tuple[int, str]:
    """CMake's status and its words, on one line."""
    python = f"-DPython_EXECUTABLE={sys.executable}"
    done = subprocess.run(
        [CMAKE, "-S", ROOT, "-B", folder / "build", python],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    return done.returncode, re.sub(r"\s+", " ", done.stdout + done.stderr)


@needs_cmake
@pytest.mark.skipif(shutil.which("c++") is None, reason="it needs a C++ compiler")
def test_a_nanobind_of_another_abi_stops_the_build_with_a_sentence(tmp_path):
    pytest.importorskip("nanobind")
    other = tmp_path / "nanobind-2.4.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Name: nanobind\nVersion: 2.4.0\n")
    status, text = configure(
        tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path])
    )
    assert status != 0
    assert f"mlx {mx.__version__} is built with nanobind " in text
    assert "but nanobind 2.4.0 is installed" in text
    assert "pip install 'nanobind~=" in text and "-DMLX_LATTICE_CPU=OFF" in text


@needs_cmake
def test_without_a_compiler_the_package_installs_without_the_extension(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("ninja", "make"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    status, text = configure(tmp_path, PATH=str(tools), CXX="", CMAKE_GENERATOR="Ninja")
    assert status == 0
    assert "no C++ compiler was found: installing without the CPU kernels" in text
    subprocess.run(
        [CMAKE, "--install", tmp_path / "build", "--prefix", tmp_path / "wheel"],
        check=True,
        capture_output=True,
    )
    files = {p.relative_to(tmp_path / "wheel") for p in tmp_path.rglob("wheel/**/*.*")}
    assert any(f.suffix == ".metal" for f in files)
    assert not any(f.name.startswith("_cpu") for f in files)


# Which instruction set, which thread.


@native
def test_the_instruction_set_is_chosen_when_it_runs():
    code = """
from mlx_lattice import _cpu
try:
    print(_cpu.isa())
except ValueError as error:
    print(error)
"""
    assert run(code, MLX_LATTICE_CPU_ISA="baseline").strip() == "baseline"
    assert run(code, MLX_LATTICE_CPU_ISA="").strip() == cpu.extension.isa()
    refused = run(code, MLX_LATTICE_CPU_ISA="mmx")
    assert "MLX_LATTICE_CPU_ISA is 'mmx', but this processor and build have " in refused
    assert "baseline" in refused


@native
@pytest.mark.parametrize("call", ("unique_rows", "first_duplicate", "eval"))
def test_the_gil_is_released(call):
    """Python goes on in another thread while a kernel runs.

    The interval is so long that a thread gives the GIL up only when it lets go of it.
    """
    rng = np.random.default_rng(0)
    rows = mx.array(rng.integers(0, 9000, (300_000, 4)).astype(np.int32))
    mx.eval(rows)
    offsets = [(0, 0, d) for d in range(9)]
    entered, went_on, seen = threading.Event(), [], []

    def work():
        for _ in range(1000):  # a busy machine may leave the other thread waiting
            went_on.clear()
            entered.set()
            if call == "eval":
                table = cpu.extension.neighbour_table(
                    rows, rows, offsets, (1, 1, 1), stream=mx.cpu
                )
                mx.eval(table)
            else:
                getattr(cpu.extension, call)(rows)
            seen.append(bool(went_on))
            if seen[-1]:
                break

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            if entered.wait(0.001):
                entered.clear()
                went_on.append(1)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert any(seen)
