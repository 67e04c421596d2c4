"""spconv.pytorch.pool: pooling by the relations of mlx_lattice."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import torch

from .... import ops
from ....coordinates import CoordinateManager
from ....relation import Relation
from ....tensor import SparseTensor
from ... import bridge
from ..core import ConvAlgo
from . import kernel_maps
from .conv import VoxelCount, numbered
from .core import IndiceData, SparseConvTensor, expand_nd, expect
from .modules import SparseModule
from .ops import get_conv_output_size

IntOrSequence = int | Sequence[int]


def _maxima(x: mx.array, relation: Relation) -> mx.array:
    """Return the greatest input under each output, at least 0 as in spconv."""
    return mx.maximum(ops.sparse_pool(x, relation, "max"), 0)


def _maxima_vjp(relation: Relation, arrays, dy: mx.array) -> list[mx.array]:
    """Return the gradient, which spconv gives to every input that is the maximum."""
    (x,) = arrays
    y, table = _maxima(x, relation), relation.in_out
    dx = mx.zeros(x.shape, dtype=mx.float32)
    for k in range(relation.volume):
        rows = table[:, k]
        chosen = (rows >= 0)[:, None] & (x == y[rows])
        dx = dx + mx.where(chosen, dy[rows].astype(mx.float32), 0)
    return [dx.astype(x.dtype)]


class _Pool(VoxelCount, SparseModule):
    """Pooling of any kind.

    Args:
        ndim: spatial axes.
        kernel_size, stride, padding, dilation: an int, or one for each axis; the
            stride is the kernel's size by default.
        indice_key: name under which the relation is stored.
        subm: whether the output has the input's rows.
        algo: ignored.
        record_voxel_count: whether the greatest number of output rows is recorded.
        name: of the module.
    """

    def __init__(
        self,
        ndim: int,
        kernel_size: IntOrSequence = 3,
        stride: IntOrSequence | None = 1,
        padding: IntOrSequence = 0,
        dilation: IntOrSequence = 1,
        indice_key: str | None = None,
        subm: bool = False,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.ndim, self.subm = ndim, subm
        self.kernel_size = expand_nd(ndim, kernel_size)
        self.stride = expand_nd(ndim, self.kernel_size if stride is None else stride)
        self.padding = expand_nd(ndim, padding)
        self.dilation = expand_nd(ndim, dilation)
        self.indice_key, self.algo = indice_key, algo
        self.register_count(record_voxel_count and not subm)

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the layer."""
        text = f"kernel_size={self.kernel_size}, stride={self.stride}"
        return f"{text}, padding={self.padding}, dilation={self.dilation}"

    @bridge.not_compiled
    def forward(self, input: SparseConvTensor) -> SparseConvTensor:
        """Return the pooled tensor.

        Raises:
            AssertionError: another layer stored the key already.
        """
        expect(
            isinstance(input, SparseConvTensor),
            f"{type(self).__name__} takes a SparseConvTensor; got "
            f"{type(input).__name__}",
        )
        stored, key = input.indice_dict, self.indice_key
        expect(
            key is None or key not in stored,
            f"indice_key {key!r} is stored in this tensor already",
        )
        kernel = self.kernel_size, self.stride, self.padding, self.dilation
        shape, rows = input.spatial_shape, input.indices
        if self.subm:
            relation, lattice = kernel_maps.submanifold_rows(
                input, self.kernel_size, self.dilation
            )
        else:
            shape = get_conv_output_size(input.spatial_shape, *kernel)
            relation, lattice, rows = kernel_maps.strided_rows(
                input, shape, False, kernel
            )
            self.record_count(len(rows))
        if key is not None:
            facts = list(input.spatial_shape), list(shape), self.subm, self.algo
            sizes = self.kernel_size, self.stride, self.dilation, self.padding
            whole = kernel_maps.over_repeats(relation, lattice)
            data = IndiceData(rows, input.indices, whole, *facts, *sizes)
            stored = {**stored, key: data}
        features, repeats = input.features, lattice.repeats
        if repeats is not None:
            features = features[repeats.first]
        features = self._pool(features, relation)
        if repeats is not None and self.subm:
            features = features[repeats.inverse]
        made = input.replace_feature(features)
        made.indices, made.indice_dict = rows, stored
        made.spatial_shape = list(shape)
        return made

    def _pool(self, features: torch.Tensor, relation: Relation) -> torch.Tensor:
        raise NotImplementedError


class SparseMaxPool(_Pool):
    """Takes the greatest input of each channel, or 0 if all are negative."""

    def _pool(self, features: torch.Tensor, relation: Relation) -> torch.Tensor:
        return bridge.call(
            lambda x: _maxima(x, relation),
            features,
            vjp=lambda _, arrays, dy: _maxima_vjp(relation, arrays, *dy),
            layer=self,
        )


class SparseAvgPool(_Pool):
    """Takes the mean of the inputs that are there."""

    def _pool(self, features: torch.Tensor, relation: Relation) -> torch.Tensor:
        return bridge.call(
            lambda x: ops.sparse_pool(x, relation, "avg"), features, layer=self
        )


class _Numbered:  # the constructor of pooling in a given number of axes
    def __init__(
        self,
        kernel_size: IntOrSequence,
        stride: IntOrSequence | None = None,
        padding: IntOrSequence = 0,
        dilation: IntOrSequence = 1,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
        subm: bool = False,
    ):
        sizes = kernel_size, stride, padding, dilation
        facts = indice_key, subm, algo, record_voxel_count, name
        super().__init__(self.dims, *sizes, *facts)


class SparseGlobalMaxOrAvgPool(SparseModule):
    """Pools each batch element to one row of a dense tensor.

    Args:
        is_mean: whether to take the mean instead of the greatest value.
        name: of the module.
    """

    def __init__(self, is_mean: bool, name: str | None = None):
        super().__init__(name=name)
        self.is_mean = is_mean

    @bridge.not_compiled
    def forward(self, input: SparseConvTensor) -> torch.Tensor:
        """Return the (B, C) tensor; a batch element without rows is 0."""
        batch = input.indices[:, 0].int()
        place = torch.arange(len(batch), dtype=torch.int32, device=batch.device)
        (rows,) = bridge.to_mlx(torch.stack([batch, place], 1), copy=True)
        manager, size = CoordinateManager(), input.batch_size
        key = manager.insert(rows, batch_size=size)
        pool = ops.global_avg_pool if self.is_mean else ops.global_max_pool
        return bridge.call(
            lambda x: pool(SparseTensor.of(manager, key, x)),
            input.features,
            layer=self,
        )


class SparseGlobalMaxPool(SparseGlobalMaxOrAvgPool):
    """Returns the greatest features of each batch element."""

    def __init__(self, name: str | None = None):
        super().__init__(is_mean=False, name=name)


class SparseGlobalAvgPool(SparseGlobalMaxOrAvgPool):
    """Returns the mean features of each batch element."""

    def __init__(self, name: str | None = None):
        super().__init__(is_mean=True, name=name)


_KINDS = {"SparseMaxPool": SparseMaxPool, "SparseAvgPool": SparseAvgPool}
globals().update(numbered(__name__, {n: (_Numbered, k) for n, k in _KINDS.items()}))
