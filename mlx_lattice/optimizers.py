"""SGD, Adam and AdamW that update many parameters in one launch.

Classes, arguments, states and formulas are those of ``mlx.optimizers``, and either can
continue with the state of the other. On Metal and CUDA one launch updates up to 32
parameters (5 on Metal). Kernels compute in float32 and round once. On other devices,
and for arrays that are not float32, float16 or bfloat16, MLX's own step runs.

With ``master_weights`` the state has a float32 copy of each half parameter, to which
steps are added (Micikevicius et al., "Mixed Precision Training", 2018). If a parameter
is set between two steps, as by ``load_weights``, the copy takes its value.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.optimizers
from mlx.utils import tree_flatten, tree_map

from . import registry
from .backends.gpu import optimizers as gpu_optimizers
from .backends.gpu.optimizers import Rule
from .checks import LatticeWarning

__all__ = ["SGD", "Adam", "AdamW"]

HALVES = mx.float16, mx.bfloat16
LEAST_ROOT = 2.0**-12  # square root of the smallest float16


class _Batched:
    """Updates all parameters of one dtype in few launches."""

    def __init__(self, *args, master_weights: bool = False, **options):
        super().__init__(*args, **options)
        self.master_weights = master_weights

    def init_single(self, parameter: mx.array, state: dict) -> None:
        """Initialize the state of a parameter."""
        if self._has_master(parameter):
            state["master"] = parameter = parameter.astype(mx.float32)
        super().init_single(parameter, state)

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict
    ) -> mx.array:
        """Return the updated parameter by MLX's own step; the state is updated."""
        # Half is computed in float32: in half Adam's ``eps`` is 0, and so is the square
        # of a gradient below 2e-4.
        if parameter.dtype not in HALVES:
            return super().apply_single(gradient, parameter, state)
        own = parameter.astype(mx.float32)
        if self._has_master(parameter):
            master = state.get("master", own)
            own = mx.where(master.astype(parameter.dtype) == parameter, master, own)
        halves = {n: a.dtype for n, a in state.items() if a.dtype in HALVES}
        state.update((name, state[name].astype(mx.float32)) for name in halves)
        wide = super().apply_single(gradient.astype(mx.float32), own, state)
        state.update((name, state[name].astype(kind)) for name, kind in halves.items())
        if self._has_master(parameter):
            state["master"] = wide
        return wide.astype(parameter.dtype)

    def _has_master(self, parameter: mx.array) -> bool:
        return self.master_weights and parameter.dtype in HALVES

    def apply_gradients(self, gradients: dict, parameters: dict) -> dict:
        """Return the updated parameters; the state is updated."""
        if not self._initialized or _misses(self.state, gradients):
            self.init(gradients)
        kernels = registry.updates()
        if kernels is None:
            return super().apply_gradients(gradients, parameters)
        super().apply_gradients({}, {})  # schedules and the number of the step
        rule, names = self._rule()
        # Of parameters without a master copy, and of those with one.
        rules = (rule, names), (rule.with_master, ("master", *names))
        batches: tuple[list, list] = ([], [])
        leaves: list[tuple] = []
        tree_map(lambda *leaf: leaves.append(leaf), gradients, parameters, self.state)
        updated: list[mx.array | None] = [None] * len(leaves)
        for at, (gradient, parameter, state) in enumerate(leaves):
            has_master = self._has_master(parameter)
            if has_master and "master" not in state:
                state["master"] = parameter.astype(mx.float32)
            rule, names = rules[has_master]
            arrays = gradient, parameter, *[state[name] for name in names]
            if kernels.takes(arrays, rule):
                batches[has_master].append((at, arrays))
            else:
                updated[at] = self.apply_single(gradient, parameter, state)
        for (rule, names), batch in zip(rules, batches, strict=True):
            if batch:
                found = kernels.step(
                    rule, self._rates(), [arrays for _, arrays in batch]
                )
                for (at, _), (updated[at], *states) in zip(batch, found, strict=True):
                    leaves[at][2].update(zip(names, states, strict=True))
        results = iter(updated)
        return tree_map(lambda _: next(results), gradients)

    def _rule(self) -> tuple[Rule, tuple[str, ...]]:
        """Return the kernel's rule, and the names of its states."""
        raise NotImplementedError

    def _rates(self) -> mx.array:
        """Return (8,) float32: the numbers that the rule's kernel reads."""
        raise NotImplementedError


