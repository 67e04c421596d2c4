"""Linear layers: MLX's values and gradients, on the route that the CPU is best at."""

import platform

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from cases import features

from mlx_lattice import backends, devices, nn
from mlx_lattice.nn import fused, linear

SHAPES = ((7, 4), (300, 4), (2, 3, 4), (4,), (0, 4), (2, 0, 4))
on_cpu = pytest.mark.skipif(
    devices.current().backend != devices.CPU or platform.system() == "Darwin",
    reason="MLX's own matmul serves here",
)


@pytest.mark.parametrize("place", ("here", "portable", "matmul"))
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_mlx(shape, bias, dtype, place, monkeypatch):
    if place == "matmul":  # as on GPUs: the bias's gradient is a kernel's
        monkeypatch.setattr(linear, "is_contraction", lambda x: False)
    mx.random.seed(0)
    layer = nn.Linear(4, 5, bias=bias)
    layer.set_dtype(getattr(mx, dtype))
    x = mx.random.normal(shape).astype(getattr(mx, dtype))
    exact = {k: v.astype(mx.float32) for k, v in layer.parameters().items()}

    def energy(function, parameters, x):
        y = x @ parameters["weight"].T if function is None else function(x)
        y = y + parameters["bias"] if function is None and bias else y
        return (y.astype(mx.float32) ** 2).sum()

    def run(parameters, x):
        layer.update(parameters)
        return energy(layer, parameters, x)

    held = layer.parameters()
    with backends.portable_only() if place == "portable" else mx.stream(mx.cpu):
        y = layer(x)
        found = mx.grad(run, (0, 1))(held, x)
    layer.update(held)
    if x.size == 0 and devices.current().backend == devices.CUDA:
        assert y.shape == (*shape[:-1], 5) and found[1].shape == shape
        assert not any(mx.abs(found[0][name]).max().item() for name in exact)
        pytest.skip("MLX's CUDA matmul crashes for no rows: nothing to compare with")
    wide = x.astype(mx.float32)
    expected = mx.grad(lambda p, x: energy(None, p, x), (0, 1))(exact, wide)
    product = wide @ exact["weight"].T + exact.get("bias", mx.array(0.0))
    assert y.shape == (*shape[:-1], 5) and y.dtype == x.dtype
    ref.assert_close(y, np.array(product).astype(np.float64), dtype)
    for name in exact:
        want = np.array(expected[0][name]).astype(np.float64)
        ref.assert_close(found[0][name], want, dtype, what=name)
    ref.assert_close(found[1], np.array(expected[1]).astype(np.float64), dtype)


def test_dtypes_that_mlx_would_promote_are_left_to_it():
    layer = nn.Linear(4, 5)
    x = mx.ones((3, 4), mx.float16)
    assert layer(x).dtype == mlx.nn.Linear.__call__(layer, x).dtype == mx.float32


@on_cpu
def test_second_order_forward_mode_map_and_compile():
    mx.random.seed(1)
    layer = nn.Linear(4, 3)
    x, dx = mx.random.normal((6, 4)), mx.random.normal((6, 4))
    w = layer.weight

    def energy(x):
        return (layer(x) ** 2).sum()

    found = mx.grad(lambda x: (mx.grad(energy)(x) * dx).sum())(x)
    ref.assert_close(found, np.array(2 * dx @ w.T @ w).astype(np.float64))
    tangent = mx.jvp(layer, [x], [dx])[1][0]
    ref.assert_close(tangent, np.array(dx @ w.T).astype(np.float64))
    both = mx.vmap(layer)(mx.stack([x, dx]))
    ref.assert_close(both[1], np.array(layer(dx)).astype(np.float64))
    ref.assert_close(mx.compile(layer)(x), np.array(layer(x)).astype(np.float64))


def mlp(channels=32, bits=None, bias=True):
    """A linear layer to four times the channels, and one back."""
    mx.random.seed(1)
    both = [nn.Linear(channels, 4 * channels, bias), nn.Linear(4 * channels, channels)]
    return [each if bits is None else each.to_quantized(32, bits) for each in both]


@pytest.mark.parametrize("kind", ("float32", "float16", "8 bits", "no bias"))
def test_what_follows_a_linear_layer_is_what_it_computes_apart(kind):
    bits, bias = 8 if "bits" in kind else None, kind != "no bias"
    wide, narrow = mlp(bits=bits, bias=bias)
    dtype = mx.float16 if kind == "float16" else mx.float32
    for layer in (wide, narrow):
        layer.set_dtype(dtype)
    x = mx.array(features(50, 32)).astype(dtype)

    def together(x):
        return fused.linear(narrow, fused.linear(wide, x, mlx.nn.SiLU()), residual=x)

    def apart(x):
        return x + narrow(mlx.nn.silu(wide(x)))

    exact = apart(x.astype(mx.float32)) if bits is None else apart(x)
    wanted = np.array(exact.astype(mx.float32)).astype(np.float64)
    ref.assert_close(together(x), wanted, str(dtype).rpartition(".")[2])
    if dtype == mx.float32:
        functions = together, apart
        found, dx = (mx.grad(lambda x, f=f: f(x).square().sum())(x) for f in functions)
        ref.assert_close(found, np.array(dx).astype(np.float64))
