"""Packed weights on CUDA against the oracle."""

import cases
import mlx.core as mx
import numpy as np
import pytest
from conftest import KINDS, bits, multi_edges, pair
from planned import run
from quantized_checks import check_packed, problem
from test_misaligned import view

if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
    pytest.skip("MLX has no CUDA device here", allow_module_level=True)

from mlx_lattice import devices  # noqa: E402
from mlx_lattice.backends import cuda_tiles  # noqa: E402
from mlx_lattice.routes import thresholds  # noqa: E402

FLOOR, TILES = "quantized_traversal", "quantized_sorted"
# Stages of one offset, of two and of four of them, and of parts; each tile width.
CHANNELS = ((1, 1), (20, 7), (32, 32), (64, 65), (100, 33), (128, 136), (130, 264))


def packed_by(route, **planning):
    """What runs packed weights on a route: ``run(x, packed, relation, groups)``."""

    def packed(x, w, relation, groups, bias=None):
        return run(route, "forward", relation, x, w, groups, bias, **planning)

    return packed


def check(route, *args, planning=None, **kwargs):
    check_packed(packed_by(route, **(planning or {})), *args, name=route, **kwargs)


@pytest.fixture(params=(False, True), ids=("split", "whole"))
def whole(request, monkeypatch):
    """Whether few rows are left in one piece, as many rows would be."""
    if request.param:
        monkeypatch.setattr(thresholds, "MOST_SPLITS", 1)


def unpacked(once: bool, monkeypatch) -> None:
    """Have the tiles' route unpack weights once a call, or in every tile."""
    monkeypatch.setattr(cuda_tiles, "unpacks_once", lambda *_: once)


@pytest.fixture(params=(False, True), ids=("in_tiles", "once"))
def tiles(request, monkeypatch):
    """The route of the tiles, both ways."""
    unpacked(request.param, monkeypatch)
    return TILES


@pytest.fixture(params=(FLOOR, TILES, "once"))
def route(request, monkeypatch):
    """Each route, that of the tiles both ways."""
    once = request.param == "once"
    unpacked(once, monkeypatch)
    return TILES if once else request.param


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
def test_channels_in_half(channels, bits, whole, tiles):
    check(tiles, pair(KINDS[0], "surface", 400), *channels, bits, dtype="float16")


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("bits", (4, 8))
def test_other_dtypes(bits, dtype, whole, tiles):
    for channels in ((20, 7), (64, 65)):
        check(tiles, pair(KINDS[0], "surface", 400), *channels, bits, dtype=dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("bits", (4, 8))
def test_traversal(bits, dtype):
    for channels in ((1, 1), (33, 7), (64, 65)):
        check(FLOOR, pair(KINDS[0], "surface", 100), *channels, bits, dtype=dtype)


@pytest.mark.parametrize("size", (32, 64, 128))
@pytest.mark.parametrize("bits", (4, 8))
def test_group_sizes(route, bits, size):
    for channels in ((130, 40), (192, 100)):
        check(route, pair(KINDS[0], n=100), *channels, bits, size, dtype="float16")


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_every_kind(route, case):
    check(route, pair(case, "negative", 100), 20, 16, dtype="float16")


@pytest.mark.parametrize("shape", ((4, 6, 2), (40, 10, 2), (6, 6, 6)), ids=str)
def test_groups(shape):
    *channels, groups = shape
    check(FLOOR, pair(KINDS[0], n=24), *channels, groups=groups, dtype="float16")


def test_edges_without_a_table():
    check(FLOOR, multi_edges(), 35, 5, dtype="float32")
    check(FLOOR, multi_edges(1), 6, 4, 8, 64, 2, "float32")


def test_many_offsets(tiles):
    both = pair(cases.Case("submanifold", 3, 9), "block", 120)
    check(tiles, both, 8, 8, dtype="float16")


@pytest.mark.parametrize("geometry", ("empty", "one"))
def test_few_rows(route, geometry):
    check(route, pair(KINDS[0], geometry, 1), 20, 7, dtype="float16")


@pytest.mark.parametrize("channels", ((20, 7), (64, 65), (128, 256)), ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_bias(channels, dtype, whole, tiles):
    both = pair(KINDS[0], "surface", 300)
    bias = mx.random.normal((channels[1],), key=mx.random.key(3))
    bias = bias.astype(getattr(mx, dtype))

    def less_its_bias(*args):
        y = packed_by(tiles)(*args, bias=bias)
        return (y.astype(mx.float32) - bias).astype(y.dtype)

    check_packed(less_its_bias, both, *channels, dtype=dtype, name=tiles)


def test_general_kernels_on_hopper(tiles):
    """What older and newer GPUs run in 16 bits."""
    older = {"device": devices.PROFILES["a100"]}
    for dtype in ("float16", "bfloat16"):
        for levels in (4, 8):
            both = pair(KINDS[0], "surface", 300)
            check(tiles, both, 72, 40, levels, dtype=dtype, planning=older)


def test_padding_in_storage_reaches_no_output(route):
    relation, _ = pair(KINDS[0])
    x, q = problem(relation, 20, 5, 4, 32, dtype="float16")
    y = packed_by(route)(x, q, relation, 1)
    words = np.array(q.weight)
    words[..., 20 * 4 // 32 + 1 :] = 0x12345678
    words[..., 20 * 4 // 32] |= np.uint32(0xFFFF0000)  # channels 20 ... 23
    other = q.holding(mx.array(words), q.scales, q.biases)
    assert bits(y) == bits(packed_by(route)(x, other, relation, 1))


def test_same_bits_every_time(route):
    relation, _ = pair(KINDS[0], "surface", 2000)
    x, q = problem(relation, 64, 64, 4, 64, dtype="float16")
    runs = {bits(packed_by(route)(x, q, relation, 1)) for _ in range(5)}
    assert len(runs) == 1


@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("levels", (4, 8))
def test_words_may_begin_anywhere(route, levels, dtype):
    relation, _ = pair(KINDS[0], "surface", 300)
    for channels in ((20, 7), (64, 130)):
        x, q = problem(relation, *channels, levels, 32, dtype=dtype)
        other = q.holding(view(q.weight), q.scales, q.biases)
        by = packed_by(route)
        assert bits(by(x, q, relation, 1)) == bits(by(x, other, relation, 1))
