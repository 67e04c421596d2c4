"""A matrix kernel proves itself before its first launch: right ones pass, faults show.

Kernels run on the CPU by metal/host.
"""

from dataclasses import replace

import pytest
from metal_checks import host
from mutants import new_folder, on_metal  # noqa: F401 (a fixture)

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.epilogue import EpilogueFacts
from mlx_lattice.problem import (
    ARRAYS,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    IntegerFacts,
)
from mlx_lattice.routes import named, proof

host.require()

INTEGERS = IntegerFacts(ARRAYS[:-1], "relu")
RIGHT = (
    ("sorted_implicit_gemm", FORWARD, "float32", {}),
    ("sorted_implicit_gemm", INPUT_GRAD, "bfloat16", {"layout": "mlx"}),
    ("sorted_implicit_gemm", FORWARD, "float16", {"c_in": 2048}),  # in slices
    ("dense_channel", FORWARD, "float16", {"c_in": 32, "c_out": 64}),
    ("dense_channel", INPUT_GRAD, "float32", {"c_in": 32, "c_out": 64}),
    ("cout16", FORWARD, "bfloat16", {"c_out": 16}),
    ("grouped_gemm", WEIGHT_GRAD, "float32", {}),
    ("tensor_ops", FORWARD, "bfloat16", {"c_out": 100}),
    ("tensor_ops", INPUT_GRAD, "float16", {}),
    ("tensor_ops", FORWARD, "float16", {"c_in": 64, "c_out": 96, "n_in": 90_000}),
    ("tensor_ops", WEIGHT_GRAD, "float16", {}),
    ("tensor_ops", WEIGHT_GRAD, "bfloat16", {"c_in": 200, "c_out": 64}),
    ("quantized_sorted", FORWARD, "bfloat16", {"bits": 8, "group_size": 128}),
    ("quantized_sorted", FORWARD, "float16", {"bits": 4, "group_size": 32}),
    ("quantized_tensor_ops", FORWARD, "float16", {"bits": 4, "group_size": 64}),
    (
        "quantized_tensor_ops",
        FORWARD,
        "bfloat16",
        {"bits": 8, "group_size": 32, "c_in": 64},
    ),
    ("int8_tensor_ops", FORWARD, "float16", {"bits": 8, "integer": INTEGERS}),
    (
        "int8_tensor_ops",
        FORWARD,
        "float32",
        {"bits": 4, "group_size": 32, "integer": IntegerFacts(), "c_in": 128},
    ),
    ("quantized_sorted", FORWARD, "bfloat16", {"bits": 8, "integer": INTEGERS}),
)


@pytest.mark.parametrize("chip", ("whole", "split"))
@pytest.mark.parametrize(
    "route, pass_, dtype, facts", RIGHT, ids=lambda v: v if isinstance(v, str) else ""
)
def test_right_kernels_pass(route, pass_, dtype, facts, chip):
    facts = {"c_in": 24, "c_out": 40, "n_in": 3000, "edges": 20_000} | facts
    p = replace(ml.Problem.forward(dtype=dtype, **facts), pass_=pass_)
    with on_metal(chip=chip):
        plan = named(route).plan(p, devices.current())
        assert proof.check(plan, pass_ == FORWARD) is None


