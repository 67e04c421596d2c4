"""A Plan is the launch on the CPU: the function of the extension that runs."""

from dataclasses import replace
from unittest.mock import patch

import mlx.core as mx
import pytest
from cases import DTYPES
from conftest import KINDS, Numbers, multi_edges, pair

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.backends import cpu
from mlx_lattice.devices import CPU, PROFILES
from mlx_lattice.problem import FORWARD, INPUT_GRAD, PASSES, WEIGHT_GRAD, Problem
from mlx_lattice.routes import TABLE
from mlx_lattice.routes.needs import pointwise_kernel

if devices.extension is None:
    pytest.skip("the extension is not installed", allow_module_level=True)

ROWS = [(r, p) for r in TABLE for p in PASSES if p in r.passes and r.planner(CPU, p)]


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Relations are built there too: others keep tables in a form of their own."""
    with mx.stream(mx.cpu):
        yield


class Recorder:
    """Stands before the extension and notes each function that is called."""

    def __init__(self, extension):
        self.extension, self.calls = extension, []

    def __getattr__(self, name):
        function = getattr(self.extension, name)

        def called(*arguments, **options):
            self.calls.append((name, arguments, options))
            return function(*arguments, **options)

        return called


def views(relation) -> dict[str, list]:
    """The arrays of each view that the extension reads."""
    kept = relation.view("output_csr_columns", lambda: ())
    found = {"edges": [relation.edges], "output_csr": list(kept), "none": []}
    return found | ({"out_in": [relation.out_in]} if relation.has_table else {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("route, pass_", ROWS, ids=lambda v: str(v))
def test_the_function_of_the_plan_is_called_with_its_view(route, pass_, dtype):
    pointwise = pointwise_kernel in route.needs
    case = replace(KINDS[0], kernel_size=1) if pointwise else KINDS[0]
    relations = [pair(case)[0]] + [multi_edges()[0]] * (not pointwise)
    for relation in relations:
        n = Numbers(relation, 32, 24, dtype=dtype)
        weight, packing = n.w, {}
        if route.takes_packed:
            packing = {"bits": 4, "group_size": 32}
            weight = ml.quantize_weight(n.w, **packing)
        table = relation.has_table
        problem = Problem.of(pass_, relation, 32, 24, n.x.dtype, table=table, **packing)
        if route.refusal(problem, PROFILES["cpu"], forced=True):
            continue
        plan = route.plan(problem, PROFILES["cpu"])
        assert (plan.backend, plan.kernel) == (CPU, route.name)
        recorder = Recorder(devices.extension)
        with patch.object(cpu, "extension", recorder):
            if pass_ == FORWARD:
                over, y = relation, plan(relation, n.x, weight)
            elif pass_ == INPUT_GRAD:
                over, y = relation.T, plan(relation.T, n.dy, weight)
            else:
                over, y = relation, plan(relation, n.x, n.dy)
            mx.eval(y)
        name = plan.kernel + "_weight_grad" * (pass_ == WEIGHT_GRAD)
        (call,) = [call for call in recorder.calls if call[0] == name]
        _, arguments, options = call
        given = [a for a in arguments if isinstance(a, mx.array)]
        for view in views(over)[plan.view]:
            assert any(a is view for a in given), f"{name} does not read {plan.view}"
        if pass_ == INPUT_GRAD:
            transposed = options.get("transpose_weight", options.get("transpose"))
            assert transposed is True
