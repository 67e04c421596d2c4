"""Convolution modules and their quantised twins, in the manner of mlx.nn.

The weight is (C_out, kernel..., C_in / groups), MLX's own layout. Each call reads the
current parameter, so that every update is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import mlx.core as mx
from mlx.nn import Module

from ..axes import Family, classes, expect_axes
from ..checks import flag, whole
from ..epilogue import Epilogue
from ..kernel_spec import IntOrTuple, KernelSpec, check_support, per_axis
from ..ops import relations
from ..ops.conv import contracted, contracted_blocks, fitted
from ..ops.relations import Coordinates
from ..relation import Relation
from ..routes import launch
from ..tensor import SparseTensor
from .quantized import INTEGER, Packable, QuantizedConvolution, convolved

__all__ = [
    "Conv1d", "Conv2d", "Conv3d", "Conv4d", "ConvTranspose1d", "ConvTranspose2d",
    "ConvTranspose3d", "ConvTranspose4d", "GenerativeConvTranspose1d",
    "GenerativeConvTranspose2d", "GenerativeConvTranspose3d",
    "GenerativeConvTranspose4d", "QuantizedConv1d", "QuantizedConv2d",
    "QuantizedConv3d", "QuantizedConv4d", "QuantizedConvTranspose1d",
    "QuantizedConvTranspose2d", "QuantizedConvTranspose3d",
    "QuantizedConvTranspose4d", "QuantizedGenerativeConvTranspose1d",
    "QuantizedGenerativeConvTranspose2d", "QuantizedGenerativeConvTranspose3d",
    "QuantizedGenerativeConvTranspose4d", "QuantizedSubmConv1d",
    "QuantizedSubmConv2d", "QuantizedSubmConv3d", "QuantizedSubmConv4d",
    "SubmConv1d", "SubmConv2d", "SubmConv3d", "SubmConv4d", "hyper_cross",
]  # fmt: skip


Offsets = Sequence[Sequence[int]] | None


def kernel_spec(
    dims: int, kernel_size, stride, padding, dilation, offsets=None
) -> KernelSpec:
    """Return the checked kernel of a layer, from what its constructor takes."""
    if offsets is not None:
        if kernel_size is not None or dilation != 1:
            raise ValueError(
                "offsets say where the kernel reaches; leave kernel_size and dilation "
                f"out, which are {kernel_size} and {dilation}"
            )
        return KernelSpec.of(dims, stride=stride, padding=padding, offsets=offsets)
    if kernel_size is None:
        raise TypeError("a convolution takes kernel_size, or offsets")
    return KernelSpec.of(
        dims,
        kernel_size=kernel_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
    )


def hyper_cross(
    kernel_size: IntOrTuple, dilation: IntOrTuple = 1, *, dims: int = 3
) -> tuple[tuple[int, ...], ...]:
    """Return the offsets on the axes alone: 7 of the 27 of a 3x3x3 kernel.

    The order is that of MinkowskiEngine's ``RegionType.HYPER_CROSS``, so that its
    kernels load as they are: the centre, then for each axis first the offsets above 0
    and then those below, both upwards.

    Args:
        kernel_size: int or one per axis, odd.
        dilation: int or one per axis.
        dims: number of spatial axes. Default: ``3``.

    Raises:
        ValueError: a size is even, or a value of the wrong length or too small.
    """
    sizes = per_axis(kernel_size, dims, "kernel_size")
    steps = per_axis(dilation, dims, "dilation")
    if not all(size % 2 for size in sizes):
        raise ValueError(f"a hyper-cross has odd sizes; got {kernel_size}")
    found = [(0,) * dims]
    for axis, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        half = size // 2
        for at in (*range(1, half + 1), *range(-half, 0)):
            found.append(tuple(at * step if a == axis else 0 for a in range(dims)))
    return tuple(found)


GEOMETRY = frozenset(("kernel_size", "stride", "padding", "dilation", "offsets"))


class Convolution(Family, Packable, Module):
    """A weight and a kernel, and the call of every kind of convolution."""

    mode: str | None = None  # of a packed weight; a module takes long to say no

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
        # Offsets that are no box stand on the first axis.
        size = (spec.volume, *spec.size[1:]) if spec.custom else spec.size
        self.weight = mx.random.uniform(
            low=-scale, high=scale, shape=(out_channels, *size, per_group)
        )
        if bias:
            self.bias = mx.zeros((out_channels,))
        self.kernel_size, self.offsets = size, spec.custom
        self.stride = spec.stride
        self.padding = spec.padding
        self.dilation = spec.dilation
        self.groups = groups

    def __setattr__(self, name: str, value: object) -> None:
        if name in GEOMETRY:
            # Module would keep tuples among the parameters, where they are slow to
            # find, and walked through at every step of training.
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

    def _run(
        self, find: Callable[..., Relation], x, after, coordinates=None, *options,
        run=contracted, **kernel,
    ):  # fmt: skip
        with launch.scope(self) if launch.observed() else _NO_SCOPE:
            size, dilation = self.kernel_size, self.dilation
            question, relation = None, None
            onto = 0 if coordinates is None else _serial(x, coordinates)
            if onto is not None and isinstance(x, SparseTensor):
                reach, ends = self.offsets or size, (x.key.serial, onto)
                question = find, ends, reach, dilation, options, *kernel.values()
                relation = x.manager.asked(question)
            if relation is None:
                expect_axes(x, self.dims, type(self).__name__)
            weight = self["weight"] if self.mode is None else self.packed_weight()
            w = fitted(weight, self.dims, size)
            if relation is None:
                kernel = {"kernel_size": size, "dilation": dilation, **kernel}
                if self.offsets is not None:
                    kernel |= {"kernel_size": 1, "offsets": self.offsets}
                relation = find(x, coordinates, *options, **kernel)
                if question is not None:
                    searched = find is relations.transposed and not any(options)
                    x.manager.answer(question, relation, searched and not onto)
            if self.mode == INTEGER:
                y = convolved(self, x, w, relation, after)
                return y if run is contracted else iter([(0, y.feats)])
            return run(x, w, relation, self.get("bias"), self.groups, after)


_NO_SCOPE = nullcontext()


def _serial(x: SparseTensor, coordinates: Coordinates) -> int | None:
    """Return the serial of rows that are a tensor of the same manager, else None."""
    if not isinstance(coordinates, SparseTensor) or not isinstance(x, SparseTensor):
        return None
    return coordinates.key.serial if coordinates.manager is x.manager else None


class Conv(Convolution):
    """Applies a sparse convolution: ``y[o] = sum of x[o * stride + offset_k] @ W[k]``.

    Output rows are the sorted unique cells ``floor(in / stride)``, or the input's own
    rows where the stride is 1 and the kernel centred.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
        kernel_size (int or tuple): The size of the kernel, one per axis; left out
            where ``offsets`` are given.
        stride (int or tuple): The step between output cells. Default: ``1``.
        padding (int or tuple, optional): The dense rule of PyTorch; by default the
            kernel is centred.
        dilation (int or tuple): The spacing of the kernel. Default: ``1``.
        groups (int): The number of channel groups. Default: ``1``.
        bias (bool): If ``True`` add a learnable bias. Default: ``True``.
        support (str): ``"cell"``, or ``"reach"`` for every row that an input reaches,
            as in dense convolution. Default: ``"cell"``.
        offsets (tuple, optional): K offsets in place of a box, such as
            ``nn.hyper_cross(3)``; the weight is (C_out, K, 1, 1, C_in / groups) then.
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
    ):
        spec = kernel_spec(self.dims, kernel_size, stride, padding, dilation, offsets)
        super().__init__(in_channels, out_channels, spec, groups, bias)
        self.support = check_support(support)

    def _extra_repr(self) -> str:
        return f"{super()._extra_repr()}, support={self.support}"

    def __call__(
        self,
        x: SparseTensor,
        coordinates: Coordinates = None,
        *,
        epilogue: Epilogue | None = None,
    ) -> SparseTensor:
        """Convolve; with ``coordinates`` on exactly those rows, in their order."""
        return self._run(
            relations.forward,
            x,
            epilogue,
            coordinates,
            self.support,
            stride=self.stride,
            padding=self.padding,
        )


