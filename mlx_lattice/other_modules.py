"""Names that other libraries have for modules and functions.

A name that means the same gives the thing meant; any other raises a sentence with the
name here.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

_DIMS = r"(?P<d>[1-4])[dD]"
# Modules by patterns of their names; {d} is the number of axes. The first match counts.
MODULES = {
    rf"SparseConv{_DIMS}": 'nn.Conv{d}d(..., padding=p, support="reach"), with p = 0 '
    "where it gave none",
    rf"SparseInverseConv{_DIMS}": "nn.ConvTranspose{d}d(a, b, k, stride=s, padding=p), "
    "with s and p of the convolution that it undoes",
    rf"SparseConvTranspose{_DIMS}": "nn.GenerativeConvTranspose{d}d(..., padding=p)",
    rf"Sparse(?P<kind>Max|Avg)Pool{_DIMS}": "nn.{kind}Pool{d}d(kernel_size, stride, "
    'padding, support="reach"), whose stride is kernel_size by default, not 1',
    "SparseGlobal(?P<kind>Max|Avg)Pool": "nn.Global{kind}Pool",
    "Sparse(?P<kind>ReLU|BatchNorm)": "nn.{kind}",
    "SparseIdentity|Identity": "mlx.nn.Identity",
    "SparseModule": "mlx.nn.Module",
    "ToDense|MinkowskiToDenseTensor": "the method x.to_dense(), channels last; "
    "x.dense() has them first",
    "MinkowskiToSparseTensor": "ml.SparseTensor.from_dense(array)",
    "(ToBEV)?HeightCompression": "nn.ToBEV, channels last",
    "JoinTable|MinkowskiCat.*": "the function ops.cat([x, y])",
    "AddTableMisaligned": "the function ops.union(x, y, ...)",
    "AddTable": "x + y, or ops.union(x, y) where their rows differ",
    "ConcatTable": "a call of each layer on the same tensor",
    "BatchNorm[1-3]d": "nn.BatchNorm",
    "MinkowskiConvolution": "nn.SubmConv3d for stride 1, else nn.Conv3d",
    "MinkowskiConvolutionTranspose": "nn.ConvTranspose3d",
    "MinkowskiGenerativeConvolutionTranspose": "nn.GenerativeConvTranspose3d",
    "MinkowskiChannelwiseConvolution": "nn.SubmConv3d(c, c, k, groups=c)",
    "Minkowski(?P<kind>Sum|Avg|Max)Pooling": "nn.{kind}Pool3d, whose stride is "
    "kernel_size by default, not 1",
    "MinkowskiPoolingTranspose": "the function ops.avg_pool_transpose3d",
    "MinkowskiGlobal(?P<kind>Sum|Avg|Max)Pooling": "nn.Global{kind}Pool",
    "MinkowskiGlobalPooling": "nn.GlobalAvgPool",
    "MinkowskiPruning": "the function ops.prune(x, mask)",
    "MinkowskiUnion": "the function ops.union(x, y, ...)",
    "MinkowskiToFeature": "x.feats",
    "MinkowskiInterpolation": "the function ops.interpolate(x, points)",
    "MinkowskiBroadcastMultiplication": "the function ops.gate(x, by)",
    "MinkowskiBroadcastAddition": "the function ops.modulate(x, by, 0 * by)",
    "MinkowskiBroadcast(Concatenation)?": "by[x.coords[:, 0]], a row of each element "
    "for each row of x; mx.concatenate puts it beside x.feats",
    "MinkowskiStackCat": "ops.cat([layer(x) for layer in layers])",
    "MinkowskiStackSum": "the sum of what the layers make of x",
    "(Minkowski|Sparse)SyncBatchNorm": "nn.SyncBatchNorm",
    "MinkowskiStableInstanceNorm": "nn.InstanceNorm",
    "MinkowskiHard(shrink|tanh)": "mlx.nn.HardShrink or HardTanh, in a nn.Sequential",
    "Minkowski(?P<kind>Hardswish|LogSigmoid|LogSoftmax|ReLU6|Softmin|Softplus|"
    "Softshrink|Softsign)": "mlx.nn.{kind}, in a nn.Sequential",
    "Sparse(?P<kind>Linear|GroupNorm|LayerNorm|SiLU|GELU)(32)?": "nn.{kind}",
    "SparseActivation": "nn.Sequential, or a layer of nn",
    "SparseDownsample": "nn.AvgPool3d",
    "SparseUpsample": "nn.Upsample3d",
    "SparseSpatial2Channel": 'the function ops.space_to_channel(x, 2, order="first")',
    "SparseChannel2Spatial": 'the function ops.channel_to_space(x, 2, order="first")',
    "SparseMultiHeadAttention|MultiheadAttention": "nn.SparseAttention of a tensor, "
    "mlx.nn.MultiHeadAttention of arrays",
    "SparseFeedForwardNet": "nn.Sequential of nn.Linear, nn.GELU and nn.Linear",
    "ModulatedSparseTransformerBlock": "nn.ModulatedTransformerBlock",
    "SparseCrop": "the function ops.crop(x, low, high)",
    "SparseConvTensor": "ml.SparseTensor(coords, feats)",
    "Upsample": "nn.Upsample3d",
    r"Dropout[1-3]d": "nn.Dropout",
    r"AdaptiveAvgPool[1-3]d": "nn.GlobalAvgPool, where the output has one cell",
    "ModuleList": "a list: self.layers = [...]",
    "ModuleDict": "a dict: self.layers = {{...}}",
    "Parameter": "an array that is set: self.scale = mx.ones((8,))",
    r"\w+Loss": "a function of mlx.nn.losses, of arrays",
    "functional": "ops, of tensors, and mlx.nn, of arrays",
    "init|Embedding": "that of mlx.nn",
    "Minkowski(?P<kind>BatchNorm|InstanceNorm|Linear|Dropout|ReLU|LeakyReLU|PReLU|ELU|"
    "GELU|SELU|CELU|SiLU|Sigmoid|Tanh|Softmax)": "nn.{kind}, or mlx.nn.{kind} in a "
    "nn.Sequential",
}

# Functions, and what is made by them, by patterns of their names.
FUNCTIONS = {
    "SparseConvTensor|TensorField": "ml.SparseTensor(coords, feats)",
    "sparse_collate|batched_coordinates": "ops.batch([...]), of a tensor for each scan",
    "sparse_quantize|PointToVoxel|initial_voxelize|point_to_voxel|spvoxelize": "ml."
    "SparseTensor.from_points(points, feats, voxel_size=...)",
    "to_sparse(_all)?": "ml.SparseTensor.from_dense(array)",
    "sparse_add": "ops.union(x, y)",
    "voxel_to_point|spdevoxelize": "ops.interpolate(x, points), or ops.devoxelize",
    "sphash|sphashquery": "ops.lookup(x, coords)",
    "sparse_cat": "ops.cat([x, y]) of channels, ops.batch([x, y]) of batch elements",
    "sparse_unbind": "ops.unbatch(x)",
    "sparse_batch_(broadcast|op)": "ops.modulate or ops.gate, by batch element",
    "sparse_scaled_dot_product_attention": "ops.full_attention(q, k, v, x)",
}


def module_named(name: str, package: str, named: Mapping[str, object]) -> object:
    """Return the module that another library's name means, or raise a sentence.

    Raises:
        AttributeError: there is no module of this name; of a known name it says what
            to use.
    """
    if found := re.fullmatch(rf"SubMConv{_DIMS}", name):
        return named[f"SubmConv{found['d']}d"]
    if name == "SparseSequential":
        return named["Sequential"]
    for pattern, text in MODULES.items():
        if found := re.fullmatch(pattern, name):
            raise AttributeError(
                f"nn has no {name!r}: here that is {text.format(**found.groupdict())}"
            )
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def function_named(name: str, package: str, named: Container[str]) -> None:
    """Raise the AttributeError of a name that a package has not.

    Args:
        name: what was asked for.
        package: which has it not.
        named: names of functions of ``ops``, where the package is another.
    """
    for pattern, text in FUNCTIONS.items():
        if re.fullmatch(pattern, name):
            raise AttributeError(f"{package} has no {name!r}: here that is {text}")
    if name in named:
        raise AttributeError(f"{package} has no {name!r}: here that is ops.{name}")
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
