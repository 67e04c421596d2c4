"""What calibration for int8 features knows of one layer, and of each call of it.

A net may call a layer several times, a head over levels say. The report tells the error
of each call: features of a small one count little in the layer's error over all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.nn import Module

from ..integer_weight import IntegerWeight
from .calibration_report import LayerError
from .integer_search import Samples


class Turns:
    """Which call of a layer it is in a run of the model, from 0 on."""

    def __init__(self):
        self._made: Counter[tuple[str, int]] = Counter()

    def start(self) -> None:
        """Begin a run."""
        self._made.clear()

    def next(self, what: str, module: Module) -> int:
        """Return the place of a call, counted for each ``what`` apart."""
        key = what, id(module)
        self._made[key] += 1
        return self._made[key] - 1


class Compared:
    """Sums over the results of one call of a layer, in all batches.

    Args:
        errors: (3,) float32: of the plain error, of the chosen one, of the output;
            squared.
        shift: (C_out,) float32 (float result - integer result).
        rows: count of rows.
    """

    def __init__(self, errors: mx.array, shift: mx.array, rows: int):
        self.errors, self.shift, self.rows = errors, shift, rows

    def __add__(self, other: Compared | None) -> Compared:
        """Return the sums of both, evaluated."""
        made = self
        if other is not None:
            errors, shift = self.errors + other.errors, self.shift + other.shift
            made = Compared(errors, shift, self.rows + other.rows)
        mx.eval(made.errors, made.shift)
        return made

    def error(self, chosen: bool, mean: mx.array | None = None) -> float:
        """Return the norm of an error over that of the output.

        Args:
            chosen: the error of what was chosen, else of the plain rounding.
            mean: (C_out,), what the layer adds to its results.
        """
        plain, wrong, whole = self.errors.tolist()
        wrong = wrong if chosen else plain
        if mean is not None:
            moved = self.rows * mx.square(mean) - 2 * mean * self.shift
            wrong = max(0.0, wrong + moved.sum().item())
        return (wrong / (whole or 1.0)) ** 0.5


@dataclass(eq=False)
class Layer:
    """What is known of one layer.

    Attributes:
        module: the float layer.
        paths: where it stands in the model.
        bits, group_size: of its weight.
        trained: its scale of features from training with ``FakeQuant``, or None.
        fixed: whether it was trained so: then nothing is searched.
        inputs: magnitudes of features.
        squares: sums of squares of the input channels, and count of rows.
        rows: count of rows of the features.
        calls: of the layer, whether anything is fused into it or not.
        scale, weight: of features and in integers, as chosen.
        by_row: whether rows have scales of their own, as calls differ too much for one.
        notes: what the report says of that.
        plain: weight and scale by the greatest magnitudes.
        compared: results, by the place of the call in a run.
    """

    module: Module
    paths: list[str]
    bits: int
    group_size: int | None
    trained: mx.array | None = None
    fixed: bool = False
    inputs: Samples = field(default_factory=Samples)
    squares: mx.array | None = None
    rows: int = 0
    calls: int = 0
    scale: mx.array | None = None
    weight: IntegerWeight | None = None
    by_row: bool = False
    notes: list[str] = field(default_factory=list)
    plain: tuple[IntegerWeight, mx.array] | None = None
    compared: dict[int, Compared] = field(default_factory=dict)

    @property
    def whole(self) -> Compared | None:
        """The sums over all calls."""
        total = None
        for each in self.compared.values():
            total = each + total
        return total

    @property
    def mean(self) -> mx.array | None:
        """What rounding takes from the mean of each output channel, which is put back.

        None where nothing was seen, of layers that were trained for it, and where calls
        differ: the mean of large features is wrong for small ones.
        """
        whole = self.whole
        if self.fixed or self.by_row or whole is None or not whole.rows:
            return None
        return whole.shift / whole.rows

    @property
    def after(self) -> float | None:
        """The error of what was chosen, without what the shift takes back."""
        whole = self.whole
        return None if whole is None else whole.error(True, self.mean)

    def said(self, path: str, writes_int8: bool) -> LayerError:
        """Return what the report says of the layer."""
        whole, mean = self.whole, self.mean
        before = None if whole is None else whole.error(False)
        calls = [
            self.compared[turn].error(True, mean) for turn in sorted(self.compared)
        ]
        calls = calls if len(calls) > 1 else []
        facts = before, self.after, writes_int8, tuple(calls), "; ".join(self.notes)
        return LayerError(path, *facts)
