"""Scenes and dense references for tests of compat, in PyTorch."""

import pytest

torch = pytest.importorskip(
    "torch", reason="compat runs PyTorch nets: its tests need PyTorch installed"
)
from torch.nn import functional  # noqa: E402

torch.set_num_threads(1)


def scene(
    extents=(7, 8, 6), channels=5, batch=2, rows=220, seed=0, dtype=torch.float32
):
    """Rows without repeats in a drawn order, and features that need a gradient."""
    draw = torch.Generator().manual_seed(seed)
    columns = [torch.randint(0, n, (rows,), generator=draw) for n in (batch, *extents)]
    indices = torch.unique(torch.stack(columns, 1), dim=0)
    indices = indices[torch.randperm(len(indices), generator=draw)].int()
    features = torch.randn(len(indices), channels, generator=draw).to(dtype)
    return features.requires_grad_(), indices


def spread(features, indices, extents, batch=2):
    """The (B, C, spatial...) grid of features, differentiable."""
    grid = features.new_zeros((batch, *extents, features.shape[1]))
    grid = grid.index_put(tuple(indices.long().T), features)
    return grid.movedim(-1, 1)


def picked(grid, indices):
    """The (N, C) values of a (B, C, spatial...) grid at rows."""
    return grid.movedim(1, -1)[tuple(indices.long().T)]


CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


def close(got, expected, tolerance=1e-5):
    """Both have one shape and differ by no more than a share of the norm."""
    assert got.shape == expected.shape
    got, expected = got.detach().double(), expected.detach().double()
    assert torch.isfinite(got).all()
    assert (got - expected).norm() <= tolerance * expected.norm().clamp(min=1e-12)


def gradients(result, inputs, seed=1):
    """The gradients of a drawn sum of a result."""
    draw = torch.Generator().manual_seed(seed)
    by = torch.randn(result.shape, generator=draw).to(result.dtype)
    return torch.autograd.grad(result, inputs, by, retain_graph=True)
