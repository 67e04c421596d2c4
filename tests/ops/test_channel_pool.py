"""Means of channels, and channels again, against NumPy: by MLX's sum, and in halves."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref

from mlx_lattice import devices, ops


@pytest.fixture(params=("cpu", "h200"), autouse=True)
def chip(request, monkeypatch):
    """The device that chooses the way; MLX's operations run on every machine."""
    profile = devices.PROFILES[request.param]
    monkeypatch.setattr(devices, "current", lambda: profile)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    "rows, share", ((0, 4), (1, 4), *((37, n) for n in (1, 2, 3, 6, 8)))
)
def test_means_repeats_and_their_gradients(rows, share, dtype):
    """Repeats are the mean's transpose, times the channels that share one."""
    kind = getattr(mx, dtype)
    narrow, wide = (
        mx.array(cases.features(rows, 5 * n, n)).astype(kind) for n in (1, share)
    )
    f64 = [ref.to_numpy(a).astype(np.float64) for a in (narrow, wide)]
    sums, repeated = f64[1].reshape(rows, 5, share).sum(2), f64[0].repeat(share, 1)

    (mean,), (dx,) = mx.vjp(lambda f: ops.channel_avg_pool(f, 5), [wide], [narrow])
    assert mean.dtype == kind and mean.shape == (rows, 5)
    ref.assert_close(mean, sums / share, dtype)
    ref.assert_close(dx, repeated / share, dtype)

    (again,), (dx,) = mx.vjp(lambda f: ops.channel_repeat(f, share), [narrow], [wide])
    assert again.dtype == kind
    np.testing.assert_array_equal(ref.to_numpy(again), repeated)
    ref.assert_close(dx, sums, dtype)


@pytest.mark.parametrize(
    "name, number", (("channel_avg_pool", 3), ("channel_repeat", 4))
)
def test_second_derivatives_and_tangents(name, number):
    feats, function = mx.array(cases.features(9, 12)), getattr(ops, name)

    def run(f):
        return function(f, number)

    def by_mlx(f):
        if name == "channel_repeat":
            return mx.repeat(f, number, axis=1)
        return f.reshape(9, number, -1).mean(axis=2)

    def slope(call):
        return mx.grad(lambda f: (call(f) ** 3).sum())

    def bend(call):
        return mx.grad(lambda f: (slope(call)(f) ** 2).sum())

    ref.assert_close(bend(run)(feats), np.array(bend(by_mlx)(feats)))
    ref.assert_close(mx.compile(slope(run))(feats), np.array(slope(by_mlx)(feats)))
    along = mx.array(cases.features(9, 12, 1))
    (_, (tangent,)) = mx.jvp(run, [feats], [along])
    ref.assert_close(tangent, np.array(by_mlx(along)))
