"""CoordinateKey and CoordinateSet: coordinate rows, checked, with their look-up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from numbers import Rational
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import mlx.core as mx

from . import registry, sync
from .checks import AXES, array_of, each_axis, whole
from .geometry import lattice
from .geometry.lattice import Bounds
from .geometry.tables import RowIndex
from .sync import SharedViews, building, built_by_one

# Batch elements that a set of fewer rows may have without a declared batch_size.
UNDECLARED_ELEMENTS = 1024

_serial = itertools.count(1)


# One value an axis.
Stride = tuple[int | Fraction, ...]


@dataclass(frozen=True, eq=False)
class CoordinateKey:
    """Name one coordinate set of a manager; equal only to itself.

    A tensor has the key of its rows. A manager frees a set when its key is dropped.
    """

    stride: Stride  # of a lattice cell on each axis, in cells of the first lattice
    serial: int  # never reused in one process

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a CoordinateKey names a set of one manager, and is not copied or pickled. "
            "Copy a tensor, whose copy has a key of its own"
        )

    def __repr__(self) -> str:
        return f"#{self.serial} at stride {stride_text(self.stride)}"


_NO_REF = ref(CoordinateKey((), 0))  # to what is gone


class CoordinateSet:
    """One set of coordinate rows and what is known of it.

    ``box`` are bounds of rows that the library made, perhaps wider than the rows;
    ``trusted`` rows are sorted and unique. No user has the array ``coords``; ``shown``
    is the same memory for tensors and relations. A ``is_pinned`` set lives without its
    key, and ``array_ref`` is to the caller's array that it was made of, if any.
    """

    serial: int
    array_ref: ReferenceType[Any]

    def __init__(
        self,
        coords: mx.array,
        stride: Stride,
        spatial_shape: tuple[int, ...] | None,
        batch_size: int | None,
        trusted: bool,
        box: Bounds | None,
    ):
        self.serial, self.array_ref = next(_serial), _NO_REF
        self.key_ref: ReferenceType[CoordinateKey] = _NO_REF
        self.is_pinned: bool = False
        self.is_sorted: bool = False
        self.coords: mx.array = coords
        self.stride: Stride = stride
        self._rows = coords.shape[0]
        self.shown: mx.array = coords.__copy__()  # the same memory
        self.spatial_shape: tuple[int, ...] | None = spatial_shape
        self.trusted: bool = trusted
        self.declared_batch_size: int | None = batch_size
        self._box, self._bounds, self._repeat = box, None, None
        self._views = SharedViews()
        # Rows that the library made are right; others are read once.
        self.settled: bool = box is not None or not len(self)

    def __len__(self) -> int:
        return self._rows

    @property
    def key(self) -> CoordinateKey:
        """Its key: one object, for as long as a reference to it exists."""
        key = self.key_ref()
        if key is None:
            key = CoordinateKey(self.stride, self.serial)
            self.key_ref = ref(key)
        return key

    @property
    def is_reachable(self) -> bool:
        """Whether its key, or the array that it was made of, is alive."""
        return (
            self.is_pinned or self.key_ref() is not None or self.array_ref() is not None
        )

    @property
    def bounds(self) -> Bounds:
        """Least and greatest value of every column; read from the device once."""
        if self._bounds is None:
            with building:
                if self._bounds is None and not self.settled:
                    learn([self])
                elif self._bounds is None:
                    with sync.values():
                        self._bounds = registry.geometry().bounds(self.coords)
        return self._bounds

    @property
    def box(self) -> Bounds:
        """Bounds of a box that holds all rows. Reads nothing for a derived set."""
        return self._box if self._bounds is None and self._box else self.bounds

    @property
    def batch_size(self) -> int:
        """Number of batch elements: the declared one, or the greatest index + 1.

        Raises a ValueError if an undeclared index is far beyond the number of rows.
        """
        if self.declared_batch_size is not None:
            return self.declared_batch_size
        size = self.bounds[1][0] + 1 if len(self) else 1
        if size > max(len(self), UNDECLARED_ELEMENTS):
            raise ValueError(
                f"batch indices (column 0) reach {size - 1:,} in a tensor of "
                f"{len(self):,} rows, which would make {size:,} batch elements. "
                f"Correct the column, or pass batch_size={size} if so many are meant"
            )
        return size

    @property
    def lookup(self) -> RowIndex:
        """The look-up of its rows, not checked: see ``index``."""
        build = partial(registry.geometry().index, self.coords, self._box)
        return self.view("lookup", build)

    def view(self, name: Hashable, build: Callable[[], Any]) -> Any:
        """Return what ``build()`` makes of the rows, built once and kept with them."""
        view = self._views.get(name)
        return self._views.build(name, build) if view is None else view

    @lookup.setter
    def lookup(self, index: RowIndex) -> None:
        self._views.add("lookup", index)

    @property
    def arrays(self) -> tuple[mx.array]:
        """The rows, which are computed before another thread sees the set."""
        return (self.coords,)

    @property
    def repeat(self) -> tuple[int, int] | None:
        """Two equal rows that were found, or None; rows are read by ``index``."""
        return self._repeat

    @property
    def index(self) -> RowIndex:
        """The look-up of its rows. Checks range and uniqueness the first time."""
        if not self.settled:
            settle([self])
        return self.lookup

    def release(self) -> None:
        """Drop the look-up of checked rows; it is built again when needed."""
        if self.settled and (self._bounds is not None or self._box is not None):
            self._views.drop("lookup")

    @property
    def unread(self) -> list[mx.array]:
        """Small arrays that ``learn`` wants the values of, launched."""
        return self.lookup.facts() if self._bounds is None else []

    def learn(self, facts: list[Any]) -> None:
        """Take the values of ``unread``."""
        if self._bounds is None:
            index = self.lookup
            self._bounds, self._repeat = index.settle(facts)
            self.is_sorted |= bool(index.is_sorted)
            self.lookup = index  # which may have sorted its rows again

    def check(self) -> None:
        """Raise a ValueError that says what is wrong with the rows."""
        self._check_range()
        if self._repeat is not None and not self.trusted:
            first, second = self._repeat
            row = tuple(sync.read(self.coords[second])[0])
            raise ValueError(
                f"coordinates must be unique; rows {first} and {second} are "
                f"both {row}. Build the tensor with SparseTensor.from_points, "
                "which merges points of one voxel, or drop the repeats"
            )
        self.settled = True

    def _check_range(self) -> None:
        low, high = self._bounds
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


class OfPairs:
    """Cached values of pairs of sets, for as long as both live."""

    def __init__(self):
        self._known: WeakKeyDictionary[CoordinateSet, WeakKeyDictionary] = (
            WeakKeyDictionary()
        )

    def of(self, a: CoordinateSet, b: CoordinateSet) -> dict[Any, Any]:
        """Return the cache of a pair, to look up and to add to."""
        return self._known.setdefault(a, WeakKeyDictionary()).setdefault(b, {})

    def build(
        self, a: CoordinateSet, b: CoordinateSet, name: str, make: Callable[..., Any]
    ) -> Any:
        """Return a value of a pair, which ``make()`` builds the first time."""
        known = self.of(a, b)
        if name not in known:
            known[name] = make()
        return known[name]

    def forget(self, a: CoordinateSet) -> None:
        """Drop the caches of all pairs that a set is the first of."""
        self._known.pop(a, None)


@built_by_one
def learn(sets: list[CoordinateSet], *more: mx.array) -> list[Any]:
    """Read what is not known yet of sets, once; return the values of ``more``."""
    unread = [each.unread for each in sets]
    wanted = [*itertools.chain(*unread), *more]
    values = sync.read(*wanted) if wanted else []
    for each, its in zip(sets, unread, strict=True):
        each.learn(values[: len(its)])
        values = values[len(its) :]
    return values


@built_by_one
def settle(sets: list[CoordinateSet], *more: mx.array) -> list[Any]:
    """Check sets that were not checked yet; see ``learn``. Raises a ValueError."""
    values = learn(sets, *more)
    for each in sets:
        if not each.settled:  # by another thread, meanwhile
            each.check()
    return values


def check_coords(coords: object) -> mx.array:
    """Return coordinates as (N, 1 + D) int32, or raise with what was wrong."""
    if not isinstance(coords, mx.array):
        coords = array_of(coords, "coords")
        if coords.size == 0 and coords.ndim == 2:
            coords = coords.astype(mx.int32)
    if coords.ndim != 2 or coords.shape[1] - 1 not in AXES:
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
        return lattice.as_int32(coords, "coords")
    # An array that is right already keeps its identity: managers find sets by it.
    return coords if coords.dtype == mx.int32 else coords.astype(mx.int32)


def stride_text(stride: Stride) -> str:
    """Return ``2`` if all axes have one stride, else ``2x1x1``."""
    return "x".join(map(str, stride[:1] if len(set(stride)) == 1 else stride))


def expect_one_lattice(a: CoordinateSet, b: CoordinateSet) -> None:
    """Raise a ValueError unless two sets have equal axes and strides."""
    if a.stride != b.stride:
        raise ValueError(
            f"the tensors lie on different lattices: {len(a.stride)}D at stride "
            f"{stride_text(a.stride)} and {len(b.stride)}D at stride "
            f"{stride_text(b.stride)}"
        )


def check_stride(stride: object, dims: int) -> Stride:
    """Return a stride as an int or Fraction for each axis, or raise a ValueError."""
    if type(stride) is int and stride > 0:
        return (stride,) * dims
    axes = each_axis(stride, dims)
    are_ratios = all(isinstance(a, Rational) and not isinstance(a, bool) for a in axes)
    if not are_ratios or len(axes) != dims or min(axes) <= 0:
        raise ValueError(
            "stride must be a positive int or Fraction, or one for each of "
            f"{dims} axes; got {stride!r}. A half is Fraction(1, 2)"
        )
    return tuple([exact_ratio(int(a.numerator), int(a.denominator)) for a in axes])


def check_batch_size(batch_size: object) -> int | None:
    """Return a number of batch elements as an int, or raise; None is for unknown."""
    if batch_size is None:
        return None
    kind = "an int, or None for the greatest batch index + 1"
    return whole(batch_size, "batch_size", kind=kind)


def exact_ratio(a: int | Fraction, b: int | Fraction) -> int | Fraction:
    """Return ``a / b`` as an int if it is one, else as a Fraction."""
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    quotient = Fraction(a) / Fraction(b)
    return int(quotient) if quotient.denominator == 1 else quotient


def coarser(stride: Stride, steps: Sequence[int]) -> Stride:
    """Return the stride of cells that have ``steps`` of these on each axis."""
    return tuple([exact_ratio(s * t, 1) for s, t in zip(stride, steps, strict=True)])


def finer(stride: Stride, steps: Sequence[int]) -> Stride:
    """Return the stride of the ``steps`` cells on each axis that one of these has."""
    return tuple([exact_ratio(s, t) for s, t in zip(stride, steps, strict=True)])
