"""Nets that are drawn by chance: layers called by hand, in any order, on any rows.

Each part says what it does twice: by the library, and over ``exact_rows``.
"""

import exact_rows as exact
import mlx.nn
import net_layers
import net_rows
import numpy as np
import reference as ref
from net_draws import WIDTHS, Draw, Unfit
from net_rows import kept

PARTS = [
    kind
    for module in (net_layers, net_rows)
    for kind in vars(module).values()
    if isinstance(kind, type) and kind.__module__ == module.__name__
    for _ in range(kind.often)
]


def sets_of(draw: Draw, coords) -> list[exact.Rows]:
    """All sets of a net by the oracle."""
    batches = int(coords[:, 0].max()) + 1 if len(coords) else 1
    made = []
    for name, *given in draw.sets:
        if name == "given":
            made.append(exact.Rows(coords, batches))
            continue
        of = made[given[0]].coords
        if name == "cells":
            rows = ref.cell_rows(of, (2, 2, 2))
        elif name == "kept":
            rows = of[kept(of, given[1])]
        elif name == "batched":
            rows = of[np.argsort(of[:, 0], kind="stable")]
        elif name == "made":
            rows = ref.generative_rows(of, ref.kernel_offsets(2, 3), (2, 2, 2))
        else:
            rows = sorted({*ref.rows_of(of), *ref.rows_of(made[given[1]].coords)})
        made.append(made[0].of(ref.as_coords(rows, 3)))
    return made


class Net(mlx.nn.Module):
    """Parts one after the other, and some of their values."""

    def __init__(self, seed: int, length: int, widths=WIDTHS):
        super().__init__()
        self._made_of = seed, length, widths
        draw = self._draw = Draw(seed, widths)
        self.parts = []
        while len(self.parts) < length:
            try:
                part = draw.choice(PARTS)(draw)
            except Unfit:
                continue
            self.parts.append(part)
            draw.values.append(part._out)
        last = len(draw.values) - 1
        self._asked = sorted({last, max(0, last - 2), draw.choice(range(last + 1))})
        if draw.maybe():
            self._asked.reverse()

    def __call__(self, x, condition):
        """Return some values; condition: (B, CONDITION)."""
        values = [x]
        for part in self.parts:
            values.append(part(*[values[i] for i in part._at], condition))
        return [values[i] for i in self._asked]


class ExactNet:
    """The same net in float64."""

    def __init__(self, net: Net, coords, training: bool):
        self.net, self.training = net, training
        self.rows = sets_of(net._draw, coords)

    def __call__(self, parts: list, feats, condition) -> list:
        """Return the same values of the parameters of the parts, in float64."""
        self.condition, values = condition, [feats]
        draw = self.net._draw
        for part, given in zip(self.net.parts, parts, strict=True):
            self.given = given
            sets = [self.rows[draw.values[i][0]] for i in part._at]
            self.here, self.there = sets[0], sets[-1]
            values.append(part.exact(self, *[values[i] for i in part._at]))
        return [values[i] for i in self.net._asked]

    def spread(self, lines):
        """Return for each row that is read the line of its batch element."""
        return exact.taken(lines, self.here.batch)

    def convolved(self, x, kind, target=None, *, parameters=None, **facts):
        """Return a convolution of the part, or of some parameters of it."""
        given = self.given["layer"] if parameters is None else parameters
        relation = self.here.relation(kind, target, **facts)
        return exact.contracted(x, given["weight"], relation, given.get("bias"))

    def normalised(self, x, kind: str, given: dict):
        """Return a norm by some parameters."""
        if not x.shape[0]:
            return x
        return exact.normalised(x, self.here, kind, given, self.training)
