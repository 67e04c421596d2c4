"""spconv, FlexGEMM and flash-attention in PyTorch alone, for unmodified.py to compare.

The plain definitions: a dictionary of rows finds the neighbours, ``index_add`` adds up
their products, and attention writes out the matrix. Nothing here imports mlx_lattice.
Works in float64. Has the names that the nets of unmodified_nets.py use; ``modules``
returns them as modules for ``sys.modules``.

Kernel maps are cached by their rows, so that a second run of a net times only its
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from itertools import product
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

# Edges by kernel offset: rows of the input, rows of the output.
Edges = list[tuple[torch.Tensor, torch.Tensor]]
_maps: dict[tuple, Edges] = {}


def lookup(inputs: torch.Tensor, sought: Sequence[torch.Tensor], *key) -> Edges:
    """Return the edges to inputs at given places.

    Args:
        inputs: (N_in, 1 + D) integer rows, batch first.
        sought: for each kernel offset the (N_out, 1 + D) rows that output rows read.
        *key: what ``sought`` depends on, hashable, to cache the edges by.
    """
    key = inputs.numpy().tobytes(), *key
    if key not in _maps:
        index = {tuple(row): i for i, row in enumerate(inputs.tolist())}
        edges = []
        for places in sought:
            found = [index.get(tuple(row), -1) for row in places.tolist()]
            rows = torch.tensor(found, dtype=torch.long)
            there = (rows >= 0).nonzero()[:, 0]
            edges.append((rows[there], there))
        _maps[key] = edges
    return _maps[key]


def contract(
    x: torch.Tensor, weight: torch.Tensor, edges: Edges, count: int
) -> torch.Tensor:
    """Return ``y[o] = sum over edges (i, o, k) of x[i] @ weight[k]``.

    Args:
        x: (N_in, C_in).
        weight: (K, C_in, C_out).
        edges: edges of each of K offsets.
        count: N_out.
    """
    y = x.new_zeros(count, weight.shape[2])
    for k, (rows, outputs) in enumerate(edges):
        if len(rows):
            y = y.index_add(0, outputs, x[rows] @ weight[k])
    return y


def submanifold(
    rows: torch.Tensor, kernel: Sequence[int], dilation: Sequence[int]
) -> Edges:
    """Return the edges of a centred kernel, last axis fastest, on its own rows."""
    offsets = [
        [0, *((k - n // 2) * d for k, n, d in zip(at, kernel, dilation, strict=True))]
        for at in product(*map(range, kernel))
    ]
    sought = (rows + rows.new_tensor(offset) for offset in offsets)
    return lookup(rows, sought, "submanifold", tuple(kernel), tuple(dilation))


# spconv


class SparseConvTensor:
    """Features (N, C) at int32 rows (N, 1 + D), batch first."""

    def __init__(
        self,
        features: torch.Tensor,
        indices: torch.Tensor,
        spatial_shape: Sequence[int],
        batch_size: int,
        grid: object = None,
        voxel_num: object = None,
        indice_dict: dict | None = None,
        benchmark: bool = False,
    ):
        self._features, self.indices = features, indices
        self.spatial_shape = [int(n) for n in spatial_shape]
        self.batch_size, self.grid, self.voxel_num = int(batch_size), grid, voxel_num
        self.indice_dict = {} if indice_dict is None else indice_dict
        self.benchmark, self.benchmark_record = benchmark, {}
        self.thrust_allocator = self._timer = self.force_algo = self.int8_scale = None

    @property
    def features(self) -> torch.Tensor:
        return self._features

    def replace_feature(self, features: torch.Tensor) -> SparseConvTensor:
        """Return a tensor of the same rows."""
        return self.like(features, self.indices, self.spatial_shape)

    def like(self, features, indices, shape) -> SparseConvTensor:
        """Return a tensor with this one's batch, grid and keys."""
        return SparseConvTensor(
            features, indices, shape, self.batch_size, self.grid, self.voxel_num,
            self.indice_dict,
        )  # fmt: skip

    def dense(self, channels_first: bool = True) -> torch.Tensor:
        """Return (B, C, spatial...), zero where there is no row."""
        features = self.features
        shape = self.batch_size, *self.spatial_shape, features.shape[1]
        y = features.new_zeros(shape).index_put(
            tuple(self.indices.long().T), features, accumulate=False
        )
        return y.movedim(-1, 1).contiguous() if channels_first else y


class SparseModule(nn.Module):
    """Marks modules that take a sparse tensor."""


