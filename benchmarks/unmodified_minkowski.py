"""The public nets of unmodified.py for MinkowskiEngine and torchsparse."""

from __future__ import annotations

import codecs
import collections
import collections.abc
from pathlib import Path
from types import SimpleNamespace

import torch
from unmodified_nets import POINTS, Build, Load, Scene, add, points, scene

# What files written for older versions of Python ask for.
codecs.register(lambda name: codecs.lookup("utf-8") if "fstrings" in name else None)
if not hasattr(collections, "Sequence"):
    collections.Sequence = collections.abc.Sequence

_ME = "MinkowskiEngine"


def _rows(s: Scene) -> torch.Tensor:
    """Return the scene's rows around the origin: coordinates may be negative."""
    return s.rows - torch.tensor([0, 20, 20, 20], dtype=torch.int32)


def _sparse(s: Scene, **names):
    import MinkowskiEngine as ME

    names = names or {"coordinates": _rows(s)}
    return ME.SparseTensor(s.x, **names)


@add("FCGF ResUNetBN2C", "chrischoy/FCGF@499813ea", _ME)
def _(load: Load):
    net = load("model").load_model("ResUNetBN2C")(
        1, 32, conv1_kernel_size=5, normalize_feature=True
    )
    return net, lambda s: [net(_sparse(s)).F], scene(1500, 1)


@add("DeepGlobalRegistration ResUNetBN2C",
     "chrischoy/DeepGlobalRegistration@1f4871d4", _ME)  # fmt: skip
def _(load: Load):
    net = load("model").load_model("ResUNetBN2C")(
        1, 32, conv1_kernel_size=7, normalize_feature=True
    )
    return net, lambda s: [net(_sparse(s, coords=_rows(s))).F], scene(1000, 1)


@add("MinkLoc3D", "jac99/MinkLoc3D@4700dfda", _ME)
def _(load: Load):
    net = load("models.minkloc").MinkLoc(
        "MinkFPN_GeM", 1, 256, 256, planes=[32, 64, 64], layers=[1, 1, 1],
        num_top_down=1, conv0_kernel_size=5,
    )  # fmt: skip
    return net, lambda s: [net({"features": s.x, "coords": _rows(s)})], scene(2000, 1)


@add("MinkLoc3Dv2", "jac99/MinkLoc3Dv2@2413a5dd", _ME)
def _(load: Load):
    utils = load("misc.utils")
    file = Path(utils.__file__).parents[1] / "models" / "minkloc3dv2.txt"
    net = load("models.model_factory").model_factory(utils.ModelParams(str(file)))

    def forward(s: Scene):
        return [net({"features": s.x, "coords": _rows(s)})["global"]]

    return net, forward, scene(2000, 1)


@add("SpatioTemporalSegmentation Res16UNet34C",
     "chrischoy/SpatioTemporalSegmentation@4afee296", _ME,
     stand_ins=("open3d",))  # fmt: skip
def _(load: Load):
    config = SimpleNamespace(bn_momentum=0.02, conv1_kernel_size=5)
    net = load("models.res16unet").Res16UNet34C(3, 20, config, D=3)
    return net, lambda s: [net(_sparse(s, coords=_rows(s))).F], scene(1000, 3)


@add("Pointcept MinkUNet14A", "Pointcept/Pointcept@d74c646d", _ME, **POINTS)
def _(load: Load):
    module = load("pointcept.models.sparse_unet.mink_unet")
    net = module.MinkUNet14A(6, 20)
    return net, lambda s: [net(points(s))], scene(1500, 6)


_MASK3D = "JonasSchult/Mask3D@11bd5ff9"
_MASK3D_FACTS = {"stand_ins": ("hydra", "torch_scatter", "third_party")}


def _mask3d_backbone(load: Load):
    config = SimpleNamespace(
        dialations=[1, 1, 1, 1], conv1_kernel_size=5, bn_momentum=0.02
    )
    return load("models.res16unet").Res16UNet34C(3, 20, config, out_fpn=True)


@add("Mask3D Res16UNet34C", _MASK3D, _ME, **_MASK3D_FACTS)
def _(load: Load):
    net = _mask3d_backbone(load)

    def forward(s: Scene):
        y, levels = net(_sparse(s))
        return [y.F, *(each.F.sum(0) for each in levels)]

    return net, forward, scene(1000, 3)


