"""What a manager keeps of rows that nothing reads again is dropped under a limit."""

from __future__ import annotations

from ..coordinate_set import CoordinateKey
from ..coordinates import CoordinateManager
from . import limit


def release(manager: CoordinateManager, key: CoordinateKey) -> None:
    """Drop tables and look-ups of a set after its last use, if a limit asks for it.

    They are made again where they are asked for. Below a small share of the limit they
    are kept, for the next call with the same rows.

    Args:
        manager: has the set.
        key: of the set.
    """
    held = limit.active()
    if held is None:
        return
    rows = manager[key]
    relations = [r for r in manager.relations if rows in r.sets]
    entries = sum(r.n_out * r.volume for r in relations)
    if 4 * entries < held.share("dropped"):
        return
    for relation in relations:
        relation.release()
    rows.release()
