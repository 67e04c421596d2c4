"""Nets that are saved to a folder and read from one, and what is saved with them.

``Pretrained`` is the base of all nets, ``Segmentor`` of those that score points.
``About`` holds the facts that are saved beside the weights.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, overload

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from ..checks import DTYPES
from ..distribution import __version__
from ..io import folders
from ..io.safetensors import CheckpointError, shown, write_safetensors
from ..scene import hue
from ..tensor import SparseTensor, align
from .voxel_recipe import ATTRIBUTES, VoxelRecipe, Voxels, check_scores, names_of

if TYPE_CHECKING:
    from typing_extensions import Self

log: logging.Logger = logging.getLogger("mlx_lattice")

__all__ = [
    "About",
    "Pretrained",
    "Segmentor",
    "from_pretrained",
]

# Facts that are saved beside weights


@dataclass(frozen=True)
class About:
    """Facts about weights, kept in a folder's ``config.json``.

    Attributes:
        voxels: how voxels are made of points, or None.
        classes: names of the classes, in the order of the output channels.
        colours: red, green and blue of each class, from 0 to 255.
        source: the origin of the weights.
        licence: the licence of the weights.
        legacy: whether weights of ``PTv3`` were trained with Pointcept 1.5.1 or older,
            whose blocks differ: see ``PTv3``.
        version: the code that trained the weights, and its version.

    Raises:
        TypeError: ``voxels`` is not a recipe, or ``classes`` are a string.
        ValueError: the number of colours is neither 0 nor that of the classes, or a
            colour is not three integers from 0 to 255.

    Examples:
        >>> about = models.About(models.VoxelRecipe(0.05), ("floor", "wall"))
        >>> about.classes, about.voxels.voxel_size
        (('floor', 'wall'), 0.05)
    """

    voxels: VoxelRecipe | None = None
    classes: tuple[str, ...] = ()
    colours: tuple[tuple[int, int, int], ...] = ()
    source: str = ""
    licence: str = ""
    legacy: bool = False
    version: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.voxels, VoxelRecipe | None):
            raise TypeError(
                f"voxels must be a VoxelRecipe; got {type(self.voxels).__name__}"
            )
        object.__setattr__(self, "classes", names_of(self.classes, "classes"))
        colours = getattr(self.colours, "tolist", lambda: self.colours)()
        object.__setattr__(self, "colours", tuple(map(tuple, colours)))
        if self.colours and len(self.colours) != len(self.classes):
            raise ValueError(
                f"there must be a colour for each of the {len(self.classes)} classes; "
                f"got {len(self.colours)}"
            )
        for colour in self.colours:
            whole = all(isinstance(v, int) and 0 <= v < 256 for v in colour)
            if len(colour) != 3 or not whole:
                raise ValueError(
                    f"a colour must be three integers from 0 to 255; got {colour}"
                )

    def palette(self, count: int) -> tuple[tuple[int, int, int], ...]:
        """Return ``count`` colours: those of the classes, or distinct hues."""
        if len(self.colours) >= count:
            return self.colours[:count]
        return tuple(hue(i) for i in range(count))

    def label(self, index: int) -> str:
        """Return the name of a class, or its number if it has no name."""
        return self.classes[index] if index < len(self.classes) else f"class {index}"

    def config(self) -> dict[str, Any]:
        """Return the values that are set, for JSON."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> About:
        """Return an About of the result of ``config()``; unknown names are left out."""
        values = {f.name: config[f.name] for f in fields(cls) if f.name in config}
        if isinstance(values.get("voxels"), Mapping):
            values["voxels"] = VoxelRecipe(**values["voxels"])
        return cls(**values)


Net = TypeVar("Net", bound="Pretrained")

# Nets by (whether this package defines it, name): the class that was defined last.
_CLASSES: dict[tuple[bool, str], type[Pretrained]] = {}

# What constructors make of numbers and lists that no net has.
_OF_ARGUMENTS = TypeError, ValueError, ArithmeticError, LookupError, AttributeError


