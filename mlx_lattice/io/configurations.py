"""Published configurations: the JSON beside a checkpoint, as one of our models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..checks import real, whole
from ..models.trellis2.published import NETS, arguments_of
from .errors import CheckpointError, check_file, shown


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


def spvnas(config: Mapping) -> dict[str, float]:
    """Return the classes and the width that SPVNAS's ``net.config`` tells.

    Raises:
        CheckpointError: one of them is missing, or no number.
    """
    missing = [key for key in ("num_classes", "cr") if key not in config]
    if missing:
        raise CheckpointError(
            f"SPVNAS's configurations have num_classes and cr; {missing[0]} is missing"
        )
    try:
        return {
            "classes": whole(config["num_classes"], "num_classes", 1),
            "width": real(config["cr"], "cr"),
        }
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the configuration: {error}") from None
