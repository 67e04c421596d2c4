"""Install what a wheel is built with into this Python, as ``[build-system]`` names it.

    python tests/distribution/build_environment.py

MLX's wheels ask for a newer Linux than the images that wheels are built in, and pip on
a Mac takes the wheel of its macOS; so MLX's for the oldest system is unpacked here. Its
headers and library are built against, and never loaded.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# By system: what follows MLX's name where its library is apart, and the oldest tag.
OLDEST = {"Linux": ("cpu", "manylinux_2_35"), "Darwin": ("metal", "macosx_14_0")}


def requirements() -> list[str]:
    """Return the requirements of the build."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^\[build-system\]\nrequires = \[\n(.*?)^\]", text, re.M | re.S)
    return re.findall(r'^  "(.*)",$', block[1], re.M)


def commands(system: str, machine: str) -> list[list[str]]:
    """Return pip's arguments: the tools, then MLX of the oldest system."""
    needed = requirements()
    tools = [r for r in needed if not r.startswith("mlx")]
    (version,) = {r.split("==")[1].split(";")[0] for r in needed if r.startswith("mlx")}
    library, tag = OLDEST[system]
    site = sysconfig.get_path("purelib")
    unpack = ["--platform", f"{tag}_{machine}", "--target", site, "--upgrade"]
    return [
        ["install", *tools, "cmake", "ninja"],
        ["install", "--no-deps", "--only-binary", ":all:", *unpack]
        + [f"mlx=={version}", f"mlx-{library}=={version}"],
    ]


if __name__ == "__main__":
    for arguments in commands(platform.system(), platform.machine()):
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
        subprocess.run(pip, check=True)
