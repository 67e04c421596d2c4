"""The oracle: sparse convolution in NumPy, from one scalar rule, float64 throughout.

Slow on purpose. Every geometric fact below comes from `reaches`; every number comes
from a plain loop over edges. Nothing here imports the library.
"""

from itertools import product
from typing import NamedTuple

import numpy as np

TOLERANCE = {"float32": 1e-5, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 1.6e-2}


class Relation(NamedTuple):
    """Edges `(in row, out row, offset)` sorted by (offset, out row), and their sets."""

    kind: str
    in_coords: np.ndarray  # (N_in, 1 + D) int64
    out_coords: np.ndarray  # (N_out, 1 + D) int64
    offsets: np.ndarray  # (K, D) int64
    edges: np.ndarray  # (E, 3) int64

    @property
    def out_in(self) -> np.ndarray:
        """The neighbour table (N_out, K): the input row of each edge, or -1."""
        table = np.full((len(self.out_coords), len(self.offsets)), -1, np.int64)
        for i, o, k in self.edges:
            table[o, k] = i
        return table

    @property
    def in_out(self) -> np.ndarray:
        """The transposed table (N_in, K): the output row of each edge, or -1."""
        return self.T.out_in

    @property
    def counts(self) -> np.ndarray:
        """Edges per offset (K,)."""
        return np.bincount(self.edges[:, 2], minlength=len(self.offsets))

    @property
    def T(self) -> "Relation":  # noqa: N802
        """The same edges with the roles of input and output swapped."""
        swapped = [(o, i, k) for i, o, k in self.edges]
        return self._replace(
            kind=f"{self.kind}.T",
            in_coords=self.out_coords,
            out_coords=self.in_coords,
            edges=_sorted_edges(swapped),
        )


# The rule


def reaches(fine, coarse, offset, stride) -> bool:
    """`fine = coarse * stride + offset` within one batch element: the only rule.

    A forward edge has `fine` as its input, a transposed edge has it as its output.
    """
    return fine[0] == coarse[0] and all(
        f == c * s + a
        for f, c, s, a in zip(fine[1:], coarse[1:], stride, offset, strict=True)
    )


def fine_site(coarse, offset, stride) -> tuple:
    """The one site that `coarse` touches at `offset`."""
    moved = (c * s + a for c, s, a in zip(coarse[1:], stride, offset, strict=True))
    return (coarse[0], *moved)


