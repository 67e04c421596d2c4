"""torchsparse 2.1 and 1.4 against dense forms in PyTorch."""

import copy
import pickle

import numpy as np
import pytest
from torch_scenes import (
    CONV,
    TRANSPOSED,
    close,
    gradients,
    picked,
    scene,
    spread,
    torch,
)

from mlx_lattice import compat
from mlx_lattice.compat import torchsparse as v2
from mlx_lattice.compat import torchsparse_1_4 as v1

EXTENTS = 8, 8, 6
VERSIONS = pytest.mark.parametrize("library", (v2, v1), ids=("2.1", "1.4"))
nn = torch.nn


def tensor_of(library, extents=EXTENTS, **facts):
    """A tensor whose greatest coordinates end the grid, and the dense grid."""
    features, rows = scene(extents, **facts)
    coords = rows if library is v2 else rows[:, [1, 2, 3, 0]].contiguous()
    return library.SparseTensor(features, coords), spread(features, rows, extents)


def cells(x):
    """Rows (batch, x, y, z) of a tensor in cells of its stride."""
    if isinstance(x, v2.SparseTensor):
        return x.C
    return x.C[:, [3, 0, 1, 2]] // torch.tensor([1, *x.s])


def dense_weight(layer, transposed=False):
    """The kernel as PyTorch takes it: the first axis is the fastest of odd volumes."""
    kernel, size = layer.kernel, layer.kernel_size
    last = (3, 4) if transposed else (4, 3)
    if layer.kernel_volume % 2:
        box = kernel.reshape(*reversed(size), *kernel.shape[-2:])
        return box.permute(*last, 2, 1, 0)
    return kernel.reshape(*size, *kernel.shape[-2:]).permute(*last, 0, 1, 2)


def compare(y, expected, leaves, tolerance=1e-5):
    close(y, expected, tolerance)
    for got, other in zip(
        gradients(y, leaves), gradients(expected, leaves), strict=True
    ):
        close(got, other, tolerance)


# Convolution


