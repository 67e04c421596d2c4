"""OpenPCDet's configurations as arguments of the detectors here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .boxes import Decoding
from .voxels import GridRecipe

# Our class by the published names of a model and of its 3D backbone.
DETECTORS = {"CenterPoint": "CenterPoint", "VoxelNeXt": "VoxelNeXt"}
BACKBONES = {
    "VoxelBackBone8x": "VoxelBackBone8x",
    "VoxelResBackBone8x": "VoxelResBackBone8x",
    "UNetV2": "UNetV2",
    "VoxelResBackBone8xVoxelNeXt": "VoxelResBackBone8xVoxelNeXt",
}
KINDS = (*DETECTORS.values(), *BACKBONES.values())
FEATURES = ("x", "y", "z", "intensity", "elongation", "timestamp")


def published_arguments(
    config: Mapping[str, Any], kind: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Return our class and its arguments for a configuration of OpenPCDet's.

    Args:
        config: what its YAML files say, base configurations merged: CLASS_NAMES,
            DATA_CONFIG and MODEL.
        kind: the class that is wanted: a detector, or a backbone alone; by default
            the detector that the configuration is of.

    Raises:
        ValueError: an entry is missing, or the net has parts that ours has not.
    """
    try:
        model, data = config["MODEL"], config["DATA_CONFIG"]
        kind = kind or DETECTORS.get(model["NAME"])
        if kind not in KINDS:
            raise ValueError(
                f"the configuration is of {model['NAME']!r}; expected one of "
                f"{', '.join(DETECTORS)}, or name a backbone of it"
            )
        grid, encoder = _grid(data, model), model["BACKBONE_3D"]
        if kind in BACKBONES.values():
            _expect(encoder, "NAME", kind)
            return kind, {"in_channels": grid.channels, **_encoder(encoder, kind)}
        arguments = {"grid": grid, **_head(model["DENSE_HEAD"], config["CLASS_NAMES"])}
        if kind == "VoxelNeXt":
            name = "VoxelResBackBone8xVoxelNeXt"
            _expect(encoder, "NAME", name)
            arguments |= _encoder(encoder, name)
            kernel = model["DENSE_HEAD"].get("KERNEL_SIZE_HEAD", 3)
            return kind, arguments | {"head_kernel": kernel}
        return kind, arguments | _center_point(model, encoder)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            "the configuration is none of OpenPCDet's with its base configurations "
            f"merged: {type(error).__name__} {error}"
        ) from error


def _center_point(model: Mapping, encoder: Mapping) -> dict[str, Any]:
    """Return the arguments of CenterPoint besides its grid and classes."""
    head, flat = model["DENSE_HEAD"], model["BACKBONE_2D"]
    _expect(head, "NAME", "CenterHead")
    _expect(flat, "NAME", "BaseBEVBackbone")
    name = encoder.get("NAME", "VoxelResBackBone8x")
    if name not in ("VoxelBackBone8x", "VoxelResBackBone8x"):
        raise ValueError(f"CenterPoint here has no backbone {name!r}")
    return _encoder(encoder, name) | {
        "residual": name == "VoxelResBackBone8x",
        "layer_nums": tuple(flat["LAYER_NUMS"]),
        "layer_strides": tuple(flat["LAYER_STRIDES"]),
        "num_filters": tuple(flat["NUM_FILTERS"]),
        "upsample_strides": tuple(flat.get("UPSAMPLE_STRIDES") or ()),
        "num_upsample_filters": tuple(flat.get("NUM_UPSAMPLE_FILTERS") or ()),
        "conv_for_no_stride": bool(flat.get("USE_CONV_FOR_NO_STRIDE", False)),
        "shared_channels": head["SHARED_CONV_CHANNEL"],
        "head_eps": head.get("BN_EPS", 1e-5),
    }


