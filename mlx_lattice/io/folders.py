"""Folders of a net: ``config.json``, ``model.safetensors``, a card; here or on a hub.

A folder is data: its config names a class of ``models`` and the arguments of its
constructor, and nothing in it is executed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from .. import nn
from ..cache_files import atomic_write
from ..distribution import NAME, __version__, install
from ..nn.int8 import OPTIONAL
from .safetensors import CheckpointError, read_object, read_safetensors, shown

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_folder(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """Return a local folder, or fetch a repository of a hub to its cache."""
    path = Path(path_or_repo).expanduser()
    if os.path.isdir(path):  # False for a path that is too long; pathlib raises
        return path
    if os.path.isfile(path):
        raise NotADirectoryError(f"{path} is a file; name the folder that holds it")
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
            f"{folder} has no {CONFIG}: it was not written by save_pretrained or "
            "mlx-lattice convert"
        )
    config = read_object(path)
    if not isinstance(config.get("model"), str):
        raise CheckpointError(
            f'{path} is not a JSON object with the name of a "model" of this package'
        )
    for name in ("arguments", "about", "quantization"):
        if not isinstance(config.get(name, {}), dict):
            raise CheckpointError(f'{path}: "{name}" must be an object of names')
    return config


def read_weights(folder: Path) -> dict[str, mx.array]:
    """Return the arrays of ``model.safetensors``, or of the parts of one."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no {WEIGHTS}")
    arrays: dict[str, mx.array] = {}
    for path in files:
        part = read_safetensors(path)
        if twice := sorted(arrays.keys() & part.keys()):
            raise CheckpointError(
                f"{shown(twice[0])} is in {path.name} and in another file of {folder}"
            )
        arrays |= part
    return arrays


def load_weights(model: mlx.nn.Module, folder: Path) -> None:
    """Give a model the weights of a folder; each array must be a parameter's."""
    arrays, parameters = read_weights(folder), dict(tree_flatten(model.parameters()))
    wrong = [f"{name} is missing" for name in parameters if name not in arrays]
    for name, array in arrays.items():
        parameter = parameters.get(name)
        if parameter is None:
            wrong.append(f"{shown(name)} is left over")
        elif array.shape != parameter.shape:
            wrong.append(
                f"{name} has the shape {tuple(array.shape)}, expected "
                f"{tuple(parameter.shape)}"
            )
        elif _kind(array) != _kind(parameter):
            wrong.append(f"{name} is {array.dtype}, expected {_kind(parameter)}")
    if wrong:
        raise CheckpointError(
            f"the weights in {folder} do not fit its {CONFIG}: {'; '.join(wrong[:3])}"
            + f", and {len(wrong) - 3} more" * (len(wrong) > 3)
        )
    model.load_weights(list(arrays.items()))
    nn.tie_scales(model)


def _kind(array: mx.array) -> str:
    """Return the kind of dtype that a parameter accepts: any float, or its own."""
    floating = mx.issubdtype(array.dtype, mx.floating)
    return "floating" if floating else str(array.dtype)


def replaced(folder: Path) -> list[Path]:
    """Return the files of a folder that a net replaces."""
    return [folder / CONFIG, *folder.glob("model*.safetensors"), folder / CARD]


@contextmanager
def written(folder: str | Path, config: Mapping[str, Any], card: str) -> Iterator[Path]:
    """Write a folder; the block writes the weights to the path that it gets."""
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


def described_packing(model: mlx.nn.Module) -> dict[str, Any] | None:
    """Return how a model's layers are packed, or None if none is."""
    modules = dict(model.named_modules())
    packed = {path: _packing(m) for path, m in modules.items() if "scales" in m}
    if not packed:
        return None
    texts = [json.dumps(packing) for packing in packed.values()]
    usual = json.loads(max(sorted(set(texts)), key=texts.count))
    errors = {path: getattr(modules[path], "rounding_error", None) for path in packed}
    able = {path for path, m in modules.items() if hasattr(m, "to_quantized")}
    optional = {
        "layers": {path: each for path, each in packed.items() if each != usual},
        "folded": sorted(
            path for path, m in modules.items() if isinstance(m, nn.FoldedNorm)
        ),
        "rounding_errors": {p: e for p, e in errors.items() if e is not None},
    }
    optional = {name: value for name, value in optional.items() if value}
    return usual | {"float": sorted(able - packed.keys())} | optional


def _packing(module: mlx.nn.Module) -> dict[str, Any]:
    """Return the description of one packed layer for a config."""
    packing = {"bits": module.bits, "group_size": module.group_size}
    if module.mode == "integer":
        arrays = [name for name in OPTIONAL if name in module]
        packing |= {"activations": 8, "arrays": arrays}
    return packing


