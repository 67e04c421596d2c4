"""The public nets of unmodified.py: where each lies, how it is built and called.

A record says which repository and commit a net is of, which libraries it imports, which
packages have stand-ins (stand_ins.py), and which packages' ``__init__`` is left out
because it imports the whole project. The code itself is read from a checkout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from scenes import surface
from torch import nn

# Imports a module of the checkout.
Load = Callable[[str], ModuleType]


@dataclass
class Scene:
    """What a net is called with: two scans of a surface, drawn by a fixed seed.

    Attributes:
        rows: (N, 4) int32, batch first, sorted by batch; others from 1 on.
        x: (N, C) features.
        extra: other floating inputs.
    """

    rows: torch.Tensor
    x: torch.Tensor
    extra: dict[str, torch.Tensor]

    @property
    def batch(self) -> torch.Tensor:
        return self.rows[:, 0].long()

    @property
    def grid(self) -> torch.Tensor:
        return self.rows[:, 1:]

    @property
    def offset(self) -> torch.Tensor:
        return torch.bincount(self.batch).cumsum(0)

    def copy(self, dtype: torch.dtype) -> Scene:
        """Return the scene with memory of its own; features take gradients."""
        x = self.x.to(dtype, copy=True).requires_grad_()
        extra = {name: each.to(dtype, copy=True) for name, each in self.extra.items()}
        return Scene(self.rows.clone(), x, extra)


def scene(count: int, channels: int, **extra: tuple[int, ...]) -> Scene:
    """Draw a scene of twice ``count`` voxels; ``extra`` has shapes by name."""
    elements = []
    for i in range(2):
        rows = torch.from_numpy(surface(count, seed=5 + i))
        elements.append(torch.cat([rows[:, :1] * 0 + i, rows[:, 1:] + 1], 1))
    rows = torch.cat(elements).int()
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(len(rows), channels, generator=generator)
    drawn = {n: torch.randn(shape, generator=generator) for n, shape in extra.items()}
    return Scene(rows, x, drawn)


# Returns the net, the function that calls it, and its scene.
Forward = Callable[[Scene], Sequence[torch.Tensor]]
Build = Callable[[Load], tuple[nn.Module, Forward, Scene]]


@dataclass
class Net:
    """A public net.

    Attributes:
        name: name in the table.
        repository: OWNER/NAME on GitHub, or a package of the index.
        commit: commit that was run.
        libraries: what ``compat.install`` is called with.
        build: builds it.
        folder: name of the checkout below a source.
        stand_ins: packages that stand_ins.py provides.
        bare: packages of the checkout whose ``__init__`` is not run.
        half: dtype that the net casts to inside of attention, or "".
    """

    name: str
    repository: str
    commit: str
    libraries: tuple[str, ...]
    build: Build
    folder: str
    stand_ins: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    half: str = ""


NETS: list[Net] = []


def add(name: str, source: str, libraries: str, **facts):
    """Add a record; ``source`` is OWNER/NAME@COMMIT, libraries are joined by spaces."""
    repository, commit = source.split("@")
    folder = facts.pop("folder", repository.replace("/", "+"))

    def record(build: Build) -> Build:
        parts = tuple(libraries.split())
        NETS.append(Net(name, repository, commit, parts, build, folder, **facts))
        return build

    return record


def ordered(features: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return features in the order of their rows; libraries promise none."""
    code = torch.zeros_like(rows[:, 0]).long()
    for column in rows.long().T:
        code = code * 4096 + column
    return features[code.argsort()]


def _spconv_rows(tensor) -> torch.Tensor:
    return ordered(tensor.features, tensor.indices)


# Pointcept

_POINTCEPT = "Pointcept/Pointcept@d74c646d"
_BARE = (
    "pointcept", "pointcept.models", "pointcept.engines", "pointcept.utils",
    "pointcept.models.sparse_unet", "pointcept.models.point_transformer_v3",
    "pointcept.models.litept", "pointcept.models.oacnns",
    "pointcept.models.spvcnn",
)  # fmt: skip
_STAND_INS = "timm", "torch_geometric", "torch_scatter", "pointcept.engines.hooks"
POINTS = {"stand_ins": _STAND_INS, "bare": _BARE}


