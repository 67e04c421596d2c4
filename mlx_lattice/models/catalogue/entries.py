"""Published weights by name: where they are, of which net, and what they expect.

``create(name)`` builds the net and loads its weights; ``published(name)`` is the entry
with its sources. Facts that no source states are None, and printed as unknown. What a
net computes is that of the code that trained its weights: see ``About.version``.
"""

from __future__ import annotations

import builtins
import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...io.checkpoints import import_checkpoint, load_state
from ...io.safetensors import shown
from .. import detection, trellis2
from ..pretrained import About, Pretrained
from ..voxel_recipe import VoxelRecipe
from .record import HUB, Published

__all__ = ["PUBLISHED", "create", "list", "published"]


def list(pattern: str = "*") -> builtins.list[str]:
    """Return the names of published weights that ``create`` takes.

    Args:
        pattern: a pattern with ``*`` and ``?``, such as ``"ptv3*"`` or
            ``"*scannet20*"``.

    Examples:
        >>> models.list("spunet*")
        ['spunet.scannet20.pointcept']
    """
    return [name for name in _ENTRIES if fnmatch.fnmatch(name, pattern)]


def published(name: str) -> Published:
    """Return the entry of a published checkpoint; ``print`` shows all its facts.

    Raises:
        ValueError: there is no such name; the message has similar names.

    Examples:
        >>> entry = models.published("spunet.scannet20.pointcept")
        >>> entry.kind, entry.library  # print(entry) shows everything
        ('SpUNet', 'spconv')
    """
    if name not in _ENTRIES:
        near = [known for known in _ENTRIES if known.startswith(str(name))][:3]
        near = near or difflib.get_close_matches(str(name), _ENTRIES, 3, 0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"there are no published weights {shown(str(name))}; {hint}models.list() "
            "or mlx-lattice models lists all names"
        )
    return _ENTRIES[name]


def create(
    name: str,
    path: str | Path | Sequence[str | Path] | None = None,
    *,
    download: bool = True,
    library: str | None = None,
) -> Pretrained:
    """Return a published net with its weights, in evaluation mode.

    ``net.about`` has the voxel recipe, the classes and the licence.
    ``net.about.version`` names the code that trained the weights; the net computes what
    that code computes.

    Args:
        name: one of ``list()``, such as ``"ptv3.scannet20.pointcept"``.
        path: a file that you downloaded, in any format of ``io.import_checkpoint``;
            both files for an entry of two. By default they are downloaded to the cache
            of ``huggingface_hub``, which the extra ``hub`` installs.
        download: whether the network may be used; if not, only the cache is read.
        library: the layout of the file, such as "spconv1", if it is not the entry's.

    Raises:
        io.CheckpointError: a file does not fit the net.
        FileNotFoundError: there is no such file, or it cannot be downloaded; the
            message has the address.
        ImportError: ``huggingface_hub`` is needed and not installed.
        ValueError: there is no such name, or ``path`` has another number of files.

    Examples:
        >>> net = models.create("ptv3.scannet20.pointcept")  # doctest: +SKIP
        >>> net.about.version  # doctest: +SKIP
        'Pointcept 1.5.1, whose convolutions read the MLP branch (legacy=True)'
    """
    entry = published(name)
    if path is None:
        files = entry.download(cached=not download)
    else:
        files = [path] if isinstance(path, str | Path) else [*path]
        if len(files) != len(entry.files):
            raise ValueError(
                f"{name} is in {len(entry.files)} files; got {len(files)}: "
                f"{', '.join(entry.files)}"
            )
    net, source = entry.build(), files[0]
    if len(files) > 1:
        source = {k: v for file in files for k, v in load_state(file).items()}
    import_checkpoint(source, net, library or entry.library)
    return net


# Voxels and classes, as published configurations have them


def _about(
    voxels: VoxelRecipe | None, classes: str, source: str, licence: str
) -> About:
    """Return an About; ``classes`` has names with their colours, ``name rrggbb``."""
    rows = [row.strip().rpartition(" ") for row in classes.split(",")]
    colours = tuple(tuple(bytes.fromhex(colour)) for _, _, colour in rows)
    return About(voxels, tuple(name for name, _, _ in rows), colours, source, licence)


def _names(text: str) -> tuple[str, ...]:
    """Return names of classes that have no colours of their own."""
    return tuple(" ".join(name.split()) for name in text.split(","))


