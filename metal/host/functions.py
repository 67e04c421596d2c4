"""Functions that Metal's compiler may leave as calls, or that call themselves.

A function that takes an array of simdgroup matrices and is not inlined can read the
wrong ones, without a word; `METAL_FUNC` is Metal's word for one that always is. From
Metal 4.1 on the `this` of a method that names no address space is generic, which costs
and may not compile; before, such a method is of thread memory alone. Methods and
constructors are `thread` (or what they are), and what holds matrices has a constructor
that says so.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from .tree import FUNCTIONS, RECORDS, Node, base_name

_THIS = re.compile(r"\)[^()]*\b__generic$")
_MATRICES = re.compile(r"\b(?:simdgroup_matrix|simdgroup_\w+8x8|cooperative_tensor)\b")
_SPACES = re.compile(r"__(?:global|local|constant)\b")


def in_functions(tree: Node, kernels: Container[str]) -> Iterator[str]:
    """Yields findings in definitions and calls.

    Args:
        tree: The kernel's tree.
        kernels: Names of the kernel functions, which nothing calls.
    """
    own = {n.id for n in tree.walk() if n.kind in FUNCTIONS}
    for node in tree.walk():
        if node.kind in FUNCTIONS and not node.implicit and node.name not in kernels:
            if node.has("CompoundStmt") and not node.has("AlwaysInlineAttr"):
                yield f"{node.place}: error: '{node.name}' is not METAL_FUNC"
            static = node.fields.get("storageClass") == "static"
            if node.kind != "FunctionDecl" and not static and _THIS.search(node.type):
                yield (
                    f"{node.place}: error: '{node.name}' names no address space for "
                    "`this`"
                )
        if node.kind == "MemberExpr" and node.fields["referencedMemberDecl"] in own:
            (this,) = node.children
            object_type = this.children[0].type if this.children else ""
            if "__generic" in this.type and _SPACES.search(object_type):
                yield (
                    f"{node.place}: error: '{node.name.lstrip('.->')}' is a method of "
                    f"thread memory, called on {object_type}"
                )
    yield from _unconstructed(tree)
    yield from _recursive(tree)


def _unconstructed(tree: Node) -> Iterator[str]:
    records = [
        n
        for n in tree.walk()
        if n.kind in RECORDS and n.fields.get("completeDefinition")
    ]
    fields = {
        r.id: [f.type for f in r.children if f.kind == "FieldDecl"] for r in records
    }
    holders: set[str] = set()
    more = True
    while more:
        more = False
        for record in records:
            holds = any(
                _MATRICES.search(t)
                or ("*" not in t and base_name(_plain(t)) in holders)
                for t in fields[record.id]
            )
            if holds and record.name not in holders:
                holders.add(record.name)
                more = True
    for record in records:
        constructed = any(
            n.kind == "CXXConstructorDecl"
            and not n.implicit
            and n.type == "void () __private"
            for n in record.children
        )
        if record.name in holders and not constructed:
            yield (
                f"{record.place}: error: '{record.name}' holds matrices: give it "
                f"`METAL_FUNC {record.name}() thread {{}}`"
            )


def _plain(type_name: str) -> str:
    return re.sub(r"\b(?:const|volatile|__\w+)\b|\[.*", "", type_name).strip()


def _recursive(tree: Node) -> Iterator[str]:
    # A declaration after the first has the first one's name for all.
    first: dict[str, str] = {}
    functions: dict[str, Node] = {}
    calls: dict[str, set[str]] = {}
    for node in tree.walk():
        if node.kind in FUNCTIONS:
            before = node.fields.get("previousDecl", node.id)
            first[node.id] = first.get(before, before)
            functions[first[node.id]] = node
    for node in tree.walk():
        called = node.fields.get("referencedMemberDecl") or node.refers_to.get("id")
        if called in first and (caller := node.function):
            calls.setdefault(first[caller.id], set()).add(first[called])
    for start, node in functions.items():
        if start in _reached(calls, start):
            yield f"{node.place}: error: '{node.name}' calls itself"


def _reached(calls: dict[str, set[str]], start: str) -> set[str]:
    reached, waiting = set(), [start]
    while waiting:
        new = calls.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached
