"""Parts of drawn nets whose rows stay: by the library, and over ``exact_rows``."""

import exact_rows as exact
import mlx.core as mx
import mlx.nn
from net_draws import CONDITION, Part, Unfit

from mlx_lattice import nn, ops

NORMS = {
    "batch": nn.BatchNorm,
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "instance": nn.InstanceNorm,
    "group 2": lambda c, **given: nn.GroupNorm(2, c, **given),
}
MODULES = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}
FREQUENT = ("relu", "relu", "relu", "silu", "gelu")


class Convolution(Part):
    """Of the rows that there are."""

    often = 6

    def __init__(self, draw):
        super().__init__()
        before, after = self.widen(draw)
        self._size = draw.choice((3, 3, 3, 1, 2, (1, 3, 3), (3, 1, 1)))
        self._dilation, groups = draw.choice((1, 1, 1, 2)), 1
        if draw.maybe(0.2):
            after = before
            groups = draw.choice([g for g in (2, before) if before % g == 0])
        self._out = self._out[0], after
        self.layer = nn.SubmConv3d(
            before, after, self._size, self._dilation, groups, draw.maybe()
        )

    def __call__(self, x, _):
        return self.layer(x)

    def exact(self, net, x):
        facts = {"kernel_size": self._size, "dilation": self._dilation}
        return net.convolved(x, "submanifold", **facts)


class Linear(Part):
    """One matrix for all rows."""

    often = 2

    def __init__(self, draw):
        super().__init__()
        self.layer = nn.Linear(*self.widen(draw), bias=draw.maybe())

    def __call__(self, x, _):
        return self.layer(x)

    def exact(self, net, x):
        return exact.linear(x, net.given["layer"])


class Norm(Part):
    """By the layer's call alone."""

    often = 6

    def __init__(self, draw):
        super().__init__()
        channels = self.follow(draw)
        fits = [k for k in NORMS if k != "group 2" or channels % 2 == 0]
        self._kind = draw.choice(("batch", *fits))
        affine = {} if self._kind == "rms" else {"affine": draw.maybe(0.8)}
        self.layer = NORMS[self._kind](channels, **affine)

    def __call__(self, x, _):
        return self.layer(x)

    def exact(self, net, x):
        return net.normalised(x, self._kind, net.given["layer"])


class NormAndMore(Norm):
    """With a residual and an activation as its arguments."""

    often = 2

    def __init__(self, draw):
        super().__init__(draw)
        if self._kind == "rms":
            raise Unfit
        self._at = (*self._at, draw.beside(self._at[0]))
        self._act = draw.choice(("relu", "silu", "gelu", None))

    def __call__(self, x, other, _):
        return self.layer(x, residual=other, activation=self._act)

    def exact(self, net, x, other):
        return exact.ACTIVATIONS[self._act](super().exact(net, x) + other)


class Activation(Part):
    """A function, or a module."""

    often = 6

    def __init__(self, draw):
        super().__init__()
        self.follow(draw)
        self._name = draw.choice(FREQUENT if draw.maybe() else tuple(MODULES))
        self._is_module = draw.maybe()

    def __call__(self, x, _):
        return MODULES[self._name]()(x) if self._is_module else self._function(x)

    def _function(self, x):
        return getattr(ops, self._name)(x)

    def exact(self, net, x):
        return exact.ACTIVATIONS[self._name](x)


class Sum(Part):
    """Of two values, or of one twice."""

    often = 5

    def __init__(self, draw):
        super().__init__()
        self.follow(draw)
        self._at = (*self._at, draw.beside(self._at[0]))

    def __call__(self, x, other, _):
        return x + other

    def exact(self, net, x, other):
        return x + other


class Product(Sum):
    """Of two values."""

    often = 1

    def __call__(self, x, other, _):
        return x * other

    def exact(self, net, x, other):
        return x * other


class Joined(Part):
    """Channels beside each other, and a layer of them."""

    often = 2

    def __init__(self, draw):
        super().__init__()
        before, after = self.widen(draw)
        other = draw.beside(self._at[0], any_channels=True)
        self._at, before = (*self._at, other), before + draw.values[other][1]
        self._is_linear = draw.maybe()
        size = () if self._is_linear else (3,)
        kind = nn.Linear if self._is_linear else nn.SubmConv3d
        self.layer = kind(before, after, *size, bias=draw.maybe())

    def __call__(self, x, other, _):
        return self.layer(ops.cat([x, other]))

    def exact(self, net, x, other):
        x = mx.concatenate([x, other], 1)
        if self._is_linear:
            return exact.linear(x, net.given["layer"])
        return net.convolved(x, "submanifold", kernel_size=3)


class Conditioned(Part):
    """Scaled and moved, or gated, by lines of the batch elements."""

    often = 2

    def __init__(self, draw):
        super().__init__()
        channels, self._is_gate = self.follow(draw), draw.maybe()
        self.layer = mlx.nn.Linear(CONDITION, channels * (2 - self._is_gate))

    def __call__(self, x, condition):
        lines = self.layer(condition)
        if self._is_gate:
            return ops.gate(x, lines)
        return ops.modulate(x, *mx.split(lines, 2, -1))

    def exact(self, net, x):
        lines = exact.linear(net.condition, net.given["layer"])
        if self._is_gate:
            return x * net.spread(lines)
        shift, scale = (net.spread(a) for a in mx.split(lines, 2, -1))
        return x * (1 + scale) + shift