class SubmConv(Convolution):
    """Applies a submanifold convolution: the output has the input's own rows.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
        kernel_size (int or tuple): The size of the kernel, one per axis; left out
            where ``offsets`` are given.
        dilation (int or tuple): The spacing of the kernel. Default: ``1``.
        groups (int): The number of channel groups. Default: ``1``.
        bias (bool): If ``True`` add a learnable bias. Default: ``True``.
        offsets (tuple, optional): As of ``Conv3d``.
    """

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
    ):
        spec = kernel_spec(self.dims, kernel_size, 1, None, dilation, offsets)
        super().__init__(in_channels, out_channels, spec, groups, bias)

    def __call__(
        self, x: SparseTensor, *, epilogue: Epilogue | None = None
    ) -> SparseTensor:
        """Convolve on the rows of ``x``, which keep their order and key."""
        return self._run(relations.submanifold, x, epilogue)

    def blocks(self, x: SparseTensor) -> Iterator[tuple[int, mx.array]]:
        """Yield (first row, features) of blocks of rows under ``ml.memory_limit``.

        Without a limit, and where rows are few, there is one block of all rows.
        """
        return self._run(relations.submanifold, x, None, run=contracted_blocks)


class ConvTranspose(Convolution):
    """Applies a transposed convolution: ``out = in * stride + offset_k``.

    Output rows are the coordinates given to the call, or the finer set that an
    earlier strided convolution consumed. With stride 1 they are the input's own.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
        kernel_size (int or tuple): The size of the kernel. Default: ``2``.
        stride (int or tuple): The step of the input's cells. Default: ``2``.
        padding (int or tuple, optional): The dense rule of PyTorch; by default the
            kernel is centred.
        dilation (int or tuple): The spacing of the kernel. Default: ``1``.
        groups (int): The number of channel groups. Default: ``1``.
        bias (bool): If ``True`` add a learnable bias. Default: ``True``.
    """

    generative = False

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
    ):
        spec = kernel_spec(self.dims, kernel_size, stride, padding, dilation)
        super().__init__(in_channels, out_channels, spec, groups, bias)

    def __call__(
        self,
        x: SparseTensor,
        coordinates: Coordinates = None,
        *,
        epilogue: Epilogue | None = None,
    ) -> SparseTensor:
        """Convolve; with ``coordinates`` on exactly those rows, in their order."""
        return self._run(
            relations.transposed,
            x,
            epilogue,
            coordinates,
            self.generative,
            stride=self.stride,
            padding=self.padding,
        )


