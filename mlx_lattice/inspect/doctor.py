"""``mlx-lattice doctor``: prove this machine's kernels, time layers, compare reports.

The doctor runs every kernel of the machine's backend on a small problem and compares
the result with the portable floor route. Then it times a fixed list of layers. It
prints a table and writes ``doctor.json``, which names nothing of the machine's owner.
"""

from __future__ import annotations

import getpass
import json
import math
import os
import platform
import re
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache, partial
from itertools import zip_longest
from pathlib import Path

import mlx.core as mx

from .. import devices, kept_files, nn, ops
from ..backends import first_use, mlx_ops
from ..backends.availability import portable_only
from ..coordinates import CoordinateManager
from ..devices import CPU, CUDA, METAL, Device
from ..distribution import __version__
from ..dtypes import DTYPES
from ..integer_facts import IntegerFacts
from ..output_places import check_writable
from ..problem import FORWARD, INPUT_GRAD, LAYOUTS, PASSES, WEIGHT_GRAD, Problem
from ..quantized import (
    BITS,
    DEFAULT_GROUP_SIZE,
    GROUP_SIZES,
    QuantizedWeight,
    quantize_weight,
)
from ..relation import Relation
from ..routes import TABLE, measure, proof, proof_integers, proof_results, thresholds
from ..routes.choice import Route
from ..routes.measure import FLOOR, relative_error
from ..routes.plan import MLX, Plan
from ..routes.selection import candidates, named, select
from ..tensor import SparseTensor
from . import backend_info
from .cost import cost, milliseconds
from .page import drawn

FORMAT, VERSION = "mlx_lattice.doctor", 2
SECONDS, QUICK_SECONDS = 300.0, 30.0
PROOF_SHARE = 0.6  # of the seconds; layers are timed in what is left
GRACE = 0.2  # share of the seconds beyond them, after which a kernel counts as hung
HUNG = 3  # exit code
SAVE_SECONDS = 1.0
ON_HOST = "Metal's kernels run on the CPU here, where times mean nothing"


# The machine, without its owner.

# Variables that a report shows: those of caches may name folders.
VARIABLES = tuple(name for name in backend_info.VARIABLES if "CACHE" not in name)
BUSY, BUSY_SECONDS = 0.4, 0.2  # share of the processors' time that makes times long
_TARGET = """
#ifdef __ENVIRONMENT_OS_VERSION_MIN_REQUIRED__
  target[0] = __ENVIRONMENT_OS_VERSION_MIN_REQUIRED__;
#else
  target[0] = none[0];
#endif
"""
_SLASH = re.compile(r"[/\\]")
# Folder names may hold spaces, so a path ends at the last slash before a mark.
_PATH = re.compile(
    r"(?<![\w.<])(?:~|[A-Za-z]:)?[/\\](?:[^'\":;,()<>\n]*[/\\])?[^\s'\":;,()<>]+"
)


def machine_facts(device: Device) -> dict:
    """Return the chip, the software and the settings; safe to publish."""
    info = dict(
        mx.device_info(mx.cpu if device.backend == CPU else mx.default_device())
    )
    memory = next((info[k] for k in ("memory_size", "total_memory") if k in info), None)
    darwin = platform.system() == "Darwin"
    facts = {
        "chip": str(info.get("device_name", "unknown")),
        "architecture": str(info.get("architecture", "unknown")),
        "memory_gb": None if memory is None else round(memory / 2**30, 1),
        "system": platform.system(),
        # A Linux release may contain a host name.
        "release": platform.release() if darwin else None,
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "mlx": mx.__version__,
        "library": __version__,
        "on_host": devices.metal_on_host(),
        "metal_target": metal_target() if device.backend == METAL else None,
        "environment": {k: os.environ[k] for k in VARIABLES if os.environ.get(k)},
    }
    return {k: scrub(v) if isinstance(v, str) else v for k, v in facts.items()}


def busy() -> str | None:
    """Return how much other programs use the processors, or None below ``BUSY``."""
    before = _ticks()
    time.sleep(BUSY_SECONDS)
    total, idle = (b - a for a, b in zip(before, _ticks(), strict=True))
    # Without /proc/stat, count the programs that ran in the last minute.
    average = os.getloadavg()[0] / (os.cpu_count() or 1)
    used = 1 - idle / total if total else average
    if used < BUSY:
        return None
    return f"other programs use {min(used, 1):.0%} of the processors' time"


def _ticks() -> tuple[int, int]:
    """Return the processors' total and idle time since Linux started."""
    try:
        line = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return 0, 0
    times = [int(text) for text in line.split()[1:9]]
    return sum(times), sum(times[3:5])