def _encoder(config: Mapping, name: str) -> dict[str, Any]:
    """Return the arguments of a 3D backbone, but for its input channels."""
    if name == "VoxelResBackBone8xVoxelNeXt":
        bias = config.get("USE_BIAS")
        return {
            "channels": tuple(config.get("CHANNELS", (16, 32, 64, 128, 128))),
            "out_channels": config.get("OUT_CHANNEL", 128),
            "kernel_sizes": tuple(config.get("SPCONV_KERNEL_SIZES", (3, 3, 3, 3))),
            "use_bias": True if bias is None else bool(bias),
        }
    made: dict[str, Any] = {"last_pad": config.get("last_pad", 0)}
    if name == "VoxelResBackBone8x":
        bias = config.get("USE_BIAS")
        made["use_bias"] = True if bias is None else bool(bias)
    if name == "UNetV2":
        made["return_encoded"] = bool(config.get("RETURN_ENCODED_TENSOR", True))
    return made


def _grid(data: Mapping, model: Mapping) -> GridRecipe:
    """Return how voxels are made, in testing."""
    features = data["POINT_FEATURE_ENCODING"]["used_feature_list"]
    name = "transform_points_to_voxels"
    steps = {step["NAME"]: step for step in data["DATA_PROCESSOR"]}
    step = steps.get(name) or steps[f"{name}_placeholder"]
    most = step.get("MAX_NUMBER_OF_VOXELS")
    most = most.get("test") if isinstance(most, Mapping) else most
    dynamic = "Dyn" in model.get("VFE", {}).get("NAME", "MeanVFE")
    return GridRecipe(
        tuple(step["VOXEL_SIZE"]),
        tuple(data["POINT_CLOUD_RANGE"]),
        tuple(features),
        None if dynamic else step.get("MAX_POINTS_PER_VOXEL"),
        None if dynamic else most,
    )


def _head(config: Mapping, class_names: list[str]) -> dict[str, Any]:
    """Return the classes, the branches and the decoding of a head."""
    if config.get("DOUBLE_FLIP"):
        raise ValueError("DOUBLE_FLIP, four mirrored scans for one, is not here")
    separate = config["SEPARATE_HEAD_CFG"]["HEAD_DICT"]
    heads = [
        tuple(name for name in head if name in class_names)
        for head in config["CLASS_NAMES_EACH_HEAD"]
    ]
    return {
        "heads": tuple(heads),
        "classes": tuple(class_names),
        "branches": tuple(
            (name, branch["out_channels"], branch["num_conv"])
            for name, branch in separate.items()
        ),
        "heat_convs": config["NUM_HM_CONV"],
        "head_bias": bool(config.get("USE_BIAS_BEFORE_NORM", False)),
        "decoding": _decoding(config),
    }


def _decoding(config: Mapping) -> Decoding:
    """Return what becomes a box."""
    after = config["POST_PROCESSING"]
    nms = after["NMS_CONFIG"]
    kinds = ("nms_gpu", "class_specific_nms")
    if nms["NMS_TYPE"] not in kinds:
        raise ValueError(
            f"NMS_TYPE must be one of {', '.join(kinds)}; got {nms['NMS_TYPE']!r}"
        )
    rectifier = config.get("RECTIFIER") if config.get("IOU_BRANCH") else None
    if after.get("USE_IOU_TO_RECTIFY_SCORE"):
        rectifier = after["IOU_RECTIFIER"]
    by_class = bool(config.get("IOU_BRANCH")) or nms["NMS_TYPE"] == kinds[1]
    return Decoding(
        stride=config["TARGET_ASSIGNER_CONFIG"]["FEATURE_MAP_STRIDE"],
        max_boxes=after["MAX_OBJ_PER_SAMPLE"],
        score_threshold=after["SCORE_THRESH"],
        limit_range=tuple(after["POST_CENTER_LIMIT_RANGE"]),
        nms_threshold=_plain(nms["NMS_THRESH"]),
        nms_pre=_plain(nms["NMS_PRE_MAXSIZE"]),
        nms_post=_plain(nms["NMS_POST_MAXSIZE"]),
        by_class=by_class,
        rectifier=None if rectifier is None else tuple(rectifier),
        nms_score=_plain(nms.get("SCORE_THRESH")) if by_class else None,
    )


def _plain(value):
    return tuple(value) if isinstance(value, list | tuple) else value


def _expect(config: Mapping, key: str, value: str) -> None:
    """Raise unless an entry that is there has a value."""
    if config.get(key, value) != value:
        raise ValueError(f"{key} must be {value!r} here; got {config[key]!r}")
