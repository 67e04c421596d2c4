"""Hopper's tiles are those that were timed as best, or nearly."""

import json
from pathlib import Path
from statistics import mean

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.backends.cuda import contraction as cuda_contraction
from mlx_lattice.backends.cuda import tiles as cuda_tiles
from mlx_lattice.backends.cuda import weight_grad as cuda_weight_grad
from mlx_lattice.problem import KERNEL_MAJOR, MLX_LAYOUT, WEIGHT_GRAD, IntegerFacts
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
