"""flex_gemm's convolutions and samples, as TRELLIS.2 calls them."""

import pytest
from torch_scenes import close, gradients, picked, scene, spread, torch

import mlx_lattice as ml
from mlx_lattice.compat import flex_gemm
from mlx_lattice.compat.flex_gemm.ops.grid_sample import grid_sample_3d
from mlx_lattice.compat.flex_gemm.ops.spconv import (
    sparse_conv3d,
    sparse_submanifold_conv3d,
)

EXTENTS = 7, 8, 6
SHAPE = torch.Size([2, 5, *EXTENTS])
functional = torch.nn.functional


class Conv(torch.nn.Module):
    """A submanifold convolution in the style of TRELLIS.2."""

    def __init__(self, c_in, c_out, size, dilation=1):
        super().__init__()
        self.dilation = (dilation,) * 3
        self.weight = torch.nn.Parameter(torch.randn(c_out, size, size, size, c_in) / 9)
        self.bias = torch.nn.Parameter(torch.randn(c_out))

    def forward(self, feats, coords, caches):
        flex_gemm.ops.spconv.set_algorithm(
            flex_gemm.ops.spconv.Algorithm.MASKED_IMPLICIT_GEMM_SPLITK
        )
        flex_gemm.ops.spconv.set_hashmap_ratio(2.0)
        key = f"{tuple(self.weight.shape[1:4])}_{self.dilation}"
        out, cache = sparse_submanifold_conv3d(
            feats, coords, SHAPE, self.weight, self.bias, caches.get(key), self.dilation
        )
        caches[key] = cache
        return out


@pytest.mark.parametrize("size, dilation", ((3, 1), (5, 1), (3, 2), (1, 1)))
def test_submanifold_convolution(size, dilation):
    feats, coords = scene(EXTENTS)
    layer, caches = Conv(5, 4, size, dilation), {}
    y = layer(feats, coords, caches)
    weight = layer.weight.movedim(-1, 1)
    padding = size // 2 * dilation
    grid = spread(feats, coords, EXTENTS)
    dense = functional.conv3d(
        grid, weight, layer.bias, padding=padding, dilation=dilation
    )
    expected, leaves = picked(dense, coords), (feats, layer.weight, layer.bias)
    close(y, expected)
    for got, other in zip(
        gradients(y, leaves), gradients(expected, leaves), strict=True
    ):
        close(got, other)
    (cache,) = caches.values()
    assert torch.equal(layer(feats, coords, caches), y)
    assert list(caches.values()) == [cache]
    assert cache["neighbor_map"].shape == (len(coords), size**3)


def test_one_relation_serves_all_layers_of_a_cache():
    feats, coords = scene(EXTENTS)
    caches = {}
    with ml.trace() as trace:
        y = Conv(5, 5, 3)(feats, coords, caches)
        Conv(5, 5, 3)(y, coords, caches)
    assert len(caches) == 1 and len(trace) == 2


@pytest.mark.parametrize("dtype, tolerance", (("float16", 2e-3), ("bfloat16", 1.6e-2)))
def test_half_precision(dtype, tolerance):
    feats, coords = scene(EXTENTS)
    layer = Conv(5, 4, 3)
    expected = layer(feats, coords, {})
    kind = getattr(torch, dtype)
    y = layer.to(kind)(feats.to(kind), coords, {})
    assert y.dtype == kind
    close(y, expected, 2 * tolerance)


def test_a_convolution_that_makes_rows():
    feats, coords = scene(EXTENTS)
    weight = torch.randn(4, 3, 3, 3, 5, requires_grad=True)
    y, rows, cache = sparse_conv3d(
        feats, coords, SHAPE, weight, None, None, None, (2, 2, 2), (1, 1, 1)
    )
    dense = functional.conv3d(
        spread(feats, coords, EXTENTS), weight.movedim(-1, 1), None, 2, 1
    )
    close(spread(y, rows, dense.shape[2:]), dense)
    again, same, _ = sparse_conv3d(feats, coords, SHAPE, weight, None, cache)
    assert torch.equal(again, y) and torch.equal(same, rows)
    some, chosen, _ = sparse_conv3d(
        feats, coords, SHAPE, weight, None, None, rows[5:9], (2, 2, 2), (1, 1, 1)
    )
    close(some, y[5:9])
    assert torch.equal(chosen, rows[5:9])


def test_trilinear_samples_are_divided_by_the_weight_that_is_there():
    feats, coords = scene(EXTENTS)
    points = torch.rand(2, 60, 3) * torch.tensor(EXTENTS)
    y = grid_sample_3d(feats, coords, SHAPE, points)
    where = (points / torch.tensor(EXTENTS) * 2 - 1).flip(-1)[:, :, None, None]

    def sampled(grid):
        values = functional.grid_sample(grid, where, align_corners=False)
        return values[..., 0, 0].transpose(1, 2)

    ones = spread(torch.ones(len(coords), 1), coords, EXTENTS)
    expected = sampled(spread(feats, coords, EXTENTS)) / sampled(ones).clamp(min=1e-12)
    close(y, expected, 1e-4)
    close(gradients(y, (feats,))[0], gradients(expected, (feats,))[0], 1e-4)


def test_nearest_samples():
    feats, coords = scene(EXTENTS)
    points = torch.rand(2, 60, 3) * torch.tensor(EXTENTS)
    y = grid_sample_3d(feats, coords, SHAPE, points, mode="nearest")
    grid = spread(feats, coords, EXTENTS).movedim(1, -1)
    cells = points.long()
    batch = torch.arange(2)[:, None].expand(2, 60)
    close(y, grid[(batch, *cells.unbind(-1))])
    assert y.shape == (2, 60, 5)


def test_errors():
    feats, coords = scene(EXTENTS)
    weight = torch.randn(4, 3, 3, 3, 5)
    call = sparse_submanifold_conv3d
    with pytest.raises(AssertionError, match=r"\(6\) should match weight channels \(5"):
        call(torch.zeros(len(coords), 6), coords, SHAPE, weight)
    with pytest.raises(AssertionError, match=r"int32.*\.int\(\)"):
        call(feats, coords.long(), SHAPE, weight)
    with pytest.raises(AssertionError, match="must be .C_out, kx, ky, kz, C_in"):
        call(feats, coords, SHAPE, weight[0])
    with pytest.raises(AssertionError, match="features have 3 rows"):
        call(feats[:3], coords, SHAPE, weight)
    _, cache = call(feats, coords, SHAPE, weight)
    with pytest.raises(ValueError, match="cache is of 27 offsets"):
        call(feats, coords, SHAPE, torch.randn(4, 1, 1, 1, 5), None, cache)
    with pytest.raises(ValueError, match="must be unique"):
        call(feats[[0, 0]], coords[[0, 0]], SHAPE, weight)
    with pytest.raises(AssertionError, match="mode must be"):
        grid_sample_3d(feats, coords, SHAPE, torch.zeros(2, 1, 3), mode="linear")
    with pytest.raises(AssertionError, match=r"grid must be \(B, L, 3\)"):
        grid_sample_3d(feats, coords, SHAPE, torch.zeros(2, 3))
    with pytest.raises(NotImplementedError, match="curve_code"):
        flex_gemm.ops.serialize.encode_seq(coords, SHAPE)
    flex_gemm.ops.grid_sample.set_hashmap_ratio(3.0)
