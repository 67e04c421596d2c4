"""How the arrays of MLX's views lie in the memory that they share."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .graph import Layout, Node


def fresh(shape: Sequence[int]) -> Layout:
    """Return the layout of an array that has just been allocated."""
    size = prod(shape)
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    is_vector = size <= 1 or size == max(shape)
    return Layout(tuple(strides[::-1]), size, True, True, is_vector)


def view(node: Node, of: Node, at: Layout) -> Layout | None:
    """Return the layout of a view, or None where MLX copies instead.

    Args:
        node: an array that a primitive of ``VIEWS`` makes.
        of: what it is a view of.
        at: the layout of that.
    """
    return VIEWS[node.primitive](node, of, at)


def _same(node: Node, of: Node, at: Layout) -> Layout:
    return at


def _transpose(node: Node, of: Node, at: Layout) -> Layout:
    strides = tuple(at.strides[axis] for axis in node.state)
    rows, columns = at.rows, at.columns
    if at.dense and at.span == of.size:
        rows, columns = _order(node.shape, strides)
    return Layout(strides, at.span, at.dense, rows, columns)


def _broadcast(node: Node, of: Node, at: Layout) -> Layout:
    if not node.size:
        return fresh(node.shape)
    new = len(node.shape) - len(of.shape)
    held = (0 if n == 1 else s for n, s in zip(of.shape, at.strides, strict=True))
    same = node.size <= of.size
    return Layout(
        (0,) * new + tuple(held),
        at.span,
        at.dense,
        at.rows and same,
        at.columns and same,
    )


def _expand(node: Node, of: Node, at: Layout) -> Layout:
    strides = list(at.strides)
    for axis in node.state:
        strides.insert(axis, 1)
    return Layout(tuple(strides), at.span, at.dense, at.rows, at.columns)


def _squeeze(node: Node, of: Node, at: Layout) -> Layout:
    gone = set(node.state)
    strides = tuple(s for axis, s in enumerate(at.strides) if axis not in gone)
    return Layout(strides, at.span, at.dense, at.rows, at.columns)


def _slice(node: Node, of: Node, at: Layout) -> Layout:
    if not node.size:
        return fresh(node.shape)
    strides = tuple(s * n for s, n in zip(at.strides, node.state, strict=True))
    span = 1 + sum(abs(s) * (n - 1) for s, n in zip(strides, node.shape, strict=True))
    held = prod(n for n, s in zip(node.shape, strides, strict=True) if s > 0)
    return Layout(strides, span, held == span, *_order(node.shape, strides))


def _split(node: Node, of: Node, at: Layout) -> Layout:
    rows, columns = _order(node.shape, at.strides)
    span = prod(n for n, s in zip(node.shape, at.strides, strict=True) if s > 0)
    dense = span == 1 or (at.dense and (span == at.span or rows or columns))
    return Layout(at.strides, span, dense, rows, columns)


def _reshape(node: Node, of: Node, at: Layout) -> Layout | None:
    new = fresh(node.shape)
    if at.rows or not of.size:
        return Layout(new.strides, at.span, at.dense, at.rows, new.columns)
    if not of.shape:
        return Layout((0,) * len(node.shape), at.span, at.dense, at.rows, at.columns)
    strides = _reshaped(node.shape, *_collapsed(of.shape, at.strides))
    if strides is None:
        return None
    return Layout(strides, at.span, at.dense, at.rows, at.columns)


def _reinterpret(node: Node, of: Node, at: Layout) -> Layout | None:
    narrows = node.itemsize < of.itemsize and at.strides and at.strides[-1] == 1
    if not (node.itemsize == of.itemsize or narrows or at.rows):
        return None
    strides = [s * of.itemsize // node.itemsize for s in at.strides[:-1]]
    span = at.span * of.itemsize // node.itemsize
    strides = (*strides, *at.strides[-1:])
    return Layout(strides, span, at.dense, at.rows, at.columns)


# By the primitive; AsStrided's strides are not known: no array of its is dense.
VIEWS = {
    "AsStrided": lambda node, of, at: Layout(at.strides, at.span, False, False, False),
    "Broadcast": _broadcast,
    "BroadcastAxes": _broadcast,
    "Copy": _same,
    "ExpandDims": _expand,
    "Flatten": _reshape,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "StopGradient": _same,
    "Transpose": _transpose,
    "Unflatten": _reshape,
    "View": _reinterpret,
    "Withheld": _same,
}


def _order(shape: Sequence[int], strides: Sequence[int]) -> tuple[bool, bool]:
    """Return whether strides go by rows, and whether by columns."""

    def goes(pairs) -> bool:
        step = 1
        for extent, stride in pairs:
            if extent != 1 and stride != step:
                return False
            step *= extent
        return True

    pairs = list(zip(shape, strides, strict=True))
    return goes(reversed(pairs)), goes(pairs)


def _collapsed(shape, strides) -> tuple[list[int], list[int]]:
    """Merge axes that lie one in the other; axes of one element go."""
    extents, steps = [], []
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        if steps and steps[-1] == stride * extent:
            extents[-1] *= extent
            steps[-1] = stride
        else:
            extents.append(extent)
            steps.append(stride)
    return extents, steps


def _reshaped(shape, extents: list[int], steps: list[int]) -> tuple[int, ...] | None:
    """Return the strides of a shape over merged axes, or None where it must copy."""
    left, strides, j = list(extents), [], 0
    for extent in shape:
        if j < len(left) and left[j] % extent == 0:
            left[j] //= extent
            strides.append(left[j] * steps[j])
            j += left[j] == 1
        elif extent == 1:
            strides.append(strides[-1] if strides else 1)
        else:
            return None
    return tuple(strides)
