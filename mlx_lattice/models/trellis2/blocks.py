"""The layers of TRELLIS.2's nets, their published configurations and names.

Xiang et al., "Native and Compact Structured Latents for 3D Generation" (TRELLIS.2),
2025, whose configurations call the blocks ``SparseConvNeXtBlock3d``,
``SparseResBlockC2S3d`` and ``SparseResBlockS2C3d``. A fine cell's offset counts its
first axis fastest. Embeddings of times: Ho et al., "Denoising Diffusion Probabilistic
Models", 2020; of places: Vaswani et al., "Attention Is All You Need", 2017.

A net's first and last layers are float32, and so are norms and factors everywhere; the
layers between have the dtype that the net was made with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from ... import memory, nn, ops
from ...checks import DTYPES
from ...coordinate_set import CoordinateKey
from ...io.checkpoints import RENAMES
from ...io.errors import CheckpointError, shown
from ...nn import fused
from ...ops.channels import fine_rows, forget_slots, rows_of
from ...settings import boundary
from ...tensor import SparseTensor
from ..pretrained import Pretrained

Model = TypeVar("Model", bound="Trellis2Net")


class Net(NamedTuple):
    """How a published net is one of ours."""

    kind: str  # our class
    fixed: dict[str, Any]  # what the published name decides
    taken: tuple[str, ...]  # arguments that are ours too
    only: dict[str, Any]  # what there is no choice of here
    apart: tuple[str, ...]  # of training alone, or of uses of the output


_VAE = ("model_channels", "latent_channels", "num_blocks")
_BLOCKS = {"block_type": "SparseConvNeXtBlock3d"}
_UP, _DOWN = (
    _BLOCKS | {f"{word}_block_type": f"SparseResBlock{kind}3d"}
    for word, kind in (("up", "C2S"), ("down", "S2C"))
)
_FLOW = (
    "resolution", "in_channels", "model_channels", "cond_channels", "out_channels",
    "num_blocks", "num_heads", "num_head_channels", "mlp_ratio", "pe_mode", "rope_freq",
    "share_mod", "qk_rms_norm", "qk_rms_norm_cross",
)  # fmt: skip
_TRAINING = ("use_checkpoint", "initialization")
_DECODER = (*_VAE, "out_channels", "pred_subdiv")
_STRUCTURE = ("latent_channels", "num_res_blocks", "channels", "num_res_blocks_middle")
_SLAT = Net("SLatFlowModel", {}, _FLOW, {}, _TRAINING)

# By the name that a configuration has.
NETS = {
    "FlexiDualGridVaeDecoder": Net(
        "SparseVAEDecoder",
        {"out_channels": 7},
        (*_VAE, "voxel_margin"),
        _UP,
        (*_TRAINING, "resolution"),
    ),
    "SparseUnetVaeDecoder": Net("SparseVAEDecoder", {}, _DECODER, _UP, _TRAINING),
    "FlexiDualGridVaeEncoder": Net(
        "SparseVAEEncoder", {"in_channels": 6}, _VAE, _DOWN, _TRAINING
    ),
    "SparseUnetVaeEncoder": Net(
        "SparseVAEEncoder", {}, (*_VAE, "in_channels"), _DOWN, _TRAINING
    ),
    "SLatFlowModel": _SLAT,
    "ElasticSLatFlowModel": _SLAT,
    "SparseStructureFlowModel": _SLAT._replace(kind="SparseStructureFlowModel"),
    **{
        kind: Net(kind, {}, (*_STRUCTURE, channels), {"norm_type": "layer"}, _TRAINING)
        for kind, channels in (
            ("SparseStructureEncoder", "in_channels"),
            ("SparseStructureDecoder", "out_channels"),
        )
    },
}
# The sizes of TRELLIS.2-4B's flow models; the texture model is given the shape too.
FLOW = {
    "resolution": 32,
    "in_channels": 32,
    "model_channels": 1536,
    "cond_channels": 1024,
    "out_channels": 32,
    "num_blocks": 30,
    "num_heads": 12,
    "mlp_ratio": 5.3334,
    "pe_mode": "rope",
    "share_mod": True,
    "qk_rms_norm": True,
    "qk_rms_norm_cross": True,
}
STRUCTURE_FLOW = FLOW | {"resolution": 16, "in_channels": 8, "out_channels": 8}


class Trellis2Net(Pretrained):
    """A net of TRELLIS.2, which can be made from its published configuration."""

    @classmethod
    def of_config(cls: type[Model], config: Mapping[str, Any]) -> Model:
        """Return the net of a published configuration, with random weights.

        Args:
            config: the ``args`` of the JSON that is published beside the weights.

        Raises:
            ValueError: the configuration has an argument or a part that this class
                lacks.
        """
        kinds = {kind.__name__ for kind in cls.__mro__}
        names = [name for name, net in NETS.items() if net.kind in kinds]

        def known(name: str) -> int:
            return len({*NETS[name].taken, *NETS[name].apart} & {*config})

        # Two published nets may be one class here: take the one that fits.
        return cls(**arguments_of(max(names, key=known), config))


def arguments_of(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of our class for those of a published net."""
    net = NETS[name]
    taken = dict(net.fixed)
    for key in config:
        if key in net.apart:
            continue
        value = config[key]
        if key in net.taken:
            taken[key] = tuple(value) if isinstance(value, list) else value
        elif key in net.only:
            values = value if isinstance(value, list | tuple) else [value]
            if other := [v for v in values if v != net.only[key]]:
                raise ValueError(
                    f"{key} of {name} must be {net.only[key]} throughout; got "
                    f"{other[0]!r}"
                )
        elif key == "block_args":
            taken |= _block_arguments(value)
        elif key == "use_fp16":
            taken |= {"dtype": mx.float16} if value else {}
        elif key == "dtype" and "num_heads" in net.taken:
            taken["dtype"] = _dtype(value)
        else:
            raise ValueError(f"{name} here has no argument {key!r}")
    return taken


