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


def as_float32(array) -> mx.array:
    return mx.array(np.asarray(array, np.float32))


def grid_of(coords, vertices, flags, split=None):
    """A dual grid of rows (batch, x, y, z)."""
    x = ml.SparseTensor(mx.array(coords), as_float32(vertices))
    return DualGrid(x, mx.array(flags), None if split is None else as_float32(split))


def random_grid(name="crowded", side=6, seed=0):
    """Rows, vertices, flags and split weights."""
    rng = np.random.default_rng(seed)
    if name == "crowded":
        cells = np.argwhere(np.ones((side,) * 4))
        coords = cells[rng.permutation(len(cells))[: len(cells) * 4 // 5]]
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


def triangles_of_edges(faces) -> np.ndarray:
    """The number of triangles of each undirected edge."""
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


@pytest.mark.parametrize("weights", ("equal", "ones and twos"))
def test_equal_diagonals_are_cut_from_1_to_3(weights):
    """As TRELLIS.2's ``torch.where(w02 > w13, quad_split_1, quad_split_2)``."""
    coords, vertices, flags, _ = random_grid()
    quads = quads_of(coords, flags)
    weight = np.arange(len(coords)) % 2 + 1.0
    weight = np.ones_like(weight) if weights == "equal" else weight
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
    x = ml.SparseTensor(mx.array(coords), as_float32(vertices))
    logits, weights = (
        ml.SparseTensor(mx.array(coords[order]), as_float32(feats[order]))
        for feats in (np.where(flags, 0.3, -2.0), split)
    )
    mesh = ops.dual_grid_mesh(DualGrid(x, logits, weights))
    assert mx.array_equal(mesh.faces, wanted.faces).item()


def test_elements():
    grid = random_grid()
    whole = ops.dual_grid_mesh(grid_of(*grid))
    for b in np.unique(grid[0][:, 0]):
        alone = ops.dual_grid_mesh(grid_of(*(a[grid[0][:, 0] == b] for a in grid)))
        vertices, faces = whole.element(int(b))
        assert mx.array_equal(vertices, alone.vertices).item()
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
    counts = triangles_of_edges(faces)
    assert (counts == 2).all()
    assert len(points) - len(counts) + len(faces) == 2 * (1 - genus)
    a, b, c = (points[faces[:, at]] for at in range(3))
    normals = np.cross(b - a, c - a)
    assert (np.linalg.norm(normals, axis=1) > 0).all()
    # The winding is by axis: turn the quads whose edge comes from the inside.
    inward = np.repeat(lower[flags], 2)
    signed = np.einsum("fd,fd->f", a, normals) / 6 * np.where(inward, -1, 1)
    assert abs(abs(signed.sum()) * 8 / volume - 1) < 0.03
    # Without some voxels the surface is open there, and no face names a missing one.
    half = coords[:, 1] < n // 2
    mesh = ops.dual_grid_mesh(grid_of(coords[half], vertices[half], flags[half]))
    counts = triangles_of_edges(np.array(mesh.faces))
    assert set(np.unique(counts)) == {1, 2} and mesh.faces.max() < half.sum()


def test_gradients_of_the_training_mesh():
    coords, vertices, flags, split = random_grid(side=3)
    x = ml.SparseTensor(mx.array(coords), as_float32(vertices))
    quads = quads_of(coords, flags)
    assert len(quads) > 20
    pull = np.random.default_rng(5).normal(size=(len(coords) + len(quads), 3))

    def training_vertices(feats, weights):
        grid = DualGrid(x.replace(feats), mx.array(flags), weights)
        return ops.dual_grid_mesh(grid, train=True).vertices

    def exact(vertices, split):
        points = coords[:, 1:] + vertices
        q, w = points[quads], split[quads]
        one, two = w[:, 0] * w[:, 2], w[:, 1] * w[:, 3]
        middle = (one * (q[:, 0] + q[:, 2]) + two * (q[:, 1] + q[:, 3])) / 2
        return (np.concatenate([points, middle / (one + two)]) * pull).sum()

    inputs = [as_float32(vertices), as_float32(split)]
    _, gradients = mx.vjp(training_vertices, inputs, [as_float32(pull)])
    step, at = 1e-5, [np.array(array, np.float64) for array in inputs]
    for array, gradient in zip(at, gradients, strict=True):
        wanted = np.zeros_like(array)
        for entry in np.ndindex(*array.shape):
            middle, ends = array[entry], []
            for moved in (middle + step, middle - step):
                array[entry] = moved
                ends.append(exact(*at))
            array[entry] = middle
            wanted[entry] = (ends[0] - ends[1]) / (2 * step)
        ref.assert_close(gradient, wanted, slack=3)


def test_bad_input():
    grid = random_grid()
    good = grid_of(*grid)
    flat = good.vertices.replace(good.vertices.feats[:, :2])
    twice = grid_of(*(np.concatenate([a, a[:1]]) for a in grid))
    with pytest.raises(TypeError, match="must be a DualGrid"):
        ops.dual_grid_mesh(good.vertices)
    for sentence, bad, options in (
        (
            "train=True places vertices by grid.split",
            good._replace(split=None),
            {"train": True},
        ),
        (
            r"intersected must have shape \(\d+, 3\)",
            good._replace(intersected=good.intersected[:, :2]),
            {},
        ),
        ("3 spatial axes and 3 channels", good._replace(vertices=flat), {}),
        ("twice|repeat|duplicate", twice, {}),
    ):
        with pytest.raises(ValueError, match=sentence):
            ops.dual_grid_mesh(bad, **options)
