"""Checkpoints of other libraries: read, matched by name, converted.

A layout is looked up by the library's name, never guessed from a shape: the offsets of
a 3x3x3 kernel can be counted in two orders, and both have 27.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from ..checks import AXES, each_axis
from ..kernel_spec import per_axis
from ..nn.convolution import Conv, ConvTranspose, SubmConv
from .pytorch import PyTorchState
from .safetensors import (
    ArrayState,
    CheckpointError,
    SafetensorsState,
    State,
    check_file,
    shown,
)


@dataclass(frozen=True)
class Layout:
    """The layout of a convolution's weight in a library.

    Attributes:
        axes: O and I for the channels, k for the kernel's axes, K for all of its
            offsets on one axis, 1 for an axis of one entry.
        transposed: the same for transposed convolutions.
        first_fastest: which flat kernels count their first axis fastest: "always",
            "never", or "odd" for kernels of an odd number of offsets.
        leaf: name of the parameter.
        wrappers: names of modules that only wrap one of PyTorch's.
        unit: whether a kernel of one offset may be (C_in, C_out), without K.
        unit_flat: whether a kernel of one offset, whatever its shape says, is
            multiplied as its memory read as (C_in, C_out): ``x @ w.reshape(C_in,
            C_out)``. With a stride that skips cells it is used as shaped.
        linear: the order of a linear layer's weight: "OI" as PyTorch's, "IO", or
            "either" if the library has layers of both kinds.
        large: ``axes`` of kernels of more than 32 offsets, if they differ.
        depthwise: whether depthwise kernels are (K, C).
        leaves: parameters that have another name than PyTorch's.
    """

    axes: str
    transposed: str
    first_fastest: str = "never"
    leaf: str = "weight"
    wrappers: tuple[str, ...] = ()
    unit: bool = False
    unit_flat: bool = False
    linear: str = "OI"
    large: str = ""
    depthwise: bool = False
    leaves: tuple[tuple[str, str], ...] = ()


LARGE = 32  # offsets, from which on spconv 2.1 has another layout
# The library's name for what it writes itself.
OURS = "mlx_lattice"
_MINKOWSKI = ("bn", "linear", "module")
_TORCHSPARSE = Layout("KIO", "KIO", "odd", "kernel", unit=True)
_PADDLE = (("_mean", "running_mean"), ("_variance", "running_var"))

# As measured with spconv 2.3, MinkowskiEngine 0.5, torchsparse 2.0 and 2.1, ocnn 2.3,
# SparseConvNet and Paddle 3.3; older spconv's and FlexGEMM's, which TRELLIS.2 saves, as
# published. The last is what `mlx-lattice convert` writes.
LIBRARIES = {
    "spconv": Layout("OkI", "OkI", unit_flat=True),
    "spconv1": Layout("kIO", "kIO"),
    "spconv2.0": Layout("kOI", "kOI", unit_flat=True),
    "spconv2.1": Layout("OkI", "OkI", unit_flat=True, large="kOI"),
    "minkowski": Layout(
        "KIO", "KIO", "always", "kernel", _MINKOWSKI, unit=True, depthwise=True
    ),
    "torchsparse": _TORCHSPARSE,
    "torchsparse2.1": _TORCHSPARSE,
    "flexgemm": Layout("OkI", "OkI"),
    "trellis2": Layout("OkI", "OkI"),
    "ocnn": Layout("KIO", "KOI", leaf="weights", wrappers=("linear",)),
    "sparseconvnet": Layout("K1IO", "K1IO", linear="either"),
    "paddle": Layout("kIO", "kIO", linear="IO", leaves=_PADDLE),
    OURS: Layout("OkI", "OkI"),
}


def layout_of(library: str) -> Layout:
    """Return a library's layout, or say which libraries there are."""
    if library not in LIBRARIES:
        raise CheckpointError(
            f"library must be one of {', '.join(LIBRARIES)}; got {library!r}"
        )
    return LIBRARIES[library]


