"""Attention among rows and to tokens, and transformer blocks, in the manner of mlx.nn.

Parameters are named as in TRELLIS, TRELLIS.2 and Point Transformer V3, whose weights
load by name.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.nn import Module

from .. import ops
from ..checks import flag, heads_of, one_of, real, whole
from ..geometry.lattice import CURVES
from ..kernel_spec import IntOrTuple
from ..ops.attention import angles, check_rotary, turned_head, turned_heads
from ..ops.attention_calls import biases, inside
from ..tensor import Features, SparseTensor, expect_tensor, features_of
from .fused import in_order
from .layers import GELU, Parameters
from .linear import Linear
from .normalization import LayerNorm

__all__ = [
    "AdaptiveLayerNorm", "CrossAttention", "ModulatedTransformerBlock",
    "RelativePositions", "SparseAttention", "SparseTransformerBlock",
]  # fmt: skip


class MultiHeadRMSNorm(Parameters, Module):
    """Scales each head of (N, heads, D) to root mean square 1, then by ``gamma``."""

    def __init__(self, dims: int, num_heads: int):
        super().__init__()
        self.gamma: mx.array = mx.ones((num_heads, dims))

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise in float32."""
        rows = x.reshape(-1, *x.shape[-2:]) if x.ndim != 3 else x
        return turned_head(rows, self.gamma).reshape(x.shape)


class SparseAttention(Module):
    """Apply multi-head self-attention among the rows of a batch element.

    Without ``window`` and ``patch`` every row attends to all rows of its batch element.

    Args:
        dims (int): The number of channels.
        num_heads (int): The number of heads, a divisor of the channels.
        window (int or tuple, optional): Attend within windows of this extent.
        shift (int or tuple): The shift of the windows in cells, or of the patches in
            rows. Default: ``0``.
        patch (int, optional): Attend within patches of this many rows along a curve.
        order (str): The curve, as for ``ops.curve_order``. Default: ``"hilbert"``.
        bias (bool): If ``True`` queries, keys and values have a bias.
            Default: ``True``.
        rope (bool): If ``True`` rotate queries and keys by their coordinates.
            Default: ``False``.
        rope_base (float): See ``ops.rotary``. Default: ``10000``.
        rope_frequency (float): See ``ops.rotary``. Default: ``1``.
        qk_rms_norm (bool): If ``True`` normalise queries and keys. Default: ``False``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> nn.SparseAttention(8, num_heads=2)(x).shape  # every row sees every row
        (64, 8)
        >>> nn.SparseAttention(8, 2, window=2)(x).shape  # in windows of 2 x 2 x 2 cells
        (64, 8)
    """

    def __init__(
        self,
        dims: int,
        num_heads: int,
        *,
        window: IntOrTuple | None = None,
        shift: IntOrTuple = 0,
        patch: int | None = None,
        order: str = "hilbert",
        bias: bool = True,
        rope: bool = False,
        rope_base: float = 10000.0,
        rope_frequency: float = 1.0,
        qk_rms_norm: bool = False,
    ):
        super().__init__()
        dims = whole(dims, "dims", 1)
        self.num_heads: int = heads_of(dims, num_heads)
        if window is not None and patch is not None:
            raise ValueError("pass window or patch, not both")
        one_of(order, CURVES, "order")
        if window is None and patch is None and shift != 0:
            raise ValueError(f"shift = {shift} needs a window or a patch to shift")
        self.rope: bool = flag(rope, "rope")
        self.rope_base: float = real(rope_base, "rope_base")
        self.rope_frequency: float = real(rope_frequency, "rope_frequency")
        self.order: str = order
        self.patch: int | None = patch
        self.window: IntOrTuple | None = window
        self.shift: IntOrTuple = shift
        self.to_qkv: Linear = Linear(dims, 3 * dims, bias=bias)
        if flag(qk_rms_norm, "qk_rms_norm"):
            self.q_rms_norm: MultiHeadRMSNorm = MultiHeadRMSNorm(
                dims // num_heads, num_heads
            )
            self.k_rms_norm: MultiHeadRMSNorm = MultiHeadRMSNorm(
                dims // num_heads, num_heads
            )
        self.to_out: Linear = Linear(dims, dims)

    def _extra_repr(self) -> str:
        kind = "full"
        if self.window is not None:
            kind = f"window={self.window}, shift={self.shift}"
        elif self.patch is not None:
            kind = f"patch={self.patch}, order={self.order}, shift={self.shift}"
        return f"num_heads={self.num_heads}, {kind}, rope={self.rope}"

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Attend; rows and key of ``x`` are kept."""
        expect_tensor(x)
        heads = self.to_qkv(x).feats
        width = heads.shape[1] // (3 * self.num_heads)
        qkv = heads.reshape(len(x), 3, self.num_heads, width), None, None
        scales = turns = ()
        if "q_rms_norm" in self:
            scales = self.q_rms_norm.gamma, self.k_rms_norm.gamma
        if self.rope:
            check_rotary(width, x.dims, self.rope_base)
            turns = angles(x, width, self.rope_base, self.rope_frequency)
        if scales or turns:
            qkv = turned_heads(qkv[0], scales, turns)
        with inside(self):
            y = self._attend(qkv, x)
        return self.to_out(x.replace(y.reshape(len(x), self.num_heads * width)))

    def _attend(self, qkv: tuple, x: SparseTensor) -> mx.array:
        if self.window is not None:
            return ops.window_attention(*qkv, x, self.window, shift=self.shift)
        if self.patch is None:
            return ops.full_attention(*qkv, x)
        return ops.serialized_attention(
            *qkv, x, self.patch, order=self.order, shift=self.shift
        )


class FeedForward(Module):
    """Two linear layers with a GELU between them, on each row."""

    def __init__(self, dims: int, hidden_dims: int):
        super().__init__()
        self.mlp: list[Any] = [
            Linear(dims, hidden_dims),
            GELU("precise"),
            Linear(hidden_dims, dims),
        ]

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Apply the layers to each row."""
        return in_order(self.mlp, x)


