"""How kernels use vectors and arrays of a thread, for lint.py.

These stay in registers only where every index is known when the kernel is compiled: a
loop that may run any number of times is not unrolled, and what it indexes goes to
memory. An element of a vector has no address, and nothing refers to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .tree import Node

_LOOPS = frozenset({"ForStmt", "WhileStmt", "DoStmt", "CXXForRangeStmt"})
_CONSTANTS = frozenset({"EnumConstantDecl", "NonTypeTemplateParmDecl", "FunctionDecl"})
_VECTOR = re.compile(r"^(?:const |__private )*(?:metal::)?(?:packed_)?vec<")
_INDEXED = re.compile(
    r"^(?:const |__private )*(?:metal::)?(?:packed_)?vec<|\bcooperative_tensor<"
)
_OTHER_MEMORY = re.compile(r"__(?:global|local|constant)\b")
_ASSIGNED = re.compile(r"^(?:[-+*/%&|^]|<<|>>)?=$")


def in_registers(tree: Node) -> Iterator[str]:
    """Yields indices that are not known, and references to elements."""
    variables = {n.id: n for n in tree.walk() if n.kind == "VarDecl"}
    loops = {n: _is_counted(n, variables) for n in tree.walk() if n.kind in _LOOPS}
    changing = {n: _changing(n, loops) for n, counted in loops.items() if not counted}
    for node in tree.walk():
        if node.depends:
            continue
        base, index = _indexed(node)
        if base is not None:
            around = [n for n in node.above() if n in changing]
            names = {id_ for loop in around for id_ in changing[loop]}
            used = next(
                (n for n in index.walk() if n.refers_to.get("id") in names), None
            )
            if used is not None:
                yield (
                    f"{node.place}: error: '{_name(base)}' is indexed by "
                    f"'{used.refers_to['name']}' of a loop whose count is not known: "
                    "give the loop a fixed count, and its body a guard"
                )
        if (element := _element(node)) and (fault := _referred(node)):
            yield f"{node.place}: error: {fault} '{_name(element)}'"


def _is_counted(loop: Node, variables: dict[str, Node]) -> bool:
    """Whether a loop's count is known when it is compiled."""
    if loop.kind == "CXXForRangeStmt":
        return True
    if loop.kind != "ForStmt":
        return False
    start, _, condition, step, _ = loop.children
    own = _counters(loop)
    return bool(own and condition.kind and step.kind) and all(
        _is_constant(part, variables, own) for part in (start, condition, step)
    )


def _counters(loop: Node) -> set[str]:
    """The variables that a `for` declares or sets, and steps."""
    start, _, _, step, _ = loop.children
    declared = {n.id for n in start.walk() if n.kind == "VarDecl"} | _assigned(start)
    return declared & _assigned(step)


def _is_constant(part: Node, variables: dict[str, Node], known: set[str]) -> bool:
    for node in part.walk():
        if node.kind == "CallExpr":
            return False
        if node.kind == "MemberExpr" or node.kind == "CXXThisExpr":
            return False
        named = node.refers_to
        if not named or named["id"] in known or named["kind"] in _CONSTANTS:
            continue
        variable = variables.get(named["id"])
        if variable is None:  # of Metal's or MLX's headers
            if named["kind"] != "VarDecl":
                return False
        elif not variable.fields.get("constexpr"):
            fixed = re.match(r"const\b[^&*]*$", variable.written)
            if not fixed or not _is_constant(variable, variables, known):
                return False
    return True


def _assigned(part: Node) -> set[str]:
    """The variables that a statement changes."""
    found = set()
    for node in part.walk():
        opcode = node.fields.get("opcode", "")
        if _ASSIGNED.match(opcode) or opcode in ("++", "--"):
            found |= {n.refers_to["id"] for n in _lvalue(node.children[0])}
    return found


def _lvalue(node: Node) -> list[Node]:
    while node.kind in ("ParenExpr", "ImplicitCastExpr"):
        (node,) = node.children
    return [node] if node.refers_to else []


def _changing(loop: Node, loops: dict[Node, bool]) -> set[str]:
    """The variables whose values differ between a loop's rounds."""
    counted = [n for n in loop.walk() if n.kind == "ForStmt" and loops[n]]
    found = _assigned(loop) - {id_ for n in counted for id_ in _counters(n)}
    # What is made of one of these in the loop differs too.
    for node in loop.walk():
        if node.kind == "VarDecl" and node.id not in found:
            inside = any(n in counted for n in node.above()) and node.parent
            counter = inside and any(node.id in _counters(n) for n in counted)
            made = any(n.refers_to.get("id") in found for n in node.walk())
            if made and not counter:
                found.add(node.id)
    return found


def _indexed(node: Node) -> tuple[Node | None, Node | None]:
    """The vector or array of a thread that an expression indexes, and by what."""
    if node.kind == "ArraySubscriptExpr":
        base, index = node.children
        if base.kind == "ImplicitCastExpr" and "[" in base.children[0].type:
            base = base.children[0]
        memory = _OTHER_MEMORY.search(base.type.split("*")[0])
        return (None, None) if memory else (base, index)
    if node.kind == "CXXOperatorCallExpr" and len(node.children) == 3:
        callee, base, index = node.children
        named = [n.refers_to.get("name") for n in callee.walk() if n.refers_to]
        indexes = named == ["operator[]"] and _INDEXED.search(base.type)
        if indexes and not _OTHER_MEMORY.search(base.type):
            return base, index
    return None, None


def _element(node: Node) -> Node | None:
    """The vector of which an expression is an element."""
    if node.kind == "CXXOperatorCallExpr" and len(node.children) == 3:
        callee, base, _ = node.children
        named = [n.refers_to.get("name") for n in callee.walk() if n.refers_to]
        vector = re.sub(r"__\w+ ", "", base.type)
        return base if named == ["operator[]"] and _VECTOR.search(vector) else None
    if node.kind == "MemberExpr" and node.name and "swizzle<" not in node.type:
        base = node.children[0]
        while base.kind == "MemberExpr" and not base.name:
            (base,) = base.children
        if "metal::components<" in base.type and base.children:
            return base.children[0]
    return None


def _referred(element: Node) -> str:
    """What is done to an element that has no address; "" where all is well."""
    node, above = element, element.parent
    while above.kind in ("ParenExpr", "ConditionalOperator"):
        node, above = above, above.parent
    if above.kind == "UnaryOperator" and above.fields.get("opcode") == "&":
        return "the address is taken of an element of"
    reads = above.kind == "ImplicitCastExpr" and (
        above.fields.get("castKind") == "LValueToRValue" or "const" in above.type
    )
    bound = above.kind in (
        "VarDecl", "CallExpr", "CXXMemberCallExpr", "CXXConstructExpr", "ReturnStmt",
        "CXXCtorInitializer", "InitListExpr", "ImplicitCastExpr",
    )  # fmt: skip
    lvalue = node.fields.get("valueCategory") == "lvalue"
    return (
        "a reference is made to an element of" if bound and lvalue and not reads else ""
    )


def _name(node: Node) -> str:
    for part in node.walk():
        if part.refers_to:
            return part.refers_to.get("name", "")
        if part.kind == "MemberExpr" and part.name:
            return part.name
    return "a vector"
