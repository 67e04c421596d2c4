"""Convolutions whose offsets are no box: MinkowskiEngine's crosses, and any."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref

import mlx_lattice as ml
from mlx_lattice import io, nn

# Of the published coordinate_at: index 0 is the centre; then of each axis of size n,
# with r = n // 2, index i is i + 1 for i < r and i - 2r from there on.
CROSS_3 = (
    (0, 0, 0), (1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1),
)  # fmt: skip
CROSS_5_1_3 = (
    (0, 0, 0), (1, 0, 0), (2, 0, 0), (-2, 0, 0), (-1, 0, 0), (0, 0, 1), (0, 0, -1),
)  # fmt: skip


def test_the_order_of_a_cross():
    assert nn.hyper_cross(3) == CROSS_3
    assert nn.hyper_cross((5, 1, 3)) == CROSS_5_1_3
    doubled = tuple(tuple(2 * v for v in offset) for offset in CROSS_3)
    assert nn.hyper_cross(3, dilation=2) == doubled
    for dims in (1, 2, 3, 4):
        assert set(nn.hyper_cross(3, dims=dims)) == set(cases.CROSS[dims])
    with pytest.raises(ValueError, match="a hyper-cross must be odd; got 2"):
        nn.hyper_cross(2)


def scene(dims=3, geometry="batches", channels=4):
    coords = cases.geometry(geometry, dims, 60)
    feats = cases.features(len(coords), channels)
    return coords, feats, ml.SparseTensor(mx.array(coords), mx.array(feats))


def kernel_major(weight):
    """(K, C_in / groups, C_out) of a module's weight, in float64."""
    weight = ref.to_numpy(weight).astype(np.float64)
    weight = weight.reshape(weight.shape[0], -1, weight.shape[-1])
    return weight.transpose(1, 2, 0)


@pytest.mark.parametrize("geometry", ("negative", "batches", "one"))
@pytest.mark.parametrize("dims", (1, 2, 3, 4))
@pytest.mark.parametrize("kind", ("submanifold", "forward"))
def test_against_float64(kind, dims, geometry):
    coords, feats, x = scene(dims, geometry)
    offsets = (*nn.hyper_cross(3, dims=dims), (2,) * dims)
    name, stride = ("SubmConv", 1) if kind == "submanifold" else ("Conv", 2)
    options = {} if stride == 1 else {"stride": 2}
    layer = getattr(nn, f"{name}{dims}d")(4, 6, offsets=offsets, **options)
    assert layer.weight.shape == (6, len(offsets), *(1,) * (dims - 1), 4)
    relation = ref.relation(kind, coords, offsets=np.array(offsets), stride=stride)
    y = layer(x)
    assert np.array_equal(np.array(y.coords), relation.out_coords)
    ref.assert_close(y.feats, ref.conv(feats, kernel_major(layer.weight), relation))
    assert layer(x).key == y.key  # the relation is found again


def test_groups_and_gradients():
    coords, feats, x = scene(channels=6)
    layer = nn.SubmConv3d(6, 4, offsets=CROSS_5_1_3, groups=2)
    relation = ref.relation("submanifold", coords, offsets=np.array(CROSS_5_1_3))
    dy = np.random.default_rng(1).normal(size=(len(coords), 4)).astype(np.float32)

    def loss(layer):
        return (layer(x).feats * mx.array(dy)).sum()

    ref.assert_close(
        layer(x).feats, ref.conv(feats, kernel_major(layer.weight), relation, groups=2)
    )
    _, grads = mlx.nn.value_and_grad(layer, loss)(layer)
    expected = ref.weight_grad(feats, dy, relation, groups=2)
    layer.weight = grads["weight"]
    ref.assert_close(kernel_major(layer.weight), expected)


def test_a_kernel_of_minkowski_loads():
    """(K, C_in, C_out), its offsets in the library's order."""
    coords, feats, x = scene()
    layer = nn.SubmConv3d(4, 6, offsets=nn.hyper_cross(3), bias=False)
    kernel = np.random.default_rng(2).normal(size=(7, 4, 6)).astype(np.float32)
    net = nn.Sequential(layer)
    state = {"0.kernel": mx.array(kernel)}
    assert io.import_checkpoint(state, net, "minkowski").complete
    relation = ref.relation("submanifold", coords, offsets=np.array(CROSS_3))
    ref.assert_close(net(x).feats, ref.conv(feats, kernel, relation))


def test_a_cross_is_not_taken_for_a_box_of_its_size():
    """Both have the size (7, 1, 1), on the same rows of the same manager."""
    _, _, x = scene()
    cross = nn.SubmConv3d(4, 4, offsets=CROSS_3, bias=False)
    box = nn.SubmConv3d(4, 4, (7, 1, 1), bias=False)
    box.weight = cross.weight
    ones = mx.array_equal(cross(x).feats, box(x).feats)
    assert not ones.item()
    apart = ml.SparseTensor(x.coords, x.feats)
    assert mx.array_equal(box(x).feats, box(apart).feats).item()