def metal_target() -> int | str:
    """Return the macOS version that Metal's run-time compiler targets.

    260200 means macOS 26.2, 0 that the compiler does not define it. If the kernel does
    not compile, return the error.
    """
    kernel = mx.fast.metal_kernel(
        name="lattice_metal_target",
        input_names=["none"],
        output_names=["target"],
        source=_TARGET,
    )
    try:
        (target,) = kernel(
            inputs=[mx.zeros((1,), dtype=mx.int32)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )
        return target.item()
    except RuntimeError as error:
        return sentence(error)


def scrub(text: str) -> str:
    """Return a text without paths, host name and user name."""
    text = _PATH.sub(lambda path: f"<{_SLASH.split(path[0])[-1]}>", text)
    for name in _private_names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<private>", text)
    return text


@cache
def _private_names() -> tuple[str, ...]:
    """Return the names that a report must not contain, longest first."""
    names = {Path.home().name, socket.gethostname(), socket.gethostname().split(".")[0]}
    with suppress(OSError, KeyError, ImportError):  # a container may have no user name
        names.add(getpass.getuser())
    return tuple(sorted((n for n in names if len(n) > 1), key=len, reverse=True))


def sentence(error: BaseException, most: int = 400) -> str:
    """Return an error as one scrubbed line of bounded length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return scrub(text if len(text) <= most else f"{text[:most]} ...")


def current_device() -> Device:
    """Return MLX's device profile; the emulated Metal GPU gets neural accelerators."""
    device = devices.current()
    if device.backend == METAL and devices.metal_on_host():
        return replace(device, neural_accelerators=True)
    return device


# Voxels, relations and layers. All arithmetic is on integers, so that every machine
# times the same rows.


def shell(resolution: int) -> mx.array:
    """Return the (N, 4) int32 voxels of a hollow sphere, sorted.

    A voxel belongs to the shell if its distance from the centre of a grid of that side
    is between resolution / 2 - 1.25 and resolution / 2.
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


def sheet(rows: int, layers: int = 1) -> mx.array:
    """Return about ``rows`` (N, 4) int32 voxels of a wavy sheet, sorted.

    In a 3x3x3 submanifold kernel, a sheet of one layer has about 8 edges a row, one of
    two layers about 16, like a LiDAR scan.
    """
    side = max(8, round(math.sqrt(rows / layers)))
    # (height, periods along x, along y): shares of the side.
    waves = ((0.03, 3, 2), (0.02, 5, 4), (0.01, 9, 7))
    height = mx.full((side, side), side // 2, dtype=mx.int32)
    for share, *periods in waves:
        x, y = (
            mx.array(
                [
                    round(1024 * math.sin(2 * math.pi * n * i / side))
                    for i in range(side)
                ]
            )
            for n in periods
        )
        # A shift rounds down on every backend; a division may not.
        wave = mx.right_shift(x[:, None] * y, 10)
        height = height + mx.right_shift(int(share * side) * wave, 10)
    z = (height[:, :, None] + mx.arange(layers, dtype=mx.int32)).flatten()
    column = mx.arange(side * side, dtype=mx.int32)
    x, y = (mx.repeat(v, layers) for v in (column // side, column % side))
    return mx.stack([mx.zeros_like(z), x, y, z], axis=1)


SCENES = {"shell": shell, "scan": partial(sheet, layers=2), "thin": sheet}
# The manager's method of each kind of relation, and its arguments.
KINDS = {
    "submanifold": ("submanifold_kernel_relation", {"kernel_size": 3}),
    "pointwise": ("submanifold_kernel_relation", {"kernel_size": 1}),
    "strided": ("kernel_relation", {"kernel_size": 2, "stride": 2}),
    "strided 3": ("kernel_relation", {"kernel_size": 3, "stride": 2}),
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


@dataclass(frozen=True)
class Layer:
    """A convolution that the doctor times.

    Attributes:
        scene: a key of ``SCENES``.
        size: the side of a shell, or the rows of a sheet.
        c_in, c_out: channels.
        kind: a key of ``KINDS``.
        dtype: of the features.
        passes: timed passes.
        groups: channel groups.
        bits: of a packed weight, or None.
        quick: whether ``--quick`` times it.
    """

    scene: str
    size: int
    c_in: int
    c_out: int
    kind: str = "submanifold"
    dtype: str = "float16"
    passes: tuple[str, ...] = (FORWARD,)
    groups: int = 1
    bits: int | None = None
    quick: bool = False

    def __str__(self) -> str:
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        weight = f"int{self.bits} weight, " if self.bits else ""
        channels = f"{self.c_in} to {self.c_out}{groups}"
        return f"{self.source}, {channels}, {weight}{self.dtype}"

    @property
    def source(self) -> str:
        """The relation in words."""
        kind = "" if self.kind == "submanifold" else f" {self.kind}"
        return f"{self.scene} {self.size:,}{kind}"

    @property
    def rows(self) -> int:
        """About how many input rows there are."""
        return 4 * self.size**2 if self.scene == "shell" else self.size

    def problem(self, pass_: str, relation: Relation) -> Problem:
        """Return the problem that a module of these channels poses over a relation."""
        packed = {"bits": self.bits, "group_size": DEFAULT_GROUP_SIZE}
        return Problem.of(
            pass_,
            relation,
            self.c_in,
            self.c_out,
            DTYPES[self.dtype],
            self.groups,
            table=(relation.T if pass_ == INPUT_GRAD else relation).has_table,
            layout="kernel_major" if self.bits else "mlx",
            **(packed if self.bits else {}),
        )


def _layers() -> tuple[Layer, ...]:
    on_shell = partial(Layer, "shell")
    on_scan = partial(Layer, "scan", 100_000)
    layers = [
        on_shell(32, 64, 64, quick=True),
        on_shell(64, 128, 128, quick=True),
        on_shell(64, 256, 256),
        on_shell(128, 128, 128, passes=PASSES),
        on_shell(128, 256, 256),
        on_scan(64, 64, passes=PASSES, quick=True),
        on_scan(16, 16),
        on_scan(32, 32, passes=PASSES),
        on_scan(128, 128, passes=PASSES),
        on_scan(64, 64, dtype="float32", passes=PASSES, quick=True),
        on_scan(64, 64, dtype="bfloat16", passes=PASSES),
        on_scan(64, 64, bits=4, quick=True),
        on_scan(64, 64, bits=8, quick=True),
        on_scan(64, 64, groups=64, passes=PASSES),
        on_scan(64, 64, kind="pointwise"),
        on_scan(32, 64, kind="strided", passes=PASSES, quick=True),
        on_scan(32, 64, kind="strided 3"),
        on_scan(64, 32, kind="inverse", passes=PASSES, quick=True),
        on_scan(32, 32, kind="generative"),
    ]
    # Rows and channels of the stages of TRELLIS.2's decoders.
    for rows, channels in (
        (37_000, 1024),
        (97_000, 512),
        (800_000, 256),
        (2_300_000, 128),
    ):
        on_stage = partial(Layer, "thin", rows, channels)
        layers += [on_stage(channels), on_stage(channels, bits=8)]
        layers.append(on_stage(4 * channels))
    return tuple(layers)


LAYERS = _layers()


def operands(problem: Problem, relation: Relation) -> tuple:
    """Return a plan's arguments: the relation of the pass, then its arrays."""
    p, dtype = problem, DTYPES[problem.dtype]
    if p.integer:
        return relation, *proof_integers.arrays(p)

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(len(shape))).astype(dtype)

    c_in = p.c_in // p.groups
    if p.pass_ == WEIGHT_GRAD:
        dy = mx.random.normal((p.n_out, p.c_out), key=mx.random.key(7)).astype(dtype)
        return relation, normal(p.n_in, p.c_in), dy * 0.5
    if p.layout == "mlx":
        w = normal(p.c_out, p.volume, c_in)
    else:
        w = normal(p.volume, c_in, p.c_out)
    if p.bits:
        w = quantize_weight(w, bits=p.bits, group_size=p.group_size)
    if p.pass_ == INPUT_GRAD:
        return relation.T, normal(p.n_out, p.c_out), w
    return relation, normal(p.n_in, p.c_in), w


