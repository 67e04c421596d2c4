"""The command generate: an image's tokens to TRELLIS.2's latents, and to a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn

from .. import memory as memory_limits
from .. import models
from ..cache_files import check_writable
from ..geometry.lattice import true_positions
from ..io.checkpoints import import_checkpoint
from ..io.folders import CONFIG
from ..io.safetensors import (
    CheckpointError,
    SafetensorsState,
    listed,
    read_object,
    read_safetensors,
    shown,
    write_safetensors,
)
from ..memory import memory_limit
from ..models.trellis2 import Generated, Pipeline, Recipe, nets_of, sizes_of
from ..models.trellis2.pipeline import STAGES
from ..models.trellis2.transformer import trellis2
from . import log, stages, usage

SUFFIX = ".safetensors"
PIPELINE = "pipeline.json"
# The class of each net, by a part of its published name: the first that is in it.
KINDS: dict[str, type[Any]] = {
    "structure_flow": models.SparseStructureFlowModel,
    "structure_decoder": models.SparseStructureDecoder,
    "slat_flow": models.SLatFlowModel,
    "slat_decoder": models.SparseVAEDecoder,
}


def run(
    image_tokens: str | Path,
    model: str | Path,
    out: str | Path,
    *,
    type: str | None,
    seed: int,
    steps: int | None,
    guidance: float | None,
    no_texture: bool,
    max_tokens: int,
    dtype: str | None,
    memory: str | None,
    faces: int,
    texture_size: int,
) -> None:
    """Generate latents and write them; decode each asset if ``out`` is a mesh."""
    out = Path(out)
    latents = out.with_suffix(SUFFIX)
    mesh = {"faces": faces, "texture_size": texture_size}
    decode = None if out == latents else _decoding(out)
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent}")
    check_writable(latents, out, read=[image_tokens])
    every = {"steps": steps, "guidance_strength": guidance}
    every = {name: value for name, value in every.items() if value is not None}
    texture, folder = not no_texture, Path(model)
    arguments = pipeline_of(folder)
    try:
        recipe = Recipe.of_config(arguments)
        form = type or recipe.form
        names = [*nets_of(form, texture)]
        names += _decoders(texture) if decode else []
    except ValueError as error:
        raise CheckpointError(f"{folder / PIPELINE}: {error}") from None
    places = places_of(folder, arguments["models"], names)
    tokens = tokens_of(image_tokens, form)
    begun = time.perf_counter()
    load = partial(loaded, places, dtype=dtype)
    bounded = nullcontext() if memory is None else memory_limit(memory)
    with stages() as step, bounded:
        generated = Pipeline(load, recipe, step)(
            tokens,
            form,
            seed=seed,
            texture=texture,
            max_tokens=max_tokens,
            options={stage: every for stage in STAGES},
        )
        write(latents, generated)
    count = generated.shape.batch_size
    log.info(
        f"wrote {latents}: {len(generated.shape):,} latents of {count} asset(s) at "
        f"{generated.resolution}, {'with' if texture else 'without'} texture, in "
        f"{time.perf_counter() - begun:.1f} s"
    )
    if decode is None:
        return
    nets = [*map(load, _decoders(texture)), None][:2]
    for element in range(count):
        place = out.with_name(f"{out.stem}-{element}{out.suffix}") if count > 1 else out
        at = true_positions(generated.shape.coords[:, 0] == element)
        if not at.size:
            log.warning(f"{place}: no cell is occupied, so there is nothing to write")
            continue
        arrays = {"shape": generated.shape.feats[at]}
        if generated.texture is not None:
            arrays["texture"] = generated.texture.feats[at]
        decode(
            generated.shape.coords[at],
            arrays,
            *nets,
            place,
            resolution=generated.resolution,
            memory=memory,
            **mesh,
        )


def _decoding(out: Path) -> Callable:
    """Return the function that makes a mesh of latents."""
    try:
        from ..mesh import check_suffix
        from .decode import check_scene, decode, pictures_of
    except ImportError as error:
        raise ImportError(
            f"{error}, or write only the latents: --out latents{SUFFIX}"
        ) from error
    with usage():
        check_suffix(out)
    check_scene(*pictures_of(out, rerun=False)[1:])
    return decode


def _decoders(texture: bool) -> list[str]:
    return ["shape_slat_decoder", *["tex_slat_decoder"] * texture]


def pipeline_of(folder: Path) -> Mapping[str, Any]:
    """Return the ``args`` of a folder's ``pipeline.json``."""
    if not (folder / PIPELINE).is_file():
        raise CheckpointError(
            f"{folder} has no {PIPELINE}: expected a copy of the repository "
            "huggingface.co/microsoft/TRELLIS.2-4B; see docs/trellis2.md"
        )
    arguments = read_object(folder / PIPELINE).get("args")
    nets = arguments.get("models") if isinstance(arguments, Mapping) else None
    if not isinstance(nets, Mapping):
        raise CheckpointError(f'{folder / PIPELINE} has no "args" with "models"')
    return arguments


