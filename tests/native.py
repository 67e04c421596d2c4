"""What the tests of the extension share: instruction sets, threads, random tables."""

import mlx.core as mx
import numpy as np
import pytest

cpu = pytest.importorskip("mlx_lattice._cpu")

THREADS = (1, 2, 5)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def runnable():
    """The instruction sets that this processor has."""
    names = []
    before = cpu.isa()
    for name in ("baseline", "avx2", "avx512"):
        try:
            cpu.set_isa(name)
            names.append(name)
        except ValueError:
            pass
    cpu.set_isa(before)
    return names


# For parametrised tests: on every instruction set, in every dtype.
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
