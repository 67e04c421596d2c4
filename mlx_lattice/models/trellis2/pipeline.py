"""TRELLIS.2's generator behind the image encoder: tokens to latents, stage by stage.

Stages: structure flow, structure decoder, occupied cells, flow of the shape's latents,
flow of the texture's. A cascade samples the shape twice, the second time on the finer
cells that the shape decoder makes of the first. One net is in memory at a time.

Samplers take Euler's steps from noise to data, with guidance. Lipman et al., "Flow
Matching for Generative Modeling", 2023; Ho and Salimans, "Classifier-Free Diffusion
Guidance", 2022; its interval, Kynkäänniemi et al., 2024; its rescaling, Lin et al.,
"Common Diffusion Noise Schedules and Sample Steps are Flawed", 2024. Names and rules
are those of TRELLIS.2's samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import mlx.core as mx

from ... import nn, ops, registry
from ...checks import whole
from ...ops.pool import batch_rows
from ...tensor import SparseTensor, features_of
from .transformer import dtype_of
from .vae import occupied

__all__ = [
    "FORMS",
    "FlowEulerCfgSampler",
    "FlowEulerGuidanceIntervalSampler",
    "FlowEulerSampler",
    "Generated",
    "Pipeline",
    "Recipe",
    "SAMPLERS",
    "Samples",
    "Step",
    "nets_of",
    "sizes_of",
]

Latents = SparseTensor | mx.array


class Step(NamedTuple):
    """The result of one step of a sampler.

    Examples:
        >>> sampler = models.trellis2.FlowEulerSampler()
        >>> walk = sampler.steps(lambda x, t, cond: x, mx.ones((1, 3)), steps=4)
        >>> [round(step.x[0, 0].item(), 3) for step in walk]
        [0.75, 0.562, 0.422, 0.316]
    """

    x: Latents  # at the next time
    x_0: Latents  # what the end would be, as seen from here


class Samples(NamedTuple):
    """Hold the result of a sampler, and of each step if they were kept.

    Examples:
        >>> sampler = models.trellis2.FlowEulerSampler()
        >>> found = sampler.sample(lambda x, t, cond: x, mx.ones((1, 3)), steps=4)
        >>> found.samples.shape, len(found.pred_x_0)
        ((1, 3), 4)
    """

    samples: Latents
    pred_x_t: list[Latents]
    pred_x_0: list[Latents]


class FlowEulerSampler:
    """Follow the velocities of a flow model with Euler's steps.

    Args:
        sigma_min (float): The noise that remains at the end. Default: ``1e-5``.

    Examples:
        >>> def velocity(x, t, cond):  # of data that are all 1
        ...     return (x - 1) * 1000 / t
        >>> sampler = models.trellis2.FlowEulerSampler()
        >>> sampler.sample(velocity, mx.array([[5.0]]), steps=4).samples.tolist()
        [[1.0]]
    """

    def __init__(self, sigma_min: float = 1e-5):
        if not 0 <= sigma_min < 1:
            raise ValueError(f"sigma_min must be from 0 to below 1; got {sigma_min}")
        self.sigma_min = sigma_min

    def sample(
        self,
        model: Callable[..., Any],
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
        results: list[Step] = []
        done = Step(noise, noise)
        walk = self.steps(
            model, noise, cond, steps=steps, rescale_t=rescale_t, **options
        )
        for count, done in enumerate(walk, 1):
            mx.eval(*(features_of(a) for a in (done if keep else done[:1])))
            if keep:
                results.append(done)
            if on_step is not None:
                on_step(count)
        lists = [step.x for step in results], [step.x_0 for step in results]
        return Samples(done.x, *lists)

    def steps(
        self,
        model: Callable[..., Any],
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
        self, model: Callable[..., Any], x: Latents, t: float, cond: Any, **options: Any
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
    """Follow a flow model with Euler's steps and classifier-free guidance.

    ``sample`` takes three more arguments:

    - ``neg_cond``: the condition to lead away from;
    - ``guidance_strength`` g: the velocity is g times that of ``cond`` and 1 - g times
      that of ``neg_cond``; the model runs once if g is 1 or 0. Default: ``3``;
    - ``guidance_rescale`` q: how far the standard deviation of each element is moved
      back to that of ``cond`` alone. Default: ``0``.

    Args:
        sigma_min (float): The noise that remains at the end. Default: ``1e-5``.

    Examples:
        >>> def velocity(x, t, cond):
        ...     return mx.full(x.shape, cond)
        >>> sampler = models.trellis2.FlowEulerCfgSampler()
        >>> found = sampler.sample(
        ...     velocity, mx.zeros((1, 1)), 1.0, neg_cond=0.0, guidance_strength=2.0
        ... )
        >>> round(found.samples.item(), 3)
        -2.0
    """

    def velocity(
        self,
        model: Callable[..., Any],
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
    """Guide a flow model at times inside an interval, and by ``cond`` alone outside it.

    ``sample`` takes the arguments of ``FlowEulerCfgSampler``, and
    ``guidance_interval``: the first and the last time with guidance, both inclusive.
    Default: ``(0, 1)``.

    Args:
        sigma_min (float): The noise that remains at the end. Default: ``1e-5``.

    Examples:
        >>> def velocity(x, t, cond):
        ...     return mx.full(x.shape, cond)
        >>> sampler = models.trellis2.FlowEulerGuidanceIntervalSampler()
        >>> guided = {"neg_cond": 0.0, "guidance_interval": (0.5, 1.0)}
        >>> found = sampler.sample(velocity, mx.zeros((1, 1)), 1.0, **guided)
        >>> round(found.samples.item(), 1)  # 3 in half of the steps, 1 in the others
        -2.0
    """

    def velocity(
        self,
        model: Callable[..., Any],
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
# The samplers by their published names.
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


# What a voxel of latents is along an axis, in voxels of the asset.
CELL = 16
LEAST = 1024  # resolution below which a cascade does not go for fewer tokens


class Form(NamedTuple):
    """A way through the stages."""

    structure: int  # extent of the grid of occupied cells
    shapes: tuple[int, ...]  # sizes of the shape's flows, the last the final one
    resolution: int  # of the asset


# The ways through the stages by name, such as ``"512"`` for an asset of 512 voxels.
FORMS = {
    "512": Form(32, (512,), 512),
    "1024": Form(64, (1024,), 1024),
    "1024_cascade": Form(32, (512, 1024), 1024),
    "1536_cascade": Form(32, (512, 1024), 1536),
}
# The stages, and what the published configuration calls them.
PUBLISHED = {
    "structure": "sparse_structure",
    "shape": "shape_slat",
    "texture": "tex_slat",
}
STAGES = tuple(PUBLISHED)


@dataclass(frozen=True)
class Recipe:
    """Settings of the pipeline, as in a published ``pipeline.json``.

    Attributes:
        samplers: for each stage the sampler's name and ``sigma_min``.
        options: for each stage the arguments of ``sample``: steps and guidance.
        normalisation: for "shape" and "texture" the mean and the standard deviation of
            each channel of the latents; by default none.
        form: one of ``FORMS``; the default of a call.

    Examples:
        >>> samplers = {"shape": ("FlowEulerSampler", 1e-5)}  # its name and sigma_min
        >>> options = {"shape": {"steps": 12}}
        >>> recipe = models.trellis2.Recipe(samplers, options, form="512")
        >>> recipe.form, recipe.options["shape"]
        ('512', {'steps': 12})
    """

    samplers: Mapping[str, tuple[str, float]]
    options: Mapping[str, Mapping[str, Any]]
    normalisation: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = field(
        default_factory=dict
    )
    form: str = "1024_cascade"

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Recipe:
        """Return the recipe of the ``args`` of a published ``pipeline.json``.

        Raises:
            ValueError: they lack something, or name a sampler that there is none of.
        """
        samplers, options, normalisation = {}, {}, {}
        for stage, name in PUBLISHED.items():
            try:
                sampler = config[f"{name}_sampler"]
                samplers[stage] = (
                    sampler["name"],
                    sampler.get("args", {}).get("sigma_min", 0),
                )
                options[stage] = dict(sampler.get("params", {}))
                if stage != "structure":
                    statistics = config[f"{name}_normalization"]
                    normalisation[stage] = (
                        tuple(statistics["mean"]),
                        tuple(statistics["std"]),
                    )
            except (KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"the pipeline's args must have {name}_sampler with a name"
                    + f", and {name}_normalization with mean and std"
                    * (stage != "structure")
                ) from None
            if samplers[stage][0] not in SAMPLERS:
                raise ValueError(
                    f"{name}_sampler is a {samplers[stage][0]!r}; there are "
                    f"{', '.join(SAMPLERS)}"
                )
        form = config.get("default_pipeline_type", cls.form)
        return cls(samplers, options, normalisation, form)


class Generated(NamedTuple):
    """Latents in the form that the decoders take.

    Attributes:
        shape: (N, C) latents of the shape.
        texture: (N, C) latents of the texture on the same rows, or None.
        resolution: voxels of the asset along each side of the unit box.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 32)))
        >>> found = models.trellis2.Generated(shape=x, texture=None, resolution=512)
        >>> found.shape.shape
        (64, 32)
    """

    shape: SparseTensor
    texture: SparseTensor | None
    resolution: int


class Pipeline:
    """Generate latents from the tokens of an image.

    Args:
        load: a function that returns a net by its published name (see ``nets_of``). It
            is called when the net is needed; the net is freed after its stage.
        recipe: samplers, their options and the normalisation.
        on_step: called with the stage's name, the number of finished steps and of all
            steps.

    Examples:
        >>> samplers = {"shape": ("FlowEulerSampler", 1e-5)}
        >>> recipe = models.trellis2.Recipe(samplers, options={}, form="512")
        >>> pipeline = models.trellis2.Pipeline(models.from_pretrained, recipe)
        >>> pipeline.recipe.form  # pipeline({512: tokens}) returns a Generated
        '512'
    """

    def __init__(
        self,
        load: Callable[[str], nn.Module],
        recipe: Recipe,
        on_step: Callable[[str, int, int], object] | None = None,
    ):
        self.load: Callable[[str], Any] = load
        self.recipe: Recipe = recipe
        self.on_step: Callable[[str, int, int], object] = on_step or (lambda *_: None)

    def __call__(
        self,
        tokens: Mapping[int, mx.array],
        form: str | None = None,
        *,
        seed: int = 42,
        texture: bool = True,
        max_tokens: int = 49152,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Generated:
        """Generate the latents of a batch of images.

        The noise is MLX's: a seed gives other latents than in PyTorch.

        Args:
            tokens: (B, M, C) tokens of the images by size, 512 or 1024 pixels;
                ``sizes_of`` says which are needed.
            form: one of ``FORMS``; by default the recipe's.
            seed: of the noise.
            texture: whether to make the texture's latents.
            max_tokens: a cascade lowers its resolution until there are fewer rows.
            options: changes of the recipe's options, by stage.

        Raises:
            ValueError: the form or the seed is not valid, tokens are missing or of
                other shapes, or no cell is occupied.
        """
        form = form or self.recipe.form
        tokens = _checked(tokens, form)
        how, keys = FORMS[form], _keys(seed)
        changed = options or {}
        if unknown := set(changed) - set(STAGES):
            raise ValueError(
                f"options are by stage, one of {STAGES}; got {sorted(unknown)}"
            )
        cells = self.structure(tokens[512], how.structure, keys[0], changed)
        if not len(cells):
            raise ValueError(
                "no cell of the structure is occupied: try another seed, or more "
                "guidance"
            )
        resolution, normal = how.resolution, None
        for at, size in enumerate(how.shapes):
            if at:
                cells, resolution = self.finer(
                    self._restored(normal, "shape"), resolution, max_tokens
                )
            name = f"shape_slat_flow_model_{size}"
            normal = self.latents(
                name, tokens[size], cells, keys[1 + at], "shape", changed
            )
        shape, colour = self._restored(normal, "shape"), None
        if texture:
            name = f"tex_slat_flow_model_{how.shapes[-1]}"
            size = how.shapes[-1]
            colour = self.latents(
                name, tokens[size], normal, keys[3], "texture", changed, normal
            )
            colour = self._restored(colour, "texture")
        return Generated(shape, colour, resolution)

    def structure(
        self,
        cond: mx.array,
        resolution: int,
        key: mx.array,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> SparseTensor:
        """Return the occupied cells of a grid of ``resolution``, with features of 1."""
        flow = self.load("sparse_structure_flow_model")
        size = (flow.resolution,) * 3
        noise = mx.random.normal((cond.shape[0], flow.in_channels, *size), key=key)
        z = self._sampled(flow, noise, cond, "structure", options)
        del flow
        mx.clear_cache()
        decoder = self.load("sparse_structure_decoder")
        cells = occupied(decoder(z), resolution)
        del decoder
        mx.clear_cache()
        return cells

    def latents(
        self,
        name: str,
        cond: mx.array,
        cells: SparseTensor,
        key: mx.array,
        stage: str,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        beside: SparseTensor | None = None,
    ) -> SparseTensor:
        """Return latents on the rows of ``cells``, still normalised."""
        flow = self.load(name)
        more = {} if beside is None else {"concat_cond": beside}
        channels = flow.in_channels - (0 if beside is None else beside.channels)
        noise = cells.replace(mx.random.normal((len(cells), channels), key=key))
        sampled = self._sampled(flow, noise, cond, stage, options, **more)
        del flow
        mx.clear_cache()
        return sampled

    def finer(
        self, shape: SparseTensor, resolution: int, max_tokens: int
    ) -> tuple[SparseTensor, int]:
        """Return the cells of a finer grid around a coarse shape, and the resolution.

        The resolution falls by 128 down to 1024 until there are fewer cells than
        ``max_tokens``. Cells are sorted and unique.
        """
        decoder = self.load("shape_slat_decoder")
        shape = shape.astype(dtype_of(decoder.from_latent))
        fine = decoder.upsample(shape, len(decoder.blocks) - 1)
        mx.eval(fine)
        extent = FORMS["512"].resolution
        del decoder
        mx.clear_cache()
        places = (fine[:, 1:].astype(mx.float32) + 0.5) / extent
        while True:
            cells = (places * (resolution // CELL)).astype(mx.int32)
            rows = mx.concatenate([fine[:, :1], cells], axis=1)
            rows = registry.geometry().unique_rows(rows).rows
            if rows.shape[0] < max_tokens or resolution <= LEAST:
                break
            resolution -= 128
        ones = mx.ones((rows.shape[0], 1))
        return SparseTensor(rows, ones, batch_size=shape.batch_size), resolution

    def _sampled(
        self,
        flow: nn.Module,
        noise: Latents,
        cond: mx.array,
        stage: str,
        options: Mapping[str, Mapping[str, Any]] | None,
        **more: Any,
    ) -> Latents:
        name, sigma_min = self.recipe.samplers[stage]
        sampler = SAMPLERS[name](sigma_min)
        settings = {**self.recipe.options[stage], **(options or {}).get(stage, {})}
        steps = settings.setdefault("steps", 50)
        if isinstance(sampler, FlowEulerCfgSampler):
            settings["neg_cond"] = mx.zeros_like(cond)
        try:
            done = sampler.sample(
                flow,
                noise,
                cond,
                keep=False,
                on_step=lambda count: self.on_step(stage, count, steps),
                **settings,
                **more,
            )
        except TypeError as error:
            raise ValueError(f"the {stage}'s sampler: {error}") from error
        return done.samples

    def _restored(self, x: SparseTensor, stage: str) -> SparseTensor:
        if stage not in self.recipe.normalisation:
            return x
        mean, std = (mx.array(v) for v in self.recipe.normalisation[stage])
        if mean.size != x.channels or std.size != x.channels:
            raise ValueError(
                f"the normalisation of the {stage}'s latents is of {mean.size} and "
                f"{std.size} channels, the latents have {x.channels}"
            )
        return x.replace(x.feats * std + mean)


def sizes_of(form: str) -> tuple[int, ...]:
    """Return the sizes in pixels at which a form needs an image's tokens.

    Examples:
        >>> models.trellis2.sizes_of("1024_cascade")
        (512, 1024)
    """
    if form not in FORMS:
        raise ValueError(f"the form must be one of {', '.join(FORMS)}; got {form!r}")
    return tuple(sorted({512, *FORMS[form].shapes}))


def nets_of(form: str, texture: bool = True) -> tuple[str, ...]:
    """Return the published names of the nets that a form needs, in order.

    Examples:
        >>> models.trellis2.nets_of("512", texture=False)[0]
        'sparse_structure_flow_model'
    """
    sizes_of(form)
    sizes = FORMS[form].shapes
    shapes = [f"shape_slat_flow_model_{size}" for size in sizes]
    nets = ["sparse_structure_flow_model", "sparse_structure_decoder", shapes[0]]
    if len(shapes) > 1:
        nets += ["shape_slat_decoder", shapes[1]]
    return (*nets, *[f"tex_slat_flow_model_{sizes[-1]}"] * texture)


def _keys(seed: int) -> mx.array:
    if whole(seed, "seed") >= 2**64:
        raise ValueError(f"seed must be below 2^64; got {seed}")
    return mx.random.split(mx.random.key(seed), 4)


def _checked(tokens: Mapping[int, mx.array], form: str) -> dict[int, mx.array]:
    sizes = sizes_of(form)
    if missing := [size for size in sizes if size not in tokens]:
        raise ValueError(
            f"{form} needs tokens of the image at {' and '.join(map(str, sizes))} "
            f"pixels; those at {missing[0]} are missing"
        )
    chosen = {size: tokens[size] for size in sizes}
    shapes = {size: tuple(array.shape) for size, array in chosen.items()}
    if any(len(s) != 3 or 0 in s for s in shapes.values()) or (
        len({shape[0] for shape in shapes.values()}) > 1
    ):
        raise ValueError(
            "tokens must be (B, M, C), of as many images at each size; got "
            + ", ".join(f"{shape} at {size}" for size, shape in shapes.items())
        )
    return chosen
