"""SPVCNN against SPVNAS's rules in float64, its names, and the smallest inputs."""

import cases
import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
import pytest
import reference as ref
import reference_rows as ref_rows
from differences import assert_gradients, cross_entropy
from foreign import exported, torchsparse_name
from foreign_nets import SPVNAS, spvnas_shapes
from mlx.utils import tree_flatten
from training import every_parameter_gets_a_gradient, lowers_the_loss

import mlx_lattice as ml
from mlx_lattice import io, models

PLANES = (4, 4, 6, 8, 8, 8, 6, 6, 4)
VOXEL = 0.5


def net(seed=0, **options):
    """A small one whose running statistics are not those of a new one."""
    mx.random.seed(seed)
    options = {"planes": PLANES, "voxel_size": VOXEL} | options
    made = models.SPVCNN(4, 5, **options)
    weights = []
    for name, p in tree_flatten(made.parameters()):
        if p.ndim == 1:
            low = 0.5 if name.endswith("var") or name.endswith("weight") else -0.3
            p = mx.random.uniform(low, low + 0.6, p.shape)
        weights.append((name, p))
    return made.load_weights(weights)


def cloud(n=70, batches=(0, 2), dtype="float32", seed=0):
    rng = np.random.default_rng([seed, n])
    points = (rng.normal(size=(n, 3)) * 1.5).astype(np.float32)
    batch = rng.choice(batches, n).astype(np.int32)
    feats = mx.array(cases.features(n, 4)).astype(getattr(mx, dtype))
    return mx.array(points), feats, mx.array(batch)


class Exact(SPVNAS):
    """The net in evaluation, in float64, as SPVNAS describes it."""

    def __init__(self, made, points, batch):
        super().__init__(exported(made, "torchsparse", torchsparse_name))
        self.at = np.asarray(points, np.float64) / VOXEL
        self.batch = np.asarray(batch)

    def points(self, rows, x, stride):
        return ref_rows.interpolate(
            rows, x, self.at / stride, self.batch, normalise=True
        )

    def voxels(self, z, stride, rows):
        made = ref_rows.voxelise(self.at, z, voxel_size=stride, batch=self.batch)
        kept = {tuple(row) for row in np.asarray(rows).tolist()}
        return made[1][[tuple(row) in kept for row in made[0].tolist()]]

    def transform(self, i, z):
        name = f"point_transforms.{i}"
        z = z @ self.p[f"{name}.0.weight"].T + self.p[f"{name}.0.bias"]
        return np.maximum(self.norm(f"{name}.1", z), 0)

    def __call__(self, feats):
        r0, x0, _, _ = ref_rows.voxelise(self.at, feats, voxel_size=1, batch=self.batch)
        x0 = self.stem(r0, x0)
        z0 = self.points(r0, x0, 1)
        r1, x1 = self.stage("stage1", r0, self.voxels(z0, 1, r0))
        r2, x2 = self.stage("stage2", r1, x1)
        r3, x3 = self.stage("stage3", r2, x2)
        r4, x4 = self.stage("stage4", r3, x3)
        z1 = self.points(r4, x4, 16) + self.transform(0, z0)
        y = self.up("up1", r4, self.voxels(z1, 16, r4), r3, x3)
        y = self.up("up2", r3, y, r2, x2)
        z2 = self.points(r2, y, 4) + self.transform(1, z1)
        y = self.up("up3", r2, self.voxels(z2, 4, r2), r1, x1)
        y = self.up("up4", r1, y, r0, x0)
        z3 = self.points(r0, y, 1) + self.transform(2, z2)
        return self.classify(z3)


def test_is_the_published_net():
    made, (points, feats, batch) = net().eval(), cloud()
    y = made(points, feats, batch)
    expected = Exact(made, points, batch)(np.array(feats))
    assert y.shape == (70, 5)
    ref.assert_close(y, expected)


@pytest.mark.parametrize("seed", (0, 1, 2))
def test_cells_that_torchsparse_leaves_out(seed):
    made, (points, feats, batch) = net(trimmed=True).eval(), cloud(seed=seed)
    exact = Exact(made, points, batch)
    whole, exact.trimmed = exact(np.array(feats)), True
    trimmed = exact(np.array(feats))
    ref.assert_close(made(points, feats, batch), trimmed)
    assert np.abs(whole - trimmed).max() > 1e-3


def test_gradients_of_a_step_of_training():
    """Of a cross entropy, norms by their batch: float64 differences, some entries."""
    made, (points, feats, batch) = net(dropout=0.0).train(), cloud(60)
    labels = np.random.default_rng(3).integers(0, 5, 60)

    def loss(made):
        scores, y = made(points, feats, batch), mx.array(labels)
        return mlx.nn.losses.cross_entropy(scores, y, reduction="mean")

    exact = Exact(made, points, batch)
    exact.training = True
    exact_loss = lambda: cross_entropy(exact(np.array(feats)), labels)  # noqa: E731
    value, grads = mlx.nn.value_and_grad(made, loss)(made)
    assert abs(value.item() - exact_loss()) <= 1e-5 * abs(value.item())
    made.update(grads)
    # In the names and layouts of the library.
    grads = exported(made, "torchsparse", torchsparse_name)
    wanted = (
        "stem.0.kernel",
        "stage2.1.downsample.0.kernel",
        "stage3.0.net.0.kernel",
        "up2.0.net.0.kernel",
        "up4.1.1.net.4.weight",
        "point_transforms.1.0.weight",
        "point_transforms.2.1.bias",
        "classifier.0.weight",
    )
    found = {name: ref.to_numpy(grads[name]) for name in wanted}
    assert_gradients(exact_loss, exact.p, found, entries=1)


