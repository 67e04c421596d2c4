"""The CUDA kernels of int8 features: their interfaces, templates and sources."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import mlx.core as mx

from ..devices import CUDA
from ..dtypes import DTYPES
from ..integer_facts import FOLLOWING, IntegerFacts
from ..problem import Problem
from . import cuda_epilogue, cuda_tiles
from .cuda_compile import TYPES
from .gpu_kernel import GpuKernel, Interface
from .kernel_launches import THREADS
from .signatures import ADD_SPLITS, SORTED_TILES, W_OFFSET, W_ROW, kept, rounded_up

_SIZES = {
    **dict(SORTED_TILES.sizes),
    "c_y": "w_shape[1]",
    W_OFFSET: "w_shape[1] * w_shape[2]",
    W_ROW: "w_shape[2]",
    "pitch": "table_shape[1]",
}
# Partial sums, which nothing follows, and whole ones.
PARTS = replace(SORTED_TILES, sizes=tuple(_SIZES.items()))
TILES = replace(PARTS, inputs=(*SORTED_TILES.inputs[:-1], *FOLLOWING))
SPLITS = replace(ADD_SPLITS, inputs=("partial", *FOLLOWING))
UNPACK = Interface(
    "UnpackInt4",
    ("words", "multipliers"),
    ("w",),
    (("lines", "words_shape[0] * words_shape[1]"), ("padded", "words_shape[2] * 8")),
)
EPILOGUE = "integer_epilogue.cuh"
# Sources of a tile, by variant.
FILES = {
    "mma": (*cuda_tiles.MMA, EPILOGUE, "sorted_implicit_gemm_mma.cuh"),
    "wide": (
        *cuda_tiles.HOPPER,
        EPILOGUE,
        "hopper_int8.cuh",
        "weight_stages.cuh",
        "sorted_implicit_gemm_wide.cuh",
    ),
    "hopper": (
        *cuda_tiles.HOPPER,
        "hopper_tf32.cuh",
        EPILOGUE,
        "hopper_int8.cuh",
        "stage_sources.cuh",
        "sorted_implicit_gemm_hopper.cuh",
    ),
}


def after(facts: IntegerFacts, dtype: mx.Dtype) -> str:
    """Return the C++ type of what follows the sums.

    Args:
        facts: what there is.
        dtype: of a residual of floats.
    """
    there = [str(name in facts.there).lower() for name in ("shift", "residual")]
    residual = TYPES[mx.int8 if facts.residual_int8 else dtype]
    return f"IntegerEpilogue<{facts.act.code}, {', '.join(there)}, {residual}>"


def tiles_kernel(p: Problem, tile: cuda_tiles.Tile, is_split: bool) -> GpuKernel:
    """Return the kernel of the tiles; where sums are split it writes parts of them."""
    dtype, whole = DTYPES[p.dtype], not is_split
    return kept(
        GpuKernel(
            CUDA,
            "int8_sorted",
            (*tile.files, "int8_sorted.cu"),
            TILES if whole else PARTS,
            (
                ("TILE", tile.code),
                ("OUT", p.integer.out_dtype(dtype) if whole else mx.int32),
                ("MIRRORED", p.mirrored),
                ("AFTER", after(p.integer, dtype) if whole else "PartialSums"),
            ),
            threads=tile.threads,
            blocks_per_multiprocessor=tile.per_multiprocessor,
            shared_bytes=tile.shared_bytes,
            defines=(("LATTICE_MAX_OFFSETS", cuda_tiles.list_length(p.volume)),),
            together=FOLLOWING if whole else ("bias",),
        )
    )


def adding_kernel(facts: IntegerFacts, dtype: mx.Dtype) -> GpuKernel:
    """Return what adds int32 partial sums, and does what follows.

    Args:
        facts: what that is.
        dtype: of floats, of the result and the residual.
    """
    return kept(
        GpuKernel(
            CUDA,
            "add_integer_splits",
            (*cuda_epilogue.FILES, "tiles.cuh", EPILOGUE, "integer_splits.cu"),
            SPLITS,
            (("OUT", facts.out_dtype(dtype)), ("AFTER", after(facts, dtype))),
            together=FOLLOWING,
        )
    )


@lru_cache(maxsize=1024)
def unpacker(shape: tuple[int, ...], group_size: int):
    """Return the launch that makes int4 words of a shape int8: (K, C_out, channels)."""
    template = (("GROUP_SIZE", group_size),)
    kernel = kept(GpuKernel(CUDA, "unpack_int4", ("unpack_int4.cu",), UNPACK, template))
    volume, c_out, words = shape
    threads = rounded_up(volume * c_out * words // 2, THREADS)
    out = (volume, c_out, 8 * words), mx.int8
    return kernel.launcher((True, True), [out], (threads,))
