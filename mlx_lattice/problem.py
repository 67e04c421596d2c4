"""Problem: the facts of one pass of one contraction, without arrays.

Plan: how such a pass runs on a backend, decided once, from facts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import mlx.core as mx

from .checks import DTYPES, dtype_name, one_of, whole
from .devices import CPU, CUDA, METAL, Device
from .epilogue import Activation, EpilogueFacts, composed, named
from .kernel_spec import KernelSpec
from .settings import FLOAT32, PRECISIONS

if TYPE_CHECKING:  # they are imported after these records
    from .backends.gpu.kernel import GpuKernel
    from .quantized import QuantizedWeight
    from .relation import Relation

# The passes of a contraction.
FORWARD, INPUT_GRAD, WEIGHT_GRAD = PASSES = ("forward", "input_grad", "weight_grad")
KINDS = ("forward", "target", "submanifold", "transposed", "generative", "general")
# How a float weight is stored: (K, C_in, C_out), or MLX's own (C_out, K, C_in).
KERNEL_MAJOR, MLX_LAYOUT = LAYOUTS = ("kernel_major", "mlx")

MOST_ROWS = 2**31 - 1  # rows are numbered in int32


def weight_axes(shape: Sequence[int]) -> tuple[str, int, int, int]:
    """Return (layout, K, C_in / groups, C_out) of a weight of a shape."""
    if len(shape) == 3:
        return KERNEL_MAJOR, *shape
    return MLX_LAYOUT, prod(shape[1:-1]), shape[-1], shape[0]


@dataclass(frozen=True)
class Problem:
    """State the facts that routes are chosen by, without arrays or a device.

    Channels and rows are those of the layer in every pass.

    Examples:
        >>> problem = ml.Problem.forward(
        ...     kind="submanifold", kernel_size=3, c_in=64, c_out=64, n_in=100_000,
        ...     n_out=100_000, dtype="float16",
        ... )
        >>> ml.select(problem, device="m4-max").route.name
        'sorted_implicit_gemm'
    """

    pass_: str  # "forward", "input_grad" or "weight_grad"
    kind: str  # of the relation, see ``Relation``
    kernel: str  # as text, "3x3x3, stride 2"
    volume: int  # number of kernel offsets, K
    c_in: int
    c_out: int
    n_in: int
    n_out: int
    dtype: str = "float32"  # of features; of a float result of int8 features
    dims: int = 3  # spatial axes
    groups: int = 1
    pointwise: bool = False  # one zero offset that keeps the rows
    table: bool = True  # whether the relation has a neighbour table
    edges: int | None = None  # None if not counted; plans of a weight gradient have it
    bits: int | None = None  # 4 or 8 for a packed weight
    group_size: int | None = None  # input channels that share a scale
    deterministic: bool = True  # the same input must give the same bits
    mirrored: bool = False  # the table is read as its own transpose, by K - 1 - k
    layout: str = KERNEL_MAJOR  # of the weight, as above
    precision: str = FLOAT32  # "tf32" if products in TF32 are allowed
    epilogue: EpilogueFacts | None = None  # what a forward pass does to its sums
    integer: IntegerFacts | None = None  # what it does to int32 sums of int8 features
    moments: bool = False  # may sum statistics for a norm after it

    def __post_init__(self) -> None:
        one_of(self.pass_, PASSES, "pass")
        one_of(self.kind, KINDS, "kind")
        one_of(self.layout, LAYOUTS, "layout")
        one_of(self.precision, PRECISIONS, "precision")
        if self.dtype not in DTYPES:
            dtype_name(self.dtype)  # raises
        for name in ("c_in", "c_out", "n_in", "n_out"):
            object.__setattr__(self, name, whole(getattr(self, name), name))
        object.__setattr__(self, "groups", whole(self.groups, "groups", 1))
        for name, channels in (("c_in", self.c_in), ("c_out", self.c_out)):
            if channels < 1 or channels % self.groups:
                raise ValueError(
                    f"{name} must be a positive multiple of groups = {self.groups}; "
                    f"got {channels}"
                )
        for name, rows in (("n_in", self.n_in), ("n_out", self.n_out)):
            if rows > MOST_ROWS:
                raise ValueError(
                    f"{name} must be at most {MOST_ROWS}, since rows are numbered in "
                    f"int32; got {rows}"
                )
        if self.edges is None:
            return
        # Only a relation of kind "general" may have an edge twice.
        most, upward = self.n_out * self.volume, self.kind == "general"
        if self.edges < 0 or (self.edges > most and not upward):
            range_ = "0 or more" if upward else f"0 to n_out * K = {most}"
            raise ValueError(
                f"edges of a {self.kind} relation must be {range_}; got {self.edges}"
            )

    @classmethod
    def forward(
        cls,
        *,
        kind: str | None = None,
        kernel_size: int | Sequence[int] = 3,
        c_in: int,
        c_out: int,
        n_in: int,
        n_out: int | None = None,
        dtype: str | mx.Dtype = "float32",
        dims: int = 3,
        stride: int = 1,
        **facts: Any,
    ) -> Problem:
        """Describe a forward pass; by default ``n_out`` is ``n_in``.

        The kind is "submanifold" if the rows are kept, else "forward".
        """
        dims = dims if isinstance(kernel_size, int) else len(kernel_size)
        spec = KernelSpec.of(dims, kernel_size=kernel_size, stride=stride)
        n_out = n_in if n_out is None else n_out
        has_stride = set(spec.stride) != {1}
        if kind is None:
            kind = "forward" if has_stride or n_in != n_out else "submanifold"
        if kind == "submanifold" and (has_stride or n_in != n_out):
            raise ValueError(
                "a submanifold convolution keeps its rows: stride is 1 and n_out is "
                f'n_in; got {stride} and {n_in} -> {n_out}. Kind "forward" takes others'
            )
        is_itself = kind in ("submanifold", "forward") and n_in == n_out
        return cls(
            pass_=FORWARD,
            kind=kind,
            kernel=str(spec),
            volume=spec.volume,
            c_in=c_in,
            c_out=c_out,
            n_in=n_in,
            n_out=n_out,
            dtype=dtype_name(dtype),
            dims=dims,
            pointwise=spec.is_pointwise and is_itself,
            **facts,
        )

    @classmethod
    def input_grad(cls, **facts: Any) -> Problem:
        """Describe the input gradient of the layer that ``forward`` describes."""
        layer = cls.forward(**facts)
        # A centred box on the rows themselves is its own mirror image where it is odd.
        mirrored = layer.kind == "submanifold" and layer.volume % 2 == 1
        return replace(layer, pass_=INPUT_GRAD, mirrored=mirrored)

    @classmethod
    def weight_grad(cls, **facts: Any) -> Problem:
        """Describe the weight gradient of the layer that ``forward`` describes."""
        return replace(cls.forward(**facts), pass_=WEIGHT_GRAD)

    @classmethod
    def of(
        cls,
        pass_: str,
        relation: Any,
        c_in: int,
        c_out: int,
        dtype: mx.Dtype,
        groups: int = 1,
        **facts: object,
    ) -> Problem:
        """Describe a pass of a layer over its (untransposed) relation."""
        spec, edges = relation.spec, relation.counted
        pointwise = relation.is_identity
        if edges is None and pass_ == WEIGHT_GRAD and not pointwise:
            edges = relation.n_edges  # the pass reads the list of edges
        is_back = relation.is_transposed != (pass_ == INPUT_GRAD)
        return cls(
            pass_=pass_,
            kind=relation.kind,
            kernel=str(spec) if spec else f"{relation.volume} offsets",
            volume=relation.volume,
            c_in=c_in,
            c_out=c_out,
            n_in=relation.n_in,
            n_out=relation.n_out,
            dtype=dtype_name(dtype),
            dims=spec.dims if spec else 3,
            groups=groups,
            pointwise=pointwise,
            edges=edges,
            mirrored=relation.mirrored and is_back,
            **facts,
        )

    @cached_property
    def dense(self) -> Problem:
        """The same pass of a layer with one group and as many channels."""
        return replace(self, groups=1)

    def counted(self, n_in: int, n_out: int, edges: int | None) -> Problem:
        """Return the same layer's problem with other numbers of rows and edges."""
        return replace(self, n_in=n_in, n_out=n_out, edges=edges)

    @property
    def transposed(self) -> bool:
        """Whether the pass contracts with W[k].T over the transposed relation."""
        return self.pass_ == INPUT_GRAD

    @property
    def rows_are_summed(self) -> bool:
        """Whether a row of the weight runs along the channels that the pass sums."""
        return self.transposed != (self.layout == MLX_LAYOUT)

    @property
    def channels(self) -> tuple[int, int]:
        """Channels that the pass sums over and those that it writes, (C_x, C_y)."""
        # In full, as are sizes of features: planners of tiles ask again and again.
        is_back = self.pass_ == INPUT_GRAD
        return (self.c_out, self.c_in) if is_back else (self.c_in, self.c_out)

    @property
    def operands(self) -> str:
        """What is multiplied, as tables print it: "float16", "int4", "int8 x int8"."""
        if self.integer:
            return f"int8 x int{self.bits}"
        return f"int{self.bits}" if self.bits else self.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one feature."""
        return DTYPES[self.dtype].size

    @property
    def read_size(self) -> int:
        """Bytes of one feature as the pass reads it."""
        return 1 if self.integer else DTYPES[self.dtype].size

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a row of the layer's input and of its output."""
        written = self.itemsize
        if self.integer:
            written = self.integer.out_dtype(DTYPES[self.dtype]).size
        return self.c_in * self.read_size, self.c_out * written

    @property
    def dense_weight_bytes(self) -> int:
        """Bytes of the weight as features of this dtype hold it."""
        return self.volume * self.c_in * self.c_out // self.groups * self.itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight as it is stored; packed with its scales and padding."""
        if not self.bits:
            return self.dense_weight_bytes
        stored = self.packed_channels
        groups = stored // (self.group_size or stored)
        values = stored * self.bits // 8
        if self.integer:  # a multiplier a group of int4, a scale an output channel
            groups = groups if self.bits == 4 else 0
            return self.volume * self.c_out * (values + groups) + 4 * self.c_out
        return self.volume * self.c_out * (values + 2 * self.itemsize * groups)

    @property
    def packed_channels(self) -> int:
        """Input channels of a group as a packed weight stores them, padded."""
        c_in = self.c_in // self.groups
        size = self.group_size or (ALIGNMENT if self.integer else c_in)
        return -(-c_in // size) * size

    @property
    def sums_moments(self) -> bool:
        """Whether statistics are asked for, and there is anything that kernels sum."""
        return self.moments and 0 not in (self.n_in, self.n_out, self.edges)

    @property
    def edges_at_most(self) -> int:
        """The edges, or as many as there may be where they are not counted."""
        if self.edges is not None:
            return self.edges
        rows = self.n_in if self.transposed else self.n_out
        return rows if self.pointwise else rows * self.volume

    def known_edges(self, relation: Any = None) -> int | None:
        """Return the edges, the relation's if the problem has none, or None."""
        if self.pointwise:
            return self.n_out
        if self.edges is None and relation is not None:
            return relation.n_edges
        return self.edges

    def im2col_bytes(self, device: Device) -> int:
        """Return the bytes of the matrix that explicit GEMM gathers.

        MLX multiplies half precision as it is on Metal, and as float32 elsewhere.
        """
        is_input_grad = self.pass_ == INPUT_GRAD
        rows = self.n_in if is_input_grad else self.n_out
        channels = self.c_out if is_input_grad else self.c_in
        each = self.itemsize if device.backend == METAL else 4
        return each * rows * self.volume * channels

    def useful(self, edges: int) -> int:
        """Return a multiply-add for each edge, input channel of a group and output."""
        return edges * self.c_in * self.c_out // self.groups

    @property
    def useful_flops(self) -> int | None:
        """Two operations for each of the ``useful`` ones, where edges are known."""
        edges = self.known_edges()
        return None if edges is None else 2 * self.useful(edges)

    @property
    def rows_written(self) -> int:
        """Rows of what the pass writes: K for a weight gradient."""
        if self.pass_ == WEIGHT_GRAD:
            return self.volume
        return self.n_in if self.pass_ == INPUT_GRAD else self.n_out

    def __str__(self) -> str:
        edges = ""
        if self.edges is not None:
            per_row = self.edges / self.n_out if self.n_out else 0.0
            edges = f", {self.edges:,} edges ({per_row:.1f} a row)"
        rows = (
            f"{self.n_out:,} rows"
            if self.n_in == self.n_out
            else f"{self.n_in:,} -> {self.n_out:,} rows"
        )
        packed = f", int{self.bits} weight" if self.bits else ""
        if packed and self.pass_ != FORWARD:
            packed += " dequantised"
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        asked = f" ({self.precision} allowed)" if self.precision != FLOAT32 else ""
        after = f" {self.epilogue}" if self.epilogue else ""
        after = " + statistics of its rows" if self.moments else after
        if self.integer:
            packed, after = f", int8 features{packed}", f" {self.integer}".rstrip()
        return (
            f"{self.kind} {self.kernel}, {self.c_in} -> {self.c_out}, {self.dtype}"
            f"{asked}{packed}{groups}{after}, {rows}{edges}"
        )


# The arrays that follow x and w, in the order of kernels.
ARRAYS = (
    "scale", "shift", "residual", "residual_scale", "out_inverse", "row_scales",
)  # fmt: skip
FOLLOWING = ARRAYS[:-1]  # what follows the sums: scales of rows are in them
WHOLE = 8  # numbers that a scalar of kernels lies in, see in_device_memory
MOST = 127  # int8 values are -127 ... 127
ALIGNMENT = 32  # weights pad input channels to a multiple of it


@dataclass(frozen=True)
class IntegerFacts:
    """What follows the sums of int8 features, without its arrays.

    ``there``: those of ``ARRAYS`` that there are, in that order; always ``scale``.
    """

    there: tuple[str, ...] = ("scale",)
    activation: str = ""

    @cached_property
    def act(self) -> Activation:
        """The activation."""
        return named(self.activation)

    @property
    def writes_int8(self) -> bool:
        """Whether the result is int8, else of the problem's dtype."""
        return "out_inverse" in self.there

    @property
    def residual_int8(self) -> bool:
        """Whether the residual is int8, with a scale."""
        return "residual_scale" in self.there

    @property
    def row_scales(self) -> bool:
        """Whether every input row has a scale of its own."""
        return "row_scales" in self.there

    def out_dtype(self, dtype: mx.Dtype) -> mx.Dtype:
        """Return the dtype of the result in a problem of a float dtype."""
        return mx.int8 if self.writes_int8 else dtype

    def named(self, arrays: Sequence[mx.array]) -> list[mx.array | None]:
        """Return all ``ARRAYS`` of those that there are, None for the others."""
        rest = iter(arrays)
        return [next(rest) if name in self.there else None for name in ARRAYS]

    def __str__(self) -> str:
        added = [name for name in ("shift", "residual") if name in self.there]
        parts = [*added, *filter(None, [self.act.name])]
        text = "by row scales " if self.row_scales else ""
        text += " ".join(f"+ {part}" for part in parts)
        return f"{text.strip()} to int8".strip() if self.writes_int8 else text.strip()


def finished(
    sums: mx.array,
    facts: IntegerFacts,
    dtype: mx.Dtype,
    scale: mx.array,
    shift: mx.array | None = None,
    residual: mx.array | None = None,
    residual_scale: mx.array | None = None,
    out_inverse: mx.array | None = None,
) -> mx.array:
    """Return what follows the sums, in MLX operations.

    Sums are (N, C_out) int32, or float32 if rows have scales of their own.
    """
    v = sums.astype(mx.float32) * scale
    if shift is not None:
        v = v + shift
    if residual is not None:
        added = residual.astype(mx.float32)
        v = v + (added if residual_scale is None else added * residual_scale)
    if facts.activation and v.size:
        v = composed(facts.act)(v)
    return v.astype(dtype) if out_inverse is None else to_int8(v, out_inverse)


def in_device_memory(scalar: mx.array) -> mx.array:
    """Return a (1,) array in memory that a GPU reads as fast as any.

    MLX's CUDA backend keeps arrays of up to 8 bytes in host memory. This one is a view
    of the first of several numbers. It moves to the host when it is read there.
    """
    return mx.pad(scalar, (0, WHOLE - 1))[:1]


def to_int8(x: mx.array, inverse: mx.array) -> mx.array:
    """Return ``clip(round(x * inverse), -127, 127)`` as int8, halves to even."""
    levels = mx.round(x.astype(mx.float32) * inverse)
    return mx.clip(levels, -MOST, MOST).astype(mx.int8)


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
    """One dispatch of a GPU kernel: ``count`` units (rows, tiles, ...) from ``first``.

    ``add`` are threads of the kernel that adds the partial sums so far, or ().
    """

    first: int
    count: int
    grid: tuple[int, ...]
    add: tuple[int, ...] = ()


class Proof(NamedTuple):
    """How a matrix kernel is tried: on a small problem that uses all parts of it.

    By ``channels``, (C_in, C_out), tiles are full and others have a tail;
    ``again(problem)`` plans another problem for the very same kernel; ``itself`` says
    whether the kernel takes rows for their own only neighbours.
    """

    channels: tuple[int, int]
    again: Callable[[Problem], Plan]
    itself: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything that a launch needs; ``bind`` decides nothing.

    ``bind(plan, relation)``, of the pass's relation, reads the view and returns
    ``call``: ``call(x, w, bias)`` is y, and ``call(x, dy)`` dW. An epilogue in kernels
    takes its arrays in place of the bias. With ``moments``, ``call`` returns y and
    (moments, 3, C_y) float32. Only MLX operations keep the relation.
    """

    problem: Problem
    backend: str  # "metal", "cuda", "cpu", or "mlx" for MLX operations
    kernel: str  # the entry symbol, which is the route's name
    view: str  # "out_in", "sorted", "edges", "output_csr", "kernel_csr" or "none"
    bind: Bind = field(repr=False)
    variant: str = ""  # of the kernel, if it has several
    tile: tuple[int, int] | None = None  # rows and columns of a tile of the result
    region: int = 0  # rows that Metal's sorted tiles sort among themselves
    splits: int = 1  # partial sums of a tile, which are added in order
    partials: tuple[int, ...] = ()  # shape of the float32 partial sums
    placed: bool = True  # whether sorted rows are written to their own places in y
    moments: int = 0  # lines of statistics that kernels write beside y, for a norm
    multiple: int = 1  # channels are padded to a multiple of it
    read: Callable[[Relation], Sequence[mx.array]] | None = field(
        default=None, repr=False, compare=False
    )
    epilogue: str = ""  # where it is computed, see above; "" without one
    then: Callable[..., mx.array] | None = field(default=None, repr=False)
    weights: str = ""  # how they are read, if not as they are stored, see above
    # Kernels take the problem's layout, else (K, C_in, C_out).
    reads_stored: bool = False
    products: str = ""  # "TF32", "three TF32", or "" for plain float32
    dequantised: str | None = None  # dtype that packed weights get before
    expanded: int = 1  # groups of a weight that is made a dense one
    scratch: int = 0  # bytes of temporary arrays beside inputs and outputs
    sizes: tuple[tuple[str, int], ...] = ()  # what the kernel gets besides shapes
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

        ``relation`` is that of the pass, transposed for an input gradient; ``x`` are
        features of the pass, ``w`` the layer's weight, or dy of a weight gradient, and
        ``added`` a (C_y,) bias, or the arrays of the problem's epilogue.
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
        """Return the multiply-adds of the kernel for the layer's relation, if known."""
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
    def details(self) -> tuple[tuple[str, object], ...]:
        """The facts to print, as (name, value) pairs."""
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
        return ", ".join(v if k == "code" else f"{k} {v}" for k, v in self.details)

    def facts(self) -> dict[str, object]:
        """Return the values that a reader needs, without problem and functions."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        del values["problem"]
        return values | {"dispatches": len(self.dispatches)}

    @classmethod
    def from_facts(cls, problem: Problem, facts: dict[str, Any]) -> Plan:
        """Return a plan with these ``facts``, which prints and cannot run."""
        dispatches = (None,) * facts["dispatches"]
        return cls(problem, **facts | {"dispatches": dispatches, "bind": _no_kernel})

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the facts, without functions."""
        return Plan.from_facts, (self.problem, self.facts())


def _no_kernel(plan: Plan, relation: Relation | None) -> NoReturn:
    raise RuntimeError(
        "a plan that was copied or loaded has no kernel; choose its problem again: "
        "ml.select(plan.problem)"
    )


def integers_unpacked(problem: Problem) -> str:
    """Return what a Plan says of integer weights: int4 ones become int8 before."""
    return UNPACKED_ONCE if problem.bits == 4 else ""


Planner = Callable[..., Plan]  # of a problem and a device; some take a tile too


def block_diagonal(w: mx.array, groups: int, layout: str) -> mx.array:
    """Return the dense weight of a grouped one, with zeros between groups."""
    if layout == KERNEL_MAJOR:
        volume, width, c_out = w.shape
        shape, own = (volume, groups * width, c_out), w[:, None]
    else:
        c_out, volume, width = w.shape
        shape, own = (c_out, volume, groups * width), w[:, :, None]
    return mx.where(_is_inside(groups, c_out, layout), own, 0).reshape(shape)


def diagonal_blocks(dw: mx.array, groups: int, layout: str) -> mx.array:
    """Return the gradient of a grouped weight from that of its dense one."""
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
