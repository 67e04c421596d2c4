"""CoordinateManager: owns coordinate sets and builds the relations between them.

Layers get kernel maps from the manager of their input. Also joins of two sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from operator import floordiv, mul
from typing import Any, NamedTuple
from weakref import ref

import mlx.core as mx

from . import registry, sync
from .coordinate_set import (
    CoordinateKey,
    CoordinateSet,
    OfPairs,
    check_batch_size,
    check_coords,
    check_stride,
    coarser,
    expect_one_lattice,
    finer,
    settle,
    stride_text,
)
from .geometry import lattice
from .geometry.lattice import Bounds, Rule, join
from .kernel_spec import IntOrTuple, KernelSpec, cells_of, check_support, per_axis
from .reductions import inverted
from .relation import Relation, Search
from .sync import SharedViews, building, built_by_one


def _forget(sets: ref[CoordinateManager], array: int, _: ref) -> None:
    """Drop the id of a freed array: a new array may get the same id."""
    if (manager := sets()) is not None:
        manager._by_array.pop(array, None)


class CoordinateManager:
    """Hold coordinate sets and build each relation between them once.

    Every ``SparseTensor`` has a manager, which it shares with the tensors computed from
    it. A coordinate set and its relations are freed with its last tensor, key or array:
    see ``insert``. The only geometric rule is ``in = out * stride + offset_k`` within a
    batch element.

    Examples:
        >>> coords = mx.array([[0, 0, 0], [0, 1, 0], [0, 2, 0]])
        >>> manager = ml.CoordinateManager()
        >>> key = manager.insert(coords)
        >>> relation = manager.submanifold_kernel_relation(key, kernel_size=3)
        >>> relation.n_edges  # the three rows, and both directions of two neighbours
        7
    """

    def __init__(self):
        self._sets: dict[int, CoordinateSet] = {}  # by serial
        # By the id of a live array: its sets, by stride, spatial shape and batch size.
        self._by_array: dict[int, tuple[ref[mx.array], dict[tuple, CoordinateSet]]] = {}
        # Derived sets, by (rule, source set, kernel or stride).
        self._derived = SharedViews()
        # For each set, by stride: the set it was computed from, or None for several.
        self._consumed: dict[CoordinateSet, dict[tuple, CoordinateSet | None]] = {}
        self._version = 0  # counts the changes of ``_consumed``
        # Calls that `prepare_scan` prepared: (id of the net, serial, dtype, training).
        self.prepared: set[tuple[Any, ...]] = set()
        self._relations: dict[tuple, Relation] = {}
        # Relations by a layer's arguments, and the version that they are valid for.
        self._by_arguments: dict[tuple, tuple[Relation, int | None]] = {}

    @built_by_one
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

        Do not change the rows in place: pass changed rows as a new array. An insertion
        frees the sets whose keys, arrays and tensors are gone. A set also lives as long
        as a set that it was derived from, or that was derived from it.

        Args:
            coords: (N, 1 + D) int32 rows (batch, x, y, ...), in their own lattice
                cells; negative spatial values are legal.
            stride: size of a lattice cell, int or one per axis.
            spatial_shape: D extents of a dense grid that starts at 0.
            batch_size: number of batch elements; by default the greatest index + 1,
                and 1 without rows.
            trusted: promise that the rows are sorted and unique, and skip the check.
            box: bounds of all rows, if the caller guarantees them.

        Raises:
            ValueError: wrong shape or dtype. Duplicates and ranges are checked when
                the first relation is built.
        """
        return self.inserted(
            coords, stride, spatial_shape, batch_size, trusted, box
        ).key

    @built_by_one
    def inserted(
        self,
        coords: mx.array,
        stride: IntOrTuple = 1,
        spatial_shape: Sequence[int] | None = None,
        batch_size: int | None = None,
        trusted: bool = False,
        box: Bounds | None = None,
        rows: mx.array | None = None,
    ) -> CoordinateSet:
        """Add a set and return it; as ``insert``.

        ``rows`` are the rows to use if ``coords`` may have been changed in place.
        """
        coords = check_coords(coords)
        dims = coords.shape[1] - 1
        stride, batch_size = check_stride(stride, dims), check_batch_size(batch_size)
        if spatial_shape is not None:
            spatial_shape = per_axis(spatial_shape, dims, "spatial_shape", least=0)
        _, known = self._by_array.get(id(coords), (None, {}))
        entry = known.get((stride, spatial_shape, batch_size))
        if entry is not None:
            return entry
        self._collect_garbage()
        # Shares the caller's memory; mx.array would copy. Column-major rows, as from
        # np.argwhere, are copied here, and not at every launch.
        rows = mx.contiguous(coords if rows is None else rows)
        entry = self._add(rows, stride, spatial_shape, batch_size, trusted, box)
        entry.array_ref = self._index_array(coords, entry)
        return entry

    def _add(self, coords: mx.array, stride: tuple, *facts) -> CoordinateSet:
        """Add a set of int32 rows; ``facts`` as for ``CoordinateSet``."""
        entry = CoordinateSet(coords, stride, *facts)
        self._sets[entry.serial] = entry
        self._index_array(entry.shown, entry)
        return entry

    def _index_array(self, array: mx.array, entry: CoordinateSet) -> ref[mx.array]:
        """Index a set by an array; return a weak reference to the array."""
        known = self._by_array.get(id(array))
        if known is None:
            gone = partial(_forget, ref(self), id(array))
            known = self._by_array[id(array)] = ref(array, gone), {}
        facts = entry.stride, entry.spatial_shape, entry.declared_batch_size
        known[1][facts] = entry
        return known[0]

    def _collect_garbage(self) -> None:
        """Free unreachable sets, and everything cached for them."""
        left = [entry for entry in self._sets.values() if entry.is_reachable]
        if len(left) == len(self._sets):
            return
        beside: dict[CoordinateSet, list[CoordinateSet]] = {}
        for keeper, dependent in self._dependencies():
            beside.setdefault(keeper, []).append(dependent)
        living = set(left)
        while left:
            found = set(beside.get(left.pop(), ())) - living
            living |= found
            left += found
        if len(living) < len(self._sets):
            self._retain(living)

    def _dependencies(self) -> Iterator[tuple[CoordinateSet, CoordinateSet]]:
        """Yield pairs of sets: the second lives as long as the first."""
        for (_, source, _), derived in self._derived.everything():
            yield source, derived  # avoids a rebuild
            yield derived, source  # a transposed convolution needs it
        for coarse, sets in self._consumed.items():
            for fine in sets.values():
                if fine is not None:
                    yield coarse, fine

    def _retain(self, living: set[CoordinateSet]) -> None:
        """Drop all sets but ``living``, and everything cached for the others."""
        self._sets = {n: entry for n, entry in self._sets.items() if entry in living}
        for rule, derived in self._derived.everything():
            if derived not in living:
                self._derived.drop(rule)
        self.prepared = {each for each in self.prepared if each[1] in self._sets}
        for name, (array, known) in list(self._by_array.items()):
            left = {facts: entry for facts, entry in known.items() if entry in living}
            if left:
                self._by_array[name] = array, left
            else:
                self._by_array.pop(name, None)
        for coarse in self._consumed.keys() - living:
            del self._consumed[coarse]
        self._relations = {
            arguments: relation
            for arguments, relation in self._relations.items()
            if living.issuperset(relation.sets)
        }
        self._by_arguments = {
            arguments: entry
            for arguments, entry in self._by_arguments.items()
            if living.issuperset(entry[0].sets)
        }

    def __getitem__(self, key: CoordinateKey) -> CoordinateSet:
        try:
            return self._sets[key.serial]
        except KeyError:
            keys = ", ".join(repr(each.key) for each in self.sets) or "none"
            raise KeyError(
                f"{key!r} is not a coordinate set of this manager, which has: {keys}. "
                "Keep a tensor, key or array of a set alive to keep the set"
            ) from None

    def __contains__(self, key: CoordinateKey) -> bool:
        return key.serial in self._sets

    @property
    def sets(self) -> tuple[CoordinateSet, ...]:
        """The coordinate sets so far, in the order in which they were made."""
        return tuple(self._sets.values())

    def key_of(self, key_or_coords: CoordinateKey | mx.array) -> CoordinateKey:
        """Return the key of an array of coordinates; a key is returned as it is.

        An array that has no set is inserted at stride 1.
        """
        if isinstance(key_or_coords, CoordinateKey):
            self[key_or_coords]
            return key_or_coords
        _, known = self._by_array.get(id(key_or_coords), (None, {}))
        entry = next(iter(known.values()), None)
        return self.insert(key_or_coords) if entry is None else entry.key

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a CoordinateManager cannot be copied or pickled; copy its tensors, each "
            "of which gets a new manager"
        )

    # Sets derived from other sets

    def cells(
        self, key_or_coords: CoordinateKey | mx.array, strides: Sequence[IntOrTuple]
    ) -> tuple[CoordinateKey, ...]:
        """Build the rows of a chain of strided convolutions; return their keys.

        ``kernel_relation`` with ``support="cell"`` uses them. Reads all sizes at once.
        """
        source = self[self.key_of(key_or_coords)]
        dims = len(source.stride)
        chain = [per_axis(stride, dims, "stride") for stride in strides]
        return tuple(derived.key for derived in self._cells(source, chain))

    def _forward_rows(
        self, source: CoordinateSet, spec: KernelSpec, support: str
    ) -> CoordinateSet:
        """Return the output set of a forward convolution with this support."""
        if support != "cell":
            return self._derived_set("reach", source, spec)
        if set(spec.stride) == {1} and spec.is_centred:
            return source
        return self._cells(source, [spec.stride])[0]

    def _derived_set(
        self, name: str, source: CoordinateSet, spec: KernelSpec
    ) -> CoordinateSet:
        """Return the set that "reach" or "generative" derives from a set, cached."""
        derived = self._derived.get((name, source, spec))
        if derived is None:
            build = partial(self._derived_rows, name == "generative", source, spec)
            derived = self._derived.build((name, source, spec), build)
        return derived

    def _derived_rows(
        self, expands: bool, source: CoordinateSet, spec: KernelSpec
    ) -> CoordinateSet:
        """Return the set of all rows that some input reaches or expands to."""
        if not source.settled:
            settle([source])  # rows are checked before they are used
        rule, shape = Rule.EXPAND if expands else Rule.REACH, source.spatial_shape
        if shape is not None and expands:
            shape = spec.transposed_output_shape(shape)
        elif shape is not None:
            shape = spec.output_shape(shape, "reach")
        coords, offsets, stride = source.coords, spec.offsets, spec.stride
        box = lattice.int32_box(rule, source.box, offsets, stride)
        cut = lattice.cut(box, shape)
        # Without overlap every cell is a row, unless the grid cuts a cell.
        are_cells = expands and spec.fills_cell and cut == box
        count = len(source) * spec.volume if are_cells else None
        build = registry.geometry().rule_rows
        rows = build(rule, coords, offsets, stride, cut, count)
        step = (finer if expands else coarser)(source.stride, stride)
        return self._insert_sorted(rows, cut, step, shape, source)

    def _cells(
        self, source: CoordinateSet, strides: Sequence[tuple[int, ...]]
    ) -> list[CoordinateSet]:
        chain = []
        # Cells depend on the stride alone: kernels of one stride share their rows.
        for stride in strides:
            derived = self._derived.find(("cell", source, stride))
            if derived is None:
                return chain + self._new_cells(source, strides[len(chain) :])
            source = derived
            chain.append(source)
        return chain

    @built_by_one
    def _new_cells(
        self, source: CoordinateSet, strides: Sequence[tuple[int, ...]]
    ) -> list[CoordinateSet]:
        if self._derived.find(("cell", source, strides[0])) is not None:
            return self._cells(source, strides)  # built by another thread
        chain = []
        for stride, level in zip(strides, _levels(source, strides), strict=True):
            rows, box, cell, shape = level
            derived = self._insert_sorted(rows, box, cell, shape, source)
            self._derived.add(("cell", source, stride), derived)
            self._note_consumed(derived, source)
            source = derived
            chain.append(derived)
        return chain

    def _insert_sorted(self, rows, box, stride, shape, source) -> CoordinateSet:
        derived = self._add(rows, stride, shape, source.batch_size, True, box)
        derived.is_sorted = True
        return derived

    def _note_consumed(self, coarse: CoordinateSet, fine: CoordinateSet) -> None:
        if coarse is fine or self._consumed.get(coarse, {}).get(fine.stride) is fine:
            return
        with building:
            sets = self._consumed.setdefault(coarse, {})
            one = fine if sets.get(fine.stride, fine) is fine else None
            if fine.stride not in sets or sets[fine.stride] is not one:
                sets[fine.stride] = one
                self._version += 1

    def finer(self, key: CoordinateKey, steps: Sequence[int]) -> CoordinateKey:
        """Return the key of the set that strides of ``steps`` computed ``key`` from.

        Raises a ValueError if ``key`` was computed from no such set, or from several.
        """
        return self._finer(self[key], steps).key

    def _finer(self, coarse: CoordinateSet, steps: Sequence[int]) -> CoordinateSet:
        if set(steps) == {1}:
            return coarse
        wanted = finer(coarse.stride, steps)
        found, above = [], [coarse]
        for each in above:  # the list grows: a set of stride 4 goes back to stride 1
            sets = self._consumed.get(each, {})
            near = [sets[wanted]] if wanted in sets else list(sets.values())
            for fine in near:
                if fine is None or fine.stride == wanted:
                    found.append(fine)
                elif fine not in above:
                    above.append(fine)
        if len(set(found)) == 1 and found[0] is not None:
            return found[0]
        stride = stride_text(wanted)
        if not found:
            raise ValueError(
                f"no coordinates of stride {stride} are known to upsample "
                f"{coarse.key!r} onto: no strided operation computed its rows from "
                "such a set. Pass coordinates=, or use a generative transposed "
                "convolution"
            )
        raise ValueError(
            f"several coordinate sets of stride {stride} could be the target of "
            f"{coarse.key!r}, whose rows were computed from more than one set; pass "
            "coordinates= to say which"
        )

    # Relations

    @property
    def relations(self) -> tuple[Relation, ...]:
        """The relations so far, in the order in which they were built."""
        return tuple(self._relations.values())

    def cached_relation(self, arguments: tuple[Any, ...]) -> Relation | None:
        """Return the cached relation of a layer's call, or None if it is outdated."""
        relation, version = self._by_arguments.get(arguments, (None, None))
        return relation if version in (None, self._version) else None

    def cache_relation(
        self, arguments: tuple[Any, ...], relation: Relation, searched: bool
    ) -> None:
        """Cache a relation for later calls of a layer with equal arguments.

        ``searched``: whether its target was searched for among this manager's sets.
        """
        self._by_arguments[arguments] = relation, self._version if searched else None

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

        With ``support="cell"`` the output rows are the sorted unique
        ``floor(in / stride)``; with stride 1 and centred offsets they are the input's
        rows in their order. With ``"reach"`` they are all rows that some input reaches,
        sorted, and cut to the dense output grid if the input has a ``spatial_shape``.
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
        """Return the forward relation onto exactly the rows of a target set."""
        key = self.key_of(key_or_coords)  # kept alive while the target is inserted
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
        """Return the stride-1 relation of a set to itself."""
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

        The default target is the finer set that strided convolutions computed the
        input's rows from; with stride 1 it is the input's own set.

        Raises:
            ValueError: ``target`` is None, and the input's rows were computed from no
                set of that stride, or from several.
        """
        key = self.key_of(key_or_coords)  # kept alive while the target is inserted
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
        """Return the generative relation, onto every row that a kernel reaches.

        Rows are sorted and unique, even if kernels overlap; with a
        ``spatial_shape`` they are cut to PyTorch's transposed output grid.
        """
        source, spec = self._start(
            key_or_coords, kernel_size, stride, padding, dilation, offsets
        )
        target = self._derived_set("generative", source, spec)
        return self._between("generative", source, target, spec)

    def relation(
        self,
        key_or_coords: CoordinateKey | mx.array,
        target: CoordinateKey | mx.array,
        *,
        offsets: Sequence[Sequence[int]],
        stride: IntOrTuple = 1,
    ) -> Relation:
        """Return the relation between any two sets with explicit offsets."""
        key = self.key_of(key_or_coords)  # kept alive while the target is inserted
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

    def _known_edges(
        self, kind: str, source: CoordinateSet, target: CoordinateSet, spec: KernelSpec
    ) -> int | None:
        """Return the number of edges if each finer row has one, to its cell."""
        if not spec.fills_cell or kind not in ("forward", "transposed", "generative"):
            return None
        fine = source if kind == "forward" else target
        if kind == "generative":
            return len(fine)
        derived = self._derived.find(("cell", target, spec.stride))
        if kind == "transposed" and derived is not source:  # it may lack cells
            return None
        pairs = zip(fine.spatial_shape or (), spec.stride, strict=False)
        return None if any(n % s for n, s in pairs) else len(fine)

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
        arguments = kind, source, target, spec
        known = self._relations.get(arguments)
        if known is not None:
            return known
        if len(source.stride) != len(target.stride):
            raise ValueError(
                f"the target has {len(target.stride)} spatial axes, the input "
                f"{len(source.stride)}; both must have the same number"
            )
        if kind == "transposed":
            # Transpose the strided relation that built the cells.
            derived = self._relations.get(("forward", target, source, spec))
            if derived is not None:
                return self._relations.setdefault(arguments, derived.transposed(kind))
        search = Search.of(kind, source, target, spec)
        identity = search.identity
        relation = Relation(
            kind,
            spec.volume,
            len(source),
            len(target),
            search,
            family=ref(self),
            spec=spec,
            in_coords=source.shown,
            out_coords=target.shown,
            mirrored=search.mirrored,
            sets=(source, target),
        )
        # Both sets are checked: a duplicate target row is an error too.
        if not (source.settled and target.settled):
            both = dict.fromkeys((source, target))
            unsettled = [each for each in both if not each.settled]
            # The read that checks the sets also counts the edges.
            count = None if identity else registry.geometry().start(relation)
            for (edges,) in settle(unsettled, *([] if count is None else [count])):
                relation.set_counted(edges)
        edges = len(source) if identity else self._known_edges(*arguments)
        if edges is not None:
            relation.set_counted(edges)
        self._relations[arguments] = relation
        return relation


def _levels(
    source: CoordinateSet, strides: Sequence[tuple[int, ...]]
) -> Iterator[tuple[mx.array, Bounds, tuple, tuple[int, ...] | None]]:
    """Yield (rows, box, stride, spatial_shape) of each level of a chain."""
    steps = list(accumulate(strides, lambda a, b: tuple(map(mul, a, b))))
    shape = source.spatial_shape
    for rows, box, step in zip(*_rows(source, steps), steps, strict=True):
        grid = None if shape is None else cells_of(shape, step)
        yield rows, box, coarser(source.stride, step), grid


def _rows(
    source: CoordinateSet, steps: Sequence[tuple[int, ...]]
) -> tuple[list[mx.array], list[Bounds]]:
    """Return the int32 rows of each level, and their boxes."""
    geometry, was_settled = registry.geometry(), source.settled

    def boxes() -> list[Bounds]:
        low, high = source.box
        return [
            (tuple(map(floordiv, low, (1, *s))), tuple(map(floordiv, high, (1, *s))))
            for s in steps
        ]

    started = geometry.start_levels(source, steps, boxes() if was_settled else None)
    unsettled = [] if was_settled else [source]
    counts = settle(unsettled, *(started.counts if started else ()))
    known = boxes()
    rows = started and started.rows(counts, known)
    if rows is None and not was_settled:
        return _rows(source, steps)  # try again with known bounds
    return rows or geometry.levels(source.coords, steps, known), known


# Joins by pair of sets. They cache keys, since sets or a manager keep a pair alive.
_joins = OfPairs()


class Move(NamedTuple):
    """The mapping of the N rows of a source set to the M rows of a target set."""

    places: mx.array  # (M,) int32: the source row of each target row, or -1
    back: mx.array  # (N,) int32: the target row of each source row, or -1


class Part(NamedTuple):
    """Selected rows of a set, in order; key and move are None for all rows."""

    key: CoordinateKey | None
    move: Move | None


class Union(NamedTuple):
    """The union of two sets.

    ``key`` is None if the set ``which`` (0 or 1) already has these rows. ``moves`` of
    the two sets are None if their rows do not move.
    """

    key: CoordinateKey | None
    which: int
    moves: tuple[Move | None, Move | None]


def part_of(
    manager: CoordinateManager,
    source: CoordinateSet,
    mask: mx.array,
    count: int | None = None,
) -> Part:
    """Return the part of a set whose mask is true. Reads the number of rows."""
    if not len(source):
        return Part(None, None)
    started = registry.geometry().start_masked(mx.stop_gradient(mask), source.coords)
    unsettled = [] if source.settled else [source]
    if count is None:
        ((count,),) = settle(unsettled, started.count)
    else:
        settle(unsettled)
    if count == len(source):
        return Part(None, None)
    rows, back, coords = started.rows(count)
    new = manager.inserted(
        coords,
        source.stride,
        spatial_shape=source.spatial_shape,
        batch_size=source.batch_size,
        trusted=True,
        box=source.box,  # bounds every selection of rows
    )
    new.is_sorted = source.is_sorted
    return Part(new.key, Move(rows, back))


def equal_rows(a: CoordinateSet, b: CoordinateSet) -> Move | None:
    """Return the move from one set to another with the same rows.

    Returns None if the order is the same too. Raises if a row differs or repeats.
    """
    return _joins.build(a, b, "equal", lambda: sync.complete(_equal_rows(a, b)))


def _equal_rows(a: CoordinateSet, b: CoordinateSet) -> Move | None:
    expect_one_lattice(a, b)
    # Sorted sets are equal row by row, or not equal.
    are_sorted = len(a) == len(b) and a.is_sorted and b.is_sorted
    if are_sorted and sync.read(mx.array_equal(a.coords, b.coords))[0]:
        return None
    places = _find_rows(b, a)
    same = mx.array_equal(places, mx.arange(len(b), dtype=mx.int32))
    missing, same = sync.read((places < 0).sum(), same)
    if missing or len(a) != len(b):
        of, at = (b, places) if missing else (a, _find_rows(a, b))
        row = tuple(of.coords[mx.argmin(at).item()].tolist())
        raise ValueError(
            f"the tensors do not have the same coordinates ({len(a):,} and {len(b):,} "
            f"rows; {row} is in only one); join them with ops.union or "
            "ops.intersection"
        )
    return None if same else Move(places, inverted(places, len(a)))


def common(
    manager: CoordinateManager, a: CoordinateSet, b: CoordinateSet
) -> tuple[Part, Move]:
    """Return the rows that both sets have, and the second set's move to them."""

    def build() -> tuple[Part, Move]:
        at = _find_rows(a, b)
        part = part_of(manager, a, at >= 0)
        at = at if part.move is None else at[part.move.places]
        move = Move(at, inverted(at, len(b)))
        return _complete(manager, part, move), move

    return _joins.build(a, b, "common", build)


