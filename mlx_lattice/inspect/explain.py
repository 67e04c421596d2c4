"""explain(): which route a convolution takes, why, and what it must cost.

cost(): operations, bytes and a device's roofline. explain_attention(): whether MLX's
fused kernel computes attention, and why not. verify(): each contraction again on an
independent route, compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import Any

import mlx.core as mx
from mlx.nn import Module

from .. import devices, registry
from ..backends import portable_only
from ..backends.cuda.tiles import ONE, THREE
from ..devices import CPU, CUDA, Device
from ..epilogue import finished
from ..ops import convolution
from ..ops.attention_calls import COMPOSED, Attended, Call, attention_observers
from ..problem import FORWARD, INPUT_GRAD, MLX_LAYOUT, PASSES, WEIGHT_GRAD, Problem
from ..relation import Relation
from ..routes import launch
from ..routes.choice import Choice
from ..routes.launch import Launch
from ..routes.selection import relative_error, select
from ..routes.table import FLOOR, named
from ..tensor import SparseTensor

# float32 products on tensor cores: share of the rate for half precision.
TF32_SHARE = {ONE: 1 / 2, THREE: 1 / 6}
# int8 products on matrix units: factor over the rate for half precision. Others
# measured 1.8 on an A19 and 2.0 on M5 Max.
INTEGERS = 2.0

# Three digits round up to 1000 from here, and would print as 1e+03.
ROUNDED_UP = 999.5


@dataclass(frozen=True)
class Cost:
    """Count the work of one contraction, and the least time that a device needs.

    Fields that depend on the number of edges are None until the edges are counted.
    """

    device: str  # name of the profile
    edges: int | None
    useful_flops: int | None  # two for each edge, channel in of a group and channel out
    done_over_useful: float | None  # operations that the plan executes over useful ones
    # Each input row, weight and table entry once, each output once.
    bytes_moved: int | None
    explicit_bytes: int | None  # of explicit GEMM, with the gathered rows
    edges_per_row: float | None  # of an output row, on average
    occupancy: float | None  # edges over output rows times offsets
    compute_ms: float | None  # useful operations at the device's peak rate
    memory_ms: float | None  # bytes at its memory rate
    estimated: bool  # whether rates are public figures, not measured ones

    @property
    def roofline_ms(self) -> float | None:
        """The larger of compute and memory time."""
        if self.compute_ms is None or self.memory_ms is None:
            return None
        return max(self.compute_ms, self.memory_ms)

    @property
    def bound(self) -> str | None:
        """The bound of the roofline: "compute" or "memory"."""
        if self.roofline_ms is None:
            return None
        return "compute" if self.compute_ms > self.memory_ms else "memory"

    def as_dict(self) -> dict[str, Any]:
        """Return every field, and the roofline with its bound."""
        derived = {"roofline_ms": self.roofline_ms, "bound": self.bound}
        return asdict(self) | derived

    def __str__(self) -> str:
        """Return the cost in one line, as ``explain`` prints it."""
        if self.edges is None:
            moved = f"; {size(self.bytes_moved)} must move" if self.bytes_moved else ""
            return f"edges are not counted, so operations are not known{moved}"
        done = self.done_over_useful
        times = "" if done is None else f", x {done:.2f} done"
        note = " (estimated)" if self.estimated else ""
        return (
            f"{operations(self.useful_flops)} useful{times}; "
            f"{size(self.bytes_moved)} must move (explicit GEMM: "
            f"{size(self.explicit_bytes)}); roofline {milliseconds(self.roofline_ms)}, "
            f"{self.bound}-bound{note}"
        )


def cost(
    problem: Problem,
    device: Device,
    *,
    choice: Choice | None = None,
    relation: Relation | None = None,
) -> Cost:
    """Count what a problem costs on a device.

    Operations that the plan executes take a ``choice``. If the problem has no number of
    edges, those of the layer's (untransposed) ``relation`` are counted.
    """
    p = problem
    edges = p.known_edges(relation)
    moved = _bytes(p, edges)
    if moved is not None and choice and choice.plan.expanded > 1:
        moved += 2 * choice.plan.problem.dense_weight_bytes  # written and read
    if edges is None:
        return Cost(
            device.name,
            *(None, None, None, moved),
            *(None, None, None, None),
            None if moved is None else 1e3 * moved / (1e9 * device.bandwidth),
            device.estimated,
        )
    useful = p.useful(edges)
    flops = 2 * useful
    done = choice.plan.multiply_adds(relation) if choice and edges else None
    channels = {FORWARD: p.c_in, INPUT_GRAD: p.c_out, WEIGHT_GRAD: p.c_in + p.c_out}
    gathered = 0 if p.pointwise else 2 * edges * channels[p.pass_] * p.read_size
    places = p.n_out * p.volume
    return Cost(
        device=device.name,
        edges=edges,
        useful_flops=flops,
        done_over_useful=None if done is None or not useful else done / useful,
        bytes_moved=moved,
        explicit_bytes=moved + gathered,
        edges_per_row=edges / p.n_out if p.n_out else 0.0,
        occupancy=edges / places if places else 0.0,
        compute_ms=1e3 * flops / _peak(p, choice, device),
        memory_ms=1e3 * moved / (1e9 * device.bandwidth),
        estimated=device.estimated,
    )


def _bytes(p: Problem, edges: int | None) -> int | None:
    """Each input row, weight and table entry once, and each output once."""
    read, written = p.row_bytes
    rows = p.n_in * read + p.n_out * written
    if p.epilogue and "residual" in p.epilogue.there:
        rows += p.n_out * p.c_out * p.itemsize
    weight = p.weight_bytes
    if p.pointwise:
        return rows + weight
    if p.table:
        out = p.n_in if p.pass_ == INPUT_GRAD else p.n_out
        return rows + weight + 4 * out * p.volume
    return None if edges is None else rows + weight + 12 * edges


def _peak(p: Problem, choice: Choice | None, device: Device) -> float:
    """Return the peak operations a second of the units that multiply."""
    rate, matrices = device.flops(p.dtype), 1e12 * device.half_tflops
    if p.integer:
        has_units = device.backend == CUDA or device.neural_accelerators
        return max(rate, INTEGERS * matrices) if has_units else rate
    products = choice.plan.products if choice and device.backend == CUDA else ""
    return max(rate, matrices * TF32_SHARE.get(products, 0))


def operations(flops: float) -> str:
    """Return operations as people read them: "69.0 GFLOP"."""
    return _scaled(flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def size(count: float) -> str:
    """Return bytes as people read them: "2.24 GB"."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def milliseconds(ms: float) -> str:
    """Return a time as people read it: "3.70 ms", "12.0 us"."""
    if ms and ms < 0.1:
        return f"{1e3 * ms:.3g} us"
    return f"{ms:,.0f} ms" if ms >= ROUNDED_UP else f"{ms:.3g} ms"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    at = 0
    while value >= ROUNDED_UP and at < len(units) - 1:
        value, at = value / 1000, at + 1
    return f"{value:.3g} {units[at]}"


