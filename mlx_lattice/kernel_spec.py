"""KernelSpec: the offsets of a convolution kernel, and its stride."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from operator import index
from typing import Any

from .checks import INT32_LIMIT, each_axis, spatial_axes

IntOrTuple = int | Sequence[int]
MOST_LISTED = 1 << 20  # offsets: one row of their table takes 4 MB


def per_axis(
    value: IntOrTuple, dims: int, name: str, least: int = 1
) -> tuple[int, ...]:
    """Return ``value`` as one integer per spatial axis, each at least ``least``."""
    if type(value) is int and value >= least:
        return (value,) * dims
    try:
        axes = tuple(map(index, each_axis(value, dims)))
    except TypeError:
        axes = ()
    if len(axes) != dims:
        raise ValueError(
            f"{name} must be an int or {dims} ints, one per spatial axis; got {value!r}"
        )
    if min(axes) < least:
        raise ValueError(f"{name} must be at least {least} on every axis; got {axes}")
    return axes


def check_support(support: str) -> str:
    """Return ``support``; raise unless it is "cell" or "reach"."""
    if support not in ("cell", "reach"):
        raise ValueError(f'support must be "cell" or "reach"; got {support!r}')
    return support


def cells_of(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the extents of the grid of cells that a dense grid is cut into."""
    return tuple([-(-n // s) for n, s in zip(shape, stride, strict=True)])


@dataclass(frozen=True)
class KernelSpec:
    """Describe the geometry of one kernel, with one value per spatial axis.

    Axis positions are ``j = 0 .. size - 1``, with the last axis fastest. Without
    ``padding`` the kernel is centred: ``offset = (j - size // 2) * dilation`` on axes
    of odd size and ``j * dilation`` on axes of even size (the rule of MinkowskiEngine
    and WarpConvNet). With ``padding`` ``offset = j * dilation - padding`` (the rule of
    dense convolution in PyTorch).

    Examples:
        >>> spec = ml.KernelSpec.of(2, kernel_size=3, stride=2)
        >>> spec.size, spec.stride, spec.volume
        ((3, 3), (2, 2), 9)
    """

    size: tuple[int, ...]  # extent of the kernel box; all ones for ``custom``
    stride: tuple[int, ...]  # lattice step between input and output
    padding: tuple[int, ...] | None  # dense padding, or None for the centred rule
    dilation: tuple[int, ...]  # spacing of the box's positions
    custom: tuple[tuple[int, ...], ...] | None = None  # offsets instead of a box

    @classmethod
    def of(
        cls,
        dims: int,
        *,
        kernel_size: IntOrTuple = 3,
        stride: IntOrTuple = 1,
        padding: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        offsets: Sequence[Sequence[int]] | None = None,
    ) -> KernelSpec:
        """Check the arguments of a convolution and return their spec.

        Args:
            dims: number of spatial axes, 1 to 4.
            kernel_size: int or one per axis; not used where ``offsets`` is given.
            stride: int or one per axis.
            padding: int or one per axis, or None for the centred rule.
            dilation: int or one per axis.
            offsets: distinct integer offsets that replace the box.

        Raises:
            ValueError: a value does not fit, or two offsets are equal.
        """
        dims = spatial_axes(dims)
        stride = per_axis(stride, dims, "stride")
        if offsets is not None:
            if padding is not None:
                raise ValueError(
                    "offsets and padding were both given: explicit offsets already say "
                    "where the kernel reaches, so leave padding out"
                )
            custom = explicit_offsets(offsets, dims)
            if any(abs(v) >= INT32_LIMIT for offset in custom for v in offset):
                raise ValueError(f"offsets must be within int32; got {offsets!r}")
            if len(set(custom)) < len(custom):
                twice = next(each for each in custom if custom.count(each) > 1)
                raise ValueError(f"offsets must be distinct; {twice} comes twice")
            ones = (1,) * dims
            return _spec(ones, stride, None, ones, custom)
        if padding is not None:
            padding = per_axis(padding, dims, "padding", least=0)
        size = per_axis(kernel_size, dims, "kernel_size")
        dilation = per_axis(dilation, dims, "dilation")
        steps = [d * n for d, n in zip(dilation, size, strict=True)]
        if max(*steps, *stride, *(padding or ())) >= INT32_LIMIT:
            raise ValueError(
                f"a kernel must reach over less than 2^31 cells; got kernel_size {size}"
                f", dilation {dilation}, stride {stride} and padding {padding}"
            )
        return _spec(size, stride, padding, dilation)

    @cached_property
    def dims(self) -> int:
        """Number of spatial axes."""
        return len(self.stride)

    @cached_property
    def volume(self) -> int:
        """Number of offsets, K."""
        return len(self.custom) if self.custom else prod(self.size)

    @cached_property
    def origin(self) -> tuple[int, ...]:
        """How far the box starts below zero on each axis: the padding that applies."""
        return self._centre if self.padding is None else self.padding

    @cached_property
    def is_centred(self) -> bool:
        """Whether offsets are those of the centred rule, or explicit."""
        return self.custom is not None or self.origin == self._centre

    @property
    def _centre(self) -> tuple[int, ...]:
        pairs = zip(self.size, self.dilation, strict=True)
        return tuple((n // 2) * d if n % 2 else 0 for n, d in pairs)

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """The K offsets in kernel order; raises for more than ``MOST_LISTED``."""
        if self.custom is not None:
            return self.custom
        if self.volume > MOST_LISTED:
            raise ValueError(
                f"a kernel of {'x'.join(map(str, self.size))} has {self.volume:,} "
                f"offsets, and no more than {MOST_LISTED:,} are listed. A sum or "
                "mean of cells lists none: kernel_size equal to stride, with padding=0"
            )
        axes = [
            [j * d - p for j in range(n)]
            for n, d, p in zip(self.size, self.dilation, self.origin, strict=True)
        ]
        return tuple(itertools.product(*axes))

    @cached_property
    def is_pointwise(self) -> bool:
        """Whether the kernel is the single zero offset, with stride 1."""
        zero = (0,) * self.dims
        return set(self.stride) == {1} and self.offsets == (zero,)

    @cached_property
    def fills_cell(self) -> bool:
        """Whether the offsets are the places of a cell, which do not overlap."""
        if self.volume != prod(self.stride):  # first: a cell may have 2^31 places
            return False
        if self.custom is None:  # by axes: a box may have 10^9 offsets
            dense = all(
                n == 1 or d == 1 for n, d in zip(self.size, self.dilation, strict=True)
            )
            return self.size == self.stride and not any(self.origin) and dense
        return set(self.offsets) == set(itertools.product(*map(range, self.stride)))

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether offset K - 1 - k is the negative of offset k for every k."""
        turned = (tuple(-v for v in offset) for offset in reversed(self.offsets))
        return tuple(map(tuple, self.offsets)) == tuple(turned)

    def _axes(self, spatial_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Return each axis's extent, kernel size, stride, origin and dilation."""
        kernel = self.size, self.stride, self.origin, self.dilation
        return zip(spatial_shape, *kernel, strict=True)

    def output_shape(
        self, spatial_shape: Sequence[int], support: str
    ) -> tuple[int, ...]:
        """Return the extents of a convolution's dense output grid."""
        if support == "cell" or self.custom is not None:
            return cells_of(spatial_shape, self.stride)
        for axis, (n, k, _, p, d) in enumerate(self._axes(spatial_shape)):
            reach = d * (k - 1) + 1
            if n and n + 2 * p < reach:
                raise ValueError(
                    f"the kernel reaches over {reach} cells on axis {axis}, and the "
                    f"grid has {n} there, or {n + 2 * p} with its padding: no output "
                    "is left. Give a larger spatial_shape or padding"
                )
        return tuple(
            max(0, (n + 2 * p - d * (k - 1) - 1) // s + 1)
            for n, k, s, p, d in self._axes(spatial_shape)
        )

    def transposed_output_shape(self, spatial_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the extents of a transposed convolution's dense output grid."""
        if self.custom is not None:
            return tuple(n * s for n, s in zip(spatial_shape, self.stride, strict=True))
        return tuple(
            max(0, (n - 1) * s - 2 * p + d * (k - 1) + 1) if n else 0
            for n, k, s, p, d in self._axes(spatial_shape)
        )

    def __str__(self) -> str:
        parts = [
            f"{self.volume} offsets" if self.custom else "x".join(map(str, self.size))
        ]
        axes = self.stride, self.padding, self.dilation
        for name, value in zip(("stride", "padding", "dilation"), axes, strict=True):
            if value is not None and (name == "padding" or set(value) != {1}):
                same = len(set(value)) == 1
                parts.append(f"{name} {value[0] if same else value}")
        return ", ".join(parts)


def explicit_offsets(offsets: Any, dims: int) -> tuple[tuple[int, ...], ...]:
    """Return explicit offsets as tuples of ints."""
    given = offsets
    if hasattr(offsets, "tolist"):  # an array of NumPy, or of MLX
        offsets = offsets.tolist()
    try:
        custom = tuple(tuple(index(v) for v in offset) for offset in offsets)
    except TypeError:
        custom = ()
    if not custom or any(len(offset) != dims for offset in custom):
        raise ValueError(
            f"offsets must be a non-empty list of {dims}-tuples of ints; got {given!r}"
        )
    return custom


@lru_cache(maxsize=1024)
def _spec(size, stride, padding, dilation, custom=None) -> KernelSpec:
    """Return one spec for equal arguments: every call of a layer asks for it."""
    return KernelSpec(size, stride, padding, dilation, custom)
