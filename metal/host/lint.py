"""Type-checks a kernel as Metal would, address spaces included; nothing is generated.

The shim that runs kernels has one address space and C++'s conversions, so it accepts
code that Metal's compiler refuses. Lint is the other half: clang's C++ for OpenCL,
which has the same address spaces, reads the kernel against declarations that convert
what Metal converts (lint_headers/). What it takes and Metal refuses, or may compile to
something slow or wrong, rules find in the syntax tree: standard.py, functions.py,
memory.py, registers.py, elements.py and names.py.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import elements, functions, memory, names, registers, standard
from .compile import preprocess
from .rewrite import rewrite
from .toolchain import (
    HERE,
    CompileError,
    cache_folder,
    clang,
    contents,
    digest,
    mlx_headers,
    precompiled_lint_headers,
)
from .tree import parse

_OPTIONS = ("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-Wno-everything")
_MESSAGE = re.compile(r"^(\S+?:\d+):\d+: (?:fatal )?(error|note|warning): (.*)$")
_TENSOR_OPS = re.compile(r"^\s*#\s*include <MetalPerformancePrimitives/", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:.*\\\n)*.*$", re.MULTILINE)
_BEFORE_TENSOR_OPS = 260100


def _errors(messages: str) -> Iterator[str]:
    """Yields clang's errors, each at a line of the kernel.

    What an assertion of lint_headers/ says is placed where the kernel asked for it.
    """
    waiting = ""
    for line in messages.splitlines():
        message = _MESSAGE.match(line)
        if not message or message[2] == "warning":
            continue
        place, kind, text = message.groups()
        if kind == "error":
            if waiting:
                yield waiting
            waiting = f"{place}: error: {text}"
        if waiting and "lint_headers" not in place:
            yield f"{place}: {waiting.split(': ', 1)[1]}"
            waiting = ""
    if waiting:
        yield waiting


def _unguarded(source: str, name: str) -> Iterator[str]:
    """Yields a finding where TensorOps of another layout would be compiled."""
    include = _TENSOR_OPS.search(source)
    if include and not _stops("\n".join(_DIRECTIVE.findall(source))):
        line = source.count("\n", 0, include.end()) + 1
        yield (
            f"{name}.metal:{line}: error: does not stop where cooperative tensors have "
            "another layout, below a deployment target of 26.2"
        )


@functools.cache
def _stops(directives: str) -> bool:
    try:
        preprocess(directives, preamble="", deployment_target=_BEFORE_TENSOR_OPS)
    except CompileError as error:
        return "#error" in str(error)
    return False


def lint(source: str, name: str = "kernel") -> list[str]:
    """Finds what Metal's compiler would refuse and the host would run.

    One finding is false: ``?:`` between an element of device memory and a vector value
    (write an ``if``).

    What is found is kept in the cache, as compiled kernels are.

    Args:
        source: Metal source, such as ``Report.source`` or ``Source.text``.
        name: What the diagnostics call it, unless a ``#line`` in it says else.

    Returns:
        One line for each error; none for a clean kernel.
    """
    kept = cache_folder() / f"lint-{digest(*_rules(), source, name)}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    found = _findings(source, name)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        new = Path(folder) / kept.name
        new.write_text(json.dumps(found))
        os.replace(new, kept)
    return found


@functools.cache
def _rules() -> tuple[str, ...]:
    """What findings depend on besides the kernel."""
    code = "".join(p.read_text() for p in sorted(HERE.glob("*.py")))
    headers = contents("lint_headers", "stand_ins")
    return clang().version, code, headers, mlx_headers()


def _findings(source: str, name: str) -> list[str]:
    rewritten = rewrite(preprocess(source, name, preamble=""), lint=True)
    command = [*clang().command, *_OPTIONS, *standard.WARNINGS]
    command += ["-include-pch", str(precompiled_lint_headers(_OPTIONS))]
    command += ["-fsyntax-only", "-ferror-limit=20", "-fno-color-diagnostics"]
    command += ["-Xclang", "-ast-dump=json", "-"]
    out = subprocess.run(command, input=rewritten.text.encode(), capture_output=True)
    messages = out.stderr.decode()
    if not out.stdout:
        raise CompileError(f"linting {name} failed:\n{messages[:6000]}")
    tree = parse(out.stdout, rewritten.text)
    found = [
        *_errors(messages),
        *memory.in_memory(tree, rewritten.kernels),
        *standard.in_warnings(messages),
        *functions.in_functions(tree, rewritten.kernels),
        *elements.in_elements(tree),
        *registers.in_registers(tree),
        *names.in_names(tree),
        *standard.in_tokens(source, name, tensor_ops=bool(_TENSOR_OPS.search(source))),
        *_unguarded(source, name),
    ]
    return list(dict.fromkeys(found))