class Squeezed(Part):
    """Gated by what a global pool makes of it."""

    def __init__(self, draw):
        super().__init__()
        channels = self.follow(draw)
        self.layer, self._mode = (
            mlx.nn.Linear(channels, channels),
            draw.choice(("avg", "max", "sum")),
        )

    def __call__(self, x, _):
        lines = getattr(ops, f"global_{self._mode}_pool")(x)
        if not len(lines):  # by whose number MLX's matmul on CUDA divides
            return x
        return ops.gate(x, mx.sigmoid(self.layer(lines * 0.1)))

    def exact(self, net, x):
        mode = {"avg": "mean"}.get(self._mode, self._mode)
        lines = exact.reduced(x, net.here.batch, net.here.batches, mode)
        lines = mx.sigmoid(exact.linear(lines * 0.1, net.given["layer"]))
        return x * net.spread(lines)


class Half(Part):
    """Some of the channels, and a layer of them."""

    def __init__(self, draw):
        super().__init__()
        before, after = self.widen(draw)
        self._half = before // 2
        self.layer = nn.SubmConv3d(self._half, after, 3)

    def __call__(self, x, _):
        return self.layer(x.replace(feats=x.feats[:, : self._half]))

    def exact(self, net, x):
        return net.convolved(x[:, : self._half], "submanifold", kernel_size=3)


class Scalar(Part):
    """With a number."""

    often = 2
    WAYS = {
        "by": lambda x, a: x * a,
        "number_first": lambda x, a: a * x,
        "over": lambda x, a: x / a,
        "less": lambda x, a: x - a,
        "negative": lambda x, a: -x,
        "more": lambda x, a: x + a,
    }

    def __init__(self, draw):
        super().__init__()
        self.follow(draw)
        self._how = self.WAYS[draw.choice(tuple(self.WAYS))]
        self._number = draw.rng.uniform(0.5, 2)

    def __call__(self, x, _):
        return self._how(x, self._number)

    def exact(self, net, x):
        return self._how(x, self._number)


class Read(Part):
    """Looked at: what waits is computed."""

    often = 2
    WAYS = {
        "feats": lambda x: (x.feats, x)[1],
        "length": lambda x: (len(x), x.shape, x)[-1],
        "replaced": lambda x: x.replace(feats=x.feats),
        "set": lambda x: Read.set(x.replace(feats=x.feats * 2), x.feats),
    }

    def __init__(self, draw):
        super().__init__()
        self.follow(draw)
        self._how = self.WAYS[draw.choice(tuple(self.WAYS))]

    @staticmethod
    def set(x, feats):
        """Give it other features."""
        x.feats = feats
        return x

    def __call__(self, x, _):
        return self._how(x)

    def exact(self, net, x):
        return x


class Factors(Part):
    """Each channel by a factor, beside another value."""

    often = 2

    def __init__(self, draw):
        super().__init__()
        self.layer = nn.LayerScale(self.follow(draw), 0.5)
        self._at = (*self._at, draw.beside(self._at[0]))

    def __call__(self, x, other, _):
        return other + self.layer(x)

    def exact(self, net, x, other):
        return other + x * net.given["layer"]["gamma"]


class Attended(Part):
    """Rows look at those of their window, by keys and values of layers."""

    def __init__(self, draw):
        super().__init__()
        channels = self.follow(draw)
        self._heads = 2 if channels % 2 == 0 else 1
        self._window, self._shift = draw.choice((2, 5)), draw.choice((0, 1))
        self.layer = nn.Linear(channels, 3 * channels)

    def __call__(self, x, _):
        shape = len(x), 3, self._heads, x.channels // self._heads
        parts, facts = self.layer(x).feats.reshape(shape), {"shift": self._shift}
        y = ops.window_attention(parts, None, None, x, self._window, **facts)
        return x.replace(y.reshape(x.shape))

    def exact(self, net, x):
        if not x.shape[0]:
            return x
        coords = net.here.coords.copy()
        coords[:, 1:] = (coords[:, 1:] + self._shift) // self._window
        return exact.attended(exact.linear(x, net.given["layer"]), self._heads, coords)


class InSequence(Part):
    """A Sequential of a convolution, a norm and an activation, or some of them."""

    often = 3

    def __init__(self, draw):
        super().__init__()
        before, after = self.widen(draw)
        self._kind = draw.choice((None, "batch", "batch", "layer", "instance"))
        self._act = draw.choice((None, *MODULES))
        parts = [nn.SubmConv3d(before, after, 3, bias=draw.maybe())]
        parts += [NORMS[self._kind](after)] if self._kind else []
        parts += [MODULES[self._act]()] if self._act else []
        self.layer = nn.Sequential(*parts)

    def __call__(self, x, _):
        return self.layer(x)

    def exact(self, net, x):
        conv, *rest = net.given["layer"]["layers"]
        x = net.convolved(x, "submanifold", parameters=conv, kernel_size=3)
        if self._kind:
            x = net.normalised(x, self._kind, rest[0])
        return exact.ACTIVATIONS[self._act](x)


class Block(Part):
    """A residual block, by hand."""

    often = 3

    def __init__(self, draw):
        super().__init__()
        channels = self.follow(draw)
        self.convs = [nn.SubmConv3d(channels, channels, 3, bias=False) for _ in "ab"]
        self.norms = [nn.BatchNorm(channels) for _ in "ab"]

    def __call__(self, x, _):
        out = ops.relu(self.norms[0](self.convs[0](x)))
        return ops.relu(self.norms[1](self.convs[1](out)) + x)

    def exact(self, net, x):
        out, own = x, net.given
        for i, (conv, norm) in enumerate(zip(own["convs"], own["norms"], strict=True)):
            out = net.convolved(out, "submanifold", parameters=conv, kernel_size=3)
            out = net.normalised(out, "batch", norm) + (x if i else 0)
            out = exact.ACTIVATIONS["relu"](out)
        return out
