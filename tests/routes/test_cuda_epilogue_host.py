"""CUDA's epilogues, emulated on the CPU, against the oracle: by rows, where splits are
added, and as Hopper's tiles finish and write the sums of a warpgroup, with statistics
of what is written.
"""

from dataclasses import replace

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from contractions import Point, work
from cuda_emulation import emulated
from epilogues import ACTIVATIONS, epilogue, oracle
from norm_checks import joined, moments

from mlx_lattice import devices
from mlx_lattice.backends.cuda import contraction as cuda_contraction
from mlx_lattice.backends.cuda import tiles as cuda_tiles
from mlx_lattice.backends.gpu.kernel import Interface
from mlx_lattice.checks import DTYPES
from mlx_lattice.epilogue import ARRAYS
from mlx_lattice.problem import FORWARD, Problem

pytestmark = emulated
PARTS = ARRAYS, ARRAYS[:-1], ("shift", "residual"), ("mean",), (), ("var",), ARRAYS[-1:]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    "planner, point",
    (
        (cuda_contraction.relation_traversal, Point("surface", (12, 6, 3))),
        (cuda_contraction.relation_traversal, Point("edges", (5, 7, 1))),
        (cuda_contraction.depthwise, Point("surface", (16, 16, 16))),
        (cuda_contraction.depthwise, Point("surface", (3, 6, 3))),
        (
            cuda_contraction.quantized_traversal,
            Point("surface", (40, 6, 1), packing=(4, 32)),
        ),
        (
            cuda_contraction.quantized_traversal,
            Point("edges", (40, 6, 1), packing=(8, 32)),
        ),
    ),
    ids=lambda v: getattr(v, "__name__", None),
)
def test_by_rows(emulator, planner, point, dtype):
    given = work(replace(point, dtype=dtype), FORWARD)
    relation, (c_in, c_out, groups) = given.relation, point.shape
    bits, group_size = point.packing or (None, None)
    for activation, parts in zip(ACTIVATIONS, PARTS, strict=False):
        after = epilogue(relation.n_out, c_out, dtype, activation, parts)
        problem = Problem.of(
            FORWARD,
            relation,
            c_in,
            c_out,
            DTYPES[dtype],
            groups,
            table=relation.has_table,
            bits=bits,
            group_size=group_size,
            epilogue=after.facts,
        )
        plan = planner(problem, devices.profile("h200"))
        arrays = after.as_kernels_take(after.facts)
        y = plan(relation, given.x, given.w, *arrays)
        ref.assert_close(y, oracle(given.wanted, after), dtype, f"{plan}")
    ran = [name for name in emulator.launches if "_Epilogue_" in name]
    assert len(ran) == len(ACTIVATIONS)


def sums_of(*shape):
    values = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    return mx.array(values), values.astype(np.float64)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    "splits, rows, channels", ((1, 1, 8), (3, 37, 24), (9, 300, 8))
)
def test_where_splits_are_added(emulator, splits, rows, channels, dtype):
    partial, values = sums_of(splits, rows, channels)
    for activation, parts in zip(ACTIVATIONS, PARTS, strict=False):
        after = epilogue(rows, channels, dtype, activation, parts)
        kernel = cuda_tiles.add_splits(DTYPES[dtype], after=after.facts)
        given = dict(
            zip(after.facts.there, after.as_kernels_take(after.facts), strict=True)
        )
        given = [given.get(name) for name in ARRAYS]
        threads = cuda_tiles.adding_threads(rows * channels)
        shape = (rows, channels), DTYPES[dtype]
        (y,) = kernel([partial, *given], [shape], (threads,))
        wanted = oracle(values.sum(axis=0), after)
        ref.assert_close(y, wanted, dtype, str(after.facts))