class GenerativeConvTranspose(ConvTranspose):
    """Applies a transposed convolution that makes its own rows: all that it reaches.

    Rows are sorted and unique, also where kernels overlap. Arguments are those of the
    transposed convolution.
    """

    generative = True


Conv1d, Conv2d, Conv3d, Conv4d = classes(Conv)
(
    QuantizedConv1d,
    QuantizedConv2d,
    QuantizedConv3d,
    QuantizedConv4d,
) = classes(Conv, "Quantized", QuantizedConvolution)
SubmConv1d, SubmConv2d, SubmConv3d, SubmConv4d = classes(SubmConv)
(
    QuantizedSubmConv1d,
    QuantizedSubmConv2d,
    QuantizedSubmConv3d,
    QuantizedSubmConv4d,
) = classes(SubmConv, "Quantized", QuantizedConvolution)
(
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    ConvTranspose4d,
) = classes(ConvTranspose)
(
    QuantizedConvTranspose1d,
    QuantizedConvTranspose2d,
    QuantizedConvTranspose3d,
    QuantizedConvTranspose4d,
) = classes(ConvTranspose, "Quantized", QuantizedConvolution)
(
    GenerativeConvTranspose1d,
    GenerativeConvTranspose2d,
    GenerativeConvTranspose3d,
    GenerativeConvTranspose4d,
) = classes(GenerativeConvTranspose)
(
    QuantizedGenerativeConvTranspose1d,
    QuantizedGenerativeConvTranspose2d,
    QuantizedGenerativeConvTranspose3d,
    QuantizedGenerativeConvTranspose4d,
) = classes(GenerativeConvTranspose, "Quantized", QuantizedConvolution)

for _name in __all__:
    if f"Quantized{_name}" in __all__:
        globals()[_name].twin = globals()[f"Quantized{_name}"]
