"""Folders of a net: ``config.json``, ``model.safetensors``, a card; here or on a hub.

A folder is data: its config names a class of ``models`` and the arguments of its
constructor, and nothing in it is executed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from .. import nn
from ..distribution import NAME, __version__, install
from ..kept_files import atomic_write
from ..memory import format_bytes
from ..nn.integer_files import OPTIONAL
from .errors import CheckpointError, read_object, shown
from .safetensors import read_safetensors

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
_CONFIG_BYTES = 2**22
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_folder(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """Return a local folder, or fetch a repository of a hub to its cache."""
    path = Path(path_or_repo).expanduser()
    if os.path.isdir(path):  # False for a path that is too long, where pathlib raises
        return path
    name = str(path_or_repo)
    if not _REPOSITORY.fullmatch(name):
        raise FileNotFoundError(
            f"there is no folder {shown(name)}; expected one with {CONFIG} and "
            f"{WEIGHTS}, or owner/name of a repository on Hugging Face"
        )
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"there is no folder {name}, and to read a repository of that name from "
            f"Hugging Face huggingface_hub is needed; {install('hub')}"
        ) from error
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=[CONFIG, "*.safetensors", CARD]
        )
    except (OSError, ValueError) as error:  # the hub's own errors are of these
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"there is no folder {name}, and the repository of that name on Hugging "
            f"Face is neither in the cache nor within reach: {why}"
        ) from error
    return Path(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of ``config.json``; the model itself is not needed."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG}: it is no folder that save_pretrained or "
            "mlx-lattice convert wrote"
        )
    if path.stat().st_size > _CONFIG_BYTES:
        raise CheckpointError(f"{path} is larger than 4 MiB, too large for a config")
    held = read_object(path)
    if not isinstance(held.get("model"), str):
        raise CheckpointError(
            f'{path} is no JSON object with the name of a "model" of this package'
        )
    for name in ("arguments", "about", "quantization"):
        if not isinstance(held.get(name, {}), dict):
            raise CheckpointError(f'{path}: "{name}" must be an object of names')
    return held


def read_weights(folder: Path) -> dict[str, mx.array]:
    """Return the arrays of ``model.safetensors``, or of the parts of one."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no {WEIGHTS}")
    arrays: dict[str, mx.array] = {}
    for path in files:
        held = read_safetensors(path)
        if twice := sorted(arrays.keys() & held.keys()):
            raise CheckpointError(
                f"{shown(twice[0])} is in {path.name} and in another file of {folder}"
            )
        arrays |= held
    return arrays


def load_weights(model: mlx.nn.Module, folder: Path) -> None:
    """Give a model the weights of a folder; each array must be a parameter's."""
    arrays = read_weights(folder)
    wanted = dict(tree_flatten(model.parameters()))
    wrong = [f"{name} is missing" for name in wanted if name not in arrays]
    wrong += [f"{shown(name)} is left over" for name in arrays if name not in wanted]
    wrong += [
        f"{name} has the shape {tuple(arrays[name].shape)}, expected "
        f"{tuple(array.shape)}"
        for name, array in wanted.items()
        if name in arrays and arrays[name].shape != array.shape
    ]
    wrong += [
        f"{name} is {arrays[name].dtype}, expected {_kind(array)}"
        for name, array in wanted.items()
        if name in arrays and _kind(arrays[name]) != _kind(array)
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"the weights in {folder} do not fit its {CONFIG}: {'; '.join(wrong[:3])}"
            f"{more}"
        )
    model.load_weights(list(arrays.items()))
    nn.tie_scales(model)


def _kind(array: mx.array) -> str:
    """Return the kind of dtype that a parameter accepts: any float, or its own."""
    floating = mx.issubdtype(array.dtype, mx.floating)
    return "floating" if floating else str(array.dtype)


def replaced(folder: Path) -> list[Path]:
    """Return the files that a net takes the place of in its folder, the config first.

    Weights are all parts of any model that was there.
    """
    return [folder / CONFIG, *folder.glob("model*.safetensors"), folder / CARD]


