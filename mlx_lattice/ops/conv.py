"""Sparse convolutions as functions of tensors and weights, in 1 to 4 dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import mlx.core as mx

from .. import contraction, memory
from ..axes import functions
from ..checks import array_of, arrays_of
from ..epilogue import Moments
from ..kernel_spec import IntOrTuple, explicit_offsets, per_axis
from ..problem import weight_axes
from ..quantized import IntegerWeight, QuantizedWeight
from ..relation import Relation
from ..settings import boundary
from ..tensor import SparseTensor
from . import relations
from .relations import Coordinates

__all__ = [
    "conv1d", "conv2d", "conv3d", "conv4d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "conv_transpose4d", "generative_conv_transpose1d",
    "generative_conv_transpose2d", "generative_conv_transpose3d",
    "generative_conv_transpose4d", "sparse_conv", "subm_conv1d", "subm_conv2d",
    "subm_conv3d", "subm_conv4d",
]  # fmt: skip


def sparse_conv(
    feats: mx.array,
    weight: mx.array | QuantizedWeight,
    relation: Relation,
    bias: mx.array | None = None,
    *,
    groups: int = 1,
) -> mx.array:
    """Contract features with a weight over any relation.

    Args:
        feats: (N_in, C_in).
        weight: (K, C_in / groups, C_out), (C_out, spatial..., C_in / groups), or
            packed.
        relation: the edges.
        bias: (C_out,), added to every output row.
        groups: channel groups.

    Returns:
        (N_out, C_out): ``y[o] = sum over edges (i, o, k) of x[i] @ W[k] + bias``.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes do not fit.
    """
    feats, bias = arrays_of(feats=feats, bias=bias)
    if not isinstance(weight, QuantizedWeight | IntegerWeight):
        weight = array_of(weight, "weight")
    return contraction.conv(feats, weight, relation, groups=groups, bias=bias)


def fitting(
    weight: mx.array | QuantizedWeight, dims: int, kernel_size, offsets=None
) -> mx.array | QuantizedWeight:
    """Return the weight after checking it against the kernel's size.

    In MLX's layout it has at least four axes then: three are (K, C_in, C_out).
    """
    if offsets is not None:
        volume, size = len(explicit_offsets(offsets, dims)), None
    else:
        size = per_axis(kernel_size, dims, "kernel_size")
        volume = prod(size)
    packed = isinstance(weight, QuantizedWeight | IntegerWeight)
    weight = weight if packed else array_of(weight, "weight")
    if packed:
        spatial = weight.kernel or None
    else:
        # A 1D weight has three axes in both layouts: there it is always MLX's own.
        spatial = tuple(weight.shape[1:-1]) if weight.ndim == dims + 2 else None
    if None not in (spatial, size) and spatial != size:
        raise ValueError(
            f"the weight's spatial shape {spatial} is not kernel_size {size}; expected "
            "(C_out, spatial..., C_in / groups)"
        )
    if len(weight.shape) < 3:
        raise ValueError(
            "a weight must have shape (C_out, spatial..., C_in / groups) or "
            f"(K, C_in / groups, C_out); got {tuple(weight.shape)}"
        )
    if dims == 1 and not packed:
        weight = mx.expand_dims(weight, 2)
    _, given, _, _ = weight_axes(weight.shape)
    if given != volume:
        raise ValueError(
            f"the weight has {given} offsets, the kernel {volume}; expected shape "
            f"(C_out, spatial..., C_in / groups) or ({volume}, C_in / groups, C_out), "
            f"got {tuple(weight.shape)}"
        )
    return weight


def fitted(
    weight: mx.array | QuantizedWeight, dims: int, kernel_size: tuple[int, ...]
) -> mx.array | QuantizedWeight:
    """Return the same of a layer's weight; ``kernel_size`` is a checked KernelSpec's.

    Layers take MLX's layout alone: by its first axis they know their channels.
    """
    kind, given = type(weight), None
    if kind is mx.array:
        given = weight.shape[1:-1]
        if len(given) != dims:
            raise ValueError(
                "a layer's weight has shape (C_out, spatial..., C_in / groups), "
                f"{dims + 2} axes; got {tuple(weight.shape)}. io.convert_weight takes "
                "those of other libraries"
            )
    elif kind is QuantizedWeight:  # of as many offsets: it checked that
        given = weight.kernel
    if dims > 1 and given == kernel_size:
        return weight
    return fitting(weight, dims, kernel_size)


def contracted(
    x: SparseTensor, w, relation: Relation, bias, groups, epilogue=None
) -> SparseTensor:
    """Contract the features of ``x`` with a fitting weight over its relation."""
    if memory.active() is not None:
        after = None if type(epilogue) is Moments else epilogue
        layer = memory.Layer(w, bias, groups, after)
        feats = memory.conv(x.feats, layer, relation)
        boundary(feats)
    else:
        feats = contraction.conv(
            x.feats, w, relation, groups=groups, bias=bias, epilogue=epilogue
        )
    key, coords = relation.out_key, relation.out_coords
    return SparseTensor.trusted(x.manager, key, coords, feats)


def contracted_blocks(
    x: SparseTensor, w, relation: Relation, bias, groups, epilogue=None
) -> Iterator[tuple[int, mx.array]]:
    """Yield (first row, features) of blocks of what ``contracted`` returns."""
    layer = memory.Layer(w, bias, groups, epilogue)
    return memory.conv_blocks(x.feats, layer, relation)


def conv(
    x: SparseTensor,
    weight: mx.array | QuantizedWeight,
    bias: mx.array | None = None,
    *,
    kernel_size: IntOrTuple = 3,
    stride: IntOrTuple = 1,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    offsets: Sequence[Sequence[int]] | None = None,
    groups: int = 1,
    support: str = "cell",
    coordinates: Coordinates = None,
) -> SparseTensor:
    """Convolve: ``y[o] = sum of x[o * stride + offset_k] @ W[k]``.

    Args:
        x: input.
        weight: (C_out, spatial..., C_in / groups) or, in 2 to 4 dimensions, (K,
            C_in / groups, C_out); or a packed one.
        bias: (C_out,).
        kernel_size, stride, padding, dilation: int or one per axis; ``padding=None``
            centres the kernel, an int is the dense rule of PyTorch.
        offsets: explicit kernel offsets instead of ``kernel_size``.
        groups: channel groups.
        support: "cell" keeps ``floor(in / stride)``; "reach" every row that an input
            reaches, as dense convolution does.
        coordinates: compute exactly these output rows instead, in their order: a
            tensor, a key or (N, 1 + D) int32 rows. Where the manager is that of ``x``
            they have the stride that the step makes.

    Returns:
        Features on the output rows; rows that the library makes are sorted.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes, dimensions or coordinates do not fit.
    """
    w, (bias,) = fitting(weight, x.dims, kernel_size, offsets), arrays_of(bias=bias)
    relation = relations.forward(
        x,
        coordinates,
        support,
        kernel_size=kernel_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
        offsets=offsets,
    )
    return contracted(x, w, relation, bias, groups)


def subm_conv(
    x: SparseTensor,
    weight: mx.array | QuantizedWeight,
    bias: mx.array | None = None,
    *,
    kernel_size: IntOrTuple = 3,
    dilation: IntOrTuple = 1,
    offsets: Sequence[Sequence[int]] | None = None,
    groups: int = 1,
) -> SparseTensor:
    """Convolve on the input's own rows, which keep their order and key.

    Arguments and errors are those of ``conv3d``.
    """
    w, (bias,) = fitting(weight, x.dims, kernel_size, offsets), arrays_of(bias=bias)
    relation = relations.submanifold(
        x, None, kernel_size=kernel_size, dilation=dilation, offsets=offsets
    )
    return contracted(x, w, relation, bias, groups)


def conv_transpose(
    x: SparseTensor,
    weight: mx.array | QuantizedWeight,
    bias: mx.array | None = None,
    *,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple = 2,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    groups: int = 1,
    coordinates: Coordinates = None,
    generative: bool = False,
) -> SparseTensor:
    """Convolve with the roles swapped: ``out = in * stride + offset_k``.

    Output rows are ``coordinates``, or the finer set that an earlier strided
    convolution consumed; with stride 1 they are the input's own. Arguments and errors
    are those of ``conv3d``.
    """
    w, (bias,) = fitting(weight, x.dims, kernel_size), arrays_of(bias=bias)
    kernel = dict(
        kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
    )
    relation = relations.transposed(x, coordinates, generative, **kernel)
    return contracted(x, w, relation, bias, groups)


conv1d, conv2d, conv3d, conv4d = functions(conv)
subm_conv1d, subm_conv2d, subm_conv3d, subm_conv4d = functions(subm_conv)
conv_transpose1d, conv_transpose2d, conv_transpose3d, conv_transpose4d = functions(
    conv_transpose, generative=False
)
(
    generative_conv_transpose1d,
    generative_conv_transpose2d,
    generative_conv_transpose3d,
    generative_conv_transpose4d,
) = functions(
    conv_transpose,
    "generative_conv_transpose",
    """Transposed convolution that makes its own rows: all that the kernel reaches.

    They are sorted and unique. With ``coordinates`` it computes exactly those rows, in
    their order. Arguments and errors are those of ``conv3d``.
    """,
    generative=True,
)
