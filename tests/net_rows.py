"""Parts of drawn nets of other rows: by the library, and over ``exact_rows``."""

import exact_rows as exact
import numpy as np
import reference as ref
from net_draws import Part, Unfit

from mlx_lattice import nn, ops


def kept(coords, residue: int):
    """Which rows a net keeps, by their coordinates."""
    return coords[:, 1:].sum(1) % 3 != residue


class Down(Part):
    """Onto coarser rows."""

    often = 3

    def __init__(self, draw):
        super().__init__()
        pair, self._size = self.widen(draw), draw.choice((2, 3))
        if draw.level(self._out[0]) > 2:
            raise Unfit
        self._out = draw.rows("cells", self._out[0]), pair[1]
        self.layer = nn.Conv3d(*pair, self._size, stride=2, bias=draw.maybe())

    def __call__(self, x, _):
        return self.layer(x)

    def exact(self, net, x):
        return net.convolved(x, "forward", kernel_size=self._size, stride=2)


class Up(Part):
    """Onto the finer rows again."""

    often = 3

    def __init__(self, draw):
        super().__init__()
        pair, self._size = self.widen(draw), draw.choice((2, 3))
        self._out = draw.parent(self._out[0]), pair[1]
        self.layer = nn.ConvTranspose3d(*pair, self._size, stride=2, bias=draw.maybe())

    def __call__(self, x, _):
        return self.layer(x)

    def exact(self, net, x):
        facts = {"kernel_size": self._size, "stride": 2}
        return net.convolved(x, "transposed", net.rows[self._out[0]], **facts)


class Onto(Part):
    """Onto the rows of another value."""

    def __init__(self, draw):
        super().__init__()
        pair, other = self.widen(draw), draw.latest()
        target = draw.values[other][0]
        if draw.level(target) != draw.level(self._out[0]):
            raise Unfit
        self._at, self._out = (*self._at, other), (target, pair[1])
        self.layer = nn.Conv3d(*pair, 3, bias=draw.maybe())

    def __call__(self, x, other, _):
        return self.layer(x, coordinates=other)

    def exact(self, net, x, _):
        return net.convolved(x, "target", net.rows[self._out[0]], kernel_size=3)


class Made(Part):
    """Onto finer rows that it makes."""

    def __init__(self, draw):
        super().__init__()
        pair = self.widen(draw)
        if draw.level(self._out[0]) < 1:
            raise Unfit
        self._out = draw.rows("made", self._out[0]), pair[1]
        self.layer = nn.GenerativeConvTranspose3d(*pair, 2, stride=2)

    def __call__(self, x, _):
        return self.layer(x)

    def exact(self, net, x):
        return net.convolved(x, "generative", kernel_size=2, stride=2)


class Pool(Part):
    """Onto coarser rows, by the greatest, the sum or the mean."""

    often = 2

    def __init__(self, draw):
        super().__init__()
        channels, self._mode = self.follow(draw), draw.choice(("max", "avg", "sum"))
        if draw.level(self._out[0]) > 2:
            raise Unfit
        self._out = draw.rows("cells", self._out[0]), channels

    def __call__(self, x, _):
        return getattr(ops, f"{self._mode}_pool3d")(x, 2, 2)

    def exact(self, net, x):
        mode = {"avg": "mean"}.get(self._mode, self._mode)
        relation = net.here.relation("forward", kernel_size=2, stride=2)
        return exact.pooled(x, relation, mode)


class Nearest(Part):
    """Onto the finer rows, each as its coarse one."""

    def __init__(self, draw):
        super().__init__()
        channels = self.follow(draw)
        self._out = draw.parent(self._out[0]), channels

    def __call__(self, x, _):
        return ops.upsample_nearest3d(x, 2)

    def exact(self, net, x):
        facts = {"kernel_size": 2, "stride": 2}
        target = net.rows[self._out[0]]
        return exact.pooled(x, net.here.relation("transposed", target, **facts), "sum")


class Pruned(Part):
    """Some of the rows."""

    often = 2

    def __init__(self, draw):
        super().__init__()
        channels, self._residue = self.follow(draw), draw.choice((0, 1))
        self._out = draw.rows("kept", self._out[0], self._residue), channels

    def __call__(self, x, _):
        return ops.prune(x, kept(x.coords, self._residue))

    def exact(self, net, x):
        return exact.taken(x, np.flatnonzero(kept(net.here.coords, self._residue)))


class United(Part):
    """All rows that one of two values has."""

    often = 2

    def __init__(self, draw):
        super().__init__()
        channels, of = self.follow(draw), self._out[0]
        level = draw.level(of)
        fits = [
            i
            for i, (rows, c) in enumerate(draw.values)
            if c == channels and draw.level(rows) == level
        ]
        other = draw.choice(fits)
        self._at = (*self._at, other)
        self._out = draw.rows("union", of, draw.values[other][0]), channels

    def __call__(self, x, other, _):
        return ops.union(x, other)

    def exact(self, net, x, other):
        places, sets = net.rows[self._out[0]].places, (net.here, net.there)
        parts = []
        for rows, feats in zip(sets, (x, other), strict=True):
            at = [places[row] for row in ref.rows_of(rows.coords)]
            parts.append(exact.added(feats, at, len(places)))
        return sum(parts)


class Apart(Part):
    """Each batch element by itself, and all together again."""

    def __init__(self, draw):
        super().__init__()
        before, after = self.widen(draw)
        self._out = draw.rows("batched", self._out[0]), after
        self.layer = nn.SubmConv3d(before, after, 3)

    def __call__(self, x, _):
        parts = [self.layer(part) for part in ops.unbatch(x)]
        return ops.batch(parts) if parts else self.layer(x)

    def exact(self, net, x):
        y = net.convolved(x, "submanifold", kernel_size=3)
        return exact.taken(y, np.argsort(net.here.batch, kind="stable"))