# Proofs of contraction kernels.

# Channels by which kernels choose their tiles: each width, odd ones, wide rows.
CHANNELS = ((64, 64), (128, 128), (32, 32), (16, 16), (24, 40), (64, 16), (16, 64))
MORE_CHANNELS = ((576, 32), (3, 16), (5, 7))
COMMON_GROUP_SIZES = (32, 64)
COMPILED_TOGETHER = 16  # CUDA kernels


@dataclass(frozen=True)
class Point:
    """A kernel to prove: a route, and the facts by which it chooses the kernel.

    Attributes:
        route: the route.
        problem: the small problem.
        whole: whether tiles are planned unsplit, as for many rows.
    """

    route: Route
    problem: Problem
    whole: bool

    def plan(self, device: Device) -> Plan:
        """Return the plan that has the kernel."""
        return self.route.plan(self.problem, _unsplit(device) if self.whole else device)


@dataclass(frozen=True)
class Proof:
    """The result of one kernel's proof.

    Attributes:
        kernel: the route, or the operation.
        facts: pass, dtype, channels, layout or packing, and the plan.
        error: relative to the norm of the reference; None if the kernel did not run.
        tolerance: the largest error allowed.
        seconds: of compilation and run.
        note: the error message, or None.
    """

    kernel: str
    facts: str
    error: float | None
    tolerance: float
    seconds: float
    note: str | None = None

    @property
    def good(self) -> bool:
        """Whether the kernel ran and its result is right."""
        return self.error is not None and self.error <= self.tolerance

    def as_dict(self) -> dict:
        """Return every field, and whether it is good."""
        return asdict(self) | {"good": self.good}


def _unsplit(device: Device) -> Device:
    """Return a Metal GPU that a single tile fills, so that no tile's sum is split."""
    return replace(device, cores=0, tflops=1e30) if device.backend == METAL else device


@lru_cache(maxsize=8)
def _relation(kind: str, portable: bool = False) -> Relation:
    """Return a small relation, one of its own for the portable reference."""
    if kind != "edges":
        manager = CoordinateManager()
        key = manager.insert(shell(9))
        size = 3 if kind == "surface" else 1
        return manager.submanifold_kernel_relation(key, kernel_size=size)
    n_in, n_out, volume = 90, 70, 8
    at = mx.arange(900, dtype=mx.int32)
    # Several edges share an output row and an offset, so there is no table.
    ends = at * 37 % n_in, at * at % 53 % n_out, at * 11 % volume
    return Relation.from_edges(*ends, n_in, n_out, volume)


def _kind(problem: Problem) -> str:
    """Return which small relation a problem is over."""
    if problem.pointwise:
        return "pointwise"
    return "edges" if problem.kind == "general" else "surface"


def points(device: Device) -> list[Point]:
    """Return a point for each kernel of the device's own, alternating over routes."""
    queues = [
        list(_points(route, pass_, device))
        for route in TABLE
        for pass_ in route.passes
        if route.planner(device.backend, pass_)
    ]
    return [p for row in zip_longest(*queues) for p in row if p is not None]


def _points(route: Route, pass_: str, device: Device) -> Iterator[Point]:
    seen: set[tuple] = set()
    for problem, whole in _problems(pass_):
        if route.refusal(problem, device, forced=True):
            continue
        point = Point(route, problem, whole)
        plan = point.plan(device)
        if plan.backend == MLX:
            continue
        keys = {_identity(plan)}
        if problem.integer and problem.bits == 4:  # a kernel unpacks the weight first
            keys.add(("unpacked", problem.group_size))
        if not keys <= seen:
            seen |= keys
            yield point


def _identity(plan: Plan) -> tuple:
    """Return what distinguishes a plan's kernels from those of other plans."""
    if plan.gpu is not None:
        kernels = (plan.gpu, plan.add)
        return tuple(k and (k.symbol, k.template, k.defines) for k in kernels)
    p = plan.problem
    packing = p.bits, p.group_size
    return plan.kernel, p.dtype, p.layout, *packing, p.c_in, p.c_out, p.groups, p.table


def _problems(pass_: str) -> Iterator[tuple[Problem, bool]]:
    """Yield (problem, whether tiles are whole), the most usual ones first."""
    dtypes = ("float16", "float32", "bfloat16")
    kinds = ("surface", "edges", "pointwise")
    for at, channels in enumerate((*CHANNELS, *MORE_CHANNELS)):
        for kind in kinds[: 3 if at < 2 else 1]:
            for dtype in dtypes:
                for layout in reversed(LAYOUTS):
                    facts = {"layout": layout, "deterministic": False}
                    problem = _problem(pass_, kind, channels, dtype, **facts)
                    yield from ((problem, False), (problem, True))
    for channels in ((64, 64), (16, 32)):
        for dtype in dtypes:
            for facts in ({}, {"layout": "mlx"}):
                facts["groups"] = channels[0]
                yield _problem(pass_, "surface", channels, dtype, **facts), False
    if pass_ != FORWARD:
        return
    for at, channels in enumerate(CHANNELS[:5]):
        for kind in kinds:
            for dtype in dtypes:
                for bits in BITS:
                    for size in GROUP_SIZES if at < 2 else COMMON_GROUP_SIZES:
                        facts = {"bits": bits, "group_size": size}
                        problem = _problem(pass_, kind, channels, dtype, **facts)
                        yield from ((problem, False), (problem, True))
    for channels in CHANNELS[:5]:
        for dtype in dtypes:
            fours = ({"bits": 4, "group_size": size} for size in GROUP_SIZES)
            for packing in ({"bits": 8}, *fours):
                facts = packing | {"integer": IntegerFacts()}
                problem = _problem(pass_, "surface", channels, dtype, **facts)
                yield from ((problem, False), (problem, True))


