"""Norms whose shift and scale come from a condition, and the block made of them.

Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023; parameters are
named as in TRELLIS and TRELLIS.2, whose weights load by name.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.nn import Module

from .. import ops
from ..tensor import SparseTensor, features_of
from .attention import FeedForward, SparseAttention
from .cross_attention import CrossAttention
from .linear import Linear
from .normalization import LayerNorm

__all__ = ["AdaptiveLayerNorm", "ModulatedTransformerBlock"]

# Shift, scale and gate, of attention and of the feed-forward net.
PARTS = 6


class AdaptiveLayerNorm(LayerNorm):
    """Applies layer normalization to each row, then a batch element's shift and scale.

    Args:
        dims (int): The number of channels.
        eps (float): Added to the variance. Default: ``1e-6``.
        affine (bool): If ``True`` learn a scale and a shift too. Default: ``False``.
    """

    def __init__(self, dims: int, eps: float = 1e-6, affine: bool = False):
        super().__init__(dims, eps=eps, affine=affine)

    def __call__(
        self, x: SparseTensor | mx.array, shift: mx.array, scale: mx.array
    ) -> SparseTensor | mx.array:
        """Normalise a tensor, or sequences (B, L, C), by ``ops.modulate``.

        Where all rows have one shift and scale, they are the norm's own.

        Args:
            x: what to normalise.
            shift, scale: (B, C).
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
    """Self-attention, attention to tokens and a feed-forward net, under a condition.

    The first and the last are behind adaptive norms, and their results are gated;
    attention to tokens is behind an affine norm. Each is beside a skip.

    Args:
        dims (int): The number of channels.
        num_heads (int): The number of heads, a divisor of the channels.
        context_dims (int, optional): The channels of the tokens. Default: ``dims``.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        share_mod (bool): If ``True`` a call is given the modulation itself, made by
            one layer for all blocks, to which each block adds a vector of its own;
            else each block makes it of the condition. Default: ``False``.
        qk_rms_norm_cross (bool): If ``True`` normalise queries and keys of the
            attention to tokens. Default: ``False``.
        **attention: The other arguments of ``SparseAttention``, for self-attention.
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
        **attention,
    ):
        super().__init__()
        self.norm1 = AdaptiveLayerNorm(dims)
        self.norm2 = LayerNorm(dims, eps=1e-6)
        self.norm3 = AdaptiveLayerNorm(dims)
        self.self_attn = SparseAttention(dims, num_heads, **attention)
        self.cross_attn = CrossAttention(
            dims, num_heads, context_dims, qk_rms_norm=qk_rms_norm_cross
        )
        self.mlp = FeedForward(dims, int(dims * mlp_ratio))
        if share_mod:
            self.modulation = mx.random.normal((PARTS * dims,)) * dims**-0.5
        else:
            self.adaLN_modulation = modulation_layers(dims)

    def __call__(
        self,
        x: SparseTensor,
        condition: mx.array,
        context: SparseTensor | mx.array,
        lengths: mx.array | None = None,
    ) -> SparseTensor:
        """Return features on the rows of ``x``.

        Args:
            x: tensor.
            condition: (B, dims), or with ``share_mod`` (B, 6 * dims).
            context, lengths: as of ``CrossAttention``.
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
