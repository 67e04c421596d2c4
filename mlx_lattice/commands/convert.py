"""The command convert: another library's checkpoint as a file or folder of this one.

Tensors are read, converted and written one at a time, so that a conversion takes little
more memory than the largest of them. Int8 features and calibration by scans need the
whole net.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from .. import models, nn
from ..distribution import __version__
from ..io import folders
from ..io.checkpoints import Sizes, Step, match, opened, plan
from ..io.errors import CheckpointError, read_object, shown
from ..io.layouts import LIBRARIES, OURS, layout_of
from ..io.safetensors import State, write_safetensors
from ..kept_files import check_writable
from ..models import PUBLISHED, Segmentor, ptv3
from ..models.published import spvnas
from ..models.recipe import of_scan
from ..models.trellis2.published import FLOW, STRUCTURE_FLOW, trellis2
from ..nn.calibrate import calibrate

METADATA = {"format": "mlx", "library": OURS, "version": __version__}

# Models by the name that --model takes: class, the options it takes, what is fixed.
MODELS: dict[str, tuple[str, tuple[str, ...], dict]] = {
    f"minkunet{depth}": (f"MinkUNet{depth}", ("channels", "plan"), {})
    for depth in (14, 18, 34, 50, 101)
} | {
    "minkunet-torchsparse": (
        "MinkUNetTorchSparse",
        ("channels", "width", "trimmed"),
        {},
    ),
    "spunet": ("SpUNet", ("channels",), {}),
    **{
        f"ptv3-{form}": ("PTv3", ("channels",), {"variant": form})
        for form in ("m1", "m2", "m3")
    },
    "spvcnn": ("SPVCNN", ("channels", "width", "trimmed"), {}),
    "trellis2-shape": ("SparseVAEDecoder", (), {}),
    "trellis2-texture": (
        "SparseVAEDecoder",
        (),
        {"out_channels": 6, "pred_subdiv": False},
    ),
    "trellis2-encoder": ("SparseVAEEncoder", (), {}),
    "trellis2-structure": ("SparseStructureDecoder", (), {}),
    "trellis2-structure-encoder": ("SparseStructureEncoder", (), {}),
    "trellis2-structure-flow": ("SparseStructureFlowModel", (), STRUCTURE_FLOW),
    "trellis2-shape-flow": ("SLatFlowModel", (), FLOW),
    "trellis2-texture-flow": ("SLatFlowModel", (), FLOW | {"in_channels": 64}),
}
# OpenPCDet's, whose configurations say all of their sizes.
DETECTORS = {
    "centerpoint": "CenterPoint",
    "voxelnext": "VoxelNeXt",
    "second": "VoxelBackBone8x",
    "unetv2": "UNetV2",
}
MODELS |= {name: (kind, (), {}) for name, kind in DETECTORS.items()}
SPVNAS = ("minkunet-torchsparse", "spvcnn")


class Configuration(dict):
    """A published configuration, which records the keys that are read.

    ``mlx-lattice convert`` prints the keys that no model reads. Objects within the
    configuration are recorded in the same way.
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
        names = []
        for key, value in super().items():
            if key not in self._read:
                names.append(key)
                continue
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Configuration):
                    names += [f"{key}.{name}" for name in part.unread()]
        return list(dict.fromkeys(names))


def _recorded(value: Any) -> Any:
    if isinstance(value, dict):
        return Configuration(value)
    return [_recorded(each) for each in value] if isinstance(value, list) else value


def run(given: argparse.Namespace) -> None:
    """Convert; print the files that were written and how to load them."""
    source, target = Path(given.source), Path(given.target)
    folder = target.is_dir() or not target.suffix
    if not folder and target.suffix != ".safetensors":
        raise ValueError(f"{target} must end in .safetensors, or be a folder")
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {target.parent}")
    if source.resolve() == target.resolve():
        raise ValueError("SOURCE and TARGET must be two files")
    read = [source, given.config, given.mapping, *(given.calibrate or ())]
    check_writable(
        *(folders.replaced(target) if folder else [target]), read=filter(None, read)
    )
    layout_of(given.library)
    config = Configuration(read_object(given.config)) if given.config else None
    model = _model(given, config)
    if config is not None and (unread := config.unread()):
        print(f"not used of {given.config}:", ", ".join(map(shown, unread)))
    if folder and model is None:
        raise ValueError("a folder is of a net: name it by --model or --config")
    if given.legacy is not None and not folder:
        raise ValueError("--legacy is for folders, which have a config that holds it")
    if given.about is not None:
        _describe(model if folder else None, given.about, given.colour_range)
    elif given.colour_range is not None:
        raise ValueError("--colour-range needs --about, whose colours it replaces")
    if given.activations or given.calibrate:
        _check_calibration(given, model)
    mapping = _mapping(given.mapping) if given.mapping else None
    with opened(source, given.entry) as state:
        if model is None:
            if state.note:
                print(f"{source.name}: {state.note}")
            _without_model(given, state, mapping, target)
        else:
            _with_model(given, state, mapping, target, model)


