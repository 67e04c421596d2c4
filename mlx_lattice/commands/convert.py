"""The command convert: another library's checkpoint as a file or folder of this one.

Tensors are read, converted and written one at a time, so that a conversion takes little
more memory than the largest of them. Int8 features and calibration by scans need the
whole net.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from .. import models, nn
from ..distribution import __version__
from ..io import folders
from ..io.checkpoints import (
    LIBRARIES,
    OURS,
    Sizes,
    Step,
    layout_of,
    match,
    opened,
    plan,
)
from ..io.safetensors import (
    CheckpointError,
    State,
    read_object,
    shown,
    write_safetensors,
)
from ..kept_files import check_writable
from ..models import PUBLISHED, Segmentor, ptv3
from ..models.pretrained import of_scan
from ..models.published import spvnas
from ..models.trellis2.transformer import FLOW, STRUCTURE_FLOW, trellis2
from ..nn.calibrate import calibrate

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
SPVNAS = ("minkunet-torchsparse", "spvcnn")


class Configuration(dict):
    """A published configuration, which records the keys that are read.

    Objects inside it are recorded in the same way.
    """

    def __init__(self, entries: Mapping[str, Any]):
        super().__init__({key: _recorded(value) for key, value in entries.items()})
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        self._read.add(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry, or the default if there is none."""
        try:
            return self[key]
        except KeyError:
            return default

    def items(self) -> list[tuple[str, Any]]:
        """Return the keys and their entries, which are then read."""
        return [(key, self[key]) for key in self]

    def unread(self) -> list[str]:
        """Return the dotted names of the keys that were not read."""
        names = [key for key in self if key not in self._read]
        for key in self._read:
            value = super().__getitem__(key)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Configuration):
                    names += [f"{key}.{name}" for name in part.unread()]
        return sorted(set(names))


def _recorded(value: Any) -> Any:
    if isinstance(value, dict):
        return Configuration(value)
    return [_recorded(each) for each in value] if isinstance(value, list) else value


def run(options: argparse.Namespace) -> None:
    """Convert; print the files that were written and how to load them."""
    source, target = Path(options.source), Path(options.target)
    folder = target.is_dir() or not target.suffix
    if not folder and target.suffix != ".safetensors":
        raise ValueError(f"{target} must end in .safetensors, or be a folder")
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {target.parent}")
    if source.resolve() == target.resolve():
        raise ValueError("SOURCE and TARGET must be two files")
    read = [source, options.config, options.mapping, *(options.calibrate or ())]
    written = folders.replaced(target) if folder else [target]
    check_writable(*written, read=filter(None, read))
    layout_of(options.library)
    model = _model(options)
    _check(options, model, folder)
    if options.about is not None:
        _describe(model, options.about, options.colour_range)
    mapping = _mapping(options.mapping) if options.mapping else None
    with opened(source, options.entry) as state:
        if model is None:
            if state.note:
                print(f"{source.name}: {state.note}")
            _without_model(options, state, mapping, target)
            return
        _with_model(options, state, mapping, target, model, folder)
    if folder:
        print(f'{target} is for models.from_pretrained("{target}")')


def _check(options: argparse.Namespace, model: Any, folder: bool) -> None:
    """Raise if options need others, a folder, or another net."""
    if folder and model is None:
        raise ValueError("a folder is of a net: name it by --model or --config")
    if options.legacy is not None and not folder:
        raise ValueError("--legacy is for folders, which have a config that holds it")
    if options.about is not None and not folder:
        raise ValueError("--about is for folders, which have a config that holds it")
    if options.colour_range is not None and options.about is None:
        raise ValueError("--colour-range needs --about, whose colours it replaces")
    if (options.activations or options.calibrate) and not options.bits:
        raise ValueError("--activations and --calibrate need --bits, of the weights")
    if options.calibrate and not isinstance(model, Segmentor):
        raise ValueError(
            "--calibrate is for nets that score the points of a scan; others are "
            "calibrated by ml.calibrate, on inputs of their own"
        )
    if options.calibrate and options.about is None and model.about.voxels is None:
        raise ValueError("--calibrate needs --about, which says how voxels are made")


def _without_model(options: argparse.Namespace, state: State, mapping, target) -> None:
    sizes, as_shaped = Sizes.parsed(options.size), options.unit_as_shaped
    steps = plan(state, options.library, mapping, sizes, as_shaped)
    units = [
        step.target
        for step in steps
        if LIBRARIES[options.library].unit_flat
        and len(shape := state.sketch(step.source).shape) > 2
        and set(shape[1:-1]) == {1}
    ]
    if units and not as_shaped:
        print(
            f"{len(units)} kernels of one offset were read as {options.library} "
            "multiplies them at stride 1; name the model, or give --unit-as-shaped, if "
            f"one has another stride: {', '.join(units)}"
        )
    arrays = {step.target: step.convert(state.sketch(step.source)) for step in steps}
    values = ((step.target, step.of(state)) for step in steps)
    write_safetensors(target, arrays, METADATA, values)
    print(
        f"{len(arrays)} arrays written to {target}; load them by "
        f'io.import_checkpoint("{target}", model, "{OURS}")'
    )


