"""What a modelled launch of matrix tiles should take on a chip.

The model of ``apple_model.py``, with the operations and the bytes that ``tile_model``
counts: multiplying, memory, threadgroup memory, the caches, integer arithmetic,
barriers, and simdgroups by the estimate of registers.
"""

from dataclasses import replace
from math import prod

import apple_model
import mlx.core as mx
import tensor_model
import tile_model
from shells import LETTERS
from tile_model import Grad
from tile_steps import conv_steps, grad_steps

import mlx_lattice as ml
from mlx_lattice import devices, routes


def on_chip(model):
    """The model of a pass by the route of the chip that is planned for."""
    return tensor_model.of(model) if tile_model.chip().neural_accelerators else model


def steps_of(model, c_x, c_y):
    """The Steps of a pass."""
    if isinstance(model, (tensor_model.TensorConv, tensor_model.TensorGrad)):
        return model.steps(c_x, c_y)
    return (grad_steps if isinstance(model, Grad) else conv_steps)(model, c_x, c_y)


def plan_of(model, c_x, c_y, device, route=None):
    """The Plan of a pass of the whole scene; a Conv is of the pass's own relation."""
    pass_, relation = "weight_grad", model.relation
    if not isinstance(model, Grad):
        pass_ = "input_grad" if model.transposed else "forward"
        relation = relation.T if model.transposed else relation
        route = route or "sorted_implicit_gemm"
    c_in, c_out = (c_y, c_x) if pass_ == "input_grad" else (c_x, c_y)
    problem = ml.Problem.of(pass_, relation, c_in, c_out, mx.float16)
    sizes = {name: getattr(problem, name) for name in ("n_in", "n_out", "edges")}
    sizes = {name: n and int(model.scale * n) for name, n in sizes.items()}
    if device.neural_accelerators and route != "dense_channel":
        route = "tensor_ops"
    chosen = routes.named(route or "grouped_gemm")
    return chosen.plan(replace(problem, **sizes), device)


def bounded(model, c_x, c_y, chips, route=None):
    """What a pass should take on each chip, by every bound; its steps' ratios.

    As ``shells.py`` predicts, but with the bytes that pass through the cache counted.
    """
    rows = {}
    for name in chips:
        device = devices.profile(name)
        with tile_model.on(device):
            own = model if route else on_chip(model)
            counts = own.counts(c_x, c_y)
            steps = {} if route else steps_of(own, c_x, c_y)
        plan, tensor = plan_of(own, c_x, c_y, device, route), device.neural_accelerators
        partials = 0
        if plan.partials and not isinstance(own, Grad):
            partials = 8 * prod(plan.partials)  # float32, written and read once
        found = apple_model.predict(
            plan,
            device,
            done=int(counts.coarse if tensor else counts.done) // 2,
            moved=int(counts.compulsory),
            cached=counts.moved + counts.copied + partials,
        )
        rows[name] = (steps.facts(tensor) if steps else {}) | found.as_dict()
    return rows


def span(found):
    """A predicted time and the letter of what bounds it."""
    ends = (apple_model.number(found[f"{end}_ms"]) for end in ("fast", "slow"))
    return f"{' to '.join(ends)} {LETTERS[found['bound']]}"
