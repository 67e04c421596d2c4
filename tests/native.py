"""What the tests of the extension share: instruction sets, threads, random tables."""

import os

import mlx.core as mx
import numpy as np
import pytest

cpu = pytest.importorskip("mlx_lattice._cpu")

THREADS = (1, 2, 5)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


# Those that share the loops of floats, the best first.
FAMILIES = (
    ("baseline",),
    ("avx_vnni", "avx2"),
    ("avx512_vnni", "avx512"),
    ("i8mm", "dotprod"),
)


def isas():
    """The processor's instruction sets, or that which the environment names."""
    named = os.environ.get("MLX_LATTICE_CPU_ISA")
    return [named] if named else cpu.isas()


def runnable():
    """The best instruction set of each family that this processor has."""
    able = isas()
    best = [[name for name in family if name in able][:1] for family in FAMILIES]
    return sum(best, [])


# For parametrised tests: on all loops of floats, in every dtype.
each_isa = pytest.mark.parametrize("isa", runnable())
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def cpu_device():
    """MLX on the CPU; instruction set and threads as they were afterwards."""
    before, isa = mx.default_device(), cpu.isa()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)
    cpu.set_isa(isa)
    cpu.set_num_threads(0)


def random_table(rng, n_out, n_in, volume, density=0.4):
    table = rng.integers(0, max(n_in, 1), (n_out, volume))
    absent = (
        rng.random((n_out, volume)) > density if n_in else np.ones_like(table, bool)
    )
    return np.where(absent, -1, table).astype(np.int32)


def same_bits(arrays):
    first = np.array(arrays[0].view(mx.uint8))
    for other in arrays[1:]:
        np.testing.assert_array_equal(np.array(other.view(mx.uint8)), first)