# The function of a layer, by the kind of its relation.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "submanifold": convolution.subm_conv,
    "forward": convolution.conv,
    "target": convolution.conv,
    "transposed": convolution.conv_transpose,
    "generative": convolution.generative_conv_transpose,
}


@dataclass(frozen=True)
class Explanation:
    """Say why one contraction takes its route. Prints as a table."""

    problem: Problem
    choice: Choice  # what the call executes
    cost: Cost
    layer: str | None = None
    rounding_error: float | None = None  # of a calibrated integer layer

    @property
    def facts(self) -> Problem:
        """The problem with its edges counted."""
        return replace(self.problem, edges=self.cost.edges)

    def __str__(self) -> str:
        """Return the table: facts, route, view, cost, rows refused, rows below."""
        of = f" of {self.layer}" if self.layer else ""
        head = f"{self.problem.pass_}{of}: {self.facts}, on {self.choice.device.name}"
        rows = [("route", self._route()), ("reads", self.choice.view)]
        rows.append(("cost", str(self.cost)))
        if self.problem.bits:
            rows.append(("weight", self._weight()))
        if self.rounding_error is not None:
            error = f"{self.rounding_error:.2%} of the output"
            rows.append(("rounding", f"{error}, when it was calibrated"))
        if reason := self.choice.precision:
            rows.append(("products", reason))
        rows += self._listed("refused", self.choice.rejected)
        rows += self._listed("below", self.choice.below)
        return "\n".join([head, *(f"  {name:<8} {text}" for name, text in rows)])

    __repr__ = __str__

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as ``Trace.to_json`` writes it."""
        choice, facts = self.choice, self.facts
        return {
            "layer": self.layer,
            "pass": self.problem.pass_,
            "route": choice.route.name,
            "idea": choice.route.idea,
            "parameters": dict(choice.parameters),
            "plan": choice.plan.facts(),
            "view": choice.view,
            "precision": choice.precision,
            "forced": choice.forced,
            "measured": [{"route": r, "milliseconds": t} for r, t in choice.measured],
            "rejected": [{"route": r, "reason": why} for r, why in choice.rejected],
            "below": [{"route": r, "reason": why} for r, why in choice.below],
            "problem": asdict(facts) | {"summary": str(facts)},
            "cost": self.cost.as_dict(),
            "rounding_error": self.rounding_error,
        }

    def _weight(self) -> str:
        p = self.problem
        packed, dense = p.weight_bytes, p.dense_weight_bytes
        saved = f"saves {1 - packed / dense:.0%}" if packed < dense else "saves nothing"
        groups = f" in groups of {p.group_size}" if p.group_size else ""
        return (
            f"int{p.bits}{groups}: {size(packed)} for {size(dense)} of {p.dtype}, "
            f"{saved}"
        )

    def _route(self) -> str:
        choice = self.choice
        if choice.forced:
            return f"{choice}: forced"
        if choice.measured:
            ms = choice.measured[0][1]
            return f"{choice}: measured, {ms:.3g} ms, {choice.route.idea}"
        return f"{choice}: {choice.route.idea}"

    def _listed(self, name: str, rows) -> list[tuple[str, str]]:
        labels = (name, *[""] * len(rows))
        return [
            (label, f"{route:<21} {reason}")
            for label, (route, reason) in zip(labels, rows, strict=False)
        ]


def explain(
    x: SparseTensor | Problem,
    module_or_weight: Any = None,
    *,
    device: str | Device | None = None,
    pass_: str = FORWARD,
    only: str | None = None,
    kind: str = "submanifold",
    **conv_arguments: Any,
) -> Explanation:
    """Explain which route a convolution takes. Executes no contraction.

    The relation is built and its edges are counted, as in the call itself. Inside
    ``ml.tune()`` an unknown key is measured. A matrix kernel that is new to this
    machine proves itself (see ``ml.proof``).

    Args:
        x: the input, or only a ``Problem``, which needs no device.
        module_or_weight: a convolution module, or a weight in a layout of ``ops``.
        device: a device profile or its name; by default the device that MLX runs on.
        pass_: "forward", "input_grad" or "weight_grad".
        only: the name of a route to force.
        kind: for a weight, "submanifold", "forward", "target" (with ``coordinates``),
            "transposed" or "generative".
        **conv_arguments: arguments of the function in ``ops``, or of the module's call.

    Raises:
        RouteError: a forced route cannot run.
        ValueError: the arguments do not fit, or the module does not run exactly one
            convolution.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> found = ml.explain(x, nn.SubmConv3d(8, 16, 3), device="m4-max")
        >>> found.choice.route.name  # print(found) shows why others were refused
        'vec4'
    """
    if pass_ not in PASSES:
        raise ValueError(f"pass_ must be one of {PASSES}; got {pass_!r}")
    device = None if device is None else devices.profile(device)
    if isinstance(x, Problem):
        if module_or_weight is not None or conv_arguments:
            raise ValueError("a Problem is explained alone; leave the rest out")
        problem = x if pass_ == FORWARD else replace(x, pass_=pass_)
        choice = select(problem, device=device, only=only)
        counts = cost(problem, choice.device, choice=choice)
        return Explanation(problem, choice, counts)
    if not isinstance(x, SparseTensor):
        raise TypeError(
            "explain takes a SparseTensor or a Problem first, as ml.explain(x, layer); "
            f"got {type(x).__name__}"
        )
    call, name = _call(x, module_or_weight, kind, conv_arguments)
    seen = _plan(x, call, pass_, device, only)
    if len(seen) != 1:
        raise ValueError(
            f"{name or 'the call'} runs {len(seen)} {pass_} contractions; explain one "
            "convolution at a time, or record a whole net: "
            "with ml.trace(net) as t: net(x)"
        )
    (launched,) = seen
    problem, choice = launched.problem, launched.choice
    counts = cost(problem, choice.device, choice=choice, relation=launched.relation)
    error = getattr(launched.scope, "rounding_error", None)
    return Explanation(problem, choice, counts, name, error)


def _call(x: SparseTensor, module_or_weight, kind: str, arguments: dict):
    if module_or_weight is None:
        raise ValueError("explain needs a module or a weight beside the tensor")
    if callable(module_or_weight):
        name = type(module_or_weight).__name__
        return (lambda x: module_or_weight(x, **arguments)), name
    if kind not in FUNCTIONS:
        raise ValueError(f"kind must be one of {tuple(FUNCTIONS)}; got {kind!r}")
    if kind == "target" and arguments.get("coordinates") is None:
        raise ValueError('kind "target" needs coordinates=, the rows to compute')

    def call(x):
        return FUNCTIONS[kind](x, module_or_weight, **arguments)

    return call, None


def _plan(x: SparseTensor, call, pass_: str, device, only) -> list[Launch]:
    seen: list[Launch] = []

    def keep(launched: Launch) -> None:
        if launched.problem.pass_ == pass_:
            seen.append(launched)

    # `only` applies to the pass that is explained: its route may lack others.
    def features(feats: mx.array) -> mx.array:
        return call(x.replace(feats)).feats

    with launch.planned(keep, device, {pass_: only} if only else {}):
        if pass_ == FORWARD:
            call(x)
        else:
            y = mx.zeros(features(x.feats).shape, dtype=x.dtype)
            mx.vjp(features, [x.feats], [y])
    return seen


@dataclass(frozen=True)
class AttentionForm:
    """``count`` calls of attention of one form; MLX's fused kernel may take them."""

    count: int
    call: Call
    fused: bool

    def __str__(self) -> str:
        """Return it in one line."""
        c, form = self.call, "fused" if self.fused else "composed by MLX"
        calls = "1 call" if self.count == 1 else f"{self.count} calls"
        groups = "1 group" if c.groups == 1 else f"{c.groups} groups"
        return (
            f"{calls} of {groups}, {c.heads} heads of {c.channels}, "
            f"{c.queries:,} queries, {c.keys:,} keys: {form}"
        )


