"""Checkpoints of other libraries: names and weights converted, and what matched."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from ..nn.convolution import Conv, ConvTranspose, SubmConv
from .errors import CheckpointError, shown
from .layouts import LIBRARIES, OURS, convert_linear, convert_weight, layout_of
from .mapping import Names, Renamer, suggestion
from .names import published
from .states import State, opened
from .steps import Step, check_library, counter, habits
from .without_model import convert_state

__all__ = ["ImportReport", "convert_state", "import_checkpoint", "load_state", "match"]

# MLX's own convolutions, over dense grids.
DENSE = mlx.nn.Conv1d, mlx.nn.Conv2d, mlx.nn.Conv3d
DENSE_TRANSPOSED = (
    mlx.nn.ConvTranspose1d,
    mlx.nn.ConvTranspose2d,
    mlx.nn.ConvTranspose3d,
)


@dataclass(frozen=True)
class ImportReport:
    """The match of a checkpoint's tensors with a model's parameters.

    Attributes:
        matched: (source name, its shape, parameter, its shape).
        mismatched: (source name, its shape, parameter, its shape, what is wrong).
        missing: (parameter, its shape) that no tensor was for.
        unused: (source name, its shape) that no parameter was for.
        ignored: names that the mapping drops, and counters that MLX does not keep.
        idle: keys of the mapping that matched no name.
        hint: a prefix with which left-over names would fit; empty if there is none.
        note: the entry of the file that holds the tensors; empty if it has no entries.
    """

    library: str
    matched: tuple[tuple, ...]
    mismatched: tuple[tuple, ...]
    missing: tuple[tuple, ...]
    unused: tuple[tuple, ...]
    ignored: tuple[str, ...]
    idle: tuple[str, ...] = ()
    hint: str = ""
    note: str = ""

    @property
    def complete(self) -> bool:
        """Whether each parameter got a tensor and each tensor a parameter."""
        return not (self.mismatched or self.missing or self.unused)

    def __str__(self) -> str:
        """Return a line of counts, and one for each name that was not matched."""
        total = len(self.matched) + len(self.mismatched) + len(self.missing)
        lines = [
            f"{self.library}: {len(self.matched)} of {total} parameters matched, "
            f"{len(self.unused)} tensors left over, {len(self.ignored)} ignored"
        ]
        lines += [
            f"  mismatched  {shown(source)} {shape} -> {name} {expected}: {why}"
            for source, shape, name, expected, why in self.mismatched
        ]
        lines += [f"  missing     {name} {shape}" for name, shape in self.missing]
        lines += [f"  left over   {shown(name)} {shape}" for name, shape in self.unused]
        lines += [f"  mapping     {shown(key)!r} matches no name" for key in self.idle]
        lines += [f"  hint        {self.hint}"] * bool(self.hint)
        lines += [f"  file        {self.note}"] * bool(self.note)
        return "\n".join(lines)


def load_state(path: str | Path, key: str | None = None) -> dict[str, mx.array]:
    """Read the arrays of a checkpoint; nothing that it holds is executed.

    Args:
        path: ``.safetensors``, or what ``torch.save`` wrote (``.pt``, ``.pth``,
            ``.ckpt``, ``.bin``, ``.tar``), as a zip or in its older format. PyTorch
            itself is not needed.
        key: the entry of a PyTorch file that holds the weights; a dot leads into a
            nested entry. By default ``state_dict``, ``model`` and other names that
            trainers use are found, and a warning names other entries with tensors.

    Returns:
        Name to array, in the file's dtypes; doubles become float32.

    Raises:
        CheckpointError: the file is broken, does not say which of its entries holds
            the weights, or keeps other objects among the weights. Objects beside the
            weights (schedulers, NumPy scalars) are left out.
        FileNotFoundError: there is no such file.
    """
    with opened(Path(path), key) as state:
        if key is None and getattr(state, "others", ()):
            warnings.warn(f"{Path(path).name}: {state.note}", stacklevel=2)
        return {name: state.read(name) for name in state}


def import_checkpoint(
    source: str | Path | Mapping[str, mx.array],
    model: mlx.nn.Module,
    library: str,
    mapping: Names = None,
    strict: bool = True,
    *,
    unit_as_shaped: bool = False,
) -> ImportReport:
    """Load another library's checkpoint into a model, converting weights and names.

    A name of the checkpoint first goes through ``mapping``, where there is one. Then
    what the library adds to PyTorch's names is removed: its own name of a weight,
    modules that only wrap others. The result must be the name of a parameter, in which
    the ``layers`` of a Sequential may be left out, or a name under which this model is
    published in this library: MinkowskiEngine's MinkUNet, torchsparse's, TRELLIS.2's
    nets, Pointcept's SpUNet. Where each name begins with ``module.``, that is taken
    off first.

    A kernel of one offset that spconv wrote for a submanifold convolution, or for one
    of stride 1, is read as spconv multiplies it: its memory as (C_in, C_out), though
    its shape says (C_out, 1, 1, 1, C_in).

    Weights of MLX's own convolutions, over dense grids, are PyTorch's in any library.

    What ``mlx-lattice convert`` wrote is of the library "mlx_lattice".

    Parameters keep their dtype; a file's tensors are read one at a time. BatchNorm's
    running statistics are parameters like others; its epsilon is in no checkpoint.

    Args:
        source: a file for ``load_state``, or what it returned.
        model: the model, of ``mlx_lattice.nn`` modules.
        library: one of ``LIBRARIES``: who wrote the checkpoint.
        mapping: dotted prefix to its replacement (``""`` drops the prefix, ``None``
            the tensors under it; the longest prefix wins), or a function of a name. In
            a prefix ``*`` stands for what there is up to the next dot, at its end for
            all that is left, and so it does in the replacement: ``{"net.*": "*"}``.
        strict: whether anything unmatched is an error, with the model left as it is.
        unit_as_shaped: take kernels of one offset as their shape says: for nets of
            spconv's whose own 1x1 layer keeps (C_out, C_in).

    Returns:
        An ``ImportReport``; ``print`` it.

    Raises:
        CheckpointError: the file is refused, two tensors are meant for one parameter,
            or ``strict`` is set and something did not match: the report is the text.
    """
    if not isinstance(model, mlx.nn.Module):
        raise TypeError(f"model must be a module; got {type(model).__name__}")
    parameters = dict(tree_flatten(model.parameters()))
    with opened(source) as state:
        report, steps = match(
            state, model, library, mapping, unit_as_shaped=unit_as_shaped
        )
        if strict and not report.complete:
            raise CheckpointError(f"the checkpoint does not fit the model\n{report}")
        weights = []
        for step in steps:
            array = step.of(state).astype(parameters[step.target].dtype)
            if state.from_file:
                mx.eval(array)  # frees what the file's layout took
            weights.append((step.target, array))
    model.load_weights(weights, strict=False)
    return report


def match(
    state: State,
    model: mlx.nn.Module,
    library: str,
    mapping: Names = None,
    *,
    unit_as_shaped: bool = False,
) -> tuple[ImportReport, list[Step]]:
    """Match a state with a model by names and shapes; nothing is read or loaded.

    Arguments and errors are those of ``import_checkpoint``.
    """
    layout_of(library)
    check_library(state, library)
    parameters = dict(tree_flatten(model.parameters()))
    if any(name.endswith("scales") for name in parameters):
        raise CheckpointError(
            "the model is quantised; import into the float model, then quantise it"
        )
    modules = dict(model.named_modules())
    known, rename = _lookup(model, parameters), Renamer(mapping, state)
    rules = published(model, library)

    def place(name: str) -> str | None:
        return next((known[n] for n in habits(name, library) if n in known), None)

    def found(name: str | None) -> tuple[str | None, str | None]:
        """Return a name, or None to drop it, and its parameter."""
        target = None if name is None else place(name)
        for rule in rules:
            if name is None or target is not None:
                break
            new = rule(name)
            target = None if new is None else place(new)
            name = new if target is not None or new is None else name
        return name, target

    matched, mismatched, unused, ignored, steps = [], [], [], [], []
    taken: dict[str, str] = {}
    for source_name in state:
        array = state.sketch(source_name)
        name, target = found(rename(source_name))
        if name is None:
            ignored.append(source_name)
            continue
        shape = tuple(array.shape)
        if target is None:
            if counter(name):
                ignored.append(source_name)
            else:
                unused.append((source_name, shape))
            continue
        if target in taken:
            raise CheckpointError(
                f"{shown(taken[target])} and {shown(source_name)} are both meant for "
                f"{target}: change the mapping"
            )
        taken[target] = source_name
        wanted = tuple(parameters[target].shape)
        row = (source_name, shape, target, wanted)
        convert = partial(
            _converted,
            leaf=source_name.rpartition(".")[2],
            library=library,
            module=modules.get(target.rpartition(".")[0]),
            wanted=wanted,
            unit_as_shaped=unit_as_shaped,
        )
        try:
            becomes = tuple(convert(array).shape)
        except CheckpointError as error:
            mismatched.append((*row, str(error)))
            continue
        if becomes != wanted:
            mismatched.append((*row, f"becomes {becomes}"))
            continue
        matched.append(row)
        steps.append(Step(source_name, target, convert))
    missing = [(n, tuple(p.shape)) for n, p in parameters.items() if n not in taken]
    hint = suggestion(
        {rename.seen(name) for name, _ in unused},
        {name for name, _ in missing},
        lambda name: found(name)[1],
    )
    lists = (matched, mismatched, missing, unused, ignored, rename.idle)
    rows = (tuple(each) for each in lists)
    return ImportReport(library, *rows, hint, state.note), steps


def _converted(
    array: mx.array,
    leaf: str,
    library: str,
    module: mlx.nn.Module | None,
    wanted: tuple[int, ...],
    unit_as_shaped: bool,
) -> mx.array:
    """Return a tensor in the parameter's layout, as far as the library tells it."""
    layout = LIBRARIES[library]
    if array.dtype == mx.complex64:
        raise CheckpointError("it is complex64, and parameters are real")
    convolution = isinstance(module, Conv | SubmConv | ConvTranspose)
    if isinstance(module, mlx.nn.Embedding):
        return array
    if isinstance(module, DENSE + DENSE_TRANSPOSED) and array.ndim == len(wanted) > 1:
        if library == OURS:
            return array
        # PyTorch's: (C_out, C_in, axes...), of transposed ones (C_in, C_out, axes...).
        inputs = 0 if isinstance(module, DENSE_TRANSPOSED) else 1
        return mx.moveaxis(array, inputs, -1)
    linear = leaf == "weight" and array.ndim == 2
    kernel = leaf == layout.leaf and not linear
    if convolution and kernel and len(wanted) > 1:
        transposed = isinstance(module, ConvTranspose)
        # With a stride, spconv multiplies kernels of one offset as their shape says.
        skips = not isinstance(module, SubmConv) and prod(module.stride) != 1
        return convert_weight(
            array,
            library,
            module.kernel_size,
            transposed,
            unit_as_shaped=unit_as_shaped or skips,
        )
    if linear and len(wanted) > 1:
        array = convert_linear(array, library, (wanted[-1], wanted[0]))
        if convolution and prod(module.kernel_size) == 1:
            ones = (1,) * len(module.kernel_size)
            return array.reshape(array.shape[0], *ones, array.shape[1])
        return array
    if not convolution and kernel and len(wanted) == 2:
        weight = convert_weight(array, library, 1, unit_as_shaped=unit_as_shaped)
        return weight.reshape(weight.shape[0], -1)
    if library == "minkowski" and len(wanted) == 1 and array.ndim == 2:
        return array.squeeze(0) if array.shape[0] == 1 else array  # biases are rows
    return array


def _lookup(model: mlx.nn.Module, parameters: Mapping) -> dict[str, str]:
    """Map each parameter's name to itself, and the name without ``layers`` to it."""
    chains = [
        f"{name}.layers." if name else "layers."
        for name, module in model.named_modules()
        if isinstance(module, mlx.nn.Sequential)
    ]
    known = {}
    for name in parameters:
        short = name
        for chain in sorted(chains, key=len, reverse=True):
            if short.startswith(chain):
                short = chain.removesuffix("layers.") + short[len(chain) :]
        known[short] = name
    return known | {name: name for name in parameters}
