"""Numbers that Python and the text of a kernel both have are equal.

A kernel's text is fixed, and Python counts blocks, scratch and rows by the same
numbers: where they differed, a kernel would read or write beyond an array.
"""

import re
from math import prod
from pathlib import Path

import pytest

from mlx_lattice import epilogue
from mlx_lattice.backends import cpu
from mlx_lattice.backends.cuda import geometry as cuda_geometry
from mlx_lattice.backends.cuda import sort as cuda_sort
from mlx_lattice.backends.cuda import thresholds as cuda_thresholds
from mlx_lattice.backends.cuda import tiles as cuda_tiles
from mlx_lattice.backends.cuda import weight_grad as cuda_weight_grad
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.gpu import norms as gpu_norms
from mlx_lattice.backends.gpu import optimizers as gpu_optimizers
from mlx_lattice.backends.metal import contraction as metal_contraction
from mlx_lattice.backends.metal import geometry as metal_geometry
from mlx_lattice.backends.metal import tiles as metal_tiles
from mlx_lattice.devices import CUDA, METAL
from mlx_lattice.geometry.lattice import Rule
from mlx_lattice.ops import attention
from mlx_lattice.quantized import fits_int32

ROOT = Path(__file__).parents[2]
NUMBERS = {
    "cuda/rows.cuh": {
        "BINS": cuda_sort.BINS,
        "HEADER": cuda_sort.HEADER,
        "BOUNDS": cuda_geometry.TABLE_WORDS,
    },
    "cuda/radix_sort.cu": {
        "SORT_THREADS": cuda_sort.SORT_THREADS,
        "SORT_ITEMS": cuda_sort.SORT_TILE // cuda_sort.SORT_THREADS,
        "SUM_OF_TILE": cuda_sort.MOST_KEYS,
    },
    "cuda/table_sources.cuh": {
        "PART_OFFSETS": cuda_geometry.PART_OFFSETS,
        "GROUP": cuda_geometry.GROUP,
        "PARTS_AT": cuda_geometry.PARTS_AT,
    },
    "cuda/neighbour_table.cu": {"BAND": cuda_geometry.BAND},
    "cuda/sort_table.cu": {"ROW_ALIGNMENT": cuda_geometry.ROW_ALIGNMENT},
    "cuda/relation_views.cu": {"BANDS": cuda_geometry.EDGE_ROWS // cuda_geometry.BAND},
    "cuda/patches.cu": {"PATCH_WORDS": 8},
    "cuda/attention_heads.cu": {"HEAD_EPS": attention.EPS},
    "cuda/norm_blocks.cuh": {"NORM_THREADS": gpu_norms.THREADS},
    "cuda/channel_norms.cu": {
        "COMBINE_ACROSS": gpu_norms.COMBINING[CUDA][0],
        "COMBINE_DOWN": gpu_norms.COMBINING[CUDA][1],
    },
    "cuda/batch_norm.cu": {
        "BATCH_ACROSS": gpu_norms.FEW_ACROSS,
        "BATCH_WARPS": gpu_norms.MOST_THREADS // 32,
    },
    "cuda/add_splits_moments.cu": {
        "MOMENTS_ACROSS": cuda_tiles.MOMENTS_CHANNELS // cuda_tiles.ADDED,
        "MOMENTS_DOWN": gpu_kernel.THREADS
        // (cuda_tiles.MOMENTS_CHANNELS // cuda_tiles.ADDED),
    },
    "cuda/relation_traversal.cu": {"SIDE": cuda_weight_grad.SIDE},
    "cuda/transposed_sums.cu": {"COLUMNS": cuda_weight_grad.TRANSPOSED_SIDE},
    "cuda/sorted_implicit_gemm_mma.cuh": {"PIPELINE": cuda_tiles.MMA_STAGES},
    "cuda/grouped_gemm_mma.cuh": {"GROUPED_PIPELINE": cuda_tiles.MMA_STAGES},
    "cuda/sorted_implicit_gemm_weight_grad.cu": {
        "MAX_BLOCKS": cuda_thresholds.SORTED_GRAD["most"]
    },
    "cpu/contraction.cpp": {
        "tile_alone": cpu.ONE_TILE,
        "line_rows": cpu.LINE_ROWS,
    },
    "metal/matrix_tiles.metal": {
        "LANES": metal_geometry.LANES,
        "SIMDGROUPS": metal_tiles.THREADS // metal_geometry.LANES,
        "BLOCK_ROWS": metal_tiles.BLOCK_ROWS,
        "TILE_ROWS": metal_tiles.TILE_ROWS,
    },
    "metal/tensor_ops.metal": {"TENSOR_WIDTH": metal_tiles.TENSOR_WIDTH},
    "metal/vec4.metal": {"ROWS": metal_contraction.VEC4_ROWS},
    "metal/fp16_gather.metal": {"HALF_ROWS": metal_contraction.HALF_ROWS},
    "metal/patches.metal": {"PATCH_WORDS": 8},
    "metal/attention_heads.metal": {"HEAD_EPS": attention.EPS},
    "metal/channel_norms.metal": {"NORM_THREADS": gpu_norms.THREADS},
}
ACTIVATIONS = ("SLOPE", "GELU", "SILU", "GELU_TANH", "ELU")
UPDATES = ("SGD_PLAIN", "SGD_MOVED", "SGD_NESTEROV", "ADAM")
RULES = (*(rule.name for rule in Rule), "CELLS")
ENUMERATIONS = {
    ("cuda/activations.cuh", "Activation"): [f"ACT_{name}" for name in ACTIVATIONS],
    ("metal/activations.metal", "Activation"): [f"ACT_{name}" for name in ACTIVATIONS],
    ("cuda/unique_rows.cu", "Rule"): RULES,
    ("metal/hash_table.metal", "Rule"): RULES,
    ("cuda/table_sources.cuh", "Stride"): cuda_geometry.KINDS,
    ("cuda/updates.cu", "UpdateRule"): UPDATES,
    ("metal/updates.metal", "UpdateRule"): UPDATES,
}


def number(file: str, name: str) -> float:
    """Return what a kernel's text gives a name, which it does once."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.findall(rf"\b{name} = ([^,;}}]+)[,;}}]|\b{name} = ([^,;\n]+)\n", text)
    assert len(found) == 1, f"{file} gives {name} {len(found)} values"
    value = "".join(found[0]).strip().replace("int64_t", "").replace("/", "//")
    return eval(re.sub(r"(?<=[\d.])(?:u|f)\b", "", value), {})


@pytest.mark.parametrize("file", NUMBERS)
def test_a_number_is_the_same_in_both_places(file):
    assert {name: number(file, name) for name in NUMBERS[file]} == NUMBERS[file]


@pytest.mark.parametrize(("file", "name"), ENUMERATIONS)
def test_an_enumeration_has_the_order_of_pythons(file, name):
    text = (ROOT / file).read_text(encoding="utf-8")
    (names,) = re.findall(rf"enum (?:class )?{name} (?:: int )?\{{([^}}]+)\}}", text)
    expected = ENUMERATIONS[file, name]
    assert [each.strip() for each in names.split(",")] == list(expected)


def test_codes_count_as_the_enumerations_do():
    assert [getattr(epilogue, name) for name in ACTIVATIONS] == [0, 1, 2, 3, 4]
    assert list(Rule) == list(range(len(Rule)))
    assert cuda_geometry.CELLS == metal_geometry.CELLS == len(Rule)
    rules = gpu_optimizers.SGD, gpu_optimizers.MOMENTUM, gpu_optimizers.NESTEROV
    assert [rule.code for rule in (*rules, gpu_optimizers.ADAM)] == [0, 1, 2, 3]


def test_numbers_that_others_are_made_of():
    """What kernels have no name for, but rely on."""
    threads = cuda_sort.THREADS, gpu_kernel.THREADS
    assert {*threads, gpu_norms.THREADS, cuda_geometry.EDGE_ROWS} == {256}
    assert cuda_sort.SORT_THREADS == cuda_sort.BINS
    slab = number("cuda/sort_table.cu", "SLAB")
    warps = cuda_sort.SORT_THREADS // 32
    assert 4 * warps * slab * (slab + 1) == cuda_geometry.TILE_SCRATCH
    assert prod(gpu_norms.COMBINING[CUDA]) == prod(gpu_norms.COMBINING[METAL]) == 512
    # A thread holds 32 bytes of a channel; see BATCH_HELD of batch_norm.cu.
    held = 32 * gpu_norms.MOST_THREADS
    assert held >= gpu_norms.ONE_LAUNCH_NORM * gpu_norms.FEW_ACROSS


def test_the_products_of_a_sum_of_integers_are_bounded_alike():
    most = number("cpu/int8_blocked.cpp", "most")
    assert fits_int32(most, 1) and not fits_int32(most + 1, 1)


def test_every_row_that_a_tile_reads_is_in_the_padded_table():
    """WideTile reads as many as it is high; others blocks of 64, where masks say so."""
    tables = vars(cuda_tiles).values()
    shapes = {shape for table in tables for shape in shapes_of(table)}
    wide = [shape for shape in shapes if isinstance(shape, cuda_tiles.WideTile)]
    assert {shape.rows for shape in wide} == {64, 128, 192}
    assert all(cuda_geometry.ROW_ALIGNMENT % shape.rows == 0 for shape in wide)
    assert cuda_geometry.ROW_ALIGNMENT % 64 == 0


def shapes_of(table):
    """Yield the tiles that a table holds, however deep."""
    if isinstance(table, cuda_tiles.Shape):
        yield table
    elif isinstance(table, dict):
        for each in table.values():
            yield from shapes_of(each)
    elif isinstance(table, tuple):
        for each in table:
            yield from shapes_of(each)
