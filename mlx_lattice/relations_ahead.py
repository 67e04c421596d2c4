"""A net's relations, built before its layers run: those that it read of another scan.

Layers ask for their relations one by one, and each view starts on the device as it is
made, which takes the host a while each time. Scans of like sizes are read alike, so
what the last one read is made for the next one, and started once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.nn

from .coordinate_set import CoordinateKey
from .coordinates import CoordinateManager
from .geometry import sync
from .kernel_spec import KernelSpec
from .memory import limit
from .tensor import SparseTensor


class Read(NamedTuple):
    """A view of a relation that a net read.

    Attributes:
        kind, spec: of the relation.
        ends: places of its sets among the levels.
        is_transposed: whether the view is of the transpose.
        view: ``view(relation)`` returns its arrays.
    """

    kind: str
    spec: KernelSpec
    ends: tuple[int, int]
    is_transposed: bool
    view: Callable


def build(net: mlx.nn.Module, x: SparseTensor, levels: Sequence[CoordinateKey]) -> None:
    """Make the views that ``net`` read of another scan, and start them together.

    They are those that its layers would make, so nothing changes but when. Nothing is
    done for no rows, of which kernels make nothing, nor under a memory limit, which
    decides what is there and when.

    Args:
        net: a module; ``remember`` keeps in it what it reads.
        x: its input.
        levels: the coordinate sets of its layers, ``x.key`` first.
    """
    if not _is_new(x) or limit.active() is not None:
        return
    reads = dict(getattr(net, "_reads", ())).get(_facts(net, x))
    if reads is None:
        return
    manager, arrays = x.manager, []
    with sync.held():
        for read in reads:
            ends = (levels[place] for place in read.ends)
            relation = manager.relation_of(read.kind, *ends, read.spec)
            arrays += read.view(relation.T if read.is_transposed else relation)
    sync.start(tuple(arrays))


def remember(
    net: mlx.nn.Module, x: SparseTensor, levels: Sequence[CoordinateKey]
) -> None:
    """Keep what ``net`` read of a new scan; arguments as of ``build``."""
    if not _is_new(x):
        return
    reads = tuple(_reads(x.manager, levels))
    if reads:
        x.manager.is_complete = True
        known = dict(getattr(net, "_reads", ())) | {_facts(net, x): reads}
        # A set, which can be copied and pickled: a module walks through dicts.
        net._reads = frozenset(known.items())


def _is_new(x: SparseTensor) -> bool:
    return len(x) > 0 and not x.manager.is_complete


def _facts(net: mlx.nn.Module, x: SparseTensor) -> tuple[str, bool, int]:
    return str(x.dtype), net.training, x.dims


def _reads(manager: CoordinateManager, levels: Sequence[CoordinateKey]):
    """Yield what was read of the relations between some sets, as they were built."""
    places = {key: place for place, key in enumerate(levels)}
    for (kind, source, target, spec), relation in manager.named_relations:
        if source in places and target in places:
            ends = places[source], places[target]
            for is_transposed, view in relation.reads:
                yield Read(kind, spec, ends, is_transposed, view)