class SparseSequential(SparseModule):
    """Modules in turn; those that are not sparse take features."""

    def __init__(self, *modules: nn.Module):
        super().__init__()
        if len(modules) == 1 and isinstance(modules[0], dict):
            items = modules[0].items()
        else:
            items = ((str(i), module) for i, module in enumerate(modules))
        for name, module in items:
            self.add_module(name, module)

    def add(self, module: nn.Module) -> None:
        self.add_module(str(len(self._modules)), module)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self._modules.values())[index]

    def __len__(self) -> int:
        return len(self._modules)

    def forward(self, x):
        for module in self._modules.values():
            if isinstance(module, SparseModule) or not isinstance(x, SparseConvTensor):
                x = module(x)
            else:
                x = x.replace_feature(module(x.features))
        return x


class Identity(SparseModule):
    def forward(self, x):
        return x


def _axes(value: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    return (value,) * ndim if isinstance(value, int) else tuple(value)


class SparseConvolution(SparseModule):
    """Every convolution; weight (C_out, kernel..., C_in)."""

    kind, ndim = "strided", 3

    def __init__(
        self, in_channels, out_channels, kernel_size=3, stride=1, padding=0,
        dilation=1, groups=1, bias=True, indice_key=None, algo=None, **ignored,
    ):  # fmt: skip
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        kernel, stride, padding, dilation = (
            _axes(each, self.ndim) for each in (kernel_size, stride, padding, dilation)
        )
        self.kernel_size, self.stride = kernel, stride
        self.padding, self.dilation, self.indice_key = padding, dilation, indice_key
        if groups != 1:
            raise NotImplementedError("the naive spconv has no groups")
        fan = math.prod(kernel) * in_channels
        self.weight = nn.Parameter(torch.randn(out_channels, *kernel, in_channels))
        self.weight.data /= fan**0.5
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        c_in, c_out = self.in_channels, self.out_channels
        weight = self.weight.reshape(c_out, -1, c_in).permute(1, 2, 0)
        rows, shape, keys = x.indices, x.spatial_shape, x.indice_dict
        if self.kind == "inverse":
            edges, rows, shape = keys[self.indice_key]
            edges = [(outputs, inputs) for inputs, outputs in edges]
        elif math.prod(self.kernel_size) == math.prod(self.stride) == 1:
            # spconv reads the memory of a 1x1 kernel as (C_in, C_out).
            weight = self.weight.reshape(1, c_in, c_out)
            edges = [(torch.arange(len(rows)),) * 2]
        elif self.kind == "submanifold":
            edges = submanifold(rows, self.kernel_size, self.dilation)
        else:
            edges, rows, shape = self.strided(x)
            if self.indice_key is not None:
                keys = keys | {self.indice_key: (edges, x.indices, x.spatial_shape)}
        y = contract(x.features, weight, edges, len(rows))
        if self.bias is not None:
            y = y + self.bias
        y = x.like(y, rows, shape)
        y.indice_dict = keys
        return y

    def strided(self, x: SparseConvTensor):
        """Return edges, rows and grid of the output, rows sorted.

        An input at ``i`` reaches output ``o`` if ``i = o * stride - padding +
        k * dilation`` for an offset ``k`` of the kernel.
        """
        steps = (self.kernel_size, self.stride, self.padding, self.dilation)
        axes = list(zip(*steps, strict=True))
        shape = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, (k, s, p, d) in zip(x.spatial_shape, axes, strict=True)
        ]
        rows = x.indices
        stride = rows.new_tensor([1, *self.stride])
        bases = [
            rows.new_tensor([0, *(k * d - p for k, (_, _, p, d) in zip(at, axes))])  # noqa: B905
            for at in product(*map(range, self.kernel_size))
        ]
        reached = []
        for base in bases:
            place = rows - base
            there = (place % stride == 0).all(1)
            place = torch.div(place[there], stride, rounding_mode="floor")
            limit = rows.new_tensor(shape)
            inside = ((place[:, 1:] >= 0) & (place[:, 1:] < limit)).all(1)
            reached.append(place[inside])
        outputs = torch.unique(torch.cat(reached), dim=0)
        sought = (outputs * stride + base for base in bases)
        edges = lookup(rows, sought, "strided", steps, tuple(shape))
        return edges, outputs, shape


def _layer(name: str, kind: str, ndim: int) -> type:
    return type(f"{name}{ndim}d", (SparseConvolution,), {"kind": kind, "ndim": ndim})


class _Inverse(SparseConvolution):
    """Convolutions that go back: the second place after the kernel is the key."""

    kind = "inverse"

    def __init__(self, c_in, c_out, kernel_size, indice_key, bias=True, **ignored):
        super().__init__(c_in, c_out, kernel_size, bias=bias, indice_key=indice_key)


