"""A strided relation and its transposed use are one set of edges, searched once."""

import cases
import mlx.core as mx
import numpy as np
import pytest
from reference_rows import table_of

import mlx_lattice as ml
from mlx_lattice import backends, nn

STRIDES = (2, 3, (1, 2, 2))


@pytest.fixture(params=("compiled", "portable"), autouse=True)
def builders(request):
    """Builders of the device, and portable ones."""
    if request.param == "compiled":
        yield
        return
    with backends.portable_only():
        yield


def ends(name, n, size, stride):
    """A strided relation, the transposed one after it, and one that stands alone."""
    coords = mx.array(cases.geometry(name, 3, n)) if n else mx.zeros((0, 4), mx.int32)
    kernel = {"kernel_size": size, "stride": stride}
    manager, alone = ml.CoordinateManager(), ml.CoordinateManager()
    down = manager.kernel_relation(manager.insert(coords), **kernel)
    up = manager.transposed_kernel_relation(down.keys[1], **kernel)
    cells = mx.array(np.array(down.out_coords))
    other = alone.transposed_kernel_relation(
        cells, mx.array(np.array(coords)), **kernel
    )
    return down, up, other


@pytest.mark.parametrize("stride", STRIDES, ids=str)
@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("name", ("negative", "surface", "batches", "far"))
def test_both_are_what_they_are_alone(name, size, stride):
    down, up, alone = ends(name, 60, size, stride)
    assert up.kind == "transposed" and not up.is_transposed and up.T.is_transposed
    assert up.keys == down.keys[::-1] and up.T.keys == down.keys
    assert (up.n_in, up.n_out) == (alone.n_in, alone.n_out)
    for a, b in ((up, alone), (up.T, alone.T), (down.T, alone), (down, alone.T)):
        for view in ("out_in", "in_out", "edges", "counts"):
            np.testing.assert_array_equal(
                np.array(getattr(a, view)), np.array(getattr(b, view)), view
            )
        for view in ("output_csr", "input_csr", "kernel_csr", "sorted"):
            for x, y in zip(getattr(a, view), getattr(b, view), strict=True):
                np.testing.assert_array_equal(np.array(x), np.array(y), view)
    rows, cells = np.array(down.in_coords), np.array(down.out_coords)
    expected = table_of(cells, rows, down.spec.offsets, down.spec.stride, True)
    np.testing.assert_array_equal(np.array(up.out_in), expected)


@pytest.mark.parametrize("shape", (None, (40, 41, 42)), ids=("free", "grid"))
@pytest.mark.parametrize("n", (0, 1, 300))
def test_a_chain_of_cells_is_that_of_the_convolutions(n, shape):
    """Rows, strides, grids, batch size; also from the middle on, and asked again."""
    rows = cases.in_grid((40, 41, 42), 300)[:n]
    strides = (2, (1, 2, 2), 3, 1, 2)
    sets = []
    for said in ((), strides[:2], strides):
        manager = ml.CoordinateManager()
        key = manager.insert(mx.array(rows), spatial_shape=shape, batch_size=3)
        chain = manager.cells(key, said)
        assert chain == manager.cells(key, said)
        found = [key]
        for stride in strides:
            # Padding, so that stride 1 makes rows of its own.
            down = manager.kernel_relation(found[-1], stride=stride, padding=2)
            found.append(down.keys[1])
        assert tuple(found[1 : 1 + len(said)]) == chain
        assert len(manager.sets) == 1 + len(strides)
        sets.append([manager[each] for each in found])
    for alone, *others in zip(*sets, strict=True):
        expected = np.array(alone.coords)
        for other in others:
            np.testing.assert_array_equal(np.array(other.coords), expected)
            assert other.stride == alone.stride and other.batch_size == 3
            assert other.spatial_shape == alone.spatial_shape
            assert other.bounds == alone.bounds


def test_a_wrong_stride_is_said():
    manager = ml.CoordinateManager()
    key = manager.insert(mx.array(cases.geometry("surface", 3, 20)))
    assert manager.cells(key, ()) == ()
    with pytest.raises(ValueError, match="stride must be"):
        manager.cells(key, (2, 0))
    with pytest.raises(ValueError, match="one per spatial axis"):
        manager.cells(key, (2, (2, 2)))


def test_gradients_over_both_are_those_over_two():
    coords = mx.array(cases.geometry("surface", 3, 100))
    net = nn.Sequential(nn.Conv3d(3, 4, 2, stride=2), nn.ConvTranspose3d(4, 5, 2))
    feats = mx.random.normal((len(coords), 3))
    (_, up) = net.layers

    def shared(feats):
        return net(ml.SparseTensor(coords, feats)).feats.sum()

    def apart(feats):
        x = ml.SparseTensor(coords, feats)
        y = net.layers[0](x)
        other = ml.SparseTensor(mx.array(np.array(y.coords)), y.feats, stride=2)
        return up(other, ml.SparseTensor(coords, feats)).feats.sum()

    for a, b in zip(
        mx.value_and_grad(shared)(feats), mx.value_and_grad(apart)(feats), strict=True
    ):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-5, atol=1e-5)
