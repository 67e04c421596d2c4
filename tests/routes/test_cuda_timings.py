"""Hopper's tiles are those that were timed as best, or nearly."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.backends.cuda import contraction as cuda_contraction
from mlx_lattice.backends.cuda import tiles as cuda_tiles
from mlx_lattice.backends.cuda import weight_grad as cuda_weight_grad
from mlx_lattice.problem import KERNEL_MAJOR, MLX_LAYOUT, WEIGHT_GRAD, IntegerFacts
from mlx_lattice.routes import named
from mlx_lattice.settings import TF32

# Microseconds of each tile: the first parameters of its template.
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def lines_of(file: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


TIMED = lines_of("gpu-surfaces.jsonl")
ITSELF = lines_of("gpu-itself.jsonl")  # of 1x1 kernels
WIDTHS = lines_of("gpu-widths.jsonl")  # of int8 features, TF32 and weight gradients
INT8 = {"bits": 8, "integer": IntegerFacts(("scale", "shift", "out_inverse"), "relu")}
DEVICE = devices.profile("h200")


def timed_as(code: str) -> str:
    """The name of a tile among those that were timed."""
    name, _, rest = code.rstrip(">").partition("<")
    shape = rest.split(", ")
    counts = {"PersistentTile": 6, "EdgeTile": 4}
    return f"{name}<{', '.join(shape[: counts.get(name, 3)])}"


def problem_of(timed: dict) -> ml.Problem:
    """The problem that was timed; of other channels on either side a 1x1 kernel's."""
    facts = {name: timed[name] for name in ("kind", "n_in", "n_out", "edges")}
    facts |= {"dtype": timed["dtype"], "layout": MLX_LAYOUT}
    if timed["kind"] != "submanifold":
        facts |= {"kernel_size": 2, "stride": 2}
    elif "c_in" in timed:
        facts["kernel_size"] = timed.get("kernel_size", 1)
    if timed["dtype"] == "int8":
        facts |= INT8 | {"dtype": "float16", "layout": KERNEL_MAJOR}
    elif timed["dtype"] == TF32:
        facts |= {"dtype": "float32", "precision": TF32}
    sides = {side: timed.get(side, timed.get("channels")) for side in ("c_in", "c_out")}
    return getattr(ml.Problem, timed["pass"])(**facts, **sides)


def chosen(problem: ml.Problem) -> cuda_tiles.Tile:
    """The tile that a problem gets."""
    if problem.integer:
        return cuda_contraction.int8_cut(problem, DEVICE)[0]
    if problem.pass_ == WEIGHT_GRAD:
        return cuda_weight_grad.grouped_tile(problem, DEVICE)
    return cuda_tiles.sorted_tile(problem, DEVICE)


def over_the_fastest(timed: dict) -> float | None:
    """The time of the chosen tile over the least one, None where it was not timed."""
    times = {
        code: us
        for code, us in timed["us"].items()
        if code.startswith(("WideTile", "PersistentTile", "EdgeTile"))
        and not code.endswith("producers")
    }  # other kinds of tiles were timed too
    us = times.get(timed_as(chosen(problem_of(timed)).code))
    return us and us / min(times.values())


def test_tiles_are_nearly_the_fastest():
    over = [ratio for ratio in map(over_the_fastest, TIMED) if ratio]
    assert len(over) > 550
    assert mean(over) < 1.02 and max(over) < 1.35


def test_tiles_of_rows_that_feed_themselves_are_nearly_the_fastest():
    over = [ratio for ratio in map(over_the_fastest, ITSELF) if ratio]
    assert len(over) > 160
    assert mean(over) < 1.03 and max(over) < 1.25


def test_tiles_of_other_operands_are_nearly_the_fastest():
    over = [ratio for ratio in map(over_the_fastest, WIDTHS) if ratio]
    assert len(over) > 75
    assert mean(over) < 1.03 and max(over) < 1.35


@pytest.mark.parametrize(
    "channels", sorted({timed["channels"] for timed in TIMED if "channels" in timed})
)
def test_no_width_is_left_behind(channels):
    of = (
        over_the_fastest(timed) for timed in TIMED if timed.get("channels") == channels
    )
    assert mean([ratio for ratio in of if ratio]) < 1.05


# Which of Hopper's tiles and how many splits a layer gets: what was timed as best.


H200 = devices.profile("h200")