def _without_model(given: argparse.Namespace, state: State, mapping, target) -> None:
    sizes = Sizes.parsed(given.size)
    steps = plan(state, given.library, mapping, sizes, given.unit_as_shaped)
    units = [
        step.target
        for step in steps
        if LIBRARIES[given.library].unit_flat
        and len(shape := state.sketch(step.source).shape) > 2
        and set(shape[1:-1]) == {1}
    ]
    if units and not given.unit_as_shaped:
        print(
            f"{len(units)} kernels of one offset were read as {given.library} "
            "multiplies them at stride 1; name the model, or give --unit-as-shaped, if "
            f"one has another stride: {', '.join(units)}"
        )
    arrays = [(step.target, step.convert(state.sketch(step.source))) for step in steps]
    values = ((step.target, step.of(state)) for step in steps)
    write_safetensors(target, dict(arrays), METADATA, values)
    print(
        f"{len(arrays)} arrays written to {target}; load them by "
        f'io.import_checkpoint("{target}", model, "{OURS}")'
    )


def _with_model(
    given: argparse.Namespace, state: State, mapping, target: Path, model
) -> None:
    report, steps = match(
        state, model, given.library, mapping, unit_as_shaped=given.unit_as_shaped
    )
    if not (report.complete or given.partial):
        raise CheckpointError(f"the checkpoint does not fit the model\n{report}")
    print(report)
    folder = target.suffix != ".safetensors" or target.is_dir()
    if folder and (report.missing or report.mismatched):
        raise CheckpointError("a folder holds a whole net; name a .safetensors file")
    if given.activations or given.calibrate:
        weights = [(step.target, step.of(state)) for step in steps]
        _write_calibrated(given, model, weights, target, folder)
        if folder:
            _say(target)
        return
    # In the dtypes of the file, which parameters are to have.
    sketches = [(s.target, s.convert(state.sketch(s.source))) for s in steps]
    model.load_weights(sketches, strict=False)
    modules, packing = dict(model.named_modules()), {}
    if given.bits:
        predicate = nn.keep_float()
        packing = {"group_size": given.group_size, "bits": given.bits}
        mlx.nn.quantize(model, **packing, class_predicate=predicate)
        print(f"int{given.bits} in groups of {given.group_size}; {predicate}")
    parameters = dict(tree_flatten(model.parameters()))
    pack = {
        name: modules[path]
        for name, _ in sketches
        if f"{(path := name.rpartition('.')[0])}.scales" in parameters
        and name.endswith("weight")
    }
    arrays = []
    for name, sketch in sketches:
        packed = (
            [(part, parameters[part]) for part in _parts(name)] if name in pack else []
        )
        arrays += packed or [(name, sketch)]
    converted = _converted(state, steps, pack, packing)
    if not folder:
        write_safetensors(target, dict(arrays), METADATA, converted)
        arguments = ", ".join(f"{k}={v!r}" for k, v in model._arguments.items())
        print(f"{target} has the weights of models.{type(model).__name__}({arguments})")
        return
    with folders.written(target, *model.described()) as path:
        write_safetensors(path, dict(arrays), METADATA, converted)
    _say(target)


def _say(target: Path) -> None:
    print(f'{target} is for models.from_pretrained("{target}")')


def _parts(name: str) -> list[str]:
    """Return the names of a packed weight's arrays."""
    return [f"{name.removesuffix('weight')}{n}" for n in ("weight", "scales", "biases")]


def _converted(
    state: State, steps: list[Step], pack: dict[str, mlx.nn.Module], packing: dict
) -> Iterator[tuple[str, mx.array]]:
    """Return names and arrays one after another; weights in ``pack`` are packed."""
    for step in steps:
        array = step.of(state)
        if step.target not in pack:
            yield step.target, array
            continue
        layer = pack.pop(step.target)
        layer.weight = array
        twin = layer.to_quantized(**packing)
        del layer["weight"], array  # whose memory goes with the twin's evaluation
        for name in _parts(step.target):
            yield name, twin[name.rpartition(".")[2]]


def _check_calibration(given: argparse.Namespace, model: mlx.nn.Module | None) -> None:
    """Raise if --activations and --calibrate do not fit the net."""
    if not given.bits:
        raise ValueError("--activations and --calibrate need --bits, of the weights")
    if given.calibrate and not isinstance(model, Segmentor):
        raise ValueError(
            "--calibrate is for nets that score the points of a scan; others are "
            "calibrated by ml.calibrate, on inputs of their own"
        )
    if given.calibrate and model.about.voxels is None:
        raise ValueError("--calibrate needs --about, which says how voxels are made")


