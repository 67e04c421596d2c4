"""SparseTensor: features on the rows of a coordinate set.

Also ``align``, and the names for 1 to 4 spatial axes, such as ``Conv3d``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from math import prod
from numbers import Number
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    Union,
    overload,
)

import mlx.core as mx

from . import sync
from .checks import (
    AXES,
    FLOATS,
    INT32_LIMIT,
    ArrayLike,
    array_of,
    as_mlx_reads,
    dtype_text,
    whole,
)
from .coordinate_set import (
    CoordinateKey,
    CoordinateSet,
    Stride,
    check_coords,
    stride_text,
)
from .coordinates import CoordinateManager, equal_rows
from .geometry.lattice import active_cells, places_in, true_positions
from .geometry.points import first_points, majority, voxelize
from .kernel_spec import IntOrTuple, per_axis
from .reductions import move_rows, put
from .scene import Scene, html_table
from .settings import boundary
from .transformations import zeros_of

if TYPE_CHECKING:
    import numpy as np


# A layer returns a tensor for a tensor, and an array for an array of features.
Features = TypeVar("Features", "SparseTensor", mx.array)
Operand = Union["SparseTensor", mx.array, "np.ndarray", float]  # of arithmetic


def check_feats(feats: ArrayLike, rows: int) -> mx.array:
    """Return features as an (N, C) array; raise if shape or dtype is wrong."""
    if hasattr(feats, "feats"):
        raise TypeError(
            "feats must be an array (N, C); got a tensor. Pass its features in the "
            "order of these rows: ops.align(other, x).feats"
        )
    feats = array_of(feats, "feats")
    if feats.ndim != 2 or feats.shape[0] != rows:
        raise ValueError(
            f"feats must have shape (N, C) with N = {rows}, the rows of coords; got "
            f"{tuple(feats.shape)}"
        )
    if feats.dtype not in (*FLOATS, mx.int32, mx.bool_):
        raise TypeError(
            "feats must be float32, float16 or bfloat16, or int32 for labels; got "
            f"{dtype_text(feats)}. Cast with .astype(mx.float32)"
        )
    return feats


def expect_fitting(feats: mx.array, shape: tuple[int, ...]) -> None:
    """Raise a ValueError unless this shape broadcasts to the features."""
    n, width = feats.shape
    rows, channels = (1, 1, *shape)[-2:]
    fits = rows in (1, n) and (channels == width or 1 in (channels, width))
    if len(shape) > 2 or not fits:
        raise ValueError(
            f"arithmetic with features of shape {(n, width)} takes a number, or values "
            f"of shape ({width},), ({n}, 1) or ({n}, {width}); got {tuple(shape)}. "
            "Join channels with ops.cat. Spread one line for each batch element to "
            "the rows with values[x.coords[:, 0]]"
        )


_PLACE = "coords", "key", "manager"
_OF_PLACE = "stride", "spatial_shape", "batch_size", "dims"


PASS_FEATURES = (
    "Pass x.feats to losses, layers and functions of MLX, and put results back on the "
    "rows with x.replace(feats)"
)
OTHER_NAMES = "docs/coming_from.md has the names of other libraries"


class SparseTensor:
    """Hold features at (batch, x, y, z, ...) coordinates.

    The constructor checks shapes and dtypes. Uniqueness and range of the coordinates
    are checked when the first relation is built. Rows keep the order in which you give
    them, and a tensor may have no rows. If coordinates repeat, call ``ops.unique_sum``.

    A tensor is not an array. Pass ``x.feats`` to losses, layers and functions of MLX,
    and put results back with ``x.replace(feats)``. Call ``x.eval()`` to compute a
    tensor: ``mx.eval`` only computes arrays in lists, tuples and dicts, and skips other
    objects without an error.

    You can assign ``x.feats``, but not ``coords``, ``key`` and ``manager``. Changing
    ``x.coords`` in place changes only that array. Copies and pickles have rows and a
    manager of their own.

    Args:
        coords: (N, 1 + D) int32, D from 1 to 4: batch index, then spatial coordinates
            in cells of the tensor's own lattice; negative values are legal.
        feats: (N, C) float32, float16 or bfloat16. Functions that move rows, such as
            ``ops.prune``, ``align``, ``cat`` and ``batch``, also take int32 for labels
            and bool for flags; layers do not.
        stride: size of a lattice cell in cells of the first lattice, an int or one per
            axis.
        spatial_shape: D extents of a dense grid that starts at 0, or None for an
            unbounded lattice.
        batch_size: number of batch elements; by default the greatest batch index + 1,
            and 1 without rows.
        manager: coordinate manager to share; a new one by default.
        key: the manager's key of ``coords``, if the manager already has them.

    Raises:
        TypeError: feats have another dtype, or batch_size is not an int.
        ValueError: shapes do not fit, the stride is not a positive ratio, or the key
            belongs to other coordinates.

    Examples:
        >>> coords = mx.array([[0, 1, 2, 3], [0, 4, 4, 0], [1, 0, 0, 0]])
        >>> x = ml.SparseTensor(coords, mx.ones((3, 8)))
        >>> x.shape, x.batch_size, x.dims
        ((3, 8), 2, 3)
    """

    __array_ufunc__ = None  # NumPy arrays on the left defer to the tensor
    __array_priority__ = 1000

    coords: mx.array
    feats: mx.array
    key: CoordinateKey
    manager: CoordinateManager

    def __init__(
        self,
        coords: ArrayLike,
        feats: ArrayLike,
        stride: IntOrTuple = 1,
        *,
        spatial_shape: Sequence[int] | None = None,
        batch_size: int | None = None,
        manager: CoordinateManager | None = None,
        key: CoordinateKey | None = None,
    ):
        manager = CoordinateManager() if manager is None else manager
        for name, value, kind in (
            ("manager", manager, CoordinateManager),
            ("key", key, CoordinateKey | None),
        ):
            if not isinstance(value, kind):
                raise TypeError(
                    f"{name} must have the type of x.{name}; got {type(value).__name__}"
                )
        if key is None:
            key = manager.inserted(coords, stride, spatial_shape, batch_size).key
        elif coords is not None:
            _expect_coords(coords, manager[key])
        coordinate_set = manager[key]
        place = {"manager": manager, "key": key, "coords": coordinate_set.shown}
        self.__dict__.update(place, feats=check_feats(feats, len(coordinate_set)))

    @classmethod
    def of(
        cls, manager: CoordinateManager, key: CoordinateKey, feats: mx.array
    ) -> SparseTensor:
        """Return a tensor of a manager's coordinate set, with features checked."""
        coordinate_set = manager[key]
        return cls.trusted(
            manager, key, coordinate_set.shown, check_feats(feats, len(coordinate_set))
        )

    @classmethod
    def trusted(
        cls,
        manager: CoordinateManager,
        key: CoordinateKey,
        coords: mx.array,
        feats: mx.array,
    ) -> SparseTensor:
        """Return a tensor of a manager's coordinate set, without checks."""
        tensor = cls.__new__(cls)  # bypasses __setattr__, which checks
        tensor.__dict__.update(manager=manager, key=key, coords=coords, feats=feats)
        return tensor

    def _not_an_array(self, *_: object) -> NoReturn:
        raise TypeError(f"a SparseTensor is not an array. {PASS_FEATURES}")

    if not TYPE_CHECKING:  # type checkers report mistyped names
        # MLX calls __mlx_array__ if it expects an array.
        __mlx_array__ = __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _not_an_array
        __lt__ = __le__ = __gt__ = __ge__ = __abs__ = __mod__ = _not_an_array
        __floordiv__ = _not_an_array

        def __getattr__(self, name: str):
            cls = type(self)
            if isinstance(getattr(cls, name, None), property):
                return object.__getattribute__(self, name)  # raises its error
            text = f"{cls.__name__!r} object has no attribute {name!r}"
            if hasattr(mx.array, name) and name[0] != "_":
                text += f": it is not an array. {PASS_FEATURES}"
            elif name[0] != "_":
                text += f"; {OTHER_NAMES}"
            raise AttributeError(text)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "feats":
            value = check_feats(value, len(self))
        elif name in _PLACE or name in _OF_PLACE:
            raise AttributeError(
                f"{name} of a tensor cannot be set, since other tensors share its "
                "coordinate set. Make a new tensor: SparseTensor(coords, feats)"
            )
        object.__setattr__(self, name, value)

    @overload
    @classmethod
    def from_points(
        cls,
        points: ArrayLike,
        feats: ArrayLike | None = None,
        *,
        voxel_size: float | Sequence[float],
        batch: ArrayLike | None = None,
        origin: float | Sequence[float] = 0.0,
        reduce: str = "mean",
        batch_size: int | None = None,
        labels: None = None,
        return_inverse: Literal[False] = False,
    ) -> SparseTensor: ...

    @overload
    @classmethod
    def from_points(
        cls,
        points: ArrayLike,
        feats: ArrayLike | None = None,
        *,
        voxel_size: float | Sequence[float],
        batch: ArrayLike | None = None,
        origin: float | Sequence[float] = 0.0,
        reduce: str = "mean",
        batch_size: int | None = None,
        labels: ArrayLike | None = None,
        ignore_label: int = -1,
        ignore_ties: bool = False,
        return_inverse: bool = False,
    ) -> VoxelizedPoints: ...

    @classmethod
    def from_points(
        cls,
        points,
        feats=None,
        *,
        voxel_size,
        batch=None,
        origin=0.0,
        reduce="mean",
        batch_size=None,
        labels=None,
        ignore_label=-1,
        ignore_ties=False,
        return_inverse=False,
    ):
        """Voxelise points: cell ``floor((point - origin) / voxel_size)``.

        Rows are sorted and unique. Points of one voxel are reduced in the order they
        were given, in float32: the same input gives the same bits.

        Args:
            points: (P, D) float, in the unit of ``voxel_size``.
            feats: (P, C); by default one channel of ones.
            voxel_size: edge of a voxel, one value or one per axis.
            batch: (P,) integer batch index of each point; by default all 0.
            origin: the corner of voxel 0.
            reduce: "mean", "sum", "max" or "first" (the earliest point).
            batch_size: as for the constructor.
            labels: (P,) integers, one for each point. A voxel gets the most frequent
                label of its points, or the smallest of equally frequent labels.
            ignore_label: points with this label do not vote. A voxel without votes
                gets this label.
            ignore_ties: whether a voxel whose most frequent labels are equally
                frequent gets ``ignore_label`` instead of the smallest.
            return_inverse: whether to return ``VoxelizedPoints`` if no labels are
                given.

        Returns:
            A tensor; with ``labels`` or ``return_inverse`` a ``VoxelizedPoints``: the
            tensor, the label of each voxel, the voxel of each point, and the earliest
            point of each voxel.

        Raises:
            ValueError: shapes do not fit, a value is not finite, labels are not
                integers, or a voxel lies beyond int32.
            TypeError: features are integers or bool, and ``reduce`` is not "first".

        Examples:
            >>> points = mx.array([[0.1, 0.1, 0.1], [0.2, 0.1, 0.1], [1.5, 0.0, 0.0]])
            >>> labels = mx.array([2, 2, 0])
            >>> x, labels, inverse, first = ml.SparseTensor.from_points(
            ...     points, voxel_size=1.0, labels=labels
            ... )
            >>> labels, inverse
            (array([2, 0], dtype=int32), array([0, 0, 1], dtype=int32))
        """
        coords, feats, inverse = voxelize(
            points, feats, voxel_size, batch, origin, reduce
        )
        tensor = cls._of_sorted(coords, feats, batch_size=batch_size)
        if labels is None and not return_inverse:
            return tensor
        if labels is None:
            labels = mx.full((len(tensor),), ignore_label, dtype=mx.int32)
        else:
            labels = majority(
                labels,
                inverse,
                len(tensor),
                ignore_label=ignore_label,
                ignore_ties=ignore_ties,
            )
        first = first_points(inverse, len(tensor))
        return VoxelizedPoints(tensor, labels, inverse, first)

    @classmethod
    def from_dense(
        cls, array: ArrayLike, mask: ArrayLike | None = None, *, keep_shape: bool = True
    ) -> SparseTensor:
        """Keep the active cells of a dense (B, x, y, z, ..., C) array.

        Args:
            array: (B, spatial..., C) float; 1 to 4 spatial axes.
            mask: (B, spatial...) bool of the cells to keep; by default those with a
                feature that is not zero.
            keep_shape: whether the tensor carries the grid as its spatial_shape.

        Examples:
            >>> array = mx.array([[[0.0], [5.0], [7.0]]])  # (B, x, C)
            >>> x = ml.SparseTensor.from_dense(array)
            >>> x.coords.tolist(), x.feats.tolist()
            ([[0, 1], [0, 2]], [[5.0], [7.0]])
        """
        coords, feats, grid = active_cells(array, mask)
        shape = grid[1:] if keep_shape else None
        return cls._of_sorted(coords, feats, spatial_shape=shape, batch_size=grid[0])

    @classmethod
    def _of_sorted(cls, coords: mx.array, feats: mx.array, **facts) -> SparseTensor:
        """Put features on sorted unique rows, in a manager of their own."""
        manager = CoordinateManager()
        rows = manager.inserted(coords, trusted=True, **facts)
        rows.is_sorted = True
        return cls.of(manager, rows.key, feats)

    @classmethod
    def from_arrays(cls, arrays: dict[str, mx.array], **kwargs: Any) -> SparseTensor:
        """Rebuild a tensor from ``arrays()`` and the constructor's other arguments.

        The arrays do not hold ``stride``, ``spatial_shape`` and ``batch_size``.
        """
        return cls(arrays["coords"], arrays["feats"], **kwargs)

    def arrays(self) -> dict[str, mx.array]:
        """Return {"coords", "feats"}, to save in a file or pass to another thread."""
        return {"coords": self.coords, "feats": self.feats}

    def eval(self) -> SparseTensor:
        """Compute the features and coordinates now; return the tensor itself.

        Raises:
            RuntimeError: another thread made the tensor and did not compute it.
        """
        with sync.values():
            mx.eval(self.arrays())
        return self

    @property
    def coordinate_set(self) -> CoordinateSet:
        """The coordinate set of the rows; tensors with the same key share it."""
        return self.manager[self.key]

    @property
    def stride(self) -> Stride:
        """Size of a lattice cell on each axis, in cells of the first lattice."""
        return self.key.stride

    @property
    def spatial_shape(self) -> tuple[int, ...] | None:
        """Extents of the dense grid that bounds the lattice, or None."""
        return self.coordinate_set.spatial_shape

    @property
    def batch_size(self) -> int:
        """Number of batch elements. Reads one number from the device, once."""
        return self.coordinate_set.batch_size

    @property
    def dims(self) -> int:
        """Number of spatial axes."""
        return self.coords.shape[1] - 1

    @property
    def channels(self) -> int:
        """Number of feature channels."""
        return self.feats.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, C)."""
        return tuple(self.feats.shape)

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the features."""
        return self.feats.dtype

    def __len__(self) -> int:
        return self.coords.shape[0]

    @property
    def features(self) -> mx.array:
        """The features, ``feats``, by spconv's name."""
        return self.feats

    @property
    def indices(self) -> mx.array:
        """The coordinates, ``coords``, by spconv's name."""
        return self.coords

    def replace_feature(self, feature: mx.array) -> SparseTensor:
        """Return ``replace(feature)``, by spconv's name."""
        return self.replace(feature)

    def dense(self, channels_first: bool = True) -> mx.array:
        """Return a dense (B, C, spatial...) array, as spconv does."""
        dense = self.to_dense()
        return mx.moveaxis(dense, -1, 1) if channels_first else dense

    def replace(self, feats: ArrayLike) -> SparseTensor:
        """Return the same coordinates with other features.

        Examples:
            >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
            >>> x.replace(mx.tanh(x.feats)).shape
            (64, 8)
        """
        feats = check_feats(feats, self.coords.shape[0])
        boundary(feats)  # each layer of rows is a stage
        return SparseTensor.trusted(self.manager, self.key, self.coords, feats)

    def astype(self, dtype: mx.Dtype) -> SparseTensor:
        """Return the tensor with its features cast."""
        if not isinstance(dtype, mx.Dtype):
            raise TypeError(
                f"dtype must be one of MLX's, such as mx.float16; got {dtype!r}"
            )
        return self.replace(self.feats.astype(dtype))

    def to_dense(self, spatial_shape: Sequence[int] | None = None) -> mx.array:
        """Return a (B, spatial..., C) array with zeros at inactive cells.

        Args:
            spatial_shape: extents of the grid from 0; by default the tensor's own, or
                the greatest coordinate + 1 on each axis.

        Raises:
            ValueError: a coordinate lies outside the grid, or the grid has 2^31 cells.

        Examples:
            >>> coords = mx.array([[0, 1], [0, 2]])
            >>> x = ml.SparseTensor(coords, mx.array([[5.0], [7.0]]))
            >>> x.to_dense().tolist()
            [[[0.0], [5.0], [7.0]]]
        """
        coordinate_set = self.coordinate_set
        coordinate_set.index  # noqa: B018 (raises if rows repeat)
        shape = self.spatial_shape if spatial_shape is None else spatial_shape
        if shape is None:
            shape = [most + 1 for most in coordinate_set.bounds[1][1:]]
        shape = per_axis(shape, self.dims, "spatial_shape", least=0)
        grid = (self.batch_size, *shape)
        if prod(grid) >= INT32_LIMIT:
            cells = " x ".join(map(str, grid))
            raise ValueError(
                f"a dense array of {cells} cells has 2^31 or more; crop the tensor, or "
                "move it nearer to the origin"
            )
        if not len(self):
            return zeros_of([self.feats], (*grid, self.channels), self.dtype)
        places = places_in(grid, coordinate_set.coords, coordinate_set.bounds)
        return put(self.feats, places, prod(grid)).reshape(*grid, self.channels)

    def __add__(self, other: Operand) -> SparseTensor:
        return self._arithmetic(other, mx.add)

    def __sub__(self, other: Operand) -> SparseTensor:
        return self._arithmetic(other, mx.subtract)

    def __mul__(self, other: Operand) -> SparseTensor:
        return self._arithmetic(other, mx.multiply)

    def __truediv__(self, other: Operand) -> SparseTensor:
        return self._arithmetic(other, mx.divide)

    def __radd__(self, other: Operand) -> SparseTensor:
        return self + other

    def __rmul__(self, other: Operand) -> SparseTensor:
        return self * other

    def __rsub__(self, other: Operand) -> SparseTensor:
        return self._arithmetic(other, lambda a, b: b - a)

    def __rtruediv__(self, other: Operand) -> SparseTensor:
        return self._arithmetic(other, lambda a, b: b / a)

    def __neg__(self) -> SparseTensor:
        return self.replace(-self.feats)

    def _arithmetic(self, other: Operand, operation: Callable) -> SparseTensor:
        """Combine with a scalar or array of features, or with an aligned tensor."""
        if isinstance(other, SparseTensor):
            other = align(other, self).feats
        else:
            is_known = isinstance(other, (mx.array, Number))
            if not is_known and not hasattr(other, "__array__"):
                raise TypeError(
                    "arithmetic with a SparseTensor takes another one, an array that "
                    f"fits its features, or a number; got {type(other).__name__}"
                )
            other = as_mlx_reads(other)
        expect_fitting(self.feats, getattr(other, "shape", ()))
        return self.replace(operation(self.feats, other))

    def __copy__(self) -> SparseTensor:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        with suppress(sync.TracedError):  # a traced tensor has no values
            self.eval()
        kind, state = self._state()
        rows = self.coordinate_set
        facts = rows.stride, rows.spatial_shape, rows.declared_batch_size, rows.trusted
        return _copied, (kind, rows.coords, rows.is_sorted, *facts), state

    def _state(self) -> tuple[type, dict[str, object]]:
        """Return the class of a copy, and its attributes without the rows."""
        attributes = self.__dict__
        return type(self), {
            name: attributes[name] for name in attributes if name not in _PLACE
        }

    def __repr__(self) -> str:
        name = str(self.dtype).rpartition(".")[2]
        return (
            f"SparseTensor({len(self):,} rows x {self.channels} {name}, "
            f"{self.dims}D, {self.key!r})"
        )

    def _repr_html_(self) -> str:
        """Return a table of facts; a notebook shows it. Reads the extent."""
        rows = self.coordinate_set
        facts = {
            "rows": f"{len(self):,}",
            "features": f"{self.channels} {dtype_text(self.feats)}",
            "stride": stride_text(self.stride),
            "spatial shape": self.spatial_shape or "unbounded",
        }
        if len(self):
            low, high = rows.bounds
            facts["extent"] = " x ".join(
                f"{a} to {b}" for a, b in zip(low[1:], high[1:], strict=True)
            )
            index = self.coords[:, 0]
            counts = mx.zeros(self.batch_size, mx.int32).at[index].add(1).tolist()
            shown = ", ".join(f"{n:,}" for n in counts[:8])
            more = f", ... ({len(counts)} elements)" if len(counts) > 8 else ""
            facts["rows of each batch element"] = shown + more
        return html_table("SparseTensor", (), facts.items())

    def show(
        self,
        *,
        labels: mx.array | None = None,
        classes: Sequence[str] = (),
        palette: Sequence[Sequence[int]] = (),
        element: int = 0,
        title: str = "SparseTensor",
        up: str = "z",
    ) -> Scene:
        """Return the voxels of one batch element as a scene, which notebooks display.

        Three channels of floats from 0 to 1 are read as red, green and blue, and one
        channel of integers as labels. The page needs the extra ``viz``;
        ``show().save("x.html")`` writes it to a file.

        Args:
            labels: (N,) integers, the class of each row; colours the voxels by class.
            classes: the names of the classes.
            palette: red, green and blue of each class, from 0 to 255.
            element: the batch element.
            title: title of the page.
            up: the upward axis: "x", "y", "z", or one of them with a minus.

        Raises:
            ValueError: the tensor has four spatial axes or no such batch element, or
                labels are not integers of shape (N,).

        Examples:
            >>> coords = mx.array([[0, 0, 0, 0], [0, 0, 0, 1]])
            >>> x = ml.SparseTensor(coords, mx.array([[1.0, 0, 0], [0, 0, 1]]))
            >>> x.show()
            Scene('SparseTensor', voxels: 2)
        """
        if self.dims > 3:
            raise ValueError(f"a scene has at most 3 spatial axes; got {self.dims}")
        batches = self.batch_size
        if whole(element, "element") >= max(1, batches):
            raise ValueError(
                f"element must be from 0 to {max(1, batches) - 1}; got {element}"
            )
        is_float = self.feats.dtype in FLOATS
        if labels is None and self.channels == 1 and not is_float:
            labels = self.feats[:, 0]
        if labels is not None:
            labels = array_of(labels, "labels")
            if tuple(labels.shape) != (len(self),):
                raise ValueError(
                    f"labels must be integers of shape ({len(self)},), one for each "
                    f"row; got shape {tuple(labels.shape)}. If you have scores, pass "
                    "mx.argmax(scores, axis=1)"
                )
        rows = true_positions(self.coords[:, 0] == element)
        flat = 3 - self.dims
        coords = mx.pad(self.coords[rows, 1:], ((0, 0), (0, flat)))
        colours = None
        if self.channels == 3 and labels is None and is_float:
            colours = self.feats[rows].astype(mx.float32)
            if rows.size and not mx.all((colours >= 0) & (colours <= 1)).item():
                colours = None
        note = f"{rows.size:,} voxels of stride {stride_text(self.stride)}"
        if batches > 1:
            note += f"; element {element} of {batches}"
        return Scene(title, note, up=up).voxels(
            coords,
            size=[*map(float, self.stride), *[1.0] * flat],
            labels=None if labels is None else labels[rows],
            colours=colours,
            classes=classes,
            palette=palette,
        )


