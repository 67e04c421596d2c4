"""A matrix kernel proves itself before its first launch on a machine.

It computes one small problem, and the result is compared with that of MLX operations.
The problem has 333 rows and 27 offsets: tiles that are full and one that is not, rows
with many edges, few and none, an offset without any; or one offset, over which rows
feed themselves. Values are small integers, whose sums are exact in any order and dtype,
so one that is wrong is off by one or more. Results are kept on disk.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import plistlib
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from threading import RLock
from typing import Any

import mlx.core as mx

from .. import cache_files, devices, settings
from ..backends import portable_only
from ..backends.gpu.kernel import SHORT, GpuKernel
from ..checks import DTYPES, LatticeWarning
from ..devices import CPU, CUDA, METAL, Device
from ..epilogue import CHANNELS, SLOPE
from ..problem import (
    AFTER,
    FORWARD,
    IN_KERNEL,
    INPUT_GRAD,
    MLX_LAYOUT,
    OPERATIONS,
    WEIGHT_GRAD,
    Plan,
    Problem,
)
from ..quantized import IntegerWeight, QuantizedWeight, integer_weight, padded
from ..relation import Relation
from .table import FLOOR, named

# Raise it when the proof becomes stricter: earlier results are then ignored.
VERSION = 2

VARIABLE = "MLX_LATTICE_PROOF"


@contextmanager
def proof(on: bool = True) -> Iterator[None]:
    """Turn the proof of matrix kernels on or off inside the block.

    Before its first launch on a machine, a kernel that uses matrix instructions
    computes one small problem, which is compared with the floor route. A kernel is new
    to a machine if the chip, the build of the system, MLX or the kernel's text is new.
    If the result is wrong, or the kernel raises or does not compile, ``select`` refuses
    it from then on, with a warning, and takes the next route. Results are kept in the
    cache folder.

    The environment variable MLX_LATTICE_PROOF=0 is ``proof(False)`` for a whole
    process: kernels run without a proof, even those that failed.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> with ml.proof(False):
        ...     y = nn.SubmConv3d(8, 16, 3)(x)
        >>> y.shape
        (64, 16)
    """
    with settings.block(proved=on):
        yield


def enabled() -> bool:
    """Return whether kernels prove themselves here."""
    inside = settings.current().proved
    return cache_files.is_set(VARIABLE, default=True) if inside is None else inside


class Results:
    """The results of the kernels of one machine."""

    def __init__(self, path: Path, where: str):
        self.path: Path = path
        self.where: str = where
        header = {"version": VERSION, "machine": where}
        self._file = cache_files.EntryFile(path, header, _is_entry)
        # Why kernels are refused, by digest; choices keep the object that they read.
        self.refused: dict[str, str] = {}
        self.load()

    def load(self) -> None:
        """Read the file."""
        entries = self._file.load()
        # By key: the kernel's name, and why it is refused or None.
        self.entries: dict[str, object] = {
            k: e for k, e in entries.items() if not isinstance(e, int)
        }
        # By key: how many processes ended while they tried the kernel.
        self.ended: dict[str, int] = {
            k: e for k, e in entries.items() if isinstance(e, int)
        }
        refused = {k.partition(" ")[0]: why for k, (_, why) in self.entries.items()}
        refused = {digest: why for digest, why in refused.items() if why}
        if self.refused != refused:
            self.refused = refused
            settings.note_change()

    def knows(self, plan: Plan, biased: bool) -> bool:
        """Return whether the kernel of a plan was tried before, with these inputs."""
        return key_of(plan, biased) in self.entries

    def add(self, plan: Plan, biased: bool, why: str | None) -> None:
        """Keep why the kernel of a plan is refused; None if it is right."""
        self.note(key_of(plan, biased), [kernel_name(plan.gpu), why])

    def note(self, key: str, entry: list[Any] | int) -> None:
        """Write an entry, and read what other processes found."""
        self._file.add(key, entry)
        self.load()

    @property
    def kernels(self) -> tuple[tuple[str, str | None], ...]:
        """(name, why it is refused or None) of each, refused ones first."""
        found = map(tuple, self.entries.values())
        return tuple(sorted(found, key=lambda each: (each[1] is None, each[0])))


def _is_entry(entry: object) -> bool:
    if isinstance(entry, int):
        return True
    name, why = entry
    return isinstance(name, str) and isinstance(why, str | None)


def key_of(plan: Plan, biased: bool) -> str:
    """Return the key of a plan's kernel: its text, and which inputs it is given."""
    after = plan.problem.integer or plan.problem.epilogue
    given = ("bias",) if biased and after is None else ()
    if after is not None and plan.epilogue == IN_KERNEL:
        given = after.there
    if plan.splits > 1 or plan.problem.pass_ != FORWARD:
        given = ()  # the launch that adds the splits has them
    return " ".join([plan.gpu.digest, *given])