def _write_calibrated(
    given: argparse.Namespace,
    model: mlx.nn.Module,
    weights: Sequence[tuple[str, mx.array]],
    target: Path,
    folder: bool,
) -> None:
    """Pack a whole net, by scans or with a scale for each row of features."""
    names = {name for name, _ in weights}
    missing = [n for n, _ in tree_flatten(model.parameters()) if n not in names]
    if missing:
        raise CheckpointError(
            f"a net that is calibrated must be whole; {missing[0]} is missing"
        )
    model.load_weights(list(weights))
    model.eval()
    bits, group_size = given.bits, given.group_size
    if given.activations and bits == 8:
        group_size = None
    predicate = nn.keep_float()
    if given.calibrate:
        from ..io import read_points  # needs NumPy

        batches = []
        for scan in given.calibrate:
            cloud = read_points(scan)
            with of_scan(scan):
                batches.append(model.recipe()(cloud.points, cloud.attributes))
        model, report = calibrate(
            model,
            batches,
            bits,
            group_size,
            activations=given.activations,
            class_predicate=predicate,
            call=lambda net, voxels: net.score_voxels(voxels),
        )
        print(report)
    else:
        options = {"quantize_input": True, "class_predicate": predicate}
        mlx.nn.quantize(model, group_size, bits, **options)
        print(f"int{bits}, features of {given.activations} bits by row; {predicate}")
    if folder:
        model.save_pretrained(target)
        return
    write_safetensors(target, dict(tree_flatten(model.parameters())), METADATA)


def _describe(model, name: str, colour_range: list[float] | None) -> None:
    """Set a net's ``about`` to a published one; print settings that change results."""
    if model is None:
        raise ValueError("--about is for folders, which have a config that holds it")
    if name not in PUBLISHED:
        raise ValueError(f"--about must be one of {', '.join(PUBLISHED)}; got {name}")
    about, net = PUBLISHED[name], model.described()[0]["arguments"]
    inputs = about.voxels.channels if about.voxels else 0
    classes = net.get("num_classes") or len(net.get("classes", ()))
    for what, said, found in (
        ("input channels", inputs, net.get("in_channels")),
        ("classes", len(about.classes), classes),
    ):
        if said and found and said != found:
            raise ValueError(
                f"--about {name} is of {said} {what}, and the net has {found}: leave "
                "it out, and set the net's about yourself"
            )
    voxels = about.voxels
    if voxels and "colours" in voxels.features:
        if colour_range is not None:
            voxels = replace(voxels, colour_range=tuple(colour_range))
            about = replace(about, voxels=voxels)
        black, white = voxels.colour_range
        print(f"{name}: colours from {black:g} to {white:g}")
    elif colour_range is not None:
        raise ValueError(f"--colour-range is not for --about {name}: it has no colours")
    if model.about.voxels and about.voxels:  # the configuration's size of a voxel
        voxels = replace(about.voxels, voxel_size=model.about.voxels.voxel_size)
        about = replace(about, voxels=voxels)
    model.about = about
    if getattr(model, "legacy", False):
        print("legacy blocks, of Pointcept 1.5.1; --no-legacy for newer weights")


def _model(given: argparse.Namespace, config: Configuration | None):
    """Return the model that the options name, or None."""
    if given.size and (given.model or given.config):
        raise ValueError("--size is for conversions without a model, which knows them")
    kind, takes, fixed = MODELS.get(given.model, (None, (), {}))
    pres = None
    if config is not None and given.model in SPVNAS:
        if given.channels or given.width:
            raise ValueError("--config says --channels and --width already")
        fixed, pres = spvnas(config, kind)
        takes = ("trimmed",)
    elif config is not None and kind == "PTv3":
        takes, fixed = (), ptv3.published_arguments(config, **fixed)
    elif config is not None and takes:
        raise ValueError(f"--config is not for --model {given.model}")
    elif given.model in DETECTORS and config is None:
        raise ValueError(
            f"--model {given.model} needs --config: OpenPCDet's configuration as JSON, "
            "with its base configurations merged"
        )
    elif given.model in DETECTORS or {"MODEL", "DATA_CONFIG"} <= {*(config or ())}:
        kind, fixed = models.published_arguments(config, kind)
    elif config is not None:
        named, arguments = trellis2(config)
        if kind not in (None, named):
            raise ValueError(f"--config is of a {named}, --model {given.model} of none")
        kind, fixed = named, arguments
    if given.legacy is not None:
        if kind != "PTv3":
            raise ValueError("--legacy needs --model ptv3-m1")
        fixed = {**fixed, "legacy": given.legacy}
    for option in ("channels", "plan", "width", "trimmed"):
        if getattr(given, option) is not None and option not in takes:
            raise ValueError(
                f"--{option} is not for --model {given.model}"
                if kind
                else f"--{option} needs --model"
            )
    if kind is None:
        if given.bits:
            raise ValueError("--bits needs --model, which knows its layers")
        return None
    if "channels" in takes and not given.channels:
        raise ValueError(f"--model {given.model} needs --channels IN CLASSES")
    options = {
        option: getattr(given, option)
        for option in ("plan", "width", "trimmed")
        if getattr(given, option) is not None
    }
    model = getattr(models, kind)(*(given.channels or ()), **(fixed | options))
    if pres is not None:
        voxels = models.PUBLISHED["spvnas-semantic-kitti"].voxels
        model.about = models.About(replace(voxels, voxel_size=pres))
    return model


def _mapping(path: str) -> dict[str, str | None]:
    try:
        mapping = read_object(path)
    except CheckpointError:
        mapping = None
    if mapping is None or not all(
        value is None or isinstance(value, str) for value in mapping.values()
    ):
        raise ValueError(f"{path} is no JSON object of names to names, or to null")
    return mapping
