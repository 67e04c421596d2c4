"""The offsets of a layer's kernel: a box by its size, or any set of them."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernel_spec import IntOrTuple, KernelSpec, per_axis

__all__ = ["hyper_cross"]

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
