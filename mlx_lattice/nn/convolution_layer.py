"""What all convolutions share: parameters, and a call over the relation they ask for.

The weight is (C_out, kernel..., C_in / groups), MLX's own layout. Each call contracts
with the current parameter where it stands, so an update can never be missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
from mlx.nn import Module

from .. import relations_ahead
from ..axes import Family, expect_axes
from ..checks import flag, whole
from ..kernel_spec import KernelSpec
from ..ops import relations
from ..ops.conv import contracted, fitted
from ..ops.relations import Coordinates
from ..quantized import QuantizedWeight
from ..relation import Relation
from ..routes import launch
from ..tensor import SparseTensor
from .quantized import Packable, QuantizedConvolution

GEOMETRY = frozenset(("kernel_size", "stride", "padding", "dilation", "offsets"))


class Convolution(Family, Packable, Module):
    """A weight and a kernel, and the call of every kind of convolution."""

    mode: str | None = None  # of a packed weight; a module takes long to say no

    def __init_subclass__(
        cls, twin: type[QuantizedConvolution] | None = None, **family
    ):
        super().__init_subclass__(**family)
        if twin is not None:
            cls.twin = twin

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

    def _kernel(self) -> mx.array | QuantizedWeight:
        return self["weight"]

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
        """Convolve over the relation that ``find`` returns; see ``ops.relations``."""
        given = find, x, after, coordinates, options, kernel
        if launch.observed():  # who else asks for the layer?
            with launch.scope(self):
                return self._convolved(run, *given)
        return self._convolved(run, *given)

    def _convolved(self, run, find, x, after, coordinates, options, kernel):
        size, dilation = self.kernel_size, self.dilation
        question, relation = None, None
        onto = 0 if coordinates is None else _serial(x, coordinates)
        if onto is not None and isinstance(x, SparseTensor):
            ends = x.key.serial, onto
            reach = self.offsets or size
            question = find, ends, reach, dilation, options, *kernel.values()
            relation = x.manager.asked(question)
        if relation is None:
            expect_axes(x, self.dims, type(self).__name__)
        w = fitted(self._kernel(), self.dims, size)
        if relation is None:
            kernel = {"kernel_size": size, "dilation": dilation, **kernel}
            if self.offsets is not None:
                kernel |= {"kernel_size": 1, "offsets": self.offsets}
            relations_ahead.begin(self, x)
            relation = find(x, coordinates, *options, **kernel)
            if question is not None:
                searched = find is relations.transposed and not any(options)
                x.manager.answer(question, relation, searched and not onto)
        return self._contracted(run, x, w, relation, after)

    def _contracted(self, run, x, w, relation: Relation, after):
        return run(x, w, relation, self.get("bias"), self.groups, after)


def _serial(x: SparseTensor, coordinates: Coordinates) -> int | None:
    """Return the serial of rows that are a tensor of the same manager, else None."""
    if not isinstance(coordinates, SparseTensor) or not isinstance(x, SparseTensor):
        return None
    return coordinates.key.serial if coordinates.manager is x.manager else None
