"""Plan: how one pass of a problem runs on a backend, decided once, from facts alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from .checks import DTYPES
from .devices import CPU, CUDA, METAL
from .problem import KERNEL_MAJOR, WEIGHT_GRAD, Problem
from .quantized import QuantizedWeight

if TYPE_CHECKING:  # they are imported after this record
    from .backends.gpu.kernel import GpuKernel
    from .relation import Relation

MLX = "mlx"  # MLX operations, which run on every backend
# The language of each one's kernels, as it is printed.
LANGUAGE = {METAL: "Metal", CUDA: "CUDA", CPU: "C++", MLX: "MLX operations"}


# Where an epilogue is computed.
IN_KERNEL, IN_SUM = "in the kernel", "in the launch that adds the splits"
AFTER, OPERATIONS = "a launch after", "MLX operations after"

# How weights are read that a kernel does not take as they are stored.
IN_TILES, UNPACKED_ONCE = "unpacked in tiles", "unpacked once"
PREPARED_ONCE, COPIED = "prepared once", "kernel-major copy"
# How a grouped weight is read by a kernel that knows one group.
EXPANDED = "{} in one block-diagonal weight"

# Greatest error relative to the norm of the output. "tf32": float32 features multiplied
# in TF32, which cuts both operands at 11 bits.
TOLERANCE = {"float32": 1e-5, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 1.6e-2}

# Splits, at most, of a kernel that proves itself.
PROOF_SPLITS = 3

Count = Callable[["Plan", "Relation | None"], int | None]
Bind = Callable[["Plan", "Relation"], Callable[..., mx.array]]


class Dispatch(NamedTuple):
    """One dispatch of a GPU kernel.

    Attributes:
        first: the first of the units that it covers: rows, tiles, edges, or lines of
            partial sums.
        count: how many units it covers.
        grid: threads on each axis.
        add: threads, on each axis, of the kernel that adds the partial sums of this
            and earlier dispatches; () where none does after this one.
    """

    first: int
    count: int
    grid: tuple[int, ...]
    add: tuple[int, ...] = ()


class Proof(NamedTuple):
    """How a matrix kernel is tried: on a small problem that uses all parts of it.

    Attributes:
        channels: (C_in, C_out) by which tiles are full, and others have a tail.
        again: ``again(problem)`` plans another problem for the very same kernel.
        itself: whether the kernel takes rows for their own only neighbours.
    """

    channels: tuple[int, int]
    again: Callable[[Problem], Plan]
    itself: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything that a launch needs; ``bind`` decides nothing.

    Attributes:
        problem: the facts that the plan was made from.
        backend: whose kernels run: "metal", "cuda", "cpu", or "mlx" for MLX operations.
        kernel: the entry symbol, which is the route's name.
        view: the view of the relation that the kernel reads: "out_in", "sorted",
            "edges", "output_csr", "kernel_csr", or "none".
        bind: ``bind(plan, relation)`` reads the view and returns ``call``:
            ``call(x, w, bias)`` is y, and ``call(x, dy)`` dW. ``relation`` is that of
            the pass: transposed for an input gradient. Only MLX operations keep it.
        variant: the variant of the kernel, if it has several.
        tile: rows and columns of a tile of the result, or None.
        region: rows that Metal's sorted tiles sort among themselves; else 0.
        splits: partial sums of a tile, which are added in order.
        partials: shape of the float32 partial sums, or ().
        placed: whether sorted rows are written to their own places in y.
        moments: lines of statistics of y's rows that the kernels write beside it, for a
            norm: then ``call`` returns y and (moments, 3, C_y) float32. 0: no lines.
        multiple: channels are padded to a multiple of it.
        read: returns the arrays of the view, as the kernel takes them.
        epilogue: where the problem's epilogue is computed: "in the kernel", "in the
            launch that adds the splits", "a launch after", "MLX operations after", or
            "" without an epilogue. For the first two, ``call`` takes the epilogue's
            arrays in place of the bias.
        then: ``then(sums, facts, *arrays)`` computes an epilogue after the kernel.
        weights: how weights are read: packed weights "unpacked in tiles" or "unpacked
            once" a call, float32 weights "prepared once" for tensor cores, others by a
            "kernel-major copy" of the call; "" if they are read as they are stored.
        reads_stored: whether the kernels take MLX's layout, (C_out, K, C_in), if the
            problem names it; else they take, or write, (K, C_in, C_out), a view of it.
        products: how float32 is multiplied: "TF32", rounded to 11 bits, "three TF32",
            which keeps float32's accuracy, or "" for plain float32.
        dequantised: the dtype that packed weights get before the launch, or None if
            the kernel reads them packed.
        expanded: groups of a weight that becomes a block-diagonal dense weight before
            the launch, or of a gradient that is the diagonal blocks of a dense one;
            else 1. The problem is then the dense one.
        scratch: bytes of temporary arrays beside inputs and outputs.
        sizes: numbers that the kernel gets besides the shapes, by name.
        gpu: the GPU kernel, with its template arguments.
        add: the GPU kernel that adds the splits, if MLX does not.
        threadgroup: threads of a threadgroup, or block.
        dispatches: the part of the work that each dispatch covers.
        count: ``count(plan, relation)`` returns the multiply-adds of the kernel, or
            None if they are unknown; ``relation`` is the layer's (untransposed) one or
            None. Without ``count`` they are the useful ones.
        proof: how a matrix kernel proves itself on a machine, or None.
    """

    problem: Problem
    backend: str
    kernel: str
    view: str
    bind: Bind = field(repr=False)
    variant: str = ""
    tile: tuple[int, int] | None = None
    region: int = 0
    splits: int = 1
    partials: tuple[int, ...] = ()
    placed: bool = True
    moments: int = 0
    multiple: int = 1
    read: Callable[[Relation], Sequence[mx.array]] | None = field(
        default=None, repr=False, compare=False
    )
    epilogue: str = ""
    then: Callable[..., mx.array] | None = field(default=None, repr=False)
    weights: str = ""
    reads_stored: bool = False
    products: str = ""
    dequantised: str | None = None
    expanded: int = 1
    scratch: int = 0
    sizes: tuple[tuple[str, int], ...] = ()
    gpu: GpuKernel | None = field(default=None, repr=False)
    add: GpuKernel | None = field(default=None, repr=False)
    threadgroup: tuple[int, ...] = ()
    dispatches: tuple[Dispatch, ...] = field(default=(), repr=False)
    count: Count | None = field(default=None, repr=False, compare=False)
    proof: Proof | None = field(default=None, repr=False, compare=False)

    def __call__(
        self,
        relation: Relation | None,
        x: mx.array,
        w: mx.array | QuantizedWeight,
        *added: mx.array,
    ) -> mx.array:
        """Execute the plan.

        Args:
            relation: that of the pass: transposed for an input gradient.
            x: (N_in, C_x) features of the pass.
            w: the layer's weight, packed, or with three axes in the problem's layout;
                for a weight gradient dy, (N_out, C_out).
            *added: (C_y,), added to every row, or nothing; or the arrays of the
                problem's epilogue.
        """
        return self._execute(self.bind(self, relation), relation, x, w, *added)

    def bound(self, relation: Relation) -> Callable[..., mx.array]:
        """Return ``launch(relation, *arrays)``, this plan for repeated calls.

        It has no reference to the relation, whose ``plans`` it is cached in.
        """
        if self.backend == MLX:
            return self
        return partial(self._execute, self.bind(self, relation))

    def _execute(
        self, call: Callable[..., mx.array], _: Relation | None, x, w, *added
    ) -> mx.array:
        """Return what ``call`` does, of the weight that it takes, with what follows."""
        layout, groups = self.problem.layout, self.expanded
        if self.problem.pass_ == WEIGHT_GRAD:
            dw = call(x, w)
            dw = dw.transpose(2, 0, 1) if self.transposes else dw
            return dw if groups == 1 else diagonal_blocks(dw, groups, layout)
        if self.dequantised:
            w = w.dense(DTYPES[self.dequantised])
        if groups > 1:
            w = block_diagonal(w, groups, layout)
        if self.transposes:
            w = w.transpose(1, 2, 0)
        if self.problem.integer:
            return call(x, w, *self.problem.integer.named(added))
        after = self.problem.epilogue
        if after is None:
            return call(x, w, *added)
        if self.then is not None:
            return self.then(call(x, w), after, *after.named(added))
        # GPU kernels take the arrays that there are, others None for each missing one.
        return call(x, w, *(added if self.gpu else after.named(added)))

    @property
    def layout(self) -> str:
        """The layout of the weight, or its gradient, that ``call`` takes or returns."""
        return self.problem.layout if self.reads_stored else KERNEL_MAJOR

    @cached_property
    def transposes(self) -> bool:
        """Whether that layout is a view of the one that the problem names."""
        return self.layout != self.problem.layout

    def multiply_adds(self, relation: Relation | None) -> int | None:
        """Return the multiply-adds that the kernel does, None where that is not known.

        Args:
            relation: the layer's (untransposed) one, if there is one.
        """
        if self.count is not None:
            return self.count(self, relation)
        p = self.problem
        edges = p.known_edges(relation)
        return None if edges is None else p.useful(edges)

    @property
    def tolerance(self) -> float:
        """Greatest error, relative to the norm of the result."""
        reduced = self.products == "TF32"
        return TOLERANCE["tf32" if reduced else self.problem.dtype]

    @property
    def said(self) -> tuple[tuple[str, object], ...]:
        """The facts for a reader that apply, as (name, value) pairs."""
        tile = self.tile and " x ".join(map(str, self.tile))
        where = IN_SUM if self.splits > 1 else IN_KERNEL
        pairs = (
            ("code", LANGUAGE[self.backend]),
            ("variant", self.variant),
            ("tile", tile),
            ("split-K", self.splits if self.splits > 1 else None),
            ("dispatches", len(self.dispatches) if len(self.dispatches) > 1 else None),
            ("epilogue", self.epilogue),
            ("statistics", where if self.moments else None),
            ("groups", EXPANDED.format(self.expanded) if self.expanded > 1 else None),
            ("weights", self.weights),
            ("products", self.products),
            ("dequantised to", self.dequantised),
            ("scratch bytes", self.scratch),
        )
        return tuple((name, value) for name, value in pairs if value)

    def __str__(self) -> str:
        """Return what a reader is told, in one line."""
        return ", ".join(v if k == "code" else f"{k} {v}" for k, v in self.said)


