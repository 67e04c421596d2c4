"""Launches of every kernel of CUDA's contractions, by every route, pass and layout."""

import itertools
from dataclasses import replace
from unittest.mock import patch

import cases
import mlx.core as mx
import packings
from conftest import KINDS, Numbers, multi_edges, pair, problem_of
from packings import feats
from planned import plan_of, run

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.backends.gpu import norms as gpu_norms
from mlx_lattice.epilogue import ARRAYS, EpilogueFacts
from mlx_lattice.problem import LAYOUTS, MLX_LAYOUT
from mlx_lattice.routes import selection

SUBMANIFOLD, STRIDED = KINDS[0], KINDS[2]
# Channels that take each tile, and bytes that fill 16 or not.
CHANNELS = (
    (3, 5),
    (16, 24),
    (32, 64),
    (64, 64),
    (64, 128),
    (128, 264),
    (72, 40),
    (96, 48),
)


def contractions():
    """Every route and pass, with a bias and without, few edges a row and many."""
    relations = [pair(case, "surface", 300)[0] for case in (SUBMANIFOLD, STRIDED)]
    relations += [multi_edges()[0], pair(SUBMANIFOLD, "surface", 300)[0]]
    relations[-1].set_counted(1)  # few edges a row
    for dtype, relation in itertools.product(cases.DTYPES, relations):
        for c_in, c_out in CHANNELS:
            every(relation, c_in, c_out, 1, dtype)
            if relation.has_table:
                with_moments(relation, c_in, c_out, dtype)
            if dtype == "float32" and relation.has_table:
                every_tf32(relation, c_in, c_out)
        if relation.has_table:
            for c_in, c_out in CHANNELS[::2]:
                every_integer(relation, c_in, c_out, dtype)
        every(relation, 16, 16, 16, dtype)
        every_epilogue(relation, 64, 64, 1, dtype)
        every_epilogue(relation, 16, 16, 16, dtype)
        every_epilogue(relation, 64, 24, 1, dtype, 4, 32)
        every(relation, 6, 12, 6, dtype)
        every(relation, 8, 12, 2, dtype)
        for bits, size in ((4, 32), (8, 64)):
            for c_in, c_out, groups in ((64, 24, 1), (64, 136, 1), (64, 32, 2)):
                every_packed(relation, c_in, c_out, groups, bits, size, dtype)
    itself = pair(cases.Case("submanifold", 3, 1), "surface", 300)[0]
    for dtype, (c_in, c_out) in itertools.product(cases.DTYPES[1:], CHANNELS[3:]):
        every(itself, c_in, c_out, 1, dtype)
        with_moments(itself, c_in, c_out, dtype)
        every_epilogue(itself, c_in, c_out, 1, dtype)
    for size in (5, 9):  # more offsets than a word, than a list
        many = pair(cases.Case("submanifold", 3, size), "block", 60)[0]
        every(many, 8, 8, 1, "float16")


def able(pass_, relation, c_in, c_out, dtype, groups=1, **packing):
    """The routes that CUDA's kernels can run."""
    p = problem_of(pass_, relation, c_in, c_out, dtype, groups, **packing)
    for route in selection.candidates(p, devices.current()):
        if route.planner(devices.CUDA, pass_):
            yield route.name


def every(relation, c_in, c_out, groups, dtype):
    """Each float route both ways, and its weight gradient, in every layout."""
    n = Numbers(relation, c_in, c_out, groups, dtype)
    passes, stored = ("forward", "input_grad", "weight_grad"), n.w.transpose(2, 0, 1)
    for pass_, layout in itertools.product(passes, LAYOUTS):
        w = stored if layout == MLX_LAYOUT else n.w
        w = n.dy if pass_ == "weight_grad" else w
        x = n.dy if pass_ == "input_grad" else n.x
        c_y = c_in if pass_ == "input_grad" else c_out
        biases = (mx.zeros((c_y,), dtype=x.dtype), None)
        for name in able(pass_, relation, c_in, c_out, dtype, groups):
            for bias in biases[1:] if pass_ == "weight_grad" else biases:
                run(name, pass_, relation, x, w, groups, bias, layout=layout)


