"""Attention of rows to a sequence of tokens, in the manner of mlx.nn.

Parameters are named as in TRELLIS and TRELLIS.2, whose weights load by name.
"""

from __future__ import annotations

import mlx.core as mx
from mlx.nn import Module

from .. import ops
from ..checks import heads_of, whole
from ..ops.attended import inside
from ..tensor import SparseTensor, features_of
from .attention import MultiHeadRMSNorm
from .linear import Linear

__all__ = ["CrossAttention"]


class CrossAttention(Module):
    """Applies multi-head attention from rows to the tokens of their batch element.

    Args:
        dims (int): The number of channels.
        num_heads (int): The number of heads, a divisor of the channels.
        context_dims (int, optional): The channels of the tokens. Default: ``dims``.
        bias (bool): If ``True`` queries, keys and values have a bias.
            Default: ``True``.
        qk_rms_norm (bool): If ``True`` normalise queries and keys. Default: ``False``.
    """

    def __init__(
        self,
        dims: int,
        num_heads: int,
        context_dims: int | None = None,
        *,
        bias: bool = True,
        qk_rms_norm: bool = False,
    ):
        super().__init__()
        dims = whole(dims, "dims", 1)
        self.num_heads = heads_of(dims, num_heads)
        self.to_q = Linear(dims, dims, bias=bias)
        tokens = dims if context_dims is None else context_dims
        self.to_kv = Linear(tokens, 2 * dims, bias=bias)
        if qk_rms_norm:
            self.q_rms_norm = MultiHeadRMSNorm(dims // num_heads, num_heads)
            self.k_rms_norm = MultiHeadRMSNorm(dims // num_heads, num_heads)
        self.to_out = Linear(dims, dims)

    def _extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"

    def __call__(
        self,
        x: SparseTensor | mx.array,
        context: SparseTensor | mx.array,
        lengths: mx.array | None = None,
    ) -> SparseTensor | mx.array:
        """Attend; rows and key of a tensor are kept.

        Args:
            x: a tensor, or an array (B, L, dims) of sequences.
            context: the tokens: (B, M, context_dims); a tensor, whose batch elements
                are the sequences; or (T, context_dims), one sequence after another.
            lengths: (B,) integers: the number of tokens of each sequence; by default M.

        Raises:
            ValueError: shapes do not fit.
        """
        if isinstance(context, SparseTensor):
            if lengths is not None:
                raise ValueError("a tensor of tokens has its own lengths; pass none")
            context, lengths = ops.to_sequences(context)
        elif context.ndim == 2 and lengths is not None:
            context, lengths = ops.to_sequences(context, lengths)
        if context.ndim != 3:
            raise ValueError(
                f"context must have shape (B, M, C); got {tuple(context.shape)}. Rows "
                "(T, C) of all sequences need their lengths"
            )
        rows = features_of(x)
        q = self.to_q(rows)
        width = q.shape[-1] // self.num_heads
        q = q.reshape(*q.shape[:-1], self.num_heads, width)
        both = self.to_kv(context)
        both = both.reshape(*both.shape[:2], 2, self.num_heads, width)
        k, v = (a.squeeze(2) for a in mx.split(both, 2, axis=2))
        if "q_rms_norm" in self:
            q, k = self.q_rms_norm(q), self.k_rms_norm(k)
        like = x if isinstance(x, SparseTensor) else None
        with inside(self):
            y = ops.cross_attention(q, k, v, like, lengths=lengths)
        y = self.to_out(y.reshape(rows.shape))
        return y if like is None else x.replace(y)
