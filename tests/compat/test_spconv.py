"""spconv's layers against dense convolution and pooling of PyTorch."""

import copy
import io

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
from mlx_lattice.compat.spconv import pytorch as spconv
from mlx_lattice.compat.spconv.pytorch import functional as fsp

EXTENTS = {1: (40,), 2: (9, 11), 3: (7, 8, 6), 4: (4, 5, 4, 3)}
nn = torch.nn


def tensor_of(dims=3, channels=5, **facts):
    features, indices = scene(EXTENTS[dims], channels, **facts)
    x = spconv.SparseConvTensor(features, indices, EXTENTS[dims], 2)
    return x, spread(features, indices, EXTENTS[dims])


def dense_weight(layer):
    """A layer's weight as PyTorch's convolution takes it."""
    return layer.weight.movedim(-1, 1)


def compare(y, expected, leaves, others=None, tolerance=1e-5):
    """Values and gradients are those of the dense form."""
    close(y, expected, tolerance)
    others = leaves if others is None else others
    for got, other in zip(
        gradients(y, leaves), gradients(expected, others), strict=True
    ):
        close(got, other, tolerance)


@pytest.mark.parametrize("dims", (1, 2, 3))
@pytest.mark.parametrize("size, dilation", ((3, 1), (5, 1), (3, 2)))
def test_submanifold(dims, size, dilation):
    x, grid = tensor_of(dims)
    kind = getattr(spconv, f"SubMConv{dims}d")
    layer = kind(5, 4, size, stride=2, padding=7, dilation=dilation, indice_key="a")
    y = layer(x)
    padding = size // 2 * dilation
    dense = CONV[dims](
        grid, dense_weight(layer), layer.bias, padding=padding, dilation=dilation
    )
    compare(
        y.features, picked(dense, x.indices), (x.features, layer.weight, layer.bias)
    )
    assert y.indices is x.indices and y.spatial_shape == x.spatial_shape


def test_submanifold_in_four_dimensions():
    x, _ = tensor_of(4)
    layer = spconv.SubMConv4d(5, 4, (1, 1, 1, 3), bias=False)
    flat = spconv.SubMConv1d(5, 4, 3, bias=False)
    flat.weight.data = layer.weight.data.reshape(4, 3, 5)
    # Rows of one line in the last axis are a batch element in one dimension.
    lines, batch = torch.unique(x.indices[:, :4], dim=0, return_inverse=True)
    indices = torch.stack([batch.int(), x.indices[:, 4]], 1)
    line = spconv.SparseConvTensor(x.features, indices, [3], len(lines))
    close(layer(x).features, flat(line).features)


STRIDED = (
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=2, stride=2),
    dict(kernel_size=3),
    dict(kernel_size=3, padding=1, dilation=2),
    dict(kernel_size=1, stride=2),
)


@pytest.mark.parametrize("dims", (1, 2, 3))
@pytest.mark.parametrize("arguments", STRIDED, ids=str)
def test_strided(dims, arguments):
    x, grid = tensor_of(dims)
    layer = getattr(spconv, f"SparseConv{dims}d")(5, 4, bias=False, **arguments)
    y = layer(x)
    rest = {k: v for k, v in arguments.items() if k != "kernel_size"}
    dense = CONV[dims](grid, dense_weight(layer), **rest)
    assert y.spatial_shape == list(dense.shape[2:])
    compare(y.dense(), dense, (x.features, layer.weight))
    ones = CONV[dims](
        spread(torch.ones(len(x.indices), 1), x.indices, EXTENTS[dims]),
        torch.ones_like(dense_weight(layer)[:1, :1]),
        **rest,
    )
    assert len(y.indices) == (ones > 0.5).sum()  # every row that an input reaches
    assert y.indices.dtype == torch.int32