def alone(manager: CoordinateManager, a: CoordinateSet, b: CoordinateSet) -> Part:
    """Return the rows of the first set that the second lacks."""

    def build() -> Part:
        return _complete(manager, part_of(manager, a, _find_rows(a, b) < 0))

    return _joins.build(a, b, "alone", build)


def _find_rows(a: CoordinateSet, b: CoordinateSet) -> mx.array:
    """Return the (N_a,) places of the first set's rows in the second, or -1."""
    settle([each for each in dict.fromkeys((a, b)) if not each.settled])
    if not len(a):
        return mx.zeros((0,), dtype=mx.int32)
    return b.lookup.find(a.coords, a.box)


def united(
    manager: CoordinateManager, a: CoordinateSet, b: CoordinateSet, is_one: bool
) -> Union:
    """Return the sorted rows that either set has. Reads one number, once."""

    def build() -> Union:
        return _complete(manager, _united(manager, a, b, is_one))

    return _joins.build(a, b, "union", build)


def _united(
    manager: CoordinateManager, a: CoordinateSet, b: CoordinateSet, is_one: bool
) -> Union:
    is_turned = len(b) > len(a)
    small, large = (a, b) if is_turned else (b, a)
    at, missing = _find_rows(small, large), 0
    if len(small):
        ((missing,),) = sync.read((at < 0).sum().reshape(1))
    box = join(a.box, b.box) if len(small) else large.box
    shape = a.spatial_shape if a.spatial_shape == b.spatial_shape else None
    facts = shape, max(a.batch_size, b.batch_size)
    if large.is_sorted and not missing:  # the union is there
        rows, move = large.shown, None
        if len(small) < len(large) or not small.is_sorted:
            move = Move(inverted(at, len(large)), at)
        moves = (move, None) if is_turned else (None, move)
    else:
        both, count = mx.concatenate([a.coords, b.coords]), len(large) + missing
        rows, places = registry.geometry().unique_rows(both, box, count)
        backs = places[: len(a)], places[len(a) :]
        moves = tuple(Move(inverted(back, count), back) for back in backs)
    for which, (side, move) in enumerate(zip((a, b), moves, strict=True)):
        same = facts == (side.spatial_shape, side.batch_size)
        if move is None and same and (is_one or not which):
            return Union(None, which, moves)
    new = manager.inserted(rows, a.stride, *facts, trusted=True, box=box)
    new.is_sorted = True
    return Union(new.key, 0, moves)


def _complete(
    manager: CoordinateManager, new: Part | Union, *moves: Move
) -> Part | Union:
    """Evaluate the moves and rows of a join, which threads share; return it."""
    rows = None if new.key is None else manager[new.key].coords
    sync.complete((new, moves, rows))
    return new
