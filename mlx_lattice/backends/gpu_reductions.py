"""The interfaces of the reductions' kernels, on Metal and CUDA alike.

All have one struct of sizes. A dispatch covers `rows` rows of the result from `first`
on, of `channels` each; `volume` is the K of a table.
"""

from __future__ import annotations

from .gpu_kernel import Interface

_NAME = "Reduction"


def _sizes(rows: str, volume: str) -> tuple[tuple[str, str], ...]:
    each = ("first", "0"), ("rows", rows), ("volume", volume)
    return *each, ("channels", "x_shape[1]")


_BY_TABLE = _sizes("table_shape[0]", "table_shape[1]")
_BY_SEGMENT = _sizes("starts_shape[0] - 1", "1")

# y[o] = sum over k of weights[o, k] * x[table[o, k]], over divisors[o]; weights (M, K)
# and divisors (M,) may be absent.
GATHER_SUM = Interface(_NAME, ("x", "table", "weights", "divisors"), ("y",), _BY_TABLE)
# y[o] = the greatest of x[table[o, k]], and won, the row that has it or -1.
GATHER_MAX = Interface(_NAME, ("x", "table"), ("y", "won"), _BY_TABLE)
# dx[i] = sum over o = table[i, k] of x[o] where won[o] = i; table is (N, K).
MAX_POOL_BACKWARD = Interface(_NAME, ("x", "won", "table"), ("dx",), _BY_TABLE)
# products[o, k] = x[table[o, k]] . y[o].
ROW_PRODUCTS = Interface(_NAME, ("x", "y", "table"), ("products",), _BY_TABLE)
# Segment s has the places starts[s] .. starts[s + 1] of entries, which are places of a
# flat (M, K) table; without entries a place is its own. divisors (S,) may be absent.
SUM_SEGMENTS = Interface(
    _NAME, ("x", "entries", "weights", "starts", "divisors"), ("y",), _BY_SEGMENT
)
# Entries are rows; of pieces, names are the rows that won in them, -1 for none.
MAX_SEGMENTS = Interface(
    _NAME, ("x", "entries", "names", "starts"), ("y", "won"), _BY_SEGMENT
)
