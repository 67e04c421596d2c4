"""Heads before attention in float64: what is done to them, and its derivatives."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import mappable
from contractions import exact

from mlx_lattice.ops.attention import turned_head, turned_heads

# Rows, heads, channels: one of each, several blocks, lanes without channels, and such
# as no kernel takes.
SHAPES = (
    ((1, 1, 16), "float32"),
    ((300, 3, 64), "float16"),
    ((70, 2, 96), "bfloat16"),
    ((9, 12, 128), "float32"),
    ((5, 2, 6), "float16"),
)


class Given:
    """Heads, what is done to them, and what must come of it in float64."""

    def __init__(self, shape, dtype, parts=3, scaled=True, turns=True, kind="float32"):
        (rows, count, channels), kind = shape, getattr(mx, kind)
        self.turned = min(parts, 2)
        x, dy = (
            mx.array(cases.features(rows, parts * count * channels, seed))
            .reshape(rows, parts, count, channels)
            .astype(getattr(mx, dtype))
            for seed in (1, 2)
        )
        self.x, self.dy = 3 * x, dy
        lines = cases.features(2 * count, channels, 3).reshape(2, count, channels)
        self.scales = [(1 + 0.5 * mx.array(line)).astype(kind) for line in lines]
        self.scales = self.scales[: self.turned] if scaled else []
        angle = 9 * cases.features(rows, channels // 2, 4)
        cos, sin = (f(angle).astype(np.float32) for f in (np.cos, np.sin))
        self.angles = [mx.array(a)[:, None] for a in (cos, sin)] if turns else []
        x, dy = exact(self.x), exact(self.dy)
        self.y, self.dx, self.dscales = x.copy(), dy.copy(), []
        for part in range(self.turned):
            own, g = x[:, part], dy[:, part]
            root = 1.0
            scale = exact(self.scales[part]) if scaled else 1.0
            if scaled:
                root = ((own**2).mean(axis=2, keepdims=True) + 1e-12) ** -0.5
            z = own * root * scale
            turn = (cos + 1j * sin.astype(np.float64))[:, None] if turns else 1.0
            self.y[:, part] = paired(z, turn)
            g = paired(g, np.conj(turn))
            self.dscales.append((g * own * root).sum(axis=0))
            g = g * scale
            dot = (g * own).mean(axis=2, keepdims=True) if scaled else 0.0
            self.dx[:, part] = root * g - own * root**3 * dot

    def run(self, x, *scales):
        """Return (rows, parts, heads, D), however it is made."""
        if x.shape[1] == 1:
            scale = scales[0] if scales else None
            return turned_head(x[:, 0], scale, self.angles)[:, None]
        qkv, *rest = turned_heads(x, scales, self.angles)
        return qkv if rest[0] is None else mx.stack([qkv, *rest], axis=1)

    def check(self, place, dtype):
        def both():
            return mx.vjp(self.run, [self.x, *self.scales], [self.dy])

        for results in place.run(both).values():
            (y,), (dx, *dscales) = results[0]
            assert y.dtype == dx.dtype == self.x.dtype
            ref.assert_close(y, self.y, dtype)
            ref.assert_close(dx, self.dx, dtype)
            for found, given, wanted in zip(
                dscales, self.scales, self.dscales, strict=False
            ):
                assert found.dtype == given.dtype
                least = "float16" if given.dtype != mx.float32 else dtype
                ref.assert_close(found, wanted, least)


def paired(values, turn):
    """Pairs of neighbouring channels, turned as complex numbers."""
    z = (values[..., 0::2] + 1j * values[..., 1::2]) * turn
    return np.stack([z.real, z.imag], axis=-1).reshape(values.shape)


def derivatives(given: Given) -> None:
    """Forward mode, a gradient's gradient, and vmap, beside differences."""
    along = [mx.ones_like(a) for a in (given.x, *given.scales)]

    def total(x, *scales):
        return (given.run(x, *scales) * given.dy).sum()

    at = (given.x, *given.scales)
    grads = mx.grad(total, argnums=(0, 1, 2))(*at)
    (tangent,) = mx.jvp(total, list(at), along)[1]
    assert abs(tangent.item() - sum(g.sum() for g in grads).item()) < 1e-2
    # A gradient's gradient, beside differences of gradients.
    slope = lambda x: (mx.grad(total)(x, *given.scales) ** 2).sum()  # noqa: E731
    second, step = mx.grad(slope)(given.x), 1e-2
    way = mx.array(cases.features(7, 96, 6)).reshape(given.x.shape)
    moved_by = (slope(given.x + step * way) - slope(given.x - step * way)) / (2 * step)
    assert moved_by.item() == pytest.approx((second * way).sum().item(), rel=2e-2)
    many = mx.stack([given.x, 2 * given.x])
    with mappable():
        ref.assert_close(
            mx.vmap(lambda x: given.run(x, *given.scales))(many)[1],
            exact(given.run(2 * given.x, *given.scales)),
        )
