"""Steps of optimizers on Metal and CUDA: many parameters in one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import mlx.core as mx

from ...checks import FLOATS
from ...devices import CUDA, METAL
from .kernel import LEAST_DEVICE_SIZE, THREADS, GpuKernel, Interface

FILES = {
    METAL: ("updates",),
    CUDA: ("alignment.cuh", "channels.cuh", "updates.cu"),
}
STATES = "master", "first", "second"
# Arrays of a launch: Metal binds 31 buffers, and CUDA's arguments fit into 4 KB.
MOST_ARRAYS = {METAL: 31, CUDA: 460}
MOST_PARAMETERS = 32  # of a launch: their gradients wait for each other
ELEMENTS = 8192  # of a block
MOST_ELEMENTS = 2**31 - ELEMENTS  # of a parameter

_PLACE = (
    "threadgroup_position_in_grid, thread_position_in_threadgroup, "
    "threads_per_threadgroup"
)


class Rule(NamedTuple):
    """How an element is updated.

    Attributes:
        code: as kernels number it.
        states: which of ``STATES`` are read and written besides a parameter.
    """

    code: int
    states: tuple[str, ...]

    @property
    def with_master(self) -> Rule:
        """The same of parameters whose float32 copies are updated, and rounded."""
        return Rule(self.code, ("master", *self.states))


SGD, MOMENTUM, NESTEROV = Rule(0, ()), Rule(1, ("first",)), Rule(2, ("first",))
ADAM = Rule(3, ("first", "second"))
Arrays = tuple[mx.array, ...]  # gradient, parameter, and its states


class GpuUpdates:
    """The steps of optimizers of a GPU's kernels.

    Args:
        backend: "metal" or "cuda".
    """

    def __init__(self, backend: str):
        self.backend = backend

    def takes(self, arrays: Arrays, rule: Rule) -> bool:
        """Whether a parameter may go into a launch: it is no scalar, and of dtypes.

        Of one; states beside a master copy are float32 as that is.
        """
        gradient, parameter, *states = arrays
        size, dtype = parameter.size, parameter.dtype
        least = LEAST_DEVICE_SIZE if self.backend == METAL else 1
        if dtype not in FLOATS or not least <= size < MOST_ELEMENTS:
            return False
        kept = _dtype_of_states(rule, dtype)
        for array in states:  # a loop is quick
            if array.dtype != kept or array.size != size:
                return False
        return gradient.dtype == dtype and gradient.shape == parameter.shape

    def run(
        self, rule: Rule, rates: mx.array, given: Sequence[Arrays]
    ) -> list[list[mx.array]]:
        """Return the new parameter and states of each.

        Args:
            rule: how.
            rates: (8,) float32, as the rule's kernel reads them.
            given: what ``takes``.
        """
        made: list[list[mx.array]] = [[] for _ in given]
        each = 1 + len(rule.states)
        # Backwards, each after the one before it: gradients come in that order, and
        # MLX would else begin with the first layers' and hold what all others need.
        for part in reversed(list(self._launches(given, rule))):
            shapes = tuple([given[at][1].shape for at in part])
            dtype = given[part[0]][1].dtype
            launch = _launcher(self.backend, rule, dtype, shapes)
            inputs = [array for at in part for array in given[at]]
            work = _work(tuple([given[at][1].size for at in part]))
            outputs = launch([work, *inputs, rates])
            rates = mx.depends([rates], outputs[:1])[0]
            for i, at in enumerate(part):
                made[at] = outputs[each * i : each * (i + 1)]
        return made

    def _launches(self, given: Sequence[Arrays], rule: Rule) -> Iterator[list[int]]:
        """Yield which parameters go together, of one dtype, in nearly equal parts."""
        room = (MOST_ARRAYS[self.backend] - 2) // (3 + 2 * len(rule.states))
        for dtype in FLOATS:
            of = [at for at, arrays in enumerate(given) if arrays[1].dtype == dtype]
            count = -(-len(of) // min(room, MOST_PARAMETERS))
            for i in range(count):
                yield of[i * len(of) // count : (i + 1) * len(of) // count]


def _dtype_of_states(rule: Rule, dtype: mx.Dtype) -> mx.Dtype:
    """Return the dtype of what is kept beside a parameter."""
    return mx.float32 if "master" in rule.states else dtype


def _names(rule: Rule, count: int) -> tuple[list[str], list[str]]:
    """Return the inputs and outputs of so many parameters, in order."""
    kinds = ["gradient", "parameter", *rule.states]
    made = ["next", *[f"next_{name}" for name in rule.states]]
    return (
        [f"{kind}_{i}" for i in range(count) for kind in kinds],
        [f"{kind}_{i}" for i in range(count) for kind in made],
    )


@lru_cache(maxsize=256)
def _kernel(backend: str, rule: Rule, dtype: mx.Dtype, count: int) -> GpuKernel:
    inputs, outputs = _names(rule, count)
    # A launch has all arrays; the call gets those that the switch picks.
    picked = [name if name in rule.states else "nullptr" for name in STATES]
    made = [name if name == "nullptr" else f"next_{name}" for name in picked]
    passed = dict.fromkeys((*inputs, "rates", *outputs), "")
    passed[inputs[0]] = ", ".join(
        ["gradient, parameter", *picked, "rates, next", *made]
    )
    face = Interface("Updates", ("work", *inputs, "rates"), tuple(outputs))
    metal = backend == METAL
    return GpuKernel(
        backend,
        "update_parameters",
        FILES[backend],
        face,
        (
            ("T", dtype),
            ("STATE", _dtype_of_states(rule, dtype)),
            ("RULE", rule.code),
            ("COUNT", count),
        ),
        place=_PLACE if metal else "",
        arguments=tuple(passed.items()),
        before=_picking(metal, inputs, outputs, count),
    )


def _picking(metal: bool, inputs: list[str], outputs: list[str], count: int) -> str:
    """Return statements that pick the arrays of a block's parameter."""
    space = "device " if metal else ""
    block = "threadgroup_position_in_grid.x" if metal else "blockIdx.x"
    each, made = len(inputs) // count, len(outputs) // count
    kinds = [name.rpartition("_")[0] for name in (*inputs[:each], *outputs[:made])]
    lines = []
    for name in kinds:
        dtype = "STATE" if name.removeprefix("next_") in STATES else "T"
        const = "" if name.startswith("next") else "const "
        lines.append(f"{const}{space}{dtype}* {name} = nullptr;")
    lines.append(f"switch (work[3 * {block}]) {{")
    for i in range(count):
        picks = "".join(f" {name} = {name}_{i};" for name in kinds)
        lines.append(f"  case {i}:{picks} break;")
    return "\n  ".join([*lines, "}"])


@lru_cache(maxsize=256)
def _launcher(
    backend: str, rule: Rule, dtype: mx.Dtype, shapes: tuple[tuple[int, ...], ...]
) -> Callable[[list[mx.array]], list[mx.array]]:
    """Return what launches the step of parameters of some shapes."""
    kernel = _kernel(backend, rule, dtype, len(shapes))
    kept = [_dtype_of_states(rule, dtype)] * len(rule.states)
    outputs = [(shape, each) for shape in shapes for each in (dtype, *kept)]
    blocks = sum([-(-prod(shape) // ELEMENTS) for shape in shapes])
    given = (True,) * len(kernel.interface.inputs)
    return kernel.launcher(given, outputs, (blocks * THREADS,), (THREADS,))


@lru_cache(maxsize=256)
def _work(sizes: tuple[int, ...]) -> mx.array:
    """Return (blocks, 3) int32: a parameter, and where a block begins and ends."""
    rows = [
        (i, begin, min(begin + ELEMENTS, size))
        for i, size in enumerate(sizes)
        for begin in range(0, size, ELEMENTS)
    ]
    return mx.array(rows, dtype=mx.int32)
