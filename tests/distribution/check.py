"""Check built archives: what is in them, and that they run where no compiler is.

    python tests/distribution/check.py dist/*
    python tests/distribution/check.py --install [--native] [--demo] dist/*

With --install each that fits this machine is installed in an environment of its own
whose PATH has nothing else, and the README's Python runs there, outside the checkout.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "mlx_lattice"
BUILT = (".so", ".dylib", ".pyd")
# What the GPU backends read of the folders beside the package.
KERNELS = {"metal": ("*.metal",), "cuda": ("*.cu", "*.cuh")}


def stated(name: str) -> str:
    """Return a constant of distribution.py, which is not imported here."""
    text = (ROOT / PACKAGE / "distribution.py").read_text()
    return re.search(rf'^{name} = "(.*)"', text, re.M)[1]


def package_files() -> set[str]:
    """Return the package's files and the kernels' sources, as a wheel has them."""
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file()
        and path.suffix not in (*BUILT, ".pyc")
        and path.name != ".DS_Store"
    }
    for folder, patterns in KERNELS.items():
        for pattern in patterns:
            found = {
                f"{PACKAGE}/{folder}/{p.name}" for p in (ROOT / folder).glob(pattern)
            }
            assert found, f"{folder} has no {pattern}"
            files |= found
    return files


def tracked_files() -> set[str]:
    """Return the files of the checkout, by git."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def differences(found: set[str], wanted: set[str]) -> list[str]:
    """Say which names are missing, and which should not be there."""
    return [
        f"{what}: {', '.join(sorted(names))}"
        for what, names in (
            ("missing", wanted - found),
            ("should not be there", found - wanted),
        )
        if names
    ]


def wheel_faults(path: Path) -> list[str]:
    """Return what is wrong with a wheel, a sentence each."""
    with zipfile.ZipFile(path) as wheel:
        names = {n for n in wheel.namelist() if not n.endswith("/")}
        record = f"{stated('NAME').replace('-', '_')}-{stated('__version__')}.dist-info"
        texts = {
            n.rpartition("/")[2]: wheel.read(n).decode()
            for n in names
            if n.startswith(f"{record}/")
        }
    extensions = {n for n in names if n.endswith(BUILT)}
    records = {n for n in names if n.startswith(f"{record}/")}
    faults = differences(names - extensions - records, package_files())
    pure = path.name.endswith("-py3-none-any.whl")
    wanted = 0 if pure else 1
    if len(extensions) != wanted or not all(
        re.fullmatch(rf"{PACKAGE}/_cpu\.[\w.-]+", n) for n in extensions
    ):
        faults.append(f"extensions are {sorted(extensions)}; {wanted} _cpu is wanted")
    if not {"METADATA", "RECORD", "LICENSE", "entry_points.txt"} <= set(texts):
        faults.append(f"of {record} there are only {sorted(texts)}")
        return faults
    if f"mlx-lattice={PACKAGE}.cli:main" not in re.sub(
        r" ", "", texts["entry_points.txt"]
    ):
        faults.append(f"the command is not there: {texts['entry_points.txt']}")
    return faults + metadata_faults(texts["METADATA"])


def metadata_faults(text: str) -> list[str]:
    """Return what is wrong with the metadata of a wheel or an sdist."""
    metadata = Parser().parsestr(text)
    hard = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    found = metadata["Name"], metadata["Version"], metadata["Description-Content-Type"]
    wanted = stated("NAME"), stated("__version__"), "text/markdown"
    faults = [] if found == wanted else [f"metadata says {found}, not {wanted}"]
    bounds = r"mlx *\(?(?=.*>=\d)(?=.*<\d)[\d.<>=, ]+\)?"
    if len(hard) != 1 or not re.fullmatch(bounds, hard[0]):
        faults.append(f"it depends on {hard}; mlx alone is wanted, with two bounds")
    return faults


def sdist_faults(path: Path) -> list[str]:
    """Return what is wrong with an sdist, a sentence each."""
    with tarfile.open(path) as archive:
        top = path.name.removesuffix(".tar.gz")
        names = {m.name.removeprefix(f"{top}/") for m in archive if m.isfile()}
        text = archive.extractfile(f"{top}/PKG-INFO").read().decode()
    faults = differences(names - {"PKG-INFO"}, tracked_files())
    return faults + metadata_faults(text)