class Pretrained(mlx.nn.Module):
    """Save and load a net with its constructor's arguments: the base of all nets.

    You can subclass it. The arguments of your constructor must be numbers, strings,
    booleans, dtypes, None, or lists, tuples, dicts and dataclasses of these.
    ``from_pretrained`` passes lists as tuples and dataclasses as dicts.

    Attributes:
        about: voxel recipe, classes and source of the weights: an ``About``.

    Examples:
        >>> class Encoder(models.Pretrained):
        ...     def __init__(self, channels, width=32):
        ...         super().__init__()
        ...         self.conv = nn.SubmConv3d(channels, width, 3)
        ...
        ...     def __call__(self, x):
        ...         return self.conv(x)
        >>> Encoder(4, width=8).save_pretrained("encoder")
        >>> Encoder.from_pretrained("encoder").conv.weight.shape
        (8, 3, 3, 3, 4)
    """

    # The command that runs this net, as "segment scan.ply"; for the card.
    _command: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _CLASSES[_is_ours(cls), cls.__name__] = cls

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Return what the subclass returns."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the arguments; ``__init__`` checks them."""
        net = super().__new__(cls)
        signature = inspect.signature(cls.__init__)
        try:
            bound = signature.bind_partial(net, *args, **kwargs).arguments
        except TypeError:
            return net  # __init__ is about to raise the same
        arguments = {}
        for name, value in list(bound.items())[1:]:
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= _copied(value)
            else:
                star = "*" if kind is inspect.Parameter.VAR_POSITIONAL else ""
                arguments[star + name] = _copied(value)
        object.__setattr__(net, "_arguments", arguments)
        object.__setattr__(net, "_about", About())
        return net

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
        """Refuse a list or a dict, before whose assignment MLX deletes a property."""
        raise TypeError("about must be an About, as models.About(recipe, classes)")

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, ``model.safetensors`` and a card, ``README.md``.

        The config has the name of the class, the arguments of its constructor, the
        facts in ``about``, and the bits and group sizes of packed layers. The name of
        your own class is ``module:Class``, as in ``my_net:MyUNet``. The card says how
        to load the folder.

        Args:
            folder: created if it does not exist. The three files are replaced once all
                are written; if writing fails, the old ones stay.

        Raises:
            OSError: a file cannot be written.
            TypeError: JSON cannot hold an argument of the constructor.
        """
        config = self.described()
        card = folders.model_card(config, Path(folder), self._command)
        with folders.written(folder, config, card) as path:
            write_safetensors(path, dict(tree_flatten(self.parameters())))

    def described(self) -> dict[str, Any]:
        """Return the config of the net's folder; nothing is computed."""
        kind = type(self)
        name = kind.__name__
        if unnamed := [key for key in self._arguments if key.startswith("*")]:
            raise TypeError(
                f"{name} takes {unnamed[0]}, and a config has arguments by their names"
            )
        config: dict[str, Any] = {
            "library": "mlx_lattice",
            "version": __version__,
            "model": name if _is_ours(kind) else f"{_module_of(kind)}:{name}",
            "arguments": {
                key: _written(value, f"{key} of {name}")
                for key, value in self._arguments.items()
            },
        }
        if packing := folders.described_packing(self):
            config["quantization"] = packing
        if about := self.about.config():
            config["about"] = about
        return config

    @classmethod
    def from_pretrained(
        cls: type[Net],
        path_or_repo: str | Path,
        *,
        revision: str | None = None,
        code: str | Path | None = None,
    ) -> Net:
        """Return the net of a folder, in evaluation, with float or packed weights.

        Args:
            path_or_repo: a folder of ``save_pretrained`` or ``mlx-lattice convert``, or
                ``owner/name`` of a repository on Hugging Face, which needs
                ``huggingface_hub``; its cache needs no network.
            revision: branch, tag or commit of a repository.
            code: the Python file that defines the net's class, if it is your own and
                not imported yet. The file is imported, so its code runs. Code that
                trains belongs under ``if __name__ == "__main__":``.

        Raises:
            io.CheckpointError: the folder is of another class, or its files do not fit.
            FileNotFoundError: there is no such folder, repository or code.
            ImportError: ``code`` raises an error, or ``huggingface_hub`` is needed and
                not installed.
        """
        return from_pretrained(path_or_repo, revision=revision, code=code, kind=cls)


@overload
def from_pretrained(
    path_or_repo: str | Path,
    *,
    revision: str | None = None,
    code: str | Path | None = None,
) -> Pretrained: ...


@overload
def from_pretrained(
    path_or_repo: str | Path,
    *,
    revision: str | None = None,
    code: str | Path | None = None,
    kind: type[Net],
) -> Net: ...


