"""Steps that runners share: before a kernel's launches, and after them.

Which inputs it gets and how they are padded; how partial sums are added, and what is
returned where there is nothing to add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import mlx.core as mx

from ..devices import CUDA, METAL
from ..dtypes import DTYPES
from ..epilogue import ARRAYS as EPILOGUE
from ..epilogue import finished
from ..integer_facts import finished as finished_integers
from ..problem import MLX_LAYOUT
from ..quantized import QuantizedWeight
from ..relation import Relation
from ..routes.plan import Plan
from . import gpu_joins
from .gpu_kernel import GpuKernel
from .kernel_launches import Launcher, in_device_space
from .signatures import computes_after


def view_of(plan: Plan, relation: Relation) -> Sequence[mx.array]:
    """Return the arrays of a relation that a plan reads, as its kernels take them.

    What launches would make longer is made so once, for all that are settled with it.
    """
    view = plan.read(relation)
    if plan.backend != METAL:
        return view
    return [in_device_space(array) if array.size else array for array in view]


def inputs_given(plan: Plan, *last: bool) -> tuple[bool, ...]:
    """Return which inputs a kernel gets: all, but of the last ones as is said."""
    return (True,) * (len(plan.gpu.interface.inputs) - len(last)) + last


def usually_there(plan: Plan) -> tuple[bool, ...]:
    """Return which arrays most calls give after the weight.

    Those that the epilogue of the plan's kernels has, or a bias.
    """
    if not computes_after(plan):
        return (True,)
    return tuple([name in plan.problem.epilogue.there for name in EPILOGUE])


def weight_arrays(plan: Plan) -> Callable[..., Sequence[mx.array]]:
    """Return what gives a kernel's weights: packed arrays, or a dense one padded."""
    axes, padded = (), padding_of(plan)
    if has_padding(plan):
        axes = (0, 2) if plan.layout == MLX_LAYOUT else (1, 2)

    def arrays(w: mx.array | QuantizedWeight) -> Sequence[mx.array]:
        if isinstance(w, QuantizedWeight):
            return w.arrays
        for axis in axes:
            w = padded(w, axis, plan.multiple)
        return (w,)

    return arrays


def padding_of(plan: Plan) -> Callable[[mx.array, int, int], mx.array]:
    """Return what fills an axis up to a multiple of channels with zeros."""
    return gpu_joins.padded if plan.backend == CUDA else gpu_joins.zero_padded


def has_padding(plan: Plan) -> bool:
    """Whether channels are padded."""
    p, multiple = plan.problem, plan.multiple
    return bool(p.c_in % multiple or p.c_out % multiple)


class Adder(NamedTuple):
    """What adds partial sums in order: a kernel of the interface ADD_SPLITS.

    Attributes:
        kernel: of ``Plan.add``.
        given: which of its inputs there are.
        read: their names.
    """

    kernel: GpuKernel
    given: tuple[bool, ...]
    read: list[str]

    @classmethod
    def of(cls, plan: Plan, named: Sequence[str]) -> Adder:
        """Return what adds by a plan; ``named``: what there is that it may read."""
        names = plan.add.interface.inputs
        given = tuple([name in named for name in names])
        return cls(plan.add, given, [name for name in names if name in named])

    def __call__(
        self,
        splits: int,
        grid: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: mx.Dtype,
        first: int = 0,
        lines: int = 0,
    ) -> Adding:
        """Return what adds arrays that it is given by name.

        Args:
            splits: how many partial sums there are.
            grid: threads of the kernel.
            shape: of the sum.
            dtype: of the sum.
            first: the line of the whole result that the sum starts with.
            lines: of statistics of its rows, where the kernel writes them.
        """
        sizes = {"lines": prod(shape[:-1]), "channels": shape[-1], "splits": splits}
        outputs = ((shape, dtype),)
        if lines:
            outputs = *outputs, ((lines, 3, shape[-1]), mx.float32)
        launch = self.kernel.launcher(self.given, outputs, grid, first=first, **sizes)
        return Adding(launch, self.read)


class Adding:
    """Adds partial sums: a launch on arrays by name, of which it takes its own."""

    __slots__ = "_launch", "_read"

    def __init__(self, launch: Launcher, read: list[str]):
        self._launch, self._read = launch, read

    def __call__(self, arrays: dict[str, mx.array | None]) -> list[mx.array]:
        """Return the sum, and what is written beside it."""
        return self._launch([arrays[name] for name in self._read])


def has_no_edges(plan: Plan, view: Sequence[mx.array]) -> bool:
    """Whether there is nothing to add up; rows there are."""
    return plan.problem.edges == 0 or 0 in [array.size for array in view]


def _bias_alone(
    shape: tuple[int, int], dtype: mx.Dtype, bias: mx.array | None = None
) -> mx.array:
    """Return what a contraction gives where there is nothing to add up."""
    zeros = mx.zeros(shape, dtype=dtype)
    return zeros if bias is None else zeros + bias


def without_edges(
    plan: Plan, shape: tuple[int, int], dtype: mx.Dtype, *added: mx.array | None
) -> mx.array:
    """Return the bias, or an epilogue, where there is nothing to add up."""
    if plan.problem.integer:
        facts, own = plan.problem.integer, DTYPES[plan.problem.dtype]
        return finished_integers(mx.zeros(shape), facts, own, *added[:-1])
    if plan.problem.epilogue is None or plan.then:
        return _bias_alone(shape, dtype, *added)
    after = plan.problem.epilogue
    given = after.named([a for a in added if a is not None])
    return finished(mx.zeros(shape, dtype=dtype), after, *given)


def joined(parts: Sequence[mx.array]) -> mx.array:
    """Return what the dispatches wrote, in order, as one array."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
