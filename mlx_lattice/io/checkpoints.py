"""Checkpoints of other libraries: reading, converting names and weights, a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from ..nn.convolution import Conv, ConvTranspose, SubmConv
from .errors import CheckpointError, shown
from .layouts import LIBRARIES, convert_weight, layout_of
from .names import Rename, published
from .pytorch import read_pytorch
from .safetensors import read_safetensors

Names = Mapping[str, str | None] | Callable[[str], str | None] | None


@dataclass(frozen=True)
class ImportReport:
    """The match of a checkpoint's tensors with a model's parameters.

    Attributes:
        matched: (source name, its shape, parameter, its shape).
        mismatched: (source name, its shape, parameter, its shape, what is wrong).
        missing: (parameter, its shape) that no tensor was for.
        unused: (source name, its shape) that no parameter was for.
        ignored: names that the mapping drops, and counters that MLX does not keep.
    """

    library: str
    matched: tuple[tuple, ...]
    mismatched: tuple[tuple, ...]
    missing: tuple[tuple, ...]
    unused: tuple[tuple, ...]
    ignored: tuple[str, ...]

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
        return "\n".join(lines)


def load_state(path: str | Path, key: str | None = None) -> dict[str, mx.array]:
    """Read the arrays of a checkpoint; nothing that it holds is executed.

    Args:
        path: ``.safetensors``, or a zip that ``torch.save`` wrote (``.pt``, ``.pth``,
            ``.ckpt``, ``.bin``). PyTorch itself is not needed.
        key: the entry of a PyTorch file that holds the weights, where it has several
            entries; ``state_dict``, ``model`` and the like are found.

    Returns:
        Name to array, in the file's dtypes; doubles become float32.

    Raises:
        CheckpointError: the file is broken, or asks for more than tensors.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in (".pt", ".pth", ".ckpt", ".bin"):
        return read_pytorch(path, key)
    if suffix != ".safetensors":
        raise CheckpointError(
            f"{path.name}: no reader for {suffix or 'a file without a suffix'}; "
            "expected .safetensors, .pt, .pth, .ckpt or .bin"
        )
    path.stat()  # a missing file raises FileNotFoundError
    if key is not None:
        raise CheckpointError(f"{path.name} has no entries, so none called {key!r}")
    return read_safetensors(path)


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
    decoders.

    A kernel of one offset that spconv wrote for a submanifold convolution, or for one
    of stride 1, is read as spconv multiplies it: its memory as (C_in, C_out), though
    its shape says (C_out, 1, 1, 1, C_in).

    Parameters keep their dtype. BatchNorm's running statistics are parameters like
    others; its epsilon is in no checkpoint.

    Args:
        source: a file for ``load_state``, or what it returned.
        model: the model, of ``mlx_lattice.nn`` modules.
        library: one of ``LIBRARIES``: who wrote the checkpoint.
        mapping: dotted prefix to its replacement (``""`` drops the prefix, ``None``
            the tensors under it; the longest prefix wins), or a function of a name.
        strict: whether anything unmatched is an error, with the model left as it is.
        unit_as_shaped: take kernels of one offset as their shape says: for nets of
            spconv's whose own 1x1 layer keeps (C_out, C_in).

    Returns:
        An ``ImportReport``; ``print`` it.

    Raises:
        CheckpointError: the file is refused, two tensors are meant for one parameter,
            or ``strict`` is set and something did not match: the report is the text.
    """
    layout_of(library)
    if not isinstance(model, mlx.nn.Module):
        raise TypeError(f"model must be a module; got {type(model).__name__}")
    state = load_state(source) if isinstance(source, str | Path) else dict(source)
    for name, array in state.items():
        if not isinstance(array, mx.array):
            raise TypeError(
                f"{shown(str(name))} must be an mlx array; got {type(array).__name__}"
            )
    parameters = dict(tree_flatten(model.parameters()))
    if any(name.endswith("scales") for name in parameters):
        raise CheckpointError(
            "the model is quantised; import into the float model, then quantise it"
        )
    convolutions = {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules()
        if isinstance(module, Conv | SubmConv | ConvTranspose)
    }
    known, rename = _lookup(model, parameters), _renamer(mapping, state)
    rules = published(model, library)

    def place(name: str) -> str | None:
        return next((known[n] for n in _habits(name, library) if n in known), None)

    matched, mismatched, unused, ignored, weights = [], [], [], [], {}
    taken: dict[str, str] = {}
    for source_name, array in state.items():
        name = rename(source_name)
        target = None if name is None else place(name)
        if name is not None and target is None and rules is not None:
            name = rules(name)
            target = None if name is None else place(name)
        if name is None:
            ignored.append(source_name)
            continue
        shape = tuple(array.shape)
        if target is None:
            if name.endswith("num_batches_tracked"):
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
        wanted = parameters[target]
        try:
            leaf = source_name.rpartition(".")[2]
            module = convolutions.get(target)
            converted = _converted(array, leaf, library, module, wanted, unit_as_shaped)
            why = f"becomes {tuple(converted.shape)}"
        except CheckpointError as error:
            converted, why = None, str(error)
        row = (source_name, shape, target, tuple(wanted.shape))
        if converted is None or converted.shape != wanted.shape:
            mismatched.append((*row, why))
        else:
            matched.append(row)
            weights[target] = converted.astype(wanted.dtype)
    missing = [(n, tuple(p.shape)) for n, p in parameters.items() if n not in taken]
    lists = (matched, mismatched, missing, unused, ignored)
    report = ImportReport(library, *(tuple(rows) for rows in lists))
    if strict and not report.complete:
        raise CheckpointError(f"the checkpoint does not fit the model\n{report}")
    model.load_weights(list(weights.items()), strict=False)
    return report


def convert_state(
    state: Mapping[str, mx.array],
    library: str,
    mapping: Names = None,
    *,
    unit_as_shaped: bool = False,
) -> dict[str, mx.array]:
    """Convert a checkpoint without a model; its layout must keep the kernel's axes.

    Args:
        state: the result of ``load_state``.
        library: one of ``LIBRARIES``.
        mapping: as ``import_checkpoint`` takes it.
        unit_as_shaped: take kernels of one offset as their shape says. Without a model
            nothing tells strides, so that all of spconv's are taken for stride 1.

    Returns:
        Name to array, convolutions as (C_out, kernel..., C_in).

    Raises:
        CheckpointError: the library writes a kernel's offsets on one axis, so that its
            extents are known to the model alone.
    """
    layout = layout_of(library)
    if "k" not in layout.axes:
        raise CheckpointError(
            f"{library} writes the offsets of a kernel on one axis, which does not say "
            "its extents: name the model that they are for"
        )
    rename = _renamer(mapping, state)
    converted = {}
    for source_name, array in state.items():
        name = rename(source_name)
        if name is None or name.endswith("num_batches_tracked"):
            continue
        if source_name.endswith(layout.leaf) and array.ndim > 2:
            at, dims = layout.axes.index("k"), array.ndim - 2
            size = tuple(array.shape[at : at + dims])
            array = convert_weight(array, library, size, unit_as_shaped=unit_as_shaped)
        converted[_habits(name, library)[-1]] = array
    return converted


def _converted(
    array: mx.array,
    leaf: str,
    library: str,
    module: mlx.nn.Module | None,
    wanted: mx.array,
    unit_as_shaped: bool,
) -> mx.array:
    """Return a tensor in the parameter's layout, as far as the library tells it."""
    layout = LIBRARIES[library]
    if array.dtype == mx.complex64:
        raise CheckpointError("it is complex64, and parameters are real")
    # Each of these libraries keeps PyTorch's Linear, (C_out, C_in), beside its own.
    linear = leaf == "weight" and array.ndim == 2
    kernel = leaf == layout.leaf and not linear
    if module is not None and kernel:
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
    if module is not None and linear and prod(module.kernel_size) == 1:
        ones = (1,) * len(module.kernel_size)
        return array.reshape(array.shape[0], *ones, array.shape[1])
    if module is None and kernel and wanted.ndim == 2:
        weight = convert_weight(array, library, 1, unit_as_shaped=unit_as_shaped)
        return weight.reshape(weight.shape[0], -1)
    if library == "minkowski" and wanted.ndim == 1 and array.ndim == 2:
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