def _problem(
    pass_: str, kind: str, channels: tuple[int, int], dtype: str, groups=1, **facts
) -> Problem:
    relation = _relation(kind)
    table = (relation.T if pass_ == INPUT_GRAD else relation).has_table
    return Problem.of(
        pass_, relation, *channels, DTYPES[dtype], groups, table=table, **facts
    )


def prove(point: Point, device: Device) -> Proof:
    """Compile and run one kernel, and compare its result with the floor route's.

    A matrix kernel also repeats the proof of its first launch; ``select`` refuses it
    from then on if it fails either.
    """
    problem, begun = point.problem, time.perf_counter()
    plan = point.plan(device)
    error, note = None, None
    try:
        if plan.proof is not None and (why := proof.try_again(plan)):
            note = scrub(why)
        else:
            arguments = operands(problem, _relation(_kind(problem)))
            y = plan(*arguments)
            mx.eval(y)
            error, note = _error(y, _reference(problem), plan.tolerance)
        if plan.proof is not None and note and proof_results.enabled():
            proof_results.current().add([(plan, False, note)])
    except Exception as raised:  # whatever a compiler or driver raises
        error, note = None, sentence(raised)
    took = time.perf_counter() - begun
    facts = f"{problem.pass_}, {problem.c_in} to {problem.c_out}, {plan_facts(plan)}"
    return Proof(point.route.name, facts, error, plan.tolerance, took, note)


def _error(
    y: mx.array, reference: mx.array, tolerance: float
) -> tuple[float | None, str | None]:
    """Return (relative error or None if it is not finite, what is wrong or None)."""
    error = relative_error(y, reference)[0]
    if not (math.isfinite(error) and mx.isfinite(y).all().item()):
        return None, "the result holds NaN or infinity"
    wrong = f"its result is off the floor route's by {error:.1e}"
    return error, wrong if error > tolerance else None


@lru_cache(maxsize=64)
def _reference(problem: Problem) -> mx.array:
    """Return the floor route's result in float32, by MLX operations on the CPU."""
    p = replace(problem, dtype="float32", bits=None, group_size=None)
    with mx.stream(mx.cpu), portable_only():
        relation, *arrays = operands(problem, _relation(_kind(problem), portable=True))
        if problem.integer:
            y = proof_integers.floor(problem, relation, arrays)
        else:
            a, b = arrays
            b = b.dense() if isinstance(b, QuantizedWeight) else b
            plan = mlx_ops.gather_gemm_scatter(p, devices.profile("cpu"))
            y = plan(relation, a.astype(mx.float32), b.astype(mx.float32))
        mx.eval(y)
    return y


def compile_together(batch: Sequence[Point], device: Device) -> None:
    """Compile CUDA kernels side by side; each proof reports its own failure."""
    with first_use.rehearsal():
        for point in batch:
            with suppress(Exception):
                plan = point.plan(device)
                plan(*operands(point.problem, _relation(_kind(point.problem))))
    with suppress(RuntimeError):
        first_use.finish()


def plan_facts(plan: Plan) -> str:
    """Return dtype, layout or packing, and the plan, in one line."""
    p = plan.problem
    packed = p.layout
    if p.bits:
        grouped = f" in groups of {p.group_size}" if p.group_size else ""
        packed = f"{p.operands}{grouped}"
    groups = f", {p.groups} groups" if p.groups > 1 else ""
    table = "" if p.table else ", edges"
    return f"{p.dtype}, {packed}{groups}{table}, {plan}"


# Checks of relations, norms and pools: by this machine's kernels, then by MLX
# operations.

Check = Callable[[], list[mx.array]]
CHECK_CHANNELS = 24