def test_training_lowers_the_loss_and_every_parameter_gets_a_gradient():
    made, data = models.SPVCNN(4, 5, VOXEL, planes=PLANES), cloud(200)
    loss = lambda made, *data: (made(*data) - 1).square().mean()  # noqa: E731
    every_parameter_gets_a_gradient(made, loss, *data)
    lowers_the_loss(made, loss, *data, steps=10)


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("n", (0, 1))
def test_few_points(n, training):
    made, data = net(dropout=0.0).train(training), cloud(n)
    before = dict(tree_flatten(made.parameters()))
    loss = lambda made, *data: made(*data).square().sum()  # noqa: E731
    value, grads = mlx.nn.value_and_grad(made, loss)(made, *data)
    assert mx.isfinite(value).item() and made(*data).shape == (n, 5)
    for path, grad in tree_flatten(grads):
        assert mx.isfinite(grad).all().item(), path
    if n == 0:
        for path, held in tree_flatten(made.parameters()):
            assert mx.array_equal(held, before[path]).item(), path


def test_points_of_map_coordinates():
    made, (points, feats, batch) = net().eval(), cloud()
    near, wide = made(points, feats, batch), np.array(points, np.float64)
    # 1e7 is a whole number of the coarsest cells.
    for far in (wide + 1e7, (wide + 1e7).tolist()):
        assert mx.allclose(made(far, feats, batch), near, atol=1e-4)
    near = ml.SparseTensor.from_points(points, voxel_size=VOXEL)
    feats = mx.array(cases.features(len(near), 4))
    scores = []
    for move in (0, 10**8):
        coords = near.coords + mx.array([0, move, move, move])
        x = ml.SparseTensor(coords, feats)
        scores.append(made.score_voxels(models.Voxels(x, None)))
    assert mx.allclose(*scores, atol=1e-4)


def test_points_keep_their_order_and_their_batch_element():
    made, (points, feats, batch) = net().eval(), cloud()
    y = np.array(made(points, feats, batch))
    shuffle = np.random.default_rng(1).permutation(70)
    at = mx.array(shuffle)
    shuffled = np.array(made(points[at], feats[at], batch[at]))
    np.testing.assert_allclose(shuffled, y[shuffle], atol=2e-5)
    mine = np.flatnonzero(np.array(batch) == 2)
    at = mx.array(mine)
    np.testing.assert_allclose(
        np.array(made(points[at], feats[at])), y[mine], atol=2e-5
    )
    np.testing.assert_array_equal(np.array(made(points, feats, batch)), y)


def test_published_names(tmp_path):
    """Names and shapes of SPVNAS, in torchsparse's layouts, with a strict import."""
    made = models.SPVCNN(4, 19)
    shapes = {n: p.shape for n, p in tree_flatten(made.parameters())}
    published = spvnas_shapes(models.unets.PLANES, 4, 19)
    state = {n: mx.ones(s) for n, s in published.items()}
    report = io.import_checkpoint(state, made, "torchsparse")
    assert report.complete and len(report.matched) == len(shapes), str(report)
    # 21.8 million parameters, as the authors report for SPVCNN.
    size = sum(p.size for _, p in tree_flatten(made.trainable_parameters()))
    assert size == pytest.approx(21.8e6, rel=0.01)


def test_saves_and_quantises(tmp_path):
    made, data = net().eval(), cloud()
    path = str(tmp_path / "net.safetensors")
    made.save_weights(path)
    other = net(1).eval()
    other.load_weights(path, strict=True)
    y = made(*data)
    assert mx.array_equal(other(*data), y).item()
    linear = lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0  # noqa: E731
    wide = net(planes=(32,) * 9).eval()
    mlx.nn.quantize(wide, group_size=32, bits=8, class_predicate=linear)
    assert mx.isfinite(wide(*data)).all().item()


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_half(dtype):
    made, data = net().eval(), cloud()
    expected = np.array(made(*data))
    made.set_dtype(getattr(mx, dtype))
    y = made(*cloud(dtype=dtype))
    assert y.dtype == getattr(mx, dtype)
    error = np.linalg.norm(ref.to_numpy(y) - expected)
    assert error < 4 * ref.TOLERANCE[dtype] * np.linalg.norm(expected)


def test_dropout_and_width():
    made, data = net(dropout=0.9).train(), cloud()
    assert not mx.array_equal(made(*data), made(*data)).item()
    made.eval()
    assert mx.array_equal(made(*data), made(*data)).item()
    half = models.SPVCNN(4, 5, width=0.5)
    assert half.head.weight.shape == (5, 48)
    with pytest.raises(ValueError, match="planes has one entry"):
        models.SPVCNN(4, 5, planes=(1, 2))