def _spconv() -> dict[str, ModuleType]:
    modules = _module(
        "spconv.pytorch.modules",
        SparseModule=SparseModule,
        SparseSequential=SparseSequential,
        is_spconv_module=lambda module: isinstance(module, SparseModule),
    )
    core = _module(
        "spconv.core", ConvAlgo=SimpleNamespace(Native=0, MaskImplicitGemm=1)
    )
    names = {
        "SparseConvTensor": SparseConvTensor,
        "Identity": Identity,
        **vars(modules),
    }
    for ndim in (1, 2, 3):
        names[f"SubMConv{ndim}d"] = _layer("SubMConv", "submanifold", ndim)
        names[f"SparseConv{ndim}d"] = _layer("SparseConv", "strided", ndim)
        inverse = type(f"SparseInverseConv{ndim}d", (_Inverse,), {"ndim": ndim})
        names[f"SparseInverseConv{ndim}d"] = inverse
    conv = _module("spconv.pytorch.conv", SparseConvolution=SparseConvolution)
    names |= {"modules": modules, "conv": conv, "ConvAlgo": core.ConvAlgo}
    pytorch = _module("spconv.pytorch", **names)
    constants = _module("spconv.constants", SPCONV_USE_DIRECT_TABLE=True)
    parts = {"pytorch": pytorch, "constants": constants, "core": core}
    top = _module("spconv", __version__="2.3.8", **parts)
    return {
        each.__name__: each for each in (top, pytorch, modules, conv, core, constants)
    }


# FlexGEMM


def sparse_submanifold_conv3d(
    feats, coords, shape, weight, bias=None, neighbor_cache=None, dilation=(1, 1, 1)
):
    """Return features, and None as the cache; the weight is (C_out, k..., C_in)."""
    c_out, *kernel, c_in = weight.shape
    edges = submanifold(coords, kernel, dilation)
    flat = weight.reshape(c_out, -1, c_in).permute(1, 2, 0)
    y = contract(feats, flat, edges, len(coords))
    return (y if bias is None else y + bias), None


def _flex_gemm() -> dict[str, ModuleType]:
    def ignored(*_, **__):
        """Take a setting that has no effect."""

    spconv = _module(
        "flex_gemm.ops.spconv",
        sparse_submanifold_conv3d=sparse_submanifold_conv3d,
        set_algorithm=ignored,
        set_hashmap_ratio=ignored,
    )
    ops = _module("flex_gemm.ops", spconv=spconv)
    top = _module("flex_gemm", ops=ops)
    return {each.__name__: each for each in (top, ops, spconv)}


# flash-attention


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None,
    dropout_p=0.0, softmax_scale=None, **ignored,
):  # fmt: skip
    """Return attention within segments: q (N, heads, C), k and v (M, heads, C)."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    results = []
    starts = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    starts = list(starts)
    for (a, c), (b, d) in zip(starts, starts[1:], strict=False):
        logits = torch.einsum("nhc,mhc->hnm", q[a:b], k[c:d]) * scale
        results.append(torch.einsum("hnm,mhc->nhc", logits.softmax(-1), v[c:d]))
    return torch.cat(results)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen=None, *args, **kwargs):
    return flash_attn_varlen_func(
        *qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs
    )


def flash_attn_varlen_kvpacked_func(q, kv, *args, **kwargs):
    return flash_attn_varlen_func(q, *kv.unbind(1), *args, **kwargs)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, **ignored):
    """Return attention of (B, N, heads, C)."""
    q_rows, k_rows = (torch.arange(len(x) + 1) * x.shape[1] for x in (q, k))
    flat = (x.flatten(0, 1) for x in (q, k, v))
    y = flash_attn_varlen_func(*flat, q_rows, k_rows, softmax_scale=softmax_scale)
    return y.unflatten(0, q.shape[:2])


def flash_attn_qkvpacked_func(qkv, *args, **kwargs):
    return flash_attn_func(*qkv.unbind(2), *args, **kwargs)


def flash_attn_kvpacked_func(q, kv, *args, **kwargs):
    return flash_attn_func(q, *kv.unbind(2), *args, **kwargs)


def _flash_attn() -> dict[str, ModuleType]:
    functions = (
        flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func,
        flash_attn_varlen_func, flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )  # fmt: skip
    return {"flash_attn": _module("flash_attn", **{f.__name__: f for f in functions})}


def _module(name: str, **names) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, None, origin=__file__)
    vars(module).update({k: v for k, v in names.items() if k not in vars(module)})
    return module


LIBRARIES = {"spconv": _spconv, "flex_gemm": _flex_gemm, "flash_attn": _flash_attn}


def modules(*libraries: str) -> dict[str, ModuleType]:
    """Return modules by name, to be put into ``sys.modules``."""
    result: dict[str, ModuleType] = {}
    for library in libraries:
        result |= LIBRARIES[library]()
    return result
