"""Pooling and its transposes against the float64 oracle."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
import reference_rows as ref_rows
from cuda_emulation import Emulator, emulated, emulating
from pooled import distinct, route, tensor  # noqa: F401 (a fixture for every test here)

import mlx_lattice as ml
from mlx_lattice import ops

MODES = ("max", "sum", "avg", "avgvol")
GEOMETRIES = ("empty", "one", "negative", "batches", "surface")
# (dims, kernel, stride, padding, dilation, support); stride None is the kernel's.
KERNELS = (
    (1, 2, None, None, 1, "cell"),
    (2, 3, None, None, 1, "cell"),
    (3, 2, None, None, 1, "cell"),
    (3, 3, 2, None, 1, "cell"),
    (3, 3, 1, None, 2, "cell"),
    (3, 3, 2, 1, 1, "reach"),
    (3, 4, 3, 1, 1, "reach"),
    (3, (1, 2, 3), (2, 1, 2), None, 1, "reach"),
    (4, 2, None, None, 1, "cell"),
    # Of cells that rows name, instead of a table.
    (1, 40, None, 0, 1, "reach"),
    (2, 8, None, None, 1, "cell"),
    (3, (4, 3, 3), None, 0, 1, "cell"),
    (4, 4, None, None, 1, "reach"),
    # Their maxima too.
    (1, 600, None, 0, 1, "cell"),
    (3, (9, 8, 8), None, 0, 1, "reach"),
)


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


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_pool_and_gradient(mode, kernel, geometry):
    coords = cases.geometry(geometry, kernel[0], 40)
    feats = distinct(len(coords), 5)
    x, relation = tensor(coords, feats), oracle(kernel, coords)
    y = pool(x, mode, kernel)
    np.testing.assert_array_equal(np.array(y.coords), relation.out_coords)
    ref.assert_close(y.feats, ref_rows.pool(feats, relation, mode))

    dy = cases.features(len(y), 5, 1)

    def run(f):
        return (pool(x.replace(f), mode, kernel).feats * mx.array(dy)).sum()

    ref.assert_close(
        mx.grad(run)(x.feats), ref_rows.pool_grad(feats, dy, relation, mode)
    )


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_dtypes_accumulate_in_float32(mode, dtype):
    coords = cases.geometry("block", 3, 200)
    kernel = (3, 5, 3, None, 1, "cell")
    x = tensor(coords, distinct(len(coords), 3) / 7, dtype)
    exact = ref.to_numpy(x.feats).astype(np.float64)
    relation = oracle(kernel, coords)
    y = pool(x, mode, kernel)
    assert y.dtype == x.dtype
    ref.assert_close(y.feats, ref_rows.pool(exact, relation, mode), dtype)
    dx = mx.grad(lambda f: pool(x.replace(f), mode, kernel).feats.sum())(x.feats)
    assert dx.dtype == x.dtype
    if mode != "max":  # neighbours tie in bfloat16; the next test says who wins
        ones = np.ones(y.shape)
        ref.assert_close(dx, ref_rows.pool_grad(exact, ones, relation, mode), dtype)


def test_ties_go_to_the_first_offset():
    coords = np.array([(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)])[::-1]
    x = tensor(coords, np.ones((4, 2)))

    def run(f):
        return ops.max_pool2d(x.replace(f)).feats.sum()

    expected = [[0, 0]] * 3 + [[1, 1]]
    np.testing.assert_array_equal(np.array(mx.grad(run)(x.feats)), expected)


def test_max_never_starts_from_zero_and_keeps_nan():
    x = tensor(np.array([(0, -3), (0, 5), (0, 6)]), [[-2.0], [-7.0], [-np.inf]])
    y = ops.max_pool1d(x)
    np.testing.assert_array_equal(np.array(y.feats), [[-2], [-7], [-np.inf]])
    y = ops.max_pool1d(x.replace(mx.array([[1.0], [np.nan], [3.0]])), 12, padding=6)
    assert np.isnan(np.array(y.feats)).any()


@pytest.mark.parametrize("mode", MODES)
def test_rows_without_edges_are_zero(mode):
    x = tensor(np.array([(0, 4, 4), (1, 0, 0)]), [[-3.0], [2.0]], batch_size=8)
    target = mx.array([[1, 0, 0], [0, 50, 50], [0, 2, 2], [7, 2, 2]], dtype=mx.int32)
    kernel = (2, 2, None, None, 1, "cell")

    def run(f):
        return pool(x.replace(f), mode, kernel, coordinates=target).feats

    over = 4 if mode == "avgvol" else 1
    expected = np.array([[2.0], [0], [-3], [0]]) / over
    np.testing.assert_allclose(np.array(run(x.feats)), expected)
    dx = mx.grad(lambda f: run(f).sum())(x.feats)
    np.testing.assert_allclose(np.array(dx), np.full((2, 1), 1 / over))


@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("mode", MODES)
def test_all_pruned(mode, size):
    x = tensor(cases.geometry("negative", 3, 10), np.ones((10, 2))[:10])
    none = ops.prune(x, mx.zeros((len(x),), dtype=mx.bool_))
    kernel = (3, size, None, None, 1, "cell")

    def run(f):
        return pool(none.replace(f), mode, kernel).feats.sum()

    assert mx.grad(run)(none.feats).shape == (0, 2)


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
    step = 1e-3
    moved = ref_rows.pool(feats + step * tangent, relation, mode)
    expected = (moved - ref_rows.pool(feats, relation, mode)) / step
    ref.assert_close(dy, expected, what="tangent")

    # d/df |J^T J f|^2 / 2 through gradients of gradients, against the oracle's J.
    def inner(f):
        return 0.5 * (run(f) ** 2).sum()

    def outer(f):
        return 0.5 * (mx.grad(inner)(f) ** 2).sum()

    def forward(f):
        return ref_rows.pool(f, relation, mode)

    def back(dy):
        return ref_rows.pool_grad(feats, dy, relation, mode)

    jacobian = np.stack(
        [back(row.reshape(-1, 3)).ravel() for row in np.eye(forward(feats).size)]
    )
    gram = jacobian.T @ jacobian
    expected = (gram @ gram @ feats.astype(np.float64).ravel()).reshape(feats.shape)
    ref.assert_close(mx.grad(outer)(x.feats), expected, what="second order")


def test_same_bits_every_time_and_rows_of_the_convolution():
    coords = cases.geometry("block", 3, 300)
    x = tensor(coords, cases.features(len(coords), 8))
    first = ops.max_pool3d(x, 3, 2)
    weight = mx.ones((27, 8, 8))
    assert first.key == ops.conv3d(x, weight, kernel_size=3, stride=2).key
    again = ops.max_pool3d(x, 3, 2)
    assert mx.array_equal(first.feats, again.feats).item()


@emulated
@pytest.mark.parametrize("count", ("active", "volume"))
def test_means_in_half_are_one_launch_and_two_back(cuda_programs, count):
    coords = cases.geometry("block", 3, 300)
    feats = mx.array(cases.features(len(coords), 8)).astype(mx.float16)
    emulator = Emulator(cuda_programs)
    with emulating(emulator):
        x = ml.SparseTensor(mx.array(coords), feats)

        def pooled(feats):
            return ops.avg_pool3d(x.replace(feats=feats), 2, count=count).feats

        y = pooled(feats)
        dy = mx.array(cases.features(len(y), 8, 1)).astype(mx.float16)
        (dx,) = mx.vjp(pooled, [feats], [dy])[1]
        mx.eval(dx)
        done = len(emulator.launches)
        mx.eval(pooled(feats))
        assert [name.split("_f16")[0] for name in emulator.launches[done:]] == [
            "lattice_gather_sum"
        ]
        done = len(emulator.launches)
        mx.eval(mx.vjp(pooled, [feats], [dy])[1])
        assert len(emulator.launches) == done + 3
    relation = x.manager.kernel_relation(x.key, kernel_size=2, stride=2)
    table = np.array(relation.out_in)
    places = (table >= 0).sum(1) if count == "active" else np.full(len(table), 8)
    found, back = np.zeros(y.shape), np.zeros(feats.shape)
    for o, k in zip(*np.nonzero(table >= 0), strict=True):
        found[o] += ref.to_numpy(feats)[table[o, k]] / places[o]
        back[table[o, k]] += ref.to_numpy(dy)[o] / places[o]
    ref.assert_close(y, found, "float16")
    ref.assert_close(dx, back, "float16")


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


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda x: ops.max_pool2d(x), "3d name"),
        (lambda x: ops.max_pool3d(x, 0), "kernel_size must be at least 1"),
        (lambda x: ops.avg_pool3d(x, count="all"), "count must be"),
        (lambda x: ops.sum_pool_transpose3d(x), "no coordinates of stride"),
        (lambda x: ops.max_unpool(x, ops.max_pool3d(x, return_indices=True)[1]), "poo"),
    ],
)
def test_errors(call, text):
    x = tensor(cases.geometry("negative", 3, 10), np.ones((10, 2)))
    with pytest.raises(ValueError, match=text):
        call(x)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kernel, stride", [(2, 2), (3, 2), (3, 3), (2, 3), (4, 4)])
@pytest.mark.parametrize("mode", ("sum", "avg"))
def test_pool_transpose(mode, kernel, stride, geometry):
    coords = cases.geometry(geometry, 3, 40)
    x = tensor(coords, cases.features(len(coords), 4))
    down = ops.sum_pool3d(x, kernel, stride)
    feats = cases.features(len(down), 4, 3)
    run = getattr(ops, f"{mode}_pool_transpose3d")
    up = run(down.replace(mx.array(feats)), kernel, stride)
    assert up.key == x.key
    relation = ref.relation(
        "transposed",
        np.array(down.coords),
        target=coords,
        kernel_size=kernel,
        stride=stride,
    )
    ref.assert_close(up.feats, ref_rows.pool(feats, relation, mode))
    dy = cases.features(len(x), 4, 4)

    def loss(f):
        return (run(down.replace(f), kernel, stride).feats * mx.array(dy)).sum()

    expected = ref_rows.pool_grad(feats, dy, relation, mode)
    ref.assert_close(mx.grad(loss)(mx.array(feats)), expected)


@pytest.mark.parametrize(
    "dims, scale", [(1, 3), (2, 2), (3, (2, 1, 3)), (4, 2), (1, 99), (3, (5, 4, 3))]
)
def test_upsample_nearest(dims, scale):
    coords = cases.geometry("negative", dims, 40)
    x = tensor(coords, cases.features(len(coords), 2))
    down = getattr(ops, f"max_pool{dims}d")(x, scale)
    up = getattr(ops, f"upsample_nearest{dims}d")(down, scale)
    rows = {
        tuple(row): f
        for row, f in zip(down.coords.tolist(), down.feats.tolist(), strict=True)
    }
    step = np.array((1, *ref.per_axis(scale, dims)))
    expected = [rows[tuple(row)] for row in (coords // step).tolist()]
    np.testing.assert_array_equal(np.array(up.feats), np.array(expected))


@pytest.mark.parametrize("size", (4, 16))
def test_large_cells_have_no_table(size):
    coords = cases.geometry("surface", 3, 300)
    x = tensor(coords, cases.features(len(coords), 3))
    down, target = ops.max_pool3d(x, 2), mx.array(coords[::2].astype(np.int32))
    top = ops.sum_pool3d(down, size // 2)

    def run(f, onto):
        up = ops.upsample_nearest3d(top.replace(f), size, onto)
        return ops.sum_pool3d(up, size, coordinates=top).feats

    places = {tuple(row): i for i, row in enumerate(np.array(top.coords).tolist())}
    feats = ref.to_numpy(top.feats).astype(np.float64)
    for onto, rows in ((x, coords), (target, coords[::2])):
        cells = [
            places[tuple(c)] for c in (rows // np.array((1, *[size] * 3))).tolist()
        ]
        counts = np.bincount(cells, minlength=len(top))[:, None]
        for call in (run, mx.compile(lambda f, onto=onto: run(f, onto))):
            y = call(top.feats, onto) if call is run else call(top.feats)
            ref.assert_close(y, counts * feats)
        grad = mx.grad(lambda f, onto=onto: 0.5 * run(f, onto).square().sum())
        ref.assert_close(grad(top.feats), counts**2 * feats)
    known = x.manager.transposed_kernel_relation(
        top.key, x.key, kernel_size=size, stride=size, padding=0
    )
    assert known.fills_cells and ("table", False) not in known.built


def test_max_unpool():
    coords = cases.geometry("negative", 3, 60)
    feats = distinct(len(coords), 3)
    x = tensor(coords, feats)
    y, indices = ops.max_pool3d(x, return_indices=True)
    rows = np.array(indices.rows)
    np.testing.assert_array_equal(np.take_along_axis(feats, rows, 0), np.array(y.feats))
    up = ops.max_unpool(y, indices)
    assert up.key == x.key
    expected = np.zeros_like(feats)
    np.put_along_axis(expected, rows, np.array(y.feats), 0)
    np.testing.assert_array_equal(np.array(up.feats), expected)
