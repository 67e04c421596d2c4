"""What kernels of int8 features are tried on, and what they must make of it."""

from __future__ import annotations

import mlx.core as mx

from .. import devices
from ..activations import SLOPE
from ..backends import mlx_integers
from ..dtypes import DTYPES
from ..integer_facts import IntegerFacts
from ..integer_weight import integer_weight
from ..problem import Problem
from ..relation import Relation
from .proof_values import drawn


def arrays(p: Problem) -> list:
    """Return features, the weight and what follows the sums, of all sizes."""
    x = 101 * drawn("x", (p.n_in, p.c_in)) + 13 * drawn("", (p.n_in, p.c_in))
    w = drawn("w", (p.volume, p.c_in // p.groups, p.c_out))
    w = integer_weight(
        w * 97 + drawn("rest", w.shape), bits=p.bits, group_size=p.group_size
    )
    line, of_rows = drawn("scale", (p.c_out,)), drawn("residual", (p.n_out, p.c_out))
    residual = (
        (50 * of_rows).astype(mx.int8)
        if p.integer.residual_int8
        else (5 * of_rows).astype(DTYPES[p.dtype])
    )
    made = {
        "scale": (1.5 + 0.5 * line) / 4096,
        "shift": 3 * drawn("shift", (p.c_out,)),
        "residual": residual,
        "residual_scale": mx.array([0.0371]),
        "out_inverse": mx.array([0.61]),
        "row_scales": 1.5 + 0.5 * drawn("rows", (p.n_in,)),
    }
    return [x.astype(mx.int8), w, *(made[name] for name in p.integer.there)]


def floor(p: Problem, relation: Relation, given: list) -> mx.array:
    """Return the result by the portable floor, as float32."""
    plan = mlx_integers.gather_gemm_scatter(p, devices.profile("cpu"))
    return plan(relation, *given).astype(mx.float32)


def most(facts: IntegerFacts, rounding: mx.array) -> mx.array | float:
    """Return by how much results may differ: not at all where nothing is approximate.

    Functions other than slopes every backend computes in its own way.

    Args:
        facts: what follows the sums.
        rounding: what a rounding of the result may change.
    """
    if facts.act.kind == SLOPE:
        return 0.0
    return 1.0 if facts.writes_int8 else rounding
