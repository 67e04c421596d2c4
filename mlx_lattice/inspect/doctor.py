"""backend_info(): which kernels are here. doctor(): prove them, and time layers.

Each kernel of the machine's backend runs on a small problem, and its result is compared
with that of MLX operations on the CPU. ``commands.doctor`` prints the report.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import cache_files, devices, nn, ops
from ..backends.cuda import geometry as cuda_geometry
from ..backends.gpu import nvrtc as cuda_compile
from ..checks import DTYPES, dtype_name
from ..coordinates import CoordinateManager
from ..devices import CPU, CUDA, METAL, Device, absence, metal_on_host, portable_only
from ..distribution import __version__
from ..problem import (
    FORWARD,
    INPUT_GRAD,
    LAYOUTS,
    MLX,
    PASSES,
    TOLERANCE,
    WEIGHT_GRAD,
    IntegerFacts,
    Plan,
    Problem,
)
from ..quantized import BITS, DEFAULT_GROUP_SIZE, GROUP_SIZES, quantize_weight
from ..relation import Relation
from ..routes import TABLE, proof, selection
from ..routes.choice import Route
from ..routes.selection import candidates, relative_error, select
from ..routes.table import FLOOR, named
from ..settings import environment
from ..tensor import SparseTensor
from .explain import cost


@dataclass(frozen=True)
class BackendInfo:
    """Describe this machine and the settings that apply. Prints as a list."""

    version: str
    mlx: str
    device: Device
    # Whether its kernels can run here, and a sentence.
    backends: Mapping[str, tuple[bool, str]]
    routes: Mapping[str, tuple[str, ...]]  # that can be selected, by pass
    cache: str  # file of measured choices
    tuning: bool  # whether routes are chosen by measurement
    proving: bool  # whether matrix kernels prove themselves before their first launch
    kernels: tuple[tuple[str, str | None], ...]  # proved ones; why they are refused
    forced: Mapping[str, str]  # routes by pass
    environment: Mapping[str, str]  # the library's variables that are set

    def as_dict(self) -> dict[str, Any]:
        """Return every field, for JSON."""
        states = {
            name: {"available": runs, "reason": text}
            for name, (runs, text) in self.backends.items()
        }
        kernels = [{"name": name, "refused": why} for name, why in self.kernels]
        return asdict(self) | {"backends": states, "kernels": kernels}

    def __str__(self) -> str:
        """Return the list as a person reads it."""
        d = self.device
        rates = "estimated" if d.estimated else "measured"
        lines = [
            ("mlx_lattice", self.version),
            ("MLX", self.mlx),
            (
                "device",
                f"{d.name} ({d.backend}): {d.tflops:.3g} TFLOP/s float32, "
                f"{d.half_tflops:.3g} half, {d.bandwidth:,.0f} GB/s ({rates})",
            ),
        ]
        for name, (runs, text) in self.backends.items():
            lines.append((name, f"{'' if runs else 'not '}available: {text}"))
        for pass_, names in self.routes.items():
            lines.append((pass_, ", ".join(names) or "no route can run"))
        lines.append(("cache", self.cache))
        lines.append(("tuning", "on" if self.tuning else "off"))
        refused = [(name, why) for name, why in self.kernels if why]
        counts = f"{len(self.kernels) - len(refused)} right, {len(refused)} refused"
        state = "on" if self.proving else "off: matrix kernels run unproved"
        lines.append(("proof", f"{state}; matrix kernels proved here: {counts}"))
        lines += [("refused", f"{name}: {why}") for name, why in refused]
        forced = ", ".join(f"{k}={v}" for k, v in self.forced.items())
        lines.append(("forced", forced or "none"))
        variables = ", ".join(f"{k}={v}" for k, v in self.environment.items())
        lines.append(("environment", variables or "none set"))
        return "\n".join(f"{name:<12} {text}" for name, text in lines)

    __repr__ = __str__


def backend_info() -> BackendInfo:
    """Return MLX's version, the device, its kernels, and the settings that apply.

    Examples:
        >>> info = ml.backend_info()
        >>> list(info.backends)  # print(info) shows everything
        ['portable', 'metal', 'cuda', 'cpu']
    """
    device = devices.current()
    states = {backend: _state(backend) for backend in (METAL, CUDA, CPU)}
    # If Metal's kernels are to run on a CPU that cannot run them, every call raises.
    runs = not metal_on_host() or states[METAL][0]
    return BackendInfo(
        version=__version__,
        mlx=mx.__version__,
        device=device,
        backends={
            "portable": (True, "routes in MLX operations, on every backend"),
            **states,
        },
        routes={
            pass_: tuple(
                route.name
                for route in selection.TABLE
                if runs and pass_ in route.passes and route.code(device.backend, pass_)
            )
            for pass_ in selection.PASSES
        },
        cache=str(selection.cache_file()),
        tuning=selection.is_tuning(),
        proving=proof.enabled(),
        kernels=proof.current().kernels,
        forced={
            pass_: name
            for pass_ in selection.PASSES
            if (name := selection.forced_route(pass_)) is not None
        },
        environment={k: v for k, v in environment.items() if v},
    )


def _state(backend: str) -> tuple[bool, str]:
    """Return whether a backend's kernels run here, and their routes, or why not."""
    if why := absence(backend):
        return False, why
    where = "on the CPU, for tests: " if backend == METAL and metal_on_host() else ""
    routes = [
        route.name
        for route in selection.TABLE
        if any(route.planner(backend, pass_) for pass_ in route.passes)
    ]
    return True, where + ", ".join(routes)


