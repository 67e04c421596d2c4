"""Attention among active rows, in the manner of mlx.nn.

Parameters are named as in TRELLIS and TRELLIS.2, whose weights load by name.
"""

from __future__ import annotations

import mlx.core as mx
from mlx.nn import Module

from .. import ops
from ..checks import flag, heads_of, one_of, real, whole
from ..geometry.curves import CURVES
from ..kernel_spec import IntOrTuple
from ..ops.attended import inside
from ..ops.heads import turned_head, turned_heads
from ..ops.rotations import angles, check_rotary
from ..tensor import SparseTensor, expect_tensor
from .activations import GELU
from .containers import in_order
from .linear import Linear
from .normalization import LayerNorm
from .parameters import Parameters

__all__ = ["SparseAttention", "SparseTransformerBlock"]


class MultiHeadRMSNorm(Parameters, Module):
    """Scales each head of (N, heads, D) to root mean square 1, then by ``gamma``.

    Args:
        dims (int): The channels of a head.
        num_heads (int): The number of heads.
    """

    def __init__(self, dims: int, num_heads: int):
        super().__init__()
        self.gamma = mx.ones((num_heads, dims))

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise in float32."""
        rows = x.reshape(-1, *x.shape[-2:]) if x.ndim != 3 else x
        return turned_head(rows, self.gamma).reshape(x.shape)


class SparseAttention(Module):
    """Applies multi-head self-attention among rows of one batch element.

    Without ``window`` and ``patch`` all rows of an element see each other. On the CPU
    groups of rows are attended as they are, elsewhere padded by at most an eighth of
    their useful pairs: see ``ops.window_attention``, and ``ml.trace`` for the count.

    Args:
        dims (int): The number of channels.
        num_heads (int): The number of heads, a divisor of the channels.
        window (int or tuple, optional): Attend within windows of this extent.
        shift (int or tuple): The shift of the windows in cells, or of the patches in
            rows. Default: ``0``.
        patch (int, optional): Attend within patches of this many rows along a curve.
        order (str): The curve, as of ``ops.curve_order``. Default: ``"hilbert"``.
        bias (bool): If ``True`` queries, keys and values have a bias.
            Default: ``True``.
        rope (bool): If ``True`` rotate queries and keys by their coordinates.
            Default: ``False``.
        rope_base (float): See ``ops.rotary``. Default: ``10000``.
        rope_frequency (float): See ``ops.rotary``. Default: ``1``.
        qk_rms_norm (bool): If ``True`` normalise queries and keys. Default: ``False``.
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
        self.num_heads = heads_of(dims, num_heads)
        if window is not None and patch is not None:
            raise ValueError("pass window or patch, not both")
        one_of(order, CURVES, "order")
        if window is None and patch is None and shift != 0:
            raise ValueError(f"shift = {shift} needs a window or a patch to shift")
        self.rope = flag(rope, "rope")
        self.rope_base = real(rope_base, "rope_base")
        self.rope_frequency = real(rope_frequency, "rope_frequency")
        self.order, self.patch = order, patch
        self.window, self.shift = window, shift
        self.to_qkv = Linear(dims, 3 * dims, bias=bias)
        if flag(qk_rms_norm, "qk_rms_norm"):
            self.q_rms_norm = MultiHeadRMSNorm(dims // num_heads, num_heads)
            self.k_rms_norm = MultiHeadRMSNorm(dims // num_heads, num_heads)
        self.to_out = Linear(dims, dims)

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
        given = heads.reshape(len(x), 3, self.num_heads, width), None, None
        scales = turns = ()
        if "q_rms_norm" in self:
            scales = self.q_rms_norm.gamma, self.k_rms_norm.gamma
        if self.rope:
            check_rotary(width, x.dims, self.rope_base)
            turns = angles(x, width, self.rope_base, self.rope_frequency)
        if scales or turns:
            given = turned_heads(given[0], scales, turns)
        with inside(self):
            y = self._attend(given, x)
        return self.to_out(x.replace(y.reshape(len(x), self.num_heads * width)))

    def _attend(self, given: tuple, x: SparseTensor) -> mx.array:
        if self.window is not None:
            return ops.window_attention(*given, x, self.window, shift=self.shift)
        if self.patch is None:
            return ops.full_attention(*given, x)
        return ops.serialized_attention(
            *given, x, self.patch, order=self.order, shift=self.shift
        )


class FeedForward(Module):
    """Two linear layers with a GELU between them, on each row.

    Args:
        dims (int): The number of channels.
        hidden_dims (int): The channels between the layers.
    """

    def __init__(self, dims: int, hidden_dims: int):
        super().__init__()
        self.mlp = [
            Linear(dims, hidden_dims),
            GELU("precise"),
            Linear(hidden_dims, dims),
        ]

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Apply the layers to each row."""
        return in_order(self.mlp, x)


class SparseTransformerBlock(Module):
    """Attention and a feed-forward net, each behind a LayerNorm and beside a skip.

    Norms are computed in float32, whatever the dtype of the features.

    Args:
        dims (int): The number of channels.
        num_heads (int): The number of heads, a divisor of the channels.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        affine (bool): If ``True`` the norms learn scale and shift. Default: ``True``.
        **attention: The other arguments of ``SparseAttention``.
    """

    def __init__(
        self,
        dims: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        *,
        affine: bool = True,
        **attention,
    ):
        super().__init__()
        self.norm1 = LayerNorm(dims, eps=1e-6, affine=affine)
        self.attn = SparseAttention(dims, num_heads, **attention)
        self.norm2 = LayerNorm(dims, eps=1e-6, affine=affine)
        self.mlp = FeedForward(dims, int(dims * real(mlp_ratio, "mlp_ratio")))

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))
