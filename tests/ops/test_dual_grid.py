"""Triangles of dual grids: the published faces, shapes of known genus and volume."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from foreign_arrays import arrays, needs_folder
from shapes import ball, surface, torus

import mlx_lattice as ml
from mlx_lattice import ops
from mlx_lattice.ops import DualGrid

AROUND = {
    0: ((0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0)),
    1: ((0, 0, 0), (1, 0, 0), (1, 0, 1), (0, 0, 1)),
    2: ((0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0)),
}


def grid_of(coords, vertices, flags, split=None):
    """A dual grid of rows (batch, x, y, z)."""
    x = ml.SparseTensor(mx.array(coords), mx.array(np.asarray(vertices, np.float32)))
    split = None if split is None else mx.array(np.asarray(split, np.float32))
    return DualGrid(x, mx.array(flags), split)


def random_grid(name="crowded", side=6, seed=0):
    rng = np.random.default_rng(seed)
    if name == "crowded":
        cells = np.stack(np.meshgrid(*[np.arange(side)] * 4, indexing="ij"), -1)
        coords = cells.reshape(-1, 4)[rng.permutation(side**4)[: side**4 * 4 // 5]]
        coords = (coords - (0, 3, 2, 4)).astype(np.int32)
    else:
        coords = cases.geometry(name, 3, 300, seed)
    n = len(coords)
    split = rng.random((n, 1)) + 0.1
    return coords, rng.random((n, 3)), rng.random((n, 3)) < 0.6, split


def quads_of(coords, flags):
    """The definition, a row and an axis after the other."""
    place = {tuple(row): at for at, row in enumerate(coords.tolist())}
    quads = []
    for at, axis in np.argwhere(flags):
        around = [coords[at] + np.array((0, *d)) for d in AROUND[axis]]
        quad = [place.get(tuple(map(int, cell))) for cell in around]
        quads += [quad] if None not in quad else []
    return np.array(quads, np.int64).reshape(-1, 4)


def edges_of(faces) -> np.ndarray:
    """How many triangles each undirected edge has."""
    pairs = np.sort(np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, ::2]]))
    return np.unique(pairs, axis=0, return_counts=True)[1]


@needs_folder
@pytest.mark.parametrize("name", ("infer", "angle", "train"))
def test_published_faces(name):
    case = arrays("nets/trellis2_mesh")
    coords = np.pad(case["coords"], ((0, 0), (1, 0)))
    split = None if name == "angle" else case["split_weight"]
    grid = grid_of(coords, case["dual_vertices"], case["intersected"], split)
    size, train = 1 / 512, name == "train"
    mesh = ops.dual_grid_mesh(grid, voxel_size=size, origin=-0.5, train=train)
    ref.assert_close(mesh.vertices, case[f"out/{name}/vertices"])
    np.testing.assert_array_equal(np.array(mesh.faces), case[f"out/{name}/faces"])


@pytest.mark.parametrize("name", ("crowded", "negative", "far", "one", "empty"))
def test_definition(name):
    coords, vertices, flags, split = random_grid(name)
    grid = grid_of(coords, vertices, flags, split)
    mesh = ops.dual_grid_mesh(grid, voxel_size=(1, 2, 0.5), origin=(0, 1, 2))
    quads = quads_of(coords, flags)
    assert len(quads) > 200 or name != "crowded"
    w = split[:, 0].astype(np.float32)[quads]
    first = (w[:, 0] * w[:, 2] > w[:, 1] * w[:, 3])[:, None]
    wanted = np.where(first, quads[:, [0, 1, 2, 0, 2, 3]], quads[:, [0, 1, 3, 3, 1, 2]])
    np.testing.assert_array_equal(np.array(mesh.faces), wanted.reshape(-1, 3))
    places = (coords[:, 1:] + vertices) * (1, 2, 0.5) + (0, 1, 2)
    ref.assert_close(mesh.vertices, places)
    assert mesh.faces.dtype == mx.int32
    whole = ops.dual_grid_mesh(grid, train=True)
    assert whole.faces.shape == (4 * len(quads), 3)
    assert whole.vertices.shape == (len(coords) + len(quads), 3)
    assert whole.batch.shape == whole.vertices.shape[:1]


def test_equal_diagonals_are_cut_from_1_to_3():
    """As TRELLIS.2's ``torch.where(w02 > w13, quad_split_1, quad_split_2)``."""
    coords, vertices, flags, _ = random_grid()
    quads = quads_of(coords, flags)
    for weight in (np.ones(len(coords)), np.arange(len(coords)) % 2 + 1.0):
        mesh = ops.dual_grid_mesh(grid_of(coords, vertices, flags, weight[:, None]))
        a, b, c, d = weight[quads].T
        assert (a * c == b * d).sum() > 50
        for quad, pair, first in zip(
            quads, np.array(mesh.faces).reshape(-1, 2, 3), a * c > b * d, strict=True
        ):
            cut = set(pair[0]) & set(pair[1])
            assert cut == set(quad[0::2] if first else quad[1::2])


def test_logits_and_rows_in_another_order():
    coords, vertices, flags, split = random_grid()
    wanted = ops.dual_grid_mesh(grid_of(coords, vertices, flags, split))
    order = np.random.default_rng(1).permutation(len(coords))
    x = ml.SparseTensor(mx.array(coords), mx.array(vertices.astype(np.float32)))
    mixed = mx.array(coords[order])
    logits = ml.SparseTensor(mixed, mx.array(np.where(flags, 0.3, -2.0)[order]))
    weights = ml.SparseTensor(mixed, mx.array(split[order].astype(np.float32)))
    mesh = ops.dual_grid_mesh(DualGrid(x, logits, weights))
    assert mx.array_equal(mesh.faces, wanted.faces).item()


