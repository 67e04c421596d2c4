"""What each kernel of a layer does besides multiplying: counted launches.

    python benchmarks/launch_counts.py [--rows N]

Every launch of a relation's making, of a reduction over segments and of the three
passes of a layer runs on ``metal/host`` in counted mode. A line gives, for each row of
the output, its integer divisions and multiplications; the barriers of a threadgroup
for each 8 x 8 x 8 product of a simdgroup, and such products for each load of an 8 x 8
matrix; bytes through threadgroup memory for each product; bytes that a step of a
simdgroup asks of a 128-byte line of device memory; the lines that it reads, and their
bytes, a row. Nothing is timed.
"""

import argparse
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

import mlx_lattice as ml
from metal import host
from metal.host import pressure
from mlx_lattice import sync
from mlx_lattice.backends.gpu.reductions import GpuReductions
from mlx_lattice.backends.metal import geometry as metal_geometry
from mlx_lattice.backends.metal.geometry import MetalGeometry, RowTable
from mlx_lattice.geometry import lattice
from mlx_lattice.geometry.lattice import Rule
from mlx_lattice.geometry.tables import BoxedRows
from mlx_lattice.problem import INPUT_GRAD, PASSES, WEIGHT_GRAD

LINE = 128
CUBE = [tuple(int(j) - 1 for j in at) for at in np.ndindex(3, 3, 3)]
CELL = [tuple(int(j) for j in at) for at in np.ndindex(2, 2, 2)]


@dataclass(frozen=True)
class Launch:
    """The counts of one launch, for rows of its output and for products.

    Attributes:
        kernel: its symbol.
        rows: of the output.
        divisions, multiplications: of integers, 32 and 64 bits, a row.
        barriers: of threadgroups, a product of 8 x 8 x 8.
        products_a_load: of simdgroup matrices.
        staged: bytes through threadgroup memory, a product.
        asked: bytes that a step asks of a line that it reads.
        lines, read: lines that steps read, and bytes of them that they ask for, a row.
        memory: bytes of threadgroup memory.
        registers: of a lane, an estimate, or None.
    """

    kernel: str
    rows: int
    divisions: tuple[float, float]
    multiplications: tuple[float, float]
    barriers: float | None
    products_a_load: float | None
    staged: float | None
    asked: float
    lines: float
    read: float
    memory: int
    registers: int | None = None

    @staticmethod
    def of(report, rows, registers=False):
        """The facts of a report of a counted launch; registers take a compilation."""
        c = report.counts
        lines = sum(t.read_lines for t in c.buffers.values())
        asked = sum(t.read_line_bytes for t in c.buffers.values())
        products = c.matrix_multiplies
        through = c.threadgroup_read_bytes + c.threadgroup_written_bytes
        return Launch(
            kernel=report.kernel.removeprefix("custom_kernel_lattice_"),
            rows=rows,
            divisions=(c.divisions32 / rows, c.divisions64 / rows),
            multiplications=(c.multiplications32 / rows, c.multiplications64 / rows),
            barriers=c.barriers / products if products else None,
            products_a_load=products / c.matrix_loads if c.matrix_loads else None,
            staged=through / products if products else None,
            asked=asked / max(lines, 1),
            lines=lines / rows,
            read=asked / rows,
            memory=c.threadgroup_memory,
            registers=pressure.registers(report.source) if registers else None,
        )

    def __str__(self):
        """One line of the table."""

        def number(value, digits=2):
            return "-" if value is None else f"{value:.{digits}f}"

        both = (*self.divisions, *self.multiplications)
        return (
            f"{self.kernel[:34]:34} "
            + " ".join(f"{each:8.2f}" for each in both)
            + f" {number(self.barriers, 4):>8} {number(self.products_a_load):>6}"
            + f" {number(self.staged, 0):>6} {self.asked:6.1f}"
            + f" {self.lines:7.2f} {self.read:7.1f} {self.memory:6}"
            + f" {number(self.registers, 0):>5}"
        )


HEAD = (
    f"{'kernel':34} {'div32':>8} {'div64':>8} {'mul32':>8} {'mul64':>8} "
    f"{'barriers':>8} {'/ load':>6} {'staged':>6} {'asked':>6} "
    f"{'lines':>7} {'bytes':>7} {'memory':>6} {'regs':>5}"
)


def counted(call, rows, registers=False):
    """The launches of a call, by a row of its output."""
    _, report = host.run(call, counted=True, order="forward")
    report.raise_faults()
    return [Launch.of(launch, rows, registers) for launch in report.launches]


def searched(coords, out, offsets, stride, **how):
    """The table of a relation, launched."""
    with host.recording(checked=False):
        table = RowTable(coords)
        mx.eval(table.slots)
    return lambda: table.table(BoxedRows(out, None), offsets, stride, **how)


