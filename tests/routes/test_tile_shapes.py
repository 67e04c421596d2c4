"""Shapes of simdgroup matrices by chip: what they plan, and that all sum the same."""

from dataclasses import replace

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
from mlx_lattice.problem import FORWARD, INPUT_GRAD, LAYOUTS
from mlx_lattice.routes import named, needs

host.require()

METAL = MetalHost()
NAME = "sorted_implicit_gemm"
MACS = [d for d in devices.PROFILES.values() if d.backend == devices.METAL]


def plan(chip, rows=3840, channels=128, route=NAME, edges=None, **facts):
    facts = {"dtype": "float16", "c_in": channels, "c_out": channels} | facts
    edges = edges or 13 * rows
    p = ml.Problem.forward(n_in=rows, edges=edges, **facts)
    return named(route).plan(p, devices.profile(chip))


def template(made):
    return dict(made.gpu.template)


@pytest.mark.parametrize("route", (NAME, "quantized_sorted", "dense_channel", "cout16"))
@pytest.mark.parametrize("chip", ("m1", "m1-ultra", "m2-pro", "m3", "m4-max"))
def test_bfloat_is_multiplied_as_float_where_chips_have_none(chip, route):
    packing = {"bits": 4, "group_size": 32} if route == "quantized_sorted" else {}
    packing |= {"channels": 16} if route in ("dense_channel", "cout16") else {}
    made = plan(chip, dtype="bfloat16", route=route, **packing)
    in_float = chip[:2] in ("m1", "m2")
    assert str(template(made)["M"]).endswith("float32" if in_float else "bfloat16")
    said = "products bfloat16 as float32"
    assert (said in str(made)) == in_float == bool(made.products)
    for dtype in ("float16", "float32"):
        other = plan(chip, dtype=dtype, route=route, **packing)
        assert not other.products and str(template(other)["M"]).endswith(dtype)


@pytest.mark.parametrize("chip", MACS, ids=lambda chip: chip.name)
def test_shapes_cover_a_tile(chip):
    for layout in LAYOUTS:
        for columns in (16, 32, 64, 128):
            for dtype in ("float16", "bfloat16", "float32"):
                facts = {"c_in": 64, "c_out": columns, "dtype": dtype}
                p = ml.Problem.forward(n_in=9000, layout=layout, **facts)
                made = template(named(NAME).plan(p, chip))
                rows = 64 * columns // (4 * made["SIDE"])
                assert rows in (16, 32, 64) and columns % made["SIDE"] == 0
                assert made["BYTES"] in (32, 64)


def test_splits_follow_the_chips_own_cores():
    """60 threadgroups of 128 columns fill 8 cores; 40 they do not."""
    m1 = plan("m1")
    assert m1.splits == 1 and m1.partials == () and not m1.scratch
    by_chip = [plan(chip).splits for chip in ("m1", "m1-pro", "m1-max", "m1-ultra")]
    assert by_chip == sorted(by_chip) and by_chip[1] == 1 < by_chip[2] < by_chip[3]
    assert plan("m1", rows=400).splits > 1, "too few rows for 8 cores"
    # What partial sums take is weighed: a launch of microseconds is not cut.
    assert plan("m3-max", rows=100, channels=16, edges=300).splits == 1


@pytest.mark.parametrize("chip", MACS, ids=lambda chip: chip.name)
def test_rows_from_which_tiles_pay_follow_the_cores(chip):
    def pays(device: devices.Device) -> int:
        return needs.least_rows(NAME, FORWARD, (16, 16), device)

    least = 24 * chip.cores
    assert pays(chip) == least
    unknown = replace(chip, name="apple-x", family="x")
    assert pays(unknown) == 24 * 8, "the fewest cores"
    variant = replace(chip, name="another", family=chip.family)
    assert pays(variant) == 24 * devices.profile(chip.family).cores
    facts = {"c_in": 16, "c_out": 16, "dtype": "float32"}
    for rows, takes in ((least, True), (least - 1, False)):
        chosen = ml.select(ml.Problem.forward(n_in=rows, **facts), device=chip)
        assert (chosen.route.name == NAME) == takes


POINTS = (
    (Point("surface", (40, 64, 1), "bfloat16"), FORWARD),
    (Point("129_rows", (64, 40, 1), "float16"), INPUT_GRAD),
    (Point("129_rows", (24, 128, 1), "bfloat16", layout="mlx"), FORWARD),
    (Point("surface", (40, 64, 1), "bfloat16", packing=(4, 32)), FORWARD),
)
# Of tiles of rows in their own order: features, weights along and across.
OWN_ORDER = (
    ("dense_channel", Point("surface", (32, 16, 1), "bfloat16"), FORWARD),
    ("dense_channel", Point("129_rows", (64, 32, 1), "bfloat16"), INPUT_GRAD),
    ("cout16", Point("129_rows", (24, 16, 1), "bfloat16", layout="mlx"), FORWARD),
)


@pytest.mark.parametrize("point, pass_", POINTS, ids=str)
def test_every_shape_gives_the_same_bits(point, pass_, monkeypatch):
    """Native matrices too: products of bfloat16 are exact in float."""
    given, results = work(point, pass_), []
    route = "quantized_sorted" if point.packing else NAME
    for chip in ("m1", "m3", "m4-max"):
        monkeypatch.setitem(metal_thresholds.FILLING, chip, 1)
        (y,) = METAL.run(given.forced(route, pass_), steady=False, chip=chip)[""]
        ref.assert_close(y, given.wanted, point.dtype, chip)
        results.append(bits(y))
    assert len(set(results)) == 1


@pytest.mark.parametrize("point", (POINTS[0][0], POINTS[-1][0]), ids=str)
def test_far_places_are_those_of_32_bits(point, monkeypatch):
    """Arrays of 2^32 elements have kernels of their own, which give the same."""
    route = "quantized_sorted" if point.packing else NAME
    given, results = work(point, FORWARD), []
    for least in (1 << 32, 1):
        monkeypatch.setitem(metal_thresholds.FAR_ELEMENTS, "*", least)
        made = named(route).plan(point.problem(FORWARD), devices.profile("m1"))
        assert template(made)["FAR"] == (least == 1)
        run, chip = given.forced(route, FORWARD), f"far from {least}"
        (y,) = METAL.run(run, steady=False, chip=chip)[""]
        ref.assert_close(y, given.wanted, point.dtype, str(least))
        results.append(bits(y))
    assert results[0] == results[1]


@pytest.mark.parametrize("route, point, pass_", OWN_ORDER, ids=str)
def test_rows_in_their_own_order_give_the_same_bits(route, point, pass_):
    given, results = work(point, pass_), []
    for chip in ("m1", "m3"):
        (y,) = METAL.run(given.forced(route, pass_), steady=False, chip=chip)[""]
        ref.assert_close(y, given.wanted, point.dtype, chip)
        results.append(bits(y))
    assert results[0] == results[1]


# TensorOps' simdgroups of every height, step and width, and which are planned.


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
