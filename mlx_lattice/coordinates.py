"""CoordinateManager: holds coordinate sets and builds the relations between them."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import mlx.core as mx

from .backends import registry
from .consumed_sets import ConsumedSets
from .coordinate_set import CoordinateKey, CoordinateSet, settle
from .geometry.search import Search
from .kernel_spec import IntOrTuple, KernelSpec, check_support
from .relation import Relation
from .shared_views import built_by_one


def _has_every_cell(fine: CoordinateSet, spec: KernelSpec) -> bool:
    """Whether each row has one edge to the rows of a forward convolution.

    A grid whose extents are no multiples of the stride is cut where cells reach out.
    """
    if fine.spatial_shape is None or not spec.fills_cell:
        return spec.fills_cell
    pairs = zip(fine.spatial_shape, spec.stride, strict=True)
    return all(n % s == 0 for n, s in pairs)


class CoordinateManager(ConsumedSets):
    """Holds coordinate sets and builds each relation between them once.

    Every ``SparseTensor`` has one, shared by the tensors that come from it; it lives
    as long as they do. A coordinate set and its relations are freed with the last
    tensor, key or array of it: see ``insert``. ``in = out * stride + offset_k`` within
    one batch element is the only geometric rule.
    """

    def __init__(self):
        super().__init__()
        self._relations: dict[tuple, Relation] = {}
        # Of rows to themselves, by set and spec: of every kind they are the same.
        self._identities: dict[tuple, Relation] = {}
        # Relations by what a layer asked with, and the version they hold for.
        self._asked: dict[tuple, tuple[Relation, int | None]] = {}

    def _keep(self, living: set[CoordinateSet]) -> None:
        super()._keep(living)
        for known in (self._relations, self._identities):
            for question, relation in list(known.items()):
                if not living.issuperset(relation.sets):
                    del known[question]
        for question, (relation, _) in list(self._asked.items()):
            if not living.issuperset(relation.sets):
                del self._asked[question]

    @property
    def relations(self) -> tuple[Relation, ...]:
        """The relations so far, in the order in which they were built."""
        return tuple(self._relations.values())

    def asked(self, question: tuple) -> Relation | None:
        """Return the relation that ``answer`` kept, None where it may be another."""
        relation, version = self._asked.get(question, (None, None))
        return relation if version in (None, self._version) else None

    def answer(self, question: tuple, relation: Relation, searched: bool) -> None:
        """Keep a relation under the arguments that a layer asked for it with.

        Args:
            question: hashable; holds the input key's serial.
            relation: the answer.
            searched: whether its target was searched for among this manager's sets.
        """
        self._asked[question] = relation, self._version if searched else None

    def kernel_relation(
        self,
        key_or_coords: CoordinateKey | mx.array,
        *,
        kernel_size: IntOrTuple = 3,
        stride: IntOrTuple = 1,
        padding: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        offsets: Sequence[Sequence[int]] | None = None,
        support: str = "cell",
    ) -> Relation:
        """Return the forward relation of a convolution.

        Output rows are ``support="cell"``: the sorted unique ``floor(in / stride)``,
        or ``"reach"``: the sorted unique of every out that some input reaches (the
        rule of dense convolution), cut to the dense output grid where the input has
        a ``spatial_shape``. On stride 1 with the centred offsets, "cell" keeps the
        input's rows in their order.
        """
        check_support(support)
        source, spec = self._start(
            key_or_coords, kernel_size, stride, padding, dilation, offsets
        )
        target = self._forward_rows(source, spec, support)
        self._note_consumed(target, source)
        return self._between("forward", source, target, spec)

    def target_kernel_relation(
        self,
        key_or_coords: CoordinateKey | mx.array,
        target: CoordinateKey | mx.array,
        *,
        kernel_size: IntOrTuple = 3,
        stride: IntOrTuple = 1,
        padding: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        offsets: Sequence[Sequence[int]] | None = None,
    ) -> Relation:
        """Return the forward rule onto exactly the target's rows, in its order."""
        key = self.key_of(key_or_coords)  # held while the target is inserted
        source, spec = self._start(key, kernel_size, stride, padding, dilation, offsets)
        target = self[self.key_of(target)]
        self._note_consumed(target, source)
        return self._between("target", source, target, spec)

    def submanifold_kernel_relation(
        self,
        key_or_coords: CoordinateKey | mx.array,
        *,
        kernel_size: IntOrTuple = 3,
        dilation: IntOrTuple = 1,
        offsets: Sequence[Sequence[int]] | None = None,
    ) -> Relation:
        """Return the stride-1 relation of a set to itself, identity kept."""
        rows, spec = self._start(key_or_coords, kernel_size, 1, None, dilation, offsets)
        return self._between("submanifold", rows, rows, spec)

    def transposed_kernel_relation(
        self,
        key_or_coords: CoordinateKey | mx.array,
        target: CoordinateKey | mx.array | None = None,
        *,
        kernel_size: IntOrTuple = 2,
        stride: IntOrTuple = 2,
        padding: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        offsets: Sequence[Sequence[int]] | None = None,
    ) -> Relation:
        """Return the relation ``out = in * stride + offset_k`` onto a target set.

        Without ``target`` it is the set that strided convolutions computed the input's
        rows from. With stride 1 it is the input's own set.

        Raises:
            ValueError: no target was given, and the rows were not computed from a set
                of that stride, or from several.
        """
        key = self.key_of(key_or_coords)  # held while the target is inserted
        source, spec = self._start(key, kernel_size, stride, padding, dilation, offsets)
        if target is None:
            target = self._finer(source, spec.stride)
        else:
            target = self[self.key_of(target)]
        return self._between("transposed", source, target, spec)

    def generative_relation(
        self,
        key_or_coords: CoordinateKey | mx.array,
        *,
        kernel_size: IntOrTuple = 2,
        stride: IntOrTuple = 2,
        padding: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        offsets: Sequence[Sequence[int]] | None = None,
    ) -> Relation:
        """Return ``out = in * stride + offset_k`` onto every row that it reaches.

        Rows are sorted and unique, also where kernels overlap; with a
        ``spatial_shape`` they are cut to PyTorch's transposed output grid.
        """
        source, spec = self._start(
            key_or_coords, kernel_size, stride, padding, dilation, offsets
        )
        target = self._generated_rows(source, spec)
        return self._between("generative", source, target, spec)

    def relation(
        self,
        key_or_coords: CoordinateKey | mx.array,
        target: CoordinateKey | mx.array,
        *,
        offsets: Sequence[Sequence[int]],
        stride: IntOrTuple = 1,
    ) -> Relation:
        """Return ``in = out * stride + offset_k`` for any two sets and offsets."""
        key = self.key_of(key_or_coords)  # held while the target is inserted
        source, spec = self._start(key, 1, stride, None, 1, offsets)
        return self._between("general", source, self[self.key_of(target)], spec)

    def _start(self, key_or_coords, kernel_size, stride, padding, dilation, offsets):
        source = self[self.key_of(key_or_coords)]
        spec = KernelSpec.of(
            len(source.stride),
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            offsets=offsets,
        )
        return source, spec

    @staticmethod
    def _count_with(source: CoordinateSet, relation: Relation) -> None:
        """Have the edges of a new relation counted by the read that checks a set."""
        if relation.is_identity:
            return
        count = registry.geometry().start(relation)
        if count is not None:
            source.read_also(count, relation.set_counted)

    def _known_edges(
        self, kind: str, source: CoordinateSet, target: CoordinateSet, spec: KernelSpec
    ) -> int | None:
        """Return the edges where each row of the finer set has one, to its cell."""
        fine = source if kind == "forward" else target
        if kind == "transposed":  # of a set that may lack cells
            made = self._made.find(("cell", target, spec.stride))
            has_one = made is source and _has_every_cell(fine, spec)
        elif kind == "forward":
            has_one = _has_every_cell(fine, spec)
        else:
            has_one = kind == "generative" and spec.fills_cell
        return len(fine) if has_one else None

    def relation_of(
        self,
        kind: str,
        source: CoordinateKey,
        target: CoordinateKey,
        spec: KernelSpec,
    ) -> Relation:
        """Return the relation of a kind between two sets, built once."""
        return self._between(kind, self[source], self[target], spec)

    def _between(
        self, kind: str, source: CoordinateSet, target: CoordinateSet, spec: KernelSpec
    ) -> Relation:
        known = self._relations.get((kind, source, target, spec))
        if known is not None and source.settled and target.settled:
            return known
        return self._build_between(kind, source, target, spec)

    @built_by_one
    def _build_between(
        self, kind: str, source: CoordinateSet, target: CoordinateSet, spec: KernelSpec
    ) -> Relation:
        question = kind, source, target, spec
        known = self._relations.get(question)
        if known is not None:
            return known
        if len(source.stride) != len(target.stride):
            raise ValueError(
                f"the target has {len(target.stride)} spatial axes, the input "
                f"{len(source.stride)}; both must have the same number"
            )
        if kind == "transposed":
            # The strided relation that made the cells, from the other end.
            made = self._relations.get(("forward", target, source, spec))
            if made is not None:
                return self._add(question, made.transposed(kind))
        search = Search.of(kind, source, target, spec)
        identity, mirrored = search.identity, search.mirrored
        if identity and (made := self._identities.get((source, spec))):
            return self._add(question, made.renamed(kind))
        relation = Relation(
            kind,
            spec.volume,
            len(source),
            len(target),
            search,
            back=None if mirrored else search.turned,
            family=ref(self),
            spec=spec,
            in_coords=source.shown,
            out_coords=target.shown,
            mirrored=mirrored,
            sets=(source, target),
        )
        # A duplicate target row would be an error too.
        if not (source.settled and target.settled):
            both = dict.fromkeys((source, target))
            unsettled = [each for each in both if not each.settled]
            self._count_with(unsettled[0], relation)
            settle(unsettled)
        edges = len(source) if identity else self._known_edges(*question)
        if edges is not None:
            relation.set_counted(edges)
        if identity:
            self._identities[source, spec] = relation
        return self._add(question, relation)

    def _add(self, question: tuple, relation: Relation) -> Relation:
        self._relations[question] = relation
        return relation
