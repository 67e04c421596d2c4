"""What memory each of MLX's primitives takes: new, shared, or an input's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from . import layouts
from .graph import Layout, Node

# MLX reuses a buffer that is this much larger than what goes into it.
SLACK = 16384
# The extension aligns its results to cache lines.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Source:
    """Where an output's memory comes from.

    Attributes:
        layout: how it lies there.
        nbytes: bytes that are allocated, where ``of`` is None.
        of: which input's buffer it is.
    """

    layout: Layout
    nbytes: int = 0
    of: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """What a primitive takes.

    Attributes:
        outputs: where each output's memory comes from.
        temporaries: bytes of buffers that live until it has run.
        launches: pieces of work that it gives to its stream.
    """

    outputs: tuple[Source, ...]
    temporaries: tuple[int, ...] = ()
    launches: int = 1


@dataclass(frozen=True, slots=True)
class Input:
    """An input as a primitive meets it.

    Attributes:
        node: its shape and type.
        layout: how it lies in its buffer.
        buffer: bytes of that.
        may_go: whether nothing else will read the buffer: MLX may then reuse it.
    """

    node: Node
    layout: Layout
    buffer: int
    may_go: bool

    @property
    def is_scalar(self) -> bool:
        """Whether one element stands for all."""
        return self.layout.span == 1

    def fits(self, out: Node) -> bool:
        """Whether an output may be written over it."""
        return (
            self.may_go
            and self.node.itemsize == out.itemsize
            and self.buffer <= out.nbytes + SLACK
        )


def taken(outputs: Sequence[Node], inputs: Sequence[Input]) -> Taken:
    """Return what a primitive takes for its outputs: the rule of its name."""
    name = outputs[0].primitive
    if name in layouts.VIEWS:
        return _view(outputs, inputs)
    if name.startswith("Compiled"):
        return _compiled(outputs, inputs)
    if name[0].islower():
        return _native(outputs, inputs)
    return _RULES.get(name, _allocate)(outputs, inputs)


def _new(out: Node) -> Source:
    return Source(layouts.fresh(out.shape), out.nbytes)


def _like(out: Node, x: Input) -> Source:
    """Return memory for an output that lies as an input does, broadcasts kept."""
    return Source(x.layout, x.layout.span * out.itemsize)


def _allocate(outputs, inputs) -> Taken:
    return Taken(tuple(map(_new, outputs)))


def _native(outputs, inputs) -> Taken:
    """The extension's, whose names are a route's or an operation's, in small letters.

    Aligned, nothing reused; its working memory is not MLX's.
    """
    return Taken(
        tuple(
            Source(layouts.fresh(out.shape), out.nbytes + ALIGNMENT) for out in outputs
        )
    )


def _view(outputs, inputs) -> Taken:
    sources = []
    for out in outputs:
        layout = layouts.view(out, inputs[0].node, inputs[0].layout)
        sources.append(_new(out) if layout is None else Source(layout, of=0))
    copies = any(source.of is None for source in sources)
    return Taken(tuple(sources), launches=int(copies))


def _last_inputs(outputs, inputs) -> Taken:
    """A custom function's outputs: what its forward pass made, its last inputs."""
    first = len(inputs) - len(outputs)
    return _some_inputs(inputs, range(first, len(inputs)))


def _results(outputs, inputs) -> Taken:
    return _some_inputs(inputs, outputs[0].state)


def _some_inputs(inputs, which: Iterable[int]) -> Taken:
    return Taken(
        tuple(Source(inputs[at].layout, of=at) for at in which),
        launches=0,
    )


def _first_inputs(outputs, inputs) -> Taken:
    return _some_inputs(inputs, range(len(outputs)))


def _contiguous(outputs, inputs) -> Taken:
    (out,), x = outputs, inputs[0]
    if x.buffer <= out.nbytes + SLACK and x.layout.rows:
        return Taken((Source(x.layout, of=0),), launches=0)
    return Taken((_new(out),))


def _copy(outputs, inputs) -> Taken:
    """A copy of the first input, which the rest then writes into."""
    (out,), x = outputs, inputs[0]
    dense = x.layout.dense and (out.primitive == "AsType" or x.layout.rows)
    if not dense or (x.is_scalar and out.size > 1 and out.primitive != "AsType"):
        return Taken((_new(out),), launches=2)
    if x.fits(out):
        return Taken((Source(x.layout, of=0),))
    return Taken((_like(out, x),), launches=2)


def _full(outputs, inputs) -> Taken:
    (out,), x = outputs, inputs[0]
    if x.is_scalar or not x.layout.dense:
        return Taken((_new(out),))
    return _copy(outputs, inputs)


def _unary(outputs, inputs) -> Taken:
    (out,), x = outputs, inputs[0]
    if not x.layout.dense:
        return Taken((_new(out),))
    return Taken((Source(x.layout, of=0) if x.fits(out) else _like(out, x),))


def _binary(outputs, inputs) -> Taken:
    (out,), (a, b) = outputs, inputs
    if a.is_scalar and b.is_scalar:
        return Taken((Source(a.layout, out.itemsize),))
    if a.is_scalar and b.layout.dense:
        candidates = (1,)
    elif b.is_scalar and a.layout.dense:
        candidates = (0,)
    elif (a.layout.rows and b.layout.rows) or (a.layout.columns and b.layout.columns):
        candidates = (0, 1)
    else:
        return Taken((_over(out, inputs),))
    for at in candidates:
        if inputs[at].fits(out):
            return Taken((Source(inputs[at].layout, of=at),))
    return Taken((_like(out, inputs[candidates[0]]),))


