"""The command decode: latents to a mesh with its texture, and a picture."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn

from ..cache_files import check_writable
from ..geometry.lattice import true_positions
from ..io.safetensors import SafetensorsState, listed
from ..memory import memory_limit
from ..mesh import (
    asset_of,
    check_suffix,
    contact_sheet,
    save,
)
from ..models import SparseVAEDecoder, dual_grid, from_pretrained
from ..models.trellis2.transformer import dtype_of
from ..scene import Scene, check_scene
from ..tensor import SparseTensor
from . import log, progress, usage

SHAPE, TEXTURE, COORDS = "shape", "texture", "coords"


def run(
    latents: str | Path,
    model: str | Path,
    out: str | Path,
    *,
    texture_model: str | Path | None = None,
    element: int = 0,
    revision: str | None = None,
    **options: Any,
) -> tuple[Path, ...]:
    """Decode latents to a mesh; write it, and a picture and a page beside it."""
    out = Path(out)
    with usage():
        check_suffix(out)
    pictures = pictures_of(out, options.get("rerun", False))
    check_scene(*pictures[1:])
    check_writable(out, *pictures, read=[latents])
    resolution = options.pop("resolution", None)
    rows, arrays, stored = _latents(latents, element, texture_model is not None)
    shape = _decoder(model, "the shape", 7, revision)
    texture = None
    if texture_model is not None:
        texture = _decoder(texture_model, "the texture", 6, revision)
    resolution = stored if resolution is None else resolution
    return decode(rows, arrays, shape, texture, out, resolution=resolution, **options)


def decode(
    rows: mx.array,
    arrays: Mapping[str, mx.array],
    shape: SparseVAEDecoder,
    texture: SparseVAEDecoder | None,
    out: Path,
    *,
    resolution: int | None = None,
    faces: int = 200_000,
    texture_size: int = 2048,
    memory: str | float | None = None,
    rerun: bool = False,
) -> tuple[Path, ...]:
    """Decode one batch element by nets; write its mesh, a picture and a page."""
    nets = mlx.nn.Module()
    nets.shape = shape
    if texture is not None:
        nets.texture = texture
    mx.eval(nets.parameters())  # held before the limit's block
    begun = time.perf_counter()
    bounded = nullcontext() if memory is None else memory_limit(memory)
    with bounded:
        rows = rows * mx.array([0, 1, 1, 1])  # an element of any number, alone
        x = SparseTensor(rows, arrays[SHAPE].astype(dtype_of(shape.from_latent)))
        with progress(nets.shape, "shape"):
            y, cells = nets.shape(x, return_subdivisions=True)
            mx.eval(y.feats)
        if not len(y):
            raise ValueError(
                "no voxel is left after decoding: check that the latents fit --model"
            )
        steps = 2 ** len(cells)
        if resolution is None:
            # The power of two that holds the latents' grid.
            grid = 1 << max(1, int(rows[:, 1:].max().item()).bit_length())
            resolution = grid * steps
        materials = None
        if texture is not None:
            latents = arrays[TEXTURE].astype(dtype_of(texture.from_latent))
            z = x.replace(latents)
            with progress(nets.texture, "texture"):
                z = nets.texture(z, subdivisions=cells)
                mx.eval(z.feats)
            materials = z.replace(mx.clip(z.feats * 0.5 + 0.5, 0, 1))
    decoded = time.perf_counter() - begun
    log.info(
        f"{len(x):,} latents -> {len(y):,} voxels of 1/{resolution} in {decoded:.1f} s"
    )
    surface, baked = asset_of(
        dual_grid(y, shape.voxel_margin),
        materials,
        resolution,
        faces=faces,
        texture_size=texture_size,
        report=lambda line: log.info(f"  {line}"),
    )
    save(out, surface, baked)
    picture, *pages = pictures_of(out, rerun)
    contact_sheet(picture, surface, baked)
    note = f"{len(surface.faces):,} triangles from {len(y):,} voxels of 1/{resolution}"
    with TemporaryDirectory() as folder:
        glb = Path(folder) / "asset.glb"  # the page has the mesh as such a file
        save(glb, surface, baked)
        Scene(out.name, note).mesh(glb, out.stem).save(*pages)
    closed = "closed" if surface.is_closed else "open"
    log.info(
        f"wrote {out}: {len(surface.faces):,} triangles, {closed}"
        + (f", a texture of {texture_size}" if baked else "")
        + f"; {', '.join(map(str, (picture, *pages)))}"
    )
    return out, picture, *pages


def pictures_of(out: Path, rerun: bool) -> tuple[Path, ...]:
    """Return the paths of a mesh's picture, of its page and of a recording."""
    pages = [out.with_suffix(kind) for kind in (".html", *[".rrd"] * rerun)]
    return out.with_name(f"{out.stem}-views.png"), *pages


def _latents(
    path: str | Path, element: int, textured: bool
) -> tuple[mx.array, dict[str, mx.array], int | None]:
    """Return an element's rows, its latents by name, and the resolution."""
    state = SafetensorsState(Path(path))
    resolution = state.metadata.get("resolution", "")
    required = [COORDS, SHAPE, *[TEXTURE] * textured]
    names = sorted(state)
    if lacking := [name for name in required if name not in names]:
        raise ValueError(
            f"{path} must hold {', '.join(required)}; it holds {listed(names)}, but "
            f"not {', '.join(lacking)}"
        )
    arrays = {name: state.read(name) for name in required}
    coords = arrays[COORDS]
    if coords.ndim != 2 or coords.shape[1] != 4 or coords.dtype != mx.int32:
        raise ValueError(
            f"{path}: coords must be (N, 4) int32, rows (batch, x, y, z); got "
            f"{tuple(coords.shape)} of {coords.dtype}"
        )
    n = coords.shape[0]
    for name in required[1:]:
        if arrays[name].ndim != 2 or arrays[name].shape[0] != n:
            raise ValueError(
                f"{path}: {name} must have a row for each of the {n} coordinates; got "
                f"{tuple(arrays[name].shape)}"
            )
    places = true_positions(coords[:, 0] == element)
    if not places.size:
        raise ValueError(f"{path} has no batch element {element}")
    known = int(resolution) if resolution.isdecimal() else None
    return coords[places], {name: arrays[name][places] for name in required[1:]}, known


def _decoder(
    model: str | Path, what: str, channels: int, revision: str | None
) -> SparseVAEDecoder:
    """Return a decoder with so many output channels."""
    net = from_pretrained(model, revision=revision)
    if not isinstance(net, SparseVAEDecoder):
        raise ValueError(
            f"{model} is a {type(net).__name__}; {what} needs a SparseVAEDecoder"
        )
    count = net.output_layer.weight.shape[0]
    if count != channels:
        raise ValueError(
            f"{model} has {count} output channels; {what} needs {channels}"
        )
    return net