@dataclass(frozen=True)
class AttentionExplanation:
    """Show how a device computes the attention of a layer. Prints as lines.

    ``attended`` has the calls of attention, in order. ``forms`` has, for each call, the
    forms of MLX's attention that compute it; none if another kernel does.
    """

    device: Device
    attended: tuple[Attended, ...]
    forms: tuple[tuple[AttentionForm, ...], ...]

    def __str__(self) -> str:
        """Return a line for each attention, and one for each form of its calls."""
        lines = []
        for attended, forms in zip(self.attended, self.forms, strict=True):
            head = f"{attended.rule} attention on {self.device.name}"
            if forms:
                lines.append(f"{head}, {attended.padding:.3g} times the useful pairs")
                lines += [f"  {form}" for form in forms]
            elif attended.kernel == COMPOSED:
                lines.append(f"{head}: two products and a softmax, with biased scores")
            else:
                lines.append(f"{head}: the CPU's kernel")
        return "\n".join(lines)


def explain_attention(
    x: SparseTensor, layer: object, *, device: str | Device | None = None
) -> AttentionExplanation:
    """Explain whether MLX's fused kernel computes a layer's attention.

    Args:
        x: the input.
        layer: a layer, or a function of ``x``, that attends among its rows.
        device: a device profile or its name; by default the device that MLX runs on.

    Raises:
        ValueError: the layer calls no attention.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> layer = nn.SparseAttention(8, num_heads=2)
        >>> print(ml.explain_attention(x, layer, device="cpu"))
        full attention on cpu: the CPU's kernel
    """
    device = devices.current() if device is None else devices.profile(device)
    seen: list[Attended] = []
    by_mlx = device.backend != CPU or registry.serving() != CPU
    with (
        attention_observers.observe(seen.append),
        launch.planned(lambda launched: None, device),
        portable_only() if by_mlx else nullcontext(),
    ):
        layer(x)
    if not seen:
        raise ValueError(
            "the layer attends to nothing; ml.explain explains a convolution, and "
            "ml.trace(model) a whole net"
        )
    forms = tuple(
        tuple(
            AttentionForm(n, call, call.fused_on(device)) for n, call in attended.forms
        )
        for attended in seen
    )
    attended = tuple(replace(each, scope=None) for each in seen)
    return AttentionExplanation(device, attended, forms)


