"""Rows side by side and apart: by MLX's operations, and by kernels of GPUs."""

import math
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest
from conftest import mappable
from cuda_emulation import CAN_COMPILE, HAS_GPU, Emulator, emulating
from places import HERE, agreed

from mlx_lattice import registry
from mlx_lattice.backends.gpu import joins as gpu_joins
from mlx_lattice.backends.gpu.joins import GpuJoins
from mlx_lattice.channel_kernels import beside

METAL = [place for place in HERE if place.name == "metal"]
SHAPES = (1, 1, 1), (3, 8, 4), (130, 96, 32), (1000, 12, 20), (7, 300, 5), (2, 9000, 16)


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


@pytest.mark.parametrize(
    "dtype", (mx.float32, mx.float16, mx.bfloat16, mx.int8), ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_stand_side_by_side(shape, dtype, launches):
    rows, *channels = shape
    a, b = (numbers(rows, c, dtype) for c in channels)
    y = beside([a, b])
    assert y.dtype == dtype
    assert mx.array_equal(y, mx.concatenate([a, b], axis=1))
    assert launches is None or HAS_GPU or len(launches) == 1


@pytest.mark.parametrize(
    "dtype", (mx.float32, mx.float16, mx.bfloat16, mx.int8), ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_apart(shape, dtype, launches):
    if launches is None:
        pytest.skip("a kernel of GPUs")
    rows, c_a, c_b = shape
    y = numbers(rows, c_a + c_b, dtype)
    a, b = registry.joins().split(y, c_a)
    assert a.dtype == b.dtype == dtype
    assert mx.array_equal(a, y[:, :c_a]) and mx.array_equal(b, y[:, c_a:])
    assert HAS_GPU or len(launches) == 1


@pytest.mark.skipif(not METAL, reason="no Metal kernel runs here")
@pytest.mark.parametrize("begin", (0, 1), ids=("aligned", "views"))
@pytest.mark.parametrize(
    "dtype", (mx.float32, mx.float16, mx.bfloat16, mx.int8), ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_metal(shape, dtype, begin):
    rows, c_a, c_b = shape
    y = numbers(rows, c_a + c_b, dtype)
    a, b = mx.contiguous(y[:, :c_a]), mx.contiguous(y[:, c_a:])

    def view(array):
        longer = mx.concatenate([mx.zeros((begin,), dtype), array.flatten()])
        return longer[begin:].reshape(array.shape)

    whole, parts = view(y), [view(a), view(b)]

    def run():
        kernels = registry.joins()
        return [kernels.join(*parts), *kernels.split(whole, c_a)]

    for got, wanted in zip(agreed(METAL[0], run), (y, a, b), strict=True):
        assert got.dtype == dtype and mx.array_equal(got, wanted)


@pytest.mark.parametrize("channels", ((5,), (4, 8, 12)), ids=str)
@pytest.mark.parametrize("rows", (0, 6))
@pytest.mark.parametrize("dtype", (mx.float16, mx.int8), ids=str)
def test_any_number_of_arrays(channels, rows, dtype, launches):
    parts = [numbers(rows, c, dtype) for c in channels]
    assert mx.array_equal(beside(parts), mx.concatenate(parts, axis=1))


@pytest.mark.parametrize("dtype", (mx.float32, mx.float16, mx.int8), ids=str)
@pytest.mark.parametrize("shape", ((1, 1), (300, 4), (20, 27, 12), (6, 3, 5)), ids=str)
def test_rows_beside_zeros(shape, dtype, launches):
    if launches is None:
        pytest.skip("a kernel of CUDA")
    array = numbers(math.prod(shape[:-1]), shape[-1], dtype).reshape(shape)
    made = gpu_joins.padded(array, -1, 8)
    assert mx.array_equal(made, gpu_joins.zero_padded(array, array.ndim - 1, 8))
    assert made.shape[-1] % 8 == 0 and made.dtype == dtype
    assert HAS_GPU or len(launches) == 1
    assert gpu_joins.padded(made, -1, 8) is made


@pytest.mark.parametrize("dtype", (mx.float32, mx.float16, mx.bfloat16), ids=str)
@pytest.mark.parametrize(
    "shape, axis",
    (((5,), 0), ((20, 27, 12), 0), ((27, 3, 8), 1), ((20, 1, 64), -3), ((1, 1, 7), 1)),
    ids=str,
)
def test_lines_before_zeros(shape, axis, dtype, launches):
    """A weight's output channels, or a bias."""
    if launches is None:
        pytest.skip("a kernel of CUDA")
    array = numbers(math.prod(shape), 1, dtype).reshape(shape)
    made = gpu_joins.padded(array, axis, 8)
    assert mx.array_equal(made, gpu_joins.zero_padded(array, axis % array.ndim, 8))
    assert made.dtype == dtype and (HAS_GPU or len(launches) == 1)


class Kernels(GpuJoins):
    """Kernels that MLX can put into any transformation."""

    def join(self, a, b):
        return mx.concatenate([a, b], axis=1)

    def split(self, y, c_a):
        return [y[:, :c_a], y[:, c_a:]]


def test_transformations_are_those_of_a_concatenation(monkeypatch):
    if registry.joins() is None:
        monkeypatch.setattr(registry, "joins", lambda: Kernels("cuda"))
    a, b = numbers(40, 8, mx.float32), numbers(40, 4, mx.float32)
    t = [mx.random.normal(x.shape) for x in (a, b)]
    dy = mx.random.normal((40, 12))
    several, ones = mx.random.normal((3, 40, 8)), mx.ones((3, 40, 12))

    def back(join, *by):
        return mx.vjp(lambda *x: join(x), [a, b], list(by))[1]

    unmapped = (
        lambda join: mx.vjp(lambda *x: mx.square(join(x)), [a, b], [dy])[1],
        lambda join: mx.jvp(lambda *x: mx.square(join(x)), [a, b], t)[1],
        lambda join: mx.grad(
            lambda x: mx.grad(lambda z: (join([z, b]) ** 3).sum())(x).sum()
        )(a),
        lambda join: mx.jvp(lambda by: back(join, by), [dy], [2 * dy])[1],
    )
    mapped = (
        lambda join: mx.vmap(lambda x: join([x, b]))(several),
        lambda join: mx.vmap(lambda by: back(join, by))(ones),
    )
    for function in unmapped + mapped:
        with mappable() if function in mapped else nullcontext():
            got = function(beside)
        want = function(lambda x: mx.concatenate(list(x), axis=1))
        for ours, theirs in zip(list(got), list(want), strict=True):
            assert mx.array_equal(ours, theirs)
