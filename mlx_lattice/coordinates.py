"""CoordinateManager: holds coordinate sets and builds the relations between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from numbers import Rational
from weakref import ref

import mlx.core as mx

from .backends import registry
from .cell_levels import levels
from .coordinate_set import (
    CoordinateKey,
    CoordinateSet,
    check_coords,
    exact_ratio,
    settle,
)
from .geometry import output_rows
from .geometry.keys import Bounds
from .geometry.output_rows import Rule
from .geometry.protocol import Keep
from .kernel_spec import IntOrTuple, KernelSpec, per_axis
from .relation import Relation

SUPPORTS = ("cell", "reach")

_serial = itertools.count(1)


class CoordinateManager:
    """Holds coordinate sets and builds each relation between them once.

    Every ``SparseTensor`` has one, shared by the tensors that come from it; it lives
    as long as they do. ``in = out * stride + offset_k`` within one batch element is
    the only geometric rule.
    """

    def __init__(self):
        self._sets: dict[CoordinateKey, CoordinateSet] = {}
        # Arrays by identity; each is held, so that no other can take its place.
        self._by_array: dict[int, tuple[mx.array, CoordinateKey]] = {}
        self._made: dict[tuple, CoordinateKey] = {}
        self._relations: dict[tuple, Relation] = {}
        # For each coarse key the finer keys it was computed from, latest last.
        self._consumed: dict[CoordinateKey, list[CoordinateKey]] = {}
        # Relations by what a layer asked with, and the version they hold for; the
        # version counts what a look-up may find besides.
        self._asked: dict[tuple, tuple[Relation, int | None]] = {}
        self._version = 0
        # Rows that bring one set's features into another's order; see ops.align.
        self.alignments: dict[tuple[CoordinateKey, CoordinateKey], object] = {}

    def insert(
        self,
        coords: mx.array,
        stride: IntOrTuple = 1,
        *,
        spatial_shape: Sequence[int] | None = None,
        batch_size: int | None = None,
        trusted: bool = False,
        box: Bounds | None = None,
    ) -> CoordinateKey:
        """Add a coordinate set and return its key; the same array gives the same key.

        The rows are kept as they are now: a later change of the array in place is not
        seen. Give changed rows as a new array.

        Args:
            coords: (N, 1 + D) int32 rows (batch, x, y, ...), in their own lattice
                cells; negative spatial values are legal.
            stride: size of a lattice cell, int or one per axis.
            spatial_shape: D extents of a dense grid that starts at 0.
            batch_size: number of batch elements; by default the greatest index + 1.
            trusted: promise that the rows are sorted and unique, and skip the check.
            box: bounds that hold all rows, where the caller knows that they are right.

        Raises:
            ValueError: wrong shape or dtype. Duplicates and ranges are checked when
                the first relation is built.
        """
        coords = check_coords(coords)
        dims = coords.shape[1] - 1
        if isinstance(stride, Rational):
            stride = (stride,) * dims
        stride = tuple(exact_ratio(s, 1) for s in stride)
        if len(stride) != dims or min(stride) <= 0:
            raise ValueError(
                f"stride must be positive, one value for each of {dims} axes; "
                f"got {stride}"
            )
        if spatial_shape is not None:
            spatial_shape = per_axis(spatial_shape, dims, "spatial_shape", least=0)
        if id(coords) in self._by_array:
            _, known = self._by_array[id(coords)]
            held = self._sets[known]
            facts = (held.stride, held.spatial_shape, held.declared_batch_size)
            if facts == (stride, spatial_shape, batch_size):
                return known
        key = CoordinateKey(stride, next(_serial))
        self._version += 1
        # The same memory, whatever becomes of the caller's; mx.array would copy.
        held = coords.astype(coords.dtype)
        self._sets[key] = CoordinateSet(
            held, stride, spatial_shape, batch_size, trusted, box
        )
        for array in (coords, held):
            self._by_array[id(array)] = array, key
        return key

    def __getitem__(self, key: CoordinateKey) -> CoordinateSet:
        try:
            return self._sets[key]
        except KeyError:
            held = ", ".join(map(repr, self._sets)) or "none"
            raise KeyError(
                f"{key!r} is not a coordinate set of this manager, which has: {held}"
            ) from None

    def __contains__(self, key: CoordinateKey) -> bool:
        return key in self._sets

    @property
    def sets(self) -> tuple[CoordinateSet, ...]:
        """The coordinate sets so far, in the order in which they were made."""
        return tuple(self._sets.values())

    @property
    def relations(self) -> tuple[Relation, ...]:
        """The relations so far, in the order in which they were built."""
        return tuple(self._relations.values())

    def key_of(self, key_or_coords: CoordinateKey | mx.array) -> CoordinateKey:
        """Return the key itself, or insert the coordinates at stride 1."""
        if isinstance(key_or_coords, CoordinateKey):
            self[key_or_coords]
            return key_or_coords
        return self.insert(key_or_coords)

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
        return self._relation("forward", key, target, spec)

    def _forward_rows(self, key, spec: KernelSpec, support: str) -> CoordinateKey:
        source = self[key]
        centred = spec.custom or all(
            p == (n // 2 * d if n % 2 else 0)
            for p, n, d in zip(spec.origin, spec.size, spec.dilation, strict=True)
        )
        if support == "cell" and set(spec.stride) == {1} and centred:
            return key
        if support == "cell":
            return self._cells(key, [spec.stride])[0]
        made = "reach", key, spec
        if made in self._made:
            return self._made[made]
        shape = source.spatial_shape
        if shape is not None:
            shape = spec.output_shape(shape, support)
        made_rows = self._made_rows(Rule.REACH, source, spec, shape)
        stride = tuple(
            exact_ratio(s * t, 1)
            for s, t in zip(source.stride, spec.stride, strict=True)
        )
        self._made[made] = self._insert_sorted(*made_rows, stride, shape, source)
        return self._made[made]

    def _made_rows(self, rule, source, spec: KernelSpec, shape):
        """Return the rows that a rule makes of a set, and their box."""
        if not source.settled:
            settle([source])  # rows are checked before they are used
        coords, offsets, stride = source.coords, spec.offsets, spec.stride
        box = output_rows.int32_box(rule, coords, source.box, offsets, stride)
        cut, is_cut = output_rows.cut(box, shape), shape is not None
        build = registry.geometry().made_rows
        return build(rule, coords, offsets, stride, cut, is_cut), cut

    def cells(
        self, key_or_coords: CoordinateKey | mx.array, strides: Sequence[IntOrTuple]
    ) -> tuple[CoordinateKey, ...]:
        """Make the rows of a chain of strided convolutions; return their keys.

        They are those that ``kernel_relation`` makes with ``support="cell"``, one
        convolution after another, and it finds them. Their sizes are read at once.

        Args:
            key_or_coords: the set that the first convolution reads.
            strides: of each convolution, int or one per axis.
        """
        key = self.key_of(key_or_coords)
        dims = len(key.stride)
        chain = [per_axis(stride, dims, "stride") for stride in strides]
        return tuple(self._cells(key, chain))

    def _cells(self, key, strides: Sequence[tuple[int, ...]]) -> list[CoordinateKey]:
        chain, left = [], list(strides)
        # Cells depend on the stride alone: kernels of one stride share their rows.
        while left and (made := self._made.get(("cell", key, left[0]))) is not None:
            key = made
            chain.append(key)
            del left[0]
        if not left:
            return chain
        source = self[key]
        for stride, level in zip(left, levels(source, left), strict=True):
            rows, box, cell, shape = level
            made = "cell", key, stride
            key = self._made[made] = self._insert_sorted(rows, box, cell, shape, source)
            chain.append(key)
        return chain

    def _insert_sorted(self, rows, box, stride, shape, source) -> CoordinateKey:
        return self.insert(
            rows,
            stride,
            spatial_shape=shape,
            batch_size=source.batch_size,
            trusted=True,
            box=box,
        )

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
        return self._relation("target", key, target, spec)

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
        return self._relation("submanifold", key, key, spec)

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
        return self._relation("transposed", key, self.key_of(target), spec)

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
        made = ("generative", key, spec)
        if made not in self._made:
            source = self[key]
            shape = source.spatial_shape
            if shape is not None:
                shape = spec.transposed_output_shape(shape)
            made_rows = self._made_rows(Rule.EXPAND, source, spec, shape)
            finer = tuple(
                exact_ratio(a, b)
                for a, b in zip(source.stride, spec.stride, strict=True)
            )
            self._made[made] = self._insert_sorted(*made_rows, finer, shape, source)
        return self._relation("generative", key, self._made[made], spec)

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
        return self._relation("general", key, self.key_of(target), spec)

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

    def _relation(self, kind, source_key, target_key, spec: KernelSpec) -> Relation:
        cache_key = kind, source_key, target_key, spec
        if cache_key in self._relations:
            return self._relations[cache_key]
        source, target = self[source_key], self[target_key]
        if source.coords.shape[1] != target.coords.shape[1]:
            raise ValueError(
                f"the target has {target.coords.shape[1] - 1} spatial axes, the input "
                f"{source.coords.shape[1] - 1}; both must have the same number"
            )
        if kind == "transposed":
            # The strided relation that made the cells, from the other end.
            made = self._relations.get(("forward", target_key, source_key, spec))
            if made is not None:
                self._relations[cache_key] = made.turned(kind)
                return self._relations[cache_key]
        mirrored = kind == "submanifold" and spec.is_symmetric
        swapped = kind in ("transposed", "generative")
        identity = spec.is_pointwise and source is target

        def search(source: CoordinateSet, target: CoordinateSet, transposed: bool):
            def table(keep: Keep, wanted: str | None) -> mx.array:
                if identity and len(source):  # of no rows nothing is launched
                    return mx.arange(len(source), dtype=mx.int32)[:, None]
                return source.lookup.table(
                    target,
                    spec.offsets,
                    spec.stride,
                    transposed=transposed,
                    mirrored=mirrored,
                    keep=keep,
                    wanted=wanted,
                )

            return table

        relation = Relation(
            kind,
            spec.volume,
            len(source),
            len(target),
            search(source, target, swapped),
            back=None if mirrored else search(target, source, not swapped),
            family=ref(self),
            spec=spec,
            in_coords=source.coords,
            out_coords=target.coords,
            mirrored=mirrored,
            keys=(source_key, target_key),
        )
        # A duplicate target row would be an error too.
        unsettled = [
            each for each in dict.fromkeys((source, target)) if not each.settled
        ]
        if unsettled:
            # The device builds while Python waits for what is wrong with the rows.
            count = None if identity else registry.geometry().start(relation)
            values = settle(unsettled, *([] if count is None else [count]))
            if values:
                relation.set_counted(values[0][0])
        if identity:
            relation.set_counted(len(source))
        self._relations[cache_key] = relation
        return relation
