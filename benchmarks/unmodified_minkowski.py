"""Run public nets for MinkowskiEngine and torchsparse, unmodified, by compat.

Each net is a checkout of its repository, under a folder:

    python benchmarks/unmodified_minkowski.py --source /path/to/checkouts
    python benchmarks/unmodified_minkowski.py --source /path/to/checkouts fcgf spvcnn

A net runs forward and backward with random weights. Beside it the same net runs in
float64, with layers of PyTorch alone in the place of those of mlx_lattice: they find
their neighbours by sorting rows, and make the rows of strided maps in another order.
ReLU is softplus in both, so that gradients do not depend on the signs of rounding.
Prints the relative errors of the output and of the gradients, and times.
"""

from __future__ import annotations

import argparse
import codecs
import collections
import collections.abc
import copy
import itertools
import json
import math
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from mlx_lattice import compat


class Case(NamedTuple):
    """A net and how to run it.

    Attributes:
        net: the module.
        run: returns the net's output of float features; takes the net and a dtype.
        rows: rows of the input.
    """

    net: torch.nn.Module
    run: Callable[[torch.nn.Module, torch.dtype], torch.Tensor]
    rows: int


# Scenes


def surface(rows: int, seed: int = 0, size: float = 0.02) -> np.ndarray:
    """Points of a wavy floor and a wall, about ``rows`` voxels of ``size``."""
    draw = np.random.default_rng(seed)
    extent = math.sqrt(rows / 2) * size
    flat = draw.uniform(-extent / 2, extent / 2, (8 * rows, 2))
    height = 0.2 * np.sin(3 * flat[:, 0] / extent) * np.cos(4 * flat[:, 1] / extent)
    floor = np.column_stack([flat, height * extent])
    wall = np.column_stack([flat[:, 0], np.full(len(flat), extent / 2), flat[:, 1]])
    points = np.concatenate([floor, wall])
    return points[draw.permutation(len(points))].astype(np.float32)


def voxels(rows: int, batch: int = 2, size: float = 0.02) -> torch.Tensor:
    """(N, 4) int32 distinct voxels of a few surfaces: batch, x, y, z."""
    made = []
    for element in range(batch):
        cells = np.unique(np.floor(surface(rows, element) / size), axis=0)
        cells = np.random.default_rng(element).permutation(cells)[:rows]
        made.append(np.column_stack([np.full(len(cells), element), cells]))
    return torch.from_numpy(np.concatenate(made)).int()


# The reference: layers in PyTorch alone


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


def minkowski_reference() -> None:
    """Put layers of PyTorch alone into compat's MinkowskiEngine."""
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

    manager.stride = stride
    convolution.MinkowskiConvolutionBase.forward = convolve
    pooling.MinkowskiPoolingBase.forward = pool
    pooling.batch_pool = batch_pool
    ME.MinkowskiInstanceNorm.forward = instance_norm


def torchsparse_reference(version: str) -> None:
    """Put a convolution of PyTorch alone into compat's torchsparse."""
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
                if version == "1.4":  # nets for 2.1 give points without a voxel row 0
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

    module.Conv3d.forward = forward
    sys.modules["torchsparse.nn.functional"].spdevoxelize = devoxelize


# Packages that checkouts import


def _stub(name: str, **names: object) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = sys.modules.setdefault(
            ".".join(parts[:end]), types.ModuleType(".".join(parts[:end]))
        )
        if end > 1:
            setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
    vars(sys.modules[name]).update(names)


def _scatter_mean(src, index, dim=0, dim_size=None):
    count = int(index.max()) + 1 if dim_size is None else dim_size
    index = index.reshape(-1)
    total = src.new_zeros((count, src.shape[1])).index_add(0, index, src)
    return total / torch.bincount(index, minlength=count).clamp(min=1)[:, None]


def _farthest(points: torch.Tensor, count: int) -> torch.Tensor:
    """(B, count) indices of points, each the farthest from those before."""
    made = []
    for rows in points.double():
        chosen, apart = [0], torch.full((len(rows),), math.inf)
        for _ in range(count - 1):
            distance = ((rows - rows[chosen[-1]]) ** 2).sum(1)
            apart = torch.minimum(apart.double(), distance)
            chosen.append(int(apart.argmax()))
        made.append(torch.tensor(chosen))
    return torch.stack(made).int()


# Nets


