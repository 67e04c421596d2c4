"""keep_float: which layers of a net are better left in float."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx.nn import Module

from .linear import why_no_twin

__all__ = ["keep_float"]

# Words in the paths of the layers that a net's result or its rows come from.
HEADS = (
    "head", "classifier", "logits", "final", "output_layer", "to_subdiv", "out_layer",
    "to_latent",
)  # fmt: skip


class keep_float:  # noqa: N801 - reads as the predicate it is
    """A ``class_predicate`` of ``mlx.nn.quantize`` that keeps stems and heads in float.

    Layers with few input channels (stems, depthwise kernels) have nothing to pack, and
    layers with few outputs are what the net's result is made of; a subclass with a call
    of its own has no packed twin. Printed afterwards, it says which layers it kept and
    why; ``kept`` has the same as a dict.

    Args:
        few_inputs (int): Keep layers with fewer input channels a group. Default:
            ``16``.
        few_outputs (int): Keep layers with fewer output channels. Default: ``8``.
        names (tuple of str): Keep layers with one of these words in their path.
            Default: those of the ``models``' heads, and of what decides on rows.
    """

    def __init__(
        self,
        few_inputs: int = 16,
        few_outputs: int = 8,
        names: Sequence[str] = HEADS,
    ):
        self.few_inputs, self.few_outputs = few_inputs, few_outputs
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self.kept: dict[str, str] = {}

    def __call__(self, path: str, module: Module) -> bool:
        """Return whether a layer is to be packed; a kept one is noted."""
        if not hasattr(module, "to_quantized") or "scales" in module:
            return False
        reason = self._reason(path, module)
        if reason is None:
            self.kept.pop(path, None)
        else:
            self.kept[path] = reason
        return reason is None

    def _reason(self, path: str, module: Module) -> str | None:
        for name in self.names:
            if name in path.lower().split("."):
                return f'"{name}" in its path'
        why = why_no_twin(module)
        if why is not None:
            return why
        c_out, *_, c_in = module.weight.shape
        if c_in < self.few_inputs:
            return f"{c_in} input channels a group, fewer than {self.few_inputs}"
        if c_out < self.few_outputs:
            return f"{c_out} output channels, fewer than {self.few_outputs}"
        return None

    def __str__(self) -> str:
        """Return a line for each layer that was kept."""
        if not self.kept:
            return "kept in float: none"
        rows = (f"  {path}: {reason}" for path, reason in self.kept.items())
        return "\n".join(["kept in float:", *rows])

    __repr__ = __str__


def asked(predicate: Callable[[str, Module], bool], path: str, module: Module) -> bool:
    """Return whether a predicate wants a layer to be packed.

    Raises:
        TypeError: it gives options of a layer's own, as ``mlx.nn.quantize`` takes.
    """
    wanted = predicate(path, module)
    if isinstance(wanted, dict):
        raise TypeError(
            f"class_predicate must return True or False here; got {wanted} for {path}: "
            "all layers are packed alike"
        )
    return bool(wanted)