@contextmanager
def written(folder: str | Path, config: Mapping[str, Any], card: str) -> Iterator[Path]:
    """Write a folder; the block writes the weights to the path that it gets.

    If writing fails, the folder keeps the files that it had.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; name a folder to write to")
    folder.mkdir(parents=True, exist_ok=True)
    stale = {*folder.glob("model*.safetensors")} - {folder / WEIGHTS}
    text = json.dumps(config, indent=2, ensure_ascii=False)
    with atomic_write(folder / CONFIG) as draft:
        yield draft.with_name(WEIGHTS)
        draft.with_name(CARD).write_text(card, encoding="utf-8")
        draft.write_text(text + "\n", encoding="utf-8")
    for old in stale:
        old.unlink(missing_ok=True)


# Packed weights

PACKED_GROUP = 64  # input channels that share a scale


def pack(net: mlx.nn.Module, bits: int, path: str | Path) -> None:
    """Pack the weights of a folder's float net, except those of ``nn.keep_float``."""
    if described_packing(net):
        raise CheckpointError(f"{path} is packed already; leave --bits out")
    mlx.nn.quantize(net, PACKED_GROUP, bits, class_predicate=nn.keep_float())


def described_packing(model: mlx.nn.Module) -> dict[str, Any] | None:
    """Return how a model's layers are packed, or None where none is.

    Returns:
        bits and group_size of most packed layers, and activations where features are
        int8 too; ``layers`` for those that have others, and ``float``: the paths of
        layers that could be packed and are not. Of integer layers also ``arrays``,
        which not all of them have, ``rounding_errors`` and ``folded``: the paths of
        norms that are in convolutions.
    """
    packed, left, folded, errors = {}, [], [], {}
    for path, module in model.named_modules():
        if isinstance(module, nn.FoldedNorm):
            folded.append(path)
        elif "scales" in module:
            packed[path] = _packing(module)
            if module.mode == "integer":
                errors[path] = module.rounding_error
        elif hasattr(module, "to_quantized"):
            left.append(path)
    if not packed:
        return None
    each = [json.dumps(packing) for packing in packed.values()]
    usual = json.loads(max(sorted(set(each)), key=each.count))
    others = {path: packing for path, packing in packed.items() if packing != usual}
    found = usual | {"float": sorted(left)} | ({"layers": others} if others else {})
    errors = {path: error for path, error in errors.items() if error is not None}
    found |= {"folded": sorted(folded)} if folded else {}
    return found | ({"rounding_errors": errors} if errors else {})


def _packing(module: mlx.nn.Module) -> dict[str, Any]:
    """Return the description of one packed layer for a config."""
    found = {"bits": module.bits, "group_size": module.group_size}
    if module.mode != "integer":
        return found
    has = [name for name in OPTIONAL if name in module]
    return found | {"activations": 8, "arrays": has}


def pack_as(model: mlx.nn.Module, packing: Mapping[str, Any], folder: Path) -> None:
    """Pack a model's layers as ``described_packing`` says; nothing is computed."""
    left, others = packing.get("float", []), packing.get("layers", {})
    errors = packing.get("rounding_errors", {})
    if not isinstance(left, list) or not isinstance(others, dict):
        raise CheckpointError(
            'quantization: "float" must be a list of layers and "layers" an object'
        )
    layers = {p for p, m in model.named_modules() if hasattr(m, "to_quantized")}
    if unknown := sorted({*map(str, left), *others} - layers):
        raise CheckpointError(
            f"quantization names {shown(unknown[0])}, which is no layer of the model"
        )
    try:
        if is_integer := _integer_layers(layers - {*left}, packing, others):
            said = {path: others.get(path, packing) for path in is_integer}
            _make_integer(model, said, read_weights(folder))
            _keep_errors(model, errors)

        def predicate(path: str, module: mlx.nn.Module) -> bool | dict:
            if path not in layers or path in left or path in is_integer:
                return False
            return others.get(path, True)

        mlx.nn.quantize(
            model,
            packing.get("group_size"),
            packing.get("bits"),
            class_predicate=predicate,
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"quantization: {error}") from None


