"""CoordinateManager: holds coordinate sets and builds the relations between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

import mlx.core as mx

from .backends import registry
from .coordinate_set import (
    CoordinateKey,
    CoordinateSet,
    exact_ratio,
    settle,
)
from .geometry import sync
from .geometry.search import Search
from .held_sets import HeldSets
from .kernel_spec import IntOrTuple, KernelSpec
from .relation import Relation

SUPPORTS = ("cell", "reach")


def _has_every_cell(fine: CoordinateSet, spec: KernelSpec) -> bool:
    """Whether each row has one edge to the rows of a forward convolution.

    A grid whose extents are no multiples of the stride is cut where cells reach out.
    """
    if fine.spatial_shape is None or not spec.fills_cell:
        return spec.fills_cell
    pairs = zip(fine.spatial_shape, spec.stride, strict=True)
    return all(n % s == 0 for n, s in pairs)


class CoordinateManager(HeldSets):
    """Holds coordinate sets and builds each relation between them once.

    Every ``SparseTensor`` has one, shared by the tensors that come from it; it lives
    as long as they do. ``in = out * stride + offset_k`` within one batch element is
    the only geometric rule.
    """

    def __init__(self):
        super().__init__()
        self._relations: dict[tuple, Relation] = {}
        # Of rows to themselves, by key and spec: of every kind they are the same.
        self._identities: dict[tuple, Relation] = {}
        # For each coarse key the finer keys it was computed from, latest last.
        self._consumed: dict[CoordinateKey, list[CoordinateKey]] = {}
        # Relations by what a layer asked with, and the version they hold for.
        self._asked: dict[tuple, tuple[Relation, int | None]] = {}
        self._checks_later = False  # whether sets are checked after their relations
        # Whether a net has read its relations; see ``relations_ahead``.
        self.is_complete = False
        # Rows that bring sets' features into another's order, by the keys that it
        # takes; see ops.align.
        self.alignments: dict[tuple[CoordinateKey, ...], object] = {}

    @property
    def relations(self) -> tuple[Relation, ...]:
        """The relations so far, in the order in which they were built."""
        return tuple(self._relations.values())

    @property
    def named_relations(self) -> tuple[tuple[tuple, Relation], ...]:
        """The same, each after what ``relation_of`` was asked for it with."""
        return tuple(self._relations.items())

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
        if support not in SUPPORTS:
            raise ValueError(f'support must be "cell" or "reach"; got {support!r}')
        key, spec = self._start(
            key_or_coords, kernel_size, stride, padding, dilation, offsets
        )
        target = self._forward_rows(key, spec, support)
        self._note_consumed(target, key)
        return self.relation_of("forward", key, target, spec)

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
        key, spec = self._start(
            key_or_coords, kernel_size, stride, padding, dilation, offsets
        )
        target = self.key_of(target)
        self._note_consumed(target, key)
        return self.relation_of("target", key, target, spec)

    def submanifold_kernel_relation(
        self,
        key_or_coords: CoordinateKey | mx.array,
        *,
        kernel_size: IntOrTuple = 3,
        dilation: IntOrTuple = 1,
        offsets: Sequence[Sequence[int]] | None = None,
    ) -> Relation:
        """Return the stride-1 relation of a set to itself, identity kept."""
        key, spec = self._start(key_or_coords, kernel_size, 1, None, dilation, offsets)
        return self.relation_of("submanifold", key, key, spec)

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

        Without ``target`` it is the finer set that an earlier strided convolution
        consumed, or the only set of the right stride.

        Raises:
            ValueError: no target was given and none, or several, could be meant.
        """
        key, spec = self._start(
            key_or_coords, kernel_size, stride, padding, dilation, offsets
        )
        if target is None:
            target = self.finer(key, spec.stride)
        return self.relation_of("transposed", key, self.key_of(target), spec)

    def finer(self, key: CoordinateKey, steps: Sequence[int]) -> CoordinateKey:
        """Return the set that a strided operation of these steps made ``key`` of.

        Raises:
            ValueError: there is none, or it is not known which.
        """
        wanted = tuple(
            exact_ratio(a, b) for a, b in zip(key.stride, steps, strict=True)
        )
        consumed = [k for k in self._consumed.get(key, ()) if k.stride == wanted]
        found = consumed or [k for k in self._sets if k.stride == wanted and k != key]
        if not found and set(steps) == {1}:
            return key
        if len(found) == 1:
            return found[0]
        stride = wanted[0] if len(set(wanted)) == 1 else tuple(map(str, wanted))
        if not found:
            raise ValueError(
                f"no coordinates of stride {stride} are known to upsample {key!r} "
                "onto; pass coordinates=, or use a generative transposed convolution"
            )
        raise ValueError(
            f"several coordinate sets of stride {stride} could be the target of "
            f"{key!r}: {', '.join(map(repr, found))}; pass coordinates= to say which"
        )

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
        key, spec = self._start(
            key_or_coords, kernel_size, stride, padding, dilation, offsets
        )
        target = self._generated_rows(key, spec)
        return self.relation_of("generative", key, target, spec)

    def relation(
        self,
        key_or_coords: CoordinateKey | mx.array,
        target: CoordinateKey | mx.array,
        *,
        offsets: Sequence[Sequence[int]],
        stride: IntOrTuple = 1,
    ) -> Relation:
        """Return ``in = out * stride + offset_k`` for any two sets and offsets."""
        key, spec = self._start(key_or_coords, 1, stride, None, 1, offsets)
        return self.relation_of("general", key, self.key_of(target), spec)

    def _start(self, key_or_coords, kernel_size, stride, padding, dilation, offsets):
        key = self.key_of(key_or_coords)
        spec = KernelSpec.of(
            len(key.stride),
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            offsets=offsets,
        )
        return key, spec

    def _note_consumed(self, coarse: CoordinateKey, fine: CoordinateKey) -> None:
        if coarse != fine:
            keys = self._consumed.setdefault(coarse, [])
            if fine not in keys:
                keys.append(fine)
                self._version += 1

    @staticmethod
    def _count_with(source: CoordinateSet, relation: Relation) -> None:
        """Have the edges of a new relation counted by the read that checks a set."""
        if relation.is_identity:
            return
        # What is read starts all of it: the device builds while Python waits.
        with sync.held():
            count = registry.geometry().start(relation)
        if count is not None:
            source.read_also(count, relation.set_counted)

    @contextmanager
    def checked_later(
        self, key: CoordinateKey, kind: str, spec: KernelSpec
    ) -> Iterator[None]:
        """Make the first relation of a set to itself, and check the set in the block.

        Its edges are counted by the same read. Until then other relations are made of
        the set as it is; none is kept where it turns out to be wrong. For backends that
        search rows unchecked.

        Raises:
            ValueError: what is wrong with the set.
        """
        source = self[key]
        held = self._relations, self._identities
        self._relations, self._identities = map(dict, held)
        self._checks_later = True
        try:
            relation = self.relation_of(kind, key, key, spec)
            if not source.settled:
                self._count_with(source, relation)
            yield
            if not source.settled:
                settle([source])
        except BaseException:
            self._relations, self._identities = held
            source.forget_counts()
            raise
        finally:
            self._checks_later = False

    def _known_edges(self, kind: str, source_key, target_key, spec) -> int | None:
        """Return the edges where each row of the finer set has one, to its cell."""
        fine = self[source_key if kind == "forward" else target_key]
        if kind == "transposed":  # of a set that may lack cells
            made = self._made.get(("cell", target_key, spec.stride))
            has_one = made == source_key and _has_every_cell(fine, spec)
        elif kind == "forward":
            has_one = _has_every_cell(fine, spec)
        else:
            has_one = kind == "generative" and spec.fills_cell
        return len(fine) if has_one else None

    def has_relation(self, *question) -> bool:
        """Whether there is the relation that ``relation_of`` is asked for with it."""
        return question in self._relations

    def relation_of(
        self,
        kind: str,
        source_key: CoordinateKey,
        target_key: CoordinateKey,
        spec: KernelSpec,
    ) -> Relation:
        """Return the relation of a kind between two sets, built once."""
        cache_key = kind, source_key, target_key, spec
        known = self._relations.get(cache_key)
        if known is not None:
            return known
        source, target = self[source_key], self[target_key]
        if len(source.stride) != len(target.stride):
            raise ValueError(
                f"the target has {len(target.stride)} spatial axes, the input "
                f"{len(source.stride)}; both must have the same number"
            )
        if kind == "transposed":
            # The strided relation that made the cells, from the other end.
            made = self._relations.get(("forward", target_key, source_key, spec))
            if made is not None:
                self._relations[cache_key] = made.transposed(kind)
                return self._relations[cache_key]
        search = Search.of(kind, source, target, spec)
        identity, mirrored = search.identity, search.mirrored
        if identity and (made := self._identities.get((source_key, spec))):
            self._relations[cache_key] = made.renamed(kind)
            return self._relations[cache_key]
        relation = Relation(
            kind,
            spec.volume,
            len(source),
            len(target),
            search,
            back=None if mirrored else search.turned,
            family=ref(self),
            spec=spec,
            in_coords=source.coords,
            out_coords=target.coords,
            mirrored=mirrored,
            keys=(source_key, target_key),
        )
        # A duplicate target row would be an error too.
        if not (source.settled and target.settled) and not self._checks_later:
            both = dict.fromkeys((source, target))
            unsettled = [each for each in both if not each.settled]
            self._count_with(unsettled[0], relation)
            settle(unsettled)
        edges = len(source) if identity else self._known_edges(*cache_key)
        if edges is not None:
            relation.set_counted(edges)
        self._relations[cache_key] = relation
        if identity:
            self._identities[source_key, spec] = relation
        return relation
