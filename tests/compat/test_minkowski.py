"""MinkowskiEngine's tensors and layers against dense forms in PyTorch."""

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

import mlx_lattice as ml
from mlx_lattice import compat
from mlx_lattice.compat import MinkowskiEngine as ME
from mlx_lattice.compat.MinkowskiEngine import MinkowskiFunctional as MEF
from mlx_lattice.compat.MinkowskiEngine.modules import resnet_block

EXTENTS = {1: (40,), 2: (10, 12), 3: (8, 8, 6), 4: (4, 4, 4, 2)}
nn = torch.nn


def tensor_of(dims=3, channels=5, **facts):
    features, coords = scene(EXTENTS[dims], channels, **facts)
    x = ME.SparseTensor(features, coordinates=coords)
    return x, spread(features, coords, EXTENTS[dims], facts.get("batch", 2))


def dense_weight(layer, transposed=False):
    """The kernel, whose first axis is the fastest, as PyTorch takes it."""
    kernel, size = layer.kernel, layer.kernel_generator.kernel_size
    box = kernel.reshape(*reversed(size), *kernel.shape[-2:])
    axes = range(len(size) - 1, -1, -1)
    last = (len(size), len(size) + 1) if transposed else (len(size) + 1, len(size))
    return box.permute(*last, *axes)


def cells(x):
    """Rows of a tensor in cells of its stride."""
    return x.C // torch.tensor([1, *x.tensor_stride])


def compare(y, expected, leaves, tolerance=1e-5):
    close(y, expected, tolerance)
    for got, other in zip(
        gradients(y, leaves), gradients(expected, leaves), strict=True
    ):
        close(got, other, tolerance)


# Convolution


