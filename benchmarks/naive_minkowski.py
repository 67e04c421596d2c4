"""MinkowskiEngine's and torchsparse's layers in PyTorch alone, for unmodified.py.

``patched`` puts these layers into ``compat``'s modules for the length of a block.
Tensors, keys and collation stay those of ``compat``; rows of strided maps, kernel maps,
products, pooling and normalization are computed here. Sorted rows find neighbours.
Strided maps have their rows in random order, except those of torchsparse 2.1. Works in
float64.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator
from unittest.mock import patch

import torch


def _places(queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Place of each row among others, or -1, by sorting codes of rows."""
    steps = torch.tensor([1 << 54, 1 << 36, 1 << 18, 1])
    shift = torch.tensor([0, 1 << 17, 1 << 17, 1 << 17])
    known, order = torch.sort(((rows.long() + shift) * steps).sum(1))
    wanted = ((queries.long() + shift) * steps).sum(1)
    found = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
    return torch.where(known[found] == wanted, order[found], -1)


def _pairs(fine: torch.Tensor, coarse: torch.Tensor, offsets):
    """Rows of two maps with ``fine = coarse + offset``, for each offset."""
    for offset in offsets:
        place = _places(coarse + torch.tensor([0, *offset]), fine)
        rows = (place >= 0).nonzero()[:, 0]
        yield place[rows], rows