# ScanNet's twenty classes, in the order and the colours of its benchmark.
SCANNET = """
    wall aec7e8, floor 98df8a, cabinet 1f77b4, bed ffbb78, chair bcbd22,
    sofa 8c564b, table ff9896, door d62728, window c5b0d5, bookshelf 9467bd,
    picture c49c94, counter 17becf, desk f7b6d2, curtain dbdb8d,
    refrigerator ff7f0e, shower curtain 9edae5, toilet 2ca02c, sink 708090,
    bathtub e377c2, other furniture 5254a3
"""
# SemanticKITTI's nineteen, in the order of SPVNAS, in the benchmark's colours.
SEMANTIC_KITTI = """
    car 6496f5, bicycle 64e6f5, motorcycle 1e3c96, truck 501eb4,
    other vehicle 0000ff, person ff1e1e, bicyclist ff28c8, motorcyclist 961e5a,
    road ff00ff, parking ff96ff, sidewalk 4b004b, other ground af004b,
    building ffc800, fence ff7832, vegetation 00af00, trunk 873c00, terrain 96f050,
    pole fff096, traffic sign ff0000
"""
# The classes of OpenPCDet's configurations for Waymo and nuScenes.
WAYMO = """
    Vehicle 1f77b4, Pedestrian d62728, Cyclist 2ca02c
"""
NUSCENES = """
    car ff9e00, truck ff6347, construction_vehicle e99646, bus ff7f50,
    trailer ff8c00, barrier 708090, motorcycle ff3d63, bicycle dc143c,
    pedestrian 0000e6, traffic_cone 2f4f4f
"""

SCANNET200 = """
    wall, chair, floor, table, door, couch, cabinet, shelf, desk, office chair, bed,
    pillow, sink, picture, window, toilet, bookshelf, monitor, curtain, book,
    armchair, coffee table, box, refrigerator, lamp, kitchen cabinet, towel,
    clothes, tv, nightstand, counter, dresser, stool, cushion, plant, ceiling,
    bathtub, end table, dining table, keyboard, bag, backpack, toilet paper,
    printer, tv stand, whiteboard, blanket, shower curtain, trash can, closet,
    stairs, microwave, stove, shoe, computer tower, bottle, bin, ottoman, bench,
    board, washing machine, mirror, copier, basket, sofa chair, file cabinet, fan,
    laptop, shower, paper, person, paper towel dispenser, oven, blinds, rack, plate,
    blackboard, piano, suitcase, rail, radiator, recycling bin, container, wardrobe,
    soap dispenser, telephone, bucket, clock, stand, light, laundry basket, pipe,
    clothes dryer, guitar, toilet paper holder, seat, speaker, column, bicycle,
    ladder, bathroom stall, shower wall, cup, jacket, storage bin, coffee maker,
    dishwasher, paper towel roll, machine, mat, windowsill, bar, toaster, bulletin
    board, ironing board, fireplace, soap dish, kitchen counter, doorframe, toilet
    paper dispenser, mini fridge, fire extinguisher, ball, hat, shower curtain rod,
    water cooler, paper cutter, tray, shower door, pillar, ledge, toaster oven,
    mouse, toilet seat cover dispenser, furniture, cart, storage container, scale,
    tissue box, light switch, crate, power outlet, decoration, sign, projector,
    closet door, vacuum cleaner, candle, plunger, stuffed animal, headphones, dish
    rack, broom, guitar case, range hood, dustpan, hair dryer, water bottle,
    handicap bar, purse, vent, shower floor, water pitcher, mailbox, bowl, paper
    bag, alarm clock, music stand, projector screen, divider, laundry detergent,
    bathroom counter, stick, bathroom vanity, closet wall, laundry hamper, bathroom
    stall door, ceiling light, trash bin, dumbbell, stair rail, tube, bathroom
    cabinet, cd case, closet rod, coffee kettle, structure, shower head, keyboard
    piano, case of water bottles, coat rack, storage organizer, folded chair, fire
    alarm, power strip, calendar, poster, potted plant, luggage, mattress
"""
S3DIS = """
    ceiling, floor, wall, beam, column, window, door, table, chair, sofa, bookcase,
    board, clutter
"""
DALES = """
    unknown, ground, vegetation, cars, trucks, power lines, fences, poles, buildings
"""
# Points of nuScenes and Waymo, which are segmented, and rooms of Structured3D.
NUSCENES_POINTS = """
    barrier, bicycle, bus, car, construction vehicle, motorcycle, pedestrian,
    traffic cone, trailer, truck, driveable surface, other flat, sidewalk, terrain,
    manmade, vegetation
"""
WAYMO_POINTS = """
    car, truck, bus, other vehicle, motorcyclist, bicyclist, pedestrian, sign,
    traffic light, pole, construction cone, bicycle, motorcycle, building, vegetation,
    tree trunk, curb, road, lane marker, other ground, walkable, sidewalk
"""
STRUCTURED3D = """
    wall, floor, cabinet, bed, chair, sofa, table, door, window, picture, desk, shelves,
    curtain, dresser, pillow, mirror, ceiling, refrigerator, television, nightstand,
    sink, lamp, other structure, other furniture, other prop
"""

