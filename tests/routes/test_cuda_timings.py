"""Hopper's tiles are those that were timed as best, or nearly, in half."""

import json
from pathlib import Path
from statistics import mean

import pytest

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.backends import cuda_tile_choice
from mlx_lattice.problem import MLX_LAYOUT

# Microseconds of each tile: the first parameters of its template.
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def lines_of(file: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


TIMED = lines_of("gpu-surfaces.jsonl")
ITSELF = lines_of("gpu-itself.jsonl")  # of 1x1 kernels


def timed_as(code: str) -> str:
    """The name of a tile among those that were timed."""
    name, _, rest = code.rstrip(">").partition("<")
    shape = rest.split(", ")
    kept = shape[: {"PersistentTile": 6, "ResidentTile": 4}.get(name, 3)]
    return f"{name}<{', '.join(kept)}"


def over_the_fastest(timed: dict) -> float | None:
    """The time of the chosen tile over the least one, None where it was not timed."""
    of_kernel = {}
    if timed["kind"] != "submanifold":
        of_kernel = {"kernel_size": 2, "stride": 2}
    elif "c_in" in timed:
        of_kernel = {"kernel_size": 1}
    facts = {name: timed[name] for name in ("kind", "n_in", "n_out", "edges", "dtype")}
    sides = {side: timed.get(side, timed.get("channels")) for side in ("c_in", "c_out")}
    make = getattr(ml.Problem, timed["pass"])
    problem = make(**facts, **sides, **of_kernel, layout=MLX_LAYOUT)
    of = problem.layer, devices.profile("h200"), False, lambda tile: tile
    chosen = cuda_tile_choice.tile_chooser(*of)(problem)
    us = timed["us"].get(timed_as(chosen.code))
    return us and us / min(timed["us"].values())


def test_tiles_are_nearly_the_fastest():
    over = [ratio for ratio in map(over_the_fastest, TIMED) if ratio]
    assert len(over) > 200
    assert mean(over) < 1.015 and max(over) < 1.2


def test_tiles_of_rows_that_feed_themselves_are_nearly_the_fastest():
    over = [ratio for ratio in map(over_the_fastest, ITSELF) if ratio]
    assert len(over) > 130
    assert mean(over) < 1.04 and max(over) < 1.2


@pytest.mark.parametrize(
    "channels", sorted({timed["channels"] for timed in TIMED if "channels" in timed})
)
def test_no_width_is_left_behind(channels):
    of = (
        over_the_fastest(timed) for timed in TIMED if timed.get("channels") == channels
    )
    assert mean([ratio for ratio in of if ratio]) < 1.04
