"""Errors are sentences: what was expected, what came, what to do."""

import cases
import mlx.core as mx
import pytest
from conftest import KINDS, Numbers, pair
from refusals import refused, tensor

import mlx_lattice as ml
from mlx_lattice import ops


@pytest.mark.parametrize("dtype", ("int32", "float64", "complex64"))
def test_features_are_floating(dtype):
    feats = mx.zeros((2, 3)).astype(getattr(mx, dtype), stream=mx.cpu)
    name = dtype.rstrip("_")
    sentence = f"feats must be float32, float16 or bfloat16; got {name}.*astype"
    refused(TypeError, sentence, lambda: tensor().replace(feats))


@pytest.mark.parametrize(
    "run",
    (
        lambda x: ops.subm_conv3d(x, mx.ones((4, 3, 3, 3, 4))),
        lambda x: ops.max_pool3d(x, 2, 2),
        lambda x: ops.avg_pool3d(x, 2, 2),
        ops.global_sum_pool,
        lambda x: ops.group_norm(x, 2),
        ops.instance_norm,
        ops.unique_sum,
        lambda x: ops.channel_avg_pool(x, 2),
        lambda x: ops.interpolate(x, mx.zeros((1, 4))),
    ),
)
def test_flags_are_not_added_up(run):
    x = tensor()
    sentence = r"x has bool features, which are not added up; cast them with .astype"
    refused(TypeError, sentence, lambda: run(x.replace(x.feats > 0)))


@pytest.mark.parametrize("shape", ((2,), (3, 4), (2, 1, 4)), ids=str)
def test_features_have_a_row_each(shape):
    sentence = r"feats must have shape \(N, C\) with N = 2, the rows of coords; got \("
    refused(ValueError, sentence, lambda: tensor().replace(mx.zeros(shape)))


def test_both_dtypes_are_named():
    x, w = tensor(), mx.ones((4, 3, 3, 3, 4), dtype=mx.float16)
    sentence = r"features \(float32\) and the weight \(float16\) must have one dtype"
    refused(TypeError, sentence, lambda: ops.subm_conv3d(x, w))
    sentence = r"features \(float32\) and the bias \(float16\) must have one dtype"
    bias = mx.zeros((4,), dtype=mx.float16)
    w = w.astype(mx.float32)
    refused(TypeError, sentence, lambda: ops.subm_conv3d(x, w, bias))
    relation, _ = pair(KINDS[0])
    at = Numbers(relation, 4, 4)
    half = at.dy.astype(mx.bfloat16)
    sentence = r"features \(float32\) and dy \(bfloat16\) must have one dtype"
    refused(TypeError, sentence, lambda: ml.weight_grad(at.x, half, relation))


@pytest.mark.parametrize(
    ("shape", "arguments", "sentence"),
    (
        (
            (4, 3, 3, 3, 5),
            {},
            r"4 channels do not fit .* groups = 1: expected C_in = 5",
        ),
        ((4, 3, 3, 3, 4), {"groups": 2}, "groups = 2: expected C_in = 8"),
        ((5, 3, 3, 3, 2), {"groups": 2}, "expected C_in = 4 and C_out a multiple of 2"),
        (
            (4, 2, 2, 2, 4),
            {},
            r"spatial shape \(2, 2, 2\) is not kernel_size \(3, 3, 3\)",
        ),
        ((8, 4, 4), {}, "the weight has 8 offsets, the kernel 27; expected shape"),
        ((4, 4), {}, r"a weight must have shape \(C_out, spatial.*got \(4, 4\)"),
        (
            (4, 3, 3, 3, 4),
            {"bias": mx.zeros((3,))},
            r"bias must have shape \(4,\), one value an output channel; got \(3,\)",
        ),
    ),
    ids=("c-in", "groups-c-in", "groups-c-out", "kernel", "volume", "matrix", "bias"),
)
def test_weights_that_do_not_fit(shape, arguments, sentence):
    def call():
        return ops.subm_conv3d(tensor(), mx.ones(shape), **arguments)

    refused(ValueError, sentence, call)


