"""PyTorch tensors through MLX functions: conversion, autograd, autocast, devices."""

import copy
import gc
import threading
import weakref

import mlx.core as mx
import numpy as np
import pytest
from torch_scenes import close, gradients, picked, scene, spread, torch

import mlx_lattice as ml
from mlx_lattice.compat import bridge

EXTENTS = 7, 8, 6


def relation_of(indices) -> ml.Relation:
    manager = ml.CoordinateManager()
    return manager.submanifold_kernel_relation(
        manager.insert(mx.array(indices.numpy()))
    )


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16", "int32", "int64"))
def test_values_survive_both_ways(dtype):
    tensor = torch.arange(-3, 9).reshape(3, 4).to(getattr(torch, dtype))
    (array,) = bridge.to_mlx(tensor)
    assert array.dtype == getattr(mx, dtype) and array.shape == (3, 4)
    back = bridge.to_torch(array)
    assert back.dtype == tensor.dtype and torch.equal(back, tensor)


@pytest.mark.parametrize(
    "view",
    (
        lambda t: t.T,
        lambda t: t[:, ::2],
        lambda t: t[1:2].expand(4, 6),
        lambda t: t[:0],
        lambda t: t.requires_grad_()[2:],
        lambda t: t[0],
    ),
    ids=("transposed", "strided", "expanded", "empty", "with gradient", "row"),
)
def test_any_strides_are_read(view):
    tensor = view(torch.randn(4, 6))
    (array,) = bridge.to_mlx(tensor)
    np.testing.assert_array_equal(np.array(array), tensor.detach().numpy())


def test_an_empty_tensor_of_any_strides():
    tensor = torch.zeros(()).expand(0, 4)
    (array,) = bridge.to_mlx(tensor)
    assert array.astype(mx.float16).shape == (0, 4)
    assert array.astype(mx.float32).sum(axis=0).tolist() == [0] * 4
    (flags,) = bridge.to_mlx(torch.zeros(0, 2, dtype=torch.bool))
    assert flags.dtype == mx.bool_


def test_a_change_in_place_does_not_reach_the_other_library():
    tensor = torch.ones(3, 2)
    (array,) = bridge.to_mlx(tensor)
    copied = bridge.to_torch(array, copy=True)
    tensor.fill_(5)
    copied.fill_(7)
    assert array.tolist() == [[1, 1]] * 3
    result = bridge.call(lambda x: x * 2, tensor)
    result.add_(1)
    tensor.zero_()
    assert result.tolist() == [[11, 11]] * 3


def test_memory_is_freed_with_its_last_user():
    array = mx.ones((1000,))
    tensor = bridge.to_torch(array)
    del array
    gc.collect()
    assert tensor.sum() == 1000
    features, indices = scene()
    node = bridge.convolve(features, torch.randn(27, 5, 3), None, relation_of(indices))
    watch = weakref.ref(node.grad_fn)
    del node
    gc.collect()
    assert watch() is None


