"""The fixed list of layers and relations that the doctor times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import mlx.core as mx

from ...coordinates import CoordinateManager
from ...dtypes import DTYPES
from ...problem import FORWARD, INPUT_GRAD, PASSES, WEIGHT_GRAD, Problem
from ...quantized import DEFAULT_GROUP_SIZE, quantize_weight
from ...relation import Relation
from ...routes import proof_integers
from . import published, scenes

SCENES = {
    "shell": scenes.shell,
    "scan": scenes.surface,
    "thin": scenes.thin_surface,
}
# What a kind of relation takes: the manager's method and its arguments.
KINDS = {
    "submanifold": ("submanifold_kernel_relation", {"kernel_size": 3}),
    "pointwise": ("submanifold_kernel_relation", {"kernel_size": 1}),
    "strided": ("kernel_relation", {"kernel_size": 2, "stride": 2}),
    "strided 3": ("kernel_relation", {"kernel_size": 3, "stride": 2}),
    "inverse": ("transposed_kernel_relation", {"kernel_size": 2, "stride": 2}),
    "generative": ("generative_relation", {"kernel_size": 2, "stride": 2}),
}
# On metal/host, where a launch takes a thousand times as long and times mean nothing.
HOST_SHELL, HOST_ROWS, HOST_CHANNELS = 8, 200, 48


@dataclass(frozen=True)
class Scene:
    """Voxels by name and size: a shell's side, or about so many rows."""

    name: str
    size: int

    def __str__(self) -> str:
        size = self.size if self.name == "shell" else f"{self.size:,}"
        return f"{self.name} {size}"

    @property
    def rows(self) -> int:
        """About how many rows there are."""
        return 4 * self.size**2 if self.name == "shell" else self.size

    def shrunk(self) -> Scene:
        """Return what is small enough for metal/host."""
        most = HOST_SHELL if self.name == "shell" else HOST_ROWS
        return replace(self, size=min(self.size, most))

    def coords(self) -> mx.array:
        """Return the (N, 4) voxels."""
        return SCENES[self.name](self.size)


@dataclass(frozen=True)
class Layer:
    """A layer that is timed.

    Attributes:
        scene: its voxels.
        c_in, c_out: channels.
        kind: of the relation, a key of KINDS.
        dtype: of the features.
        passes: that are timed.
        groups: channel groups.
        bits: of a packed weight, or None.
        published: milliseconds that somebody published of its forward pass.
        quick: whether ``--quick`` has it.
    """

    scene: Scene
    c_in: int
    c_out: int
    kind: str = "submanifold"
    dtype: str = "float16"
    passes: tuple[str, ...] = (FORWARD,)
    groups: int = 1
    bits: int | None = None
    published: float | None = field(default=None, compare=False)
    quick: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        kind = "" if self.kind == "submanifold" else f" {self.kind}"
        weight = f"int{self.bits} weight, " if self.bits else ""
        return (
            f"{self.scene}{kind}, {self.c_in} to {self.c_out}{groups}, {weight}"
            f"{self.dtype}"
        )

    @property
    def work(self) -> int:
        """What it costs, in no unit."""
        return self.scene.rows * self.c_in * self.c_out

    def shrunk(self) -> Layer:
        """Return what is small enough for metal/host."""
        scene, most = self.scene.shrunk(), HOST_CHANNELS
        c_in, c_out, groups = (
            min(n, most) for n in (self.c_in, self.c_out, self.groups)
        )
        sizes = {"scene": scene, "c_in": c_in, "c_out": c_out, "groups": groups}
        return replace(self, **sizes, published=None)


@dataclass(frozen=True)
class Build:
    """A relation that is built from new coordinates, and timed.

    Attributes:
        scene: its voxels.
        kind: a key of KINDS.
        quick: whether ``--quick`` has it.
    """

    scene: Scene
    kind: str = "submanifold"
    quick: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.kind} over {self.scene}"

    @property
    def work(self) -> int:
        """What it costs, in no unit."""
        return self.scene.rows

    def shrunk(self) -> Build:
        """Return what is small enough for metal/host."""
        return replace(self, scene=self.scene.shrunk())


def _shells() -> list[Layer]:
    found = []
    for shell in published.SHELLS:
        scene, quick = Scene("shell", shell.resolution), shell.resolution == 64
        found.append(
            Layer(
                scene,
                *(shell.channels,) * 2,
                published=shell.masked_ms,
                quick=quick or shell.resolution == 32,
            )
        )
    return found


def _scan() -> list[Layer]:
    scene, half = Scene("scan", 100_000), "float16"
    grads = (WEIGHT_GRAD, INPUT_GRAD)
    return [
        Layer(scene, 64, 64, passes=(FORWARD, *grads), quick=True),
        Layer(scene, 32, 32, passes=PASSES),
        Layer(scene, 128, 128, passes=PASSES),
        Layer(scene, 64, 64, dtype="float32", passes=PASSES, quick=True),
        Layer(scene, 64, 64, dtype="bfloat16", passes=PASSES),
        Layer(scene, 16, 16, dtype=half),
        Layer(scene, 64, 64, bits=4, quick=True),
        Layer(scene, 64, 64, bits=8, quick=True),
        Layer(scene, 64, 64, groups=64, passes=PASSES),
        Layer(scene, 64, 64, kind="pointwise"),
        Layer(scene, 32, 64, kind="strided", passes=PASSES, quick=True),
        Layer(scene, 32, 64, kind="strided 3"),
        Layer(scene, 64, 32, kind="inverse", passes=PASSES, quick=True),
        Layer(scene, 32, 32, kind="generative"),
    ]


def _decoders() -> list[Layer]:
    """TRELLIS.2's: rows and channels of each stage, and of the block that widens."""
    stages = ((37_000, 1024), (97_000, 512), (800_000, 256), (2_300_000, 128))
    found = []
    for rows, channels in stages:
        scene = Scene("thin", rows)
        found.append(Layer(scene, channels, channels))
        found.append(Layer(scene, channels, channels, bits=8))
        found.append(Layer(scene, channels, 4 * channels))
    return found


LAYERS: tuple[Layer, ...] = (
    *_shells(),
    Layer(Scene("shell", 64), 128, 128, dtype="bfloat16"),
    Layer(Scene("shell", 64), 128, 128, dtype="float32"),
    Layer(Scene("shell", 64), 128, 128, bits=4),
    Layer(Scene("shell", 64), 128, 128, bits=8),
    Layer(Scene("shell", 128), 128, 128, passes=PASSES),
    *_scan(),
    *_decoders(),
)
BUILDS: tuple[Build, ...] = (
    Build(Scene("shell", 64), quick=True),
    Build(Scene("shell", 128)),
    Build(Scene("scan", 100_000), quick=True),
    Build(Scene("scan", 100_000), "strided", quick=True),
    Build(Scene("scan", 100_000), "generative"),
    Build(Scene("thin", 1_000_000)),
    Build(Scene("thin", 1_000_000), "strided"),
)


def chosen(quick: bool, on_host: bool) -> tuple[list[Layer], list[Build]]:
    """Return the layers and relations of a run.

    Args:
        quick: the few of ``--quick``, smallest first, so that the largest are left out.
        on_host: small enough for metal/host.
    """
    found = []
    for listed in (LAYERS, BUILDS):
        items = [item for item in listed if item.quick or not quick]
        if quick:
            items.sort(key=lambda item: item.work)
        if on_host:  # many become the same
            items = list(dict.fromkeys(item.shrunk() for item in items))
        found.append(items)
    return tuple(found)


@lru_cache(maxsize=1)
def coords_of(scene: Scene) -> mx.array:
    """Return a scene's voxels; the last ones are kept."""
    coords = scene.coords()
    mx.eval(coords)
    return coords


@lru_cache(maxsize=2)
def relation_of(scene: Scene, kind: str) -> Relation:
    """Return a scene's relation, with its edges; the last ones are kept."""
    relation = build(coords_of(scene), kind)
    mx.eval(relation.edges)
    return relation


def forget() -> None:
    """Free the scenes and relations that are kept."""
    relation_of.cache_clear()
    coords_of.cache_clear()


def build(coords: mx.array, kind: str) -> Relation:
    """Return a relation over new coordinates."""
    method, arguments = KINDS[kind]
    manager = CoordinateManager()
    key = manager.insert(coords)
    if kind == "inverse":
        # From the coarse rows of a strided convolution onto those that it consumed.
        coarse = manager.kernel_relation(key, **arguments).keys[1]
        return getattr(manager, method)(coarse, key, **arguments)
    return getattr(manager, method)(key, **arguments)


def described(layer: Layer, pass_: str, relation: Relation) -> Problem:
    """Return the problem that a module's layer poses over a relation."""
    packed = {}
    if layer.bits:
        packed = {"bits": layer.bits, "group_size": DEFAULT_GROUP_SIZE}
    over = relation.T if pass_ == INPUT_GRAD else relation
    return Problem.of(
        pass_,
        relation,
        layer.c_in,
        layer.c_out,
        DTYPES[layer.dtype],
        layer.groups,
        table=over.has_table,
        layout="kernel_major" if layer.bits else "mlx",
        **packed,
    )


def operands(problem: Problem, relation: Relation, seed: int = 0) -> tuple:
    """Return what a plan is called with: the relation, x and w or dy, what follows."""
    p, dtype = problem, DTYPES[problem.dtype]
    if p.integer:
        return relation, *proof_integers.arrays(p)

    def normal(*shape: int) -> mx.array:
        key = mx.random.key(seed + len(shape))
        return mx.random.normal(shape, key=key).astype(dtype)

    c_in = p.c_in // p.groups
    if p.pass_ == WEIGHT_GRAD:
        return relation, normal(p.n_in, p.c_in), normal(p.n_out, p.c_out) * 0.5
    if p.layout == "mlx":
        w = normal(p.c_out, p.volume, c_in)
    else:
        w = normal(p.volume, c_in, p.c_out)
    if p.bits:
        w = quantize_weight(w, bits=p.bits, group_size=p.group_size)
    if p.pass_ == INPUT_GRAD:
        return relation.T, normal(p.n_out, p.c_out), w
    return relation, normal(p.n_in, p.c_in), w
