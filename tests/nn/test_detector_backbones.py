"""Detectors' backbones and maps: what they sum, keep, save and refuse."""

import gc
import weakref
from functools import partial

import mlx.core as mx
import mlx.nn
import pytest
from detector_cases import WIDTHS, randomised, scene
from mlx.utils import tree_flatten
from processes import on_the_cpu_alone

import mlx_lattice as ml
from mlx_lattice import models, ops


def test_unetv2_without_its_encoded_tensor():
    _, _, x = scene()
    net = models.UNetV2(4, WIDTHS, return_encoded=False).eval()
    encoded, y = net(x)
    assert encoded is None and y.key == x.key and y.channels == WIDTHS[0]
    assert not any("conv_out" in n for n, _ in tree_flatten(net.parameters()))
    with pytest.raises(ValueError, match="takes a tensor of .* with a spatial_shape"):
        net(ml.SparseTensor(x.coords, x.feats))
    with pytest.raises(ValueError, match="widths are those of"):
        models.VoxelBackBone8x(4, (1, 2, 3))


def test_pairs_of_channels_are_added_as_they_stand(tmp_path):
    """UNetV2 sums no axis of two, for which MLX has no fast kernel on a GPU."""
    _, _, x = scene(60)
    net = models.UNetV2(4, (4, 4, 8, 8, 5), return_encoded=False).eval()
    net.set_dtype(mx.float16)
    made = net.stages(x.astype(mx.float16))
    path = tmp_path / "graph.dot"
    mx.export_to_dot(str(path), made["up4"].feats)
    nodes = path.read_text()
    assert "Add" in nodes and "Sum" not in nodes


def sum_over_height(levels) -> ml.SparseTensor:
    """Rows of levels at one (batch, y, x) of the first of them, added up."""
    coords = [
        x.coords[:, mx.array([0, 2, 3])] * mx.array([1, 2**i, 2**i])
        for i, x in enumerate(levels)
    ]
    return ops.unique_sum(
        mx.concatenate(coords),
        mx.concatenate([x.feats for x in levels]),
        stride=levels[0].stride[1:],
        spatial_shape=levels[0].spatial_shape[1:],
        batch_size=2,
    )


@pytest.mark.parametrize("dtype", ("float32", "float16"))
@pytest.mark.parametrize("count", (0, 1, 150))
def test_a_sum_over_height(count, dtype):
    """Of VoxelNeXt: the rows, their sums and the gradients of these."""
    _, _, x = scene(count)
    x = x.astype(getattr(mx, dtype))
    net = randomised(models.VoxelResBackBone8xVoxelNeXt(4, WIDTHS, 6)).eval()
    net.set_dtype(x.dtype)
    made = net.stages(x)
    levels = [made[f"x_conv{i}"] for i in (4, 5, 6)]
    y, expected = made["bev_sum"], sum_over_height(levels)
    assert y.coords.tolist() == expected.coords.tolist() and y.manager is x.manager
    for fact in ("stride", "spatial_shape", "batch_size", "dtype"):
        assert getattr(y, fact) == getattr(expected, fact), fact
    assert mx.allclose(y.feats, expected.feats, 1e-3, 1e-3)
    scale = mx.random.normal(y.shape).astype(y.dtype)

    def loss(of, *feats):
        given = [x.replace(f) for x, f in zip(levels, feats, strict=True)]
        return (of(given).feats * scale).sum()

    feats = [x.feats for x in levels]
    own, other = (
        mx.grad(partial(loss, of), argnums=(0, 1, 2))(*feats)
        for of in (lambda given: net._summed(*given), sum_over_height)
    )
    assert all(map(mx.array_equal, own, other))


def test_rows_of_a_sum_over_height_are_kept_with_their_scan():
    """Steps on a scan that comes again, on another, and on both anew."""
    _, _, x = scene(20)
    net = randomised(models.VoxelResBackBone8xVoxelNeXt(4, WIDTHS, 6)).train()
    far = mx.array([0, *(n - 1 for n in x.spatial_shape)])

    def scan(coords) -> ml.SparseTensor:
        facts = {"spatial_shape": x.spatial_shape, "batch_size": x.batch_size}
        return ml.SparseTensor(coords, x.feats, **facts)

    def turned() -> ml.SparseTensor:
        return scan(mx.abs(far - x.coords))  # as many rows, elsewhere

    def step(x) -> list[mx.array]:
        def loss(net):
            return net(x).feats.square().sum()

        value, grads = mlx.nn.value_and_grad(net, loss)(net)
        return [net(x).coords, value, *(grad for _, grad in tree_flatten(grads))]

    other = turned()
    first, beside = step(x), step(other)
    assert first[1].item() != beside[1].item()
    for again, before in (
        (x, first),
        (other, beside),
        (scan(x.coords + 0), first),
        (turned(), beside),
    ):
        assert all(map(mx.array_equal, step(again), before))
    compiled = ml.compile(net.eval())
    # A CPU's compiled norms are launches of their own: sums are rounded before.
    on_gpu = mx.default_device() == mx.gpu
    same = mx.array_equal if on_gpu else partial(mx.allclose, rtol=1e-4, atol=1e-5)
    made = [compiled(x) for _ in range(4)]
    for y in made:
        assert y.manager is x.manager and same(y.feats, net(x).feats)
    assert mx.array_equal(made[-1].feats, made[-2].feats)
    held = weakref.ref(other.manager)
    del other, again
    gc.collect()
    assert held() is None


@on_the_cpu_alone
@pytest.mark.parametrize(
    "kind",
    (
        models.VoxelBackBone8x,
        models.VoxelResBackBone8x,
        models.UNetV2,
        models.VoxelResBackBone8xVoxelNeXt,
    ),
)
def test_backbones_are_saved_and_read(kind, tmp_path):
    _, _, x = scene(60)
    net = randomised(kind(4, WIDTHS)).eval()
    net.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    for name, y in net.stages(x).items():
        assert mx.array_equal(again.stages(x)[name].feats, y.feats)


def test_maps_of_other_strides():
    """Blocks alone, a map that is strided, and one more enlargement at the end."""
    x = mx.random.normal((2, 8, 12, 3))
    alone = models.BaseBEVBackbone(3, (0,), (1,), (5,), (), ())
    assert alone(x).shape == (2, 8, 12, 5)
    net = models.BaseBEVBackbone(
        3, (1, 0), (1, 2), (4, 5), (0.5, 1, 2), (6, 7), conv_for_no_stride=True
    )
    assert net(x).shape == (2, 8, 12, 13) == (*x.shape[:3], net.out_channels)
    trained = net.train()(x)
    assert trained.shape == (2, 8, 12, 13)
    with pytest.raises(ValueError, match="one entry a block"):
        models.BaseBEVBackbone(3, (1,), (1, 2), (4, 5))
    with pytest.raises(ValueError, match="extents that its strides divide"):
        net(x[:, :7])
    with pytest.raises(ValueError, match="are of 1 blocks"):
        models.BaseBEVBackbone(3, (1,), (1,), (4,), (1, 2), (4, 4))
