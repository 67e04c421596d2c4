"""HeldSets: coordinate sets by their keys, and those that rules make of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from numbers import Rational

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
from .kernel_spec import IntOrTuple, KernelSpec, per_axis

_serial = itertools.count(1)


class HeldSets:
    """Coordinate sets by key; each set that a rule makes of another is made once."""

    def __init__(self):
        self._sets: dict[CoordinateKey, CoordinateSet] = {}
        # Arrays by identity; each is held, so that no other can take its place.
        self._by_array: dict[int, tuple[mx.array, CoordinateKey]] = {}
        self._made: dict[tuple, CoordinateKey] = {}
        # Counts what a look-up among the sets may find.
        self._version = 0

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
        # The same memory, whatever becomes of the caller's; mx.array would copy.
        held = coords.astype(coords.dtype)
        key = self._hold(held, stride, spatial_shape, batch_size, trusted, box)
        self._by_array[id(coords)] = coords, key
        return key

    def _hold(self, coords: mx.array, stride: tuple, *facts) -> CoordinateKey:
        """Add a set of rows that are int32; ``facts`` as of ``CoordinateSet``."""
        key = CoordinateKey(stride, next(_serial))
        self._version += 1
        self._sets[key] = CoordinateSet(coords, stride, *facts)
        self._by_array[id(coords)] = coords, key
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

    def key_of(self, key_or_coords: CoordinateKey | mx.array) -> CoordinateKey:
        """Return the key itself, or insert the coordinates at stride 1."""
        if isinstance(key_or_coords, CoordinateKey):
            self[key_or_coords]
            return key_or_coords
        return self.insert(key_or_coords)

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

    def chain(self, key: CoordinateKey) -> tuple[CoordinateKey, ...]:
        """Return a set and the cells that were made of it, one after another.

        Of several made of one set, the first.
        """
        made: dict[CoordinateKey, CoordinateKey] = {}
        for (rule, source, _), cells in self._made.items():
            if rule == "cell":
                made.setdefault(source, cells)
        keys = [key]
        while keys[-1] in made:
            keys.append(made[keys[-1]])
        return tuple(keys)

    def _forward_rows(self, key, spec: KernelSpec, support: str) -> CoordinateKey:
        """Return the set that a forward convolution writes, by its support."""
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

    def _generated_rows(self, key, spec: KernelSpec) -> CoordinateKey:
        """Return the set of every ``in * stride + offset_k``, sorted and unique."""
        made = "generative", key, spec
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
        return self._hold(rows, stride, shape, source.batch_size, True, box)
