"""Rows side by side and apart: by MLX's operations, and by kernels of GPUs."""

from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest
from conftest import mappable
from contractions import moved
from cuda_emulation import CAN_COMPILE, HAS_GPU, Emulator, emulating
from places import HERE, agreed

from mlx_lattice import registry
from mlx_lattice.backends.gpu.reductions import GpuJoins
from mlx_lattice.channel_kernels import beside

METAL = [place for place in HERE if place.name == "metal"]
shapes = pytest.mark.parametrize(
    "shape",
    ((1, 1, 1), (3, 8, 4), (130, 96, 32), (1000, 12, 20), (7, 300, 5), (2, 9000, 16)),
    ids=str,
)
dtypes = pytest.mark.parametrize(
    "dtype", (mx.float32, mx.float16, mx.bfloat16, mx.int8), ids=str
)


@pytest.fixture(params=("mlx", "aligned", "views"))
def launches(request, cuda_programs, monkeypatch):
    """MLX joins, or CUDA's kernel, of arrays that begin at 16 bytes or anywhere."""
    if request.param == "mlx":
        monkeypatch.setattr(registry, "JOINS", {})
        yield None
    elif HAS_GPU:
        yield ()
    elif not CAN_COMPILE:
        pytest.skip("running CUDA's kernels on the CPU needs Linux and a C++ compiler")
    else:
        emulator = Emulator(cuda_programs, request.param == "views")
        with emulating(emulator):
            yield emulator.launches


def numbers(rows, channels, dtype):
    values = np.random.default_rng(channels).integers(-90, 90, (rows, channels))
    return mx.array(values).astype(dtype)


@dtypes
@shapes
def test_joined_and_split(shape, dtype, launches):
    rows, c_a, c_b = shape
    a, b = (numbers(rows, c, dtype) for c in (c_a, c_b))
    y = beside([a, b])
    assert y.dtype == dtype and mx.array_equal(y, mx.concatenate([a, b], axis=1))
    if launches is not None:
        parts = registry.joins().split(y, c_a)
        for part, wanted in zip(parts, (a, b), strict=True):
            assert part.dtype == dtype and mx.array_equal(part, wanted)
        assert HAS_GPU or len(launches) == 2


@pytest.mark.skipif(not METAL, reason="no Metal kernel runs here")
@pytest.mark.parametrize("begin", (0, 1), ids=("aligned", "views"))
@dtypes
@shapes
def test_on_metal(shape, dtype, begin):
    rows, c_a, c_b = shape
    y = numbers(rows, c_a + c_b, dtype)
    wanted = y, y[:, :c_a], y[:, c_a:]
    whole, *parts = (moved(mx.contiguous(array), begin) for array in wanted)

    def run():
        kernels = registry.joins()
        return [kernels.join(*parts), *kernels.split(whole, c_a)]

    for result, array in zip(agreed(METAL[0], run), wanted, strict=True):
        assert result.dtype == dtype and mx.array_equal(result, array)


@pytest.mark.parametrize("channels", ((5,), (4, 8, 12)), ids=str)
@pytest.mark.parametrize("rows", (0, 6))
def test_any_number_of_arrays(channels, rows, launches):
    parts = [numbers(rows, c, mx.float16) for c in channels]
    assert mx.array_equal(beside(parts), mx.concatenate(parts, axis=1))


class Kernels(GpuJoins):
    """Kernels that MLX can put into any transformation."""

    def join(self, a, b):
        return mx.concatenate([a, b], axis=1)

    def split(self, y, c_a):
        return [y[:, :c_a], y[:, c_a:]]


A, B = numbers(40, 8, mx.float32), numbers(40, 4, mx.float32)
DY = numbers(40, 12, mx.float32) / 90
TANGENTS = [A / 7, B / 5]
SEVERAL = mx.stack([A, A + 1, 2 * A])


def squares(join):
    return lambda *arrays: mx.square(join(arrays))


def cubes_of_a(join):
    return mx.grad(lambda a: (join([a, B]) ** 3).sum())


TRANSFORMATIONS = {
    "vjp": lambda join: mx.vjp(squares(join), [A, B], [DY])[1],
    "jvp": lambda join: mx.jvp(squares(join), [A, B], TANGENTS)[1],
    "second": lambda join: mx.grad(lambda a: cubes_of_a(join)(a).sum())(A),
    "vmap": lambda join: mx.vmap(lambda a: join([a, B]))(SEVERAL),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_are_those_of_a_concatenation(name, monkeypatch):
    if registry.joins() is None:
        monkeypatch.setattr(registry, "joins", lambda: Kernels("cuda"))
    function = TRANSFORMATIONS[name]
    with mappable() if "vmap" in name else nullcontext():
        result = function(beside)
    wanted = function(lambda arrays: mx.concatenate(list(arrays), axis=1))
    for ours, theirs in zip(list(result), list(wanted), strict=True):
        assert mx.array_equal(ours, theirs)
