"""Make `data/published_states.json.xz`: names and shapes of published state dicts.

Each net of `models.list()` is built by the code that its weights were trained with, or
that saved them, with its published configuration and on PyTorch's meta device. What
that code imports beside PyTorch has stand-ins here: modules of spconv, torchsparse and
MinkowskiEngine with their parameters, and empty classes for the rest.

    python tests/io/published_states.py FOLDER

FOLDER holds the repositories of `SOURCES` as OWNER+NAME/repo (bare), and the wheel of
torch-pointcloud, whose own requirements must be installed; so must easydict, PyYAML.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from torch import nn

OUT = Path(__file__).parent / "data/published_states.json.xz"
COUNTER = "num_batches_tracked"
# Libraries that are not installed, and modules that are compiled.
ABSENT = (
    "addict", "av2", "clip", "colorhash", "cumesh", "cumm", "cv2", "einops",
    "flash_attn", "flex_gemm", "huggingface_hub", "imageio", "kaolin", "kornia",
    "MinkowskiEngine", "nuscenes", "numba", "nvdiffrast", "o_voxel", "ocnn", "open3d",
    "peft", "plyfile", "pointgroup_ops", "pointops", "pointrope", "pyquaternion",
    "SharedArray", "skimage", "sklearn", "spconv", "tensorboardX", "termcolor", "timm",
    "torch_cluster", "torch_scatter", "torchmetrics", "torchpack", "torchsparse",
    "torchvision", "transformers", "trimesh", "utils3d", "wandb", "xformers", "yapf",
)  # fmt: skip


class Anything(nn.Module):
    """A base class, a decorator or a function of a library that is not installed."""

    def __init__(self, *args, **options):
        super().__init__()

    def __init_subclass__(cls, **options):
        super().__init_subclass__()

    def forward(self, *args, **options):
        return args[0] if args else None


def sizes(kernel_size, dims):
    return (kernel_size,) * dims if isinstance(kernel_size, int) else tuple(kernel_size)


def spconv_layer(name, dims):
    def init(self, inputs, outputs, kernel_size=3, *args, bias=True, **options):
        nn.Module.__init__(self)
        shape = outputs, *sizes(kernel_size, dims), inputs
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    return type(name, (Anything,), {"__init__": init})


class Kernel(Anything):
    """A convolution with a flat kernel: torchsparse's, and MinkowskiEngine's."""

    rows = ()  # leading axes of a bias

    def __init__(self, in_channels, out_channels, kernel_size=3, *args, **options):
        nn.Module.__init__(self)
        volume = prod(sizes(kernel_size, 3))
        shape = in_channels, out_channels
        self.kernel = nn.Parameter(
            torch.empty((volume, *shape) if volume > 1 else shape)
        )
        if options.get("bias") or options.get("has_bias"):
            self.bias = nn.Parameter(torch.empty(*self.rows, out_channels))


class MinkowskiKernel(Kernel):
    rows = (1,)


class MinkowskiNorm(Anything):
    def __init__(self, channels, **options):
        nn.Module.__init__(self)
        self.bn = nn.BatchNorm1d(channels)


KNOWN = {
    "torchsparse.nn": {
        "Conv3d": Kernel,
        "BatchNorm": type("BatchNorm", (nn.BatchNorm1d,), {}),
    },
    "spconv.pytorch": {
        "SparseSequential": type("SparseSequential", (nn.Sequential,), {}),
        **{
            f"{kind}{dims}d": spconv_layer(f"{kind}{dims}d", dims)
            for kind in ("SubMConv", "SparseConv", "SparseInverseConv")
            for dims in (1, 2, 3)
        },
    },
    "MinkowskiEngine": {
        "MinkowskiConvolution": MinkowskiKernel,
        "MinkowskiConvolutionTranspose": MinkowskiKernel,
        "MinkowskiBatchNorm": MinkowskiNorm,
        "utils": SimpleNamespace(kaiming_normal_=lambda *args, **options: None),
    },
    "pcdet.version": {"__version__": "0"},
    "spconv": {"__version__": "2.3.8"},
    "timm.layers": {"trunc_normal_": lambda *args, **options: None},
    "timm.models.layers": {"trunc_normal_": lambda *args, **options: None},
    "addict": {"Dict": type("Dict", (dict,), {})},
}


class StandIn(ModuleType):
    """A module of a library that is not installed."""

    __path__: list = []

    def __getattr__(self, name):
        known = KNOWN.get(self.__name__, {})
        if name.startswith("__") and name not in known:
            raise AttributeError(name)
        return known.get(name) or type(name, (Anything,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for what is absent."""

    def find_spec(self, name, path=None, target=None):
        known = name in KNOWN or name.endswith(("_cuda", "_ext"))
        if known or name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(
                name, self, origin="", is_package=True
            )

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def shapes(module, prefix=""):
    """The names and shapes of a module's state dict."""
    state = module.state_dict()
    return {f"{prefix}{name}": list(array.shape) for name, array in state.items()}


