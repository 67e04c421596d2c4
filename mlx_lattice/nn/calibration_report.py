"""Calibration: what quantisation did to every layer of a net, as calibrate says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerError:
    """What quantisation does to one layer's output on the batches.

    Attributes:
        path: the layer's path in the model.
        before: norm of the output's error over that of the output, where weights and
            features are rounded by their greatest magnitudes; None where no batch
            reached the layer.
        after: the same with what was chosen.
        writes_int8: whether the layer's result stays int8 for the next one.
        calls: ``after`` of each call, where the model calls the layer several times.
        note: where the calls differ too much for one scale, what was done, and why.
    """

    path: str
    before: float | None
    after: float | None
    writes_int8: bool = False
    calls: tuple[float, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        """Return "0.412% plain 0.305% calibrated, to int8, worst of 2 calls 0.5%"."""
        if self.before is None:
            return "not reached by the batches"
        text = f"{self.before:8.3%} plain {self.after:8.3%} calibrated"
        text += ", to int8" if self.writes_int8 else ""
        if self.calls:
            text += f", worst of {len(self.calls)} calls {max(self.calls):.1%}"
        return f"{text}; {self.note}" if self.note else text


@dataclass(frozen=True)
class Calibration:
    """Errors of every layer that was packed. Prints as a table.

    Attributes:
        bits, group_size: how weights were packed.
        layers: one a packed layer, in the model's order.
        kept: path and reason of each layer that stays in float.
        activations: bits of features, 8 or None for floats.
        method: how scales of features were chosen, "" for floats.
        folded: paths of the norms that are in the convolution before them.
    """

    bits: int
    group_size: int | None
    layers: tuple[LayerError, ...]
    kept: dict[str, str]
    activations: int | None = None
    method: str = ""
    folded: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a row a layer: its error before and after."""
        names = [e.path for e in self.layers] + list(self.kept)
        width = max(map(len, names), default=0)
        head = f"int{self.bits}"
        head += f" in groups of {self.group_size}" if self.group_size else ""
        if self.activations:
            head += f", int{self.activations} features by {self.method}"
        lines = [f"{head}: error of outputs"]
        lines += [f"  {e.path:<{width}}  {e}" for e in self.layers]
        lines += [f"  {path:<{width}}  float: {why}" for path, why in self.kept.items()]
        return "\n".join(lines)

    __repr__ = __str__
