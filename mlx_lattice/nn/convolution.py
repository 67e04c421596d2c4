"""Convolution modules and their quantised twins, in the manner of mlx.nn.

A call passes the relation of ``x`` and the current weight to ``ops.convolution``. The
weight is (C_out, kernel..., C_in / groups), MLX's layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import mlx.core as mx
from mlx.nn import Module

from .. import memory
from ..checks import flag, whole
from ..epilogue import Epilogue
from ..kernel_spec import IntOrTuple, KernelSpec, check_support, per_axis
from ..ops.convolution import (
    Coordinates,
    contracted,
    fitting,
    forward_relation,
    transposed_relation,
)
from ..quantized import QuantizedWeight
from ..relation import Relation
from ..routes import launch
from ..tensor import SparseTensor, expect_axes
from .linear import INTEGER, Packable, QuantizedConvolution, Weight, convolved

__all__ = [
    "Conv", "ConvTranspose", "GenerativeConvTranspose", "QuantizedConv",
    "QuantizedConvTranspose", "QuantizedGenerativeConvTranspose", "QuantizedSubmConv",
    "SubmConv", "hyper_cross",
]  # fmt: skip


Offsets = Sequence[Sequence[int]] | None
NO_SCOPE = nullcontext()


def kernel_spec(
    dims: int,
    kernel_size: IntOrTuple | None,
    stride: IntOrTuple,
    padding: IntOrTuple | None,
    dilation: IntOrTuple,
    offsets: Offsets = None,
) -> KernelSpec:
    """Return the checked kernel of a layer."""
    if offsets is not None:
        if kernel_size is not None or dilation != 1:
            raise ValueError(
                "offsets replace kernel_size and dilation; leave both out. Got "
                f"kernel_size = {kernel_size} and dilation = {dilation}"
            )
        return KernelSpec.of(dims, stride=stride, padding=padding, offsets=offsets)
    if kernel_size is None:
        raise TypeError("a convolution needs kernel_size or offsets; got neither")
    return KernelSpec.of(
        dims, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
    )


def hyper_cross(
    kernel_size: IntOrTuple, dilation: IntOrTuple = 1, *, dims: int = 3
) -> tuple[tuple[int, ...], ...]:
    """Return the offsets on the axes alone: 7 of the 27 of a 3x3x3 kernel.

    The order is that of MinkowskiEngine's ``RegionType.HYPER_CROSS``, so that its
    kernels load unchanged: the centre, then for each axis the positive offsets and the
    negative offsets, both in ascending order. Sizes are odd; ``kernel_size`` and
    ``dilation`` are an int or one per axis.

    Examples:
        >>> nn.hyper_cross(3, dims=2)
        ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
    """
    sizes = per_axis(kernel_size, dims, "kernel_size")
    steps = per_axis(dilation, dims, "dilation")
    if not all(size % 2 for size in sizes):
        raise ValueError(f"kernel_size of a hyper-cross must be odd; got {kernel_size}")
    offsets = [(0,) * dims]
    for axis, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        half = size // 2
        for place in (*range(1, half + 1), *range(-half, 0)):
            offset = (place * step if a == axis else 0 for a in range(dims))
            offsets.append(tuple(offset))
    return tuple(offsets)


GEOMETRY = frozenset(("kernel_size", "stride", "padding", "dilation", "offsets"))


class Convolution(Packable, Module):
    """The base of all convolutions: the weight, the kernel and the call."""

    mode: str | None = None  # of a packed weight; Modules look up slowly

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        spec: KernelSpec,
        groups: int,
        bias: bool,
    ):
        super().__init__()
        groups, bias = whole(groups, "groups", 1), flag(bias, "bias")
        in_channels = whole(in_channels, "in_channels")
        out_channels = whole(out_channels, "out_channels")
        for name, channels in (("input", in_channels), ("output", out_channels)):
            if channels < 1 or channels % groups:
                raise ValueError(
                    f"The number of {name} channels ({channels}) must be positive and "
                    f"divisible by the number of groups ({groups})"
                )
        per_group = in_channels // groups
        scale = math.sqrt(1 / (per_group * spec.volume))
        # Explicit offsets lie along the first kernel axis.
        size = (spec.volume, *spec.size[1:]) if spec.custom else spec.size
        self.weight: mx.array = mx.random.uniform(
            low=-scale, high=scale, shape=(out_channels, *size, per_group)
        )
        if bias:
            self.bias: mx.array = mx.zeros((out_channels,))
        self.dims: int = spec.dims
        self.kernel_size: tuple[int, ...] = size
        self.offsets: tuple[tuple[int, ...], ...] | None = spec.custom
        self.stride: tuple[int, ...] = spec.stride
        self.padding: tuple[int, ...] | None = spec.padding
        self.dilation: tuple[int, ...] = spec.dilation
        self.groups = groups

    def __setattr__(self, name: str, value: object) -> None:
        if name in GEOMETRY:
            # Module would store tuples with the parameters, which makes lookups slow
            # and adds them to every traversal of the parameters.
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def channels(self) -> tuple[int, int]:
        """Input and output channels."""
        shape = self["weight"].shape
        return shape[-1] * self.groups, shape[0]

    def _extra_repr(self) -> str:
        c_in, c_out = self.channels
        return (
            f"{c_in}, {c_out}, "
            f"kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, "
            f"groups={self.groups}, bias={'bias' in self}"
            + ("" if self.offsets is None else f", offsets={self.offsets}")
        )

    # See ``Relation.kind``.
    kind = "forward"
    support: str | None = None

    def __call__(
        self,
        x: SparseTensor,
        coordinates: Coordinates = None,
        *,
        epilogue: Epilogue | None = None,
    ) -> SparseTensor:
        """Return the convolution of ``x``, on the rows of ``coordinates`` if given."""
        with launch.scope(self) if launch.observed() else NO_SCOPE:
            relation, weight = self._relation(x, coordinates), self._weight()
            if self.mode == INTEGER:
                return convolved(self, x, weight, relation, epilogue)
            bias = self.get("bias")
            return contracted(x, weight, relation, bias, self.groups, epilogue)

    def _weight(self) -> Weight | mx.array:
        """Return the current weight, checked against the kernel."""
        if self.mode is not None:
            weight = self.packed_weight()
            size = weight.kernel if type(weight) is QuantizedWeight else None
        else:
            weight = self["weight"]
            size = weight.shape[1:-1]
            if len(size) != self.dims:
                raise ValueError(
                    "a layer's weight has shape (C_out, spatial..., C_in / groups), "
                    f"{self.dims + 2} axes; got {tuple(weight.shape)}. "
                    "io.convert_weight converts weights of other libraries"
                )
        if self.dims > 1 and size == self.kernel_size:
            return weight
        return fitting(weight, self.dims, self.kernel_size)

    def _relation(self, x: SparseTensor, coordinates: Coordinates) -> Relation:
        """Return the relation of a call; the manager caches it for the next call."""
        arguments = None
        if isinstance(x, SparseTensor) and (
            coordinates is None
            or isinstance(coordinates, SparseTensor)
            and x.manager is coordinates.manager
        ):
            target = 0 if coordinates is None else coordinates.key.serial
            size = self.offsets or self.kernel_size
            geometry = size, self.stride, self.padding, self.dilation, self.support
            arguments = self.kind, x.key.serial, target, *geometry
            known = x.manager.cached_relation(arguments)
            if known is not None:
                return known
        expect_axes(x, self.dims, type(self).__name__)
        kernel = {"kernel_size": self.kernel_size, "dilation": self.dilation}
        if self.offsets is not None:
            kernel |= {"kernel_size": 1, "offsets": self.offsets}
        relation = self._find_relation(x, coordinates, kernel)
        if arguments is not None:
            # The default target of a transposed convolution may change with later sets.
            searched = self.kind == "transposed" and not target
            x.manager.cache_relation(arguments, relation, searched)
        return relation


class Conv(Convolution):
    """Apply a sparse convolution: ``y[o] = sum of x[o * stride + offset_k] @ W[k]``.

    Output rows are the sorted unique cells ``floor(in / stride)``. If the stride is 1
    and the kernel centred, they are the rows of the input.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
        kernel_size (int or tuple): The size of the kernel, one per axis; leave it out
            with ``offsets``.
        stride (int or tuple): The step between output cells. Default: ``1``.
        padding (int or tuple, optional): Padding as in a dense convolution of PyTorch;
            by default the kernel is centred.
        dilation (int or tuple): The spacing of the kernel. Default: ``1``.
        groups (int): The number of channel groups. Default: ``1``.
        bias (bool): If ``True`` add a learnable bias. Default: ``True``.
        support (str): ``"cell"``, or ``"reach"`` for every row that an input reaches,
            as in dense convolution. Default: ``"cell"``.
        offsets (tuple, optional): K kernel offsets instead of a box, such as
            ``nn.hyper_cross(3)``. The weight is then (C_out, K, 1, 1, C_in / groups).
        dims (int): The number of spatial axes, 1 to 4; ``Conv1d`` to ``Conv4d`` set it.
            Default: ``3``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> conv = nn.Conv3d(8, 16, kernel_size=2, stride=2)
        >>> conv(x).shape  # 4 x 4 x 4 cells become 2 x 2 x 2
        (8, 16)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrTuple | None = None,
        stride: IntOrTuple = 1,
        padding: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        support: str = "cell",
        offsets: Offsets = None,
        dims: int = 3,
    ):
        spec = kernel_spec(dims, kernel_size, stride, padding, dilation, offsets)
        super().__init__(in_channels, out_channels, spec, groups, bias)
        self.support: str | None = check_support(support)

    def _extra_repr(self) -> str:
        return f"{super()._extra_repr()}, support={self.support}"

    def _find_relation(self, x, coordinates: Coordinates, kernel: dict) -> Relation:
        kernel |= {"stride": self.stride, "padding": self.padding}
        return forward_relation(x, coordinates, self.support, **kernel)