def _sparse(rows: int, channels: int, dims: int = 3):
    """Coordinates and features of a scene."""
    coords = voxels(rows)
    draw = torch.Generator().manual_seed(1)
    return coords, torch.randn(len(coords), channels, generator=draw)


def fcgf(source: Path, rows: int) -> Case:
    """FCGF's ResUNetBN2C."""
    import MinkowskiEngine as ME

    sys.path.insert(0, str(source / "FCGF"))
    from model import load_model

    net = load_model("ResUNetBN2C")(1, 32, conv1_kernel_size=5, normalize_feature=True)
    coords, feats = _sparse(rows, 1)

    def run(net, dtype):
        return net(ME.SparseTensor(feats.to(dtype), coordinates=coords)).F

    return Case(net, run, len(coords))


def deep_global_registration(source: Path, rows: int) -> Case:
    """DeepGlobalRegistration's ResUNetBN2C, written for 0.4."""
    import MinkowskiEngine as ME

    sys.path.insert(0, str(source / "DeepGlobalRegistration"))
    from model import load_model

    net = load_model("ResUNetBN2C")(1, 32, conv1_kernel_size=7, normalize_feature=True)
    coords, feats = _sparse(rows, 1)

    def run(net, dtype):
        return net(ME.SparseTensor(feats.to(dtype), coords=coords)).F

    return Case(net, run, len(coords))


def minkloc3d(source: Path, rows: int) -> Case:
    """MinkLoc3D."""
    sys.path.insert(0, str(source / "MinkLoc3D"))
    from models.minkloc import MinkLoc

    sizes = {"planes": [32, 64, 64], "layers": [1, 1, 1], "num_top_down": 1}
    net = MinkLoc("MinkFPN_GeM", 1, 256, 256, conv0_kernel_size=5, **sizes)
    coords, feats = _sparse(rows, 1)

    def run(net, dtype):
        return net({"features": feats.to(dtype), "coords": coords})

    return Case(net, run, len(coords))


def minkloc3dv2(source: Path, rows: int) -> Case:
    """MinkLoc3Dv2, by its own model file."""
    sys.path.insert(0, str(source / "MinkLoc3Dv2"))
    from misc.utils import ModelParams
    from models.model_factory import model_factory

    parameters = ModelParams(str(source / "MinkLoc3Dv2/models/minkloc3dv2.txt"))
    net = model_factory(parameters)
    coords, feats = _sparse(rows, 1)

    def run(net, dtype):
        return net({"features": feats.to(dtype), "coords": coords})["global"]

    return Case(net, run, len(coords))


def spatio_temporal_segmentation(source: Path, rows: int) -> Case:
    """SpatioTemporalSegmentation's MinkUNet34C, written for 0.4."""
    import MinkowskiEngine as ME

    _stub("open3d")
    collections.Sequence = collections.abc.Sequence  # as before Python 3.10
    sys.path.insert(0, str(source / "SpatioTemporalSegmentation"))
    from models.res16unet import Res16UNet34C

    config = types.SimpleNamespace(bn_momentum=0.02, conv1_kernel_size=5)
    net = Res16UNet34C(3, 20, config, D=3)
    coords, feats = _sparse(rows, 3)

    def run(net, dtype):
        return net(ME.SparseTensor(feats.to(dtype), coords=coords)).F

    return Case(net, run, len(coords))


def mask3d_backbone(source: Path, rows: int) -> Case:
    """Mask3D's Res16UNet34C with the maps of all levels."""
    import MinkowskiEngine as ME

    sys.path.insert(0, str(source / "Mask3D"))
    _stub_mask3d()
    from models.res16unet import Res16UNet34C

    config = types.SimpleNamespace(
        dialations=[1, 1, 1, 1], conv1_kernel_size=5, bn_momentum=0.02
    )
    net = Res16UNet34C(3, 20, config, out_fpn=True)
    coords, feats = _sparse(rows, 3)

    def run(net, dtype):
        y, levels = net(ME.SparseTensor(feats.to(dtype), coordinates=coords))
        return torch.cat([y.F.reshape(-1), *(each.F.sum(0) for each in levels)])

    return Case(net, run, len(coords))


def _stub_mask3d() -> None:
    _stub("hydra.utils", instantiate=lambda made: made)
    _stub("torch_scatter", scatter_mean=_scatter_mean, scatter_max=None)
    _stub("torch_scatter", scatter_min=None)
    name = "third_party.pointnet2.pointnet2_utils"
    _stub(name, furthest_point_sample=_farthest)