def _over(out: Node, inputs) -> Source:
    """Return an input of the output's size, where one may go; else new memory."""
    for at, x in enumerate(inputs):
        if x.layout.rows and x.node.size == out.size and x.fits(out):
            return Source(x.layout, of=at)
    return _new(out)


def _select(outputs, inputs) -> Taken:
    (out,) = outputs
    if all(x.is_scalar for x in inputs):
        return Taken((Source(inputs[1].layout, out.itemsize),))
    rows = all(x.layout.rows for x in inputs)
    if rows or all(x.layout.columns for x in inputs):
        for at, x in enumerate(inputs):
            if x.fits(out):
                return Taken((Source(x.layout, of=at),))
        return Taken((_like(out, inputs[1]),))
    return Taken((_over(out, inputs),))


def _compiled(outputs, inputs) -> Taken:
    """Fused elementwise work: each output over an input that may go, if one is left."""
    read = [x for x in inputs if x.node.shape]
    shape = outputs[0].shape
    whole = all(x.node.shape == shape for x in read) and bool(read)
    dense = whole and (
        all(x.layout.rows for x in read)
        or all(x.layout.columns for x in read)
        or (len(read) == 1 and read[0].layout.dense)
    )
    sources: list[Source] = []
    for at, x in enumerate(inputs):
        if len(sources) == len(outputs):
            break
        out = outputs[len(sources)]
        if not x.node.shape or not x.may_go or x.node.itemsize != out.itemsize:
            continue
        if dense or (x.layout.rows and x.node.size == out.size):
            sources.append(Source(x.layout, of=at))
    for out in outputs[len(sources) :]:
        sources.append(_like(out, read[0]) if dense else _new(out))
    return Taken(tuple(sources))


def _softmax(outputs, inputs) -> Taken:
    """Rows by themselves: over the input where it may go. Norms are one on GPUs."""
    (out,), x = outputs, inputs[0]
    if not (x.layout.dense and x.layout.strides[-1] == 1):
        return Taken((_new(out),), launches=2)
    return Taken((Source(x.layout, of=0) if x.may_go else _like(out, x),))


def _matmul(outputs, inputs) -> Taken:
    (out,) = outputs
    copies = tuple(x.node.nbytes for x in inputs[:2] if not _is_matrix(x))
    return Taken((_new(out),), copies, launches=1 + len(copies))


def _convolution(outputs, inputs) -> Taken:
    """A dense convolution: on the CPU in float32, over an unfolded copy of its input.

    What cuDNN and Metal take beside the result is not known.
    """
    (out,), (x, w) = outputs, inputs[:2]
    grouped = x.node.shape[-1] != w.node.shape[-1]
    if out.on_gpu or (grouped and len(out.shape) > 3):
        return _allocate(outputs, inputs)
    window = w.node.shape[1:-1]
    spatial = zip(x.node.shape[1:-1], window, strict=True)
    padded = prod(n + k - 1 for n, k in spatial) * x.node.shape[-1]
    unfolded = prod(out.shape[:-1]) * prod(window) * x.node.shape[-1]
    copies = [4 * x.node.shape[0] * padded, 4 * unfolded]
    if w.node.itemsize != 4 or not w.layout.rows:
        copies.append(4 * w.node.size)
    if out.itemsize != 4:
        copies.append(4 * out.size)
    return Taken((_new(out),), tuple(copies), launches=1 + len(copies))


def _is_matrix(x: Input) -> bool:
    """Whether a matrix product reads it in place, transposed or not."""
    (*_, m, n), (*_, s, t) = x.node.shape, x.layout.strides
    return (s == n and t == 1) or (s == 1 and t == m)


def _addmm(outputs, inputs) -> Taken:
    rest = _matmul(outputs, inputs)
    return Taken(rest.outputs, rest.temporaries, rest.launches + 1)


def _rows_needed(outputs, inputs) -> Taken:
    """A kernel that reads rows one after the other: what lies otherwise is copied."""
    copies = tuple(x.node.nbytes for x in inputs if not x.layout.rows)
    return Taken(tuple(map(_new, outputs)), copies, launches=1 + len(copies))


_BY_NAME = {
    _unary: """
        Abs ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTanh BitwiseInvert Ceil Conjugate
        Cos Cosh Erf ErfInv Exp Expm1 Floor Imag Log Log10 Log1p Log2 LogicalNot
        Negative Real Round Rsqrt Sigmoid Sign Sin Sinh Sqrt Square Tan Tanh""",
    _binary: """
        Add ArcTan2 BitwiseAnd BitwiseOr BitwiseXor Divide Equal FloorDivide Greater
        GreaterEqual LeftShift Less LessEqual LogAddExp LogicalAnd LogicalOr Maximum
        Minimum Multiply NaNEqual NotEqual Power Remainder RightShift Subtract""",
    _copy: "AsType Scatter ScatterAxis SliceUpdate",
    _rows_needed: "CustomKernel QuantizedMatmul Scan",
    _addmm: "AddMM",
    _contiguous: "Contiguous",
    _convolution: "Convolution",
    _last_inputs: "CustomTransforms",
    _results: "CustomFunction",
    _first_inputs: "Depends",
    _full: "Full",
    _matmul: "Matmul",
    _select: "Select",
    _softmax: "LayerNorm RMSNorm Softmax",
}
_RULES: dict[str, Callable[..., Taken]] = {
    name: rule for rule, names in _BY_NAME.items() for name in names.split()
}
