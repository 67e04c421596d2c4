"""What only CUDA has: variants of a row's kernels, each run where the table may not.

Few rows in splits, in one piece or on two processors; tiles of few edges a row, of wide
channels and of older GPUs; weight gradients by sorted rows; weights unpacked once.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from cases import DTYPES
from conftest import bits
from contractions import Point, work
from cuda_recorder import no_small_tiles
from planned import plan_of, run

from mlx_lattice import devices
from mlx_lattice.backends.cuda import thresholds as cuda_thresholds
from mlx_lattice.backends.cuda import tiles as cuda_tiles
from mlx_lattice.backends.cuda import weight_grad as cuda_weight_grad
from mlx_lattice.problem import (
    FORWARD,
    INPUT_GRAD,
    LAYOUTS,
    MLX_LAYOUT,
    PASSES,
    WEIGHT_GRAD,
)

if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
    pytest.skip("MLX has no CUDA device here", allow_module_level=True)

SORTED, PACKED = "sorted_implicit_gemm", "quantized_sorted"
HALVES = DTYPES[1:]
# Each tile width and depth, below, at and above.
SHAPES = tuple(
    (*channels, 1)
    for channels in (
        (1, 1),
        (3, 5),
        (16, 16),
        (33, 31),
        (64, 64),
        (96, 40),
        (128, 136),
        (64, 264),
    )
)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
WIDE = set(cuda_tiles.WIDE_TILES.values()) | {
    tile
    for table in cuda_tiles.SMALL_TILES.values()
    for named in table.values()
    for _, tile in named
    if isinstance(tile, cuda_tiles.WideTile)
}


def result(route, pass_, point, device=None, **facts) -> mx.array:
    """One pass by its plan on a row."""
    given = work(point, pass_)
    x = given.dy if pass_ == INPUT_GRAD else given.x
    w = given.dy if pass_ == WEIGHT_GRAD else given.w
    if facts.get("layout") == MLX_LAYOUT:
        w = w.transpose(2, 0, 1)
    planning = {"device": device, **facts}
    return run(route, pass_, given.relation, x, w, given.groups, given.bias, **planning)


def check(route, pass_, point, device=None, **facts) -> None:
    """One pass gives what the oracle gives."""
    y = result(route, pass_, point, device, **facts)
    assert str(y.dtype).endswith(point.dtype)
    wanted = work(point, pass_).wanted
    asked = facts.get("precision", "float32") if point.dtype == "float32" else None
    ref.assert_close(y, wanted, asked or point.dtype, f"{route} {pass_}")


@pytest.fixture(params=("small", "split", "whole", "few"))
def device(request, monkeypatch):
    """What is planned for: few rows have small tiles, or those of many rows.

    Those of many are split, in one piece, or on two processors.
    """
    if request.param != "small":
        no_small_tiles(monkeypatch)
    if request.param == "whole":
        monkeypatch.setattr(cuda_thresholds, "MOST_SPLITS", 1)
    here = devices.current()
    return replace(here, cores=2) if request.param == "few" else here


def relative(y, wanted) -> float:
    """The error relative to the norm."""
    return np.linalg.norm(ref.to_numpy(y) - wanted) / np.linalg.norm(wanted)


def tiles_of(pass_) -> str:
    """The route whose tiles run a pass in every dtype."""
    return "grouped_gemm" if pass_ == WEIGHT_GRAD else SORTED


def rows_for(device) -> str:
    """Several tiles a processor take many rows."""
    return "many" if device.cores == 2 else "some"


@shapes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pass_", PASSES[:2])
def test_sorted_tiles(pass_, dtype, shape, device):
    point = Point(rows_for(device), shape, dtype, bias=pass_ == FORWARD)
    check(SORTED, pass_, point, device)


# Last stages of one slice, of two, of three and of four.
@pytest.mark.parametrize("shape", ((72, 144, 1), (100, 224, 1), (248, 96, 1)), ids=str)
@pytest.mark.parametrize("scene", ("some", "even", "forward", "line", "pointwise_65"))
@pytest.mark.parametrize("tile", sorted(WIDE), ids=str)
def test_wide_tiles_of_whole_stages_and_of_tails(tile, scene, shape, monkeypatch):
    """Of many offsets and of few, by weights in either layout, whole and by views."""
    monkeypatch.setattr(cuda_tiles, "small_shape", lambda p: tile)
    monkeypatch.setattr(cuda_thresholds, "MOST_SPLITS", 1)
    for dtype, before in (("float16", ""), ("bfloat16", "x w dy bias 1")):
        for pass_ in PASSES[:2]:
            bias = pass_ == FORWARD
            point = Point(scene, shape, dtype, bias=bias, moved=before)
            for layout in LAYOUTS:
                check(SORTED, pass_, point, layout=layout)


@shapes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("route", ("grouped_gemm", "relation_traversal"))
def test_weight_gradients(route, dtype, shape, device):
    check(route, WEIGHT_GRAD, Point(rows_for(device), shape, dtype), device)


@pytest.mark.parametrize("before", ("", "x w dy bias 1"))
@pytest.mark.parametrize("width", cuda_weight_grad.GRAD_TILES)
def test_weight_gradients_of_each_width(width, before, monkeypatch):
    """Of one tile and several; the wider side names the width."""
    monkeypatch.setattr(cuda_weight_grad, "writes_whole", lambda p, device: False)
    for at, c_in in enumerate((24, width)):
        point = Point("many", (c_in, width - 3 * at, 1), HALVES[at], moved=before)
        given = work(point, WEIGHT_GRAD)
        of = WEIGHT_GRAD, given.relation, given.x, given.dy
        assert plan_of("grouped_gemm", *of).tile[1] in (width, width // 2)
        check("grouped_gemm", WEIGHT_GRAD, point)


@pytest.mark.parametrize("before", ("", "x w dy bias 1"))
@pytest.mark.parametrize("tile", cuda_weight_grad.WHOLE_TILES.values(), ids=str)
def test_weight_gradients_of_whole_offsets(tile, before, monkeypatch):
    """Of half a tile and several, of one row, and of few offsets."""
    monkeypatch.setattr(cuda_weight_grad, "writes_whole", lambda p, device: True)
    monkeypatch.setattr(cuda_weight_grad, "_whole_tile", lambda p, device: tile)
    for channels in ((24, 40), (40, 24), (33, 131), (136, 264)):
        for scene, dtype in (
            ("some", "float16"),
            ("many", "bfloat16"),
            ("one", "float16"),
            ("even", "bfloat16"),
        ):
            point = Point(scene, (*channels, 1), dtype, moved=before)
            given = work(point, WEIGHT_GRAD)
            of = WEIGHT_GRAD, given.relation, given.x, given.dy
            plan = plan_of("grouped_gemm", *of)
            assert (plan.variant, plan.tile) == ("whole", (tile.rows, tile.width))
            check("grouped_gemm", WEIGHT_GRAD, point)


@shapes
@pytest.mark.parametrize("pass_", PASSES)
def test_tf32(pass_, shape, device):
    point = Point(rows_for(device), shape, "float32", bias=pass_ == FORWARD)
    check(tiles_of(pass_), pass_, point, device, precision="tf32")


@shapes
@pytest.mark.parametrize("pass_", PASSES[:2])
def test_tf32_reads_weights_that_run_along_the_sum(pass_, shape, device):
    point = Point(rows_for(device), shape, "float32", bias=pass_ == FORWARD)
    check(SORTED, pass_, point, device, precision="tf32", layout=MLX_LAYOUT)


@pytest.mark.parametrize("edges", (None, 1))
@pytest.mark.parametrize("pass_", PASSES)
def test_tf32_is_not_float32(pass_, edges, monkeypatch):
    """What is asked for is what runs: TF32 has its own, larger error."""
    no_small_tiles(monkeypatch)
    point, facts = Point("some", (64, 96, 1), "float32"), {}
    if edges is not None and pass_ != WEIGHT_GRAD:
        facts["edges"] = edges
    exact, rounded = (
        result(tiles_of(pass_), pass_, point, precision=precision, **facts)
        for precision in ("float32", "tf32")
    )
    wanted = work(point, pass_).wanted
    ref.assert_close(exact, wanted, "float32")
    ref.assert_close(rounded, wanted, "tf32")
    assert ref.TOLERANCE["float32"] < relative(rounded, wanted)


@pytest.mark.parametrize(
    "shape",
    (
        (96, 96, 1),
        (160, 40, 1),
        (48, 192, 1),
        (192, 48, 1),
        (80, 112, 1),
        (144, 160, 1),
    ),
    ids=str,
)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("pass_", PASSES[:2])
def test_widths_of_no_power_of_two(pass_, dtype, shape, device):
    check(SORTED, pass_, Point(rows_for(device), shape, dtype), device)


@pytest.mark.parametrize("shape", ((32, 32, 1), *SHAPES[4:], (40, 136, 1)), ids=str)
@pytest.mark.parametrize("pass_", PASSES[:2])
def test_tiles_of_few_edges_a_row(pass_, shape, device):
    check(SORTED, pass_, Point("some", shape, "float16"), device, edges=1)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "channels", ((1, 1), (16, 24), (24, 40), (33, 31), (64, 64), (64, 136)), ids=str
)
@pytest.mark.parametrize("before", ("", "x w dy bias 1"))
def test_weight_gradients_by_sorted_rows(before, channels, dtype):
    for scene in ("some", "forward"):
        check(SORTED, WEIGHT_GRAD, Point(scene, (*channels, 1), dtype, moved=before))


# One channel a thread and 16 bytes of them, few and many of these, and a multiplier.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((5, 5), (16, 16), (264, 264), (3, 6)), ids=str)
@pytest.mark.parametrize("pass_", PASSES)
def test_depthwise(pass_, shape, dtype):
    check("depthwise", pass_, Point("some", (*shape, shape[0]), dtype))


@pytest.fixture(params=(False, True), ids=("in_tiles", "once"))
def unpacked(request, monkeypatch):
    """Weights are unpacked in every tile, or once a call."""
    monkeypatch.setattr(cuda_tiles, "unpacks_once", lambda *_: request.param)


# Stages of one offset, of two and of four of them, and of parts; each tile width.
@pytest.mark.parametrize(
    "channels",
    ((1, 1), (20, 7), (32, 32), (64, 65), (100, 33), (128, 136), (130, 264)),
    ids=str,
)
@pytest.mark.parametrize("levels", (4, 8))
@pytest.mark.parametrize("splits", (1, 8))
def test_packed_channels(splits, levels, channels, unpacked, monkeypatch):
    monkeypatch.setattr(cuda_thresholds, "MOST_SPLITS", splits)
    for dtype in DTYPES:
        point = Point("some", (*channels, 1), dtype, (levels, 32), bias=True)
        check(PACKED, FORWARD, point)


@pytest.mark.parametrize("size", (32, 64, 128))
@pytest.mark.parametrize("levels", (4, 8))
@pytest.mark.parametrize("before", ("", "w 1"))
def test_packed_groups(before, levels, size, unpacked):
    for channels in ((130, 40), (192, 100)):
        point = Point("batch", (*channels, 1), "float16", (levels, size), moved=before)
        check(PACKED, FORWARD, point)


def test_general_kernels_on_hopper(unpacked):
    """What older and newer GPUs run in 16 bits."""
    older = devices.PROFILES["a100"]
    for dtype in HALVES:
        point = Point("some", (40, 72, 1), dtype)
        check(SORTED, FORWARD, point, older)
        check(SORTED, INPUT_GRAD, point, older)
        check("grouped_gemm", WEIGHT_GRAD, point, older)
        for levels in (4, 8):
            check(PACKED, FORWARD, replace(point, packing=(levels, 32)), older)


@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize(
    "route, pass_",
    ((SORTED, FORWARD), ("grouped_gemm", WEIGHT_GRAD), (PACKED, FORWARD)),
)
def test_same_bits_every_time(route, pass_, dtype, unpacked):
    packing = (4, 64) if route == PACKED else None
    point = Point("many", (64, 64, 1), dtype, packing)
    assert len({bits(result(route, pass_, point)) for _ in range(5)}) == 1
