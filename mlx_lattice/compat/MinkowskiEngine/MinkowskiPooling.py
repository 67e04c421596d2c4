"""Pooling over kernels and over batch elements, broadcasting, and pruning."""

from __future__ import annotations

from typing import Any

import torch

from ... import ops
from .. import bridge
from .MinkowskiCommon import (
    Absent,
    BroadcastMode,
    MinkowskiModuleBase,
    PoolingMode,
    StrideType,
    absent,
    expect,
)
from .MinkowskiConvolution import LayerOfKernel
from .MinkowskiCoordinateManager import DIFFERENT_MANAGERS, CoordinateMapKey
from .MinkowskiKernelGenerator import KernelGenerator
from .MinkowskiTensor import SparseTensor, Tensor, TensorField

__all__ = [
    "MinkowskiAvgPooling", "MinkowskiAvgUnpooling", "MinkowskiBroadcast",
    "MinkowskiBroadcastAddition", "MinkowskiBroadcastConcatenation",
    "MinkowskiBroadcastFunction", "MinkowskiBroadcastMultiplication",
    "MinkowskiDirectMaxPoolingFunction", "MinkowskiGlobalAvgPooling",
    "MinkowskiGlobalMaxPooling", "MinkowskiGlobalPooling",
    "MinkowskiGlobalPoolingFunction", "MinkowskiGlobalSumPooling",
    "MinkowskiInterpolation", "MinkowskiInterpolationFunction",
    "MinkowskiLocalPoolingFunction", "MinkowskiLocalPoolingTransposeFunction",
    "MinkowskiMaxPooling", "MinkowskiPoolingTranspose", "MinkowskiPruning",
    "MinkowskiPruningFunction", "MinkowskiSumPooling", "MinkowskiUnion",
    "MinkowskiUnionFunction",
]  # fmt: skip


class MinkowskiPoolingBase(LayerOfKernel):
    """Pooling over a kernel.

    A kernel as large as the stride is the cell of the coarser rows, whatever its size.

    Args:
        kernel_size, stride, dilation: an int, or one for each axis.
        kernel_generator: used instead of them.
        is_transpose: whether the layer goes to a finer stride.
        pooling_mode: what is computed of the inputs that are there.
        dimension: spatial axes.
        expand_coordinates: whether the layer makes every row that it reaches.
    """

    def __init__(
        self,
        kernel_size: StrideType,
        stride: StrideType = 1,
        dilation: StrideType = 1,
        kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False,
        pooling_mode: PoolingMode = PoolingMode.LOCAL_AVG_POOLING,
        dimension: int | None = -1,
        expand_coordinates: bool = False,
    ):
        facts = kernel_generator, expand_coordinates, is_transpose, dimension
        super().__init__(kernel_size, stride, dilation, *facts)
        self.pooling_mode = pooling_mode

    @bridge.not_compiled
    def forward(
        self,
        input: SparseTensor,
        coordinates: SparseTensor | CoordinateMapKey | torch.Tensor | None = None,
    ) -> SparseTensor:
        """Return the pooled tensor.

        Args:
            input: the tensor.
            coordinates: rows of the output: a tensor, a key, or (N, 1 + D) int32; by
                default those of the stride.
        """
        self._expect_input(input)
        out_key = self._out_key(input, coordinates)
        facts = self.kernel_generator, self.is_transpose, True
        relation = input.coordinate_manager.relation(input._key, out_key, *facts)
        mode = self.pooling_mode.reduction
        features = bridge.call(
            lambda x: ops.sparse_pool(x, relation, mode), input.F, layer=self
        )
        return input._at(features, out_key)


class _Pooling(MinkowskiPoolingBase):
    """The constructor of pooling to the rows of the stride."""

    mode = PoolingMode.LOCAL_AVG_POOLING

    def __init__(
        self,
        kernel_size: StrideType = -1,
        stride: StrideType = 1,
        dilation: StrideType = 1,
        kernel_generator: KernelGenerator | None = None,
        dimension: int | None = None,
    ):
        facts = kernel_generator, False, self.mode, dimension
        super().__init__(kernel_size, stride, dilation, *facts)


class MinkowskiSumPooling(_Pooling):
    """Adds the inputs under a kernel."""

    mode = PoolingMode.LOCAL_SUM_POOLING


class MinkowskiAvgPooling(_Pooling):
    """Takes the mean of the inputs that are there under a kernel."""


class MinkowskiMaxPooling(_Pooling):
    """Takes the maximum of the inputs that are there under a kernel."""

    mode = PoolingMode.LOCAL_MAX_POOLING


