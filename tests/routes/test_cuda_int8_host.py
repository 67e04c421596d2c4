"""What CUDA's int8 kernels do beside their products, emulated on the CPU.

What follows int32 sums, where splits are added and as Hopper's tiles write them, and
int4 weights unpacked.
"""

import mlx.core as mx
import numpy as np
import pytest
from cuda_emulation import emulated
from reference_integers import activated

from mlx_lattice.backends.cuda import contraction as cuda_contraction
from mlx_lattice.backends.cuda import tiles as cuda_tiles
from mlx_lattice.backends.gpu.kernel import GpuKernel, Interface
from mlx_lattice.devices import CUDA
from mlx_lattice.problem import IntegerFacts

pytestmark = emulated
HALF, BRAIN, FLOAT, INT8 = mx.float16, mx.bfloat16, mx.float32, mx.int8
# (dtype of the result, of the residual or None, whether there is a shift, what
# activation).
CASES = (
    (INT8, INT8, True, "relu"),
    (INT8, HALF, False, ""),
    (HALF, INT8, True, "leaky_relu(0.2)"),
    (BRAIN, BRAIN, True, "relu"),
    (FLOAT, FLOAT, False, "relu"),
    (INT8, None, True, ""),
)


def values_of(array) -> np.ndarray:
    return np.array(array if array.dtype == INT8 else array.astype(FLOAT))


def layer(case, rows, channels):
    """(the arrays that follow, what of integer sums they make)."""
    out, residual, shift, activation = case
    draw = np.random.default_rng(rows + channels)
    # Steps of halves: ties are rounded, and some results are clipped.
    scale = mx.array(draw.choice([-0.5, 0.25, 0.5], channels).astype(np.float32))
    added = [scale, None, None, None, None]
    if shift:
        added[1] = mx.array(draw.integers(-9, 9, channels).astype(np.float32) / 4)
    if residual is not None:
        drawn = mx.array(draw.integers(-127, 128, (rows, channels)).astype(np.int8))
        added[2] = drawn if residual is INT8 else (drawn / 8).astype(residual)
    if residual is INT8:
        added[3] = mx.array([0.173])
    if out is INT8:
        added[4] = mx.array([0.5])

    def wanted(sums):
        v = sums.astype(np.float32) * values_of(scale)
        v = v if added[1] is None else v + values_of(added[1])
        if residual is not None:
            more = values_of(added[2]).astype(np.float32)
            v = v + (more if added[3] is None else more * values_of(added[3]))
        v = activated(v, activation)
        assert v.dtype == np.float32
        if out is INT8:
            return np.clip(np.rint(v * np.float32(0.5)), -127, 127).astype(np.int8)
        return values_of(mx.array(v).astype(out))

    return added, wanted


def sums_of(*shape):
    values = np.random.default_rng(5).integers(-700, 700, shape).astype(np.int32)
    values[..., 0] = 0
    return values


def facts_of(case) -> tuple[IntegerFacts, mx.Dtype]:
    """What follows, and the dtype of floats."""
    out, residual, shift, activation = case
    there = ["scale"] + ["shift"] * shift
    there += ["residual"] * (residual is not None)
    there += ["residual_scale"] * (residual is INT8) + ["out_inverse"] * (out is INT8)
    dtype = residual if out is INT8 else out
    dtype = HALF if dtype is None or dtype is INT8 else dtype
    return IntegerFacts(tuple(there), activation), dtype


@pytest.mark.parametrize("case", CASES, ids=str)
def test_where_splits_are_added(emulator, case):
    kernel = cuda_contraction._add_integer_splits(*facts_of(case))
    for splits, rows, channels in ((1, 1, 16), (3, 37, 48)):
        partial = sums_of(splits, rows, channels)
        added, wanted = layer(case, rows, channels)
        threads = cuda_tiles.adding_threads(rows * channels)
        shape = (rows, channels), case[0]
        (y,) = kernel([mx.array(partial), *added], [shape], (threads,))
        assert np.array_equal(values_of(y), wanted(partial.sum(axis=0)))


# A warpgroup's sums as wgmma leaves them: lane / 4 and 8 more are rows, pairs columns.
SUMS = """
  __shared__ __align__(16) float2 kept[KEPT<AFTER, BN>];
  const int first_column = blockIdx.y * BN;
  int sums[1][BN / 2];
  for (int i = 0; i < BN / 2; ++i) {
    const int row = blockIdx.x * 64 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 +
                    (i / 2) % 2 * 8;
    const int column = first_column + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    const bool inside = row < partial_shape[0] && column < partial_shape[1];
    sums[0][i] = inside ? partial[row * partial_shape[1] + column] : 0;
  }
  keep_channels<BN>(kept, after, first_column, partial_shape[1], threadIdx.x, 128);
  __syncthreads();
"""
STORED = Interface("", ("partial", *cuda_contraction.FOLLOWING, "rows"), ("y",))
TO = "y, blockIdx.x * 64, partial_shape[0], first_column, partial_shape[1]"


@pytest.mark.parametrize(
    "case, width, beside",
    list(zip(CASES, (64, 96, 48, 32, 48, 256), (64, 20, 128, 50, 64, 42), strict=True)),
    ids=str,
)
def test_as_tiles_write(emulator, case, width, beside):
    rows, channels = 70, 112
    values, (added, wanted) = sums_of(rows, channels), layer(case, rows, channels)
    order = np.random.default_rng(1).permutation(rows).astype(np.int32)
    placed = np.empty_like(values)
    placed[order] = values
    kernel = GpuKernel(
        CUDA,
        "stored",
        (*cuda_contraction.INT8_FILES["wide"][:-1], "../tests/cuda_host/stored.cuh"),
        STORED,
        (
            ("T", mx.int8),
            ("BN", width),
            ("BESIDE", beside),
            ("OUT", case[0]),
            ("AFTER", cuda_contraction._integer_epilogue(*facts_of(case))),
        ),
        threads=128,
        before=SUMS,
        arguments=(("partial", "sums"), ("rows", "kept, rows"), ("y", TO)),
        together=cuda_contraction.FOLLOWING,
    )
    (y,) = kernel(
        [mx.array(values), *added, mx.array(order)],
        [((rows, channels), case[0])],
        (2 * 128, -(-channels // width)),
    )
    assert np.array_equal(values_of(y), wanted(placed))


@pytest.mark.parametrize("group_size", (32, 128))
def test_int4_becomes_int8(emulator, group_size):
    draw = np.random.default_rng(group_size)
    levels = draw.integers(-7, 8, (3, 5, 256))
    multipliers = draw.integers(1, 19, (3, 5, 256 // group_size)).astype(np.int8)
    eight = (levels & 15).reshape(3, 5, 32, 8) << 4 * np.arange(8)
    words = eight.sum(axis=-1).astype(np.uint32)
    launch = cuda_contraction._int4_unpacker(words.shape, group_size)
    (w,) = launch([mx.array(words), mx.array(multipliers)])
    grouped = levels.reshape(3, 5, -1, group_size) * multipliers[..., None]
    assert np.array_equal(values_of(w), grouped.reshape(3, 5, 256))
