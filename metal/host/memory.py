"""Where variables lie, and how much of it there is, for lint.py."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .rewrite import Parameter
from .tree import FUNCTIONS, RECORDS, Node

BUFFERS = 31
THREADGROUP_BYTES = 32768
# The 128 registers of 4 bytes that a thread of any Apple GPU has at most.
THREAD_BYTES = 512

_DECLARED = frozenset({"ParmVarDecl", "VarDecl", "FieldDecl"})
# Variables whose own memory is device memory; `*__private` is that of a pointer.
_GLOBAL = re.compile(
    r"^(?:const |volatile )*__global [^*&]*$|[*&] ?(?:const )?__global$"
)
_ARRAY = re.compile(r"^([^\[(]*?)((?: ?\[\d+\])+)$")
_QUALIFIER = re.compile(r"\b(?:const|volatile|__private)\b")
_VECTOR = re.compile(r"^(?:metal::)?(packed_)?vec<(.+), ([234])>$")
_VECTOR_NAME = re.compile(r"^(packed_)?([a-z]+)([234])$")
_MATRIX = re.compile(
    r"^(?:metal::)?simdgroup_(?:matrix<)?(half|bfloat|float)(?:8x8)?\b"
)
_BYTES = {
    **dict.fromkeys(("bool", "char", "signed char", "uchar", "unsigned char"), 1),
    **dict.fromkeys(("short", "ushort", "unsigned short", "half", "bfloat"), 2),
    **dict.fromkeys(("int", "uint", "unsigned int", "float"), 4),
    **dict.fromkeys(("long", "ulong", "unsigned long"), 8),
}


def in_memory(tree: Node, kernels: dict[str, list[Parameter]]) -> Iterator[str]:
    """Yields what lies in no memory or in the wrong one, and what is too large.

    Args:
        tree: The kernel's tree.
        kernels: The parameters of each kernel function.
    """
    totals: dict[int, tuple[Node, int]] = {}
    records = _Records(tree)
    for node in tree.walk():
        if node.kind in _DECLARED and not node.implicit:
            function = node.function
            if "__generic" in node.written and not node.fields.get("constexpr"):
                yield (
                    f"{node.place}: error: '{node.name}' has no address space: "
                    f"{node.written}"
                )
            if node.kind == "VarDecl" and _GLOBAL.search(node.written):
                yield f"{node.place}: error: '{node.name}' must be in constant memory"
            memory = "mtl_type" in node.written and node.written.startswith("__local")
            if memory and function and function.name not in kernels:
                yield (
                    f"{node.place}: error: '{node.name}' is threadgroup memory outside "
                    "of a kernel function"
                )
            if not node.depends and (node.kind == "FieldDecl" or function):
                size = records.array_bytes(node.type)
                if size > THREAD_BYTES:
                    yield (
                        f"{node.place}: error: '{node.name}' takes {size} bytes of a "
                        f"thread, whose registers are {THREAD_BYTES}"
                    )
        elif node.kind == "FunctionDecl" and "__generic" in node.written.split("(")[0]:
            yield f"{node.place}: error: '{node.name}' returns no address space"
        elif node.kind == "EnumConstantDecl" and node.name.startswith("mtl_bytes_"):
            function = node.function
            value = next(
                (c.fields["value"] for c in node.walk() if "value" in c.fields), None
            )
            if function and value is not None and not node.depends:
                _, before = totals.get(id(function), (function, 0))
                totals[id(function)] = function, before + int(value)
        if node.kind in FUNCTIONS and node.name in kernels:
            last = max((p.index for p in kernels[node.name] if p.buffer), default=0)
            if last >= BUFFERS:
                yield (
                    f"{node.place}: error: '{node.name}' has a buffer {last}; "
                    f"{BUFFERS - 1} is the last"
                )
    for function, total in totals.values():
        if total > THREADGROUP_BYTES:
            yield (
                f"{function.place}: error: '{function.name}' has {total} bytes of "
                f"threadgroup memory; {THREADGROUP_BYTES} are the most"
            )


class _Records:
    """Sizes of types, as far as the tree says them; 0 for others."""

    def __init__(self, tree: Node):
        self.fields: dict[str, list[str]] = {}
        for node in tree.walk():
            if node.kind in RECORDS and node.fields.get("completeDefinition"):
                types = [c.type for c in node.children if c.kind == "FieldDecl"]
                self.fields[_printed(node)] = types

    def array_bytes(self, type_name: str) -> int:
        """Bytes of an array in a thread; 0 for what is none."""
        if re.search(r"[*&]|__global|__local|__constant", type_name):
            return 0
        plain = _QUALIFIER.sub("", type_name).strip()
        return self.bytes(plain) if "[" in plain else 0

    def bytes(self, name: str) -> int:
        name = _QUALIFIER.sub("", name).strip()
        if "*" in name or "&" in name:
            return 8
        if array := _ARRAY.match(name):
            total = self.bytes(array[1].strip())
            for extent in re.findall(r"\d+", array[2]):
                total *= int(extent)
            return total
        if vector := _VECTOR.match(name) or _VECTOR_NAME.match(name):
            packed, element, count = vector.groups()
            return self.bytes(element) * (
                4 if count == "3" and not packed else int(count)
            )
        if matrix := _MATRIX.match(name):
            return 2 * self.bytes(matrix[1])
        if name in _BYTES:
            return _BYTES[name]
        return sum(map(self.bytes, self.fields.get(name, ())))


def _printed(record: Node) -> str:
    """The name of a class as types name it."""
    arguments = [
        c.type or str(c.fields.get("value", ""))
        for c in record.children
        if c.kind == "TemplateArgument"
    ]
    return f"{record.name}<{', '.join(arguments)}>" if arguments else record.name
