"""Maps of coordinates by tensor stride and text, over mlx_lattice's manager.

A map has coordinates in input units: at tensor stride 2 they are 0, 2, 4. The manager
of mlx_lattice has them in cells of their stride, and with axes reversed, so that its
last axis, the fastest of a kernel, is MinkowskiEngine's first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import torch

from ... import coordinates as lattice
from ...coordinate_set import CoordinateKey
from ...ops import lookup
from ...relation import Relation
from ...tensor import SparseTensor
from .. import bridge
from .MinkowskiCommon import (
    CoordinateMapType,
    GPUMemoryAllocatorType,
    MinkowskiAlgorithm,
    RegionType,
    StrideType,
    convert_to_int_list,
    expect,
    unique_rows,
)
from .MinkowskiKernelGenerator import KernelGenerator

__all__ = ["CoordinateManager", "CoordinateMapKey"]

MOST_AXES = 4
MOST_ELEMENTS = 1 << 24


class CoordinateMapKey:
    """Names a map: its tensor stride and a text, empty for maps of inputs.

    Args:
        stride_or_size: D strides, or 1 + D for a key that is set later.
        string_id: the text.
    """

    def __init__(self, stride_or_size: int | Sequence[int], string_id: str = ""):
        is_set = not isinstance(stride_or_size, int)
        self._stride = tuple(map(int, stride_or_size)) if is_set else None
        self._size = len(self._stride) + 1 if is_set else stride_or_size
        self._text = string_id

    def is_key_set(self) -> bool:
        """Whether the key names a map."""
        return self._stride is not None

    def get_coordinate_size(self) -> int:
        """Return 1 + D."""
        return self._size

    def get_tensor_stride(self) -> list[int]:
        """Return the D strides."""
        return list(self._stride)

    def get_key(self) -> tuple[list[int], str]:
        """Return strides and text."""
        expect(self.is_key_set(), "this key names no map yet")
        return list(self._stride), self._text

    def set_key(self, key: CoordinateMapKey) -> None:
        """Make the key name the map of another."""
        self._stride, self._text = key._stride, key._text

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CoordinateMapKey) or not self.is_key_set():
            return False
        return (self._stride, self._text) == (other._stride, other._text)

    def __hash__(self) -> int:
        return hash((self._stride, self._text))

    def __repr__(self) -> str:
        text = f":{self._text}" if self._text else ""
        return f"coordinate map key:{list(self._stride or ())}{text}"


class _Map:
    """The rows of a map, as tensors and as sets of mlx_lattice, each when needed.

    Args:
        manager: of mlx_lattice.
        stride: the tensor stride.
        coords: (N, 1 + D) int32 in input units, or None for rows that mlx_lattice made.
        cells: the key of the rows in cells, if mlx_lattice made them.
        batch_size: of the manager's batch elements.
        device: of coordinates that mlx_lattice made.
    """

    def __init__(self, manager, stride, coords, cells, batch_size, device):
        self._lattice, self.stride, self._coords = manager, stride, coords
        self._device = device
        self._cells: CoordinateKey | None = cells
        self._units: CoordinateKey | None = None
        self._batch_size = batch_size

    @property
    def coords(self) -> torch.Tensor:
        """(N, 1 + D) int32 in input units."""
        if self._coords is None:
            with torch.inference_mode(False):
                cells = self._lattice[self._cells].coords
                rows = bridge.to_torch(cells, self._device, copy=True)
                rows = reversed_axes(rows)
                self._coords = rows * _steps(self.stride, rows)
        return self._coords

    def __len__(self) -> int:
        if self._coords is None:
            return len(self._lattice[self._cells])
        return len(self._coords)

    @property
    def cells(self) -> CoordinateKey | None:
        """The rows in cells of the stride, or None if they are not multiples of it."""
        if self._cells is None and min(self.stride) > 0:
            steps = _steps(self.stride, self._coords)
            if max(self.stride) == 1 or not (self._coords % steps).any():
                self._cells = self._inserted(self._coords // steps)
        return self._cells

    @property
    def units(self) -> CoordinateKey:
        """The rows in input units, as a set of stride 1."""
        if self._units is None:
            self._units = self._inserted(self.coords)
        return self._units

    def _inserted(self, rows: torch.Tensor) -> CoordinateKey:
        (rows,) = bridge.to_mlx(reversed_axes(rows), copy=True)
        return self._lattice.insert(rows, batch_size=self._batch_size)

    def tensor(self, feats: mx.array) -> SparseTensor:
        """Return a tensor of features on the rows counted in cells, else in units."""
        key = self.cells or self.units
        return SparseTensor.of(self._lattice, key, feats)


def _steps(stride: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor((1, *stride), dtype=torch.int32, device=like.device)


def reversed_axes(rows: torch.Tensor) -> torch.Tensor:
    """Return rows (batch, x, y, ...) with the axes after the first reversed."""
    return torch.cat([rows[:, :1], rows[:, 1:].flip(1)], dim=1)


class _Field(NamedTuple):
    coords: torch.Tensor  # (N, 1 + D) float32
    stride: tuple[int, ...]


class CoordinateManager:
    """Holds maps of coordinates, and relations between them.

    Args:
        D: spatial axes, 1 to 4.
        num_threads, coordinate_map_type, allocator_type, minkowski_algorithm: ignored.

    Raises:
        ValueError: D is not positive.
        NotImplementedError: D is greater than 4.
    """

    def __init__(
        self,
        D: int = 0,
        num_threads: int = -1,
        coordinate_map_type: CoordinateMapType | None = None,
        allocator_type: GPUMemoryAllocatorType | None = None,
        minkowski_algorithm: MinkowskiAlgorithm | None = None,
    ):
        if D < 1:
            raise ValueError(
                f"D, the number of spatial axes, must be positive; got {D}"
            )
        if D > MOST_AXES:
            raise NotImplementedError(
                f"mlx_lattice has 1 to {MOST_AXES} spatial axes; got {D}. Put further "
                "axes into features, or into the batch index"
            )
        self.D = D
        self.minkowski_algorithm: MinkowskiAlgorithm = (
            minkowski_algorithm or MinkowskiAlgorithm.DEFAULT
        )
        self._lattice = lattice.CoordinateManager()
        self._maps: dict[CoordinateMapKey, _Map] = {}
        self._fields: dict[CoordinateMapKey, _Field] = {}
        self._relations: dict[tuple, Relation] = {}
        self._batches: torch.Tensor | None = None
        self._number = itertools.count(1)

    def __repr__(self) -> str:
        maps = ", ".join(f"{key!r} {len(rows)}" for key, rows in self._maps.items())
        return f"{type(self).__name__}({maps})"

    # Maps

    def _new_key(
        self, stride: Sequence[int], text: str = "", among: dict | None = None
    ) -> CoordinateMapKey:
        """Return a key that names no map yet; or none among fields."""
        key = CoordinateMapKey(stride, text)
        among = self._maps if among is None else among
        while key in among:
            number = next(self._number)
            key = CoordinateMapKey(stride, f"{text}-{number}" if text else f"{number}")
        return key

    def _add(self, key: CoordinateMapKey, coords, cells=None) -> CoordinateMapKey:
        stride = tuple(key.get_tensor_stride())
        facts = self._batch_size, self._batches.device
        self._maps[key] = _Map(self._lattice, stride, coords, cells, *facts)
        return key

    @property
    def _batch_size(self) -> int:
        rows = self._batches
        return int(rows[-1]) + 1 if rows is not None and len(rows) else 1

    def _note_batches(self, coords: torch.Tensor) -> None:
        """Note the batch elements of rows that a user gave, and their device."""
        batch = coords[:, 0].long()
        low, high = (int(batch.min()), int(batch.max())) if len(batch) else (0, -1)
        if low < 0 or high >= MOST_ELEMENTS:
            raise ValueError(
                "batch indices, the first column of coordinates, must be from 0 to "
                f"{MOST_ELEMENTS - 1}; got {low} to {high}"
            )
        found = torch.bincount(batch).nonzero()[:, 0]
        if self._batches is not None:
            found = torch.unique(torch.cat([self._batches.to(found.device), found]))
        self._batches = found

    def map_of(self, key: CoordinateMapKey) -> _Map:
        """Return the map that a key names.

        Raises:
            RuntimeError: this manager has no such map.
        """
        if key not in self._maps:
            raise RuntimeError(
                f"{key!r} names no coordinate map of this manager, which has "
                f"{', '.join(map(repr, self._maps)) or 'none'}"
            )
        return self._maps[key]

    @bridge.not_compiled
    def insert_and_map(
        self,
        coordinates: torch.Tensor,
        tensor_stride: StrideType = 1,
        string_id: str = "",
    ) -> tuple[CoordinateMapKey, tuple[torch.Tensor, torch.Tensor]]:
        """Add a map of the distinct rows, in the order of their first occurrence.

        Args:
            coordinates: (N, 1 + D) int32, the batch index first.
            tensor_stride: an int, or one for each axis.
            string_id: text of the key; a number is added if there is such a map.

        Returns:
            The key; (U,) int64 rows of ``coordinates`` that the map has; (N,) int64
            rows of the map for all coordinates.
        """
        self._expect_rows(coordinates)
        stride = convert_to_int_list(tensor_stride, self.D)
        self._note_batches(coordinates)
        unique, inverse = unique_rows(coordinates)
        rows = coordinates if len(unique) == len(coordinates) else coordinates[unique]
        key = self._new_key(stride, string_id)
        # A copy: the caller may change the coordinates in place.
        self._add(key, rows.detach().int().clone())
        return key, (unique, inverse)

    def _expect_rows(self, coordinates: torch.Tensor) -> None:
        shape = tuple(coordinates.shape)
        expect(
            len(shape) == 2 and shape[1] == self.D + 1,
            f"coordinates must be (N, {self.D + 1}), the batch index first; got "
            f"{shape}",
        )

    def stride(
        self,
        coordinate_map_key: CoordinateMapKey,
        stride: StrideType,
        string_id: str = "",
    ) -> CoordinateMapKey:
        """Return the key of the rows ``floor(x / stride)``, one map a key's text."""
        steps = convert_to_int_list(stride, self.D)
        strides, text = coordinate_map_key.get_key()
        strides = [a * b for a, b in zip(strides, steps, strict=True)]
        key = CoordinateMapKey(strides, string_id or text)
        if key in self._maps:
            return key
        source = self.map_of(coordinate_map_key)
        if set(steps) == {1}:
            return self._add(key, source.coords)
        if source.cells is None:
            steps = _steps(strides, source.coords)
            return self._add(key, torch.unique(source.coords // steps, dim=0) * steps)
        (cells,) = self._lattice.cells(source.cells, [tuple(reversed(steps))])
        return self._add(key, None, cells)

    def prune(self, key: CoordinateMapKey, mask: torch.Tensor) -> CoordinateMapKey:
        """Return the key of the rows whose mask is true, in their order."""
        rows = self.map_of(key).coords
        rows = rows[mask.to(rows.device)]
        return self._add(self._new_key(key.get_tensor_stride(), "pruned"), rows)

    def transposed_key(
        self, key: CoordinateMapKey, kernel: KernelGenerator, makes_rows: bool
    ) -> CoordinateMapKey:
        """Return the key that a transposed layer writes to.

        That is the map of an input at the finer stride, unless there is none or
        ``makes_rows`` is true: then rows are made that the kernel reaches.

        Raises:
            ValueError: the tensor stride is not a multiple of the layer's stride.
        """
        stride, steps = key.get_tensor_stride(), kernel.kernel_stride
        if any(a % b for a, b in zip(stride, steps, strict=True)):
            raise ValueError(
                f"a transposed layer of stride {steps} needs a tensor stride that is a "
                f"multiple of it; the input's is {stride}"
            )
        finer = [a // b for a, b in zip(stride, steps, strict=True)]
        out = CoordinateMapKey(finer)
        if out in self._maps and not makes_rows:
            return out
        source = self.map_of(key)
        if source.cells is None:
            rows = self._reached(source.coords, kernel, finer)
            return self._add(self._new_key(finer), torch.unique(rows, dim=0))
        relation = self._lattice.generative_relation(
            source.cells, stride=tuple(reversed(steps)), **_lattice_kernel(kernel)
        )
        out = self._add(self._new_key(finer), None, relation.out_key)
        self._relations[_question(key, out, kernel, True, False)] = relation
        return out

    def expanded_key(
        self, key: CoordinateMapKey, kernel: KernelGenerator
    ) -> CoordinateMapKey:
        """Return the key of new rows, all that a kernel reaches and the stride has."""
        source, steps = self.map_of(key), kernel.kernel_stride
        strides = [a * b for a, b in zip(source.stride, steps, strict=True)]
        rows = self._reached(source.coords, kernel, source.stride)
        rows = rows[(rows % _steps(strides, rows) == 0).all(dim=1)]
        return self._add(self._new_key(strides), torch.unique(rows, dim=0))

    def _reached(self, coords, kernel: KernelGenerator, unit) -> torch.Tensor:
        offsets = torch.tensor(kernel.listed(), dtype=torch.int32, device=coords.device)
        offsets = offsets * _steps(unit, coords)[1:]
        offsets = torch.nn.functional.pad(offsets, (1, 0))
        return (coords[:, None] + offsets).flatten(0, 1)

    def key_at(
        self, coordinates: object, stride: Sequence[int]
    ) -> CoordinateMapKey | None:
        """Return the key of the ``coordinates`` that a layer was called with."""
        if coordinates is None or isinstance(coordinates, CoordinateMapKey):
            return coordinates
        if isinstance(coordinates, torch.Tensor):
            return self.insert_and_map(coordinates, stride)[0]
        manager = coordinates.coordinate_manager
        expect(manager is self, DIFFERENT_MANAGERS)
        return coordinates.coordinate_map_key

    def union_map(
        self, in_keys: Sequence[CoordinateMapKey], out_key: CoordinateMapKey
    ) -> list[torch.Tensor]:
        """Set ``out_key`` to a map of all rows; return (2, N) places in and out."""
        rows = [self.map_of(key).coords for key in in_keys]
        every = torch.cat(rows)
        unique, inverse = unique_rows(every)
        strides = [key.get_tensor_stride() for key in in_keys]
        key = self._new_key([min(each) for each in zip(*strides, strict=True)], "merge")
        out_key.set_key(self._add(key, every[unique]))
        parts = inverse.split([len(each) for each in rows])
        return [torch.stack([torch.arange(len(p), device=p.device), p]) for p in parts]

    def size(self, coordinate_map_key: CoordinateMapKey) -> int:
        """Return the number of rows of a map."""
        return len(self.map_of(coordinate_map_key))

    def get_coordinates(
        self, coords_key_or_tensor_strides: CoordinateMapKey | StrideType
    ) -> torch.Tensor:
        """Return (N, 1 + D) int32 of a map, or of the first map with a stride."""
        key = self._get_coordinate_map_key(coords_key_or_tensor_strides)
        return self.map_of(key).coords.clone()

    def _get_coordinate_map_key(self, key: object) -> CoordinateMapKey:
        if isinstance(key, CoordinateMapKey):
            return key
        stride = convert_to_int_list(key, self.D)
        found = [k for k in self._maps if k.get_tensor_stride() == stride]
        expect(bool(found), f"there is no map of tensor stride {stride}")
        return found[0]

    def get_unique_coordinate_map_key(self, tensor_stride: StrideType) -> Any:
        """Return a key of a stride that names no map yet."""
        return self._new_key(convert_to_int_list(tensor_stride, self.D))

    # Batch elements

    def number_of_unique_batch_indices(self) -> int:
        """Return the number of batch elements that rows were given for."""
        return 0 if self._batches is None else len(self._batches)

    def origin(self) -> CoordinateMapKey:
        """Return the key of one row for each batch element, by rising index."""
        key = CoordinateMapKey((0,) * self.D)
        rows = torch.nn.functional.pad(self._batches[:, None], (0, self.D)).int()
        if key not in self._maps or len(self._maps[key]) != len(rows):
            self._add(key, rows)
        return key

    def elements(self, coords: torch.Tensor) -> torch.Tensor:
        """Return (N,) int64: the row of ``origin()`` for each row of coordinates."""
        batch = coords[:, 0].long().contiguous()
        return torch.searchsorted(self._batches.to(batch.device), batch)

    def origin_map(
        self, key: CoordinateMapKey
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return batch indices, and the rows of each, from 0 to the greatest."""
        return self._decomposed(self.map_of(key).coords)

    def origin_field_map(
        self, key: CoordinateMapKey
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the same of a field."""
        return self._decomposed(self._fields[key].coords)

    def _decomposed(self, coords: torch.Tensor):
        batch = coords[:, 0].long()
        order = torch.argsort(batch, stable=True)
        counts = torch.bincount(batch, minlength=self._batch_size)
        return self._batches, list(order.split(counts.tolist()))

    # Fields

    def insert_field(
        self,
        coordinates: torch.Tensor,
        tensor_stride: StrideType = 1,
        string_id: str = "",
    ) -> CoordinateMapKey:
        """Add float coordinates and return their key."""
        self._expect_rows(coordinates)
        self._note_batches(coordinates)
        stride = convert_to_int_list(tensor_stride, self.D)
        key = self._new_key(stride, string_id, self._fields)
        coords = coordinates.detach().float().clone()
        self._fields[key] = _Field(coords, tuple(stride))
        return key

    def get_coordinate_field(self, key: CoordinateMapKey) -> torch.Tensor:
        """Return (N, 1 + D) float32 of a field."""
        return self._fields[key].coords.clone()

    def field_cells(self, key: CoordinateMapKey, stride: StrideType) -> torch.Tensor:
        """Return (N, 1 + D) int32: a field's rows floored to a stride."""
        coords = self._fields[key].coords
        steps = _steps(convert_to_int_list(stride, self.D), coords)
        return (torch.floor(coords / steps) * steps).int()

    def field_to_sparse_insert_and_map(
        self, field_map_key: CoordinateMapKey, sparse_tensor_stride: StrideType
    ) -> tuple[CoordinateMapKey, tuple[torch.Tensor, torch.Tensor]]:
        """Add a map of a field's floored rows; returns as ``insert_and_map``."""
        cells = self.field_cells(field_map_key, sparse_tensor_stride)
        return self.insert_and_map(cells, sparse_tensor_stride)

    def get_field_to_sparse_map(
        self, field_map_key: CoordinateMapKey, sparse_map_key: CoordinateMapKey
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (N,) int64 rows of the field, and the rows of the map under them."""
        cells = self.field_cells(field_map_key, sparse_map_key.get_tensor_stride())
        rows = self.find(sparse_map_key, cells)
        expect(
            bool((rows >= 0).all()),
            f"the map {sparse_map_key!r} lacks rows that the field has; slice a "
            "tensor that comes from the field's own sparse()",
        )
        return torch.arange(len(rows), device=rows.device), rows

    field_to_sparse_map = get_field_to_sparse_map

    def find(self, key: CoordinateMapKey, coords: torch.Tensor) -> torch.Tensor:
        """Return (Q,) int64: the row of each coordinate in a map, or -1."""
        held = self.map_of(key)
        if held.cells is not None:
            coords = coords // _steps(held.stride, coords)
        (queries,) = bridge.to_mlx(reversed_axes(coords))
        x = held.tensor(mx.zeros((len(held), 1)))
        return bridge.to_torch(lookup(x, queries), coords.device).long()

    def interpolation_map_weight(
        self, key: CoordinateMapKey, samples: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows of a map around points, those points, and linear weights.

        Args:
            key: of the map.
            samples: (Q, 1 + D) float, in input units, the batch index first.

        Returns:
            (E,) int32 rows of the map, (E,) int32 rows of ``samples``, (E,) weights.
        """
        stride = samples.new_tensor(key.get_tensor_stride())
        low = torch.floor(samples[:, 1:] / stride) * stride
        found = []
        for corner in itertools.product((0, 1), repeat=self.D):
            place = low + samples.new_tensor(corner) * stride
            weights = (1 - (samples[:, 1:] - place).abs() / stride).prod(1)
            place = torch.cat([samples[:, :1].round(), place], dim=1)
            rows = self.find(key, place.int())
            kept = (rows >= 0).nonzero()[:, 0]
            found.append((rows[kept].int(), kept.int(), weights[kept]))
        return tuple(map(torch.cat, zip(*found, strict=True)))

    # Relations

    def relation(
        self,
        in_key: CoordinateMapKey,
        out_key: CoordinateMapKey,
        kernel: KernelGenerator,
        is_transpose: bool = False,
        is_pool: bool = False,
    ) -> Relation:
        """Return the edges between two maps, built once.

        An input ``i`` reaches an output ``o`` by an offset ``k`` if
        ``i = o + k * (stride of i)``; for a transposed layer if
        ``o = i + k * (stride of o)``. Pooling whose kernel is as large as its stride
        goes by the cells of the coarser map, whatever its size.
        """
        by_cells = is_pool and kernel.kernel_size == kernel.kernel_stride
        question = _question(in_key, out_key, kernel, is_transpose, by_cells)
        if question not in self._relations:
            args = in_key, out_key, kernel, is_transpose, by_cells
            self._relations[question] = self._built(*args)
        return self._relations[question]

    def _built(self, in_key, out_key, kernel, is_transpose, by_cells) -> Relation:
        x, y = self.map_of(in_key), self.map_of(out_key)
        coarse, fine = (x, y) if is_transpose else (y, x)
        is_whole = min(coarse.stride) > 0 and min(fine.stride) > 0
        is_whole = is_whole and not any(
            a % b for a, b in zip(coarse.stride, fine.stride, strict=True)
        )
        build = self._lattice.target_kernel_relation
        if is_transpose:
            build = self._lattice.transposed_kernel_relation
        if not is_whole or x.cells is None or y.cells is None:
            expect(
                not by_cells,
                f"pooling by cells needs coordinates that are multiples of their "
                f"tensor strides, {list(x.stride)} and {list(y.stride)}",
            )
            arguments = _lattice_kernel(kernel, fine.stride)
            return build(x.units, y.units, stride=1, **arguments)
        steps = [a // b for a, b in zip(coarse.stride, fine.stride, strict=True)]
        arguments = {"stride": tuple(reversed(steps))}
        if by_cells:
            arguments |= {"kernel_size": arguments["stride"], "padding": 0}
            return build(x.cells, y.cells, **arguments)
        arguments |= _lattice_kernel(kernel)
        if not is_transpose and x.cells is y.cells:
            del arguments["stride"]
            return self._lattice.submanifold_kernel_relation(x.cells, **arguments)
        if not is_transpose and set(steps) != {1}:
            made = self._lattice.cells(x.cells, [arguments["stride"]])
            if made == (y.cells,):
                return self._lattice.kernel_relation(x.cells, **arguments)
        return build(x.cells, y.cells, **arguments)

    def kernel_map(
        self,
        in_key: CoordinateMapKey | StrideType,
        out_key: CoordinateMapKey | StrideType,
        stride: StrideType = 1,
        kernel_size: StrideType = 3,
        dilation: StrideType = 1,
        region_type: RegionType = RegionType.HYPER_CUBE,
        region_offset: torch.Tensor | None = None,
        is_transpose: bool = False,
        is_pool: bool = False,
    ) -> dict[int, torch.Tensor]:
        """Return (2, n) int32 rows of input and output for each offset that has any.

        Pooling whose kernel is as large as its stride has one entry, 0.
        """
        in_key = self._get_coordinate_map_key(in_key)
        out_key = self._get_coordinate_map_key(out_key)
        kind = {"region_type": region_type, "region_offsets": region_offset}
        sizes = kernel_size, stride, dilation
        kernel = KernelGenerator(*sizes, dimension=self.D, **kind)
        relation = self.relation(in_key, out_key, kernel, is_transpose, is_pool)
        device = self.map_of(in_key).coords.device
        edges = bridge.to_torch(relation.edges, device).int()
        if is_pool and kernel.kernel_size == kernel.kernel_stride:
            return {0: edges[:, :2].T.contiguous()} if len(edges) else {}
        parts = edges[:, :2].split(list(relation.edge_counts))
        return {k: part.T.contiguous() for k, part in enumerate(parts) if len(part)}

    get_kernel_map = kernel_map

    def stride_map(
        self, in_key: CoordinateMapKey, stride_key: CoordinateMapKey
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (N,) int64 rows of a map, and the rows of a coarser map over them."""
        coords = self.map_of(in_key).coords
        steps = _steps(stride_key.get_tensor_stride(), coords)
        found = self.find(stride_key, coords // steps * steps)
        return torch.arange(len(found), device=found.device), found


DIFFERENT_MANAGERS = (
    "tensors must share one coordinate manager: make the second with "
    "coordinate_manager=x.coordinate_manager, and coordinate_map_key= if it has the "
    "same rows"
)


def _question(in_key, out_key, kernel, is_transpose, by_cells) -> tuple:
    """Return what a relation is kept by."""
    size, dilation = tuple(kernel.kernel_size), tuple(kernel.kernel_dilation)
    return in_key, out_key, size, dilation, kernel.offsets, is_transpose, by_cells


def _lattice_kernel(kernel: KernelGenerator, unit: Sequence[int] | None = None) -> dict:
    """Return a kernel's arguments for mlx_lattice, its axes reversed.

    ``unit`` scales offsets: the size of a cell, for rows in input units.
    """
    unit = unit or (1,) * kernel.dimension
    if kernel.offsets is not None:
        scaled = [
            tuple(p * u for p, u in zip(offset, unit, strict=True))[::-1]
            for offset in kernel.offsets
        ]
        return {"offsets": scaled}
    steps = zip(kernel.kernel_dilation, unit, strict=True)
    return {
        "kernel_size": tuple(reversed(kernel.kernel_size)),
        "dilation": tuple(d * u for d, u in steps)[::-1],
    }