class SparseTransformerBlock(Module):
    """Apply attention and a feed-forward net, each after a LayerNorm and with a skip.

    Norms are computed in float32, whatever the dtype of the features.

    Args:
        dims (int): The number of channels.
        num_heads (int): The number of heads, a divisor of the channels.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        affine (bool): If ``True`` the norms learn scale and shift. Default: ``True``.
        **attention: The other arguments of ``SparseAttention``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> block = nn.SparseTransformerBlock(8, num_heads=2, patch=16)
        >>> block(x).shape
        (64, 8)
    """

    def __init__(
        self,
        dims: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        *,
        affine: bool = True,
        **attention: Any,
    ):
        super().__init__()
        self.norm1: LayerNorm = LayerNorm(dims, eps=1e-6, affine=affine)
        self.attn: SparseAttention = SparseAttention(dims, num_heads, **attention)
        self.norm2: LayerNorm = LayerNorm(dims, eps=1e-6, affine=affine)
        self.mlp: FeedForward = FeedForward(
            dims, int(dims * real(mlp_ratio, "mlp_ratio"))
        )

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class RelativePositions(Parameters, Module):
    """Return a learnt bias for each axis by the distance from a key to its query.

    The ``RPE`` of Point Transformer V3, with the same name of its table. Pass the table
    to ``ops.serialized_attention(table=...)``.

    Args:
        patch_size (int): The rows of a patch. Differences are clipped to ``int(2 * (4 *
            patch_size) ** (1 / dims))`` cells.
        num_heads (int): The number of heads.
        dims (int): The number of spatial axes. Default: ``3``.

    Examples:
        >>> bias = nn.RelativePositions(patch_size=16, num_heads=2)
        >>> bias(mx.array([[0, 1, -1]])).shape
        (1, 2)
    """

    def __init__(self, patch_size: int, num_heads: int, dims: int = 3):
        super().__init__()
        self.bound: int = int((4 * patch_size) ** (1 / dims) * 2)
        self.dims: int = dims
        shape = dims * (2 * self.bound + 1), num_heads
        self.rpe_table: mx.array = 0.02 * mx.random.truncated_normal(
            -100.0, 100.0, shape
        )

    def _extra_repr(self) -> str:
        return f"bound={self.bound}, num_heads={self.rpe_table.shape[1]}"

    def __call__(self, apart: mx.array) -> mx.array:
        """Return (..., heads) biases of (..., dims) integer query cell minus key."""
        return biases(self.rpe_table, apart)


class CrossAttention(Module):
    """Apply multi-head attention from rows to the tokens of their batch element.

    Args:
        dims (int): The number of channels.
        num_heads (int): The number of heads, a divisor of the channels.
        context_dims (int, optional): The channels of the tokens. Default: ``dims``.
        bias (bool): If ``True`` queries, keys and values have a bias.
            Default: ``True``.
        qk_rms_norm (bool): If ``True`` normalise queries and keys. Default: ``False``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> tokens = mx.ones((1, 5, 32))  # 5 tokens for the one batch element
        >>> nn.CrossAttention(8, num_heads=2, context_dims=32)(x, tokens).shape
        (64, 8)
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
        self.num_heads: int = heads_of(dims, num_heads)
        self.to_q: Linear = Linear(dims, dims, bias=bias)
        tokens = dims if context_dims is None else context_dims
        self.to_kv: Linear = Linear(tokens, 2 * dims, bias=bias)
        if qk_rms_norm:
            self.q_rms_norm: MultiHeadRMSNorm = MultiHeadRMSNorm(
                dims // num_heads, num_heads
            )
            self.k_rms_norm: MultiHeadRMSNorm = MultiHeadRMSNorm(
                dims // num_heads, num_heads
            )
        self.to_out: Linear = Linear(dims, dims)

    def _extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"

    def __call__(
        self,
        x: Features,
        context: SparseTensor | mx.array,
        lengths: mx.array | None = None,
    ) -> Features:
        """Attend; rows and key of a tensor are kept.

        Args:
            x: a tensor, or an array (B, L, dims) of sequences.
            context: the tokens: (B, M, context_dims); a tensor, whose batch elements
                are the sequences; or (T, context_dims), one sequence after another.
            lengths: (B,) integers: the number of tokens of each sequence; by default M.
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


