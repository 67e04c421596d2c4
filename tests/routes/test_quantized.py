"""Packed weights in contractions: every relation and route, gradients, inspection."""

import contextlib

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, build, mappable, multi_edges, pair
from packings import exact, feats, packed, unpacked

import mlx_lattice as ml
from mlx_lattice import backends, devices, ops, registry

POINTWISE = cases.Case("submanifold", 3, 1)
ROUTES = ("quantized_sorted", "quantized_traversal", "gather_gemm_scatter")


@pytest.fixture(params=("native", "portable"))
def kernels(request):
    """Run a test with compiled kernels, where there are any, and without."""
    portable = request.param == "portable"
    if not portable and registry.serving() == registry.MLX:
        pytest.skip("no compiled kernels here")
    with backends.portable_only() if portable else contextlib.nullcontext():
        yield request.param


def runs(route: str) -> bool:
    """Whether something runs a route on this device."""
    return ml.routes.named(route).code(devices.current().backend, "forward") is not None


def check(relation, expected, q, groups=1, dtype="float32") -> None:
    """Forward with a bias, and the features' gradient, against the oracle."""
    c_in, c_out = q.in_channels * groups, q.shape[2]
    x = feats(relation.n_in, c_in, dtype)
    dy = feats(relation.n_out, c_out, dtype, 1)
    bias = feats(1, c_out, dtype, 2)[0]

    def forward(x):
        return ops.sparse_conv(x, q, relation, bias, groups=groups)

    (y,), (dx,) = mx.vjp(forward, [x], [dy])
    w = unpacked(q)
    assert y.dtype == dx.dtype == x.dtype
    wanted = ref.conv(exact(x), w, expected, exact(bias), groups=groups)
    ref.assert_close(y, wanted, dtype, "y")
    wanted = ref.input_grad(exact(dy), w, expected, groups=groups)
    ref.assert_close(dx, wanted, dtype, "dx")


# Convolutions


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", (*KINDS, POINTWISE), ids=str)
def test_every_kind(case, dtype, kernels):
    relation, expected = pair(case)
    for c_in, size in ((20, 32), (64, 64)):
        check(
            relation,
            expected,
            packed(relation.volume, c_in, 10, 4, size, dtype),
            dtype=dtype,
        )


@pytest.mark.parametrize("groups", (1, 2))
def test_edges_that_share_a_row_and_offset(groups, kernels):
    relation, expected = multi_edges(1)
    check(relation, expected, packed(5, 6, 4), groups)


