"""Reductions of a backend against float64 loops: what each of them must give."""

import cases
import mlx.core as mx
import numpy as np
import reference as ref

from mlx_lattice import reductions
from mlx_lattice.ops.pool import BatchRows


def features(n, channels, dtype="float32", seed=0):
    """Features in MLX and, rounded alike, in float64."""
    x = mx.array(cases.features(n, channels, seed)).astype(getattr(mx, dtype))
    return x, ref.to_numpy(x).astype(np.float64)


def tables(shape, seed=0):
    """A table of rows, some absent and some named often, and float32 weights."""
    rows, volume, n = shape
    rng = np.random.default_rng(seed)
    table = rng.integers(-1, n, (rows, volume)).astype(np.int32)
    table[table == n // 2] = 0  # a row that nobody names
    return table, rng.standard_normal(table.shape).astype(np.float32)


def maxima(x, members):
    """The greatest of x over lists of rows, and the first row that has it."""
    shape = len(members), x.shape[1]
    y, rows = np.zeros(shape), np.full(shape, -1)
    for o, listed in enumerate(members):
        if len(listed):
            rows[o] = np.asarray(listed)[np.argmax(x[listed], axis=0)]
            y[o] = np.take_along_axis(x, rows[o][None], axis=0)[0]
    return y, rows


class Checks:
    """The checks of a backend's reductions.

    Args:
        backend: the module that has them.
        call: ``call(function, *arguments)`` runs one of them.
    """

    def __init__(self, backend, call=lambda function, *args: function(*args)):
        self.backend, self.call = backend, call

    def tables(self, dtype, shape, weighted, channels):
        """Sums by a table, the way back, and products."""
        table, weights = tables(shape)
        x, exact = features(shape[2], channels, dtype)
        dy, dy_exact = features(shape[0], channels, dtype, 1)
        y_wanted, x_wanted = np.zeros_like(dy_exact), np.zeros_like(exact)
        products = np.zeros(table.shape)
        for o, k in zip(*np.nonzero(table >= 0), strict=True):
            i, weight = table[o, k], float(weights[o, k]) if weighted else 1
            y_wanted[o] += weight * exact[i]
            x_wanted[i] += weight * dy_exact[o]
            products[o, k] = exact[i] @ dy_exact[o]
        given = mx.array(weights) if weighted else None
        at = mx.array(table)
        y = self.call(self.backend.gather_sum, x, at, given)
        assert y.dtype == x.dtype
        ref.assert_close(y, y_wanted, dtype)
        divisors = (np.arange(len(table)) % 5).astype(np.int32)
        y = self.call(self.backend.gather_sum, x, at, given, mx.array(divisors))
        assert y.dtype == x.dtype
        ref.assert_close(y, y_wanted / np.maximum(divisors, 1)[:, None], dtype)
        back = self.call(self.backend.scatter_sum, dy, at, shape[2], given)
        assert back.dtype == x.dtype
        ref.assert_close(back, x_wanted, dtype)
        ref.assert_close(reductions.products(x, dy, at), products)

    def max(self, both, channels, dtype="float32"):
        """Maxima over a relation, and their gradients."""
        relation, expected = both
        x, exact = features(relation.n_in, channels, dtype)
        y, rows = self.call(self.backend.gather_max, x, relation.out_in)
        table = expected.out_in
        values, won = maxima(exact, [row[row >= 0] for row in table])
        assert y.dtype == x.dtype and rows.dtype == mx.int32
        np.testing.assert_array_equal(ref.to_numpy(y), values)
        np.testing.assert_array_equal(np.array(rows), won)
        dy, dy_exact = features(relation.n_out, channels, dtype, 1)
        dx = self.call(self.backend.max_pool_backward, dy, rows, relation.in_out)
        wanted = np.zeros_like(exact)
        for o, c in zip(*np.nonzero(won >= 0), strict=True):
            wanted[won[o, c], c] += dy_exact[o, c]
        ref.assert_close(dx, wanted, dtype)

    def segments(self, of, count, channels, dtype="float32"):
        """Sums and maxima by segment number, as a scatter and by batch element."""
        of = np.array(of, np.int32)
        x, exact = features(len(of), channels, dtype)
        members = [np.flatnonzero(of == s) for s in range(count)]
        sums = np.array([exact[listed].sum(axis=0) for listed in members])
        best, won = maxima(exact, members)
        at = mx.array(of)[:, None]
        order = np.argsort(of, kind="stable").astype(np.int32)
        starts = np.searchsorted(of[order], np.arange(count + 1))
        batch = BatchRows(
            mx.array(of),
            tuple(starts.tolist()),
            None if (order == np.arange(len(of))).all() else mx.array(order),
        )
        y = self.call(self.backend.scatter_sum, x, at, count)
        assert y.dtype == x.dtype
        ref.assert_close(y, sums, dtype)
        for name, given in (("scatter", (at, count)), ("segment", (batch,))):
            y, rows = self.call(getattr(self.backend, f"{name}_max"), x, *given)
            assert y.dtype == x.dtype and rows.dtype == mx.int32
            np.testing.assert_array_equal(ref.to_numpy(y), best)
            np.testing.assert_array_equal(np.array(rows), won)

    def nan_and_ties(self):
        """A NaN wins, and the first of equals."""
        values = mx.array([1.0, np.nan, 3.0, np.nan] * 3)[:, None]
        ties = mx.array([-0.0, 0.0, -1.0, 0.0] * 3)[:, None]
        at = mx.array([0] * 11 + [1], dtype=mx.int32)[:, None]
        table = mx.array([[0, 1, 2, 3], [4, 2, -1, -1], [-1, -1, -1, -1]], mx.int32)
        for x, of_segments, of_tables in (
            (values, [1, 11, -1], [1, 2, -1]),
            (ties, [0, 11, -1], [0, 4, -1]),
        ):
            rows = self.call(self.backend.scatter_max, x, at, 3)[1]
            assert rows[:, 0].tolist() == of_segments
            rows = self.call(self.backend.gather_max, x, table)[1]
            assert rows[:, 0].tolist() == of_tables

    def negative_maxima(self):
        """A maximum never starts from zero."""
        x, at = mx.full((9, 2), -3.0), mx.zeros((9, 1), dtype=mx.int32)
        assert (self.call(self.backend.scatter_max, x, at, 1)[0] == -3).all().item()
        assert (self.call(self.backend.gather_max, x, at)[0] == -3).all().item()

    def nothing(self, n, rows, channels):
        """Zeros of the right shape come from nothing. Yields after each call."""
        x, y = mx.zeros((n, channels)), mx.zeros((rows, channels))
        table = mx.full((rows, 2), -1, dtype=mx.int32)
        at = mx.full((rows, 1), -1, dtype=mx.int32)
        for name, arguments, shape in (
            ("gather_sum", (x, table), y.shape),
            ("gather_max", (x, table), y.shape),
            (
                "max_pool_backward",
                (y, y.astype(mx.int32), mx.zeros((n, 0), dtype=mx.int32)),
                x.shape,
            ),
            ("scatter_sum", (y, table, n), x.shape),
            ("scatter_max", (y, at, n), x.shape),
        ):
            result = self.call(getattr(self.backend, name), *arguments)
            result = result[0] if isinstance(result, tuple) else result
            assert result.shape == shape and not result.any().item()
            yield name