# The nets of each repository; the working folder is its checkout


def setting(path, name="model"):
    """A variable of a configuration that is Python."""
    values = {}
    exec(Path(path).read_text(), values)
    return values[name]


def segmentor(config, build, prefix=""):
    """Pointcept's DefaultSegmentorV2: a backbone and a linear head."""
    width, classes = config["backbone_out_channels"], config["num_classes"]
    head = shapes(nn.Linear(width, classes), f"{prefix}seg_head.")
    return shapes(build(config["backbone"]), f"{prefix}backbone.") | head


def pointcept():
    build = importlib.import_module("pointcept.models").build_model
    for data, name in (
        ("nuscenes", "nuscenes"),
        ("scannet", "scannet20.model_best"),
        ("scannet200", "scannet200.model_best"),
    ):
        config = setting(f"configs/{data}/semseg-pt-v3m1-0-base.py")
        yield f"ptv3.{name}.pointcept", segmentor(config, build, "module.")


# Depths, channels and heads of the encoders, as facebookresearch and Pointcept save
# them beside the weights; torch-pointcloud's registry has them in the open.
DEPTHS = {"small": (2, 2, 2, 6, 2), "base": (3, 3, 3, 12, 3)}
ENCODERS = {
    "tiny": ((1, 1, 1, 3, 1), (16, 32, 64, 128, 256), (1, 2, 4, 8, 16)),
    "small": (DEPTHS["small"], (32, 64, 128, 256, 512), (2, 4, 8, 16, 32)),
    "base": (DEPTHS["base"], (48, 96, 192, 384, 512), (3, 6, 12, 24, 32)),
    "large": (DEPTHS["base"], (64, 128, 256, 512, 768), (4, 8, 16, 32, 48)),
}
UTONIA = {
    "tiny": (DEPTHS["small"], (18, 36, 72, 144, 216), (1, 2, 4, 8, 12)),
    "small": (DEPTHS["small"], (36, 72, 144, 288, 432), (2, 4, 8, 16, 24)),
    "base": (DEPTHS["base"], (54, 108, 216, 432, 576), (3, 6, 12, 24, 32)),
}


def encoder(module, size):
    """An encoder's state, in a form of PTv3 without a decoder."""
    depths, channels, heads = size
    net = importlib.import_module(module).PointTransformerV3(
        in_channels=9,
        order=("z", "z-trans", "hilbert", "hilbert-trans"),
        enc_depths=depths,
        enc_channels=channels,
        enc_num_head=heads,
        enc_patch_size=(1024,) * 5,
        mask_token=True,
        enc_mode=True,
    )
    return shapes(net)


def probe(state, size):
    """An encoder beside its linear probe, which is in a file of its own."""
    return state | shapes(nn.Linear(sum(size[1]), 20), "seg_head.")


def sonata():
    for name in ("small", "base"):
        state = encoder("sonata.model", ENCODERS[name])
        yield f"sonata-{name}.pretrain.fair", state
    yield "sonata-base-lp.scannet20.fair", probe(state, ENCODERS["base"])


def concerto():
    for name, size in ENCODERS.items():
        state = encoder("concerto.model", size)
        yield f"concerto-{name}.pretrain.pointcept", state
        for kind in {"base": ("origin", "siglip"), "large": ("origin",)}.get(name, ()):
            yield f"concerto-{name}-{kind}.pretrain.pointcept", state
    yield "concerto-large-lp.scannet20.pointcept", probe(state, size)


def utonia():
    for name, size in UTONIA.items():
        state = encoder("utonia.model", size)
        yield f"utonia-{name}.pretrain.pointcept", state
    yield "utonia-base-lp.scannet20.pointcept", probe(state, size)


def litept():
    build = importlib.import_module("models").build_model
    for data, size in (
        ("nuscenes", "small"),
        ("waymo", "small"),
        ("scannet", "small"),
        ("structured3d", "small"),
        ("structured3d", "base"),
        ("structured3d", "large"),
    ):
        config = setting(f"configs/{data}/semseg-litept-{size}-v1m1.py")
        data = "scannet20" if data == "scannet" else data
        yield f"litept-{size}.{data}.prs-eth", segmentor(config, build, "module.")