class SubmConv(Convolution):
    """Apply a submanifold convolution: the output has the rows of the input.

    Arguments are those of ``Conv``. The stride is 1 and the kernel is centred.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> y = nn.SubmConv3d(8, 16, kernel_size=3)(x)
        >>> y.shape, y.key == x.key
        ((64, 16), True)
    """

    kind = "submanifold"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        offsets: Offsets = None,
        dims: int = 3,
    ):
        spec = kernel_spec(dims, kernel_size, 1, None, dilation, offsets)
        super().__init__(in_channels, out_channels, spec, groups, bias)

    def __call__(
        self, x: SparseTensor, *, epilogue: Epilogue | None = None
    ) -> SparseTensor:
        """Return the convolution of ``x`` on its rows, with the same key."""
        return super().__call__(x, epilogue=epilogue)

    def _find_relation(self, x, coordinates: Coordinates, kernel: dict) -> Relation:
        return x.manager.submanifold_kernel_relation(x.key, **kernel)

    def blocks(self, x: SparseTensor) -> Iterator[tuple[int, mx.array]]:
        """Yield (first row, features) of blocks of rows under ``ml.memory_limit``."""
        if self.mode == INTEGER:
            return iter([(0, self(x).feats)])
        with launch.scope(self):
            relation, weight = self._relation(x, None), self._weight()
            bias = self.get("bias")
            return memory.conv_blocks(x.feats, weight, relation, bias, self.groups)


