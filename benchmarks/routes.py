"""Every route that can run, timed beside the one that is chosen.

    python benchmarks/routes.py [--rows N ...] [--routes NAME ...] [--json FILE]
    python benchmarks/routes.py --rows 1 10 100 --channels 32 512 --slower 1.2

Cases are the rows of the route table x scenes x layers x dtypes x passes: a row that
is in the table is benchmarked. Each admissible route is forced and its Plan executed
over a relation whose views are there; ``>`` marks the one that ``select`` chooses.
"done" is the multiply-adds of the plan over useful ones. Routes of a problem are timed
in turn: by the wall, by all threads' processor time with ``--cpu-time``, or on an
NVIDIA GPU with PyTorch by the sum over kernels. ``--channels`` has layers of so many
channels in place of the named ones. ``--slower`` prints only the problems whose chosen
route takes that much longer than the fastest, and how many there are.

With MLX_LATTICE_METAL=host the Metal kernels run on the CPU, with all checks, and their
work is counted instead of timed: "executed" is what matrix operations multiplied,
over useful ones. The chip is then one that has neural accelerators. A few hundred rows
are enough.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import mlx.core as mx
import scenes
from gpu_profiles import gpu_kernels

import mlx_lattice as ml
from mlx_lattice import devices, routes
from mlx_lattice.backends.gpu import nvrtc as cuda_compile
from mlx_lattice.checks import DTYPES
from mlx_lattice.inspect.trace import drawn
from mlx_lattice.problem import (
    FORWARD,
    KERNEL_MAJOR,
    MLX,
    MLX_LAYOUT,
    PASSES,
    WEIGHT_GRAD,
    IntegerFacts,
)
from mlx_lattice.routes.selection import candidates


@dataclass(frozen=True)
class Layer:
    """Channels, groups, (bits, group size) of a packed weight, and int8 features."""

    c_in: int
    c_out: int
    groups: int = 1
    packing: tuple[int, int | None] | None = None
    int8: bool = False


LAYERS = {
    "16": Layer(16, 16),
    "32": Layer(32, 64),
    "64": Layer(64, 64),
    "128": Layer(128, 128),
    "depthwise": Layer(64, 64, 64),
    "int4": Layer(64, 64, packing=(4, 32)),
    "int8": Layer(64, 64, packing=(8, 32)),
    "w8a8": Layer(64, 64, packing=(8, None), int8=True),
    "w4a8": Layer(64, 64, packing=(4, 64), int8=True),
}
INT8 = IntegerFacts()  # the sums' own scale, and a float result
# Voxels, the manager's method and its arguments, and the layers over it.
SUBMANIFOLD = "submanifold_kernel_relation"
SCENES = {
    "surface": (scenes.surface, SUBMANIFOLD, {"kernel_size": 3}, tuple(LAYERS)),
    "scattered": (
        scenes.scattered,
        SUBMANIFOLD,
        {"kernel_size": 3},
        ("64", "depthwise", "int4"),
    ),
    "strided": (
        scenes.surface,
        "kernel_relation",
        {"kernel_size": 2, "stride": 2},
        ("32", "int4"),
    ),
    "pointwise": (
        scenes.surface,
        SUBMANIFOLD,
        {"kernel_size": 1},
        ("16", "64", "int4"),
    ),
}


@dataclass(frozen=True)
class Case:
    """One route of one problem; ``chosen`` is the route that a layer takes."""

    device: str
    scene: str
    rows: int
    edges: int
    pass_: str
    dtype: str
    c_in: int
    c_out: int
    groups: int
    packing: tuple[int, int | None] | None
    int8: bool
    route: str
    chosen: str
    plan: str
    view: str
    done: float | None
    ms: float | None = None
    executed: float | None = None
    device_bytes: int | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of its row in the table."""
        numbers = (self.ms, ".4g"), (self.done, ".2f"), (self.executed, ".2f")
        moved = None if self.device_bytes is None else self.device_bytes / 1e6
        numbers = (*numbers, (moved, ".2f"))
        return (
            ">" if self.route == self.chosen else "",
            self.route,
            *("" if n is None else format(n, form) for n, form in numbers),
            self.view,
            self.plan,
        )


COLUMNS = (
    ("", "left"),
    ("route", "left"),
    ("ms", "right"),
    ("done", "right"),
    ("executed", "right"),
    ("MB", "right"),
    ("view", "left"),
    ("plan", "left"),
)


@cache
def relation_of(scene: str, rows: int) -> ml.Relation:
    """The relation of a scene, made once."""
    voxels, method, arguments, _ = SCENES[scene]
    manager = ml.CoordinateManager()
    key = manager.insert(mx.array(voxels(rows)))
    relation = getattr(manager, method)(key, **arguments)
    mx.eval(relation.edges)  # they are counted for every case
    return relation


