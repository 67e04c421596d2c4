"""The work of launches of matrix tiles on Metal, without executing them.

``Conv`` and ``Grad`` give the operations, the bytes that a GPU kernel asks for, and the
bytes that miss a cache, for a relation and channel counts. ``metal_counts.py`` compares
them with executed counts.
"""

import ctypes
import functools
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from metal.host import toolchain  # noqa: E402
from mlx_lattice import devices  # noqa: E402
from mlx_lattice.backends.gpu import kernel as gpu_kernel  # noqa: E402
from mlx_lattice.backends.metal import tiles as metal_thresholds  # noqa: E402
from mlx_lattice.backends.metal import tiles as metal_tiles  # noqa: E402
from mlx_lattice.backends.metal import weight_grad as metal_weight_grad  # noqa: E402

ITEM, CACHE, EIGHT, TILE, SIMDGROUPS = 2, 8_000_000, 8, 64, 4


_chip = [devices.profile("m1")]


@contextmanager
def on(device):
    """Plan launches for a device inside the block."""
    _chip.append(device)
    try:
        yield
    finally:
        _chip.pop()


def chip():
    """The device that launches are planned for."""
    return _chip[-1]


@functools.cache
def library():
    """The cache model, compiled."""
    source = Path(__file__).with_name("cache.cpp")
    name = f"tile-model-{toolchain.digest(source.read_text())}.so"
    command = [*toolchain.clang().command, "-std=c++17", "-O2", "-fPIC", "-shared"]
    target = toolchain.cache_folder() / name
    toolchain.build_once(target, [*command, str(source)], "building the cache model")
    loaded = ctypes.CDLL(str(target))
    loaded.conv_misses.restype = loaded.grad_misses.restype = ctypes.c_int64
    return loaded


def misses(known, name, arrays, *numbers):
    """Call a function of the cache model, once for the same numbers.

    Args:
        known: its results for the same arrays, by numbers.
        name: the function.
        arrays: addresses in order of access, and their sizes.
        numbers: those of the plan.
    """
    if numbers not in known:
        known[numbers] = _misses(getattr(library(), name), *arrays, *numbers)
    return known[numbers]


def _misses(function, *arguments):
    where = [
        a.ctypes.data_as(ctypes.c_void_p)
        if isinstance(a, np.ndarray)
        else ctypes.c_int64(a)
        for a in arguments
    ]
    return function(*where, ctypes.c_int64(CACHE))


