"""CheckpointError, and how names from a file are shown."""

from __future__ import annotations

SHOWN = 120


class CheckpointError(ValueError):
    """A checkpoint that is broken, refused, or not of the library that was named."""


def shown(name: str) -> str:
    """Return a name from a file without control characters, shortened if it is long."""
    name = name if name.isprintable() else repr(name)
    return name if len(name) <= SHOWN else f"{name[:SHOWN]}... ({len(name):,} letters)"