def spvnas():
    nets = importlib.import_module("core.models.semantic_kitti")
    for width, macs in ((0.5, "29"), (0.64, "46"), (1.0, "114")):
        net = nets.MinkUNet(num_classes=19, cr=width)
        yield f"minkunet-{macs}gmacs.semantickitti.mit-han-lab", shapes(net)


def minkowski():
    """The net of examples/indoor.py, whose blocks are the library's own."""
    blocks = "MinkowskiEngine.modules.resnet_block"
    path = blocks.replace(".", "/") + ".py"
    spec = importlib.util.spec_from_file_location(blocks, path)
    sys.modules[blocks] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[blocks])
    urllib.request.urlretrieve = lambda *args: None  # an example's scan
    net = importlib.import_module("examples.minkunet").MinkUNet34C
    yield "minkunet34c.scannet20.nvidia", shapes(net(3, 20))


def openpcdet():
    """Detectors of the configurations, with what their data sets would tell them."""
    torch.jit.script = lambda function: function
    torch.Tensor.cuda = lambda tensor: tensor
    models = importlib.import_module("pcdet.models")
    read = importlib.import_module("pcdet.config")
    for path, name in (
        ("nuscenes_models/cbgs_voxel01_res3d_centerpoint", "centerpoint-01.nuscenes"),
        (
            "nuscenes_models/cbgs_voxel0075_res3d_centerpoint",
            "centerpoint-0075.nuscenes",
        ),
        ("argo2_models/cbgs_voxel01_voxelnext", "voxelnext.argo2"),
    ):
        config = read.cfg_from_yaml_file(f"cfgs/{path}.yaml", read.EasyDict())
        data = config.DATA_CONFIG
        size = data.DATA_PROCESSOR[-1].VOXEL_SIZE
        low, high = data.POINT_CLOUD_RANGE[:3], data.POINT_CLOUD_RANGE[3:]
        grid = [round((b - a) / s) for a, b, s in zip(low, high, size, strict=True)]
        features = len(data.POINT_FEATURE_ENCODING.used_feature_list)
        told = SimpleNamespace(
            class_names=config.CLASS_NAMES,
            grid_size=np.array(grid),
            voxel_size=size,
            point_cloud_range=np.array(data.POINT_CLOUD_RANGE),
            point_feature_encoder=SimpleNamespace(num_point_features=features),
            depth_downsample_factor=None,
        )
        net = models.build_network(config.MODEL, len(config.CLASS_NAMES), told)
        yield f"{name}.openpcdet", shapes(net)


def trellis2():
    models = importlib.import_module("trellis2.models")

    def net(path, part):
        model = json.loads(Path(path).read_text())["models"][part]
        name = model["name"].removeprefix("Elastic")
        return shapes(getattr(models, name)(**model["args"]))

    for data, name in (("shape", "shape"), ("tex", "texture")):
        path = f"configs/scvae/{data}_vae_next_dc_f16c32_fp16.json"
        for part in ("encoder", "decoder"):
            yield f"trellis2-{name}-{part}.microsoft", net(path, part)
    path = "configs/gen/ss_flow_img_dit_1_3B_64_bf16.json"
    yield "trellis2-structure-flow.microsoft", net(path, "denoiser")
    for data, name in (("img2shape", "shape"), ("imgshape2tex", "texture")):
        path = f"configs/gen/slat_flow_{data}_dit_1_3B_512_bf16.json"
        for resolution in (512, 1024):
            key = f"trellis2-{name}-flow-{resolution}.microsoft"
            yield key, net(path, "denoiser")
    # As TRELLIS's configs/vae/ss_vae_conv3d_16l8_fp16.json has them.
    sizes = {"latent_channels": 8, "num_res_blocks": 2, "num_res_blocks_middle": 2}
    wide = [32, 128, 512]
    net = models.SparseStructureEncoder(in_channels=1, channels=wide, **sizes)
    yield "trellis2-structure-encoder.microsoft", shapes(net)
    net = models.SparseStructureDecoder(out_channels=1, channels=wide[::-1], **sizes)
    yield "trellis2-structure-decoder.microsoft", shapes(net)