def ceil_div(a, b):
    """Divide, rounding up."""
    return -(-a // b)


def eights(channels):
    """Blocks of eight channels, which simdgroup matrices multiply."""
    return ceil_div(channels, EIGHT)


@dataclass
class Counts:
    """One pass over a relation.

    Attributes:
        done: operations; by blocks of 16 rows, as TensorOps do them, ``coarse``.
        asked: bytes that the kernel reads, by buffer.
        compulsory, moved, copied, explicit: bytes: each array once; through the cache;
            what joining several dispatches copies; explicit GEMM's.
        memory, registers: of a threadgroup, and of a lane by declaration.
        plan: the tile and its order, in words.
    """

    useful: int
    done: int
    coarse: int
    asked: dict
    compulsory: int
    moved: int
    copied: int
    explicit: int
    memory: int
    registers: int
    plan: str


def scaled(counts, scale, weights):
    """The counts of a scene by those of a window: all but the weights are scaled."""
    if scale == 1:
        return counts
    grown = {
        name: (getattr(counts, name) - weights) * scale + weights
        for name in ("compulsory", "moved", "explicit")
    }
    grown |= {
        name: getattr(counts, name) * scale for name in ("useful", "done", "coarse")
    }
    asked = {name: size * scale for name, size in counts.asked.items()}
    return replace(counts, **grown, asked=asked)


def region_rows():
    """The rows of a region on the chip."""
    return devices.entry(metal_thresholds.REGION_ROWS, chip())


def shape_of(columns, in_float=False):
    """(columns of a simdgroup, bytes of a row in a step) of a tile."""
    return metal_tiles.tile_shape(columns, in_float)


def gemm_tile(columns, transposed, item=ITEM, matrix=ITEM):
    """(bytes of threadgroup memory, registers of a lane) of a tile of 64 x columns.

    item, matrix: bytes of an element that is stored, and multiplied.
    """
    (width, step), groups = shape_of(columns, matrix == 4), SIMDGROUPS
    rows, lanes = TILE * columns // (groups * width), 32 * groups
    depth, pad = step // item, 16 // item
    a = TILE * (depth + pad)
    b = columns * (depth + pad) if transposed else depth * (columns + pad)
    memory = max((a + b) * item, groups * 16 * width * 4)
    parts = TILE * step // 16 // lanes + ceil_div(columns * step // 16, lanes)
    operands = (1 + width // 8) * 2 * matrix // 4
    return memory, rows * width // 32 + operands + 4 * parts + EIGHT + 1


class GradTile:
    """A tile of dW: ``GradTile`` of ``metal/grouped_gemm.metal``.

    Args:
        high, wide: channels.
        item, matrix: bytes of an element that is stored, and multiplied.
    """

    def __init__(self, high, wide, item=ITEM, matrix=ITEM):
        self.high, self.wide = high, wide
        self.rows = 64 if high > 64 else 32 if high > 16 else 16
        self.width = 32 if wide > 16 else 16
        self.shares = 4 // (high // self.rows * (wide // self.width))
        step = 32 if high + wide > 128 else 64 if high + wide > 32 else 128
        self.depth = max(step // item, EIGHT * self.shares)
        line = high + wide + 32 // item
        self.memory = max(self.depth * line * item, 4 * 16 * self.width * 4)
        parts = [ceil_div(self.depth * c * item, 16 * 128) for c in (high, wide)]
        operands = (1 + self.width // EIGHT) * 2 * matrix // 4
        self.registers = self.rows * self.width // 32 + operands + 4 * sum(parts)

    def loads(self, c_in, c_out):
        """Matrices that are loaded for eight edges, over all tiles of so many channels.

        A simdgroup whose part has none loads none.
        """
        down = _parts(c_in, self.high, self.rows)
        across = _parts(c_out, self.wide, self.width)
        return len(across) * sum(down) + len(down) * sum(across)


def _parts(channels, tile, part):
    """Eights of channels of each simdgroup's part that has any."""
    starts = (
        (at, min(channels, first + tile))
        for first in range(0, channels, tile)
        for at in range(first, min(channels, first + tile), part)
    )
    return [eights(min(part, stop - at)) for at, stop in starts]


class Conv:
    """The forward pass over a relation, or the input gradient over the transposed.

    The relation may be a window of one that is ``scale`` times as large.
    """

    def __init__(self, relation, transposed=False, scale=1.0):
        self.relation, self.transposed, self.scale = relation, transposed, scale
        self.n, self.n_in = relation.n_out, relation.n_in
        self.volume, self.edges = relation.volume, relation.n_edges
        self.tables, self.known = {}, {}

    def sorted_table(self, row):
        """The table in the order of tiles; the blocks of 8, 16 and 64 that use k."""
        region = region_rows()
        if region not in self.tables:
            table = np.array(metal_tiles.tile_table(self.relation, region))
            used = np.pad(table >= 0, ((0, -len(table) % TILE), (0, 0)))
            blocks = [
                used.reshape(-1, size, self.volume).any(axis=1)
                for size in (EIGHT, 2 * EIGHT, TILE)
            ]
            self.tables[region] = np.ascontiguousarray(table), blocks
        return *self.tables[region], region

    def plan(self, c_x, c_y):
        """(bytes of a row, columns of a tile)."""
        row = c_x * ITEM
        return row, metal_tiles.tile_columns(c_y, row, self.volume, chip())

    def executed(self, c_x, c_y):
        """Operations and bytes by buffer, as metal/host counts them."""
        row, columns = self.plan(c_x, c_y)
        _, (blocks, _, tiles), _ = self.sorted_table(row)
        across = ceil_div(c_y, columns)
        rows = np.clip(self.n - EIGHT * np.arange(len(blocks)), 0, EIGHT)
        pairs = EIGHT * eights(c_x) * EIGHT * eights(c_y)
        # Lanes side by side bring a row, and each reads its entry of the table.
        lanes = 32 * SIMDGROUPS // TILE
        entries = int((blocks * rows[:, None]).sum()) * lanes
        return {
            "matrix_flop": 2 * EIGHT * int(blocks.sum()) * pairs,
            "x": self.edges * c_x * ITEM * across,
            "w": int(tiles.sum()) * c_x * c_y * ITEM,
            "table": entries * 4 * across,
        }

    def held(self, columns):
        """(bytes of threadgroup memory, registers of a lane) of a tile."""
        return gemm_tile(columns, self.transposed)

    def counts(self, c_x, c_y):
        """The Counts of a pass from c_x to c_y channels."""
        row, columns = self.plan(c_x, c_y)
        table, (_, coarse, _), region = self.sorted_table(row)
        weights, n = self.volume * c_x * c_y * ITEM, self.n
        reached = region_rows()
        across, width = ceil_div(c_y, columns), min(columns, c_y)
        missed = misses(
            self.known.setdefault((region, row), {}),
            "conv_misses",
            (table, n, self.n_in, self.volume, TILE, row),
            *(row * width, width * ITEM, across, 1),
        )
        work = self.edges * c_x * c_y
        asked = self.executed(c_x, c_y)
        done = asked.pop("matrix_flop")
        compulsory = self.n_in * c_x * ITEM + n * c_y * ITEM + weights + table.size * 4
        memory, registers = self.held(columns)
        tiles, whole = int(self.scale * ceil_div(n, TILE)), int(self.scale * work)
        pieces, placed = metal_tiles.tile_dispatches(
            tiles * TILE, reached, whole, chip()
        )
        copies = (len(pieces) > 1) * (2 if placed else 4)
        counts = Counts(
            useful=2 * work,
            done=done,
            coarse=4 * EIGHT * int(coarse.sum()) * EIGHT**2 * eights(c_x) * eights(c_y),
            asked=asked,
            compulsory=compulsory,
            # The place of each row and the masks come on top.
            moved=missed + 4 * n + 4 * ceil_div(n, EIGHT) * ceil_div(self.volume, 32),
            copied=int(self.scale * copies * n * c_y * ITEM),
            explicit=compulsory + 2 * self.edges * (c_x + c_y) * ITEM,
            memory=memory,
            registers=registers,
            plan=f"64x{columns}, regions of {region}",
        )
        return scaled(counts, self.scale, weights)


class OwnOrder(Conv):
    """The forward pass of dense_channel and cout16: rows in their own order."""

    def plan(self, c_x, c_y):
        """A tile of all columns."""
        return c_x * ITEM, c_y

    def sorted_table(self, row):
        """The table itself; these kernels skip eight rows at a time too."""
        table = np.ascontiguousarray(np.array(self.relation.out_in))
        used = np.pad(table >= 0, ((0, -len(table) % TILE), (0, 0)))
        sizes = (EIGHT, 2 * EIGHT, TILE)
        blocks = [used.reshape(-1, n, self.volume).any(axis=1) for n in sizes]
        return table, blocks, 0


class Grad:
    """The weight gradient over a relation, or a window of one ``scale`` times it."""

    def __init__(self, relation, scale=1.0):
        self.relation, self.scale = relation, scale
        self.n, self.n_in = relation.n_out, relation.n_in
        self.volume = relation.volume
        self.table = np.ascontiguousarray(np.array(relation.edges))
        self.edges, self.known = len(self.table), {}
        self.starts = np.searchsorted(self.table[:, 2], np.arange(self.volume + 1))

    def plan(self, c_in, c_out):
        """(height and width of a tile, ranges of rows)."""
        high, wide = metal_weight_grad.grad_tile(c_in, c_out)
        return high, wide, self.splits(c_in, c_out, high, wide)

    def tile(self, c_in, c_out):
        """The GradTile of so many channels."""
        return GradTile(*self.plan(c_in, c_out)[:2])

    def splits(self, c_in, c_out, high, wide):
        """The ranges of rows for tiles of a height and width."""
        features = (self.n_in * c_in + self.n * c_out) * ITEM
        shape = self.volume, c_in, c_out
        edges = self.edges, min(self.edges, self.n)
        return metal_weight_grad.grad_splits(
            *edges, features, shape, (high, wide), ITEM, chip()
        )

    def bounds(self, splits):
        """(splits x K, 2) edges at which the units start and stop, K the faster."""
        limits = self.n * np.arange(splits + 1) // splits
        cuts = [
            start + np.searchsorted(self.table[start:stop, 1], limits)
            for start, stop in zip(self.starts, self.starts[1:], strict=False)
        ]
        cuts = np.stack(cuts, axis=1).astype(np.int64)
        both = np.stack([cuts[:-1], cuts[1:]], axis=-1).reshape(-1, 2)
        return np.ascontiguousarray(both)

    def executed(self, c_in, c_out):
        """Operations and bytes by buffer, as metal/host counts them."""
        high, wide, splits = self.plan(c_in, c_out)
        lengths = np.diff(self.bounds(splits), axis=1)
        pairs = EIGHT * eights(c_in) * EIGHT * eights(c_out)
        return {
            "matrix_flop": 2 * EIGHT * int(ceil_div(lengths, EIGHT).sum()) * pairs,
            "x": self.edges * c_in * ITEM * ceil_div(c_out, wide),
            "dy": self.edges * c_out * ITEM * ceil_div(c_in, high),
        }

    def counts(self, c_in, c_out):
        """The Counts of the pass."""
        high, wide, splits = self.plan(c_in, c_out)
        tall, across = ceil_div(c_in, high), ceil_div(c_out, wide)
        bounds = self.bounds(splits)
        missed = misses(
            self.known.setdefault(splits, {}),
            "grad_misses",
            (self.table, self.edges, bounds, len(bounds), self.n_in, self.n),
            *(tall, across, min(high, c_in) * ITEM, min(wide, c_out) * ITEM),
            *(int(c_in <= c_out), 1),
        )
        weights = self.volume * c_in * c_out
        held = ceil_div(splits * weights * 4, metal_thresholds.PARTIAL_BYTES["*"])
        work = self.edges * c_in * c_out
        limit = gpu_kernel.matrix_limit(chip())
        held, whole = int(self.scale * held), int(self.scale * work)
        dispatches = min(int(self.scale * splits), max(held, ceil_div(whole, limit)))
        features = (self.n_in * c_in + self.n * c_out) * ITEM
        listed = 12 * self.edges
        compulsory = features + weights * ITEM + listed
        asked = self.executed(c_in, c_out)
        done = asked.pop("matrix_flop")
        tile = GradTile(high, wide)
        counts = Counts(
            useful=2 * work,
            done=done,
            coarse=done,
            asked=asked,
            compulsory=compulsory,
            moved=missed + weights * ITEM + (splits > 1) * 2 * splits * weights * 4,
            # Each dispatch but the first reads the sum so far, and writes the next.
            copied=(dispatches - 1) * 2 * weights * 4 if splits > 1 else 0,
            explicit=compulsory + 2 * self.edges * (c_in + c_out) * ITEM,
            memory=tile.memory,
            registers=tile.registers,
            plan=f"{high}x{wide}, {int(self.scale * splits)} ranges of rows",
        )
        return scaled(counts, self.scale, weights * ITEM)
