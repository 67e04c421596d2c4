"""Nets that are saved to a folder and read from one, and nets that score points."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from ..checks import DTYPES
from ..distribution import __version__
from .recipe import ATTRIBUTES, About, VoxelRecipe, Voxels, check_scores

Net = TypeVar("Net", bound="Pretrained")

# Nets by name: this package's, then the class that was defined last.
_CLASSES: dict[str, type[Pretrained]] = {}

# What constructors make of numbers and lists that no net has.
_OF_ARGUMENTS = TypeError, ValueError, ArithmeticError, LookupError, AttributeError


class Pretrained(mlx.nn.Module):
    """A net that keeps its constructor's arguments, and so can be made again.

    A subclass of your own can be saved and read as well; its arguments must be
    numbers, strings, booleans, dtypes, None, and lists, tuples, dicts and dataclasses
    of these; a dataclass is read as a dict.

    Attributes:
        about: what belongs to the weights beside the layers: an ``About``.
    """

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        known = _CLASSES.get(cls.__name__)
        if known is None or not known.__module__.startswith(__package__):
            _CLASSES[cls.__name__] = cls  # a notebook's cell may have run again

    def __new__(cls, *args, **kwargs):
        """Keep the arguments; ``__init__`` checks them."""
        made = super().__new__(cls)
        signature = inspect.signature(cls.__init__)
        try:
            given = signature.bind_partial(made, *args, **kwargs)
        except TypeError:
            return made  # __init__ is about to raise the same
        held = {}
        for name, value in list(given.arguments.items())[1:]:
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                held |= _as_given(value)
            else:
                star = "*" if kind is inspect.Parameter.VAR_POSITIONAL else ""
                held[star + name] = _as_given(value)
        object.__setattr__(made, "_arguments", held)
        object.__setattr__(made, "_about", About())
        return made

    @property
    def about(self) -> About:
        """Voxels, classes and sources of the weights."""
        return self._about

    @about.setter
    def about(self, about: About) -> None:
        if not isinstance(about, About):
            raise TypeError(f"about must be an About; got {type(about).__name__}")
        object.__setattr__(self, "_about", about)

    @about.deleter
    def about(self) -> None:
        # MLX's modules delete what a list, a dict or an array is put in the place of.
        raise TypeError("about must be an About, and cannot be taken away")

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, ``model.safetensors`` and a card.

        The config has the name of the class, its arguments, what ``about`` says, and
        of packed layers the bits, the group size and which layers are float.

        Args:
            folder: created if it does not exist. The three files are replaced once all
                are written; if writing fails, the old ones stay.

        Raises:
            OSError: a file cannot be written.
            TypeError: an argument of the constructor is none that JSON can hold.
        """
        from ..io import folders
        from ..io.safetensors import write_safetensors

        config, card = self.described()
        with folders.written(folder, config, card) as path:
            write_safetensors(path, dict(tree_flatten(self.parameters())))

    def described(self) -> tuple[dict[str, Any], str]:
        """Return the config and the card of the net's folder; nothing is computed."""
        from ..io import folders

        name = type(self).__name__
        if unnamed := [key for key in self._arguments if key.startswith("*")]:
            raise TypeError(
                f"{name} takes {unnamed[0]}, and a config has arguments by their names"
            )
        config: dict[str, Any] = {
            "library": "mlx_lattice",
            "version": __version__,
            "model": name,
            "arguments": {
                key: _written(value, f"{key} of {name}")
                for key, value in self._arguments.items()
            },
        }
        if packing := folders.described_packing(self):
            config["quantization"] = packing
        if about := self.about.config():
            config["about"] = about
        arrays = dict(tree_flatten(self.parameters()))
        size = sum(array.nbytes for array in arrays.values())
        module = None if _is_ours(type(self)) else type(self).__module__
        return config, folders.model_card(config, _count(self), size, module)

    @classmethod
    def from_pretrained(
        cls: type[Net], path_or_repo: str | Path, *, revision: str | None = None
    ) -> Net:
        """Return the net of a folder, in evaluation, with float or packed weights.

        Args:
            path_or_repo: a folder of ``save_pretrained`` or ``mlx-lattice convert``, or
                ``owner/name`` of a repository on Hugging Face, which needs
                ``huggingface_hub``; its cache needs no network.
            revision: branch, tag or commit of a repository.

        Raises:
            io.CheckpointError: the folder is of another class, or its files do not fit.
            FileNotFoundError: there is no such folder or repository.
            ImportError: ``huggingface_hub`` is needed and not installed.
        """
        return from_pretrained(path_or_repo, revision=revision, kind=cls)