def _offsets(size, unit, centre=None):
    """Offsets of a box in input units, the first axis fastest."""
    axes = []
    for n, u in zip(size, unit, strict=True):
        first = (n // 2 if n % 2 else 0) if centre is None else centre
        axes.append([(j - first) * u for j in range(n)])
    return [each[::-1] for each in itertools.product(*reversed(axes))]


def _sums(x, out, pairs, weight) -> torch.Tensor:
    for k, (i, o) in enumerate(pairs):
        out = out.index_add(0, o, x[i] @ weight[k] if weight is not None else x[i])
    return out


def _minkowski() -> list:
    """Return patches of compat's MinkowskiEngine."""
    import MinkowskiEngine as ME

    manager = ME.CoordinateManager
    convolution = sys.modules["MinkowskiEngine.MinkowskiConvolution"]
    pooling = sys.modules["MinkowskiEngine.MinkowskiPooling"]

    def stride(self, key, steps, string_id=""):
        strides, text = key.get_key()
        steps = ME.convert_to_int_list(steps, self.D)
        strides = [a * b for a, b in zip(strides, steps, strict=True)]
        made = ME.CoordinateMapKey(strides, text)
        if made not in self._maps:
            unit = torch.tensor([1, *strides])
            rows = torch.floor(self.map_of(key).coords / unit) * unit
            rows = torch.unique(rows.int(), dim=0)
            self._add(made, rows[torch.randperm(len(rows))])
        return made

    def edges(layer, x, out_key, by_cells=False):
        kernel, other = layer.kernel_generator, x.coordinate_manager.map_of(out_key)
        coarse, fine, unit = other.coords, x.C, x.tensor_stride
        if layer.is_transpose:
            coarse, fine, unit = x.C, other.coords, other.stride
        if by_cells:
            size = kernel.kernel_stride
            offsets = _offsets(size, unit, centre=0)
        else:
            steps = zip(unit, kernel.kernel_dilation, strict=True)
            steps = [u * d for u, d in steps]
            offsets = _offsets(kernel.kernel_size, steps)
            if kernel.region_type is ME.RegionType.HYBRID:  # as 0.4 counted
                offsets = [(0,) * len(steps)]
                for a, (n, u) in enumerate(zip(kernel.kernel_size, steps, strict=True)):
                    places = [j * u for j in range(-(n - 1) // 2, n // 2 + 1) if j]
                    offsets += [
                        (*o[:a], p, *o[a + 1 :]) for o in offsets for p in places
                    ]
        for fine_rows, coarse_rows in _pairs(fine, coarse, offsets):
            if layer.is_transpose:
                yield coarse_rows, fine_rows
            else:
                yield fine_rows, coarse_rows

    def convolve(self, x, coordinates=None):
        if self.use_mm:
            y = x.F @ self.kernel
            return x._like(y if self.bias is None else y + self.bias)
        key = self._out_key(x, coordinates)
        shape = x.coordinate_manager.size(key), self.out_channels
        y = _sums(x.F, x.F.new_zeros(shape), edges(self, x, key), self.kernel)
        return x._at(y if self.bias is None else y + self.bias, key)

    def pool(self, x, coordinates=None):
        key, mode = self._out_key(x, coordinates), self.pooling_mode.reduction
        kernel = self.kernel_generator
        pairs = list(edges(self, x, key, kernel.kernel_size == kernel.kernel_stride))
        count = x.coordinate_manager.size(key)
        if mode == "max":
            y = x.F.new_full((count, x.F.shape[1]), -math.inf)
            for i, o in pairs:
                index = o[:, None].expand(-1, x.F.shape[1])
                y = y.scatter_reduce(0, index, x.F[i], "amax")
            return x._at(y, key)
        y = _sums(x.F, x.F.new_zeros((count, x.F.shape[1])), pairs, None)
        if mode == "avg":
            ones = torch.zeros(count, 1, dtype=x.F.dtype)
            y = y / _sums(torch.ones_like(x.F[:, :1]), ones, pairs, None)
        return x._at(y, key)

    def batch_pool(x, reduction, layer=None):
        function = {"avg": torch.mean, "sum": torch.sum, "max": torch.amax}[reduction]
        rows = [x.C[:, 0] == b for b in range(int(x.C[:, 0].max()) + 1)]
        pooled = [function(x.F[each], dim=0) for each in rows]
        return torch.stack(pooled), x.coordinate_manager.origin()

    def instance_norm(self, x):
        y = torch.empty_like(x.F)
        for b in torch.unique(x.C[:, 0]):
            rows = (x.C[:, 0] == b).nonzero()[:, 0]
            var, mean = torch.var_mean(x.F[rows], dim=0, correction=0)
            y = y.index_copy(0, rows, (x.F[rows] - mean) / torch.sqrt(var + 1e-8))
        return x._like(y * self.weight + self.bias)

    return [
        patch.object(manager, "stride", stride),
        patch.object(convolution.MinkowskiConvolutionBase, "forward", convolve),
        patch.object(pooling.MinkowskiPoolingBase, "forward", pool),
        patch.object(pooling, "batch_pool", batch_pool),
        patch.object(ME.MinkowskiInstanceNorm, "forward", instance_norm),
    ]


def _torchsparse(version: str) -> list:
    """Return patches of compat's torchsparse."""
    if version == "1.4":
        from mlx_lattice.compat.torchsparse_1_4 import version1 as module
    else:
        from mlx_lattice.compat.torchsparse import convolution as module

    def rows_of(x):
        if version == "1.4":
            return x.coords[:, [3, 0, 1, 2]], x.stride
        return x.coords, (1, 1, 1)

    def order(size, unit):
        if math.prod(size) % 2:
            return _offsets(size, unit)
        axes = [[j * u for j in range(n)] for n, u in zip(size, unit, strict=True)]
        return list(itertools.product(*axes))

    def forward(self, x):
        size, steps = self.kernel_size, self.stride
        if self.kernel_volume == 1 and max(steps) == 1:
            y = x.feats @ self.kernel.reshape(self.kernel.shape[-2:])
            return x._like(y if self.bias is None else y + self.bias)
        caches = x if version == "1.4" else x._caches
        if self.transposed:
            to = tuple(a // b for a, b in zip(x.stride, steps, strict=True))
            coords, pairs = caches.kmaps["reference", to, size, steps]
            pairs = [(o, i) for i, o in pairs]
        else:
            to = tuple(a * b for a, b in zip(x.stride, steps, strict=True))
            coords, (rows, unit) = x.coords, rows_of(x)
            coarse = rows
            if max(steps) > 1:
                spread = torch.tensor(
                    [1, *(u * s for u, s in zip(unit, steps, strict=True))]
                )
                coarse = torch.floor(rows / spread).int()
                if version != "1.4":  # the grid ends with the greatest coordinates
                    last = (rows.amax(0)[1:] - torch.tensor(size) + 1) // spread[1:]
                    coarse = coarse[(coarse[:, 1:] <= last).all(1)]
                coarse = torch.unique(coarse, dim=0)
                if version == "1.4":  # 2.1 sorts rows, and nets use the first
                    coarse = coarse[torch.randperm(len(coarse))]
                coords = coarse
                if version == "1.4":
                    coords = (coarse * spread)[:, [1, 2, 3, 0]].int()
                coarse = coarse * spread
            pairs = list(_pairs(rows, coarse, order(size, unit)))
            caches.kmaps["reference", x.stride, size, steps] = x.coords, pairs
        weight = self.kernel.reshape(-1, *self.kernel.shape[-2:])
        y = _sums(
            x.feats, x.feats.new_zeros((len(coords), weight.shape[2])), pairs, weight
        )
        made = x._of(y, coords, to)
        if version == "1.4":
            made.cmaps, made.kmaps = x.cmaps, x.kmaps
            made.cmaps.setdefault(to, coords)
        else:
            made._caches = x._caches
        return made

    def devoxelize(feats, coords, weights):
        chosen = feats[coords.clamp(min=0).long()]
        weights = (weights * (coords >= 0)).to(feats.dtype)
        return (chosen * weights[..., None]).sum(1)

    functional = sys.modules["torchsparse.nn.functional"]
    return [
        patch.object(module.Conv3d, "forward", forward),
        patch.object(functional, "spdevoxelize", devoxelize),
    ]


LIBRARIES = {
    "MinkowskiEngine": _minkowski,
    "torchsparse": lambda: _torchsparse("2.1"),
    "torchsparse==1.4": lambda: _torchsparse("1.4"),
}


@contextlib.contextmanager
def patched(*libraries: str) -> Iterator[None]:
    """Compute installed libraries' layers in PyTorch alone inside of the block."""
    with contextlib.ExitStack() as stack:
        for library in libraries:
            for each in LIBRARIES[library]():
                stack.enter_context(each)
        yield
