"""What differs in torchsparse 1.4.

Coordinates are x, y, z, batch, and multiples of the tensor stride: at stride 2 they are
0, 2, 4. Strided convolutions write the floor of all rows, if the kernel is as large as
the stride. Kernels are centred.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .. import bridge
from ..torchsparse import points
from ..torchsparse.convolution import (
    ONES,
    Convolution,
    KernelMap,
    contracted,
    is_product,
    middle,
    missing_map,
    product_of,
    relation_to,
)
from ..torchsparse.points import IntOrSequence, get_kernel_offsets, make_ntuple
from ..torchsparse.tensor import KernelMaps, Sparse, kernel_maps

__all__ = [
    "Conv3d", "SparseTensor", "calc_ti_weights", "conv3d", "sparse_quantize",
    "spdownsample",
]  # fmt: skip


class SparseTensor(Sparse):
    """Features on rows of coordinates, of torchsparse 1.4.

    Args:
        feats: (N, C).
        coords: (N, 4) int32: x, y, z, batch, multiples of the tensor stride.
        stride: the tensor stride, an int or one for each axis.

    Attributes:
        cmaps: coordinates by tensor stride, shared with what comes from the tensor.
        kmaps: kernel maps by tensor stride, kernel size, stride and dilation.
    """

    batch_column = 3

    def __init__(
        self, feats: torch.Tensor, coords: torch.Tensor, stride: IntOrSequence = 1
    ):
        self.feats: torch.Tensor = feats
        self.coords: torch.Tensor = coords
        self.stride: tuple[int, ...] = make_ntuple(stride, 3)
        self.cmaps: dict[Any, torch.Tensor] = {}
        self.kmaps: dict[Any, Any] = KernelMaps()

    def _like(self, feats: torch.Tensor) -> SparseTensor:
        made = SparseTensor(feats, self.coords, self.stride)
        made.cmaps, made.kmaps = self.cmaps, self.kmaps
        return made

    @staticmethod
    def _of(feats: torch.Tensor, coords: torch.Tensor, stride) -> SparseTensor:
        return SparseTensor(feats, coords, stride)


def calc_ti_weights(
    coords: torch.Tensor, idx_query: torch.Tensor, scale: float = 1
) -> torch.Tensor:
    """Return (8, N) trilinear weights; ``idx_query`` is (8, N) too.

    Otherwise as ``calc_ti_weights`` of 2.1.
    """
    return points.calc_ti_weights(coords, idx_query.T, scale).T.contiguous()


def sparse_quantize(
    coords: np.ndarray,
    voxel_size: float | tuple[float, ...] = 1,
    *,
    return_index: bool = False,
    return_inverse: bool = False,
) -> Any:
    """Return the distinct voxels of points, sorted, moved so that the least are 0.

    Arguments are those of 2.1, which does not move them.
    """
    voxels = points.quantized(coords, voxel_size)
    moved = voxels - voxels.min(axis=0)
    return points.chosen(voxels, moved, return_index, return_inverse)


# Convolution


def _batch_first(coords: torch.Tensor) -> torch.Tensor:
    return torch.cat([coords[:, 3:], coords[:, :3]], dim=1)


def _batch_last(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[:, 1:], rows[:, :1]], dim=1)


def spdownsample(
    coords: torch.Tensor,
    stride: IntOrSequence = 2,
    kernel_size: IntOrSequence = 2,
    tensor_stride: IntOrSequence = 1,
) -> torch.Tensor:
    """Return the rows of a strided convolution, sorted by batch, x, y, z.

    They are the floor of all rows if the kernel is as large as the stride; otherwise
    the rows that a kernel around an input has, from the least coordinates on.
    """
    stride, size = make_ntuple(stride, 3), make_ntuple(kernel_size, 3)
    unit = make_ntuple(tensor_stride, 3)
    steps = coords.new_tensor([a * b for a, b in zip(stride, unit, strict=True)])
    if all(s in (1, n) for s, n in zip(stride, size, strict=True)):
        places, batch = coords[:, :3] // steps * steps, coords[:, 3:]
    else:
        offsets = get_kernel_offsets(size, unit, device=coords.device)
        low = coords[:, :3].amin(0)
        places = (coords[:, None, :3] + offsets).flatten(0, 1)
        batch = coords[:, 3:].repeat_interleave(len(offsets), 0)
        kept = ((places % steps == 0) & (places >= low)).all(1)
        places, batch = places[kept], batch[kept]
    return _batch_last(torch.unique(torch.cat([batch, places], dim=1), dim=0))


def _key(maps: KernelMaps, coords: torch.Tensor, stride: tuple[int, ...]):
    steps = coords.new_tensor((1, *stride))
    rows = _batch_first(coords.int())
    if (rows % steps).any():
        raise ValueError(
            f"coordinates of torchsparse 1.4 are multiples of the tensor stride, "
            f"{stride}; these are not. Coordinates that are divided by it belong to "
            "torchsparse 2"
        )
    return maps.key_of(stride, coords, rows // steps)


def _built(x: SparseTensor, size, stride, out_stride) -> KernelMap:
    maps = kernel_maps(x.kmaps)
    manager, key = maps.manager, _key(maps, x.coords, x.stride)
    if stride == ONES:
        relation = relation_to(manager, key, key, size, stride, middle(size))
        return KernelMap(relation, x.coords)
    if all(s in (1, n) for s, n in zip(stride, size, strict=True)):
        kernel = {"kernel_size": size, "stride": stride, "padding": middle(size)}
        relation = manager.kernel_relation(key, **kernel, support="cell")
        made = manager[relation.out_key].coords
        with torch.inference_mode(False):
            cells = bridge.to_torch(made, x.coords.device, copy=True)
            coords = _batch_last(cells * cells.new_tensor((1, *out_stride)))
        maps.note(out_stride, coords, relation.out_key)
        return KernelMap(relation, coords)
    coords = spdownsample(x.coords, stride, size, x.stride)
    to = _key(maps, coords, out_stride)
    return KernelMap(relation_to(manager, key, to, size, stride, middle(size)), coords)


@bridge.not_compiled
def conv3d(
    input: SparseTensor,
    weight: torch.Tensor,
    kernel_size: IntOrSequence,
    bias: torch.Tensor | None = None,
    stride: IntOrSequence = 1,
    dilation: IntOrSequence = 1,
    transposed: bool = False,
    *,
    layer: object = None,
) -> SparseTensor:
    """Return the convolved tensor.

    Args:
        input: the tensor.
        weight: (volume, in, out), or (in, out) for a volume of 1.
        kernel_size, stride: an int, or one for each axis.
        bias: (out,).
        dilation: names the kernel map; no other effect, as in torchsparse.
        transposed: whether to go back to the rows of the convolution with the same
            kernel size, stride and dilation.
        layer: the module that calls.

    Raises:
        KeyError: a transposed convolution has no such pair.
    """
    size, stride = make_ntuple(kernel_size, 3), make_ntuple(stride, 3)
    dilation = make_ntuple(dilation, 3)
    if is_product(size, stride, dilation):
        made = product_of(input, weight, bias)
        made.cmaps.setdefault(made.stride, made.coords)
        return made
    pairs = list(zip(input.stride, stride, strict=True))
    if transposed:
        to = tuple(a // b for a, b in pairs)
        found = input.kmaps.get((to, size, stride, dilation))
        if found is None or to not in input.cmaps:
            raise missing_map(to)
        relation, coords = found.relation.T, input.cmaps[to]
    else:
        to = tuple(a * b for a, b in pairs)
        question = input.stride, size, stride, dilation
        found = input.kmaps.get(question)
        if found is None:
            found = input.kmaps[question] = _built(input, size, stride, to)
        relation, coords = found.relation, found.coords
    feats = contracted(input, weight, bias, size, relation, layer)
    made = SparseTensor(feats, coords, to)
    made.cmaps, made.kmaps = input.cmaps, input.kmaps
    made.cmaps.setdefault(input.stride, input.coords)
    made.cmaps.setdefault(to, coords)
    return made


class Conv3d(Convolution):
    """A convolution in 3 dimensions.

    Args:
        in_channels, out_channels: channels.
        kernel_size, stride: an int, or one for each axis.
        dilation: an int.
        bias: whether a bias is added.
        transposed: whether the layer goes back to the rows of its pair.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrSequence = 3,
        stride: IntOrSequence = 1,
        dilation: int = 1,
        bias: bool = False,
        transposed: bool = False,
    ):
        super().__init__()
        channels = in_channels, out_channels
        facts = kernel_size, stride, dilation, bias, transposed
        self._set(channels, *facts, flat=True)

    def forward(self, input: SparseTensor) -> SparseTensor:
        """Return the convolved tensor."""
        sizes = self.kernel_size, self.bias, self.stride, self.dilation
        return conv3d(input, self.kernel, *sizes, self.transposed, layer=self)
