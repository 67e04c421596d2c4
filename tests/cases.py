"""Relation cases, channels, dtypes, geometry, features, hypothesis strategies."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import reference
from hypothesis import strategies as st

DTYPES = ("float32", "float16", "bfloat16")

# Below, at and above every width that a kernel may fix; odd ones everywhere.
CHANNELS = (
    (1, 1),
    (1, 16),
    (3, 5),
    (3, 16),
    (4, 4),
    (5, 3),
    (8, 24),
    (16, 1),
    (16, 16),
    (16, 32),
    (32, 16),
    (32, 32),
    (33, 31),
    (64, 64),
    (96, 40),
)

# (C_in, C_out, groups); the last two are depthwise, with and without a multiplier.
GROUPS = ((4, 6, 2), (8, 16, 4), (32, 32, 2), (6, 6, 6), (4, 12, 4))

CROSS = {
    d: (
        (0,) * d,
        *(
            tuple(s if a == b else 0 for b in range(d))
            for a in range(d)
            for s in (-1, 1)
        ),
    )
    for d in (1, 2, 3, 4)
}


# Relations


@dataclass(frozen=True)
class Case:
    """One way to build a relation; `str(case)` is its test id."""

    kind: str
    d: int = 3
    kernel_size: int | tuple[int, ...] = 3
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] | None = None
    dilation: int | tuple[int, ...] = 1
    offsets: tuple[tuple[int, ...], ...] | None = None
    support: str = "cell"
    spatial_shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        def text(value) -> str:
            return "x".join(map(str, value)) if isinstance(value, tuple) else f"{value}"

        name = f"{self.kind}-{self.d}d-k{text(self.kernel_size)}-s{text(self.stride)}"
        if self.offsets is not None:
            name = f"{self.kind}-{self.d}d-cross-s{text(self.stride)}"
        if self.padding is not None:
            name += f"-p{text(self.padding)}"
        if self.dilation != 1:
            name += f"-d{text(self.dilation)}"
        if self.kind == "forward":
            name += f"-{self.support}"
        return name + ("-grid" if self.spatial_shape else "")

    @property
    def volume(self) -> int:
        """K."""
        if self.offsets is not None:
            return len(self.offsets)
        return int(np.prod(reference.per_axis(self.kernel_size, self.d)))

    @property
    def needs_target(self) -> bool:
        """Whether the case needs output rows."""
        return self.kind in ("target", "transposed", "general")

    @property
    def arguments(self) -> dict:
        """Keyword arguments of the `CoordinateManager` method of this kind."""
        spec = {
            "kernel_size": self.kernel_size,
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
        }
        if self.kind == "general":
            return {"offsets": self.offsets, "stride": self.stride}
        if self.kind == "submanifold":
            del spec["stride"], spec["padding"]
        if self.offsets is not None:
            del spec["kernel_size"], spec["dilation"]
            spec.pop("padding", None)
            spec["offsets"] = self.offsets
        if self.kind == "forward":
            spec["support"] = self.support
        return spec

    def reference(self, coords, target=None) -> reference.Relation:
        """The oracle's relation of this case."""
        return reference.relation(
            self.kind,
            coords,
            target=target,
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            offsets=self.offsets,
            support=self.support,
            spatial_shape=self.spatial_shape,
        )

    def target(self, coords, seed: int = 0) -> np.ndarray:
        """A shuffled output set: most sites have edges, some have none."""
        rng = np.random.default_rng(seed)
        coords = np.asarray(coords, np.int64)
        step = reference.per_axis(self.stride, self.d)
        offsets = self.offsets
        if offsets is None:
            offsets = reference.kernel_offsets(
                self.kernel_size,
                self.d,
                dilation=self.dilation,
                padding=self.padding,
            )
        swapped = self.kind == "transposed"
        rows_of = reference.generative_rows if swapped else reference.reach_rows
        rows = rows_of(coords, np.asarray(offsets), step)
        keep = [row for row in rows if rng.random() < 0.6]
        lonely = {(row[0], *(c + 1000 for c in row[1:])) for row in rows[:3]}
        chosen = reference.as_coords({*keep, *lonely}, self.d)
        return rng.permutation(chosen).astype(np.int32)


def _submanifold() -> list[Case]:
    cases = [Case("submanifold", d, k) for d in (1, 2, 3, 4) for k in (1, 2, 3)]
    cases += [Case("submanifold", d, 3, dilation=2) for d in (1, 2, 3, 4)]
    cases += [Case("submanifold", d, offsets=CROSS[d]) for d in (1, 2, 3, 4)]
    return cases + [
        Case("submanifold", 3, 5),
        Case("submanifold", 3, 4),
        Case("submanifold", 3, (1, 3, 5)),
        Case("submanifold", 3, 3, dilation=(1, 2, 3)),
        Case("submanifold", 2, 7),
    ]


