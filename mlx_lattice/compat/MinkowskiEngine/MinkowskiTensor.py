"""SparseTensor and TensorField: features on the rows of a map, or at float coordinates.

The names ``feats``, ``coords``, ``coords_key`` and ``coords_man`` are those of 0.4.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ...checks import LatticeWarning
from ...ops import interpolate
from .. import bridge
from .MinkowskiCommon import (
    SparseTensorOperationMode,
    SparseTensorQuantizationMode,
    StrideType,
    convert_to_int_list,
    expect,
)
from .MinkowskiCoordinateManager import (
    DIFFERENT_MANAGERS,
    CoordinateManager,
    CoordinateMapKey,
    reversed_axes,
)

__all__ = [
    "SparseTensor", "TensorField", "clear_global_coordinate_manager",
    "global_coordinate_manager", "set_global_coordinate_manager",
    "set_sparse_tensor_operation_mode", "sparse_tensor_operation_mode",
]  # fmt: skip

Mode = SparseTensorQuantizationMode
_SLICED = Mode.RANDOM_SUBSAMPLE, Mode.UNWEIGHTED_AVERAGE
_DIFFERENT_ROWS = (
    "tensors must have the same coordinate_map_key; got {} and {}. Operators such as + "
    "and MinkowskiUnion take different ones"
)


# One manager for all tensors, for code that asks for it


class _Global:
    mode = SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER
    manager: CoordinateManager | None = None


def set_sparse_tensor_operation_mode(operation_mode: SparseTensorOperationMode) -> None:
    """Choose whether tensors without a manager share a global one."""
    expect(
        isinstance(operation_mode, SparseTensorOperationMode),
        f"expected a SparseTensorOperationMode; got {operation_mode!r}",
    )
    _Global.mode = operation_mode


def sparse_tensor_operation_mode() -> SparseTensorOperationMode:
    """Return the mode in use."""
    return _Global.mode


def global_coordinate_manager() -> CoordinateManager | None:
    """Return the global manager, if there is one."""
    return _Global.manager


def set_global_coordinate_manager(coordinate_manager: CoordinateManager) -> None:
    """Set the global manager."""
    _Global.manager = coordinate_manager


def clear_global_coordinate_manager() -> None:
    """Drop the global manager, and so its maps."""
    _Global.manager = None


def _manager_for(dims: int) -> CoordinateManager:
    if _Global.mode is SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER:
        return CoordinateManager(dims)
    if _Global.manager is None:
        _Global.manager = CoordinateManager(dims)
    return _Global.manager


def reduced(
    features: torch.Tensor,
    unique: torch.Tensor,
    inverse: torch.Tensor,
    mode: SparseTensorQuantizationMode,
) -> torch.Tensor:
    """Return the features of distinct rows.

    Args:
        features: (N, C).
        unique: (U,) the first of the rows of each group.
        inverse: (N,) the group of each row.
        mode: the first row, the mean, the sum or the maximum of a group.
    """
    if mode is Mode.RANDOM_SUBSAMPLE:
        return features[unique]
    made = features.new_zeros((len(unique), features.shape[1]))
    if mode is Mode.MAX_POOL:
        index = inverse[:, None].expand_as(features)
        return made.scatter_reduce(0, index, features, "amax", include_self=False)
    total = made.index_add(0, inverse, features)
    if mode is Mode.UNWEIGHTED_SUM:
        return total
    counts = torch.bincount(inverse, minlength=len(unique))
    return total / counts[:, None].to(total.dtype)


class Tensor:
    """What sparse tensors and fields share."""

    _F: torch.Tensor
    _manager: CoordinateManager
    _key: CoordinateMapKey

    def __init__(
        self,
        features: torch.Tensor,
        coordinates: torch.Tensor | None,
        key: Any,
        manager: Any,
        device: Any,
        requires_grad: bool | None,
    ):
        expect(
            isinstance(features, torch.Tensor) and features.ndim == 2,
            f"features must be a tensor (N, C); got {getattr(features, 'shape', None)} "
            f"of {type(features).__name__}",
        )
        if device is not None:
            features = features.to(device)
        if coordinates is not None:
            expect(
                isinstance(coordinates, torch.Tensor),
                f"coordinates must be a tensor; got {type(coordinates).__name__}",
            )
            expect(
                key is None, "pass either coordinates or a coordinate map key, not both"
            )
            expect(
                len(features) == len(coordinates),
                f"features and coordinates must have the same number of rows; got "
                f"{len(features)} and {len(coordinates)}",
            )
            if manager is None:
                manager = _manager_for(coordinates.shape[1] - 1)
        elif key is None or manager is None:
            raise ValueError(
                "pass coordinates, or coordinate_map_key with coordinate_manager"
            )
        expect(
            isinstance(manager, CoordinateManager),
            f"coordinate_manager must be a CoordinateManager; got "
            f"{type(manager).__name__}",
        )
        if requires_grad is not None:
            features.requires_grad_(requires_grad)
        self._F, self._manager = features, manager
        self._C: torch.Tensor | None = None
        self._rows: list[torch.Tensor] | None = None

    def _set_key(self, key: CoordinateMapKey) -> None:
        expect(
            isinstance(key, CoordinateMapKey) and key.is_key_set(),
            f"the coordinate map key must name a map; got {key!r}",
        )
        self._key = key

    def _coordinates(self) -> torch.Tensor:
        raise NotImplementedError

    def _decomposed(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        raise NotImplementedError

    def _like(self, features: torch.Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def F(self) -> torch.Tensor:  # noqa: N802 (MinkowskiEngine's own)
        """(N, C)."""
        return self._F

    features = feats = F

    @property
    def C(self) -> torch.Tensor:  # noqa: N802
        """(N, 1 + D), the batch index first."""
        if self._C is None:
            self._C = self._coordinates().to(self._F.device)
        return self._C

    coordinates = coords = C

    @property
    def coordinate_manager(self) -> CoordinateManager:
        """The manager of the coordinates."""
        return self._manager

    coords_man = coordinate_manager

    @property
    def coordinate_key(self) -> CoordinateMapKey:
        """The key of the coordinates."""
        return self._key

    coords_key = coordinate_key

    @property
    def tensor_stride(self) -> list[int]:
        """D strides."""
        return self._key.get_tensor_stride()

    @property
    def D(self) -> int:  # noqa: N802
        """Spatial axes."""
        return self._manager.D

    dimension = D

    @property
    def shape(self) -> torch.Size:
        """Shape of the features."""
        return self._F.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the features."""
        return self._F.dtype

    @property
    def device(self) -> torch.device:
        """Of the features."""
        return self._F.device

    @property
    def requires_grad(self) -> bool:
        """Of the features."""
        return self._F.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> None:
        """Set whether the features need a gradient."""
        self._F.requires_grad_(requires_grad)

    def size(self) -> torch.Size:
        """Return the shape of the features."""
        return self._F.size()

    def __len__(self) -> int:
        return len(self._F)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(\n  coordinates={self.C}\n  features={self._F}\n"
            f"  coordinate_map_key={self._key}\n  coordinate_manager={self._manager}"
            f"  spatial dimension={self.D})"
        )

    def get_device(self) -> int:
        """Return the number of the features' device, -1 for the CPU."""
        return self._F.get_device()

    # These change the tensor, as in MinkowskiEngine

    def detach(self) -> Tensor:
        """Detach the features of this tensor and return it."""
        self._F = self._F.detach()
        return self

    def float(self) -> Tensor:
        """Cast the features of this tensor and return it."""
        self._F = self._F.float()
        return self

    def double(self) -> Tensor:
        """Cast the features of this tensor and return it; layers take no float64."""
        self._F = self._F.double()
        return self

    def to(self, device: torch.device | str) -> Tensor:
        """Move the features of this tensor and return it."""
        self._F, self._C, self._rows = self._F.to(device), None, None
        return self

    def cpu(self) -> Tensor:
        """Move the features of this tensor to the CPU and return it."""
        return self.to("cpu")

    # Batch elements

    @property
    def _batchwise_row_indices(self) -> list[torch.Tensor]:
        if self._rows is None:
            _, rows = self._decomposed()
            self._rows = [each.to(self.device) for each in rows]
        return self._rows

    @property
    def decomposition_permutations(self) -> list[torch.Tensor]:
        """Rows of each batch element, as indices into the features."""
        return self._batchwise_row_indices

    @property
    def decomposed_coordinates(self) -> list[torch.Tensor]:
        """(N_i, D) coordinates of each batch element."""
        return [self.C[rows, 1:] for rows in self._batchwise_row_indices]

    @property
    def decomposed_features(self) -> list[torch.Tensor]:
        """(N_i, C) features of each batch element."""
        return [self._F[rows] for rows in self._batchwise_row_indices]

    @property
    def decomposed_coordinates_and_features(self) -> tuple[list[Any], list[Any]]:
        """Coordinates and features of each batch element."""
        return self.decomposed_coordinates, self.decomposed_features

    def coordinates_at(self, batch_index: int) -> torch.Tensor:
        """Return (N_i, D) coordinates of a batch element."""
        return self.C[self._batchwise_row_indices[batch_index], 1:]

    def features_at(self, batch_index: int) -> torch.Tensor:
        """Return (N_i, C) features of a batch element."""
        return self._F[self._batchwise_row_indices[batch_index]]

    def coordinates_and_features_at(
        self, batch_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return coordinates and features of a batch element."""
        return self.coordinates_at(batch_index), self.features_at(batch_index)

    # Arithmetic

    def _expect_kin(self, other: object) -> None:
        expect(
            isinstance(other, type(self)),
            f"expected a {type(self).__name__}; got {type(other).__name__}",
        )
        expect(self._manager is other._manager, DIFFERENT_MANAGERS)

    def _expect_same_key(self, other: Tensor) -> None:
        self._expect_kin(other)
        message = _DIFFERENT_ROWS.format(self._key, other._key)
        expect(self._key == other._key, message)

    def _changed(self, other: Tensor, function: Callable) -> Tensor:
        """Apply a function in place to the features, so that other holders see it."""
        self._expect_same_key(other)
        self._F = function(self._F, other._F)
        return self

    def __iadd__(self, other: Tensor) -> Tensor:
        return self._changed(other, operator.iadd)

    def __isub__(self, other: Tensor) -> Tensor:
        return self._changed(other, operator.isub)

    def __imul__(self, other: Tensor) -> Tensor:
        return self._changed(other, operator.imul)

    def __itruediv__(self, other: Tensor) -> Tensor:
        return self._changed(other, operator.itruediv)

    def _on_union(self, other: Tensor, function: Callable) -> Tensor:
        raise AssertionError(_DIFFERENT_ROWS.format(self._key, other._key))

    def _binary(self, other: object, function: Callable) -> Tensor:
        if not isinstance(other, Tensor):
            return self._like(function(self._F, other))
        self._expect_kin(other)
        if self._key == other._key:
            return self._like(function(self._F, other._F))
        return self._on_union(other, function)

    def __add__(self, other: Any) -> Tensor:
        return self._binary(other, torch.add)

    def __sub__(self, other: Any) -> Tensor:
        return self._binary(other, torch.sub)

    def __mul__(self, other: Any) -> Tensor:
        return self._binary(other, torch.mul)

    def __truediv__(self, other: Any) -> Tensor:
        return self._binary(other, torch.div)

    def __pow__(self, power: Any) -> Tensor:
        return self._like(self._F**power)

    __power__ = __pow__


class SparseTensor(Tensor):
    """Features on the rows of a coordinate map.

    Args:
        features: (N, C) float32, float16 or bfloat16.
        coordinates: (N, 1 + D) int32 in input units, the batch index first; float
            ones are floored, with a warning.
        tensor_stride: of the coordinates, an int or one for each axis.
        coordinate_map_key, coordinate_manager: name a map, instead of coordinates;
            a manager with coordinates adds a map to it.
        quantization_mode: what becomes of rows with equal coordinates; by default the
            first one stays.
        allocator_type, minkowski_algorithm: ignored.
        requires_grad: whether the features need a gradient.
        device: to which the features are moved.
        feats, coords, coords_key, coords_manager: names of 0.4.
        force_creation, allow_duplicate_coords: of 0.4, ignored.

    Attributes:
        unique_index: (U,) int64: rows of ``coordinates`` that stayed.
        inverse_mapping: (N,) int64: the row for each of ``coordinates``.

    Raises:
        AssertionError: arguments do not fit.
        ValueError: there are neither coordinates nor a key with its manager.
    """

    unique_index: torch.Tensor
    inverse_mapping: torch.Tensor

    def __init__(
        self,
        features: torch.Tensor | None = None,
        coordinates: torch.Tensor | None = None,
        tensor_stride: StrideType = 1,
        coordinate_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
        quantization_mode: SparseTensorQuantizationMode = Mode.RANDOM_SUBSAMPLE,
        allocator_type: object = None,
        minkowski_algorithm: object = None,
        requires_grad: bool | None = None,
        device: torch.device | str | None = None,
        *,
        feats: torch.Tensor | None = None,
        coords: torch.Tensor | None = None,
        coords_key: CoordinateMapKey | None = None,
        coords_manager: CoordinateManager | None = None,
        force_creation: bool = False,
        allow_duplicate_coords: bool = False,
    ):
        features = feats if features is None else features
        coordinates = coords if coordinates is None else coordinates
        key = coords_key if coordinate_map_key is None else coordinate_map_key
        manager = coords_manager if coordinate_manager is None else coordinate_manager
        self.quantization_mode = quantization_mode
        if coordinates is not None and coordinates.dtype != torch.int32:
            if coordinates.is_floating_point():
                warnings.warn(
                    "coordinates are floored to int32; pass coordinates.int()",
                    LatticeWarning,
                    stacklevel=2,
                )
                coordinates = torch.floor(coordinates)
            coordinates = coordinates.int()
        super().__init__(features, coordinates, key, manager, device, requires_grad)
        if coordinates is not None:
            stride = convert_to_int_list(tensor_stride, self.D)
            place = coordinates.to(self.device), stride
            key, maps = self._manager.insert_and_map(*place)
            self.unique_index, self.inverse_mapping = maps
            is_whole = len(self.unique_index) == len(coordinates)
            if not is_whole and quantization_mode is not Mode.NO_QUANTIZATION:
                self._F = reduced(self._F, *maps, quantization_mode)
        self._set_key(key)

    @property
    def coordinate_map_key(self) -> CoordinateMapKey:
        """The key of the rows."""
        return self._key

    def _coordinates(self) -> torch.Tensor:
        return self._manager.get_coordinates(self._key)

    def _decomposed(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self._manager.origin_map(self._key)

    def _like(self, features: torch.Tensor) -> SparseTensor:
        """Return other features on the same rows."""
        return self._at(features, self._key)

    def _at(self, features: torch.Tensor, key: CoordinateMapKey) -> SparseTensor:
        place = {"coordinate_map_key": key, "coordinate_manager": self._manager}
        return SparseTensor(features, **place)

    def _on_union(self, other: Tensor, function: Callable) -> SparseTensor:
        """Apply a function on the rows that either has; missing rows are 0."""
        key = CoordinateMapKey(self.D + 1)
        keys = self._key, other._key
        (_, own), (_, others) = self._manager.union_map(keys, key)
        shape = self._manager.size(key), self._F.shape[1]
        own, others = own.to(self.device), others.to(self.device)
        made = self._F.new_zeros(shape).index_copy(0, own, self._F)
        made = made.index_copy(0, others, function(made[others], other._F))
        return self._at(made, key)

    # Between tensors, fields and dense tensors

    def sparse(
        self,
        min_coords: torch.Tensor | None = None,
        max_coords: torch.Tensor | None = None,
        contract_coords: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a sparse tensor of PyTorch, its least coordinates, and strides.

        Args:
            min_coords: (D,) int32 least coordinates, multiples of the stride.
            max_coords: (D,) int32 greatest ones; they fix the shape.
            contract_coords: whether coordinates are divided by the stride.
        """
        stride = torch.tensor(self.tensor_stride, dtype=torch.int32)
        coords = self.C[:, 1:].cpu()
        low = coords.amin(0, keepdim=True) if min_coords is None else min_coords
        low = low.reshape(1, -1)
        self._expect_multiples(low, stride)
        coords = coords - low
        if contract_coords:
            coords, low = coords // stride, low // stride
        places = torch.cat((self.C[:, :1].cpu(), coords), dim=1).long().T
        size = None
        if max_coords is not None:
            self._expect_multiples(max_coords, stride)
            high = max_coords // stride if contract_coords else max_coords
            extents = (high.reshape(-1) - low.reshape(-1) + 1).tolist()
            size = len(self._batchwise_row_indices), *extents, self.shape[1]
        arguments = () if size is None else (size,)
        arguments = places.to(self.device), self._F, *arguments
        made = torch.sparse_coo_tensor(*arguments, check_invariants=False)
        return made, low, stride

    def _expect_multiples(self, coords: torch.Tensor, stride: torch.Tensor) -> None:
        expect(
            not (coords % stride.to(coords.device)).any(),
            f"least and greatest coordinates must be multiples of the tensor stride "
            f"{self.tensor_stride}; got {coords.tolist()}",
        )

    def dense(
        self,
        shape: torch.Size | None = None,
        min_coordinate: torch.Tensor | int | None = None,
        contract_stride: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a (B, C, spatial...) tensor, its least coordinates, and strides.

        Args:
            shape: B, C and D extents; by default up to the greatest coordinates.
            min_coordinate: (D,) int32 coordinates of the first cell. Without it the
                first cell is 0, and the coordinates must not be negative.
            contract_stride: whether coordinates are divided by the stride.

        Raises:
            ValueError: a coordinate is negative, and there is no min_coordinate.
        """
        device = self.device
        stride = torch.tensor(self.tensor_stride, dtype=torch.int32)
        if not len(self):
            expect(shape is not None, "pass shape= to make an empty tensor dense")
            low = torch.zeros(self.D, dtype=torch.int32, device=device)
            return self._F.new_zeros(tuple(shape)), low, stride
        coords, batch = self.C[:, 1:], self.C[:, 0].long()
        if min_coordinate is None:
            low = coords.amin(0, keepdim=True)
            if (low < 0).any():
                raise ValueError(
                    f"the least coordinates are {low[0].tolist()}; pass "
                    "min_coordinate= to make a tensor with negative coordinates dense"
                )
        elif isinstance(min_coordinate, int):
            low = torch.full((1, self.D), min_coordinate, dtype=torch.int32)
            low = low.to(device)
            coords = coords - low
        else:
            low = min_coordinate.to(device).reshape(1, -1)
            coords = coords - low
        self._expect_multiples(low, stride)
        if contract_stride:
            coords = coords // stride.to(device)
        if shape is None:
            extents = (coords.amax(0) + 1).tolist()
            shape = int(batch.max()) + 1, self.shape[1], *extents
        extents = tuple(shape)[2:]
        made = self._F.new_zeros((shape[0], *extents, self.shape[1]))
        made = made.index_put((batch, *coords.long().unbind(1)), self._F)
        return made.movedim(-1, 1), low, stride

    def slice(self, X: Tensor) -> TensorField:  # noqa: N803
        """Return the features of each point's row: at the points that made ``X``.

        Args:
            X: the field, or the tensor of repeated coordinates, that the net's input
                was made of.
        """
        return self._sliced(X, lambda rows: self._F[rows])

    def cat_slice(self, X: Tensor) -> TensorField:  # noqa: N803
        """Return the features of each point's row beside the point's own."""
        return self._sliced(X, lambda rows: torch.cat((self._F[rows], X.F), dim=1))

    def _sliced(self, field: Tensor, features_of: Callable) -> TensorField:
        if not isinstance(field, TensorField | SparseTensor):
            raise ValueError(
                f"expected a TensorField or a SparseTensor; got {type(field).__name__}"
            )
        expect(
            field.quantization_mode in _SLICED,
            "slice takes what was made with RANDOM_SUBSAMPLE or UNWEIGHTED_AVERAGE; "
            f"got {field.quantization_mode.name}",
        )
        if isinstance(field, TensorField):
            rows = field.inverse_mapping(self._key).to(self.device)
            return field._like(features_of(rows))
        self._expect_same_key(field)
        rows = field.inverse_mapping.to(self.device)
        return TensorField(
            features_of(rows),
            coordinates=self.C[rows],
            coordinate_manager=self._manager,
            quantization_mode=self.quantization_mode,
        )

    def features_at_coordinates(self, query_coordinates: torch.Tensor) -> torch.Tensor:
        """Return features interpolated linearly between the rows of the stride.

        Args:
            query_coordinates: (Q, 1 + D) in input units, of the features' dtype, the
                batch index first.

        Returns:
            (Q, C); 0 where there is no row around.
        """
        expect(
            query_coordinates.dtype == self.dtype,
            f"query coordinates must be {self.dtype}, as the features; got "
            f"{query_coordinates.dtype}",
        )
        held = self._manager.map_of(self._key)
        points = reversed_axes(query_coordinates.detach().float())
        if held.cells is not None:
            strides = points.new_tensor((1, *reversed(self.tensor_stride)))
            points = points / strides
        points[:, 0] = points[:, 0].round()

        def function(feats, points):
            return interpolate(held.tensor(feats), points)

        return bridge.call(function, self._F, points)

    def interpolate(self, X: TensorField) -> TensorField:  # noqa: N803
        """Return features interpolated at the coordinates of a field."""
        return X._like(self.features_at_coordinates(X.C.to(self.dtype)))


class TensorField(Tensor):
    """Features at float coordinates.

    Args:
        features: (N, C).
        coordinates: (N, 1 + D), the batch index first.
        tensor_stride: kept.
        coordinate_field_map_key, coordinate_manager: name coordinates of a field that
            the manager has.
        quantization_mode: how ``sparse`` reduces points of one cell, by default to
            their mean.
        allocator_type, minkowski_algorithm: ignored.
        requires_grad: whether the features need a gradient.
        device: to which the features are moved.
    """

    def __init__(
        self,
        features: torch.Tensor,
        coordinates: torch.Tensor | None = None,
        tensor_stride: StrideType = 1,
        coordinate_field_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
        quantization_mode: SparseTensorQuantizationMode = Mode.UNWEIGHTED_AVERAGE,
        allocator_type: object = None,
        minkowski_algorithm: object = None,
        requires_grad: bool | None = None,
        device: torch.device | str | None = None,
    ):
        expect(
            quantization_mode not in (Mode.NO_QUANTIZATION, None),
            f"a field has no quantization mode {quantization_mode}",
        )
        key, manager = coordinate_field_map_key, coordinate_manager
        super().__init__(features, coordinates, key, manager, device, requires_grad)
        self.quantization_mode = quantization_mode
        if coordinates is not None:
            place = coordinates.to(self.device), tensor_stride
            key = self._manager.insert_field(*place)
        self._set_key(key)
        self._rows_by_key: dict[CoordinateMapKey, torch.Tensor] = {}

    @property
    def coordinate_field_map_key(self) -> CoordinateMapKey:
        """The key of the coordinates."""
        return self._key

    def _coordinates(self) -> torch.Tensor:
        return self._manager.get_coordinate_field(self._key)

    def _decomposed(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self._manager.origin_field_map(self._key)

    def _like(self, features: torch.Tensor) -> TensorField:
        made = TensorField(
            features,
            coordinate_field_map_key=self._key,
            coordinate_manager=self._manager,
            quantization_mode=self.quantization_mode,
        )
        made._rows_by_key = self._rows_by_key
        return made

    def sparse(
        self,
        tensor_stride: StrideType = 1,
        coordinate_map_key: CoordinateMapKey | None = None,
        quantization_mode: SparseTensorQuantizationMode | None = None,
    ) -> SparseTensor:
        """Return the points of each cell reduced to one row.

        Args:
            tensor_stride: size of a cell; coordinates are floored to it.
            coordinate_map_key: a map that has all rows, instead of a new one.
            quantization_mode: by default that of the field.
        """
        mode = quantization_mode or self.quantization_mode
        expect(
            mode is not Mode.SPLAT_LINEAR_INTERPOLATION,
            "call splat() for linear weights",
        )
        manager, key = self._manager, coordinate_map_key
        if key is None:
            key, (unique, inverse) = manager.field_to_sparse_insert_and_map(
                self._key, tensor_stride
            )
        else:
            place, inverse = manager.field_to_sparse_map(self._key, key)
            unique = place.new_zeros(manager.size(key))
            unique = unique.scatter_reduce(
                0, inverse, place, "amin", include_self=False
            )
        unique, inverse = unique.to(self.device), inverse.to(self.device)
        self._rows_by_key[key] = inverse
        features = reduced(self._F, unique, inverse, mode)
        place = {"coordinate_map_key": key, "coordinate_manager": manager}
        return SparseTensor(features, **place)

    def splat(self) -> SparseTensor:
        """Return the cells around points, each the sum of points by linear weights.

        ``interpolate`` of a tensor on these rows is the way back.
        """
        manager, dims = self._manager, self.D
        corners = torch.cartesian_prod(*[torch.arange(2, dtype=torch.int32)] * dims)
        corners = torch.nn.functional.pad(corners.reshape(-1, dims), (1, 0))
        low = manager.field_cells(self._key, 1)
        rows = (low[:, None] + corners.to(low.device)).flatten(0, 1)
        key, _ = manager.insert_and_map(rows)
        to, points, weights = manager.interpolation_map_weight(key, self.C)
        made = self._F.new_zeros((manager.size(key), self._F.shape[1]))
        parts = self._F[points.long()] * weights[:, None].to(self._F.dtype)
        place = {"coordinate_map_key": key, "coordinate_manager": manager}
        return SparseTensor(made.index_add(0, to.long(), parts), **place)

    def inverse_mapping(self, sparse_tensor_map_key: CoordinateMapKey) -> torch.Tensor:
        """Return (N,) int64: the row of a map that each point lies in."""
        known, key = self._rows_by_key, sparse_tensor_map_key
        if key not in known:
            known[key] = self._manager.field_to_sparse_map(self._key, key)[1]
        return known[key]
