"""The small problem by which a matrix kernel proves itself.

333 rows and 27 offsets: tiles that are full and one that is not, rows with many edges,
few and none, an offset without any; or rows that feed themselves, through one. Values
are small integers, whose sums are exact in any order and in any dtype: one that is
wrong is off by one or more.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product

import mlx.core as mx

from .. import devices
from ..backends import mlx_ops, portable_only
from ..dtypes import DTYPES
from ..epilogue import CHANNELS, finished
from ..integer_weight import IntegerWeight
from ..problem import FORWARD, INPUT_GRAD, MLX_LAYOUT, WEIGHT_GRAD, Problem
from ..quantized import QuantizedWeight, padded
from ..relation import Relation
from . import proof_integers
from .plan import AFTER, OPERATIONS, Plan
from .proof_values import POOL, drawn

ROWS, VOLUME = 333, 27
# What rounding a result once may change, relative to it; and what float32 sums, or an
# activation, may be off besides.
ROUNDING = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-8}
SLACK = 2e-3
_LARGE = 64  # of which products cancel: sums in half would lose what is beside them


@cache
def neighbours(mirrored: bool) -> tuple[tuple[int, ...], ...]:
    """Return the rows of the neighbour table, -1 where there is no edge.

    Args:
        mirrored: whether it is of a submanifold relation, in which every row has itself
            for a neighbour; else some have none. The edge (i, o, k) comes with (o, i,
            K - 1 - k) in either.
    """
    draw = random.Random(0)
    box = [c for c in product(range(6), repeat=3) if draw.random() < 0.5]
    strings = [(10 + 4 * i, j, 0) for i in range(20) for j in range(i % 8)]
    lone = [(10 + 3 * i, 30, 9) for i in range(ROWS - len(box) - len(strings))]
    cells = sorted(box + strings + lone)
    places = {cell: row for row, cell in enumerate(cells)}
    table = []
    for x, y, z in cells:
        offsets = product((-1, 0, 1), repeat=3)
        line = [places.get((x + a, y + b, z + c), -1) for a, b, c in offsets]
        line[3] = line[-4] = -1
        if y == 30 and x % 2 and not mirrored:
            line[VOLUME // 2] = -1
        table.append(tuple(line))
    return tuple(table)


@cache
def _relation(where: str, mirrored: bool) -> Relation:
    """Return a relation of that table; its views are those of one backend."""
    del where
    lines = neighbours(mirrored)
    with mx.stream(mx.cpu):
        table = mx.array(lines, dtype=mx.int32)
        mx.eval(table)
    kind = "submanifold" if mirrored else "general"
    found = Relation(
        kind, VOLUME, ROWS, ROWS, lambda keep, wanted: table, mirrored=mirrored
    )
    found.set_counted(sum(at >= 0 for line in lines for at in line))
    return found


@cache
def _itself(where: str, mirrored: bool) -> Relation:
    """Return a relation of as many rows that feed themselves; for one backend."""
    del where
    with mx.stream(mx.cpu):
        table = mx.arange(ROWS, dtype=mx.int32)[:, None]
        mx.eval(table)
    found = Relation(
        "submanifold", 1, ROWS, ROWS, lambda keep, wanted: table, mirrored=mirrored
    )
    found.set_counted(ROWS)
    return found


class Trial:
    """The small problem of one plan, and what its kernel must make of it.

    Args:
        plan: whose kernel is tried.
        biased: whether it is given a bias.
    """

    def __init__(self, plan: Plan, biased: bool):
        p = plan.problem
        self.plan, where = plan, devices.current().name
        # Of this layer the pass reads the table that the kernel expects. A gradient of
        # weights reads half of the edges of mirrored relations, turning them.
        mirrored = p.mirrored or p.pass_ == WEIGHT_GRAD
        straight = p.mirrored == (p.pass_ == INPUT_GRAD)
        relation = _itself if plan.proof.itself else _relation
        self.layer, self._reference = (
            each if straight else each.T
            for each in (relation(of, mirrored) for of in (where, "portable"))
        )
        is_packed = bool(p.bits) and not plan.dequantised
        in_kernel = plan.epilogue not in (AFTER, OPERATIONS)
        self.problem = Problem.of(
            p.pass_,
            self.layer,
            *plan.proof.channels,
            DTYPES[p.dtype],
            deterministic=p.deterministic,
            precision=p.precision,
            bits=p.bits if is_packed else None,
            group_size=p.group_size if is_packed else None,
            layout=p.layout,
            epilogue=p.epilogue if in_kernel else None,
            integer=p.integer,
            moments=p.moments,
        )
        alone = p.epilogue is None and p.integer is None
        self.biased = biased and alone and p.pass_ == FORWARD
        # With parts that 11 bits do not hold, where they are to be multiplied too.
        exact = p.dtype != "float32" or plan.products == "TF32"
        self._unit = 1.0 if exact else 1 + 2**-12
        with mx.stream(mx.cpu):
            self.arrays = self._arrays()
            self.wanted = self._floor()
            mx.eval(self.wanted, [_parts(each) for each in self.arrays])

    def run(self) -> mx.array | tuple[mx.array, mx.array]:
        """Return what the kernel makes of it; statistics of its rows, too."""
        small = self.plan.proof.again(self.problem)
        return small(self._of_pass(self.layer), *self.arrays)

    def fault(self, made: mx.array | tuple[mx.array, mx.array]) -> str | None:
        """Return what is wrong with a result of ``run``, or None."""
        if isinstance(made, mx.array):
            return self._fault_of(made)
        return self._fault_of(made[0]) or _fault_of_moments(*made)

    def _fault_of(self, y: mx.array) -> str | None:
        wanted, dtype = self.wanted, DTYPES[self.problem.dtype]
        if self.problem.integer:
            dtype = self.problem.integer.out_dtype(dtype)
        if y.shape != wanted.shape or y.dtype != dtype:
            return f"it is {y.shape} {y.dtype}, not {wanted.shape} {dtype}"
        with mx.stream(mx.cpu):
            y = y.astype(mx.float32)
            most = ROUNDING[self.problem.dtype] * mx.abs(wanted) + SLACK
            if self.problem.integer:
                most = proof_integers.most(self.problem.integer, most)
            # NaN is not close to anything.
            wrong = mx.logical_not(mx.abs(y - wanted) <= most).flatten()
            count, at = wrong.sum().item(), mx.argmax(wrong).item()
            if not count:
                return None
            got, right = (a.flatten()[at].item() for a in (y, wanted))
        place = []
        for size in reversed(wanted.shape):
            at, rest = divmod(at, size)
            place.insert(0, rest)
        name = "dW" if self.problem.pass_ == WEIGHT_GRAD else "y"
        return (
            f"{count:,} of {wanted.size:,} values are wrong, the first {name}{place} = "
            f"{got:.6g}, which is {right:.6g}"
        )

    def _of_pass(self, layer: Relation) -> Relation:
        return layer.T if self.problem.pass_ == INPUT_GRAD else layer

    def _floor(self) -> mx.array:
        """Return the result by the portable floor, in float32 and on the CPU."""
        if self.problem.integer:
            with portable_only():
                relation = self._of_pass(self._reference)
                return proof_integers.floor(self.problem, relation, self.arrays)
        p = replace(self.problem, dtype="float32", bits=None, group_size=None)
        plan = mlx_ops.gather_gemm_scatter(p, devices.profile("cpu"))
        if p.epilogue:
            plan = replace(plan, then=finished)
        x, w, *added = self.arrays
        w = w.dense() if isinstance(w, QuantizedWeight) else w.astype(mx.float32)
        added = [array.astype(mx.float32) for array in added]
        with portable_only():
            return plan(self._of_pass(self._reference), x.astype(mx.float32), w, *added)

    def _arrays(self) -> list:
        """Return what the pass takes: features, weight or dy, and what is added."""
        if self.problem.integer:
            return proof_integers.arrays(self.problem)
        p, dtype = self.problem, DTYPES[self.problem.dtype]
        c_x, c_y = p.channels
        x = drawn("x", (ROWS, c_x)) * self._unit
        if p.pass_ == WEIGHT_GRAD:
            dy = drawn("dy", (ROWS, c_y)) * self._unit
            return [x.astype(dtype), dy.astype(dtype)]
        if p.bits:
            w = _packed(p, dtype)
        else:
            w = drawn("w", (p.volume, c_x, c_y)) * self._unit
            if dtype != mx.float32 and c_x > 2:
                first, last = _LARGE * x[:, :1], x[:, 1:-1]
                x = mx.concatenate([first, last, first], axis=1)
                first = _LARGE * w[:, :1]
                w = mx.concatenate([first, w[:, 1:-1], -first], axis=1)
            w = w.swapaxes(1, 2) if p.transposed else w
            w = w.transpose(2, 0, 1) if p.layout == MLX_LAYOUT else w
            w = mx.contiguous(w.astype(dtype))
        return [x.astype(dtype), w, *self._added()]

    def _added(self) -> list[mx.array]:
        """Return the bias, or the arrays of the epilogue."""
        p, dtype = self.problem, DTYPES[self.problem.dtype]
        if self.biased:
            return [drawn("bias", (p.c_out,)).astype(dtype)]
        made = []
        for name in p.epilogue.there if p.epilogue else ():
            if name == "residual":
                made.append((5 * drawn(name, (ROWS, p.c_out))).astype(dtype))
                continue
            assert name in CHANNELS
            line = drawn(name, (p.c_out,))
            value = {"scale": 1.5 + 0.5 * line, "var": 2.5 + 1.5 * line}
            kind = getattr(mx, p.epilogue.kind(name))
            made.append(value.get(name, 3 * line).astype(kind))
        return made


def _fault_of_moments(y: mx.array, lines: mx.array) -> str | None:
    """Return what is wrong with statistics of the rows of y, or None."""
    with mx.stream(mx.cpu):
        counts, means, squares = (lines[:, i] for i in range(3))
        y, total = y.astype(mx.float32), mx.maximum(counts.sum(axis=0), 1)
        mean = (counts * means).sum(axis=0) / total
        squares = squares.sum(axis=0) + (counts * mx.square(means - mean)).sum(axis=0)
        right, var = y.mean(axis=0), y.var(axis=0)
        most = 1e-3 * (mx.abs(right) + mx.sqrt(var)) + SLACK
        for name, found, wanted, least in (
            ("counts", total, mx.full(total.shape, len(y)), 0.0),
            ("means", mean, right, most),
            ("variances", squares / total, var, 1e-3 * var + SLACK),
        ):
            # NaN is not close to anything.
            if not mx.all(mx.abs(found - wanted) <= least).item():
                return f"{name} of its rows are wrong"
    return None


@cache
def _words() -> mx.array:
    draw = random.Random("words")
    words = mx.array([draw.getrandbits(32) for _ in range(POOL)], dtype=mx.uint32)
    mx.eval(words)
    return words


def _packed(p: Problem, dtype: mx.Dtype) -> QuantizedWeight:
    """Return packed weights whose values 8 bits hold."""
    channels = padded(p.c_in, p.group_size)
    shape = VOLUME, p.c_out, channels // p.group_size
    step = 2.0 ** (1 - p.bits)
    scales = step * (1.5 + 0.5 * drawn("scales", shape))
    scales = mx.where(scales == 1.5 * step, step, scales)
    return QuantizedWeight(
        drawn("", (VOLUME, p.c_out, channels * p.bits // 32), _words()),
        scales.astype(dtype),
        mx.where(drawn("biases", shape) > 0, -2.0, -1.0).astype(dtype),
        p.c_in,
        p.bits,
        p.group_size,
    )


def _parts(array: mx.array | QuantizedWeight | IntegerWeight) -> tuple[mx.array, ...]:
    return (array,) if isinstance(array, mx.array) else array.arrays
