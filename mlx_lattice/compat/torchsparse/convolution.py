"""conv3d and Conv3d of torchsparse 2.1, by the relations of mlx_lattice.

``kernel`` is (volume, in, out), and (in, out) if the volume and the stride are 1.
Weights of a kernel with an odd volume are counted with the first axis fastest. The
dilation names a kernel map and has no other effect, as in torchsparse.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from ...coordinate_set import CoordinateKey
from ...coordinates import CoordinateManager
from ...relation import Relation
from .. import bridge
from .points import IntOrSequence, expect, make_ntuple
from .tensor import Sparse, SparseTensor, kernel_maps

__all__ = [
    "Conv3d", "conv3d", "get_conv_mode", "get_downsample_mode", "get_kmap_mode",
    "set_conv_mode", "set_downsample_mode", "set_kmap_mode",
]  # fmt: skip

ONES = 1, 1, 1


class KernelMap(NamedTuple):
    """Edges of a convolution, and the rows that it writes."""

    relation: Relation
    coords: torch.Tensor
    spatial_range: tuple[int, ...] | None = None


# Modes


class _Modes:
    conv: object = 0
    kmap = "hashmap_on_the_fly"
    downsample = "spconv"


def get_conv_mode() -> object:
    """Return what was set."""
    return _Modes.conv


def set_conv_mode(conv_mode: object) -> None:
    """Do nothing but keep the choice."""
    _Modes.conv = conv_mode


def get_kmap_mode() -> str:
    """Return the mode of kernel maps."""
    return _Modes.kmap


def set_kmap_mode(kmap_mode: str) -> None:
    """Choose which rows a strided convolution makes.

    "hashmap_on_the_fly": those that the kernel reaches within the grid. "hashmap": the
    floor of all rows, if the kernel is as large as the stride; its kernels are centred.
    """
    modes = "hashmap_on_the_fly", "hashmap"
    expect(kmap_mode in modes, f"kmap_mode must be one of {modes}; got {kmap_mode!r}")
    _Modes.kmap = kmap_mode


def get_downsample_mode() -> str:
    """Return the mode of rows."""
    return _Modes.downsample


def set_downsample_mode(downsample_mode: str) -> None:
    """Choose the rows of kernels larger than their stride, with kmap_mode "hashmap".

    "spconv": those that the kernel reaches within the grid. "minkowski": the floor.
    """
    modes = "spconv", "minkowski"
    expect(
        downsample_mode in modes,
        f"downsample_mode must be one of {modes}; got {downsample_mode!r}",
    )
    _Modes.downsample = downsample_mode


# Kernel maps


def relation_to(
    manager: CoordinateManager,
    key: CoordinateKey,
    target: CoordinateKey,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    first: tuple[int, ...],
) -> Relation:
    """Return the edges ``in = out * stride + j - first`` of two sets, j from 0."""
    if key is target and first == tuple(n // 2 for n in size):
        return manager.submanifold_kernel_relation(key, kernel_size=size)
    arguments = {"kernel_size": size, "stride": stride, "padding": first}
    return manager.target_kernel_relation(key, target, **arguments)


def middle(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the place of each axis that has offset 0 in a centred kernel."""
    return tuple((n - 1) // 2 for n in size)


def contracted(
    x: Sparse,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    size: tuple[int, ...],
    relation: Relation,
    layer: object,
) -> torch.Tensor:
    """Return the features of a convolution.

    Args:
        x: the input.
        weight: (volume, in, out) in torchsparse's order, or (in, out).
        bias: (out,) or None.
        size: of the kernel.
        relation: the edges, whose offsets have the last axis fastest.
        layer: the module that calls.
    """
    channels = weight.shape[-2:]
    if math.prod(size) % 2:
        axes = weight.reshape(*reversed(size), *channels)
        weight = axes.permute(2, 1, 0, 3, 4)
    weight = weight.reshape(-1, *channels)
    return bridge.convolve(x.feats, weight, bias, relation, layer=layer)


def is_product(size: Any, stride: Any, dilation: Any) -> bool:
    """Whether a convolution is one matrix product."""
    return size == stride == dilation == ONES


def product_of(x: Sparse, weight: torch.Tensor, bias: torch.Tensor | None) -> Sparse:
    """Return the matrix product of features and a weight."""
    feats = x.feats @ weight.reshape(weight.shape[-2:])
    return x._like(feats if bias is None else feats + bias)


def missing_map(stride: tuple[int, ...]) -> KeyError:
    """Return the error of a transposed convolution without its pair."""
    return KeyError(
        f"a transposed convolution to tensor stride {stride} takes the kernel map of "
        "the convolution with the same kernel_size, stride and dilation that made its "
        "rows; there is none in this tensor"
    )


def _extents(x: SparseTensor) -> tuple[int, ...] | None:
    """Return the extents of the grid, or None if coordinates are negative."""
    if x.spatial_range is not None:
        return tuple(x.spatial_range[-3:])
    if not len(x.coords) or (x.coords[:, 1:] < 0).any():
        return None
    return tuple((x.coords[:, 1:].amax(0) + 1).tolist())


def _built(x: SparseTensor, size, stride, padding, config) -> KernelMap:
    """Return the kernel map of a convolution that is not transposed."""
    maps = kernel_maps(x._caches.kmaps)
    by_table = _mode(config, "kmap_mode", _Modes.kmap) == "hashmap"
    floors = _mode(config, "downsample_mode", _Modes.downsample) == "minkowski"
    floors = floors or all(s in (1, n) for s, n in zip(stride, size, strict=True))
    shape = _extents(x)
    facts = {} if shape is None else {"spatial_shape": shape}
    key = maps.key_of(x.stride, x.coords, x.coords.int(), **facts)
    manager, coords = maps.manager, x.coords
    spatial_range = _range(x.spatial_range, size, stride, padding)
    if stride == ONES:
        # A kernel of an even volume counts from 0 on every axis.
        is_odd = math.prod(size) % 2
        first = middle(size) if by_table or is_odd else (0, 0, 0)
        relation = relation_to(manager, key, key, size, stride, first)
        return KernelMap(relation, coords, spatial_range)
    kernel = {"kernel_size": size, "stride": stride}
    if by_table and floors:
        place = {"padding": middle(size), "support": "cell"}
        relation = manager.kernel_relation(key, **kernel, **place)
    else:
        if shape is None and len(coords):
            raise ValueError(
                "a strided convolution of torchsparse 2.1 needs coordinates that are "
                f"not negative; the least are {coords[:, 1:].amin(0).tolist()}. Move "
                'them, or call set_kmap_mode("hashmap")'
            )
        place = {"padding": padding, "support": "reach"}
        relation = manager.kernel_relation(key, **kernel, **place)
        if by_table:
            to = relation.out_key
            relation = relation_to(manager, key, to, size, stride, middle(size))
    made = manager[relation.out_key].coords
    with torch.inference_mode(False):
        coords = bridge.to_torch(made, coords.device, copy=True)
    return KernelMap(relation, coords, spatial_range)


def _mode(config: object, name: str, default: str) -> str:
    if isinstance(config, dict):
        return config.get(name, default)
    return getattr(config, name, default)


def _range(spatial_range, size, stride, padding) -> tuple[int, ...] | None:
    if spatial_range is None:
        return None
    *batch, x, y, z = spatial_range
    sizes = zip((x, y, z), size, stride, padding, strict=True)
    return *batch, *((n + 2 * p - k) // s + 1 for n, k, s, p in sizes)


@bridge.not_compiled
def conv3d(
    input: SparseTensor,
    weight: torch.Tensor,
    kernel_size: IntOrSequence,
    bias: torch.Tensor | None = None,
    stride: IntOrSequence = 1,
    padding: IntOrSequence = 0,
    dilation: IntOrSequence = 1,
    config: object = None,
    transposed: bool = False,
    generative: bool = False,
    training: bool = False,
    *,
    layer: object = None,
) -> SparseTensor:
    """Return the convolved tensor.

    A strided convolution writes the rows that the kernel reaches within the grid of the
    greatest coordinates, or of the spatial range: cells that the grid has only a part
    of are cut, as in torchsparse.

    Args:
        input: the tensor.
        weight: (volume, in, out), or (in, out) for a volume of 1.
        kernel_size, stride, padding, dilation: an int, or one for each axis.
        bias: (out,).
        config: modes of kernel maps; other entries have no effect.
        transposed: whether to go back to the rows of the convolution with the same
            kernel size, stride and dilation.
        generative: not provided.
        training: ignored.
        layer: the module that calls.

    Raises:
        KeyError: a transposed convolution has no such pair.
        ValueError: a coordinate of a strided convolution is negative.
    """
    size, stride = make_ntuple(kernel_size, 3), make_ntuple(stride, 3)
    dilation, padding = make_ntuple(dilation, 3), make_ntuple(padding, 3)
    if generative:
        raise NotImplementedError(
            "conv3d(generative=True) is not provided; use "
            "ops.generative_conv_transpose3d of mlx_lattice"
        )
    if is_product(size, stride, dilation):
        return product_of(input, weight, bias)
    caches, kmaps = input._caches, input._caches.kmaps
    pairs = list(zip(input.stride, stride, strict=True))
    if transposed:
        to = tuple(a // b for a, b in pairs)
        found = kmaps.get((to, size, stride, dilation))
        if found is None or to not in caches.cmaps:
            raise missing_map(to)
        relation, (coords, spatial_range) = found.relation.T, caches.cmaps[to]
    else:
        to, question = tuple(a * b for a, b in pairs), (input.stride, size, stride)
        found = kmaps.get((*question, dilation))
        if found is None:
            found = _built(input, size, stride, padding, config)
            kmaps[(*question, dilation)] = found
        relation, coords, spatial_range = found
    feats = contracted(input, weight, bias, size, relation, layer)
    made = SparseTensor(feats, coords, to, spatial_range)
    made._caches = caches
    caches.cmaps.setdefault(input.stride, (input.coords, input.spatial_range))
    caches.cmaps.setdefault(to, (coords, spatial_range))
    return made


class Convolution(nn.Module):
    """What the layers of both versions share.

    Attributes:
        kernel: (volume, in, out), or (in, out).
        bias: (out,) or None.
    """

    in_channels: int
    out_channels: int

    # flat: whether the kernel of volume 1 is (in, out) whatever the stride.
    def _set(self, channels, kernel_size, stride, dilation, bias, transposed, flat):
        self.in_channels, self.out_channels = channels
        self.kernel_size: tuple[int, ...] = make_ntuple(kernel_size, 3)
        self.stride: tuple[int, ...] = make_ntuple(stride, 3)
        self.dilation: int = dilation
        self.transposed: bool = transposed
        self.kernel_volume: int = math.prod(self.kernel_size)
        is_flat = self.kernel_volume == 1 and (flat or self.stride == ONES)
        shape = () if is_flat else (self.kernel_volume,)
        self.kernel: torch.Tensor = nn.Parameter(torch.empty(*shape, *channels))
        self.bias: torch.Tensor | None = (
            nn.Parameter(torch.empty(channels[1])) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters uniformly."""
        channels = self.out_channels if self.transposed else self.in_channels
        bound = 1 / math.sqrt(channels * self.kernel_volume)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the layer."""
        text = (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        )
        text += f", stride={self.stride}" if self.stride != ONES else ""
        text += f", dilation={self.dilation}" if self.dilation != 1 else ""
        text += ", bias=False" if self.bias is None else ""
        return text + (", transposed=True" if self.transposed else "")


class Conv3d(Convolution):
    """A convolution in 3 dimensions.

    Args:
        in_channels, out_channels: channels.
        kernel_size, stride, padding: an int, or one for each axis.
        dilation: an int.
        bias: whether a bias is added.
        transposed: whether the layer goes back to the rows of its pair.
        generative: not provided.
        config: see ``conv3d``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrSequence = 3,
        stride: IntOrSequence = 1,
        padding: IntOrSequence = 0,
        dilation: int = 1,
        bias: bool = False,
        transposed: bool = False,
        generative: bool = False,
        config: object = None,
    ):
        super().__init__()
        channels = in_channels, out_channels
        facts = kernel_size, stride, dilation, bias, transposed
        self._set(channels, *facts, flat=False)
        sizes = zip(self.kernel_size, self.stride, make_ntuple(padding, 3), strict=True)
        self.padding: tuple[int, ...] = tuple(
            n // 2 if n % 2 and s == 1 else p for n, s, p in sizes
        )
        self.generative: bool = generative
        self._config = config

    def forward(self, input: SparseTensor) -> SparseTensor:
        """Return the convolved tensor."""
        sizes = self.kernel_size, self.bias, self.stride, self.padding, self.dilation
        facts = self._config, self.transposed, self.generative, self.training
        return conv3d(input, self.kernel, *sizes, *facts, layer=self)
