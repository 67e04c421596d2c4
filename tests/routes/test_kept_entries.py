"""Files of what was measured: of several processes, and of another form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_lattice import LatticeWarning, cache_files

ROOT = Path(__file__).resolve().parents[2]


def file(folder):
    path, header = Path(folder) / "entries.json", {"version": 1}
    return cache_files.EntryFile(path, header, lambda entry: isinstance(entry, dict))


STORE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_kept_entries import file
from mlx_lattice import cache_files
with cache_files.cache(sys.argv[2]):
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(40):
        file(sys.argv[2]).add(f"{sys.argv[3]} {i}", {"is": i})
"""


def test_processes_that_store_at_once_lose_nothing(tmp_path):
    given = str(Path(__file__).parent), str(tmp_path)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", STORE, *given, str(name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        for name in range(3)
    ]
    for each in running:
        assert each.stdout.readline() == "ready\n"
    for each in running:
        each.stdin.write("\n")
        each.stdin.close()
    assert [each.wait() for each in running] == [0] * 3
    with cache_files.cache(tmp_path):
        assert len(file(tmp_path).load()) == 3 * 40


@pytest.mark.parametrize("text", ("[" * 100_000, "[]", "{", '{"entries": 3}', ""))
def test_files_of_another_form_are_written_anew(text, tmp_path):
    (tmp_path / "entries.json").write_text(text)
    with (
        cache_files.cache(tmp_path),
        pytest.warns(LatticeWarning, match="written anew"),
    ):
        assert file(tmp_path).load() == {}
        file(tmp_path).add("a", {"is": 1})
    held = json.loads((tmp_path / "entries.json").read_text())
    assert held["entries"] == {"a": {"is": 1}}


def test_a_folder_that_takes_no_file(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "folder"
    with cache_files.cache(folder):
        with pytest.warns(LatticeWarning, match="this process only"):
            file(folder).add("a", {"is": 1})
        assert file(folder).load() == {"a": {"is": 1}}
