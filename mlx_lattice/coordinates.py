"""CoordinateManager: coordinate sets, their keys, and the relations between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import mlx.core as mx

from . import builders, geometry
from .geometry import Bounds
from .kernel import IntOrTuple, KernelSpec, per_axis
from .relation import Relation

SUPPORTS = ("cell", "reach")

Index = geometry.RowIndex | builders.HashIndex

_serial = itertools.count(1)


@dataclass(frozen=True)
class CoordinateKey:
    """Names one coordinate set of a manager.

    Attributes:
        stride: the size of its lattice cell on each axis, in cells of the first
            lattice; a fraction where a generative convolution refined it.
        serial: distinguishes sets of equal stride; never reused in one process.
    """

    stride: tuple
    serial: int

    def __repr__(self) -> str:
        """Return ``#3 at stride 2``."""
        same = len(set(self.stride)) == 1
        stride = self.stride[0] if same else tuple(map(str, self.stride))
        return f"#{self.serial} at stride {stride}"


class CoordinateSet:
    """One set of coordinate rows and what is known of it.

    Args:
        coords: (N, 1 + D) int32.
        stride: the size of its lattice cell on each axis.
        spatial_shape: extents of a dense grid from 0, or None.
        batch_size: number of batch elements, or None for the greatest index + 1.
        trusted: whether the library made the rows, so they are sorted and unique.
    """

    def __init__(self, coords, stride, spatial_shape, batch_size, trusted):
        self.coords, self.stride = coords, stride
        self.spatial_shape, self.trusted = spatial_shape, trusted
        self.declared_batch_size = batch_size
        self._bounds: Bounds | None = None
        self._index: Index | None = None

    def __len__(self) -> int:
        return self.coords.shape[0]

    @property
    def bounds(self) -> Bounds:
        """Least and greatest value of every column; read from the device once."""
        if self._bounds is None:
            self._bounds = geometry.bounds_of(self.coords)
        return self._bounds

    @property
    def batch_size(self) -> int:
        """Number of batch elements, empty ones included where they were declared."""
        if self.declared_batch_size is not None:
            return self.declared_batch_size
        return self.bounds[1][0] + 1 if len(self) else 0

    @property
    def index(self) -> Index:
        """The look-up of its rows. Checks range and uniqueness the first time.

        Raises:
            ValueError: a batch index is out of range, or a row comes twice.
        """
        if self._index is None:
            self._check_range()
            index = builders.index(self.coords, self.bounds)
            pair = None if self.trusted else index.first_duplicate()
            if pair is not None:
                row = tuple(self.coords[pair[1]].tolist())
                raise ValueError(
                    f"coordinates must be unique; rows {pair[0]} and {pair[1]} are "
                    f"both {row}. Build the tensor with SparseTensor.from_points, "
                    "which merges points of one voxel, or drop the repeats"
                )
            self._index = index
        return self._index

    def _check_range(self) -> None:
        if not len(self):
            return
        low, high = self.bounds
        if low[0] < 0:
            raise ValueError(
                f"batch indices (column 0) must be 0 or more; got {low[0]} to {high[0]}"
            )
        declared = self.declared_batch_size
        if declared is not None and high[0] >= declared:
            raise ValueError(
                f"batch indices (column 0) must be below batch_size {declared}; got "
                f"{low[0]} to {high[0]}"
            )
        if self.spatial_shape is None:
            return
        for axis, extent in enumerate(self.spatial_shape):
            if low[1 + axis] < 0 or high[1 + axis] >= extent:
                raise ValueError(
                    f"coordinates of axis {axis} must lie in [0, {extent}), the "
                    f"spatial_shape; got {low[1 + axis]} to {high[1 + axis]}"
                )


def check_coords(coords) -> mx.array:
    """Return coordinates as (N, 1 + D) int32, or raise with what was wrong."""
    if not isinstance(coords, mx.array):
        coords = mx.array(coords)
        if coords.size == 0 and coords.ndim == 2:
            coords = coords.astype(mx.int32)
    if coords.ndim != 2 or not 2 <= coords.shape[1] <= 5:
        raise ValueError(
            "coords must have shape (N, 1 + D): a batch index and 1 to 4 spatial "
            f"coordinates a row; got shape {tuple(coords.shape)}"
        )
    if not mx.issubdtype(coords.dtype, mx.integer):
        raise ValueError(
            f"coords must be int32; got {coords.dtype}. Points in metres become "
            "voxels through SparseTensor.from_points"
        )
    if coords.dtype in (mx.int64, mx.uint32, mx.uint64):
        return geometry.as_int32(coords, "coords")
    # An array that is right already keeps its identity: managers find sets by it.
    return coords if coords.dtype == mx.int32 else coords.astype(mx.int32)


