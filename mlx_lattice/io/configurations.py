"""Published configurations: the JSON beside a checkpoint, as one of our models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checks import real, whole
from ..models.trellis2.published import NETS, arguments_of
from .errors import CheckpointError, check_file, shown

# SPVNAS's nets read coordinates and intensity.
SPVNAS_INPUTS = 4


def read_config(path: str | Path) -> dict:
    """Return the JSON object of a file.

    Raises:
        CheckpointError: the file holds none.
    """
    path = Path(path)
    check_file(path, CheckpointError)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return config


class Configuration(Mapping):
    """A published configuration, which records the keys that are read.

    ``mlx-lattice convert`` prints the keys that no model reads. Objects within the
    configuration are recorded in the same way.

    Args:
        entries: the JSON object.
    """

    def __init__(self, entries: Mapping[str, Any]):
        self._entries = {key: _recorded(value) for key, value in entries.items()}
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        value = self._entries[key]
        self._read.add(key)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return repr(self._entries)

    def unread(self) -> list[str]:
        """Return the dotted names of the keys that were not read."""
        names = []
        for key, value in self._entries.items():
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


def trellis2(config: Mapping) -> tuple[str, dict]:
    """Return our class and its arguments for a configuration of TRELLIS.2's.

    Args:
        config: ``{"name": ..., "args": {...}}``; other entries have no part in it.

    Raises:
        CheckpointError: the net is none of ours, or has parts that ours has not.
    """
    name, arguments = config.get("name"), config.get("args")
    if (
        not isinstance(name, str)
        or name not in NETS
        or not isinstance(arguments, Mapping)
    ):
        raise CheckpointError(
            f"the configuration is of {shown(repr(name))}; expected a name and args of "
            f"one of {', '.join(NETS)}"
        )
    try:
        return NETS[name].kind, arguments_of(name, arguments)
    except ValueError as error:
        raise CheckpointError(shown(str(error))) from None


def spvnas(config: Mapping, kind: str) -> tuple[dict[str, Any], float | None]:
    """Return the arguments of our class, and ``pres``, for SPVNAS's ``net.config``.

    Args:
        config: ``num_classes`` and ``cr``; optionally ``pres``, the size of the cells
            that points are rounded to, ``vres``, the size of SPVCNN's voxels, and
            ``trimmed``, which is an argument of the nets here.
        kind: our class, "SPVCNN" or "MinkUNetTorchSparse".

    Raises:
        CheckpointError: an entry is missing or has a value of another type.
    """
    missing = [key for key in ("num_classes", "cr") if key not in config]
    if missing:
        raise CheckpointError(
            f"SPVNAS's configurations have num_classes and cr; {missing[0]} is missing"
        )
    if kind == "SPVCNN" and ("pres" in config) != ("vres" in config):
        raise CheckpointError("SPVCNN's configurations have both pres and vres")
    try:
        arguments = {
            "in_channels": SPVNAS_INPUTS,
            "num_classes": whole(config["num_classes"], "num_classes", 1),
            "width": real(config["cr"], "cr"),
        }
        if "trimmed" in config:
            arguments["trimmed"] = config["trimmed"]
            if not isinstance(config["trimmed"], bool):
                raise TypeError(f"trimmed must be a bool; got {config['trimmed']!r}")
        if kind == "SPVCNN" and "vres" in config:
            arguments["voxel_size"] = _size(config, "vres")
        pres = _size(config, "pres") if "pres" in config else None
        return arguments, pres
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the configuration: {error}") from None


def _size(config: Mapping, key: str) -> float:
    size = real(config[key], key)
    if size <= 0:
        raise ValueError(f"{key} must be positive; got {size}")
    return size
