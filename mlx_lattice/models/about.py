"""About: what a net's weights were trained for, beside its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .recipe import VoxelRecipe


@dataclass(frozen=True)
class About:
    """What belongs to weights and is in no layer; kept in a folder's ``config.json``.

    Attributes:
        voxels: how voxels are made of points, or None.
        classes: names of the classes, in the order of the output channels.
        colours: red, green and blue of each class, from 0 to 255.
        source: where the weights are from.
        licence: under which licence they are.
        legacy: whether weights of ``PTv3`` were trained with Pointcept 1.5.1 or older,
            whose blocks differ: see ``PTv3``.

    Raises:
        ValueError: there are as many colours as classes, or none; this is not so, or
            a colour is none.
    """

    voxels: VoxelRecipe | None = None
    classes: tuple[str, ...] = ()
    colours: tuple[tuple[int, int, int], ...] = ()
    source: str = ""
    licence: str = ""
    legacy: bool = False

    def __post_init__(self):
        object.__setattr__(self, "classes", tuple(self.classes))
        colours = getattr(self.colours, "tolist", lambda: self.colours)()
        object.__setattr__(self, "colours", tuple(map(tuple, colours)))
        if self.colours and len(self.colours) != len(self.classes):
            raise ValueError(
                f"there must be a colour for each of the {len(self.classes)} classes; "
                f"got {len(self.colours)}"
            )
        for colour in self.colours:
            whole = all(isinstance(v, int) and 0 <= v < 256 for v in colour)
            if len(colour) != 3 or not whole:
                raise ValueError(
                    f"a colour must be three integers from 0 to 255; got {colour}"
                )

    def palette(self, count: int) -> tuple[tuple[int, int, int], ...]:
        """Return ``count`` colours: its own, and where it has none distinct hues."""
        if len(self.colours) >= count:
            return self.colours[:count]
        return tuple(_hue(i) for i in range(count))

    def label(self, index: int) -> str:
        """Return the name of a class, or its number where it has no name."""
        return self.classes[index] if index < len(self.classes) else f"class {index}"

    def config(self) -> dict[str, Any]:
        """Return what is known as JSON has it."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> About:
        """Return what ``config()`` returned; names that are unknown are left out."""
        held = {f.name: config[f.name] for f in fields(cls) if f.name in config}
        if isinstance(held.get("voxels"), Mapping):
            held["voxels"] = VoxelRecipe(**held["voxels"])
        return cls(**held)


def _hue(index: int) -> tuple[int, int, int]:
    """Return the colour of a class without one: hues a golden section apart."""
    import colorsys

    level = (0.9, 0.65)[index // 12 % 2]
    red, green, blue = colorsys.hsv_to_rgb(index * 0.618034 % 1, 0.65, level)
    return round(255 * red), round(255 * green), round(255 * blue)


def _about(
    voxels: VoxelRecipe | None, classes: Mapping, source: str, licence: str
) -> About:
    return About(voxels, tuple(classes), tuple(classes.values()), source, licence)


# ScanNet's twenty classes, in the order and the colours of its benchmark.
SCANNET = {
    "wall": (174, 199, 232),
    "floor": (152, 223, 138),
    "cabinet": (31, 119, 180),
    "bed": (255, 187, 120),
    "chair": (188, 189, 34),
    "sofa": (140, 86, 75),
    "table": (255, 152, 150),
    "door": (214, 39, 40),
    "window": (197, 176, 213),
    "bookshelf": (148, 103, 189),
    "picture": (196, 156, 148),
    "counter": (23, 190, 207),
    "desk": (247, 182, 210),
    "curtain": (219, 219, 141),
    "refrigerator": (255, 127, 14),
    "shower curtain": (158, 218, 229),
    "toilet": (44, 160, 44),
    "sink": (112, 128, 144),
    "bathtub": (227, 119, 194),
    "other furniture": (82, 84, 163),
}
# SemanticKITTI's nineteen, in the order of SPVNAS, in the benchmark's colours.
SEMANTIC_KITTI = {
    "car": (100, 150, 245),
    "bicycle": (100, 230, 245),
    "motorcycle": (30, 60, 150),
    "truck": (80, 30, 180),
    "other vehicle": (0, 0, 255),
    "person": (255, 30, 30),
    "bicyclist": (255, 40, 200),
    "motorcyclist": (150, 30, 90),
    "road": (255, 0, 255),
    "parking": (255, 150, 255),
    "sidewalk": (75, 0, 75),
    "other ground": (175, 0, 75),
    "building": (255, 200, 0),
    "fence": (255, 120, 50),
    "vegetation": (0, 175, 0),
    "trunk": (135, 60, 0),
    "terrain": (150, 240, 80),
    "pole": (255, 240, 150),
    "traffic sign": (255, 0, 0),
}

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

# The classes of OpenPCDet's configurations for Waymo and nuScenes.
WAYMO = {
    "Vehicle": (31, 119, 180),
    "Pedestrian": (214, 39, 40),
    "Cyclist": (44, 160, 44),
}
NUSCENES = {
    "car": (255, 158, 0),
    "truck": (255, 99, 71),
    "construction_vehicle": (233, 150, 70),
    "bus": (255, 127, 80),
    "trailer": (255, 140, 0),
    "barrier": (112, 128, 144),
    "motorcycle": (255, 61, 99),
    "bicycle": (220, 20, 60),
    "pedestrian": (0, 0, 230),
    "traffic_cone": (47, 79, 79),
}
_OPENPCDET = "https://github.com/open-mmlab/OpenPCDet"

# What published configurations say, by net and data set.
PUBLISHED = {
    # semseg-spunet-v1m1-0-base and semseg-pt-v3m1-0-base.
    "spunet-scannet": _POINTCEPT,
    "ptv3-scannet": replace(_POINTCEPT, legacy=True),
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
