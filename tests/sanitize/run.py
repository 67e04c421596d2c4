"""Build the extension with sanitizers into build/sanitize and run the native tests.

    python tests/sanitize/run.py address,undefined
    python tests/sanitize/run.py thread

Together they take some five minutes on two idle cores, most of it for thread; each is
stopped after an hour, so that a deadlock is an error too.

For Linux with GCC. Python itself is not instrumented, so the runtimes are preloaded;
suppressions.txt says what is suppressed, and why.
"""

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ELSEWHERE = {"test_cpu_build.py"}  # starts compilers and interpreters of its own
TESTS = (
    *sorted(p for p in ROOT.glob("tests/*/test_cpu_*.py") if p.name not in ELSEWHERE),
    # Of the suites over all backends, what the extension runs.
    "routes/test_table.py",
    "geometry/test_builders.py",
    "geometry/test_reduction_kernels.py",
    "geometry/test_reductions.py",
    # Through the public API: gradients, maps and compilation around the same kernels.
    "geometry/test_relations.py",
    "routes/test_contraction.py",
    "ops/test_pooling.py",
    "nn/test_linear.py",
    "routes/test_misaligned.py",
)
LIMIT = 3600  # seconds
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
# Imports the instrumented extension in place of the installed one, then runs pytest.
START = """
import importlib.util, sys
import mlx.core  # its library is found by name from then on
spec = importlib.util.spec_from_file_location("mlx_lattice._cpu", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["mlx_lattice._cpu"] = module
spec.loader.exec_module(module)
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def build(sanitizers: str) -> Path:
    """Return the instrumented extension, built where sources are newer."""
    folder = ROOT / "build" / "sanitize" / sanitizers.replace(",", "-")
    define = f"cmake.define.MLX_LATTICE_SANITIZE={sanitizers}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    settings = [f"-C{define}", f"-Cbuild-dir={folder / 'build'}"]
    subprocess.run([*pip, "--target", folder, *settings, ROOT], check=True)
    return next((folder / "mlx_lattice").glob("_cpu*.so"))


def runtime(name: str) -> str:
    """Return the path of one of the compiler's libraries."""
    command = [os.environ.get("CXX", "g++"), f"-print-file-name={name}"]
    return subprocess.run(
        command, check=True, text=True, capture_output=True
    ).stdout.strip()


def main(sanitizers: str) -> int:
    """Build, run, and return pytest's exit status."""
    if platform.system() != "Linux":
        sys.exit("sanitizers are preloaded here, which works on Linux alone")
    # The C++ runtime too, so that exceptions are intercepted from the start.
    names = [*(RUNTIMES[s] for s in sanitizers.split(",")), "libstdc++.so.6"]
    reports = "halt_on_error=1:print_stacktrace=1"
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtime(name) for name in names),
        # The interpreter frees little at its end: every leak found would be its own.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": reports,
        "TSAN_OPTIONS": f"{reports}:suppressions={HERE / 'suppressions.txt'}",
        "MLX_LATTICE_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "1",  # NumPy makes the oracles, not instrumented
    }
    if sanitizers == "thread" and platform.machine() in ("x86_64", "AMD64"):
        # GCC 12 spills mask registers of AVX-512 under it: 16 bits are stored and 32
        # read. Loops without threads are wrong then; other builds spill none.
        environment["MLX_LATTICE_CPU_ISA"] = "avx2"
    start = time.monotonic()
    extension = build(sanitizers)
    built = time.monotonic()
    # Captured at the descriptors, a report would be lost with the process.
    options = ("-q", "-x", "--capture=sys", "-k", "not mlx and not metal")
    command = [sys.executable, "-c", START, str(extension), *options]
    if sanitizers == "thread" and (setarch := shutil.which("setarch")):
        command = [setarch, "-R", *command]  # TSan wants addresses that do not move
    tests = [str(HERE.parent / test) for test in TESTS]
    try:
        status = subprocess.run(
            [*command, *tests], env=environment, cwd=ROOT, timeout=LIMIT
        ).returncode
    except subprocess.TimeoutExpired:
        sys.exit(
            f"{sanitizers}: stopped after {LIMIT} s; a deadlock, or a slow machine"
        )
    found = "clean" if status == 0 else f"pytest's status is {status}"
    seconds = f"{built - start:.0f} s to build, {time.monotonic() - built:.0f} s to run"
    print(f"{sanitizers}: {found}; {seconds}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "address,undefined"))
