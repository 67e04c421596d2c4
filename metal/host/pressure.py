"""An estimate of the registers that a lane of a kernel needs, from clang's own output.

The kernel is compiled at -O2 with matrices and functions of simdgroups as calls that
take and give values. What is live at each instruction of LLVM's text is added up, and
the most of it is the estimate: 32-bit registers, two halves in one. Left out is what a
GPU keeps elsewhere or makes where it is needed: pointers to buffers, what is loaded or
computed from them and from nothing of the thread's (uniform registers), addresses,
conversions, comparisons, parts of vectors, integers made of one other integer. What
stays in memory, since clang does not unroll a loop, counts whole. The order of
instructions is clang's: a GPU's compiler may move loads, so the truth is some registers
beside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from math import ceil

from . import rewrite
from .compile import translate
from .toolchain import MEASURED, call

_NAME = re.compile(r'%(?:"[^"]+"|[-\w.$]+)')
_LABEL = re.compile(r'^((?:"[^"]+"|[-\w.$]+)):')
_TYPE = re.compile(r"^(%(?:\"[^\"]+\"|[-\w.$]+)) = type (.*)$")
_PHI = re.compile(r"\[ ([^,\]]+), (%(?:\"[^\"]+\"|[-\w.$]+)) \]")
_TARGET = re.compile(r"label (%(?:\"[^\"]+\"|[-\w.$]+))")
_PARAMETER = re.compile(r"(ptr[^,()]*(?:\([^()]*\)[^,()]*)*|[^,()]+?) (%[\w.]+)(?:,|$)")
_SCALAR = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8, "void": 0}
# What takes no register of its own, but keeps what it is made of.
_ALIASES = re.compile(
    "getelementptr|[sz]ext|trunc|bitcast|freeze|inttoptr|ptrtoint|[if]cmp|"
    "shufflevector|(?:extract|insert)(?:element|value)"
)
# What is sooner made again than kept, where it is made of one value and constants.
_CHEAP = re.compile("add|sub|mul|shl|[al]shr|and|x?or|[su]rem|[su]div")
_WORDS = re.compile(
    "nuw|nsw|exact|nneg|fast|nnan|ninf|nsz|arcp|contract|afn|reassoc|tail|musttail|"
    "notail|inbounds|volatile|atomic|noundef|signext|zeroext|nonnull"
)


@dataclass
class _Block:
    label: str
    before: list[str] = field(default_factory=list)  # blocks that may come before
    after: list[str] = field(default_factory=list)
    # (value it gives or None, values it needs), in order.
    instructions: list[tuple[str | None, frozenset[str]]] = field(default_factory=list)
    # Values that a phi of a block takes from each block before it.
    taken: dict[str, set[str]] = field(default_factory=dict)


def registers(source: str, name: str = "kernel") -> int:
    """Returns the estimate for a kernel's source, as MLX generated it.

    Args:
        source: Metal source of one kernel function, without MLX's preamble.
        name: What diagnostics call it.

    Raises:
        CompileError: The source is not valid.
    """
    return max(_of_text(_compiled(source, name)))


@cache
def _compiled(source: str, name: str) -> str:
    rewritten, compiler = translate(source, name, MEASURED)
    text = rewritten.text + rewrite.glue(rewritten)
    command = [*compiler, "-S", "-emit-llvm", "-o", "-"]
    return call(command, f"measuring {name}", text)


def _of_text(text: str) -> Iterator[int]:
    """Yields the estimate of every function of LLVM's text.

    A kernel is one, or is in the launcher that passes it its buffers.
    """
    types = {m[1]: m[2] for m in map(_TYPE.match, text.splitlines()) if m}
    head, lines = "", []
    for line in text.splitlines():
        if line.startswith("define "):
            head, lines = line, []
        elif line == "}" and head:
            yield _of_function(head, lines, types)
            head = ""
        elif head:
            lines.append(line)


def _of_function(head: str, lines: list[str], types: dict[str, str]) -> int:
    given = head[head.index("(", head.index("@")) : head.rindex(")")]
    buffers = [m[2] for m in _PARAMETER.finditer(given) if _is_buffer(m[1])]
    # A launcher gets them in an array, and then what says where the thread is.
    uniform = set(buffers[:1] if "4Bind" in head else buffers)
    sizes = {
        m[2]: 0 if m[2] in uniform or m[1].startswith("ptr") else _bytes(m[1], types)
        for m in _PARAMETER.finditer(given)
    }
    roots: dict[str, frozenset[str]] = {n: frozenset({n}) for n in sizes}
    memory, blocks = 0, [_Block("%entry")]
    for line in lines:
        if label := _LABEL.match(line):
            blocks.append(_Block("%" + label[1]))
            continue
        code = line.split(", !")[0].strip()
        if not code or code.startswith(("#dbg", ";")) or "@llvm.lifetime" in code:
            continue
        memory += _read(code, types, sizes, roots, uniform, blocks[-1])
    _join(blocks, roots)
    live = _most(blocks, {n: size for n, size in sizes.items() if size})
    return ceil((live + memory) / 4)


def _is_buffer(kind: str) -> bool:
    return kind.startswith("ptr") and "byval" not in kind


def _read(
    code: str,
    types: dict[str, str],
    sizes: dict[str, float],
    roots: dict[str, frozenset[str]],
    uniform: set[str],
    block: _Block,
) -> int:
    """Adds an instruction to its block; returns the bytes of memory that it takes."""
    found = re.match(r"(%[\w.]+) = (.*)$", code)
    to, rest = (found[1], found[2]) if found else (None, code)
    words = [w for w in rest.split() if not _WORDS.fullmatch(w)]
    kind = words[0]
    if kind == "alloca":
        roots[to] = frozenset()
        return _bytes(rest.split("alloca ", 1)[1].split(", align")[0], types)
    block.after += _TARGET.findall(rest)
    if kind == "phi":
        # Their values are needed where the blocks before end.
        for value, label in _PHI.findall(rest):
            if value.startswith("%"):
                block.taken.setdefault(label, set()).add(value)
        roots[to] = frozenset({to})
        sizes[to] = _bytes(_result(words, rest), types)
        block.instructions.append((to, frozenset()))
        return 0
    named = [n for n in _NAME.findall(rest) if n in roots and n != to]
    needs = frozenset().union(*(roots[n] for n in named))
    if to is None:
        block.instructions.append((None, needs))
        return 0
    fixed = all(n in uniform for n in named) and "@" not in rest and kind != "call"
    if named and fixed:
        uniform.add(to)
        roots[to] = frozenset()
    elif _ALIASES.fullmatch(kind) or (_CHEAP.fullmatch(kind) and len(needs) == 1):
        roots[to] = needs
    else:
        roots[to] = frozenset({to})
        sizes[to] = _bytes(_result(words, rest), types)
        block.instructions.append((to, needs))
    return 0


def _result(words: list[str], rest: str) -> str:
    """The type that an instruction gives."""
    kind = words[0]
    text = rest[rest.index(kind) + len(kind) :].strip()
    while _WORDS.fullmatch(text.split(" ", 1)[0]) or text.startswith(
        ("i1 %", "i1 true")
    ):
        if kind == "select" and text.startswith("i1 "):
            text = text.split(", ", 1)[1]
            break
        text = text.split(" ", 1)[1]
    if " to " in text and kind not in ("load", "call", "phi", "select"):
        text = text.rsplit(" to ", 1)[1]
    if kind == "select" and text.startswith("i1 "):
        text = text.split(", ", 1)[1]
    return _first_type(text)


def _first_type(text: str) -> str:
    depth = 0
    for at, letter in enumerate(text):
        depth += letter in "<[{"
        depth -= letter in ">]}"
        if depth == 0 and letter in " ,":
            return text[:at]
    return text


def _bytes(kind: str, types: dict[str, str]) -> float:
    """The bytes of a type: conditions take none, smaller numbers two."""
    kind = kind.strip()
    if vector := re.match(r"[<\[](\d+) x (.*)[>\]]$", kind):
        return int(vector[1]) * _bytes(vector[2], types)
    if kind.startswith("%"):
        return _bytes(types.get(kind.split(" ")[0], "{}"), types)
    if kind.startswith(("{", "<{")):
        return sum(_bytes(part, types) for part in _parts(kind.strip("<{ }>")))
    kind = kind.split(" ")[0]
    if number := re.match(r"i(\d+)$", kind):
        bits = int(number[1])
        return 0 if bits == 1 else max(2, bits / 8)
    return _SCALAR.get(kind, 4)


def _parts(text: str) -> Iterator[str]:
    while text:
        part = _first_type(text.strip(", "))
        if part:
            yield part
        text = text.strip(", ")[len(part) :].strip(", ")


def _join(blocks: list[_Block], roots: dict[str, frozenset[str]]) -> None:
    """Says what comes before each block, and replaces what phis take by its roots."""
    known = {b.label: b for b in blocks}
    # clang leaves the first block without a label, where it has a number.
    first = {label for b in blocks for label in b.taken} - known.keys()
    for label in first:
        known[label] = blocks[0]
    for block in blocks:
        taken: dict[str, set[str]] = {}
        for label, values in block.taken.items():
            every = frozenset().union(*(roots.get(v, frozenset()) for v in values))
            taken.setdefault(known[label].label, set()).update(every)
        block.taken = taken
        for label in block.after:
            known[label].before.append(block.label)


def _most(blocks: list[_Block], sizes: dict[str, float]) -> float:
    """The most bytes that are live at once."""
    known = {b.label: b for b in blocks}
    out: dict[str, set[str]] = {b.label: set() for b in blocks}
    waiting, most = [b.label for b in blocks], 0.0
    entry: dict[str, set[str]] = {}
    while waiting:
        label = waiting.pop()
        block, live = known[label], set(out[label])
        for to, needs in reversed(block.instructions):
            live.discard(to)
            live |= needs
        if entry.get(label) == live:
            continue
        entry[label] = live
        for before in block.before:
            new = live | block.taken.get(before, set())
            if not new <= out[before]:
                out[before] |= new
            waiting.append(before)
    for block in blocks:
        live = set(out[block.label])
        most = max(most, sum(sizes.get(n, 0) for n in live))
        for to, needs in reversed(block.instructions):
            most = max(most, sum(sizes.get(n, 0) for n in live | ({to} - {None})))
            live.discard(to)
            live |= needs
    return most