class LayerNames:
    """Names of layers: paths in a model, else classes with an index."""

    def __init__(self, model: object = None):
        self._names: dict[int, tuple[object, str]] = {}
        self._seen: Counter[str] = Counter()
        if model is not None and not hasattr(model, "named_modules"):
            raise TypeError(f"the model must be a net; got {type(model).__name__}")
        for path, module in model.named_modules() if model is not None else ():
            name = path or type(module).__name__
            self._names.setdefault(id(module), (module, name))

    def of(self, layer: object) -> str:
        """Return the path of a layer, else its class and an index, else "call"."""
        if layer is None or isinstance(layer, str):
            return layer or "call"
        if id(layer) not in self._names:
            kind = type(layer).__name__
            # The layer is kept alive: the id of a freed one could be used again.
            self._names[id(layer)] = layer, f"{kind} {self._seen[kind]}"
            self._seen[kind] += 1
        return self._names[id(layer)][1]


class VerificationError(ArithmeticError):
    """Raised if a route's result differs from that of an independent route.

    ``error`` is relative to the norm of the output; it is largest in ``row``.
    """

    def __init__(self, message: str, layer: object, route: str, error: float, row: int):
        super().__init__(message)
        self.layer: object = layer
        self.route: str = route
        self.error: float = error
        self.row: int = row


