"""Problem: the facts of one pass of one contraction, without arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import mlx.core as mx

from .checks import DTYPES, dtype_name, one_of, whole
from .devices import METAL, Device
from .epilogue import Activation, EpilogueFacts, composed, named
from .kernel_spec import KernelSpec
from .settings import FLOAT32, PRECISIONS

FORWARD, INPUT_GRAD, WEIGHT_GRAD = PASSES = ("forward", "input_grad", "weight_grad")
KINDS = ("forward", "target", "submanifold", "transposed", "generative", "general")
# How a float weight is stored: (K, C_in, C_out), or MLX's own (C_out, K, C_in).
KERNEL_MAJOR, MLX_LAYOUT = LAYOUTS = ("kernel_major", "mlx")

MOST_ROWS = 2**31 - 1  # rows are numbered in int32


def weight_axes(shape: Sequence[int]) -> tuple[str, int, int, int]:
    """Return (layout, K, C_in / groups, C_out) of a weight of a shape.

    Three axes are (K, C_in / groups, C_out); more are MLX's own.
    """
    if len(shape) == 3:
        return KERNEL_MAJOR, *shape
    return MLX_LAYOUT, prod(shape[1:-1]), shape[-1], shape[0]


@dataclass(frozen=True)
class Problem:
    """The facts that routes are chosen by. Holds no arrays, needs no device.

    Channels and rows are the layer's own in every pass: an input gradient has the
    ``c_in`` of its forward.

    Attributes:
        pass_: "forward", "input_grad" or "weight_grad".
        kind: relation kind (see ``Relation``).
        kernel: the kernel spec as text, "3x3x3, stride 2".
        volume: number of kernel offsets, K.
        c_in, c_out: channels of the layer.
        n_in, n_out: rows of the layer's input and output.
        dtype: "float32", "float16" or "bfloat16"; with int8 features that of a float
            result.
        dims: spatial axes.
        groups: channel groups.
        pointwise: whether the kernel is one zero offset that keeps the rows.
        table: whether the relation has a neighbour table.
        edges: number of edges, or None where the relation was made without counting
            them. Plans of a weight gradient always have it.
        bits: 4 or 8 for a packed weight, else None.
        group_size: input channels that share a scale in a packed weight.
        deterministic: whether the same input must give the same bits.
        precision: "float32", or "tf32" where the caller asked for float32 products in
            TF32 (see ``precision``). It changes nothing for other dtypes.
        mirrored: whether the pass reads the table of a relation that is its own mirror
            image as its transpose: offset k there stands for K - 1 - k.
        layout: of the weight: "kernel_major", (K, C_in / groups, C_out), or "mlx",
            (C_out, K, C_in / groups), as modules hold it.
        epilogue: what a forward pass does to its sums, or None.
        integer: where features are int8, what a forward pass does to its int32 sums;
            else None. ``bits`` is then that of an integer weight.
        moments: whether a forward pass may sum the statistics of what it writes, which
            a norm after it wants.
    """

    pass_: str
    kind: str
    kernel: str
    volume: int
    c_in: int
    c_out: int
    n_in: int
    n_out: int
    dtype: str = "float32"
    dims: int = 3
    groups: int = 1
    pointwise: bool = False
    table: bool = True
    edges: int | None = None
    bits: int | None = None
    group_size: int | None = None
    deterministic: bool = True
    mirrored: bool = False
    layout: str = KERNEL_MAJOR
    precision: str = FLOAT32
    epilogue: EpilogueFacts | None = None
    integer: IntegerFacts | None = None
    moments: bool = False

    def __post_init__(self):
        one_of(self.pass_, PASSES, "pass")
        one_of(self.kind, KINDS, "kind")
        one_of(self.layout, LAYOUTS, "layout")
        one_of(self.precision, PRECISIONS, "precision")
        if self.dtype not in DTYPES:
            dtype_name(self.dtype)  # raises
        if {*map(type, (self.c_in, self.c_out, self.n_in, self.n_out))} != {int}:
            for name in ("c_in", "c_out", "n_in", "n_out"):
                object.__setattr__(self, name, whole(getattr(self, name), name))
        if type(self.groups) is not int or self.groups < 1:
            object.__setattr__(self, "groups", whole(self.groups, "groups", 1))
        for name, channels in (("c_in", self.c_in), ("c_out", self.c_out)):
            if channels < 1 or channels % self.groups:
                raise ValueError(
                    f"{name} must be a positive multiple of groups = {self.groups}; "
                    f"got {channels}"
                )
        self._check_rows()

    def _check_rows(self) -> None:
        for name, rows in (("n_in", self.n_in), ("n_out", self.n_out)):
            if not 0 <= rows <= MOST_ROWS:
                raise ValueError(
                    f"{name} must be 0 to {MOST_ROWS}, since rows are numbered in "
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
        **facts,
    ) -> Problem:
        """Describe a forward pass; ``n_out`` is ``n_in`` where it is left out.

        The kind is "submanifold" where it is left out and the rows are kept; with a
        stride, or with other rows, it is "forward".

        Raises:
            ValueError: a fact is out of its range, or there is no such kind.
        """
        dims = dims if isinstance(kernel_size, int) else len(kernel_size)
        spec = KernelSpec.of(dims, kernel_size=kernel_size, stride=stride)
        n_out = n_in if n_out is None else n_out
        has_stride = set(spec.stride) != {1}
        if kind is None:
            kind = "forward" if has_stride or n_in != n_out else "submanifold"
        if kind == "submanifold" and has_stride:
            raise ValueError(
                "a submanifold convolution keeps its rows, so its stride is 1; got "
                f'{stride}. Kind "forward" takes others'
            )
        if kind == "submanifold" and n_in != n_out:
            raise ValueError(
                "a submanifold convolution keeps its rows, so n_out is n_in; got "
                f'{n_in} -> {n_out}. Kind "forward" has other rows'
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
    def input_grad(cls, **facts) -> Problem:
        """Describe the input gradient of the layer that ``forward`` describes."""
        layer = cls.forward(**facts)
        # A centred box on the rows themselves is its own mirror image where it is odd.
        mirrored = layer.kind == "submanifold" and layer.volume % 2 == 1
        return replace(layer, pass_=INPUT_GRAD, mirrored=mirrored)

    @classmethod
    def weight_grad(cls, **facts) -> Problem:
        """Describe the weight gradient of the layer that ``forward`` describes."""
        return replace(cls.forward(**facts), pass_=WEIGHT_GRAD)

    @classmethod
    def linear(
        cls,
        rows: int,
        c_in: int,
        c_out: int,
        dtype: str,
        bits: int | None = None,
        group_size: int | None = None,
    ) -> Problem:
        """Describe a layer of rows alone, without coordinates."""
        return cls(
            pass_=FORWARD,
            kind="submanifold",
            kernel="1x1x1",
            volume=1,
            c_in=c_in,
            c_out=c_out,
            n_in=rows,
            n_out=rows,
            dtype=dtype,
            pointwise=True,
            bits=bits,
            group_size=group_size,
        )

    @classmethod
    def of(
        cls,
        pass_: str,
        relation,
        c_in: int,
        c_out: int,
        dtype: mx.Dtype,
        groups: int = 1,
        **facts: object,
    ) -> Problem:
        """Describe a pass of a layer over its (untransposed) relation.

        Args:
            pass_: the pass.
            relation: the layer's.
            c_in, c_out: channels.
            dtype: of the features.
            groups: channel groups.
            **facts: others by name.
        """
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

    def known_edges(self, relation=None) -> int | None:
        """Return the edges: of a pointwise layer one a row; None where nobody counted.

        relation: the layer's, whose edges are taken where the problem has none.
        """
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

    Attributes:
        there: those of ``ARRAYS`` that there are, in that order; always ``scale``.
        activation: what it is called, see ``activations``; "" is none.
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

    MLX's CUDA backend keeps arrays of up to 8 bytes in host memory (``scalar_pool_`` of
    its allocator), where every read of a kernel goes over the bus. This one is a view
    of the first of several numbers. It moves to the host when it is read there.
    """
    return mx.pad(scalar, (0, WHOLE - 1))[:1]


def to_int8(x: mx.array, inverse: mx.array) -> mx.array:
    """Return ``clip(round(x * inverse), -127, 127)`` as int8, halves to even."""
    levels = mx.round(x.astype(mx.float32) * inverse)
    return mx.clip(levels, -MOST, MOST).astype(mx.int8)
