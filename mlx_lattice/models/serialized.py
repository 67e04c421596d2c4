"""Point Transformer V3's block: attention in patches of rows along a curve."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .. import memory, nn, ops
from ..checks import heads_of
from ..nn.fused import in_order
from ..ops.observed import inside
from ..ops.pool import batch_rows
from ..tensor import SparseTensor


class Level(NamedTuple):
    """What the blocks of one level share."""

    orders: tuple[str, ...]  # of curves; block i takes number i, from the start again
    bits: int  # of the curves
    flash: bool  # whether patches stay as long where an element is shorter
    legacy: bool  # whether convolutions read the MLP branch of the block before
    positions: mx.array | None  # (N, D) float32, where queries and keys are rotated

    def patch(self, x: SparseTensor, most: int) -> int:
        """Return the rows of a patch."""
        if self.flash:
            return most
        starts = batch_rows(x).starts
        sizes = (b - a for a, b in zip(starts, starts[1:], strict=False))
        return min([most, *(size for size in sizes if size)])


class SerializedAttention(nn.Module):
    """Multi-head self-attention in filled patches along a curve.

    Args:
        channels (int): The number of channels.
        num_heads (int): The number of heads, a divisor of the channels.
        patch_size (int): The number of rows of a patch, at most.
        order_index (int): Which of the level's curves. Default: ``0``.
        qkv_bias (bool): If ``True`` queries, keys and values have a bias.
            Default: ``True``.
        qk_scale (float, optional): The factor of the scores; by default ``D ** -0.5``
            of D channels a head.
        rope_base (float, optional): Rotate queries and keys by positions, see
            ``ops.rotary``; by default they are not rotated.
        enable_rpe (bool): If ``True`` scores have a bias by relative positions.
            Default: ``False``.
        dims (int): The number of spatial axes. Default: ``3``.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        patch_size: int,
        order_index: int = 0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        rope_base: float | None = None,
        enable_rpe: bool = False,
        dims: int = 3,
    ):
        super().__init__()
        self.num_heads, self.patch_size = heads_of(channels, num_heads), patch_size
        self.order_index, self.scale = order_index, qk_scale
        self.rope_base = rope_base
        self.qkv = nn.Linear(channels, 3 * channels, bias=qkv_bias)
        self.proj = nn.Linear(channels, channels)
        if enable_rpe:
            self.rpe = nn.RelativePositions(patch_size, num_heads, dims)

    def _extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, patch_size={self.patch_size}, "
            f"order_index={self.order_index}, rope_base={self.rope_base}"
        )

    def __call__(self, x: SparseTensor, level: Level) -> SparseTensor:
        """Attend; rows and key of ``x`` are kept."""
        count, heads = len(x), self.num_heads
        width = x.channels // heads
        qkv = self.qkv(x).feats
        if self.rope_base:
            qk, v = mx.split(qkv.reshape(count, 3 * heads, width), [2 * heads], axis=1)
            turned = ops.rotary(
                qk,
                x,
                base=self.rope_base,
                positions=level.positions,
                pairs="halves",
            )
            given = *mx.split(turned, 2, axis=1), v
        else:
            given = qkv.reshape(count, 3, heads, width), None, None
        with inside(self):
            y = ops.serialized_attention(
                *given,
                x,
                level.patch(x, self.patch_size),
                order=level.orders[self.order_index % len(level.orders)],
                scale=self.scale,
                last_patch="fill",
                bits=level.bits,
                table=self.rpe.rpe_table if "rpe" in self else None,
            )
        return self.proj(x.replace(y.reshape(count, x.channels)))


class MLP(nn.Module):
    """Two linear layers with a GELU between them.

    Args:
        channels (int): The number of channels.
        hidden_channels (int): The number of channels between the layers.
        drop (float): The probability to zero an entry after each. Default: ``0``.
    """

    def __init__(self, channels: int, hidden_channels: int, drop: float = 0.0):
        super().__init__()
        self.fc1 = nn.Linear(channels, hidden_channels)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_channels, channels)
        self.drop = nn.Dropout(drop)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Apply the layers to each row, in blocks of rows where a limit holds."""
        if self.training or memory.active() is None:  # blocks would drop other entries
            return self._rows(x)
        row_bytes = 3 * self.fc1.bias.shape[0] * x.dtype.size
        return x.replace(memory.by_rows(self._rows, x.feats, row_bytes=row_bytes))

    def _rows(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        return in_order((self.fc1, self.act, self.drop, self.fc2, self.drop), x)


class SerializedBlock(nn.Module):
    """A convolution, attention and an MLP, each beside a skip.

    Args:
        channels (int): The number of channels.
        num_heads, patch_size, order_index, qkv_bias, qk_scale, rope_base,
            enable_rpe: See ``SerializedAttention``.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        proj_drop (float): The probability to zero an entry. Default: ``0``.
        drop_path (float): The probability to leave a row's branch out. Default: ``0``.
        layer_scale (float, optional): What factors of the branches begin at; by
            default there are none.
        dims (int): The number of spatial axes. Default: ``3``.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        patch_size: int,
        *,
        order_index: int = 0,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        rope_base: float | None = None,
        enable_rpe: bool = False,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        dims: int = 3,
    ):
        super().__init__()
        conv = getattr(nn, f"SubmConv{dims}d")(channels, channels, 3)
        # Lists of one layer are named as the published parameters are.
        self.cpe = [conv, nn.Linear(channels, channels), nn.LayerNorm(channels)]
        self.norm1 = [nn.LayerNorm(channels)]
        self.attn = SerializedAttention(
            channels,
            num_heads,
            patch_size,
            order_index,
            qkv_bias,
            qk_scale,
            rope_base,
            enable_rpe,
            dims,
        )
        self.norm2 = [nn.LayerNorm(channels)]
        self.mlp = [MLP(channels, int(channels * mlp_ratio), proj_drop)]
        self.drop = nn.Dropout(proj_drop)
        self.drop_path = nn.DropPath(drop_path)
        if layer_scale is not None:
            self.ls1 = [nn.LayerScale(channels, layer_scale)]
            self.ls2 = [nn.LayerScale(channels, layer_scale)]

    def __call__(
        self, x: SparseTensor, level: Level, convolved: SparseTensor
    ) -> tuple[SparseTensor, SparseTensor]:
        """Return features on the rows of ``x``, and the next block's ``convolved``.

        Args:
            x: input.
            level: what the level's blocks share.
            convolved: the input of the convolution.
        """
        x = in_order(self.cpe, convolved, x)
        x = self._added(x, self.drop(self.attn(self.norm1[0](x), level)), "ls1")
        branch = self.mlp[0](self.norm2[0](x))
        if level.legacy:
            branch = self._branch(branch, "ls2")
            return x + branch, branch
        x = self._added(x, branch, "ls2")
        return x, x

    def _added(self, x: SparseTensor, y: SparseTensor, scale: str) -> SparseTensor:
        """Return ``x`` with a branch added, in the launch of the branch's scale."""
        drops = self.training and self.drop_path.p
        if scale in self and not drops:
            return self[scale][0](y, residual=x)
        return x + self._branch(y, scale)

    def _branch(self, y: SparseTensor, scale: str) -> SparseTensor:
        return self.drop_path(self[scale][0](y) if scale in self else y)
