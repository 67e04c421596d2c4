"""Reference nets: they build, train, save, trace, and take the smallest inputs."""

import cases
import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten
from training import every_parameter_gets_a_gradient, lowers_the_loss

import mlx_lattice as ml
from mlx_lattice import models
from mlx_lattice.routes.launch import observe

SMALL = (4, 8, 8, 16, 16, 8, 8, 4)
ONES = (1,) * 8


def unet(dims=3):
    return models.MinkUNet(3, 5, SMALL, ONES, dims=dims)


def resnet(dims=3):
    return models.SparseResNet(3, 5, (1, 2), (8, 16), dims=dims)


def torchsparse(dims=3):
    return models.MinkUNetTorchSparse(3, 5, 0.125, dims=dims)


NETS = {"unet": unet, "torchsparse": torchsparse, "resnet": resnet}


def tensor(name="batches", dims=3, n=60, dtype="float32", **options):
    coords = cases.geometry(name, dims, n)
    feats = mx.array(cases.features(len(coords), 3), dtype=getattr(mx, dtype))
    return ml.SparseTensor(mx.array(coords.astype(np.int32)), feats, **options)


def scores(y):
    return y.feats if isinstance(y, ml.SparseTensor) else y


def loss(net, x):
    return (scores(net(x)) ** 2).sum()


@pytest.mark.parametrize("dims", (1, 2, 3, pytest.param(4, marks=pytest.mark.native)))
@pytest.mark.parametrize("name", NETS)
def test_training_lowers_the_loss(name, dims):
    mx.random.seed(0)
    net, x = NETS[name](dims), tensor(dims=dims)
    lowers_the_loss(net, lambda net, x: (scores(net(x)) - 1).square().mean(), x)


@pytest.mark.parametrize("name", NETS)
def test_every_parameter_gets_a_gradient(name):
    every_parameter_gets_a_gradient(NETS[name](), loss, tensor())


@pytest.mark.parametrize("name", NETS)
def test_rows_and_shapes(name):
    x = tensor(batch_size=40)
    y = NETS[name]().eval()(x)
    if name != "resnet":
        assert y.key == x.key and y.shape == (len(x), 5)
    else:
        assert y.shape == (40, 5) and mx.isfinite(y).all().item()


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("rows", ("empty", "one"))
@pytest.mark.parametrize("name", NETS)
def test_few_rows(name, rows, training):
    net, x = NETS[name](), tensor(rows, batch_size=2)
    net.train(training)
    before = dict(tree_flatten(net.parameters()))
    value, grads = mlx.nn.value_and_grad(net, loss)(net, x)
    for path, grad in tree_flatten(grads):
        assert mx.isfinite(grad).all().item(), path
    assert mx.isfinite(value).item()
    if rows == "empty" or not training:
        for path, held in tree_flatten(net.parameters()):
            assert mx.array_equal(held, before[path]).item(), path


def test_the_other_elements_of_a_batch_do_not_matter():
    net = unet().eval()
    x = tensor()
    batch = np.array(x.coords)[:, 0]
    rows = mx.array(np.flatnonzero(batch == batch[0]))
    alone = ml.SparseTensor(x.coords[rows], x.feats[rows])
    expected = np.array(net(x).feats[rows])
    np.testing.assert_allclose(np.array(net(alone).feats), expected, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_safetensors_both_ways(name, tmp_path):
    path = str(tmp_path / "net.safetensors")
    first, second, x = NETS[name](), NETS[name](), tensor()
    first(x)  # moves the running statistics, which are saved too
    first.save_weights(path)
    second.load_weights(path, strict=True)
    first.eval(), second.eval()
    assert mx.array_equal(scores(first(x)), scores(second(x))).item()
    second.save_weights(path)
    first.load_weights(path, strict=True)
    with pytest.raises(ValueError):
        NETS["unet" if name == "resnet" else "resnet"]().load_weights(path)


@pytest.mark.parametrize("name", NETS)
def test_traces_name_layers(name):
    net, seen = NETS[name](), []
    with observe(seen.append):
        mx.eval(mlx.nn.value_and_grad(net, loss)(net, tensor()))
    modules = {id(module) for _, module in net.named_modules()}
    convs = [m for _, m in net.named_modules() if hasattr(m, "kernel_size")]
    convs = [m for m in convs if "weight" in m]
    assert all(id(launch.scope) in modules for launch in seen)
    seen = [s for s in seen if not isinstance(s.scope, mlx.nn.Linear)]
    assert {id(launch.scope) for launch in seen} == {id(m) for m in convs}


@pytest.mark.parametrize("name", NETS)
def test_half(name):
    net = NETS[name]().eval()
    x = tensor()
    expected = np.array(scores(net(x)))
    net.set_dtype(mx.float16)
    y = scores(net(x.astype(mx.float16)))
    assert y.dtype == mx.float16
    error = np.linalg.norm(np.array(y, np.float32) - expected)
    assert error < 2e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "make, parameters",
    [
        (models.MinkUNet14, None),
        (models.MinkUNet18, None),
        (lambda i, o: models.MinkUNet34(i, o, "C"), None),
        (models.SparseResNet14, None),
        (models.SparseResNet18, None),
        (models.SparseResNet34, None),
    ],
)
def test_published_sizes_run(make, parameters):
    net = make(3, 20).eval()
    y = scores(net(tensor(n=20)))
    assert y.shape[1] == 20 and mx.isfinite(y).all().item()


def test_minkunet34c_has_the_published_size():
    """37.8 million parameters: MinkowskiEngine's MinkUNet34C with 3 channels in."""
    net = models.MinkUNet34(3, 20, "C")
    trained = tree_flatten(net.trainable_parameters())
    assert sum(p.size for _, p in trained) == pytest.approx(37.8e6, rel=0.01)


def test_unknown_plans_are_refused():
    with pytest.raises(ValueError, match="plans A, B, D"):
        models.MinkUNet18(3, 20, "C")
    with pytest.raises(ValueError, match="four encoder"):
        models.MinkUNet(3, 20, (1, 2))
    for make in (
        lambda: models.MinkUNet(3, 20, layers=(2, 0, 2, 2, 2, 2, 2, 2)),
        lambda: models.SparseResNet(3, 20, (1, 0), (8, 8)),  # it had one block there
    ):
        with pytest.raises(ValueError, match="stage's blocks must be 1 or more; got 0"):
            make()
