"""A drop-in for ``mx.fast.metal_kernel`` that runs kernels on the CPU, lazily.

``install()`` puts it in MLX's place. A kernel called then becomes a node of MLX's
graph like any other: it runs when evaluated, works inside ``mx.compile`` and, wrapped
in ``mx.custom_function`` as a Metal kernel must be anyway, under ``mx.grad`` and
``mx.jvp``.

The node is a small C++ primitive (primitive.cpp), built into the cache on first use
with the clang that the kernels need, and nanobind.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import itertools
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from .compile import compile_source, runtime
from .launch import order_index, read_report
from .report import Report
from .source import Source, capture
from .toolchain import (
    CHECKED,
    COUNTED,
    FAST,
    HERE,
    MODES,
    ToolMissing,
    build_once,
    cache_folder,
    clang,
    contents,
    digest,
    missing,
    mlx_include,
)

_MODULE = "metal_host_primitive"
_real_metal_kernel = mx.fast.metal_kernel
_numbers = itertools.count()


@dataclass
class Recording:
    """How kernels run while it is the innermost, and what they did.

    Attributes:
        checked: Whether kernels that are called are built with all checks.
        counted: Whether they count their arithmetic too; implies ``checked``.
        order: ``"forward"``, ``"reverse"`` or ``"random"``.
        seed: Of the random order.
        workers: OS threads that share the threadgroups of a fast kernel.
        number: What the primitive calls it; -1 records nothing and throws faults.
    """

    checked: bool = False
    counted: bool = False
    order: str = "forward"
    seed: int = 0
    workers: int = 1
    number: int = -1
    _launches: list[Report] = field(default_factory=list)

    @property
    def mode(self) -> str:
        """How kernels that are called are built."""
        return COUNTED if self.counted else CHECKED if self.checked else FAST

    def __post_init__(self):
        self.checked |= self.counted
        order_index(self.order)

    @property
    def report(self) -> Report:
        """All launches that were evaluated in the block so far.

        Raises:
            RuntimeError: The recording is checked, but a launch was not: mx.compile
                had traced it before.
        """
        for index, checked, counts, traffic, faults in _primitive().take(self.number):
            source = _sources[index]
            if self.checked and not checked:
                raise RuntimeError(
                    f"{source.name} ran unchecked: mx.compile traced it before the "
                    "checked recording began; compile the function inside of it"
                )
            self._launches.append(
                read_report(source.name, source.text, counts, traffic, faults)
            )
        return Report.merge(self._launches)


_active = [Recording()]
# Every source that was called, numbered: a launch may run long after its call.
_sources: list[Source] = []
_source_numbers: dict[str, int] = {}


def _number(source: Source) -> int:
    if source.text not in _source_numbers:
        _source_numbers[source.text] = len(_sources)
        _sources.append(source)
    return _source_numbers[source.text]


def _apply(recording: Recording) -> None:
    """Tells the primitive how kernels run that are evaluated from now on."""
    _primitive().set(
        order_index(recording.order),
        recording.seed,
        recording.workers,
        recording.number,
    )


@functools.cache
def _primitive():
    """Builds and loads primitive.cpp."""
    if reason := missing():
        raise ToolMissing(reason)
    import nanobind

    bind = Path(nanobind.__file__).parent
    mlx_library = mlx_include().parent / "lib"
    compiler, suffix = clang(), sysconfig.get_config_var("EXT_SUFFIX")
    version = digest(
        compiler.version,
        sys.version,
        nanobind.__version__,
        mx.__version__,
        mlx_library,
        contents("runtime"),
        (HERE / "primitive.cpp").read_text(),
    )
    folders = [HERE, mlx_include(), bind / "include", bind / "ext/robin_map/include"]
    folders.append(sysconfig.get_paths()["include"])
    command = [*compiler.command, "-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
    # MLX keeps its types in a nanobind domain of their own: join it, or no array fits.
    command += ["-fvisibility=hidden", "-fno-strict-aliasing", "-DNB_DOMAIN=mlx"]
    command += [f"-I{folder}" for folder in folders]
    command += [str(HERE / "primitive.cpp"), str(bind / "src" / "nb_combined.cpp")]
    command += [f"-L{mlx_library}", f"-Wl,-rpath,{mlx_library}", "-lmlx"]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    target = cache_folder() / f"{_MODULE}-{version}{suffix}"
    build_once(target, command, "building MLX's side of metal/host")
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(target))
    spec = importlib.util.spec_from_file_location(_MODULE, target, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _on_cpu(stream: mx.Stream | mx.Device | None) -> mx.Stream | mx.Device:
    """Where a kernel runs that was meant for the GPU."""
    if stream is None:
        return mx.cpu
    device = stream.device if isinstance(stream, mx.Stream) else stream
    return stream if device == mx.Device(mx.cpu) else mx.cpu


class HostKernel:
    """What ``metal_kernel`` returns: call it as you would the kernel on a Mac."""

    def __init__(self, real: Callable[..., list[mx.array]]):
        self._real = real

    def source(self, *, inputs: Sequence[object], **call: object) -> Source:
        """The source that this call would hand to Metal; nothing runs."""
        call.pop("stream", None)
        call.pop("verbose", None)
        return capture(self._real, [mx.array(x) for x in inputs], **call)

    def __call__(
        self,
        *,
        inputs: Sequence[object],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, object]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: mx.Stream | mx.Device | None = None,
    ) -> list[mx.array]:
        """Puts a launch into the graph; the arguments are those of MLX's kernels."""
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        optional = {"template": template} if template else {}
        source = capture(
            self._real,
            arrays,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            grid=grid,
            threadgroup=threadgroup,
            init_value=init_value,
            **optional,
        )
        if verbose:
            print(source.text)
        recording = _active[-1]
        entry = compile_source(source.text, name=source.name, mode=recording.mode)[
            source.name
        ]
        where = _on_cpu(stream)
        if source.row_contiguous:
            arrays = [mx.contiguous(x, stream=where) for x in arrays]
        return _primitive().launch(
            arrays,
            [list(shape) for shape in output_shapes],
            output_dtypes,
            where,
            ctypes.cast(runtime().mtl_launch, ctypes.c_void_p).value,
            entry.address,
            source.name,
            [p.name for p in entry.buffers],
            grid,
            threadgroup,
            source.metadata,
            init_value,
            MODES.index(recording.mode),
            _number(source),
        )


