"""On CUDA, what a Plan says is what is launched, for every row of the table.

Kernels are recorded, not run.
"""

import itertools

import cases
import mlx.core as mx
import pytest
from conftest import KINDS, Numbers, multi_edges, pair
from cuda_recorder import recording
from planned import alone

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.backends.cuda import thresholds as cuda_thresholds
from mlx_lattice.problem import FORWARD, WEIGHT_GRAD
from mlx_lattice.quantized import IntegerWeight
from mlx_lattice.routes import TABLE, launch

if not devices.has_extension():
    pytest.skip("relations are built by the CPU's extension", allow_module_level=True)

# (C_in, C_out, groups), and (bits, group_size) of packed weights.
SHAPES = ((3, 5, 1), (16, 24, 1), (64, 64, 1), (64, 264, 1), (6, 12, 6), (8, 12, 2))
PACKED = (4, 32)
ROWS = [(r.name, p) for r in TABLE for p in r.passes if r.planner(devices.CUDA, p)]


def whole(sizes) -> tuple:
    return (*sizes, 1, 1)[:3]


@pytest.fixture(params=("many", "few", "whole"))
def relations(request, monkeypatch):
    """Relations of many and of few edges a row; sums in splits, and whole."""
    if request.param == "whole":
        monkeypatch.setattr(cuda_thresholds, "MOST_SPLITS", 1)
    made = [pair(case, "surface", 300)[0] for case in (KINDS[0], KINDS[2])]
    for relation in made:
        relation.set_counted(1 if request.param == "few" else relation.n_edges)
    ml.settings.note_change()
    yield [*made, multi_edges()[0]]
    ml.settings.note_change()


def launched(pass_, relation, n, groups, packed, bias):
    """One pass and nothing else."""
    if isinstance(packed, IntegerWeight):
        x, shift = mx.zeros(n.x.shape, dtype=mx.int8), bias[0] if bias else None
        facts = {"scale": packed.scale, "shift": shift, "dtype": n.x.dtype}
        return ml.integer_conv(x, packed, relation, groups=groups, **facts)
    w = n.w if packed is None or pass_ != FORWARD else packed
    return alone(pass_, relation, n.x, w, n.dy, groups, *bias)


@pytest.mark.parametrize("chip", ("h200", "a100"))
@pytest.mark.parametrize("route, pass_", ROWS)
def test_the_plan_of_a_choice_is_launched(route, pass_, chip, relations):
    ran, seen = 0, []
    points = itertools.product(relations, SHAPES, cases.DTYPES, (False, True))
    for relation, (c_in, c_out, groups), dtype, biased in points:
        n = Numbers(relation, c_in, c_out, groups, dtype)
        packed = None
        if route.startswith("quantized"):
            bits, size = PACKED
            packed = ml.quantize_weight(n.w, bits=bits, group_size=size)
        kind = n.x.dtype
        if route.startswith("int8"):
            kind, packed = mx.float32, ml.integer_weight(n.w, bits=4, group_size=32)
        bias = (mx.zeros((c_out,), kind),) if biased and pass_ == FORWARD else ()
        given = pass_, relation, n, groups, packed, bias
        with recording(chip) as launches, ml.routes.only(f"{pass_}={route}"):
            try:
                launched(*given)  # the views are there from now on
            except ml.routes.RouteError:
                continue
            launches.clear()
            with launch.observe(seen.append):
                launched(*given)
            # Before it, channels are filled up to what the kernel reads at once.
            filling = "lattice_join_channels", "lattice_fill_lines"
            found = [each for each in launches if not each.name.startswith(filling)]
        plan = seen[-1].choice.plan
        padded = c_in % plan.multiple or c_out % plan.multiple
        assert padded or len(found) == len(launches)
        (dispatch,) = plan.dispatches
        if plan.weights == "unpacked once":
            assert found.pop(0).name.startswith("lattice_unpack_")
        if plan.weights == "prepared once":
            assert found.pop(0).name.startswith("lattice_tf32_weights")
        calls = [(plan.gpu, dispatch.grid, plan.threadgroup)]
        if dispatch.add:
            calls.append((plan.add, dispatch.add, (plan.add.threads,)))
        assert len(found) == len(calls)
        for call, (kernel, grid, threads) in zip(found, calls, strict=True):
            names = [name for name, *_ in call.inputs]
            there = tuple(name in names for name in kernel.interface.inputs)
            assert call.name == kernel.name(there)
            assert (call.grid, call.threadgroup) == (whole(grid), whole(threads))
        assert plan.kernel == route and plan.backend == devices.CUDA
        assert plan.gpu.symbol.startswith(route) or plan.weights == "unpacked once"
        if plan.partials:
            assert found[0].shapes == (plan.partials,)
        elif plan.splits > 1:
            assert found[0].shapes[0][0] == plan.splits
        fused = {"bias", "shift"} & {name for name, *_ in found[0].inputs}
        assert bool(fused) == bool(bias and plan.splits == 1)
        ran += 1
    # dW over sorted rows is summed by wgmma.
    only_hopper = (route, pass_) == ("sorted_implicit_gemm", WEIGHT_GRAD)
    assert bool(ran) != (only_hopper and chip == "a100")