# Pointcept's nets for ScanNet, trained before 1.6.0, which has colours from 0 to 1.
_POINTCEPT = _about(
    VoxelRecipe(
        0.02,
        ("colours", "normals"),
        centred=True,
        from_zero=True,
        colour_range=(-1.0, 1.0),
    ),
    SCANNET,
    "https://github.com/Pointcept/Pointcept",
    "MIT (the code); the data's own terms of use",
)
_OPENPCDET = "https://github.com/open-mmlab/OpenPCDet"

# The voxel recipes and classes of published configurations, by net and data set.
PUBLISHED = {
    # semseg-spunet-v1m1-0-base and semseg-pt-v3m1-0-base.
    "spunet-scannet": _POINTCEPT,
    "ptv3-scannet": replace(_POINTCEPT, legacy=True),
    # LitePT's configs/scannet/semseg-litept-small-v1m1.
    "litept-scannet": replace(
        _POINTCEPT,
        voxels=replace(_POINTCEPT.voxels, colour_range=(0.0, 1.0)),
        source="https://github.com/prs-eth/LitePT",
    ),
    # MinkowskiEngine's examples/indoor.py.
    "minkunet-scannet": _about(
        VoxelRecipe(0.02, ("colours",), reduce="mean", colour_range=(-0.5, 0.5)),
        SCANNET,
        "https://github.com/NVIDIA/MinkowskiEngine",
        "MIT (the code); the data's own terms of use",
    ),
    # SPVNAS's core/datasets/semantic_kitti.py.
    "spvnas-semantic-kitti": _about(
        VoxelRecipe(
            0.05, ("coordinates", "intensity"), from_zero=True, rounding="nearest"
        ),
        SEMANTIC_KITTI,
        "https://github.com/mit-han-lab/spvnas",
        "MIT (the code); CC BY-NC-SA 4.0 (the data)",
    ),
    # A detector's voxels are in its own arguments.
    "openpcdet-waymo": _about(
        None,
        WAYMO,
        _OPENPCDET,
        "Apache-2.0 (the code); Waymo's terms of use (the data)",
    ),
    "openpcdet-nuscenes": _about(
        None, NUSCENES, _OPENPCDET, "Apache-2.0 (the code); CC BY-NC-SA 4.0 (the data)"
    ),
}

# The entries

_REGISTRY = "https://pypi.org/project/torch-pointcloud/0.0.18/"  # its models' registry
_PTV3 = "https://github.com/Pointcept/PointTransformerV3/blob/main/README.md"
_POINTCEPT_README = "https://github.com/Pointcept/Pointcept/blob/main/README.md"
_POINTCEPT_CONFIGS = "https://github.com/Pointcept/Pointcept/tree/v1.5.1/configs"
_SONATA = "https://github.com/facebookresearch/sonata/blob/main/README.md"
_CONCERTO = "https://github.com/Pointcept/Concerto/blob/main/README.md"
_UTONIA = "https://github.com/Pointcept/Utonia/blob/main/README.md"
_LITEPT = "https://github.com/prs-eth/LitePT/blob/main/README.md"
_SPVNAS = "https://github.com/mit-han-lab/spvnas/blob/master/README.md"
_ZOO = f"{_OPENPCDET}/blob/master/README.md"
_TRELLIS2 = "https://github.com/microsoft/TRELLIS.2/blob/main/README.md"
_TRELLIS = "https://github.com/microsoft/TRELLIS/blob/main/README.md"

_V151 = "Pointcept 1.5.1, whose convolutions read the MLP branch (legacy=True)"
_NON_COMMERCIAL = "CC-BY-NC-4.0"
_SPVNAS_VERSION = "SPVNAS with torchsparse 1, which keeps every coarse cell"
_AS_POINTS = VoxelRecipe(
    0.02, ("coordinates", "colours", "normals"), centred=True, from_zero=True
)
_SWEEP = VoxelRecipe(0.05, ("coordinates", "intensity"), from_zero=True)
_INTENSITY = "the intensity of nuScenes' files is divided by 255 first"


def _hub(repository: str, revision: str, *files: str) -> tuple[str, ...]:
    return tuple(f"{HUB}{repository}/resolve/{revision}/{file}" for file in files)