@pytest.mark.parametrize("d", (1, 2, 4))
def test_other_dimensions_by_ops(d, kernels):
    coords = mx.array(cases.geometry("negative", d, 30))
    x = ml.SparseTensor(coords, feats(len(coords), 20))
    w = mx.array(cases.weights(2**d, 20, 6))
    w = w.transpose(2, 0, 1).reshape(6, *(2,) * d, 20)
    q = ml.quantize_weight(w, bits=8, group_size=32, layout="module")
    step = np.array([1, *(2,) * d])
    coarse = np.unique(np.array(coords) // step, axis=0)[::-1]
    for name, arguments in (
        ("subm_conv", {}),
        ("conv", {"stride": 2}),
        ("conv", {"stride": 2, "coordinates": mx.array(coarse.astype(np.int32))}),
        ("generative_conv_transpose", {}),
    ):
        function = getattr(ops, f"{name}{d}d")
        y = function(x, q, kernel_size=2, **arguments)
        z = function(x, ml.dequantize_weight(q), kernel_size=2, **arguments)
        assert y.key == z.key
        ref.assert_close(y.feats, np.array(z.feats, np.float64))


# Derivatives


def test_the_error_of_packing_is_bounded(kernels):
    relation, _ = pair(KINDS[0], n=200)
    x, w = feats(relation.n_in, 64), mx.array(cases.weights(27, 64, 16))
    y = ml.conv(x, w, relation)
    for bits, most in ((4, 0.12), (8, 0.01)):
        z = ml.conv(x, ml.quantize_weight(w, bits=bits), relation)
        assert mx.linalg.norm(y - z).item() < most * mx.linalg.norm(y).item()


def test_derivatives_of_features_to_third_order(kernels):
    relation, _ = pair(KINDS[2], n=12)
    q, x = packed(8, 20, 6), feats(relation.n_in, 20)
    dense = q.dense()

    def chain(w, order):
        def f(x):
            return (ml.conv(x, w, relation) ** 4).sum() / 100

        for _ in range(order):
            f = (lambda g: lambda x: (mx.grad(g)(x) ** 2).sum())(f)
        return mx.grad(f)(x)

    for order in range(3):
        wanted = np.array(chain(dense, order), np.float64)
        error = np.linalg.norm(np.array(chain(q, order)) - wanted)
        assert error < 1e-5 * np.linalg.norm(wanted)
    t = feats(relation.n_in, 20, seed=3)
    forward = lambda x: ml.conv(x, q, relation)  # noqa: E731
    (_,), (dy,) = mx.jvp(forward, [x], [t])
    ref.assert_close(dy, np.array(forward(t), np.float64))
    with mappable():
        both = mx.vmap(forward)(mx.stack([x, t]))
        assert mx.array_equal(both, mx.stack([forward(x), forward(t)])).item()
    ref.assert_close(mx.compile(forward)(x), np.array(forward(x), np.float64))


@pytest.mark.parametrize("part", ("scales", "biases"))
def test_a_packed_weight_has_no_gradient(part):
    relation, _ = pair(KINDS[0])
    q, x = packed(27, 20, 6), feats(relation.n_in, 20)

    def forward(a):
        parts = {"weight": q.weight, "scales": q.scales, "biases": q.biases}
        return ml.conv(x, q.holding(*{**parts, part: a}.values()), relation).sum()

    at = getattr(q, part)
    for derive in (
        lambda: mx.grad(forward)(at),
        lambda: mx.jvp(forward, [at], [at]),
    ):
        with pytest.raises(ValueError, match="a packed weight has no gradient"):
            derive()


# Inspection


def test_explain_trace_verify_and_tune_see_packed_weights(tmp_path):
    coords = mx.array(cases.geometry("surface", 3, 80))
    x = ml.SparseTensor(coords, feats(len(coords), 64))
    q = packed(27, 64, 16, 4, 64)
    e = ml.explain(x, q)
    assert e.problem.bits == 4 and e.problem.group_size == 64
    assert f"{e.choice}" in str(e) and "int4 weight" in str(e)
    with ml.trace() as t, ml.verify():
        y = ops.subm_conv3d(x, q)
        mx.grad(lambda f: ops.subm_conv3d(x.replace(f), q).feats.sum())(x.feats)
    passes = [r.problem.pass_ for r in t]
    assert passes == ["forward", "forward", "input_grad"]
    assert all(r.problem.bits == 4 for r in t)
    assert t.records[0].choice == e.choice
    with ml.cache(tmp_path), ml.tune():
        z = ops.subm_conv3d(x, q)
        measured = ml.explain(x, q).choice.measured
    ref.assert_close(z.feats, np.array(y.feats, np.float64))
    able = set(filter(runs, ROUTES))
    assert set(dict(measured)) == (able if len(able) > 1 else set())
    assert None not in dict(measured).values()


# Mistakes


def test_nothing_packed_is_kept():
    """The nearest peer caches packings by identity and computes with old weights."""
    relation, expected = pair(KINDS[0])
    q, x = packed(27, 20, 6), feats(relation.n_in, 20)
    mx.eval(ml.conv(x, q, relation))
    q.scales[:] = 2 * q.scales
    q.biases[:] = 2 * q.biases
    check(relation, expected, q)
    y = ml.conv(x, q, relation)
    q.weight[:] = mx.zeros_like(q.weight)
    check(relation, expected, q)
    assert not mx.array_equal(y, ml.conv(x, q, relation)).item()


def test_weights_that_do_not_fit_the_call():
    coords = mx.array(cases.geometry("negative", 3, 30))
    x = ml.SparseTensor(coords, feats(len(coords), 20))
    q = packed(27, 20, 6)
    for weight, arguments, kind, text in (
        (q.astype(mx.float16), {}, TypeError, "float32.* and .*float16"),
        (packed(27, 21, 6), {}, ValueError, "features of 20 channels do not fit"),
        (q, {"groups": 2}, ValueError, "with groups = 2"),
        (q, {"kernel_size": 2}, ValueError, "27 offsets, the kernel 8"),
        (
            ml.quantize_weight(mx.zeros((6, 3, 1, 9, 20))),
            {},
            ValueError,
            "not kernel_size",
        ),
        (q, {"bias": mx.zeros(5)}, ValueError, "bias must have shape"),
    ):
        with pytest.raises(kind, match=text):
            ops.subm_conv3d(x, weight, **arguments)
    relation = build(KINDS[0], coords)
    with pytest.raises(ml.RouteError, match="the weight is packed int4"):
        ml.explain(x, q, only="explicit_gemm")
    with pytest.raises(ml.RouteError, match="float32, not packed"):
        ml.explain(x, q.dense(), only="quantized_traversal")
    with pytest.raises(ValueError, match=r"\(K, C_in / groups, C_out\)"):
        ml.conv(x.feats, packed(8, 20, 6), relation)
