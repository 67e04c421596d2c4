"""On Metal, what a Plan says is what is launched, for every row of the table.

Kernels run by metal/host, which says what it ran. test_plan_is_the_cuda_launch: CUDA.
"""

from dataclasses import replace
from math import prod

import mlx.core as mx
import pytest
from contractions import Point, work
from metal_checks import host
from places import MetalHost

import mlx_lattice as ml
from mlx_lattice.problem import FORWARD
from mlx_lattice.routes import TABLE, RouteError, launch

host.require()

METAL = MetalHost()
PLAIN = Point("surface", (16, 16, 1), "float16", bias=True)


def rows() -> list:
    """(route, pass, point) for what Metal's kernels take."""
    found = []
    with METAL.inside():
        for route in TABLE:
            packing = (4, 32) if route.name.startswith("quantized") else None
            for pass_ in (p for p in route.passes if METAL.runs(route, p)):
                for facts in ({}, {"dtype": "float32"}, {"shape": (16, 16, 16)}):
                    facts |= {"packing": packing, "bias": pass_ == FORWARD}
                    point = replace(PLAIN, **facts)
                    try:
                        ml.select(point.problem(pass_), only=route.name)
                    except RouteError:
                        continue
                    name = f"{route.name}-{pass_}"
                    found.append(pytest.param(route, pass_, point, id=name))
                    break
    return found


@pytest.mark.parametrize("chip", ("", "split"))
@pytest.mark.parametrize("route, pass_, point", rows())
def test_metal(route, pass_, point, chip):
    run = work(point, pass_).forced(route, pass_)
    with METAL.inside(chip), host.recording(checked=True) as record:
        mx.eval(run())  # the views are there from now on
        before = len(record.report.launches)
        seen = []
        with launch.observe(seen.append):
            mx.eval(run())
    (plan,) = (each.choice.plan for each in seen if each.problem.pass_ == pass_)
    assert plan.kernel == route.name and plan.gpu.symbol.startswith(route.name)
    said = []
    for dispatch in plan.dispatches:
        said.append((plan.gpu.symbol, prod(dispatch.grid)))
        if dispatch.add:
            said.append((plan.add.symbol, prod(dispatch.add)))
    # Sums of pieces of rows are those of a reduction.
    ran = [
        each
        for each in record.report.launches[before:]
        if "lattice_sum_segments" not in each.kernel
    ]
    assert len(ran) == len(said) > 0
    for each, (symbol, threads) in zip(ran, said, strict=True):
        assert f"lattice_{symbol}" in each.kernel
        # Edges that were not counted with their relation are fewer than planned for.
        assert each.counts.threads == threads or plan.view == "edges"
