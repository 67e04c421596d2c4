"""The layers of TRELLIS.2's nets, their published configurations and names.

Xiang et al., "Native and Compact Structured Latents for 3D Generation" (TRELLIS.2),
2025, whose configurations call the blocks ``SparseConvNeXtBlock3d``,
``SparseResBlockC2S3d`` and ``SparseResBlockS2C3d``. A fine cell's offset counts its
first axis fastest. Embeddings of times: Ho et al., "Denoising Diffusion Probabilistic
Models", 2020; of places: Vaswani et al., "Attention Is All You Need", 2017.

A net's first and last layers are float32, and so are norms and factors everywhere; the
layers between have the dtype that the net was made with.

TRELLIS.2's flow models: velocities of latents, on a dense grid and on voxels.
Parameters have the names and layouts of the published checkpoints:

    input_layer, out_layer, t_embedder.mlp.{0, 2}       weight, bias
    adaLN_modulation.1                                  weight, bias   shared
    blocks.<i>.modulation                                              shared
    blocks.<i>.adaLN_modulation.1                       weight, bias   not shared
    blocks.<i>.norm2                                    weight, bias
    blocks.<i>.self_attn.{to_qkv, to_out}               weight, bias
    blocks.<i>.cross_attn.{to_q, to_kv, to_out}         weight, bias
    blocks.<i>.{self, cross}_attn.{q, k}_rms_norm       gamma
    blocks.<i>.mlp.mlp.{0, 2}                           weight, bias

The published tables ``rope_phases`` and ``pos_emb`` are computed here, not loaded.
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
from ...checks import DTYPES, dtype_name
from ...coordinate_set import CoordinateKey
from ...io.checkpoints import RENAMES
from ...io.safetensors import CheckpointError, shown
from ...nn import fused
from ...nn.attention import modulation_layers, modulation_of
from ...nn.layers import ModuleCache
from ...ops.channels import fine_rows, forget_slots, rows_of
from ...prepare import prepare_scan
from ...settings import boundary
from ...tensor import SparseTensor, align, expect_tensor
from ..pretrained import Pretrained

__all__ = [
    "ConvNeXtBlock",
    "DownBlock",
    "FLOW",
    "FlowModel",
    "SLatFlowModel",
    "STRUCTURE_FLOW",
    "SparseStructureFlowModel",
    "UpBlock",
]

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
# The sizes of TRELLIS.2-4B's flow models of latents; the texture model also gets the
# shape.
FLOW: dict[str, Any] = {
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
# The sizes of TRELLIS.2-4B's flow model of the structure.
STRUCTURE_FLOW: dict[str, Any] = FLOW | {
    "resolution": 16,
    "in_channels": 8,
    "out_channels": 8,
}


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


def trellis2(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
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


def cast_layers(blocks: Iterable[Any], dtype: mx.Dtype) -> None:
    """Cast convolutions and linear layers of (nested lists of) blocks, but no norms."""
    for layer in _layers(blocks):
        layer.set_dtype(dtype)


def torso_dtype(blocks: Iterable[Any], default: mx.Dtype) -> mx.Dtype:
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
    """Apply a 3x3x3 convolution, LayerNorm and a two-layer MLP, beside a skip.

    The convolution is full, not depthwise. The last layer starts at zero.

    Args:
        channels (int): The number of channels.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.trellis2.ConvNeXtBlock(8)(x).shape
        (64, 8)
    """

    def __init__(self, channels: int, mlp_ratio: float = 4.0):
        super().__init__()
        hidden = int(channels * mlp_ratio)
        self.norm: nn.LayerNorm = nn.LayerNorm(channels, eps=1e-6)
        self.conv: nn.SubmConv3d = nn.SubmConv3d(channels, channels, 3)
        last = zero(nn.Linear(hidden, channels))
        self.mlp: list[Any] = [nn.Linear(channels, hidden), mlx.nn.SiLU(), last]

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
    """Divide each row into up to eight, by channel-to-space, in a residual block.

    Args:
        channels (int): The number of input channels, a multiple of 8.
        out_channels (int): The number of output channels, a multiple of an eighth of
            the input's.
        pred_subdiv (bool): If ``True`` predict which fine cells are active.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> block = models.trellis2.UpBlock(8, 4, pred_subdiv=False)
        >>> y, _ = block(x, subdivision=mx.ones((64, 8), dtype=mx.bool_))
        >>> y.shape
        (512, 4)
    """

    def __init__(self, channels: int, out_channels: int, pred_subdiv: bool = True):
        super().__init__()
        if channels % CELLS or out_channels % (channels // CELLS):
            raise ValueError(
                "channels must be a multiple of 8 and out_channels a multiple of an "
                f"eighth of them; got {channels} and {out_channels}"
            )
        self.norm1: nn.LayerNorm = nn.LayerNorm(channels, eps=1e-6)
        self.norm2: nn.LayerNorm = nn.LayerNorm(out_channels, eps=1e-6, affine=False)
        self.conv1: nn.SubmConv3d = nn.SubmConv3d(channels, CELLS * out_channels, 3)
        self.conv2: nn.SubmConv3d = zero(nn.SubmConv3d(out_channels, out_channels, 3))
        if pred_subdiv:
            self.to_subdiv: nn.Linear = nn.Linear(channels, CELLS)
        self.repeats: int = out_channels // (channels // CELLS)

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
    """Join the rows of each coarse cell, by space-to-channel, in a residual block.

    Args:
        channels (int): The number of input channels.
        out_channels (int): The number of output channels, a multiple of 8 that
            divides 8 times the input's.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.trellis2.DownBlock(8, 16)(x).shape
        (8, 16)
    """

    def __init__(self, channels: int, out_channels: int):
        super().__init__()
        if out_channels % CELLS or CELLS * channels % out_channels:
            raise ValueError(
                "out_channels must be a multiple of 8 and divide 8 times channels; "
                f"got {channels} and {out_channels}"
            )
        self.norm1: nn.LayerNorm = nn.LayerNorm(channels, eps=1e-6)
        self.norm2: nn.LayerNorm = nn.LayerNorm(out_channels, eps=1e-6, affine=False)
        self.conv1: nn.SubmConv3d = nn.SubmConv3d(channels, out_channels // CELLS, 3)
        self.conv2: nn.SubmConv3d = zero(nn.SubmConv3d(out_channels, out_channels, 3))
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
        self.mlp: list[Any] = list(layers)

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
    """Return (N, channels) for (N, D) cells: for each axis sines, then cosines."""
    n, axes = coords.shape
    each = channels // axes // 2
    speed = mx.array([PERIOD ** (-i / each) for i in range(each)])
    angle = coords.astype(mx.float32)[:, :, None] * speed
    y = mx.concatenate([mx.sin(angle), mx.cos(angle)], axis=2)
    y = y.reshape(n, 2 * each * axes)
    return mx.pad(y, [(0, 0), (0, channels - y.shape[1])])


ROPE = (1.0, 10000.0)
PLACES = ("ape", "rope")


class FlowModel(Trellis2Net):
    """Hold the transformer that both flow models share; it has no call of its own.

    Args:
        resolution (int): The extent of the grid of latents.
        in_channels (int): The number of input channels.
        model_channels (int): The channels between the first and the last layer.
        cond_channels (int): The channels of the image's tokens.
        out_channels (int): The number of output channels.
        num_blocks (int): The number of blocks.
        num_heads (int, optional): The heads of an attention; by default the number of
            heads with ``num_head_channels`` each.
        num_head_channels (int): The channels of a head. Default: ``64``.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        pe_mode (str): The encoding of positions: ``"rope"`` rotates queries and keys,
            ``"ape"`` adds sines and cosines once. Default: ``"ape"``.
        rope_freq (tuple): The fastest rotation in radians a cell, and its ratio to the
            slowest. Default: ``(1, 10000)``.
        share_mod (bool): If ``True`` one layer makes the modulation of all blocks.
        qk_rms_norm (bool): If ``True`` normalise queries and keys of the attention
            among rows. Default: ``False``.
        qk_rms_norm_cross (bool): The same for the attention to tokens. Default:
            ``False``.
        dtype (mx.Dtype): The dtype of the blocks' linear layers.

    Examples:
        >>> net = models.SLatFlowModel(8, 8, 16, 12, 8, num_blocks=1, num_heads=2)
        >>> isinstance(net, models.trellis2.FlowModel)
        True
    """

    def __init__(
        self,
        resolution: int,
        in_channels: int,
        model_channels: int,
        cond_channels: int,
        out_channels: int,
        num_blocks: int,
        num_heads: int | None = None,
        num_head_channels: int = 64,
        mlp_ratio: float = 4.0,
        pe_mode: str = "ape",
        rope_freq: tuple[float, float] = ROPE,
        share_mod: bool = False,
        qk_rms_norm: bool = False,
        qk_rms_norm_cross: bool = False,
        dtype: mx.Dtype = mx.float32,
    ):
        super().__init__()
        dtype_name(dtype)
        if pe_mode not in PLACES:
            raise ValueError(f"pe_mode must be one of {PLACES}; got {pe_mode!r}")
        self.resolution: int = resolution
        self.pe_mode = pe_mode
        self.in_channels: int = in_channels
        self.out_channels: int = out_channels
        self.cond_channels = cond_channels
        self.t_embedder: TimestepEmbedder = TimestepEmbedder(model_channels)
        if share_mod:
            self.adaLN_modulation: list[Any] = modulation_layers(model_channels)
        self.input_layer: nn.Linear = nn.Linear(in_channels, model_channels)
        frequency, base = self._rotations(rope_freq)
        self.blocks: list[nn.ModulatedTransformerBlock] = [
            nn.ModulatedTransformerBlock(
                model_channels,
                num_heads or max(1, model_channels // num_head_channels),
                cond_channels,
                mlp_ratio,
                share_mod=share_mod,
                rope=pe_mode == "rope",
                rope_base=base,
                rope_frequency=frequency,
                qk_rms_norm=qk_rms_norm,
                qk_rms_norm_cross=qk_rms_norm_cross,
            )
            for _ in range(num_blocks)
        ]
        self.out_layer: nn.Linear = nn.Linear(model_channels, out_channels)
        if dtype != mx.float32:
            cast_layers(self.blocks, dtype)

    def _rotations(self, rope_freq: tuple[float, float]) -> tuple[float, float]:
        return tuple(rope_freq)

    def _velocity(
        self,
        x: SparseTensor,
        t: mx.array,
        cond: SparseTensor | mx.array,
        cond_lengths: mx.array | None,
    ) -> SparseTensor:
        packed = not isinstance(cond, SparseTensor) and cond.ndim == 2
        if packed and cond_lengths is not None:  # once, not in each block
            cond, cond_lengths = ops.to_sequences(cond, cond_lengths)
        tokens = cond.channels if isinstance(cond, SparseTensor) else cond.shape[-1]
        if tokens != self.cond_channels:
            raise ValueError(
                f"the net reads tokens of {self.cond_channels} channels; got {tokens}"
            )
        t = self._times(t, x.batch_size)
        y = self.input_layer(x.astype(dtype_of(self.input_layer)))
        outer = y.dtype
        torso = torso_dtype(self.blocks, outer)
        condition = self.t_embedder(t)
        if "adaLN_modulation" in self:
            condition = modulation_of(self.adaLN_modulation, condition)
        condition, cond = condition.astype(torso), cond.astype(torso)
        y = y.astype(torso)
        if self.pe_mode == "ape":
            rows = y.coordinate_set.coords
            y = y + place_features(rows[:, 1:], y.channels).astype(torso)
        for block in self.blocks:
            y = block(y, condition, cond, cond_lengths)
        y = ops.layer_norm(y.astype(outer)).astype(dtype_of(self.out_layer))
        return self.out_layer(y).astype(x.dtype)

    def _times(self, t: mx.array | float, batches: int) -> mx.array:
        t = mx.array(t) if not isinstance(t, mx.array) else t
        if tuple(t.shape) not in ((), (1,), (batches,)):
            raise ValueError(
                f"t must be one time, or ({batches},), one for each batch element; got "
                f"shape {tuple(t.shape)}"
            )
        return t.reshape(-1)


class SLatFlowModel(FlowModel):
    """Return the velocity of structured latents, of shape or texture, on voxels.

    Arguments are those of ``FlowModel``; ``trellis2.FLOW`` has the sizes of
    TRELLIS.2-4B. The input of the texture model is its own latents and those of the
    shape.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> net = models.SLatFlowModel(8, 8, 16, 12, 8, num_blocks=1, num_heads=2)
        >>> net(x, 500.0, mx.ones((1, 5, 12))).shape  # time, and the tokens of an image
        (64, 8)
    """

    def __call__(
        self,
        x: SparseTensor,
        t: mx.array | float,
        cond: SparseTensor | mx.array,
        concat_cond: SparseTensor | None = None,
        *,
        cond_lengths: mx.array | None = None,
    ) -> SparseTensor:
        """Return the velocity at the rows of ``x``, in its dtype.

        Args:
            x: (N, C) latents.
            t: (B,) times of the batch elements, or one for all, from 0 to 1000.
            cond: (B, M, cond_channels) tokens of the images, a tensor of them, or
                (T, cond_channels) tokens of all images in a row, in any floating dtype.
            concat_cond: a tensor of the same rows, whose channels follow those of x.
            cond_lengths: (B,) integers: tokens of each image; by default M.
        """
        expect_tensor(x)
        if concat_cond is not None:
            more = align(concat_cond, x).feats.astype(x.dtype)
            x = x.replace(mx.concatenate([x.feats, more], axis=1))
        if x.channels != self.in_channels:
            raise ValueError(
                f"the net reads {self.in_channels} channels, of x and concat_cond; got "
                f"{x.channels}"
            )
        prepare_scan(self, x, t, cond, cond_lengths, call=self._velocity)
        return self._velocity(x, t, cond, cond_lengths)


class SparseStructureFlowModel(FlowModel):
    """Return the velocity of the latents of a dense occupancy grid.

    Arguments are those of ``FlowModel``, but ``rope_freq`` has no effect: rotations
    always use (1, 10000), as published. ``trellis2.STRUCTURE_FLOW`` has the sizes of
    TRELLIS.2-4B.

    Examples:
        >>> net = models.SparseStructureFlowModel(4, 8, 16, 12, 8, 1, num_heads=2)
        >>> net(mx.ones((1, 8, 4, 4, 4)), 500.0, mx.ones((1, 5, 12))).shape
        (1, 8, 4, 4, 4)
    """

    def _rotations(self, rope_freq: tuple[float, float]) -> tuple[float, float]:
        return ROPE

    def __call__(
        self,
        x: mx.array,
        t: mx.array | float,
        cond: SparseTensor | mx.array,
        *,
        cond_lengths: mx.array | None = None,
    ) -> mx.array:
        """Return the velocity of ``x``, (B, out_channels, R, R, R) in its dtype.

        Args:
            x: (B, in_channels, R, R, R), R the resolution; channels stand first, as
                published.
            t, cond, cond_lengths: as of ``SLatFlowModel``.
        """
        size = self.resolution
        if x.ndim != 5 or tuple(x.shape[1:]) != (self.in_channels, *(size,) * 3):
            raise ValueError(
                f"x must have shape (B, {self.in_channels}, {size}, {size}, {size}); "
                f"got {tuple(x.shape)}"
            )
        rows = x.reshape(*x.shape[:2], -1).transpose(0, 2, 1)
        cells = self._grid(x.shape[0]).replace(rows.reshape(-1, self.in_channels))
        prepare_scan(self, cells, t, cond, cond_lengths, call=self._velocity)
        y = self._velocity(cells, t, cond, cond_lengths).feats
        y = y.reshape(x.shape[0], -1, self.out_channels).transpose(0, 2, 1)
        return y.reshape(x.shape[0], self.out_channels, *x.shape[2:])

    def _grid(self, batches: int) -> SparseTensor:
        """Return a tensor of all cells; kept, since plans live as long as it."""
        known = self.__dict__.setdefault("_grids", ModuleCache())
        cells = known.get("last")
        if cells is None or cells.batch_size != batches:
            shape = batches, *(self.resolution,) * 3
            mask = mx.ones(shape, dtype=mx.bool_)
            cells = SparseTensor.from_dense(mx.zeros((*shape, 1)), mask)
            known["last"] = cells
        return cells
