"""mlx-lattice run: a Python script that finds this package's stand-ins for libraries.

The script runs as ``python script.py`` does: its folder is first in ``sys.path``, its
errors print their traceback, and its exit code is the command's. Processes that it
starts, such as the workers of a data loader, find the libraries too.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .. import compat
from . import usage

_STUB = "from mlx_lattice import compat\n\ncompat.install({library!r}, replace=True)\n"


def run(
    script: str,
    arguments: Sequence[str],
    libraries: Sequence[str],
    replace: bool = False,
    is_module: bool = False,
) -> int:
    """Run a script, or a module by its name, and return its exit code.

    Args:
        script: path of the file, or name of the module.
        arguments: what follows in ``sys.argv``.
        libraries: names of ``compat.LIBRARIES``.
        replace: whether to hide libraries that are installed.
        is_module: whether ``script`` names a module, as after ``python -m``.

    Raises:
        ValueError: there is no such library.
        ImportError: a library is installed, and ``replace`` is false.
        FileNotFoundError: there is no such file.
    """
    if not is_module and not Path(script).exists():
        raise FileNotFoundError(2, "no such file", script)
    # As `python` itself sets it. The libraries are looked for from there.
    first = os.getcwd() if is_module else str(Path(script).resolve().parent)
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [script, *arguments], first
    try:
        with usage():
            compat.install(*libraries, replace=replace)
        with _for_processes(libraries):
            return _execute(script, is_module)
    finally:
        sys.argv, sys.path[:] = argv, path


def _execute(script: str, is_module: bool) -> int:
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        traceback.print_exception(error.with_traceback(_of_script(error)))
        return 1
    return 0


def _of_script(error: BaseException):
    """Return the traceback without the frames above the script's own."""
    frame = error.__traceback__
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if name != __file__ and not name.startswith("<frozen") and "runpy" not in name:
            return frame
        frame = frame.tb_next
    return error.__traceback__


@contextmanager
def _for_processes(libraries: Sequence[str]) -> Iterator[None]:
    """Let processes that the script starts find the libraries.

    A folder of modules that install them is put into ``sys.path``, which processes of
    ``multiprocessing`` inherit, and into ``PYTHONPATH``, which others do.
    """
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory(prefix="mlx_lattice_") as folder:
        for library in libraries:
            for name in compat.LIBRARIES[library]:
                if "." not in name and compat.is_ours(sys.modules.get(name)):
                    text = _STUB.format(library=library)
                    Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
        sys.path.insert(1, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
