"""clang's syntax tree of a kernel, for lint's rules.

The tree has the kernel's own declarations only: Metal's are in a precompiled header,
which clang does not print. A template stands there as it is written, and once more for
each instantiation.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator

_MARKER = re.compile(rb'^#\s*(?:line )?(\d+)(?: "([^"]*)")?')
FUNCTIONS = frozenset({"FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl"})
RECORDS = frozenset({"CXXRecordDecl", "ClassTemplateSpecializationDecl"})
_TEMPLATES = {"FunctionTemplateDecl": FUNCTIONS, "ClassTemplateDecl": RECORDS}
_NOWHERE: dict = {}
_NAMED = re.compile(r"(?:::)?(\w+)(?:<.*)?$")


class Node:
    """A declaration, a statement or an expression.

    Attributes:
        fields: What clang says of it.
        kind: Its class in clang, as ``ForStmt``.
        name: Of a declaration, else "".
        type: Without names for it, address spaces included; "" where it has none.
        written: The type as the kernel names it.
        parent: What it is part of, or None.
        children: Its parts; of a ``for``, five, of which some may have no kind.
        function: The function that it is part of, or None.
        implicit: Whether the kernel does not say it, or what it is part of.
        depends: Whether it is a template's text, whose types may not be known.
        place: ``file:line``.
    """

    __slots__ = (
        "children", "depends", "fields", "first", "function", "implicit", "kind",
        "last", "name", "nodes", "parent", "place", "type", "written",
    )  # fmt: skip

    def __init__(self, fields: dict, parent: Node | None, places: _Places, nodes: list):
        self.fields, self.parent, self.nodes = fields, parent, nodes
        self.kind, self.name = fields.get("kind", ""), fields.get("name", "")
        types = fields.get("type")
        self.written = types.get("qualType", "") if types else ""
        self.type = types.get("desugaredQualType", self.written) if types else ""
        self.place = places.of(fields) or (parent.place if parent else "")
        inner = fields.get("inner", ())
        self.implicit = fields.get("isImplicit", False)
        self.depends = self.kind == "ClassTemplatePartialSpecializationDecl"
        self.function = None
        if parent is not None:
            own = parent.kind in FUNCTIONS
            self.function = parent if own else parent.function
            self.implicit = self.implicit or parent.implicit
            self.depends = self.depends or parent.depends
            if self.kind in _TEMPLATES.get(parent.kind, ()):
                made = any(c.get("kind") == "TemplateArgument" for c in inner)
                self.depends = self.depends or not made
        self.first = len(nodes)
        nodes.append(self)
        self.children = [Node(child, self, places, nodes) for child in inner]
        self.last = len(nodes)

    def walk(self) -> list[Node]:
        """It and its parts, in the order of the text."""
        return self.nodes[self.first : self.last]

    def above(self) -> Iterator[Node]:
        """Yields what it is part of, the nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def has(self, kind: str) -> bool:
        """Whether one of its parts is of a kind."""
        return any(child.kind == kind for child in self.children)

    @property
    def id(self) -> str:
        """By which clang refers to it."""
        return self.fields.get("id", "")

    @property
    def refers_to(self) -> dict:
        """What clang says of the declaration that an expression names."""
        return self.fields.get("referencedDecl", {})

    @property
    def named(self) -> str:
        """The first name in an expression."""
        names = (n.refers_to.get("name") or n.name for n in self.walk())
        return next(filter(None, names), "?").lstrip(".->")

    @property
    def operator(self) -> str:
        """The operator function that an expression calls; "" for none."""
        if self.kind != "CXXOperatorCallExpr":
            return ""
        return self.children[0].named

    @property
    def parameters(self) -> list[Node]:
        """Those of a function."""
        return [child for child in self.children if child.kind == "ParmVarDecl"]


class _Places:
    """The file and line of each offset of a text with line markers."""

    def __init__(self, text: str):
        self.starts, self.names = [], []
        offset, file, number = 0, "kernel.metal", 0
        for line in text.encode().split(b"\n"):
            number += 1
            self.starts.append(offset)
            self.names.append(f"{file}:{number}")
            if marker := _MARKER.match(line):
                number = int(marker[1]) - 1
                file = (marker[2] or file.encode()).decode()
            offset += len(line) + 1

    def of(self, fields: dict) -> str:
        for where in (fields.get("loc"), fields.get("range", _NOWHERE).get("begin")):
            where = where.get("expansionLoc", where) if where else _NOWHERE
            if "offset" in where:
                return self.names[bisect_right(self.starts, where["offset"]) - 1]
        return ""


def parse(printed: bytes, text: str) -> Node:
    """Reads the tree that clang printed as JSON.

    Args:
        printed: What it printed.
        text: What it read.
    """
    return Node(json.loads(printed), None, _Places(text), [])


def base_name(type_name: str) -> str:
    """The name of a class without its namespace and arguments."""
    found = _NAMED.search(type_name.split("<")[0])
    return found[1] if found else ""