# A warpgroup's sums as wgmma leaves them: lane / 4 and 8 more are rows, pairs columns.
SUMS = """
  __shared__ __align__(16) float2 kept[KEPT<AFTER, BN>];
  const int first_column = blockIdx.y * BN;
  float sums[1][BN / 2];
  for (int i = 0; i < BN / 2; ++i) {
    const int row = blockIdx.x * 64 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 +
                    (i / 2) % 2 * 8;
    const int column = first_column + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    const bool inside = row < partial_shape[0] && column < partial_shape[1];
    sums[0][i] = inside ? partial[row * partial_shape[1] + column] : 0.0f;
  }
  if constexpr (AFTER::FINISHES) {
    keep_channels<BN>(kept, after, first_column, partial_shape[1], threadIdx.x, 128);
  }
  __syncthreads();
"""
STORED = Interface("", ("partial", "bias", "rows"), ("y",))
TO = "y, blockIdx.x * 64, partial_shape[0], first_column, partial_shape[1]"


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("width", (32, 48, 64, 96, 256))
def test_as_tiles_write(emulator, width, dtype):
    rows, channels, kind = 70, 72, DTYPES[dtype]
    template = ("T", kind), ("BN", width), ("BESIDE", 64), ("OUT", kind)
    partial, values = sums_of(rows, channels)
    order = np.random.default_rng(1).permutation(rows).astype(np.int32)
    placed = np.empty_like(values)
    placed[order] = values
    for activation, parts in zip(ACTIVATIONS, PARTS, strict=False):
        after = epilogue(rows, channels, dtype, activation, parts)
        kernel = cuda_tiles.finishing_kernel(
            "stored",
            (*cuda_tiles.HOPPER, "../tests/cuda_host/stored.cuh"),
            STORED,
            template,
            after.facts,
            threads=128,
            before=SUMS,
            arguments=(("partial", "sums"), ("rows", "kept, rows"), ("y", TO)),
        )
        given = dict(
            zip(after.facts.there, after.as_kernels_take(after.facts), strict=True)
        )
        given = [given.get(name) for name in ARRAYS]
        (y,) = kernel(
            [partial, *given, mx.array(order)],
            [((rows, channels), kind)],
            (2 * 128, -(-channels // width)),
        )
        ref.assert_close(y, oracle(placed, after), dtype, str(after.facts))


SUMMED = Interface("", ("partial", "bias", "rows"), ("y",))
SIZES = "rows, partial_shape[0], partial_shape[1]"


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("width", (32, 48, 64, 96, 128, 256))
@pytest.mark.parametrize("biased", (False, True))
def test_statistics_of_what_tiles_write(emulator, width, dtype, biased):
    rows, channels, kind = 300, 136, DTYPES[dtype]
    kernel = cuda_tiles.finishing_kernel(
        "summed",
        (*cuda_tiles.HOPPER, "../tests/cuda_host/stored.cuh"),
        SUMMED,
        (("T", kind), ("BN", width)),
        None,
        moments=True,
        threads=128,
        arguments=(("rows", SIZES),),
    )
    values = 100 + cases.features(rows, channels)  # far from zero
    partial = mx.array(values.astype(np.float32))
    bias = mx.array(cases.features(1, channels, 1)[0]).astype(kind) if biased else None
    order = mx.array(np.random.default_rng(1).permutation(rows).astype(np.int32))
    columns = -(-channels // width)
    for blocks in (1, 2, 5):  # of more tiles, or one, each
        y, lines = kernel(
            [partial, bias, order],
            [((rows, channels), kind), ((blocks, 3, channels), mx.float32)],
            (columns * blocks * 128,),
        )
        if bias is not None:
            values = np.array(partial) + ref.to_numpy(bias)
        ref.assert_close(y[order], values, dtype)
        for found, wanted in zip(joined(lines), moments(y), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    "splits, rows, channels", ((2, 1, 8), (3, 37, 24), (2, 65, 72), (4, 3000, 136))
)
def test_statistics_where_splits_are_added(emulator, splits, rows, channels, dtype):
    partial, values = sums_of(splits, rows, channels)
    bias = mx.array(1000 * cases.features(1, channels)[0]).astype(DTYPES[dtype])
    kernel = cuda_tiles.add_splits(DTYPES[dtype], moments=True)
    lines = cuda_tiles.moments_lines(rows, channels)
    shapes = ((rows, channels), DTYPES[dtype]), ((lines, 3, channels), mx.float32)
    threads = cuda_tiles.moments_threads(rows, channels)
    y, found = kernel([partial, bias], shapes, (threads,))
    ref.assert_close(y, values.sum(axis=0) + ref.to_numpy(bias), dtype)
    for got, wanted in zip(joined(found), moments(y), strict=True):
        np.testing.assert_allclose(got, wanted, 1e-4, 1e-3 if rows == 1 else 1e-5)
