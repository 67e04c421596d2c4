"""The least cost of a contraction: operations, bytes, and a device's roofline."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..backends.cuda.tiles import ONE, THREE
from ..devices import CUDA, Device
from ..problem import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Problem
from ..relation import Relation
from ..routes.choice import Choice

# float32 products on tensor cores: share of the rate for half precision.
TF32_SHARE = {ONE: 1 / 2, THREE: 1 / 6}
# int8 products on matrix units: factor over the rate for half precision. Others
# measured 1.8 on an A19 and 2.0 on M5 Max.
INTEGERS = 2.0

# Three digits round up to 1000 from here, and would print as 1e+03.
ROUNDED_UP = 999.5


@dataclass(frozen=True)
class Cost:
    """Counts of one contraction, and the least time that a device needs for them.

    Fields that depend on the number of edges are None until the edges are counted.

    Attributes:
        device: name of the profile.
        edges: number of edges.
        useful_flops: two operations for each edge, input channel of a group and output
            channel.
        done_over_useful: operations that the plan executes, absent edges and padded
            channels of tiles included, over the useful ones; None without a choice, or
            without a relation if one is needed.
        bytes_moved: bytes if each input row, weight and table entry is read once, and
            each output written once.
        explicit_bytes: the same for explicit GEMM, which also writes and reads the
            gathered rows.
        edges_per_row: edges of an output row, on average.
        occupancy: edges over output rows times offsets.
        compute_ms: useful operations at the device's peak rate.
        memory_ms: ``bytes_moved`` at its memory rate.
        estimated: whether the device's rates are public figures, not measured ones.
    """

    device: str
    edges: int | None
    useful_flops: int | None
    done_over_useful: float | None
    bytes_moved: int | None
    explicit_bytes: int | None
    edges_per_row: float | None
    occupancy: float | None
    compute_ms: float | None
    memory_ms: float | None
    estimated: bool

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

    def as_dict(self) -> dict:
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

    Args:
        problem: the facts, with the number of edges.
        device: the profile of the roofline.
        choice: for the operations that its plan executes.
        relation: the layer's (untransposed) relation. Its edges are counted if the
            problem has none, and its table says what tiles of rows skip.
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