def test_the_name_of_the_right_dimension_is_given():
    call = ops.subm_conv2d
    sentence = "subm_conv2d got a tensor with 3 spatial axes; use the 3d name"
    refused(ValueError, sentence, lambda: call(tensor(), mx.ones((4, 3, 3, 4))))


@pytest.mark.parametrize("groups", (3, 0, -1))
def test_groups_that_do_not_divide(groups):
    relation, _ = pair(KINDS[0])
    at = Numbers(relation, 4, 4)

    def forward():
        return ml.conv(at.x, at.w, relation, groups=groups)

    def backward():
        return ml.weight_grad(at.x, at.dy, relation, groups=groups)

    sentence = rf"groups (= {groups}|must be 1 or more; got {groups})"
    refused(ValueError, sentence, forward)
    refused(ValueError, sentence, backward)


def test_rows_that_are_not_the_relations():
    relation, _ = pair(KINDS[2])
    at = Numbers(relation, 4, 4)
    n, m = relation.n_in, relation.n_out
    sentence = rf"features must have shape \(N, C\) with N = {n}, .* got \({m}, 4\)"
    refused(ValueError, sentence, lambda: ml.conv(at.dy, at.w, relation))
    sentence = rf"dy must have shape \(N, C\) with N = {m}"
    refused(ValueError, sentence, lambda: ml.weight_grad(at.x, at.x, relation))
    sentence = r"\(K, C_in / groups, C_out\) with K = 8, .* got \(7, 4, 4\)"
    refused(ValueError, sentence, lambda: ml.conv(at.x, at.w[:7], relation))
    sentence = "features and weights must be float32, float16 or bfloat16; got int32"
    whole = at.x.astype(mx.int32)
    refused(TypeError, sentence, lambda: ml.conv(whole, at.w, relation))


def test_repeated_offsets():
    x = tensor()
    sentence = r"offsets must be distinct; \(0, 0, 1\) comes twice"

    def call():
        return ops.subm_conv3d(x, mx.ones((2, 4, 4)), offsets=[(0, 0, 1)] * 2)

    refused(ValueError, sentence, call)


@pytest.mark.parametrize(
    ("columns", "sentence"),
    (
        (([0, 1], [0], [0, 0]), "one entry an edge; got lengths 2, 1 and 2"),
        (([0, 2], [0, 1], [0, 0]), r"in_rows must lie in \[0, 2\); got 0 to 2"),
        (([0, 1], [-1, 1], [0, 0]), r"out_rows must lie in \[0, 2\); got -1 to 1"),
        (([0, 1], [0, 1], [0, 3]), r"offsets must lie in \[0, 3\); got 0 to 3"),
        (([0.5, 1], [0, 1], [0, 0]), "1-D integer arrays; got shape .* of .*float32"),
        (([[0, 1]], [0, 1], [0, 0]), r"1-D integer arrays; got shape \(1, 2\)"),
    ),
    ids=("lengths", "in", "out", "offset", "float", "matrix"),
)
def test_edges(columns, sentence):
    refused(ValueError, sentence, lambda: ml.Relation.from_edges(*columns, 2, 2, 3))


@pytest.mark.parametrize(
    ("text", "sentence"),
    (
        ("fastest", "no route is named 'fastest'; there are native_pointwise, "),
        ("weight_grad=vec4", "vec4 has no weight_grad pass; it has forward"),
        ("sideways=vec4", "vec4 has no 'sideways' pass"),
    ),
    ids=str,
)
def test_routes_that_do_not_exist(text, sentence):
    def call():
        with ml.routes.only(text):
            pass

    refused(ml.RouteError, sentence, call)


def test_a_forced_route_is_never_replaced_silently():
    relation, _ = pair(cases.Case("submanifold", 3, 3))
    at = Numbers(relation, 4, 4)
    sentence = (
        "route pointwise was forced but cannot run the forward of submanifold 3x3x3"
    )

    def call():
        with ml.routes.only("pointwise"):
            ml.conv(at.x, at.w, relation)

    refused(ml.RouteError, sentence, call)
