"""Samplers of flow models: Euler's steps from noise to data, with guidance.

Lipman et al., "Flow Matching for Generative Modeling", 2023; Ho and Salimans,
"Classifier-Free Diffusion Guidance", 2022; its interval, Kynkäänniemi et al., 2024; its
rescaling, Lin et al., "Common Diffusion Noise Schedules and Sample Steps are Flawed",
2024. Names and rules are those of TRELLIS.2's samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any, NamedTuple

import mlx.core as mx

from ... import ops
from ...ops.pool import batch_rows
from ...tensor import SparseTensor, features_of

Latents = SparseTensor | mx.array


class Step(NamedTuple):
    """The result of a step."""

    x: Latents  # at the next time
    x_0: Latents  # what the end would be, as seen from here


class Samples(NamedTuple):
    """The result of a sampler: the last step, and each step if they were kept."""

    samples: Latents
    pred_x_t: list[Latents]
    pred_x_0: list[Latents]


class FlowEulerSampler:
    """Euler's steps along the velocities of a flow model.

    Args:
        sigma_min (float): The noise that is left at the end. Default: ``1e-5``.
    """

    def __init__(self, sigma_min: float = 1e-5):
        if not 0 <= sigma_min < 1:
            raise ValueError(f"sigma_min must be from 0 to below 1; got {sigma_min}")
        self.sigma_min = sigma_min

    def sample(
        self,
        model: Callable,
        noise: Latents,
        cond: Any = None,
        *,
        steps: int = 50,
        rescale_t: float = 1.0,
        keep: bool = True,
        on_step: Callable[[int], object] | None = None,
        **options: Any,
    ) -> Samples:
        """Follow a model from noise at time 1 to data at time 0.

        Each step is evaluated before the next.

        Args:
            model: called as ``model(x, t, cond, **options)``, with (B,) float32 times
                from 0 to 1000; returns the velocity at x.
            noise: a tensor, or an array whose first axis is the batch.
            cond: the condition, as the model takes it.
            steps: the number of steps, 1 or more.
            rescale_t: above 1 makes steps at times near 1 shorter.
            keep: whether to keep each step's results; else both lists are empty.
            on_step: called after each step with the number of steps done.
            **options: other options of the model and of the guidance.
        """
        kept: list[Step] = []
        done = Step(noise, noise)
        walk = self.steps(
            model, noise, cond, steps=steps, rescale_t=rescale_t, **options
        )
        for count, done in enumerate(walk, 1):
            mx.eval(*(features_of(a) for a in (done if keep else done[:1])))
            if keep:
                kept.append(done)
            if on_step is not None:
                on_step(count)
        lists = [step.x for step in kept], [step.x_0 for step in kept]
        return Samples(done.x, *lists)

    def steps(
        self,
        model: Callable,
        noise: Latents,
        cond: Any = None,
        *,
        steps: int = 50,
        rescale_t: float = 1.0,
        **options: Any,
    ) -> Iterator[Step]:
        """Yield each step; arguments are those of ``sample``. Nothing is evaluated."""
        if not isinstance(steps, int) or steps < 1 or not 0 < rescale_t < inf:
            raise ValueError(
                "steps must be an int of 1 or more and rescale_t above 0; got "
                f"{steps!r} and {rescale_t!r}"
            )
        times = [1 - i / steps for i in range(steps + 1)]
        times = [rescale_t * t / (1 + (rescale_t - 1) * t) for t in times]
        x = noise
        for t, after in zip(times, times[1:], strict=False):
            v = self.velocity(model, x, t, cond, **options)
            x_0 = self._end(x, t, v)
            x = x - (t - after) * v
            yield Step(x, x_0)

    def velocity(
        self, model: Callable, x: Latents, t: float, cond: Any, **options: Any
    ) -> Latents:
        """Return the velocity at time t, from 0 to 1."""
        sparse = isinstance(x, SparseTensor)
        batches = x.batch_size if sparse else x.shape[0]
        return model(x, mx.full((batches,), 1000 * t), cond, **options)

    def _end(self, x: Latents, t: float, v: Latents) -> Latents:
        return (1 - self.sigma_min) * x - self._noise(t) * v

    def _noise(self, t: float) -> float:
        return self.sigma_min + (1 - self.sigma_min) * t


class FlowEulerCfgSampler(FlowEulerSampler):
    """Euler's steps with classifier-free guidance.

    ``sample`` takes three more arguments:

    - ``neg_cond``: the condition to lead away from;
    - ``guidance_strength`` g: the velocity is g times that of ``cond`` and 1 - g times
      that of ``neg_cond``; the model runs once where g is 1 or 0. Default: ``3``;
    - ``guidance_rescale`` q: how far each element's standard deviation is brought back
      to that of ``cond`` alone. Default: ``0``.

    Args:
        sigma_min (float): The noise that is left at the end. Default: ``1e-5``.
    """

    def velocity(
        self,
        model: Callable,
        x: Latents,
        t: float,
        cond: Any,
        *,
        neg_cond: Any = None,
        guidance_strength: float = 3.0,
        guidance_rescale: float = 0.0,
        **options: Any,
    ) -> Latents:
        """Return the guided velocity at time t, from 0 to 1.

        Raises:
            ValueError: ``neg_cond`` is needed and not given.
        """
        if guidance_strength == 1:
            return super().velocity(model, x, t, cond, **options)
        if neg_cond is None:
            raise ValueError(
                f"guidance_strength = {guidance_strength} needs neg_cond, the "
                "condition to lead away from (zeros like cond, in TRELLIS.2)"
            )
        negative = super().velocity(model, x, t, neg_cond, **options)
        if guidance_strength == 0:
            return negative
        positive = super().velocity(model, x, t, cond, **options)
        v = guidance_strength * positive + (1 - guidance_strength) * negative
        if guidance_rescale == 0:
            return v
        with_cond, guided = self._end(x, t, positive), self._end(x, t, v)
        ratio = _deviation(with_cond) / mx.maximum(_deviation(guided), 1e-20)
        factor = guidance_rescale * ratio + (1 - guidance_rescale)
        end = _scaled(guided, factor)
        return ((1 - self.sigma_min) * x - end) / self._noise(t)


class FlowEulerGuidanceIntervalSampler(FlowEulerCfgSampler):
    """Guidance at times inside an interval alone; outside it ``cond`` alone.

    ``sample`` takes the arguments of ``FlowEulerCfgSampler``, and
    ``guidance_interval``: the first and the last time, both of which count.
    Default: ``(0, 1)``.

    Args:
        sigma_min (float): The noise that is left at the end. Default: ``1e-5``.
    """

    def velocity(
        self,
        model: Callable,
        x: Latents,
        t: float,
        cond: Any,
        *,
        guidance_strength: float = 3.0,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
        **options: Any,
    ) -> Latents:
        """Return the velocity at time t, from 0 to 1, guided inside the interval."""
        first, last = guidance_interval
        strength = guidance_strength if first <= t <= last else 1
        return super().velocity(
            model, x, t, cond, guidance_strength=strength, **options
        )


KINDS = FlowEulerSampler, FlowEulerCfgSampler, FlowEulerGuidanceIntervalSampler
SAMPLERS = {kind.__name__: kind for kind in KINDS}


def _deviation(x: Latents) -> mx.array:
    """Return the (B,) standard deviations, float32: over N of tensors, else N - 1."""
    if not isinstance(x, SparseTensor):
        flat = x.reshape(x.shape[0], -1).astype(mx.float32)
        return mx.sqrt(mx.var(flat, axis=1, ddof=1))
    x = x.astype(mx.float32)
    mean = ops.global_avg_pool(x).mean(axis=1, keepdims=True)
    apart = x.feats - mean[batch_rows(x).batch]
    return mx.sqrt(ops.global_avg_pool(x.replace(apart * apart)).mean(axis=1))


def _scaled(x: Latents, by: mx.array) -> Latents:
    if isinstance(x, SparseTensor):
        by = by[batch_rows(x).batch][:, None]
        return x.replace(x.feats * by.astype(x.dtype))
    return x * by.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)
