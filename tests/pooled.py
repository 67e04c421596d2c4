"""What suites of pooling share: every way to run it, tensors without ties."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml


@pytest.fixture(autouse=True, params=("fastest", "portable"))
def route(request):
    """Every promise holds for the device's own kernels and for MLX operations."""
    if request.param == "portable":
        request.getfixturevalue("portable_only")


def distinct(n, channels, seed=0):
    """Features without ties in any dtype, negative ones among them."""
    rng = np.random.default_rng(seed)
    columns = [rng.permutation(n) - n / 2 for _ in range(channels)]
    return np.stack(columns, axis=1).astype(np.float32).reshape(n, channels)


def tensor(coords, feats, dtype="float32", **options):
    feats = mx.array(feats, dtype=getattr(mx, dtype))
    return ml.SparseTensor(mx.array(coords.astype(np.int32)), feats, **options)
