"""HeldSets: coordinate sets by their keys, and those that rules make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from weakref import ref

import mlx.core as mx

from .backends import registry
from .cell_levels import levels
from .coordinate_set import (
    CoordinateKey,
    CoordinateSet,
    check_batch_size,
    check_coords,
    check_stride,
    coarser,
    finer,
    settle,
)
from .copies import Links, OneManager, copied_manager
from .geometry import output_rows
from .geometry.keys import Bounds
from .geometry.output_rows import Rule
from .kernel_spec import IntOrTuple, KernelSpec, per_axis
from .shared_views import SharedViews, built_by_one


def _forget(sets: ref[HeldSets], array: int, _: ref) -> None:
    """Find a set no longer by an array that is gone: another may take its place."""
    if (held := sets()) is not None:
        held._by_array.pop(array, None)


class HeldSets:
    """Coordinate sets by key; each set that a rule makes of another is made once."""

    def __init__(self):
        self._sets: dict[int, CoordinateSet] = {}  # by serial
        # Sets by the identity of an array, for as long as that lives, and their facts.
        self._by_array: dict[int, tuple[ref[mx.array], dict[tuple, CoordinateSet]]] = {}
        # By the rule, the set that it read, and how.
        self._made = SharedViews()
        # Calls that `prepare_scan` prepared: (id of the net, serial, dtype, training).
        self.prepared: set[tuple] = set()

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

        The rows are kept as they are now: a later change of the array in place is not
        seen. Give changed rows as a new array. The manager frees a set once neither
        its key, its array nor a tensor on it is alive, nor those of a set that was
        made from it or that it was made from. It frees sets at the next insertion.

        Args:
            coords: (N, 1 + D) int32 rows (batch, x, y, ...), in their own lattice
                cells; negative spatial values are legal.
            stride: size of a lattice cell, int or one per axis.
            spatial_shape: D extents of a dense grid that starts at 0.
            batch_size: number of batch elements; by default the greatest index + 1,
                and 1 without rows.
            trusted: promise that the rows are sorted and unique, and skip the check.
            box: bounds that hold all rows, where the caller knows that they are right.

        Raises:
            ValueError: wrong shape or dtype. Duplicates and ranges are checked when
                the first relation is built.
        """
        facts = spatial_shape, batch_size, trusted, box
        return self.inserted(coords, stride, *facts).key

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

        Args:
            coords, stride, spatial_shape, batch_size, trusted, box: as of ``insert``.
            rows: those of ``coords`` where that may have been changed since.
        """
        coords = check_coords(coords)
        dims = coords.shape[1] - 1
        stride, batch_size = check_stride(stride, dims), check_batch_size(batch_size)
        if spatial_shape is not None:
            spatial_shape = per_axis(spatial_shape, dims, "spatial_shape", least=0)
        _, known = self._by_array.get(id(coords), (None, {}))
        held = known.get((stride, spatial_shape, batch_size))
        if held is not None:
            return held
        self._drop_unheld()
        # The same memory, whatever becomes of the caller's; mx.array would copy. Rows
        # that lie by column, as np.argwhere's, are copied here, not at every launch.
        rows = mx.contiguous(coords if rows is None else rows)
        held = self._hold(rows, stride, spatial_shape, batch_size, trusted, box)
        held.given = self._know(coords, held)
        return held

    def _hold(self, coords: mx.array, stride: tuple, *facts) -> CoordinateSet:
        """Add a set of rows that are int32; ``facts`` as of ``CoordinateSet``."""
        held = CoordinateSet(coords, stride, *facts)
        self.adopt(held)
        return held

    @built_by_one
    def adopt(self, held: CoordinateSet) -> None:
        """Add a set that no manager has."""
        self._sets[held.serial] = held
        self._know(held.shown, held)

    @property
    def one(self) -> OneManager:
        """What stands for it in what is copied: one object."""
        return self.__dict__.setdefault("_one", OneManager(type(self)))

    @built_by_one
    def links(self, held: CoordinateSet) -> Links:
        """Return a set as it is copied."""
        made = tuple(
            (rule, source.serial, how)
            for (rule, source, how), made in self._made.everything()
            if made is held
        )
        return Links(held, held.serial, made, ())

    @built_by_one
    def link(self, sets: dict[int, CoordinateSet], links: Sequence[Links]) -> None:
        """Take over what is known of sets that were copied.

        Args:
            sets: those that are here, by the serials of the originals.
            links: of them.
        """
        for held, _, made, _ in links:
            for rule, source, how in made:
                if source in sets:
                    self._made.add((rule, sets[source], how), held)

    def __copy__(self) -> HeldSets:
        return deepcopy(self)

    def __reduce__(self) -> tuple:
        """Return how it is copied and pickled: its sets, and no relations."""
        return copied_manager, (self.one, tuple(map(self.links, self.sets)))

    def _know(self, array: mx.array, held: CoordinateSet) -> ref[mx.array]:
        """Find a set by an array from now on; return a reference to the array."""
        known = self._by_array.get(id(array))
        if known is None:
            gone = partial(_forget, ref(self), id(array))
            known = self._by_array[id(array)] = ref(array, gone), {}
        facts = held.stride, held.spatial_shape, held.declared_batch_size
        known[1][facts] = held
        return known[0]

    def _drop_unheld(self) -> None:
        """Drop sets that nobody can name, nor any that keeps them: see ``_keepers``."""
        left = [held for held in self._sets.values() if held.is_held]
        if len(left) == len(self._sets):
            return
        beside: dict[CoordinateSet, list[CoordinateSet]] = {}
        for keeper, kept in self._keepers():
            beside.setdefault(keeper, []).append(kept)
        living = set(left)
        while left:
            found = set(beside.get(left.pop(), ())) - living
            living |= found
            left += found
        if len(living) < len(self._sets):
            self._keep(living)

    def _keepers(self) -> Iterator[tuple[CoordinateSet, CoordinateSet]]:
        """Yield pairs of sets of which the second lives while the first does."""
        for (_, source, _), made in self._made.everything():
            yield source, made  # or it would be made again
            yield made, source  # what goes back up looks for it

    def _keep(self, living: set[CoordinateSet]) -> None:
        """Drop all sets but these, and what is known of others."""
        self._sets = {n: held for n, held in self._sets.items() if held in living}
        for rule, made in self._made.everything():
            if made not in living:
                self._made.drop(rule)
        self.prepared = {each for each in self.prepared if each[1] in self._sets}
        for name, (array, known) in list(self._by_array.items()):
            left = {facts: held for facts, held in known.items() if held in living}
            if left:
                self._by_array[name] = array, left
            else:
                self._by_array.pop(name, None)

    def __getitem__(self, key: CoordinateKey) -> CoordinateSet:
        try:
            return self._sets[key.serial]
        except KeyError:
            held = ", ".join(repr(each.key) for each in self.sets) or "none"
            raise KeyError(
                f"{key!r} is not a coordinate set of this manager, which has: {held}. "
                "A set is freed with the last tensor, key or array of it"
            ) from None

    def __contains__(self, key: CoordinateKey) -> bool:
        return key.serial in self._sets

    @property
    def sets(self) -> tuple[CoordinateSet, ...]:
        """The coordinate sets so far, in the order in which they were made."""
        return tuple(self._sets.values())

    def key_of(self, key_or_coords: CoordinateKey | mx.array) -> CoordinateKey:
        """Return the key itself, or that of the set that an array is of.

        An array that is of none is inserted, at stride 1.
        """
        if isinstance(key_or_coords, CoordinateKey):
            self[key_or_coords]
            return key_or_coords
        _, known = self._by_array.get(id(key_or_coords), (None, {}))
        held = next(iter(known.values()), None)
        return self.insert(key_or_coords) if held is None else held.key

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
        source = self[self.key_of(key_or_coords)]
        dims = len(source.stride)
        chain = [per_axis(stride, dims, "stride") for stride in strides]
        return tuple(made.key for made in self._cells(source, chain))

    @built_by_one
    def levels(self, held: CoordinateSet) -> list[CoordinateSet]:
        """Return a set and the chain of cells made from it, the first of each set."""
        cells: dict[CoordinateSet, CoordinateSet] = {}
        for (rule, source, _), made in self._made.everything():
            if rule == "cell":
                cells.setdefault(source, made)
        found = [held]
        while found[-1] in cells:
            found.append(cells[found[-1]])
        return found

    @built_by_one
    def coarser(
        self, held: CoordinateSet, fine: CoordinateSet
    ) -> tuple[CoordinateSet, CoordinateSet] | None:
        """Return sets of which one holds the other if these two do; None if unknown.

        Args:
            held: rows that a generative convolution made, of whole cells.
            fine: other rows, whose cells are there.

        Returns:
            The rows that were refined, and the cells of the fine rows.
        """
        for (rule, source, spec), made in self._made.everything():
            if made is held and rule == "generative":
                is_whole = len(held) == len(source) * spec.volume  # no grid cut it
                cells = self._made.find(("cell", fine, spec.stride))
                known = spec.fills_cell and is_whole and cells is not None
                return (source, cells) if known else None
        return None

    def _forward_rows(
        self, source: CoordinateSet, spec: KernelSpec, support: str
    ) -> CoordinateSet:
        """Return the set that a forward convolution writes, by its support."""
        centred = spec.custom or all(
            p == (n // 2 * d if n % 2 else 0)
            for p, n, d in zip(spec.origin, spec.size, spec.dilation, strict=True)
        )
        if support == "cell" and set(spec.stride) == {1} and centred:
            return source
        if support == "cell":
            return self._cells(source, [spec.stride])[0]
        return self._made_once("reach", source, spec, self._reached_rows)

    def _made_once(
        self, rule: str, source: CoordinateSet, spec: KernelSpec, make: Callable
    ) -> CoordinateSet:
        """Return the set that ``make(source, spec)`` returns, made once by a rule."""
        made = self._made.get((rule, source, spec))
        if made is None:
            made = self._made.build((rule, source, spec), partial(make, source, spec))
        return made

    def _reached_rows(self, source: CoordinateSet, spec: KernelSpec) -> CoordinateSet:
        shape = source.spatial_shape
        if shape is not None:
            shape = spec.output_shape(shape, "reach")
        made_rows = self._made_rows(Rule.REACH, source, spec, shape)
        stride = coarser(source.stride, spec.stride)
        return self._insert_sorted(*made_rows, stride, shape, source)

    def _generated_rows(self, source: CoordinateSet, spec: KernelSpec) -> CoordinateSet:
        """Return the set of every ``in * stride + offset_k``, sorted and unique."""
        return self._made_once("generative", source, spec, self._expanded_rows)

    def _expanded_rows(self, source: CoordinateSet, spec: KernelSpec) -> CoordinateSet:
        shape = source.spatial_shape
        if shape is not None:
            shape = spec.transposed_output_shape(shape)
        made_rows = self._made_rows(Rule.EXPAND, source, spec, shape)
        stride = finer(source.stride, spec.stride)
        return self._insert_sorted(*made_rows, stride, shape, source)

    def _made_rows(self, rule, source, spec: KernelSpec, shape):
        """Return the rows that a rule makes of a set, and their box."""
        if not source.settled:
            settle([source])  # rows are checked before they are used
        coords, offsets, stride = source.coords, spec.offsets, spec.stride
        box = output_rows.int32_box(rule, coords, source.box, offsets, stride)
        cut, is_cut = output_rows.cut(box, shape), shape is not None
        # Cells that do not overlap are all made, unless the grid ends in them.
        are_cells = rule == Rule.EXPAND and spec.fills_cell and cut == box
        count = len(source) * spec.volume if are_cells else None
        build = registry.geometry().made_rows
        return build(rule, coords, offsets, stride, cut, is_cut, count), cut

    def _note_consumed(self, coarse: CoordinateSet, fine: CoordinateSet) -> None:
        """Note that a set was computed from another."""

    def _cells(
        self, source: CoordinateSet, strides: Sequence[tuple[int, ...]]
    ) -> list[CoordinateSet]:
        chain = []
        # Cells depend on the stride alone: kernels of one stride share their rows.
        for stride in strides:
            made = self._made.find(("cell", source, stride))
            if made is None:
                return chain + self._new_cells(source, strides[len(chain) :])
            source = made
            chain.append(source)
        return chain

    @built_by_one
    def _new_cells(
        self, source: CoordinateSet, strides: Sequence[tuple[int, ...]]
    ) -> list[CoordinateSet]:
        if self._made.find(("cell", source, strides[0])) is not None:
            return self._cells(source, strides)  # another thread has made them
        chain = []
        for stride, level in zip(strides, levels(source, strides), strict=True):
            rows, box, cell, shape = level
            made = self._insert_sorted(rows, box, cell, shape, source)
            self._made.add(("cell", source, stride), made)
            self._note_consumed(made, source)
            source = made
            chain.append(made)
        return chain

    def _insert_sorted(self, rows, box, stride, shape, source) -> CoordinateSet:
        made = self._hold(rows, stride, shape, source.batch_size, True, box)
        made.is_sorted = True
        return made
