"""Parts of coordinate sets, and two of them: rows of either, of both, of one alone.

What is made of two sets alone is cached for as long as both live.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from . import registry, sync
from .coordinate_set import (
    CoordinateKey,
    CoordinateSet,
    OfPairs,
    expect_one_lattice,
    settle,
)
from .coordinates import CoordinateManager
from .geometry.lattice import join
from .reductions import inverted

# By what was made of a pair. A new set is cached by its key: a cached set of its own
# pair, or its manager, would keep both alive for ever.
_joins = OfPairs()


class Move(NamedTuple):
    """Where the rows of one set stand among those of another."""

    places: mx.array  # (M,) int32: the row of the one for each of the other, or -1
    back: mx.array  # (N,) int32: the other way round


class Part(NamedTuple):
    """Some rows of a set, in their order.

    Attributes:
        key: of their set; None if they are all rows, so that no set was made.
        move: to them; None for all rows.
    """

    key: CoordinateKey | None
    move: Move | None


class Union(NamedTuple):
    """Rows that were made of two sets.

    Attributes:
        key: of the new set; None if one of the two has the rows.
        which: the one that has, 0 or 1.
        moves: of the rows of each; None if they stand as they are made.
    """

    key: CoordinateKey | None
    which: int
    moves: tuple[Move | None, Move | None]


def part_of(
    manager: CoordinateManager,
    held: CoordinateSet,
    mask: mx.array,
    count: int | None = None,
) -> Part:
    """Return the rows whose mask is true.

    Reads what is not known: their number, and with it what the whole set is checked by.
    """
    if not len(held):
        return Part(None, None)
    started = registry.geometry().start_kept(mx.stop_gradient(mask), held.coords)
    unsettled = [] if held.settled else [held]
    if count is None:
        ((count,),) = settle(unsettled, started.count)
    else:
        settle(unsettled)
    if count == len(held):
        return Part(None, None)
    rows, back, coords = started.kept(count)
    made = manager.inserted(
        coords,
        held.stride,
        spatial_shape=held.spatial_shape,
        batch_size=held.batch_size,
        trusted=True,
        box=held.box,  # some rows of a set that is right are right
    )
    made.is_sorted = held.is_sorted
    return Part(made.key, Move(rows, back))


def equal_rows(a: CoordinateSet, b: CoordinateSet) -> Move | None:
    """Return the move of the first set's rows to the second's, which are the same.

    None if their order is the same too. Raises if a row differs or repeats.
    """
    known = _joins.of(a, b)
    if "equal" not in known:
        known["equal"] = sync.complete(_equal_rows(a, b))
    return known["equal"]


def _equal_rows(a: CoordinateSet, b: CoordinateSet) -> Move | None:
    expect_one_lattice(a, b)
    # In one order they are the same place by place, or not at all.
    are_sorted = len(a) == len(b) and a.is_sorted and b.is_sorted
    if are_sorted and sync.read(mx.array_equal(a.coords, b.coords))[0]:
        return None
    places = _found(b, a)
    same = mx.array_equal(places, mx.arange(len(b), dtype=mx.int32))
    missing, same = sync.read((places < 0).sum(), same)
    if missing or len(a) != len(b):
        of, at = (b, places) if missing else (a, _found(a, b))
        row = tuple(of.coords[mx.argmin(at).item()].tolist())
        raise ValueError(
            f"the tensors do not have the same coordinates ({len(a):,} and {len(b):,} "
            f"rows; {row} is in one alone); join them with ops.union or "
            "ops.intersection"
        )
    return None if same else Move(places, inverted(places, len(a)))


def common(
    manager: CoordinateManager, a: CoordinateSet, b: CoordinateSet
) -> tuple[Part, Move]:
    """Return the rows of the first set that the second has, and its move to them."""
    known = _joins.of(a, b)
    if "common" not in known:
        at = _found(a, b)
        part = part_of(manager, a, at >= 0)
        at = at if part.move is None else at[part.move.places]
        move = Move(at, inverted(at, len(b)))
        known["common"] = _complete(manager, part, move), move
    return known["common"]


def alone(manager: CoordinateManager, a: CoordinateSet, b: CoordinateSet) -> Part:
    """Return the rows of the first set that the second lacks."""
    known = _joins.of(a, b)
    if "alone" not in known:
        part = part_of(manager, a, _found(a, b) < 0)
        known["alone"] = _complete(manager, part)
    return known["alone"]


def _found(a: CoordinateSet, b: CoordinateSet) -> mx.array:
    """Return the (N_a,) places of the first set's rows in the second, or -1."""
    settle([each for each in dict.fromkeys((a, b)) if not each.settled])
    if not len(a):
        return mx.zeros((0,), dtype=mx.int32)
    return b.lookup.find(a.coords, a.box)


def united(
    manager: CoordinateManager, a: CoordinateSet, b: CoordinateSet, is_one: bool
) -> Union:
    """Return the sorted rows that either set has. Reads one number, once."""
    known = _joins.of(a, b)
    if "union" not in known:
        known["union"] = _complete(manager, _united(manager, a, b, is_one))
    return known["union"]


def _united(
    manager: CoordinateManager, a: CoordinateSet, b: CoordinateSet, is_one: bool
) -> Union:
    is_turned = len(b) > len(a)
    small, large = (a, b) if is_turned else (b, a)
    at, missing = _found(small, large), 0
    if len(small):
        ((missing,),) = sync.read((at < 0).sum().reshape(1))
    box = join(a.box, b.box) if len(small) else large.box
    shape = a.spatial_shape if a.spatial_shape == b.spatial_shape else None
    facts = shape, max(a.batch_size, b.batch_size)
    if large.is_sorted and not missing:  # the union is there
        rows, move = large.shown, None
        if len(small) < len(large) or not small.is_sorted:
            move = Move(inverted(at, len(large)), at)
        moves = (move, None) if is_turned else (None, move)
    else:
        both, count = mx.concatenate([a.coords, b.coords]), len(large) + missing
        rows, places = registry.geometry().unique_rows(both, box, count)
        backs = places[: len(a)], places[len(a) :]
        moves = tuple(Move(inverted(back, count), back) for back in backs)
    for which, (held, move) in enumerate(zip((a, b), moves, strict=True)):
        same = facts == (held.spatial_shape, held.batch_size)
        if move is None and same and (is_one or not which):
            return Union(None, which, moves)
    made = manager.inserted(rows, a.stride, *facts, trusted=True, box=box)
    made.is_sorted = True
    return Union(made.key, 0, moves)


def _complete(
    manager: CoordinateManager, made: Part | Union, *moves: Move
) -> Part | Union:
    """Compute moves and the rows of a new set, which threads share; return the set."""
    rows = None if made.key is None else manager[made.key].coords
    sync.complete((made, moves, rows))
    return made
