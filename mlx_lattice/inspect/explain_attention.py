"""explain_attention(): whether MLX's fused kernel computes it, and why."""

from __future__ import annotations

from dataclasses import dataclass

from .. import devices
from ..backends import portable_only, registry
from ..devices import CPU, METAL, Device
from ..ops import observed
from ..ops.fused_attention import Call
from ..ops.observed import COMPOSED, Attended
from ..routes import launch
from ..tensor import SparseTensor


@dataclass(frozen=True)
class AttentionForm:
    """Calls of attention of one form, on a device.

    Attributes:
        count: how many there are.
        call: one of them, as it is asked for.
        width: channels of a head that are computed.
        fused: whether MLX's fused kernel takes them, outside of training.
    """

    count: int
    call: Call
    width: int
    fused: bool

    def __str__(self) -> str:
        """Return it in one line."""
        c, form = self.call, "fused" if self.fused else "composed by MLX"
        calls = "1 call" if self.count == 1 else f"{self.count} calls"
        groups = "1 group" if c.groups == 1 else f"{c.groups} groups"
        if self.width != c.channels:
            form += f", heads of {c.channels} padded to {self.width}"
        return (
            f"{calls} of {groups}, {c.heads} heads of {c.channels}, "
            f"{c.queries:,} queries, {c.keys:,} keys: {form}"
        )


@dataclass(frozen=True)
class AttentionExplanation:
    """How the attention of a layer is computed on a device. Prints as lines.

    Attributes:
        device: the profile.
        attended: what was asked for, in order; ``kernel`` is that of this machine.
        forms: of each of them, the calls of MLX's attention; none where another kernel
            computes it.
    """

    device: Device
    attended: tuple[Attended, ...]
    forms: tuple[tuple[AttentionForm, ...], ...]

    def __str__(self) -> str:
        """Return a line for each attention, and one for each form of its calls."""
        lines = []
        for told, forms in zip(self.attended, self.forms, strict=True):
            head = f"{told.rule} attention on {self.device.name}"
            if not forms:
                own = "two products and a softmax, with a bias of the scores"
                what = own if told.kernel == COMPOSED else "the CPU's kernel"
                lines.append(f"{head}: {what}")
            else:
                lines.append(f"{head}, {told.padding:.3g} times the useful pairs")
                lines += [f"  {form}" for form in forms]
        return "\n".join(lines)


def explain_attention(
    x: SparseTensor, layer, *, device: str | Device | None = None
) -> AttentionExplanation:
    """Explain whether MLX's fused kernel computes a layer's attention.

    Nothing is computed but the groups of rows.

    Args:
        x: the input.
        layer: a layer, or a function of ``x``, that attends among its rows.
        device: a profile or its name; by default the one that MLX runs on.

    Raises:
        ValueError: the layer attends to nothing.
    """
    device = devices.current() if device is None else devices.profile(device)
    seen: list[Attended] = []
    by_mlx = device.backend != CPU or registry.serving() != CPU
    with (
        observed.attention.observe(seen.append),
        launch.planned(lambda launched: None, device),
    ):
        if by_mlx:
            with portable_only():
                layer(x)
        else:
            layer(x)
    if not seen:
        raise ValueError(
            "the layer attends to nothing; ml.explain explains a convolution, and "
            "ml.trace(model) a whole net"
        )
    forms = (tuple(_form(*form, device) for form in told.forms) for told in seen)
    return AttentionExplanation(device, tuple(seen), tuple(forms))


def _form(count: int, call: Call, device: Device) -> AttentionForm:
    wide = call.widened() if device.backend == METAL else call
    return AttentionForm(count, call, wide.channels, wide.fused_on(device))