def verify(
    tolerance: float | None = None, model: Module | None = None
) -> AbstractContextManager[None]:
    """Check every contraction in the block against an independent route, at once.

    The reference is the floor route, another route if the floor route was chosen, or
    plain arithmetic over the edges. Results are evaluated, so the block cannot hold
    ``mx.compile`` or ``mx.vmap``. Values that are finite in neither result count as
    equal.

    Args:
        tolerance: the greatest error relative to the norm of the output; by default
            1e-5 for float32, 2e-3 for float32 in TF32 products, 2e-3 for float16 and
            1.6e-2 for bfloat16.
        model: a net whose ``named_modules`` give layers their paths.

    Raises:
        VerificationError: an error is above the tolerance. It names the layer, the
            route and the worst row.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> with ml.verify():  # raises if two routes disagree
        ...     y = nn.SubmConv3d(8, 16, 3)(x)
        >>> y.shape
        (64, 16)
    """
    if tolerance is not None and not isinstance(tolerance, Real):
        raise TypeError(
            f"the tolerance must be a number; got {type(tolerance).__name__}. Call the "
            "net inside the block: with ml.verify(model=net): net(x)"
        )
    return _verify(tolerance, LayerNames(model))


@contextmanager
def _verify(tolerance: float | None, names: LayerNames) -> Iterator[None]:

    def check(launched: Launch) -> None:
        p, route = launched.problem, launched.choice.route.name
        try:
            mx.eval(launched.result)
        except ValueError as error:
            raise RuntimeError(
                "ml.verify evaluates every result, which mx.compile and mx.vmap do not "
                "allow; call the function without them"
            ) from error
        reference, name = _reference(launched)
        error, row = relative_error(launched.result, reference)
        most = launched.choice.plan.tolerance if tolerance is None else tolerance
        if error <= most:
            return
        layer = names.of(launched.scope)
        raise VerificationError(
            f"{p.pass_} of {layer} on route {route} is off {name} by {error:.2e} "
            f"(tolerance {most:.1e}), worst in row {row}: {p}",
            layer,
            route,
            error,
            row,
        )

    with launch.observe(check):
        yield


