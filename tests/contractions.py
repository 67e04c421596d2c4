"""What the suite of the route table computes: points, a covering sample, the oracle.

A point is one contraction: edges, channels, dtype, packing, bias, and where its arrays
begin. ``sample`` chooses points for a row of the table from what the row's needs allow.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import cases
import mlx.core as mx
import numpy as np
import reference as ref
from cases import Case
from conftest import multi_edges, pair

import mlx_lattice as ml
from mlx_lattice import ops
from mlx_lattice.problem import (
    FORWARD,
    INPUT_GRAD,
    KERNEL_MAJOR,
    LAYOUTS,
    MLX_LAYOUT,
    WEIGHT_GRAD,
    Problem,
)

# Edges: a case over a named geometry of so many rows.
SCENES: dict[str, tuple[Case, str, int] | None] = {
    "submanifold": (Case("submanifold", 3, 3), "negative", 40),
    "surface": (Case("submanifold", 3, 3), "surface", 150),  # several tiles
    "even": (Case("submanifold", 3, 2), "batches", 40),
    "oblong": (Case("submanifold", 3, (1, 3, 5)), "batches", 30),
    "wide": (Case("submanifold", 3, 7), "block", 27),
    # Below, at and above the rows of a tile.
    "63_rows": (Case("submanifold", 1, 3), "block", 63),
    "64_rows": (Case("submanifold", 1, 3), "block", 64),
    "129_rows": (Case("submanifold", 1, 3), "block", 129),
    "line": (Case("transposed", 1, 3, 2), "negative", 30),
    "plane": (Case("forward", 2, 3, 2, padding=1, support="reach"), "negative", 40),
    "four": (Case("forward", 4, 2, 2), "batches", 40),
    "forward": (Case("forward", 3, 2, 2), "batches", 50),
    "reach": (Case("forward", 3, 3, 2, support="reach"), "negative", 30),
    "target": (Case("target", 3, 3, 2, padding=1), "negative", 40),
    "transposed": (Case("transposed", 3, 3, 2), "negative", 30),
    "generative": (Case("generative", 3, 3, 2), "batches", 12),
    "general": (
        Case("general", 3, offsets=((0, 0, 0), (5, -2, 1), (-1, 0, 1)), stride=2),
        "negative",
        40,
    ),
    "edges": None,  # several share a row and offset: no neighbour table
    "unrelated": None,  # rows of both sides, and no edge
    "no_inputs": None,
    "no_outputs": None,
    "empty": (Case("forward", 3, 3, 2, support="reach"), "empty", 0),
    "one": (Case("submanifold", 3, 3), "one", 1),
    "pointwise": (Case("submanifold", 3, 1), "batches", 40),
    "pointwise_forward": (Case("forward", 3, 1), "surface", 100),
    "pointwise_empty": (Case("submanifold", 3, 1), "empty", 0),
    "pointwise_one": (Case("submanifold", 3, 1), "one", 1),
}

# Larger ones, for those who ask for them by name.
LARGE: dict[str, tuple[Case, str, int] | None] = {
    "batch": (Case("submanifold", 3, 3), "negative", 100),
    "some": (Case("submanifold", 3, 3), "surface", 900),
    "many": (Case("submanifold", 3, 3), "surface", 3000),
    "nine": (Case("submanifold", 3, 9), "block", 120),
    "pointwise_65": (Case("submanifold", 3, 1), "block", 65),
    "pointwise_many": (Case("submanifold", 3, 1), "block", 20_000),  # tiles a block
    # Rows that are written have one edge: forward, and in the gradient of features.
    "inverse_one": (Case("transposed", 3, 2, 2), "one", 1),
    "inverse_65": (Case("transposed", 3, 2, 2), "block", 13),
    "inverse_many": (Case("transposed", 3, 2, 2), "block", 4000),
    "strided_one": (Case("forward", 3, 2, 2), "one", 1),
    "strided_65": (Case("forward", 3, 2, 2), "block", 65),
    "strided_many": (Case("forward", 3, 2, 2), "block", 20_000),
}

# Rows in, rows out and offsets of scenes without an edge.
NO_EDGES = {"unrelated": (4, 6, 3), "no_inputs": (0, 5, 3), "no_outputs": (5, 0, 3)}

# (C_in, C_out, groups): below, at and above every width that a kernel fixes.
SHAPES = (
    (1, 1, 1),
    (3, 5, 1),
    (3, 16, 1),
    (4, 4, 1),
    (8, 24, 1),
    (16, 16, 1),
    (16, 32, 1),
    (32, 16, 1),
    (33, 31, 1),
    (64, 64, 1),
    (64, 16, 1),
    (7, 130, 1),
    (130, 8, 1),
    (40, 65, 1),
    (4, 6, 2),
    (8, 16, 4),
    (6, 6, 6),
    (4, 12, 4),
    (16, 16, 16),
)

# (bits, group_size) of packed weights.
PACKINGS = (None, (4, 32), (8, 64), (4, 128), (8, 32), (4, 64), (8, 128))

# Which arrays begin so many elements into another, so that no vector may be read there;
# or a weight that is stored in another order of axes.
MOVED = (
    "",
    *(
        f"{names} {n}"
        for names in ("x", "w", "dy bias", "x w dy bias")
        for n in (1, 2, 4)
    ),
    "turned",
)


@cache
def scene(name: str) -> tuple[ml.Relation, ref.Relation]:
    """The library's and the oracle's relation of a scene."""
    if name == "edges":
        return multi_edges(n_in=40, n_out=30, n_edges=300)
    if name in NO_EDGES:
        return multi_edges(0, *NO_EDGES[name], n_edges=0)
    return pair(*(SCENES | LARGE)[name])


def moved(values, before: int = 1) -> mx.array:
    """The same values as a view that begins ``before`` elements into its array."""
    values = mx.array(values)
    ahead = mx.full((before,), 7, dtype=values.dtype)
    flat = mx.concatenate([ahead, values.flatten()])
    return flat[before:].reshape(values.shape)


def exact(array: mx.array) -> np.ndarray:
    """An array in float64."""
    return ref.to_numpy(array).astype(np.float64)


@dataclass(frozen=True)
class Point:
    """One contraction; ``str(point)`` is its test id."""

    scene: str = "submanifold"
    shape: tuple[int, int, int] = (16, 16, 1)
    dtype: str = "float32"
    packing: tuple[int, int] | None = None
    bias: bool = False
    moved: str = ""
    chip: str = ""
    layout: str = KERNEL_MAJOR

    def __str__(self) -> str:
        c_in, c_out, groups = self.shape
        short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[self.dtype]
        parts = [self.scene, f"{c_in}to{c_out}", short]
        parts += [f"by{groups}"] if groups > 1 else []
        parts += ["int{}by{}".format(*self.packing)] if self.packing else []
        parts += ["bias"] if self.bias else []
        parts += [self.layout] if self.layout != KERNEL_MAJOR else []
        parts += [f"moved_{self.moved.replace(' ', '_')}"] if self.moved else []
        return "-".join(parts + ([self.chip] if self.chip else []))

    def problem(self, pass_: str, deterministic: bool = False) -> Problem:
        """The facts by which routes are chosen, without a relation."""
        given = (SCENES | LARGE)[self.scene]
        case = given[0] if given else Case("general", 3, 3)
        c_in, c_out, groups = self.shape
        bits, size = self.packing or (None, None)
        problem = Problem.forward(
            kind=case.kind,
            kernel_size=(case.volume, 1, 1),
            c_in=c_in,
            c_out=c_out,
            n_in=40,
            dtype=self.dtype,
            groups=groups,
            table=self.scene != "edges",
            bits=bits,
            group_size=size,
            deterministic=deterministic,
            layout=self.layout,
        )
        return replace(problem, pass_=pass_)


@dataclass(frozen=True)
class Work:
    """What a point computes with, and what must come of it."""

    relation: ml.Relation
    x: mx.array
    w: mx.array | ml.QuantizedWeight
    dy: mx.array
    bias: mx.array | None
    groups: int
    wanted: np.ndarray

    def run(self, pass_: str) -> mx.array:
        """One pass by the library."""
        in_layout = self.w is not None and len(self.w.shape) > 3  # of MLX
        if pass_ == WEIGHT_GRAD and not in_layout:
            return ml.weight_grad(self.x, self.dy, self.relation, groups=self.groups)

        def forward(x, w):
            return ops.sparse_conv(x, w, self.relation, self.bias, groups=self.groups)

        if pass_ == FORWARD:
            return forward(self.x, self.w)
        if pass_ == INPUT_GRAD:
            return mx.vjp(lambda x: forward(x, self.w), [self.x], [self.dy])[1][0]
        dw = mx.vjp(lambda w: forward(self.x, w), [self.w], [self.dy])[1][0]
        return dw[:, :, 0].transpose(1, 2, 0)

    def forced(self, route, pass_: str) -> Callable[[], mx.array]:
        """A call that runs one pass on one row of the table."""

        def call():
            with ml.routes.only(f"{pass_}={route}"), ml.waive_determinism():
                return self.run(pass_)

        return call


@cache
def work(point: Point, pass_: str) -> Work:
    """The arrays of a point, and its result by the float64 oracle."""
    relation, expected = scene(point.scene)
    c_in, c_out, groups = point.shape
    kind = getattr(mx, point.dtype)
    x = mx.array(cases.features(relation.n_in, c_in)).astype(kind)
    dy = mx.array(cases.features(relation.n_out, c_out, 1)).astype(kind)
    w = mx.array(cases.weights(relation.volume, c_in // groups, c_out)).astype(kind)
    bias = mx.array(cases.features(1, c_out, 2)[0]).astype(kind) if point.bias else None
    if point.packing:
        bits, size = point.packing
        w = ml.quantize_weight(w, bits=bits, group_size=size)
    dense = exact(w.dense() if point.packing else w)
    wanted = {
        FORWARD: lambda: ref.conv(
            exact(x),
            dense,
            expected,
            None if bias is None else exact(bias),
            groups=groups,
        ),
        INPUT_GRAD: lambda: ref.input_grad(exact(dy), dense, expected, groups=groups),
        WEIGHT_GRAD: lambda: ref.weight_grad(
            exact(x), exact(dy), expected, groups=groups
        ),
    }[pass_]()
    *which, before = point.moved.split() if " " in point.moved else (point.moved, 0)
    before = int(before)
    if "w" in which and point.packing:
        w = w.holding(*(moved(a, before) for a in w.arrays))
    elif not point.packing:
        w = stored(w, point.layout, which, before)
    x, dy = (moved(a, before) if n in which else a for n, a in (("x", x), ("dy", dy)))
    if bias is not None and "bias" in which:
        bias = moved(bias, before)
    mx.eval(x, dy, w.arrays if point.packing else w, *(() if bias is None else (bias,)))
    return Work(relation, x, w, dy, bias, groups, wanted)


def stored(
    w: mx.array, layout: str, which: Sequence[str] = (), before: int = 0
) -> mx.array:
    """A weight (K, C_in, C_out) as a layout has it, or a view that begins elsewhere."""
    order = (2, 0, 1) if layout == MLX_LAYOUT else (0, 1, 2)
    turned = mx.contiguous(w.transpose(order))
    if "w" in which:
        turned = moved(turned, before)
    elif "turned" in which:
        turned = mx.contiguous(turned.transpose(1, 2, 0)).transpose(2, 0, 1)
    return turned[:, :, None] if layout == MLX_LAYOUT else turned


def sample(
    seed: str, able: Callable[[Point], bool], chips: Sequence[str], rounds: int
) -> list[Point]:
    """Points that cover what ``able`` allows.

    Every scene and every shape is met in each of some rounds, beside others each time;
    bias, packing, arrays and chips are drawn, the same for the same seed. ``able`` is
    asked for each point with its chip.
    """
    representative = ("submanifold", "pointwise", "edges")
    bases: Iterable[Point] = (
        Point(s, shape, dtype, packing)
        for s in representative
        for packing in PACKINGS[:2]
        for dtype in cases.DTYPES
        for shape in SHAPES
    )
    base = next((point for point in bases if able(point)), None)
    if base is None:
        return []

    def levels(name: str, values: Iterable) -> list:
        return [v for v in values if able(replace(base, **{name: v}))]

    scenes, shapes = levels("scene", SCENES), levels("shape", SHAPES)
    dtypes, packings = levels("dtype", cases.DTYPES), levels("packing", PACKINGS)
    biases = levels("bias", (False, True))
    rng = random.Random(seed)
    # Every input of one element, which MLX may pass as a constant.
    least = Point("pointwise_one", shapes[0], dtypes[0], packings[0])
    points = [least] if able(least) else []
    for lap, j in product(range(rounds), range(max(len(scenes), len(shapes)))):
        packing = rng.choice(packings)
        point = Point(
            scenes[j % len(scenes)],
            shapes[(j + 5 * lap) % len(shapes)],
            dtypes[(j + lap) % len(dtypes)],
            packing,
            rng.choice(biases),
            rng.choice(MOVED),
            rng.choice(chips),
            KERNEL_MAJOR if packing else LAYOUTS[j % 2],
        )
        if not able(point):  # there, but on another chip perhaps
            point = replace(point, chip="")
        if able(point) and point != least:
            points.append(point)
    return points
