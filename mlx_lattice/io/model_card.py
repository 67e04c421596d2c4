"""The card of a net's folder: what it is, how to load it, under which licence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..distribution import NAME, __version__
from ..memory import format_bytes

# Licences that Hugging Face has a word for, which is that of the text here.
_LICENCES = ("mit", "apache-2.0", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0")


def model_card(
    config: Mapping[str, Any], parameters: int, size: int, module: str | None = None
) -> str:
    """Return the Markdown of a card.

    Args:
        config: what ``config.json`` says.
        parameters: how many numbers the weights are, packed ones counted one by one.
        size: bytes of the arrays.
        module: the module that defines the class, if that is not this package.
    """
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