def _checks() -> Iterator[tuple[str, str, Check]]:
    """Yield (name, facts, check)."""

    def views(relation: Relation) -> list[mx.array]:
        rows = relation.sorted.rows
        return [relation.out_coords, relation.out_in, relation.edges, rows]

    def lines(dims: int) -> list[mx.array]:
        at = mx.arange(-60, 60, dtype=mx.int32)
        axes = [at // (axis + 1) for axis in range(dims)]
        coords = mx.stack([mx.zeros_like(at), *axes], axis=1)
        manager = CoordinateManager()
        return views(manager.submanifold_kernel_relation(coords, kernel_size=3))

    def reach() -> list[mx.array]:
        facts = {"kernel_size": 3, "stride": 2, "padding": 1, "support": "reach"}
        return views(CoordinateManager().kernel_relation(shell(9), **facts))

    for kind in KINDS:
        yield (
            f"{kind} relation",
            "3D",
            lambda k=kind: views(build_relation(shell(10), k)),
        )
    for dims in (1, 2, 4):
        yield "submanifold relation", f"{dims}D", partial(lines, dims)
    yield "forward relation, support reach", "3D", reach
    norms = {
        "BatchNorm": nn.BatchNorm,
        "GroupNorm": partial(nn.GroupNorm, 4),
        "InstanceNorm": nn.InstanceNorm,
    }
    for dtype in DTYPES:
        for name, norm in norms.items():
            yield name, f"{dtype}, with gradients", partial(_check_norm, norm, dtype)
        for pool in (ops.max_pool3d, ops.avg_pool3d):
            yield pool.__name__, dtype, partial(_check_pool, pool, dtype)
        yield "convolution, norm and ReLU", dtype, partial(_check_fused, dtype)


def _tensor(dtype: str) -> SparseTensor:
    coords = shell(9)
    shape = len(coords), CHECK_CHANNELS
    feats = mx.random.normal(shape, key=mx.random.key(3)).astype(DTYPES[dtype])
    return SparseTensor(coords, feats)


def _check_norm(norm: Callable, dtype: str) -> list[mx.array]:
    x, layer = _tensor(dtype), norm(CHECK_CHANNELS)
    weights = mx.random.normal(x.feats.shape, key=mx.random.key(4))

    def loss(feats: mx.array) -> mx.array:
        return (layer(x.replace(feats)).feats.astype(mx.float32) * weights).sum()

    return [layer(x).feats, mx.grad(loss)(x.feats)]


def _check_pool(pool: Callable, dtype: str) -> list[mx.array]:
    x = _tensor(dtype)

    def pooled(feats: mx.array) -> mx.array:
        return pool(x.replace(feats), kernel_size=2, stride=2).feats

    return [pooled(x.feats), mx.grad(lambda f: pooled(f).square().sum())(x.feats)]


def _check_fused(dtype: str) -> list[mx.array]:
    """Return the result of a net whose norm may be the convolution's epilogue."""
    convolution = nn.SubmConv3d(CHECK_CHANNELS, 32, 3, bias=False)
    key, shape = mx.random.key(5), convolution.weight.shape
    convolution.weight = mx.random.normal(shape, key=key) / 16
    net = nn.Sequential(convolution, nn.BatchNorm(32), nn.ReLU())
    net.eval()
    net.set_dtype(DTYPES[dtype])
    return [net(_tensor(dtype)).feats]


CHECKS = tuple(_checks())


def prove_check(name: str, facts: str, check: Check) -> Proof:
    """Compute a check with the kernels and with MLX operations, and compare."""
    begun, tolerance, error, note = time.perf_counter(), 0.0, 0.0, None
    try:
        with portable_only():
            expected = check()
            mx.eval(expected)
        result = check()
        mx.eval(result)
        for a, b in zip(result, expected, strict=True):
            if a.shape != b.shape:
                raise ValueError(
                    f"the result is {a.shape}, MLX operations give {b.shape}"
                )
            if mx.issubdtype(a.dtype, mx.floating):
                dtype = str(a.dtype).rpartition(".")[2]
                tolerance = max(tolerance, thresholds.TOLERANCE[dtype])
                off = relative_error(a, b)[0]
                if not math.isfinite(off):
                    raise ValueError("the result holds NaN or infinity")
            else:
                off = float(not mx.array_equal(a, b).item())
            error = max(error, off)
    except Exception as raised:  # whatever a compiler or driver raises
        error, note = None, sentence(raised)
    return Proof(name, facts, error, tolerance, time.perf_counter() - begun, note)


# Times of layers.

RUNS, RUN_SECONDS, QUICK_RUN_SECONDS = 9, 0.25, 0.12
BATCH_SECONDS = 0.004  # of a run: long for the clock, too short to heat a laptop
BATCH_BYTES = 1 << 28  # of the results that a run holds at a time
MOST_SECONDS = 12.0  # of one route
REFERENCE_SECONDS = 3.0  # of the floor route, where it is only a reference
# Times over the roofline that a route takes, until one was timed; and seconds that it
# compiles.
SLOWER = {METAL: 4.0, CUDA: 20.0, CPU: 6.0}
COMPILE_SECONDS = {METAL: 0.5, CUDA: 4.0, CPU: 0.01}
LEAST_MS = 0.05  # of a call
MEMORY_SHARE = 0.4  # of the machine's, that a layer's arrays may take
RELATION = "relation"


@dataclass(frozen=True)
class Row:
    """One timed route of a layer's pass, or the build of its relation.

    Attributes:
        layer: the layer in words; for a build, the relation.
        pass_: the pass, or "relation".
        route: its name; "" for a build.
        chosen: whether ``select`` takes the route.
        rows, edges: of the relation.
        ms: the median; None if the call failed.
        first_ms: the first call, which compiles.
        tflops: useful operations a second, 10^12.
        roofline_ms: the least time at the chip's peak rates.
        error: relative to the floor route; None if it was not compared.
        note: the error message, or None.
    """

    layer: str
    pass_: str
    route: str
    chosen: bool
    rows: int | None
    edges: int | None
    ms: float | None = None
    first_ms: float | None = None
    tflops: float | None = None
    roofline_ms: float | None = None
    error: float | None = None
    note: str | None = None


def measured(
    call: Callable[[], mx.array], seconds: float
) -> tuple[float, float, mx.array]:
    """Return (ms of the first call, median ms of those after it, the first result)."""

    def once() -> tuple[float, mx.array]:
        mx.synchronize()
        start = time.perf_counter()
        y = call()
        mx.eval(y)
        mx.synchronize()
        return time.perf_counter() - start, y

    first, y = once()
    again = once()[0]
    if again > seconds:
        return 1e3 * first, 1e3 * again, y
    count = min(BATCH_SECONDS / max(again, 1e-9), BATCH_BYTES / max(1, y.nbytes), 50)
    count, taken, begun = max(1, int(count)), [again], time.perf_counter()
    while len(taken) <= RUNS and time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        mx.eval([call() for _ in range(count)])
        mx.synchronize()
        taken.append((time.perf_counter() - start) / count)
    return 1e3 * first, 1e3 * statistics.median(taken[1:] or taken), y


# The run.


@dataclass
class Doctor:
    """A run of the doctor, and its report.

    Attributes:
        quick: whether only the chosen routes of a short list are timed.
        seconds: time budget.
        path: of ``doctor.json``, which is written while the doctor runs, or None.
        layers: what is timed.
    """

    quick: bool = False
    seconds: float | None = None
    path: Path | None = None
    layers: Sequence[Layer] = field(default_factory=lambda: LAYERS)

    def __post_init__(self):
        # Results are compared in float32, so MLX's matmul must not round to TF32.
        os.environ["MLX_ENABLE_TF32"] = "0"
        self.seconds = self.seconds or (QUICK_SECONDS if self.quick else SECONDS)
        self.device = current_device()
        self.machine = machine_facts(self.device)
        self.busy = busy()
        self.proofs: list[Proof] = []
        self.left_out = 0  # kernels
        self.rows: list[Row] = []
        self.skipped: list[tuple[str, str]] = []  # what, why
        self.unfinished: str | None = "start"
        self._times: list[tuple[Problem, dict[str, float | None]]] = []
        self._slower = SLOWER[self.device.backend]
        self._begun, self._saved = time.perf_counter(), -math.inf
        self._parts: set[str] = set()

    def __call__(self) -> Doctor:
        """Prove and time what fits into the seconds; return the doctor itself."""
        self.prove(PROOF_SHARE)
        if not self.machine["on_host"] and not self.busy:
            self.time_layers()
            self.busy = busy()
        if self.busy:
            # Times of a busy machine mislead whoever reads or compares them.
            self.rows = [replace(r, ms=None, tflops=None) for r in self.rows if r.note]
            self._times = []
        self.unfinished = None
        return self

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.perf_counter() - self._begun)

    def _start(self, part: str, done: int, total: int, name: str) -> None:
        """Note what runs next, show it, and write the report once a second."""
        self.unfinished = f"{part}: {name}"
        if self.path and time.perf_counter() - self._saved > SAVE_SECONDS:
            self.save(self.path)
            self._saved = time.perf_counter()
        if not self.path:
            return
        if sys.stderr.isatty():
            line = f"{part} {done + 1} of {total}: {name}"[:79].ljust(79)
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
        elif part not in self._parts:
            self._parts.add(part)
            print(f"{part}: {total}", file=sys.stderr, flush=True)

    def prove(self, share: float) -> None:
        """Prove relations, norms, pools and every contraction kernel.

        Args:
            share: of the seconds, after which the rest is left out.
        """
        compiles = self.device.backend == CUDA and first_use.compiles()
        if compiles:
            first_use.rehearse_geometry(3)
        kept_back = (1 - share) * self.seconds
        for at, check in enumerate(CHECKS):
            if self.left <= kept_back:
                self.left_out += 1
                continue
            self._start("relations, norms and pools", at, len(CHECKS), check[0])
            self.proofs.append(prove_check(*check))
        kernels = points(self.device)
        for at, point in enumerate(kernels):
            if self.left <= kept_back:
                self.left_out += 1
                continue
            p = point.problem
            name = f"{point.route} {p.pass_}, {p.dtype}, {p.c_in} to {p.c_out}"
            self._start("kernels", at, len(kernels), name)
            if compiles and at % COMPILED_TOGETHER == 0:
                batch = kernels[at : at + COMPILED_TOGETHER]
                compile_together(batch, self.device)
            self.proofs.append(prove(point, self.device))

    def time_layers(self) -> None:
        """Time the layers, the smallest first if the list is the short one."""
        layers = [la for la in self.layers if la.quick or not self.quick]
        if self.quick:
            layers.sort(key=lambda la: la.rows * la.c_in * la.c_out)
        # Layers over the same relation follow each other.
        order = list(dict.fromkeys((la.scene, la.size, la.kind) for la in layers))
        layers.sort(key=lambda la: order.index((la.scene, la.size, la.kind)))
        relation, source = None, None
        for at, layer in enumerate(layers):
            self._start("layers", at, len(layers), str(layer))
            if why := self._obstacle(layer):
                self.skipped.append((str(layer), why))
                continue
            if layer.source != source:
                relation, source = self._build(layer), layer.source
            if relation is not None:
                for pass_ in layer.passes:
                    self._time_pass(layer, pass_, relation)
            mx.clear_cache()

    def _obstacle(self, layer: Layer) -> str | None:
        """Return why a layer cannot be timed."""
        needed = layer.rows * (2 * layer.c_in + 3 * layer.c_out) * 4
        memory = self.machine["memory_gb"]
        if memory and needed > MEMORY_SHARE * memory * 2**30:
            return f"it takes {needed / 1e9:.1f} GB of {memory:.0f}"
        # About two seconds for a million voxels on two cores.
        return None if self.left > 2e-6 * layer.rows else "no time was left"

    def _build(self, layer: Layer) -> Relation | None:
        """Time a relation from new coordinates to its table, and return one."""
        try:
            coords = SCENES[layer.scene](layer.size)
            mx.eval(coords)
            first, ms, _ = measured(
                lambda: build_relation(coords + 0, layer.kind).out_in, self._run_seconds
            )
            relation = build_relation(coords, layer.kind)
            mx.eval(relation.edges)
            facts = relation.n_out, relation.n_edges, ms, first
            row = Row(layer.source, RELATION, "", True, *facts)
        except Exception as raised:  # whatever a compiler or driver raises
            relation, note = None, sentence(raised)
            row = Row(layer.source, RELATION, "", True, None, None, note=note)
        self.rows.append(row)
        return relation

    @property
    def _run_seconds(self) -> float:
        return QUICK_RUN_SECONDS if self.quick else RUN_SECONDS

    def _time_pass(self, layer: Layer, pass_: str, relation: Relation) -> None:
        """Time the routes of a pass; the chosen one comes first."""
        problem = layer.problem(pass_, relation)
        choice = select(problem, device=self.device)
        routes = [choice.route]
        if not self.quick:
            # Every route, also what adds atomically and is not deterministic.
            able = candidates(replace(problem, deterministic=False), self.device)
            routes += [route for route in able if route != choice.route]
        arguments = operands(problem, relation)
        times: dict[str, float | None] = {}
        reference = self._floor(problem, relation, arguments)
        for route in routes:
            needed = self._estimate(problem, route, relation)
            if needed > min(self.left, MOST_SECONDS):
                why = "no time was left"
                if needed > MOST_SECONDS:
                    why = f"more than {MOST_SECONDS:.0f} s are estimated"
                self.skipped.append((f"{pass_} of {layer} by {route}", why))
                continue
            chosen = route == choice.route
            row = self._time(layer, problem, route, chosen, arguments, reference)
            self.rows.append(row)
            if route.name != "fp32_atomic":
                times[route.name] = None if row.note else row.ms
        if len(times) > 1:
            self._times.append((problem, times))

    def _time(
        self,
        layer: Layer,
        problem: Problem,
        route: Route,
        chosen: bool,
        arguments: tuple,
        reference: mx.array | None,
    ) -> Row:
        relation = arguments[0].T if problem.pass_ == INPUT_GRAD else arguments[0]
        facts = problem.n_out, relation.n_edges
        row = Row(str(layer), problem.pass_, route.name, chosen, *facts)
        try:
            plan = route.plan(_allowing(problem, route), self.device)
            first, ms, y = measured(lambda: plan(*arguments), self._run_seconds)
            error, note = None, None
            if reference is not None:
                error, note = _error(y, reference, plan.tolerance)
            counted = cost(problem, self.device, relation=relation)
        except Exception as raised:  # whatever a compiler or driver raises
            return replace(row, note=sentence(raised))
        least = counted.roofline_ms or 0.0
        if ms > 1:
            # Expect the ratio just seen, or half of the old one.
            seen = ms / max(least, LEAST_MS)
            self._slower = max(2.0, seen, self._slower / 2)
        return replace(
            row,
            ms=ms,
            first_ms=first,
            tflops=counted.useful_flops / ms / 1e9,
            roofline_ms=least,
            error=error,
            note=note,
        )

    def _estimate(self, problem: Problem, route: Route, relation: Relation) -> float:
        """Return about how many seconds the timing of a route takes."""
        counted = cost(problem, self.device, relation=relation)
        least = max(counted.roofline_ms or 0.0, LEAST_MS) / 1e3
        compiling = COMPILE_SECONDS[self.device.backend]
        return compiling + 3 * self._slower * least + self._run_seconds

    def _floor(
        self, problem: Problem, relation: Relation, arguments: tuple
    ) -> mx.array | None:
        """Return the floor route's result, or None if it would take too long."""
        needed = self._estimate(problem, named(FLOOR), relation)
        if needed > min(self.left / 2, REFERENCE_SECONDS):
            return None
        try:
            y = named(FLOOR).plan(problem, self.device)(*arguments)
            mx.eval(y)
        except Exception:  # the route's own row reports it
            return None
        return y

    @property
    def wrong(self) -> list[str]:
        """A sentence for each wrong result and each failure."""
        lines = [
            f"{p.kernel} ({p.facts}): "
            + (p.note or f"off by {p.error:.1e}, at most {p.tolerance:.1e}")
            for p in self.proofs
            if not p.good
        ]
        for r in self.rows:
            if r.note:
                by = f" by {r.route}" if r.route else ""
                lines.append(f"{r.pass_} of {r.layer}{by}: {r.note}")
        return lines

    def as_dict(self) -> dict:
        """Return what ``doctor.json`` holds."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "machine": {**self.machine, "busy": self.busy},
            "device": asdict(self.device),
            "quick": self.quick,
            "limit": self.seconds,
            "seconds": round(time.perf_counter() - self._begun, 2),
            "wrong": self.wrong,
            "left_out": self.left_out,
            "proofs": [p.as_dict() for p in self.proofs],
            "layers": [asdict(row) for row in self.rows],
            "skipped": self.skipped,
            "unfinished": self.unfinished,
        }

    def save(self, path: Path) -> None:
        """Write ``doctor.json``, all of it or nothing."""
        text = json.dumps(self.as_dict(), indent=1, allow_nan=False, default=str)
        kept_files.write_whole(path, text.encode())

    def keep(self) -> int:
        """Keep the times as this machine's tuning; return of how many problems.

        Raises:
            ValueError: the machine is busy, or Metal's kernels ran on the CPU.
        """
        if self.machine["on_host"]:
            raise ValueError(f"{ON_HOST}: nothing was kept")
        if self.busy:
            raise ValueError(
                f"the machine is busy ({self.busy}): nothing was kept. Close other "
                "programs and run the doctor again"
            )
        for problem, times in self._times:
            measure.keep(problem, self.device, times)
        return len(self._times)


def _allowing(problem: Problem, route: Route) -> Problem:
    """Return the problem as a route takes it: atomic sums waive determinism."""
    atomic = route.name == "fp32_atomic"
    return replace(problem, deterministic=False) if atomic else problem


def run(
    folder: Path,
    *,
    quick: bool = False,
    seconds: float | None = None,
    keep: bool = False,
) -> int:
    """Run the doctor, print its report and write ``doctor.json``.

    Args:
        folder: of ``doctor.json``.
        quick: the short form.
        seconds: time budget, by default 300, or 30 for the short form.
        keep: whether to keep the times as this machine's tuning.

    Returns:
        The exit code: 0, or 1 if a kernel is wrong.

    Raises:
        OSError: the file cannot be written.
        ValueError: times were to be kept, and they are not trustworthy.
    """
    path = folder / "doctor.json"
    check_writable(path)
    folder.mkdir(parents=True, exist_ok=True)
    doctor = Doctor(quick, seconds, path)
    with hang_guard(doctor, path):
        doctor()
    doctor.save(path)
    if sys.stderr.isatty():
        print(f"\r{'':79}\r", end="", file=sys.stderr, flush=True)
    print(f"{report(doctor.as_dict())}\n\nwritten: {path}")
    if keep:
        count = doctor.keep()
        print(f"kept as this machine's tuning: {count} problems (used by ml.tune())")
    return 1 if doctor.wrong else 0


@contextmanager
def hang_guard(
    doctor: Doctor, path: Path, leave: Callable = os._exit, grace: float = GRACE
) -> Iterator[None]:
    """End the process if the block takes far longer than the doctor's seconds.

    Nothing can stop a kernel that hangs; ``doctor.json`` names it.

    Args:
        doctor: the doctor that runs.
        path: of its report.
        leave: ends the process with an exit code.
        grace: share of the seconds that is granted beyond them.
    """

    def stop() -> None:
        doctor.save(path)
        print(
            f"mlx-lattice doctor: gave up {grace:.0%} after its {doctor.seconds:.0f} s "
            f"in {doctor.unfinished}; {path} holds the results until then",
            file=sys.stderr,
            flush=True,
        )
        leave(HUNG)

    timer = threading.Timer(doctor.seconds * (1 + grace), stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# Reports as text; each takes what ``doctor.json`` holds.

COLUMNS = (
    ("layer", "left"),
    ("pass", "left"),
    ("route", "left"),
    ("ms", "right"),
    ("TFLOP/s", "right"),
    ("roofline", "right"),
    ("error", "right"),
)
FACTS = ("chip", "system", "release", "mlx", "library", "python", "memory_gb")


def headline(found: Mapping) -> str:
    """Return the chip, the software and the verdict in one line."""
    m, d, wrong = found["machine"], found["device"], len(found["wrong"])
    release = f" {m['release']}" if m["release"] else ""
    verdict = f"{wrong} wrong" if wrong else "nothing wrong"
    if m["busy"]:
        verdict = f"{wrong or 'no'} wrong results, not timed: the machine is busy"
    return (
        f"{m['chip']} ({d['name']}, {d['backend']}), {m['system']}{release}, MLX "
        f"{m['mlx']}: {verdict}, {found['seconds']:.0f} s of {found['limit']:.0f}"
    )


def report(found: Mapping) -> str:
    """Return a report as a person reads it."""
    m, parts = found["machine"], [headline(found)]
    if m["on_host"]:
        parts.append(f"{ON_HOST}: kernels were proved, and nothing was timed.")
    if m["busy"]:
        parts.append(
            f"The machine is busy: {m['busy']}. No times were kept: close other "
            "programs, then run the doctor again."
        )
    if m["metal_target"] is not None:
        parts.append(
            "Metal compiles kernels with __ENVIRONMENT_OS_VERSION_MIN_REQUIRED__ = "
            f"{m['metal_target']}; TensorOps (M5) need 260200 or later."
        )
    if found["unfinished"]:
        parts.append(f"Stopped in: {found['unfinished']}")
    right = sum(p["good"] for p in found["proofs"])
    left_out = found["left_out"]
    parts.append(
        f"kernels and operations: {right} right, {len(found['proofs']) - right} wrong"
        + (f", {left_out} left out (no time was left)" if left_out else "")
    )
    if found["layers"]:
        parts.append(drawn(COLUMNS, [_cells(row) for row in found["layers"]]))
    for why, count in Counter(why for _, why in found["skipped"]).items():
        names = [what for what, reason in found["skipped"] if reason == why]
        more = f" and {count - 3} more" if count > 3 else ""
        parts.append(f"left out ({why}): {'; '.join(names[:3])}{more}")
    wrong = found["wrong"]
    parts += [f"WRONG: {line}" for line in wrong[:20]]
    if len(wrong) > 20:
        parts.append(f"and {len(wrong) - 20} more that are wrong")
    return "\n".join(parts)


def _cells(row: Mapping) -> tuple[str, ...]:
    """Return a row's texts, by ``COLUMNS``; ">" marks the chosen route."""

    def text(value: float | None, form: Callable) -> str:
        return "-" if value is None else form(value)

    error = text(row["error"], lambda e: f"{e:.0e}")
    if row["note"]:
        error = "failed" if row["ms"] is None else f"WRONG {error}"
    return (
        row["layer"],
        row["pass_"],
        (("> " if row["chosen"] else "  ") + row["route"]) if row["route"] else "",
        text(row["ms"], _ms),
        text(row["tflops"], lambda t: f"{t:.3g}"),
        text(row["roofline_ms"], milliseconds),
        error,
    )