@add("Mask3D", _MASK3D, _ME, **_MASK3D_FACTS)
def _(load: Load):
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
    module = load("models.mask3d")
    config = SimpleNamespace(backbone=_mask3d_backbone(load))
    net = module.Mask3D(config, **facts)

    def forward(s: Scene):
        x = _sparse(s)
        coordinates = _rows(s)[:, 1:].to(s.x.dtype) * 0.02
        made = net(x, raw_coordinates=coordinates, is_eval=True)
        # Later masks depend on thresholds of these.
        first = made["aux_outputs"][0]
        return [*first["pred_masks"], first["pred_logits"]]

    return net, forward, scene(1000, 3)


@add("LiDiff MinkUNet", "PRBonn/LiDiff@570e73c5", _ME, stand_ins=("pykeops",))
def _(load: Load):
    net = load("lidiff.models.minkunet").MinkUNet(in_channels=3, out_channels=3)

    def forward(s: Scene):
        import MinkowskiEngine as ME

        rows = _rows(s).to(s.x.dtype)
        rows[:, 1:] += (s.extra["shift"] * 16).round() / 32
        field = ME.TensorField(
            s.x, rows,
            quantization_mode=ME.SparseTensorQuantizationMode.UNWEIGHTED_AVERAGE,
            minkowski_algorithm=ME.MinkowskiAlgorithm.SPEED_OPTIMIZED,
        )  # fmt: skip
        return [net(field)]

    return net, forward, scene(1000, 3, shift=(2000, 3))


# torchsparse: 1.4's columns are x, y, z, batch

_PACKAGES = "core", "core.models", "core.models.semantic_kitti"
_SPVNAS_FACTS = {"stand_ins": ("torch_scatter",), "bare": _PACKAGES}


def _spvnas(name: str, first: bool) -> Build:
    def build(load: Load):
        module = load(f"core.models.semantic_kitti.{name.lower()}")
        # Sizes of points and voxels are powers of two, by which division is exact.
        net = getattr(module, name)(num_classes=19, cr=0.5, pres=0.5, vres=0.5)

        def forward(s: Scene):
            import torchsparse

            rows = s.rows if first else s.rows[:, [1, 2, 3, 0]].contiguous()
            return [net(torchsparse.SparseTensor(s.x, rows))]

        # At stride 16 a smaller scene has too few rows for batch normalization.
        return net, forward, scene(5000 if first else 1500, 4)

    return build


_SPVNAS14 = {**_SPVNAS_FACTS, "folder": "mit-han-lab+spvnas@97a282d"}
for _name in ("SPVCNN", "MinkUNet"):
    add(f"SPVNAS {_name}", "mit-han-lab/spvnas@5c53224c", "torchsparse",
        **_SPVNAS_FACTS)(_spvnas(_name, True))  # fmt: skip
    add(f"SPVNAS {_name} of 1.4", "mit-han-lab/spvnas@97a282da", "torchsparse==1.4",
        **_SPVNAS14)(_spvnas(_name, False))  # fmt: skip


@add("LoGG3D-Net SPVCNN", "csiro-robotics/LoGG3D-Net@cfbe064e", "torchsparse==1.4",
     folder="csiro-robotics+LoGG3D-Net/models/backbones/spvnas")  # fmt: skip
def _(load: Load):
    module = load("core.models.semantic_kitti.spvcnn")
    net = module.SPVCNN(num_classes=16, cr=0.5, pres=0.5, vres=0.5)

    def forward(s: Scene):
        import torchsparse

        rows = s.rows[:, [1, 2, 3, 0]].contiguous()
        return [net(torchsparse.SparseTensor(s.x, rows))]

    return net, forward, scene(1500, 4)


@add("Pointcept SPVCNN", "Pointcept/Pointcept@d74c646d", "torchsparse==1.4", **POINTS)
def _(load: Load):
    module = load("pointcept.models.spvcnn.ts_spvcnn")
    net = module.SPVCNN(
        6, 20, base_channels=16, channels=(16, 32, 64, 64, 64, 48, 32, 32),
        layers=(1,) * 8,
    )  # fmt: skip
    return net, lambda s: [net(points(s))], scene(1500, 6)
