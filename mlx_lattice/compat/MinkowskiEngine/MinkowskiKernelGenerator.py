"""Shapes of kernels: boxes, crosses, a shape of its own for each axis, offsets.

Offsets of a box are counted with the first axis fastest, and so are weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch

from .MinkowskiCommon import (
    Absent,
    RegionType,
    StrideType,
    absent,
    convert_to_int_list,
    expect,
)

__all__ = ["KernelGenerator", "convert_region_type", "get_kernel_volume"]

Offsets = list[tuple[int, ...]]


def _positions(size: int, step: int) -> range:
    """Return places along an axis: centred for an odd size, from 0 for an even one."""
    first = -(size // 2) * step if size % 2 else 0
    return range(first, first + size * step, step)


def _box(sizes: Sequence[int], steps: Sequence[int]) -> Offsets:
    axes = [_positions(*each) for each in zip(sizes, steps, strict=True)]
    return [each[::-1] for each in product(*reversed(axes))]


def _on_axis(axis: int, places: Sequence[int], dims: int) -> Offsets:
    return [tuple(p if a == axis else 0 for a in range(dims)) for p in places]


def _cross(sizes: Sequence[int], steps: Sequence[int]) -> Offsets:
    """Return the centre, then for each axis the places above 0 and those below."""
    found = [(0,) * len(sizes)]
    for axis, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        half = size // 2
        places = [p * step for p in (*range(1, half + 1), *range(-half, 0))]
        found += _on_axis(axis, places, len(sizes))
    return found


def _hybrid(sizes: Sequence[int], steps: Sequence[int], kinds) -> Offsets:
    """Return a box over the axes of one kind, then places on the others, as in 0.4."""
    dims = len(sizes)
    found = [(0,) * dims]
    for kind in (RegionType.HYPER_CUBE, RegionType.HYPER_CROSS):
        for axis in (a for a in range(dims) if kinds[a] is kind):
            centre = (sizes[axis] - 1) // 2
            places = [(j - centre) * steps[axis] for j in range(sizes[axis])]
            places = [p for p in places if p]
            if kind is RegionType.HYPER_CROSS:
                found += _on_axis(axis, places, dims)
            else:
                found += [(*o[:axis], p, *o[axis + 1 :]) for o in found for p in places]
    return found


class KernelGenerator:
    """The shape of a kernel, its stride and its dilation.

    Args:
        kernel_size: an int, or one for each axis.
        stride: of the layer.
        dilation: spacing of offsets.
        is_transpose: without an effect.
        region_type: shape of the kernel.
        region_offsets: (K, D) int32 for ``RegionType.CUSTOM``, in steps of the input's
            tensor stride.
        expand_coordinates: whether the layer makes every row that it reaches.
        axis_types: a shape for each axis, for ``RegionType.HYBRID`` of 0.4.
        dimension: spatial axes.
        region_offset: ``region_offsets`` in 0.4.

    Raises:
        AssertionError: the dimension is missing, or sizes do not fit the shape.
    """

    def __init__(
        self,
        kernel_size: StrideType = -1,
        stride: StrideType = 1,
        dilation: StrideType = 1,
        is_transpose: bool = False,
        region_type: RegionType = RegionType.HYPER_CUBE,
        region_offsets: torch.Tensor | None = None,
        expand_coordinates: bool = False,
        axis_types: Sequence[RegionType] | None = None,
        dimension: int = -1,
        region_offset: torch.Tensor | None = None,
    ):
        expect(
            dimension is not None and dimension > 0,
            f"pass dimension=, the number of spatial axes; got {dimension}",
        )
        expect(
            isinstance(region_type, RegionType),
            f"region_type must be a RegionType; got {region_type!r}",
        )
        self.kernel_size: list[int] = convert_to_int_list(kernel_size, dimension)
        self.kernel_stride: list[int] = convert_to_int_list(stride, dimension)
        self.kernel_dilation: list[int] = convert_to_int_list(dilation, dimension)
        self.region_type: RegionType = region_type
        self.axis_types: Sequence[RegionType] | None = axis_types
        given = region_offset if region_offsets is None else region_offsets
        self.region_offsets: torch.Tensor = (
            torch.IntTensor() if given is None else given
        )
        self.dimension: int = dimension
        self.cache: dict[Any, Any] = {}
        self.offsets: tuple[tuple[int, ...], ...] | None = self._offsets()
        self.kernel_volume: int = self._volume()
        self.requires_strided_coordinates: bool = set(self.kernel_stride) == {1}
        self.expand_coordinates = expand_coordinates

    def _volume(self) -> int:
        if self.offsets is None:
            return prod(self.kernel_size)
        return len(self.offsets)

    def _offsets(self) -> tuple[tuple[int, ...], ...] | None:
        """Return offsets in steps of the lattice, or None for a box."""
        sizes, steps, kind = self.kernel_size, self.kernel_dilation, self.region_type
        if kind is RegionType.CUSTOM:
            shape = tuple(self.region_offsets.shape)
            expect(
                len(shape) == 2 and shape[0] > 0 and shape[1] == self.dimension,
                f"region_offsets must be (K, {self.dimension}) for RegionType.CUSTOM; "
                f"got {shape}",
            )
            return tuple(map(tuple, self.region_offsets.tolist()))
        expect(
            min(sizes) > 0,
            f"kernel_size must be positive; got {sizes}. Pass kernel_size=, or a "
            "kernel_generator",
        )
        if kind is RegionType.HYPER_CUBE:
            return None
        if kind is RegionType.HYBRID:
            expect(
                self.axis_types is not None and len(self.axis_types) == self.dimension,
                f"RegionType.HYBRID needs {self.dimension} axis_types; got "
                f"{self.axis_types}",
            )
            return tuple(_hybrid(sizes, steps, self.axis_types))
        expect(
            all(size % 2 for size in sizes),
            f"RegionType.HYPER_CROSS needs odd sizes; got {sizes}",
        )
        return tuple(_cross(sizes, steps))

    def listed(self) -> Offsets:
        """Return all offsets in steps of the lattice, in the order of weights."""
        if self.offsets is None:
            return _box(self.kernel_size, self.kernel_dilation)
        return list(self.offsets)

    def get_kernel(
        self, tensor_stride: Sequence[int], is_transpose: bool
    ) -> tuple[RegionType, torch.Tensor, int]:
        """Return the shape, its offsets if they are listed, and the volume."""
        return self.region_type, self.region_offsets, self.kernel_volume

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(kernel_size={self.kernel_size}, "
            f"kernel_stride={self.kernel_stride}, "
            f"kernel_dilation={self.kernel_dilation}, region_type={self.region_type}, "
            f"expand_coordinates={self.expand_coordinates}, "
            f"dimension={self.dimension})"
        )


def get_kernel_volume(
    region_type: RegionType,
    kernel_size: StrideType,
    region_offset: torch.Tensor | None,
    axis_types: Sequence[RegionType] | None,
    dimension: int,
) -> int:
    """Return the number of offsets of a kernel."""
    kind = {"region_type": region_type, "axis_types": axis_types}
    kind |= {"region_offsets": region_offset, "dimension": dimension}
    return KernelGenerator(kernel_size, **kind).kernel_volume


convert_region_type: Absent = absent(
    "convert_region_type", "call KernelGenerator(...).listed() for offsets"
)
