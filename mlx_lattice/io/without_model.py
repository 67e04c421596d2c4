"""Checkpoints converted without a model: what the files and the sizes given tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from math import prod

import mlx.core as mx

from ..checks import AXES
from .errors import CheckpointError, shown
from .layouts import Layout, convert_linear, convert_weight, layout_of
from .mapping import Names, Renamer
from .states import Arrays, State
from .steps import Step, check_library, counter, habits

Size = int | Sequence[int]


def convert_state(
    state: Mapping[str, mx.array],
    library: str,
    mapping: Names = None,
    *,
    unit_as_shaped: bool = False,
    sizes: Iterable[Size | tuple[str, Size]] = (),
) -> dict[str, mx.array]:
    """Convert a checkpoint without a model.

    ``import_checkpoint(converted, model, "mlx_lattice")`` loads the result; names are
    the checkpoint's, but for what the library adds to PyTorch's.

    Args:
        state: the result of ``load_state``.
        library: one of ``LIBRARIES``.
        mapping: as ``import_checkpoint`` takes it.
        unit_as_shaped: take kernels of one offset as their shape says. Without a model
            nothing tells strides, so that all of spconv's are taken for stride 1.
        sizes: extents of kernels, for libraries that keep a kernel's offsets on one
            axis: an int for a cube, or one extent an axis; or a pair of a name, in
            which ``*`` stands for anything, and the extents of such kernels.

    Returns:
        Name to array, convolutions as (C_out, kernel..., C_in).

    Raises:
        CheckpointError: a kernel's extents are told by no size, or by several; or the
            library has two layouts that only a model tells apart.
    """
    held = Arrays(state)
    given = Sizes(sizes)
    return {
        step.target: step.of(held)
        for step in plan(held, library, mapping, given, unit_as_shaped)
    }


def plan(
    state: State, library: str, mapping: Names, sizes: Sizes, unit_as_shaped: bool
) -> list[Step]:
    """Return how each tensor is converted; arguments are those of convert_state."""
    layout = layout_of(library)
    check_library(state, library)
    if layout.axes != layout.transposed:
        raise CheckpointError(
            f"{library} keeps the channels of transposed convolutions in another "
            "order, which no shape tells: name the model that they are for"
        )
    if layout.large:
        raise CheckpointError(
            f"{library} keeps large kernels in another order, which no shape tells: "
            "name the model that they are for"
        )
    if "k" not in layout.axes and not (sizes.any or sizes.named):
        raise CheckpointError(
            f"{library} writes the offsets of a kernel on one axis, which does not say "
            "its extents: name the model that they are for, or give the sizes of its "
            "kernels, as in --size 3 2"
        )
    rename, steps = Renamer(mapping, state), []
    for source in state:
        name = rename(source)
        if name is None or counter(name):
            continue
        array, leaf = state.sketch(source), source.rpartition(".")[2]
        convert = _same
        if leaf == layout.leaf and (array.ndim > 2 or leaf == "kernel"):
            size = sizes.of(source, array, library, layout)
            convert = partial(
                convert_weight,
                library=library,
                kernel_size=size,
                unit_as_shaped=unit_as_shaped,
            )
        elif leaf == "weight" and array.ndim == 2:
            convert = partial(convert_linear, library=library, channels=None)
        elif library == "minkowski" and leaf == "bias" and array.ndim == 2:
            convert = partial(mx.squeeze, axis=0)  # biases are rows
        try:
            convert(array)
        except CheckpointError as error:
            raise CheckpointError(f"{shown(source)}: {error}") from None
        steps.append(Step(source, habits(name, library)[-1], convert))
    targets = [step.target for step in steps]
    if twice := next((name for name in targets if targets.count(name) > 1), None):
        raise CheckpointError(f"two tensors become {shown(twice)}: change the mapping")
    return steps


def _same(array: mx.array) -> mx.array:
    return array


class Sizes:
    """The extents of kernels that were given, by name or for any of their volume."""

    def __init__(self, given: Iterable[Size | tuple[str, Size]]):
        self.named: list[tuple[str, tuple[int, ...]]] = []
        self.any: list[tuple[int, ...]] = []
        for entry in given:
            pair = isinstance(entry, tuple) and isinstance(entry[0], str)
            name, size = entry if pair else ("", entry)
            size = (size,) * 3 if isinstance(size, int) else tuple(size)
            if len(size) not in AXES or min(size) < 1:
                raise ValueError(
                    f"a kernel has 1 to 4 extents of 1 or more; got {size}"
                )
            if name:
                self.named.append((name, size))
            else:
                self.any.append(size)

    @classmethod
    def parsed(cls, words: Iterable[str]) -> Sizes:
        """Return the sizes of a command line: ``3``, ``1x3x3`` or ``NAME=3x3x3``."""
        given = []
        for word in words:
            name, _, size = word.rpartition("=")
            try:
                extents = [int(n) for n in size.split("x")]
            except ValueError:
                raise ValueError(
                    f"--size takes 3, 1x3x3 or NAME=3x3x3; got {word!r}"
                ) from None
            extents = extents * 3 if len(extents) == 1 else extents
            given.append((name, extents) if name else extents)
        return cls(given)

    def of(
        self, name: str, array: mx.array, library: str, layout: Layout
    ) -> tuple[int, ...]:
        """Return a kernel's extents: its own, those given, or ones."""
        if "k" in layout.axes:
            at, dims = layout.axes.index("k"), array.ndim - 2
            return tuple(array.shape[at : at + dims])
        for pattern, size in self.named:
            if name == pattern or fnmatchcase(name, pattern) or _under(name, pattern):
                return size
        volume = array.shape[layout.axes.index("K")]
        fits = sorted({size for size in self.any if prod(size) == volume})
        # (C_in, C_out), unless it may be a depthwise kernel, (K, C).
        alone = array.ndim == 2 and not (layout.depthwise and fits)
        if alone or (array.ndim > 2 and volume == 1):
            dims = {len(size) for size in (*self.any, *(s for _, s in self.named))}
            return (1,) * (dims.pop() if len(dims) == 1 else 3)
        if len(fits) == 1 and array.ndim > 2:
            return fits[0]
        which = "which of the sizes given it has" if fits else "its extents"
        raise CheckpointError(
            f"{shown(name)}: {library} writes the {volume} offsets of a kernel on one "
            f"axis, which does not say {which}: give them, as in --size 3, or "
            f"{shown(name)}=3x3x3"
        )


def _under(name: str, pattern: str) -> bool:
    """Return whether a name stands under a prefix that has no pattern in it."""
    return name.startswith(f"{pattern}.")