# The machine, as a report of the doctor has it

# Variables that name folders are left out.
VARIABLES = tuple(name for name in environment if "CACHE" not in name)
# Folder names may hold spaces, so a path ends at the last slash before a mark.
_PATH = re.compile(
    r"(?<![\w.<])(?:~|[A-Za-z]:)?[/\\](?:[^'\":;,()<>\n]*[/\\])?([^\s'\":;,()<>/\\]+)"
)


def machine_facts(device: Device) -> dict[str, Any]:
    """Return the chip, the software and the settings; safe to publish."""
    info = mx.device_info(mx.cpu if device.backend == CPU else mx.default_device())
    memory = info.get("memory_size", info.get("total_memory"))
    darwin = platform.system() == "Darwin"  # other releases may contain a host name
    return {
        "chip": str(info.get("device_name", "unknown")),
        "memory_gb": None if memory is None else round(memory / 2**30, 1),
        "system": platform.system(),
        "release": platform.release() if darwin else None,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "mlx": mx.__version__,
        "library": __version__,
        "on_host": devices.metal_on_host(),
        "environment": {k: environment[k] for k in VARIABLES if environment[k]},
    }


def sentence(error: BaseException) -> str:
    """Return an error as one line; of each path only the file name is left."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return _PATH.sub(r"<\1>", text if len(text) <= 400 else f"{text[:400]} ...")


FORMAT, VERSION = "mlx_lattice.doctor", 4
SECONDS, QUICK_SECONDS = 300.0, 30.0
PROOF_SHARE = 0.6  # of the seconds; the rest is for the layers

# Voxels and relations.


def shell(resolution: int) -> mx.array:
    """Return the (N, 4) int32 voxels of a hollow sphere, sorted.

    By integers, so that every machine times the same rows: a voxel belongs to the shell
    if its distance from the centre is between resolution / 2 - 1.25 and resolution / 2.
    """
    axis = 2 * mx.arange(resolution, dtype=mx.int32) - resolution + 1
    square = axis * axis
    distance = 4 * (square[:, None, None] + square[:, None] + square)  # 16 d^2
    inside = (distance >= (2 * resolution - 5) ** 2) & (distance <= 4 * resolution**2)
    cells = mx.where(inside.flatten(), mx.arange(inside.size), inside.size)
    cells = mx.sort(cells)[: inside.sum().item()].astype(mx.int32)
    x, rest = cells // resolution**2, cells % resolution**2
    y, z = rest // resolution, rest % resolution
    return mx.stack([mx.zeros_like(x), x, y, z], axis=1)


# The manager's method for each kind of relation, and its arguments.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "submanifold": ("submanifold_kernel_relation", {"kernel_size": 3}),
    "pointwise": ("submanifold_kernel_relation", {"kernel_size": 1}),
    "strided": ("kernel_relation", {"kernel_size": 2, "stride": 2}),
    "strided 3": ("kernel_relation", {"kernel_size": 3, "stride": 2}),
    "dense rule": (
        "kernel_relation",
        {"kernel_size": 3, "stride": 2, "padding": 1, "support": "reach"},
    ),
    "inverse": ("transposed_kernel_relation", {"kernel_size": 2, "stride": 2}),
    "generative": ("generative_relation", {"kernel_size": 2, "stride": 2}),
}


def build_relation(coords: mx.array, kind: str) -> Relation:
    """Return a new relation over coordinates; ``kind`` is a key of ``KINDS``."""
    method, arguments = KINDS[kind]
    manager = CoordinateManager()
    key = manager.insert(coords)
    if kind == "inverse":
        # From the coarse rows of a strided convolution back to the fine ones.
        coarse = manager.kernel_relation(key, **arguments).keys[1]
        return getattr(manager, method)(coarse, key, **arguments)
    return getattr(manager, method)(key, **arguments)


def operands(problem: Problem, relation: Relation) -> tuple[Any, ...]:
    """Return a plan's arguments: the relation of the pass, then its arrays."""
    of_pass = relation.T if problem.pass_ == INPUT_GRAD else relation
    return of_pass, *_arrays(problem)


