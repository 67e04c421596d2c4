"""What only Metal does: cut dispatches, sums and weights that would hold a chip long.

Limits are lowered until small problems are cut. Each test is a chip of its own, since
plans are kept by chip.
"""

import pytest
import reference as ref
from conftest import bits
from contractions import Point, work
from metal_checks import bounded, checked, host
from places import MetalHost

import mlx_lattice as ml
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.metal import tiles as metal_thresholds
from mlx_lattice.problem import PASSES
from mlx_lattice.routes import TABLE

host.require()

METAL = MetalHost()
ROWS = [
    pytest.param(str(route), pass_, id=f"{route}-{pass_}")
    for route in TABLE
    for pass_ in route.passes
    if METAL.runs(route, pass_) and "int8" not in route.name  # test_metal_int8.py
]
TILES = (
    ("sorted_implicit_gemm", "forward"),
    ("sorted_implicit_gemm", "input_grad"),
    ("grouped_gemm", "weight_grad"),
    *(("tensor_ops", pass_) for pass_ in PASSES),
)
# What each row takes that is not plain.
TAKES = {
    "vec4": {"dtype": "float32"},
    "fp32_atomic": {"dtype": "float32"},
    "depthwise": {"shape": (16, 16, 16)},
    "quantized_sorted": {"packing": (4, 32)},
    "quantized_tensor_ops": {"packing": (8, 32)},
    "quantized_traversal": {"packing": (4, 32)},
}


@pytest.fixture
def chip(request) -> str:
    return request.node.nodeid


def point(route, scene="surface", **facts) -> Point:
    return Point(scene, **({"dtype": "float16"} | TAKES.get(route, {}) | facts))


def ran(route, pass_, given: Point, chip="") -> tuple[bytes, int]:
    """Check a pass on a chip; return its bits, and how many kernels it took."""
    numbers, steady = work(given, pass_), route != "fp32_atomic"
    run = numbers.forced(route, pass_)
    first, *others = METAL.run(run, steady, chip)[""]
    ref.assert_close(first, numbers.wanted, given.dtype, route)
    assert all(bits(other) == bits(first) for other in others)
    return bits(first), checked.launches


def launches(*arguments) -> int:
    """Check a pass; return how many kernels it took."""
    return ran(*arguments)[1]


@pytest.mark.parametrize("route, pass_", ROWS)
def test_work_is_cut_into_bounded_dispatches(route, pass_, chip, monkeypatch):
    """The bits are those of the whole, but where atomics add in any order."""
    given = point(route, bias=pass_ == "forward")
    launches(route, pass_, given)  # its views are there from now on
    whole, few = ran(route, pass_, given)
    bounded(monkeypatch, "multiply_adds", 5000)
    bounded(monkeypatch, "elements", 500)
    monkeypatch.setattr(gpu_kernel, "matrix_limit", lambda device: 2000)
    cut, many = ran(route, pass_, given, chip)
    assert many > few
    assert cut == whole or route == "fp32_atomic"


@pytest.mark.parametrize("route, pass_", ROWS)
def test_no_kernel_is_launched_for_no_rows(route, pass_):
    assert launches(route, pass_, point(route, "empty")) == 0


@pytest.mark.parametrize("piece", (2, 3))
@pytest.mark.parametrize("pass_", PASSES[:2])
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_rows_of_many_edges_are_added_in_pieces(dtype, pass_, piece, chip, monkeypatch):
    monkeypatch.setitem(gpu_kernel.SEGMENT_CUTS, "longest", 4)
    monkeypatch.setitem(gpu_kernel.SEGMENT_CUTS, "piece", piece)
    for shape in ((3, 5, 1), (4, 6, 2)):
        given = Point("edges", shape, dtype, bias=pass_ == "forward")
        assert launches("relation_traversal", pass_, given, chip) > 1


@pytest.mark.parametrize("route", ("relation_traversal", "depthwise"))
@pytest.mark.parametrize(
    "cuts",
    (
        {"SPLIT_EDGES": 3},
        {"thread_edges": 4},
        {"thread_edges": 4, "PARTIAL_BYTES": 4 * 3 * 27 * 16},
    ),
    ids=str,
)
def test_splits_of_a_weight_gradient(route, cuts, chip, monkeypatch):
    """No thread adds many edges, and partial sums are few at a time."""
    given = point(route, "submanifold", shape=(16, 16, 16), dtype="bfloat16")
    launches(route, "weight_grad", given)
    whole = launches(route, "weight_grad", given)
    for name, value in cuts.items():
        where = getattr(metal_thresholds, name, None)
        if where is None:
            monkeypatch.setitem(gpu_kernel.METAL_CUTS, name, value)
        else:
            monkeypatch.setitem(where, "*", value)
    cut = launches(route, "weight_grad", given, chip)
    assert cut > whole if len(cuts) > 1 else cut >= whole


@pytest.mark.parametrize("route, pass_", TILES)
@pytest.mark.parametrize("shape", ((4, 4096, 1), (4096, 4, 1)), ids=str)
def test_4096_channels(shape, route, pass_):
    launches(route, pass_, Point("one", shape, "float16"))


@pytest.mark.parametrize("share", (None, 0.6, 0.2), ids=("whole", "cut", "cut_short"))
@pytest.mark.parametrize("pass_", PASSES[:2])
def test_rows_sorted_by_region(pass_, share, chip, monkeypatch):
    monkeypatch.setitem(metal_thresholds.REGION_ROWS, "*", 64)
    monkeypatch.setitem(metal_thresholds.FILLING, "*", 1)
    given = point("sorted_implicit_gemm", shape=(8, 8, 1))
    if share is not None:
        limit = int(share * work(given, pass_).relation.n_edges * 8 * 8)
        monkeypatch.setattr(gpu_kernel, "matrix_limit", lambda device: limit)
    launches("sorted_implicit_gemm", pass_, given, chip)


@pytest.mark.parametrize("edges", (1, 2, 9))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("far", (False, True), ids=("near", "far"))
def test_ranges_of_edges_in_every_type(far, dtype, edges, chip, monkeypatch):
    """Any number of edges an offset, so that a range begins and ends at any."""
    monkeypatch.setitem(metal_thresholds.SPLIT_EDGES, "*", edges)
    monkeypatch.setitem(metal_thresholds.FAR_ELEMENTS, "*", 0 if far else 1 << 32)
    matrices = "bfloat16" if far else "float32"
    monkeypatch.setitem(metal_thresholds.BFLOAT_MATRICES, "*", matrices)
    for scene, shape in (("129_rows", (24, 17)), ("surface", (16, 40))):
        given = Point(scene, (*shape, 1), dtype)
        launches("grouped_gemm", "weight_grad", given, f"{chip} {scene}")
        with METAL.inside(f"{chip} {scene}"):
            p = given.problem("weight_grad")
            plan = ml.select(p, only="grouped_gemm").plan
            said = "bfloat16 as float32" if dtype == "bfloat16" and not far else ""
            assert plan.products == said and dict(plan.gpu.template)["FAR"] == far
