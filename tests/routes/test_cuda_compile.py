"""CUDA kernels that are kept on disk: their text, the files, and what is missing.

MLX is a stand-in, too, where it would launch.

NVRTC is a stand-in (cuda_host/nvrtc.c); on a GPU the real one compiles, too.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice.backends.gpu import nvrtc as cuda_compile
from mlx_lattice.backends.gpu.nvrtc import Compiler

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("clang")
HAS_GPU = hasattr(mx, "cuda") and mx.cuda.is_available()
needs_stand_in = pytest.mark.skipif(
    COMPILER is None or os.uname().sysname != "Linux",
    reason="the stand-in for NVRTC needs Linux and a C compiler",
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_CUDA_CACHE", None)
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "mlx"))
    cuda_compile.compiler.cache_clear()
    cuda_compile._jobs.clear()  # of other tests
    with ml.cache(tmp_path / "cache"):
        yield
    cuda_compile._jobs.clear()
    cuda_compile.compiler.cache_clear()


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The stand-in, loaded into this process."""
    # Under a name of its own: where there is a GPU, the real one is to be found.
    path = tmp_path_factory.mktemp("nvrtc") / "stand_in.so"
    source = Path(__file__).parents[1] / "cuda_host" / "nvrtc.c"
    command = [COMPILER, "-shared", "-fPIC", "-w", source, "-o", path]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(path))
    return path


def kernel(nvrtc, body="y[0] = x_shape[1] + z_shape[0] + x_shape[3];", **more):
    given = dict(
        name="lattice_sum",
        inputs=("x", "z"),
        outputs=("y",),
        text="#define ONE 1",
        body=body,
        bounds=(128, 2),
        shared_bytes=4096,
    )
    return cuda_compile.Kernel(nvrtc, **{**given, **more})


def launch(made, x=None, z=None):
    return made(
        inputs=[
            mx.zeros((2, 3, 4, 5), mx.float16) if x is None else x,
            mx.zeros((7,), mx.uint32) if z is None else z,
        ],
        grid=(256, 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
        init_value=-1,
    )


@pytest.fixture
def launches(monkeypatch):
    """What MLX is asked to launch; the code "y[0] = 2" gives 2."""
    seen = []

    def launched(name, compiled_source, **given):
        assert compiled_source.startswith(b"\x7fELF")
        seen.append({"name": name, "compiled_source": compiled_source, **given})
        text = compiled_source.partition(f"{name}(".encode())[2]
        text = text.partition(b"y[0] = ")[2]
        value = int(text[:1]) if text[:1].isdigit() else 0
        return [mx.full(given["output_shapes"][0], value, dtype=mx.int32)]

    # The stand-in makes no machine code.
    monkeypatch.setattr(cuda_compile, "fatbin", lambda: None)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launched, raising=False)
    monkeypatch.setattr(mx, "gpu", mx.cpu)
    return seen


@needs_stand_in
def test_the_text_has_what_the_launch_gives(library, tmp_path, launches):
    made = kernel(Compiler(library, tmp_path, (9, 0)))
    for _ in range(2):
        launch(made)
    first, second = launches
    first.pop("inputs"), second.pop("inputs")
    assert first == second and first["scalars"] == [3, 5, 7]
    assert (first["name"], first["shared_memory"]) == ("lattice_sum", 4096)
    assert first["init_value"] == -1 and first["ensure_row_contiguous"]
    text = first["compiled_source"].decode()
    assert text.startswith("\x7fELF" + cuda_compile.PRELUDE + "#define ONE 1")
    assert (
        'extern "C" __global__ void __launch_bounds__(128, 2) lattice_sum('
        "const __half* x, const uint32_t* z, int32_t* y, "
        "int x_shape_1, int x_shape_3, int z_shape_0) {\n"
        "const int x_shape[] = {0, x_shape_1, 0, x_shape_3};\n"
        "const int z_shape[] = {z_shape_0};\n"
    ) in text


@needs_stand_in
class TestRehearsal:
    def test_what_is_not_compiled_is_compiled_and_not_launched(
        self, library, tmp_path, launches
    ):
        nvrtc = Compiler(library, tmp_path, (9, 0))
        features = kernel(nvrtc, body="y[0] = 3;")
        rows = kernel(nvrtc, name="rows", body="y[0] = 4;", geometry=True)
        with cuda_compile.rehearsal():
            assert launch(features)[0].item() == 0 and not launches
            assert launch(rows)[0].item() == 4 and len(launches) == 1
        assert cuda_compile.finish() == 2 and cuda_compile.finish() == 0
        assert len(list((tmp_path / "cache" / "cuda").iterdir())) == 2
        assert launch(features)[0].item() == 3
        with cuda_compile.rehearsal("all"):
            assert launch(rows)[0].item() == 4, "it is compiled"

    def test_what_does_not_compile_is_said_at_the_end(self, library, tmp_path):
        with cuda_compile.rehearsal():
            launch(kernel(Compiler(library, tmp_path, (9, 0)), body="wrong"))
        with pytest.raises(RuntimeError, match="did not compile"):
            cuda_compile.finish()