def _habits(name: str, library: str) -> list[str]:
    """Return a name, and the name without what the library adds to PyTorch's."""
    layout = LIBRARIES[library]
    *path, leaf = name.split(".")
    if path and path[-1] in layout.wrappers:
        path = path[:-1]
    return [name, ".".join([*path, "weight" if leaf == layout.leaf else leaf])]


def _name(new: object, name: str) -> str | None:
    """Return what a mapping made of a name: a name or None, else raise."""
    if not isinstance(new, str | None):
        raise TypeError(
            f"the mapping makes {new!r} of {shown(name)}; expected a name or None"
        )
    return new


def _renamer(mapping: Names, state: Mapping) -> Rename:
    """Return the function that a mapping means."""
    if callable(mapping):
        return lambda name: _name(mapping(name), name)
    if not isinstance(mapping, Mapping | None):
        raise TypeError(
            "mapping must be a dict of prefixes or a function of a name; got "
            f"{type(mapping).__name__}"
        )
    prefixes = mapping or {}
    # DataParallel puts this prefix before every name of a model.
    parallel = bool(state) and all(name.startswith("module.") for name in state)

    def rename(name: str) -> str | None:
        if parallel:
            name = name.removeprefix("module.")
        fits = [p for p in prefixes if not p or f"{name}.".startswith(f"{p}.")]
        if not fits:
            return name
        prefix = max(fits, key=len)
        new = _name(prefixes[prefix], name)
        rest = name[len(prefix) :].removeprefix(".")
        return None if new is None else ".".join(filter(None, (new, rest)))

    return rename