def _forward() -> list[Case]:
    cases = [
        Case("forward", d, k, s, support=support)
        for d, k, s, support in product((1, 2, 3), (2, 3), (1, 2, 3), ("cell", "reach"))
    ]
    cases += [
        Case("forward", 4, k, s, support=support)
        for k, s, support in ((2, 2, "cell"), (3, 2, "cell"), (2, 2, "reach"))
    ]
    return cases + [
        Case("forward", 3, 3, 2, padding=1),
        Case("forward", 3, 3, 1, padding=0),
        Case("forward", 3, 3, 2, padding=1, support="reach"),
        Case("forward", 3, 3, 2, padding=1, support="reach", spatial_shape=(9, 8, 7)),
        Case("forward", 3, 2, 2, padding=0, support="reach", spatial_shape=(9, 7, 5)),
        Case("forward", 3, 4, 2, padding=1, support="reach", spatial_shape=(8, 8, 8)),
        Case("forward", 2, 3, 1, 2, 2, support="reach", spatial_shape=(9, 9)),
        Case("forward", 3, (1, 3, 2), (2, 1, 3), (0, 1, 0), support="reach"),
        Case("forward", 3, 3, 2, dilation=2, support="reach"),
        Case("forward", 3, 2, 3),  # stride beyond the kernel: inputs without an edge
        Case("forward", 3, 1, 2, support="reach"),
        Case("forward", 2, offsets=CROSS[2], stride=2, support="reach"),
        Case("forward", 3, offsets=CROSS[3], stride=1),
    ]


def _others() -> list[Case]:
    cases = [
        Case(kind, d, k, s)
        for kind, d, (k, s) in product(
            ("target", "transposed", "generative"),
            (1, 2, 3),
            ((2, 2), (3, 1), (3, 2), (2, 3)),
        )
    ]
    cases += [Case(kind, 4, 2, 2) for kind in ("target", "transposed", "generative")]
    cases += [Case("general", d, offsets=CROSS[d]) for d in (1, 2, 3, 4)]
    return cases + [
        Case("target", 3, 3, 2, padding=1),
        Case("transposed", 3, 3, 2, padding=1),
        Case("transposed", 3, 4, 2, padding=1),
        Case("transposed", 3, 3, 1, dilation=2),
        Case("generative", 3, 3, 1, padding=1, spatial_shape=(6, 6, 6)),
        Case("generative", 3, 4, 2, padding=1, spatial_shape=(5, 5, 5)),
        Case("generative", 3, 3, 2, dilation=2),
        Case("general", 3, offsets=((0, 0, 0), (5, -2, 1)), stride=2),
    ]


CASES: tuple[Case, ...] = (*_submanifold(), *_forward(), *_others())


# Geometry. Every generator returns unique int32 rows (N, 1 + D) in shuffled order.


def _unique(rng, rows) -> np.ndarray:
    return rng.permutation(np.unique(np.asarray(rows), axis=0)).astype(np.int32)


def _with_batch(rng, sites, batches=(0,)) -> np.ndarray:
    batch = rng.choice(batches, size=(len(sites), 1))
    return np.concatenate([batch, sites], axis=1)


def empty(rng, d: int, n: int) -> np.ndarray:
    """No rows."""
    return np.zeros((0, 1 + d), np.int32)


def one(rng, d: int, n: int) -> np.ndarray:
    """A single row."""
    return np.array([[0, *range(2, 2 + d)]], np.int32)


def scattered(rng, d: int, n: int) -> np.ndarray:
    """Random sites of a box from 0, about a third full."""
    side = max(2, round((3 * n) ** (1 / d)))
    return _unique(rng, _with_batch(rng, rng.integers(0, side, (n, d))))