def random(dtype: str, *shape: int) -> mx.array:
    """Normal values, the same for the same shape."""
    return mx.random.normal(shape, key=mx.random.key(0)).astype(DTYPES[dtype])


def operands(
    pass_: str, relation: ml.Relation, layer: Layer, dtype: str, layout: str
) -> tuple:
    """The arguments of a plan: a relation, and arrays or a packed weight."""
    c_in, c_out, groups, packing, int8 = astuple(layer)
    x, dy = random(dtype, relation.n_in, c_in), random(dtype, relation.n_out, c_out)
    if pass_ == WEIGHT_GRAD:
        return relation, x, dy
    w = random(dtype, relation.volume, c_in // groups, c_out)
    if int8:
        w = ml.integer_weight(w, bits=packing[0], group_size=packing[1])
        x = mx.clip(mx.round(x * 30), -127, 127).astype(mx.int8)
        return relation, x, w, *INT8.named([w.scale / 30])
    if packing:
        w = ml.quantize_weight(w, bits=packing[0], group_size=packing[1])
    elif layout == MLX_LAYOUT:
        w = mx.contiguous(w.transpose(2, 0, 1))
    return (relation, x, w) if pass_ == FORWARD else (relation.T, dy, w)


def whole(plan: Callable[..., mx.array], given: tuple) -> mx.array:
    """Return what a plan makes, in the order of memory that its reader takes."""
    return mx.contiguous(plan(*given))


def milliseconds(
    calls: Sequence[Callable[[], mx.array]], budget: float, cpu_time: bool
) -> list[float]:
    """Median ms of each call, of five times that take ``budget`` together, in turn.

    One that takes thrice as long as another at first is timed once.
    """
    clock = time.process_time if cpu_time else time.perf_counter

    def time_of(call: Callable[[], mx.array], count: int) -> float:
        mx.synchronize()
        begin = clock()
        mx.eval([call() for _ in range(count)])
        mx.synchronize()
        return (clock() - begin) * 1e3 / count

    for call in calls:
        time_of(call, 1)  # builds views and kernels
    by_kernels = [kernels_ms(call) for call in calls]
    if None not in by_kernels:
        return by_kernels
    once = [min(time_of(call, 1) for _ in range(3)) for call in calls]
    near = [at for at, ms in enumerate(once) if ms <= max(3 * min(once), 0.05)]
    times: dict[int, list[float]] = {at: [] for at in near}
    for _ in range(5):
        for at, found in times.items():
            count = max(1, min(20, int(budget / 5 / max(once[at], 1e-3))))
            found.append(time_of(calls[at], count))
    return [
        statistics.median(times[at]) if at in times and once[at] <= budget else ms
        for at, ms in enumerate(once)
    ]


def kernels_ms(call: Callable[[], mx.array], count: int = 5) -> float | None:
    """Ms of a call's kernels on an NVIDIA GPU, by PyTorch's profiler; else None."""

    def several() -> None:
        for _ in range(count):
            mx.eval(call())

    kernels = gpu_kernels(several)
    return sum(ms for _, ms in kernels.values()) / count if kernels else None


def counted(call: Callable[[], mx.array], useful: int) -> dict:
    """Counts of the Metal kernels of a call, on metal/host."""
    from metal import host

    host.run(call)  # builds views
    report = host.run(call)[1]
    report.raise_faults()
    counts = report.counts
    return {
        "executed": counts.matrix_flop / 2 / useful if counts.matrix_flop else None,
        "device_bytes": counts.device_read_bytes + counts.device_written_bytes,
    }


def current() -> devices.Device:
    """The profile that MLX runs on; for metal/host, with neural accelerators."""
    device = devices.current()
    on_host = devices.metal_on_host()
    return replace(device, neural_accelerators=True) if on_host else device


def problems(options: argparse.Namespace) -> Iterator[tuple]:
    """Yield (rows, scene, layer, dtype, pass) of everything that is asked for."""
    for rows, scene in product(options.rows, options.scenes):
        layers = [LAYERS[name] for name in SCENES[scene][-1] if name in options.layers]
        if options.channels:
            layers = [Layer(channels, channels) for channels in options.channels]
        for layer, dtype, pass_ in product(layers, options.dtypes, options.passes):
            if pass_ == FORWARD or not layer.packing:
                yield rows, scene, layer, dtype, pass_


def planned(
    options: argparse.Namespace,
) -> Iterator[tuple[ml.Problem, ml.Choice, int, list]]:
    """Yield a problem, its Choice, its useful work, and (case, call) of each route."""
    device, on_host = current(), devices.metal_on_host()
    for rows, scene, layer, dtype, pass_ in problems(options):
        relation = relation_of(scene, rows)
        bits, size = layer.packing or (None, None)
        layout = KERNEL_MAJOR if options.kernel_major or layer.packing else MLX_LAYOUT
        given = operands(pass_, relation, layer, dtype, layout)
        problem = ml.Problem.of(
            pass_,
            relation,
            layer.c_in,
            layer.c_out,
            DTYPES[dtype],
            layer.groups,
            table=given[0].has_table,
            bits=bits,
            group_size=size,
            integer=INT8 if layer.int8 else None,
            layout=layout,
        )
        useful = problem.useful(relation.n_edges)
        choice, found = routes.select(problem, device=device), []
        for route in candidates(replace(problem, deterministic=False), device):
            plan = route.plan(problem, device)
            # With metal/host, MLX operations would be those of the CPU.
            if route.name not in options.routes or (on_host and plan.backend == MLX):
                continue
            done = plan.multiply_adds(relation)
            case = Case(
                device.name,
                scene,
                relation.n_out,
                relation.n_edges,
                pass_,
                dtype,
                *astuple(layer),
                route.name,
                choice.route.name,
                str(plan),
                plan.view,
                None if done is None else done / useful,
            )
            found.append((case, partial(whole, plan, given)))
        if found:
            yield problem, choice, useful, found


def cases(options: argparse.Namespace) -> Iterator[tuple[ml.Problem, ml.Choice, list]]:
    """Yield a problem, its Choice, and the cases of every route that can run it."""
    if cuda_compile.compiles():  # side by side
        with cuda_compile.rehearsal():
            mx.eval([call() for *_, found in planned(options) for _, call in found])
        cuda_compile.finish()
    for problem, choice, useful, found in planned(options):
        calls = [call for _, call in found]
        if devices.metal_on_host():
            more = [counted(call, useful) for call in calls]
        else:
            times = milliseconds(calls, options.budget, options.cpu_time)
            more = [{"ms": ms} for ms in times]
        rows = [
            replace(case, **each) for (case, _), each in zip(found, more, strict=True)
        ]
        yield problem, choice, rows


def behind(rows: Sequence[Case]) -> float:
    """Return the time of the chosen route over the fastest's; 1 where it is unknown."""
    chosen = [row.ms for row in rows if row.route == row.chosen and row.ms]
    return chosen[0] / min(row.ms for row in rows) if chosen else 1.0


def shown(problem: ml.Problem, choice: ml.Choice, rows: Sequence[Case]) -> str:
    """A problem's routes as a table; columns that say nothing are left out."""
    cells = [row.cells for row in rows]
    kept = [at for at, *_ in enumerate(COLUMNS) if any(row[at] for row in cells)]
    table = drawn([COLUMNS[a] for a in kept], [[row[a] for a in kept] for row in cells])
    head = f"{problem.pass_} of {problem}, on {choice.device.name}: {choice}"
    return f"{head}\n{table}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table a problem; write a JSON line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[5000], help="voxels of a scene"
    )
    parser.add_argument("--channels", type=int, nargs="+", help="in place of --layers")
    parser.add_argument(
        "--slower", type=float, help="print only what is that far behind"
    )
    parser.add_argument("--cpu-time", action="store_true", help="of all threads")
    parser.add_argument(
        "--kernel-major", action="store_true", help="weights of (K, C_in, C_out)"
    )
    parser.add_argument(
        "--routes",
        nargs="+",
        default=routes.NAMES,
        metavar="NAME",
        choices=routes.NAMES,
    )
    for name, every, default in (
        ("passes", PASSES, PASSES),
        ("scenes", SCENES, tuple(SCENES)),
        ("layers", LAYERS, tuple(LAYERS)),
        ("dtypes", DTYPES, ("float32", "float16")),
    ):
        parser.add_argument(f"--{name}", nargs="+", default=default, choices=every)
    parser.add_argument("--budget", type=float, default=100, help="ms of each case")
    parser.add_argument("--json", type=Path, help="a file for a JSON line a case")
    options = parser.parse_args(arguments)
    lines, every, slower = [], 0, 0
    for problem, choice, rows in cases(options):
        every, is_slower = every + 1, behind(rows) > (options.slower or 0)
        slower += is_slower
        if is_slower:
            print(shown(problem, choice, rows), flush=True)
        lines += [json.dumps(asdict(row)) + "\n" for row in rows]
        if options.json:  # keeps what was measured if the script is stopped
            options.json.write_text("".join(lines))
    if options.slower:
        print(f"{slower} of {every} problems are {options.slower} times the fastest")


if __name__ == "__main__":
    main()
