"""Problems: which facts are refused, what they count, how they print."""

import pytest
from problems import problem

import mlx_lattice as ml
from mlx_lattice.problem import Problem

pytestmark = pytest.mark.usefixtures("portable_only", "unforced")


@pytest.mark.parametrize(
    "facts, text",
    [
        ({"n_in": -1}, "n_in must be 0 or more; got -1"),
        ({"kind": "forward", "n_out": -2}, "n_out must be 0 or more; got -2"),
        ({"n_in": 2**31}, "numbered in int32; got 2147483648"),
        ({"kind": "submanifold", "n_out": 7}, "keeps its rows: .*got 1 and 50000 -> 7"),
        ({"kind": "submanifold", "stride": 2}, "stride is 1 and .*got 2 and"),
        ({"n_in": 5, "edges": 136}, "submanifold relation must be 0 to .* = 135"),
        ({"kind": "general", "edges": -1}, "general relation must be 0 or more"),
    ],
)
def test_facts_that_no_layer_has_are_refused(facts, text):
    with pytest.raises(ValueError, match=text):
        problem(**facts)


def test_facts_that_look_odd_and_are_none():
    repeated = problem(kind="general", n_in=5, edges=1000)
    assert ml.explain(repeated, device="m4").problem.edges == 1000
    assert problem(n_in=2**31 - 1, n_out=0).kind == "forward"
    assert problem(stride=2).kind == problem(n_out=7).kind == "forward"
    assert problem(edges=27 * 50_000).kind == problem().kind == "submanifold"


@pytest.mark.parametrize(
    "facts, error, match",
    [
        ({"pass_": "sideways"}, ValueError, "pass must be one of"),
        ({"dtype": "int32"}, TypeError, "float32, float16 or bfloat16; got int32"),
        ({"c_in": 0}, ValueError, "c_in must be a positive multiple"),
        ({"c_out": -4}, ValueError, "c_out must be 0 or more; got -4"),
        ({"groups": 3}, ValueError, "multiple of groups = 3"),
    ],
)
def test_a_problem_checks_its_facts(facts, error, match):
    with pytest.raises(error, match=match):
        problem(**facts)


def test_a_problem_counts_and_prints():
    p = problem(edges=1000, n_in=100, c_in=8, c_out=16)
    assert p.useful_flops == 2 * 1000 * 8 * 16
    assert p.itemsize == 2
    assert str(p) == (
        "submanifold 3x3x3, 8 -> 16, float16, 100 rows, 1,000 edges (10.0 a row)"
    )
    assert problem(kernel_size=1).pointwise and not problem(stride=2).pointwise
    grad = Problem.input_grad(c_in=3, c_out=4, n_in=10, n_out=5, kind="forward")
    assert (grad.pass_, grad.rows_written) == ("input_grad", 10)
    assert Problem.weight_grad(c_in=3, c_out=4, n_in=10).rows_written == 27
