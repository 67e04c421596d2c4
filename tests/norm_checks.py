"""Norms of a backend against float64: what each of its functions must give."""

import cases
import mlx.core as mx
import numpy as np
import reference as ref
from contractions import exact
from places import agreed
from reference_norms import Norm

import mlx_lattice as ml
from mlx_lattice import ops, registry
from mlx_lattice.ops import channels
from mlx_lattice.registry import NORMS, Fit, RowSegments


def array(shape, dtype="float32", seed=0, scale=1.0, shift=0.0):
    """Features and their float64 values."""
    values = cases.features(*shape, seed) * scale + shift
    a = mx.array(values.astype(np.float32)).astype(getattr(mx, dtype))
    return a, exact(a)


def backend_of(place) -> str:
    """The backend whose kernels run in a place."""
    return place.name.split()[0]


def kernels_of(place):
    """The norms that run in a place."""
    return NORMS[backend_of(place)]


def joined(lines) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, mean and variance of each channel, of the statistics of parts of them."""
    counts, means, squares = exact(lines).transpose(1, 0, 2)
    total = counts.sum(axis=0)
    mean = (counts * means).sum(axis=0) / total
    squares = squares.sum(axis=0) + (counts * (means - mean) ** 2).sum(axis=0)
    return total, mean, squares / total


def moments(y) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of rows."""
    y = exact(y)
    return np.full(y.shape[1], len(y)), y.mean(axis=0), y.var(axis=0)