@pytest.mark.parametrize("dims", (1, 2, 3))
@pytest.mark.parametrize("size, dilation", ((3, 1), (5, 1), (3, 2)))
def test_convolution_of_stride_1(dims, size, dilation):
    x, grid = tensor_of(dims)
    sizes = {"kernel_size": size, "dilation": dilation, "bias": True}
    layer = ME.MinkowskiConvolution(5, 4, dimension=dims, **sizes)
    assert tuple(layer.kernel.shape) == (size**dims, 5, 4)
    assert tuple(layer.bias.shape) == (1, 4)
    y = layer(x)
    facts = {"padding": size // 2 * dilation, "dilation": dilation}
    dense = CONV[dims](grid, dense_weight(layer), layer.bias[0], **facts)
    compare(y.F, picked(dense, x.C), (x.F, layer.kernel, layer.bias))
    assert y.coordinate_map_key == x.coordinate_map_key
    assert y.coordinate_manager is x.coordinate_manager


@pytest.mark.parametrize("dims", (1, 2, 3))
@pytest.mark.parametrize("size", (1, 2, 3))
def test_strided_and_back(dims, size):
    x, grid = tensor_of(dims)
    down = ME.MinkowskiConvolution(5, 4, size, stride=2, dimension=dims)
    up = ME.MinkowskiConvolutionTranspose(4, 3, size, stride=2, dimension=dims)
    assert tuple(down.kernel.shape) == (size**dims, 5, 4)
    y = down(x)
    assert y.tensor_stride == [2] * dims
    assert torch.equal(
        torch.unique(y.C, dim=0),
        torch.unique(x.C // 2 * 2 * torch.tensor([0, *[1] * dims])
                     + x.C * torch.tensor([1, *[0] * dims]), dim=0),
    )  # fmt: skip
    padding = size // 2 if size % 2 else 0
    dense = CONV[dims](grid, dense_weight(down), stride=2, padding=padding)
    compare(y.F, picked(dense, cells(y)), (x.F, down.kernel))
    z = up(y)
    assert z.coordinate_map_key == x.coordinate_map_key
    half = [n // 2 for n in EXTENTS[dims]]
    facts = {"stride": 2, "padding": padding, "output_padding": 2 - size % 2 - 1}
    facts["output_padding"] = 1 if size % 2 else 0
    wide = TRANSPOSED[dims](
        spread(y.F, cells(y), half), dense_weight(up, True), **facts
    )
    compare(z.F, picked(wide, x.C), (x.F, down.kernel, up.kernel))


def test_product():
    x, _ = tensor_of()
    layer = ME.MinkowskiConvolution(5, 4, kernel_size=1, bias=True, dimension=3)
    assert tuple(layer.kernel.shape) == (5, 4)
    close(layer(x).F, x.F @ layer.kernel + layer.bias)


def test_four_axes():
    x, _ = tensor_of(4)
    layer = ME.MinkowskiConvolution(5, 4, [1, 1, 1, 2], stride=1, dimension=4)
    y, rows = layer(x), {tuple(r): i for i, r in enumerate(x.C.tolist())}
    expected = x.F @ layer.kernel[0]
    for place, (*fixed, last) in enumerate(x.C.tolist()):
        found = rows.get((*fixed, last + 1))
        if found is not None:
            expected[place] = expected[place] + x.F[found] @ layer.kernel[1]
    close(y.F, expected)
    with pytest.raises(NotImplementedError, match="1 to 4 spatial axes; got 6"):
        ME.SparseTensor(torch.ones(1, 1), torch.zeros(1, 7, dtype=torch.int32))


def test_cross():
    x, grid = tensor_of()
    kind = ME.RegionType.HYPER_CROSS
    kernel = ME.KernelGenerator(3, region_type=kind, dimension=3)
    layer = ME.MinkowskiConvolution(5, 4, kernel_generator=kernel, dimension=3)
    assert tuple(layer.kernel.shape) == (7, 5, 4)
    weight = torch.zeros(4, 5, 3, 3, 3)
    # The centre, then each axis: above, below.
    places = [
        (1, 1, 1),
        (2, 1, 1),
        (0, 1, 1),
        (1, 2, 1),
        (1, 0, 1),
        (1, 1, 2),
        (1, 1, 0),
    ]
    for k, place in enumerate(places):
        weight[(slice(None), slice(None), *place)] = layer.kernel[k].T
    close(layer(x).F, picked(CONV[3](grid, weight, padding=1), x.C))
    assert ME.RegionType(1) is ME.RegionType.HYPERCROSS is kind


def test_offsets_of_its_own_and_hybrid():
    x, _ = tensor_of()
    custom = ME.KernelGenerator(
        region_type=ME.RegionType.CUSTOM,
        region_offsets=torch.tensor([[0, 0, 0], [1, 0, 2]], dtype=torch.int32),
        dimension=3,
    )
    layer = ME.MinkowskiConvolution(5, 4, kernel_generator=custom, dimension=3)
    rows = {tuple(r): i for i, r in enumerate(x.C.tolist())}
    expected = x.F @ layer.kernel[0]
    for place, (b, i, j, k) in enumerate(x.C.tolist()):
        if (found := rows.get((b, i + 1, j, k + 2))) is not None:
            expected[place] = expected[place] + x.F[found] @ layer.kernel[1]
    close(layer(x).F, expected)
    kinds = [ME.RegionType.HYPER_CUBE] * 2 + [ME.RegionType.HYPER_CROSS]
    facts = {"region_type": ME.RegionType.HYBRID, "axis_types": kinds, "dimension": 3}
    assert ME.KernelGenerator(3, **facts).kernel_volume == 11


def test_generative():
    x, _ = tensor_of()
    down = ME.MinkowskiConvolution(5, 4, 2, stride=2, dimension=3)
    up = ME.MinkowskiGenerativeConvolutionTranspose(4, 3, 2, stride=2, dimension=3)
    y = down(x)
    z = up(y)
    assert z.tensor_stride == [1, 1, 1] and len(z) == 8 * len(y)
    assert z.coordinate_map_key != x.coordinate_map_key
    half = [n // 2 for n in EXTENTS[3]]
    wide = TRANSPOSED[3](spread(y.F, cells(y), half), dense_weight(up, True), stride=2)
    compare(z.F, picked(wide, z.C), (x.F, down.kernel, up.kernel))


def test_transposed_without_finer_rows_makes_them():
    features, coords = scene(EXTENTS[3])
    coords[:, 1:] *= 2
    x = ME.SparseTensor(features, coords, tensor_stride=2)
    up = ME.MinkowskiConvolutionTranspose(5, 3, 3, stride=2, dimension=3)
    y = up(x)
    assert y.tensor_stride == [1, 1, 1] and len(y) > len(x)
    with pytest.raises(ValueError, match="multiple"):
        up(y)


def test_expanded_coordinates():
    x, _ = tensor_of(rows=20)
    layer = ME.MinkowskiConvolution(5, 4, 3, expand_coordinates=True, dimension=3)
    y, rows = layer(x), set(map(tuple, x.C.tolist()))
    reached = {
        (b, i + a, j + c, k + d)
        for b, i, j, k in rows
        for a in (-1, 0, 1)
        for c in (-1, 0, 1)
        for d in (-1, 0, 1)
    }
    assert set(map(tuple, y.C.tolist())) == reached


def test_coordinates_of_the_output():
    x, grid = tensor_of()
    other = ME.SparseTensor(
        torch.ones(3, 1),
        torch.tensor([[0, 1, 1, 1], [1, 4, 4, 2], [0, 7, 7, 5]], dtype=torch.int32),
        coordinate_manager=x.coordinate_manager,
    )
    layer = ME.MinkowskiConvolution(5, 4, 3, dimension=3)
    dense = CONV[3](grid, dense_weight(layer), padding=1)
    for given in (other, other.coordinate_map_key, other.C):
        y = layer(x, coordinates=given)
        close(y.F, picked(dense, other.C))
        assert torch.equal(y.C, other.C)
    # Onto rows of a finer stride than the input's.
    coarse = ME.MinkowskiConvolution(5, 4, 2, stride=2, dimension=3)(x)
    fine = ME.MinkowskiConvolution(4, 4, 3, dimension=3)(coarse, coordinates=x)
    even = (x.C[:, 1:] % 2 == 0).all(1)
    assert torch.equal((fine.F != 0).any(1) & ~even, torch.zeros(len(x), dtype=bool))


def test_depthwise():
    x, grid = tensor_of()
    layer = ME.MinkowskiChannelwiseConvolution(5, 3, bias=True, dimension=3)
    assert tuple(layer.kernel.shape) == (27, 5)
    weight = layer.kernel.reshape(3, 3, 3, 5).permute(3, 2, 1, 0)[:, None]
    dense = CONV[3](grid, weight, layer.bias[0], padding=1, groups=5)
    compare(layer(x).F, picked(dense, x.C), (x.F, layer.kernel))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half(dtype):
    x, grid = tensor_of(dtype=dtype)
    layer = ME.MinkowskiConvolution(5, 4, 3, dimension=3).to(dtype)
    dense = CONV[3](grid.float(), dense_weight(layer).float(), padding=1)
    close(layer(x).F, picked(dense, x.C), 2e-2)
    y, _ = tensor_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = ME.MinkowskiConvolution(5, 4, 3, dimension=3)(y)
    assert made.dtype == torch.bfloat16


def test_trace_sees_layers():
    x, _ = tensor_of()
    net = nn.Sequential(ME.MinkowskiConvolution(5, 4, 3, dimension=3))
    with ml.trace() as trace:
        net(x)
    assert len(trace.table()) > 0


# Pooling


@pytest.mark.parametrize("size", (2, 3))
def test_pooling(size):
    x, grid = tensor_of()
    ones = spread(torch.ones(len(x), 1), x.C, EXTENTS[3])
    facts = {"stride": 2, "padding": size // 2 if size % 2 else 0}
    kernel = torch.ones(1, 1, size, size, size)

    def sums(values):
        each = [
            CONV[3](values[:, c : c + 1], kernel, **facts)
            for c in range(values.shape[1])
        ]
        return torch.cat(each, 1)

    y = ME.MinkowskiSumPooling(size, stride=2, dimension=3)(x)
    compare(y.F, picked(sums(grid), cells(y)), (x.F,))
    y = ME.MinkowskiAvgPooling(size, stride=2, dimension=3)(x)
    compare(y.F, picked(sums(grid) / sums(ones), cells(y)), (x.F,))
    low = torch.where(ones > 0, grid, -1e9)
    most = nn.functional.max_pool3d(low, size, **facts)
    y = ME.MinkowskiMaxPooling(size, stride=2, dimension=3)(x)
    compare(y.F, picked(most, cells(y)), (x.F,))
    back = ME.MinkowskiPoolingTranspose(2, stride=2, dimension=3)(y)
    rows = {tuple(r): i for i, r in enumerate(y.C.tolist())}
    order = [rows[b, i // 2 * 2, j // 2 * 2, k // 2 * 2] for b, i, j, k in x.C.tolist()]
    close(back.F, y.F[torch.tensor(order)])
    assert back.coordinate_map_key == x.coordinate_map_key


def test_kernel_as_large_as_the_stride_pools_cells():
    x, _ = tensor_of()
    y = ME.MinkowskiSumPooling(3, stride=3, dimension=3)(x)
    close(y.F.sum(0), x.F.sum(0))  # a centred kernel would miss rows


def test_batch_elements():
    x, _ = tensor_of(batch=3)
    rows = [x.F[x.C[:, 0] == b] for b in range(3)]
    means = torch.stack([each.mean(0) for each in rows])
    mean = ME.MinkowskiGlobalPooling()(x)
    compare(mean.F, means, (x.F,))
    assert mean.C.tolist() == [[b, 0, 0, 0] for b in range(3)]
    assert mean.tensor_stride == [0, 0, 0]
    most = torch.stack([each.amax(0) for each in rows])
    compare(ME.MinkowskiGlobalMaxPooling()(x).F, most, (x.F,))
    total = torch.stack([each.sum(0) for each in rows])
    compare(ME.MinkowskiGlobalSumPooling()(x).F, total, (x.F,))
    batch = x.C[:, 0].long()
    close(ME.MinkowskiBroadcast()(x, mean).F, means[batch])
    close(ME.MinkowskiBroadcastAddition()(x, mean).F, x.F + means[batch])
    close(ME.MinkowskiBroadcastMultiplication()(x, mean).F, x.F * means[batch])
    joined = torch.cat([x.F, means[batch]], 1)
    compare(ME.MinkowskiBroadcastConcatenation()(x, mean).F, joined, (x.F,))
    other, _ = tensor_of(batch=3)
    with pytest.raises(AssertionError, match="one coordinate manager"):
        ME.MinkowskiBroadcast()(x, ME.MinkowskiGlobalPooling()(other))
    parts = zip(x.decomposed_features, x.decomposition_permutations, strict=True)
    for b, (part, order) in enumerate(parts):
        assert torch.equal(part, x.F[order]) and (batch[order] == b).all()
    coords, features = x.decomposed_coordinates_and_features
    assert torch.equal(coords[1], x.coordinates_at(1))
    assert torch.equal(features[1], x.features_at(1))


def test_a_batch_element_without_rows():
    x, _ = tensor_of(batch=3)
    kept = ME.MinkowskiPruning()(x, x.C[:, 0] != 1)
    pooled = ME.MinkowskiGlobalAvgPooling()(kept)
    assert len(pooled) == 3 and (pooled.F[1] == 0).all()
    assert [len(each) for each in kept.decomposed_features][1] == 0
    last = ME.MinkowskiPruning()(x, x.C[:, 0] != 2)
    assert len(ME.MinkowskiGlobalMaxPooling()(last)) == 3


# Norms and features


def test_norms():
    x, _ = tensor_of()
    norm = ME.MinkowskiBatchNorm(5, momentum=0.02)
    assert set(norm.state_dict()) >= {"bn.weight", "bn.bias", "bn.running_mean"}
    close(norm(x).F, nn.BatchNorm1d(5)(x.F))
    layer = ME.MinkowskiInstanceNorm(5, dimension=3)
    nn.init.normal_(layer.weight)
    expected = torch.empty_like(x.F)
    for b in range(2):
        rows = x.C[:, 0] == b
        var, mean = torch.var_mean(x.F[rows], 0, correction=0)
        expected[rows] = (x.F[rows] - mean) / torch.sqrt(var + 1e-8)
    compare(layer(x).F, expected * layer.weight + layer.bias, (x.F, layer.weight))
    net = nn.Sequential(
        ME.MinkowskiBatchNorm(5), nn.Sequential(ME.MinkowskiBatchNorm(5))
    )
    converted = ME.MinkowskiSyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(converted[1][0], ME.MinkowskiSyncBatchNorm)
    assert set(converted.state_dict()) == set(net.state_dict())


def test_layers_on_features():
    x, _ = tensor_of()
    assert torch.equal(ME.MinkowskiReLU(inplace=False)(x).F, x.F.relu())
    assert torch.equal(ME.MinkowskiELU()(x).F, nn.functional.elu(x.F))
    assert torch.equal(MEF.relu(x).F, x.F.relu())
    assert torch.equal(MEF.leaky_relu(x, 0.3).F, nn.functional.leaky_relu(x.F, 0.3))
    linear = ME.MinkowskiLinear(5, 3)
    assert set(linear.state_dict()) == {"linear.weight", "linear.bias"}
    assert torch.equal(linear(x).F, linear.linear(x.F))
    joined = ME.cat(x, x)
    assert torch.equal(joined.F, torch.cat([x.F, x.F], 1))
    assert torch.equal(ME.MinkowskiOps.cat([x, x, x]).F[:, 10:], x.F)
    close(ME.mean(x, x).F, x.F)
    close(ME.sum(x, x).F, 2 * x.F)
    with pytest.raises(AssertionError, match="at least two"):
        ME.cat(x)
    pruned = ME.MinkowskiPruning()(x, torch.ones(len(x), dtype=torch.bool))
    with pytest.raises(AssertionError, match="same coordinate_map_key"):
        ME.cat(x, pruned)


# Tensors


def test_keys_and_strides():
    x, _ = tensor_of()
    assert x.coordinate_map_key.get_key() == ([1, 1, 1], "")
    again = ME.SparseTensor(x.F, x.C, coordinate_manager=x.coordinate_manager)
    assert again.coordinate_map_key != x.coordinate_map_key
    down = ME.MinkowskiConvolution(5, 4, 2, stride=2, dimension=3)
    wide = ME.MinkowskiConvolution(5, 4, 3, stride=2, dimension=3)
    # Kernels of one stride share their rows.
    assert down(x).coordinate_map_key == wide(x).coordinate_map_key
    assert down(down_of := x).tensor_stride == [2, 2, 2] and down_of is x
    pruned = ME.MinkowskiPruning()(x, x.F[:, 0] > 0)
    assert pruned.coordinate_map_key.get_key() == ([1, 1, 1], "pruned")
    assert down(pruned).coordinate_map_key.get_key() == ([2, 2, 2], "pruned")
    up = ME.MinkowskiConvolutionTranspose(4, 4, 2, stride=2, dimension=3)
    # Back onto the input's rows, although the coarse rows are those of a part of it.
    assert up(down(pruned)).coordinate_map_key == x.coordinate_map_key
    assert not isinstance(up, ME.MinkowskiConvolution)
    same = ME.SparseTensor(
        x.F, coordinate_map_key=x.coordinate_map_key,
        coordinate_manager=x.coordinate_manager,
    )  # fmt: skip
    assert torch.equal(same.C, x.C) and same.D == same.dimension == 3
    with pytest.raises(ValueError, match="coordinate_map_key with coordinate_manager"):
        ME.SparseTensor(x.F)
    with pytest.raises(AssertionError, match="either coordinates or"):
        ME.SparseTensor(x.F, x.C, coordinate_map_key=x.coordinate_map_key)


def test_negative_coordinates():
    features, coords = scene(EXTENTS[3])
    grid = spread(features, coords, EXTENTS[3])
    moved = coords - torch.tensor([0, 4, 4, 4], dtype=torch.int32)
    x = ME.SparseTensor(features, moved)
    layer = ME.MinkowskiConvolution(5, 4, 3, stride=2, dimension=3)
    y = layer(x)
    dense = CONV[3](grid, dense_weight(layer), stride=2, padding=1)
    place = cells(y) + torch.tensor([0, 2, 2, 2])
    close(y.F, picked(dense, place))


REPEATED = torch.tensor(
    [[0, 0, 0], [0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.int32
)


def test_repeated_rows():
    features = torch.arange(10.0).reshape(5, 2)
    mode = ME.SparseTensorQuantizationMode
    first = ME.SparseTensor(features, REPEATED)
    assert first.F.tolist() == [[0, 1], [2, 3], [6, 7]]
    assert first.C.tolist() == [[0, 0, 0], [0, 1, 1], [1, 0, 0]]
    assert first.unique_index.tolist() == [0, 1, 3]
    assert first.inverse_mapping.tolist() == [0, 1, 0, 2, 0]
    rows = [features[[0, 2, 4]], features[[1]], features[[3]]]
    for name, function in (("UNWEIGHTED_SUM", torch.sum), ("MAX_POOL", torch.amax)):
        made = ME.SparseTensor(
            features, REPEATED, quantization_mode=getattr(mode, name)
        )
        close(made.F, torch.stack([function(each, dim=0) for each in rows]))
    mean = mode.UNWEIGHTED_AVERAGE
    made = ME.SparseTensor(features, REPEATED, quantization_mode=mean)
    close(made.F, torch.stack([each.mean(0) for each in rows]))
    field = made.slice(made)
    assert len(field) == 5 and torch.equal(field.F[[0, 2, 4]], made.F[[0, 0, 0]])
    with pytest.warns(UserWarning, match="floored"):
        floats = ME.SparseTensor(features, REPEATED + 0.5)
    assert torch.equal(floats.C, first.C)


def test_arithmetic():
    x, _ = tensor_of()
    close((x * x + x - x / 2.0).F, x.F * x.F + x.F - x.F / 2)
    close((x + 1.0).F, x.F + 1)
    part = ME.MinkowskiPruning()(x, x.C[:, 1] > 2)
    manager, leaf = x.coordinate_manager, x.F
    moved = x.C + torch.tensor([0, 1, 0, 0], dtype=torch.int32)
    other = ME.SparseTensor(x.F.detach().clone(), moved, coordinate_manager=manager)
    y = part - other
    wide = (9, *EXTENTS[3][1:])
    expected = spread(part.F, part.C, wide) - spread(other.F, other.C, wide)
    compare(y.F, picked(expected, y.C), (leaf,))
    union = ME.MinkowskiUnion()(part, other, x)
    expected = (
        spread(part.F, part.C, wide)
        + spread(other.F, other.C, wide)
        + spread(x.F, x.C, wide)
    )
    compare(union.F, picked(expected, union.C), (leaf,))
    alone, _ = tensor_of()
    for function in (lambda: x + alone, lambda: ME.MinkowskiUnion()(x, alone)):
        with pytest.raises(AssertionError, match="one coordinate manager"):
            function()


def test_sum_in_place():
    x, _ = tensor_of()
    y = ME.MinkowskiReLU()(x)
    held, expected = y.F, y.F + x.F
    y += x
    assert y.F is held
    close(held, expected)
    pruned = ME.MinkowskiPruning()(x, x.C[:, 1] > 2)
    with pytest.raises(AssertionError, match="same coordinate_map_key"):
        y += pruned


def test_detach_changes_the_tensor():
    x, _ = tensor_of()
    y = ME.MinkowskiReLU()(x)
    assert y.detach() is y and not y.requires_grad
    assert y.to("cpu") is y and y.device.type == "cpu" and y.shape == (len(y), 5)


def test_dense_and_sparse():
    x, grid = tensor_of()
    made, low, stride = x.dense(shape=torch.Size([2, 5, *EXTENTS[3]]))
    assert torch.equal(made, grid) and stride.tolist() == [1, 1, 1]
    y = ME.MinkowskiSumPooling(2, stride=2, dimension=3)(x)
    half = [n // 2 for n in EXTENTS[3]]
    made, low, stride = y.dense(shape=torch.Size([2, 5, *half]))
    assert torch.equal(made, spread(y.F, cells(y), half))
    assert stride.tolist() == [2, 2, 2]
    given = ME.MinkowskiToDenseTensor(torch.Size([2, 5, *EXTENTS[3]]))(x)
    assert torch.equal(ME.to_sparse(given).dense(grid.shape)[0], grid)
    every = ME.MinkowskiToSparseTensor(remove_zeros=False)(given)
    assert len(every) == 2 * np.prod(EXTENTS[3])
    coo, low, _ = x.sparse()
    close(coo.to_dense().movedim(-1, 1), grid[(..., *map(slice, coo.shape[1:-1]))])
    moved = ME.SparseTensor(x.F, x.C - torch.tensor([0, 4, 4, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match="min_coordinate"):
        moved.dense()
    low = torch.IntTensor([-4, -4, -4])
    made, _, _ = moved.dense(grid.shape, min_coordinate=low)
    assert torch.equal(made, grid)


def test_features_at_coordinates():
    x, grid = tensor_of()
    points = torch.rand(50, 4) * torch.tensor([0.0, 7, 7, 5])
    points[:, 0] = torch.randint(0, 2, (50,))
    extents = torch.tensor(EXTENTS[3])
    for y, stride in ((x, 1), (ME.MinkowskiSumPooling(2, 2, dimension=3)(x), 2)):
        dense = spread(y.F, cells(y), (extents // stride).tolist())
        # grid_sample's corners are rows 0 and n - 1; last axis first.
        place = points[:, 1:] / stride / (extents // stride - 1) * 2 - 1
        expected = [
            nn.functional.grid_sample(
                dense[b : b + 1], place[None, None, None, i : i + 1].flip(-1),
                align_corners=True, padding_mode="zeros",
            ).reshape(-1)
            for i, b in enumerate(points[:, 0].long())
        ]  # fmt: skip
        compare(y.features_at_coordinates(points), torch.stack(expected), (x.F,), 1e-4)
    close(ME.MinkowskiInterpolation()(x, points), x.features_at_coordinates(points))


def test_fields():
    points = torch.tensor(
        [[0, 0.2, 0.3], [0, 0.9, 0.1], [0, 1.5, -0.5], [1, 0.1, 0.1], [0, 2.5, 2.5]]
    )
    features = torch.randn(5, 3, requires_grad=True)
    field = ME.TensorField(features, points)
    x = field.sparse()
    assert x.C.tolist() == [[0, 0, 0], [0, 1, -1], [1, 0, 0], [0, 2, 2]]
    assert x.coordinate_map_key.get_key() == ([1, 1], "")
    close(x.F[0], features[:2].mean(0))
    assert field.inverse_mapping(x.coordinate_map_key).tolist() == [0, 0, 1, 2, 3]
    coarse = ME.MinkowskiMaxPooling(2, 2, dimension=2)(x)
    y = coarse.slice(field)
    assert isinstance(y, ME.TensorField) and torch.equal(y.C, points)
    order = [tuple(r) for r in coarse.C.tolist()]
    rows = [
        order.index(r) for r in ((0, 0, 0), (0, 0, 0), (0, 0, -2), (1, 0, 0), (0, 2, 2))
    ]
    compare(y.F, coarse.F[torch.tensor(rows)], (features,))
    beside = x.cat_slice(field)
    assert torch.equal(beside.F[:, 3:], features)
    assert len(ME.cat(field, field).F[0]) == 6
    assert isinstance(ME.MinkowskiReLU(inplace=False)(field), ME.TensorField)
    assert len(ME.MinkowskiGlobalMaxPooling()(field)) == 2
    assert [len(each) for each in field.decomposed_features] == [4, 1]
    assert len(field.sparse(tensor_stride=2)) == 4


def test_splat():
    points = torch.tensor([[0, 0.25, 0.5], [0, 1.0, 0.5], [1, 0.0, 0.0]])
    features = torch.randn(3, 2, requires_grad=True)
    field = ME.TensorField(features, points)
    x = field.splat()
    rows = [tuple(r) for r in x.C.tolist()]
    expected = torch.zeros(len(rows), 2)
    for feature, (b, i, j) in zip(features, points.tolist(), strict=True):
        for a in (int(i), int(i) + 1):
            for c in (int(j), int(j) + 1):
                share = (1 - abs(i - a)) * (1 - abs(j - c))
                place = torch.tensor([rows.index((b, a, c))])
                expected = expected.index_add(0, place, feature[None] * share)
    compare(x.F, expected, (features,))
    layer = ME.MinkowskiInterpolation(return_kernel_map=True, return_weights=True)
    values, (i, o), weights = layer(x, points)
    made = torch.zeros(3, 2).index_add(0, o.long(), x.F[i.long()] * weights[:, None])
    compare(values, made, (features,))
    close(x.interpolate(field).F, values)


def test_manager():
    x, _ = tensor_of()
    manager, key = x.coordinate_manager, x.coordinate_map_key
    to = manager.stride(key, 2)
    maps = manager.kernel_map(key, to, stride=2, kernel_size=2)
    fine, coarse = manager.get_coordinates(key), manager.get_coordinates(to)
    for k, (i, o) in maps.items():
        offset = torch.tensor([0, k % 2, k // 2 % 2, k // 4])
        assert torch.equal(fine[i.long()], (coarse[o.long()] + offset).int())
    pooled = manager.kernel_map(key, to, stride=2, kernel_size=2, is_pool=True)
    assert set(pooled) == {0} and pooled[0].shape == (2, len(x))
    i, o = manager.stride_map(key, to)
    assert torch.equal(coarse[o][:, 1:], fine[i][:, 1:] // 2 * 2)
    made, (unique, inverse) = manager.insert_and_map(fine, tensor_stride=[1, 1, 1])
    assert made != key and torch.equal(unique, inverse)
    assert torch.equal(manager.get_coordinates([2, 2, 2]), coarse)
    with pytest.raises(RuntimeError, match="names no coordinate map"):
        manager.get_coordinates(ME.CoordinateMapKey([8, 8, 8], ""))
    copy = manager.get_coordinates(key)
    copy += 1
    assert torch.equal(manager.get_coordinates(key), fine)


def test_global_manager():
    mode = ME.SparseTensorOperationMode
    ME.set_sparse_tensor_operation_mode(mode.SHARE_COORDINATE_MANAGER)
    try:
        x, _ = tensor_of()
        y, _ = tensor_of(seed=1)
        assert x.coordinate_manager is y.coordinate_manager
        assert len(x + y) > len(x)
    finally:
        ME.clear_global_coordinate_manager()
        ME.set_sparse_tensor_operation_mode(mode.SEPARATE_COORDINATE_MANAGER)


# Utilities


def test_sparse_quantize():
    points = np.array([[0.1, 0.1], [1.2, 0.3], [0.4, 0.2], [-0.1, 0.0]])
    quantize = ME.utils.sparse_quantize
    assert quantize(points).tolist() == [[0, 0], [1, 0], [-1, 0]]
    assert isinstance(quantize(points), torch.Tensor)
    coords, features, index, inverse = quantize(
        points, np.arange(4)[:, None], return_index=True, return_inverse=True
    )
    assert features.tolist() == [[0], [1], [3]]
    assert index.tolist() == [0, 1, 3] and inverse.tolist() == [0, 1, 0, 2]
    labels = np.array([1, 2, 5, 4], dtype=np.int32)
    coords, found = quantize(points, labels=labels, ignore_label=-7)
    assert isinstance(coords, np.ndarray) and found.tolist() == [-7, 2, 4]
    assert quantize(points, quantization_size=2).tolist() == [[0, 0], [-1, 0]]
    tensor = torch.from_numpy(points).float()
    size = [1.0, 0.25]
    assert quantize(tensor, quantization_size=size)[1].tolist() == [1, 1]
    only = quantize(tensor, return_index=True, return_maps_only=True)
    assert only.tolist() == [0, 1, 3]
    with pytest.raises(AssertionError, match="return_index"):
        quantize(points, return_inverse=True)


def test_batches():
    samples = [np.array([[0.5, 1.5]]), np.array([[-0.5, 2.0], [3.0, 4.0]])]
    made = ME.utils.batched_coordinates(samples)
    assert made.tolist() == [[0, 0, 1], [1, -1, 2], [1, 3, 4]]
    assert made.dtype == torch.int32
    floats = ME.utils.batched_coordinates(samples, dtype=torch.float32)
    assert floats[1].tolist() == [1.0, -0.5, 2.0]
    features = [np.ones((1, 2)), np.zeros((2, 2))]
    labels = [np.array([3]), np.array([4, 5])]
    coords, joined, found = ME.utils.sparse_collate(samples, features, labels)
    assert joined.shape == (3, 2) and found.tolist() == [3, 4, 5]
    _, _, names = ME.utils.sparse_collate(samples, features, ["a", "b"])
    assert names == ["a", "b"]
    data = list(zip(samples, features, labels, strict=True))
    assert torch.equal(ME.utils.batch_sparse_collate(data)[0], coords)
    assert len(ME.utils.SparseCollation(limit_numpoints=2)(data)[0]) == 1
    with pytest.raises(AssertionError, match="same number of rows"):
        ME.utils.sparse_collate(samples, features[:1])


def test_kaiming():
    kernel = torch.empty(27, 64, 32)
    ME.utils.kaiming_normal_(kernel, mode="fan_out", nonlinearity="relu")
    assert abs(float(kernel.std()) - (2 / (27 * 32)) ** 0.5) < 1e-3
    flat = torch.empty(400, 100)
    ME.utils.kaiming_normal_(flat, nonlinearity="relu")
    assert abs(float(flat.std()) - (2 / 100) ** 0.5) < 5e-3
    hashes = ME.utils.fnv_hash_vec(np.array([[1, 2], [2, 1], [1, 2]]))
    assert hashes[0] == hashes[2] != hashes[1]


# Nets


def test_residual_blocks():
    x, _ = tensor_of()
    down = nn.Sequential(
        ME.MinkowskiConvolution(5, 8, 1, stride=2, dimension=3),
        ME.MinkowskiBatchNorm(8),
    )
    block = resnet_block.BasicBlock(5, 8, stride=2, downsample=down, dimension=3)
    y = block(x)
    assert y.tensor_stride == [2, 2, 2] and y.shape[1] == 8
    names = {name.split(".")[0] for name in block.state_dict()}
    assert names == {"conv1", "norm1", "conv2", "norm2", "downsample"}
    out = block.norm2(block.conv2(MEF.relu(block.norm1(block.conv1(x)))))
    close(y.F, (out.F + down(x).F).relu())
    assert resnet_block.Bottleneck(32, 8, dimension=3)(
        ME.MinkowskiConvolution(5, 32, 1, dimension=3)(x)
    ).shape[1] == 32  # fmt: skip


class UNet(ME.MinkowskiNetwork):
    """A small net in the library's style, with the spellings of 0.4."""

    def __init__(self, D):  # noqa: N803
        ME.MinkowskiNetwork.__init__(self, D)
        kernel = ME.KernelGenerator(3, 1, 1, region_type=ME.RegionType(0), dimension=D)
        facts = {"kernel_generator": kernel, "dimension": D}
        self.stem = ME.MinkowskiConvolution(5, 6, 3, has_bias=False, **facts)
        self.down = ME.MinkowskiConvolution(6, 8, 3, stride=2, dimension=D)
        self.norm = ME.MinkowskiInstanceNorm(8)
        self.up = ME.MinkowskiConvolutionTranspose(8, 6, 3, stride=2, dimension=D)
        self.last = ME.MinkowskiConvolution(12, 2, 1, has_bias=True, dimension=D)
        for m in self.modules():
            if isinstance(m, ME.MinkowskiConvolution):
                ME.utils.kaiming_normal_(m.kernel, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        skip = MEF.elu(self.stem(x))
        y = self.up(MEF.elu(self.norm(self.down(skip))))
        y = self.last(ME.cat(y, skip))
        scale = y.F.norm(p=2, dim=1, keepdim=True) + 1
        return ME.SparseTensor(
            y.F / scale, coords_key=y.coords_key, coords_manager=y.coords_man
        )


def test_net():
    features, coords = scene(EXTENTS[3])
    net = UNet(3)
    y = net(ME.SparseTensor(features, coords=coords))
    grid = spread(features, coords, EXTENTS[3])
    active = spread(torch.ones(len(coords), 1), coords, EXTENTS[3])
    elu = nn.functional.elu
    skip = elu(CONV[3](grid, dense_weight(net.stem), padding=1)) * active
    down = CONV[3](skip, dense_weight(net.down), stride=2, padding=1)
    rows = (nn.functional.max_pool3d(active, 2) > 0).to(down.dtype)
    axes = (2, 3, 4)
    count = rows.sum(axes, keepdim=True)
    mean = (down * rows).sum(axes, keepdim=True) / count
    var = ((down - mean) ** 2 * rows).sum(axes, keepdim=True) / count
    normed = elu((down - mean) / torch.sqrt(var + 1e-8)) * rows
    facts = {"stride": 2, "padding": 1, "output_padding": 1}
    up = TRANSPOSED[3](normed, dense_weight(net.up, True), **facts)
    joined = picked(torch.cat([up, skip], 1), coords)
    last = joined @ net.last.kernel + net.last.bias
    expected = last / (last.norm(p=2, dim=1, keepdim=True) + 1)
    leaves = (features, net.stem.kernel, net.down.kernel, net.up.kernel)
    compare(y.F, expected, leaves, 2e-5)


def test_imports_by_name():
    compat.install("MinkowskiEngine")
    try:
        import MinkowskiEngine
        import MinkowskiEngine.MinkowskiFunctional as F  # noqa: N812
        import MinkowskiEngine.MinkowskiOps as ops
        from MinkowskiEngine.MinkowskiNormalization import MinkowskiBatchNorm
        from MinkowskiEngine.MinkowskiPooling import MinkowskiAvgPooling
        from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
        from MinkowskiEngine.modules.resnet_block import Bottleneck

        assert MinkowskiEngine is ME and F is MEF and ops.SparseTensor is SparseTensor
        assert SparseTensor is ME.SparseTensor and MinkowskiEngine.__version__
        assert MinkowskiAvgPooling is ME.MinkowskiAvgPooling
        assert MinkowskiBatchNorm is ME.MinkowskiBatchNorm
        assert Bottleneck is resnet_block.Bottleneck
    finally:
        compat.uninstall("MinkowskiEngine")


def test_wrong_use():
    x, _ = tensor_of()
    with pytest.raises(AssertionError, match="pass dimension="):
        ME.MinkowskiConvolution(5, 4, 3)
    with pytest.raises(AssertionError, match="takes a SparseTensor; got Tensor"):
        ME.MinkowskiConvolution(5, 4, 3, dimension=3)(x.F)
    with pytest.raises(AssertionError, match="dimension=2; the input has 3"):
        ME.MinkowskiConvolution(5, 4, 3, dimension=2)(x)
    with pytest.raises(AssertionError, match="same number of rows"):
        ME.SparseTensor(x.F[:3], x.C)
    with pytest.raises(AssertionError, match="mask must be"):
        ME.MinkowskiPruning()(x, torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="must be from 0"):
        ME.SparseTensor(x.F, x.C - 1)
    with pytest.raises(NotImplementedError, match="call a layer"):
        ME.MinkowskiConvolutionFunction()
    with pytest.raises(TypeError, match="float64"):
        ME.MinkowskiConvolution(5, 4, 3, dimension=3).double()(x.double())