def mask3d(source: Path, rows: int) -> Case:
    """Mask3D: its first masks and classes, before the decoder's hard thresholds."""
    import MinkowskiEngine as ME

    sys.path.insert(0, str(source / "Mask3D"))
    _stub_mask3d()
    from models.mask3d import Mask3D
    from models.res16unet import Res16UNet34C

    config = types.SimpleNamespace(
        dialations=[1, 1, 1, 1], conv1_kernel_size=5, bn_momentum=0.02
    )
    backbone = Res16UNet34C(3, 20, config, out_fpn=True)
    facts = {
        "hidden_dim": 128, "num_queries": 20, "num_heads": 8, "dim_feedforward": 256,
        "sample_sizes": [200, 800, 3200, 12800, 51200], "shared_decoder": True,
        "num_classes": 20, "num_decoders": 1, "dropout": 0.0, "pre_norm": False,
        "positional_encoding_type": "fourier", "non_parametric_queries": True,
        "train_on_segments": False, "normalize_pos_enc": True,
        "use_level_embed": False, "scatter_type": "mean", "hlevels": [0, 1, 2, 3],
        "use_np_features": False, "voxel_size": 0.02, "max_sample_size": True,
        "random_queries": False, "gauss_scale": 1.0, "random_query_both": False,
        "random_normal": False,
    }  # fmt: skip
    net = Mask3D(types.SimpleNamespace(backbone=backbone), **facts)
    coords, feats = _sparse(rows, 3)
    raw = coords[:, 1:].float() * 0.02

    def run(net, dtype):
        x = ME.SparseTensor(feats.to(dtype), coordinates=coords)
        made = net(x, raw_coordinates=raw.to(dtype), is_eval=True)
        first = made["aux_outputs"][0]
        masks = torch.cat([each.reshape(-1) for each in first["pred_masks"]])
        return torch.cat([masks, first["pred_logits"].reshape(-1)])

    return Case(net, run, len(coords))


def lidiff(source: Path, rows: int) -> Case:
    """LiDiff's MinkUNet, from a field to its points."""
    import MinkowskiEngine as ME

    sys.path.insert(0, str(source / "LiDiff"))
    _stub("pykeops.torch", LazyTensor=None)
    from lidiff.models.minkunet import MinkUNet

    net = MinkUNet(in_channels=3, out_channels=3)
    points = [torch.from_numpy(surface(rows, i))[:rows] / 0.02 for i in range(2)]
    coords = ME.utils.batched_coordinates(points, dtype=torch.float32)
    mode = ME.SparseTensorQuantizationMode.UNWEIGHTED_AVERAGE
    facts = {"minkowski_algorithm": ME.MinkowskiAlgorithm.SPEED_OPTIMIZED}

    def run(net, dtype):
        feats = coords[:, 1:].to(dtype) * 0.02
        return net(ME.TensorField(feats, coords, quantization_mode=mode, **facts))

    return Case(net, run, len(coords))


def _spvnas(source: Path, name: str, rows: int, version: str) -> Case:
    import torchsparse

    folder = source / ("spvnas14" if version == "1.4" else "spvnas")
    sys.path.insert(0, str(folder))
    _stub("torch_scatter", scatter_mean=_scatter_mean)
    # The package's own __init__ imports data sets and trainers.
    for package in ("core", "core.models", "core.models.semantic_kitti"):
        module = types.ModuleType(package)
        module.__path__ = [str(folder / package.replace(".", "/"))]
        sys.modules[package] = module
    import importlib

    module = importlib.import_module(f"core.models.semantic_kitti.{name.lower()}")
    net = getattr(module, name)(num_classes=19, cr=1.0, pres=0.0625, vres=0.0625)
    coords, feats = _sparse(rows, 4)
    coords[:, 1:] -= coords[:, 1:].amin(0)
    if version == "1.4":
        coords = coords[:, [1, 2, 3, 0]].contiguous()

    def run(net, dtype):
        return net(torchsparse.SparseTensor(feats.to(dtype), coords))

    return Case(net, run, len(coords))


def spvcnn_1_4(source: Path, rows: int) -> Case:
    """SPVNAS's SPVCNN at 97a282d, for torchsparse 1.4."""
    return _spvnas(source, "SPVCNN", rows, "1.4")


