"""The oracle against itself: dense grids, brute force over the rule, algebra."""

from itertools import product

import cases
import numpy as np
import pytest
import reference as ref
import reference_rows as ref_rows
from hypothesis import given

GRIDS = {1: (11,), 2: (7, 6), 3: (6, 5, 4), 4: (4, 3, 4, 3)}

DENSE = [
    # d, kernel, stride, padding, dilation
    (1, 3, 1, 1, 1),
    (1, 4, 2, 1, 1),
    (1, 3, 3, 0, 2),
    (2, (3, 2), (2, 1), (1, 0), (1, 2)),
    (3, 3, 1, 1, 1),
    (3, 3, 2, 1, 1),
    (3, (1, 3, 2), (2, 1, 2), (0, 1, 1), 1),
    (3, 3, 1, 2, 2),
    (4, 2, 2, 0, 1),
    (4, 3, 1, 1, 1),
]


def setup(d, kernel, channels=(3, 4), seed=0):
    coords = cases.in_grid(GRIDS[d], 40, seed)
    x = cases.features(len(coords), channels[0], seed).astype(np.float64)
    volume = int(np.prod(ref.per_axis(kernel, d)))
    return coords, x, cases.weights(volume, *channels, seed).astype(np.float64)


def densify(coords, x, shape, batch=2):
    grid = np.zeros((batch, *shape, x.shape[1]))
    grid[tuple(coords.T)] = x
    return grid


def windows(shape, kernel, stride, dilation):
    """The slice of each kernel position, of so many sites on each axis."""
    n, s, e = (ref.per_axis(v, len(shape)) for v in (kernel, stride, dilation))
    for position in np.ndindex(*n):
        starts = [j * f for j, f in zip(position, e, strict=True)]
        yield (
            slice(None),
            *(
                slice(first, first + (m - 1) * t + 1, t)
                for first, m, t in zip(starts, shape, s, strict=True)
            ),
        )