@VERSIONS
@pytest.mark.parametrize("size", (3, 5, (3, 1, 3)))
def test_convolution_of_stride_1(library, size):
    x, grid = tensor_of(library)
    layer = library.nn.Conv3d(5, 4, size, bias=True)
    assert layer.bias.shape == (4,)
    y = layer(x)
    padding = [n // 2 for n in layer.kernel_size]
    dense = CONV[3](grid, dense_weight(layer), layer.bias, padding=padding)
    compare(y.F, picked(dense, cells(x)), (x.F, layer.kernel, layer.bias))
    assert y.C is x.C and y.s == (1, 1, 1)


@VERSIONS
def test_kernels_of_size_1_and_2(library):
    x, grid = tensor_of(library)
    product = library.nn.Conv3d(5, 4, 1)
    assert product.kernel.shape == (5, 4)
    close(product(x).F, x.F @ product.kernel)
    even = library.nn.Conv3d(5, 4, 2)
    wide = nn.functional.pad(grid, (0, 1, 0, 1, 0, 1))
    close(even(x).F, picked(CONV[3](wide, dense_weight(even)), cells(x)))
    shortcut = library.nn.Conv3d(5, 4, 1, stride=2)
    assert shortcut.kernel.ndim == (3 if library is v2 else 2)
    y = shortcut(x)
    assert y.s == (2, 2, 2)
    weight = shortcut.kernel.reshape(5, 4).T[..., None, None, None]
    close(y.F, picked(CONV[3](grid, weight, stride=2), cells(y)))


@VERSIONS
def test_down_and_up(library):
    x, grid = tensor_of(library)
    down = library.nn.Conv3d(5, 4, 2, stride=2)
    up = library.nn.Conv3d(4, 3, 2, stride=2, transposed=True)
    y = down(x)
    assert y.s == y.stride == (2, 2, 2)
    assert y.C.max() == (3 if library is v2 else 6)  # divided in 2.1 alone
    dense = CONV[3](grid, dense_weight(down), stride=2)
    compare(y.F, picked(dense, cells(y)), (x.F, down.kernel))
    z = up(y)
    half = [n // 2 for n in EXTENTS]
    wide = spread(y.F, cells(y), half)
    wide = TRANSPOSED[3](wide, dense_weight(up, True), stride=2)
    compare(z.F, picked(wide, cells(x)), (x.F, down.kernel, up.kernel))
    assert z.C is x.C and z.s == (1, 1, 1)
    assert library.nn.Conv3d(4, 3, 3)(y).C is y.C
    alone = library.SparseTensor(y.F, y.C, 2)
    with pytest.raises(KeyError, match="takes the kernel map"):
        up(alone)


@pytest.mark.parametrize("padding", (0, 1))
def test_rows_that_a_larger_kernel_reaches_in_2_1(padding):
    x, grid = tensor_of(v2)
    layer = v2.nn.Conv3d(5, 4, 3, stride=2, padding=padding)
    y = layer(x)
    dense = CONV[3](grid, dense_weight(layer), stride=2, padding=padding)
    compare(y.F, picked(dense, y.C), (x.F, layer.kernel))
    assert (dense != 0).any(1).sum() == len(y.C)


def test_grid_is_cut_in_2_1():
    coords = torch.tensor([[0, 0, 0, 0], [0, 4, 1, 1]], dtype=torch.int32)
    down = v2.nn.Conv3d(5, 4, 2, stride=2)
    x = v2.SparseTensor(torch.ones(2, 5), coords)
    # The greatest x is 4: the cell of 4 and 5 is not in the grid.
    assert down(x).C.tolist() == [[0, 0, 0, 0]]
    x = v2.SparseTensor(torch.ones(2, 5), coords, spatial_range=(1, 6, 6, 6))
    y = down(x)
    assert y.C.tolist() == [[0, 0, 0, 0], [0, 2, 0, 0]]
    assert y.spatial_range == (1, 3, 3, 3) and y.dense().shape == (1, 3, 3, 3, 4)
    functional = v2.nn.functional
    functional.set_kmap_mode("hashmap")
    try:
        x = v2.SparseTensor(torch.ones(2, 5), coords)
        assert len(down(x).C) == 2
        moved = v2.SparseTensor(torch.ones(2, 5), coords - 3)
        assert down(v2.SparseTensor(torch.ones(2, 5), moved.C * (moved.C != -3))).s
    finally:
        functional.set_kmap_mode("hashmap_on_the_fly")
    negative = coords.clone()
    negative[1, 1] = -4
    with pytest.raises(ValueError, match="not negative"):
        down(v2.SparseTensor(torch.ones(2, 5), negative))


def test_rows_of_a_larger_kernel_in_1_4():
    x, grid = tensor_of(v1)
    layer = v1.nn.Conv3d(5, 4, 3, stride=2)
    y = layer(x)
    dense = CONV[3](grid, dense_weight(layer), stride=2, padding=1)
    kept = cells(y)
    assert (y.C[:, :3] % 2 == 0).all()
    inside = (kept[:, 1:] < torch.tensor([4, 4, 3])).all(1)
    close(y.F[inside], picked(dense, kept[inside]))


def test_undivided_coordinates_are_expected_in_1_4():
    x, _ = tensor_of(v1)
    wrong = v1.SparseTensor(x.F, x.C, 2)
    with pytest.raises(ValueError, match="multiples of the tensor stride"):
        v1.nn.Conv3d(5, 4, 3)(wrong)


@VERSIONS
def test_dilation_names_a_map_alone(library):
    x, grid = tensor_of(library)
    layer = library.nn.Conv3d(5, 4, 3, dilation=2)
    dense = CONV[3](grid, dense_weight(layer), padding=1)
    close(layer(x).F, picked(dense, cells(x)))


@VERSIONS
def test_negative_coordinates(library):
    x, grid = tensor_of(library)
    move = torch.tensor([0, 4, 4, 4] if library is v2 else [4, 4, 4, 0])
    moved = library.SparseTensor(x.F, (x.C - move).int())
    layer = library.nn.Conv3d(5, 4, 3)
    dense = CONV[3](grid, dense_weight(layer), padding=1)
    close(layer(moved).F, picked(dense, cells(x)))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half(dtype):
    x, grid = tensor_of(v2, dtype=dtype)
    layer = v2.nn.Conv3d(5, 4, 3).to(dtype)
    dense = CONV[3](grid.float(), dense_weight(layer).float(), padding=1)
    close(layer(x).F, picked(dense, x.C), 2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert v2.nn.Conv3d(5, 4, 3)(tensor_of(v2)[0]).F.dtype == torch.bfloat16


def test_generative_is_refused():
    x, _ = tensor_of(v2)
    layer = v2.nn.Conv3d(5, 4, 2, 2, transposed=True, generative=True)
    with pytest.raises(NotImplementedError, match="generative"):
        layer(x)


# Tensors and layers on features


@VERSIONS
def test_layers(library):
    x, _ = tensor_of(library)
    assert torch.equal(library.nn.ReLU(False)(x).F, x.F.relu())
    close(library.nn.BatchNorm(5)(x).F, nn.BatchNorm1d(5)(x.F))
    both = library.cat([x, x])
    assert torch.equal(both.F, torch.cat([x.F, x.F], 1)) and both.C is x.C
    close((x + x).F, 2 * x.F)
    batch = cells(x)[:, 0]
    rows = [x.F[batch == b] for b in range(2)]
    means = library.nn.GlobalAvgPool()(x)
    compare(means, torch.stack([each.mean(0) for each in rows]), (x.F,))
    most = library.nn.GlobalMaxPool()(x)
    compare(most, torch.stack([each.amax(0) for each in rows]), (x.F,))
    norm = library.nn.GroupNorm(1, 5)
    made = norm(x)
    for b, each in enumerate(rows):
        close(made.F[batch == b], nn.GroupNorm(1, 5)(each.T[None])[0].T)
    cropped = library.nn.SparseCrop((1, 1, 1), (4, 4, 4))(x)
    places = cells(x)[:, 1:]
    assert len(cropped.F) == ((places >= 1) & (places < 4)).all(1).sum()


def test_caches_are_shared():
    x, _ = tensor_of(v2)
    y = v2.nn.Conv3d(5, 4, 3)(x)
    assert y._caches is x._caches and ((1,) * 3, (3,) * 3, (1,) * 3, (1,) * 3) in (
        x._caches.kmaps
    )
    x._caches.own = {}
    assert y._caches.own == {}
    old, _ = tensor_of(v1)
    z = v1.nn.Conv3d(5, 4, 2, 2)(old)
    assert z.kmaps is old.kmaps and z.cmaps is old.cmaps
    assert z.cmaps[2, 2, 2] is z.C
    other = v1.SparseTensor(z.F, z.C, z.s)
    other.cmaps, other.kmaps = z.cmaps, z.kmaps
    old.cmaps.setdefault(old.s, old.C)
    assert v1.nn.Conv3d(4, 3, 2, 2, transposed=True)(other).C is old.C
    x.s = 4
    assert x.stride == (4, 4, 4)


@VERSIONS
def test_copies_build_maps_of_their_own(library):
    x, _ = tensor_of(library)
    x.feats = x.feats.detach()
    layer = library.nn.Conv3d(5, 4, 2, 2)
    y = layer(x)
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert torch.equal(layer(other).F, y.F)


# Points


def test_offsets():
    offsets = v2.nn.utils.get_kernel_offsets
    assert offsets(2, 4).tolist()[:3] == [[0, 0, 0], [0, 0, 4], [0, 4, 0]]
    assert offsets(3, 2).tolist()[:2] == [[-2, -2, -2], [0, -2, -2]]
    assert offsets((1, 3, 1), 1, 2).tolist() == [[0, -2, 0], [0, 0, 0], [0, 2, 0]]


@VERSIONS
def test_hashes_and_queries(library):
    F = library.nn.functional  # noqa: N806
    _, rows = scene(EXTENTS)
    rows = rows[:, [1, 2, 3, 0]].contiguous()
    hashes = F.sphash(rows)
    assert len(torch.unique(hashes)) == len(rows) and (hashes >= 0).all()
    # FNV-1a of four zero words, by plain integers.
    code = 14695981039346656037
    for _ in range(4):
        code = code * 1099511628211 % 2**64
    code = (code >> 60) ^ (code & 0xFFFFFFFFFFFFFFF)
    assert F.sphash(torch.zeros(1, 4, dtype=torch.int32)).item() == code
    order = torch.randperm(len(rows))
    assert torch.equal(F.sphashquery(hashes[order], hashes), order)
    offsets = library.nn.utils.get_kernel_offsets(2)
    moved = F.sphashquery(F.sphash(rows, offsets), hashes)
    assert moved.shape == (8, len(rows))
    known = {tuple(r): i for i, r in enumerate(rows.tolist())}
    expected = [
        [known.get((x + a, y + b, z + c, e), -1) for x, y, z, e in rows.tolist()]
        for a, b, c in offsets.tolist()
    ]
    assert moved.tolist() == expected
    counts = F.spcount(torch.tensor([0, 2, 2, -1], dtype=torch.int32), 4)
    assert counts.tolist() == [1, 0, 2, 0] and counts.dtype == torch.int32


def test_means_and_weights():
    F = v2.nn.functional  # noqa: N806
    features = torch.randn(4, 3, requires_grad=True)
    places = torch.tensor([0, 2, 2, 0])
    means = F.spvoxelize(features, places, F.spcount(places.int(), 3))
    rows = features[[0, 3]].mean(0), torch.zeros(3), features[[1, 2]].mean(0)
    compare(means, torch.stack(rows), (features,))
    points = torch.rand(6, 3) * 4
    table = torch.randint(-1, 4, (6, 8))
    weights = F.calc_ti_weights(points, table, scale=2)
    part = points / 2 - torch.floor(points / 2)
    for place, row in enumerate(table):
        sides = torch.stack([1 - part[place], part[place]])
        each = [
            sides[k >> 2, 0] * sides[k >> 1 & 1, 1] * sides[k & 1, 2] for k in range(8)
        ]
        each = torch.stack(each) * (row >= 0)
        close(weights[place], each / (each.sum() + 1e-8))
    old = v1.nn.functional.calc_ti_weights(points, table.T, scale=2)
    close(old, weights.T)
    made = F.spdevoxelize(features, table, weights)
    chosen = features[table.clamp(min=0)] * (weights * (table >= 0))[..., None]
    compare(made, chosen.sum(1), (features,))


def test_table():
    _, rows = scene(EXTENTS)
    rows = rows[:, [1, 2, 3, 0]].contiguous()
    table = v2.backend.GPUHashTable(torch.zeros(1), torch.zeros(1))
    table.insert_coords(rows)
    make = v2.utils.make_tensor
    size = make((2, 2, 2), device="cpu", dtype=torch.int32)
    ones = make((1, 1, 1), device="cpu", dtype=torch.int32)
    found = table.lookup_coords(rows, size, ones, 8)
    assert found.shape[0] % 128 == 0 and found.dtype == torch.int32
    assert found[: len(rows), 0].tolist() == list(range(1, len(rows) + 1))
    known = {tuple(r): i + 1 for i, r in enumerate(rows.tolist())}
    above = [known.get((x, y, z + 1, b), 0) for x, y, z, b in rows.tolist()]
    assert found[: len(rows), 1].tolist() == above


# Utilities


def test_quantize_and_collate():
    points = np.array(
        [[0.1, 0.1, 5.0], [1.2, 0.3, 5.5], [0.4, 0.2, 5.9], [2.1, 0, 4.0]]
    )
    quantize = v2.utils.quantize.sparse_quantize
    coords, index, inverse = quantize(points, return_index=True, return_inverse=True)
    assert coords.tolist() == [[0, 0, 5], [1, 0, 5], [2, 0, 4]]
    assert index.tolist() == [0, 1, 3] and inverse.tolist() == [0, 1, 0, 2]
    old = v1.utils.quantize.sparse_quantize(points, 0.5)
    assert old.min() == 0 and len(old) == 4
    for library, column in ((v2, 0), (v1, 3)):
        each = [library.SparseTensor(np.ones((3, 2), np.float32), coords)] * 2
        made = library.utils.collate.sparse_collate(each)
        assert made.C.shape == (6, 4) and made.C.dtype == torch.int32
        assert made.C[:, column].tolist() == [0, 0, 0, 1, 1, 1]
        data = [{"x": one, "name": "a", "y": np.zeros(2)} for one in each]
        batch = library.utils.collate.sparse_collate_fn(data)
        assert len(batch["x"].F) == 6 and batch["name"] == ["a", "a"]
        assert batch["y"].shape == (2, 2)
    assert v2.utils.make_ntuple(2, 3) == (2, 2, 2)


@pytest.mark.parametrize("library", ("torchsparse", "torchsparse==1.4"))
def test_imports_by_name(library):
    compat.install(library)
    try:
        import torchsparse
        import torchsparse.nn as spnn
        import torchsparse.nn.functional as F  # noqa: N812
        from torchsparse.nn.functional.devoxelize import calc_ti_weights
        from torchsparse.nn.utils import fapply, get_kernel_offsets
        from torchsparse.utils.collate import sparse_collate_fn
        from torchsparse.utils.quantize import sparse_quantize

        assert torchsparse.__version__ == ("1.4.0" if "==" in library else "2.1.0")
        assert F.calc_ti_weights is calc_ti_weights and spnn.functional is F
        assert all((fapply, get_kernel_offsets, sparse_collate_fn, sparse_quantize))
        assert torchsparse.SparseTensor.batch_column == (3 if "==" in library else 0)
    finally:
        compat.uninstall(library)
