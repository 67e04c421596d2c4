"""int8_sorted on CUDA: its tiles, its padding, and how its kernels prove themselves."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import pytest

from mlx_lattice import devices
from mlx_lattice.backends import mlx as mlx_backend
from mlx_lattice.problem import IntegerFacts, Problem, Proof
from mlx_lattice.routes import named
from mlx_lattice.routes.proof import check

ALL = ("scale", "shift", "residual", "residual_scale", "out_inverse")


def problem(
    c_in=64,
    c_out=64,
    rows=100_000,
    bits=8,
    facts=None,
    dtype="float16",
    kernel_size=3,
):
    given = Problem.forward(
        c_in=c_in,
        c_out=c_out,
        n_in=rows,
        kernel_size=kernel_size,
        edges=rows * (17 if kernel_size > 1 else 1),
        dtype=dtype,
        bits=bits,
    )
    size = 32 if bits == 4 else None
    return replace(given, group_size=size, integer=facts or IntegerFacts())


def test_rows_with_scales_of_their_own_are_refused():
    facts = IntegerFacts(("scale", "row_scales"))
    why = named("int8_sorted").refusal(problem(facts=facts), devices.profile("h200"))
    assert "every row has a scale of its own" in why


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize(
    "facts, dtype",
    (
        (IntegerFacts(ALL, "relu"), "float16"),
        (IntegerFacts(ALL[:3]), "bfloat16"),
        (IntegerFacts(("scale", "out_inverse"), "gelu"), "float32"),
    ),
)
def test_proofs_find_what_is_wrong(bits, facts, dtype):
    """What a kernel is tried on, with the portable floor in the kernel's place."""
    p = problem(96, 64, 3000, bits, facts, dtype)

    def floor(p, fault):
        plan = mlx_backend.gather_gemm_scatter(p, devices.profile("cpu"))

        def bind(of, relation):
            def wrong(x, *arrays):
                y = plan.bind(of, relation)(x, *arrays)
                return mx.concatenate([y[1:2], y[1:]]) if fault else y

            return wrong

        return replace(plan, bind=bind)

    for fault in (False, True):
        again = partial(floor, fault=fault)
        plan = replace(again(p), proof=Proof((93, 61), again))
        found = check(plan)
        assert bool(found) == fault, found
        assert not fault or "values are wrong" in found
