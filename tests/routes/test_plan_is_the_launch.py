"""A Plan is the launch: what runs is what it says, for every row of the table.

Kernels are recorded as they are handed to MLX: on Metal, the calls of
``mx.fast.metal_kernel``, which metal/host then runs.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import mlx.core as mx
import pytest
from cases import DTYPES
from contractions import Point, work
from metal_checks import bounded, host
from places import MetalHost
from planned import alone

import mlx_lattice as ml
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.gpu.kernel import LEAST_DEVICE_SIZE
from mlx_lattice.problem import FORWARD, INPUT_GRAD
from mlx_lattice.routes import TABLE, RouteError

host.require()

METAL = MetalHost()


@dataclass(frozen=True)
class Call:
    """One kernel as it was launched.

    Attributes:
        name: by which MLX keeps it.
        template: its template arguments by name.
        grid: threads on each axis.
        threadgroup: threads of a threadgroup.
        inputs: the arrays by name.
    """

    name: str
    template: dict
    grid: tuple
    threadgroup: tuple
    inputs: dict

    def sizes(self, interface) -> dict[str, int]:
        """What it was told besides the shapes."""
        names = (name for name, _ in interface.sizes)
        return dict(zip(names, self.inputs["numbers"].tolist(), strict=True))


@contextmanager
def metal_calls():
    """The calls of Metal kernels in the block, as they come."""
    calls, inner = [], mx.fast.metal_kernel

    def factory(**made):
        built = inner(**made)

        def call(**given):
            inputs = dict(zip(made["input_names"], given["inputs"], strict=True))
            template = dict(given.get("template", ()))
            where = given["grid"], given["threadgroup"]
            calls.append(Call(made["name"], template, *where, inputs))
            return built(**given)

        return call

    with patch.object(mx.fast, "metal_kernel", factory):
        yield calls


def points(route) -> list[Point]:
    """What a row may take: every dtype, packed, grouped, wide, without a table."""
    packing = (4, 32) if route.name.startswith("quantized") else None
    plain = Point("surface", (16, 16, 1), packing=packing, bias=True)
    changed = [replace(plain, dtype=dtype) for dtype in DTYPES]
    half = replace(plain, dtype="float16")
    changed += [replace(half, shape=shape) for shape in ((16, 16, 16), (70, 130, 1))]
    changed += [replace(half, scene="edges"), replace(plain, scene="edges")]
    return changed


def rows() -> list:
    """(route, pass, point) for what Metal's kernels take."""
    found = []
    with METAL.inside():
        for route in TABLE:
            for pass_ in (p for p in route.passes if METAL.runs(route, p)):
                for point in points(route):
                    point = replace(point, bias=point.bias and pass_ == FORWARD)
                    try:
                        ml.select(point.problem(pass_), only=route.name)
                    except RouteError:
                        continue
                    name = f"{route.name}-{pass_}-{point}"
                    found.append(pytest.param(route, pass_, point, id=name))
    return found


def forced(given, route, pass_):
    """A call that runs a pass on a row, and no other pass."""
    arrays = given.x, given.w, given.dy, given.groups, given.bias

    def call():
        with ml.routes.only(f"{pass_}={route}"), ml.waive_determinism():
            return alone(pass_, given.relation, *arrays)

    return call


def whole(sizes) -> tuple:
    return (*sizes, 1, 1)[:3]


def expected(plan, relation) -> list:
    """(kernel, grid, threadgroup or None) of the launches that a plan says.

    Edges that were not counted with their relation are fewer than planned for.
    """
    launches = []
    for dispatch in plan.dispatches:
        if plan.view == "edges":
            left = relation.n_edges - dispatch.first
            if left <= 0:
                continue
            across, most = dispatch.grid
            dispatch = dispatch._replace(grid=(across, min(most, left)))
        launches.append((plan.gpu, whole(dispatch.grid), whole(plan.threadgroup)))
        if dispatch.add:
            launches.append((plan.add, whole(dispatch.add), None))
    return launches


@pytest.mark.parametrize("chip", ("", "split", "cut"))
@pytest.mark.parametrize("route, pass_, point", rows())
def test_metal(route, pass_, point, chip, monkeypatch):
    given = work(point, pass_)
    relation = given.relation.T if pass_ == INPUT_GRAD else given.relation
    if chip == "cut":
        bounded(monkeypatch, "multiply_adds", 5000)
        bounded(monkeypatch, "elements", 500)
        monkeypatch.setattr(gpu_kernel, "matrix_limit", lambda device: 2000)
    with METAL.inside(chip):
        run = forced(given, route, pass_)
        # Checked, as most of these kernels are compiled for the table's tests.
        with host.recording(checked=True) as record:
            mx.eval(run())  # the views are there from now on
            before = len(record.report.launches)
            with ml.trace() as t, metal_calls() as calls:
                mx.eval(run())
        (plan,) = (r.choice.plan for r in t if r.problem.pass_ == pass_)
        view = plan.read(relation) if plan.read else [getattr(relation, plan.view)]
    assert plan.kernel == route.name
    assert plan.gpu.symbol.startswith(route.name)
    assert plan.gpu.files[-1] in (route.name, plan.gpu.symbol)
    # Sums of pieces of rows are those of a reduction.
    calls = [c for c in calls if not c.name.startswith("lattice_sum_segments")]
    launches = expected(plan, relation)
    assert len(calls) == len(launches) > 0
    if chip == "cut":
        assert len(plan.dispatches) > 1
    for call, (kernel, grid, threadgroup) in zip(calls, launches, strict=True):
        absent = [f"no_{n}" for n in kernel.interface.inputs if n not in call.inputs]
        assert call.name == "_".join(("lattice", kernel.symbol, *absent))
        assert call.template == dict(kernel.template)
        assert call.grid == grid
        assert threadgroup in (None, call.threadgroup)
    name = f"lattice_{plan.gpu.symbol}"
    kernels = [call for call in calls if call.name.startswith(name)]
    for call, dispatch in zip(kernels, plan.dispatches, strict=plan.view != "edges"):
        sizes = call.sizes(plan.gpu.interface)
        assert sizes["first"] == dispatch.first
        assert sizes.items() >= dict(plan.sizes).items()
        arrays = list(call.inputs.values())
        for array in view:
            assert array.size < LEAST_DEVICE_SIZE or any(a is array for a in arrays)
        assert call.threadgroup == whole(plan.threadgroup)
    # The host ran what MLX was asked for, and the bias went in where there is one.
    ran = [report.kernel for report in record.report.launches[before:]]
    assert sum(name in kernel for kernel in ran) == len(kernels)
    last = calls[-1].inputs
    fused = "bias" in plan.gpu.interface.inputs and not (plan.partials and not plan.add)
    assert ("bias" in last) == (given.bias is not None and fused)
    assert plan.splits == 1 or (plan.partials and plan.add)