def _ratio(a, b):
    quotient = Fraction(a) / Fraction(b)
    return int(quotient) if quotient.denominator == 1 else quotient


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

        Raises:
            ValueError: wrong shape or dtype. Duplicates and ranges are checked when
                the first relation is built.
        """
        coords = check_coords(coords)
        dims = coords.shape[1] - 1
        if isinstance(stride, (int, Fraction)):
            stride = (stride,) * dims
        stride = tuple(_ratio(s, 1) for s in stride)
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
        held = mx.array(coords)  # the same memory, whatever becomes of the caller's
        self._sets[key] = CoordinateSet(
            held, stride, spatial_shape, batch_size, trusted
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

    def key_of(self, key_or_coords: CoordinateKey | mx.array) -> CoordinateKey:
        """Return the key itself, or insert the coordinates at stride 1."""
        if isinstance(key_or_coords, CoordinateKey):
            self[key_or_coords]
            return key_or_coords
        return self.insert(key_or_coords)

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
        # Cells depend on the stride alone: kernels of one stride share their rows.
        made = ("cell", key, spec.stride) if support == "cell" else ("reach", key, spec)
        if made in self._made:
            return self._made[made]
        shape = source.spatial_shape
        if shape is not None:
            shape = spec.output_shape(shape, support)
        source.index  # noqa: B018 (checks the rows before they are used)
        if support == "cell":
            rows = builders.cell_rows(source.coords, spec.stride)
        else:
            rows = builders.reached_rows(
                source.coords, source.bounds, spec.offsets, spec.stride
            )
            if shape is not None:
                rows = geometry.cut(rows, shape)
        stride = tuple(
            _ratio(s * t, 1) for s, t in zip(source.stride, spec.stride, strict=True)
        )
        self._made[made] = self._insert_sorted(rows, stride, shape, source)
        return self._made[made]

    def _insert_sorted(self, rows, stride, shape, source) -> CoordinateKey:
        return self.insert(
            rows,
            stride,
            spatial_shape=shape,
            batch_size=source.batch_size,
            trusted=True,
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
            target = self._finer(key, spec)
        return self._relation("transposed", key, self.key_of(target), spec)

    def _finer(self, key: CoordinateKey, spec: KernelSpec) -> CoordinateKey:
        wanted = tuple(
            _ratio(a, b) for a, b in zip(key.stride, spec.stride, strict=True)
        )
        consumed = [k for k in self._consumed.get(key, ()) if k.stride == wanted]
        found = consumed or [k for k in self._sets if k.stride == wanted and k != key]
        if not found and set(spec.stride) == {1}:
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
            source.index  # noqa: B018 (checks the rows before they are used)
            rows = builders.expanded_rows(
                source.coords, source.bounds, spec.offsets, spec.stride
            )
            shape = source.spatial_shape
            if shape is not None:
                shape = spec.transposed_output_shape(shape)
                rows = geometry.cut(rows, shape)
            finer = tuple(
                _ratio(a, b) for a, b in zip(source.stride, spec.stride, strict=True)
            )
            self._made[made] = self._insert_sorted(rows, finer, shape, source)
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
        index = source.index
        if target is not source:
            target.index  # noqa: B018 (a duplicate target row would be an error too)
        offsets, stride = spec.offsets, spec.stride
        mirrored = kind == "submanifold" and spec.is_symmetric

        def table() -> mx.array:
            return builders.table(
                index,
                source.coords,
                target.coords,
                target.bounds,
                offsets,
                stride,
                transposed=kind in ("transposed", "generative"),
                mirrored=mirrored,
            )

        relation = Relation(
            kind,
            spec.volume,
            len(source),
            len(target),
            table,
            spec=spec,
            in_coords=source.coords,
            out_coords=target.coords,
            mirrored=mirrored,
            keys=(source_key, target_key),
        )
        self._relations[cache_key] = relation
        return relation