def points(scene: Scene) -> dict:
    """Return Pointcept's dictionary of a scene."""
    return {
        "grid_coord": scene.grid.long(),
        "coord": scene.grid.to(scene.x.dtype) * 0.02,
        "feat": scene.x,
        "offset": scene.offset,
        "grid_size": 0.02,
    }


_CHANNELS = {"channels": (16, 32, 48, 64, 64, 48, 32, 32), "layers": (1,) * 8}


@add("SpUNet v1m1", _POINTCEPT, "spconv", **POINTS)
def _(load):
    module = load("pointcept.models.sparse_unet.spconv_unet_v1m1_base")
    net = module.SpUNetBase(6, 20, **_CHANNELS)
    return net, lambda s: [net(points(s))], scene(3000, 6)


@add("SpUNet v1m3 (PPT)", _POINTCEPT, "spconv", **POINTS)
def _(load):
    module = load("pointcept.models.sparse_unet.spconv_unet_v1m3_pdnorm")
    net = module.SpUNetBase(6, 20, context_channels=16, **_CHANNELS)

    def forward(s: Scene):
        return [net({**points(s), "condition": "S3DIS", "context": s.extra["context"]})]

    return net, forward, scene(3000, 6, context=(1, 16))


@add("OA-CNNs", _POINTCEPT, "spconv", **POINTS)
def _(load):
    module = load("pointcept.models.oacnns.oacnns_v1m1_base")
    net = module.OACNNs(
        6, 20, embed_channels=16, enc_channels=[16, 32, 32, 64], enc_depth=[1] * 4,
        dec_channels=[32, 32, 32, 64], dec_depth=[1] * 4,
    )  # fmt: skip
    return net, lambda s: [net(points(s))], scene(2000, 6)


# A small point transformer of the third version, by the names of its arguments.
_TRANSFORMER = {
    "in_channels": 6,
    "order": ("z", "z-trans"),
    "enc_depths": (1, 1, 1, 1, 1),
    "enc_channels": (16, 32, 32, 64, 64),
    "enc_num_head": (1, 2, 2, 4, 4),
    "enc_patch_size": (128,) * 5,
    "dec_depths": (1, 1, 1, 1),
    "dec_channels": (32, 32, 32, 64),
    "dec_num_head": (2, 2, 2, 4),
    "dec_patch_size": (128,) * 4,
    "drop_path": 0.0,
}


def _transformer(path: str, **arguments) -> Build:
    def build(load):
        net = load(path).PointTransformerV3(**{**_TRANSFORMER, **arguments})
        return net, lambda s: [net(points(s)).feat], scene(2000, 6)

    return build


_V3 = "pointcept.models.point_transformer_v3.point_transformer_v3m1_base"
_V151 = {**POINTS, "folder": "Pointcept+Pointcept@v1.5.1"}
for _name, _flash, _source, _facts in (
    ("PTv3 v1m1", False, _POINTCEPT, POINTS),
    ("PTv3 v1m1, flash", True, _POINTCEPT, {**POINTS, "half": "bfloat16"}),
    ("PTv3 of v1.5.1", False, "Pointcept/Pointcept@72a79935", _V151),
    ("PTv3 of v1.5.1, flash", True, "Pointcept/Pointcept@72a79935",
     {**_V151, "half": "float16"}),
):  # fmt: skip
    _libraries = "spconv flash_attn" if _flash else "spconv"
    _build = _transformer(
        _V3, enable_flash=_flash, upcast_attention=not _flash, upcast_softmax=not _flash
    )
    add(_name, _source, _libraries, **_facts)(_build)

_LITEPT = {**POINTS, "half": "float16"}