def _arrays(p: Problem) -> Sequence:
    """Return features, or their gradients, and weights or gradients of the outputs."""
    dtype = DTYPES[p.dtype]
    if p.integer:
        return proof.integer_arrays(p)

    def normal(*shape: int) -> mx.array:
        key = mx.random.key(len(shape))
        return mx.random.normal(shape, key=key).astype(dtype)

    c_in = p.c_in // p.groups
    if p.pass_ == WEIGHT_GRAD:
        return normal(p.n_in, p.c_in), normal(1, p.n_out, p.c_out)[0]
    if p.layout == "mlx":
        w = normal(p.c_out, p.volume, c_in)
    else:
        w = normal(p.volume, c_in, p.c_out)
    if p.bits:
        w = quantize_weight(w, bits=p.bits, group_size=p.group_size)
    rows, channels = p.n_in, p.c_in
    if p.pass_ == INPUT_GRAD:
        rows, channels = p.n_out, p.c_out
    return normal(rows, channels), w


@dataclass(frozen=True)
class Case:
    """A computation to prove: run by this machine's kernels and by MLX operations."""

    name: str  # of the route, or of the operation
    facts: str
    run: Callable[[], list[mx.array]]
    reference: Callable[[], list[mx.array]] | None = None  # by default ``run``
    plan: Plan | None = None  # of a convolution's kernel


def prove(case: Case) -> dict[str, Any]:
    """Compute a case twice and compare; return its entry of the report.

    A matrix kernel also repeats the proof of its first launch.
    """
    begun, error, wrong = time.perf_counter(), None, None
    proves = case.plan is not None and case.plan.proof is not None
    try:
        wrong = proof.check(case.plan) if proves else None
        results = case.run()
        if case.reference is None:
            with portable_only():
                expected = case.run()
                mx.eval(expected)
        else:
            expected = case.reference()
        compared = [difference(*pair) for pair in zip(results, expected, strict=True)]
        wrong = wrong or next((why for _, why in compared if why), None)
        error = max((off for off, _ in compared if off is not None), default=None)
    except Exception as raised:  # whatever a compiler or driver raises
        wrong = sentence(raised)
    if proves and proof.enabled():
        proof.current().add(case.plan, False, wrong)
    seconds = round(time.perf_counter() - begun, 3)
    facts = {"kernel": case.name, "facts": case.facts}
    return facts | {"error": error, "seconds": seconds, "wrong": wrong}


def difference(y: mx.array, reference: mx.array) -> tuple[float | None, str | None]:
    """Return the error of a result or None, and what is wrong with it or None."""
    if y.shape != reference.shape:
        return None, f"the result is {y.shape}, not {reference.shape}"
    if not mx.issubdtype(y.dtype, mx.floating):
        is_same = mx.array_equal(y, reference).item()
        return float(not is_same), None if is_same else "its integers are wrong"
    error, most = relative_error(y, reference)[0], TOLERANCE[dtype_name(y.dtype)]
    if not (math.isfinite(error) and mx.isfinite(y).all().item()):
        return None, "the result holds NaN or infinity"
    wrong = f"its result is off by {error:.1e}, at most {most:.1e} is right"
    return error, wrong if error > most else None


