"""Shapes of simdgroup matrices by chip: what they plan, and that all sum the same."""

import pytest
import reference as ref
from conftest import bits
from contractions import Point, work
from metal_checks import host
from places import MetalHost

from mlx_lattice import devices
from mlx_lattice.backends.metal import tiles as metal_thresholds
from mlx_lattice.backends.metal import tiles as metal_tiles
from mlx_lattice.problem import FORWARD, INPUT_GRAD
from mlx_lattice.routes import named

host.require()

METAL = MetalHost()
NAME = "sorted_implicit_gemm"


def template(made):
    return dict(made.gpu.template)


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
