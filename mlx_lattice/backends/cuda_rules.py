"""Rules of look-ups as the CUDA kernels read them: see ``enum Rule`` in
``cuda/table_sources.cuh``.
"""

from __future__ import annotations

from ..geometry.lattice import negated

PART_OFFSETS, GROUP, PARTS_AT = 64, 3, 12
# How offsets are applied; on stride 1 either rule is an addition. Rows that feed
# themselves are not looked up.
KINDS = FORWARD, TRANSPOSED, UNIT, ITSELF = "FORWARD", "TRANSPOSED", "UNIT", "ITSELF"
_WIDE = 1 << 30  # beyond it sums are made in 64 bits

Offsets = tuple[tuple[int, ...], ...]


def rule_kind(
    offsets: Offsets, stride: tuple[int, ...], transposed: bool
) -> tuple[str, Offsets]:
    """Return the kind of a rule, and the offsets in its sense."""
    if max(stride) > 1:
        return (TRANSPOSED if transposed else FORWARD), offsets
    return UNIT, negated(offsets) if transposed else offsets


def rule_words(offsets: Offsets, stride: tuple[int, ...], kind: str) -> list[int]:
    """Return the words of a rule: a header, groups, pairs, and the plain offsets."""
    shifts = [s.bit_length() - 1 if s & (s - 1) == 0 else -1 for s in stride]
    if kind == TRANSPOSED:
        scaled = [
            (
                tuple(-(v // s) for v, s in zip(o, stride, strict=True)),
                tuple(v % s for v, s in zip(o, stride, strict=True)),
            )
            for o in offsets
        ]
    else:
        scaled = [(o, (0,) * len(o)) for o in offsets]
    is_wide = any(abs(v) >= _WIDE for at, _ in scaled for v in at)
    if is_wide:  # then the kernel goes by the plain offsets
        scaled = [((0,) * len(stride),) * 2] * len(offsets)
    parts, records = [], []
    for k0 in range(0, len(offsets), PART_OFFSETS):
        parts.append(len(records))
        records += _groups(scaled[k0 : k0 + PART_OFFSETS], k0, kind)
    parts.append(len(records))
    groups_at = -(-(PARTS_AT + len(parts)) // 4) * 4
    pairs_at = groups_at + 12 * len(records)
    offsets_at = pairs_at + 2 * len(offsets)
    return [
        *_padded(stride),
        *_padded(shifts),
        *(-int(is_wide), groups_at, pairs_at, offsets_at),
        *_padded(parts, groups_at - PARTS_AT),
        *(v for record in records for v in record),
        *(v for at, rest in scaled for v in (at[-1], rest[-1])),
        *(v for offset in offsets for v in offset),
    ]


def _groups(scaled, k0: int, kind: str) -> list[list[int]]:
    """Return the groups of a part: up to three offsets that share what leads.

    Their last coordinates go by one step, except where remainders are looked at.
    """
    groups, k = [], 0
    while k < len(scaled):
        (at, rest), count = scaled[k], 1
        step = 0
        for other, left in scaled[k + 1 : k + GROUP]:
            if (other[:-1], left[:-1]) != (at[:-1], rest[:-1]):
                break
            apart = other[-1] - scaled[k + count - 1][0][-1]
            if kind != TRANSPOSED and count > 1 and apart != step:
                break
            step, count = apart, count + 1
        groups.append(
            [k0 + k, count, at[-1], step, *_padded(at[:-1]), *_padded(rest[:-1])]
        )
        k += count
    return groups


def _padded(values, length: int = 4) -> list[int]:
    return [*values, *(0,) * (length - len(values))]