def coarse_site(fine, offset, stride) -> tuple | None:
    """The one site that touches `fine` at `offset`, if the division is exact."""
    shifted = [f - a for f, a in zip(fine[1:], offset, strict=True)]
    if any(c % s for c, s in zip(shifted, stride, strict=True)):
        return None
    return (fine[0], *(c // s for c, s in zip(shifted, stride, strict=True)))


# Kernels


def per_axis(value, d: int) -> tuple[int, ...]:
    """An integer for every axis, or one integer per axis."""
    values = (value,) * d if np.ndim(value) == 0 else tuple(value)
    if len(values) != d:
        raise ValueError(f"expected {d} values, one per axis, got {values}")
    return tuple(int(v) for v in values)


def effective_padding(kernel_size, dilation, padding, d: int) -> tuple[int, ...]:
    """The padding of the dense rule; `None` is the centred rule."""
    if padding is not None:
        return per_axis(padding, d)
    n, step = per_axis(kernel_size, d), per_axis(dilation, d)
    return tuple((m // 2) * e if m % 2 else 0 for m, e in zip(n, step, strict=True))


def kernel_offsets(kernel_size, d: int, *, dilation=1, padding=None) -> np.ndarray:
    """Offsets (K, D), last axis fastest: `j * dilation - padding` on each axis."""
    n, step = per_axis(kernel_size, d), per_axis(dilation, d)
    pad = effective_padding(kernel_size, dilation, padding, d)
    axes = [[j * e - p for j in range(m)] for m, e, p in zip(n, step, pad, strict=True)]
    return np.array(list(product(*axes)), np.int64).reshape(-1, d)


def conv_shape(shape, kernel_size, stride, padding, dilation) -> tuple[int, ...]:
    """PyTorch's output shape of a dense convolution; `padding=None` is centred."""
    axes = _axes(shape, kernel_size, stride, padding, dilation)
    return tuple(
        max((m + 2 * p - e * (k - 1) - 1) // s + 1, 0) for m, k, s, p, e in axes
    )


def conv_transpose_shape(
    shape, kernel_size, stride, padding, dilation
) -> tuple[int, ...]:
    """PyTorch's output shape of a dense transposed convolution."""
    axes = _axes(shape, kernel_size, stride, padding, dilation)
    return tuple(
        max((m - 1) * s - 2 * p + e * (k - 1) + 1, 0) for m, k, s, p, e in axes
    )


def _axes(shape, kernel_size, stride, padding, dilation):
    d = len(shape)
    padding = effective_padding(kernel_size, dilation, padding, d)
    facts = (per_axis(v, d) for v in (kernel_size, stride, padding, dilation))
    return zip(shape, *facts, strict=True)


# Output rows


def rows_of(coords) -> list[tuple[int, ...]]:
    """Coordinate rows as tuples of Python integers, which cannot overflow."""
    return [tuple(int(v) for v in row) for row in np.asarray(coords)]


def as_coords(rows, d: int) -> np.ndarray:
    """Tuples as an (N, 1 + D) int64 array, also for N = 0."""
    return np.array(list(rows), np.int64).reshape(-1, 1 + d)


def inside(row, shape) -> bool:
    """Whether a site lies in the dense grid `shape` that starts at 0."""
    return all(0 <= c < m for c, m in zip(row[1:], shape, strict=True))


def cell_rows(coords, stride) -> list[tuple[int, ...]]:
    """Sorted unique `floor(in / stride)`."""
    return sorted(
        {
            (r[0], *(c // s for c, s in zip(r[1:], stride, strict=True)))
            for r in rows_of(coords)
        }
    )


def reach_rows(coords, offsets, stride, shape=None) -> list[tuple[int, ...]]:
    """Sorted unique outputs that any input reaches, cut to `shape` where given."""
    reached = {
        coarse_site(row, offset, stride)
        for row in rows_of(coords)
        for offset in offsets.tolist()
    } - {None}
    return sorted(r for r in reached if shape is None or inside(r, shape))


def generative_rows(coords, offsets, stride, shape=None) -> list[tuple[int, ...]]:
    """Sorted unique `in * stride + offset`, cut to `shape` where given."""
    made = {
        fine_site(row, offset, stride)
        for row in rows_of(coords)
        for offset in offsets.tolist()
    }
    return sorted(r for r in made if shape is None or inside(r, shape))


# Relations


def _sorted_edges(edges) -> np.ndarray:
    ordered = sorted((int(k), int(o), int(i)) for i, o, k in edges)
    return np.array([(i, o, k) for k, o, i in ordered], np.int64).reshape(-1, 3)


def forward_edges(in_coords, out_coords, offsets, stride) -> np.ndarray:
    """Every edge with `in = out * stride + offset`."""
    index = {row: i for i, row in enumerate(rows_of(in_coords))}
    edges = []
    for o, row in enumerate(rows_of(out_coords)):
        for k, offset in enumerate(offsets.tolist()):
            i = index.get(fine_site(row, offset, stride))
            if i is not None:
                edges.append((i, o, k))
    return _sorted_edges(edges)


def transposed_edges(in_coords, out_coords, offsets, stride) -> np.ndarray:
    """Every edge with `out = in * stride + offset`."""
    swapped = forward_edges(out_coords, in_coords, offsets, stride)
    return _sorted_edges((i, o, k) for o, i, k in swapped)


def relation(
    kind: str,
    coords,
    *,
    target=None,
    kernel_size=3,
    stride=1,
    padding=None,
    dilation=1,
    offsets=None,
    support="cell",
    spatial_shape=None,
) -> Relation:
    """Any of the six relations.

    Args:
        kind: forward, target, submanifold, transposed, generative or general.
        coords: Input rows (N_in, 1 + D).
        target: Output rows of target, transposed and general.
        kernel_size: Extent per axis; not read where `offsets` is given.
        stride: Step per axis.
        padding: `None` for the centred rule, else the dense rule.
        dilation: Spacing per axis.
        offsets: Custom offsets (K, D), taken as they are.
        support: "cell" or "reach": the output rows of a forward relation.
        spatial_shape: Extents of the input's dense grid; cuts reach and generative.
    """
    coords = np.asarray(coords, np.int64)
    d = coords.shape[1] - 1
    step = per_axis(stride, d)
    custom = offsets is not None
    if custom:
        offsets = np.array(offsets, np.int64).reshape(-1, d)
    else:
        offsets = kernel_offsets(kernel_size, d, dilation=dilation, padding=padding)
    facts = (kernel_size, stride, padding, dilation)

    if kind == "submanifold":
        rows = rows_of(coords)
    elif kind in ("target", "transposed", "general"):
        rows = rows_of(target)
    elif kind == "generative":
        shape = spatial_shape and conv_transpose_shape(spatial_shape, *facts)
        rows = generative_rows(coords, offsets, step, shape)
    elif kind == "forward" and support == "reach":
        shape = spatial_shape and conv_shape(spatial_shape, *facts)
        rows = reach_rows(coords, offsets, step, shape)
    elif kind == "forward" and support == "cell":
        centred = kernel_offsets(kernel_size, d, dilation=dilation).tolist()
        kept = set(step) == {1} and (custom or offsets.tolist() == centred)
        rows = rows_of(coords) if kept else cell_rows(coords, step)
    else:
        raise ValueError(f"no relation of kind {kind!r} with support {support!r}")

    out_coords = as_coords(rows, d)
    swapped = kind in ("transposed", "generative")
    build = transposed_edges if swapped else forward_edges
    edges = build(coords, out_coords, offsets, step)
    return Relation(kind, coords, out_coords, offsets, edges)


# Contractions. W is (K, C_in / groups, C_out).


def weight_kio(weight) -> np.ndarray:
    """(C_out, k0, ..., C_in / groups), the layout of `mlx.nn`, as (K, C_in, C_out)."""
    weight = np.asarray(weight, np.float64)
    return np.moveaxis(weight, 0, -1).reshape(-1, weight.shape[-1], weight.shape[0])


def _groups(c_in: int, c_out: int, groups: int) -> list[tuple[slice, slice]]:
    a, b = c_in // groups, c_out // groups
    if a * groups != c_in or b * groups != c_out:
        raise ValueError(f"{groups} groups do not divide {c_in} -> {c_out} channels")
    return [(slice(g * a, g * a + a), slice(g * b, g * b + b)) for g in range(groups)]


def conv(x, weight, rel: Relation, bias=None, *, groups: int = 1) -> np.ndarray:
    """`y[o] = bias + sum over edges of x[i] @ W[k]`, per group of channels."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    c_out = weight.shape[2]
    y = np.zeros((len(rel.out_coords), c_out))
    for here, there in _groups(x.shape[1], c_out, groups):
        for i, o, k in rel.edges:
            y[o, there] += x[i, here] @ weight[k][:, there]
    return y if bias is None else y + np.asarray(bias, np.float64)


def input_grad(dy, weight, rel: Relation, *, groups: int = 1) -> np.ndarray:
    """`dx[i] = sum over edges of dy[o] @ W[k].T`."""
    dy, weight = np.asarray(dy, np.float64), np.asarray(weight, np.float64)
    c_in = weight.shape[1] * groups
    dx = np.zeros((len(rel.in_coords), c_in))
    for here, there in _groups(c_in, dy.shape[1], groups):
        for i, o, k in rel.edges:
            dx[i, here] += weight[k][:, there] @ dy[o, there]
    return dx


def weight_grad(x, dy, rel: Relation, *, groups: int = 1) -> np.ndarray:
    """`dW[k] = sum over edges of outer(x[i], dy[o])`."""
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    dw = np.zeros((len(rel.offsets), x.shape[1] // groups, dy.shape[1]))
    for here, there in _groups(x.shape[1], dy.shape[1], groups):
        for i, o, k in rel.edges:
            dw[k][:, there] += np.outer(x[i, here], dy[o, there])
    return dw


def bias_grad(dy) -> np.ndarray:
    """`db = sum of the rows of dy`."""
    return np.asarray(dy, np.float64).sum(axis=0)


# Comparison


def to_numpy(array) -> np.ndarray:
    """A NumPy or MLX array as NumPy; bfloat16, which NumPy lacks, by way of float32."""
    if "bfloat16" in str(getattr(array, "dtype", "")):
        import mlx.core as mx

        array = array.astype(mx.float32)
    return np.array(array)


def by_coordinates(coords, order) -> np.ndarray:
    """Rows of `coords` in the order of `order`; fails unless the sets are equal."""
    rows, wanted = rows_of(coords), rows_of(order)
    assert len(set(rows)) == len(rows), "the coordinates have duplicates"
    missing, extra = set(wanted) - set(rows), set(rows) - set(wanted)
    assert not missing and not extra, (
        f"{len(rows)} sites, expected {len(wanted)}: {len(missing)} missing "
        f"{sorted(missing)[:3]}, {len(extra)} unexpected {sorted(extra)[:3]}"
    )
    index = {row: i for i, row in enumerate(rows)}
    return np.array([index[row] for row in wanted], np.int64)


def assert_close(
    actual, expected, dtype: str = "float32", what: str = "", slack: float = 1.0
) -> None:
    """Fail unless `actual` is `expected` to `slack` tolerances of `dtype`.

    The error is relative to the norm of `expected`; no single entry may be off by
    four tolerances of the largest, so that one wrong entry shows in a large array.
    """
    dtype = str(dtype).rsplit(".", 1)[-1]
    tolerance = TOLERANCE[dtype] * slack
    actual = to_numpy(actual).astype(np.float64)
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (
        f"{what or 'array'}: shape {actual.shape}, expected {expected.shape}"
    )
    if not expected.size:
        return
    assert np.isfinite(actual).all(), (
        f"{what or 'array'}: {np.count_nonzero(~np.isfinite(actual))} entries of "
        f"{actual.size} are not finite"
    )
    norm, difference = np.linalg.norm(expected), np.abs(actual - expected)
    error = np.linalg.norm(difference) / norm if norm else difference.max()
    worst = np.unravel_index(difference.argmax(), difference.shape)
    peak = difference[worst] / (np.abs(expected).max() or 1.0)
    assert error <= tolerance and peak <= 4 * tolerance, (
        f"{what or 'array'} ({dtype}): error {error:.2e}, tolerance {tolerance:.1e}, "
        f"both relative to the norm {norm:.4g}; worst at {tuple(map(int, worst))}: "
        f"{actual[worst]:.8g}, expected {expected[worst]:.8g}\n"
        f"actual\n{actual}\nexpected\n{expected}"
    )
