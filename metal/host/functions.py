"""Functions that Metal's compiler may leave as calls, for lint.py.

A function that takes an array of simdgroup matrices and is not inlined can read the
wrong ones, without a word; `METAL_FUNC` is Metal's word for one that always is. From
Metal 4.1 on the `this` of a method that names no address space is generic, which costs
and may not compile: methods and constructors are `thread` (or what they are).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .standard import without_comments

_LINE = re.compile(r'^\s*#\s*line (\d+)(?: "([^"]*)")?')
_PIECE = re.compile(r"[{};()]|[^{};()]+")
_FUNCTION = re.compile(
    r"(operator\s*(?:\(\)|[^\s\w(]+)|~?\w+)\s*\(\)\s*([\w\s]*)(?::.*)?$", re.DOTALL
)
_SCOPE = re.compile(r"\b(?:struct|class|union|namespace)\b")
_SPACES = frozenset({"thread", "device", "constant", "threadgroup"})


def _places(source: str, name: str) -> list[str]:
    """What each line of the source is called in a finding."""
    file, number, places = f"{name}.metal", 0, []
    for line in source.splitlines():
        number += 1
        places.append(f"{file}:{number}")
        if said := _LINE.match(line):
            number, file = int(said[1]) - 1, said[2] or file
    return places


def _definitions(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yields the start, the head and whether it is a member, of each function defined.

    A head has no more than ``()`` of its parameters.
    """
    scopes: list[str] = []
    head, start, depth = "", 0, 0
    for piece in _PIECE.finditer(text):
        token = piece.group()
        depth -= token == ")"
        if depth == 0 and token in ("{", "}", ";"):
            if token == "{":
                function = "code" not in scopes and _FUNCTION.search(head.strip())
                if function:
                    yield start, head.strip(), scopes[-1:] == ["type"]
                named = None if function else _SCOPE.search(head)
                kind = "namespace" if named and named[0] == "namespace" else "type"
                scopes.append(kind if named else "code")
            elif token == "}" and scopes:
                scopes.pop()
            head = ""
        elif depth == 0:
            if not head.strip():
                start = piece.start() + len(token) - len(token.lstrip())
            head += token
        depth += token == "("


def in_functions(source: str, name: str) -> list[str]:
    """Definitions without `METAL_FUNC`, and methods without an address space.

    Args:
        source: Metal source; a kernel function needs neither.
        name: What the findings call it, unless a ``#line`` in it says else.
    """
    plain = without_comments(source)
    places = _places(source, name)
    # Directives, with their continuations, are no part of a declaration.
    text = re.sub(
        r"(?m)^[ \t]*#(?:.*\\\n)*.*$", lambda m: re.sub(r"[^\n]", " ", m[0]), plain
    )
    found = []
    for start, head, member in _definitions(text):
        if re.search(r"\bkernel\b", head):
            continue
        function = _FUNCTION.search(head)
        place = places[text.count("\n", 0, start)]
        if not re.search(r"\bMETAL_FUNC\b", head):
            found.append(f"{place}: error: '{function[1]}' is not METAL_FUNC")
        words = set(function[2].split())
        if member and not re.search(r"\bstatic\b", head) and not words & _SPACES:
            found.append(
                f"{place}: error: '{function[1]}' names no address space for `this`"
            )
    return found