def negative(rng, d: int, n: int) -> np.ndarray:
    """Random sites around the origin: floor division has to be floor division."""
    side = max(2, round((3 * n) ** (1 / d)) // 2 + 1)
    return _unique(rng, _with_batch(rng, rng.integers(-side, side, (n, d))))


def block(rng, d: int, n: int) -> np.ndarray:
    """A full box: every inner row has all K edges."""
    side = max(2, round(n ** (1 / d)))
    axes = [range(-1, side - 1)] * d
    return _unique(rng, [(0, *site) for site in product(*axes)])


def surface(rng, d: int, n: int) -> np.ndarray:
    """A thin shell, like a scan."""
    direction = rng.normal(size=(n, d))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    radius = max(3.0, n ** (1 / max(d - 1, 1)) / 3)
    radius = min(radius, 1000.0)
    return _unique(rng, _with_batch(rng, np.floor(direction * radius).astype(int)))


def batches(rng, d: int, n: int) -> np.ndarray:
    """Five batch elements that overlap in space; 1 and 3 are empty."""
    side = max(2, round(n ** (1 / d)))
    sites = rng.integers(-side // 2, side, (n, d))
    return _unique(rng, _with_batch(rng, sites, batches=(0, 2, 4)))


def far(rng, d: int, n: int) -> np.ndarray:
    """Small clusters about a million cells apart: packed keys have to be wide."""
    centres = rng.integers(-(2**20), 2**20, (max(1, n // 16), d))
    sites = centres[rng.integers(0, len(centres), n)] + rng.integers(-1, 2, (n, d))
    return _unique(rng, _with_batch(rng, sites, batches=(0, 1)))


Generator = Callable[[np.random.Generator, int, int], np.ndarray]

GEOMETRIES: dict[str, Generator] = {
    f.__name__: f
    for f in (empty, one, scattered, negative, block, surface, batches, far)
}


def geometry(name: str, d: int = 3, n: int = 60, seed: int = 0) -> np.ndarray:
    """The named geometry with at most about `n` rows, the same for the same seed."""
    return GEOMETRIES[name](np.random.default_rng([seed, d, n]), d, n)


def in_grid(shape: tuple[int, ...], n: int = 60, seed: int = 0) -> np.ndarray:
    """At most `n` random rows of two batch elements inside a dense grid."""
    rng = np.random.default_rng([seed, n, *shape])
    sites = np.stack([rng.integers(0, m, n) for m in shape], axis=1)
    return _unique(rng, _with_batch(rng, sites, batches=(0, 1)))


def for_case(case: Case, name: str, n: int = 60, seed: int = 0) -> np.ndarray:
    """The named geometry, or rows of the case's grid if it has one."""
    if case.spatial_shape is not None and name not in ("empty", "one"):
        return in_grid(case.spatial_shape, n, seed)
    return geometry(name, case.d, n, seed)


def features(n: int, channels: int, seed: int = 0) -> np.ndarray:
    """Normal float32 features (n, channels)."""
    return (
        np.random.default_rng([seed, n, channels])
        .normal(size=(n, channels))
        .astype(np.float32)
    )


def weights(volume: int, c_in: int, c_out: int, seed: int = 0) -> np.ndarray:
    """Normal float32 weights (K, C_in / groups, C_out), scaled to keep variance."""
    rng = np.random.default_rng([seed, volume, c_in, c_out])
    scale = (volume * c_in) ** -0.5
    return (rng.normal(size=(volume, c_in, c_out)) * scale).astype(np.float32)


# Hypothesis


@st.composite
def coordinate_sets(
    draw, d: int | None = None, max_rows: int = 24, extent: int = 6, batch: int = 3
):
    """Unique shuffled rows in a box around 0, or moved far away from it."""
    d = draw(st.integers(1, 4)) if d is None else d
    site = st.tuples(st.integers(0, batch - 1), *[st.integers(-extent, extent)] * d)
    rows = draw(st.lists(site, max_size=max_rows, unique=True))
    shift = draw(st.sampled_from((0, 0, 0, -1_000_001, 1_000_003)))
    coords = np.array(rows, np.int64).reshape(-1, 1 + d)
    coords[:, 1:] += shift
    return coords.astype(np.int32)


@st.composite
def relation_cases(draw, kinds=("submanifold", "forward", "transposed", "generative")):
    """A `Case` over small kernels, any stride, dilation, padding and D."""
    kind, d = draw(st.sampled_from(kinds)), draw(st.integers(1, 4))

    def axis(low, high):
        return st.tuples(*[st.integers(low, high)] * d)

    kernel = draw(axis(1, 3 if d < 4 else 2))
    case = {"kind": kind, "d": d, "kernel_size": kernel, "dilation": draw(axis(1, 2))}
    if kind != "submanifold":
        case["stride"] = draw(axis(1, 3))
        case["padding"] = draw(st.none() | axis(0, 2))
    if kind == "forward":
        case["support"] = draw(st.sampled_from(("cell", "reach")))
    return Case(**case)


@st.composite
def convolutions(draw, **kinds):
    """(case, coords, target or None): the inputs of a relation."""
    case = draw(relation_cases(**kinds))
    coords = draw(coordinate_sets(d=case.d))
    seed = draw(st.integers(0, 2**16))
    return case, coords, case.target(coords, seed) if case.needs_target else None