class ConvTranspose(Convolution):
    """Apply a transposed convolution: ``out = in * stride + offset_k``.

    Output rows are the ``coordinates`` passed to the call. By default they are the
    finer set that an earlier strided convolution read. With stride 1 they are the rows
    of the input. Arguments are those of ``Conv``; the kernel size and the stride are 2
    by default.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> y = nn.Conv3d(8, 16, 2, stride=2)(x)
        >>> up = nn.ConvTranspose3d(16, 8)(y)
        >>> up.shape, up.key == x.key  # back on the rows of x
        ((64, 8), True)
    """

    kind = "transposed"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrTuple = 2,
        stride: IntOrTuple = 2,
        padding: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        dims: int = 3,
    ):
        spec = kernel_spec(dims, kernel_size, stride, padding, dilation)
        super().__init__(in_channels, out_channels, spec, groups, bias)

    def _find_relation(self, x, coordinates: Coordinates, kernel: dict) -> Relation:
        kernel |= {"stride": self.stride, "padding": self.padding}
        is_generative = self.kind == "generative"
        return transposed_relation(x, coordinates, is_generative, **kernel)


class GenerativeConvTranspose(ConvTranspose):
    """Apply a transposed convolution onto every row that the kernel reaches.

    Rows are sorted and unique, even if kernels overlap. Arguments are those of
    ``ConvTranspose``.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 5, 5, 5]]), mx.ones((1, 8)))
        >>> nn.GenerativeConvTranspose3d(8, 4)(x).shape  # one cell becomes 2 x 2 x 2
        (8, 4)
    """

    kind = "generative"


class QuantizedConv(QuantizedConvolution, Conv):
    """Apply ``Conv`` with a packed weight.

    Args:
        *args, **kwargs: The arguments of ``Conv``.
        group_size (int): Input channels that share a scale: 32, 64 or 128. Default:
            ``64``.
        bits (int): 4 or 8. Default: ``4``.
        mode (str): ``"affine"``, or ``"integer"`` for int8 features.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 64)))
        >>> conv = nn.Conv3d(64, 32, 2, stride=2)
        >>> packed = conv.to_quantized(bits=4)  # a QuantizedConv3d
        >>> packed(x).shape
        (8, 32)
        >>> conv.weight.nbytes, packed.weight.nbytes
        (65536, 8192)
    """


class QuantizedSubmConv(QuantizedConvolution, SubmConv):
    """Apply ``SubmConv`` with a packed weight; see ``QuantizedConv``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 64)))
        >>> net = nn.Sequential(nn.SubmConv3d(64, 64, 3), nn.ReLU())
        >>> mlx.nn.quantize(net, bits=8)
        >>> type(net.layers[0]).__name__, net(x).shape
        ('QuantizedSubmConv3d', (64, 64))
    """


class QuantizedConvTranspose(QuantizedConvolution, ConvTranspose):
    """Apply ``ConvTranspose`` with a packed weight; see ``QuantizedConv``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 64)))
        >>> coarse = nn.MaxPool3d()(x)
        >>> nn.QuantizedConvTranspose3d(64, 32)(coarse).shape
        (64, 32)
    """


class QuantizedGenerativeConvTranspose(QuantizedConvolution, GenerativeConvTranspose):
    """Apply ``GenerativeConvTranspose`` with a packed weight; see ``QuantizedConv``.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 5, 5, 5]]), mx.ones((1, 64)))
        >>> nn.QuantizedGenerativeConvTranspose3d(64, 32)(x).shape
        (8, 32)
    """


Conv.twin = QuantizedConv
SubmConv.twin = QuantizedSubmConv
ConvTranspose.twin = QuantizedConvTranspose
GenerativeConvTranspose.twin = QuantizedGenerativeConvTranspose
