"""What Metal 3.1 (macOS 14) refuses and clang's C++ for OpenCL takes, for lint.py.

Three sources: the tokens of the kernel, for names and headers that came later; clang's
own warnings, for C++ later than Metal's; and its syntax tree, for what Metal forbids
of C++ itself.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_LATER = {
    r"metal_(?:tensor|cooperative_tensor)\b|MetalPerformancePrimitives": "4.0",
    r"\b(?:mpp|tensor_ops|cooperative_tensor|tensor_inline|dextents)\b": "4.0",
    r"\bmetal_logging\b|\bos_log\w*|\bcoherent\b": "3.2",
    r"\batomic_thread_fence\b|\bthread_scope_\w+": "3.2",
    r"\bmemory_order_(?:acquire|release|acq_rel|seq_cst)\b": "3.2",
    r"\batomic_compare_exchange_strong\w*": None,
    r"\bdouble\b": None,
    r"\bgoto\b": None,
    r"\bthread_local\b": None,
    r"\blong\s+long\b": None,
    r"\bstd::\w+": None,
}
# MLX compiles `if constexpr` for macOS 14 in kernels of its own: a C++17 extension.
_WARNING = re.compile(
    r"^(\S+?:\d+):\d+: warning: (?!constexpr if)(.*) "
    r"\[-W(?:pre-c\+\+17-compat|c\+\+98-compat)\]$"
)
_NODE = re.compile(r"^([ |`-]*)(\w+) (0x\w+)(.*)$")
_LINE = re.compile(r"([^\s<>:,]*):(\d+):\d+")
_CALLED = re.compile(r"(?:Function|CXXMethod) (0x\w+) '([^']*)' '([^']*)'")
_METHOD = re.compile(r"(?:->|\.)\w+ (0x\w+)$")
_BEFORE = re.compile(r"\bprev (0x\w+)")
_VARIABLE = re.compile(r"(\w+) '([^']*)'(?::'[^']*')?")
# Variables whose own memory is device memory; `*__private` is that of a pointer.
_GLOBAL = re.compile(
    r"^(?:const |volatile )*__global [^*&]*$|[*&] ?(?:const )?__global$"
)
_SIMD = re.compile(r"^(?:simd|quad)_\w+$")
# Of 64 bits, MLX's utilities have shuffles of their own.
_SHUFFLES = re.compile(r"^simd_shuffle(?:_up|_down|_and_fill_up)?$")

WARNINGS = ("-Wpre-c++17-compat", "-Wc++98-compat")


def in_tokens(source: str, name: str) -> list[str]:
    """Names and headers that Metal 3.1 does not have."""
    found = []
    for number, line in enumerate(without_comments(source).splitlines(), 1):
        for pattern, version in _LATER.items():
            if used := re.search(pattern, line):
                since = f"needs Metal {version}" if version else "is not in Metal"
                found.append(f"{name}.metal:{number}: error: {used.group()} {since}")
    return found


def without_comments(source: str) -> str:
    """Blanks comments and strings; every place stays where it was."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), source)


def in_warnings(messages: str) -> list[str]:
    """C++ later than Metal's: C++17 but for what MLX relies on, and lambdas."""
    found = []
    for line in messages.splitlines():
        warning = _WARNING.match(line)
        if not warning or "lint_headers" in line:
            continue
        later = "pre-c++17" in line or "lambda" in line
        if later:
            found.append(f"{warning[1]}: error: not in Metal 3.1: {warning[2]}")
    return found


def _nodes(tree: str) -> Iterator[tuple[int, str, str, str, str]]:
    """Yields depth, kind, address, text and place of each node of the kernel's own."""
    file, line = "", ""
    for row in tree.splitlines():
        node = _NODE.match(row)
        if not node:
            continue
        span = node[4].split("> ")[0] if "<" in node[4] else ""
        for where, number in _LINE.findall(node[4]):
            if where != "line":
                file = where or file
            line = number
        if "lint_headers" not in file or ".metal" in span:
            yield len(node[1]), node[2], node[3], node[4], f"{file}:{line}"


def in_tree(tree: str, kernels: Container[str]) -> list[str]:
    """What Metal forbids: recursion, 64-bit lanes, variables in memory it has not.

    Args:
        tree: clang's syntax tree.
        kernels: names of the kernel functions.
    """
    found, functions, calls, places, same = [], [], {}, {}, {}
    for depth, kind, address, text, place in _nodes(tree):
        while functions and functions[-1][0] >= depth:
            functions.pop()
        if kind in ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl"):
            named, before = _VARIABLE.search(text), _BEFORE.search(text)
            if before:  # declared earlier, under the address that callers name
                address = same[address] = same.get(before[1], before[1])
            functions.append((depth, address, named[1] if named else ""))
            places[address] = place, functions[-1][2]
        inside = functions[-1] if functions else None
        if kind == "VarDecl" and (variable := _VARIABLE.search(text)):
            name, type_name = variable.groups()
            if _GLOBAL.search(type_name):
                found.append(f"{place}: error: '{name}' must be in constant memory")
            local = type_name.startswith("__local") and "mtl_type" in type_name
            if local and inside and inside[2] not in kernels:
                found.append(
                    f"{place}: error: '{name}' is threadgroup memory outside of a "
                    "kernel function"
                )
        if not inside:
            continue
        for callee, name, type_name in _CALLED.findall(text):
            calls.setdefault(inside[1], set()).add(same.get(callee, callee))
            wide = re.match(r"(?:const )?(?:unsigned )?long\b|vec<.*long", type_name)
            if _SIMD.match(name) and wide and not _SHUFFLES.match(name):
                found.append(f"{place}: error: {name} takes at most 32 bits a lane")
        if kind == "MemberExpr" and (method := _METHOD.search(text)):
            callee = same.get(method[1], method[1])
            calls.setdefault(inside[1], set()).add(callee)
    for address, (place, name) in places.items():
        if address in _reached(calls, address):
            found.append(f"{place}: error: '{name}' calls itself")
    return list(dict.fromkeys(found))


def _reached(calls: dict[str, set[str]], start: str) -> set[str]:
    reached, waiting = set(), [start]
    while waiting:
        new = calls.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached
