"""The record of published weights: where they are, of which net, what they expect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from ...distribution import install
from ..pretrained import About, Pretrained

__all__ = ["Published"]

HUB = "https://huggingface.co/"
HUB_FILE = re.compile(rf"{HUB}([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass(frozen=True)
class Published:
    """Facts about one published checkpoint.

    Attributes:
        name: the name that ``create`` takes.
        kind: the name of the class in ``models``.
        files: the addresses of the weights; the second file of a pair has the head.
        library: the layout of the files, one of ``io.LIBRARIES``.
        arguments: the arguments of the class.
        about: the voxel recipe, the classes, source and licence of the weights, and the
            version of the code that trained them.
        metric: the published result, and the data set.
        sources: the addresses of the pages that state these facts.
        note: other facts that a user must know, such as a step of the preprocessing
            that a recipe cannot do.

    Examples:
        >>> entry = models.published("spunet.scannet20.pointcept")
        >>> entry.kind, len(entry.about.classes), entry.about.voxels.voxel_size
        ('SpUNet', 20, 0.02)
    """

    name: str
    kind: str
    files: tuple[str, ...]
    library: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    about: About = field(default_factory=About)
    metric: str | None = None
    sources: tuple[str, ...] = ()
    note: str = ""

    def build(self) -> Pretrained:
        """Return the net with random weights."""
        models = import_module("mlx_lattice.models")
        net = getattr(models, self.kind)(**self.arguments)
        net.about = self.about
        return net.eval()

    def download(self, *, cached: bool = False) -> list[Path]:
        """Return the files in the cache of Hugging Face; download them if necessary.

        Args:
            cached: whether only the cache is read.

        Raises:
            FileNotFoundError: they are not in the cache, nor within reach, or not on
                Hugging Face; the text says where to download them by hand.
            ImportError: ``huggingface_hub`` is needed and not installed.
        """
        by_hand = (
            f"download {' and '.join(self.files)} by hand, and pass "
            f"path= (--path of the command)"
        )
        places = [HUB_FILE.fullmatch(file) for file in self.files]
        if not all(places):
            raise FileNotFoundError(
                f"the weights of {self.name} are not on Hugging Face: {by_hand}"
            )
        try:
            import huggingface_hub
        except ImportError as error:
            raise ImportError(
                f"to download {self.name} huggingface_hub is needed; {install('hub')}; "
                f"or {by_hand}"
            ) from error
        try:
            return [
                Path(
                    huggingface_hub.hf_hub_download(
                        place[1], place[3], revision=place[2], local_files_only=cached
                    )
                )
                for place in places
                if place
            ]
        except (OSError, ValueError) as error:  # the hub's own errors are of these
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise FileNotFoundError(
                f"the weights of {self.name} are neither in the cache nor within "
                f"reach ({why}): {by_hand}"
            ) from error

    def __str__(self) -> str:
        """Return a card of text: a line for each fact, its sources last."""
        voxels, classes = self.about.voxels, ", ".join(self.about.classes)
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.arguments.items())
        rows = [("net", f"models.{self.kind}({arguments})")]
        rows += [("file", file) for file in self.files]
        rows += [
            ("layout", f"{self.library}, for io.import_checkpoint"),
            ("trained with", self.about.version or "unknown"),
            ("licence", self.about.licence or "unknown"),
            ("voxels", str(voxels or "see the net's arguments and the note")),
            ("classes", classes or "none"),
            ("published", self.metric or "unknown"),
        ]
        rows += [("note", self.note)] if self.note else []
        rows += [("source", source) for source in self.sources]
        return "\n".join([self.name, *(f"  {what:<14}{text}" for what, text in rows)])
