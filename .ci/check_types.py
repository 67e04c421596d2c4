"""Check the types that users see, with pyright and mypy.

    python .ci/check_types.py

The examples and ``tests/typed_script.py`` must have no error, and at least 95 percent
of the public names a known type.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.nn

ROOT = Path(__file__).resolve().parents[1]
FILES = "examples", "tests/typed_script.py"
LEAST = 0.95


def run(*command: str, **options) -> subprocess.CompletedProcess[str]:
    """Run a module of this interpreter in the root folder."""
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, **options)


def visible_mlx(folder: Path) -> None:
    """Link MLX into a folder as a package that has types.

    MLX's wheel has py.typed in a namespace package, where ``--verifytypes`` does not
    look. It would then count each subclass of ``mlx.nn.Module`` as unknown.
    """
    (folder / "mlx").mkdir()
    (folder / "mlx" / "__init__.py").touch()
    for path in Path(mlx.nn.__file__).parents[1].iterdir():
        (folder / "mlx" / path.name).symlink_to(path)


def completeness() -> dict:
    """Return pyright's report on the types of the package's public names."""
    with tempfile.TemporaryDirectory() as folder:
        visible_mlx(Path(folder))
        paths = os.pathsep.join([str(ROOT), folder])
        binaries = os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        found = run(
            *("pyright", "--verifytypes", "mlx_lattice"),
            *("--ignoreexternal", "--outputjson"),
            env=os.environ | {"PYTHONPATH": paths, "PATH": binaries},
            stdout=subprocess.PIPE,
        )
    return json.loads(found.stdout)["typeCompleteness"]


def main() -> None:
    """Run the three checks; exit with 1 if one fails."""
    wrong = run("pyright", "--pythonpath", sys.executable, *FILES).returncode
    wrong |= run("mypy", *FILES).returncode
    report = completeness()
    score = report["completenessScore"]
    print(f"{score:.1%} of the public names have a known type")
    if score < LEAST:
        reasons = re.compile("missing|could be inferred|has unknown type")
        for symbol in report["symbols"]:
            for each in symbol["diagnostics"] if symbol["isExported"] else ():
                if reasons.search(each["message"]):
                    print(f"  {symbol['name']}: {each['message'].splitlines()[0]}")
        print(
            f"At least {LEAST:.0%} must have one. Annotate these; a name that has one"
        )
        print("of them in its type is unknown too")
    sys.exit(1 if wrong or score < LEAST else 0)


if __name__ == "__main__":
    main()
