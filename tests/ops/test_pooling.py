"""Pooling, its transposes and pooling of batch elements against the float64 oracle."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
import reference_rows as ref_rows
from pooled import distinct, route, tensor  # noqa: F401 (a fixture for every test here)

import mlx_lattice as ml
from mlx_lattice import ops

MODES = ("max", "sum", "avg", "avgvol")
# (dims, kernel, stride, padding, dilation, support); stride None is the kernel's.
HALVES = (3, 2, None, None, 1, "cell")
LARGE = (2, 8, None, None, 1, "cell")  # sums by the rows of a cell, without a table
LARGEST = (3, (9, 8, 8), None, 0, 1, "reach")  # maxima without a table too
KERNELS = (
    HALVES,
    LARGE,
    LARGEST,
    (1, 2, None, None, 1, "cell"),
    (2, 3, None, None, 1, "cell"),
    (3, 3, 2, None, 1, "cell"),
    (3, 3, 1, None, 2, "cell"),
    (3, 4, 3, 1, 1, "reach"),
    (3, (1, 2, 3), (2, 1, 2), None, 1, "reach"),
    (4, 2, None, None, 1, "cell"),
    (3, (4, 3, 3), None, 0, 1, "cell"),
    (4, 4, None, None, 1, "reach"),
    (1, 600, None, 0, 1, "cell"),
)
SCENES = [(kernel, "negative") for kernel in KERNELS] + [
    (kernel, name)
    for kernel in KERNELS[:3]
    for name in ("empty", "one", "batches", "surface")
]


def pool(x, mode, kernel, **options):
    dims, size, stride, padding, dilation, support = kernel
    if mode == "avgvol":
        mode, options["count"] = "avg", "volume"
    function = getattr(ops, f"{mode}_pool{dims}d")
    return function(x, size, stride, padding, dilation, support, **options)


def oracle(kernel, coords):
    _, size, stride, padding, dilation, support = kernel
    return ref.relation(
        "forward",
        coords,
        kernel_size=size,
        stride=size if stride is None else stride,
        padding=padding,
        dilation=dilation,
        support=support,
    )


def gradient(run, x, dy):
    """The gradient of ``run``, a function of x that returns a tensor."""
    return mx.vjp(lambda f: run(x.replace(f)).feats, [x.feats], [dy])[1][0]


@pytest.mark.parametrize(("kernel", "geometry"), SCENES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_pool_and_gradient(mode, kernel, geometry):
    coords = cases.geometry(geometry, kernel[0], 40)
    feats = distinct(len(coords), 5)
    x, relation = tensor(coords, feats), oracle(kernel, coords)
    y = pool(x, mode, kernel)
    np.testing.assert_array_equal(np.array(y.coords), relation.out_coords)
    ref.assert_close(y.feats, ref_rows.pool(feats, relation, mode))
    dy = cases.features(len(y), 5, 1)
    dx = gradient(lambda x: pool(x, mode, kernel), x, mx.array(dy))
    ref.assert_close(dx, ref_rows.pool_grad(feats, dy, relation, mode))


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("mode", MODES)
def test_sums_of_halves_are_in_float32(mode, dtype):
    coords = cases.geometry("block", 3, 200)
    kernel = (3, 5, 3, None, 1, "cell")
    x = tensor(coords, distinct(len(coords), 3) / 7, dtype)
    exact = ref.to_numpy(x.feats).astype(np.float64)
    relation = oracle(kernel, coords)
    y = pool(x, mode, kernel)
    assert y.dtype == x.dtype
    ref.assert_close(y.feats, ref_rows.pool(exact, relation, mode), dtype)
    dx = gradient(lambda x: pool(x, mode, kernel), x, mx.ones_like(y.feats))
    assert dx.dtype == x.dtype
    if mode != "max":  # neighbours tie in bfloat16; the next test says who wins
        ones = np.ones(y.shape)
        ref.assert_close(dx, ref_rows.pool_grad(exact, ones, relation, mode), dtype)


def test_ties_go_to_the_first_offset():
    coords = np.array([(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)])[::-1]
    dx = gradient(ops.max_pool2d, tensor(coords, np.ones((4, 2))), mx.ones((1, 2)))
    np.testing.assert_array_equal(np.array(dx), [[0, 0]] * 3 + [[1, 1]])


def test_maxima_do_not_start_from_zero_and_keep_nan():
    x = tensor(np.array([(0, -3), (0, 5), (0, 6)]), [[-2.0], [-7.0], [-np.inf]])
    y = ops.max_pool1d(x)
    np.testing.assert_array_equal(np.array(y.feats), [[-2], [-7], [-np.inf]])
    y = ops.max_pool1d(x.replace(mx.array([[1.0], [np.nan], [3.0]])), 12, padding=6)
    assert np.isnan(np.array(y.feats)).any()


@pytest.mark.parametrize("mode", MODES)
def test_rows_without_edges_are_zero(mode):
    x = tensor(np.array([(0, 4, 4), (1, 0, 0)]), [[-3.0], [2.0]], batch_size=8)
    target = mx.array([[1, 0, 0], [0, 50, 50], [0, 2, 2], [7, 2, 2]], dtype=mx.int32)

    def run(x):
        return pool(x, mode, (2, 2, None, None, 1, "cell"), coordinates=target)

    over = 4 if mode == "avgvol" else 1
    np.testing.assert_allclose(run(x).feats, np.array([[2.0], [0], [-3], [0]]) / over)
    dx = gradient(run, x, mx.ones((4, 1)))
    np.testing.assert_allclose(np.array(dx), np.full((2, 1), 1 / over))


@pytest.mark.parametrize("size, stride", [(3, 2), (4, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_forward_mode_and_second_order(mode, size, stride):
    coords = cases.geometry("negative", 3, 40)
    kernel = (3, size, stride, None, 1, "cell")
    feats = distinct(len(coords), 3).astype(np.float64)
    x, relation = tensor(coords, feats), oracle(kernel, coords)

    def run(f):
        return pool(x.replace(f), mode, kernel).feats

    tangent = cases.features(len(coords), 3, 2)
    (_,), (dy,) = mx.jvp(run, [x.feats], [mx.array(tangent)])
    # Pooling is linear where the winners stay: its tangent is the pooled tangent.
    step, still = 1e-3, ref_rows.pool(feats, relation, mode)
    moved = ref_rows.pool(feats + step * tangent, relation, mode)
    ref.assert_close(dy, (moved - still) / step, what="tangent")

    # d/df |J^T J f|^2 / 2 through gradients of gradients, against the oracle's J.
    def inner(f):
        return 0.5 * (run(f) ** 2).sum()

    def outer(f):
        return 0.5 * (mx.grad(inner)(f) ** 2).sum()

    units = np.eye(still.size).reshape(-1, *still.shape)
    rows = [ref_rows.pool_grad(feats, unit, relation, mode).ravel() for unit in units]
    gram = np.stack(rows).T @ np.stack(rows)
    expected = (gram @ gram @ feats.ravel()).reshape(feats.shape)
    ref.assert_close(mx.grad(outer)(x.feats), expected, what="second order")


def test_general_relations_pool():
    relation = ml.Relation.from_edges([0, 1, 2, 1], [0, 0, 2, 2], [0, 1, 0, 1], 3, 3, 2)
    feats = mx.array([[1.0], [5.0], [-4.0]])
    for mode, expected in (
        ("max", [5, 0, 5]),
        ("sum", [6, 0, 1]),
        ("avg", [3, 0, 0.5]),
    ):
        y = ops.sparse_pool(feats, relation, mode)
        np.testing.assert_allclose(np.array(y)[:, 0], expected)


# Back to finer rows


@pytest.mark.parametrize(
    "kernel, stride, geometry",
    [
        *((2, 2, name) for name in ("empty", "one", "negative", "batches")),
        *((*sizes, "surface") for sizes in ((3, 2), (2, 3), (4, 4))),
    ],
)
@pytest.mark.parametrize("mode", ("sum", "avg"))
def test_pool_transpose(mode, kernel, stride, geometry):
    coords = cases.geometry(geometry, 3, 40)
    x = tensor(coords, cases.features(len(coords), 4))
    down = ops.sum_pool3d(x, kernel, stride)
    feats, dy = cases.features(len(down), 4, 3), cases.features(len(x), 4, 4)

    def run(x):
        return getattr(ops, f"{mode}_pool_transpose3d")(x, kernel, stride)

    down = down.replace(mx.array(feats))
    up = run(down)
    assert up.key == x.key
    relation = ref.relation(
        "transposed", down.coords, target=coords, kernel_size=kernel, stride=stride
    )
    ref.assert_close(up.feats, ref_rows.pool(feats, relation, mode))
    expected = ref_rows.pool_grad(feats, dy, relation, mode)
    ref.assert_close(gradient(run, down, mx.array(dy)), expected)


@pytest.mark.parametrize("dims, scale", [(2, 2), (3, (2, 1, 3)), (4, 2), (1, 99)])
def test_upsample_nearest(dims, scale):
    coords = cases.geometry("negative", dims, 40)
    x = tensor(coords, cases.features(len(coords), 2))
    down = getattr(ops, f"max_pool{dims}d")(x, scale)
    up = getattr(ops, f"upsample_nearest{dims}d")(down, scale)
    cells = ref.rows_of(coords // np.array((1, *ref.per_axis(scale, dims))))
    at = list(map(ref.rows_of(down.coords).index, cells))
    np.testing.assert_array_equal(np.array(up.feats), np.array(down.feats)[at])


@pytest.mark.parametrize("size", (4, 16))
def test_large_cells(size):
    coords = cases.geometry("surface", 3, 300)
    x = tensor(coords, cases.features(len(coords), 3))
    down, target = ops.max_pool3d(x, 2), mx.array(coords[::2])
    top = ops.sum_pool3d(down, size // 2)

    def run(f, onto):
        up = ops.upsample_nearest3d(top.replace(f), size, onto)
        return ops.sum_pool3d(up, size, coordinates=top).feats

    feats = ref.to_numpy(top.feats).astype(np.float64)
    for onto, rows in ((x, coords), (target, coords[::2])):
        cells = ref.rows_of(rows // np.array((1, *[size] * 3)))
        at = list(map(ref.rows_of(top.coords).index, cells))
        counts = np.bincount(at, minlength=len(top))[:, None]

        def there_and_back(f, onto=onto):
            return run(f, onto)

        for call in (there_and_back, mx.compile(there_and_back)):
            ref.assert_close(call(top.feats), counts * feats)
        (grad,) = mx.vjp(there_and_back, [top.feats], [there_and_back(top.feats)])[1]
        ref.assert_close(grad, counts**2 * feats)


@pytest.mark.parametrize("mode, size", [("max", 1000), ("sum", 1001)])
def test_kernels_of_too_many_offsets_are_refused(mode, size):
    coords = cases.geometry("surface", 3, 30)
    x = tensor(coords, cases.features(len(coords), 3))
    with pytest.raises(ValueError, match="offsets, and no more than 1,048,576"):
        getattr(ops, f"{mode}_pool3d")(x, size, stride=1000)


def test_max_unpool():
    coords = cases.geometry("negative", 3, 60)
    feats = distinct(len(coords), 3)
    x = tensor(coords, feats)
    y, indices = ops.max_pool3d(x, return_indices=True)
    rows, pooled = np.array(indices.rows), np.array(y.feats)
    np.testing.assert_array_equal(np.take_along_axis(feats, rows, 0), pooled)
    up = ops.max_unpool(y, indices)
    assert up.key == x.key
    expected = np.zeros_like(feats)
    np.put_along_axis(expected, rows, pooled, 0)
    np.testing.assert_array_equal(np.array(up.feats), expected)


# Batch elements


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shuffled", (False, True))
@pytest.mark.parametrize("mode", ("max", "sum", "avg"))
def test_global_pool(mode, shuffled, dtype):
    coords = cases.geometry("batches", 3, 80)
    if not shuffled:
        coords = coords[np.lexsort(coords.T[::-1])]
    size = int(coords[:, 0].max()) + 3  # two empty elements at the end
    x = tensor(coords, distinct(len(coords), 3), dtype, batch_size=size)
    exact = ref.to_numpy(x.feats).astype(np.float64)

    def run(f):
        return getattr(ops, f"global_{mode}_pool")(x.replace(f))

    y = run(x.feats)
    assert y.shape == (size, 3) and y.dtype == x.dtype
    batch = coords[:, 0]
    ref.assert_close(y, ref_rows.global_pool(exact, batch, size, mode), dtype)

    dy = mx.array(cases.features(size, 3, 1)).astype(x.dtype)
    (dx,) = mx.vjp(run, [x.feats], [dy])[1]
    share = np.zeros_like(exact)
    for b in set(batch.tolist()):
        rows = np.flatnonzero(batch == b)
        if mode == "max":
            share[rows[exact[rows].argmax(0)], np.arange(3)] = 1
        else:
            share[rows] = 1 if mode == "sum" else 1 / len(rows)
    ref.assert_close(dx, share * ref.to_numpy(dy)[batch], dtype)

    def squares(f):
        return mx.square(run(f).astype(mx.float32)).sum()

    twice = mx.grad(lambda f: mx.square(mx.grad(squares)(f)).sum())
    assert mx.isfinite(twice(x.feats / 8)).all().item()


@pytest.mark.parametrize("mode", ("max", "sum", "avg"))
def test_global_pool_of_nothing(mode):
    run = getattr(ops, f"global_{mode}_pool")
    none = np.zeros((0, 4), np.int32)
    for size, options in ((1, {}), (0, {"batch_size": 0}), (3, {"batch_size": 3})):
        x = tensor(none, np.zeros((0, 5)), **options)
        np.testing.assert_array_equal(np.array(run(x)), np.zeros((size, 5)))
    assert mx.grad(lambda f: run(x.replace(f)).sum())(x.feats).shape == (0, 5)


def test_long_sums_do_not_drift():
    n = 300_000
    coords = np.stack([np.zeros(n, np.int32), np.arange(n, dtype=np.int32)], axis=1)
    feats = np.random.default_rng(0).random((n, 2), np.float32)
    expected = feats.astype(np.float64).mean(axis=0)[None]
    y = ops.global_avg_pool(tensor(coords, feats))
    np.testing.assert_allclose(np.array(y), expected, rtol=2e-6)