def pack_as(model: mlx.nn.Module, packing: Mapping[str, Any], folder: Path) -> None:
    """Pack a model's layers as ``described_packing`` says; nothing is computed."""
    left, others = packing.get("float", []), packing.get("layers", {})
    if not isinstance(left, list) or not isinstance(others, dict):
        raise CheckpointError(
            'quantization: "float" must be a list of layers and "layers" an object'
        )
    layers = {p for p, m in model.named_modules() if hasattr(m, "to_quantized")}
    if unknown := sorted({*map(str, left), *others} - layers):
        raise CheckpointError(
            f"quantization names {shown(unknown[0])}, which is not a layer of the model"
        )
    packings = {path: others.get(path, packing) for path in layers - {*left}}
    integers = {p: each for p, each in packings.items() if "activations" in each}

    def predicate(path: str, module: mlx.nn.Module) -> bool | dict:
        floating = path in packings and path not in integers
        return others.get(path, True) if floating else False

    try:
        if integers:
            _make_integer(model, integers, read_weights(folder))
            modules = dict(model.named_modules())
            for path, error in packing.get("rounding_errors", {}).items():
                if "scales" in modules.get(path, ()):
                    modules[path].rounding_error = float(error)
        sizes = packing.get("group_size"), packing.get("bits")
        mlx.nn.quantize(model, *sizes, class_predicate=predicate)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"quantization: {error}") from None


def _make_integer(
    model: mlx.nn.Module,
    packings: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, mx.array],
) -> None:
    """Make a model's layers integer as the arrays say; check that the config agrees."""
    names = {path: p["arrays"] for path, p in packings.items() if "arrays" in p}
    if any(not isinstance(each, list) for each in names.values()):
        raise ValueError('"arrays" of integer layers must be a list of names')
    for packing in packings.values():
        if packing["activations"] != 8:
            raise ValueError(f"activations must be 8; got {packing['activations']!r}")
    by_row = [path for path, each in names.items() if "input_scale" not in each]
    integers = nn.integer_like(model, arrays, by_row=by_row if names else None)
    if other := sorted({*integers} ^ packings.keys()):
        raise ValueError(
            f"the config and the arrays differ in whether {other[0]} is an integer "
            "layer"
        )
    modules = dict(model.named_modules())
    for path, packing in packings.items():
        for key, value in _packing(modules[path]).items():
            if packing.get(key, value) != value:
                raise ValueError(
                    f"of {path} the config says {key} = {packing[key]}, the arrays "
                    f"{value}"
                )


# Licences that Hugging Face has a word for, which is that of the text here.
_LICENCES = ("mit", "apache-2.0", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0")


def model_card(config: Mapping[str, Any], folder: Path, command: str = "") -> str:
    """Return the Markdown of a card.

    Args:
        config: the contents of ``config.json``.
        folder: where the net is saved; the card's code reads its name.
        command: the command that runs the net, as "segment scan.ply".
    """
    module, _, name = config["model"].rpartition(":")
    about, place = config.get("about", {}), folder.resolve().name
    licence = about.get("licence", "")
    word = licence.lower().replace(" ", "-")
    front = ["library_name: mlx", "tags:"]
    front += [f"- {tag}" for tag in ("mlx", "sparse-convolution", "point-cloud")]
    if licence:
        front.append(f"license: {word if word in _LICENCES else 'other'}")
    lines = ["---", *front, "---", "", f"# {name}", ""]
    lines += [f"A sparse 3D net for MLX, written by {NAME} {__version__}."]
    file = "my_net.py" if module == "__main__" else module.replace(".", "/") + ".py"
    if module == "__main__":
        lines += [f"The class `{name}` was defined in a notebook: copy it to `{file}`."]
    elif module:
        lines += [f"`{file}` defines the class `{name}`: it is not part of {NAME}."]
    code = f", code={json.dumps(file)}" if module else ""
    lines += ["", "```python", "from mlx_lattice import models", ""]
    lines += [f"net = models.from_pretrained({json.dumps(place)}{code})", "```", ""]
    if command and about.get("voxels"):
        line = f"mlx-lattice {command} --model {shlex.quote(place)}"
        lines += ["```sh", line + (f" --code {file}" if module else ""), "```", ""]
    lines += [f"`{place}` is the path to this folder, or `owner/name` on a hub."]
    lines += [f"`{CONFIG}` has the net's arguments, voxels, classes and packing."]
    lines += [f"Source of the weights: {about.get('source') or 'unknown'}."]
    lines += [f"Licence: {licence or 'unknown'}."]
    return "\n".join(lines) + "\n"
