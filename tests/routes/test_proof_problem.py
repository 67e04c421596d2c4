"""The small problem by which matrix kernels prove themselves: it leaves nothing out."""

from dataclasses import replace

import mlx.core as mx
import numpy as np

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.problem import FORWARD, PASSES, IntegerFacts
from mlx_lattice.routes import TABLE
from mlx_lattice.routes.proof import ROWS, VOLUME, Trial, neighbours


def matrix_plans():
    """Every plan of a matrix kernel that the table has, on some chips."""
    chips = "m1", "m5", "h200", "a100"
    widths = (16, 16), (24, 40), (64, 96), (300, 16)
    found = {}
    for chip, dtype, pass_, route, shape in (
        (devices.PROFILES[c], d, p, r, s)
        for c in chips
        for d in ("float32", "float16", "bfloat16")
        for p in PASSES
        for r in TABLE
        for s in widths
    ):
        for facts in (
            {},
            {"layout": "mlx"},
            {"bits": 4, "group_size": 32},
            {"bits": 8, "integer": IntegerFacts()},
            {"mirrored": True},
            {"n_in": 400_000, "edges": 1_000_000},
            {"n_in": 500, "edges": 4_000},
            {"kernel_size": 1, "edges": None},
        ):
            given = {"n_in": 3000, "edges": 20_000, "dtype": dtype, **facts}
            p = ml.Problem.forward(c_in=shape[0], c_out=shape[1], **given)
            p = replace(p, pass_=pass_)
            if route.refusal(p, chip, forced=True) is None:
                plan = route.plan(p, chip)
                found[plan.gpu, plan.splits > 1, plan.weights] = plan
    return list(found.values())


def test_just_matrix_kernels_have_a_proof():
    names = set()
    for plan in matrix_plans():
        # They alone have tiles; on Metal, and threadgroup memory.
        assert (plan.proof is not None) == (plan.tile is not None), plan
        names |= {plan.gpu.symbol} if plan.proof else set()
    assert names == {
        "cout16",
        "dense_channel",
        "grouped_gemm",
        "grouped_gemm_weight_grad",
        "grouped_gemm_whole",
        "int8_sorted",
        "int8_tensor_ops",
        "quantized_sorted",
        "quantized_sorted_int8",
        "quantized_tensor_ops",
        "sorted_implicit_gemm",
        "sorted_implicit_gemm_weight_grad",
        "tensor_ops",
        "tensor_ops_weight_grad",
    }


def test_the_kernel_that_is_tried_is_the_kernel_that_runs():
    for plan in matrix_plans():
        if plan.proof is None:
            continue
        trial = Trial(plan, False)
        small = plan.proof.again(trial.problem)
        assert small.gpu == plan.gpu and small.tile == plan.tile, plan
        assert (small.splits > 1) == (plan.splits > 1)
        assert small.weights == plan.weights and small.bind is plan.bind
        # A full column of tiles, and a tail; the narrow one has 32 channels at most.
        narrow = plan.gpu.symbol == "grouped_gemm" and small.tile == (64, 32)
        wide, high = small.problem.channels[1], small.tile[1]
        fixed = plan.kernel in ("dense_channel", "cout16")
        assert fixed or (wide > high) != narrow and wide % 8, plan
        # Of the highest tiles of int8 there is one, which is not full.
        assert small.tile[0] < ROWS or plan.kernel == "int8_sorted"
        assert ROWS % small.tile[0]


def test_the_problem_has_rows_of_all_kinds():
    for mirrored in (False, True):
        table = np.array(neighbours(mirrored))
        assert table.shape == (ROWS, VOLUME) and ROWS % 8
        edges = (table >= 0).sum(axis=1)
        few = {1, 2} if mirrored else {0, 1, 2}
        assert few < set(edges) and edges.max() > 10
        assert ((table >= 0).sum(axis=0) == 0).sum() == 2
        for o, k in zip(*np.nonzero(table >= 0), strict=True):
            assert table[table[o, k], VOLUME - 1 - k] == o
    assert (table[:, VOLUME // 2] == np.arange(ROWS)).all()  # as CUDA counts on


def test_sums_are_exact_in_every_dtype():
    """So that what rounding may change is less than what a fault changes."""
    for plan in matrix_plans():
        if plan.proof is not None and not plan.problem.integer:
            trial = Trial(plan, plan.problem.pass_ == FORWARD)
            assert mx.abs(trial.wanted).max().item() <= 256