class SGD(_Batched, mlx.optimizers.SGD):
    """Update parameters as ``mlx.optimizers.SGD`` does, in few launches.

    Args:
        learning_rate (float or callable): The learning rate, or a schedule.
        momentum (float): The momentum strength. Default: ``0``.
        weight_decay (float): The weight decay (L2 penalty). Default: ``0``.
        dampening (float): Dampening for momentum. Default: ``0``.
        nesterov (bool): If ``True`` use Nesterov momentum. Default: ``False``.
        master_weights (bool): If ``True`` keep float32 copies of half-precision
            parameters. Default: ``False``.

    Examples:
        >>> net = nn.Linear(4, 2)
        >>> optimizer = optimizers.SGD(learning_rate=0.1, momentum=0.9)
        >>> optimizer.update(net, {"weight": mx.ones((2, 4))})
        >>> optimizer.step.item()
        1
    """

    def _rule(self) -> tuple[Rule, tuple[str, ...]]:
        if self.momentum <= 0:
            return gpu_optimizers.SGD, ()
        nesterov = gpu_optimizers.NESTEROV if self.nesterov else gpu_optimizers.MOMENTUM
        return nesterov, ("v",)

    def _rates(self) -> mx.array:
        gain = 1 - self.dampening if self.dampening > 0 else 1.0
        return _line([self.learning_rate], self.weight_decay, self.momentum, gain)


class Adam(_Batched, mlx.optimizers.Adam):
    """Update parameters as ``mlx.optimizers.Adam`` does, in few launches.

    Args:
        learning_rate (float or callable): The learning rate, or a schedule.
        betas (tuple): The coefficients of the running averages of the gradient and its
            square. Default: ``(0.9, 0.999)``.
        eps (float): Added to the denominator. Default: ``1e-8``.
        bias_correction (bool): If ``True`` apply bias correction. Default: ``False``.
        master_weights (bool): If ``True`` keep float32 copies of half-precision
            parameters. Default: ``False``.

    Examples:
        >>> net = nn.Linear(4, 2)
        >>> optimizer = optimizers.Adam(learning_rate=1e-3)
        >>> optimizer.update(net, {"weight": mx.ones((2, 4))})
        >>> optimizer.step.item()
        1
    """

    def init(self, parameters: dict[str, Any]) -> None:
        """Initialize the state; warn of float16 that holds no squares of gradients."""
        super().init(parameters)
        if self.master_weights or self.eps >= LEAST_ROOT:
            return
        kinds = {array.dtype for _, array in tree_flatten(parameters)}
        if mx.float16 in kinds:
            warnings.warn(
                f"{type(self).__name__} keeps averages of squared gradients in "
                "float16, where those below 6e-8 are 0: its steps are then many times "
                "too large. Pass master_weights=True, which keeps them in float32, or "
                "train in bfloat16",
                LatticeWarning,
                stacklevel=2,
            )

    def _rule(self) -> tuple[Rule, tuple[str, ...]]:
        return gpu_optimizers.ADAM, ("m", "v")

    def _rates(self) -> mx.array:
        rate, (b1, b2) = self.learning_rate, self.betas
        rates, constants = [rate, 1 - rate * self._decay()], (1.0,)
        if self.bias_correction:
            step, constants = self.step.astype(mx.float32), ()
            rates = [rate / (1 - b1**step), rates[1], mx.rsqrt(1 - b2**step)]
        return _line(rates, *constants, b1, 1 - b1, b2, 1 - b2, self.eps)

    def _decay(self) -> float:
        return 0.0


class AdamW(Adam, mlx.optimizers.AdamW):
    """Update parameters as ``mlx.optimizers.AdamW`` does, in few launches.

    Arguments are those of ``Adam``, and ``weight_decay`` (float). Default: ``0.01``.

    Examples:
        >>> net = nn.Linear(4, 2)
        >>> optimizer = optimizers.AdamW(learning_rate=1e-3, weight_decay=0.05)
        >>> optimizer.update(net, {"weight": mx.ones((2, 4))})
        >>> optimizer.step.item()
        1
    """

    def _decay(self) -> float:
        return self.weight_decay


def _misses(states, gradients) -> bool:
    """Whether parameters that were frozen until this step have no state."""
    if isinstance(gradients, mx.array):
        return False
    if not isinstance(gradients, dict):
        short = len(states) < len(gradients)
        return short or any(map(_misses, states, gradients))
    return any(
        name not in states or _misses(states[name], gradient)
        for name, gradient in gradients.items()
    )


def _line(rates: list[mx.array], *constants: float) -> mx.array:
    """Return eight float32: on Metal fewer would not be in device memory."""
    each = [a.astype(mx.float32).reshape(1) for a in rates]
    return mx.concatenate([*each, _constants(constants, 8 - len(rates))])


@lru_cache(maxsize=256)
def _constants(values: tuple[float, ...], count: int) -> mx.array:
    return mx.array([*values, *[0.0] * (count - len(values))], dtype=mx.float32)
