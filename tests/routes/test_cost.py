"""What a contraction costs: useful operations, bytes, and what tiles do besides."""

import mlx.core as mx
import pytest
from conftest import KINDS, pair

import mlx_lattice as ml
from mlx_lattice import backends, devices, routes
from mlx_lattice.inspect import explain
from mlx_lattice.problem import IntegerFacts, Problem

H200 = devices.PROFILES["h200"]


def test_cost_counts_by_hand():
    relation = pair(KINDS[0], n=200)[0]
    e, n = relation.n_edges, relation.n_out
    problem = Problem.of("forward", relation, 8, 16, mx.float16)
    c = explain.cost(problem, H200, relation=relation)
    assert c.useful_flops == 2 * e * 8 * 16
    assert c.bytes_moved == 2 * n * (8 + 16) + 2 * 27 * 8 * 16 + 4 * 27 * n
    assert c.explicit_bytes == c.bytes_moved + 2 * e * 8 * 2
    assert c.edges_per_row == e / n and c.occupancy == e / (27 * n)
    assert c.compute_ms == pytest.approx(1e3 * c.useful_flops / H200.flops("float16"))
    assert c.memory_ms == pytest.approx(1e3 * c.bytes_moved / (1e9 * H200.bandwidth))
    assert c.roofline_ms == max(c.compute_ms, c.memory_ms)
    assert c.bound == "memory" and not c.estimated
    assert "(estimated)" not in str(c)


def test_gradients_gather_what_they_read():
    facts = dict(c_in=8, c_out=16, n_in=100, n_out=50, edges=400, kind="forward")
    moved = [4 * (100 * 8 + 50 * 16) + 4 * 27 * 8 * 16 + 4 * 27 * n for n in (50, 100)]
    for pass_, rows, width in (
        ("forward", 0, 8),
        ("input_grad", 1, 16),
        ("weight_grad", 0, 24),
    ):
        c = explain.cost(getattr(Problem, pass_)(**facts), H200)
        assert c.bytes_moved == moved[rows]
        assert c.explicit_bytes - c.bytes_moved == 2 * 4 * 400 * width


def done(problem, route, relation=None, device="h200"):
    choice = routes.select(problem, device=device, only=route)
    counted = explain.cost(problem, choice.device, choice=choice, relation=relation)
    return counted.done_over_useful


def test_operations_done():
    relation = pair(KINDS[0], n=200)[0]
    p, e = Problem.of("forward", relation, 4, 8, mx.float32), relation.n_edges
    assert done(p, "explicit_gemm", relation) == 27 * relation.n_out / e
    for route in ("gather_gemm_scatter", "relation_traversal"):
        assert done(p, route, relation) == 1.0
    assert done(p, "vec4", relation, "m1") == 1.0
    assert done(p, "sorted_implicit_gemm") is None  # there is no table to look at
    mma = done(p, "sorted_implicit_gemm", relation, "a100")
    assert done(p, "sorted_implicit_gemm", relation, "cuda") == mma
    if backends.missing("cpu") is None:
        assert done(p, "blocked_gather_gemm", relation, "cpu") == 1.0


def test_what_is_not_counted_is_none():
    p = Problem.forward(c_in=4, c_out=4, n_in=100)
    c = ml.explain(p, device="m4").cost
    assert (c.useful_flops, c.roofline_ms, c.bound, c.occupancy) == (None,) * 4
    assert c.bytes_moved and "edges are not counted" in str(c)
    general = Problem.forward(c_in=4, c_out=4, n_in=100, table=False)
    assert ml.explain(general, device="m4").cost.bytes_moved is None
    pointwise = Problem.forward(c_in=4, c_out=4, n_in=100, kernel_size=1)
    assert ml.explain(pointwise, device="m4").cost.useful_flops == 2 * 100 * 16
    empty = Problem.forward(c_in=4, c_out=4, n_in=0, edges=0)
    assert "0 FLOP useful" in str(ml.explain(empty, device="m4").cost)


def test_rooflines_are_of_what_multiplies():
    """Nothing runs below its least time: TF32 and int8 have rates of their own."""
    facts = {"c_in": 256, "c_out": 256, "n_in": 10**6, "edges": 16 * 10**6}

    def least(**more):
        problem = Problem.forward(**facts, **more)
        return explain.cost(problem, H200, choice=ml.select(problem, device="h200"))

    half, exact = least(dtype="float16"), least()
    quick = least(precision="tf32")
    assert quick.compute_ms == pytest.approx(2 * half.compute_ms)
    assert exact.compute_ms == pytest.approx(6 * half.compute_ms)
    integer = IntegerFacts()
    assert least(bits=8, integer=integer).compute_ms < 0.6 * half.compute_ms