class VoxelizedPoints(NamedTuple):
    """Points as voxels, and which points are in which voxel.

    ``from_points`` returns it with ``labels=`` or ``return_inverse=True``. Row i of the
    tensor is voxel i.

    Attributes:
        tensor: V voxels with features.
        labels: (V,) int32, the label of each voxel; all ``ignore_label`` if the points
            had no labels.
        inverse: (P,) int32, the voxel of each point: ``scores[inverse]`` has the
            scores of the points.
        first: (V,) int32, the earliest point of each voxel.
    """

    tensor: SparseTensor
    labels: mx.array
    inverse: mx.array
    first: mx.array

    def eval(self) -> VoxelizedPoints:
        """Compute all arrays now; return the tuple itself."""
        self.tensor.eval()
        with sync.values():
            mx.eval(self[1:])
        return self


def _copied(kind: type, coords: mx.array, is_sorted: bool, *facts) -> object:
    """Return a tensor of a class on rows in a new manager, without features."""
    manager = CoordinateManager()
    rows = manager.inserted(coords, *facts)
    rows.is_sorted = is_sorted
    tensor = object.__new__(kind)
    tensor.__dict__.update(manager=manager, key=rows.key, coords=rows.shown)
    return tensor


def _expect_coords(coords: mx.array, coordinate_set: CoordinateSet) -> None:
    """Raise unless coordinates equal those of a set; traced arrays always pass."""
    if coords is coordinate_set.shown or coords is coordinate_set.coords:
        return
    checked = check_coords(coords)
    same = checked.shape == coordinate_set.coords.shape
    if same and not sync.is_transforming():
        same = mx.array_equal(checked, coordinate_set.coords).item()
    if not same:
        raise ValueError(
            f"{coordinate_set.key!r} is the key of other coordinates, "
            f"{tuple(coordinate_set.coords.shape)}; got {tuple(checked.shape)}. Leave "
            "the key out, and the manager makes a new one"
        )


