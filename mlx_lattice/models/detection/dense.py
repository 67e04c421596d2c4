"""What detectors do on a dense map from above: norms, and OpenPCDet's 2D backbone.

Maps are (B, y, x, C), as MLX's convolutions take them. Layers are those of ``mlx.nn``.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn

EPS, MOMENTUM = 1e-3, 0.01


class Dense(mlx.nn.Sequential):
    """Calls layers in order; a convolution, its BatchNorm and a ReLU are one.

    In evaluation the norm's scale goes into the convolution's weight, which is small,
    so that the map is written twice and not four times.

    Args:
        *layers: The layers.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """Return a (B, y, x, C) map."""
        at = 0
        while at < len(self.layers):
            here = self.layers[at : at + 3]
            if len(here) == 3 and isinstance(here[1], mlx.nn.BatchNorm):
                x = _in_one(*here, x)
                at += 3
            else:
                x = here[0](x)
                at += 1
        return x


def _in_one(conv, norm, activation, x: mx.array) -> mx.array:
    """Return ``activation(norm(conv(x)))``; in evaluation the activation is a ReLU."""
    if norm.training:
        return activation(norm(_convolved(conv, x, conv.weight)))
    scale = norm.weight * mx.rsqrt(norm.running_var + norm.eps)
    shift = norm.bias - norm.running_mean * scale
    if "bias" in conv:
        shift = shift + conv.bias * scale
    weight = (conv.weight * scale[:, None, None, None]).astype(x.dtype)
    y = _convolved(conv, x, weight, bias=False)
    return mx.maximum(y + shift.astype(x.dtype), 0)


def _convolved(conv, x: mx.array, weight: mx.array, bias: bool = True) -> mx.array:
    """Return what a convolution makes with a weight, with its bias or without."""
    if isinstance(conv, mlx.nn.ConvTranspose2d):
        # Its stride is its kernel: a matmul, whose channels are then put side by side.
        b, high, wide, _ = x.shape
        out, size, _, c_in = weight.shape
        y = x @ weight.transpose(3, 1, 2, 0).reshape(c_in, -1)
        y = y.reshape(b, high, wide, size, size, out).transpose(0, 1, 3, 2, 4, 5)
        y = y.reshape(b, high * size, wide * size, out)
    else:
        y = mx.conv2d(x, weight, conv.stride, conv.padding)
    return y + conv.bias if bias and "bias" in conv else y


def conv_norm(
    in_channels: int,
    out_channels: int,
    size: int = 3,
    stride: int = 1,
    *,
    bias: bool = False,
    eps: float = EPS,
    momentum: float = MOMENTUM,
    transposed: bool = False,
) -> list[mlx.nn.Module]:
    """Return a convolution, padded so that its map keeps its size, a norm, a ReLU.

    Args:
        in_channels, out_channels: channels.
        size, stride: of the kernel.
        bias: of the convolution.
        eps, momentum: of the norm.
        transposed: whether the convolution is a transposed one, without padding.
    """
    kind = mlx.nn.ConvTranspose2d if transposed else mlx.nn.Conv2d
    padding = size // 2 if size % 2 and not transposed else 0
    return [
        kind(in_channels, out_channels, size, stride, padding, bias=bias),
        mlx.nn.BatchNorm(out_channels, eps=eps, momentum=momentum),
        mlx.nn.ReLU(),
    ]


class BaseBEVBackbone(mlx.nn.Module):
    """OpenPCDet's 2D backbone: blocks that stride, brought back to one size and joined.

    Parameters are named as in ``base_bev_backbone.py``: ``blocks.<i>.<place>`` and
    ``deblocks.<i>.<place>``; place 0 of a block is padding, which the convolution has.

    Args:
        in_channels (int): The number of input channels.
        layer_nums (tuple): The number of layers of each block after its first.
        layer_strides (tuple): The stride of each block.
        num_filters (tuple): The channels of each block.
        upsample_strides (tuple): By how much each block's map is enlarged; below 1 it
            is strided. One more is of the joined map.
        num_upsample_filters (tuple): The channels of each enlarged map.
        conv_for_no_stride (bool): If ``True`` a map that keeps its size does so by a
            1x1 convolution, not by a transposed one. Default: ``False``.
    """

    def __init__(
        self,
        in_channels: int,
        layer_nums: Sequence[int] = (5, 5),
        layer_strides: Sequence[int] = (1, 2),
        num_filters: Sequence[int] = (128, 256),
        upsample_strides: Sequence[float] = (1, 2),
        num_upsample_filters: Sequence[int] = (256, 256),
        conv_for_no_stride: bool = False,
    ):
        super().__init__()
        levels = len(layer_nums)
        if not levels == len(layer_strides) == len(num_filters):
            raise ValueError(
                "layer_nums, layer_strides and num_filters have one entry a block; got "
                f"{layer_nums}, {layer_strides} and {num_filters}"
            )
        if len(upsample_strides) not in (0, levels, levels + 1) or len(
            num_upsample_filters
        ) != min(len(upsample_strides), levels):
            raise ValueError(
                f"upsample_strides and num_upsample_filters are of {levels} blocks; "
                f"got {upsample_strides} and {num_upsample_filters}"
            )
        self.blocks, self.deblocks = [], []
        wide = in_channels
        for count, stride, channels in zip(
            layer_nums, layer_strides, num_filters, strict=True
        ):
            layers = [mlx.nn.Identity(), *conv_norm(wide, channels, 3, stride)]
            for _ in range(count):
                layers += conv_norm(channels, channels)
            self.blocks.append(Dense(*layers))
            wide = channels
        made = list(zip(num_filters, num_upsample_filters, strict=False))
        for (channels, out), stride in zip(made, upsample_strides, strict=False):
            enlarged = stride > 1 or (stride == 1 and not conv_for_no_stride)
            step = round(stride if enlarged else 1 / stride)
            layers = conv_norm(channels, out, step, step, transposed=enlarged)
            self.deblocks.append(Dense(*layers))
        self.out_channels = sum(num_upsample_filters or num_filters)
        if len(upsample_strides) > levels:
            wide, step = self.out_channels, round(upsample_strides[-1])
            last = conv_norm(wide, wide, step, step, transposed=True)
            self.deblocks.append(Dense(*last))

    def __call__(self, x: mx.array) -> mx.array:
        """Return (B, y, x, C) of the joined maps.

        Args:
            x: (B, y, x, C).

        Raises:
            ValueError: the strides do not divide the extents.
        """
        maps = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            maps.append(self.deblocks[i](x) if self.deblocks else x)
        if len({each.shape[1:3] for each in maps}) > 1:
            raise ValueError(
                "a map must have extents that its strides divide; got maps of "
                f"{', '.join(str(each.shape[1:3]) for each in maps)} to join"
            )
        x = maps[0] if len(maps) == 1 else mx.concatenate(maps, axis=-1)
        return self.deblocks[-1](x) if len(self.deblocks) > len(maps) else x
