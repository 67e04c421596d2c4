"""A net's relations, built before its layers run: those that it asked of another scan.

Layers ask for their relations one by one, and each view starts on the device as it is
made, which takes the host a while each time. Scans of like sizes are read alike, so
what the last one was asked is made for the next one, when the layer asks that was first
then: views of the input's rows while its levels are counted, then all others, of which
a backend may make several in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import NamedTuple

import mlx.core as mx
import mlx.nn

from . import devices, settings
from .backends import registry
from .coordinate_set import CoordinateKey, settle
from .coordinates import CoordinateManager
from .geometry import sync
from .geometry.search import Search
from .kernel_spec import KernelSpec
from .module_state import Keeps
from .problem import FORWARD, Problem
from .relation import Relation
from .routes import proof_results, selection
from .routes.plan import Plan
from .scan_record import Record
from .shared_views import building, built_by_one
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
        """Return what was read; ``facts``: ``is_transposed``, ``view``, ``layers``."""
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
    """What was asked of a scan.

    Attributes:
        stages: each view, in ``STAGES`` tuples.
        strides: between the levels, one after another.
        first: kind and kernel of the first relation; None if not of the input's rows.
        relations: all that were made, as (kind, ends, spec); () where some are of other
            sets.
    """

    stages: tuple[tuple[Read, ...], ...]
    strides: tuple[tuple, ...]
    first: tuple[str, KernelSpec] | None
    relations: tuple[tuple[str, tuple[int, int], KernelSpec], ...]

    @classmethod
    def of(cls, record: Record, first: int) -> Reads | None:
        """Return what a record says of a set and its levels; None if nothing is read.

        Args:
            record: of a manager.
            first: the set, by its serial.
        """
        levels = list(record.levels(first))
        places = {first: 0} | {made: 1 + i for i, (made, _) in enumerate(levels)}
        reads, named, is_whole = [], [], True
        for kind, source, target, spec, views in record.relations:
            if source not in places or target not in places:
                is_whole = False
                continue
            ends = places[source], places[target]
            named.append((kind, ends, spec))
            for (is_transposed, view), layers in views.items():
                facts = is_transposed, view, tuple(layers)
                reads.append(Read.of(kind, spec, ends, *facts))
        if not reads:
            return None
        (kind, *ends, spec, _), *_ = record.relations
        begun = (kind, spec) if ends == [first, first] else None
        relations = sorted(named, key=lambda each: _order(*each)) if is_whole else ()
        strides = tuple([stride for _, stride in levels])
        return cls(_staged(reads), strides, begun, tuple(relations))


class Asked(Keeps):
    """What scans were asked, of which one layer was asked first.

    A layer keeps it; a copy of the layer, or one from a file, has to see a scan again.
    """

    __slots__ = "_known", "_last"

    def __init__(self):
        # By dtype, mode, axes, whether a gradient may come, and device.
        self._last: dict[tuple, Record] = {}
        self._known: dict[tuple, tuple[tuple, Reads]] = {}

    def __reduce__(self):
        """Copy and pickle as one that knows nothing."""
        return Asked, ()

    def of_last(self, facts: tuple, record: Record) -> Reads | None:
        """Return what the last scan of some facts was asked, and keep a new one's."""
        last, self._last[facts] = self._last.get(facts), record
        signature, known = self._known.get(facts, (None, None))
        if last is not None and last.signature != signature:
            known = Reads.of(last, last.first) or known
            self._known[facts] = last.signature, known
        return known


def begin(layer: mlx.nn.Module, x: SparseTensor) -> None:
    """Make what the last scan was asked, of which ``layer`` was asked first too.

    At the first layer of a new scan; at others nothing is done. Nothing changes but
    when levels and views are made. None is made for no rows, of which kernels make
    nothing, nor under a memory limit, which decides what is there and when.

    Args:
        layer: asks for a relation of ``x``; keeps what its scans were asked.
        x: its input.
    """
    record = x.manager.record
    if record.first is not None or not len(x):
        return
    record.first = x.key.serial
    asked = getattr(layer, "_asked", None)
    if asked is None:
        asked = layer._asked = Asked()
    facts = *_facts(layer, x), sync.is_transforming(), devices.current()
    known = asked.of_last(facts, record)
    if known is not None and settings.stage_end.get() is None:
        _made(known, x)