def _ported(name: str, revision: str) -> tuple[str, ...]:
    """Return the file of torch-pointcloud's repository of that name."""
    return _hub(f"torch-pointcloud/{name}", revision, "model.safetensors")


def _drive(key: str) -> tuple[str, ...]:
    return (f"https://drive.google.com/file/d/{key}/view",)


def _ptv3(
    name: str,
    files: tuple[str, ...],
    in_channels: int,
    classes: tuple[str, ...],
    voxels: VoxelRecipe | None,
    metric: str,
    licence: str,
    note: str,
    **arguments: Any,
) -> Published:
    """Return an entry of PTv3's first form, trained with Pointcept 1.5.1."""
    about = replace(
        _POINTCEPT,
        voxels=voxels,
        classes=classes,
        colours=_POINTCEPT.colours if classes == _POINTCEPT.classes else (),
        licence=licence,
        legacy=True,
        version=_V151,
    )
    arguments = {"in_channels": in_channels, "num_classes": len(classes)} | arguments
    sources = (_REGISTRY, _PTV3, _POINTCEPT_README, _POINTCEPT_CONFIGS)
    return Published(
        name, "PTv3", files, "spconv", arguments, about, metric, sources, note
    )


def _original(folder: str) -> tuple[str, ...]:
    """Return the file of a folder that PTv3's README names, as public scripts do."""
    file = f"{folder}/model/model_best.pth"
    return _hub("Pointcept/PointTransformerV3", "main", file)


def _also(folder: str) -> str:
    return f"Pointcept's own file fits too, by path=: {_original(folder)[0]}"


_SIZES = {
    "tiny": ((1, 1, 1, 3, 1), (16, 32, 64, 128, 256), (1, 2, 4, 8, 16)),
    "small": ((2, 2, 2, 6, 2), (32, 64, 128, 256, 512), (2, 4, 8, 16, 32)),
    "base": ((3, 3, 3, 12, 3), (48, 96, 192, 384, 512), (3, 6, 12, 24, 32)),
    "large": ((3, 3, 3, 12, 3), (64, 128, 256, 512, 768), (4, 8, 16, 32, 48)),
}
_UTONIA_SIZES = {
    "tiny": ((2, 2, 2, 6, 2), (18, 36, 72, 144, 216), (1, 2, 4, 8, 12)),
    "small": ((2, 2, 2, 6, 2), (36, 72, 144, 288, 432), (2, 4, 8, 16, 24)),
    "base": ((3, 3, 3, 12, 3), (54, 108, 216, 432, 576), (3, 6, 12, 24, 32)),
}
_UTONIA_NOTE = (
    "positions are multiplied by 0.5 for rooms, centred, then cut into voxels of 0.01; "
    "features are these positions, colours from 0 to 1, normals; call net(x, positions)"
)


def _encoder(
    name: str,
    files: tuple[str, ...],
    size: tuple[Sequence[int], ...],
    source: str,
    version: str,
    metric: str | None = None,
    note: str = "",
    **arguments: Any,
) -> Published:
    """Return an entry of an encoder, whose second file has a linear head."""
    depths, channels, heads = size
    probe = len(files) == 2
    about = About(
        None if "rope_base" in arguments else _AS_POINTS,
        _POINTCEPT.classes if probe else (),
        _POINTCEPT.colours if probe else (),
        source.removesuffix("/blob/main/README.md"),
        _NON_COMMERCIAL,
        version=version,
    )
    arguments = {
        "in_channels": 9,
        "num_classes": 20 if probe else 0,
        "variant": "m2",
        "enc_depths": depths,
        "enc_channels": channels,
        "enc_num_head": heads,
        "enc_mode": True,
    } | arguments
    sources = (_REGISTRY, source, _POINTCEPT_README)
    return Published(
        name, "PTv3", files, "spconv", arguments, about, metric, sources, note
    )


