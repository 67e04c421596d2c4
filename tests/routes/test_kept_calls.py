"""What a relation keeps for repeated calls: nothing that changes is missed."""

import gc
from weakref import ref

import cases
import mlx.core as mx
import numpy as np
import pytest
from planted import counting

import mlx_lattice as ml
from mlx_lattice import backends, devices, nn, ops
from mlx_lattice.routes import selection

COORDS = cases.geometry("surface", 3, 200, 0)
on_cpu = pytest.mark.skipif(
    devices.current().backend != devices.CPU or not devices.has_extension(),
    reason="names routes of the CPU's extension",
)


def scene(c_in=8, c_out=8, **options):
    """A tensor and a layer that was called on it twice."""
    x = ml.SparseTensor(mx.array(COORDS), mx.random.normal((len(COORDS), c_in)))
    layer = nn.SubmConv3d(c_in, c_out, 3, **options)
    for _ in range(2):
        mx.eval(layer(x).feats)
    return x, layer


def kernels(counts, x, layer) -> list[str]:
    """The kernels of a forward and backward pass."""
    counts.clear()
    mx.eval(mx.grad(lambda f: layer(x.replace(f)).feats.sum())(x.feats))
    return sorted(counts)


@on_cpu
def test_forced_routes_are_seen_at_once_and_left_at_once(monkeypatch):
    x, layer = scene()
    counts = counting(monkeypatch)
    usual = kernels(counts, x, layer)
    assert usual == ["blocked_gather_gemm"]
    with ml.routes.only("relation_traversal"):
        assert kernels(counts, x, layer) == ["relation_traversal"]
        with ml.routes.only("forward=gather_gemm_scatter"):
            names = ["gather_gemm_scatter", "relation_traversal"]
            assert kernels(counts, x, layer) == names
        assert kernels(counts, x, layer) == ["relation_traversal"]
    assert kernels(counts, x, layer) == usual


@on_cpu
def test_left_out_kernels_and_tuning_are_seen_at_once(monkeypatch, tmp_path):
    x, layer = scene()
    counts = counting(monkeypatch)
    with backends.portable_only():
        assert "blocked_gather_gemm" not in kernels(counts, x, layer)
    assert kernels(counts, x, layer) == ["blocked_gather_gemm"]
    recorded = []

    def record(*arguments):
        recorded.append(arguments)
        return ()

    monkeypatch.setattr(selection, "record", record)
    with ml.cache(tmp_path), ml.tune():
        kernels(counts, x, layer)
        assert len(recorded) == 3
        mx.eval(layer(x).feats)
        assert len(recorded) == 3  # once nothing is left to time the plan is kept


def test_waived_determinism_is_seen_at_once():
    x, layer = scene()
    seen = []
    for waived in (False, True, False):
        before = ml.settings.version()
        with ml.waive_determinism():
            assert ml.settings.version() != before
            if waived:
                layer(x)
                with ml.routes.launch.observe(seen.append):
                    layer(x)
        assert ml.settings.version() == before
    assert [each.problem.deterministic for each in seen] == [False]


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("bias", (False, True))
def test_nothing_is_held_in_a_circle(bias, packed):
    """A relation, and its arrays, end with the last that holds it: no collection."""
    x, layer = scene(32, 32, bias=bias)
    if packed:
        layer = layer.to_quantized()

    def run(x):
        def loss(f):
            return layer(x.replace(f)).feats.square().sum()

        mx.eval(mx.grad(loss)(x.feats), mx.jvp(loss, [x.feats], [x.feats]))

    gc.collect()
    gc.disable()
    try:
        run(x)
        manager, key = x.manager, x.key
        relation = manager.submanifold_kernel_relation(key, kernel_size=3)
        kept = [ref(each) for each in (relation, relation.T, manager)]
        assert relation.T.T is relation and relation.plans
        del x, manager, relation
        assert [each() for each in kept] == [None] * 3
    finally:
        gc.enable()


def test_a_backward_pass_outlives_its_relation():
    w = mx.random.normal((27, 4, 4))
    f = mx.random.normal((len(COORDS), 4))

    def run(feats):
        x = ml.SparseTensor(mx.array(COORDS), feats)  # ends with the call
        return ops.subm_conv3d(x, w).feats

    (y,), (dx,) = mx.vjp(run, [f], [mx.ones((len(COORDS), 4))])
    x, _ = scene(4, 4)
    relation = x.manager.submanifold_kernel_relation(x.key)
    expected = mx.vjp(lambda f: ml.conv(f, w, relation), [f], [mx.ones_like(y)])
    assert mx.array_equal(y, expected[0][0]) and mx.array_equal(dx, expected[1][0])
    second = mx.grad(lambda f: (mx.grad(lambda g: (run(g) ** 3).sum())(f)).sum())(f)
    assert second.shape == f.shape


def test_checks_are_made_for_every_new_shape_and_dtype():
    x, _ = scene()
    relation = x.manager.submanifold_kernel_relation(x.key)
    w, b = mx.ones((27, 8, 8)), mx.ones((8,))
    for _ in range(2):
        ml.conv(x.feats, w, relation, bias=b)
        with pytest.raises(ValueError, match="bias must have shape"):
            ml.conv(x.feats, w, relation, bias=b[:4])
        with pytest.raises(TypeError, match="the bias"):
            ml.conv(x.feats, w, relation, bias=b.astype(mx.float16))
        with pytest.raises(TypeError, match="the weight"):
            ml.conv(x.feats, w.astype(mx.float16), relation)
        with pytest.raises(ValueError, match="features of 8 channels"):
            ml.conv(x.feats, w, relation, groups=2)
        with pytest.raises(ValueError, match="with N ="):
            ml.conv(x.feats[1:], w, relation)
        with pytest.raises(TypeError, match="mx.array"):
            ml.conv(np.array(x.feats), w, relation)


def test_a_changed_layer_asks_again():
    x, layer = scene()
    wide = ops.subm_conv3d(x, layer.weight, layer.bias, dilation=2).feats
    layer.dilation = (2, 2, 2)
    assert mx.array_equal(layer(x).feats, wide)
    layer.dilation = 1
    assert not mx.array_equal(layer(x).feats, wide)
    layer.weight = mx.zeros_like(layer.weight)
    assert not layer(x).feats.any()
    layer.weight = mx.zeros((8, 5, 3, 3, 8))
    with pytest.raises(ValueError, match="spatial shape"):
        layer(x)