def places_of(
    folder: Path, published: Mapping[str, str], names: Sequence[str]
) -> dict[str, Path]:
    """Return the place of each net: a folder, or a path without its suffixes."""
    places, missing = {}, []
    for name in names:
        place = str(published.get(name, name))
        last = place.rpartition("/")[2]
        for path in (folder / place, folder / "ckpts" / last, folder / last):
            files = [
                path.with_name(path.name + end) for end in (".json", ".safetensors")
            ]
            if (path / CONFIG).is_file() or all(file.is_file() for file in files):
                places[name] = path
                break
        else:
            missing.append(f"{name} ({shown(place)})")
    if missing:
        raise CheckpointError(
            f"{folder} lacks {'; '.join(missing)}: expected for each the published "
            ".json and .safetensors, or a folder that mlx-lattice convert wrote. Put "
            "nets of other repositories into ckpts"
        )
    return places


def loaded(places: Mapping[str, Path], name: str, dtype: str | None) -> mlx.nn.Module:
    """Return a net of a folder, by default in the dtype of its file."""
    path = places[name]
    if path.is_dir():
        net = models.from_pretrained(path)
    else:
        weights = path.with_name(path.name + ".safetensors")
        kind, arguments = trellis2(read_object(path.with_name(path.name + ".json")))
        state = SafetensorsState(weights)
        largest = max((state.sketch(name) for name in state), key=lambda a: a.size)
        arguments.setdefault("dtype", largest.dtype)
        if dtype and "flow" in name:
            arguments["dtype"] = getattr(mx, dtype)
        net = getattr(models, kind)(**arguments).eval()
        import_checkpoint(weights, net, "trellis2")
    expected = next(kind for part, kind in KINDS.items() if part in name)
    if not isinstance(net, expected):
        raise CheckpointError(
            f"{path} is a {type(net).__name__}; {name} must be a {expected.__name__}"
        )
    mx.eval(net.parameters())
    if (limit := memory_limits.active()) is not None:
        limit.begin()
    return net


def tokens_of(path: str | Path, form: str) -> dict[int, mx.array]:
    """Return the tokens of a file by the size in pixels."""
    arrays, sizes = read_safetensors(Path(path)), sizes_of(form)
    if missing := [f"cond_{size}" for size in sizes if f"cond_{size}" not in arrays]:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}, which --type {form} needs: (B, M, C) "
            f"tokens of an image, see docs/trellis2.md; it has {listed(arrays)}"
        )
    return {size: arrays[f"cond_{size}"].astype(mx.float32) for size in sizes}


def write(out: Path, generated: Generated) -> None:
    """Write latents as ``mlx-lattice decode`` reads them."""
    arrays = {"coords": generated.shape.coords, "shape": generated.shape.feats}
    if generated.texture is not None:
        arrays["texture"] = generated.texture.feats
    about = {"format": "mlx", "resolution": str(generated.resolution)}
    write_safetensors(out, arrays, about)