def test_elements():
    coords, vertices, flags, split = random_grid()
    whole = ops.dual_grid_mesh(grid_of(coords, vertices, flags, split))
    for b in np.unique(coords[:, 0]):
        own = coords[:, 0] == b
        parts = (part[own] for part in (coords, vertices, flags, split))
        alone = ops.dual_grid_mesh(grid_of(*parts))
        found, faces = whole.element(int(b))
        assert mx.array_equal(found, alone.vertices).item()
        assert mx.array_equal(faces, alone.faces).item()


@pytest.mark.parametrize(
    "f, n, genus, volume",
    (
        (ball(24, 9.2), 24, 0, 4 / 3 * np.pi * 9.2**3),
        (torus(32, 9.0, 4.0), 32, 1, 2 * np.pi**2 * 9.0 * 4.0**2),
    ),
)
def test_closed_surfaces(f, n, genus, volume):
    coords, vertices, flags, lower = surface(f, n)
    mesh = ops.dual_grid_mesh(grid_of(coords, vertices, flags), voxel_size=0.5)
    points, faces = np.array(mesh.vertices, np.float64), np.array(mesh.faces)
    counts = edges_of(faces)
    assert (counts == 2).all()
    assert len(points) - len(counts) + len(faces) == 2 * (1 - genus)
    a, b, c = (points[faces[:, at]] for at in range(3))
    normals = np.cross(b - a, c - a)
    assert (np.linalg.norm(normals, axis=1) > 0).all()
    # The winding is by axis: turn the quads whose edge comes from the inside.
    inward = np.repeat(lower[flags], 2)
    signed = np.einsum("fd,fd->f", a, normals) / 6 * np.where(inward, -1, 1)
    found = abs(signed.sum()) * 8
    assert abs(found / volume - 1) < 0.03
    # Without some voxels the surface is open there, and no face names a missing one.
    kept = coords[:, 1] < n // 2
    parts = (part[kept] for part in (coords, vertices, flags))
    mesh = ops.dual_grid_mesh(grid_of(*parts))
    counts = edges_of(np.array(mesh.faces))
    assert set(np.unique(counts)) == {1, 2} and mesh.faces.max() < kept.sum()


def test_gradients_of_the_training_mesh():
    coords, vertices, flags, split = random_grid(side=3)
    x = ml.SparseTensor(mx.array(coords), mx.array(vertices.astype(np.float32)))
    quads = quads_of(coords, flags)
    assert len(quads) > 20
    count = len(coords) + len(quads)
    pull = np.random.default_rng(5).normal(size=(count, 3))

    def loss(feats, weights):
        grid = DualGrid(x.replace(feats), mx.array(flags), weights)
        made = ops.dual_grid_mesh(grid, train=True).vertices
        return (made * mx.array(pull.astype(np.float32))).sum()

    def exact(vertices, split):
        points = coords[:, 1:] + vertices
        q, w = points[quads], split[quads]
        one, two = w[:, 0] * w[:, 2], w[:, 1] * w[:, 3]
        middle = (one * (q[:, 0] + q[:, 2]) + two * (q[:, 1] + q[:, 3])) / 2
        return (np.concatenate([points, middle / (one + two)]) * pull).sum()

    given = [vertices.astype(np.float32), split.astype(np.float32)]
    found = mx.grad(loss, argnums=(0, 1))(*map(mx.array, given))
    for which in range(2):
        step, wanted = 1e-5, np.zeros_like(given[which], np.float64)
        for at in np.ndindex(*wanted.shape):
            ends = []
            for sign in (1, -1):
                moved = [part.astype(np.float64) for part in given]
                moved[which][at] += sign * step
                ends.append(exact(*moved))
            wanted[at] = (ends[0] - ends[1]) / (2 * step)
        ref.assert_close(found[which], wanted, what=f"gradient {which}", slack=3)


def test_bad_input():
    coords, vertices, flags, split = random_grid()
    good = grid_of(coords, vertices, flags, split)
    with pytest.raises(TypeError, match="must be a DualGrid"):
        ops.dual_grid_mesh(good.vertices)
    with pytest.raises(ValueError, match="train=True places vertices by grid.split"):
        ops.dual_grid_mesh(good._replace(split=None), train=True)
    with pytest.raises(ValueError, match=r"intersected must have shape \(\d+, 3\)"):
        ops.dual_grid_mesh(good._replace(intersected=mx.array(flags[:, :2])))
    with pytest.raises(ValueError, match="voxel_size must be one number or 3"):
        ops.dual_grid_mesh(good, voxel_size=(1, 2))
    flat = good.vertices.replace(mx.array(vertices[:, :2].astype(np.float32)))
    with pytest.raises(ValueError, match="3 spatial axes and 3 channels"):
        ops.dual_grid_mesh(good._replace(vertices=flat))
    twice = np.concatenate([coords, coords[:1]])
    rows = (np.concatenate([a, a[:1]]) for a in (vertices, flags, split))
    with pytest.raises(ValueError, match="twice|repeat|duplicate"):
        ops.dual_grid_mesh(grid_of(twice, *rows))