def kernel_name(kernel: GpuKernel) -> str:
    """Return a kernel as people read it: ``tensor_ops<f16, f16, 64, True>``."""
    values = (value for _, value in kernel.template)
    said = (SHORT.get(v, v) if isinstance(v, mx.Dtype) else v for v in values)
    return f"{kernel.symbol}<{', '.join(map(str, said))}>"


@cache
def machine_of(name: str, backend: str) -> str:
    """Return the chip, the build of its system or driver, and the version of MLX.

    The same kernel may give other results if any of them differs.
    """
    if devices.metal_on_host() or backend not in (METAL, CUDA):
        where = f"{name} on {platform.system()} {platform.machine()}"
    else:
        info = mx.device_info(devices.GPU)
        where = str(info.get("device_name", "")) or name
        if backend == CUDA:
            where += f", driver of CUDA {_driver()}"
        else:
            where += f" ({info.get('architecture', '')}), macOS build {_macos_build()}"
    return f"{where}, MLX {mx.__version__}"


def _macos_build() -> str:
    """Return the build of macOS ("25C56"): a version may have several builds."""
    try:
        file = Path("/System/Library/CoreServices/SystemVersion.plist")
        return plistlib.loads(file.read_bytes())["ProductBuildVersion"]
    except (OSError, KeyError):
        return platform.version()


def _driver() -> str:
    """Return the version of CUDA that the driver has ("13.0")."""
    version = ctypes.c_int()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def current() -> Results:
    """Return the results on the machine that MLX runs on now."""
    return _results_on(devices.current())


def _results_on(device: Device) -> Results:
    folder = settings.current().cache, settings.environment["MLX_LATTICE_CACHE"]
    return _results(folder, device.name, device.backend)


@cache
def _results(folder: tuple, name: str, backend: str) -> Results:
    # `folder` is what `cache_files.folder` depends on; each plan asks for results.
    where = machine_of(name, backend)
    file = hashlib.sha256(where.encode()).hexdigest()[:12]
    return Results(cache_files.folder() / "proofs" / f"{file}.json", where)


def refused_on(device: Device) -> Mapping[str, str]:
    """Return why kernels are refused on a device, by digest: only here they are."""
    if device.backend == CPU or not enabled() or device != devices.current():
        return {}
    return _results_on(device).refused


def refusal(refused: Mapping[str, str], plan: Plan) -> str | None:
    """Return why the kernel of a plan is refused, or None."""
    return refused.get(plan.gpu.digest) if refused and plan.gpu else None


ROWS, VOLUME = 333, 27
POOL = 8191  # values, a prime: lines of no array begin with the same ones
# What rounding a result once may change, relative to it; and what float32 sums, or an
# activation, may be off besides.
ROUNDING = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-8}
SLACK = 2e-3
_LARGE = 64  # of which products cancel: sums in half would lose what is beside them
_MOST = 400  # characters of a compiler's message
_FAILED = "its kernel failed its proof on this machine: "

# Kernels that ``prove_all`` proves later, after they were compiled side by side.
_waiting: ContextVar[list[tuple[Plan, bool]] | None] = ContextVar(
    "waiting", default=None
)
_lock = RLock()


class DeviceLost(RuntimeError):
    """A kernel was tried, and nothing runs on the device since."""


@contextmanager
def put_off() -> Iterator[list[tuple[Plan, bool]]]:
    """Let kernels in the block wait for ``prove_all`` of the list that is yielded."""
    waiting: list[tuple[Plan, bool]] = []
    token = _waiting.set(waiting)
    try:
        yield waiting
    finally:
        _waiting.reset(token)


def prove(plan: Plan, biased: bool) -> bool:
    """Return whether a plan may run here; try its kernel if it is new."""
    if plan.proof is None or not enabled():
        return True
    if current().knows(plan, biased):
        return True  # or it was forced, or chosen before it was refused
    waiting = _waiting.get()
    if waiting is not None:
        waiting.append((plan, biased))
        return True
    return prove_all([(plan, biased)])


def prove_all(plans: list[tuple[Plan, bool]]) -> bool:
    """Prove kernels of (plan, whether biased) pairs; return whether all are right."""
    is_right = True
    with _lock:
        results = current()
        for plan, biased in plans:
            if results.knows(plan, biased):
                continue
            why = _result(results, plan, biased)
            if why is None:
                continue
            is_right = False
            warnings.warn(
                f"the route {plan.kernel} is refused for a {plan.problem.pass_} in "
                f"{plan.problem.dtype} on this machine ({results.where}), and the next "
                f"one serves: {why}. Kernel: {kernel_name(plan.gpu)}. Please report "
                f"it; {VARIABLE}=0 runs it all the same",
                LatticeWarning,
                stacklevel=2,
            )
    return is_right