def test_code_is_built_once(tmp_path):
    built = []

    def build():
        built.append(1)
        return b"\x7fELF code"

    for _ in range(3):
        assert cuda_compile.cached("a", build) == b"\x7fELF code"
    file = tmp_path / "cache" / "cuda" / "a.cubin"
    assert len(built) == 1 and [file] == list(file.parent.iterdir())
    file.write_bytes(b"cut short")
    assert cuda_compile.cached("a", build) == b"\x7fELF code" and len(built) == 2
    assert file.read_bytes() == b"\x7fELF code"
    assert cuda_compile.cached("b", build) and len(built) == 3


def test_a_folder_that_cannot_be_written_keeps_nothing_and_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "cache" / "cuda" / "a.cubin").mkdir(parents=True)
    for folder in ("file", "cache"):
        with (
            ml.cache(tmp_path / folder),
            pytest.warns(
                ml.LatticeWarning, match="cannot be kept in .*MLX_LATTICE_CACHE"
            ),
        ):
            assert cuda_compile.cached("a", lambda: b"\x7fELF code") == b"\x7fELF code"
    assert [p.name for p in (tmp_path / "cache" / "cuda").iterdir()] == ["a.cubin"]


@needs_stand_in
def test_it_is_the_default(library, tmp_path, monkeypatch):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp16.h").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_compile, "loaded", lambda name: library)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_CUDA_CACHE", "0")
        assert cuda_compile.compiler((9, 0)) is None
        for text in ("", "1"):
            cuda_compile.compiler.cache_clear()
            monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_CUDA_CACHE", text)
            assert cuda_compile.compiler((9, 0)).include == tmp_path / "include"
    with pytest.warns(
        ml.LatticeWarning, match=r"NVRTC that knows compute capability 12\.1"
    ):
        assert cuda_compile.compiler((12, 1)) is None
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_CUDA_CACHE", "yes")
    with pytest.raises(ValueError, match="must be 0 or 1; got 'yes'"):
        cuda_compile.compiler((8, 0))
    assert ml.backend_info().environment["MLX_LATTICE_CUDA_CACHE"] == "yes"


@pytest.mark.parametrize("lacks", ("NVRTC", "the folder of cuda_fp16.h"))
def test_what_is_missing_is_named(lacks, monkeypatch):
    found = None if lacks == "NVRTC" else Path("/nowhere/lib/x/libnvrtc.so.13")
    monkeypatch.setattr(cuda_compile, "loaded", lambda name: found)
    monkeypatch.setattr(cuda_compile, "headers", lambda library: None)
    with pytest.warns(ml.LatticeWarning, match=f"{lacks} was not found: MLX compiles"):
        assert cuda_compile.compiler((9, 0)) is None


@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
def test_the_real_compiler(monkeypatch, tmp_path):
    """A kernel kept on disk gives what the one that MLX compiles gives."""
    coords = np.argwhere(np.random.default_rng(0).random((9, 9, 9)) < 0.4)
    coords = mx.array(np.pad(coords, [(0, 0), (1, 0)]).astype(np.int32))
    x, w = mx.random.normal((len(coords), 16)), mx.random.normal((27, 16, 24))

    def run(asked):
        monkeypatch.setenv("MLX_LATTICE_CUDA_CACHE", asked)
        monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path / "kept"))
        code = (
            "import sys, mlx.core as mx, mlx_lattice as ml\n"
            "c, x, w = (mx.load(f'{sys.argv[1]}/{n}.npy') for n in 'cxw')\n"
            "m = ml.CoordinateManager()\n"
            "r = m.submanifold_kernel_relation(m.insert(c))\n"
            "mx.save(f'{sys.argv[1]}/y.npy', ml.conv(x, w, r))\n"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        subprocess.run(command, check=True, timeout=300)
        return np.load(tmp_path / "y.npy")

    for name, array in zip("cxw", (coords, x, w), strict=True):
        mx.save(str(tmp_path / f"{name}.npy"), array)
    by_mlx, first, again = run("0"), run("1"), run("1")
    assert len(list((tmp_path / "kept" / "cuda").iterdir())) >= 3
    np.testing.assert_array_equal(by_mlx, first)
    np.testing.assert_array_equal(first, again)
