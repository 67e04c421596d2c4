"""spconv.pytorch.conv: convolutions by the relations of mlx_lattice.

A weight is (out, k..., in), the layout of spconv 2.2 and later. ``algo`` and other
choices of kernels are taken and ignored: the route table of mlx_lattice chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from ....checks import AXES
from ....relation import Relation
from ... import bridge
from .. import constants
from ..core import ConvAlgo
from . import kernel_maps
from .core import IndiceData, SparseConvTensor, expand_nd, expect
from .modules import SparseModule
from .ops import get_conv_output_size, get_deconv_output_size

IntOrSequence = int | Sequence[int]
MAX_NUM_VOXELS = "max_num_voxels_during_training"


class VoxelCount:
    """A layer that can record its greatest number of output rows in a buffer."""

    def register_count(self, records: bool) -> None:
        """Register the buffer if the layer records."""
        self.record_voxel_count = records
        if records:
            self.register_buffer(MAX_NUM_VOXELS, torch.zeros(1, dtype=torch.int32))

    def get_max_num_voxels(self) -> torch.Tensor | None:
        """Return the buffer, or None."""
        return getattr(self, MAX_NUM_VOXELS, None)

    def record_count(self, rows: int) -> None:
        """Raise the recorded number to this one."""
        if (most := self.get_max_num_voxels()) is not None:
            most.clamp_(min=rows)


class SparseConvolution(VoxelCount, SparseModule):
    """A sparse convolution of any kind; nets call the classes below.

    Args:
        ndim: spatial axes.
        in_channels, out_channels: channels.
        kernel_size, stride, padding, dilation: an int, or one for each axis.
        groups: 1.
        bias: whether there is a bias.
        subm: whether the output has the input's rows; stride and padding then have no
            effect.
        output_padding: added to the output's extents of a transposed convolution.
        transposed: whether the convolution is transposed, onto every row that it
            reaches.
        inverse: whether the output has the rows that the layer with the same
            ``indice_key`` took.
        indice_key: name under which the relation is stored, or found.
        algo, fp32_accum, large_kernel_fast_algo: ignored.
        record_voxel_count: whether the greatest number of output rows is recorded.
        act_type, act_alpha, act_beta: not provided.
        name: of the module.
        device, dtype: of the parameters.
    """

    is_convolution = True
    # Layers of spconv 1.x share a dictionary of relations, and reuse any of a key.
    shares_keys = False

    def __init__(
        self,
        ndim: int,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrSequence = 3,
        stride: IntOrSequence = 1,
        padding: IntOrSequence = 0,
        dilation: IntOrSequence = 1,
        groups: int = 1,
        bias: bool = True,
        subm: bool = False,
        output_padding: IntOrSequence = 0,
        transposed: bool = False,
        inverse: bool = False,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        act_type: object = None,
        act_alpha: float = 0,
        act_beta: float = 0,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(name=name)
        expect(groups == 1, f"spconv has no groups; got groups={groups}")
        self.ndim: int = ndim
        self.groups: int = groups
        self.in_channels: int = in_channels
        self.out_channels: int = out_channels
        self.kernel_size: list[int] = expand_nd(ndim, kernel_size)
        self.stride: list[int] = expand_nd(ndim, stride)
        self.padding: list[int] = expand_nd(ndim, padding)
        self.dilation: list[int] = expand_nd(ndim, dilation)
        self.output_padding: list[int] = expand_nd(ndim, output_padding)
        self.subm: bool = subm
        self.transposed: bool = transposed
        self.inverse: bool = inverse
        self.indice_key: str | None = indice_key
        self.algo: ConvAlgo | None = algo
        self.fp32_accum = fp32_accum
        self.act_type: object = act_type
        self.act_alpha: float = act_alpha
        self.act_beta: float = act_beta
        self.conv1x1: bool = prod(self.kernel_size) == 1
        if not subm:
            self.conv1x1 = self.conv1x1 and prod(self.stride) == 1
            expect(
                not self.conv1x1 or self.padding == [0] * ndim,
                "a convolution of kernel 1 and stride 1 takes no padding; got "
                f"padding={self.padding}",
            )
        self._expect_provided()
        self.register_count(record_voxel_count and not subm and not inverse)
        self.weight_shape: list[int] = self._weight_shape()
        options = {"device": device, "dtype": dtype}
        self.weight: torch.Tensor = nn.Parameter(
            torch.zeros(*self.weight_shape, **options)
        )
        if bias:
            self.bias: torch.Tensor = nn.Parameter(torch.zeros(out_channels, **options))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        self._register_load_state_dict_pre_hook(self._load_weight_different_layout)

    def _expect_provided(self) -> None:
        """Raise for arguments that have no counterpart, or that spconv refuses."""
        kind = type(self).__name__
        if self.act_type not in (None, 0) and "None" not in str(self.act_type):
            raise NotImplementedError(
                f"{kind} has no act_type={self.act_type}; put the activation behind "
                "the layer"
            )
        if self.subm and any(size % 2 == 0 for size in self.kernel_size):
            raise ValueError(
                "a submanifold convolution has a kernel of odd size; got "
                f"kernel_size={self.kernel_size}"
            )
        if any(size < 1 for size in self.kernel_size):
            raise NotImplementedError(
                f"{kind} has no kernel_size={self.kernel_size}: use SparseGlobalMaxPool"
                " or dense() to join a whole axis"
            )
        if self.transposed and set(self.dilation) != {1}:
            raise NotImplementedError(
                f"{kind} has no dilation={self.dilation}; use dilation=1"
            )
        if any(self.output_padding):
            raise NotImplementedError(
                f"{kind} has no output_padding={self.output_padding}; use 0 and enlarge"
                " the spatial shape of the input"
            )

    def _weight_shape(self) -> list[int]:
        return [self.out_channels, *self.kernel_size, self.in_channels]

    def _contraction_weight(self, relation: Relation) -> torch.Tensor:
        """Return the weight as ``bridge.convolve`` takes it."""
        return self.weight.unsqueeze(1) if self.ndim == 1 else self.weight

    def reset_parameters(self) -> None:
        """Draw the parameters as spconv does."""
        fan = self.in_channels * prod(self.kernel_size)
        bound = math.sqrt(3) * nn.init.calculate_gain("leaky_relu", math.sqrt(5))
        bound /= math.sqrt(fan)
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-1 / math.sqrt(fan), 1 / math.sqrt(fan))

    def _load_weight_different_layout(self, state_dict, prefix, *_: object) -> None:
        """Permute a weight of ``constants.SAVED_WEIGHT_LAYOUT`` that is loaded."""
        count = prefix + MAX_NUM_VOXELS
        if self.get_max_num_voxels() is not None and count not in state_dict:
            state_dict[count] = torch.zeros(1, dtype=torch.int32)
        layout, key = constants.SAVED_WEIGHT_LAYOUT, prefix + "weight"
        if key not in state_dict:
            return
        axes = list(range(self.ndim))
        if layout == "RSKC":
            axes = [self.ndim, *axes, self.ndim + 1]
        elif layout == "RSCK":
            axes = [self.ndim + 1, *axes, self.ndim]
        else:
            return
        state_dict[key] = state_dict[key].permute(axes).contiguous()

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the layer."""
        text = f"{self.in_channels}, {self.out_channels}, "
        text += f"kernel_size={self.kernel_size}, stride={self.stride}"
        for name, plain in (("padding", 0), ("dilation", 1), ("output_padding", 0)):
            if any(value != plain for value in getattr(self, name)):
                text += f", {name}={getattr(self, name)}"
        text += "" if self.bias is not None else ", bias=False"
        return text if self.algo is None else f"{text}, algo={self.algo}"

    def is_inverseable(self) -> bool:
        """Return whether an inverse convolution can name this layer."""
        return self.indice_key is not None and not self.subm

    def forward(
        self, input: SparseConvTensor, add_input: SparseConvTensor | None = None
    ) -> SparseConvTensor:
        """Return the convolved tensor.

        Raises:
            AssertionError: the channels are others, an inverse convolution finds
                nothing under its key, or another layer has the key already.
            ValueError: what the key stands for does not fit this layer or its input.
        """
        expect(
            isinstance(input, SparseConvTensor),
            f"{type(self).__name__} takes a SparseConvTensor; got "
            f"{type(input).__name__}",
        )
        expect(
            input.features.shape[1] == self.in_channels,
            f"channel size mismatch: the layer takes {self.in_channels} channels, and "
            f"features have {input.features.shape[1]}",
        )
        if input.is_quantized:
            raise NotImplementedError(
                "qint8 features are not computed with; use x.dequantize()"
            )
        made = self._convolve(input)
        if add_input is not None:
            made = made.replace_feature(made.features + add_input.features)
        return made

    @bridge.not_compiled
    def _convolve(self, x: SparseConvTensor) -> SparseConvTensor:
        made = x.shadow_copy()
        if self.conv1x1:
            relation = kernel_maps.identity(x.features.shape[0])
            # spconv reads the memory of (out, 1..., in) as (in, out).
            weight = self.weight.reshape(1, self.in_channels, self.out_channels)
            made._features = bridge.convolve(
                x.features, weight, self.bias, relation, layer=self
            )
            return made
        stored, data = x.indice_dict, self._found(x)
        if data is None:
            data = self._built(x)
            if self.indice_key is not None:
                stored = stored if self.shares_keys else stored.copy()
                stored[self.indice_key] = data
        relation = data.relation
        rows, shape = data.out_indices, data.out_spatial_shape
        if self.inverse:
            relation = relation.T
            rows, shape = data.indices, data.spatial_shape
        weight = self._contraction_weight(relation)
        features = bridge.convolve(x.features, weight, self.bias, relation, layer=self)
        if not self.subm and not self.inverse:
            self.record_count(len(rows))
        made._features, made.indices = features, rows
        made.indice_dict, made.spatial_shape = stored, list(shape)
        return made

    def _found(self, x: SparseConvTensor) -> IndiceData | None:
        """Return what is stored under the layer's key, if it fits the layer."""
        data, key = x.find_indice_pair(self.indice_key), self.indice_key
        if self.inverse:
            expect(
                data is not None,
                f"no layer stored indice_key {key!r} in this tensor: an inverse "
                "convolution needs the key of the SparseConv that it inverts, which "
                "must have computed the tensor",
            )
            expect(
                not data.is_subm,
                f"indice_key {key!r} is of a submanifold layer; an inverse convolution "
                "needs the key of a SparseConv or a pooling layer",
            )
            self._expect_equal("kernel size", data.ksize, self.kernel_size)
            self._expect_equal("spatial shape", data.out_spatial_shape, x.spatial_shape)
            rows = len(data.out_indices)
            self._expect_equal("number of rows", rows, len(x.indices))
            return data
        if data is None or self.shares_keys:
            return data
        expect(
            self.subm and data.is_subm,
            f"indice_key {key!r} is stored in this tensor already; submanifold layers "
            "alone reuse a key, and that of a submanifold layer",
        )
        self._expect_equal("kernel size", data.ksize, self.kernel_size)
        self._expect_equal("dilation", data.dilation, self.dilation)
        self._expect_equal("spatial shape", data.spatial_shape, x.spatial_shape)
        self._expect_equal("number of rows", len(data.indices), len(x.indices))
        return data

    def _expect_equal(self, fact: str, stored: object, own: object) -> None:
        if stored != own:
            raise ValueError(
                f"layers that share indice_key {self.indice_key!r} must have one {fact}"
                f"; stored is {stored}, and this layer or its input has {own}"
            )

    def _built(self, x: SparseConvTensor) -> IndiceData:
        """Return the relation of a layer that finds none."""
        kernel = self.kernel_size, self.stride, self.padding, self.dilation
        if self.subm:
            shape, rows = x.spatial_shape, x.indices
            relation = kernel_maps.submanifold(x, self.kernel_size, self.dilation)
        else:
            if self.transposed:
                shape = get_deconv_output_size(
                    x.spatial_shape, *kernel, self.output_padding
                )
            else:
                shape = get_conv_output_size(x.spatial_shape, *kernel)
            relation, lattice, rows = kernel_maps.strided_rows(
                x, shape, self.transposed, kernel
            )
            relation = kernel_maps.over_repeats(relation, lattice)
        return IndiceData(
            rows,
            x.indices,
            relation,
            list(x.spatial_shape),
            list(shape),
            self.subm,
            self.algo,
            self.kernel_size,
            self.stride,
            self.dilation,
            self.padding,
        )