def _pretrained() -> builtins.list[Published]:
    """Return the entries of Sonata, Concerto and Utonia."""
    revision = "df99897472c09f91ba9288da0a034aacffc0b010"
    version = "facebookresearch/sonata, released with Pointcept 1.6.0"
    rest = _SONATA, version
    base, head = "model.safetensors", "sonata_linear_prob_head_sc.pth"
    files = {"small": ("sonata_small.pth",), "base": (base,)}
    entries = [
        _encoder(
            f"sonata-{size}.pretrain.fair",
            _hub("facebook/sonata", revision, *names),
            _SIZES[size],
            *rest,
        )
        for size, names in files.items()
    ]
    entries.append(
        _encoder(
            "sonata-base-lp.scannet20.fair",
            _hub("facebook/sonata", revision, base, head),
            _SIZES["base"],
            *rest,
            "72.60 mIoU on ScanNet's validation set, as torch-pointcloud measured",
        )
    )
    revision = "efc130718a564eba0ce4899318f3c20b19d9c752"
    rest = _CONCERTO, "Pointcept/Concerto, released with Pointcept 1.6.1"
    for size in ("tiny", "small", "base", "large"):
        kinds = {"base": ("", "_origin", "_siglip"), "large": ("", "_origin")}
        for kind in kinds.get(size, ("",)):
            file = f"concerto_{size}{kind}"
            entries.append(
                _encoder(
                    f"{file.replace('_', '-')}.pretrain.pointcept",
                    _hub("Pointcept/Concerto", revision, f"{file}.pth"),
                    _SIZES[size],
                    *rest,
                )
            )
    pair = "concerto_large.pth", "concerto_large_linear_prob_head_sc.pth"
    entries.append(
        _encoder(
            "concerto-large-lp.scannet20.pointcept",
            _hub("Pointcept/Concerto", revision, *pair),
            _SIZES["large"],
            *rest,
            "78.59 mIoU on ScanNet's validation set, as torch-pointcloud measured",
        )
    )
    revision = "9457f025e36c7001ee962a542f0d27a5b600e1e7"
    rest = _UTONIA, "Pointcept/Utonia, released with Pointcept 1.7.0"
    options = {"note": _UTONIA_NOTE, "variant": "m3", "rope_base": 10.0}
    names = {"tiny": "utonia_tiny.pth", "small": "utonia_small.pth"}
    names["base"] = "utonia.pth"
    for size, file in names.items():
        files = _hub("Pointcept/Utonia", revision, file)
        name = f"utonia-{size}.pretrain.pointcept"
        entries.append(_encoder(name, files, _UTONIA_SIZES[size], *rest, **options))
    pair = "utonia.pth", "utonia_linear_prob_head_sc.pth"
    entries.append(
        _encoder(
            "utonia-base-lp.scannet20.pointcept",
            _hub("Pointcept/Utonia", revision, *pair),
            _UTONIA_SIZES["base"],
            *rest,
            "77.70 mIoU on ScanNet's validation set, as torch-pointcloud measured",
            **options,
        )
    )
    return entries