def from_pretrained(
    path_or_repo: str | Path,
    *,
    revision: str | None = None,
    kind: type[Net] = Pretrained,
) -> Net:
    """Return the net of a folder, of the class that its config names.

    Args:
        path_or_repo, revision: as for ``Pretrained.from_pretrained``.
        kind: the class that it must be, or one above it.

    Raises:
        io.CheckpointError: the config names no net, or one of another class; or as
            for ``Pretrained.from_pretrained``.
    """
    from ..io import folders
    from ..io.errors import CheckpointError, shown

    folder = folders.find_folder(path_or_repo, revision)
    config = folders.read_config(folder)
    name = config["model"]
    found = kind if kind.__name__ == name else _CLASSES.get(name)
    if found is None:
        raise CheckpointError(
            f"{folder} holds a {shown(name)}, which is not a net of this package "
            f"({', '.join(_public_nets())}). If it is a class of your own, import the "
            "module that defines it first; commands take it as --code FILE.py"
        )
    if not issubclass(found, kind):
        raise CheckpointError(
            f"{folder} is of a {name}, not of a {kind.__name__}: call "
            f"{name}.from_pretrained, or models.from_pretrained for any net"
        )
    arguments = config.get("arguments", {})
    try:
        net = found(**{key: _read(value) for key, value in arguments.items()})
    except _OF_ARGUMENTS as error:
        raise CheckpointError(
            f"{folder}: the arguments in its config make no {name}: {error}"
        ) from error
    if "quantization" in config:
        folders.pack_as(net, config["quantization"], folder)
    folders.load_weights(net, folder)
    try:
        net.about = About.of(config.get("about", {}))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f'{folder}: "about" in its config: {error}') from error
    return net.eval()


def _public_nets() -> list[str]:
    return [
        name
        for name, kind in _CLASSES.items()
        if _is_ours(kind)
        and not name.startswith("_")
        and any("__call__" in vars(each) for each in kind.__mro__)
    ]


def _is_ours(kind: type[Pretrained]) -> bool:
    return kind.__module__.startswith(f"{__package__}.")


def _count(net: mlx.nn.Module) -> int:
    """Return how many numbers a net's parameters are; a packed one counts as one."""
    total = 0
    for _, module in net.named_modules():
        for key, array in module.items():
            if not isinstance(array, mx.array):
                continue
            if "scales" in module and key not in ("weight", "bias"):
                continue
            packed = "scales" in module and array.dtype == mx.uint32
            total += array.size * 32 // module.bits if packed else array.size
    return total


def _as_given(value: Any) -> Any:
    """Return a copy of lists and dicts, which may change after the call."""
    if isinstance(value, dict):
        return {key: _as_given(each) for key, each in value.items()}
    return [_as_given(each) for each in value] if isinstance(value, list) else value


def _written(value: Any, what: str) -> Any:
    if getattr(value, "ndim", None) == 0:  # a number of NumPy or MLX
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_written(each, what) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _written(each, what) for key, each in value.items()}
    if isinstance(value, mx.Dtype):
        return str(value).replace("mlx.core", "mx")
    raise TypeError(
        f"{what} is a {type(value).__name__}, which a config can't hold: expected "
        "numbers, strings, booleans, dtypes, None, and lists and dicts of these"
    )


def _read(value: Any) -> Any:
    """Return an argument of a config as a constructor takes it."""
    if isinstance(value, list):
        return tuple(_read(each) for each in value)
    if isinstance(value, dict):
        return {key: _read(each) for key, each in value.items()}
    if isinstance(value, str) and value.removeprefix("mx.") in DTYPES and "." in value:
        return getattr(mx, value.removeprefix("mx."))
    return value


class Segmentor(Pretrained):
    """A net of scores for each voxel, called on points by the recipe in ``about``."""

    def score_points(
        self,
        points: Any,
        attributes: Mapping[str, Any] | None = None,
        *,
        fill: bool = False,
    ) -> mx.array:
        """Return (P, num_classes) scores, one row a point, in their order.

        Points of one voxel have the same scores.

        Args:
            points, attributes, fill: as for ``VoxelRecipe``: one scan.

        Raises:
            ValueError: ``about`` has no recipe, a value of a point is not finite,
                scores are NaN, or as for ``VoxelRecipe``.
        """
        recipe = self.recipe()
        voxels = recipe(points, attributes, fill=fill)
        if dropped := voxels.dropped:
            first = mx.argmax(voxels.rows < 0).item()
            names = [name for name in recipe.features if name in ATTRIBUTES]
            raise ValueError(
                f"{', '.join(['coordinates', *names])} must be finite, since each "
                f"point gets scores; point {first} and {dropped - 1} others are not: "
                "leave them out, as io.read_points does"
            )
        scores = self.score_voxels(voxels)
        check_scores(scores)
        return scores[voxels.rows]

    def score_voxels(self, voxels: Voxels) -> mx.array:
        """Return (N, num_classes) scores of the rows of ``voxels.x``."""
        return self(voxels.x.astype(self.dtype)).feats

    def recipe(self) -> VoxelRecipe:
        """Return the recipe of the net's voxels; raise where it has none."""
        if self.about.voxels is None:
            raise ValueError(
                f"this {type(self).__name__} does not say how its voxels are made: set "
                "net.about = models.About(models.VoxelRecipe(voxel_size, features))"
            )
        return self.about.voxels

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of features that the net takes: that of its first norm's scale."""
        for _, module in self.named_modules():
            if "running_mean" in module and "weight" in module:
                return module["weight"].dtype
        return mx.float32
