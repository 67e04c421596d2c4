"""The view that a Choice says is the one that its route reads, on every backend.

CUDA's kernels are recorded, not run; Metal's run with MLX_LATTICE_METAL=host.
"""

import contextlib
from dataclasses import replace

import mlx.core as mx
import pytest
from conftest import KINDS, Numbers, multi_edges, pair, problem_of
from cuda_recorder import recording
from planned import alone

import mlx_lattice as ml
from mlx_lattice import devices, routes
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.problem import PASSES, IntegerFacts
from mlx_lattice.relation import Relation
from mlx_lattice.routes import selection

# What views are kept as, where not under their own name.
KEPT = {
    "table": "out_in",
    "cuda_sorted": "sorted",
    "cuda_starts": "edges",
    "cuda_pairs": "edges",
    "cuda_stages_32": "edges",
    "cuda_stages_64": "edges",
    "output_csr_columns": "output_csr",
    f"output_csr_pieces_{gpu_kernel.SEGMENT_CUTS['piece']}": "output_csr",
}
COUNTS = ("has_table", "edge_counts", "counts")  # sizes, which are no view


@pytest.fixture
def read(monkeypatch):
    """The views that are read, by name; not what they are built from."""
    names, inside = set(), []
    view = Relation.view

    def noted(self, name, build, swapped=None):
        # A tuple names a problem, which a relation keeps too.
        if not inside and name not in COUNTS and isinstance(name, str):
            names.add("sorted" if name.startswith("tile") else KEPT.get(name, name))
        inside.append(name)
        try:
            return view(self, name, build, swapped)
        finally:
            inside.pop()

    monkeypatch.setattr(Relation, "view", noted)
    return names


def run(pass_, relation, numbers, groups, packed):
    """One pass and nothing else."""
    w = packed if packed is not None and pass_ == "forward" else numbers.w
    return alone(pass_, relation, numbers.x, w, numbers.dy, groups)


def check(names, relation, c_in, c_out, dtype="float16", groups=1, bits=None):
    """Every route of every pass reads what its Choice says; returns those that ran."""
    n, packed, packing = Numbers(relation, c_in, c_out, groups, dtype), None, {}
    if bits:
        packed = ml.quantize_weight(n.w, bits=bits, group_size=32)
        packing = {"bits": bits, "group_size": 32}
    ran, device = set(), devices.current()
    for pass_ in PASSES if packed is None else PASSES[:1]:
        problem = problem_of(pass_, relation, c_in, c_out, dtype, groups, **packing)
        problem = replace(problem, edges=relation.n_edges)
        for route in (r.name for r in selection.candidates(problem, device)):
            choice = routes.select(problem, device=device, only=route)
            with ml.waive_determinism(), routes.only(f"{pass_}={route}"):
                names.clear()
                mx.eval(run(pass_, relation, n, groups, packed))
            seen = set(names)
            if choice.parameters[0][1] == "MLX operations" and not problem.table:
                seen -= {"output_csr"}  # by which products are added
            assert seen == {choice.view} - {"none"}, (route, pass_, device.name)
            ran.add((route, pass_))
    return ran


def check_int8(names, relation):
    """The same of int8 features."""
    w = ml.integer_weight(mx.ones((relation.volume, 32, 16)))
    x, scale = mx.ones((relation.n_in, 32), dtype=mx.int8), mx.ones(16)
    facts = {"bits": 8, "integer": IntegerFacts()}
    problem = problem_of("forward", relation, 32, 16, "float16", 1, **facts)
    problem = replace(problem, edges=relation.n_edges)
    ran, device = set(), devices.current()
    for route in (r.name for r in selection.candidates(problem, device)):
        choice = routes.select(problem, device=device, only=route)
        with routes.only(f"forward={route}"):
            names.clear()
            mx.eval(ml.integer_conv(x, w, relation, scale=scale))
        assert set(names) == {choice.view} - {"none"}, (route, device.name)
        ran.add((route, "forward"))
    return ran


def check_all(names):
    submanifold = pair(KINDS[0], n=150)[0]
    ran = check(names, submanifold, 16, 16)
    ran |= check(names, submanifold, 32, 64, "float32")
    ran |= check(names, submanifold, 64, 64, bits=4)
    ran |= check(names, submanifold, 8, 8, groups=8)
    ran |= check(names, multi_edges()[0], 8, 12)
    ran |= check_int8(names, submanifold)
    return ran | check(names, multi_edges()[0], 32, 12, bits=8)


def test_on_this_device(read):
    ran = check_all(read)
    backend = devices.current().backend
    for route in routes.TABLE:
        needs = {need.__name__ for need in route.needs}
        if needs & {"neural_accelerators", "pointwise_kernel"}:
            continue
        planned = {(route.name, p) for p in route.passes if route.planner(backend, p)}
        assert planned <= ran


def test_pointwise(read):
    coords = pair(KINDS[0], n=50)[0].in_coords
    manager = ml.CoordinateManager()
    relation = manager.submanifold_kernel_relation(
        manager.insert(coords), kernel_size=1
    )
    for bits in (None, 8):
        ran = check(read, relation, 32, 8, "float32", bits=bits)
        assert {route for route, _ in ran} > {"gather_gemm_scatter"}


@pytest.mark.skipif(
    not devices.has_extension(),
    reason="the CPU's extension builds the relations",
)
@pytest.mark.parametrize("chip", ("h200", "a100"))
def test_on_cuda(chip, read):
    ml.settings.note_change()
    with contextlib.ExitStack() as stack:
        stack.callback(ml.settings.note_change)
        stack.enter_context(recording(chip))
        check_all(read)