def _segmentors() -> builtins.list[Published]:
    """Return the entries of PTv3, SpUNet, MinkUNet and SPVCNN."""
    rooms = _POINTCEPT.voxels
    entries = [
        _ptv3(
            "ptv3.scannet20.pointcept",
            _ported(
                "ptv3-base.scannet20.pointcept",
                "3a8e0a66d76ecfb57d4dd0e4ef43de18f1491b41",
            ),
            6,
            _POINTCEPT.classes,
            rooms,
            "77.6 mIoU on ScanNet's validation set (77.42 as torch-pointcloud "
            "measured)",
            "MIT",
            _also("scannet-semseg-pt-v3m1-0-base"),
        ),
        _ptv3(
            "ptv3.scannet200.pointcept",
            _ported(
                "ptv3-base.scannet200.pointcept",
                "1f1232df7e827ff72dd7cd038763e75516494462",
            ),
            6,
            _names(SCANNET200),
            rooms,
            "35.3 mIoU on ScanNet200's validation set (35.12 as torch-pointcloud "
            "measured)",
            "MIT",
            _also("scannet200-semseg-pt-v3m1-0-base"),
        ),
        _ptv3(
            "ptv3.s3dis-area5.pointcept",
            _ported(
                "ptv3-base.s3dis-area5.pointcept",
                "95d483ef0e186a94ffbf8302a2bba9b5ba710344",
            ),
            6,
            _names(S3DIS),
            rooms,
            "73.6 mIoU on S3DIS's area 5 (72.03 as torch-pointcloud measured, with "
            "normals of its own)",
            "MIT",
            _also("s3dis-semseg-pt-v3m1-0-rpe"),
            enc_patch_size=(128,) * 5,
            dec_patch_size=(128,) * 4,
            enable_rpe=True,
            enable_flash=False,
        ),
        _ptv3(
            "ptv3.nuscenes.pointcept",
            _original("nuscenes-semseg-pt-v3m1-0-base"),
            4,
            _names(NUSCENES_POINTS),
            _SWEEP,
            "80.3 mIoU on nuScenes' validation set",
            "",
            _INTENSITY,
        ),
        Published(
            "ptv3.dales.jayakumar-pujar",
            "PTv3",
            _hub(
                "jayakumarpujar/Ptv3",
                "efe615b5b626e5a9587a15fc6d52dce7b61f8f0d",
                "base_model_ptv3_dales_.pth",
            ),
            "spconv",
            {
                "in_channels": 4,
                "num_classes": 9,
                "variant": "m3",
                "enc_channels": (48, 96, 192, 384, 768),
                "dec_channels": (96, 96, 192, 384),
            },
            About(
                classes=_names(DALES),
                source=f"{HUB}jayakumarpujar/Ptv3",
                licence="MIT",
            ),
            "69.29 mIoU on DALES by its card, on a sample (68.70 on every point, as "
            "torch-pointcloud measured)",
            (_REGISTRY,),
            "blocks of 50 m, of at most 24 000 voxels of 0.15; positions less their "
            "mean, and the return number over the tile's highest, are the "
            "features; call net(x, positions)",
        ),
        Published(
            "spunet.scannet20.pointcept",
            "SpUNet",
            _ported(
                "spunet-v1m1.scannet20.pointcept",
                "641cc7cc6035a4086dfed9f70d839e9f551d5955",
            ),
            "spconv",
            {"in_channels": 6, "num_classes": 20},
            replace(
                _POINTCEPT,
                licence="MIT",
                version="Pointcept before 1.6.0, whose colours are from -1 to 1",
            ),
            "75.67 mIoU on ScanNet's validation set, as torch-pointcloud measured",
            (_REGISTRY,),
        ),
        Published(
            "minkunet34c.scannet20.nvidia",
            "MinkUNet34",
            ("https://bit.ly/2O4dZrz",),
            "minkowski",
            {"in_channels": 3, "num_classes": 20, "plan": "C"},
            replace(
                PUBLISHED["minkunet-scannet"],
                version="as examples/indoor.py of MinkowskiEngine 0.5 reads it",
            ),
            None,
            (
                "https://github.com/NVIDIA/MinkowskiEngine/blob/master/examples/"
                "indoor.py",
            ),
            "save the file as weights.pth; its licence is not stated",
        ),
    ]
    spvnas = replace(PUBLISHED["spvnas-semantic-kitti"], version=_SPVNAS_VERSION)
    for macs, width, metric in (
        (29, 0.5, "58.9 (59.3 as reproduced)"),
        (46, 0.64, "60.3 (60.0 as reproduced)"),
        (114, 1.0, "61.1 (61.9 as reproduced)"),
    ):
        folder = f"https://hanlab.mit.edu/files/SPVNAS/minkunet/SemanticKITTI_val_MinkUNet@{macs}GMACs"
        entries.append(
            Published(
                f"minkunet-{macs}gmacs.semantickitti.mit-han-lab",
                "MinkUNetTorchSparse",
                (f"{folder}/init",),
                "torchsparse",
                {"in_channels": 4, "num_classes": 19, "width": width},
                spvnas,
                f"{metric} mIoU on SemanticKITTI's validation set",
                (_SPVNAS, _SPVNAS.replace("README.md", "model_zoo.py")),
                "the file is called init: give it the suffix .pth",
            )
        )
    data = "CC BY-NC-SA 4.0 (the data)"
    spvcnn = replace(spvnas, licence=f"MIT (the weights); {data}")
    for macs, width, revision, metric in (
        (30, 0.5, "19835c445d4a1e0c40c6db62fbcc5625d639ab9f", "60.7 (60.8 +- 0.5"),
        (47, 0.64, "9638ee6c61ea72a9e33ab403f7c6d046a51703be", "61.4 (61.5 +- 0.2"),
        (119, 1.0, "0f6344036b8e67c69155d3bfce1d9dd1f7e968a3", "63.8 (63.7 +- 0.4"),
    ):
        name = f"spvcnn-{macs}gmacs.semantickitti.mit-han-lab"
        entries.append(
            Published(
                name,
                "SPVCNN",
                _ported(name, revision),
                "torchsparse",
                {"in_channels": 4, "num_classes": 19, "width": width},
                spvcnn,
                f"{metric} as reproduced) mIoU on SemanticKITTI's validation set",
                (_REGISTRY, _SPVNAS),
            )
        )
    return entries