def _block_arguments(blocks: list[Mapping]) -> dict[str, Any]:
    """Return the arguments of all blocks, which must be the same."""
    rest = [
        {key: block[key] for key in block if key not in _TRAINING} for block in blocks
    ]
    if any(block != rest[0] or block.keys() - {"mlp_ratio"} for block in rest):
        raise ValueError(
            f"block_args must be mlp_ratio alone, the same in each stage; got {blocks}"
        )
    return rest[0] if rest else {}


def _dtype(name: Any) -> mx.Dtype:
    known = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    name = known.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {name!r}")
    return getattr(mx, name)


def trellis2(config: Mapping) -> tuple[str, dict]:
    """Return our class and its arguments for a configuration of TRELLIS.2's."""
    name, arguments = config.get("name"), config.get("args")
    if (
        not isinstance(name, str)
        or name not in NETS
        or not isinstance(arguments, Mapping)
    ):
        raise CheckpointError(
            f"the configuration is of {shown(repr(name))}; expected a name and args of "
            f"one of {', '.join(NETS)}"
        )
    try:
        return NETS[name].kind, arguments_of(name, arguments)
    except ValueError as error:
        raise CheckpointError(shown(str(error))) from None


def _trellis2(name: str) -> str:
    # Saved with spconv in FlexGEMM's place, convolutions are one module deeper.
    return re.sub(r"\.(conv[12]?)\.conv\.", r".\1.", name)


def _flow(name: str) -> str | None:
    # Tables that are computed here: rotations and places of a dense grid.
    return None if name in ("rope_phases", "pos_emb") else name


RENAMES.update(
    {
        (Trellis2Net, "trellis2"): lambda _: (_trellis2, _flow),
        (Trellis2Net, "spconv"): lambda _: (_trellis2,),
    }
)


CELLS = 8
ORDER = "first"
TIME_FEATURES, PERIOD = 256, 10000.0


def zero(module: nn.Module) -> nn.Module:
    """Set every parameter to zero: a residual branch then starts as the identity."""
    zeros = {name: mx.zeros_like(value) for name, value in module.parameters().items()}
    return module.update(zeros)


def cast_layers(blocks: Iterable, dtype: mx.Dtype) -> None:
    """Cast convolutions and linear layers of (nested lists of) blocks, but no norms."""
    for layer in _layers(blocks):
        layer.set_dtype(dtype)


def torso_dtype(blocks: Iterable, default: mx.Dtype) -> mx.Dtype:
    """Return the dtype of the features that blocks' layers take; of none, another."""
    return next(map(dtype_of, _layers(blocks)), default)


def dtype_of(layer: nn.Module) -> mx.Dtype:
    """Return the dtype of the features that a layer's weight takes, packed or not."""
    return layer.get("scales", layer.weight).dtype


def _layers(blocks: Iterable) -> Iterator[nn.Module]:
    is_module = lambda value: isinstance(value, nn.Module)  # noqa: E731
    for _, block in tree_flatten(list(blocks), is_leaf=is_module):
        for module in block.modules():
            if "weight" in module and not isinstance(module, mlx.nn.LayerNorm):
                yield module