def _result(results: Results, plan: Plan, biased: bool) -> str | None:
    """Try a kernel, keep the result, and return why it is refused."""
    key = key_of(plan, biased)
    # Others wait, so that an entry of a number means that a process has ended: a GPU's
    # fault on Metal may end it.
    with cache_files.alone(".proofs.lock"):
        results.load()
        if results.knows(plan, biased):
            return results.entries[key][1]
        ended = results.ended.get(key, 0)
        results.note(key, ended + 1)
        try:
            if ended > 1:
                why = f"{_FAILED}{ended} processes ended while it was tried"
            else:
                why = check(plan, biased)
        except DeviceLost as error:
            results.add(plan, biased, str(error))
            raise
        except BaseException:
            results.note(key, ended)
            raise
        results.add(plan, biased, why)
    return why


def check(plan: Plan, biased: bool = False) -> str | None:
    """Try a plan's matrix kernel on its small problem, whatever is known of it."""
    trial = Trial(plan, biased)
    _wait()  # for earlier launches: their errors are not the kernel's
    try:
        y = trial.run()
        mx.eval(y)
    except Exception as error:
        said = " ".join(str(error).split())[:_MOST]
        why = f"{_FAILED}{type(error).__name__}: {said}"
        try:
            _wait()
        except Exception:
            raise DeviceLost(
                f"{why}; the device runs nothing since. Start the process again: the "
                "kernel is refused there"
            ) from error
        return why
    fault = trial.fault(y)
    return fault and _FAILED + fault


def _wait() -> None:
    """Have the device run something, behind all that it was given."""
    mx.eval(mx.zeros((1,)) + 1)


@cache
def neighbours(mirrored: bool) -> tuple[tuple[int, ...], ...]:
    """Return the rows of the neighbour table, -1 for no edge."""
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
def _relation(where: str, mirrored: bool, itself: bool) -> Relation:
    """Return a relation whose views are those of one backend."""
    del where
    lines = [(row,) for row in range(ROWS)] if itself else neighbours(mirrored)
    with mx.stream(mx.cpu):
        table = mx.array(lines, dtype=mx.int32)
        mx.eval(table)
    kind = "submanifold" if mirrored or itself else "general"
    found = Relation(
        kind, len(lines[0]), ROWS, ROWS, lambda keep, wanted: table, mirrored=mirrored
    )
    found.set_counted(sum(at >= 0 for line in lines for at in line))
    return found


