"""memory_limit(): keep forward passes below a number of bytes.

MLX is lazy, and a host that runs ahead of its device allocates all that it queued.
Under a limit each stage of a net is evaluated apart (``settings.boundary``), wide
intermediates are computed in blocks of rows, and large neighbour tables are built block
by block. Blocks depend on the limit and on sizes only, so results are repeatable.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from operator import attrgetter

import mlx.core as mx

from . import contraction, devices
from .coordinate_set import CoordinateKey
from .coordinates import CoordinateManager
from .devices import CPU
from .epilogue import Epilogue
from .geometry.tables import BoxedRows
from .problem import FORWARD, MLX, weight_axes
from .quantized import QuantizedWeight
from .relation import Relation
from .routes import launch
from .routes.selection import choose
from .settings import boundary, requested_precision, stage_end

# Shares of the room that a limit leaves beside the bytes in use when its block began:
WHOLE = 1 / 8  # the largest intermediate that is computed at once
BLOCK = 1 / 16  # a block of a larger one
TABLE = 1 / 8  # the largest neighbour table that is kept
WAITS = 1 / 2  # memory in use above which the host waits for the device
CACHE = 1 / 32  # share of the limit for MLX's cache on the CPU
PATIENCE = 0.01  # seconds in which MLX frees what an evaluation used
# Fewest rows of a block, by backend. MLX's GPU matmuls choose kernels, and so the order
# of sums, by the number of rows if it is small; the CPU kernels of this package do not.
LEAST_ROWS = {CPU: 1024, "*": 16384}
# Kinds whose output rows look their neighbours up, so that a table can be built in
# blocks, and the views that plans read of it row by row.
BLOCKED_KINDS = ("submanifold", "forward", "target")
BLOCKED_VIEWS = ("out_in", "sorted")
# Decimal units as MLX prints them, binary ones by their own names.
UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{name: 1000**n for n, name in enumerate(("kb", "mb", "gb", "tb"), 1)},
    **{name: 1024**n for n, name in enumerate(("kib", "mib", "gib", "tib"), 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: str | float) -> int:
    """Return the bytes of ``"8GB"`` (10^9 each), ``"8 GiB"`` (2^30) or a number."""
    if isinstance(size, bool) or not isinstance(size, (str, Real)):
        raise TypeError(
            'a size of memory must be text such as "8GB" or a number of bytes; got '
            f"{type(size).__name__}"
        )
    value = size
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = UNITS.get(match[2].lower()) if match else None
        if unit is None:
            raise ValueError(
                "a size of memory must be a number and a unit of B, kB, MB, GB, TB, "
                f'KiB, MiB, GiB or TiB, such as "8GB" or "7.5 GiB"; got {size!r}'
            )
        value = float(match[1]) * unit
    if not math.isfinite(value) or value < 1:
        raise ValueError(f"a size of memory must be 1 byte or more; got {size!r}")
    return int(value)


def format_bytes(size: float, *, up: bool = False) -> str:
    """Return a size in three digits: "7.94 GB", with ``up`` rounded up."""
    unit = next((u for u in ("GB", "MB", "kB") if size >= UNITS[u.lower()]), "B")
    value = size / UNITS[unit.lower()]
    if up:
        step = 10 ** (math.floor(math.log10(value)) - 2) if value else 1
        value = math.ceil(value / step) * step
    return f"{value:.{3 if value < 999 else 4}g} {unit}"


class MemoryLimitError(MemoryError):
    """Raised if a pass does not fit below its memory limit.

    Attributes:
        least: the smallest limit in bytes that suffices for the layer that failed.
    """

    def __init__(self, problem: str, limit: Limit, least: int):
        super().__init__(
            f"{problem}, above the limit of {limit}; the least limit that would do for "
            f"this layer is {format_bytes(least, up=True)}"
        )
        self.least = least


class Limit:
    """A limit on memory, as ``memory_limit`` gives it to its block."""

    def __init__(self, size: int):
        # Of all that MLX allocates; and what was in use when the block or a net began.
        self.bytes: int = size
        self.held: int = 0
        self.begin()

    def begin(self) -> None:
        """Count everything in use now, such as another net's weights, as held."""
        mx.synchronize()
        self.held = mx.get_active_memory()

    def __str__(self) -> str:
        return format_bytes(self.bytes)

    def share(self, share: float) -> int:
        """Return the bytes of a share of the room that the limit leaves."""
        return max(1, int((self.bytes - self.held) * share))

    def end_stage(self, *arrays: mx.array) -> None:
        """Evaluate the results of a stage; wait for the device if memory runs short."""
        try:
            mx.async_eval(*arrays)
        except ValueError as error:
            raise RuntimeError(
                "memory_limit bounds forward passes that are evaluated as they run; a "
                "gradient, or a function that mx.compile traces, keeps its whole "
                "graph. Take the limit off it, or the transformation"
            ) from error
        if mx.get_active_memory() <= self.held + self.share(WAITS):
            return
        mx.synchronize()
        end = time.perf_counter() + PATIENCE
        while (active := mx.get_active_memory()) > self.bytes:
            if time.perf_counter() > end:
                problem = f"{format_bytes(active)} are in use at the end of a layer"
                raise MemoryLimitError(problem, self, active)


