"""The interfaces of the CUDA kernels of geometry: sizes by name, and their launch.

Sizes that change from set to set come as an array on the device, ``digits``: offsets,
bits of a digit of a sort, digits of a key, rows of a work chunk; else a kernel would be
compiled for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..devices import CUDA
from .gpu_kernel import GpuKernel, Interface
from .kernel_launches import Output

_DIGITS = (
    ("volume", "digits[0]"),
    ("digit_bits", "digits[1]"),
    ("passes", "digits[2]"),
)
# Of a block among those of its job.
_BLOCKS = ("block", "blockIdx.x / JOBS"), ("blocks", "gridDim.x / JOBS")
_TABLE = ("rows", "neighbours_shape[0]"), ("volume", "neighbours_shape[1]")
# Each struct of sizes: (name, how it is read) of its fields.
SIZES = {
    # Of a block's job: n rows, and its facts.
    "HashRows": (("rows", "n"), ("scratch_words", "facts[0]"), *_BLOCKS),
    "Table": (
        ("rows", "n"),
        ("volume", "facts[0]"),
        ("digit_bits", "facts[1]"),
        ("passes", "facts[2]"),
        ("chunk_rows", "chunk_rows_of(n, facts[0], gridDim.x)"),
    ),
    "RadixSort": (("keys", "keys_shape[0]"), *_DIGITS[1:]),
    "PackKeys": (("rows", "coords_shape[0]"), *_DIGITS),
    "RowKeys": (("places", "table_shape[0]"), *_DIGITS[1:]),
    "RowStarts": (("places", "keys_shape[0]"),),
    "CutPieces": (("starts", "starts_shape[0]"),),
    "CurveKeys": (("rows", "coords_shape[0]"), *_DIGITS[1:]),
    "ScoreKeys": (
        ("rows", "scores_shape[0]"),
        ("least", "digits[0]"),
        *_DIGITS[1:],
    ),
    "MarkBest": (
        ("rows", "keys_shape[0]"),
        ("score_bits", "facts[0]"),
        ("k", "facts[1]"),
    ),
    "UniqueKeys": (("keys", "keys_shape[0]"), ("passes", "digits[2]")),
    "UnpackKeys": (("keys", "unique_shape[0]"),),
    "KeptPlaces": (("rows", "mask_shape[0]"),),
    "KeptRows": (("rows", "places_shape[0]"),),
    "TransposeTable": _TABLE,
    "SortTable": (
        ("rows", "rows_shape[0]"),
        ("pitch", "gridDim.x * blockDim.x"),
        ("volume", "neighbours_shape[1]"),
    ),
    "IdentityTiles": (("rows", "fed_shape[0]"),),
    "UnsortTable": (
        ("rows", "rows_shape[0]"),
        ("pitch", "sorted_shape[1]"),
        ("volume", "sorted_shape[0]"),
    ),
    "ScanCounts": (("bands", "counts_shape[1]"),),
    "WriteEdges": (*_TABLE, ("bands", "starts_shape[1]"), ("listed", "sums_shape[0]")),
}
# An array of words that kernels share, which MLX takes for one that is read.
SCRATCH = "reinterpret_cast<unsigned*>(const_cast<uint32_t*>(scratch))"


def of_job(name: str, job: int) -> str:
    """Return the name of an array of a job, of several in one launch."""
    return f"{name}_{job}" if job else name


def chosen(text: str, jobs: int, job: str = "job") -> str:
    """Return C++ of an array, or of one of its extents, of one of several jobs.

    Args:
        text: of the first job: ``rows`` or ``rows_shape[0]``.
        jobs: how many a launch has.
        job: C++ of the number of the one.
    """
    name, shape, axis = text.partition("_shape")
    each = [f"{of_job(name, at)}{shape}{axis}" for at in range(jobs)]
    return text if jobs == 1 else f"nth({job}, {', '.join(each)})"


def structs(but: str = "") -> tuple[Interface, ...]:
    """Return every interface as far as its struct goes: files name several."""
    return tuple(
        Interface(name, (), (), sizes) for name, sizes in SIZES.items() if name != but
    )


def geometry_kernel(
    symbol: str,
    files: tuple[str, ...],
    struct: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    **more: object,
) -> GpuKernel:
    """Return a kernel of geometry.

    Args:
        symbol: the function.
        files: its sources.
        struct: the name of its sizes, one of ``SIZES`` if it has any.
        inputs: names of the inputs.
        outputs: names of the outputs.
        more: other fields of GpuKernel.
    """
    face = Interface(struct, tuple(inputs), tuple(outputs), SIZES.get(struct, ()))
    also = structs(but=struct)
    return GpuKernel(CUDA, symbol, files, face, also=also, geometry=True, **more)


def run(
    kernel: GpuKernel,
    inputs: Sequence[mx.array],
    blocks: int,
    threads: int,
    outputs: Sequence[Output],
    fill: int | None = None,
) -> list[mx.array]:
    """Launch ``blocks`` blocks of ``threads`` threads."""
    return kernel(inputs, outputs, (blocks * threads,), (threads,), fill=fill)