def faults_of(path: Path) -> list[str]:
    """Return what is wrong with an archive."""
    if path.name.endswith(".whl"):
        return wheel_faults(path)
    if path.name.endswith(".tar.gz"):
        return sdist_faults(path)
    return ["it is neither a wheel nor an sdist"]


def is_pure(path: Path) -> bool:
    """Return whether an archive gives no extension where there is no compiler."""
    return path.name.endswith((".tar.gz", "-py3-none-any.whl"))


def fits(path: Path) -> bool:
    """Return whether this Python on this machine can install an archive."""
    if is_pure(path):
        return True
    python = "cp{}{}".format(*sys.version_info)
    system = {"linux": "linux", "darwin": "macosx"}.get(sys.platform, sys.platform)
    _, _, tag = path.stem.partition(f"-{python}-{python}-")
    return system in tag and tag.endswith(platform.machine())


# What must hold where an archive is installed; the argument says whether _cpu is there.
INSTALLED = """
import os, shutil, sys, warnings
from pathlib import Path
assert not any(map(shutil.which, ("c++", "g++", "clang++", "cc", "gcc", "clang")))
warnings.simplefilter("error" if sys.argv[1] == "native" else "ignore")
import mlx_lattice as ml
from mlx_lattice import devices, distribution
package = Path(ml.__file__).parent
assert package.is_relative_to(sys.prefix) and distribution.checkout() is None
for backend in ("metal", "cuda"):
    assert devices.source_folder(backend) == package / backend
info = ml.backend_info()
there, text = info.backends["cpu"]
assert there == {"native": True, "pure": False}.get(sys.argv[1], there), text
assert there or "pip install" in text, text
ml.settings.environment["MLX_LATTICE_METAL"] = "host"
there, text = ml.backend_info().backends["metal"]
assert not there and "checkout only" in text, text
print(info)
"""


def snippets() -> str:
    """Return the README's Python blocks as one script."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    assert len(blocks) >= 3
    return "\n".join(blocks)


def install(path: Path, demo: bool) -> None:
    """Install an archive in a new environment and run the README there.

    Raises:
        SystemExit: something does not run; what it wrote is printed.
    """
    kind = "pure" if is_pure(path) else "native"
    if path.name.endswith(".tar.gz") and sys.platform == "darwin":
        kind = "either"  # a Mac's compiler is found without PATH
    extras = ["viz", *(["demo"] if demo else [])]
    extras += ["cpu"] if sys.platform == "linux" else []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        tools = place / "venv" / "bin"
        hidden = ("PYTHONPATH", "CC", "CXX", "MLX_LATTICE_METAL", "VIRTUAL_ENV")
        environment = {k: v for k, v in os.environ.items() if k not in hidden}
        environment |= {"PATH": str(tools), "MLX_LATTICE_CACHE": str(place / "cache")}

        def run(*command):
            print("$", *(str(c) for c in command), flush=True)
            done = subprocess.run(
                [tools / command[0], *command[1:]],
                cwd=place,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                print(done.stdout)
                raise SystemExit(f"{path.name}: the last command failed")

        options = ["--quiet", "--disable-pip-version-check"]
        run("python", "-m", "pip", "install", *options, f"{path}[{','.join(extras)}]")
        (place / "installed.py").write_text(INSTALLED)
        run("python", "installed.py", kind)
        (place / "readme.py").write_text(snippets())
        run("python", "readme.py")
        run("mlx-lattice", "--version")
        run("mlx-lattice", "explain", "--channels", "64", "64", "--rows", "50000")
        if demo:
            run("mlx-lattice", "demo", "--out", "demo")
            assert (place / "demo" / "run.html").stat().st_size > 10_000


def main() -> int:
    """Check every archive; return the exit code."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("archives", nargs="+", type=Path)
    options.add_argument("--install", action="store_true", help="install and run each")
    options.add_argument(
        "--native", action="store_true", help="one must have the extension for here"
    )
    options.add_argument("--demo", action="store_true", help="the demo too")
    given = options.parse_args()
    archives = [archive.resolve() for archive in given.archives]
    code = 0
    if given.native and not any(fits(a) and not is_pure(a) for a in archives):
        print("no wheel here has the extension for this Python on this machine")
        code = 1
    for path in archives:
        faults = faults_of(path)
        code |= bool(faults)
        print(f"{path.name}: {'; '.join(faults) or 'has what it should'}", flush=True)
        if given.install and not faults and fits(path):
            install(path, given.demo)
    return code


if __name__ == "__main__":
    sys.exit(main())