def every_epilogue(relation, c_in, c_out, groups, dtype, bits=None, size=None):
    """Each route with what follows its sums: all of it, and parts, in either dtype."""
    x, packing = feats(relation.n_in, c_in, dtype), {}
    w = mx.zeros((relation.volume, c_in // groups, c_out), dtype=x.dtype)
    if bits:
        shape = relation.volume, c_in // groups, c_out
        w = packings.packed(*shape, bits, size, dtype)
        packing = {"bits": bits, "group_size": size}
    parts = ARRAYS, ARRAYS[:2], ("mean", "var"), ()
    for name in able("forward", relation, c_in, c_out, dtype, groups, **packing):
        for there, kind in itertools.product(parts, {"float32", dtype}):
            facts = EpilogueFacts(there, "", "", 0.0, kind)
            of = {n: mx.zeros((c_out,), getattr(mx, facts.kind(n))) for n in there}
            if "residual" in of:
                of["residual"] = mx.zeros((relation.n_out, c_out), dtype=x.dtype)
            for activation, eps in (("relu", 1e-5), ("gelu", 1e-5), ("relu", 1e-3)):
                facts = facts._replace(activation=activation, eps=eps)
                plan = plan_of(name, "forward", relation, x, w, groups, epilogue=facts)
                assert plan.epilogue and plan.then is None
                plan(relation, x, w, *of.values())


def with_moments(relation, c_in, c_out, dtype):
    """Statistics of the rows: by tiles of whole sums, and where splits are added."""
    n, own = Numbers(relation, c_in, c_out, 1, dtype), devices.current()
    for device in (own, replace(own, cores=1)):
        given = "sorted_implicit_gemm", "forward", relation, n.x, n.w
        with patch.object(gpu_norms, "ONE_LAUNCH_NORM", 0):
            plan = plan_of(*given, device=device, moments=True)
        for bias in (None, mx.zeros((c_out,), dtype=n.x.dtype)):
            plan(relation, n.x, n.w, bias)


def every_tf32(relation, c_in, c_out):
    """The routes that have products in TF32."""
    n, facts = Numbers(relation, c_in, c_out, 1, "float32"), {"precision": "tf32"}
    run("grouped_gemm", "weight_grad", relation, n.x, n.dy, **facts)
    weights = zip(LAYOUTS, (n.w, n.w.transpose(2, 0, 1)), strict=True)
    given = itertools.product((("forward", n.x), ("input_grad", n.dy)), weights)
    for (pass_, x), (layout, w) in given:
        run("sorted_implicit_gemm", pass_, relation, x, w, layout=layout, **facts)


def every_packed(relation, c_in, c_out, groups, bits, size, dtype):
    """Each route of packed weights."""
    x = feats(relation.n_in, c_in, dtype)
    packed = packings.packed(relation.volume, c_in // groups, c_out, bits, size, dtype)
    packing = {"bits": bits, "group_size": size}
    for name in able("forward", relation, c_in, c_out, dtype, groups, **packing):
        for bias in (mx.zeros((c_out,), dtype=x.dtype), None):
            run(name, "forward", relation, x, packed, groups, bias)


def every_integer(relation, c_in, c_out, dtype):
    """Int8 features with what may follow, and weights of either kind."""
    kind, ones = getattr(mx, dtype), mx.ones((1,))
    x = mx.zeros((relation.n_in, c_in), dtype=mx.int8)
    w = mx.zeros((relation.volume, c_in, c_out))
    scale, shape = mx.ones((c_out,)), (relation.n_out, c_out)
    parts = (
        {},
        {"shift": scale, "activation": "relu", "out_inverse": ones},
        {"residual": mx.zeros(shape, dtype=kind)},
        {"residual": mx.zeros(shape, dtype=mx.int8), "residual_scale": ones},
    )
    for bits, after in zip((8, 8, 8, 4), parts, strict=True):
        weight = ml.integer_weight(w, bits=bits)
        ml.integer_conv(x, weight, relation, scale=scale, dtype=kind, **after)
