"""The distribution: its name on the package index, its version, how to install it."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

NAME = "mlx-sparse-lattice"
ANOTHERS = "mlx-lattice"  # another project's, with the import name of this one
__version__ = "0.1.0"
MLX = "0.32.4"  # the version that the extension of wheels is built for

# What an installed distribution leaves beside its packages.
_ANOTHERS_RECORD = re.compile(r"mlx_lattice-[^-]+\.dist-info")


def checkout() -> Path | None:
    """Return the folder of the project that this package is imported from, if any."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "CMakeLists.txt").is_file() else None


def install(extra: str = "", options: str = "") -> str:
    """Say how to install the package again, or with an extra, with options of pip."""
    at, target = ("run in the project's folder", ".") if checkout() else ("run", NAME)
    target = f'"{target}[{extra}]"' if extra else target
    return f"{at}: " + " ".join(filter(None, ("pip install", options, target)))


def others(folders: Iterable[str]) -> list[str]:
    """Return the records of the other project's distribution in folders of modules."""
    # importlib.metadata finds them too, and takes 11 ms to import; this takes 0.3.
    found = []
    for folder in dict.fromkeys(folders):
        try:
            names = os.listdir(folder or ".")
        except OSError:  # a zip file, or nothing
            continue
        found += [
            os.path.join(folder, n) for n in names if _ANOTHERS_RECORD.fullmatch(n)
        ]
    return found


def warn_of_another(folders: Iterable[str]) -> None:
    """Warn if the other distribution is installed too: both use one folder."""
    if found := others(folders):
        from .checks import LatticeWarning

        warnings.warn(
            f"the distribution {ANOTHERS} is installed too ({found[0]}). It is another "
            f"project's, and its import name is mlx_lattice as well: files of one "
            f"replace files of the other. Keep one of them in an environment; to keep "
            f"this one, run: pip uninstall {ANOTHERS} {NAME}; then {install()}",
            LatticeWarning,
            stacklevel=2,
        )


warn_of_another(sys.path)