def test_sizes_of_each_axis():
    x, grid = tensor_of()
    layer = spconv.SparseConv3d(5, 4, (3, 1, 1), (2, 1, 1), padding=[1, 0, 0])
    dense = CONV[3](grid, dense_weight(layer), None, (2, 1, 1), (1, 0, 0))
    y = layer(x)
    assert y.spatial_shape == list(dense.shape[2:])
    close(y.features - layer.bias, picked(dense, y.indices))


@pytest.mark.parametrize("dims", (1, 2, 3))
@pytest.mark.parametrize("size, stride, padding", ((2, 2, 0), (3, 2, 1), (3, 1, 1)))
def test_transposed(dims, size, stride, padding):
    x, grid = tensor_of(dims)
    kind = getattr(spconv, f"SparseConvTranspose{dims}d")
    layer = kind(5, 4, size, stride, padding, bias=False)
    weight = layer.weight.movedim(-1, 0)
    dense = TRANSPOSED[dims](grid, weight, None, stride, padding)
    y = layer(x)
    assert y.spatial_shape == list(dense.shape[2:])
    compare(y.dense(), dense, (x.features, layer.weight))


@pytest.mark.parametrize("dims", (1, 2, 3))
@pytest.mark.parametrize("size, stride, padding", ((2, 2, 0), (3, 2, 1)))
def test_inverse_goes_back_to_the_rows_of_its_key(dims, size, stride, padding):
    x, _ = tensor_of(dims)
    name = f"SparseConv{dims}d"
    down = getattr(spconv, name)(
        5, 6, size, stride, padding, bias=False, indice_key="down"
    )
    inverse = getattr(spconv, f"SparseInverseConv{dims}d")
    up = inverse(6, 4, size, "down", bias=False)
    coarse = down(x)
    y = up(coarse)
    assert y.indices is x.indices and y.spatial_shape == x.spatial_shape
    grid = spread(coarse.features, coarse.indices, coarse.spatial_shape)
    extents = zip(x.spatial_shape, coarse.spatial_shape, strict=True)
    more = [n - ((m - 1) * stride - 2 * padding + size) for n, m in extents]
    weight = up.weight.movedim(-1, 0)
    dense = TRANSPOSED[dims](grid, weight, None, stride, padding, more)
    expected = picked(dense, x.indices)
    compare(y.features, expected, (x.features, up.weight, down.weight))


@pytest.mark.parametrize("kind", ("SubMConv3d", "SparseConv3d", "SparseInverseConv3d"))
def test_a_kernel_of_one_reads_its_memory_as_in_by_out(kind):
    x, _ = tensor_of(channels=4)
    named = {"indice_key": "none"} if "Inverse" in kind else {"padding": 0}
    layer = getattr(spconv, kind)(4, 6, 1, **named)
    assert layer.weight.shape == (6, 1, 1, 1, 4)
    y = layer(x)
    expected = x.features @ layer.weight.view(4, 6) + layer.bias
    compare(y.features, expected, (x.features, layer.weight, layer.bias))
    assert y.indices is x.indices and y.indice_dict == {}


@pytest.mark.parametrize("dims", (2, 3))
@pytest.mark.parametrize("size, stride, padding", ((2, None, 0), (3, 2, 1)))
def test_max_pooling_starts_from_zero(dims, size, stride, padding):
    x, grid = tensor_of(dims)
    y = getattr(spconv, f"SparseMaxPool{dims}d")(size, stride, padding)(x)
    pool = nn.functional.max_pool2d if dims == 2 else nn.functional.max_pool3d
    dense = pool(grid.clamp(min=0), size, stride, padding)
    assert y.spatial_shape == list(dense.shape[2:])
    compare(y.dense(), dense, (x.features,))


def test_equal_maxima_all_get_the_gradient():
    indices = torch.tensor([[0, 0], [0, 1], [0, 2]]).int()
    features = torch.tensor([[3.0], [3.0], [-1.0]], requires_grad=True)
    x = spconv.SparseConvTensor(features, indices, [4], 1)
    spconv.SparseMaxPool1d(2)(x).features.sum().backward()
    assert features.grad.flatten().tolist() == [1, 1, 0]


