"""How kernels use vectors and arrays of a thread, for lint.py.

These stay in registers only where every index is known when the kernel is compiled: a
loop that may run any number of times is not unrolled, and what it indexes goes to
memory. A function that indexes by a parameter is as good as its calls.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from .tree import FUNCTIONS, Node

_LOOPS = frozenset({"ForStmt", "WhileStmt", "DoStmt", "CXXForRangeStmt"})
# Calls, and what stands before their arguments.
_CALLS = {"CallExpr": 1, "CXXMemberCallExpr": 1, "CXXOperatorCallExpr": 2}
_CONSTANTS = frozenset({"EnumConstantDecl", "NonTypeTemplateParmDecl", "FunctionDecl"})
_INDEXED = re.compile(
    r"^(?:const |__private )*(?:metal::)?(?:packed_)?vec<|\bcooperative_tensor<"
)
_OTHER_MEMORY = re.compile(r"__(?:global|local|constant)\b")
_ASSIGNED = re.compile(r"^(?:[-+*/%&|^]|<<|>>)?=$")


def in_registers(tree: Node) -> Iterator[str]:
    """Yields indices that are not known when the kernel is compiled."""
    changing = _changing(tree)
    by_parameter = _by_parameter(tree)
    for node in tree.walk():
        if node.depends:
            continue
        names = {id_ for n in node.above() for id_ in changing.get(n, ())}
        if not names:
            continue
        base, indices = _indexed(node)
        given = _given(node)
        indices += [given[i] for i in by_parameter.get(_called(node), ()) if i in given]
        used = next((n for i in indices for n in i.walk() if _id(n) in names), None)
        if used is not None:
            what = base.named if base else "an array of the function"
            yield (
                f"{node.place}: error: '{what}' is indexed by '{used.named}' of a loop "
                "whose count is not known: give the loop a fixed count, and its body a "
                "guard"
            )


def _id(node: Node) -> str | None:
    return node.refers_to.get("id")


def _changing(tree: Node) -> dict[Node, set[str]]:
    """The variables that differ between the rounds of each loop of unknown count."""
    variables = {n.id: n for n in tree.walk() if n.kind == "VarDecl"}
    counters: dict[Node, set[str]] = {}
    others = []
    for node in tree.walk():
        if node.kind in _LOOPS:
            around = {id_ for n in node.above() for id_ in counters.get(n, ())}
            if _is_counted(node, variables, around):
                counters[node] = _counters(node)
            else:
                others.append(node)
    known = set().union(*counters.values())
    return {loop: _made_of(_assigned(loop) - known, loop, known) for loop in others}


def _made_of(names: set[str], part: Node, known: Container[str] = ()) -> set[str]:
    """Adds the variables that a part of the kernel makes of some, but known ones."""
    found = set(names)
    for node in part.walk():
        made = node.kind == "VarDecl" and any(_id(n) in found for n in node.walk())
        if made and node.id not in known:
            found.add(node.id)
    return found


def _is_counted(loop: Node, variables: dict[str, Node], around: set[str]) -> bool:
    """Whether a loop's count is known when it is compiled."""
    if loop.kind != "ForStmt":
        return loop.kind == "CXXForRangeStmt"
    start, _, condition, step, body = loop.children
    own = _counters(loop)
    if not (own and condition.kind and step.kind) or own & _assigned(body):
        return False
    parts = start, condition, step
    return all(_is_constant(part, variables, own | around) for part in parts)


def _counters(loop: Node) -> set[str]:
    """The variables that a loop declares or sets, and steps."""
    if loop.kind != "ForStmt":
        return set()
    start, _, _, step, _ = loop.children
    declared = {n.id for n in start.walk() if n.kind == "VarDecl"} | _assigned(start)
    return declared & _assigned(step)


def _is_constant(part: Node, variables: dict[str, Node], known: set[str]) -> bool:
    for node in part.walk():
        if node.kind in ("CallExpr", "MemberExpr", "CXXThisExpr"):
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
            target = node.children[0]
            while target.kind in ("ParenExpr", "ImplicitCastExpr"):
                (target,) = target.children
            found |= {id_ for id_ in [_id(target)] if id_}
    return found


def _indexed(node: Node) -> tuple[Node | None, list[Node]]:
    """The vector or array of a thread that an expression reads from, and by what."""
    if node.kind == "ArraySubscriptExpr":
        base, index = node.children
        if base.kind == "ImplicitCastExpr" and "[" in base.children[0].type:
            base = base.children[0]
        if not _OTHER_MEMORY.search(base.type.split("*")[0]):
            return base, [index] + [base] * ("*" in base.type)
    elif node.kind == "CXXOperatorCallExpr" and node.operator == "operator[]":
        _, base, index = node.children
        if _INDEXED.search(base.type) and not _OTHER_MEMORY.search(base.type):
            return base, [index]
    elif node.kind == "UnaryOperator" and node.fields["opcode"] == "*":
        (base,) = node.children
        if not _OTHER_MEMORY.search(base.type.split("*")[0]):
            return base, [base]
    return None, []


def _called(node: Node) -> str | None:
    """The function that an expression calls."""
    if not node.children or node.kind not in _CALLS:
        return None
    callee = node.children[0]
    if "referencedMemberDecl" in callee.fields:
        return callee.fields["referencedMemberDecl"]
    return next((_id(n) for n in callee.walk() if n.refers_to), None)


def _given(node: Node) -> dict[int, Node]:
    """The arguments of a call, by place."""
    before = _CALLS.get(node.kind)
    return {} if before is None else dict(enumerate(node.children[before:]))


def _by_parameter(tree: Node) -> dict[str, set[int]]:
    """The places of the parameters by which each function indexes."""
    made = {
        f.id: [_made_of({p.id}, f) for p in f.parameters]
        for f in tree.walk()
        if f.kind in FUNCTIONS and f.has("CompoundStmt") and not f.depends
    }
    uses = []
    for node in tree.walk():
        if node.function and node.function.id in made:
            indices, given = _indexed(node)[1], _given(node)
            if indices or given:
                uses.append((node.function.id, indices, _called(node), given))
    found: dict[str, set[int]] = {}
    before = -1
    while before != (before := sum(map(len, found.values()))):
        for function, indices, called, given in uses:
            passed = [given[i] for i in found.get(called, ()) if i in given]
            named = {_id(n) for i in (*indices, *passed) for n in i.walk()}
            places = {i for i, own in enumerate(made[function]) if named & own}
            found.setdefault(function, set()).update(places)
    return found