def layer(rows: int, channels: int, stride: int = 1, **facts) -> ml.Problem:
    """A submanifold 3x3x3 layer of a surface, or a strided 2x2x2 one."""
    few = {"kernel_size": 2, "stride": 2, "n_out": rows * 9 // 25, "edges": rows}
    every = {"kernel_size": 3, "n_out": rows, "edges": 17 * rows}
    given = {"n_in": rows, "c_in": channels, "c_out": channels, "dtype": "float16"}
    given |= (every if stride == 1 else few) | {"layout": MLX_LAYOUT} | facts
    return ml.Problem.forward(**given)


@pytest.mark.parametrize(
    "given, tile, splits",
    (
        # Few tiles: splits give every multiprocessor a block, or two, and no fewer.
        ((1000, 192), (64, 96), 4),
        ((2000, 64), (64, 64), 4),
        ((3000, 128), (64, 128), 5),
        # Tiles of which a multiprocessor holds one, and which not all have.
        ((7000, 512), (128, 256), 1),
        ((120_000, 64), (128, 64), 1),
        # Their own widths; more of them side by side.
        ((40_000, 80), (192, 80), 1),
        ((120_000, 160), (192, 160), 1),
        ((120_000, 320), (192, 160), 1),
        # Rows of one edge.
        ((2000, 64, 2), (64, 32), 1),
        ((20_000, 128, 2), (64, 64), 1),
    ),
    ids=str,
)
def test_tiles_and_splits(given, tile, splits):
    plan = named("sorted_implicit_gemm").plan(layer(*given), H200)
    assert (plan.tile, plan.splits) == (tile, splits)


@pytest.mark.parametrize(
    "given, variant, tile",
    (
        # All edges of an offset.
        ((2000, 192), "whole", (64, 64)),
        ((2000, 256), "whole", (128, 128)),
        ((10_000, 512), "whole", (128, 256)),
        ((1000, 96, 2), "whole", (64, 64)),
        ((20_000, 512), "hopper", (128, 256)),
        # Few edges have lower tiles.
        ((10_000, 96), "hopper", (128, 96)),
        ((10_000, 128), "hopper", (64, 128)),
        ((40_000, 192), "hopper", (192, 192)),
        ((40_000, 128), "hopper", (128, 128)),
    ),
    ids=str,
)
def test_tiles_of_weight_gradients(given, variant, tile):
    problem = replace(layer(*given), pass_=WEIGHT_GRAD)
    plan = named("grouped_gemm").plan(problem, H200)
    assert (plan.variant, plan.tile) == (variant, tile)
    # One launch writes dW whole, in the layout of the module's weight.
    assert (plan.add is None) == (plan.partials == ()) == (variant == "whole")
    assert plan.layout == MLX_LAYOUT


def test_a_1x1_kernel_of_half_is_tiles_where_the_matmul_would_copy():
    def taken(device="h200", pass_="forward", n_in=50_000, **facts):
        facts = {"dtype": "float16", "c_in": 64, "c_out": 64, "kernel_size": 1} | facts
        problem = ml.Problem.forward(n_in=n_in, **facts)
        return ml.select(replace(problem, pass_=pass_), device=device).route.name

    for pass_ in ("forward", "input_grad"):
        for dtype in ("float16", "bfloat16"):
            assert taken(pass_=pass_, dtype=dtype) == "sorted_implicit_gemm"
    for facts in ({}, {"n_in": 5}, {"c_in": 4}, {"c_out": 20}):
        assert taken(pass_="weight_grad", **facts) == "grouped_gemm"
    for rows in (50, 5000, 400_000):  # weights alone are padded
        assert taken(c_out=20, n_in=rows) == "sorted_implicit_gemm"
    one = {"kernel_size": 1, "edges": 400_000, "n_in": 400_000, "dtype": "float16"}
    plans = (
        ml.select(ml.Problem.forward(c_in=c, c_out=o, **one), device="h200").plan
        for c, o in ((96, 64), (1024, 512), (96, 48))
    )
    assert [(plan.variant, plan.tile) for plan in plans] == [
        ("hopper", (256, 64)),
        ("hopper", (128, 256)),
        ("hopper", (256, 48)),
    ]
    others = (
        {"dtype": "float32"},
        {"pass_": "weight_grad", "dtype": "float32"},
        {"c_in": 4},
        {"c_out": 20, "pass_": "input_grad"},
    )
    # Groups are expanded to the dense layer.
    assert taken(groups=2) == "sorted_implicit_gemm"
    assert taken(pass_="weight_grad", groups=2) == "grouped_gemm"
    for other in (*others, {"device": "a100"}, {"device": "m4-max"}):
        assert taken(**other) == "pointwise"
    half = ml.Problem.forward(n_in=9, c_in=64, c_out=64, kernel_size=1, dtype="float16")
    refused = dict(ml.select(half, device="h200").rejected)["pointwise"]
    assert "half rows are copied first" in refused