@add("LitePT", _POINTCEPT, "spconv flash_attn", **_LITEPT)
def _(load):
    module = load("pointcept.models.litept.litept_v1")
    net = module.LitePT(
        in_channels=6, enc_depths=(1, 1, 1, 1, 1), enc_channels=(18, 36, 36, 72, 72),
        enc_num_head=(1, 2, 2, 4, 4), enc_patch_size=(128,) * 5, drop_path=0.0,
        dec_channels=(36, 36, 36, 72), dec_num_head=(2, 2, 2, 4),
        dec_patch_size=(128,) * 4,
    )  # fmt: skip
    return net, lambda s: [net(points(s)).feat], scene(2000, 6)


# Encoders of Pointcept's authors that are published by themselves.
for _name, _source, _path, _more in (
    ("Sonata", "facebookresearch/sonata@18c09ff8", "sonata", {}),
    ("Concerto", "Pointcept/Concerto@5b411171", "concerto", {"enc_mode": True}),
    # Rotary positions take heads of a multiple of 6 channels.
    ("Utonia", "Pointcept/Utonia@323e6131", "utonia",
     {"enc_channels": (18, 36, 36, 72, 72), "dec_channels": (36, 36, 36, 72)}),
):  # fmt: skip
    _build = _transformer(
        f"{_path}.model", enable_flash=False, upcast_attention=True,
        upcast_softmax=True, traceable=True, **_more,
    )  # fmt: skip
    _facts = {
        "stand_ins": ("timm", "torch_scatter", "huggingface_hub"),
        "bare": (_path,),
    }
    add(_name, _source, "spconv", **_facts)(_build)


# OpenPCDet and VoxelNeXt


class _Config(dict):
    __getattr__ = dict.get


_PCDET = "open-mmlab/OpenPCDet@8cacccec"
_PCDET_FACTS = {
    "stand_ins": ("SharedArray",),
    "bare": ("pcdet", "pcdet.utils", "pcdet.models", "pcdet.models.backbones_3d"),
}
# The grid's axes x, y, z; rows are z, y, x.
_GRID = np.array([64, 64, 64])


def _backbone(file: str, name: str, flat: bool = False, **config) -> Build:
    def build(load):
        module = load(f"pcdet.models.backbones_3d.{file}")
        net = getattr(module, name)(
            _Config(config), 4, _GRID, voxel_size=[0.1] * 3,
            point_cloud_range=[0, 0, 0, 6.4, 6.4, 6.4],
        )  # fmt: skip

        def forward(s: Scene):
            rows = s.rows[:, [0, 3, 2, 1]]
            batch = {"voxel_features": s.x, "voxel_coords": rows, "batch_size": 2}
            batch = net(batch)
            results = [_spconv_rows(batch["encoded_spconv_tensor"])]
            levels = batch["multi_scale_3d_features"].values() if flat else ()
            results += [_spconv_rows(each) for each in levels]
            return results + [batch[n] for n in ("point_features",) if n in batch]

        return net, forward, scene(3000, 4)

    return build


for _file, _name, _arguments in (
    ("spconv_backbone", "VoxelBackBone8x", {}),
    ("spconv_backbone", "VoxelResBackBone8x", {}),
    ("spconv_unet", "UNetV2", {"RETURN_ENCODED_TENSOR": True}),
    ("spconv_backbone_voxelnext", "VoxelResBackBone8xVoxelNeXt", {}),
):
    _build = _backbone(_file, _name, **_arguments)
    add(_name, _PCDET, "spconv", **_PCDET_FACTS)(_build)

add("VoxelNeXt", "dvlab-research/VoxelNeXt@b5b7d393", "spconv", **_PCDET_FACTS)(
    _backbone("spconv_backbone_voxelnext", "VoxelResBackBone8xVoxelNeXt")
)