def lines_of(values, ends) -> mx.array:
    """Such statistics of rows from each end to the next; of no rows they are zeros."""
    parts = [values[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    lines = np.zeros((len(parts), 3, values.shape[1]), np.float32)
    for line, part in zip(lines, parts, strict=True):
        if len(part):
            line[:] = np.stack([*moments(part)])
            line[2] *= len(part)
    return mx.array(lines)


def segmented(ordered=True):
    """The segment of each of some rows, and these segments; two are empty."""
    of = np.repeat([0, 2, 3, 5], [30, 1, 300, 9])
    if not ordered:
        of = np.random.default_rng(0).permutation(of)
    order = np.argsort(of, kind="stable").astype(np.int32)
    starts = np.searchsorted(of[order], np.arange(7))
    segments = RowSegments(
        tuple(starts.tolist()),
        mx.array(of.astype(np.int32)),
        None if ordered else mx.array(order),
    )
    return of, segments


# How many groups of channels, whether a weight and a bias are of an element, channels
# and their dtype.
GROUPS = (
    (1, True, 600, "float16"),
    (4, True, 12, "float16"),
    (4, False, 12, "float16"),
    (12, True, 12, "float16"),
    (3, True, 9, "float32"),
    (3, False, 9, "bfloat16"),
)


def batch(of, channels, dtype, elements):
    """A tensor whose rows lie in batch elements, and its float64 features."""
    coords = np.stack([of, np.arange(len(of))], axis=1).astype(np.int32)
    feats, values = array((len(of), channels), dtype, 1, 2.0, 3.0)
    x = ml.SparseTensor(mx.array(coords), feats, batch_size=elements)
    ops.global_avg_pool(x)  # finds the rows of elements
    return x, values


def check_groups(place, monkeypatch, groups, apart, channels, dtype):
    """Statistics of groups of all channels, some and one, forward and back."""
    of, _ = segmented(groups == 4)
    x, values = batch(of, channels, dtype, 6)
    dy, along = array((len(of), channels), dtype, 2)
    lines = [array((6, channels), "float32", seed, 0.5, 1.0) for seed in (3, 4)]
    (weight, w), (bias, b) = ((a, v[of]) for a, v in lines)
    if not apart:
        (weight, w), (bias, b) = ((a[0], v[0]) for a, v in lines)
    oracle = Norm(values, w, b, act="silu", of=of, groups=groups)
    monkeypatch.setattr(registry, "serving", lambda: backend_of(place))

    def norm(feats, *lines):
        return ops.group_norm(x.replace(feats), groups, *lines, activation="silu").feats

    def run():
        (y,), back = mx.vjp(norm, [x.feats, weight, bias], [dy])
        return y, *back

    y, dx, dw, db = agreed(place, run)
    dx_wanted, _, _, g = oracle.back(along)
    ref.assert_close(y, oracle.y, dtype)
    ref.assert_close(dx, dx_wanted, dtype)
    for found, rows in ((dw, g * oracle.hat), (db, g)):
        sums = np.stack([rows[of == s].sum(axis=0) for s in range(6)])
        ref.assert_close(found, sums if apart else sums.sum(axis=0), "float32")


def check_derivatives_of_groups(monkeypatch, place, groups, apart):
    """The norm of a library's tensor, to the second order, beside MLX's operations."""
    held, _ = batch(
        np.random.default_rng(0).permutation(np.repeat([0, 2], [11, 6])),
        12,
        "float32",
        4,
    )
    x, dy, along = (array((17, 12), "float32", seed)[0] for seed in (1, 2, 3))
    lines = [array((4, 12), "float32", seed, 0.5, 1.0)[0] for seed in (4, 5)]
    lines = lines if apart else [a[0] for a in lines]

    def run(x, *lines):
        y = ops.group_norm(held.replace(x), groups, *lines, activation="silu")
        return y.feats

    def first(*arrays):
        return mx.vjp(run, [*arrays], [dy])[1]

    def derivatives():
        arrays = [x, *lines]
        second = mx.grad(lambda *a: (first(*a)[0] * along).sum(), argnums=(0, 1, 2))
        forward = mx.jvp(run, arrays, [along, *lines])[1]
        made = [run(*arrays), *first(*arrays), *second(*arrays), *forward]
        mx.eval(made)
        return made

    monkeypatch.setattr(registry, "serving", lambda: backend_of(place))
    found = derivatives()
    monkeypatch.setattr(registry, "serving", lambda: "mlx")
    for got, wanted in zip(found, derivatives(), strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(exact(got), exact(wanted), 1e-4, 1e-5)


class Given:
    """Arrays of a norm, and the oracle's."""

    def __init__(self, shape, dtype, act=None, affine=True, added=True, **more):
        self.x, x = array(shape, dtype, 1, 2.0, 3.0)
        self.dy, self.exact_dy = array(shape, dtype, 2)
        self.weight = self.bias = self.residual = w = b = r = None
        kind = more.pop("parameters", "float32")
        if affine:
            (self.weight, w), (self.bias, b) = (
                [a[0] for a in array((1, shape[1]), kind, seed, 0.5, 1.0)]
                for seed in (3, 4)
            )
        if added:
            self.residual, r = array(shape, dtype, 5)
        self.oracle = Norm(x, w, b, r, act, **more)
        self.act = channels.activation_of(act)
        self.arrays = self.weight, self.bias

    def fit(self, mean=None, var=None, segments=None):
        lines = self.arrays
        if segments is not None:
            lines = [
                a if a is None else mx.broadcast_to(a, (segments.size, *a.shape))
                for a in lines
            ]
        return Fit(mean, var, *lines, 1e-5, self.act, segments)

    def check(self, place, dtype, segments=None, fixed=None):
        """Forward and back, in several launches; and in one each way where it can."""
        kernels = kernels_of(place)
        if segments is None and fixed is None and kernels.is_one_launch(self.x):
            self.check_one_launch(place, dtype)

        def run():
            mean, var = fixed or kernels.moments(self.x, segments)[:2]
            fit = self.fit(mean, var, segments)
            y = kernels.normalize(self.x, fit, self.residual)
            given = self.dy, self.x, fit, self.residual
            sums, terms, dw, db = kernels.gradient_sums(*given)
            back = kernels.gradient(*given, None if fixed else terms)
            return y, sums, dw, db, *back

        y, sums, dw, db, dx, dr = agreed(place, run)
        wanted = self.check_rows(y, dx, dr, dtype)
        for at, (found, total) in enumerate(zip((dw, db), wanted, strict=True)):
            ref.assert_close(sums[1 - at].sum(axis=0), total, "float32")
            kind = "float32" if self.weight is None else self.weight.dtype
            if segments is None:
                ref.assert_close(found[0], total, str(kind))

    def check_one_launch(self, place, dtype):
        """The whole norm, whose statistics are of few rows."""
        kernels, fit = kernels_of(place), self.fit()

        def run():
            y, mean, var, *_ = kernels.batch_norm(self.x, fit, self.residual)
            by = fit._replace(mean=mean, var=var)
            back = kernels.batch_norm_gradient(self.dy, self.x, by, self.residual)
            return y, mean, var, *back

        y, mean, var, dx, dw, db, dr = agreed(place, run)
        values = exact(self.x)
        np.testing.assert_allclose(exact(mean)[0], values.mean(axis=0), 1e-6, 1e-6)
        np.testing.assert_allclose(exact(var)[0], values.var(axis=0), 1e-5, 1e-9)
        kind = "float32" if self.weight is None else self.weight.dtype
        wanted = self.check_rows(y, dx, dr, dtype)
        for found, total in zip((dw, db), wanted, strict=True):
            ref.assert_close(found.reshape(-1), total, str(kind))

    def check_rows(self, y, dx, dr, dtype):
        """What has rows; return the gradients of weight and bias that are wanted."""
        dx_wanted, *wanted, g = self.oracle.back(self.exact_dy)
        assert y.dtype == dx.dtype == dr.dtype == self.x.dtype
        ref.assert_close(y, self.oracle.y, dtype, "y")
        # What means are taken from: of few rows they leave next to nothing.
        straight = self.oracle.rstd * self.oracle.weight * g
        ref.assert_close(exact(dx) + straight, dx_wanted + straight, dtype, "dx")
        if self.residual is not None:
            ref.assert_close(dr, g, dtype, "residual")
        return wanted