def spvnas_minkunet_1_4(source: Path, rows: int) -> Case:
    """SPVNAS's MinkUNet at 97a282d, for torchsparse 1.4."""
    return _spvnas(source, "MinkUNet", rows, "1.4")


def spvcnn(source: Path, rows: int) -> Case:
    """SPVNAS's SPVCNN, for torchsparse 2.1."""
    return _spvnas(source, "SPVCNN", rows, "2.1")


def spvnas_minkunet(source: Path, rows: int) -> Case:
    """SPVNAS's MinkUNet, for torchsparse 2.1."""
    return _spvnas(source, "MinkUNet", rows, "2.1")


MINKOWSKI = {
    f.__name__: f
    for f in (
        *(fcgf, deep_global_registration, minkloc3d, minkloc3dv2),
        *(spatio_temporal_segmentation, mask3d_backbone, mask3d),
        lidiff,
    )
}
TORCHSPARSE = {f.__name__: f for f in (spvcnn, spvnas_minkunet)}
TORCHSPARSE_1_4 = {f.__name__: f for f in (spvcnn_1_4, spvnas_minkunet_1_4)}
NETS = MINKOWSKI | TORCHSPARSE | TORCHSPARSE_1_4


# Runs


def _smooth(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return functional.softplus(x)


def _gradients(case: Case, net, dtype) -> tuple[torch.Tensor, dict, float, float]:
    net.zero_grad()
    torch.manual_seed(3)
    start = time.perf_counter()
    y = case.run(net, dtype)
    forward = time.perf_counter() - start
    draw = torch.Generator().manual_seed(2)
    by = torch.randn(y.shape, generator=draw).to(y.dtype)
    start = time.perf_counter()
    y.backward(by)
    backward = time.perf_counter() - start
    found = {
        n: p.grad.double() for n, p in net.named_parameters() if p.grad is not None
    }
    return y.detach().double(), found, forward, backward


def _apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


def measure(name: str, source: Path, rows: int) -> dict:
    """Run a net and its reference in this process; return errors and times."""
    library = "MinkowskiEngine"
    if name in TORCHSPARSE or name in TORCHSPARSE_1_4:
        library = "torchsparse" if name in TORCHSPARSE else "torchsparse==1.4"
    sys.path.remove(str(Path(__file__).parent))  # its files are not the net's
    functional.relu = _smooth
    # Some files name a codec of Python 2.
    codecs.register(lambda n: codecs.lookup("utf-8") if "fstrings" in n else None)
    compat.install(library)
    torch.manual_seed(0)
    case = NETS[name](source, rows)
    case.net.train()
    reference = copy.deepcopy(case.net).double()
    for module in (*case.net.modules(), *reference.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    _gradients(case, case.net, torch.float32)  # the first call builds kernels
    y, grads, forward, backward = _gradients(case, case.net, torch.float32)
    if library == "MinkowskiEngine":
        minkowski_reference()
    else:
        torchsparse_reference("1.4" if "==" in library else "2.1")
    torch.Tensor.float = lambda self: self.double()
    expected, wanted, forward_64, backward_64 = _gradients(
        case, reference, torch.float64
    )
    assert grads.keys() == wanted.keys()
    total = torch.cat([wanted[n].reshape(-1) for n in wanted])
    every = torch.cat([grads[n].reshape(-1) for n in wanted])
    return {
        "net": name, "library": library, "rows": case.rows,
        "parameters": sum(p.numel() for p in case.net.parameters()),
        "error": _apart(y, expected), "gradient_error": _apart(every, total),
        "forward_s": round(forward, 3), "backward_s": round(backward, 3),
        "reference_s": round(forward_64 + backward_64, 2),
    }  # fmt: skip


def main() -> None:
    """Run nets, each in a process of its own, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("nets", nargs="*", help=f"of {', '.join(NETS)}; default all")
    parser.add_argument("--source", type=Path, required=True, help="checkouts")
    parser.add_argument("--rows", type=int, default=3000, help="rows of a sample")
    parser.add_argument("--here", action="store_true", help="run in this process")
    options = parser.parse_args()
    for name in options.nets or NETS:
        if options.here:
            print(json.dumps(measure(name, options.source, options.rows)), flush=True)
            continue
        command = [sys.executable, __file__, name, "--here", "--source"]
        command += [str(options.source), "--rows", str(options.rows)]
        subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
