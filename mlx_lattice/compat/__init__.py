"""Libraries for PyTorch, over mlx_lattice: unmodified nets run where there is no CUDA.

Three ways in:

    from mlx_lattice.compat import spconv            # in code of your own
    mlx_lattice.compat.install("spconv")             # then ``import spconv.pytorch``
    python -m mlx_lattice run --as spconv train.py   # a script as it is

Importing this package imports nothing else; PyTorch is imported with the first library.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from types import ModuleType

__all__ = ["LIBRARIES", "install", "uninstall"]

# By the name that ``install`` takes: the module names that it registers, and the
# modules of this package that they stand for.
LIBRARIES: dict[str, dict[str, str]] = {
    "spconv": {
        "spconv": "spconv",
        "spconv.modules": "spconv.pytorch.modules",
        "spconv.conv": "spconv.pytorch.version1",
        "spconv.functional": "spconv.pytorch.functional",
        "spconv.ops": "spconv.pytorch.ops",
        "spconv.tables": "spconv.pytorch.tables",
        "cumm": "cumm",
    },
    "flex_gemm": {"flex_gemm": "flex_gemm"},
    "flash_attn": {
        "flash_attn": "flash_attn",
        "flash_attn.flash_attn_interface": "flash_attn",
    },
    "MinkowskiEngine": {
        "MinkowskiEngine": "MinkowskiEngine",
        **{
            f"MinkowskiEngine.Minkowski{name}": f"MinkowskiEngine.Minkowski{file}"
            for name, file in (
                ("Broadcast", "Pooling"),
                ("ChannelwiseConvolution", "Convolution"),
                ("Interpolation", "Pooling"),
                ("Network", "Common"),
                ("Normalization", "Nonlinearity"),
                ("Pruning", "Pooling"),
                ("SparseTensor", "Tensor"),
                ("TensorField", "Tensor"),
                ("Union", "Pooling"),
            )
        },
    },
    "torchsparse": {
        "torchsparse": "torchsparse",
        "torchsparse.nn.functional.devoxelize": "torchsparse.points",
        "torchsparse.nn.modules": "torchsparse.layers",
        "torchsparse.operators": "torchsparse.tensor",
        "torchsparse.utils.collate": "torchsparse.tensor",
        "torchsparse.utils.quantize": "torchsparse.points",
        "torchsparse.utils.tensor_cache": "torchsparse.tensor",
    },
    "torchsparse==1.4": {
        "torchsparse": "torchsparse_1_4",
        "torchsparse.nn.functional.devoxelize": "torchsparse_1_4.version1",
        "torchsparse.nn.modules": "torchsparse.layers",
        "torchsparse.operators": "torchsparse.tensor",
        "torchsparse.tensor": "torchsparse_1_4.version1",
        "torchsparse.utils.collate": "torchsparse.tensor",
        "torchsparse.utils.quantize": "torchsparse_1_4.version1",
    },
}
# Names that are left alone if the library is installed.
_OPTIONAL = {"cumm"}


def install(*libraries: str, replace: bool = False) -> None:
    """Make ``import spconv`` and the like find this package's modules.

    Registers the modules, with their submodules, in ``sys.modules``. Nothing on disk
    changes. A second call with the same library does nothing.

    Args:
        *libraries: names in ``LIBRARIES``, such as ``"spconv"`` or
            ``"torchsparse==1.4"``.
        replace: whether to hide a library that is already installed or imported. Code
            that imported names from it earlier keeps them.

    Raises:
        ValueError: there is no such library.
        ImportError: the library is installed, and ``replace`` is false; or PyTorch is
            missing.
    """
    for library in libraries:
        _expect_known(library)
    for library in libraries:
        for name, module in LIBRARIES[library].items():
            _register(name, f"{__name__}.{module}", library, replace)


def uninstall(*libraries: str) -> None:
    """Remove the modules that ``install`` registered; those of other packages stay."""
    for library in libraries:
        _expect_known(library)
        for name in LIBRARIES[library]:
            for each in _names_below(name):
                if is_ours(sys.modules[each]):
                    del sys.modules[each]


def is_ours(module: ModuleType | None) -> bool:
    """Return whether a module belongs to this package."""
    return getattr(module, "__name__", "").startswith(f"{__name__}.")


def _expect_known(library: str) -> None:
    if library not in LIBRARIES:
        raise ValueError(
            f"compat has no library {library!r}; it has {', '.join(LIBRARIES)}"
        )


def _register(name: str, module: str, library: str, replace: bool) -> None:
    """Register a module and its submodules under another name."""
    if getattr(sys.modules.get(name), "__name__", None) == module:
        return
    root = name.partition(".")[0]
    there = _found(root)
    if there is not None and not replace:
        if root in _OPTIONAL:
            return
        raise ImportError(
            f"{root} is {there}; pass replace=True to install({library!r}), or "
            "--replace to the command, to use mlx_lattice's instead"
        )
    loaded = _load(module, library)
    for each in _names_below(name):
        del sys.modules[each]
    sys.modules[name] = loaded
    for found in pkgutil.walk_packages(getattr(loaded, "__path__", ()), f"{module}."):
        below = found.name.removeprefix(module)
        sys.modules[f"{name}{below}"] = importlib.import_module(found.name)


def _load(module: str, library: str) -> ModuleType:
    """Import a module of this package."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            from ..distribution import install as command

            raise ImportError(
                f"compat's {library} needs torch; {command('torch')}"
            ) from error
        raise


def _names_below(name: str) -> list[str]:
    return [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]


def _found(name: str) -> str | None:
    """Return where another library of this name is, or None.

    A folder without ``__init__.py``, such as a clone beside the script, is no library.
    """
    if name in sys.modules:
        module = sys.modules[name]
        if is_ours(module):
            return None
        return f"imported already, from {getattr(module, '__file__', 'memory')}"
    spec = importlib.util.find_spec(name)
    return f"installed at {spec.origin}" if spec and spec.origin else None