# Shift, scale and gate, of attention and of the feed-forward net.
PARTS = 6


class AdaptiveLayerNorm(LayerNorm):
    """Apply layer normalization, then the shift and scale of a batch element.

    Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023.

    Args:
        dims (int): The number of channels.
        eps (float): Added to the variance. Default: ``1e-6``.
        affine (bool): If ``True`` learn a scale and a shift too. Default: ``False``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> shift, scale = mx.zeros((1, 8)), mx.ones((1, 8))
        >>> nn.AdaptiveLayerNorm(8)(x, shift, scale).shape
        (64, 8)
    """

    def __init__(self, dims: int, eps: float = 1e-6, affine: bool = False):
        super().__init__(dims, eps=eps, affine=affine)

    def __call__(self, x: Features, shift: mx.array, scale: mx.array) -> Features:
        """Normalise a tensor, or sequences (B, L, C), by (B, C) shift and scale.

        If all rows have one shift and scale, they are the norm's own.
        """
        one = (1, features_of(x).shape[-1])
        if tuple(shift.shape) != one or tuple(scale.shape) != one:
            return ops.modulate(super().__call__(x), shift, scale)
        weight, bias = 1 + scale[0].astype(mx.float32), shift[0].astype(mx.float32)
        if "bias" in self:
            bias = bias + weight * self.bias
        if "weight" in self:
            weight = weight * self.weight
        return ops.layer_norm(x, weight, bias, self.eps)


class ModulatedTransformerBlock(Module):
    """Apply self-attention, cross-attention and a feed-forward net under a condition.

    Self-attention and the feed-forward net follow adaptive norms, and their results are
    gated. Cross-attention follows an affine norm. Each has a skip connection.

    Args:
        dims (int): The number of channels.
        num_heads (int): The number of heads, a divisor of the channels.
        context_dims (int, optional): The channels of the tokens. Default: ``dims``.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        share_mod (bool): If ``True``, one layer makes the modulation for all blocks, a
            call receives it, and each block adds a vector of its own. If ``False``,
            each block makes its modulation from the condition. Default: ``False``.
        qk_rms_norm_cross (bool): If ``True`` normalise queries and keys of the
            attention to tokens. Default: ``False``.
        **attention: The other arguments of ``SparseAttention``, for self-attention.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> block = nn.ModulatedTransformerBlock(8, num_heads=2, context_dims=32)
        >>> block(x, mx.ones((1, 8)), mx.ones((1, 5, 32))).shape
        (64, 8)
    """

    def __init__(
        self,
        dims: int,
        num_heads: int,
        context_dims: int | None = None,
        mlp_ratio: float = 4.0,
        *,
        share_mod: bool = False,
        qk_rms_norm_cross: bool = False,
        **attention: Any,
    ):
        super().__init__()
        self.norm1: AdaptiveLayerNorm = AdaptiveLayerNorm(dims)
        self.norm2: LayerNorm = LayerNorm(dims, eps=1e-6)
        self.norm3: AdaptiveLayerNorm = AdaptiveLayerNorm(dims)
        self.self_attn: SparseAttention = SparseAttention(dims, num_heads, **attention)
        self.cross_attn: CrossAttention = CrossAttention(
            dims, num_heads, context_dims, qk_rms_norm=qk_rms_norm_cross
        )
        self.mlp: FeedForward = FeedForward(dims, int(dims * mlp_ratio))
        if share_mod:
            self.modulation: mx.array = mx.random.normal((PARTS * dims,)) * dims**-0.5
        else:
            self.adaLN_modulation: list[Any] = modulation_layers(dims)

    def __call__(
        self,
        x: SparseTensor,
        condition: mx.array,
        context: SparseTensor | mx.array,
        lengths: mx.array | None = None,
    ) -> SparseTensor:
        """Return features on the rows of ``x``.

        The condition is (B, dims), or with ``share_mod`` (B, 6 * dims); ``context`` and
        ``lengths`` are as of ``CrossAttention``.
        """
        if "modulation" in self:
            condition = (self.modulation + condition).astype(condition.dtype)
        else:
            condition = modulation_of(self.adaLN_modulation, condition)
        shift1, scale1, gate1, shift2, scale2, gate2 = mx.split(condition, PARTS, 1)
        y = self.self_attn(self.norm1(x, shift1, scale1))
        x = ops.gate(y, gate1, residual=x)
        x = x + self.cross_attn(self.norm2(x), context, lengths)
        y = self.mlp(self.norm3(x, shift2, scale2))
        return ops.gate(y, gate2, residual=x)


def modulation_layers(dims: int) -> list[Module]:
    """Return SiLU and the linear layer to the six parts, which starts at zero."""
    layer = Linear(dims, PARTS * dims)
    zeros = {name: mx.zeros_like(value) for name, value in layer.parameters().items()}
    return [mlx.nn.SiLU(), layer.update(zeros)]


def modulation_of(layers: list[Module], condition: mx.array) -> mx.array:
    """Return the (B, 6 * dims) modulation that layers make of (B, dims)."""
    activation, layer = layers
    return layer(activation(condition))
