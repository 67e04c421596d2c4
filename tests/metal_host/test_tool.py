"""metal/host as a tool: its compiler, its cache, its rewrite of the source."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from metal_checks import kernel, sized, threads

from metal import host
from metal.host import rewrite, source, toolchain

ROOT = Path(__file__).resolve().parents[2]

host.require()

COPY = (
    "[[kernel]] void copy(const device float* a, device float* o, "
    "uint i [[thread_position_in_grid]]) { o[i] = a[i]; }"
)


def python(code, root=ROOT, **environment) -> str:
    """Run Python in another process and environment; return what it printed."""
    code = f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"
    command, variables = [sys.executable, "-c", code], os.environ | environment
    out = subprocess.run(command, env=variables, capture_output=True, text=True)
    return out.stdout + out.stderr


WITHOUT_CLANG = """
import os
from metal import host
print(host.missing())
for call, ci in ((host.install, ""), (host.require, ""), (host.require, "true")):
    os.environ["CI"] = ci
    try: call()
    except BaseException as e: print(type(e).__name__, e)
"""


def test_without_clang_one_sentence_says_what_to_install():
    """Tests are skipped then, but fail in CI."""
    lines = python(WITHOUT_CLANG, CLANG="/no/clang").splitlines()
    names = "", "ToolMissing ", "Skipped ", "Failed "
    assert lines == [f"{name}{toolchain.INSTALL_CLANG}" for name in names]


INSTALLED = """
from mlx_lattice import devices
folder = devices.source_folder("metal")
print(folder)
print(sorted(p.name for p in folder.iterdir()))
try: devices.install_host()
except RuntimeError as error: print(error)
"""


def test_an_install_has_the_kernels_and_not_the_host(tmp_path):
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake, which lays out the wheel, is not installed")
    build, out = str(tmp_path / "build"), tmp_path / "out"
    configure = [cmake, "-S", str(ROOT), "-B", build, "-DMLX_LATTICE_CPU=OFF"]
    install = [cmake, "--install", build, "--prefix", str(out)]
    for command in (configure, install):
        subprocess.run(command, check=True, capture_output=True)
    assert not [p for p in out.rglob("*") if "host" in p.relative_to(out).as_posix()]
    # The wheel is this and one Python package; without the editable install's hook:
    assert 'wheel.packages = ["mlx_lattice"]' in (ROOT / "pyproject.toml").read_text()
    shutil.copytree(ROOT / "mlx_lattice", out / "mlx_lattice", dirs_exist_ok=True)
    packages = Path(mx.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-S", "-c", INSTALLED],
        cwd=out,
        env=os.environ | {"PYTHONPATH": f"{out}:{packages}"},
        capture_output=True,
        text=True,
    )
    folder, names, *refusal = run.stdout.splitlines() or [run.stderr]
    assert Path(folder) == out / "mlx_lattice" / "metal", run.stderr
    assert names == str(sorted(p.name for p in (ROOT / "metal").glob("*.metal")))
    assert refusal and "which is in the project's checkout only" in refusal[0]


@pytest.fixture
def cache(tmp_path):
    """An empty cache but for the runtime, which takes long to build."""
    (tmp_path / "metal_host").mkdir()
    shutil.copy(toolchain.runtime_library(), tmp_path / "metal_host")
    return str(tmp_path)


def test_another_checkout_compiles_nothing_again(cache, tmp_path):
    """Kernels and findings of lint are found by content, wherever the sources lie."""
    headers = toolchain.mlx_include() / "mlx" / "backend" / "metal"
    shutil.copytree(ROOT / "metal" / "host", tmp_path / "metal" / "host")
    shutil.copytree(headers, tmp_path / "mlx" / "backend" / "metal")
    code = (
        "import pathlib, subprocess\n"
        "from metal.host import compile_source, toolchain\n"
        "from metal.host.lint import lint\n"
        "calls, run = [], subprocess.run\n"
        "def spy(*a, **k): calls.append(a); return run(*a, **k)\n"
        "toolchain.clang(); subprocess.run = spy\n"
        "MOVED\n"
        f"lint({COPY!r}, 'copy'); compile_source({COPY!r})\n"
        "print(len(calls))"
    )
    options = {"MLX_LATTICE_CACHE": cache}
    assert int(python(code.replace("MOVED", ""), **options)) > 4
    moved = f"toolchain.mlx_include = lambda: pathlib.Path({str(tmp_path)!r})"
    assert int(python(code.replace("MOVED", moved), root=tmp_path, **options)) == 0
    header = tmp_path / "mlx" / "backend" / "metal" / "kernels" / "utils.h"
    header.write_text(header.read_text() + "// another MLX's\n")
    assert int(python(code.replace("MOVED", moved), root=tmp_path, **options)) > 4


def test_a_broken_kernel_raises_with_its_line():
    with pytest.raises(host.CompileError, match=r"broken\.metal:3.*undeclared"):
        host.compile_source(COPY.replace("{", "{\n") + "\nint x = y;", name="broken")
    with pytest.raises(host.CompileError, match="never closed"):
        rewrite.rewrite("kernel void f(device float* a")
    with pytest.raises(host.CompileError, match=r"\[\[threadgroup\(n\)\]\] arguments"):
        rewrite.rewrite("kernel void f(threadgroup float* a [[threadgroup(0)]]) {}")


def test_the_source_is_what_mlx_would_compile():
    body = "o[thread_position_in_grid.x] = x[0] + s + x_shape[0];"
    call = source.capture(
        kernel("f", "x s", body, header="// before\n"),
        [mx.zeros((8, 2), mx.float16), mx.array(1.0)],
        **sized(16, 8, (16,), mx.float32),
    )
    assert (call.grid, call.threadgroup) == ((16, 1, 1), (8, 1, 1))
    assert call.metadata == ((True, False, False), (False, False, False))
    assert call.row_contiguous
    for part in (
        "// before",
        f"[[kernel]] void {call.name}(",
        "const device float16_t* x [[buffer(0)]]",
        "const constant int* x_shape",
        "const constant float& s",
        "uint3 thread_position_in_grid [[thread_position_in_grid]]",
    ):
        assert part in call.text


def test_empty_grids_run_nothing_and_leave_outputs_unwritten():
    for mode in ("fast", "checked"):
        entry = host.compile_source(COPY, mode=mode)["copy"]
        empty = np.empty(0, np.float32)
        report = host.launch(entry, [empty, empty.copy()], **threads(0, 64))
        assert (report.faults, report.counts.threads) == ((), 0)
    report = host.launch(entry, [empty, np.empty(4, np.float32)], **threads(0, 64))
    assert [f.kind for f in report.faults] == ["output not written"]