def _ms(value: float) -> str:
    """Return milliseconds with four digits or fewer."""
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def read(path: str | Path) -> dict:
    """Return the report in a file.

    Raises:
        ValueError: the file is not a ``doctor.json`` of this version.
    """
    path = Path(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kind, version = found["format"], found["version"]
    except (ValueError, KeyError, TypeError):
        kind, version = None, None
    if kind != FORMAT:
        raise ValueError(f"{path.name} is not a doctor.json of mlx_lattice")
    if version != VERSION:
        raise ValueError(
            f"{path.name} has version {version} of the format; this library reads "
            f"version {VERSION}: run the doctor again"
        )
    return found


def compare(a: Mapping, b: Mapping) -> str:
    """Return two reports side by side: facts that differ, times, wrong results."""
    parts = [f"a  {headline(a)}", f"b  {headline(b)}"]
    for name in FACTS:
        one, two = a["machine"][name], b["machine"][name]
        if one != two:
            parts.append(f"{name}: {one} | {two}")
    one, two = (
        {(r["layer"], r["pass_"], r["route"]): r["ms"] for r in found["layers"]}
        for found in (a, b)
    )
    rows = []
    for key in (key for key in one if key in two):
        x, y = one[key], two[key]
        times = ("-" if ms is None else _ms(ms) for ms in (x, y))
        rows.append((" ".join(key), *times, f"{x / y:.2f}" if x and y else "-"))
    if rows:
        names = (("", "left"), ("a ms", "right"), ("b ms", "right"), ("a / b", "right"))
        parts.append(drawn(names, rows))
    else:
        parts.append("no layer was timed in both")
    for name, found, other in (("a", a, b), ("b", b, a)):
        for line in found["wrong"]:
            if line not in other["wrong"]:
                parts.append(f"wrong in {name} only: {line}")
            elif name == "a":
                parts.append(f"wrong in both: {line}")
    only = len(one.keys() - two.keys()), len(two.keys() - one.keys())
    if any(only):
        parts.append(f"timed in one only: {only[0]} in a, {only[1]} in b")
    return "\n".join(parts)