_limit: ContextVar[Limit | None] = ContextVar("limit", default=None)
active: Callable[[], Limit | None] = _limit.get  # the limit that holds here, or None


@contextmanager
def memory_limit(size: str | float) -> Iterator[Limit]:
    """Keep the forward passes inside the block below a number of bytes.

    Layers compute wide intermediates in blocks of rows, rebuild large neighbour tables
    for each block, and are evaluated as they run. Results have the same bits as without
    a limit. Weights, inputs, MLX's cache and all other memory in use when the block
    begins count, so evaluate the net's parameters before the block.

    If limits are nested the smallest holds. The block also sets MLX's own limits, which
    hold for all threads. Use it for inference: gradients, and functions compiled by
    ``mx.compile``, raise a RuntimeError.

    Args:
        size: ``"8GB"`` (10^9 bytes each), ``"8 GiB"`` (2^30), or a number of bytes.

    Raises:
        TypeError, ValueError: ``size`` is not a size of memory.
        MemoryLimitError: inside the block, if a layer does not fit even in the smallest
            blocks; ``least`` says how much it needs.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> with ml.memory_limit("8GB"):
        ...     y = nn.SubmConv3d(8, 16, 3)(x)
        >>> y.shape
        (64, 16)
    """
    nbytes, outer = parse_bytes(size), active()
    limit = Limit(nbytes if outer is None else min(nbytes, outer.bytes))
    # On the CPU MLX's own limit does not bound its cache.
    on_cpu = devices.current().backend == CPU
    cache = limit.bytes * CACHE if on_cpu else max(0, limit.bytes - limit.held)
    tokens = _limit.set(limit), stage_end.set(limit.end_stage)
    before = mx.set_memory_limit(limit.bytes), mx.set_cache_limit(0)
    mx.set_cache_limit(min(before[1], int(cache)))
    try:
        yield limit
    finally:
        mx.set_memory_limit(before[0])
        mx.set_cache_limit(before[1])
        _limit.reset(tokens[0])
        stage_end.reset(tokens[1])