@add("PillarRes18BackBone8x", _PCDET, "spconv", **_PCDET_FACTS)
def _(load):
    module = load("pcdet.models.backbones_3d.spconv_backbone_2d")
    net = module.PillarRes18BackBone8x(_Config(), 32, _GRID)

    def forward(s: Scene):
        rows, first = np.unique(s.rows[:, [0, 2, 1]].numpy(), axis=0, return_index=True)
        pillars = {
            "pillar_features": s.x[first],
            "pillar_coords": torch.from_numpy(rows),
        }
        levels = net({**pillars, "batch_size": 2})["multi_scale_2d_features"].values()
        return [x if torch.is_tensor(x) else _spconv_rows(x) for x in levels]

    return net, forward, scene(3000, 32)


# SoftGroup and SPFormer


def _sparse(s: Scene):
    import spconv.pytorch as spconv

    return spconv.SparseConvTensor(s.x, s.rows, [64, 64, 64], 2)


@add("SoftGroup UBlock", "thangvubk/SoftGroup@a0b5f992", "spconv",
      bare=("softgroup", "softgroup.model"))  # fmt: skip
def _(load):
    module = load("softgroup.model.blocks")
    net = module.UBlock([16, 32, 48], nn.BatchNorm1d, 2, module.ResidualBlock)
    return net, lambda s: [net(_sparse(s)).features], scene(3000, 16)


@add("SPFormer UBlock", "sunjiahao1999/SPFormer@89eeca81", "spconv",
      stand_ins=("gorilla",), bare=("spformer", "spformer.model"))  # fmt: skip
def _(load):
    module = load("spformer.model.backbone")
    net = module.UBlock([16, 32, 48], nn.BatchNorm1d, 2, return_blocks=True)
    return net, lambda s: [_spconv_rows(x) for x in net(_sparse(s))[1]], scene(3000, 16)


# TRELLIS, over spconv, and TRELLIS.2, over FlexGEMM; both with flash-attention

_TRELLIS = "microsoft/TRELLIS@6b0d6475"
_TRELLIS_FACTS = {
    "stand_ins": ("trellis.representations",),
    "bare": ("trellis", "trellis.models", "trellis.models.structured_latent_vae"),
}


def _latent(load: Load, package: str, s: Scene):
    sparse = load(f"{package}.modules.sparse")
    return sparse.SparseTensor(feats=s.x, coords=s.rows)


def _trellis_rows(tensor) -> torch.Tensor:
    return ordered(tensor.feats, tensor.coords)


@add("TRELLIS SLatEncoder", _TRELLIS, "spconv flash_attn", **_TRELLIS_FACTS)
def _(load):
    module = load("trellis.models.structured_latent_vae.encoder")
    net = module.SLatEncoder(64, 16, 64, 8, num_blocks=2, num_heads=4)

    def forward(s: Scene):
        return [net(_latent(load, "trellis", s), sample_posterior=False).feats]

    return net, forward, scene(2000, 16)


@add("TRELLIS SLatFlowModel", _TRELLIS, "spconv flash_attn", **_TRELLIS_FACTS)
def _(load):
    module = load("trellis.models.structured_latent_flow")
    net = module.SLatFlowModel(
        64, 8, 64, 32, 8, num_blocks=2, num_heads=4, io_block_channels=[32],
        qk_rms_norm=True,
    )  # fmt: skip

    def forward(s: Scene):
        x = _latent(load, "trellis", s)
        return [net(x, s.extra["time"], s.extra["condition"]).feats]

    return net, forward, scene(1500, 8, time=(2,), condition=(2, 12, 32))


@add("TRELLIS SLatMeshDecoder", _TRELLIS, "spconv flash_attn", **_TRELLIS_FACTS)
def _(load):
    module = load("trellis.models.structured_latent_vae.decoder_mesh")
    net = module.SLatMeshDecoder(
        64, 256, 8, num_blocks=1, num_heads=4, representation_config={}
    )
    net.to_representation = lambda x: x  # the mesh itself has no sparse layer

    def forward(s: Scene):
        return [_trellis_rows(net(_latent(load, "trellis", s)))]

    return net, forward, scene(40, 8)