def test_float64_and_other_devices_raise():
    with pytest.raises(TypeError, match=r"float64.*\.float\(\)"):
        bridge.to_mlx(torch.ones(2, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="got meta"):
        bridge.to_mlx(torch.ones(2, device="meta"))
    with pytest.raises(RuntimeError, match=r"one device; got cpu and meta.*\.to\(dev"):
        bridge.call(lambda a, b: a + b, torch.ones(2), torch.ones(2, device="meta"))
    with pytest.raises(RuntimeError, match="one device; got cpu and meta"):
        bridge.convolve(
            torch.ones(2, 1), torch.ones(1, 1, 1, device="meta"), None, None
        )


def test_a_function_is_differentiated_by_its_own_rule_or_by_mlx():
    x = torch.randn(4, 3, requires_grad=True)
    w = torch.randn(3, 2, requires_grad=True)
    y = bridge.call(lambda x, w: mx.softmax(x @ w, axis=-1), x, w)
    expected = torch.softmax(x @ w, -1)
    close(y, expected)
    for got, other in zip(
        gradients(y, (x, w)), gradients(expected, (x, w)), strict=True
    ):
        close(got, other)
    seen = []

    def vjp(needed, arrays, cotangents):
        seen.append((needed, len(arrays), len(cotangents)))
        return [cotangents[0] * 3, None]

    y = bridge.call(lambda x, w: x * 2, x, w.detach(), vjp=vjp)
    assert gradients(y, (x,))[0].shape == x.shape
    assert seen == [((True, False), 2, 1)]


def test_several_results_some_of_them_integers():
    x = torch.randn(4, 3, requires_grad=True)
    order, most = bridge.call(lambda x: (mx.argmax(x, axis=1), mx.max(x, axis=1)), x)
    assert order.dtype == torch.uint32 or order.dtype == torch.int64
    assert not order.requires_grad and most.requires_grad
    most.sum().backward()
    close(x.grad, torch.nn.functional.one_hot(x.argmax(1), 3).float())


def test_arguments_may_be_none_and_integers():
    x = torch.randn(4, 3, requires_grad=True)
    y = bridge.call(lambda x, none, i: x[i], x, None, torch.tensor([2, 0]))
    close(y, x[[2, 0]])
    y.sum().backward()
    assert x.grad.sum(1).tolist() == [3, 0, 3, 0]


@pytest.mark.parametrize("layout", ("out first", "kernel major"))
@pytest.mark.parametrize(
    "dtype, tolerance", (("float32", 1e-5), ("float16", 2e-3), ("bfloat16", 1.6e-2))
)
def test_a_convolution_and_its_gradients(layout, dtype, tolerance):
    kind = getattr(torch, dtype)
    features, indices = scene(dtype=kind)
    weight = torch.randn(4, 3, 3, 3, 5).mul(0.2).to(kind).requires_grad_()
    bias = torch.randn(4).to(kind).requires_grad_()
    given = weight
    if layout == "kernel major":
        given = weight.reshape(4, 27, 5).permute(1, 2, 0)
    y = bridge.convolve(features, given, bias, relation_of(indices))
    assert y.dtype == kind
    inputs = [t.detach().float().requires_grad_() for t in (features, weight, bias)]
    grid = spread(inputs[0], indices, EXTENTS)
    dense = torch.nn.functional.conv3d(
        grid, inputs[1].permute(0, 4, 1, 2, 3), inputs[2], padding=1
    )
    expected = picked(dense, indices)
    close(y, expected, tolerance)
    found = gradients(y, (features, weight, bias))
    for got, other, like in zip(
        found, gradients(expected, inputs), (features, weight, bias), strict=True
    ):
        assert got.dtype == like.dtype
        close(got, other, tolerance)


def test_only_the_gradients_that_are_needed_are_computed():
    features, indices = scene()
    weight = torch.randn(4, 3, 3, 3, 5, requires_grad=True)
    relation = relation_of(indices)
    with ml.trace() as trace:
        y = bridge.convolve(features.detach(), weight, None, relation)
        y.sum().backward()
    assert [r.problem.pass_ for r in trace] == ["forward", "weight_grad"]
    with torch.no_grad(), ml.trace() as trace:
        assert not bridge.convolve(features, weight, None, relation).requires_grad
    assert len(trace) == 1


def test_a_second_derivative_raises_as_of_other_kernels():
    features, indices = scene()
    weight = torch.randn(27, 5, 3, requires_grad=True)
    y = bridge.convolve(features, weight, None, relation_of(indices))
    (first,) = torch.autograd.grad(y.square().sum(), features, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_a_change_of_a_saved_tensor_in_place_is_noticed():
    features, indices = scene()
    weight = torch.randn(27, 5, 3, requires_grad=True)
    y = bridge.convolve(features, weight, None, relation_of(indices))
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_casts_as_pytorch_does(dtype):
    features, indices = scene()
    weight = torch.randn(4, 3, 3, 3, 5, requires_grad=True)
    bias = torch.randn(4, requires_grad=True)
    relation = relation_of(indices)
    with torch.autocast("cpu", dtype=dtype):
        y = bridge.convolve(features, weight, bias, relation)
        half = bridge.convolve(features.to(dtype), weight, bias, relation)
    assert y.dtype == half.dtype == dtype and torch.equal(y, half)
    y.float().sum().backward()
    for each in (features, weight, bias):
        assert each.grad.dtype == torch.float32
    close(y, bridge.convolve(features, weight, bias, relation), 2e-2)
    with torch.autocast("cpu", enabled=False):
        assert bridge.convolve(features, weight, bias, relation).dtype == torch.float32


def test_mixed_dtypes_raise_with_both_names():
    features, indices = scene()
    weight = torch.randn(27, 5, 3, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"torch.float32.*weight is torch.float16"):
        bridge.convolve(features, weight, None, relation_of(indices))


def test_no_rows():
    _, indices = scene()
    features = torch.zeros(0, 5, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, 5, requires_grad=True)
    y = bridge.convolve(features, weight, torch.randn(4), relation_of(indices[:0]))
    assert y.shape == (0, 4)
    y.sum().backward()
    assert features.grad.shape == (0, 5) and weight.grad.abs().sum() == 0


def test_a_backward_pass_on_another_thread_has_the_settings_of_the_forward_pass():
    features, indices = scene()
    weight = torch.randn(27, 5, 3, requires_grad=True)
    relation = relation_of(indices)
    with ml.trace() as trace, ml.routes.only("gather_gemm_scatter"):
        y = bridge.convolve(features, weight, None, relation, layer="mine")
        thread = threading.Thread(target=y.sum().backward)
        thread.start()
        thread.join()
    assert {r.choice.route.name for r in trace} == {"gather_gemm_scatter"}
    assert [r.layer for r in trace] == ["mine"] * 3


def test_nets_on_two_threads():
    features, indices = scene()
    weight = torch.randn(27, 5, 3)
    expected = bridge.convolve(features, weight, None, relation_of(indices))
    results = [None, None]

    def run(i):
        results[i] = bridge.convolve(features, weight, None, relation_of(indices))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(each, expected) for each in results)


def test_blocks_of_this_library_hold_around_a_call():
    features, indices = scene()
    weight = torch.randn(27, 5, 3)
    relation = relation_of(indices)
    expected = bridge.convolve(features, weight, None, relation)
    with torch.no_grad(), ml.memory_limit("1GB"):
        assert torch.equal(bridge.convolve(features, weight, None, relation), expected)
    with ml.verify():
        bridge.convolve(features, weight, None, relation)
    with pytest.raises(ml.RouteError), ml.routes.only("depthwise"):
        bridge.convolve(features, weight, None, relation_of(indices))


def test_copies_of_features_do_not_share_memory():
    features, _ = scene()
    y = bridge.call(lambda x: x + 1, features)
    z = copy.deepcopy(y.detach())
    z.zero_()
    close(y, features + 1)