# Channels by which kernels choose their tiles: each width, odd ones, wide rows.
CHANNELS = (
    *((64, 64), (128, 128), (32, 32), (16, 16), (24, 40)),
    *((64, 16), (16, 64), (576, 32), (3, 16), (5, 7)),
)
COMMON_GROUP_SIZES = (32, 64)
COMPILED_TOGETHER = 16  # CUDA kernels


@lru_cache(maxsize=8)
def _small_relation(kind: str, portable: bool = False) -> Relation:
    """Return a small relation; ``portable`` only gives the reference its own views."""
    del portable
    if kind != "edges":
        return build_relation(shell(9), kind)
    n_in, n_out, volume = 90, 70, 8
    at = mx.arange(900, dtype=mx.int32)
    # Several edges share an output row and an offset, so there is no table.
    ends = at * 37 % n_in, at * at % 53 % n_out, at * 11 % volume
    return Relation.from_edges(*ends, n_in, n_out, volume)


def _small_operands(problem: Problem, portable: bool = False) -> tuple:
    kind = "edges" if problem.kind == "general" else "submanifold"
    kind = "pointwise" if problem.pointwise else kind
    relation = _small_relation(kind, portable)
    # On the CPU: devices round random numbers and the scales of packed weights
    # differently, and the reference needs the same operands as the kernel.
    with mx.stream(mx.cpu):
        return operands(problem, relation)


@lru_cache(maxsize=64)
def _reference(problem: Problem) -> mx.array:
    """Return the floor route's result, by MLX operations on the CPU."""
    with mx.stream(mx.cpu), portable_only():
        plan = named(FLOOR).plan(problem, devices.profile("cpu"))
        y = plan(*_small_operands(problem, portable=True))
        mx.eval(y)
    return y


def kernel_cases(device: Device) -> list[Case]:
    """Return a case for each kernel of the device's own, alternating over routes."""
    queues = [
        _cases_of(route, pass_, device)
        for route in TABLE
        for pass_ in route.passes
        if route.planner(device.backend, pass_)
    ]
    return [case for row in zip_longest(*queues) for case in row if case is not None]


def _cases_of(route: Route, pass_: str, device: Device) -> Iterator[Case]:
    # A Metal GPU that a single tile fills: no tile's sum is split, as for many rows.
    unsplit = replace(device, cores=0, tflops=1e30)
    seen: set[tuple] = set()
    for problem in _problems(pass_):
        if route.refusal(problem, device, forced=True):
            continue
        for planned_for in (device, unsplit) if device.backend == METAL else (device,):
            plan = route.plan(problem, planned_for)
            if plan.backend == MLX:
                continue
            keys = {_identity(plan)}
            if problem.integer and problem.bits == 4:  # a kernel unpacks weights first
                keys.add(("unpacked", problem.group_size))
            if keys <= seen:
                continue
            seen |= keys
            yield Case(
                route.name,
                f"{pass_} of {problem}, weights {problem.layout}, {plan}",
                lambda plan=plan, p=problem: [plan(*_small_operands(p))],
                lambda p=problem: [_reference(p)],
                plan,
            )


def _identity(plan: Plan) -> tuple:
    """Return what distinguishes a plan's kernels from those of other plans."""
    if plan.gpu is not None:
        kernels = (plan.gpu, plan.add)
        return tuple(k and (k.symbol, k.template, k.defines) for k in kernels)
    p = plan.problem
    sizes = p.bits, p.group_size, p.c_in, p.c_out, p.groups
    return plan.kernel, p.dtype, p.layout, p.table, *sizes


def _problems(pass_: str) -> Iterator[Problem]:
    """Yield small problems that reach each kernel, the most usual ones first."""
    kinds, surface = ("submanifold", "edges", "pointwise"), ("submanifold",)
    dense = [{"layout": layout, "deterministic": False} for layout in LAYOUTS[::-1]]
    packed = [{"bits": bits, "group_size": n} for bits in BITS for n in GROUP_SIZES]
    common = [facts for facts in packed if facts["group_size"] in COMMON_GROUP_SIZES]
    fours = [facts for facts in packed if facts["bits"] == 4]
    integers = [facts | {"integer": IntegerFacts()} for facts in ({"bits": 8}, *fours)]
    parts = [(CHANNELS[:2], kinds, dense), (CHANNELS[2:], surface, dense)]
    for channels in ((64, 64), (16, 32)):
        grouped = [{"layout": layout, "groups": channels[0]} for layout in LAYOUTS]
        parts.append(([channels], surface, grouped))
    if pass_ == FORWARD:
        parts += [(CHANNELS[:2], kinds, packed), (CHANNELS[2:5], kinds, common)]
        parts.append((CHANNELS[:5], surface, integers))
    for widths, over, options in parts:
        for channels, kind, dtype, facts in product(widths, over, DTYPES, options):
            yield _problem(pass_, _small_relation(kind), *channels, dtype, **facts)