def integers_unpacked(problem: Problem) -> str:
    """Return what a Plan says of integer weights: int4 ones become int8 before."""
    return UNPACKED_ONCE if problem.bits == 4 else ""


Planner = Callable[..., Plan]  # of a problem and a device; some take a tile too


def block_diagonal(w: mx.array, groups: int, layout: str) -> mx.array:
    """Return the dense weight of a grouped one, with zeros between groups.

    (K, C_in / groups, C_out) becomes (K, C_in, C_out). In MLX's layout
    (C_out, K, C_in / groups) becomes (C_out, K, C_in).
    """
    if layout == KERNEL_MAJOR:
        volume, width, c_out = w.shape
        shape, own = (volume, groups * width, c_out), w[:, None]
    else:
        c_out, volume, width = w.shape
        shape, own = (c_out, volume, groups * width), w[:, :, None]
    return mx.where(_is_inside(groups, c_out, layout), own, 0).reshape(shape)


def diagonal_blocks(dw: mx.array, groups: int, layout: str) -> mx.array:
    """Return the gradient of a grouped weight from that of its dense one.

    Arguments and result are those of ``block_diagonal``, the other way round.
    """
    if layout == KERNEL_MAJOR:
        volume, c_in, c_out = dw.shape
        width, each = c_in // groups, c_out // groups
        shape = volume, width, groups, each
        strides = c_in * c_out, c_out, width * c_out + each, 1
        return mx.as_strided(dw, shape, strides).reshape(volume, width, c_out)
    c_out, volume, c_in = dw.shape
    width, each = c_in // groups, c_out // groups
    shape = groups, each, volume, width
    strides = each * volume * c_in + width, volume * c_in, c_in, 1
    return mx.as_strided(dw, shape, strides).reshape(c_out, volume, width)


@lru_cache(maxsize=64)
def _is_inside(groups: int, c_out: int, layout: str) -> mx.array:
    """Return the (groups, 1, C_out) mask of channels, or (C_out, 1, groups, 1)."""
    each, outputs, all_groups = c_out // groups, range(c_out), range(groups)
    # Made of lists, without an operation: the array outlives a trace of mx.compile.
    if layout == KERNEL_MAJOR:
        return mx.array([[[o // each == g for o in outputs]] for g in all_groups])
    return mx.array([[[[o // each == g] for g in all_groups]] for o in outputs])
