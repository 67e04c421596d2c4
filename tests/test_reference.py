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


@pytest.mark.parametrize("d", (1, 2, 3, 4))
def test_submanifold_is_the_dense_convolution_at_its_rows(d):
    coords, x, weight = setup(d, 3)
    rel = ref.relation("submanifold", coords, kernel_size=3)
    grid = dense_conv(densify(coords, x, GRIDS[d]), weight, 3, 1, 1, 1)
    np.testing.assert_allclose(ref.conv(x, weight, rel), grid[tuple(coords.T)])
    np.testing.assert_array_equal(rel.out_coords, coords)


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


def test_groups_are_separate_convolutions():
    coords, x, _ = setup(3, 3, channels=(4, 6))
    rel = ref.relation("submanifold", coords)
    weight = cases.weights(27, 2, 6)
    whole = ref.conv(x, weight, rel, groups=2)
    for g in range(2):
        part = ref.conv(x[:, 2 * g : 2 * g + 2], weight[..., 3 * g : 3 * g + 3], rel)
        np.testing.assert_allclose(whole[:, 3 * g : 3 * g + 3], part)


def test_a_transposed_relation_is_a_forward_one_swapped():
    fine = cases.geometry("negative", 3, 50)
    down = ref.relation("forward", fine, kernel_size=2, stride=2)
    up = ref.relation(
        "transposed", down.out_coords, target=fine, kernel_size=2, stride=2
    )
    np.testing.assert_array_equal(up.edges, down.T.edges)
    np.testing.assert_array_equal(up.out_in, down.in_out)
    assert down.counts.sum() == len(fine), "with k = s every input has one output"


def test_offsets_of_the_two_rules():
    assert ref.kernel_offsets(3, 1).ravel().tolist() == [-1, 0, 1]
    assert ref.kernel_offsets(3, 1, dilation=2).ravel().tolist() == [-2, 0, 2]
    assert ref.kernel_offsets(2, 1, dilation=3).ravel().tolist() == [0, 3]
    assert ref.kernel_offsets(4, 1, padding=1).ravel().tolist() == [-1, 0, 1, 2]
    last_fastest = [[-1, 0], [-1, 1], [0, 0], [0, 1], [1, 0], [1, 1]]
    assert ref.kernel_offsets((3, 2), 2).tolist() == last_fastest


def test_weight_kio_keeps_the_last_axis_fastest():
    weight = np.arange(5 * 2 * 3 * 4).reshape(5, 2, 3, 4)
    flat = ref.weight_kio(weight)
    assert flat.shape == (6, 4, 5)
    np.testing.assert_array_equal(flat[1 * 3 + 2], weight[:, 1, 2].T)


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


def test_normalisations_have_mean_0_and_variance_1():
    x, batch = cases.features(40, 6) * 3 + 5, np.arange(40) % 3
    bn, ln = ref_rows.batch_norm(x, 0), ref_rows.layer_norm(x, 0)
    np.testing.assert_allclose(bn.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(ln.var(1), 1)
    inn, gn = ref_rows.instance_norm(x, batch, 0), ref_rows.group_norm(x, batch, 2, 0)
    for b in range(3):
        np.testing.assert_allclose(inn[batch == b].std(0), 1)
        np.testing.assert_allclose(gn[batch == b][:, :3].var(), 1)
        np.testing.assert_allclose(gn[batch == b][:, 3:].mean(), 0, atol=1e-12)


def test_global_pool_of_an_empty_element_is_0():
    pooled = ref_rows.global_pool([[1.0], [3.0]], [0, 2], 3, "avg")
    np.testing.assert_array_equal(pooled, [[1.0], [0.0], [3.0]])


@pytest.mark.parametrize("name", cases.GEOMETRIES)
def test_geometry_is_unique_and_repeatable(name):
    for d in (1, 2, 3, 4):
        coords = cases.geometry(name, d)
        assert coords.dtype == np.int32 and coords.shape[1] == 1 + d
        assert len(set(ref.rows_of(coords))) == len(coords)
        np.testing.assert_array_equal(coords, cases.geometry(name, d))


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