def from_pretrained(
    path_or_repo: str | Path,
    *,
    revision: str | None = None,
    code: str | Path | None = None,
    kind: type[Any] = Pretrained,
) -> Any:
    """Return the net saved in a folder, of the class that its config names.

    A class of your own is found if its module is imported, or if ``code`` names its
    file. No other code runs: a folder holds data only.

    Args:
        path_or_repo, revision, code: as for ``Pretrained.from_pretrained``.
        kind: the class of the net, or a base class of it.

    Raises:
        io.CheckpointError: the class of the config is not known, or is not ``kind``;
            or as for ``Pretrained.from_pretrained``.

    Examples:
        >>> net = models.SpUNet(1, 4, 16, (16, 32, 32, 16), layers=(1, 1, 1, 1))
        >>> net.save_pretrained("rooms")
        >>> type(models.from_pretrained("rooms")).__name__
        'SpUNet'
    """
    folder = folders.find_folder(path_or_repo, revision)
    config = folders.read_config(folder)
    if code is not None:
        import_code(code)
    module, _, name = config["model"].rpartition(":")
    key = (not module, name)
    net_class = _CLASSES.get(key)
    if key == (_is_ours(kind), kind.__name__):
        net_class = kind
    if net_class is None:
        raise CheckpointError(_unknown_class(folder, module, name, code))
    if not issubclass(net_class, kind):
        raise CheckpointError(
            f"{folder} is of a {name}, not of a {kind.__name__}: call "
            f"{name}.from_pretrained, or models.from_pretrained for any net"
        )
    arguments = config.get("arguments", {})
    log.debug("%s: %s with %s", folder, name, arguments)
    try:
        net = net_class(**{key: _read(value) for key, value in arguments.items()})
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


# Classes of users


def import_code(code: str | Path) -> None:
    """Import a Python file that defines nets, if it is not imported yet.

    The file may import others of its folder. A file of a package is imported as a part
    of its package.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the file is not Python, raises an error, or has the name of a
            module that is already imported.
    """
    path = Path(code).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {shown(str(code))}; code is the path to the Python file "
            "that defines the net's class"
        )
    if path.suffix != ".py":
        raise ImportError(f"code must be a Python file, *.py; got {path.name}")
    root, name = path.parent, path.stem
    while (root / "__init__.py").is_file():
        root, name = root.parent, f"{root.name}.{name}"
    invalidate_caches()  # the file may be new
    sys.path.insert(0, str(root))
    try:
        module = import_module(name)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = f", line {lines[-1]}" if lines else ""
        raise ImportError(
            f"{path.name}{line}: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(str(root))
    if Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise ImportError(
            f"{path.name} has the name of a module that Python has imported already, "
            f"{module!r}: rename the file"
        )


def _unknown_class(
    folder: Path, module: str, name: str, code: str | Path | None
) -> str:
    """Return the error of a folder whose class is not known."""
    if not module:
        nets = sorted(n for ours, n in _CLASSES if ours and _is_public(n))
        return (
            f"{folder} holds a {shown(name)}, which this version of mlx_lattice does "
            f"not have; it has {', '.join(nets)}"
        )
    if code is not None:
        return f"{folder} needs the class {shown(name)}, which {code} does not define"
    where = shown(f"{module}:{name}")
    if module == "__main__":
        return (
            f"{folder} needs the class {shown(name)}, which was defined in a notebook. "
            "Run the cell that defines it first, or copy the class to a file and pass "
            'code="FILE.py" (--code FILE.py on the command line)'
        )
    file = shown(module.rpartition(".")[2] + ".py")
    return (
        f"{folder} needs the class {where}, which is not part of mlx_lattice: import "
        f'it first, or name its file: models.from_pretrained(..., code="{file}"), or '
        f"--code {file} on the command line"
    )


def _is_public(name: str) -> bool:
    return name in sys.modules[__package__].__all__


def _module_of(kind: type) -> str:
    """Return the name by which other programs import the module of a class."""
    if kind.__module__ != "__main__":
        return kind.__module__
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):  # of python -m
        return spec.name
    return Path(getattr(main, "__file__", None) or "__main__").stem


def _is_ours(kind: type[Pretrained]) -> bool:
    return kind.__module__.startswith(f"{__package__}.")


