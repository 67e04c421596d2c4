"""The command generate: an image's tokens and TRELLIS.2's folder to latents."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn

from . import models, nn
from .distribution import install
from .io.errors import CheckpointError, shown
from .models.trellis2 import FORMS, Generated, Pipeline, Recipe, nets_of, sizes_of
from .models.trellis2.pipeline import STAGES
from .problem import DTYPES
from .quantized import BITS

PIPELINE = "pipeline.json"
GROUP = 64  # input channels that share a scale, with --bits
# What a setting of a sampler is, by its name.
SETTINGS = {
    "steps": int,
    "rescale_t": float,
    "guidance_strength": float,
    "guidance_rescale": float,
    "guidance_interval": lambda text: tuple(map(float, text.split(":", 1))),
}
# The class of each net, by a part of its published name: the first that is in it.
KINDS = {
    "structure_flow": models.SparseStructureFlowModel,
    "structure_decoder": models.SparseStructureDecoder,
    "slat_flow": models.SLatFlowModel,
    "slat_decoder": models.SparseVAEDecoder,
}


def add_parser(commands) -> None:
    """Add the command to a parser's."""
    generate = commands.add_parser(
        "generate", help="an image's tokens to TRELLIS.2's latents"
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
        "--out", metavar="FILE", default="latents.safetensors", help="what it writes"
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
    generate.add_argument("--dtype", choices=DTYPES, help="of the flow models' blocks")
    generate.add_argument("--bits", type=int, choices=BITS, help="pack float weights")


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
    """Generate, and write ``coords``, ``shape`` and ``texture``.

    Raises:
        ValueError: files or options do not fit.
    """
    if given.model is None:
        raise ValueError(where_weights_are())
    out = Path(given.out)
    if out.suffix != ".safetensors":
        raise ValueError(
            f"--out must end in .safetensors; got {out.name}. The file holds latents, "
            "of which mlx-lattice decode makes a mesh"
        )
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent}")
    options = settings_of(given.settings, given.steps, given.guidance)
    texture, folder = not given.no_texture, Path(given.model)
    arguments = pipeline_of(folder)
    try:
        recipe = Recipe.of_config(arguments)
        form = given.type or recipe.form
        names = nets_of(form, texture)
    except ValueError as error:
        raise CheckpointError(f"{folder / PIPELINE}: {error}") from None
    places = places_of(folder, arguments["models"], names)
    tokens = tokens_of(given.image_tokens, form)
    begun = time.perf_counter()
    with bars() as step:
        load = partial(loaded, places, dtype=given.dtype, bits=given.bits)
        made = Pipeline(load, recipe, step)(
            tokens,
            form,
            seed=given.seed,
            texture=texture,
            max_tokens=given.max_tokens,
            options=options,
        )
        write(out, made)
    print(
        f"wrote {out}: {len(made.shape):,} latents of {made.shape.batch_size} asset(s) "
        f"at {made.resolution}, {'with' if texture else 'without'} texture, in "
        f"{time.perf_counter() - begun:.1f} s"
    )


def settings_of(
    settings: Sequence[str], steps: int | None, guidance: float | None
) -> dict[str, dict[str, Any]]:
    """Return each stage's options, of ``STAGE.NAME=VALUE`` and of all stages'.

    Raises:
        ValueError: a setting is none.
    """
    every = {"steps": steps, "guidance_strength": guidance}
    every = {name: value for name, value in every.items() if value is not None}
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
        found[stage][name] = value
    return found


def pipeline_of(folder: Path) -> Mapping[str, Any]:
    """Return the ``args`` of a folder's ``pipeline.json``.

    Raises:
        io.CheckpointError: there is none, or it names no nets.
    """
    from .io.configurations import read_config

    if not (folder / PIPELINE).is_file():
        raise CheckpointError(
            f"{folder} has no {PIPELINE}: expected the folder of a TRELLIS.2, as it is "
            "published. " + where_weights_are().partition(". ")[2]
        )
    arguments = read_config(folder / PIPELINE).get("args")
    held = arguments.get("models") if isinstance(arguments, Mapping) else None
    if not isinstance(held, Mapping):
        raise CheckpointError(f'{folder / PIPELINE} has no "args" with "models"')
    return arguments


def places_of(
    folder: Path, held: Mapping[str, str], names: Sequence[str]
) -> dict[str, Path]:
    """Return where each net is: a folder of this package's, or a path without suffix.

    A net of another repository is looked for by its own name in the folder and in
    ``ckpts``.

    Raises:
        io.CheckpointError: nets are missing.
    """
    from .io.folders import CONFIG

    found, missing = {}, []
    for name in names:
        place = str(held.get(name, name))
        last = place.rpartition("/")[2]
        for path in (folder / place, folder / "ckpts" / last, folder / last):
            files = [
                path.with_name(path.name + end) for end in (".json", ".safetensors")
            ]
            if (path / CONFIG).is_file() or all(file.is_file() for file in files):
                found[name] = path
                break
        else:
            missing.append(f"{name} ({shown(place)})")
    if missing:
        raise CheckpointError(
            f"{folder} lacks {'; '.join(missing)}: expected a .json and a .safetensors "
            "of each, as published, or a folder that mlx-lattice convert wrote; a net "
            "of another repository goes into ckpts"
        )
    return found


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
            f"so many pixels, which {form} needs; it has {', '.join(held) or 'nothing'}"
        )
    return {size: held[f"cond_{size}"].astype(mx.float32) for size in sizes}


def loaded(
    places: Mapping[str, Path], name: str, dtype: str | None, bits: int | None
) -> mlx.nn.Module:
    """Return a net of a folder, in the dtype of its file if none is asked for.

    Raises:
        io.CheckpointError: its files do not fit, or are of another net.
    """
    from .io.checkpoints import import_checkpoint
    from .io.configurations import read_config, trellis2

    path = places[name]
    if path.is_dir():
        net = models.from_pretrained(path)
    else:
        weights = path.with_name(path.name + ".safetensors")
        kind, arguments = trellis2(read_config(path.with_name(path.name + ".json")))
        arguments.setdefault("dtype", _dtype_of(weights))
        if dtype and "flow" in name:
            arguments["dtype"] = getattr(mx, dtype)
        net = getattr(models, kind)(**arguments).eval()
        import_checkpoint(weights, net, "trellis2")
    wanted = next(kind for part, kind in KINDS.items() if part in name)
    if not isinstance(net, wanted):
        raise CheckpointError(
            f"{path} is a {type(net).__name__}; {name} must be a {wanted.__name__}"
        )
    if bits:
        mlx.nn.quantize(net, GROUP, bits, class_predicate=nn.keep_float())
    mx.eval(net.parameters())
    return net


def _dtype_of(weights: Path) -> mx.Dtype:
    """Return the dtype of the largest array of a file."""
    from .io.safetensors import SafetensorsState

    state = SafetensorsState(weights)
    largest = max((state.sketch(name) for name in state), key=lambda a: a.size)
    return largest.dtype


def write(out: Path, made: Generated) -> None:
    """Write latents as ``mlx-lattice decode`` reads them."""
    arrays = {"coords": made.shape.coords, "shape": made.shape.feats}
    if made.texture is not None:
        arrays["texture"] = made.texture.feats
    about = {"format": "mlx", "resolution": str(made.resolution)}
    mx.save_safetensors(str(out), arrays, about)


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
