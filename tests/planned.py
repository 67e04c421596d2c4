"""A pass on a route by its plan, whatever the table prefers."""

from dataclasses import replace

import mlx.core as mx
from conftest import problem_of

from mlx_lattice import devices
from mlx_lattice.devices import Device
from mlx_lattice.problem import FORWARD, INPUT_GRAD, MLX_LAYOUT, WEIGHT_GRAD, Plan
from mlx_lattice.quantized import QuantizedWeight
from mlx_lattice.relation import Relation
from mlx_lattice.routes import launch, named
from mlx_lattice.settings import requested_precision


def plan_of(
    name: str,
    pass_: str,
    relation: Relation,
    x: mx.array,
    w: mx.array | QuantizedWeight,
    groups: int = 1,
    device: Device | None = None,
    **facts,
) -> Plan:
    """The plan of a pass.

    Args:
        name: the route.
        pass_: the pass.
        relation: the layer's, untransposed.
        x: features; of an input gradient, the cotangent.
        w: the weight, or the cotangent of a weight gradient.
        groups: of channels.
        device: to plan for, by default the one that MLX runs on.
        facts: of the problem, in place of its own; the weight has their layout.
    """
    if pass_ == WEIGHT_GRAD:
        c_in, c_out = x.shape[1], w.shape[1]
    else:
        in_layout = facts.get("layout") == MLX_LAYOUT
        c_in, c_out = (w.shape[2], w.shape[0]) if in_layout else w.shape[1:]
        c_in *= groups
    packing = {}
    if isinstance(w, QuantizedWeight):
        packing = {"bits": w.bits, "group_size": w.group_size}
    dtype = str(x.dtype).rpartition(".")[2]
    problem = problem_of(pass_, relation, c_in, c_out, dtype, groups, **packing)
    problem = replace(problem, **facts)
    return named(name).plan(problem, device or devices.current())


def run(
    name: str,
    pass_: str,
    relation: Relation,
    x: mx.array,
    w: mx.array | QuantizedWeight,
    groups: int = 1,
    bias: mx.array | None = None,
    **planning,
) -> mx.array:
    """Run a pass on a route; arguments as of ``plan_of``."""
    plan = plan_of(name, pass_, relation, x, w, groups, **planning)
    return plan(relation.T if pass_ == INPUT_GRAD else relation, x, w, bias)


def alone(
    pass_: str,
    relation: Relation,
    x: mx.array,
    w: mx.array | QuantizedWeight | None,
    dy: mx.array,
    groups: int = 1,
    bias: mx.array | None = None,
) -> mx.array:
    """Run one pass of a layer on the route that is chosen, and no other pass."""
    packing, weights = None, (w,)
    if isinstance(w, QuantizedWeight):
        packing, weights = w.packing, w.arrays
    sides = x.shape[1], dy.shape[1]
    layer = launch.Layer(*sides, x.dtype, groups, requested_precision(), packing)
    arrays = {
        FORWARD: (x, *weights, *([] if bias is None else [bias])),
        INPUT_GRAD: (dy, *weights),
        WEIGHT_GRAD: (x, dy),
    }
    return launch.run(launch.Request(pass_, layer), relation, *arrays[pass_])