def _copied(value: Any) -> Any:
    """Return a copy of lists and dicts, which may change after the call."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


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
    """Return an argument of a config as a constructor expects it."""
    if isinstance(value, list):
        return tuple(_read(each) for each in value)
    if isinstance(value, dict):
        return {key: _read(each) for key, each in value.items()}
    if isinstance(value, str) and value.removeprefix("mx.") in DTYPES and "." in value:
        return getattr(mx, value.removeprefix("mx."))
    return value


class Segmentor(Pretrained):
    """Score the classes of each voxel: the base of a segmentation net of your own.

    Your ``__call__`` takes a ``SparseTensor`` and returns one with the same rows, whose
    features are (N, num_classes) scores. ``about`` says how points become voxels, and
    names the classes. The commands ``segment`` and ``evaluate`` run the saved net.

    Examples:
        >>> class MyUNet(models.Segmentor):
        ...     def __init__(self, in_channels, num_classes):
        ...         super().__init__()
        ...         self.conv = nn.SubmConv3d(in_channels, num_classes, 3)
        ...
        ...     def __call__(self, x):
        ...         return self.conv(x)
        >>> net = MyUNet(in_channels=1, num_classes=2)
        >>> net.about = models.About(models.VoxelRecipe(0.1), ("floor", "wall"))
        >>> net.score_points(mx.random.normal((50, 3))).shape
        (50, 2)
    """

    @property
    def _command(self) -> str:
        return "segment scan.ply" if self.about.voxels else ""

    def score_points(
        self,
        points: Any,
        attributes: Mapping[str, Any] | None = None,
        *,
        fill: bool = False,
    ) -> mx.array:
        """Return the (P, num_classes) scores of points, in their order.

        Points of one voxel have the same scores.

        Args:
            points, attributes, fill: one scan, as for ``VoxelRecipe``.

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
        """Return (N, num_classes) scores of the rows of ``voxels.x``.

        Raises:
            TypeError: the net returns something other than a tensor.
            ValueError: the net's result has other voxels than its input, or other
                classes than ``about``.
        """
        x = voxels.x.astype(self.dtype)
        scores = self(x)
        name = type(self).__name__
        if not isinstance(scores, SparseTensor):
            raise TypeError(
                f"{name} must return a SparseTensor of scores for its input's voxels; "
                f"got {type(scores).__name__}. Return x.replace(feats=scores)"
            )
        if scores.key != x.key:
            try:
                scores = align(scores, x)
            except ValueError as error:
                raise ValueError(
                    f"{name} must return scores for its input's {len(x)} voxels; got "
                    f"{scores}. Upsample to the input's rows, for example by "
                    "nn.ConvTranspose3d(...)(y, x)"
                ) from error
        names = self.about.classes
        if names and len(names) != scores.channels:
            raise ValueError(
                f"net.about names {len(names)} classes, but {name} returns scores of "
                f"{scores.channels} classes"
            )
        return scores.feats

    def recipe(self) -> VoxelRecipe:
        """Return the recipe of the net's voxels; raise if it has none."""
        if self.about.voxels is None:
            raise ValueError(
                f"this {type(self).__name__} does not say how its voxels are made: set "
                "net.about = models.About(models.VoxelRecipe(voxel_size, features), "
                "classes), and save the net again"
            )
        return self.about.voxels

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the net's input features.

        Without a batch norm it is that of the first floating-point parameter.
        """
        for _, module in self.named_modules():
            if "running_mean" in module and "weight" in module:
                return module["weight"].dtype
        dtypes = (array.dtype for _, array in tree_flatten(self.parameters()))
        return next((d for d in dtypes if mx.issubdtype(d, mx.floating)), mx.float32)


# Published nets: names of parameters


class Rules(NamedTuple):
    """The names of one net in one library."""

    stages: tuple[tuple[str, str | None, int], ...]
    rest: tuple[tuple[str, str], ...]

    def __call__(self, name: str) -> str | None:
        """Return the name here; the name itself if no row matches."""
        for pattern, place, first in self.stages:
            match = re.match(pattern, name)
            if match is None:
                continue
            if place is None:
                return None
            stage = int(match[1]) - first if match.groups() else 0
            rest = name[match.end() :]
            for old, new in self.rest:
                rest = re.sub(old, new, rest)
            return place.format(stage) + rest
        return name


# torch-pointcloud 0.0.18, whose classes rename the layers of the nets that they port.
# Its batch norms are PyTorch Geometric's, which hold PyTorch's as their ``module``.
PYG_NORMS = ((r"\bmodule\.", ""), (r"\bnorm([12])\.", r"bn\1."))


def pointcept(name: str) -> str:
    """Return a name of Pointcept's, whose segmentors hold the net as their backbone."""
    return name.removeprefix("backbone.")