def _with_model(
    options: argparse.Namespace,
    state: State,
    mapping: Mapping | None,
    target: Path,
    model: mlx.nn.Module,
    folder: bool,
) -> None:
    as_shaped = options.unit_as_shaped
    report, steps = match(
        state, model, options.library, mapping, unit_as_shaped=as_shaped
    )
    if not (report.complete or options.partial):
        raise CheckpointError(f"the checkpoint does not fit the model\n{report}")
    print(report)
    if folder and (report.missing or report.mismatched):
        raise CheckpointError("a folder holds a whole net; name a .safetensors file")
    if options.activations or options.calibrate:
        if missing := [name for name, _ in report.missing]:
            raise CheckpointError(
                f"a net that is calibrated must be whole; {missing[0]} is missing"
            )
        model.load_weights([(s.target, s.of(state)) for s in steps], strict=False)
        model = _calibrated(options, model.eval())
        if folder:
            model.save_pretrained(target)
        else:
            arrays = dict(tree_flatten(model.parameters()))
            write_safetensors(target, arrays, METADATA)
        return
    # Parameters take the dtypes of the file.
    sketches = {s.target: s.convert(state.sketch(s.source)) for s in steps}
    model.load_weights(list(sketches.items()), strict=False)
    packed = _pack(options, model) if options.bits else {}
    parameters = dict(tree_flatten(model.parameters()))
    arrays = {}
    for name, sketch in sketches.items():
        parts = _parts(name) if name in packed else []
        arrays |= {part: parameters[part] for part in parts} or {name: sketch}
    values = _converted(state, steps, packed)
    if folder:
        with folders.written(target, *model.described()) as path:
            write_safetensors(path, arrays, METADATA, values)
        return
    write_safetensors(target, arrays, METADATA, values)
    arguments = ", ".join(f"{k}={v!r}" for k, v in model._arguments.items())
    print(f"{target} has the weights of models.{type(model).__name__}({arguments})")


def _pack(
    options: argparse.Namespace, model: mlx.nn.Module
) -> dict[str, Callable[[mx.array], mlx.nn.Module]]:
    """Pack a model; return for each weight that was packed a function that packs it."""
    layers, predicate = dict(model.named_modules()), nn.keep_float()
    packing = {"group_size": options.group_size, "bits": options.bits}
    mlx.nn.quantize(model, **packing, class_predicate=predicate)
    print(f"int{options.bits} in groups of {options.group_size}; {predicate}")

    def packed(path: str, weight: mx.array) -> mlx.nn.Module:
        layer = layers.pop(path)
        layer.weight = weight
        twin = layer.to_quantized(**packing)
        del layer["weight"]  # its memory goes when the twin is evaluated
        return twin

    return {
        f"{path}.weight": partial(packed, path)
        for path, module in model.named_modules()
        if "scales" in module
    }


def _parts(name: str) -> list[str]:
    """Return the names of a packed weight's arrays."""
    return [f"{name.removesuffix('weight')}{n}" for n in ("weight", "scales", "biases")]


def _converted(
    state: State,
    steps: list[Step],
    packed: Mapping[str, Callable[[mx.array], mlx.nn.Module]],
) -> Iterator[tuple[str, mx.array]]:
    """Yield names and arrays, converted and packed one after another."""
    for step in steps:
        if step.target not in packed:
            yield step.target, step.of(state)
            continue
        twin = packed[step.target](step.of(state))
        for name in _parts(step.target):
            yield name, twin[name.rpartition(".")[2]]


def _calibrated(options: argparse.Namespace, model: mlx.nn.Module) -> mlx.nn.Module:
    """Return a whole net, packed by scans or with a scale for each row of features."""
    bits, group_size, activations = (
        options.bits,
        options.group_size,
        options.activations,
    )
    if activations and bits == 8:
        group_size = None
    predicate = nn.keep_float()
    if not options.calibrate:
        quantise = {"quantize_input": True, "class_predicate": predicate}
        mlx.nn.quantize(model, group_size, bits, **quantise)
        print(f"int{bits}, features of {activations} bits by row; {predicate}")
        return model
    from ..io import read_points  # needs NumPy

    batches = []
    for scan in options.calibrate:
        cloud = read_points(scan)
        with of_scan(scan):
            batches.append(model.recipe()(cloud.points, cloud.attributes))
    model, report = calibrate(
        model,
        batches,
        bits,
        group_size,
        activations=activations,
        class_predicate=predicate,
        call=lambda net, voxels: net.score_voxels(voxels),
    )
    print(report)
    return model