class Trial:
    """The small problem of one plan, and the result that its kernel must give."""

    layer: Relation

    def __init__(self, plan: Plan, biased: bool):
        p = plan.problem
        self.plan: Plan = plan
        where = devices.current().name
        # Of this layer the pass reads the table that the kernel expects. A gradient of
        # weights reads half of the edges of mirrored relations, turning them.
        mirrored = p.mirrored or p.pass_ == WEIGHT_GRAD
        straight = p.mirrored == (p.pass_ == INPUT_GRAD)
        self.layer, reference = (
            each if straight else each.T
            for each in (
                _relation(of, mirrored, plan.proof.itself) for of in (where, "portable")
            )
        )
        is_packed = bool(p.bits) and not plan.dequantised
        in_kernel = plan.epilogue not in (AFTER, OPERATIONS)
        self.problem: Problem = Problem.of(
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
        self.biased: bool = biased and alone and p.pass_ == FORWARD
        # With parts that 11 bits do not hold, if they are to be multiplied too.
        exact = p.dtype != "float32" or plan.products == "TF32"
        self._unit = 1.0 if exact else 1 + 2**-12
        with mx.stream(mx.cpu):
            is_integer = self.problem.integer is not None
            self.arrays: list[Any] = (
                integer_arrays(self.problem) if is_integer else self._arrays()
            )
            self.wanted: mx.array = self._floor(reference)
            mx.eval(self.wanted, [_parts(each) for each in self.arrays])

    def run(self) -> mx.array | tuple[mx.array, mx.array]:
        """Return the kernel's result, and statistics of its rows if it sums them."""
        small = self.plan.proof.again(self.problem)
        return small(self._of_pass(self.layer), *self.arrays)

    def fault(self, made: mx.array | tuple[mx.array, mx.array]) -> str | None:
        """Return what is wrong with a result of ``run``, or None."""
        if isinstance(made, mx.array):
            return self._fault_of(made)
        return self._fault_of(made[0]) or _fault_of_moments(*made)

    def _fault_of(self, y: mx.array) -> str | None:
        p, wanted, dtype = self.problem, self.wanted, DTYPES[self.problem.dtype]
        if p.integer:
            dtype = p.integer.out_dtype(dtype)
        if y.shape != wanted.shape or y.dtype != dtype:
            return f"it is {y.shape} {y.dtype}, not {wanted.shape} {dtype}"
        with mx.stream(mx.cpu):
            y = y.astype(mx.float32)
            most = ROUNDING[p.dtype] * mx.abs(wanted) + SLACK
            if p.integer:
                # Functions other than slopes every backend computes in its own way.
                approximate = 1.0 if p.integer.writes_int8 else most
                most = 0.0 if p.integer.act.kind == SLOPE else approximate
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
        name = "dW" if p.pass_ == WEIGHT_GRAD else "y"
        return (
            f"{count:,} of {wanted.size:,} values are wrong, the first {name}{place} = "
            f"{got:.6g}, which is {right:.6g}"
        )

    def _of_pass(self, layer: Relation) -> Relation:
        return layer.T if self.problem.pass_ == INPUT_GRAD else layer

    def _floor(self, layer: Relation) -> mx.array:
        """Return the floor route's result, in float32 and on the CPU."""
        p, arrays = self.problem, self.arrays
        if not p.integer:
            p = replace(p, dtype="float32")
            arrays = [
                a if isinstance(a, QuantizedWeight) else a.astype(mx.float32)
                for a in arrays
            ]
        with portable_only():
            plan = named(FLOOR).plan(p, devices.profile("cpu"))
            return plan(self._of_pass(layer), *arrays).astype(mx.float32)

    def _arrays(self) -> list:
        """Return features, the weight or dy, and the bias or the epilogue's arrays."""
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


def integer_arrays(p: Problem) -> list[Any]:
    """Return int8 features, the weight and what follows the sums, of all sizes."""
    x = 101 * drawn("x", (p.n_in, p.c_in)) + 13 * drawn("", (p.n_in, p.c_in))
    w = drawn("w", (p.volume, p.c_in // p.groups, p.c_out))
    w = integer_weight(
        w * 97 + drawn("rest", w.shape), bits=p.bits, group_size=p.group_size
    )
    line, of_rows = drawn("scale", (p.c_out,)), drawn("residual", (p.n_out, p.c_out))
    residual = (
        (50 * of_rows).astype(mx.int8)
        if p.integer.residual_int8
        else (5 * of_rows).astype(DTYPES[p.dtype])
    )
    made = {
        "scale": (1.5 + 0.5 * line) / 4096,
        "shift": 3 * drawn("shift", (p.c_out,)),
        "residual": residual,
        "residual_scale": mx.array([0.0371]),
        "out_inverse": mx.array([0.61]),
        "row_scales": 1.5 + 0.5 * drawn("rows", (p.n_in,)),
    }
    return [x.astype(mx.int8), w, *(made[name] for name in p.integer.there)]


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
def _pool(name: str) -> mx.array:
    """Return a pool of values of a name, the same in every process."""
    draw = random.Random(name)
    if name == "words":
        words = [draw.getrandbits(32) for _ in range(POOL)]
        values = mx.array(words, dtype=mx.uint32)
    else:
        values = mx.array(draw.choices((-1.0, 0.0, 1.0), k=POOL))
    mx.eval(values)
    return values


def drawn(name: str, shape: Sequence[int]) -> mx.array:
    """Return values of a pool one after another: -1, 0 and 1, or 32 bits of words."""
    size = prod(shape)
    return mx.concatenate([_pool(name)] * -(-size // POOL))[:size].reshape(shape)


def _packed(p: Problem, dtype: mx.Dtype) -> QuantizedWeight:
    """Return packed weights whose values 8 bits hold."""
    channels = padded(p.c_in, p.group_size)
    shape = VOLUME, p.c_out, channels // p.group_size
    step = 2.0 ** (1 - p.bits)
    scales = step * (1.5 + 0.5 * drawn("scales", shape))
    scales = mx.where(scales == 1.5 * step, step, scales)
    return QuantizedWeight(
        drawn("words", (VOLUME, p.c_out, channels * p.bits // 32)),
        scales.astype(dtype),
        mx.where(drawn("biases", shape) > 0, -2.0, -1.0).astype(dtype),
        p.c_in,
        p.bits,
        p.group_size,
    )


def _parts(array: mx.array | QuantizedWeight | IntegerWeight) -> tuple[mx.array, ...]:
    return (array,) if isinstance(array, mx.array) else array.arrays
