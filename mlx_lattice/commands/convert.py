"""The command convert: another library's checkpoint as a file or folder of this one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from .. import models, nn
from ..cache_files import check_writable
from ..distribution import __version__
from ..io import folders
from ..io.checkpoints import OURS, match, opened
from ..io.safetensors import CheckpointError, read_object, write_safetensors
from ..models import PUBLISHED, litept, ptv3
from ..models.trellis2.transformer import FLOW, STRUCTURE_FLOW, trellis2
from . import UsageError, log, usage

METADATA = {"format": "mlx", "library": OURS, "version": __version__}


class Net(NamedTuple):
    """A net that --model names: class, options that it takes, fixed arguments."""

    kind: str | None
    options: tuple[str, ...] = ()
    arguments: dict[str, Any] = {}


MODELS = {
    f"minkunet{depth}": Net(f"MinkUNet{depth}", ("channels", "plan"))
    for depth in (14, 18, 34, 50, 101)
}
MODELS |= {
    f"ptv3-{form}": Net("PTv3", ("channels",), {"variant": form})
    for form in ("m1", "m2", "m3")
}
MODELS |= {
    "litept": Net("LitePT", ("channels",)),
    "litept-base": Net("LitePT", ("channels",), {"size": "base"}),
    "litept-large": Net("LitePT", ("channels",), {"size": "large"}),
    "minkunet-torchsparse": Net(
        "MinkUNetTorchSparse", ("channels", "width", "trimmed")
    ),
    "spvcnn": Net("SPVCNN", ("channels", "width", "trimmed")),
    "spunet": Net("SpUNet", ("channels",)),
    "trellis2-shape": Net("SparseVAEDecoder"),
    "trellis2-texture": Net(
        "SparseVAEDecoder", (), {"out_channels": 6, "pred_subdiv": False}
    ),
    "trellis2-encoder": Net("SparseVAEEncoder"),
    "trellis2-structure": Net("SparseStructureDecoder"),
    "trellis2-structure-encoder": Net("SparseStructureEncoder"),
    "trellis2-structure-flow": Net("SparseStructureFlowModel", (), STRUCTURE_FLOW),
    "trellis2-shape-flow": Net("SLatFlowModel", (), FLOW),
    "trellis2-texture-flow": Net("SLatFlowModel", (), FLOW | {"in_channels": 64}),
}
# OpenPCDet's configurations say all sizes of these.
DETECTORS = {
    "centerpoint": Net("CenterPoint"),
    "voxelnext": Net("VoxelNeXt"),
    "second": Net("VoxelBackBone8x"),
    "unetv2": Net("UNetV2"),
}
MODELS |= DETECTORS


def run(**given: Any) -> None:
    """Convert; log the files that were written and how to load them."""
    options = argparse.Namespace(**given)
    source, target = Path(options.source), Path(options.target)
    folder = target.is_dir() or not target.suffix
    if not folder and target.suffix != ".safetensors":
        raise UsageError(f"{target} must be a .safetensors file or a folder")
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {target.parent}")
    if source.resolve() == target.resolve():
        raise UsageError("SOURCE and TARGET must be two files")
    for name in ("legacy", "about"):
        if getattr(options, name) is not None and not folder:
            raise UsageError(f"--{name} needs a folder as TARGET; got {target}")
    written = folders.replaced(target) if folder else [target]
    read = [source, options.config, options.mapping]
    check_writable(*written, read=filter(None, read))
    with usage():
        model = _model(options)
        if options.about is not None:
            _describe(model, options.about)
    mapping = _mapping(options.mapping) if options.mapping else None
    as_shaped = options.unit_as_shaped
    with opened(source, options.entry) as state:
        report, steps = match(
            state, model, options.library, mapping, unit_as_shaped=as_shaped
        )
        if not report.complete:
            raise CheckpointError(f"the checkpoint does not fit the model\n{report}")
        log.info(report)
        # Parameters take the dtypes of the file.
        weights = [
            (name, convert(state.read(source))) for source, name, convert in steps
        ]
        mx.eval(weights)
    model.load_weights(weights)
    if options.bits:
        predicate = nn.keep_float()
        mlx.nn.quantize(
            model, options.group_size, options.bits, class_predicate=predicate
        )
        log.info(f"int{options.bits} in groups of {options.group_size}; {predicate}")
    if folder:
        model.save_pretrained(target)
        log.info(f'wrote {target}; load it with models.from_pretrained("{target}")')
        return
    write_safetensors(target, dict(tree_flatten(model.parameters())), METADATA)
    arguments = ", ".join(f"{k}={v!r}" for k, v in model._arguments.items())
    log.info(f"{target} has the weights of models.{type(model).__name__}({arguments})")


def _describe(model, name: str) -> None:
    """Set a net's ``about`` to a published one; print settings that change results."""
    if name not in PUBLISHED:
        raise ValueError(f"--about must be one of {', '.join(PUBLISHED)}; got {name}")
    about, net = PUBLISHED[name], model.described()["arguments"]
    voxels = about.voxels
    classes = net.get("num_classes") or len(net.get("classes", ()))
    for what, published, count in (
        ("input channels", voxels.channels if voxels else 0, net.get("in_channels")),
        ("classes", len(about.classes), classes),
    ):
        if published and count and published != count:
            raise ValueError(
                f"--about {name} has {published} {what}, but the net has {count}: "
                "leave --about out, and set the net's about in Python"
            )
    if voxels and "colours" in voxels.features:
        black, white = voxels.colour_range
        log.info(f"{name}: colours from {black:g} to {white:g}")
    model.about = about
    if getattr(model, "legacy", False):
        log.info("legacy blocks of Pointcept 1.5.1; for newer weights pass --no-legacy")


