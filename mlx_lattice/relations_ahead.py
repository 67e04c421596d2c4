"""A net's relations, built before its layers run: those that it read of another scan.

Layers ask for their relations one by one, and each view starts on the device as it is
made, which takes the host a while each time. Scans of like sizes are read alike, so
what the last one read is made for the next one: views of the input's rows while its
levels are counted, then all others, of which a backend may make several in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, pairwise
from typing import NamedTuple

import mlx.core as mx
import mlx.nn

from . import devices
from .backends import registry
from .coordinate_set import CoordinateKey, CoordinateSet, settle
from .coordinates import CoordinateManager
from .geometry import sync
from .geometry.search import Search
from .kernel_spec import KernelSpec
from .memory import limit
from .problem import FORWARD, Problem
from .relation import Relation
from .routes import proof_results, selection
from .routes.plan import Plan
from .tensor import SparseTensor

STAGES = 2  # of views that start together: of the input's rows, of other levels


class Read(NamedTuple):
    """A view of a relation that a net read.

    Attributes:
        kind, spec: of the relation.
        ends: places of its sets among the levels.
        is_transposed: whether the view is of the transpose.
        view: ``view(relation)`` returns its arrays; None of what cannot be said.
        layers: the problems that read it, but for the rows.
        search: what it is searched by between the levels, where a backend makes several
            such views together.
    """

    kind: str
    spec: KernelSpec
    ends: tuple[int, int]
    is_transposed: bool
    view: Callable | None
    layers: tuple[Problem, ...]
    search: Search | None = None

    @classmethod
    def of(cls, kind: str, spec: KernelSpec, ends: tuple[int, int], *facts) -> Read:
        """Return what was read; ``facts`` as ``Relation.reads`` has them."""
        is_transposed, view, _ = facts
        search = None
        if view is not None and view is registry.geometry().together:
            search = Search.of(kind, *ends, spec)
            if is_transposed and not search.mirrored:
                search = search.turned()
        return cls(kind, spec, ends, *facts, search)

    def is_new(
        self, manager: CoordinateManager, levels: Sequence[CoordinateKey]
    ) -> bool:
        """Whether the manager has no such relation yet."""
        source, target = self.ends
        return not manager.has_relation(
            self.kind, levels[source], levels[target], self.spec
        )

    def relation(
        self, manager: CoordinateManager, levels: Sequence[CoordinateKey]
    ) -> Relation:
        """Return the relation, or its transpose, of a scan with these levels."""
        source, target = self.ends
        made = manager.relation_of(self.kind, levels[source], levels[target], self.spec)
        return made.T if self.is_transposed else made


class Reads(NamedTuple):
    """What a net read of a scan.

    Attributes:
        stages: each view, in ``STAGES`` tuples.
        strides: between the levels, one after another.
        relations: all that it made, as (kind, ends, spec): the first, and others in an
            order of their own; () where some are of other sets.
    """

    stages: tuple[tuple[Read, ...], ...]
    strides: tuple[tuple, ...]
    relations: tuple[tuple[str, tuple[int, int], KernelSpec], ...]

    @property
    def first(self) -> tuple[str, KernelSpec] | None:
        """Kind and kernel of the first relation; None if not of the input's rows."""
        kind, ends, spec = self.relations[0] if self.relations else (None, None, None)
        return (kind, spec) if ends == (0, 0) else None


def build(
    net: mlx.nn.Module, x: SparseTensor, strides: Sequence[int]
) -> tuple[CoordinateKey, ...]:
    """Make the levels of ``x``, and the views that ``net`` read of another scan.

    Before its layers run. Views are those that they would make, so nothing changes but
    when. None is made for no rows, of which kernels make nothing, nor under a memory
    limit, which decides what is there and when.

    Args:
        net: a module; ``remember`` keeps in it what it reads.
        x: its input.
        strides: of each level to the next.

    Returns:
        The keys of the levels, ``x.key`` first; () where nothing was made.
    """
    known = _ahead(net, x)
    return () if known is None else _made(known, x, strides)


