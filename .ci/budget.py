"""Count files and lines by folder against the table of docs/contributing.md.

    python .ci/budget.py [--write]

It fails if a folder has more than its row allows, or no row. ``--write`` puts the
numbers of today into the table.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "contributing.md"
ROWS = re.compile(r"(?<=\n)\| `([\w./]+)` \| (\d+) \| (\d+) \|\n")
PARTS = "mlx_lattice", "tests", "benchmarks", "cpu", "cuda", "metal"
SUFFIXES = ".py", ".metal", ".cu", ".cuh", ".cpp", ".h"


def count() -> dict[str, tuple[int, int]]:
    """Return (files, lines) of each folder of the package, and of each other part."""
    command = ["git", "ls-files", *PARTS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    files, lines = Counter(), Counter()
    for path in map(Path, listed.stdout.decode().splitlines()):
        if path.suffix in SUFFIXES and (ROOT / path).is_file():
            part = path.parts[0]
            folder = str(path.parent) if part == PARTS[0] else part
            files[folder] += 1
            lines[folder] += len((ROOT / path).read_bytes().splitlines())
    return {folder: (files[folder], lines[folder]) for folder in sorted(files)}


def main() -> None:
    """Compare, or write the table."""
    page, counts = PAGE.read_text(encoding="utf-8"), count()
    if "--write" in sys.argv[1:]:
        rows = "".join(f"| `{f}` | {n} | {m} |\n" for f, (n, m) in counts.items())
        first, *_, last = ROWS.finditer(page)
        PAGE.write_text(page[: first.start()] + rows + page[last.end() :], "utf-8")
        return
    most = {f: (int(n), int(m)) for f, n, m in ROWS.findall(page)}
    above = [
        f"{folder} has {n} files and {m} lines; its budget is {most.get(folder)}"
        for folder, (n, m) in counts.items()
        if folder not in most or n > most[folder][0] or m > most[folder][1]
    ]
    package = [count for folder, count in counts.items() if folder.startswith(PARTS[0])]
    files, lines = map(sum, zip(*package, strict=True))
    print(f"{PARTS[0]}: {files} files, {lines} lines")
    if above:
        sys.exit(
            "\n".join(above) + "\nMake it smaller, or raise the number in "
            "docs/contributing.md and say why in the commit"
        )


if __name__ == "__main__":
    main()
