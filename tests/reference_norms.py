"""The oracle of norms by channel with what follows them: float64, forward and back."""

import math

import numpy as np

# Name: (value, derivative), of float64.
erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(v):
    return 0.5 * v * (1 + erf(v / math.sqrt(2)))


def _gelu_slope(v):
    density = np.exp(-v * v / 2) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + erf(v / math.sqrt(2))) + v * density


def _sigmoid(v):
    return 1 / (1 + np.exp(np.minimum(-v, 700)))


def _gelu_tanh(v):
    return v * (1 + np.tanh((2 / np.pi) ** 0.5 * (v + 0.044715 * v**3))) / 2


def _gelu_tanh_slope(v):
    t = np.tanh((2 / np.pi) ** 0.5 * (v + 0.044715 * v**3))
    inner = (2 / np.pi) ** 0.5 * (1 + 3 * 0.044715 * v**2)
    return (1 + t) / 2 + v * (1 - t**2) * inner / 2


ACTIVATIONS = {
    None: (lambda v: v, np.ones_like),
    "relu": (lambda v: np.maximum(v, 0), lambda v: (v > 0) * 1.0),
    "leaky_relu": (
        lambda v: np.where(v < 0, 0.01 * v, v),
        lambda v: np.where(v < 0, 0.01, 1.0),
    ),
    "elu": (
        lambda v: np.where(v < 0, np.expm1(np.minimum(v, 0)), v),
        lambda v: np.exp(np.minimum(v, 0)),
    ),
    "gelu": (_gelu, _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "silu": (
        lambda v: v * _sigmoid(v),
        lambda v: _sigmoid(v) * (1 + v * (1 - _sigmoid(v))),
    ),
}


class Norm:
    """``y = act((x - mean) / sqrt(var + eps) * weight + bias + residual)``.

    Args:
        x: (N, C) float64.
        weight, bias: (C,), or None.
        residual: (N, C), or None.
        act: a name of ``ACTIVATIONS``.
        of: (N,) the segment of each row; by default one for all.
        statistics: (C,) mean and variance that are given, or None.
        groups: of channels that share statistics; by default one a channel.
    """

    def __init__(
        self, x, weight=None, bias=None, residual=None, act=None, of=None,
        statistics=None, groups=None, eps=1e-5,
    ):  # fmt: skip
        self.x, (n, c) = x, x.shape
        self.of = np.zeros(n, int) if of is None else np.asarray(of)
        self.groups, self.fixed = groups or c, statistics is not None
        self.weight = np.ones(c) if weight is None else weight
        mean, var = statistics if self.fixed else (self.mean(x), None)
        var = self.mean((x - mean) ** 2) if var is None else var
        self.rstd = 1 / np.sqrt(var + eps) * np.ones_like(x)
        self.hat = (x - mean) * self.rstd
        v = self.hat * self.weight
        v = v if bias is None else v + bias
        self.v = v if residual is None else v + residual
        self.slope = ACTIVATIONS[act][1](self.v)
        self.y = ACTIVATIONS[act][0](self.v)

    def mean(self, values):
        """Of each row's segment and group, for every entry."""
        means, width = np.zeros_like(values), values.shape[1] // self.groups
        for s in set(self.of.tolist()):
            rows = np.flatnonzero(self.of == s)
            for g in range(self.groups):
                block = np.ix_(rows, range(g * width, (g + 1) * width))
                means[block] = values[block].mean()
        return means

    def back(self, dy):
        """dx, dweight, dbias, dresidual."""
        g = dy * self.slope
        dx = self.weight * g
        if not self.fixed:
            dx = dx - self.mean(dx) - self.hat * self.mean(dx * self.hat)
        return self.rstd * dx, (g * self.hat).sum(axis=0), g.sum(axis=0), g
