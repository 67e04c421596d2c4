"""GPU kernels: a symbol of ``metal/`` or ``cuda/``, its text for MLX, and its call.

MLX compiles the text of a kernel when it first runs and takes the same arguments for
Metal and CUDA. An ``Interface`` names what goes in and out; the kernel's side gets the
sizes as a struct, ``<Interface>Sizes``. The body of a kernel is one call:
``symbol<template...>(inputs..., sizes, outputs...)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

import mlx.core as mx

from ... import devices
from ...devices import CUDA, METAL, Device, compute_capability, source, source_folder
from .nvrtc import TYPES, Kernel, compiler

# On Metal, MLX puts an input below this size in the `constant` address space.
LEAST_DEVICE_SIZE = 8
THREADS = 256  # of a threadgroup or block where the kernel asks for none
MOST_BLOCKS = 1 << 20  # of CUDA's kernels that walk rows

Output = tuple[Sequence[int], mx.Dtype]
SHORT = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}

Value = bool | int | str | mx.Dtype


@dataclass(frozen=True)
class Interface:
    """What a kernel is called with, under names, the same on every backend."""

    name: str  # the kernel's side has the sizes as the struct ``<name>Sizes``
    inputs: tuple[str, ...]  # one that is given as None is a null pointer
    outputs: tuple[str, ...]
    # (name, how CUDA reads it, as ``table_shape[1]``); Metal gets the numbers.
    sizes: tuple[tuple[str, str], ...] = ()

    def __hash__(self) -> int:  # quick: kernels are looked up at each launch
        return hash((self.name, self.outputs))

    @property
    def struct(self) -> str:
        """The C++ struct of the sizes."""
        if not self.sizes:
            return ""
        fields = ", ".join(name for name, _ in self.sizes)
        return f"struct {self.name}Sizes {{ int {fields}; }};\n"


@dataclass(frozen=True)
class GpuKernel:
    """One entry point of the kernel sources, for one set of template arguments."""

    backend: str  # "metal" or "cuda"
    symbol: str  # the function, which is the route's name where a route has it
    files: tuple[str, ...]  # in the order in which they need each other
    interface: Interface  # how it is called
    template: tuple[tuple[str, Value], ...] = ()
    place: str = ""  # Metal: what says where a thread is, the function's last arguments
    memory: str = ""  # Metal: C++ of the floats of threadgroup memory, if any
    also: tuple[Interface, ...] = ()  # interfaces whose structs the files name besides
    atomic: bool = False  # Metal: whether the outputs are atomic
    threads: int = THREADS  # CUDA: of a block, for the register limit
    blocks_per_multiprocessor: int = 1  # CUDA: how many must fit side by side
    shared_bytes: int = 0  # CUDA: dynamic shared memory
    defines: tuple[tuple[str, int], ...] = ()
    # CUDA: C++ of sizes, and of inputs and outputs, that are passed in another way; an
    # argument that is empty is not passed.
    sizes: tuple[tuple[str, str | int], ...] = ()
    arguments: tuple[tuple[str, str], ...] = ()
    # CUDA: inputs and outputs that are handed over as one struct, the template AFTER.
    together: tuple[str, ...] = ()
    before: str = ""  # statements before the call
    geometry: bool = False  # CUDA: whether coordinates are computed by it, not features
    # What MLX built, by its factory (a stand-in runs kernels without a GPU) and inputs.
    _built: dict = field(init=False, default_factory=dict, compare=False, repr=False)

    def __call__(
        self,
        inputs: Sequence[mx.array | None],
        outputs: Sequence[Output],
        grid: Sequence[int],
        threadgroup: Sequence[int] | None = None,
        *,
        fill: float | None = None,
        **sizes: int,
    ) -> list[mx.array]:
        """Put one launch into the graph."""
        arrays = [array for array in inputs if array is not None]
        given = tuple([array is not None for array in inputs])
        settled = outputs, grid, threadgroup
        return self.launcher(given, *settled, fill=fill, **sizes)(arrays)

    def launcher(
        self,
        given: tuple[bool, ...],
        outputs: Sequence[Output],
        grid: Sequence[int],
        threadgroup: Sequence[int] | None = None,
        *,
        fill: float | None = None,
        **sizes: int,
    ) -> Callable[[list[mx.array]], list[mx.array]]:
        """Return a function that launches the kernel on a list of arrays."""
        shapes, dtypes = zip(*outputs, strict=True)
        if 0 in chain(grid, *shapes):
            raise ValueError(
                f"{self.symbol} was launched for nothing: a grid of {tuple(grid)} and "
                f"outputs of {list(shapes)}; return an empty array instead"
            )
        grid, is_metal = (*grid, 1, 1)[:3], self.backend == METAL
        if not threadgroup:
            threadgroup = fitting_threadgroup(grid) if is_metal else (self.threads,)
        facts = {
            "output_shapes": shapes,
            "output_dtypes": dtypes,
            "grid": grid,
            "init_value": fill,
            "threadgroup": (*threadgroup, 1, 1)[:3],
        }
        # The factory is looked up at each launch: stand-ins run kernels without a GPU.
        if not is_metal:

            def launch(arrays: list[mx.array]) -> list[mx.array]:
                factory = mx.fast.cuda_kernel
                run = self._built.get((factory, given)) or self.built(factory, given)
                return run(inputs=arrays, **facts)

            return launch
        if self.template:
            facts["template"] = list(self.template)
        numbers = []
        if self.interface.sizes:
            numbers = [mx.array(self._ordered(sizes), dtype=mx.int32)]

        def launch_on_metal(arrays: list[mx.array]) -> list[mx.array]:
            inputs = [*map(in_device_space, arrays), *numbers]
            return self.built(mx.fast.metal_kernel, given)(inputs=inputs, **facts)

        return launch_on_metal

    def built(
        self, factory: Callable[..., Any], given: tuple[bool, ...]
    ) -> Callable[..., Any]:
        """Return what MLX built for some inputs."""
        built = self._built.get((factory, given))
        if built is None:
            built = self._built[factory, given] = _build(factory, self, given)
        return built

    @property
    def is_built(self) -> bool:
        """Whether it was launched before, so that its code is there."""
        built = self._built.values()
        return any(not isinstance(k, Kernel) or k.code for k in built)

    def _ordered(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        names = [name for name, _ in self.interface.sizes]
        if sizes.keys() != set(names):
            raise TypeError(
                f"{self.symbol} takes the sizes {', '.join(names)}; got "
                f"{', '.join(sizes) or 'none'}"
            )
        return tuple(sizes[name] for name in names)

    @cached_property
    def digest(self) -> str:
        """What tells it from kernels of another text, whatever inputs it is given."""
        every = (True,) * len(self.interface.inputs)
        facts = self.backend, self.name(every), self.header(), self.body(every)
        limits = self.threads, self.blocks_per_multiprocessor, self.shared_bytes
        text = "\0".join(map(str, (*facts, self.template, self.atomic, *limits)))
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def name(self, given: tuple[bool, ...]) -> str:
        """Return a name for the text with some inputs; MLX keeps kernels by it."""
        if self.backend == METAL:  # where MLX adds the template's arguments
            values = []
        else:
            values = [value for _, value in (*self.template, *self.defines)]
            values += [_word(str(value)) for _, value in self.sizes]
        absent = (n for n, g in zip(self.interface.inputs, given, strict=True) if not g)
        parts = [self.symbol, *map(_short, values), *(f"no_{name}" for name in absent)]
        return "lattice_" + "_".join(parts)

    def body(self, given: tuple[bool, ...]) -> str:
        """Return the C++ of the call with some inputs."""
        face, passed = self.interface, dict(self.arguments)
        values = {
            name: passed.get(name, name) if there else "nullptr"
            for name, there in zip(face.inputs, given, strict=True)
        }
        lines = []
        if self.together:
            first, *others = self.together
            members = ", ".join(values.get(name, name) for name in self.together)
            lines.append(f"const AFTER after = {{{members}}};")
            values |= {first: "after", **dict.fromkeys(others, "")}
            passed |= dict.fromkeys(others, "")
        lines += [self.before] * bool(self.before)
        names = list(values.values())
        if face.sizes:
            lines.append(self._sizes())
            names.append("sizes")
        names += [passed.get(name, name) for name in face.outputs]
        names = [name for name in names if name]
        if self.memory:
            # Of whole float4: it is written in vectors of 16 bytes.
            lines.append(f"threadgroup float4 memory[({self.memory} + 3) / 4];")
            names.append("(threadgroup float*)memory")
        names += [self.place] * bool(self.place)
        if self.backend == CUDA:
            lines = [*map(_constant, self.template), *lines]
        space = "lattice::" if self.backend == CUDA else ""
        template = ", ".join(name for name, _ in self.template)
        template = f"<{template}>" * bool(template)
        lines.append(f"{space}{self.symbol}{template}({', '.join(names)});")
        return "\n".join(f"  {line}" for line in lines) + "\n"

    def _sizes(self) -> str:
        struct, sizes = f"{self.interface.name}Sizes", self.interface.sizes
        if self.backend == METAL:  # where no struct is copied between address spaces
            values = ", ".join(f"numbers[{i}]" for i in range(len(sizes)))
            return f"const {struct} sizes = {{{values}}};"
        read = {**dict(sizes), **dict(self.sizes)}
        values = ", ".join(f"int({read[name]})" for name, _ in sizes)
        return f"const {struct} sizes{{{values}}};"

    def header(self, whole: bool = True) -> str:
        """Return what stands before the kernel: the structs, then the files."""
        faces = self.interface, *self.also
        structs = "".join(dict.fromkeys(face.struct for face in faces))
        if self.backend == METAL:
            # Faults and the compiler's messages then name lines of the file.
            text = "\n".join(
                f'#line 1 "metal/{file}.metal"\n{source(METAL, f"{file}.metal")}'
                for file in self.files
            )
            return f'{structs}{text}#line 1 "{self.symbol}"\n'
        lines = [f"#define {name} {value}" for name, value in self.defines]
        if whole:
            lines += [source(CUDA, file) for file in self.files]
        else:
            lines += [f'#include "{source_folder(CUDA) / file}"' for file in self.files]
        structs = f"namespace lattice {{\n{structs}}}\n" if structs else ""
        return structs + "\n".join(lines) + "\n"


class BackendKernels:
    """A family of kernels on one backend, "metal" or "cuda"."""

    def __init__(self, backend: str):
        self.backend = backend


def in_device_space(array: mx.array) -> mx.array:
    """Return the array, flat and longer where MLX would bind it as a constant."""
    if array.size >= LEAST_DEVICE_SIZE:
        return array
    return mx.pad(array.flatten(), (0, LEAST_DEVICE_SIZE - array.size))


def fitting_threadgroup(grid: Sequence[int]) -> tuple[int, int, int]:
    """Return a Metal threadgroup of up to 256 threads, as wide as fits the grid."""
    width = 1
    while width < grid[0] and width < THREADS:
        width *= 2
    return width, max(1, THREADS // width) if grid[1] > 1 else 1, 1


def blocks_for(threads: int) -> int:
    """Return CUDA's blocks for so many threads; of too many, each has several rows."""
    return max(1, min(MOST_BLOCKS, -(-threads // THREADS)))


def _build(factory: Callable, kernel: GpuKernel, given: tuple[bool, ...]) -> Callable:
    face, name = kernel.interface, kernel.name(given)
    inputs = [n for n, there in zip(face.inputs, given, strict=True) if there]
    outputs, body = list(face.outputs), kernel.body(given)
    if kernel.backend == METAL:
        return factory(
            name=name,
            input_names=[*inputs, *["numbers"] * bool(face.sizes)],
            output_names=outputs,
            header=kernel.header(),
            source=body,
            atomic_outputs=kernel.atomic,
        )
    body = f"using namespace lattice;\n{body}"
    limits = kernel.threads, kernel.blocks_per_multiprocessor
    if nvrtc := compiler(compute_capability()):
        last = kernel.shared_bytes, kernel.geometry
        return Kernel(
            nvrtc, name, inputs, outputs, kernel.header(), body, limits, *last
        )
    full = f"custom_kernel_{name}"
    # MLX writes the kernel's signature itself; this puts the launch bounds into it.
    bounds = "__launch_bounds__({}, {})".format(*limits)
    return factory(
        name=name,
        input_names=inputs,
        output_names=outputs,
        header=f"{kernel.header(whole=False)}#define {full} {bounds} {full}\n",
        source=f"\n#undef {full}\n{body}",
        shared_memory=kernel.shared_bytes,
    )


def _constant(pair: tuple[str, Value]) -> str:
    """Return a template argument as a C++ statement."""
    name, value = pair
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPES[value]};"
    if isinstance(value, str):
        return f"using {name} = {value};"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"constexpr {kind} {name} = {_text(value)};"


def _text(value: bool | int) -> str:
    return str(value).lower()


def _short(value: Value) -> str:
    """Return a value as a part of a kernel's name."""
    if isinstance(value, mx.Dtype):
        return SHORT.get(value, TYPES[value])
    return _word(_text(value)) if isinstance(value, (bool, int)) else _word(value)


def _word(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)


# Most seconds of a Metal dispatch on the slowest Apple GPU. The watchdog kills longer
# dispatches, callers then see empty results, and the screen freezes meanwhile.
DISPATCH_SECONDS = 0.1

# Bounds of a Metal dispatch: operations or bytes of a unit of work, and the lowest
# share of the chip's peak that a kernel reaches. Work that would take the slowest chip
# more than 100 ms is cut into several dispatches, mostly by rows.
DISPATCH: dict[str, dict[str, float]] = {
    # Simdgroup matrices, which are bounded by the chip they run on instead.
    "matrices": {"operations": 2, "share": 1 / 4},
    # Sums in one thread, both operands from cache every time.
    "multiply_adds": {"operations": 2, "share": 1 / 20},
    # Features and table entries of at most 4 bytes, gathered row by row.
    "elements": {"bytes": 4, "share": 1 / 2},
    # Look-ups in a hash table: a slot and a row, each a cache line of 128 bytes.
    "probes": {"bytes": 256, "share": 1 / 2},
}

# Bounds of one thread's work on Metal. They depend on sizes only, so the order of sums
# is fixed.
METAL_CUTS = {
    # Edges of one split of a weight gradient that one thread may add up, and splits.
    "thread_edges": 1 << 18,
    "splits": 256,
    # Rows that one thread lists edges of: few enough to fill the GPU, and the counts of
    # all blocks stay small.
    "edge_block": 64,
}

# More dispatches than anyone waits for: plans list them, so their number is bounded.
MOST_DISPATCHES = 1 << 20

# On a GPU, most entries of a segment or edges of a row that one thread adds, and the
# size of the pieces of longer ones. One thread adds about ten million entries a second.
SEGMENT_CUTS = {"longest": 1024, "piece": 256}


def dispatch_limit(work: str) -> int:
    """Return how much of a kind of work one Metal dispatch may do, on every chip."""
    return _limit(**DISPATCH[work])


@lru_cache(maxsize=64)
def _limit(share: float, **takes: int) -> int:
    least = []
    for chip in devices.PROFILES.values():
        if chip.backend == devices.METAL:
            peaks = {"operations": 1e12 * chip.tflops, "bytes": 1e9 * chip.bandwidth}
            least += [
                rate / takes[peak] for peak, rate in peaks.items() if peak in takes
            ]
    return max(1, int(DISPATCH_SECONDS * share * min(least)))


def matrix_limit(device: Device) -> int:
    """Return the multiply-adds of one dispatch of matrix tiles on a chip."""
    takes = DISPATCH["matrices"]
    rate = takes["share"] * 1e12 * device.tflops / takes["operations"]
    return max(1, int(DISPATCH_SECONDS * rate))


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def cuts(
    count: int, work: int, limit: int, most: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield (first, length) slices of ``count`` units, none above ``limit`` of work."""
    pieces = ceil_div(work, limit)
    if pieces > 1 and most is not None:
        pieces = ceil_div(count, max(1, limit // max(most, 1)))
    pieces = min(count, max(1, pieces))
    if pieces > MOST_DISPATCHES:
        raise ValueError(
            f"this work would be cut into {pieces:,} dispatches of a GPU, and "
            f"{MOST_DISPATCHES:,} are allowed; take fewer rows or channels at a time"
        )
    length = ceil_div(count, pieces) if count else 0
    for first in range(0, count, length or 1):
        yield first, min(length, count - first)


def by_rows(
    rows: int,
    work: int,
    limit: int,
    launch: Callable[[int, int], list[mx.array]],
    *,
    most: int | None = None,
    axis: int = 0,
) -> list[mx.array]:
    """Return the outputs of launches over slices of rows, joined along the rows."""
    parts = [launch(first, length) for first, length in cuts(rows, work, limit, most)]
    if len(parts) == 1:
        return parts[0]
    return [mx.concatenate(outputs, axis) for outputs in zip(*parts, strict=True)]