def _litept() -> builtins.list[Published]:
    """Return the entries of LitePT's segmentors."""
    sweeps, rooms = _SWEEP, PUBLISHED["litept-scannet"].voxels
    strength = "Waymo's intensity is made tanh(intensity) first"
    indoor = _names(STRUCTURED3D)
    rows = (
        ("nuscenes", "small", sweeps, _names(NUSCENES_POINTS), 82.2, _INTENSITY),
        ("waymo", "small", sweeps, _names(WAYMO_POINTS), 73.1, strength),
        ("scannet", "small", rooms, _POINTCEPT.classes, 76.5, ""),
        ("structured3d", "small", rooms, indoor, 83.6, ""),
        ("structured3d", "base", rooms, indoor, 85.1, ""),
        ("structured3d", "large", rooms, indoor, 85.4, ""),
    )
    entries = []
    for data, size, voxels, classes, metric, note in rows:
        file = f"{data}-semseg-litept-{size}-v1m1/model/model_best.pth"
        about = About(
            voxels,
            classes,
            _POINTCEPT.colours if data == "scannet" else (),
            _LITEPT.removesuffix("/blob/main/README.md"),
            "MIT (the code); the data's own terms of use",
            version="prs-eth/LitePT, released with its code in December 2025",
        )
        entries.append(
            Published(
                f"litept-{size}.{data.replace('scannet', 'scannet20')}.prs-eth",
                "LitePT",
                _hub("prs-eth/LitePT", "main", file),
                "spconv",
                {
                    "in_channels": voxels.channels,
                    "num_classes": len(classes),
                    "size": size,
                },
                about,
                f"{metric} mIoU on the validation set",
                (_LITEPT, f"{about.source}/tree/main/configs"),
                note,
            )
        )
    return entries


_NUSCENES_HEADS = (
    ("car",),
    ("truck", "construction_vehicle"),
    ("bus", "trailer"),
    ("barrier",),
    ("motorcycle", "bicycle"),
    ("pedestrian", "traffic_cone"),
)
_ARGO2_HEADS = (
    ("Regular_vehicle",),
    ("Pedestrian", "Bicyclist", "Motorcyclist", "Wheeled_rider"),
    (
        "Bollard", "Construction_cone", "Sign", "Construction_barrel", "Stop_sign",
        "Mobile_pedestrian_crossing_sign",
    ),
    (
        "Large_vehicle", "Bus", "Box_truck", "Truck", "Vehicular_trailer", "Truck_cab",
        "School_bus", "Articulated_bus", "Message_board_trailer",
    ),
    ("Bicycle", "Motorcycle", "Wheeled_device", "Wheelchair", "Stroller"),
    ("Dog",),
)  # fmt: skip


def _detectors() -> builtins.list[Published]:
    """Return the entries of OpenPCDet's detectors, and of SECOND's backbones."""
    version = "OpenPCDet; compared with the code of commit 8cacccec"
    about = replace(PUBLISHED["openpcdet-nuscenes"], version=version)
    channels = "x", "y", "z", "intensity", "timestamp"
    near = -51.2, -51.2, -5.0, 51.2, 51.2, 3.0
    far = -54.0, -54.0, -5.0, 54.0, 54.0, 3.0
    coarse = detection.GridRecipe((0.1, 0.1, 0.2), near, channels, 10, 60_000)
    fine = detection.GridRecipe((0.075, 0.075, 0.2), far, channels, 10, 160_000)
    decoding = detection.Decoding(
        limit_range=(-61.2, -61.2, -10.0, 61.2, 61.2, 10.0),
        nms_threshold=0.2,
        nms_pre=1000,
        nms_post=83,
    )
    nuscenes = {
        "heads": _NUSCENES_HEADS,
        "classes": about.classes,
        "branches": (*detection.heads.BRANCHES, ("vel", 2, 2)),
        "decoding": decoding,
    }
    wide = -200.0, -200.0, -20.0, 200.0, 200.0, 20.0
    argo2 = {
        "grid": detection.GridRecipe((0.1, 0.1, 0.2), wide, channels[:4], 20, 160_000),
        "heads": _ARGO2_HEADS,
        "head_kernel": 1,
        "decoding": replace(decoding, limit_range=wide),
    }
    of_argo2 = replace(about, classes=sum(_ARGO2_HEADS, ()), colours=(), licence="")
    old = 'with library="spconv1" if its kernels are (kernel..., C_in, C_out)'
    backbone = "the sparse backbone alone: the heads are not in this library"
    on = "on nuScenes' validation set"
    kitti = replace(about, classes=(), colours=(), licence="Apache-2.0")
    rows = (
        (
            "voxelnext.nuscenes.openpcdet",
            "VoxelNeXt",
            _ported(
                "voxelnext.nuscenes.openpcdet",
                "5802ce3855465df20b72db5b26a7cc03c153e5f3",
            ),
            nuscenes | {"grid": fine, "head_kernel": 1},
            about,
            f"60.53 mAP, 66.65 NDS {on}",
            "",
        ),
        (
            "voxelnext.argo2.openpcdet",
            "VoxelNeXt",
            _drive("1YP2UOz-yO-cWfYQkIqILEu6bodvCBVrR"),
            argo2,
            of_argo2,
            "30.5 mAP on Argoverse 2's validation set",
            "",
        ),
        (
            "centerpoint-01.nuscenes.openpcdet",
            "CenterPoint",
            _drive("1Cz-J1c3dw7JAWc25KRG1XQj8yCaOlexQ"),
            nuscenes | {"grid": coarse},
            about,
            f"56.03 mAP, 64.54 NDS {on}",
            old,
        ),
        (
            "centerpoint-0075.nuscenes.openpcdet",
            "CenterPoint",
            _drive("1XOHAWm1MPkCKr1gqmc3TWi5AYZgPsgxU"),
            nuscenes | {"grid": fine},
            about,
            f"59.22 mAP, 66.48 NDS {on}",
            old,
        ),
        (
            "second.kitti.openpcdet",
            "VoxelBackBone8x",
            _ported(
                "second.kitti.openpcdet", "257ec23dfb951b12756786fcdaba9792cb3916a0"
            ),
            {"in_channels": 4},
            kitti,
            "78.62 AP of cars with its head, on KITTI",
            backbone,
        ),
        (
            "second-multihead.nuscenes.openpcdet",
            "VoxelResBackBone8x",
            _ported(
                "second-multihead.nuscenes.openpcdet",
                "6a4c25305663b26a75079a835505c4fe6e9ea652",
            ),
            {"in_channels": 5},
            kitti,
            f"50.59 mAP, 62.29 NDS with its heads, {on}",
            backbone,
        ),
    )
    return [
        Published(name, kind, files, "spconv", arguments, about, metric, sources, note)
        for name, kind, files, arguments, about, metric, note in rows
        for sources in [(_REGISTRY, _ZOO) if HUB in files[0] else (_ZOO,)]
    ]