def expect_tensor(x: object, name: str = "x", *, flags: bool = False) -> None:
    """Raise a TypeError unless ``x`` is a SparseTensor of floating features.

    ``flags`` permits bool and int32 as well.
    """
    if not isinstance(x, SparseTensor):
        raise TypeError(
            f"{name} must be a SparseTensor; got {type(x).__name__}. Make one "
            "with SparseTensor(coords, feats), or on known rows with x.replace(feats)"
        )
    if not flags and type(x) is SparseTensor and x.feats.dtype not in FLOATS:
        raise TypeError(
            f"{name} must have floating features; got {dtype_text(x.feats)}. Cast "
            "them with .astype(mx.float32)"
        )


def tensors_of(values: Iterable[SparseTensor], name: str) -> list[SparseTensor]:
    """Return a list of tensors; raise if it is empty or has anything else."""
    if isinstance(values, SparseTensor | mx.array) or not isinstance(values, Iterable):
        raise TypeError(f"{name} takes a list of tensors; got {type(values).__name__}")
    tensors = list(values)
    if not tensors:
        raise ValueError(f"{name} needs at least one tensor; got none")
    for x in tensors:
        expect_tensor(x, "each tensor", flags=True)
    return tensors


def features_of(x: object) -> mx.array:
    """Return the features of a tensor, or the array itself; else raise a TypeError."""
    if isinstance(x, SparseTensor):
        return x.feats
    if not isinstance(x, mx.array):
        raise TypeError(
            f"expected a SparseTensor or an mx.array of features; got "
            f"{type(x).__name__}"
        )
    return x


