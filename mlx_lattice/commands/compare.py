"""The command compare: traces of a net beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..cache_files import check_writable
from ..inspect.compare import compare
from ..inspect.trace import check_page
from . import Result, log, usage


def run(first: str, others: Sequence[str], out: str | None = None) -> Result:
    """Return the table of a comparison; with ``out`` write its page."""
    if out is not None:
        with usage():
            check_page(out, (".html",))
        check_writable(out, read=(first, *others))
    found = compare(first, *others)
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        found.save(out)
        log.info(f"wrote {out}")
    return Result(found.table(), found.as_dict())