def _problem(pass_: str, relation: Relation, c_in, c_out, dtype, **facts) -> Problem:
    facts["table"] = (relation.T if pass_ == INPUT_GRAD else relation).has_table
    return Problem.of(pass_, relation, c_in, c_out, DTYPES[dtype], **facts)


def compile_together(cases: Sequence[Case]) -> None:
    """Compile CUDA kernels side by side; each proof reports its own failure."""
    with cuda_compile.rehearsal():
        for case in cases:
            with suppress(Exception):
                case.run()
    with suppress(RuntimeError):
        cuda_compile.finish()


# Other operations, with gradients if they have any.


def _views(kind: str, dims: int = 3) -> list[mx.array]:
    coords = shell(10)
    if dims != 3:
        at = mx.arange(-60, 60, dtype=mx.int32)
        axes = [at // (axis + 1) for axis in range(dims)]
        coords = mx.stack([mx.zeros_like(at), *axes], axis=1)
    r = build_relation(coords, kind)
    return [r.out_coords, r.out_in, r.edges, r.sorted.rows]


def _layer(layer: Callable[[SparseTensor], SparseTensor], dtype: str) -> list[mx.array]:
    coords = shell(9)
    feats = mx.random.normal((len(coords), 24), key=mx.random.key(3))
    x = SparseTensor(coords, feats.astype(DTYPES[dtype]))

    def loss(feats: mx.array) -> mx.array:
        y = layer(x.replace(feats)).feats.astype(mx.float32)
        return (y * mx.random.normal(y.shape, key=mx.random.key(4))).sum()

    return [layer(x).feats, mx.grad(loss)(x.feats)]


def operation_cases() -> list[Case]:
    """Return a case for each kind of relation, each norm, each pool and a small net."""
    runs = {(f"{kind} relation", "3D"): partial(_views, kind) for kind in KINDS}
    for dims in (1, 2, 4):
        runs["submanifold relation", f"{dims}D"] = partial(_views, "submanifold", dims)
    for dtype in DTYPES:
        fused = nn.SubmConv3d(24, 24, 3, bias=False), nn.BatchNorm(24), nn.ReLU()
        net = nn.Sequential(*fused).eval()  # the norm may be the epilogue
        net.set_dtype(DTYPES[dtype])
        for name, layer in (
            ("convolution, norm and ReLU", net),
            ("BatchNorm", nn.BatchNorm(24)),
            ("GroupNorm", nn.GroupNorm(4, 24)),
            ("InstanceNorm", nn.InstanceNorm(24)),
            ("max_pool3d", partial(ops.max_pool3d, kernel_size=2, stride=2)),
            ("avg_pool3d", partial(ops.avg_pool3d, kernel_size=2, stride=2)),
        ):
            runs[name, dtype] = partial(_layer, layer, dtype)
    return [Case(*names, run) for names, run in runs.items()]


# What is timed.

RUNS, RUN_SECONDS = 9, 0.25
BATCH_SECONDS = 0.004  # of a run: long for the clock, too short to heat a laptop


@dataclass(frozen=True)
class Layer:
    """A convolution over a shell, by default a submanifold one in half precision."""

    resolution: int
    c_in: int
    c_out: int
    kind: str = "submanifold"
    dtype: str = "float16"
    passes: tuple[str, ...] = (FORWARD,)
    groups: int = 1
    bits: int | None = None  # of a packed weight

    def __str__(self) -> str:
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        weight = f"int{self.bits} weight, " if self.bits else ""
        channels = f"{self.c_in} to {self.c_out}"
        return f"{self.source}, {channels}{groups}, {weight}{self.dtype}"

    @property
    def source(self) -> str:
        """The relation in words."""
        return f"shell {self.resolution} {self.kind}"

    def problem(self, pass_: str, relation: Relation) -> Problem:
        """Return the problem that a module of these channels poses over a relation."""
        facts = {"layout": "mlx", "groups": self.groups}
        if self.bits:
            facts = {"bits": self.bits, "group_size": DEFAULT_GROUP_SIZE}
        return _problem(pass_, relation, self.c_in, self.c_out, self.dtype, **facts)


# Layers over one relation follow each other.
QUICK_LAYERS = (
    Layer(32, 64, 64),
    Layer(96, 64, 64, passes=PASSES),
    Layer(96, 64, 64, dtype="float32", passes=PASSES),
    Layer(96, 64, 64, bits=4),
    Layer(96, 64, 64, bits=8),
    Layer(96, 32, 64, kind="strided", passes=PASSES),
    Layer(96, 64, 32, kind="inverse", passes=PASSES),
    Layer(64, 128, 128),
)
LAYERS = (
    *QUICK_LAYERS,
    Layer(64, 256, 256),
    Layer(160, 32, 32, passes=PASSES),
    Layer(160, 64, 64, passes=PASSES),
    Layer(160, 64, 64, dtype="float32", passes=PASSES),
    Layer(160, 64, 64, dtype="bfloat16", passes=PASSES),
    Layer(160, 128, 128, passes=PASSES),
    Layer(160, 64, 64, groups=64, passes=PASSES),
    Layer(160, 64, 64, kind="pointwise"),
    Layer(160, 32, 64, kind="strided 3"),
    Layer(160, 32, 64, kind="dense rule"),
    Layer(160, 32, 32, kind="generative"),
    # Wide layers, as TRELLIS.2's decoders have them.
    Layer(96, 1024, 1024),
    Layer(96, 1024, 1024, bits=8),
    Layer(256, 128, 512),
    Layer(256, 256, 256),
    Layer(256, 256, 256, bits=8),
)


def measured(call: Callable[[], mx.array]) -> tuple[float, float, mx.array]:
    """Return (ms of the first call, median ms of those after it, the first result)."""

    def run(count: int) -> tuple[float, mx.array]:
        mx.synchronize()
        start = time.perf_counter()
        results = [call() for _ in range(count)]
        mx.eval(results)
        mx.synchronize()
        return (time.perf_counter() - start) / count, results[0]

    first, y = run(1)
    again = run(1)[0] if first < 1 else first
    count = max(1, min(50, int(BATCH_SECONDS / max(again, 1e-9))))
    taken, begun = [again], time.perf_counter()
    while len(taken) <= RUNS and time.perf_counter() - begun + again < RUN_SECONDS:
        taken.append(run(count)[0])
    return 1e3 * first, 1e3 * statistics.median(taken[1:] or taken), y


# The run.


class Doctor:
    """A run of the doctor; its ``report`` is what ``doctor.json`` holds.

    ``quick``: only the chosen routes of a short list are timed. ``path`` is written
    while the doctor runs. What would start after ``seconds`` is left out. ``show``
    is called with the name of each part before it runs.
    """

    def __init__(
        self,
        quick: bool = False,
        path: Path | None = None,
        seconds: float | None = None,
        show: Callable[[str], object] = lambda name: None,
    ):
        # Results are compared in float32, so MLX's matmul must not round to TF32.
        os.environ["MLX_ENABLE_TF32"] = "0"
        self.quick: bool = quick
        self.path: Path | None = path
        self.show: Callable[[str], object] = show
        self.seconds: float = seconds or (QUICK_SECONDS if quick else SECONDS)
        self.device: Device = devices.current()
        if devices.metal_on_host():  # whose emulator runs every kernel of Metal
            self.device = replace(self.device, neural_accelerators=True)
        self._begun, self._saved = time.perf_counter(), -math.inf
        self.report: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "machine": machine_facts(self.device),
            "device": {"name": self.device.name, "backend": self.device.backend},
            "quick": quick,
            "seconds": 0.0,
            "wrong": [],
            "left_out": [],
            "proofs": [],
            "layers": [],
            "unfinished": "start",
        }

    def __call__(self) -> Doctor:
        """Prove and time what fits into the seconds; return the doctor itself."""
        self.prove()
        if self._is_timed:
            self.time_layers()
        self.report["unfinished"] = None
        self.report["seconds"] = round(time.perf_counter() - self._begun, 2)
        return self

    @property
    def _is_timed(self) -> bool:
        return not self.report["machine"]["on_host"]

    def _starts(self, part: str, name: str, share: float = 1.0) -> bool:
        """Report what runs next; return whether its share of the seconds is left."""
        name = f"{part}: {name}"
        if time.perf_counter() - self._begun > share * self.seconds:
            self.report["left_out"].append(f"{name}, no time was left")
            return False
        self.report["unfinished"] = name
        if self.path and time.perf_counter() - self._saved > 1:
            self.save()
            self._saved = time.perf_counter()
        self.show(name)
        return True

    def _add(self, part: str, name: str, entry: dict) -> None:
        self.report[part].append(entry)
        if entry.get("wrong"):
            self.report["wrong"].append(f"{name}: {entry['wrong']}")

    def prove(self) -> None:
        """Prove relations, norms, pools and every kernel of a convolution."""
        compiles = self.device.backend == CUDA and cuda_compile.compiles()
        if compiles:
            cuda_geometry.rehearse(3)
        share = PROOF_SHARE if self._is_timed else 1.0
        cases = [*operation_cases(), *kernel_cases(self.device)]
        for at, case in enumerate(cases):
            name = f"{case.name} ({case.facts})"
            if not self._starts("proof", name, share):
                continue
            if compiles and at % COMPILED_TOGETHER == 0:
                compile_together(cases[at : at + COMPILED_TOGETHER])
            self._add("proofs", name, prove(case))

    def time_layers(self) -> None:
        """Time the layers over their relations."""
        relation, source = None, None
        for layer in QUICK_LAYERS if self.quick else LAYERS:
            if not self._starts("layer", str(layer)):
                continue
            if layer.source != source:
                relation, source = self._build(layer), layer.source
            for pass_ in layer.passes if relation is not None else ():
                self._time_pass(layer, pass_, relation)
            mx.clear_cache()

    def _time(self, entry: dict, call: Callable[[], mx.array]) -> mx.array | None:
        """Time a call into an entry and return its result; None if it fails."""
        try:
            entry["first_ms"], entry["ms"], y = measured(call)
            return y
        except Exception as raised:  # whatever a compiler or driver raises
            entry["wrong"] = sentence(raised)
            return None

    def _build(self, layer: Layer) -> Relation | None:
        """Time a relation from new coordinates to its table, and return one."""
        coords = shell(layer.resolution)
        mx.eval(coords)
        entry, relation = {"layer": layer.source, "pass": "relation", "route": ""}, None
        new = self._time(entry, lambda: build_relation(coords + 0, layer.kind).out_in)
        if new is not None:
            relation = build_relation(coords, layer.kind)
            entry |= {"rows": relation.n_out, "edges": relation.n_edges}
        self._add("layers", f"relation of {layer.source}", entry)
        return relation

    def _time_pass(self, layer: Layer, pass_: str, relation: Relation) -> None:
        problem = layer.problem(pass_, relation)
        chosen = select(problem, device=self.device).route
        # Others may also add atomically, in no fixed order.
        loose = replace(problem, deterministic=False)
        rest = () if self.quick else candidates(loose, self.device)
        arguments, reference = operands(problem, relation), None
        counted = cost(problem, self.device, relation=relation)
        for route in dict.fromkeys((named(FLOOR), chosen, *rest)):
            name = f"{pass_} of {layer} by {route}"
            if not self._starts("layer", name):
                continue
            entry = {"layer": str(layer), "pass": pass_, "route": route.name}
            entry |= {"chosen": route == chosen, "roofline_ms": counted.roofline_ms}
            entry |= {"rows": relation.n_out, "edges": relation.n_edges}
            y = self._time(entry, partial(route.plan(loose, self.device), *arguments))
            if y is not None:
                entry["tflops"] = counted.useful_flops / entry["ms"] / 1e9
                reference = y if reference is None else reference
                entry["error"], entry["wrong"] = difference(y, reference)
            if entry["chosen"] or entry.get("wrong") or not self.quick:
                self._add("layers", name, entry)

    def save(self) -> None:
        """Write ``doctor.json``, all of it or nothing."""
        text = json.dumps(self.report, indent=1, allow_nan=False, default=str)
        cache_files.write_whole(self.path, text.encode())