# (file, old, new), and the plan whose kernel has it.
FAULTS = {
    "a matrix that is not turned": (
        (
            "grouped_gemm",
            "Load::template load<true>(",
            "Load::template load<false>(",
        ),
        ("grouped_gemm", WEIGHT_GRAD, "float16", {}),
    ),
    "the last edge of an offset": (
        ("grouped_gemm", "e < ALL && edge < left &&", "e < ALL && edge < left - 1 &&"),
        ("grouped_gemm", WEIGHT_GRAD, "float32", {}),
    ),
    "weights that are not turned": (
        ("dense_channel", "load<TRANSPOSED>(b, weights", "load<false>(b, weights"),
        ("dense_channel", INPUT_GRAD, "float16", {"c_in": 32, "c_out": 64}),
    ),
    "another offset's rows": (
        (
            "dense_channel",
            "from = owns ? neighbours[k] : -1;",
            "from = owns ? neighbours[k == 26 ? 25 : k] : -1;",
        ),
        ("cout16", FORWARD, "float16", {"c_out": 16}),
    ),
    "rows that are skipped": (
        (
            "matrix_tiles",
            "bits |= (each[b] >> (k % 32) & 1u) << b;",
            "bits |= (b == 7 ? 0u : each[b] >> (k % 32) & 1u) << b;",
        ),
        ("sorted_implicit_gemm", FORWARD, "float16", {"n_in": 90_000}),
    ),
    "a step lost between splits": (
        (
            "sorted_implicit_gemm",
            "steps = split_start(total, split + 1, splits) - from;",
            "steps = split_start(total, split + 1, splits) - from - split % 2;",
        ),
        ("sorted_implicit_gemm", FORWARD, "float32", {"n_in": 300, "edges": 8000}),
    ),
    "the second word of packed weights": (
        (
            "quantized_tensor_ops",
            "packed.words[word + f / 2] >> (16 * (f % 2))",
            "packed.words[word] >> (16 * (f % 2))",
        ),
        (
            "quantized_tensor_ops",
            FORWARD,
            "float16",
            {"bits": 4, "group_size": 64, "c_in": 64, "n_in": 300, "edges": 2000},
        ),
    ),
    "another four of a word of int8": (
        ("tensor_ops", "(words.v[f] >> (8 * j))", "(words.v[f] >> (8 * (j & 2)))"),
        ("int8_tensor_ops", FORWARD, "float16", {"bits": 8, "integer": INTEGERS}),
    ),
    "sums in half": (
        (
            "tensor_ops",
            "UNROLL for (int i = 0; i < 16; ++i) sums[i] = result[i];",
            "UNROLL for (int i = 0; i < 16; ++i) sums[i] = float(half(result[i]));",
        ),
        ("tensor_ops", FORWARD, "float16", {"n_in": 300, "edges": 2000}),
    ),
    "products of 11 bits": (
        (
            "matrix_tiles",
            "if (left >= 4) {\n    to = *(const device Four<T>*)(from);",
            "if (left >= 4) {\n    for (int j = 0; j < 4; ++j)\n"
            "      to.v[j] = as_type<T>(as_type<uint>(from[j]) & 0xffffe000u);",
        ),
        ("sorted_implicit_gemm", FORWARD, "float32", {}),
    ),
    "no mean": (
        ("epilogue", "if (mean) v -= mean[c + j];", ""),
        (
            "sorted_implicit_gemm",
            FORWARD,
            "float16",
            {"n_in": 90_000, "epilogue": EpilogueFacts(("mean", "var"), "relu")},
        ),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_anywhere_shows(name):
    mutation, (route, pass_, dtype, facts) = FAULTS[name]
    facts = {"c_in": 24, "c_out": 40, "n_in": 3000, "edges": 20_000} | facts
    p = replace(ml.Problem.forward(dtype=dtype, **facts), pass_=pass_)
    with on_metal(mutation):
        plan = named(route).plan(p, devices.current())
        assert "values are wrong" in proof.check(plan)


def test_an_epilogue_is_part_of_the_proof():
    there = "shift", "scale", "mean", "var", "residual"
    with on_metal(chip="whole"):
        for activation, dtype in (("relu", "float16"), ("gelu", "bfloat16")):
            after = EpilogueFacts(there, activation, "BatchNorm", 1e-5)
            p = ml.Problem.forward(
                c_in=24, c_out=40, n_in=9000, dtype=dtype, epilogue=after
            )
            plan = named("sorted_implicit_gemm").plan(p, devices.current())
            assert plan.epilogue == "in the kernel"
            assert proof.check(plan) is None