_TRELLIS2 = "microsoft/TRELLIS.2@5565d240"
_TRELLIS2_FACTS = {"bare": ("trellis2", "trellis2.models", "trellis2.models.sc_vaes")}
_LEVELS = {"latent_channels": 8, "num_blocks": [1, 1, 1], "block_args": [{}] * 3}
_LEVELS["block_type"] = ["SparseConvNeXtBlock3d"] * 3


@add("TRELLIS.2 SparseUnetVaeEncoder", _TRELLIS2, "flex_gemm flash_attn",
      **_TRELLIS2_FACTS)  # fmt: skip
def _(load):
    module = load("trellis2.models.sc_vaes.sparse_unet_vae")
    net = module.SparseUnetVaeEncoder(
        6, [32, 64, 128], down_block_type=["SparseResBlockS2C3d"] * 2, **_LEVELS
    )

    def forward(s: Scene):
        return [_trellis_rows(net(_latent(load, "trellis2", s)))]

    return net, forward, scene(3000, 6)


@add("TRELLIS.2 SparseUnetVaeDecoder", _TRELLIS2, "flex_gemm flash_attn",
      **_TRELLIS2_FACTS)  # fmt: skip
def _(load):
    module = load("trellis2.models.sc_vaes.sparse_unet_vae")
    net = module.SparseUnetVaeDecoder(
        7, [128, 64, 32], up_block_type=["SparseResBlockC2S3d"] * 2, **_LEVELS
    ).eval()

    def forward(s: Scene):
        y, subdivided = net(_latent(load, "trellis2", s), return_subs=True)
        return [_trellis_rows(each) for each in (y, *subdivided)]

    return net, forward, scene(250, 8)


@add("TRELLIS.2 SLatFlowModel", _TRELLIS2, "flex_gemm flash_attn", **_TRELLIS2_FACTS)
def _(load):
    module = load("trellis2.models.structured_latent_flow")
    net = module.SLatFlowModel(
        64, 8, 64, 32, 8, num_blocks=2, num_heads=4, pe_mode="rope", share_mod=True
    )

    def forward(s: Scene):
        x = _latent(load, "trellis2", s)
        return [net(x, s.extra["time"], s.extra["condition"]).feats]

    return net, forward, scene(1000, 8, time=(2,), condition=(2, 12, 32))


# torch-pointcloud, a package of the index

_INDEX = {"folder": "torch-pointcloud"}


def _torch_pointcloud(module: str, name: str, *arguments, **named) -> Build:
    def build(load):
        net = getattr(load(f"torch_pointcloud.models.{module}"), name)(
            *arguments, **named
        )
        return net, lambda s: [net(s.x, s.grid.long(), s.batch)], scene(2000, 6)

    return build


for _name, _file, _class, _arguments in (
    ("torch-pointcloud SpUNet", "spunet", "SparseUNetSegmentation",
     {"encoder_channels": (16, 32, 48, 64), "decoder_channels": (64, 48, 32, 32),
      "encoder_depths": (1,) * 4, "decoder_depths": (1,) * 4, "stem_channels": 16}),
    ("torch-pointcloud PTv3", "point_transformer_v3", "PointTransformerV3Segmentation",
     {"encoder_depths": (1,) * 5, "encoder_channels": (16, 32, 32, 64, 64),
      "encoder_num_heads": (1, 2, 2, 4, 4), "encoder_patch_size": (128,) * 5,
      "decoder_depths": (1,) * 4, "decoder_channels": (64, 32, 32, 32),
      "decoder_num_heads": (4, 2, 2, 2), "decoder_patch_size": (128,) * 4,
      "drop_path": 0.0, "use_flash_attn": False}),
    ("torch-pointcloud SPFormer UNet", "spformer_unet", "SPFormerUNetSegmentation", {}),
):  # fmt: skip
    _build = _torch_pointcloud(_file, _class, 6, 20, **_arguments)
    add(_name, "torch-pointcloud@0.0.18", "spconv", **_INDEX)(_build)
