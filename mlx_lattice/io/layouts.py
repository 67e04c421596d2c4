"""The layouts in which other libraries store the weight of a convolution, as a table.

A layout is looked up by the library's name, never guessed from a shape: the offsets of
a 3x3x3 kernel can be counted in two orders, and both have 27.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import mlx.core as mx

from ..checks import each_axis
from ..kernel_spec import per_axis
from .errors import CheckpointError


@dataclass(frozen=True)
class Layout:
    """The layout of a convolution's weight in a library.

    Attributes:
        axes: O and I for the channels, k for the kernel's axes, K for all of its
            offsets on one axis, 1 for an axis of one entry.
        transposed: the same for transposed convolutions.
        first_fastest: which flat kernels count their first axis fastest: "always",
            "never", or "odd" for kernels of an odd number of offsets.
        leaf: name of the parameter.
        wrappers: names of modules that only wrap one of PyTorch's.
        unit: whether a kernel of one offset may be (C_in, C_out), without K.
        unit_flat: whether a kernel of one offset, whatever its shape says, is
            multiplied as its memory read as (C_in, C_out): ``x @ w.reshape(C_in,
            C_out)``. With a stride that skips cells it is used as shaped.
        linear: the order of a linear layer's weight: "OI" as PyTorch's, "IO", or
            "either" if the library has layers of both kinds.
        large: ``axes`` of kernels of more than 32 offsets, if they differ.
        depthwise: whether depthwise kernels are (K, C).
        leaves: parameters that have another name than PyTorch's.
    """

    axes: str
    transposed: str
    first_fastest: str = "never"
    leaf: str = "weight"
    wrappers: tuple[str, ...] = ()
    unit: bool = False
    unit_flat: bool = False
    linear: str = "OI"
    large: str = ""
    depthwise: bool = False
    leaves: tuple[tuple[str, str], ...] = ()


LARGE = 32  # offsets, from which on spconv 2.1 has another layout
# The library's name for what it writes itself.
OURS = "mlx_lattice"
_MINKOWSKI = ("bn", "linear", "module")
_TORCHSPARSE = Layout("KIO", "KIO", "odd", "kernel", unit=True)
_PADDLE = (("_mean", "running_mean"), ("_variance", "running_var"))

# As measured with spconv 2.3, MinkowskiEngine 0.5, torchsparse 2.0 and 2.1, ocnn 2.3,
# SparseConvNet and Paddle 3.3; older spconv's and FlexGEMM's, which TRELLIS.2 saves, as
# published. The last is what `mlx-lattice convert` writes.
LIBRARIES = {
    "spconv": Layout("OkI", "OkI", unit_flat=True),
    "spconv1": Layout("kIO", "kIO"),
    "spconv2.0": Layout("kOI", "kOI", unit_flat=True),
    "spconv2.1": Layout("OkI", "OkI", unit_flat=True, large="kOI"),
    "minkowski": Layout(
        "KIO", "KIO", "always", "kernel", _MINKOWSKI, unit=True, depthwise=True
    ),
    "torchsparse": _TORCHSPARSE,
    "torchsparse2.1": _TORCHSPARSE,
    "flexgemm": Layout("OkI", "OkI"),
    "trellis2": Layout("OkI", "OkI"),
    "ocnn": Layout("KIO", "KOI", leaf="weights", wrappers=("linear",)),
    "sparseconvnet": Layout("K1IO", "K1IO", linear="either"),
    "paddle": Layout("kIO", "kIO", linear="IO", leaves=_PADDLE),
    OURS: Layout("OkI", "OkI"),
}


def layout_of(library: str) -> Layout:
    """Return a library's layout, or say which libraries there are."""
    if library not in LIBRARIES:
        raise CheckpointError(
            f"library must be one of {', '.join(LIBRARIES)}; got {library!r}"
        )
    return LIBRARIES[library]