def _model(options: argparse.Namespace):
    """Return the model that the options name."""
    config = read_object(options.config) if options.config else None
    kind, takes, arguments = MODELS.get(options.model, Net(None))
    if config is None:
        if options.model in DETECTORS:
            raise ValueError(
                f"--model {options.model} needs --config: OpenPCDet's configuration as "
                "JSON, with its base configurations merged"
            )
    elif kind == "PTv3":
        takes, arguments = (), ptv3.published_arguments(config, **arguments)
    elif kind == "LitePT":
        takes, arguments = (), litept.published_arguments(config)
    elif takes:
        raise ValueError(f"--model {options.model} takes no --config: leave it out")
    elif options.model in DETECTORS or {"MODEL", "DATA_CONFIG"} <= {*config}:
        kind, arguments = models.published_arguments(config, kind)
    else:
        published, arguments = trellis2(config)
        if kind not in (None, published):
            raise ValueError(
                f"--config describes a {published}, but --model is {options.model}: "
                "leave one of the two out"
            )
        kind = published
    if kind is None:
        raise ValueError("name the net with --model or --config")
    if options.legacy is not None:
        if kind != "PTv3":
            raise ValueError("--legacy needs --model ptv3-m1")
        arguments = {**arguments, "legacy": options.legacy}
    given = {"channels": options.channels, "plan": options.plan}
    given |= {"width": options.width, "trimmed": options.trimmed}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in takes:
            raise ValueError(f"--model {options.model} takes no --{name}: leave it out")
    channels = given.pop("channels", ())
    if "channels" in takes and not channels:
        raise ValueError(f"--model {options.model} needs --channels IN CLASSES")
    return getattr(models, kind)(*channels, **{**arguments, **given})


def _mapping(path: str) -> dict[str, str | None]:
    try:
        mapping: Mapping = read_object(path)
    except CheckpointError:
        mapping = {"": 0}
    if not all(isinstance(value, str | None) for value in mapping.values()):
        raise ValueError(
            f"{path} must be a JSON object that maps names to names or null"
        )
    return mapping