def align(x: SparseTensor, like: SparseTensor) -> SparseTensor:
    """Return ``x`` with the rows of ``like``, in their order.

    If both tensors share a key this costs nothing. Otherwise rows are matched by value,
    once for each pair of sets. Raises a ValueError if the tensors do not have the same
    rows.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1]]), mx.array([[1.0], [2.0]]))
        >>> y = ml.SparseTensor(mx.array([[0, 1], [0, 0]]), mx.array([[3.0], [4.0]]))
        >>> ops.align(x, like=y).feats[:, 0].tolist()  # cell 1, then cell 0
        [2.0, 1.0]
    """
    expect_tensor(x, flags=True)
    expect_tensor(like, "like", flags=True)
    if x.key == like.key:
        return x
    move = equal_rows(x.coordinate_set, like.coordinate_set)
    feats = x.feats if move is None else move_rows(x.feats, *move, whole=True)
    return like.replace(feats)


def expect_axes(x: SparseTensor, dims: int, name: str) -> None:
    """Raise unless ``x`` is a tensor with ``dims`` spatial axes."""
    expect_tensor(x)
    if x.dims != dims:
        raise ValueError(
            f"{name} got a tensor with {x.dims} spatial axes; use the {x.dims}d name. "
            "The first column of coords is the batch index, not an axis"
        )