def convert_weight(
    array: mx.array,
    library: str,
    kernel_size: int | tuple[int, ...],
    transposed: bool = False,
    *,
    unit_as_shaped: bool = False,
) -> mx.array:
    """Return a convolution's weight in MLX's layout, (C_out, kernel..., C_in).

    Args:
        array: the weight in the library's layout.
        library: one of ``LIBRARIES``.
        kernel_size: the extent of each spatial axis; an int means 3 equal ones.
        transposed: whether the convolution is a transposed one.
        unit_as_shaped: take a kernel of one offset as its shape says. By default
            spconv's is read as spconv multiplies it, its memory as (C_in, C_out): set
            this if the stride is not 1 (and the convolution not submanifold), or if the
            net's own 1x1 layer keeps (C_out, C_in).

    Raises:
        CheckpointError: no such library, or the shape does not fit its layout.
        ValueError: an extent is not an int of 1 or more.
    """
    layout = layout_of(library)
    if not isinstance(array, mx.array):
        raise TypeError(f"a weight must be an mlx array; got {type(array).__name__}")
    size = each_axis(kernel_size, 3)
    size = per_axis(size, len(size), "kernel_size")
    volume, shape = prod(size), tuple(array.shape)
    axes = layout.transposed if transposed else layout.axes
    axes = layout.large if layout.large and volume > LARGE else axes
    if layout.unit and volume == 1 and array.ndim == 2:
        array = array[None]
    elif layout.depthwise and array.ndim == 2:
        array = array[:, None]
    if not _fits(array, axes, size):
        raise _misfit(shape, library, axes, size)
    names = [name for name, _ in _extents(axes, size)]
    if layout.unit_flat and volume == 1 and not unit_as_shaped:
        c_out, c_in = (array.shape[names.index(name)] for name in "OI")
        return array.reshape(c_in, c_out).T.reshape(c_out, *size, c_in)
    if "1" in names:
        array = array.squeeze(names.index("1"))
        names.remove("1")
    reverse = False
    if "K" in names:
        odd = layout.first_fastest == "odd" and volume % 2
        reverse = layout.first_fastest == "always" or odd
        array = mx.unflatten(array, names.index("K"), size[::-1] if reverse else size)
        names = [
            n for name in names for n in ("k" * len(size) if name == "K" else name)
        ]
    kernel = [at for at, name in enumerate(names) if name == "k"]
    kernel = kernel[::-1] if reverse else kernel
    return array.transpose(names.index("O"), *kernel, names.index("I"))


def convert_linear(
    array: mx.array, library: str, channels: tuple[int, int] | None
) -> mx.array:
    """Return a linear layer's weight as (C_out, C_in)."""
    order = layout_of(library).linear
    if order == "either":
        if channels is None or array.shape[0] == array.shape[1]:
            raise CheckpointError(
                f"{library} keeps (C_in, C_out) in its NetworkInNetwork and (C_out, "
                f"C_in) in a Linear, and {tuple(array.shape)} does not tell which this "
                "is: give w[None, None] of the first, w.T[None, None] of the second"
            )
        order = "IO" if tuple(array.shape) == channels else "OI"
    return array.T if order == "IO" else array