def dense_conv(grid, weight, kernel, stride, padding, dilation):
    """Pad, then add one strided slice of the grid per kernel position."""
    d = grid.ndim - 2
    n, s, p, e = (ref.per_axis(v, d) for v in (kernel, stride, padding, dilation))
    padded = np.pad(grid, [(0, 0), *((q, q) for q in p), (0, 0)])
    sizes = zip(padded.shape[1:-1], n, s, e, strict=True)
    shape = [(m - f * (k - 1) - 1) // t + 1 for m, k, t, f in sizes]
    slices = windows(shape, kernel, stride, dilation)
    return sum(padded[at] @ w for at, w in zip(slices, weight, strict=True))


def dense_conv_transpose(grid, weight, kernel, stride, padding, dilation):
    """Add the grid to one strided slice of the output per position, then crop."""
    shape, d = grid.shape[1:-1], grid.ndim - 2
    n, s, p, e = (ref.per_axis(v, d) for v in (kernel, stride, padding, dilation))
    sizes = zip(shape, n, s, e, strict=True)
    whole = [(m - 1) * t + f * (k - 1) + 1 for m, k, t, f in sizes]
    y = np.zeros((len(grid), *whole, weight.shape[2]))
    slices = windows(shape, kernel, stride, dilation)
    for at, w in zip(slices, weight, strict=True):
        y[at] += grid @ w
    return y[(slice(None), *(slice(q, m - q) for q, m in zip(p, whole, strict=True)))]


@pytest.mark.parametrize(("d", "kernel", "stride", "padding", "dilation"), DENSE)
def test_reach_is_the_dense_convolution(d, kernel, stride, padding, dilation):
    coords, x, weight = setup(d, kernel)
    spec = {"stride": stride, "padding": padding, "dilation": dilation}
    rel = ref.relation(
        "forward",
        coords,
        kernel_size=kernel,
        support="reach",
        spatial_shape=GRIDS[d],
        **spec,
    )
    grid = dense_conv(densify(coords, x, GRIDS[d]), weight, kernel, **spec)
    assert grid.shape[1:-1] == ref.conv_shape(GRIDS[d], kernel, **spec)
    sparse = densify(rel.out_coords, ref.conv(x, weight, rel), grid.shape[1:-1])
    np.testing.assert_allclose(sparse, grid, atol=1e-12)
    # Zero where no input reaches, so equality also proves that no row is missing.
    ones = dense_conv(
        densify(coords, np.ones((len(x), 1)), GRIDS[d]),
        np.ones((len(weight), 1, 1)),
        kernel,
        **spec,
    )
    np.testing.assert_array_equal(np.argwhere(ones[..., 0] > 0), rel.out_coords)


@pytest.mark.parametrize(("d", "kernel", "stride", "padding", "dilation"), DENSE)
def test_generative_is_the_dense_transpose(d, kernel, stride, padding, dilation):
    coords, x, weight = setup(d, kernel)
    spec = {"stride": stride, "padding": padding, "dilation": dilation}
    rel = ref.relation(
        "generative", coords, kernel_size=kernel, spatial_shape=GRIDS[d], **spec
    )
    grid = dense_conv_transpose(densify(coords, x, GRIDS[d]), weight, kernel, **spec)
    assert grid.shape[1:-1] == ref.conv_transpose_shape(GRIDS[d], kernel, **spec)
    sparse = densify(rel.out_coords, ref.conv(x, weight, rel), grid.shape[1:-1])
    np.testing.assert_allclose(sparse, grid, atol=1e-12)


@pytest.mark.parametrize("mode", ("max", "sum", "avg", "avgvol"))
def test_pooling_is_dense_pooling_over_active_sites(mode):
    coords, x, _ = setup(2, 3)
    rel = ref.relation(
        "forward",
        coords,
        kernel_size=3,
        stride=2,
        padding=1,
        support="reach",
        spatial_shape=GRIDS[2],
    )
    around = [(0, 0), (1, 1), (1, 1), (0, 0)]
    grid, active = (
        np.pad(densify(coords, values, GRIDS[2]), around)
        for values in (x, np.ones((len(x), 1)))
    )
    pooled = ref_rows.pool(x, rel, mode)
    for row, (b, i, j) in zip(pooled, rel.out_coords, strict=True):
        window = (b, slice(2 * i, 2 * i + 3), slice(2 * j, 2 * j + 3))
        live = grid[window][active[window][..., 0] > 0]
        expected = {
            "max": live.max(0),
            "sum": live.sum(0),
            "avg": live.mean(0),
            "avgvol": live.sum(0) / 9,
        }[mode]
        np.testing.assert_allclose(row, expected)


def brute_edges(rel, stride):
    """Every triple that satisfies the scalar rule, in the guaranteed order."""
    swapped = rel.kind in ("transposed", "generative")
    inputs, outputs = ref.rows_of(rel.in_coords), ref.rows_of(rel.out_coords)
    offsets = rel.offsets.tolist()
    return [
        (i, o, k)
        for k, o, i in product(
            range(len(offsets)), range(len(outputs)), range(len(inputs))
        )
        if (
            ref.reaches(outputs[o], inputs[i], offsets[k], stride)
            if swapped
            else ref.reaches(inputs[i], outputs[o], offsets[k], stride)
        )
    ]


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_edges_are_those_of_the_scalar_rule(case):
    coords = cases.for_case(case, "negative", 9)
    target = case.target(coords)[:12] if case.needs_target else None
    rel = case.reference(coords, target)
    stride = ref.per_axis(case.stride, case.d)
    if len(rel.out_coords) <= 200:
        assert list(map(tuple, rel.edges)) == brute_edges(rel, stride)
    assert len(rel.offsets) == case.volume == len(set(map(tuple, rel.offsets)))
    if case.kind == "generative" or (case.kind == "forward" and case.stride != 1):
        rows = ref.rows_of(rel.out_coords)
        assert rows == sorted(set(rows))


@given(cases.convolutions())
def test_the_gradients_are_the_adjoints(drawn):
    case, coords, target = drawn
    rel = case.reference(coords, target)
    groups, c_in, c_out = 2, 4, 6
    x = cases.features(len(coords), c_in, 1)
    dy = cases.features(len(rel.out_coords), c_out, 2)
    weight = cases.weights(case.volume, c_in // groups, c_out)
    form = np.vdot(ref.conv(x, weight, rel, groups=groups), dy)
    dx = ref.input_grad(dy, weight, rel, groups=groups)
    dw = ref.weight_grad(x, dy, rel, groups=groups)
    np.testing.assert_allclose(np.vdot(x, dx), form, atol=1e-9)
    np.testing.assert_allclose(np.vdot(weight, dw), form, atol=1e-9)
    full = cases.weights(case.volume, c_in, c_out)
    np.testing.assert_allclose(
        ref.conv(dy, np.swapaxes(full, 1, 2), rel.T),
        ref.input_grad(dy, full, rel),
        atol=1e-9,
    )


@pytest.mark.parametrize("reduce", ("mean", "sum", "max", "first"))
def test_voxelise(reduce):
    rng = np.random.default_rng(3)
    points, feats = rng.uniform(-2, 2, (80, 3)), rng.normal(size=(80, 2))
    batch = rng.integers(0, 2, 80)
    coords, values, inverse, counts = ref_rows.voxelise(
        points, feats, voxel_size=0.7, batch=batch, origin=0.1, reduce=reduce
    )
    cells = np.floor((points - 0.1) / 0.7)
    unique, index = np.unique(
        np.column_stack([batch, cells]), axis=0, return_inverse=True
    )
    np.testing.assert_array_equal(coords, unique)
    np.testing.assert_array_equal(inverse, index.ravel())
    assert counts.sum() == len(points)
    for v, value in enumerate(values):
        members = feats[inverse == v]
        expected = members[0] if reduce == "first" else getattr(np, reduce)(members, 0)
        np.testing.assert_allclose(value, expected)


def test_interpolation_is_exact_for_affine_fields():
    sites = np.array([(0, *s) for s in product(range(-2, 4), repeat=3)])
    field = sites[:, 1:] @ [[2.0, 0.5], [-1.0, 0.0], [0.25, 3.0]] + [1.0, -2.0]
    points = np.random.default_rng(0).uniform(-2, 2.99, (30, 3))
    expected = points @ [[2.0, 0.5], [-1.0, 0.0], [0.25, 3.0]] + [1.0, -2.0]
    for normalise in (False, True):
        got = ref_rows.interpolate(sites, field, points, normalise=normalise)
        np.testing.assert_allclose(got, expected)
    lone = ref_rows.interpolate([[0, 0, 0, 0]], [[4.0]], [[0.5, 0.5, 0.5], [9, 9, 9]])
    np.testing.assert_allclose(lone, [[0.5], [0.0]])


def test_the_tolerance_sees_one_wrong_entry():
    expected = cases.features(500, 8).astype(np.float64)
    ref.assert_close(expected.astype(np.float32), expected)
    ref.assert_close(expected.astype(np.float16), expected, "float16")
    wrong = expected.copy()
    wrong[3, 4] += 0.5
    with pytest.raises(AssertionError, match=r"worst at \(3, 4\)"):
        ref.assert_close(wrong, expected, "bfloat16")
    wrong[3, 4] = np.nan
    with pytest.raises(AssertionError, match="not finite"):
        ref.assert_close(wrong, expected)
    with pytest.raises(AssertionError, match="shape"):
        ref.assert_close(expected[:1], expected)
