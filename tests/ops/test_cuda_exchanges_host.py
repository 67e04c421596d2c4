"""What CUDA sends to other processes, its kernels emulated on the CPU."""

import mlx.core as mx
import numpy as np
import pytest
from contractions import exact
from cuda_emulation import emulated

from mlx_lattice.backends import cuda_exchanges
from mlx_lattice.backends.registry import EXCHANGES
from mlx_lattice.ops import exchanges

pytestmark = emulated
CUDA = EXCHANGES["cuda"]
SHAPES = (3, 5), (1,), (17001,), (2, 2, 2), (8192,)


@pytest.mark.parametrize("count, dtype", ((1, mx.bfloat16), (5, mx.float16)), ids=str)
def test_arrays_are_joined_in_one_launch(emulator, count, dtype):
    arrays = [mx.random.randint(-99, 99, s).astype(dtype) for s in SHAPES[:count]]
    after = mx.zeros((1,))
    row = exchanges.joined(arrays, 0.5, after)
    wanted = np.concatenate([exact(a).ravel() / 2 for a in arrays])
    assert row.dtype == dtype and len(emulator.launches) == 1
    np.testing.assert_array_equal(exact(row), wanted)


def test_what_a_launch_does_not_take_is_joined_all_the_same(emulator):
    for arrays in ([mx.array([1, 2])], [mx.ones((1,))] * 300):
        row = exchanges.joined(arrays, 1.0, mx.zeros((1,)))
        assert mx.array_equal(row, mx.concatenate(arrays)) and not emulator.launches


def test_no_array_is_handed_twice(monkeypatch):
    """MLX copies each whose elements are not in order, for every slot that has it."""
    handed = []

    def kernel(inputs, *_):
        handed.extend(inputs)
        return [mx.zeros((60,))]

    monkeypatch.setattr(cuda_exchanges, "_joining", lambda *_: kernel)
    CUDA.join([mx.ones((3, 4)).T] * 5, 0.5)
    assert [a.shape for a in handed if a is not None].count((4, 3)) == 5
    assert len(handed) == 1 + 8 + 2


@pytest.mark.parametrize("counts", ((40, 3), (1, 0), (0, 0), (7, 0, 900)), ids=str)
@pytest.mark.parametrize("channels", (5, 300))
def test_moments_of_all_rows(emulator, channels, counts):
    """Far from zero, and the running ones move as those of all rows do."""
    rng = np.random.default_rng(channels)
    shares = [rng.normal(100, 2, (n, channels)) for n in counts]
    every = np.zeros((len(counts), 2 * channels + 1))
    for line, share in zip(every, shares, strict=True):
        moments = [share.mean(axis=0), share.var(axis=0)] if len(share) else [[0]] * 2
        line[:channels], line[channels:-1] = moments
        line[-1] = len(share)
    x, old = np.concatenate(shares), rng.normal(size=(2, channels))
    mean, var = (x.mean(axis=0), x.var(axis=0)) if len(x) else np.zeros((2, channels))
    every = mx.array(every.astype(np.float32))
    running = tuple(mx.array(a.astype(np.float32)) for a in old)
    moved = [0.75 * old[0] + 0.25 * mean if len(x) else old[0], old[1]]
    if len(x) > 1:
        moved[1] = 0.75 * old[1] + 0.25 * x.var(axis=0, ddof=1)
    found = CUDA.merge(every, running, 0.25)
    for a, wanted in zip(found, (mean, var, *moved), strict=True):
        assert a.shape == (1, channels)
        np.testing.assert_allclose(exact(a)[0], wanted, rtol=2e-5, atol=1e-5)
    found = CUDA.merge(every, None, 0.25)
    np.testing.assert_allclose(exact(found[1])[0], var, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", (None, mx.float16), ids=str)
@pytest.mark.parametrize("rows", (0, 1, 90))
def test_means_times_the_weight(emulator, rows, dtype):
    sums = mx.random.normal((601,))
    sums[-1] = rows
    weight = None if dtype is None else mx.random.normal((300,)).astype(dtype)
    wanted = exact(sums)[:-1].reshape(2, 1, 300) / max(rows, 1)
    if weight is not None:
        wanted = wanted * exact(weight)
    found = CUDA.mean_terms(sums, weight)
    np.testing.assert_allclose(exact(found), wanted, rtol=1e-6)