def test_max_pooling_on_the_rows_of_the_input():
    x, grid = tensor_of(2)
    layer = spconv.SparseMaxPool2d(3, 1, 1, subm=True, algo=None, indice_key="pool")
    y = layer(x)
    dense = nn.functional.max_pool2d(grid.clamp(min=0), 3, 1, 1)
    close(y.features, picked(dense, x.indices))
    assert y.indices is x.indices and "pool" in y.indice_dict


@pytest.mark.parametrize("dims", (2, 3))
def test_average_pooling_divides_by_the_rows_that_are_there(dims):
    x, grid = tensor_of(dims)
    y = getattr(spconv, f"SparseAvgPool{dims}d")(2)(x)
    ones = spread(torch.ones(len(x.indices), 1), x.indices, EXTENTS[dims])
    pool = nn.functional.avg_pool2d if dims == 2 else nn.functional.avg_pool3d
    dense = pool(grid, 2) / pool(ones, 2).clamp(min=1e-6)
    compare(y.dense(), dense, (x.features,))


def test_global_pooling():
    x, _ = tensor_of()
    batch = x.indices[:, 0]
    each = [x.features[batch == b] for b in range(2)]
    most = torch.stack([a.max(0).values for a in each])
    compare(spconv.SparseGlobalMaxPool()(x), most, (x.features,))
    mean = torch.stack([a.mean(0) for a in each])
    compare(spconv.SparseGlobalAvgPool()(x), mean, (x.features,))


class Net(nn.Module):
    """A small U-Net in spconv's style."""

    def __init__(self):
        super().__init__()
        self.stem = spconv.SparseSequential(
            spconv.SubMConv3d(5, 8, 3, padding=1, bias=False, indice_key="subm1"),
            nn.BatchNorm1d(8),
            nn.GELU(),
        )
        self.down = spconv.SparseSequential(
            spconv.SparseConv3d(8, 12, 2, 2, bias=False, indice_key="down1"),
            nn.BatchNorm1d(12),
            nn.GELU(),
            spconv.SubMConv3d(12, 12, 3, padding=1, indice_key="subm2"),
        )
        self.up = spconv.SparseInverseConv3d(12, 8, 2, indice_key="down1")
        self.head = spconv.SparseSequential(
            spconv.SubMConv3d(16, 6, 3, padding=1, indice_key="subm1"),
            spconv.SubMConv3d(6, 4, 1),
        )

    def forward(self, x):
        x = self.stem(x)
        y = self.up(self.down(x))
        joined = torch.cat([x.features, y.features], 1)
        return self.head(y.replace_feature(joined))