def block_rows(rows: int, row_bytes: int) -> int:
    """Return the rows of a block: all of them without a limit."""
    limit = active()
    if limit is None or rows * row_bytes <= limit.share(WHOLE):
        return rows
    least = LEAST_ROWS.get(devices.current().backend, LEAST_ROWS["*"])
    size = min(rows, least) * row_bytes
    if limit.held + size > limit.bytes:
        problem = (
            f"the smallest block of a layer takes {format_bytes(size)} beside the "
            f"{format_bytes(limit.held)} in use before"
        )
        raise MemoryLimitError(problem, limit, limit.held + size)
    most = max(least, limit.share(BLOCK) // max(1, row_bytes))
    return -(-rows // max(1, rows // most)) if rows >= 2 * most else rows


def blocks(rows: int, each: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of blocks of rows."""
    for first in range(0, rows, max(1, each)):
        yield first, min(rows, first + each)


def by_rows(
    function: Callable[..., mx.array], *arrays: mx.array, row_bytes: int
) -> mx.array:
    """Apply a function of independent rows, in blocks of rows under a limit."""
    rows = arrays[0].shape[0]
    each = block_rows(rows, row_bytes)
    if each >= rows:
        return function(*arrays)
    parts = (
        (first, function(*(array[first:last] for array in arrays)))
        for first, last in blocks(rows, each)
    )
    return assembled(parts, rows)


def assembled(
    parts: Iterator[tuple[int | mx.array, mx.array]],
    rows: int,
    blank: Callable[[mx.array], mx.array] | None = None,
) -> mx.array:
    """Join blocks, (first row or row indices, features), to one array of rows.

    Each is evaluated before the next: MLX copies an array that is written to while it
    is in use. ``blank`` returns the (1, C) row of places that no block fills.
    """
    whole = None
    for at, part in parts:
        if isinstance(at, int) and part.shape[0] == rows:
            return part
        if whole is None:
            whole = mx.zeros((rows, *part.shape[1:]), dtype=part.dtype)
            if blank is not None:
                whole = mx.broadcast_to(blank(part), whole.shape)
        whole[slice(at, at + len(part)) if isinstance(at, int) else at] = part
        del part  # or the block would live until the next one is computed
        boundary(whole)
        mx.eval(whole)
    return whole


def conv(
    x: mx.array,
    w: mx.array | QuantizedWeight,
    relation: Relation,
    bias: mx.array | None = None,
    groups: int = 1,
    epilogue: Epilogue | None = None,
) -> mx.array:
    """Return y, (N_out, C_out), under a limit: large tables are built in blocks."""
    is_searched = relation.kind in BLOCKED_KINDS and relation.sets is not None
    is_searched = is_searched and not (relation.is_transposed or relation.is_identity)
    is_large = relation.n_out * _table_bytes(relation) > active().share(TABLE)
    if is_searched and is_large and relation.cached_view("table") is None:
        parts = conv_blocks(x, w, relation, bias, groups, epilogue)
        return assembled(parts, relation.n_out)
    options = {"groups": groups, "bias": bias, "epilogue": epilogue}
    return contraction.conv(x, w, relation, **options)


def _table_bytes(relation: Relation) -> int:
    """Return the bytes of a row of a table; GPUs keep a sorted copy."""
    views = 1 if devices.current().backend == CPU else 2
    return 4 * relation.volume * views


def conv_blocks(
    x: mx.array,
    w: mx.array | QuantizedWeight,
    relation: Relation,
    bias: mx.array | None = None,
    groups: int = 1,
    epilogue: Epilogue | None = None,
) -> Iterator[tuple[int, mx.array]]:
    """Yield (first row, y) of blocks of output rows; one block if all rows fit."""
    n, (layout, _, _, c_out) = relation.n_out, weight_axes(tuple(w.shape))
    packing = w.packing if isinstance(w, QuantizedWeight) else None
    facts = x.shape[1], c_out, x.dtype, groups, requested_precision(), packing, layout
    after = epilogue if epilogue is None or bias is None else epilogue.biased(bias)
    request = launch.Request(FORWARD, launch.Layer(*facts), after and after.facts)
    # Whoever reads a block holds another of its size beside it.
    each = block_rows(n, 2 * c_out * x.itemsize + _table_bytes(relation))
    while each < n and not _same_sums(request, relation, each):
        each *= 2
    scope = launch.current_scope()  # the generator may be resumed in another block
    for first, last in blocks(n, min(each, n)) if n else ((0, 0),):
        part, after = relation, epilogue
        if each < n:
            part = _rows_of(relation, first, last)
            if epilogue is not None and epilogue.residual is not None:
                after = epilogue._replace(residual=epilogue.residual[first:last])
        with launch.scope(scope):
            y = contraction.conv(x, w, part, groups=groups, bias=bias, epilogue=after)
        if each < n:
            part.release()  # the vjp's closure would keep its table
        yield first, y
        del part, y


def _rows_of(relation: Relation, first: int, last: int) -> Relation:
    """Return the relation of a block of output rows, which no manager keeps."""
    source, target = relation.sets
    rows, spec = target.coords[first:last], relation.spec
    whole = relation.cached_view("table")

    def table(keep, wanted: str | None) -> mx.array:
        if whole is not None:
            return whole[first:last]
        out, kernel = BoxedRows(rows, target.box), (spec.offsets, spec.stride)
        return source.index.table(out, *kernel, keep=keep, wanted=wanted)

    return Relation(
        relation.kind,
        relation.volume,
        relation.n_in,
        last - first,
        table,
        spec=spec,
        in_coords=relation.in_coords,
        out_coords=rows,
        sets=relation.sets,
    )


# What determines the order and rounding of a row's sum.
_order = attrgetter(
    *("backend", "kernel", "variant", "view", "tile", "splits"),
    *("multiple", "products", "dequantised", "expanded", "epilogue"),
)


def _same_sums(request: launch.Request, relation: Relation, each: int) -> bool:
    """Whether blocks of ``each`` rows are summed in the order of all rows."""
    problem, n = request.problem(relation), relation.n_out
    device = devices.current()
    plan = choose(problem, device)[0].plan
    if plan.view not in BLOCKED_VIEWS or plan.backend == MLX:
        return False
    if plan.splits > 1:  # splits follow the rows of a tile
        return False
    sizes = {each, n - (n - 1) // each * each}
    # The edges of a block are not counted.
    parts = [problem.counted(problem.n_in, size, None) for size in sizes]
    return all(_order(choose(p, device)[0].plan) == _order(plan) for p in parts)


def release(manager: CoordinateManager, key: CoordinateKey) -> None:
    """Under a limit, drop the tables and indices of a set that no later layer reads.

    They are rebuilt when they are needed.
    """
    if active() is None:
        return
    rows = manager[key]
    for relation in manager.relations:
        if rows in relation.sets:
            relation.release()
    rows.release()
