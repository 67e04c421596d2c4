"""CUDA's depthwise kernels, emulated on the CPU, in each pass against the oracle."""

import cases
import pytest
import reference as ref
from conftest import bits
from contractions import Point, work
from cuda_emulation import emulated
from planned import plan_of

from mlx_lattice import devices
from mlx_lattice.backends.cuda import thresholds as cuda_thresholds
from mlx_lattice.problem import FORWARD, INPUT_GRAD, LAYOUTS, MLX_LAYOUT, PASSES
from mlx_lattice.problem import WEIGHT_GRAD as WEIGHTS

pytestmark = emulated
H200 = devices.profile("h200")
# Lanes of a row: 4 that are not all used, 4, 8, and 32 of several tiles; one channel a
# lane, odd channels and a multiplier.
SHAPES = (16, 16), (32, 32), (56, 56), (264, 264), (5, 5), (70, 70), (3, 6)
SCENES = (
    "surface",
    "even",
    "wide",
    "forward",
    "transposed",
    "one",
    "129_rows",
    "submanifold",  # negative coordinates
    "empty",
    "no_outputs",
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pass_", PASSES)
def test_each_pass(emulator, pass_, shape):
    turn = SHAPES.index(shape)
    for at, name in [*enumerate(SCENES)][turn % 2 :: 2]:
        facts = {"bias": pass_ == FORWARD, "moved": "x w dy bias 1" * (at % 2)}
        point = Point(name, (*shape, shape[0]), cases.DTYPES[(at + turn) % 3], **facts)
        given, layout = work(point, pass_), LAYOUTS[at % 2]
        x = given.dy if pass_ == INPUT_GRAD else given.x
        w = given.dy if pass_ == WEIGHTS else given.w
        if layout == MLX_LAYOUT and pass_ != WEIGHTS:
            w = w.transpose(2, 0, 1)
        relation = given.relation.T if pass_ == INPUT_GRAD else given.relation
        of = pass_, given.relation, x, w, shape[0]
        plan = plan_of("depthwise", *of, device=H200, layout=layout)
        y = plan(relation, x, w, given.bias)
        if pass_ == WEIGHTS and layout == MLX_LAYOUT:
            y = y.transpose(1, 2, 0)
        ref.assert_close(y, given.wanted, point.dtype, f"{name} {plan}")
    assert any("depthwise" in name for name in emulator.launches)


@pytest.mark.parametrize("stages", (1, 100))
def test_splits_of_the_edges(emulator, monkeypatch, stages):
    """Several offsets in a split, several splits in an offset."""
    monkeypatch.setitem(cuda_thresholds.DEPTHWISE_GRAD, "stages", stages)
    point = Point("many", (32, 32, 32), "float16")
    given = work(point, WEIGHTS)
    of = WEIGHTS, given.relation, given.x, given.dy, 32
    plan = plan_of("depthwise", *of, device=H200)
    assert plan.splits > 200 if stages == 1 else plan.splits < 20
    once, again = (plan(given.relation, given.x, given.dy) for _ in range(2))
    ref.assert_close(once, given.wanted, "float16")
    assert bits(once) == bits(again)
