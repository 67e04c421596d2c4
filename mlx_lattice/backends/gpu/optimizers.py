"""Steps of optimizers on Metal and CUDA: many parameters in one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import mlx.core as mx

from ...checks import FLOATS
from ...devices import CUDA, METAL
from .kernel import (
    LEAST_DEVICE_SIZE,
    THREADS,
    BackendKernels,
    GpuKernel,
    Interface,
    ceil_div,
)

FILES: dict[str, tuple[str, ...]] = {
    METAL: ("updates",),
    CUDA: ("alignment.cuh", "channels.cuh", "updates.cu"),
}
PLACE = (
    "threadgroup_position_in_grid, thread_position_in_threadgroup, "
    "threads_per_threadgroup"
)
STATES = "master", "first", "second"
# Arrays of a launch: Metal binds 31 buffers, and CUDA's arguments fit into 4 KB.
MOST_ARRAYS = {METAL: 31, CUDA: 460}
MOST_PARAMETERS = 32  # of a launch: their gradients wait for each other
ELEMENTS = 8192  # of a block
MOST_ELEMENTS = 2**31 - ELEMENTS  # of a parameter

Arrays = tuple[mx.array, ...]  # gradient, parameter, and its states


class Rule(NamedTuple):
    """How an element is updated."""

    code: int  # its number in the kernels
    states: tuple[str, ...]

    @property
    def with_master(self) -> Rule:
        """The rule for parameters whose float32 copies are updated, and rounded."""
        return Rule(self.code, ("master", *self.states))

    def state_dtype(self, dtype: mx.Dtype) -> mx.Dtype:
        """Return the dtype of the states of parameters of a dtype."""
        return mx.float32 if "master" in self.states else dtype


SGD, MOMENTUM, NESTEROV = Rule(0, ()), Rule(1, ("first",)), Rule(2, ("first",))
ADAM = Rule(3, ("first", "second"))


class GpuUpdates(BackendKernels):
    """The steps of optimizers by a GPU's kernels."""

    def takes(self, arrays: Arrays, rule: Rule) -> bool:
        """Whether a parameter may go into a launch, by its size and dtypes."""
        gradient, parameter, *states = arrays
        size, dtype = parameter.size, parameter.dtype
        least = LEAST_DEVICE_SIZE if self.backend == METAL else 1
        if dtype not in FLOATS or not least <= size < MOST_ELEMENTS:
            return False
        state_dtype = rule.state_dtype(dtype)
        for array in states:  # a loop is quick
            if array.dtype != state_dtype or array.size != size:
                return False
        return gradient.dtype == dtype and gradient.shape == parameter.shape

    def step(
        self, rule: Rule, rates: mx.array, parameters: Sequence[Arrays]
    ) -> list[list[mx.array]]:
        """Return the new value and states of each parameter."""
        results: list[list[mx.array]] = [[] for _ in parameters]
        each = 1 + len(rule.states)
        # Backwards, each launch after the one before it: gradients come in that order,
        # and MLX would else begin with those of the first layers, and hold the others.
        for part in reversed(list(self._launches(parameters, rule))):
            shapes = tuple([parameters[at][1].shape for at in part])
            dtype = parameters[part[0]][1].dtype
            launch = _launcher(self.backend, rule, dtype, shapes)
            inputs = [array for at in part for array in parameters[at]]
            outputs = launch([_work(tuple(map(prod, shapes))), *inputs, rates])
            rates = mx.depends([rates], outputs[:1])[0]
            for i, at in enumerate(part):
                results[at] = outputs[each * i : each * (i + 1)]
        return results

    def _launches(
        self, parameters: Sequence[Arrays], rule: Rule
    ) -> Iterator[list[int]]:
        """Yield which parameters of one dtype share a launch, in nearly equal parts."""
        room = (MOST_ARRAYS[self.backend] - 2) // (3 + 2 * len(rule.states))
        for dtype in FLOATS:
            of = [i for i, arrays in enumerate(parameters) if arrays[1].dtype == dtype]
            count = ceil_div(len(of), min(room, MOST_PARAMETERS))
            for i in range(count):
                yield of[i * len(of) // count : (i + 1) * len(of) // count]


@lru_cache(maxsize=256)
def _kernel(backend: str, rule: Rule, dtype: mx.Dtype, count: int) -> GpuKernel:
    """Return the kernel of a step for ``count`` parameters."""
    metal, state_dtype = backend == METAL, rule.state_dtype(dtype)
    space = "device " if metal else ""
    block = "threadgroup_position_in_grid.x" if metal else "blockIdx.x"
    read = ["gradient", "parameter", *rule.states]
    written = ["next", *[f"next_{name}" for name in rule.states]]
    picks = []
    for name in (*read, *written):
        kind = "STATE" if name.removeprefix("next_") in STATES else "T"
        const = "" if name in written else "const "
        picks.append(f"{const}{space}{kind}* {name} = nullptr;")
    picks.append(f"switch (work[3 * {block}]) {{")
    for i in range(count):
        these = "".join(f" {name} = {name}_{i};" for name in (*read, *written))
        picks.append(f"  case {i}:{these} break;")
    states = [name if name in rule.states else "nullptr" for name in STATES]
    next_states = [n if n == "nullptr" else f"next_{n}" for n in states]
    call = "gradient, parameter", *states, "rates, next", *next_states
    inputs = [f"{name}_{i}" for i in range(count) for name in read]
    outputs = [f"{name}_{i}" for i in range(count) for name in written]
    passed = dict.fromkeys((*inputs, "rates", *outputs), "")
    passed[inputs[0]] = ", ".join(call)
    template = ("T", dtype), ("STATE", state_dtype), ("RULE", rule.code)
    return GpuKernel(
        backend,
        "update_parameters",
        FILES[backend],
        Interface("Updates", ("work", *inputs, "rates"), tuple(outputs)),
        (*template, ("COUNT", count)),
        place=PLACE if metal else "",
        arguments=tuple(passed.items()),
        before="\n  ".join([*picks, "}"]),
    )


@lru_cache(maxsize=256)
def _launcher(
    backend: str, rule: Rule, dtype: mx.Dtype, shapes: tuple[tuple[int, ...], ...]
) -> Callable[[list[mx.array]], list[mx.array]]:
    """Return a function that launches the step of parameters of some shapes."""
    kernel = _kernel(backend, rule, dtype, len(shapes))
    dtypes = dtype, *[rule.state_dtype(dtype)] * len(rule.states)
    outputs = [(shape, each) for shape in shapes for each in dtypes]
    blocks = sum([ceil_div(prod(shape), ELEMENTS) for shape in shapes])
    every = (True,) * len(kernel.interface.inputs)
    return kernel.launcher(every, outputs, (blocks * THREADS,), (THREADS,))


@lru_cache(maxsize=256)
def _work(sizes: tuple[int, ...]) -> mx.array:
    """Return (blocks, 3) int32: a parameter, and where a block begins and ends."""
    rows = [
        (i, begin, min(begin + ELEMENTS, size))
        for i, size in enumerate(sizes)
        for begin in range(0, size, ELEMENTS)
    ]
    return mx.array(rows, dtype=mx.int32)