def dales():
    """Of a user of Pointcept's, with the sizes that torch-pointcloud's registry has."""
    build = importlib.import_module("pointcept.models").build_model
    backbone = {
        "type": "PT-v3m3",
        "in_channels": 4,
        "order": ("z", "z-trans", "hilbert", "hilbert-trans"),
        "enc_depths": (2, 2, 2, 6, 2),
        "enc_channels": (48, 96, 192, 384, 768),
        "enc_num_head": (2, 4, 8, 16, 32),
        "enc_patch_size": (1024,) * 5,
        "dec_depths": (2, 2, 2, 2),
        "dec_channels": (96, 96, 192, 384),
        "dec_num_head": (4, 4, 8, 16),
        "dec_patch_size": (1024,) * 4,
    }
    config = {"backbone": backbone, "backbone_out_channels": 96, "num_classes": 9}
    yield "ptv3.dales.jayakumar-pujar", segmentor(config, build)


# What torch-pointcloud calls its entries, and how `models` does if it differs.
TORCH_POINTCLOUD = {
    "ptv3-base.scannet20.pointcept": "ptv3.scannet20.pointcept",
    "ptv3-base.scannet200.pointcept": "ptv3.scannet200.pointcept",
    "ptv3-base.s3dis-area5.pointcept": "ptv3.s3dis-area5.pointcept",
    "spunet-v1m1.scannet20.pointcept": "spunet.scannet20.pointcept",
}


def torch_pointcloud():
    importlib.import_module("torch_pointcloud.models")
    registry = importlib.import_module("torch_pointcloud.models._registry")
    for entries in registry._REGISTERED_MODELS.values():
        for name, entry in entries.items():
            kind = name.partition(".")[0].partition("-")[0]
            if kind in ("ptv3", "spunet", "second", "voxelnext", "spvcnn") and not (
                entry["weights"] is None or "dales" in name
            ):
                options = dict(entry["hparams"])
                if "use_flash_attn" in options:
                    options["use_flash_attn"] = False
                net = entry["fn"](**options)
                yield TORCH_POINTCLOUD.get(name, name), shapes(net)


# By folder: the commit, where its modules are, and the nets.
SOURCES = {
    "torch_pointcloud": ("0.0.18", ".", torch_pointcloud),
    "Pointcept+Pointcept": ("v1.5.1", ".", pointcept),
    "Pointcept+Pointcept ": ("d74c646", ".", dales),
    "facebookresearch+sonata": ("18c09ff", ".", sonata),
    "Pointcept+Concerto": ("5b41117", ".", concerto),
    "Pointcept+Utonia": ("323e613", ".", utonia),
    "prs-eth+LitePT": ("0797098", ".", litept),
    "mit-han-lab+spvnas": ("5c53224", ".", spvnas),
    "NVIDIA+MinkowskiEngine": ("02fc608", ".", minkowski),
    "open-mmlab+OpenPCDet": ("8cacccec", "tools", openpcdet),
    "microsoft+TRELLIS.2": ("5565d24", ".", trellis2),
}


def unpack(folder, name, commit, into):
    """Write the code of a commit, or of a wheel, into a folder."""
    if wheels := sorted(folder.glob(f"{name}-{commit}-*.whl")):
        zipfile.ZipFile(wheels[0]).extractall(into)
        return
    git = ["git", f"--git-dir={folder / name.strip() / 'repo'}"]
    listed = [*git, "ls-tree", "-r", "--name-only", commit]
    files = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    code = [f for f in files.splitlines() if f.endswith((".py", ".json", ".yaml"))]
    packed = subprocess.run([*git, "archive", commit, *code], capture_output=True)
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(into, filter="data")


def states(folder, name):
    """Return the states of one source; the process imports no other's modules."""
    commit, place, nets = SOURCES[name]
    with tempfile.TemporaryDirectory() as into:
        unpack(Path(folder), name, commit, into)
        sys.path.insert(0, into)
        os.chdir(Path(into) / place)
        sys.meta_path.insert(0, Finder())
        # Rates of layers, whose values are read, are not on the meta device.
        torch.linspace = partial(torch.linspace, device="cpu")
        with torch.device("meta"):
            return {
                key: {n: s for n, s in state.items() if not n.endswith(COUNTER)}
                for key, state in nets()
            }


def main(folder):
    """Make the file; each source in a process of its own."""
    found = {}
    for name in SOURCES:
        command = [sys.executable, __file__, folder, name]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        found |= json.loads(made.stdout.splitlines()[-1])
    packed = lzma.compress(json.dumps(found, separators=(",", ":")).encode(), preset=9)
    OUT.write_bytes(packed)
    print(f"{len(found)} states, {len(packed):,} bytes")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(states(*sys.argv[1:])))
    else:
        main(sys.argv[1])
