"""Type-checks a kernel as Metal would, address spaces included; nothing is generated.

The shim that runs kernels has one address space and C++'s conversions, so it accepts
code that Metal's compiler refuses. Lint is the other half: clang's C++ for OpenCL,
which has the same address spaces, reads the kernel against declarations that convert
what Metal converts (lint_headers/). What it takes and Metal 3.1 refuses, standard.py
finds; what Metal takes and may compile to something slow or wrong, functions.py.
"""

from __future__ import annotations

import re
import subprocess

from . import functions, standard
from .compile import preprocess
from .rewrite import rewrite
from .toolchain import HERE, clang

_PLACE = re.compile(r"([^\s<>:,]+):(\d+):\d+")
_UNPLACED = re.compile(
    r"(?:ParmVarDecl|VarDecl|FieldDecl) .*> \S*:\d+(?: used| referenced| invalid)* "
    r"(?!used |referenced |implicit |constexpr )(\w+) '([^']*__generic[^']*)'"
)


def _unplaced(tree: str) -> list[str]:
    """Pointers and references that name no address space.

    Metal wants one on each; OpenCL makes it __generic and goes on.
    """
    found, file, line = [], "", ""
    for node in tree.splitlines():
        # The tree names a file or a line only where it differs from the last one named.
        for where, number in _PLACE.findall(node):
            file, line = (file if where == "line" else where), number
        declared = _UNPLACED.search(node)
        if declared and "lint_headers" not in file:
            name, type_name = declared.groups()
            text = f"{file}:{line}: error: '{name}' has no address space: {type_name}"
            if text not in found:
                found.append(text)
    return found


def lint(source: str, name: str = "kernel") -> list[str]:
    """Finds what Metal's compiler would refuse and the host would run.

    One finding is false: ``?:`` between an element of device memory and a vector value
    (write an ``if``).

    Args:
        source: Metal source, such as ``Report.source`` or ``Source.text``.
        name: What the diagnostics call it, unless a ``#line`` in it says else.

    Returns:
        One line for each error; none for a clean kernel.
    """
    rewritten = rewrite(preprocess(source, name, preamble=""), lint=True)
    command = [*clang().command, "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc"]
    command += ["-fsyntax-only", "-ferror-limit=20", "-fno-color-diagnostics"]
    command += ["-Wno-everything", *standard.WARNINGS]
    command += ["-Xclang", "-ast-dump", "-include"]
    command += [str(HERE / "lint_headers" / "library.h"), "-"]
    out = subprocess.run(command, input=rewritten.text, capture_output=True, text=True)
    errors = [e for e in out.stderr.splitlines() if re.search(r"\berror: ", e)]
    return [
        *errors,
        *_unplaced(out.stdout),
        *standard.in_warnings(out.stderr),
        *standard.in_tree(out.stdout, rewritten.kernels),
        *standard.in_tokens(source, name),
        *functions.in_functions(source, name),
    ]