def convert_weight(
    array: mx.array,
    library: str,
    kernel_size: int | tuple[int, ...],
    transposed: bool = False,
    *,
    unit_as_shaped: bool = False,
) -> mx.array:
    """Return a convolution's weight in MLX's layout, (C_out, kernel..., C_in).

    Args:
        array: the weight in the library's layout.
        library: one of ``LIBRARIES``.
        kernel_size: the extent of each spatial axis; an int means 3 equal ones.
        transposed: whether the convolution is a transposed one.
        unit_as_shaped: take a kernel of one offset as its shape says. By default
            spconv's is read as spconv multiplies it, its memory as (C_in, C_out): set
            this if the stride is not 1 (and the convolution not submanifold), or if the
            net's own 1x1 layer keeps (C_out, C_in).

    Raises:
        CheckpointError: no such library, or the shape does not fit its layout.
        ValueError: an extent is not an int of 1 or more.
    """
    layout = layout_of(library)
    if not isinstance(array, mx.array):
        raise TypeError(f"a weight must be an mlx array; got {type(array).__name__}")
    size = each_axis(kernel_size, 3)
    size = per_axis(size, len(size), "kernel_size")
    volume, shape = prod(size), tuple(array.shape)
    axes = layout.transposed if transposed else layout.axes
    axes = layout.large if layout.large and volume > LARGE else axes
    if layout.unit and volume == 1 and array.ndim == 2:
        array = array[None]
    elif layout.depthwise and array.ndim == 2:
        array = array[:, None]
    if not _fits(array, axes, size):
        raise _misfit(shape, library, axes, size)
    names = [name for name, _ in _extents(axes, size)]
    if layout.unit_flat and volume == 1 and not unit_as_shaped:
        c_out, c_in = (array.shape[names.index(name)] for name in "OI")
        return array.reshape(c_in, c_out).T.reshape(c_out, *size, c_in)
    if "1" in names:
        array = array.squeeze(names.index("1"))
        names.remove("1")
    reverse = False
    if "K" in names:
        odd = layout.first_fastest == "odd" and volume % 2
        reverse = layout.first_fastest == "always" or odd
        array = mx.unflatten(array, names.index("K"), size[::-1] if reverse else size)
        names = [
            n for name in names for n in ("k" * len(size) if name == "K" else name)
        ]
    kernel = [at for at, name in enumerate(names) if name == "k"]
    kernel = kernel[::-1] if reverse else kernel
    return array.transpose(names.index("O"), *kernel, names.index("I"))


def convert_linear(
    array: mx.array, library: str, channels: tuple[int, int] | None
) -> mx.array:
    """Return a linear layer's weight as (C_out, C_in)."""
    order = layout_of(library).linear
    if order == "either":
        if channels is None or array.shape[0] == array.shape[1]:
            raise CheckpointError(
                f"{library} keeps (C_in, C_out) in its NetworkInNetwork and (C_out, "
                f"C_in) in a Linear, and {tuple(array.shape)} does not tell which this "
                "is: give w[None, None] of the first, w.T[None, None] of the second"
            )
        order = "IO" if tuple(array.shape) == channels else "OI"
    return array.T if order == "IO" else array


def _extents(axes: str, size: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """Return the name and the extent of each axis of a weight; None for channels."""
    extents = {"k": size, "K": (prod(size),), "1": (1,), "O": (None,), "I": (None,)}
    return [(name, extent) for name in axes for extent in extents[name]]


def _fits(array: mx.array, axes: str, size: tuple[int, ...]) -> bool:
    """Return whether an array has the axes of a layout."""
    extents = [extent for _, extent in _extents(axes, size)]
    return len(extents) == array.ndim and all(
        n is None or n == m for n, m in zip(extents, array.shape, strict=True)
    )


def _misfit(
    shape: tuple[int, ...], library: str, axes: str, size: tuple[int, ...]
) -> CheckpointError:
    """Return the error of a weight that has another shape than its layout."""
    words = {"O": "C_out", "I": "C_in"}
    expected = ", ".join(words.get(a, str(n)) for a, n in _extents(axes, size))
    others = [
        name
        for name, other in LIBRARIES.items()
        if "k" in other.axes != axes and _fits(mx.zeros(shape), other.axes, size)
    ]
    hint = f", which is the layout of {', '.join(others)}" if others else ""
    return CheckpointError(
        f"a {'x'.join(map(str, size))} kernel of {library} has the shape ({expected}); "
        f"got {shape}{hint}"
    )
