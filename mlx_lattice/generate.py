"""The command generate: an image's tokens and TRELLIS.2's folder to an asset."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import mlx.core as mx

from .atomic_write import check_writable
from .distribution import install
from .dtypes import DTYPES
from .geometry.unique import true_positions
from .io.errors import CheckpointError, listed
from .memory import memory_limit, parse_bytes
from .models.trellis2 import FORMS, Generated, Pipeline, Recipe, nets_of, sizes_of
from .models.trellis2.pipeline import STAGES
from .quantized import BITS

SUFFIX = ".safetensors"
MEMORY = "keep the nets below it, such as 8GB"
# What a setting of a sampler is, by its name.
SETTINGS = {
    "steps": int,
    "rescale_t": float,
    "guidance_strength": float,
    "guidance_rescale": float,
    "guidance_interval": lambda text: tuple(map(float, text.split(":", 1))),
}


def add_parser(commands) -> None:
    """Add the command to a parser's."""
    generate = commands.add_parser(
        "generate", help="an image's tokens to TRELLIS.2's latents, and a mesh"
    )
    generate.add_argument(
        "--image-tokens",
        metavar="FILE",
        required=True,
        help=".safetensors with cond_512 and cond_1024, (B, M, C) each",
    )
    generate.add_argument(
        "--model", metavar="FOLDER", help="TRELLIS.2's, with pipeline.json and ckpts"
    )
    generate.add_argument(
        "--out",
        metavar="FILE",
        default="asset.glb",
        help=".glb, .ply or .obj with latents beside it, or .safetensors of them alone",
    )
    generate.add_argument("--type", choices=FORMS, help="by default pipeline.json's")
    generate.add_argument("--seed", type=int, default=42, help="of the noise (42)")
    generate.add_argument("--steps", type=int, help="of every stage")
    generate.add_argument("--guidance", type=float, help="strength, of every stage")
    generate.add_argument(
        "--set",
        nargs="+",
        default=[],
        dest="settings",
        metavar="STAGE.NAME=VALUE",
        help=f"of one stage: {', '.join(STAGES)}; {', '.join(SETTINGS)}",
    )
    generate.add_argument(
        "--no-texture", action="store_true", help="the shape's latents alone"
    )
    generate.add_argument(
        "--max-tokens",
        type=int,
        default=49152,
        help="rows above which a cascade lowers its resolution (49152)",
    )
    generate.add_argument(
        "--faces", type=int, default=200_000, help="triangles, at most (200000)"
    )
    generate.add_argument(
        "--texture-size", type=int, default=2048, help="texels of its sides (2048)"
    )
    generate.add_argument("--dtype", choices=DTYPES, help="of the flow models' blocks")
    generate.add_argument("--bits", type=int, choices=BITS, help="pack float weights")
    generate.add_argument("--memory", metavar="SIZE", help=MEMORY)


def where_weights_are() -> str:
    """Say what ``--model`` takes, where weights are and under which licence."""
    return (
        "--model is needed: a folder with TRELLIS.2's pipeline.json and ckpts. No "
        "weights come with this package. TRELLIS.2's are "
        "huggingface.co/microsoft/TRELLIS.2-4B, its structure decoder "
        "huggingface.co/microsoft/TRELLIS-image-large (both MIT by their cards; check "
        "it there): see docs/trellis2.md"
    )


def run(given: argparse.Namespace) -> None:
    """Generate latents and write them; decode each asset where a mesh is asked for.

    Raises:
        ValueError: files or options do not fit.
    """
    if given.model is None:
        raise ValueError(where_weights_are())
    if given.memory is not None:
        parse_bytes(given.memory)
    out = Path(given.out)
    latents = out.with_suffix(SUFFIX)
    decode = None if out == latents else _decoding(given, out)
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent}")
    check_writable(latents, out, read=[given.image_tokens])
    from .io.pipelines import PIPELINE, loaded, pipeline_of, places_of

    options = settings_of(given.settings, given.steps, given.guidance)
    texture, folder = not given.no_texture, Path(given.model)
    arguments = pipeline_of(folder)
    try:
        recipe = Recipe.of_config(arguments)
        form = given.type or recipe.form
        names = [*nets_of(form, texture)]
        names += _decoders(texture) if decode else []
    except ValueError as error:
        raise CheckpointError(f"{folder / PIPELINE}: {error}") from None
    places = places_of(folder, arguments["models"], names)
    tokens = tokens_of(given.image_tokens, form)
    begun = time.perf_counter()
    load = partial(loaded, places, dtype=given.dtype, bits=given.bits)
    bounded = nullcontext() if given.memory is None else memory_limit(given.memory)
    with bars() as step, bounded:
        made = Pipeline(load, recipe, step)(
            tokens,
            form,
            seed=given.seed,
            texture=texture,
            max_tokens=given.max_tokens,
            options=options,
        )
        write(latents, made)
    count = made.shape.batch_size
    print(
        f"wrote {latents}: {len(made.shape):,} latents of {count} asset(s) at "
        f"{made.resolution}, {'with' if texture else 'without'} texture, in "
        f"{time.perf_counter() - begun:.1f} s"
    )
    if decode is None:
        return
    nets = [*map(load, _decoders(texture)), None][:2]
    for element in range(count):
        place = out.with_name(f"{out.stem}-{element}{out.suffix}") if count > 1 else out
        at = true_positions(made.shape.coords[:, 0] == element)
        if not at.size:
            print(f"{place}: no cell is occupied, so there is nothing to write")
            continue
        held = {"shape": made.shape.feats[at]}
        if made.texture is not None:
            held["texture"] = made.texture.feats[at]
        decode(
            made.shape.coords[at],
            held,
            *nets,
            place,
            resolution=made.resolution,
            faces=given.faces,
            texture_size=given.texture_size,
            memory=given.memory,
        )


