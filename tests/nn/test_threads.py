"""Threads share tensors and nets whose relations are not built yet."""

from contextvars import copy_context
from threading import Barrier, Thread

import cases
import mlx.core as mx
import numpy as np
import pytest
from emulated_cuda import EMULATED, place_of
from places import HERE, MlxOperations

import mlx_lattice as ml
from mlx_lattice import devices, nn, ops, registry
from mlx_lattice.sync import SharedViews

THREADS = 8
pytestmark = pytest.mark.skipif(
    mx.cuda.is_available(),
    reason="MLX 0.32.4 aborts if several threads evaluate on an NVIDIA GPU",
)

PLACES = [pytest.param(place, id=place.name) for place in HERE]


@pytest.fixture(params=[*PLACES, EMULATED])
def place(request):
    return place_of(request)


def in_threads(*calls):
    """The results of calls that begin at once, each in a thread, as NumPy arrays."""
    begin, results = Barrier(len(calls)), [None] * len(calls)

    def work(at, call):
        begin.wait()
        try:
            results[at] = np.array(call())
        except BaseException as error:  # of any kind: raised below
            results[at] = error

    threads = [
        Thread(target=copy_context().run, args=(work, at, call))
        for at, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def new_net():
    net = nn.Sequential(
        nn.SubmConv3d(4, 8, 3),
        nn.BatchNorm(8),
        nn.ReLU(),
        nn.Conv3d(8, 16, 2, stride=2),
        nn.SubmConv3d(16, 16, 3),
        nn.MaxPool3d(2),
        nn.ConvTranspose3d(16, 8, 2, stride=2),
    )
    net.eval()
    mx.eval(net.parameters())
    return net


def new_tensor(seed=1, rows=120):
    coords = mx.array(cases.geometry("batches", 3, rows))
    key = mx.random.key(seed)
    x = ml.SparseTensor(coords, mx.random.normal((len(coords), 4), key=key))
    mx.eval(x.arrays())
    return x


def gradient(net, x):
    return mx.grad(lambda f: (net(x.replace(f)).feats ** 2).sum())(x.feats)


def portable(call):
    """What MLX's own operations give, in one thread."""
    with MlxOperations().inside():
        return np.array(call())


def assert_all(results, wanted):
    for result in results:
        assert np.array_equal(result, results[0])
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


CALLS = {"forward": lambda net, x: net(x).feats, "gradient": gradient}


@pytest.mark.parametrize("place", PLACES)  # CUDA's matrix kernels are not emulated
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_threads_share_a_new_tensor(place, call):
    if call is gradient and devices.extension is None:
        pytest.skip("MLX keeps the graphs of views that a gradient builds")
    net = new_net()
    wanted = portable(lambda: call(net, new_tensor()))
    with place.inside():
        x = new_tensor()
        results = in_threads(*[lambda: call(net, x)] * THREADS)
    assert_all(results, wanted)


@pytest.mark.parametrize("place", PLACES)
def test_threads_share_a_new_net(place):
    net, seeds = new_net(), range(THREADS)
    wanted = [portable(lambda s=s: net(new_tensor(s)).feats) for s in seeds]
    with place.inside():
        net = nn.Sequential(*net.layers)
        tensors = [new_tensor(seed) for seed in seeds]
        results = in_threads(*[lambda x=x: net(x).feats for x in tensors])
    for result, right in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-4)


def all_views(x):
    """Views of three relations of a tensor's rows, in one line."""
    manager = x.manager
    coarse = manager.kernel_relation(x.key, kernel_size=2, stride=2)
    parts = []
    for relation in (
        manager.submanifold_kernel_relation(x.key),
        coarse,
        manager.transposed_kernel_relation(coarse.out_key),
        manager.kernel_relation(x.key, stride=2, support="reach"),
    ):
        registry.geometry().start(relation)  # CUDA builds its tiles
        parts += [
            relation.out_in,
            relation.edges,
            relation.T.edges,
            relation.out_coords,
        ]
    return mx.concatenate([part.flatten() for part in parts])


def test_threads_share_new_views(place):
    wanted = portable(lambda: all_views(new_tensor()))
    with place.inside():
        x = new_tensor()
        results = in_threads(*[lambda: all_views(x)] * THREADS)
    for result in results:
        assert np.array_equal(result, wanted)


KEPT = {
    "slots": lambda x: ops.channel_to_space(ops.space_to_channel(x), coordinates=x),
    "blend": lambda x: nn.Upsample3d(2, "linear")(nn.AvgPool3d(2)(x)),
    "elements": lambda x: ops.batch(ops.unbatch(x)),
    "blocks": lambda x: ops.gate(x, ops.global_max_pool(x)),
    "segments": lambda x: nn.GroupNorm(1, 4)(x),
    "joined": lambda x: ops.union(x, ops.prune(x, x.coords[:, 1] > 3)),
    "groups": lambda x: x.replace(
        ops.window_attention(*[x.feats[:, None]] * 3, x, 3)[:, 0]
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_threads_share_what_is_kept_of_coordinates(place, name):
    call = KEPT[name]
    wanted = portable(lambda: call(new_tensor()).feats)
    with place.inside():
        x = new_tensor()
        results = in_threads(*[lambda: call(x).feats] * THREADS)
    assert_all(results, wanted)


@pytest.mark.parametrize("name", KEPT)
def test_what_one_thread_prepared_or_called_another_differentiates(name):
    net, (x, y) = KEPT[name], (new_tensor(), new_tensor())
    in_threads(lambda: ml.prepare(net, x) and x.feats, lambda: net(y).feats)
    mx.eval(gradient(net, x), gradient(net, y))
    assert_all([np.array(net(x).feats)], portable(lambda: net(new_tensor()).feats))


def test_views_that_cannot_be_computed_are_built_again(monkeypatch):
    views = SharedViews()
    with monkeypatch.context() as patched:
        patched.setattr(mx, "eval", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            views.build("view", lambda: mx.arange(4) + 1)
    assert not views and not views.unpublished
    assert views.build("view", lambda: mx.arange(4) + 2).tolist() == [2, 3, 4, 5]
