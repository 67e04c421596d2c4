"""spconv.pytorch.functional: sums of tensors with different rows."""

from __future__ import annotations

import torch

from .core import SparseConvTensor, expect
from .ops import Absent, absent

__all__ = ["sparse_add", "sparse_add_hash_based"]


def sparse_add(*tens: SparseConvTensor) -> SparseConvTensor:
    """Return the sum on the rows that any of the tensors has.

    If one tensor has all rows, the result has its rows, in their order, and its stored
    relations, so that an inverse convolution can follow. Otherwise rows are sorted and
    the result has no stored relations.
    """
    first = tens[0]
    for each in tens:
        same = each.spatial_shape == first.spatial_shape
        same = same and each.batch_size == first.batch_size
        same = same and each.features.shape[1] == first.features.shape[1]
        expect(same, "sparse_add takes tensors of one spatial shape, batch and width")
    codes = [_codes(x) for x in tens]
    rows, place = torch.unique(torch.cat(codes), return_inverse=True)
    largest = max(range(len(tens)), key=lambda i: len(codes[i]))
    base, keeps = tens[largest], len(codes[largest]) == len(rows)
    if keeps:
        start = sum(len(each) for each in codes[:largest])
        own = place[start : start + len(rows)]
        place = torch.argsort(own)[place]
        indices = base.indices
    else:
        indices = torch.cat([x.indices for x in tens])
        first_rows = torch.full_like(rows, len(place)).scatter_reduce(
            0, place, torch.arange(len(place), device=place.device), "amin"
        )
        indices = indices[first_rows]
    features = torch.cat([x.features for x in tens])
    place = place.to(features.device)
    sums = features.new_zeros((len(rows), features.shape[1]))
    made = base.replace_feature(sums.index_add(0, place, features))
    made.indices = indices
    made.indice_dict = base.indice_dict if keeps else {}
    return made


def _codes(x: SparseConvTensor) -> torch.Tensor:
    """Return (N,) int64: the place of each row in the dense grid."""
    codes = x.indices[:, 0].long()
    for axis, extent in enumerate(x.spatial_shape):
        codes = codes * extent + x.indices[:, 1 + axis]
    return codes


sparse_add_hash_based = sparse_add

_LAYERS = "call a layer, such as SubMConv3d, which has its kernel map under indice_key"
indice_conv: Absent = absent("functional.indice_conv", _LAYERS)
indice_subm_conv: Absent = absent("functional.indice_subm_conv", _LAYERS)
indice_inverse_conv: Absent = absent("functional.indice_inverse_conv", _LAYERS)
implicit_gemm: Absent = absent("functional.implicit_gemm", _LAYERS)
indice_maxpool: Absent = absent("functional.indice_maxpool", "call SparseMaxPool3d")
indice_maxpool_implicit_gemm: Absent = absent(
    "functional.indice_maxpool_implicit_gemm", "call SparseMaxPool3d"
)
indice_avgpool_implicit_gemm: Absent = absent(
    "functional.indice_avgpool_implicit_gemm", "call SparseAvgPool3d"
)
