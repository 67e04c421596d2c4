"""spconv.pytorch.ops: sizes of outputs. Its kernels have no counterpart here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from ..core import AlgoHint as AlgoHint
from ..core import ConvAlgo as ConvAlgo


def get_conv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return the extents of a convolution's output, as of PyTorch's."""
    sizes = zip(input_size, kernel_size, stride, padding, dilation, strict=True)
    return [
        1 if k == -1 else (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in sizes
    ]


def get_deconv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> list[int]:
    """Return the extents of a transposed convolution's output, without dilation."""
    if -1 in kernel_size:
        raise ValueError("a transposed convolution has no kernel of the whole extent")
    sizes = zip(input_size, kernel_size, stride, padding, output_padding, strict=True)
    return [(n - 1) * s - 2 * p + k + more for n, k, s, p, more in sizes]


Absent = Callable[..., NoReturn]


def absent(name: str, instead: str) -> Absent:
    """Return a function that raises, for a name that is not provided."""

    def function(*_: object, **__: object):
        raise NotImplementedError(f"spconv.pytorch.{name} is not provided; {instead}")

    function.__name__ = name.rpartition(".")[2]
    function.__doc__ = f"Raise NotImplementedError: {instead}."
    return function


_LAYERS = "call a layer, such as SubMConv3d, which has its kernel map under indice_key"
get_indice_pairs: Absent = absent("ops.get_indice_pairs", _LAYERS)
get_indice_pairs_implicit_gemm: Absent = absent(
    "ops.get_indice_pairs_implicit_gemm", _LAYERS
)
indice_conv: Absent = absent("ops.indice_conv", _LAYERS)
indice_conv_backward: Absent = absent("ops.indice_conv_backward", _LAYERS)
implicit_gemm: Absent = absent("ops.implicit_gemm", _LAYERS)
implicit_gemm_backward: Absent = absent("ops.implicit_gemm_backward", _LAYERS)
indice_maxpool: Absent = absent("ops.indice_maxpool", "call SparseMaxPool3d")