class ConvNeXtBlock(nn.Module):
    """A 3x3x3 convolution, LayerNorm and a two-layer MLP, beside a skip.

    The convolution is full, not depthwise. The last layer starts at zero.

    Args:
        channels (int): The number of channels.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
    """

    def __init__(self, channels: int, mlp_ratio: float = 4.0):
        super().__init__()
        hidden = int(channels * mlp_ratio)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.conv = nn.SubmConv3d(channels, channels, 3)
        last = zero(nn.Linear(hidden, channels))
        self.mlp = [nn.Linear(channels, hidden), mlx.nn.SiLU(), last]

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        y = self.conv(x).feats
        first, act, last = self.mlp

        def beside(x: mx.array, y: mx.array) -> mx.array:
            wide = fused.linear(first, self.norm(y), act)
            return fused.linear(last, wide, residual=x)

        # What a row takes: hidden channels twice, its own channels thrice.
        row_bytes = (2 * first.bias.shape[0] + 3 * x.channels) * x.dtype.size
        y = memory.by_rows(beside, x.feats, y, row_bytes=row_bytes)
        return x.replace(y)


class UpBlock(nn.Module):
    """Divides each row into up to eight, by channel-to-space, in a residual block.

    Args:
        channels (int): The number of input channels, a multiple of 8.
        out_channels (int): The number of output channels, a multiple of an eighth of
            the input's.
        pred_subdiv (bool): If ``True`` predict which fine cells there are.
            Default: ``True``.
    """

    def __init__(self, channels: int, out_channels: int, pred_subdiv: bool = True):
        super().__init__()
        if channels % CELLS or out_channels % (channels // CELLS):
            raise ValueError(
                "channels must be a multiple of 8 and out_channels a multiple of an "
                f"eighth of them; got {channels} and {out_channels}"
            )
        self.norm1 = nn.LayerNorm(channels, eps=1e-6)
        self.norm2 = nn.LayerNorm(out_channels, eps=1e-6, affine=False)
        self.conv1 = nn.SubmConv3d(channels, CELLS * out_channels, 3)
        self.conv2 = zero(nn.SubmConv3d(out_channels, out_channels, 3))
        if pred_subdiv:
            self.to_subdiv = nn.Linear(channels, CELLS)
        self.repeats = out_channels // (channels // CELLS)

    def __call__(
        self,
        x: SparseTensor,
        subdivision: mx.array | None = None,
        coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    ) -> tuple[SparseTensor, SparseTensor | None]:
        """Return the fine rows, and the predicted (N, 8) logits of the cells or None.

        Args:
            x: coarse rows.
            subdivision: (N, 8) bool: the cells to make, instead of those predicted.
            coordinates: the fine rows to make, instead of those predicted.
        """
        logits = self.to_subdiv(x) if "to_subdiv" in self else None
        if subdivision is None and coordinates is None:
            if logits is None:
                raise ValueError(
                    "this block does not predict its cells; pass subdivision or "
                    "coordinates"
                )
            subdivision = logits.feats > 0
        if memory.active() is not None:
            key, _ = ops.channels.fine_slots(
                x, subdivision=subdivision, coordinates=coordinates, order=ORDER
            )
            return self._in_blocks(x, key), logits
        y = self.conv1(self.norm1(x, activation="silu"))
        y = ops.channel_to_space(
            y, subdivision=subdivision, coordinates=coordinates, order=ORDER
        )
        skip = ops.channel_to_space(x, coordinates=y, order=ORDER)
        skip = ops.channel_repeat(skip, self.repeats)
        return self.conv2(self.norm2(y, activation="silu")) + skip, logits

    def _in_blocks(self, x: SparseTensor, key: CoordinateKey) -> SparseTensor:
        """Return the same features of fine rows; wide arrays are made in blocks."""
        _, slots = ops.channels.fine_slots(x, coordinates=key, order=ORDER)

        def before(rows: mx.array) -> mx.array:
            return self.norm1(rows, activation="silu")

        def between(rows: mx.array) -> mx.array:
            return self.norm2(rows, activation="silu")

        y = memory.by_rows(before, x.feats, row_bytes=3 * x.channels * x.dtype.size)
        wide = self.conv1.blocks(x.replace(y))
        del y
        fine = fine_rows(wide, slots, CELLS, between)
        del wide
        boundary(fine)
        memory.release(x.manager, x.key)
        fine = SparseTensor.of(x.manager, key, fine)
        parts = x.feats.reshape(len(x) * CELLS, x.channels // CELLS)

        def beside() -> Iterator[tuple[int, mx.array]]:
            for first, part in self.conv2.blocks(fine):
                skip = rows_of(parts, slots, first, first + part.shape[0])
                yield first, part + mx.repeat(skip, self.repeats, axis=1)

        y = memory.assembled(beside(), len(fine))
        boundary(y)
        forget_slots(x.coordinate_set)
        return fine.replace(y)

    def cells(self, x: SparseTensor) -> SparseTensor:
        """Return the fine rows alone that the block predicts, with features of 1."""
        ones = mx.ones((len(x), CELLS), dtype=x.dtype)
        subdivision = self.to_subdiv(x).feats > 0
        return ops.channel_to_space(
            x.replace(ones), subdivision=subdivision, order=ORDER
        )


class DownBlock(nn.Module):
    """Joins the rows of each coarse cell, by space-to-channel, in a residual block.

    Args:
        channels (int): The number of input channels.
        out_channels (int): The number of output channels, a multiple of 8 that
            divides 8 times the input's.
    """

    def __init__(self, channels: int, out_channels: int):
        super().__init__()
        if out_channels % CELLS or CELLS * channels % out_channels:
            raise ValueError(
                "out_channels must be a multiple of 8 and divide 8 times channels; "
                f"got {channels} and {out_channels}"
            )
        self.norm1 = nn.LayerNorm(channels, eps=1e-6)
        self.norm2 = nn.LayerNorm(out_channels, eps=1e-6, affine=False)
        self.conv1 = nn.SubmConv3d(channels, out_channels // CELLS, 3)
        self.conv2 = zero(nn.SubmConv3d(out_channels, out_channels, 3))
        self.out_channels = out_channels

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the sorted unique cells of 2 x 2 x 2 rows.

        The skip is the mean of as many neighbouring channels of the joined rows as
        there are for an output; cells that are not active count as 0.
        """
        y = self.conv1(self.norm1(x, activation="silu"))
        y = ops.space_to_channel(y, order=ORDER)
        skip = ops.space_to_channel(x, order=ORDER)
        skip = ops.channel_avg_pool(skip, self.out_channels)
        return self.conv2(self.norm2(y, activation="silu")) + skip


def check_stages(model_channels: Sequence[int], num_blocks: Sequence[int]) -> None:
    """Raise a ValueError unless each stage has channels and a number of blocks."""
    if len(model_channels) != len(num_blocks) or min(num_blocks, default=-1) < 0:
        raise ValueError(
            "model_channels and num_blocks have one entry for each stage, of 1 or "
            f"more and 0 or more; got {model_channels} and {num_blocks}"
        )


def stages(
    model_channels: Sequence[int],
    num_blocks: Sequence[int],
    mlp_ratio: float,
    step: Callable[[int, int], nn.Module],
) -> list[list[nn.Module]]:
    """Return stages of ConvNeXt blocks, each but the last followed by a step."""
    blocks = []
    for at, (width, count) in enumerate(zip(model_channels, num_blocks, strict=True)):
        stage = [ConvNeXtBlock(width, mlp_ratio) for _ in range(count)]
        if at + 1 < len(model_channels):
            stage.append(step(width, model_channels[at + 1]))
        blocks.append(stage)
    return blocks


def posterior(mean: mx.array, log_variance: mx.array, sample: bool) -> mx.array:
    """Return the means, or a sample of the normal distributions."""
    if not sample:
        return mean
    noise = mx.random.normal(mean.shape, dtype=mean.dtype)
    return mean + mx.exp(0.5 * log_variance) * noise


# Embeddings


class TimestepEmbedder(nn.Module):
    """Maps times to vectors: cosines and sines, then two linear layers."""

    def __init__(self, dims: int):
        super().__init__()
        layers = nn.Linear(TIME_FEATURES, dims), mlx.nn.SiLU(), nn.Linear(dims, dims)
        self.mlp = list(layers)

    def __call__(self, t: mx.array) -> mx.array:
        """Return (B, dims) of (B,) times."""
        y = time_features(t).astype(dtype_of(self.mlp[0]))
        for layer in self.mlp:
            y = layer(y)
        return y


def time_features(t: mx.array) -> mx.array:
    """Return (B, 256) float32: cosines, then sines, of falling frequencies."""
    half = TIME_FEATURES // 2
    speed = [math.exp(-math.log(PERIOD) * i / half) for i in range(half)]
    angle = t.astype(mx.float32)[:, None] * mx.array(speed)
    return mx.concatenate([mx.cos(angle), mx.sin(angle)], axis=1)


def place_features(coords: mx.array, channels: int) -> mx.array:
    """Return (N, channels) float32 for (N, D) cells: for each axis sines, then cosines.

    An axis has ``channels // (2 * D)`` of both; zeros fill what is left.
    """
    n, axes = coords.shape
    each = channels // axes // 2
    speed = mx.array([PERIOD ** (-i / each) for i in range(each)])
    angle = coords.astype(mx.float32)[:, :, None] * speed
    y = mx.concatenate([mx.sin(angle), mx.cos(angle)], axis=2)
    y = y.reshape(n, 2 * each * axes)
    return mx.pad(y, [(0, 0), (0, channels - y.shape[1])])
