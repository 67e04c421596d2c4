"""Stand-ins for packages that nets import beside a sparse library, in PyTorch alone.

For unmodified.py: packages that are compiled for CUDA, or too large to install for one
function. ``MODULES`` has, by module name, the few names that the nets call; modules of
``EMPTY`` are imported by the nets and not used by the part that runs.
"""

from __future__ import annotations

import importlib.machinery
from types import ModuleType

import torch
from torch import nn


class DropPath(nn.Module):
    """timm's layer at a rate of 0."""

    def __init__(self, drop_prob: float = 0.0, scale_by_keep: bool = True):
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def scatter(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
    **ignored,
) -> torch.Tensor:
    """Reduce rows by their index: (N, ...) and (N,) to (the largest index + 1, ...)."""
    if dim % src.dim() != 0:
        raise NotImplementedError("the stand-in of scatter reduces rows")
    size = int(index.max()) + 1 if dim_size is None else dim_size
    index = index.reshape(-1, *[1] * (src.dim() - 1)).expand_as(src)
    by = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    y = src.new_zeros(size, *src.shape[1:])
    return y.scatter_reduce(0, index, src, by, include_self=False)


def segment_csr(
    src: torch.Tensor, indptr: torch.Tensor, reduce: str = "sum"
) -> torch.Tensor:
    """Reduce rows between one pointer and the next."""
    counts = indptr.diff()
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    if not src.is_floating_point():
        return scatter(src.double(), rows, reduce=reduce).to(src.dtype)
    return scatter(src, rows, reduce=reduce)


def voxel_grid(pos, size, batch=None, start=None, end=None) -> torch.Tensor:
    """Return the number of each point's cell; cells of one element are its own."""
    cells = torch.div(pos - pos.min(0).values, size, rounding_mode="floor").long()
    cells = torch.cat([batch.reshape(-1, 1).long(), cells], 1)
    counts = cells.max(0).values + 1
    number = cells[:, 0]
    for axis in range(1, cells.shape[1]):
        number = number * counts[axis] + cells[:, axis]
    return number


class PyTorchModelHubMixin:
    """huggingface_hub's base class: nothing is uploaded here."""

    def __init_subclass__(cls, **ignored):
        super().__init_subclass__()


class HookBase:
    """Pointcept's base class of trainer hooks."""


class SparseFeatures2Mesh:
    """TRELLIS's mesh extractor, of which the decoder reads the number of features."""

    feats_channels = 16

    def __init__(self, **ignored):
        pass


def furthest_point_sample(points: torch.Tensor, count: int) -> torch.Tensor:
    """Return (B, count) indices of points (B, N, 3), each far from those before."""
    results = []
    for rows in points.double():
        chosen = [0]
        apart = torch.full((len(rows),), torch.inf, dtype=torch.float64)
        for _ in range(count - 1):
            distance = ((rows - rows[chosen[-1]]) ** 2).sum(1)
            apart = torch.minimum(apart, distance)
            chosen.append(int(apart.argmax()))
        results.append(torch.tensor(chosen))
    return torch.stack(results).int()


def _scatter_by(reduce: str):
    def reduced(src, index, dim=0, out=None, dim_size=None):
        y = scatter(src, index, dim, dim_size, reduce)
        return (y, None) if reduce in ("max", "min") else y

    return reduced


MODULES: dict[str, dict[str, object]] = {
    "timm": {},
    "timm.models": {},
    "timm.layers": {"DropPath": DropPath, "trunc_normal_": nn.init.trunc_normal_},
    "timm.models.layers": {
        "DropPath": DropPath,
        "trunc_normal_": nn.init.trunc_normal_,
    },
    "torch_scatter": {
        "scatter": scatter,
        "segment_csr": segment_csr,
        **{f"scatter_{by}": _scatter_by(by) for by in ("sum", "mean", "max", "min")},
    },
    "torch_geometric": {},
    "torch_geometric.nn": {},
    "torch_geometric.utils": {"scatter": scatter},
    "torch_geometric.nn.pool": {"voxel_grid": voxel_grid},
    "huggingface_hub": {
        "PyTorchModelHubMixin": PyTorchModelHubMixin,
        "hf_hub_download": None,
    },
    "pointcept.engines.hooks": {"HookBase": HookBase},
    "hydra": {},
    "hydra.utils": {"instantiate": lambda made: made},
    "third_party": {},
    "third_party.pointnet2": {},
    "third_party.pointnet2.pointnet2_utils": {
        "furthest_point_sample": furthest_point_sample
    },
    "pykeops": {},
    "pykeops.torch": {"LazyTensor": None},
    "trellis.representations": {"MeshExtractResult": None},
    "trellis.representations.mesh": {"SparseFeatures2Mesh": SparseFeatures2Mesh},
}
EMPTY = "SharedArray", "gorilla", "open3d"


def modules(*names: str) -> dict[str, ModuleType]:
    """Return modules by name: packages with what lies below them."""
    result = {}
    for name in names:
        if name not in MODULES and name not in EMPTY:
            raise ValueError(f"there is no stand-in for {name}")
        for each, values in {name: {}, **MODULES}.items():
            if f"{each}.".startswith(f"{name}."):
                module = ModuleType(each)
                module.__path__ = []
                module.__spec__ = importlib.machinery.ModuleSpec(
                    each, None, origin=__file__
                )
                vars(module).update(values)
                result[each] = module
    for name, module in result.items():
        parent, _, last = name.rpartition(".")
        if parent in result:
            setattr(result[parent], last, module)
    return result
