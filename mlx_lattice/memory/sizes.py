"""Sizes of memory as people write them."""

from __future__ import annotations

import math
import re
from numbers import Real

# Decimal as MLX prints them, binary by their own names.
UNITS = {
    "": 1,
    "b": 1,
    **{name: 1000**n for n, name in enumerate(("kb", "mb", "gb", "tb"), 1)},
    **{name: 1024**n for n, name in enumerate(("kib", "mib", "gib", "tib"), 1)},
}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: str | float) -> int:
    """Return bytes of ``"8GB"`` (10^9 each), ``"8 GiB"`` (2^30 each) or a number.

    Raises:
        TypeError: it is neither text nor a number.
        ValueError: the text is no size, or the size is not above 0.
    """
    if isinstance(size, bool) or not isinstance(size, (str, Real)):
        raise TypeError(
            'a size of memory must be text such as "8GB" or a number of bytes; got '
            f"{type(size).__name__}"
        )
    if isinstance(size, str):
        found = _WRITTEN.fullmatch(size)
        unit = UNITS.get(found[2].lower()) if found else None
        if unit is None:
            raise ValueError(
                "a size of memory must be a number and a unit of B, kB, MB, GB, TB, "
                f'KiB, MiB, GiB or TiB, such as "8GB" or "7.5 GiB"; got {size!r}'
            )
        value = float(found[1]) * unit
    else:
        value = float(size)
    if not math.isfinite(value) or value < 1:
        raise ValueError(f"a size of memory must be 1 byte or more; got {size!r}")
    return int(value)


def said_bytes(size: float, *, up: bool = False) -> str:
    """Return a size as it is printed, in three digits: "7.94 GB".

    Args:
        size: bytes.
        up: whether it is rounded up, so that what is printed is enough.
    """
    unit = next((u for u in ("GB", "MB", "kB") if size >= UNITS[u.lower()]), "B")
    value = size / UNITS[unit.lower()]
    if up:
        step = 10 ** (math.floor(math.log10(value)) - 2) if value else 1
        value = math.ceil(value / step) * step
    return f"{value:.{3 if value < 999 else 4}g} {unit}"