def plans(net: mlx.nn.Module, x: SparseTensor) -> list[Plan] | None:
    """Make what ``net`` was planned to read of another scan; return plans over this.

    None, and nothing is planned, where that is not all that its layers would make:
    ``net`` is new, or trains; routes are forced, or measured; there is a memory limit.
    """
    if net.training or not len(x) or settings.stage_end.get() is not None:
        return None
    known = dict(getattr(net, "_reads", ())).get((*_facts(net, x), _structure(net)))
    if known is None or known.first is None or not known.relations:
        return None
    now, device, found = selection.situation(), devices.current(), []
    refused = proof_results.refused_on(device)
    levels = _made(known, x)
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


@built_by_one
def _made(known: Reads, x: SparseTensor) -> tuple[CoordinateKey, ...]:
    """Make levels and views, and start them; return the levels."""
    levels, stages = (x.key,), list(known.stages)

    def begin() -> None:
        start(x.manager, levels, stages.pop(0))

    source, later = x.coordinate_set, nullcontext()
    if known.first and registry.geometry().searches_unchecked:
        later = x.manager.checked_later(x.key, *known.first)
    elif known.first:  # as layers ask: edges are counted while the input is checked
        kind, spec = known.first
        x.manager.relation_of(kind, x.key, x.key, spec)
    elif not source.settled and (stages[0] or not known.strides):
        settle([source])  # else it is read with the sizes of its levels
    # Rows of the input are there: their views are made while levels are counted.
    with later, sync.meanwhile(begin):
        levels += x.manager.cells(x.key, known.strides)
    while stages:
        begin()
    return levels


def start(
    manager: CoordinateManager, levels: Sequence[CoordinateKey], reads: Sequence[Read]
) -> None:
    """Make what was read of another scan's levels, and start it."""
    geometry, launched, alone = registry.geometry(), [], []
    is_traced = sync.is_transforming()
    with building:
        # Of relations that are new: others may have what their tables are made of.
        searches = {
            read.search: None
            for read in reads
            if read.search is not None and read.is_new(manager, levels)
        }
        sets = [manager[key] for key in levels]
        for made in geometry.tiles_together(sets, list(searches)):
            sync.start(made.arrays)
            launched.append(made)
        # The relations themselves are made while the device works.
        relations = {search: None for made in launched for search in made.searches}
        for read in reads:
            if read.view is None:
                continue
            relation = read.relation(manager, levels)
            is_launched = read.search in relations
            # Where MLX traces a graph, it takes in what is not started, views too.
            if is_traced or not is_launched:
                alone.append((relation, read.view))
            # A search may be of a relation and of another's transpose: of the first.
            if is_launched and relations[read.search] is None:
                relations[read.search] = relation
        for made in launched:
            geometry.keep_together(made, [relations[each] for each in made.searches])
        sync.start([array for relation, view in alone for array in view(relation)])


def remember_prepared(net: mlx.nn.Module, x: SparseTensor) -> None:
    """Keep what ``net`` was planned to read of a scan, for ``plans`` of the next.

    It is not found where layers print another way, or parameters have other dtypes.
    """
    made = Reads.of(x.manager.record, x.key.serial)
    if made is not None:
        facts = *_facts(net, x), _structure(net)
        known = dict(getattr(net, "_reads", ())) | {facts: made}
        # A set, which can be copied and pickled: a module walks through dicts.
        net._reads = frozenset(known.items())


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


def _facts(net: mlx.nn.Module, x: SparseTensor) -> tuple:
    """Return what reads are kept by."""
    return str(x.dtype), net.training, x.dims


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