def _decoding(given: argparse.Namespace, out: Path) -> Callable:
    """Return what makes a mesh of latents.

    Raises:
        ImportError: the extra is not installed.
        ValueError: there is no such kind of file, or a size of the mesh is none.
    """
    try:
        from .decode import decode
        from .mesh.asset import check_asset
        from .mesh.files import check_suffix
    except ImportError as error:
        raise ImportError(
            f"{error}, or write latents by --out latents{SUFFIX}"
        ) from error
    check_suffix(out)
    check_asset(None, given.faces, given.texture_size)
    return decode


def _decoders(texture: bool) -> list[str]:
    return ["shape_slat_decoder", *["tex_slat_decoder"] * texture]


def settings_of(
    settings: Sequence[str], steps: int | None, guidance: float | None
) -> dict[str, dict[str, Any]]:
    """Return each stage's options, of ``STAGE.NAME=VALUE`` and of all stages'.

    Raises:
        ValueError: a setting is none.
    """
    every = {"steps": steps, "guidance_strength": guidance}
    every = {name: value for name, value in every.items() if value is not None}
    for name, value in every.items():
        _check_setting(f"--{name.partition('_')[0]}", name, value)
    found = {stage: dict(every) for stage in STAGES}
    for setting in settings:
        key, _, text = setting.partition("=")
        stage, _, name = key.partition(".")
        if stage not in STAGES or name not in SETTINGS:
            raise ValueError(
                f"--set takes STAGE.NAME=VALUE, a stage of {', '.join(STAGES)} and a "
                f"name of {', '.join(SETTINGS)}; got {setting}"
            )
        try:
            value = SETTINGS[name](text)
        except ValueError:
            value = ()
        if value == () or (isinstance(value, tuple) and len(value) != 2):
            wanted = "two times, 0.6:1" if "interval" in name else "a number"
            raise ValueError(f"--set {key} takes {wanted}; got {text!r}")
        _check_setting(f"--set {key}", name, value)
        found[stage][name] = value
    return found


def _check_setting(option: str, name: str, value: Any) -> None:
    """Raise a ValueError where no stage can have such a setting."""
    values = value if isinstance(value, tuple) else (value,)
    if not all(map(isfinite, values)):
        raise ValueError(f"{option} must be finite; got {value}")
    if name in ("steps", "rescale_t") and value <= 0:
        raise ValueError(f"{option} must be above 0; got {value}")


def tokens_of(path: str | Path, form: str) -> dict[int, mx.array]:
    """Return the tokens of a file by the size in pixels.

    Raises:
        ValueError: some are missing.
    """
    from .io.safetensors import read_safetensors

    held, sizes = read_safetensors(Path(path)), sizes_of(form)
    if missing := [f"cond_{size}" for size in sizes if f"cond_{size}" not in held]:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}, the (B, M, C) tokens of the image at "
            f"so many pixels, which {form} needs; it has {listed(held)}"
        )
    return {size: held[f"cond_{size}"].astype(mx.float32) for size in sizes}


def write(out: Path, made: Generated) -> None:
    """Write latents as ``mlx-lattice decode`` reads them."""
    from .io.safetensors import write_safetensors

    arrays = {"coords": made.shape.coords, "shape": made.shape.feats}
    if made.texture is not None:
        arrays["texture"] = made.texture.feats
    about = {"format": "mlx", "resolution": str(made.resolution)}
    write_safetensors(out, arrays, about)


@contextmanager
def bars() -> Iterator[Any]:
    """Show a bar for each stage; the block gets what counts its steps."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(f"generate needs tqdm; {install('demo')}") from error
    interval = 0.1 if sys.stderr.isatty() else 20
    bar: tqdm | None = None

    def step(stage: str, done: int, steps: int) -> None:
        nonlocal bar
        if bar is None or done == 1:
            if bar is not None:
                bar.close()
            bar = tqdm(total=steps, desc=stage, unit="step", mininterval=interval)
        bar.update()

    try:
        yield step
    finally:
        if bar is not None:
            bar.close()
