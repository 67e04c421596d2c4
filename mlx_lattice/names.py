"""Names: for 1 to 4 spatial axes, as ``Conv3d``; and of other libraries, with ours.

A module's ``__getattr__`` calls ``unknown_name``; docs/coming_from.md has the whole
tables, with arguments and conventions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container
from functools import wraps

from .checks import AXES
from .tensor import SparseTensor, expect_tensor


def expect_axes(x: SparseTensor, dims: int, name: str) -> None:
    """Raise unless ``x`` is a tensor with ``dims`` spatial axes."""
    expect_tensor(x)
    if x.dims != dims:
        raise ValueError(
            f"{name} got a tensor with {x.dims} spatial axes; use the {x.dims}d name"
        )


def numbered_functions(module: str, *functions: Callable) -> dict[str, Callable]:
    """Return each function of a tensor under four names, 1d to 4d.

    A numbered function refuses a tensor with another number of axes.
    """
    return {
        f"{function.__name__}{dims}d": _numbered_function(module, function, dims)
        for function in functions
        for dims in AXES
    }


def _numbered_function(module: str, function: Callable, dims: int) -> Callable:
    name = f"{function.__name__}{dims}d"

    @wraps(function)
    def numbered(x, *args, **kwargs):
        expect_axes(x, dims, name)
        return function(x, *args, **kwargs)

    numbered.__name__ = numbered.__qualname__ = name
    numbered.__module__ = module
    return numbered


def numbered_classes(module: str, *bases: type) -> dict[str, type]:
    """Return each class under four names, 1d to 4d: subclasses with fixed ``dims``."""
    return {
        f"{base.__name__}{dims}d": _numbered_class(module, base, dims)
        for base in bases
        for dims in AXES
    }


def _numbered_class(module: str, base: type, dims: int) -> type:
    @wraps(base.__init__)
    def __init__(self, *args, **kwargs):
        base.__init__(self, *args, dims=dims, **kwargs)

    signature = inspect.signature(base.__init__)
    parameters = [p for name, p in signature.parameters.items() if name != "dims"]
    __init__.__signature__ = signature.replace(parameters=parameters)
    body = {"__init__": __init__, "__doc__": base.__doc__, "__module__": module}
    return type(f"{base.__name__}{dims}d", (base,), body)


PAGE = "docs/coming_from.md"

# Names end in 3d for every number of axes.
NAMES = {
    # spconv
    "SubMConv3d": "nn.SubmConv3d, without padding and indice_key",
    "SparseConv3d": 'nn.Conv3d(..., padding=p, support="reach")',
    "SparseInverseConv3d": "nn.ConvTranspose3d, with the stride and padding of the "
    "convolution that it inverts",
    "SparseConvTranspose3d": "nn.GenerativeConvTranspose3d(..., padding=p)",
    "SparseMaxPool3d": 'nn.MaxPool3d(..., support="reach")',
    "SparseAvgPool3d": 'nn.AvgPool3d(..., support="reach")',
    "SparseGlobalMaxPool": "nn.GlobalMaxPool",
    "SparseGlobalAvgPool": "nn.GlobalAvgPool",
    "SparseSequential": "nn.Sequential",
    "SparseModule": "mlx.nn.Module",
    "SparseReLU": "nn.ReLU",
    "SparseBatchNorm": "nn.BatchNorm",
    "SparseSyncBatchNorm": "nn.SyncBatchNorm",
    "SparseConvTensor": "ml.SparseTensor(coords, feats)",
    "ToDense": "x.to_dense(), or x.dense() with the channels first",
    "JoinTable": "ops.cat([x, y])",
    "AddTable": "x + y",
    "AddTableMisaligned": "ops.union(x, y, ...)",
    "sparse_add": "ops.union(x, y)",
    "PointToVoxel": "ml.SparseTensor.from_points(points, feats, voxel_size=...)",
    # MinkowskiEngine
    "MinkowskiConvolution": "nn.SubmConv3d for stride 1, else nn.Conv3d",
    "MinkowskiConvolutionTranspose": "nn.ConvTranspose3d",
    "MinkowskiGenerativeConvolutionTranspose": "nn.GenerativeConvTranspose3d",
    "MinkowskiChannelwiseConvolution": "nn.SubmConv3d(c, c, k, groups=c)",
    "MinkowskiSumPooling": "nn.SumPool3d",
    "MinkowskiAvgPooling": "nn.AvgPool3d",
    "MinkowskiMaxPooling": "nn.MaxPool3d",
    "MinkowskiPoolingTranspose": "ops.avg_pool_transpose3d",
    "MinkowskiGlobalPooling": "nn.GlobalAvgPool",
    "MinkowskiGlobalSumPooling": "nn.GlobalSumPool",
    "MinkowskiGlobalAvgPooling": "nn.GlobalAvgPool",
    "MinkowskiGlobalMaxPooling": "nn.GlobalMaxPool",
    "MinkowskiPruning": "ops.prune(x, mask)",
    "MinkowskiUnion": "ops.union(x, y, ...)",
    "MinkowskiInterpolation": "ops.interpolate(x, points)",
    "MinkowskiBroadcastMultiplication": "ops.gate(x, by)",
    "MinkowskiBroadcastAddition": "ops.modulate(x, by, 0 * by)",
    "MinkowskiToFeature": "x.feats",
    "MinkowskiToDenseTensor": "x.to_dense()",
    "MinkowskiToSparseTensor": "ml.SparseTensor.from_dense(array)",
    "MinkowskiSyncBatchNorm": "nn.SyncBatchNorm",
    "MinkowskiStableInstanceNorm": "nn.InstanceNorm",
    "MinkowskiLinear": "nn.Linear",
    "TensorField": "ml.SparseTensor.from_points(points, feats, voxel_size=...)",
    "sparse_quantize": "ml.SparseTensor.from_points(points, feats, voxel_size=...)",
    "sparse_collate": "ops.batch([x, y])",
    "batched_coordinates": "ops.batch([x, y])",
    "to_sparse": "ml.SparseTensor.from_dense(array)",
    "cat": "ops.cat([x, y])",
    # torchsparse
    "initial_voxelize": "ml.SparseTensor.from_points(points, feats, voxel_size=...)",
    "point_to_voxel": "ml.SparseTensor.from_points(points, feats, voxel_size=...)",
    "voxel_to_point": "ops.interpolate(x, points), or ops.devoxelize",
    "spdevoxelize": "ops.devoxelize",
    "sphashquery": "ops.lookup(x, coords)",
    "HeightCompression": "nn.ToBEV",
    "ToBEVHeightCompression": "nn.ToBEV",
    # TRELLIS.2
    "SparseLinear": "nn.Linear",
    "SparseLayerNorm32": "nn.LayerNorm",
    "SparseGroupNorm32": "nn.GroupNorm",
    "SparseDownsample": "nn.AvgPool3d",
    "SparseUpsample": "nn.Upsample3d",
    "SparseChannel2Spatial": 'ops.channel_to_space(x, 2, order="first")',
    "SparseSpatial2Channel": 'ops.space_to_channel(x, 2, order="first")',
    "SparseMultiHeadAttention": "nn.SparseAttention",
    "ModulatedSparseTransformerBlock": "nn.ModulatedTransformerBlock",
    "sparse_cat": "ops.cat of channels, ops.batch of batch elements",
    "sparse_unbind": "ops.unbatch(x)",
    # PyTorch
    "BatchNorm1d": "nn.BatchNorm",
    "ModuleList": "a list: self.layers = [...]",
    "ModuleDict": "a dict: self.layers = {...}",
    "Parameter": "an array that is set: self.scale = mx.ones((8,))",
    "CrossEntropyLoss": "mlx.nn.losses.cross_entropy(x.feats, labels)",
}


def unknown_name(name: str, module: str, functions: Container[str] = ()) -> None:
    """Raise the AttributeError of a name that a module of this package does not have.

    ``functions`` are the names of ``ops``, if the module is another one. If another
    library has the name, the message says what to write here.
    """
    dims = re.search(r"[1-4](?=d$)", name)
    known = NAMES.get(name) or NAMES.get(re.sub(r"[124](?=d$)", "3", name))
    if known is None and name in functions:
        known = f"ops.{name}"
    if known is None and (plain := re.fullmatch(r"(?:Minkowski|Sparse)(\w+)", name)):
        known = f"nn.{plain[1]} or mlx.nn.{plain[1]}, if there is one"
    if known is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if dims:
        known = known.replace("3d", f"{dims[0]}d")
    raise AttributeError(f"{module} has no {name!r}; write {known} ({PAGE})")
