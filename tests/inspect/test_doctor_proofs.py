"""doctor: which kernels it proves, what it finds, and by which reference."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from doctor_cases import (  # noqa: F401 (fixtures)
    PLENTY,
    each_place,
    nothing_kept,
    told,
)

from mlx_lattice import devices, routes
from mlx_lattice.backends import cpu_extension, kernel_sources
from mlx_lattice.inspect.doctor import clock, features, layers, proofs
from mlx_lattice.problem import FORWARD, PASSES
from mlx_lattice.routes import proof_results
from mlx_lattice.routes.plan import Plan


def multiplies_matrices(plan):
    files = plan.gpu.files if plan.gpu else ()
    texts = (kernel_sources.source("metal", f"{file}.metal") for file in files)
    return any("simdgroup_multiply" in text for text in texts)


def test_on_the_gpu_of_a_virtual_machine_no_kernel_multiplies_matrices():
    real = devices.profile("m1")
    virtual = replace(real, matrices=False)
    routes_of = {}
    for device in (real, virtual):
        found = [(p, p.route.plan(p.problem, device)) for p in proofs.points(device)]
        routes_of[device] = {p.route.name for p, y in found if multiplies_matrices(y)}
        for point, _ in found:
            choice = routes.select(point.problem, device=virtual)
            assert not multiplies_matrices(choice.plan)
            why = point.route.refusal(point.problem, virtual, forced=True) or ""
            assert device == real or not why
    assert routes_of[real] == {
        *("sorted_implicit_gemm", "device_weights_gemm", "dense_channel", "cout16"),
        *("quantized_sorted", "grouped_gemm"),
    }
    assert routes_of[virtual] == set()


def test_every_kernel_of_the_table_is_a_point():
    native = ("cpu",) if cpu_extension.usable() else ()
    for name in ("m1", "m5-max", "h200", "a100", *native):
        device = devices.profile(name)
        expected = {
            (route.name, pass_)
            for route in routes.TABLE
            for pass_ in route.passes
            if route.planner(device.backend, pass_)
        }
        found = proofs.points(device)
        seen = {(point.route.name, point.problem.pass_) for point in found}
        lacking = {e for e in expected - seen if device.backend != "cpu"}
        able = {
            (r, p)
            for r, p in lacking
            if not (r.endswith("tensor_ops") and not device.neural_accelerators)
        }
        # Its weight gradient wins over many rows only, but is forced on small ones.
        assert not able - {("sorted_implicit_gemm", "weight_grad")}, name
        assert {p.problem.dtype for p in found} == {"float32", "float16", "bfloat16"}
        assert {p.problem.layout for p in found} == {"mlx", "kernel_major"}


def test_points_have_every_tile_width_and_both_kinds_of_sums():
    device, seen = devices.profile("m5-max"), set()
    for point in proofs.points(device):
        with proofs.whole_tiles(point.whole):
            plan = point.route.plan(point.problem, device)
        template = dict(plan.gpu.template)
        if point.route.name == "sorted_implicit_gemm":
            facts = "T", "COLUMNS", "TRANSPOSED"
            out = template["OUT"] == mx.float32
            seen.add((*(template[f] for f in facts), plan.splits > 1, out))
    for dtype in (mx.float16, mx.bfloat16):
        for columns in (16, 32, 64, 128):
            for transposed in (False, True):
                assert (dtype, columns, transposed, True, True) in seen
                assert (dtype, columns, transposed, False, False) in seen


def test_packed_kernels_have_every_group_size_that_users_choose():
    native = ("cpu",) if cpu_extension.usable() else ()
    for name in ("m1", "m5-max", "h200", *native):
        found = proofs.points(devices.profile(name))
        packed = [p for p in found if p.problem.group_size]
        for route in {p.route.name for p in packed}:
            own = [p.problem for p in packed if p.route.name == route]
            for dtype in ("float32", "float16", "bfloat16"):
                for bits in {p.bits for p in own}:
                    some = {
                        p.group_size for p in own if (p.dtype, p.bits) == (dtype, bits)
                    }
                    # What unpacks integers once is the same for every dtype.
                    assert some in ({32, 64, 128}, set()), (name, route, dtype, bits)
        integers = {p.problem.group_size for p in packed if p.problem.integer}
        assert integers == {32, 64, 128}, name
        # Each takes a compilation, which the doctor's minutes are for.
        counts = [sum(p.problem.group_size == s for p in packed) for s in (64, 128)]
        assert counts[1] < 0.7 * counts[0], name


def test_alternating_points_begin_with_every_route():
    found = proofs.points(devices.profile("m5-max"))
    routes_ = {p.route.name for p in found}
    assert {p.route.name for p in found[:25]} == routes_


def test_kernels_are_proved(place):
    found = proofs.points(place)[: 25 if place.name == "metal-host" else None]
    done = list(proofs.proofs(place, told(found), clock.Budget(PLENTY)))
    assert proofs.summary(done)["wrong"] == 0 and len(done) == len(found) > 20
    assert [p for p in done if not p.good] == []
    assert any(p.error > 0 for p in done), "float64 is not what was compared with"


def a_point(pass_=FORWARD, dtype="float16"):
    device = devices.current()
    return next(
        p
        for p in proofs.points(device)
        if p.problem.pass_ == pass_
        and p.problem.dtype == dtype
        and not p.problem.pointwise
        and p.problem.groups == 1
    )


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(
    "plant",
    [
        lambda y: y.at[mx.array([3])].multiply(mx.array(0.0).astype(y.dtype)),
        lambda y: mx.concatenate([y[:, :1], y[:, 2:], y[:, 1:2]], axis=1),
        lambda y: y + mx.array(float("nan"), dtype=y.dtype),
        lambda y: mx.concatenate([y[1:], y[:1]]),
    ],
    ids=("a row is lost", "columns are moved", "NaN", "rows are moved"),
)
def test_a_wrong_kernel_is_found(plant, pass_, monkeypatch):
    point, called = a_point(pass_), Plan.__call__
    assert proofs.prove(point, devices.current()).good
    monkeypatch.setattr(
        Plan, "__call__", lambda plan, *given: plant(called(plan, *given))
    )
    proof = proofs.prove(point, devices.current())
    assert not proof.good and json.dumps(proof.as_dict(), allow_nan=False)


def test_a_kernel_that_does_not_compile_is_a_sentence(monkeypatch):
    def fail(plan, *given):
        raise RuntimeError("error in /Users/somebody/mlx/kernel.metal:3: no such type")

    monkeypatch.setattr(Plan, "__call__", fail)
    proof = proofs.prove(a_point(), devices.current())
    assert not proof.good and proof.error is None
    assert proof.note == "RuntimeError: error in <kernel.metal>:3: no such type"


def test_what_is_found_is_what_select_refuses(place, monkeypatch, tmp_path):
    """On a GPU, a matrix kernel that is wrong here is not taken here."""
    points = [p for p in proofs.points(place) if p.route.name == "grouped_gemm"]
    point = next((p for p in points if plan_of(p, place).proof), None)
    if point is None:
        pytest.skip("no kernel of this backend proves itself")
    monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path / "proofs"))
    monkeypatch.setenv("MLX_LATTICE_PROOF", "1")
    right, called = list(prove(point, place)), Plan.__call__
    assert right[0].good and not proof_results.current().refused
    monkeypatch.setattr(
        Plan, "__call__", lambda plan, *given: called(plan, *given) * 1.5
    )
    (wrong,) = prove(point, place)
    assert not wrong.good and wrong.note
    assert proof_results.current().refused.reason(plan_of(point, place).gpu)
    monkeypatch.setattr(Plan, "__call__", called)
    (again,) = prove(point, place)  # what is known does not count
    assert again.good and not proof_results.current().refused


def plan_of(point, device):
    with proofs.whole_tiles(point.whole):
        return point.route.plan(point.problem, device)


def prove(point, device):
    return proofs.proofs(device, told([point]), clock.Budget(PLENTY))


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("groups", (1, 4))
@pytest.mark.parametrize("kind", ("surface", "edges"))
@pytest.mark.parametrize("layout", ("mlx", "kernel_major"))
def test_the_reference_is_the_sum_over_edges(layout, kind, groups, pass_):
    p = proofs._problem(pass_, kind, (8, 12), "float32", groups=groups, layout=layout)
    relation = proofs.relation_of(kind)
    given = layers.operands(p, relation)
    with mx.stream(mx.cpu):
        found = proofs.by_edges(p, relation, *given[1:])
        mx.eval(found)
    assert found.dtype == mx.float64
    a, b = (np.array(v.astype(mx.float32)).astype(np.float64) for v in given[1:])
    if pass_ != "weight_grad" and layout == "mlx":
        b = b.transpose(1, 2, 0)
    y = np.zeros(found.shape if pass_ != "weight_grad" else (p.volume, 8 // groups, 12))
    inner, outer = 8 // groups, 12 // groups
    for i, o, k in np.array(relation.edges):
        for g in range(groups):
            x, z = slice(g * inner, (g + 1) * inner), slice(g * outer, (g + 1) * outer)
            if pass_ == "forward":
                y[o, z] += a[i, x] @ b[k, :, z]
            elif pass_ == "input_grad":
                y[i, x] += b[k, :, z] @ a[o, z]
            else:
                y[k, :, z] += np.outer(a[i, x], b[o, z])
    if pass_ == "weight_grad" and layout == "mlx":
        y = y.transpose(2, 0, 1)
    assert np.allclose(np.array(found), y, rtol=1e-12, atol=1e-9)


def test_relations_norms_and_pools_are_proved(place):
    done = list(features.proofs(clock.Budget(PLENTY)))
    assert len(done) == len(features.CHECKS) and all(p.good for p in done)


@pytest.mark.parametrize(
    "planted, text",
    [
        (lambda: [mx.array([1, 2])], None),
        (lambda: [mx.array([1])], "the result is (1,)"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_relation_is_found(planted, text):
    calls = iter((lambda: [mx.array([1, 3])], planted))
    proof = features._prove("x", "y", lambda: next(calls)())
    assert not proof.good
    assert text is None or text in proof.note
