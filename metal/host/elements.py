"""Elements of vectors, for lint.py: they have no address, nothing refers to them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .tree import Node

_VECTOR = re.compile(r"^(?:const |__private )*(?:metal::)?(?:packed_)?vec<")


def in_elements(tree: Node) -> Iterator[str]:
    """Yields what takes an element's address or refers to it."""
    for node in tree.walk():
        if node.depends:
            continue
        if (element := _element(node)) and (fault := _referred(node)):
            yield f"{node.place}: error: {fault} '{element.named}'"


def _element(node: Node) -> Node | None:
    """The vector of which an expression is an element."""
    if node.kind == "CXXOperatorCallExpr" and node.operator == "operator[]":
        base = node.children[1]
        return base if _VECTOR.search(re.sub(r"__\w+ ", "", base.type)) else None
    if node.kind == "MemberExpr" and node.name and "swizzle<" not in node.type:
        base = node.children[0]
        while base.kind == "MemberExpr" and not base.name:
            (base,) = base.children
        if "metal::components<" in base.type and base.children:
            return base.children[0]
    return None


def _is_the_same(above: Node) -> bool:
    """Whether an expression is the element that it is made of, const or not yet."""
    if above.kind == "ImplicitCastExpr":
        kept = above.fields.get("castKind") in ("AddressSpaceConversion", "NoOp")
        return kept and "const" not in above.type
    return above.kind in ("ParenExpr", "ConditionalOperator")


def _referred(element: Node) -> str:
    """What is done to an element that has no address; "" where all is well."""
    node, above = element, element.parent
    while _is_the_same(above):
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