def made(coords, rule, offsets, stride):
    """The rows that a rule makes, launched."""
    box = lattice.box_of(rule, lattice.bounds_of(coords), offsets, stride)
    return lambda: MetalGeometry().rule_rows(rule, coords, offsets, stride, box)


def levels(coords, strides):
    """The cells of several strides, made at once."""

    def make():
        started = MetalGeometry().start_levels(BoxedRows(coords, None), strides, None)
        boxes = [
            lattice.box_of(Rule.CELL, lattice.bounds_of(coords), [(0, 0, 0)], stride)
            for stride in strides
        ]
        return started.rows(sync.read(*started.counts), boxes)

    return make


def geometry(coords):
    """(what, call, rows) of geometry's kernels, for (N, 4) sorted rows."""
    n, still = coords.shape[0], [(0, 0, 0)]
    for step in (2, 3):
        stride = (step,) * 3
        rows = np.array(coords) // [1, step, step, step]
        coarse = mx.array(np.unique(rows, axis=0).astype(np.int32))
        down = searched(coords, coarse, CELL, stride)
        up = searched(coarse, coords, CELL, stride, transposed=True)
        yield f"strided by {step}", down, coarse.shape[0]
        yield f"transposed by {step}", up, n
        yield f"cells of {step}", made(coords, Rule.CELL, still, stride), n
        yield f"reached by {step}", made(coords, Rule.REACH, CUBE, stride), n
        yield f"expanded by {step}", made(coarse, Rule.EXPAND, CELL, stride), n
    strides = [(2**k,) * 3 for k in range(1, 5)]
    yield "cells of 2, 4, 8 and 16", levels(coords, strides), n
    yield "submanifold", searched(coords, coords, CUBE, (1, 1, 1), mirrored=True), n
    yield "hash", lambda: RowTable(coords).slots, n
    make, views = MetalGeometry(), metal_geometry
    with host.recording(checked=False):
        table = searched(coords, coords, CUBE, (1, 1, 1), mirrored=True)()
        mx.eval(table)
    yield "order of tiles", lambda: make.gray_order(table, 256), n
    yield "tiles", lambda: views.ordered_table(table, mx.arange(n), 8), n
    yield "edges", lambda: make.edges(table), n
    yield "transposed table", lambda: make.transpose_table(table, n), n


def segments(coords, channels=32):
    """(what, call, rows) of reductions: rows by cell, and places of a table by row."""
    n = coords.shape[0]
    x = mx.ones((n, channels), dtype=mx.float16)
    starts = mx.arange(0, n + 1, 4, dtype=mx.int32)
    order = mx.arange(n, dtype=mx.int32)
    sums, cells = GpuReductions("metal"), starts.size - 1
    cell = mx.arange(n, dtype=mx.int32)[:, None] // 4
    order = order, starts
    yield "cells of rows", lambda: sums.scatter_sum(x, cell, cells, order=order), cells
    table = mx.array(np.arange(8 * n).reshape(n, 8) % n, dtype=mx.int32)
    yield "places of a table", lambda: sums.scatter_sum(x, table, n), n


def layers(coords, channels=64):
    """(what, call, rows) of a half layer's passes, as M1 and M5 run them."""
    manager = ml.CoordinateManager()
    with host.recording(checked=False):
        key = manager.insert(coords)
        built = manager.submanifold_kernel_relation(key, kernel_size=3)
        mx.eval(built.out_in, built.edges, built.T.out_in)
    x = mx.ones((built.n_in, channels), dtype=mx.float16)
    w = mx.ones((built.volume, channels, channels), dtype=mx.float16)
    for chip in ("m1", "m5"):
        for pass_ in PASSES:
            problem = ml.Problem.of(pass_, built, channels, channels, mx.float16)
            plan = ml.select(problem, device=chip).plan
            over = built.T if pass_ == INPUT_GRAD else built
            given = over, x, x if pass_ == WEIGHT_GRAD else w
            with host.recording(checked=False):
                mx.eval(plan(*given))  # its views are there from now on
            call = partial(plan, *given)
            yield f"{pass_} of {channels} channels, {chip}", call, built.n_out


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--registers", action="store_true", help="estimate them too")
    args = parser.parse_args()
    if reason := host.missing():
        raise SystemExit(reason)
    side = np.random.default_rng(0).integers(-12, 12, (args.rows, 3))
    coords = np.unique(np.c_[np.zeros(args.rows), side], axis=0).astype(np.int32)
    coords = mx.array(coords)
    print(HEAD)
    for cases in (geometry(coords), segments(coords), layers(coords)):
        for what, call, rows in cases:
            print(what)
            for launch in counted(call, rows, args.registers):
                print("  " + str(launch), flush=True)


if __name__ == "__main__":
    main()