def numbered_functions(
    module: str, *functions: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    """Return each function of a tensor under four names, 1d to 4d."""
    return {
        f"{function.__name__}{dims}d": _numbered_function(module, function, dims)
        for function in functions
        for dims in AXES
    }


def _numbered_function(module: str, function: Callable, dims: int) -> Callable:
    name = f"{function.__name__}{dims}d"

    @wraps(function)
    def numbered(x, *args, **kwargs):
        expect_axes(x, dims, name)
        return function(x, *args, **kwargs)

    numbered.__name__ = numbered.__qualname__ = name
    numbered.__module__ = module
    return numbered


def numbered_classes(module: str, *bases: type[Any]) -> dict[str, type[Any]]:
    """Return each class under four names, 1d to 4d: subclasses with fixed ``dims``."""
    return {
        f"{base.__name__}{dims}d": _numbered_class(module, base, dims)
        for base in bases
        for dims in AXES
    }


def _numbered_class(module: str, base: type, dims: int) -> type:
    @wraps(base.__init__)
    def __init__(self, *args, **kwargs):
        base.__init__(self, *args, dims=dims, **kwargs)

    signature = inspect.signature(base.__init__)
    parameters = [p for name, p in signature.parameters.items() if name != "dims"]
    __init__.__signature__ = signature.replace(parameters=parameters)
    body = {"__init__": __init__, "__doc__": base.__doc__, "__module__": module}
    return type(f"{base.__name__}{dims}d", (base,), body)


def unknown_name(name: str, module: str) -> None:
    """Raise an AttributeError for a name that a module lacks."""
    raise AttributeError(f"module {module!r} has no attribute {name!r}; {OTHER_NAMES}")