class MinkowskiPoolingTranspose(MinkowskiPoolingBase):
    """Adds the coarser rows over each finer row; one if the kernel is the stride.

    The output has the rows of the input there, or, if ``expand_coordinates`` is true
    or there are none, every row that the kernel reaches.
    """

    mode = PoolingMode.LOCAL_SUM_POOLING

    def __init__(
        self,
        kernel_size: StrideType,
        stride: StrideType,
        dilation: StrideType = 1,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        dimension: int | None = None,
    ):
        facts = kernel_generator, True, self.mode, dimension, expand_coordinates
        super().__init__(kernel_size, stride, dilation, *facts)


class MinkowskiAvgUnpooling(MinkowskiPoolingTranspose):
    """Takes the mean of the coarser rows over each finer row; a name of 0.4."""

    mode = PoolingMode.LOCAL_AVG_POOLING


# Batch elements


@bridge.not_compiled
def batch_pool(
    x: Tensor, reduction: str, layer: object = None
) -> tuple[torch.Tensor, CoordinateMapKey]:
    """Return (B, C) features pooled over batch elements, and the key of their rows.

    Args:
        x: a tensor or a field.
        reduction: "sum", "avg" or "max".
        layer: the module that calls.
    """
    manager, key = x.coordinate_manager, x.coordinate_key
    origin = manager.origin()
    count = manager.size(origin)
    if isinstance(x, TensorField) or not len(x):
        rows = manager.elements(x.C)
        made = x.F.new_zeros((count, x.F.shape[1]))
        index = rows[:, None].expand_as(x.F)
        names = {"sum": "sum", "avg": "mean", "max": "amax"}
        made = made.scatter_reduce(0, index, x.F, names[reduction], include_self=False)
        return made, origin
    pool = getattr(ops, f"global_{reduction}_pool")
    held = manager.map_of(key)
    features = bridge.call(lambda f: pool(held.tensor(f)), x.F, layer=layer)
    batches = manager.get_coordinates(origin)[:, 0].long().to(x.device)
    if len(batches) == len(features):
        return features, origin
    missing = int(batches[-1]) + 1 - len(features)
    features = torch.nn.functional.pad(features, (0, 0, 0, max(missing, 0)))
    return features[batches], origin