def _extents(axes: str, size: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """Return the name and the extent of each axis of a weight; None for channels."""
    extents = {"k": size, "K": (prod(size),), "1": (1,), "O": (None,), "I": (None,)}
    return [(name, extent) for name in axes for extent in extents[name]]


def _fits(array: mx.array, axes: str, size: tuple[int, ...]) -> bool:
    """Return whether an array has the axes of a layout."""
    extents = [extent for _, extent in _extents(axes, size)]
    return len(extents) == array.ndim and all(
        n is None or n == m for n, m in zip(extents, array.shape, strict=True)
    )


def _misfit(
    shape: tuple[int, ...], library: str, axes: str, size: tuple[int, ...]
) -> CheckpointError:
    """Return the error of a weight that has another shape than its layout."""
    words = {"O": "C_out", "I": "C_in"}
    expected = ", ".join(words.get(a, str(n)) for a, n in _extents(axes, size))
    others = [
        name
        for name, other in LIBRARIES.items()
        if "k" in other.axes != axes and _fits(mx.zeros(shape), other.axes, size)
    ]
    hint = f", which is the layout of {', '.join(others)}" if others else ""
    return CheckpointError(
        f"a {'x'.join(map(str, size))} kernel of {library} has the shape ({expected}); "
        f"got {shape}{hint}"
    )


Size = int | Sequence[int]
Names = Mapping[str, str | None] | Callable[[str], str | None] | None

Rename = Callable[[str], str | None]
# Rules that rename the parameters of a published checkpoint, each a function of the
# model, by the model's class and the library. ``models`` fills the table.
RENAMES: dict[
    tuple[type[mlx.nn.Module], str],
    Callable[[mlx.nn.Module], tuple[Rename, ...]],
] = {}
# Later versions of a library keep the names; our own files may have any library's.
_SAME_NAMES = {"torchsparse2.1": "torchsparse", OURS: None}
_SAME_NAMES |= dict.fromkeys(("spconv1", "spconv2.0", "spconv2.1"), "spconv")

# MLX's own convolutions, over dense grids.
DENSE = mlx.nn.Conv1d, mlx.nn.Conv2d, mlx.nn.Conv3d
DENSE_TRANSPOSED = (
    mlx.nn.ConvTranspose1d,
    mlx.nn.ConvTranspose2d,
    mlx.nn.ConvTranspose3d,
)
# DataParallel puts this before every name of a model.
PARALLEL = "module."
_DEPTH = 8  # of a prefix that is suggested


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
        rows = [
            ("mismatched", f"{shown(source)} {shape} -> {name} {expected}: {why}")
            for source, shape, name, expected, why in self.mismatched
        ]
        rows += [("missing", f"{name} {shape}") for name, shape in self.missing]
        rows += [("left over", f"{shown(name)} {shape}") for name, shape in self.unused]
        rows += [("mapping", f"{shown(key)!r} matches no name") for key in self.idle]
        rows += [("hint", self.hint)] if self.hint else []
        rows += [("file", self.note)] if self.note else []
        head = (
            f"{self.library}: {len(self.matched)} of {total} parameters matched, "
            f"{len(self.unused)} tensors left over, {len(self.ignored)} ignored"
        )
        return "\n".join([head, *(f"  {name:<10}  {text}" for name, text in rows)])


def load_state(path: str | Path, key: str | None = None) -> dict[str, mx.array]:
    """Read the arrays of a checkpoint; no code in it is executed.

    Args:
        path: ``.safetensors``, or a file of ``torch.save`` (``.pt``, ``.pth``,
            ``.ckpt``, ``.bin``, ``.tar``). PyTorch itself is not needed.
        key: the entry of a PyTorch file that holds the weights; a dot leads into a
            nested entry. By default ``state_dict``, ``model`` and other names that
            trainers use are found, and a warning names other entries with tensors.

    Returns:
        Name to array, in the file's dtypes; doubles become float32.

    Raises:
        CheckpointError: the file is broken, does not say which of its entries holds
            the weights, or keeps other objects among the weights.
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

    A name goes through ``mapping`` first. Then the library's additions to PyTorch's
    names are removed: its own name of a weight, and modules that only wrap others. The
    result must be the name of a parameter, in which the ``layers`` of a Sequential may
    be left out, or a name under which this model is published in this library. If each
    name begins with ``module.``, that prefix is taken off first.

    spconv multiplies a kernel of one offset as its memory read as (C_in, C_out), though
    its shape says (C_out, 1, 1, 1, C_in); kernels with stride 1 are read in this way.

    Parameters keep their dtype; a file's tensors are read one at a time. BatchNorm's
    running statistics are parameters like others; its epsilon is in no checkpoint.

    Args:
        source: a file for ``load_state``, or its result.
        model: the model, of ``mlx_lattice.nn`` modules.
        library: one of ``LIBRARIES``: the library that wrote the checkpoint;
            "mlx_lattice" for the files of ``mlx-lattice convert``.
        mapping: dotted prefix to its replacement (``""`` drops the prefix, ``None``
            the tensors under it; the longest prefix wins), or a function of a name. In
            a prefix ``*`` stands for a part up to the next dot, at its end for the rest
            of the name, and so it does in the replacement: ``{"net.*": "*"}``.
        strict: whether anything unmatched is an error, with the model left as it is.
        unit_as_shaped: take kernels of one offset as their shape says: for nets of
            spconv's whose own 1x1 layer keeps (C_out, C_in).

    Returns:
        An ``ImportReport``; ``print`` it.

    Raises:
        CheckpointError: the file is refused, two tensors match one parameter, or
            ``strict`` is set and something did not match: the text is the report.
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


def convert_state(
    state: Mapping[str, mx.array],
    library: str,
    mapping: Names = None,
    *,
    unit_as_shaped: bool = False,
    sizes: Iterable[Size | tuple[str, Size]] = (),
) -> dict[str, mx.array]:
    """Convert a checkpoint without a model.

    ``import_checkpoint(converted, model, "mlx_lattice")`` loads the result. Names stay
    the checkpoint's, without the library's additions to PyTorch's names.

    Args:
        state: the result of ``load_state``.
        library: one of ``LIBRARIES``.
        mapping, unit_as_shaped: as of ``import_checkpoint``. Strides are not known
            without a model: spconv's kernels of one offset are taken for stride 1.
        sizes: extents of kernels, for libraries that keep a kernel's offsets on one
            axis: an int for a cube, or one extent an axis; or a pair of a name, in
            which ``*`` stands for anything, and the extents of such kernels.

    Returns:
        Name to array, convolutions as (C_out, kernel..., C_in).

    Raises:
        CheckpointError: no size or several fit a kernel; or the library has two layouts
            that only a model tells apart.
    """
    arrays = ArrayState(state)
    steps = plan(arrays, library, mapping, Sizes(sizes), unit_as_shaped)
    return {step.target: step.of(arrays) for step in steps}


@contextmanager
def opened(
    source: str | Path | Mapping[str, mx.array], key: str | None = None
) -> Iterator[State]:
    """Open a checkpoint, or take the arrays of one."""
    if not isinstance(source, str | Path):
        yield ArrayState(source)
        return
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix in (".pt", ".pth", ".ckpt", ".bin", ".tar"):
        check_file(path, CheckpointError, binary=True)
        with path.open("rb") as stream:
            yield PyTorchState(stream, path, key)
        return
    if suffix != ".safetensors":
        raise CheckpointError(
            f"{path.name}: no reader for {suffix or 'a file without a suffix'}; "
            "expected .safetensors, .pt, .pth, .ckpt, .bin or .tar"
        )
    state = SafetensorsState(path)
    if key is not None:
        raise CheckpointError(f"{path.name} has no entries, so none called {key!r}")
    yield state


class Step(NamedTuple):
    """One tensor's way into a model: its name, the parameter, how it is converted."""

    source: str
    target: str
    convert: Callable[[mx.array], mx.array]

    def of(self, state: State) -> mx.array:
        """Return the converted tensor, in the dtype that it has in the state."""
        return self.convert(state.read(self.source))


def check_library(state: State, library: str) -> None:
    """Raise if the file names another library than the caller."""
    if state.library == OURS != library:
        raise CheckpointError(
            f"the file was written by mlx-lattice convert: its library is {OURS!r}, "
            f"not {library!r}, whose layout was taken out of it"
        )


def habits(name: str, library: str) -> list[str]:
    """Return a name, and the name in PyTorch's form without the library's additions."""
    layout = LIBRARIES[library]
    *path, leaf = name.split(".")
    if path and path[-1] in layout.wrappers:
        path = path[:-1]
    leaf = "weight" if leaf == layout.leaf else dict(layout.leaves).get(leaf, leaf)
    return [name, ".".join([*path, leaf])]


def counter(name: str) -> bool:
    """Return whether a tensor is a counter of training, not a parameter."""
    return name.endswith(("num_batches_tracked", "max_num_voxels_during_training"))


# With a model


def rename_rules(model: mlx.nn.Module | None, library: str) -> tuple[Rename, ...]:
    """Return the rules that rename a library's published checkpoint of this model."""
    library = _SAME_NAMES.get(library, library)
    return tuple(
        rule
        for (kind, name), rules in RENAMES.items()
        if isinstance(model, kind) and library in (None, name)
        for rule in rules(model)
    )


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
    rules = rename_rules(model, library)

    def place(name: str) -> str | None:
        return next((known[n] for n in habits(name, library) if n in known), None)

    def resolve(name: str | None) -> tuple[str | None, str | None]:
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
    sources: dict[str, str] = {}  # by parameter
    for source in state:
        array = state.sketch(source)
        name, target = resolve(rename(source))
        shape = tuple(array.shape)
        if name is None or (target is None and counter(name)):
            ignored.append(source)
            continue
        if target is None:
            unused.append((source, shape))
            continue
        if target in sources:
            raise CheckpointError(
                f"{shown(sources[target])} and {shown(source)} are both meant for "
                f"{target}: change the mapping"
            )
        sources[target] = source
        expected = tuple(parameters[target].shape)
        convert = partial(
            _converted,
            leaf=source.rpartition(".")[2],
            library=library,
            module=modules.get(target.rpartition(".")[0]),
            expected=expected,
            unit_as_shaped=unit_as_shaped,
        )
        try:
            becomes = tuple(convert(array).shape)
            why = "" if becomes == expected else f"becomes {becomes}"
        except CheckpointError as error:
            why = str(error)
        if why:
            mismatched.append((source, shape, target, expected, why))
        else:
            matched.append((source, shape, target, expected))
            steps.append(Step(source, target, convert))
    missing = [(n, tuple(p.shape)) for n, p in parameters.items() if n not in sources]
    hint = suggestion(
        {rename.seen(name) for name, _ in unused},
        {name for name, _ in missing},
        lambda name: resolve(name)[1],
    )
    lists = (matched, mismatched, missing, unused, ignored, rename.idle)
    return ImportReport(library, *map(tuple, lists), hint, state.note), steps


def _converted(
    array: mx.array,
    leaf: str,
    library: str,
    module: mlx.nn.Module | None,
    expected: tuple[int, ...],
    unit_as_shaped: bool,
) -> mx.array:
    """Return a tensor in the parameter's layout, as far as the library tells it."""
    layout = LIBRARIES[library]
    if array.dtype == mx.complex64:
        raise CheckpointError("it is complex64, and parameters are real")
    convolution = isinstance(module, Conv | SubmConv | ConvTranspose)
    if isinstance(module, mlx.nn.Embedding):
        return array
    if isinstance(module, DENSE + DENSE_TRANSPOSED) and array.ndim == len(expected) > 1:
        if library == OURS:
            return array
        # PyTorch's: (C_out, C_in, axes...), of transposed ones (C_in, C_out, axes...).
        inputs = 0 if isinstance(module, DENSE_TRANSPOSED) else 1
        return mx.moveaxis(array, inputs, -1)
    linear = leaf == "weight" and array.ndim == 2
    kernel = leaf == layout.leaf and not linear
    if convolution and kernel and len(expected) > 1:
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
    if linear and len(expected) > 1:
        array = convert_linear(array, library, (expected[-1], expected[0]))
        if convolution and prod(module.kernel_size) == 1:
            ones = (1,) * len(module.kernel_size)
            return array.reshape(array.shape[0], *ones, array.shape[1])
        return array
    if not convolution and kernel and len(expected) == 2:
        weight = convert_weight(array, library, 1, unit_as_shaped=unit_as_shaped)
        return weight.reshape(weight.shape[0], -1)
    if library == "minkowski" and len(expected) == 1 and array.ndim == 2:
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


# Without a model


def plan(
    state: State, library: str, mapping: Names, sizes: Sizes, unit_as_shaped: bool
) -> list[Step]:
    """Return a step for each tensor; arguments are those of ``convert_state``."""
    layout = layout_of(library)
    check_library(state, library)
    for known, what in (
        (layout.axes == layout.transposed, "the channels of transposed convolutions"),
        (not layout.large, "large kernels"),
    ):
        if not known:
            raise CheckpointError(
                f"{library} keeps {what} in another order, which no shape tells: name "
                "the model that they are for"
            )
    if "k" not in layout.axes and not (sizes.any or sizes.named):
        raise CheckpointError(
            f"{library} writes the offsets of a kernel on one axis, which does not say "
            "its extents: name the model that they are for, or give the sizes of its "
            "kernels, as in --size 3 2"
        )
    rename, steps = Renamer(mapping, state), {}
    for source in state:
        name = rename(source)
        if name is None or counter(name):
            continue
        array, leaf = state.sketch(source), source.rpartition(".")[2]
        convert = mx.array
        if leaf == layout.leaf and (array.ndim > 2 or leaf == "kernel"):
            convert = partial(
                convert_weight,
                library=library,
                kernel_size=sizes.of(source, array, library, layout),
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
        target = habits(name, library)[-1]
        if target in steps:
            raise CheckpointError(
                f"two tensors become {shown(target)}: change the mapping"
            )
        steps[target] = Step(source, target, convert)
    return list(steps.values())


class Sizes:
    """Extents of kernels, by a pattern of names or for any kernel of their volume."""

    def __init__(self, sizes: Iterable[Size | tuple[str, Size]]):
        self.named: list[tuple[str, tuple[int, ...]]] = []
        self.any: list[tuple[int, ...]] = []
        for entry in sizes:
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
        sizes = []
        for word in words:
            name, _, size = word.rpartition("=")
            try:
                extents = [int(n) for n in size.split("x")]
            except ValueError:
                raise ValueError(
                    f"--size takes 3, 1x3x3 or NAME=3x3x3; got {word!r}"
                ) from None
            extents = extents * 3 if len(extents) == 1 else extents
            sizes.append((name, extents) if name else extents)
        return cls(sizes)

    def of(
        self, name: str, array: mx.array, library: str, layout: Layout
    ) -> tuple[int, ...]:
        """Return a kernel's extents: from its shape, from the sizes, or ones."""
        if "k" in layout.axes:
            at, dims = layout.axes.index("k"), array.ndim - 2
            return tuple(array.shape[at : at + dims])
        for pattern, size in self.named:
            under = name.startswith(f"{pattern}.")
            if name == pattern or under or fnmatchcase(name, pattern):
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


# Mappings of names


class Renamer:
    """A mapping of names, and which of its keys matched none.

    A key is a dotted prefix of names. A ``*`` in it stands for what there is up to the
    next dot, and at its end for all that is left; each ``*`` of the new name takes what
    that of the key stood for. The key with the most other letters wins.
    """

    def __init__(self, mapping: Names, names: Collection[str]):
        self.parallel = bool(names) and all(n.startswith(PARALLEL) for n in names)
        self.function = mapping if callable(mapping) else None
        self.keys: dict[str, re.Pattern] = {}
        self.used: set[str] = set()
        if self.function is None:
            if not isinstance(mapping, Mapping | None):
                raise TypeError(
                    "mapping must be a dict of prefixes or a function of a name; got "
                    f"{type(mapping).__name__}"
                )
            self.new = dict(mapping or {})
            weight = {key: len(key) - key.count("*") for key in self.new}
            for key in sorted(self.new, key=weight.get, reverse=True):
                self.keys[key] = _pattern(key, self.new[key])

    def seen(self, name: str) -> str:
        """Return a name as the mapping sees it."""
        return name.removeprefix(PARALLEL) if self.parallel else name

    def __call__(self, name: str) -> str | None:
        """Return the new name, or None for one to drop."""
        name = self.seen(name)
        if self.function is not None:
            return _checked(self.function(name), name)
        for key, pattern in self.keys.items():
            if match := pattern.match(name):
                self.used.add(key)
                new = _checked(self.new[key], name)
                if new is None:
                    return None
                for part in match.groups():
                    new = new.replace("*", part, 1)
                rest = name[match.end() :].removeprefix(".")
                return ".".join(filter(None, (new, rest)))
        return name

    @property
    def idle(self) -> tuple[str, ...]:
        """The keys that no name had."""
        return tuple(key for key in self.keys if key not in self.used)


def _pattern(key: str, new: str | None) -> re.Pattern:
    """Return the pattern of a key, which matches at the start of a name."""
    if not isinstance(key, str):
        raise TypeError(f"the mapping's keys must be names; got {key!r}")
    if isinstance(new, str) and new.count("*") != key.count("*"):
        raise ValueError(
            f"the mapping makes {new!r} of {key!r}: each * of a key stands for a part "
            "of the new name, so both must have as many"
        )
    if not key:
        return re.compile("")
    whole = key.endswith("*")
    parts = [re.escape(part) for part in key.split("*")]
    if whole:
        return re.compile("([^.]*)".join(parts[:-1]) + "(.+)$")
    return re.compile("([^.]*)".join(parts) + r"(?=\.|$)")


def _checked(new: object, name: str) -> str | None:
    """Return the result of a mapping; raise unless it is a name or None."""
    if not isinstance(new, str | None):
        raise TypeError(
            f"the mapping makes {new!r} of {shown(name)}; expected a name or None"
        )
    return new


def suggestion(
    left: Collection[str],
    parameters: Collection[str],
    place: Callable[[str], str | None],
) -> str:
    """Return the prefix with which most left-over names would fit, as a sentence."""
    less, more = Counter(), Counter()
    for name in left:
        less.update(prefix for prefix, end in _cuts(name) if place(end) in parameters)
    for parameter in parameters:
        more.update(prefix for prefix, end in _cuts(parameter) if end in left)
    ((key, count),) = less.most_common(1) or ((None, 0),)
    ((prefix, added),) = more.most_common(1) or ((None, 0),)
    if not (count or added):
        return ""
    if count >= added:
        how, mapping = f"without {shown(key)!r}", {key: ""}
    else:
        how, mapping = f"with {prefix!r} before them", {"": prefix}
    return f"{max(count, added)} of {len(left)} left over fit {how}: mapping={mapping}"


def _cuts(name: str) -> Iterable[tuple[str, str]]:
    """Return the ways to cut a name at one of its first dots."""
    at = name.find(".")
    for _ in range(_DEPTH):
        if at < 0:
            return
        yield name[:at], name[at + 1 :]
        at = name.find(".", at + 1)