def _trellis2() -> builtins.list[Published]:
    """Return the entries of TRELLIS.2's nets, without data sets or classes."""
    about = About(
        source="https://github.com/microsoft/TRELLIS.2",
        licence="MIT",
        version="microsoft/TRELLIS.2; compared with the code of commit 5565d24",
    )
    half, bf16 = {"dtype": mx.float16}, {"dtype": mx.bfloat16}
    texture = trellis2.FLOW | {"in_channels": 64} | bf16
    shape = trellis2.FLOW | bf16
    colours = {"out_channels": 6, "pred_subdiv": False}
    rows = (
        ("shape-encoder", "SparseVAEEncoder", "shape_enc_next_dc_f16c32_fp16", half),
        ("shape-decoder", "SparseVAEDecoder", "shape_dec_next_dc_f16c32_fp16", half),
        ("texture-encoder", "SparseVAEEncoder", "tex_enc_next_dc_f16c32_fp16", half),
        (
            "texture-decoder",
            "SparseVAEDecoder",
            "tex_dec_next_dc_f16c32_fp16",
            half | colours,
        ),
        (
            "structure-flow",
            "SparseStructureFlowModel",
            "ss_flow_img_dit_1_3B_64_bf16",
            trellis2.STRUCTURE_FLOW | bf16,
        ),
        *(
            (
                f"{what}-flow-{resolution}",
                "SLatFlowModel",
                f"slat_flow_{pair}_dit_1_3B_{resolution}_bf16",
                arguments,
            )
            for what, pair, arguments in (
                ("shape", "img2shape", shape),
                ("texture", "imgshape2tex", texture),
            )
            for resolution in (512, 1024)
        ),
        (
            "structure-encoder",
            "SparseStructureEncoder",
            "ss_enc_conv3d_16l8_fp16",
            half,
        ),
        (
            "structure-decoder",
            "SparseStructureDecoder",
            "ss_dec_conv3d_16l8_fp16",
            half,
        ),
    )
    older = "ss_enc_conv3d_16l8_fp16", "ss_dec_conv3d_16l8_fp16"
    return [
        Published(
            f"trellis2-{name}.microsoft",
            kind,
            _hub(
                f"microsoft/TRELLIS{'-image-large' if file in older else '.2-4B'}",
                "main",
                f"ckpts/{file}.safetensors",
            ),
            "trellis2",
            arguments,
            about,
            None,
            (_TRELLIS if file in older else _TRELLIS2,),
            "mlx-lattice generate runs all of them: see docs/trellis2.md",
        )
        for name, kind, file, arguments in rows
    ]


_ENTRIES = {
    entry.name: entry
    for entries in (_segmentors(), _pretrained(), _litept(), _detectors(), _trellis2())
    for entry in entries
}