def _describe(model, name: str, colour_range: list[float] | None) -> None:
    """Set a net's ``about`` to a published one; print settings that change results."""
    if name not in PUBLISHED:
        raise ValueError(f"--about must be one of {', '.join(PUBLISHED)}; got {name}")
    about, net = PUBLISHED[name], model.described()[0]["arguments"]
    inputs = about.voxels.channels if about.voxels else 0
    classes = net.get("num_classes") or len(net.get("classes", ()))
    for what, published, count in (
        ("input channels", inputs, net.get("in_channels")),
        ("classes", len(about.classes), classes),
    ):
        if published and count and published != count:
            raise ValueError(
                f"--about {name} is of {published} {what}, and the net has {count}: "
                "leave it out, and set the net's about yourself"
            )
    voxels = about.voxels
    if voxels and "colours" in voxels.features:
        if colour_range is not None:
            voxels = replace(voxels, colour_range=tuple(colour_range))
        black, white = voxels.colour_range
        print(f"{name}: colours from {black:g} to {white:g}")
    elif colour_range is not None:
        raise ValueError(f"--colour-range is not for --about {name}: it has no colours")
    if model.about.voxels and voxels:  # the configuration's size of a voxel
        voxels = replace(voxels, voxel_size=model.about.voxels.voxel_size)
    model.about = replace(about, voxels=voxels)
    if getattr(model, "legacy", False):
        print("legacy blocks, of Pointcept 1.5.1; --no-legacy for newer weights")


def _model(options: argparse.Namespace):
    """Return the model that the options name, or None."""
    if options.size and (options.model or options.config):
        raise ValueError("--size is for conversions without a model, which knows them")
    config = None
    if options.config:
        config = Configuration(read_object(options.config))
    kind, takes, arguments = MODELS.get(options.model, Net(None))
    pres = None
    if config is None:
        if options.model in DETECTORS:
            raise ValueError(
                f"--model {options.model} needs --config: OpenPCDet's configuration as "
                "JSON, with its base configurations merged"
            )
    elif options.model in SPVNAS:
        if options.channels or options.width:
            raise ValueError("--config says --channels and --width already")
        arguments, pres = spvnas(config, kind)
        takes = ("trimmed",)
    elif kind == "PTv3":
        takes, arguments = (), ptv3.published_arguments(config, **arguments)
    elif takes:
        raise ValueError(f"--config is not for --model {options.model}")
    elif options.model in DETECTORS or {"MODEL", "DATA_CONFIG"} <= {*config}:
        kind, arguments = models.published_arguments(config, kind)
    else:
        published, arguments = trellis2(config)
        if kind not in (None, published):
            raise ValueError(
                f"--config is of a {published}, --model {options.model} of none"
            )
        kind = published
    if options.legacy is not None:
        if kind != "PTv3":
            raise ValueError("--legacy needs --model ptv3-m1")
        arguments = {**arguments, "legacy": options.legacy}
    model = _built(options, kind, takes, arguments)
    if config is not None and (unread := config.unread()):
        print(f"not used of {options.config}:", ", ".join(map(shown, unread)))
    if pres is not None:
        voxels = PUBLISHED["spvnas-semantic-kitti"].voxels
        model.about = models.About(replace(voxels, voxel_size=pres))
    return model


def _built(
    options: argparse.Namespace,
    kind: str | None,
    takes: tuple[str, ...],
    arguments: Mapping[str, Any],
):
    """Return a model of a class, its arguments and the options that it takes."""
    sizes = {name: getattr(options, name) for name in ("plan", "width", "trimmed")}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    for name in (*sizes, *(["channels"] if options.channels else [])):
        if kind is None:
            raise ValueError(f"--{name} needs --model")
        if name not in takes:
            raise ValueError(f"--{name} is not for --model {options.model}")
    if kind is None:
        if options.bits:
            raise ValueError("--bits needs --model, which knows its layers")
        return None
    if "channels" in takes and not options.channels:
        raise ValueError(f"--model {options.model} needs --channels IN CLASSES")
    return getattr(models, kind)(*(options.channels or ()), **{**arguments, **sizes})


def _mapping(path: str) -> dict[str, str | None]:
    try:
        mapping = read_object(path)
    except CheckpointError:
        mapping = None
    if mapping is None or not all(
        value is None or isinstance(value, str) for value in mapping.values()
    ):
        raise ValueError(f"{path} is not a JSON object of names to names, or to null")
    return mapping
