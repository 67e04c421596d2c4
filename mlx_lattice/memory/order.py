"""In which order MLX evaluates a lazy graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from .graph import Node

# MLX goes on depth first once as many arrays as this wait on one level.
WIDTH = int(os.environ.get("MLX_BFS_MAX_WIDTH", 20))


def order(
    nodes: Sequence[Node],
    roots: Sequence[int],
    is_done: Callable[[int], bool],
    width: int = WIDTH,
) -> list[int]:
    """Return the places of the nodes that an evaluation of ``roots`` computes, in turn.

    MLX counts how often each array is read, lays the graph out from its results by
    breadth within a width, an array as soon as the last reader of it is laid out, and
    computes that list from its end: ``eval_impl`` of MLX 0.32. Of several outputs of a
    primitive one stands for all.

    Args:
        nodes: the graph.
        roots: what is evaluated, in the order of the call.
        is_done: whether a node is evaluated already.
        width: arrays that may wait on one level.
    """
    root = len(nodes)  # stands for the call, which reads the roots

    def inputs(at: int) -> Sequence[int]:
        return roots if at == root else nodes[at].inputs[: nodes[at].known]

    degrees = _degrees(nodes, inputs, root, is_done)
    tape, waiting, at = [root], [], 0
    while degrees and (at < len(tape) or waiting):
        if at < len(tape):
            node, begin = tape[at], 0
            at += 1
        else:
            node, begin = waiting.pop()
        for j, read in enumerate(inputs(node)[begin:], begin):
            if is_done(read):
                continue
            if len(tape) - at >= width:
                waiting.append((node, j))
                break
            degrees[read] -= 1
            if degrees[read]:
                for sibling in nodes[read].siblings:
                    degrees[sibling] -= 1
                continue
            del degrees[read]
            for sibling in nodes[read].siblings:
                degrees.pop(sibling, None)
            tape.append(read)
    return tape[:0:-1]


def with_its_own(nodes: Sequence[Node], at: int) -> Iterator[int]:
    """Yield what a node computes itself when MLX computes it, and then the node."""
    for own in nodes[at].inputs[nodes[at].known :]:
        yield from with_its_own(nodes, own)
    yield at


def _degrees(nodes, inputs: Callable, root: int, is_done: Callable) -> dict[int, int]:
    """Return how often what is not computed yet is read; siblings have one count."""
    degrees: dict[int, int] = {}
    stack = [iter(inputs(root))]
    while stack:
        read = next(stack[-1], None)
        if read is None:
            stack.pop()
        elif is_done(read):
            continue
        elif read not in degrees:
            for each in (read, *nodes[read].siblings):
                degrees[each] = 1
            stack.append(iter(inputs(read)))
        else:
            for each in (read, *nodes[read].siblings):
                degrees[each] = degrees.get(each, 0) + 1
    return degrees
