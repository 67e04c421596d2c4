"""The oracle beside the contractions: tables, pooling, points, normalisation.

Plain loops over edges, rows and points, as in `reference`.
"""

from itertools import product

import numpy as np
from reference import Relation, as_coords, coarse_site, fine_site, rows_of

# Tables


def table_of(rows, out_rows, offsets, stride, transposed) -> np.ndarray:
    """The neighbour table by the scalar rule, in Python's integers.

    Of equal rows the first is found.
    """
    places: dict[tuple, int] = {}
    for i, row in enumerate(rows_of(rows)):
        places.setdefault(row, i)
    site = coarse_site if transposed else fine_site
    table = np.full((len(out_rows), len(offsets)), -1, np.int32)
    for o, row in enumerate(rows_of(out_rows)):
        for k, offset in enumerate(np.asarray(offsets).tolist()):
            table[o, k] = places.get(site(row, offset, stride), -1)
    return table


def tile_order(used: np.ndarray) -> np.ndarray:
    """Return the order of rows in CUDA's tiles: by the Gray ranks of (N, K) masks.

    Of more than 64 offsets the last 63 count; rows of one rank keep their order.
    """
    used = used if used.shape[1] <= 64 else used[:, -63:]
    ranks = np.logical_xor.accumulate(used[:, ::-1], axis=1)[:, ::-1]
    return np.lexsort(ranks.T)


# Pooling


def pool(x, rel: Relation, mode: str) -> np.ndarray:
    """Pool over edges: "max", "sum", "avg" (active count) or "avgvol" (K).

    An output without edges is 0 in every mode.
    """
    x = np.asarray(x, np.float64)
    y = np.zeros((len(rel.out_coords), x.shape[1]))
    for o in range(len(y)):
        rows = rel.edges[rel.edges[:, 1] == o, 0]
        if not len(rows):
            continue
        if mode == "max":
            y[o] = x[rows].max(axis=0)
        else:
            over = {"sum": 1, "avg": len(rows), "avgvol": len(rel.offsets)}[mode]
            y[o] = x[rows].sum(axis=0) / over
    return y


def pool_grad(x, dy, rel: Relation, mode: str) -> np.ndarray:
    """The gradient of `pool`; where several inputs tie for a maximum it raises."""
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    dx = np.zeros_like(x)
    for o in range(len(dy)):
        rows = rel.edges[rel.edges[:, 1] == o, 0]
        for c in range(x.shape[1]):
            if mode == "max" and len(rows):
                winners = rows[x[rows, c] == x[rows, c].max()]
                if len(winners) > 1:
                    raise ValueError("a maximum is tied: its gradient is a choice")
                dx[winners[0], c] += dy[o, c]
            elif len(rows):
                over = {"sum": 1, "avg": len(rows), "avgvol": len(rel.offsets)}[mode]
                dx[rows, c] += dy[o, c] / over
    return dx


def global_pool(x, batch, batch_size: int, mode: str) -> np.ndarray:
    """One row per batch element; an empty element is 0."""
    x, batch = np.asarray(x, np.float64), np.asarray(batch)
    y = np.zeros((batch_size, x.shape[1]))
    for b in range(batch_size):
        rows = x[batch == b]
        if len(rows):
            y[b] = {"max": rows.max(0), "sum": rows.sum(0), "avg": rows.mean(0)}[mode]
    return y


# Points


def voxelise(
    points, feats, *, voxel_size, batch=None, origin=0.0, reduce: str = "mean"
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Voxels of `floor((point - origin) / voxel_size)`, sorted.

    Returns:
        coords (V, 1 + D), reduced feats (V, C), the voxel of each point (N,), and
        the points per voxel (V,). `reduce` is mean, sum, max or first.
    """
    points, feats = np.asarray(points, np.float64), np.asarray(feats, np.float64)
    batch = np.zeros(len(points), np.int64) if batch is None else np.asarray(batch)
    cells = np.floor((points - origin) / voxel_size).astype(np.int64)
    rows = [(int(b), *map(int, c)) for b, c in zip(batch, cells, strict=True)]
    unique = sorted(set(rows))
    index = {row: v for v, row in enumerate(unique)}
    inverse = np.array([index[row] for row in rows], np.int64)
    members = [feats[inverse == v] for v in range(len(unique))]
    reduced = [
        {"mean": m.mean(0), "sum": m.sum(0), "max": m.max(0), "first": m[0]}[reduce]
        for m in members
    ]
    return (
        as_coords(unique, points.shape[1]),
        np.array(reduced).reshape(-1, feats.shape[1]),
        inverse,
        np.array([len(m) for m in members], np.int64),
    )


def interpolate(coords, feats, points, batch=None, *, normalise=False) -> np.ndarray:
    """Multilinear interpolation at `points`, in cells, of values at integer sites.

    Args:
        coords: Sites (N, 1 + D).
        feats: Their values (N, C).
        points: Queries (P, D); subtract 0.5 where values sit at cell centres.
        batch: Batch element of each query; 0 by default.
        normalise: Divide by the weight of the corners that exist (0 where none do).
    """
    feats, points = np.asarray(feats, np.float64), np.asarray(points, np.float64)
    batch = np.zeros(len(points), np.int64) if batch is None else np.asarray(batch)
    index = {row: i for i, row in enumerate(rows_of(coords))}
    out = np.zeros((len(points), feats.shape[1]))
    for p, point in enumerate(points):
        base = np.floor(point)
        part, total = point - base, 0.0
        for corner in product((0, 1), repeat=points.shape[1]):
            site = (int(batch[p]), *(int(c) for c in base + corner))
            if site in index:
                share = np.prod(np.where(corner, part, 1 - part))
                out[p] += share * feats[index[site]]
                total += share
        if normalise and total > 0:
            out[p] /= total
    return out


# Normalisation, all with biased variance and no affine part


def _standard(x: np.ndarray, eps: float, axis=None) -> np.ndarray:
    mean = x.mean(axis=axis, keepdims=True)
    return (x - mean) / np.sqrt(x.var(axis=axis, keepdims=True) + eps)


def batch_norm(x, eps: float = 1e-5) -> np.ndarray:
    """Per channel over every row."""
    x = np.asarray(x, np.float64)
    return _standard(x, eps, axis=0) if len(x) else x


def layer_norm(x, eps: float = 1e-5) -> np.ndarray:
    """Per row over the channels."""
    return _standard(np.asarray(x, np.float64), eps, axis=1)


def instance_norm(x, batch, eps: float = 1e-5) -> np.ndarray:
    """Per channel over the rows of each batch element."""
    return group_norm(x, batch, np.asarray(x).shape[1], eps)


def group_norm(x, batch, groups: int, eps: float = 1e-5) -> np.ndarray:
    """Per batch element over its rows and the channels of each group."""
    x, batch = np.asarray(x, np.float64), np.asarray(batch)
    y, width = np.zeros_like(x), x.shape[1] // groups
    for b in set(batch.tolist()):
        for g in range(groups):
            block = np.ix_(batch == b, range(g * width, g * width + width))
            y[block] = _standard(x[block], eps)
    return y
