"""Int8 features on Metal's emulator, however the work is cut: the floor's bits."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import bits
from contractions import moved, scene
from metal_checks import host
from places import MetalHost

import mlx_lattice as ml
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.metal import tiles as metal_thresholds
from mlx_lattice.backends.metal import tiles as metal_tiles
from mlx_lattice.problem import ARRAYS, IN_KERNEL, IN_SUM, IntegerFacts, Problem

host.require()
METAL = MetalHost()
FACTS = IntegerFacts(ARRAYS[:-1], "relu")


def problem(relation, shape, **facts):
    facts = {"bits": 8, "integer": FACTS} | facts
    return Problem.of("forward", relation, *shape, mx.float16, **facts)


def contraction(shape, size=8, start=0):
    """A call by a route: the result is int8, and many are halves before rounding.

    Arrays of int8 begin ``start`` elements into others.
    """
    relation, _ = scene("surface")
    c_in, c_out = shape
    rng = np.random.default_rng([c_in, c_out])

    def integers(*of):
        return mx.array(rng.integers(-127, 128, of).astype(np.int8))

    x = integers(relation.n_in, c_in) // 40
    w = mx.array(rng.integers(-3, 4, (relation.volume, c_in, c_out)), dtype=mx.float32)
    w = ml.integer_weight(w, bits=size)
    if start:  # where no word begins
        x = moved(x, start)
        w = w.holding(moved(w.values, start), w.multipliers, w.scale)
    given = {
        "scale": mx.full((c_out,), 0.125),
        "shift": mx.array(rng.integers(-9, 9, c_out), dtype=mx.float32),
        "residual": integers(relation.n_out, c_out),
        "residual_scale": mx.array([0.25]),
        "out_inverse": mx.array([0.5]),
        "activation": "relu",
    }

    def call(route):
        with ml.routes.only(f"forward={route}"):
            return ml.integer_conv(x, w, relation, **given)

    return relation, call


# (height, chip, (C_in, C_out), bits, dispatches of so little work): whole steps and
# tails, placed rows and not, splits of edges.
CUTS = (
    (64, "whole", (64, 96), 8, None),
    (32, "split", (140, 33), 4, 2000),
    (16, "whole", (128, 32), 8, 2000),
)


@pytest.mark.parametrize("height, chip, shape, size, limit", CUTS)
def test_every_cut(height, chip, shape, size, limit, monkeypatch):
    monkeypatch.setattr(metal_tiles, "TENSOR_HEIGHTS", (height,))
    if height == 16:
        monkeypatch.setitem(metal_thresholds.FAR_ELEMENTS, "*", 1)
    if limit:
        monkeypatch.setattr(gpu_kernel, "matrix_limit", lambda device: limit)
    relation, call = contraction(shape, size)
    wanted = call("gather_gemm_scatter")
    assert wanted.dtype == mx.int8 and len(np.unique(np.array(wanted))) > 40
    with METAL.inside(chip):
        plan = ml.select(problem(relation, shape)).plan
    assert plan.kernel == "int8_tensor_ops"
    assert (plan.splits > 1) == (chip == "split")
    assert (len(plan.dispatches) > 1) == (not plan.placed) == bool(limit)
    for y in METAL.run(lambda: call("int8_tensor_ops"), True, chip)[""]:
        assert bits(y) == bits(wanted)


# (chip, (C_in, C_out), bits, dispatches of so little work, where arrays begin).
OLDER = (
    ("older whole", (32, 64), 4, 2000, 0),
    ("older split", (72, 33), 8, 2000, 1),
    ("older whole", (100, 40), 8, None, 0),
)


@pytest.mark.parametrize("chip, shape, size, limit, start", OLDER)
def test_chips_without_matrices_of_integers(
    chip, shape, size, limit, start, monkeypatch
):
    if limit:
        monkeypatch.setattr(gpu_kernel, "matrix_limit", lambda device: limit)
    relation, call = contraction(shape, size, start)
    wanted = call("gather_gemm_scatter")
    packing = {"bits": size, "group_size": 64 if size == 4 else None}
    with METAL.inside(chip):
        asked = problem(relation, shape, **packing)
        plan = ml.select(asked, only="quantized_sorted").plan
    assert "int8 as half, exact while sums stay below 2^24" in str(plan)
    assert plan.epilogue == (IN_KERNEL if plan.splits == 1 else IN_SUM)
    assert (plan.splits > 1) == ("split" in chip)
    assert (len(plan.dispatches) > 1) == (not plan.placed) == bool(limit)
    for y in METAL.run(lambda: call("quantized_sorted"), True, chip)[""]:
        assert bits(y) == bits(wanted)