def levels(x: SparseTensor, strides: Sequence[int]) -> tuple[CoordinateKey, ...]:
    """Return the keys of the levels of ``x``, after its first layer asked for rows."""
    return x.key, *x.manager.cells(x.key, strides)


def plans(net: mlx.nn.Module, x: SparseTensor) -> list[Plan] | None:
    """Make what ``net`` read of another scan; return its layers' plans over this one.

    None, and nothing is planned, where that is not all that its layers would make:
    ``net`` is new, or trains; routes are forced, or measured; there is a memory limit.
    """
    if net.training:
        return None
    known = _ahead(net, x) or _ahead(net, x, _structure(net))
    if known is None or not known.relations:
        return None
    now, device, found = selection.situation(), devices.current(), []
    refused = proof_results.refused_on(device)
    if known.first is None:
        return None
    levels = _made(known, x, known.strides)
    for kind, (source, target), spec in known.relations:
        x.manager.relation_of(kind, levels[source], levels[target], spec)
    for read in chain.from_iterable(known.stages):
        relation = read.relation(x.manager, levels)
        for layer in read.layers:
            table = selection.deciding(layer, now, refused)
            is_said = read.view is not None or layer.pointwise
            if table is None or layer.pass_ != FORWARD or not is_said:
                return None
            problem = layer.over(relation)
            plan = table.plan(table.row(problem), problem)
            if plan.read is not read.view:  # of these rows it reads another
                return None
            found.append(plan)
    return found


def _made(
    known: Reads, x: SparseTensor, strides: Sequence
) -> tuple[CoordinateKey, ...]:
    """Make levels and views, and start them; return the levels."""
    levels, stages = (x.key,), list(known.stages)

    def begin() -> None:
        start(x.manager, levels, stages.pop(0))

    source, later = x.manager[x.key], nullcontext()
    if known.first and registry.geometry().searches_unchecked:
        later = x.manager.checked_later(x.key, *known.first)
    elif known.first:  # as layers ask: edges are counted while the input is checked
        kind, spec = known.first
        x.manager.relation_of(kind, x.key, x.key, spec)
    elif not source.settled:
        settle([source])
    # Rows of the input are there: their views are made while levels are counted.
    with later, sync.meanwhile(begin):
        levels += x.manager.cells(x.key, strides)
    while stages:
        begin()
    return levels


def start(
    manager: CoordinateManager, levels: Sequence[CoordinateKey], reads: Sequence[Read]
) -> None:
    """Make what was read of another scan's levels, and start it."""
    geometry, launched, alone = registry.geometry(), [], []
    with sync.held():
        # Of relations that are new: others may have what their tables are made of.
        searches = {
            read.search: None
            for read in reads
            if read.search is not None and read.is_new(manager, levels)
        }
        sets = [manager[key] for key in levels]
        for made in geometry.tiles_together(sets, list(searches)):
            sync.start(made.arrays, at_once=True)
            launched.append(made)
        # The relations themselves are made while the device works.
        relations = {search: None for made in launched for search in made.searches}
        for read in reads:
            if read.view is None:
                continue
            relation = read.relation(manager, levels)
            if read.search not in relations:
                alone.append((relation, read.view))
            elif relations[read.search] is None:  # its transpose may share what is made
                relations[read.search] = relation
        for made in launched:
            geometry.keep_together(made, [relations[each] for each in made.searches])
        arrays = [array for relation, view in alone for array in view(relation)]
        sync.start(arrays, at_once=True)


def remember(
    net: mlx.nn.Module, x: SparseTensor, levels: Sequence[CoordinateKey]
) -> None:
    """Keep what ``net`` read of a new scan; arguments as of ``build``."""
    if _is_new(x) and _keep(net, x, levels):
        x.manager.is_complete = True


