"""CheckpointError, and the names of strangers as they may be shown."""

from __future__ import annotations

SHOWN = 120


class CheckpointError(ValueError):
    """A checkpoint that is broken, refused, or not what its reader was told."""


def shown(name: str) -> str:
    """Return a name that came in a file: no control characters, no endless line."""
    name = name if name.isprintable() else repr(name)
    return name if len(name) <= SHOWN else f"{name[:SHOWN]}... ({len(name):,} letters)"