def _reference(launched: Launch) -> tuple[mx.array, str]:
    """Return the result of a route other than the chosen one, and its name."""
    chosen = launched.choice.route.name
    for name in (FLOOR, "explicit_gemm", "grouped_gemm"):
        able = named(name).refusal(
            launched.problem, launched.choice.device, forced=True
        )
        if name != chosen and able is None:
            return launched.repeat(name), name
    if launched.problem.bits is None and launched.relation is not None:
        return _by_edges(launched), "plain arithmetic over the edges"
    wide = (
        a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a
        for a in (*launched.inputs, *launched.bias)
    )
    problem = replace(launched.problem, dtype="float32")
    floor = named(FLOOR).plan(problem, launched.choice.device)
    return launched.run(floor, *wide), f"{FLOOR} in float32"


def _by_edges(launched: Launch, block: int = 1 << 22) -> mx.array:
    """Return the result by plain arithmetic over the edges, in float32."""
    p, (a, b) = launched.problem, (x.astype(mx.float32) for x in launched.inputs)
    width, is_mlx = p.c_in // p.groups, p.layout == MLX_LAYOUT
    edges, step = launched.relation.edges, max(1, block // (width * p.c_out))

    def forward(x: mx.array, w: mx.array) -> mx.array:
        w = (w.transpose(1, 2, 0) if is_mlx else w).reshape(-1, width, p.groups, each)
        w, x = w.swapaxes(1, 2), x.reshape(-1, p.groups, width, 1)
        y = mx.zeros((p.n_out, p.c_out))
        for start in range(0, len(edges), step):
            i, o, k = edges[start : start + step].T
            y = y.at[o].add((x[i] * w[k]).sum(axis=2).reshape(-1, p.c_out))
        return y

    each = p.c_out // p.groups
    if p.pass_ == INPUT_GRAD:
        y = mx.vjp(lambda x: forward(x, b), [mx.zeros((p.n_in, p.c_in))], [a])[1][0]
    elif p.pass_ == WEIGHT_GRAD:
        axes = p.c_out, p.volume, width
        w = mx.zeros(axes if is_mlx else (*axes[1:], p.c_out))
        y = mx.vjp(lambda w: forward(a, w), [w], [b])[1][0]
    else:
        y = forward(a, b)
    after = p.epilogue
    if after is None:
        y = sum(launched.bias, y)
    else:
        y = finished(y, after, *after.named(launched.bias))
    return y.astype(launched.result.dtype)
