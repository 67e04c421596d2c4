"""What is drawn by chance of a net, and what each of its parts says."""

import random

import mlx.nn

CONDITION = 5  # numbers for each batch element
WIDTHS = ((8, 16), (3, 5, 12), (32, 16), (32, 64, 8), (16,), (4, 6))


class Unfit(Exception):
    """A part cannot follow what there is."""


class Draw:
    """What was drawn so far: values, each (set, channels), and how sets are made."""

    def __init__(self, seed: int, widths=WIDTHS):
        self.rng = random.Random(seed)
        self.widths = self.rng.choice(widths)
        self.sets = [("given",)]
        self.values = [(0, self.widths[0])]
        self.choice = self.rng.choice

    def maybe(self, share: float = 0.5) -> bool:
        """Whether, by chance."""
        return self.rng.random() < share

    def width(self) -> int:
        """A number of channels."""
        return self.choice(self.widths)

    def latest(self) -> int:
        """A value, in most cases the last one."""
        count = len(self.values)
        return count - 1 if self.maybe(0.75) else self.choice(range(count)[-6:])

    def beside(self, at: int, *, any_channels: bool = False) -> int:
        """A value on the rows of another, of as many channels."""
        of, channels = self.values[at]
        fits = [
            i
            for i, (rows, c) in enumerate(self.values)
            if rows == of and (any_channels or c == channels)
        ]
        return self.choice(fits)

    def rows(self, *how) -> int:
        """The set that is made in a way."""
        if how not in self.sets:
            self.sets.append(how)
        return self.sets.index(how)

    def parent(self, of: int) -> int:
        """The finer set that a coarse one was made of."""
        name, *parents = self.sets[of]
        if name != "cells":
            raise Unfit
        return parents[0]

    def level(self, of: int) -> int:
        """How often its lattice was made coarser."""
        name, *parents = self.sets[of]
        if name == "given":
            return 0
        steps = {"cells": 1, "made": -1}.get(name, 0)
        return self.level(parents[0]) + steps


class Part(mlx.nn.Module):
    """What one line of a net does.

    ``_at``: the values that it reads; ``_out``: what it makes, (set, channels).
    ``often``: how often it is drawn.
    """

    often = 1

    def follow(self, draw: Draw) -> int:
        """Take the latest value, whose rows and channels stay; return the channels."""
        at = draw.latest()
        self._at, self._out = (at,), draw.values[at]
        return self._out[1]

    def widen(self, draw: Draw) -> tuple[int, int]:
        """Take the latest value, for other channels; return both numbers."""
        before, after = self.follow(draw), draw.width()
        self._out = self._out[0], after
        return before, after
