"""What a Choice says of CUDA's tiles is what their kernels are built and launched with.

Runs anywhere: kernels are named, not compiled.
"""

import contextlib
import itertools
from types import SimpleNamespace

import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import devices, routes
from mlx_lattice.backends import cuda_sorted, cuda_weight_grad, mlx_ops
from mlx_lattice.routes import thresholds

SIZES = ((300, 27), (5_000, 27), (400_000, 27), (5_000, 125))
CHANNELS = ((3, 32), (32, 64), (64, 72), (128, 128), (256, 256), (64, 512))


def said(route, device, sizes, channels, edges, dtype):
    problem = ml.Problem.forward(
        c_in=channels[0],
        c_out=channels[1],
        n_in=sizes[0],
        edges=edges,
        dtype=dtype,
        kernel_size=3 if sizes[1] == 27 else 5,
        **({"bits": 8, "group_size": 32} if route == "quantized_sorted" else {}),
    )
    return dict(routes.select(problem, device=device, only=route).parameters)


@pytest.mark.parametrize("device", ("h200", "a100"))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("route", ("sorted_implicit_gemm", "quantized_sorted"))
def test_the_tile_said_is_the_tile_planned(route, dtype, device, monkeypatch):
    names = []
    monkeypatch.setattr(
        cuda_sorted, "kernel", lambda name, *_, **__: names.append(name)
    )
    monkeypatch.setattr(cuda_sorted, "current", lambda: devices.PROFILES[device])
    kind = getattr(mx, dtype)
    multiple = 16 // kind.size
    for sizes, channels, few in itertools.product(SIZES, CHANNELS, (True, False)):
        (rows, volume), edges = sizes, sizes[0] * (1 if few else 10)
        padded = [-(-c // multiple) * multiple for c in channels]
        hopper = device == "h200" and dtype == "float16"
        told = said(route, device, sizes, channels, edges, dtype)
        weights = cuda_sorted._FLOAT[False]
        if told.get("weights") == "unpacked in tiles":
            weights = weights._replace(files=("packed.cuh",))
        plan = cuda_sorted._plan.__wrapped__(
            kind, (rows, *padded, volume), few, False, False, weights, False, hopper
        )
        height, width = map(int, told["tile"].split(" x "))
        assert names[-1].startswith(f"{told['kernel']}_f")
        assert plan.splits == told.get("split-K", 1)
        tiles = -(-rows // height) * -(-padded[1] // width)
        if told["kernel"] == "sorted_implicit_gemm_hopper":  # its blocks stay
            assert plan.blocks[0] <= tiles
        else:
            assert plan.blocks[0] == tiles


@pytest.mark.parametrize("device", ("h200", "a100"))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_a_choice_says_where_packed_weights_are_unpacked(dtype, device, monkeypatch):
    ways = []
    monkeypatch.setattr(cuda_sorted, "is_hopper", lambda: device == "h200")
    monkeypatch.setattr(cuda_sorted, "unpacked_weights", lambda w: "unpacked once")
    monkeypatch.setattr(
        cuda_sorted,
        "_sorted_tiles",
        lambda x, weights, *_: ways.append(
            "unpacked in tiles" if weights.code.files else weights.arrays[0]
        ),
    )
    for sizes, channels, few in itertools.product(SIZES, CHANNELS, (True, False)):
        (rows, volume), edges = sizes, sizes[0] * (1 if few else 10)
        x = mx.zeros((1, channels[0]), dtype=getattr(mx, dtype))
        w = ml.quantize_weight(mx.zeros((volume, *channels), x.dtype), group_size=32)
        layer = SimpleNamespace(n_out=rows, known_edges=edges)
        cuda_sorted.quantized_sorted(x, w, layer, 1)
        told = said("quantized_sorted", device, sizes, channels, edges, dtype)
        assert told["weights"] == ways[-1]
        assert ("scratch bytes" in told) == (told["weights"] == "unpacked once")
        room = max(thresholds.UNPACK_BYTES, rows * channels[1] * x.itemsize)
        assert told.get("scratch bytes", 0) <= room
    assert len(set(ways)) == 2


@pytest.mark.parametrize("device", ("h200", "cuda", "m4-max", "cpu"))
def test_a_choice_says_where_a_packed_matmul_unpacks(device, monkeypatch):
    """And it does there: MLX's packed kernel is left alone."""
    facts = dict(c_in=40, c_out=7, n_in=9, kernel_size=1, bits=8, group_size=32)
    problem = ml.Problem.forward(**facts)
    choice = routes.select(problem, device=device, only="quantized_pointwise")
    says = dict(choice.parameters).get("weights") == "unpacked once"
    called, matmul = [], mx.quantized_matmul
    monkeypatch.setattr(devices, "current", lambda: devices.PROFILES[device])
    monkeypatch.setattr(
        mx, "quantized_matmul", lambda *a, **k: called.append(1) or matmul(*a, **k)
    )
    x, w = mx.random.normal((9, 40)), mx.random.normal((1, 40, 7))
    q = ml.quantize_weight(w, bits=8, group_size=32)
    y = mlx_ops.quantized_pointwise(x, q, None, 1)
    assert says == (not called) == (device in ("h200", "cuda"))
    assert mx.allclose(y, x @ q.dense()[0], atol=1e-4)


@pytest.mark.parametrize("device", ("h200", "a100"))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("edges_a_row", (1, 10))
@pytest.mark.parametrize("rows", (5_000, 400_000))
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
def test_weight_gradients_say_which_kernel_runs(
    channels, rows, edges_a_row, dtype, device, monkeypatch
):
    """The route of sorted rows goes by edges where that is better, and says so."""
    built, by_edges = [], []
    monkeypatch.setattr(
        cuda_weight_grad, "kernel", lambda name, *_, **__: built.append(name)
    )
    monkeypatch.setattr(cuda_weight_grad, "current", lambda: devices.PROFILES[device])
    monkeypatch.setattr(cuda_weight_grad, "is_hopper", lambda: device == "h200")
    monkeypatch.setattr(
        cuda_weight_grad, "grouped_gemm_weight_grad", lambda *_: by_edges.append(1)
    )
    monkeypatch.setattr(cuda_weight_grad, "sorted_rows", _Stop.now)

    class Layer:
        volume, n_out, known_edges = 27, rows, rows * edges_a_row

    x, dy = (mx.zeros((rows, c), dtype=getattr(mx, dtype)) for c in channels)
    with contextlib.suppress(_Stop):
        cuda_weight_grad.sorted_weight_grad(x, dy, Layer, 1)
    problem = ml.Problem.weight_grad(
        c_in=channels[0],
        c_out=channels[1],
        n_in=rows,
        edges=rows * edges_a_row,
        dtype=dtype,
    )
    only = "sorted_implicit_gemm"
    told = dict(routes.select(problem, device=device, only=only).parameters)
    assert (told["kernel"] == "sorted_weight_grad") == (not by_edges)
    if not by_edges:
        return
    padded = [-(-c // (16 // x.itemsize)) * (16 // x.itemsize) for c in channels]
    hopper = device == "h200" and dtype == "float16"
    plan = cuda_weight_grad._grouped_plan.__wrapped__(x.dtype, *padded, hopper)
    height, width = map(int, told["tile"].split(" x "))
    assert built[-1].startswith(f"{told['kernel']}_f")
    assert built[-1].endswith(f"_{height}_{width}")
    assert plan.tiles == -(-padded[0] // height) * -(-padded[1] // width)


class _Stop(Exception):
    """Raised where the kernel over sorted rows would be built."""

    @classmethod
    def now(cls, *_):
        raise cls


def test_a_chip_that_is_not_known_gets_no_promise():
    assert "tile" not in said(
        "sorted_implicit_gemm", "cuda", SIZES[0], CHANNELS[0], 300, "float16"
    )
