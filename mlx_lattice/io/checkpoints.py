"""Checkpoints of other libraries: read, matched by name, converted.

A layout is looked up by the library's name, never guessed from a shape: the offsets of
a 3x3x3 kernel can be counted in two orders, and both have 27.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from ..checks import LatticeWarning, each_axis
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

# The layouts of weights by library, as ``import_checkpoint`` takes its name. Measured
# with spconv 2.3, MinkowskiEngine 0.5, torchsparse 2.0 and 2.1, ocnn 2.3, SparseConvNet
# and Paddle 3.3; as published for older spconv and FlexGEMM. The last is the layout
# that ``mlx-lattice convert`` writes.
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
        kernel_size: the extent of each spatial axis, or an int for three equal extents.
        transposed: whether the convolution is a transposed one.
        unit_as_shaped: read a kernel of one offset by its shape. By default a kernel of
            spconv is read as spconv multiplies it, with its memory as (C_in, C_out).
            Set this if the stride is not 1 (and the convolution not submanifold), or if
            the net's own 1x1 layer stores (C_out, C_in).

    Raises:
        CheckpointError: there is no such library, or the shape does not fit its layout.
        ValueError: an extent is not an int of 1 or more.

    Examples:
        >>> kernel = mx.zeros((27, 8, 16))  # (K, C_in, C_out)
        >>> io.convert_weight(kernel, "minkowski", kernel_size=3).shape
        (16, 3, 3, 3, 8)
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
    extents = {"k": size, "K": (volume,), "1": (1,), "O": ("C_out",), "I": ("C_in",)}
    expected = [(name, extent) for name in axes for extent in extents[name]]
    if len(expected) != array.ndim or any(
        isinstance(n, int) and n != m
        for (_, n), m in zip(expected, array.shape, strict=True)
    ):
        raise CheckpointError(
            f"a {'x'.join(map(str, size))} kernel of {library} has the shape "
            f"({', '.join(str(n) for _, n in expected)}); got {shape}"
        )
    names = [name for name, _ in expected]
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


@dataclass(frozen=True)
class ImportReport:
    """Report how a checkpoint's tensors match a model's parameters.

    Attributes:
        matched: (source name, its shape, parameter, its shape).
        mismatched: (source name, its shape, parameter, its shape, reason).
        missing: (parameter, its shape) without a tensor in the checkpoint.
        unused: (source name, its shape) without a parameter in the model.
        ignored: names that the mapping drops, and counters that MLX does not keep.
        note: the entry of the file that holds the tensors; empty if it has no entries.
    """

    library: str
    matched: tuple[tuple[Any, ...], ...]
    mismatched: tuple[tuple[Any, ...], ...]
    missing: tuple[tuple[Any, ...], ...]
    unused: tuple[tuple[Any, ...], ...]
    ignored: tuple[str, ...]
    note: str = ""

    @property
    def complete(self) -> bool:
        """Whether every parameter has a tensor and every tensor a parameter."""
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
        rows += [("file", self.note)] if self.note else []
        head = (
            f"{self.library}: {len(self.matched)} of {total} parameters matched, "
            f"{len(self.unused)} tensors left over, {len(self.ignored)} ignored"
        )
        return "\n".join([head, *(f"  {name:<10}  {text}" for name, text in rows)])


def load_state(path: str | Path, key: str | None = None) -> dict[str, mx.array]:
    """Read the arrays of a checkpoint, without running code in it.

    Args:
        path: ``.safetensors``, or a file of ``torch.save`` (``.pt``, ``.pth``,
            ``.ckpt``, ``.bin``, ``.tar``). PyTorch itself is not needed.
        key: the entry of a PyTorch file that holds the weights; a dot leads into a
            nested entry. By default ``state_dict``, ``model`` and other common names
            are found, and a warning names other entries with tensors.

    Returns:
        Arrays by name, in the dtypes of the file; doubles become float32.

    Raises:
        CheckpointError: the file is broken, does not say which of its entries holds
            the weights, or keeps other objects among the weights.
        FileNotFoundError: there is no such file.

    Examples:
        >>> mx.save_safetensors("net.safetensors", {"conv.weight": mx.zeros((16, 8))})
        >>> state = io.load_state("net.safetensors")
        >>> state["conv.weight"].shape
        (16, 8)
    """
    with opened(Path(path), key) as state:
        if key is None and getattr(state, "others", ()):
            message = f"{Path(path).name}: {state.note}"
            warnings.warn(message, LatticeWarning, stacklevel=2)
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

    Each name first passes ``mapping``. Then the library's additions to PyTorch's names
    are removed: its own name of a weight, and modules that only wrap others. The result
    must be the name of a parameter, in which the ``layers`` of a Sequential may be left
    out, or a name under which this model is published in this library. If every name
    begins with ``module.``, that prefix is removed first.

    spconv multiplies a kernel of one offset with its memory read as (C_in, C_out),
    although its shape is (C_out, 1, 1, 1, C_in). Kernels with stride 1 are read in this
    way.

    Parameters keep their dtype, and tensors of a file are read one at a time. Running
    statistics of a BatchNorm are parameters like others; its epsilon is not in any
    checkpoint.

    Args:
        source: a file for ``load_state``, or its result.
        model: the model, of ``mlx_lattice.nn`` modules.
        library: one of ``LIBRARIES``: the library that wrote the checkpoint;
            "mlx_lattice" for the files of ``mlx-lattice convert``.
        mapping: replacements by dotted prefix, or a function of a name. ``""`` drops
            the prefix, ``None`` drops the tensors under it, and the longest prefix
            wins.
        strict: whether a name without a match is an error, which leaves the model
            unchanged.
        unit_as_shaped: read kernels of one offset by their shape, for nets of spconv
            whose own 1x1 layer stores (C_out, C_in).

    Returns:
        An ``ImportReport``, which prints as a table.

    Raises:
        CheckpointError: the file is refused, two tensors match one parameter, or
            ``strict`` is set and a name has no match. The message is the report.

    Examples:
        >>> state = {"conv.kernel": mx.zeros((27, 8, 16))}
        >>> net = nn.Module()
        >>> net.conv = nn.SubmConv3d(8, 16, 3, bias=False)
        >>> report = io.import_checkpoint(state, net, "minkowski")
        >>> len(report.matched), len(report.missing)  # print(report) shows names
        (1, 0)
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
        for name, target, convert in steps:
            array = convert(state.read(name)).astype(parameters[target].dtype)
            if state.from_file:
                mx.eval(array)  # frees what the file's layout took
            weights.append((target, array))
    model.load_weights(weights, strict=False)
    return report


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


# Counters of training, which are no parameters.
_COUNTERS = "num_batches_tracked", "max_num_voxels_during_training", "global_step"


def match(
    state: State,
    model: mlx.nn.Module,
    library: str,
    mapping: Names = None,
    *,
    unit_as_shaped: bool = False,
) -> tuple[ImportReport, list[tuple[str, str, Callable[[mx.array], mx.array]]]]:
    """Match a state with a model by names and shapes; nothing is read or loaded."""
    layout_of(library)
    if state.library == OURS != library:
        raise CheckpointError(
            f"the file was written by mlx-lattice convert: its library is {OURS!r}, "
            f"not {library!r}, whose layout was taken out of it"
        )
    parameters = dict(tree_flatten(model.parameters()))
    if any(name.endswith("scales") for name in parameters):
        raise CheckpointError(
            "the model is quantised; import into the float model, then quantise it"
        )
    modules = dict(model.named_modules())
    known, rename = _lookup(model, parameters), _renamer(mapping, state)
    layout, published = LIBRARIES[library], _SAME_NAMES.get(library, library)
    rules = [
        rule
        for (kind, name), rules in RENAMES.items()
        if isinstance(model, kind) and published in (None, name)
        for rule in rules(model)
    ]

    def place(name: str) -> str | None:
        """Return a name's parameter, also without the library's additions to it."""
        if name in known:
            return known[name]
        *path, leaf = name.split(".")
        if path and path[-1] in layout.wrappers:
            path = path[:-1]
        leaf = "weight" if leaf == layout.leaf else dict(layout.leaves).get(leaf, leaf)
        return known.get(".".join([*path, leaf]))

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
        if name is None or (target is None and name.endswith(_COUNTERS)):
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
            steps.append((source, target, convert))
    missing = [(n, tuple(p.shape)) for n, p in parameters.items() if n not in sources]
    lists = (matched, mismatched, missing, unused, ignored)
    return ImportReport(library, *map(tuple, lists), state.note), steps


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


def _renamer(mapping: Names, names: Collection[str]) -> Rename:
    """Return a function that takes ``module.`` off a name, then maps it."""
    start = "module." if names and all(n.startswith("module.") for n in names) else ""
    if not (callable(mapping) or isinstance(mapping, Mapping | None)):
        raise TypeError(
            "mapping must be a dict of prefixes or a function of a name; got "
            f"{type(mapping).__name__}"
        )

    def prefixed(name: str) -> str | None:
        for key in sorted(mapping or (), key=len, reverse=True):
            rest = name.removeprefix(key)
            if key in ("", name) or (rest != name and rest.startswith(".")):
                new = mapping[key]
                if not isinstance(new, str):
                    return new
                return ".".join(filter(None, (new, rest.removeprefix("."))))
        return name

    def rename(name: str) -> str | None:
        name = name.removeprefix(start)
        new = mapping(name) if callable(mapping) else prefixed(name)
        if not isinstance(new, str | None):
            raise TypeError(
                f"the mapping makes {new!r} of {shown(name)}; expected a name or None"
            )
        return new

    return rename