def _integer_layers(
    layers: set[str], packing: Mapping[str, Any], others: Mapping[str, Any]
) -> set[str]:
    """Return the layers whose features are int8, according to a config."""
    found = {path for path in layers if "activations" in others.get(path, packing)}
    said = [packing, *(others[path] for path in found if path in others)]
    wrong = [p["activations"] for p in said if p.get("activations", 8) != 8]
    if wrong:
        raise ValueError(f"activations must be 8; got {wrong[0]!r}")
    return found


def _make_integer(
    model: mlx.nn.Module,
    said: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, mx.array],
) -> None:
    """Make a model's layers integer as the arrays say; check that the config agrees."""
    has = {
        path: packing["arrays"] for path, packing in said.items() if "arrays" in packing
    }
    if any(not isinstance(names, list) for names in has.values()):
        raise ValueError('"arrays" of integer layers must be a list of names')
    by_row = [path for path, names in has.items() if "input_scale" not in names]
    made = set(nn.integer_like(model, arrays, by_row=by_row if has else None))
    if other := sorted(made ^ said.keys()):
        raise ValueError(
            f"the config and the arrays differ in whether {other[0]} is an integer "
            "layer"
        )
    for path, module in model.named_modules():
        for key, value in _packing(module).items() if path in made else ():
            if said[path].get(key, value) != value:
                raise ValueError(
                    f"of {path} the config says {key} = {said[path][key]}, the arrays "
                    f"{value}"
                )


def _keep_errors(model: mlx.nn.Module, errors: object) -> None:
    if not isinstance(errors, dict):
        raise ValueError('"rounding_errors" must be an object of numbers')
    for path, module in model.named_modules():
        error = errors.get(path)
        if isinstance(error, int | float) and "scales" in module:
            module.rounding_error = float(error)


# The card


# Licences that Hugging Face has a word for, which is that of the text here.
_LICENCES = ("mit", "apache-2.0", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0")


def model_card(
    config: Mapping[str, Any], parameters: int, size: int, module: str | None = None
) -> str:
    """Return the Markdown of a card."""
    name, about = config["model"], config.get("about", {})
    licence = about.get("licence", "")
    word = licence.lower().replace(" ", "-")
    word = word if word in _LICENCES else "other"
    front = ["library_name: mlx", "tags:"]
    front += [f"- {tag}" for tag in ("mlx", "sparse-convolution", "point-cloud")]
    front += [f"license: {word}"] if licence else []
    lines = ["---", *front, "---", "", f"# {name}", ""]
    lines += [f"A sparse 3D net for MLX, written by {NAME} {__version__}.", ""]
    place = "from mlx_lattice import models"
    call = f"models.{name}"
    if module is not None:
        module = "your_module" if module == "__main__" else module
        place = f"from {module} import {name}  # a class of its author, not of {NAME}"
        call = name
    lines += ["```python", place, ""]
    lines += [f'net = {call}.from_pretrained("this folder")', "```", ""]
    lines += ["| | |", "|---|---|", f"| parameters | {parameters:,} |"]
    lines += [f"| size | {format_bytes(size)} |"]
    lines += [
        f"| {key} | {_cell(value)} |" for key, value in config["arguments"].items()
    ]
    if packing := config.get("quantization"):
        bits, group = packing["bits"], packing["group_size"]
        groups = f", in groups of {group}" if group else ""
        features = packing.get("activations")
        groups += f", features of {features} bits" if features else ""
        lines += [
            f"| packed | {bits} bits{groups} |",
            f"| left in float | {_cell(packing['float']) or 'none'} |",
        ]
    voxels = about.get("voxels")
    if voxels:
        lines += [
            f"| voxels | {voxels['voxel_size']:g}, in the unit of the points |",
            f"| features | {_cell(voxels['features'])} |",
        ]
    if about.get("classes"):
        lines += [f"| classes | {_cell(about['classes'])} |"]
    lines += [
        "",
        f"Source of the weights: {about.get('source') or 'not said'}.",
        f"Licence: {licence or 'not said'}.",
    ]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    """Return a value as the cell of a table."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value).replace("|", "\\|").replace("\n", " ")
