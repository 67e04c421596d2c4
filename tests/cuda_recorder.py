"""CUDA kernels without a GPU: what MLX would compile, and with which arrays.

``recording()`` puts a stand-in where ``mx.fast.cuda_kernel`` is. Its kernels compute
nothing: their outputs are zeros. Geometry stays the CPU's, so relations are real.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple
from unittest.mock import patch

import mlx.core as mx

from mlx_lattice import devices, registry
from mlx_lattice.backends import cuda, gpu
from mlx_lattice.backends.cuda import thresholds as cuda_thresholds
from mlx_lattice.backends.cuda import tiles as cuda_tiles
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.gpu import nvrtc
from mlx_lattice.routes import proof

MODULES = tuple(
    import_module(f"{folder.__name__}.{module.name}")
    for folder in (cuda, gpu)
    for module in iter_modules(folder.__path__)
)


class Launch(NamedTuple):
    """One kernel as it was launched.

    Attributes:
        name: by which MLX keeps what it compiled.
        inputs: (name, dtype, whether it has axes) of each.
        outputs: (name, dtype) of each.
        text: header and body.
        grid: threads on each axis.
        threadgroup: threads of a block, on each axis.
        shapes: of the outputs.
    """

    name: str
    inputs: tuple[tuple[str, mx.Dtype, bool], ...]
    outputs: tuple[tuple[str, mx.Dtype], ...]
    text: tuple[str, str]
    grid: tuple[int, ...]
    threadgroup: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


def _stand_in(launches: list[Launch]):
    def cuda_kernel(name, input_names, output_names, source, header="", **_):
        def call(inputs, output_shapes, output_dtypes, grid, threadgroup, **_):
            given = zip(input_names, inputs, strict=True)
            given = tuple((key, array.dtype, array.ndim > 0) for key, array in given)
            made = tuple(zip(output_names, output_dtypes, strict=True))
            shapes = tuple(map(tuple, output_shapes))
            text = header, source
            launches.append(Launch(name, given, made, text, grid, threadgroup, shapes))
            slots = zip(output_shapes, output_dtypes, strict=True)
            return [mx.zeros(shape, dtype=dtype) for shape, dtype in slots]

        return call

    return cuda_kernel


def no_small_tiles(monkeypatch) -> None:
    """Give few rows the tiles of many, for the rest of a test."""
    none = dict.fromkeys(cuda_tiles.SMALL_TILES, {})
    monkeypatch.setattr(cuda_tiles, "SMALL_TILES", none)
    monkeypatch.setattr(cuda_tiles, "TF32_SMALL_TILES", {})
    for name in (
        "FLOAT_ELEMENTS",
        "TURNED_ELEMENTS",
        "TF32_NARROW_GRAD",
        "LOW_GRAD_EDGES",
    ):
        monkeypatch.setattr(cuda_thresholds, name, 0)
    monkeypatch.setattr(cuda_thresholds, "NARROW_GRAD_EDGES", {})
    none = dict.fromkeys(cuda_thresholds.WHOLE_GRAD, ((0, 0),))
    monkeypatch.setattr(cuda_thresholds, "WHOLE_GRAD", none)


def _forget() -> None:
    """Drop kernels and plans: they hold what they were made with."""
    for module in MODULES:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@contextmanager
def recording(chip: str = "h200") -> Iterator[list[Launch]]:
    """Run contractions and reductions as on a CUDA device; yield their launches."""
    launches: list[Launch] = []
    profile = devices.PROFILES[chip]
    capability = (8, 0) if chip == "a100" else (9, 0)
    patches = [
        patch.object(mx.fast, "cuda_kernel", _stand_in(launches)),
        patch.object(gpu_kernel, "compute_capability", lambda: capability),
        *(
            patch.object(module, "compiler", lambda capability: None)
            for module in (gpu_kernel, nvrtc)
        ),
        patch.object(registry, "geometry", lambda: registry.GEOMETRY["cpu"]),
        patch.object(registry, "reductions", lambda: registry.REDUCTIONS["cuda"]),
    ]
    holders = [devices, *MODULES]
    patches += [
        patch.object(module, "current", lambda: profile)
        for module in holders
        if hasattr(module, "current")
    ]
    _forget()
    try:
        for each in patches:
            each.start()
        # On the CPU where there is a GPU, too; and kernels that compute nothing would
        # prove to be wrong.
        with mx.stream(mx.cpu), proof.proof(False):
            yield launches
    finally:
        for each in reversed(patches):
            each.stop()
        _forget()