class DenseNet(nn.Module):
    """The same of dense layers, masked."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        net, shape = self.net, x.spatial_shape

        def conv(layer, features, rows, extents, **options):
            grid = spread(features, rows, extents)
            return CONV[3](grid, dense_weight(layer), layer.bias, **options)

        rows = x.indices
        f = picked(conv(net.stem[0], x.features, rows, shape, padding=1), rows)
        f = net.stem[2](net.stem[1](f))
        coarse = torch.cat([rows[:, :1], rows[:, 1:] // 2], 1)
        small = [n // 2 for n in shape]
        inside = (coarse[:, 1:] < torch.tensor(small)).all(1)
        coarse = torch.unique(coarse[inside], dim=0)
        g = picked(conv(net.down[0], f, rows, shape, stride=2), coarse)
        g = net.down[2](net.down[1](g))
        g = picked(conv(net.down[3], g, coarse, small, padding=1), coarse)
        more = [n - 2 * m for n, m in zip(shape, small, strict=True)]
        weight, grid = net.up.weight.movedim(-1, 0), spread(g, coarse, small)
        up = TRANSPOSED[3](grid, weight, net.up.bias, 2, 0, more)
        joined = torch.cat([f, picked(up, rows)], 1)
        h = picked(conv(net.head[0], joined, rows, shape, padding=1), rows)
        last = net.head[1]
        return h @ last.weight.view(6, 4) + last.bias


def test_a_net_and_its_gradients():
    x, _ = tensor_of()
    net = Net()
    leaves = [x.features, *net.parameters()]
    y = net(x).features
    compare(y, DenseNet(net)(x), leaves, tolerance=2e-5)


@pytest.mark.parametrize(
    "dtype, tolerance", ((torch.float16, 6e-3), (torch.bfloat16, 4e-2))
)
def test_a_net_in_half_precision_and_under_autocast(dtype, tolerance):
    x, _ = tensor_of()
    net = Net().eval()
    expected = net(x).features
    half = copy.deepcopy(net).to(dtype)
    close(half(x.replace_feature(x.features.to(dtype))).features, expected, tolerance)
    with torch.autocast("cpu", dtype=dtype):
        y = net(x).features
    assert y.dtype == dtype
    close(y, expected, tolerance)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())


def test_the_state_dict_has_spconvs_names_and_shapes():
    state = Net().state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    assert shapes["stem.0.weight"] == (8, 3, 3, 3, 5)
    assert shapes["down.0.weight"] == (12, 2, 2, 2, 8)
    assert shapes["up.weight"] == (8, 2, 2, 2, 12) and shapes["up.bias"] == (8,)
    assert "stem.0.bias" not in shapes and len(shapes) == 20
    net = Net()
    net.load_state_dict(state)
    assert all(torch.equal(net.state_dict()[k], v) for k, v in state.items())


@pytest.mark.parametrize("layout", ("RSKC", "RSCK"))
def test_weights_of_older_layouts_are_permuted_when_asked_for(layout, monkeypatch):
    from mlx_lattice.compat.spconv import constants

    layer = spconv.SubMConv3d(5, 4, 3)
    expected = layer.weight.detach().clone()
    axes = (1, 2, 3, 0, 4) if layout == "RSKC" else (1, 2, 3, 4, 0)
    state = {"weight": expected.permute(axes), "bias": layer.bias.detach()}
    other = spconv.SubMConv3d(5, 4, 3)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(dict(state))
    monkeypatch.setattr(constants, "SAVED_WEIGHT_LAYOUT", layout)
    other.load_state_dict(state)
    assert torch.equal(other.weight, expected)


def test_a_loader_of_the_net_may_replace_that_of_sparse_modules(monkeypatch):
    seen = []

    def load(self, state, prefix, *rest):
        seen.append(prefix)
        nn.Module._load_from_state_dict(self, state, prefix, *rest)

    monkeypatch.setattr(spconv.SparseModule, "_version", 2, raising=False)
    monkeypatch.setattr(spconv.SparseModule, "_load_from_state_dict", load)
    net = Net()
    net.load_state_dict(Net().state_dict())
    assert "stem.0." in seen and "up." in seen and "stem.1." not in seen


def test_the_same_seed_draws_the_same_parameters_as_uniform_ones():
    torch.manual_seed(3)
    layer = spconv.SubMConv3d(5, 4, 3)
    torch.manual_seed(3)
    bound = 1 / (27 * 5) ** 0.5
    weight = torch.empty(4, 3, 3, 3, 5).uniform_(-bound, bound)
    torch.testing.assert_close(layer.weight.detach(), weight)
    torch.testing.assert_close(
        layer.bias.detach(), torch.empty(4).uniform_(-bound, bound)
    )


def test_copies_pickles_and_recorded_numbers_of_rows():
    x, _ = tensor_of()
    net = Net()
    options = {"bias": False, "indice_key": "down1", "record_voxel_count": True}
    net.down.add_module("0", spconv.SparseConv3d(8, 12, 2, 2, **options))
    net.eval()
    expected = net(x).features
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert torch.equal(other(x).features, expected)
    name = "down.0.max_num_voxels_during_training"
    assert net.state_dict()[name].item() == len(net.down(net.stem(x)).indices)
    plain = {k: v for k, v in net.state_dict().items() if k != name}
    net.load_state_dict(plain)


def test_no_rows_and_an_empty_batch_element():
    x, _ = tensor_of()
    net = Net()  # training: norms are left out where there are no rows
    features = torch.zeros(0, 5, requires_grad=True)
    empty = spconv.SparseConvTensor(features, x.indices[:0], [7, 8, 6], 2)
    y = net(empty)
    assert y.features.shape == (0, 4) and y.dense().abs().sum() == 0
    y.features.sum().backward()
    assert spconv.SparseGlobalMaxPool()(empty).tolist() == [[0] * 5] * 2
    some = x.indices[:, 0] == 1
    one = spconv.SparseConvTensor(x.features[some], x.indices[some], [7, 8, 6], 3)
    assert Net()(one).dense().shape == (3, 4, 7, 8, 6)


def test_what_this_library_shows_of_a_net():
    x, _ = tensor_of()
    net = Net()
    with ml.trace(net) as trace:
        net(x).features.sum().backward()
    layers = [r.layer for r in trace if r.problem.pass_ == "forward"]
    assert layers == ["stem.0", "down.0", "down.3", "up", "head.0", "head.1"]
    assert {r.problem.pass_ for r in trace} == {"forward", "input_grad", "weight_grad"}
    text = str(trace.records[0].explanation)
    assert "stem.0" in text and "submanifold" in text
    with ml.routes.only("gather_gemm_scatter"), ml.trace(net) as trace:
        net(x).features.sum().backward()
    assert {r.choice.route.name for r in trace} == {"gather_gemm_scatter"}
    net.eval()
    with torch.no_grad(), ml.memory_limit("1GB"):
        limited = net(x).features
    assert torch.equal(limited, net(x).features)


def test_inference_mode_and_compile_and_checkpoints():
    x, _ = tensor_of()
    net = Net().eval()
    expected = net(x).features
    with torch.inference_mode():
        indices = x.indices.clone()
        y = net(spconv.SparseConvTensor(x.features, indices, [7, 8, 6], 2))
        assert torch.equal(y.features, expected)
        # In inference mode PyTorch counts no change in place; it is seen all the same.
        indices[:, 1] = 6 - indices[:, 1]
        z = net(spconv.SparseConvTensor(x.features, indices, [7, 8, 6], 2))
        assert not torch.equal(z.features, expected)
    from torch.utils.checkpoint import checkpoint

    y = checkpoint(net, x, use_reentrant=False).features
    y.sum().backward()
    found = x.features.grad.clone()
    x.features.grad = None
    net(x).features.sum().backward()
    assert torch.equal(found, x.features.grad)


@pytest.mark.native
def test_a_compiled_net_calls_the_layers_as_they_are():
    x, _ = tensor_of()
    net = Net().eval()
    compiled = torch.compile(net, backend="eager")
    close(compiled(x).features, net(x).features)


def test_sums_of_tensors_with_different_rows():
    x, grid = tensor_of()
    a = x.select_by_index(torch.arange(0, 100))
    b = x.select_by_index(torch.arange(60, len(x.indices)))
    y = fsp.sparse_add(a, b)
    compare(y.dense(), a.dense() + b.dense(), (x.features,))
    assert y.indice_dict == {} and len(y.indices) == len(x.indices)
    z = fsp.sparse_add(a, x, b)
    assert torch.equal(z.indices, x.indices) and z.indice_dict is x.indice_dict
    close(z.features, picked(a.dense() + grid + b.dense(), x.indices))
    w = spconv.tables.AddTableMisaligned()([a, b])
    close(w.dense(), y.dense())