def metal_kernel(*args: object, **kwargs: object) -> HostKernel:
    """The stand-in for ``mx.fast.metal_kernel``, with its arguments."""
    return HostKernel(_real_metal_kernel(*args, **kwargs))


def install(
    *, checked: bool = False, order: str = "forward", seed: int = 0, workers: int = 1
) -> None:
    """Makes ``mx.fast.metal_kernel`` run kernels on the CPU, until ``uninstall()``.

    Kernels must be created after it. Faults raise RuntimeError where arrays are
    evaluated.

    Args:
        checked: Whether kernels are built with all checks, several times slower.
        order: In what order threads run: ``"forward"``, ``"reverse"`` or ``"random"``.
        seed: Of the random order.
        workers: OS threads that share the threadgroups of a fast kernel.

    Raises:
        ToolMissing: clang or nanobind is not installed.
    """
    _active[0] = Recording(checked, False, order, seed, workers)
    _apply(_active[-1])
    mx.fast.metal_kernel = metal_kernel


def uninstall() -> None:
    """Gives ``mx.fast.metal_kernel`` back."""
    mx.fast.metal_kernel = _real_metal_kernel


@contextlib.contextmanager
def recording(
    *,
    checked: bool = True,
    counted: bool = False,
    order: str = "random",
    seed: int = 0,
    workers: int = 1,
) -> Iterator[Recording]:
    """Installs the host inside a ``with`` block and records what kernels do.

    Faults are recorded, not raised. Whether a kernel is checked is settled where it is
    called, all else where it is evaluated: do both inside.

    Args:
        checked: Whether kernels are built with all checks.
        counted: Whether they count arithmetic, matrix loads and lines of memory too,
            which takes several times as long again; implies ``checked``.
        order: In what order threads run: ``"forward"``, ``"reverse"`` or ``"random"``.
        seed: Of the random order.
        workers: OS threads that share the threadgroups of a fast kernel.

    Yields:
        The recording; its ``report`` holds what ran so far.
    """
    before = mx.fast.metal_kernel
    _active.append(Recording(checked, counted, order, seed, workers, next(_numbers)))
    mx.fast.metal_kernel = metal_kernel
    try:
        _apply(_active[-1])
        yield _active[-1]
    finally:
        mx.fast.metal_kernel = before
        _active.pop()
        _apply(_active[-1])


def run(
    call: Callable[..., object],
    *args: object,
    checked: bool = True,
    counted: bool = False,
    order: str = "random",
    seed: int = 0,
    workers: int = 1,
    **kwargs: object,
) -> tuple[object, Report]:
    """Calls something that launches Metal kernels, and evaluates what it returns.

    ``run(kernel, inputs=[x], grid=..., ...)`` runs one kernel; ``run(layer, x)`` runs
    whatever the call launches.

    Args:
        call: A kernel of ``mx.fast.metal_kernel``, created before or after
            ``install()``, or a function that creates and calls kernels.
        *args: Its arguments.
        checked: Whether kernels are built with all checks.
        counted: Whether they count arithmetic, matrix loads and lines of memory too.
        order: In what order threads run: ``"forward"``, ``"reverse"`` or ``"random"``.
        seed: Of the random order.
        workers: OS threads that share the threadgroups of a fast kernel.
        **kwargs: Its keyword arguments.

    Returns:
        What the call returned, evaluated, and a report with ``faults`` and ``counts``.
        After a fault the outputs are whatever they are.
    """
    if type(call) is type(_real_metal_kernel):
        call = HostKernel(call)
    settings = {"order": order, "seed": seed, "workers": workers}
    with recording(checked=checked, counted=counted, **settings) as record:
        outputs = call(*args, **kwargs)
        mx.eval(outputs)
    return outputs, record.report