def remember_prepared(net: mlx.nn.Module, x: SparseTensor) -> None:
    """Keep what ``net`` was planned to read of a scan, for ``plans`` of the next.

    For a net that does not ``remember`` what it reads. It is not found where layers
    print another way, or parameters have other dtypes.
    """
    if len(x):
        _keep(net, x, x.manager.chain(x.key), _structure(net))


def _structure(net: mlx.nn.Module) -> str:
    """Return what a net's layers say of themselves, and dtypes of their parameters."""
    return "\n".join(_said(net))


def _said(part: object) -> Iterator[str]:
    if isinstance(part, mx.array):
        yield str(part.dtype)
    elif isinstance(part, (dict, list, tuple)):
        if isinstance(part, mlx.nn.Module):
            yield f"{type(part).__name__}({part._extra_repr()})"
        for each in part.values() if isinstance(part, dict) else part:
            yield from _said(each)


def _keep(
    net: mlx.nn.Module, x: SparseTensor, levels: Sequence[CoordinateKey], *more: str
) -> bool:
    """Keep what was read of a scan's levels, if anything was; ``more`` as of _facts."""
    places = {x.manager[key]: place for place, key in enumerate(levels)}
    reads, before = list(_reads(x.manager, places)), _known(net, x, *more)
    if not reads:
        return False
    count = len(x.manager.named_relations)
    stages = _staged(reads)
    if before and before.stages == stages and len(before.relations) == count:
        return True  # as most scans
    strides = tuple(
        tuple(int(b / a) for a, b in zip(fine.stride, coarse.stride, strict=True))
        for fine, coarse in pairwise(levels)
    )
    named = [name for name, _ in x.manager.named_relations]
    relations = ()
    if all(each in places for _, *ends, _ in named for each in ends):
        first, *rest = ((k, (places[a], places[b]), s) for k, a, b, s in named)
        relations = first, *sorted(rest, key=lambda each: _order(*each))
    made = Reads(stages, strides, relations)
    known = dict(getattr(net, "_reads", ())) | {_facts(net, x, *more): made}
    # A set, which can be copied and pickled: a module walks through dicts.
    net._reads = frozenset(known.items())
    return True


def _ahead(net: mlx.nn.Module, x: SparseTensor, *more: str) -> Reads | None:
    """Return what to make of a scan before its layers ask, if anything."""
    if not _is_new(x) or limit.active() is not None:
        return None
    return _known(net, x, *more)


def _is_new(x: SparseTensor) -> bool:
    return len(x) > 0 and not x.manager.is_complete


def _facts(net: mlx.nn.Module, x: SparseTensor, *more: str) -> tuple:
    """Return what reads are kept by; ``more``: the structure of a prepared net."""
    return str(x.dtype), net.training, x.dims, *more


def _staged(reads: Sequence[Read]) -> tuple[tuple[Read, ...], ...]:
    """Return reads in the order of their relations, by stage."""
    stages = [[] for _ in range(STAGES)]
    keys = [_order(read.kind, read.ends, read.spec) for read in reads]
    for at in sorted(range(len(reads)), key=keys.__getitem__):
        stages[keys[at][0]].append(reads[at])
    return tuple(map(tuple, stages))


def _order(kind: str, ends: tuple[int, int], spec: KernelSpec) -> tuple:
    """Return the stage, and by what else to sort: transposed after what they share."""
    stage = min(max(ends), STAGES - 1)
    return stage, kind == "transposed", ends, spec.size, kind


def _known(net: mlx.nn.Module, x: SparseTensor, *more: str) -> Reads | None:
    """Return what ``net`` read of another scan."""
    return dict(getattr(net, "_reads", ())).get(_facts(net, x, *more))


def _reads(manager: CoordinateManager, places: dict[CoordinateSet, int]):
    """Yield what was read of the relations between some sets, as they were built."""
    for (kind, source, target, spec), relation in manager.named_relations:
        if source in places and target in places:
            ends = places[source], places[target]
            for read in relation.reads:
                yield Read.of(kind, spec, ends, *read)