# Layers by kind, then by number of axes


class _SubM(SparseConvolution):
    """A submanifold convolution: on the input's rows."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrSequence,
        stride: IntOrSequence = 1,
        padding: IntOrSequence = 0,
        dilation: IntOrSequence = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **options: object,
    ):
        sizes = in_channels, out_channels, kernel_size, stride, padding, dilation
        options |= {"subm": True, "indice_key": indice_key, "algo": algo, "name": name}
        super().__init__(self.dims, *sizes, groups, bias, **options)


class _Strided(SparseConvolution):
    """A convolution on every row that an input reaches."""

    is_transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrSequence,
        stride: IntOrSequence = 1,
        padding: IntOrSequence = 0,
        dilation: IntOrSequence = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **options: object,
    ):
        sizes = in_channels, out_channels, kernel_size, stride, padding, dilation
        options |= {"transposed": self.is_transposed, "indice_key": indice_key}
        options |= {"algo": algo, "name": name}
        options |= {"record_voxel_count": record_voxel_count}
        super().__init__(self.dims, *sizes, groups, bias, **options)


class _Transposed(_Strided):
    """A transposed convolution on every row that it reaches."""

    is_transposed = True


class _Inverse(SparseConvolution):
    """A convolution back onto the rows of the one with its key."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrSequence,
        indice_key: str,
        bias: bool = True,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        **options: object,
    ):
        sizes = in_channels, out_channels, kernel_size
        options |= {"bias": bias, "inverse": True, "indice_key": indice_key}
        super().__init__(self.dims, *sizes, algo=algo, name=name, **options)


def numbered(
    module: str, kinds: Mapping[str, tuple[type[Any], ...]]
) -> dict[str, type[Any]]:
    """Return classes of each kind, 1d to 4d: of its bases, with axes as ``dims``."""
    made = {}
    for name, bases in kinds.items():
        doc = next(base.__doc__ for base in bases if base.__doc__)
        for dims in AXES:
            facts = {"__doc__": doc, "__module__": module, "dims": dims}
            made[f"{name}{dims}d"] = type(f"{name}{dims}d", bases, facts)
    return made


KINDS: dict[str, Any] = {
    "SubMConv": _SubM,
    "SparseConv": _Strided,
    "SparseConvTranspose": _Transposed,
    "SparseInverseConv": _Inverse,
}
globals().update(numbered(__name__, {name: (kind,) for name, kind in KINDS.items()}))
