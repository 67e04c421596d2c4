"""TensorOps' simdgroups of every height, step and width, and which are planned."""

import pytest
import reference as ref
from conftest import bits
from contractions import Point, work
from metal_checks import host
from places import MetalHost

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.backends.metal import thresholds as metal_thresholds
from mlx_lattice.backends.metal import tiles as metal_tiles

host.require()

METAL = MetalHost()


def tile(rows, channels, *, shared=10_000, volume=27, chip="m5-max"):
    device = devices.profile(chip)
    return metal_tiles.tensor_tile(rows, shared, channels, volume, device)


# (pass, route, height, (C_in, C_out), packing): steps of 64 and of 32 channels, whole
# columns and tails; the table's suite has the lowest simdgroups.
CASES = (
    ("forward", "tensor_ops", 64, (64, 96), None),
    ("forward", "tensor_ops", 32, (48, 48), None),
    ("input_grad", "tensor_ops", 64, (33, 70), None),
    ("input_grad", "tensor_ops", 32, (96, 64), None),
    ("forward", "quantized_tensor_ops", 64, (64, 33), (4, 32)),
    ("forward", "quantized_tensor_ops", 32, (70, 64), (8, 128)),
    ("weight_grad", "tensor_ops", 0, (40, 33), None),
    ("weight_grad", "tensor_ops", 0, (200, 64), None),
)


@pytest.mark.parametrize("pass_, route, height, shape, packing", CASES)
def test_every_height(pass_, route, height, shape, packing, request, monkeypatch):
    monkeypatch.setattr(metal_tiles, "TENSOR_HEIGHTS", (height or 64,))
    if height == 32:  # as if arrays were large
        monkeypatch.setitem(metal_thresholds.FAR_ELEMENTS, "*", 1)
    facts = {"packing": packing, "bias": pass_ == "forward"}
    given = Point("129_rows", (*shape, 1), "bfloat16", **facts)
    numbers, chip = work(given, pass_), request.node.nodeid
    first, *others = METAL.run(numbers.forced(route, pass_), True, chip)[""]
    ref.assert_close(first, numbers.wanted, given.dtype, route)
    assert all(bits(other) == bits(first) for other in others)


def test_heights_follow_how_many_rows_share_weights():
    assert tile(100_000, (64, 64)).height == 64
    assert tile(100_000, (64, 64), shared=40).height == 32
    assert tile(100_000, (64, 64), shared=20).height == 16
    # Few rows: lower simdgroups are more of them, so that sums are not split.
    assert tile(3840, (64, 64)).height == 16
    assert tile(3840, (64, 64), chip="m5").height == 64
    assert tile(3840, (128, 128)).height == 32
    for rows in (3840, 15_192):
        assert tile(rows, (128, 128)).splits == 1


@pytest.mark.parametrize("chip", ("m5", "m5-max"))
@pytest.mark.parametrize("rows", (1, 500, 4000, 100_000))
def test_tiles_fit_and_waste_little(rows, chip):
    for c_y in (1, 16, 32, 48, 64, 96, 128, 160, 192, 256, 1000):
        for c_x in (16, 48, 64, 256):
            found = tile(rows, (c_x, c_y), chip=chip)
            simdgroups = found.threads // 32
            assert simdgroups <= metal_tiles.TENSOR_SIMDGROUPS
            across = -(-c_y // found.columns)
            assert across * found.columns - c_y < 32 * across
            assert found.step == (64 if c_x % 64 == 0 and found.height < 64 else 32)


def test_the_plan_says_it():
    problem = ml.Problem.forward(c_in=64, c_out=96, n_in=9000, dtype="float16")
    plan = ml.select(problem, device="m5").plan
    assert "simdgroups of 64 x 32, steps of 32 channels" in str(plan)
    assert plan.tile == (64, 96) and plan.threadgroup == (96, 1, 1)
    given = dict(plan.gpu.template)
    assert (given["HEIGHT"], given["DEEP"], given["COLUMNS"]) == (64, 2, 96)
    assert not plan.gpu.memory
    assert metal_thresholds.SHARED_ROWS[64] > metal_thresholds.SHARED_ROWS[32]


def test_nothing_is_staged_and_nobody_waits():
    """But where simdgroups of a narrow weight gradient add their sums."""
    for pass_, shape, waits in (
        ("forward", (64, 96), False),
        ("weight_grad", (200, 64), False),
        ("weight_grad", (40, 33), True),
    ):
        numbers = work(Point("129_rows", (*shape, 1), "bfloat16"), pass_)
        built = numbers.relation
        problem = ml.Problem.of(pass_, built, *shape, "bfloat16")
        with METAL.inside("whole"):
            plan = ml.select(problem, only="tensor_ops").plan
            call = numbers.forced("tensor_ops", pass_)
            report = host.run(call)[1]
        launch = next(r for r in report.launches if plan.gpu.symbol in r.kernel)
        counts = launch.counts
        assert counts.matrix_flop > 0
        assert (counts.barriers > 0) == waits
        assert (counts.threadgroup_memory > 0) == waits
