"""Compile the extension for 64-bit Arm and run it there: make check-arm64.

Every source is compiled with all warnings as errors, against the headers of the MLX
that is installed, and ``check.cpp`` is run under an emulator with the library of the
same MLX for Arm. Linux; needs a cross compiler and QEMU.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path

import nanobind

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "arm64"
# Instruction sets of the loops of integers, with CMakeLists.txt's flags.
SETS = (
    ("baseline", []),
    ("dotprod", ["-march=armv8.2-a+dotprod"]),
    ("i8mm", ["-march=armv8.2-a+dotprod+i8mm"]),
)
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def mlx() -> Path:
    """Fetch MLX's library for Arm, once; return its folder."""
    name = f"mlx-cpu=={version('mlx')}"
    home = BUILD / name
    if not home.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", name]
        platform = ["--platform", "manylinux_2_35_aarch64", "--only-binary=:all:"]
        subprocess.run([*pip, *platform, "--dest", BUILD], check=True)
        (wheel,) = BUILD.glob("mlx_cpu-*aarch64.whl")
        zipfile.ZipFile(wheel).extractall(home)
        wheel.unlink()
    return home / "mlx"


def main():
    """Compile, link and run."""
    for tool, package in (
        (COMPILER, "g++-aarch64-linux-gnu"),
        (EMULATOR, "qemu-user"),
    ):
        if not shutil.which(tool):
            sys.exit(f"{tool} was not found: sudo apt-get install {package}")
    BUILD.mkdir(parents=True, exist_ok=True)
    home = mlx()
    headers = [home / "include", nanobind.include_dir(), sysconfig.get_path("include")]
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-DLATTICE_ARM64"]
    flags += ["-Wno-unused-parameter", "-Wno-psabi", "-Wno-maybe-uninitialized"]
    flags += ["-fvisibility=hidden"]  # as nanobind builds modules
    flags += [f"-I{ROOT / 'cpu'}", *(f"-isystem{path}" for path in headers)]
    flags += [f'-DLATTICE_MLX_VERSION="{version("mlx")}"']
    objects, commands = [], []
    sources = sorted((ROOT / "cpu").glob("*.cpp"))
    for source in sources + sorted(Path(__file__).parent.glob("*.cpp")):
        integers = source.stem == "integer_loops"
        for isa, own in SETS if integers else SETS[:1]:
            own = [*own, f"-ffp-contract={'off' if integers else 'fast'}"]
            objects.append(BUILD / f"{source.stem}_{isa}.o")
            compiled = [f"-DLATTICE_ISA={isa}", "-c", source, "-o", objects[-1]]
            commands.append([COMPILER, *flags, *own, *compiled])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(subprocess.run, check=True), commands))
    # What needs a Python of the target is compiled, and not linked.
    objects = [o for o in objects if o.stem.removesuffix("_baseline") != "bindings"]
    program, library = BUILD / "check", home / "lib"
    link = [COMPILER, *objects, f"-L{library}", "-lmlx", "-pthread", "-o", program]
    search = f"-Wl,-rpath,{library},--allow-shlib-undefined"
    subprocess.run([*link, search], check=True)
    run = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", program]
    sys.exit(subprocess.run(run, check=False).returncode)


if __name__ == "__main__":
    main()