class MinkowskiGlobalPooling(MinkowskiModuleBase):
    """Pools each batch element to one row, by rising batch index.

    Args:
        mode: what is computed; in 0.4, whether to take the mean instead of the sum.
        average, dimension: of 0.4.
    """

    mode = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX

    def __init__(
        self,
        mode: PoolingMode | bool | None = None,
        average: bool = True,
        dimension: int | None = None,
    ):
        super().__init__()
        mode = self.mode if mode is None else mode
        if mode is False or not average:
            mode = PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX
        elif not isinstance(mode, PoolingMode):
            mode = self.mode
        self.pooling_mode = mode

    def forward(self, input: Tensor, coordinates: object = None) -> SparseTensor:
        """Return a tensor of tensor stride 0, with a row for each batch element."""
        expect(
            isinstance(input, Tensor),
            f"{type(self).__name__} takes a SparseTensor or a TensorField; got "
            f"{type(input).__name__}",
        )
        features, key = batch_pool(input, self.pooling_mode.reduction, self)
        place = {"coordinate_manager": input.coordinate_manager}
        return SparseTensor(features, coordinate_map_key=key, **place)

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the layer."""
        return f"mode={self.pooling_mode}"


class MinkowskiGlobalSumPooling(MinkowskiGlobalPooling):
    """Adds the rows of each batch element."""

    mode = PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX


class MinkowskiGlobalAvgPooling(MinkowskiGlobalPooling):
    """Takes the mean of the rows of each batch element."""


class MinkowskiGlobalMaxPooling(MinkowskiGlobalPooling):
    """Takes the maximum of the rows of each batch element."""

    mode = PoolingMode.GLOBAL_MAX_POOLING_PYTORCH_INDEX


class _Broadcast(MinkowskiModuleBase):
    """Combines each row with the row of its batch element."""

    def __init__(self, dimension: int | None = None):
        super().__init__()

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        """Return a tensor on the rows of the first.

        Args:
            input: the tensor.
            input_glob: one row a batch element, as global pooling makes them, of the
                same manager.
        """
        for each in (input, input_glob):
            expect(
                isinstance(each, SparseTensor),
                f"{type(self).__name__} takes SparseTensors; got {type(each).__name__}",
            )
        manager = input.coordinate_manager
        expect(manager is input_glob.coordinate_manager, DIFFERENT_MANAGERS)
        rows = manager.elements(input.C)
        return input._like(self._combined(input.F, input_glob.F[rows]))

    def _combined(self, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class MinkowskiBroadcast(_Broadcast):
    """Gives each row the features of its batch element."""

    def _combined(self, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return other


class MinkowskiBroadcastAddition(_Broadcast):
    """Adds the features of its batch element to each row."""

    operation_type = BroadcastMode.ELEMENTWISE_ADDITON

    def _combined(self, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return own + other


class MinkowskiBroadcastMultiplication(_Broadcast):
    """Multiplies each row by the features of its batch element."""

    operation_type = BroadcastMode.ELEMENTWISE_MULTIPLICATION

    def _combined(self, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return own * other


class MinkowskiBroadcastConcatenation(_Broadcast):
    """Joins each row with the features of its batch element."""

    def _combined(self, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.cat((own, other), dim=1)


# Rows


class MinkowskiPruning(MinkowskiModuleBase):
    """Keeps the rows whose mask is true."""

    def forward(self, input: SparseTensor, mask: torch.Tensor) -> SparseTensor:
        """Return the rows, in their order, on a new map "pruned" of the same stride.

        Args:
            input: the tensor.
            mask: (N,) bool.
        """
        expect(
            isinstance(input, SparseTensor),
            f"MinkowskiPruning takes a SparseTensor; got {type(input).__name__}",
        )
        expect(
            mask.dtype == torch.bool and tuple(mask.shape) == (len(input),),
            f"mask must be ({len(input)},) bool, one value a row; got "
            f"{tuple(mask.shape)} of {mask.dtype}",
        )
        key = input.coordinate_manager.prune(input._key, mask)
        return input._at(input.F[mask.to(input.device)], key)


class MinkowskiUnion(MinkowskiModuleBase):
    """Adds tensors on the rows that any of them has."""

    def forward(self, *inputs: SparseTensor) -> SparseTensor:
        """Return the sum on a new map of the least stride."""
        expect(len(inputs) > 1, "MinkowskiUnion takes at least two SparseTensors")
        for each in inputs:
            expect(
                isinstance(each, SparseTensor),
                f"MinkowskiUnion takes SparseTensors; got {type(each).__name__}",
            )
        manager, first = inputs[0].coordinate_manager, inputs[0]
        same = all(each.coordinate_manager is manager for each in inputs)
        expect(same, DIFFERENT_MANAGERS)
        key = CoordinateMapKey(first.D + 1)
        places = manager.union_map([each._key for each in inputs], key)
        made = first.F.new_zeros((manager.size(key), first.shape[1]))
        for each, (_, rows) in zip(inputs, places, strict=True):
            made = made.index_add(0, rows.to(first.device), each.F)
        return first._at(made, key)


class MinkowskiInterpolation(MinkowskiModuleBase):
    """Interpolates features linearly at float coordinates.

    Args:
        return_kernel_map: whether rows of the tensor and of the points are returned.
        return_weights: whether linear weights are returned.
    """

    def __init__(self, return_kernel_map: bool = False, return_weights: bool = False):
        super().__init__()
        self.return_kernel_map = return_kernel_map
        self.return_weights = return_weights

    def forward(self, input: SparseTensor, tfield: torch.Tensor) -> Any:
        """Return (Q, C) features at (Q, 1 + D) coordinates, in input units.

        In a tuple with the pair of rows and the weights, each if it is asked for.
        """
        features = input.features_at_coordinates(tfield)
        if not (self.return_kernel_map or self.return_weights):
            return features
        manager, key = input.coordinate_manager, input.coordinate_map_key
        *rows, weights = manager.interpolation_map_weight(key, tfield)
        made = [features]
        made += [tuple(rows)] if self.return_kernel_map else []
        return tuple(made + ([weights] if self.return_weights else []))


_LAYERS = "call a layer, such as MinkowskiMaxPooling"
MinkowskiLocalPoolingFunction: Absent = absent("MinkowskiLocalPoolingFunction", _LAYERS)
MinkowskiLocalPoolingTransposeFunction: Absent = absent(
    "MinkowskiLocalPoolingTransposeFunction", _LAYERS
)
MinkowskiGlobalPoolingFunction: Absent = absent(
    "MinkowskiGlobalPoolingFunction", _LAYERS
)
MinkowskiDirectMaxPoolingFunction: Absent = absent(
    "MinkowskiDirectMaxPoolingFunction", _LAYERS
)
MinkowskiBroadcastFunction: Absent = absent("MinkowskiBroadcastFunction", _LAYERS)
MinkowskiPruningFunction: Absent = absent("MinkowskiPruningFunction", _LAYERS)
MinkowskiUnionFunction: Absent = absent("MinkowskiUnionFunction", _LAYERS)
MinkowskiInterpolationFunction: Absent = absent(
    "MinkowskiInterpolationFunction", _LAYERS
)
