"""Which of Hopper's tiles and how many splits a layer gets: what was timed as best."""

from dataclasses import replace

import pytest

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.problem import MLX_LAYOUT, WEIGHT_GRAD
from mlx_lattice.routes import named

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
