"""Kernels normalise by the statistics of rows that another process has a share of.

The other process is simulated: what it would send is computed in float64. Real ones are
in tests/nn/test_distributed.py.
"""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from contractions import exact
from norm_checks import array
from places import HERE, agreed
from reference_norms import Norm

from mlx_lattice.nn.normalization import Exchanges, SharedStatistics
from mlx_lattice.ops.channels import activation_of
from mlx_lattice.ops.norms import normalized_by_rows
from mlx_lattice.registry import NORMS

C = 9
PLACES = [place for place in HERE if place.name in NORMS]


def joined(parts) -> mx.array:
    return mx.concatenate([part.reshape(-1) for part in parts])


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("act", (None, "silu"))
@pytest.mark.parametrize("shares", ((300, 20), (3, 700), (1, 1), (40, 0)), ids=str)
def test_a_share_of_the_rows(place, shares, act, dtype):
    check(place, shares, act, dtype)


def check(place, shares, act, dtype):
    """Outputs, gradients and running statistics, with the oracle's other process."""
    mine, others = shares
    x, values = array((mine + others, C), dtype, 1, 2.0, 3.0)
    dy, exact_dy = array((mine + others, C), dtype, 2)
    residual, added = array((mine + others, C), dtype, 3)
    (weight, w), (bias, b) = (
        [a[0] for a in array((1, C), "float32", seed, 0.5, 1.0)] for seed in (4, 5)
    )
    whole = Norm(values, w, b, added, act)
    theirs = values[mine:]
    dx, *_, g = whole.back(exact_dy)

    def sent(*parts) -> mx.array:
        return mx.array(np.concatenate([*parts, [others]]).astype(np.float32))

    class WithAnother(Exchanges):
        def gather(self, *parts):
            none = np.zeros(C)
            mean = theirs.mean(axis=0) if others else none
            var = theirs.var(axis=0) if others else none
            return mx.stack([joined(parts), sent(mean, var)])

        def add(self, *parts):
            there = g[mine:].sum(axis=0), (g * whole.hat)[mine:].sum(axis=0)
            own = joined(parts)
            return own + (others if own.size == 1 else sent(*there))

    running = mx.zeros((C,)), mx.ones((C,))
    how = {"act": activation_of(act), "running": running, "momentum": 0.1}
    how["statistics"] = SharedStatistics(mine, WithAnother(None))

    def normalized(x, weight, bias, residual):
        return normalized_by_rows(x, weight, bias, residual, **how)

    def run():
        given = x[:mine], weight, bias, residual[:mine]
        y, *_, mean, var = normalized(*given)
        _, back = mx.vjp(lambda *a: normalized(*a)[0], list(given), [dy[:mine]])
        return y, mean, var, *back

    y, mean, var, *back = agreed(place, run)
    ref.assert_close(y, whole.y[:mine], dtype, "y")
    ref.assert_close(mean, 0.1 * values.mean(axis=0))
    ref.assert_close(var, 0.9 + 0.1 * values.var(axis=0, ddof=1))
    straight = whole.rstd * w * g
    found = exact(back[0]) + straight[:mine]
    ref.assert_close(found, (dx + straight)[:mine], dtype, "dx")
    ref.assert_close(back[1], (g * whole.hat)[:mine].sum(axis=0), dtype, "weight")
    ref.assert_close(back[2], g[:mine].sum(axis=0), dtype, "bias")
    ref.assert_close(back[3], g[:mine], dtype, "residual")
