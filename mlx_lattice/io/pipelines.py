"""TRELLIS.2's published folder: ``pipeline.json``, and the nets that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn

from .. import memory, models, nn
from .checkpoints import import_checkpoint
from .errors import CheckpointError, shown
from .folders import CONFIG, described_packing
from .published import read_config, trellis2
from .safetensors import SafetensorsState

PIPELINE = "pipeline.json"
GROUP = 64  # input channels that share a scale, where weights are packed
# The class of each net, by a part of its published name: the first that is in it.
KINDS = {
    "structure_flow": models.SparseStructureFlowModel,
    "structure_decoder": models.SparseStructureDecoder,
    "slat_flow": models.SLatFlowModel,
    "slat_decoder": models.SparseVAEDecoder,
}


def pipeline_of(folder: Path) -> Mapping[str, Any]:
    """Return the ``args`` of a folder's ``pipeline.json``.

    Raises:
        io.CheckpointError: there is none, or it names no nets.
    """
    if not (folder / PIPELINE).is_file():
        raise CheckpointError(
            f"{folder} has no {PIPELINE}: expected the folder of TRELLIS.2 as it is "
            "published at huggingface.co/microsoft/TRELLIS.2-4B; see docs/trellis2.md"
        )
    arguments = read_config(folder / PIPELINE).get("args")
    held = arguments.get("models") if isinstance(arguments, Mapping) else None
    if not isinstance(held, Mapping):
        raise CheckpointError(f'{folder / PIPELINE} has no "args" with "models"')
    return arguments


def places_of(
    folder: Path, held: Mapping[str, str], names: Sequence[str]
) -> dict[str, Path]:
    """Return where each net is: a folder of this package's, or a path without suffix.

    A net of another repository is looked for by its own name in the folder and in
    ``ckpts``.

    Raises:
        io.CheckpointError: nets are missing.
    """
    found, missing = {}, []
    for name in names:
        place = str(held.get(name, name))
        last = place.rpartition("/")[2]
        for path in (folder / place, folder / "ckpts" / last, folder / last):
            files = [
                path.with_name(path.name + end) for end in (".json", ".safetensors")
            ]
            if (path / CONFIG).is_file() or all(file.is_file() for file in files):
                found[name] = path
                break
        else:
            missing.append(f"{name} ({shown(place)})")
    if missing:
        raise CheckpointError(
            f"{folder} lacks {'; '.join(missing)}: expected a .json and a .safetensors "
            "of each, as published, or a folder that mlx-lattice convert wrote; a net "
            "of another repository goes into ckpts"
        )
    return found


def loaded(
    places: Mapping[str, Path], name: str, dtype: str | None, bits: int | None
) -> mlx.nn.Module:
    """Return a net of a folder, in the dtype of its file if none is asked for.

    Raises:
        io.CheckpointError: its files do not fit, or are of another net.
    """
    path = places[name]
    if path.is_dir():
        net = models.from_pretrained(path)
    else:
        weights = path.with_name(path.name + ".safetensors")
        kind, arguments = trellis2(read_config(path.with_name(path.name + ".json")))
        arguments.setdefault("dtype", _dtype_of(weights))
        if dtype and "flow" in name:
            arguments["dtype"] = getattr(mx, dtype)
        net = getattr(models, kind)(**arguments).eval()
        import_checkpoint(weights, net, "trellis2")
    wanted = next(kind for part, kind in KINDS.items() if part in name)
    if not isinstance(net, wanted):
        raise CheckpointError(
            f"{path} is a {type(net).__name__}; {name} must be a {wanted.__name__}"
        )
    if bits:
        pack(net, bits, path)
    mx.eval(net.parameters())
    if (limit := memory.active()) is not None:
        limit.begin()
    return net


def pack(net: mlx.nn.Module, bits: int, path: str | Path) -> None:
    """Pack the weights of a folder's float net, but for what ``nn.keep_float`` keeps.

    Raises:
        io.CheckpointError: it is packed already, and would stay as it is.
    """
    if described_packing(net):
        raise CheckpointError(f"{path} is packed already; leave --bits out")
    mlx.nn.quantize(net, GROUP, bits, class_predicate=nn.keep_float())


def _dtype_of(weights: Path) -> mx.Dtype:
    """Return the dtype of the largest array of a file."""
    state = SafetensorsState(weights)
    largest = max((state.sketch(name) for name in state), key=lambda a: a.size)
    return largest.dtype
