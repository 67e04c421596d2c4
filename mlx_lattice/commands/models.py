"""The command models: published weights by name, one of them, or its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import models
from ..cache_files import check_writable
from ..inspect.trace import drawn
from ..io import folders
from . import Result, UsageError, log, usage

COLUMNS = tuple((name, "left") for name in ("name", "net", "licence", "published"))


def run(
    name: str | None = None,
    out: str | None = None,
    path: Sequence[str] | None = None,
    cached: bool = False,
) -> Result:
    """Return the names, or an entry; with ``out`` write its net to a folder."""
    if name is None:
        if out or path:
            raise UsageError(
                "--out and --path need NAME, the name of published weights"
            )
        entries = [models.published(each) for each in models.list("*")]
        rows = [
            (e.name, e.kind, e.about.licence or "unknown", e.metric or "unknown")
            for e in entries
        ]
        return Result(drawn(COLUMNS, rows), [_document(each) for each in entries])
    with usage():
        entry = models.published(name)
    result = Result(str(entry), _document(entry))
    if out is None:
        return result
    check_writable(*folders.replaced(Path(out)), read=path or ())
    net = models.create(name, path, download=not cached)
    net.save_pretrained(out)
    log.info(
        f'wrote {out}; load it with models.from_pretrained("{out}") or --model {out}'
    )
    return result


def _document(entry: models.Published) -> dict[str, Any]:
    return {**vars(entry), "about": asdict(entry.about)}
