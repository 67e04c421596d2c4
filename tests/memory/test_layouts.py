"""How arrays lie after MLX's operations, and whose memory they have: as MLX says."""

import random
import sys
from dataclasses import replace

import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.backends import cpu_extension
from mlx_lattice.memory import flight
from mlx_lattice.memory.freed import Freed
from mlx_lattice.memory.graph import Graph
from mlx_lattice.memory.order import order
from mlx_lattice.memory.pace import Pace
from mlx_lattice.memory.schedule import Player, Stage, peak

pytestmark = pytest.mark.skipif(
    cpu_extension.extension is None, reason="reads MLX's graph by the extension"
)


def reshaped(x: mx.array) -> mx.array:
    return x.reshape(-1, 2) if x.size % 2 == 0 else x.reshape(-1)


def cut(x: mx.array) -> mx.array:
    return x[..., 1:] if x.shape and x.shape[-1] > 1 else x[None]


def stepped(x: mx.array) -> mx.array:
    return x[::2] if x.shape and x.shape[0] > 1 else x[None]


def parted(x: mx.array) -> mx.array:
    even = x.shape and x.shape[0] % 2 == 0 and x.shape[0]
    return mx.split(x, 2, axis=0)[1] if even else x.flatten()


def wider(x: mx.array) -> mx.array:
    return mx.broadcast_to(x, (3, *x.shape)) if x.size < 5000 else x.T


STEPS = {
    "reshape": reshaped,
    "transpose": lambda x: x.T,
    "cut": cut,
    "stepped": stepped,
    "split": parted,
    "broadcast": wider,
    "expand": lambda x: mx.expand_dims(x, (0,)),
    "squeeze": lambda x: mx.squeeze(x),
    "negative": lambda x: -x,
    "add": lambda x: x + 1,
    "twice": lambda x: x + x.astype(x.dtype),
    "half": lambda x: x.astype(mx.float16),
    "single": lambda x: x.astype(mx.float32),
    "contiguous": lambda x: mx.contiguous(x),
    "select": lambda x: mx.where(x > 0, x, 0),
    "softmax": lambda x: mx.softmax(x, axis=-1) if x.shape else x,
    "sum": lambda x: x.sum(axis=0, keepdims=True) if x.shape else x,
    "view": lambda x: x.view(mx.int32 if x.dtype == mx.float32 else mx.int16),
    "halves": lambda x: mx.concatenate([x, x], axis=0) if x.ndim else x,
}


def play(arrays: list[mx.array]) -> tuple[Graph, list[int], Player]:
    """Predict where arrays lie."""
    graph = Graph(cpu_extension.extension)
    places = graph.add(arrays)
    player = Player(graph.nodes, flight.Flight("cpu", 10, None), hurry=True)
    player.begin(Stage(tuple(places), graph.holders(), 0))
    for at in order(graph.nodes, places, player.layout.__contains__):
        player.compute(at)
    return graph, places, player


@pytest.mark.parametrize("seed", range(12))
def test_random_chains(seed):
    """Every array is kept, so that each has its layout at the end, and its memory."""
    if mx.default_device() != mx.cpu:
        pytest.skip("compares with the CPU's rules")
    draw = random.Random(seed)
    x = mx.random.normal((6, 4, 5))
    mx.eval(x)
    arrays = [x]
    for _ in range(12):
        x = STEPS[draw.choice(list(STEPS))](x)
        if x.dtype in (mx.int32, mx.int16):
            arrays.append(x)
            x = x.astype(mx.float32)
        arrays.append(x)
    graph, places, player = play(arrays)
    predicted = [(player.layout[at], player._buffer[at]) for at in places]
    mx.eval(arrays)
    graph.holders()  # finds what is computed now
    found = [graph.nodes[at] for at in places]
    for node, (layout, _) in zip(found, predicted, strict=True):
        assert node.layout == layout, (node, layout)
    real = {}
    for node, (_, buffer) in zip(found, predicted, strict=True):
        assert real.setdefault(id(buffer), node.data) == node.data
    assert len(set(real.values())) == len(real)


def test_what_nothing_holds_is_written_over():
    """A chain in place: one buffer, however long it is."""
    x = mx.random.normal((100, 100))
    mx.eval(x)
    y = mx.exp(mx.tanh(mx.abs(x + 1)) * 2)
    mx.synchronize()
    graph, (at,), player = play([y])
    assert [buffer.nbytes for buffer in player.alive] == [40_000]
    assert player.active == 40_000 and player._buffer[at].maker != at


def test_the_order_goes_by_breadth_within_a_width():
    """Two branches of a sum: by turns where there is width."""
    x = mx.zeros((2,))
    a, b = x, x
    for _ in range(3):
        a, b = mx.sin(a), mx.cos(b)
    graph = Graph(cpu_extension.extension)
    (root,) = graph.add([a + b])
    done = {at for at, node in enumerate(graph.nodes) if not node.is_lazy}

    def names(width):
        places = order(graph.nodes, (root,), done.__contains__, width)
        return [graph.nodes[at].primitive for at in places]

    wide, narrow = names(20), names(1)
    assert wide[-7:] == ["Cos", "Sin"] * 3 + ["Add"]
    assert narrow[-7:] == ["Sin"] * 3 + ["Cos"] * 3 + ["Add"] or narrow[-7:] == [
        "Cos"
    ] * 3 + ["Sin"] * 3 + ["Add"]


@pytest.mark.parametrize(
    ("backend", "launches", "elements", "tasks", "held", "least"),
    (
        # A launch a task: those under way hold an input each; beside them are the last
        # result and the new one.
        ("cuda", 0, 1000, 10, 12, 2),
        ("metal", 0, 1000, 3, 5, 2),
        # A task of 2**20 elements is 128 launches of 8192 elements read each, where all
        # count, and 254 where a buffer counts once.
        ("cuda", 1000, 0, 1, 257, 129),
        ("metal", 1000, 0, 1, 400, 254),
        # Five products a task, one place each and one to let go: ten tasks under way
        # and four products of the open one. MLX lets go after each, if it is in time.
        ("cpu", 10, None, 10, 56, 2),
    ),
)
def test_tasks_hold_what_they_read(backend, launches, elements, tasks, held, least):
    x = mx.zeros((64, 64))
    w = x + 0
    mx.eval(x, w)
    y = x
    for _ in range(400):
        y = y @ w
    graph = Graph(cpu_extension.extension)
    roots = tuple(graph.add([y]))
    stage = Stage(roots, graph.holders(), 0)
    ahead = flight.Flight(backend, launches, elements, tasks)
    assert peak(graph.nodes, [stage], ahead).bytes == held * 16384
    soon = peak(graph.nodes, [stage], ahead, hurry=False)
    assert soon.bytes == least * 16384


@pytest.mark.parametrize("given", (False, True), ids=("rows", "given"))
def test_rules_of_a_norm_hold_none_of_its_arrays(given):
    """MLX holds rules until what they are of is computed; who held counts for good."""
    arrays = [mx.ones(shape) for shape in ((60, 8), (60, 8), (8,), (8,))]

    def loss(x, residual, weight, bias):
        by = (bias, weight) if given else ()
        options = {"weight": weight, "bias": bias, "residual": residual}
        return ml.ops.batch_norm(x, *by, **options, activation="relu").square().sum()

    graph = Graph(cpu_extension.extension)
    here = graph.add([*arrays, *mx.grad(loss, argnums=(0, 1, 2, 3))(*arrays)])
    held = zip(graph.nodes, graph.holders().arrays, strict=True)
    kept = {at for at, (node, count) in enumerate(held) if node.is_lazy and count}
    assert kept <= set(here)


def products(side, count):
    """The nodes of products one after another, their stage, and bytes of each."""
    x, w = mx.zeros((side, side)), mx.zeros((side, side))
    mx.eval(x, w)
    y = x
    for _ in range(count):
        y = y @ w
    graph = Graph(cpu_extension.extension)
    stage = Stage(tuple(graph.add([y])), graph.holders(), 0)
    return graph.nodes, [stage], x.nbytes


def test_what_is_under_way_depends_on_the_speed_of_a_gpu():
    """A launch a task: of a fast GPU those that are done and not free yet."""
    *chain, nbytes = products(640, 15)
    ahead, found = flight.Flight("cuda", 0, 1000, 10), []
    for rate in (1e9, 600, 1e-3):
        chip = replace(devices.PROFILES["h200"], bandwidth=rate, tflops=1e9)
        found.append(peak(*chain, ahead, pace=Pace(chip)).bytes)
    # Beside those under way are the last result and the new one.
    first, middle, last = (n / ahead.rounded(nbytes) - 2 for n in found)
    assert 1 <= first <= 5 < middle < last == 10


def test_a_pass_that_maps_new_memory_is_less_far_ahead():
    """Buffers that it freed itself serve it, and so does what was cached before."""
    *chain, nbytes = products(2048, 14)
    ahead, found = flight.Flight("cuda", 0, 1000, 10), []
    chip = replace(devices.PROFILES["h200"], bandwidth=4600, tflops=1e9)
    for cached in (0, 10 * nbytes, 1 << 40):
        pace = Pace(chip, cached)
        found.append(peak(*chain, ahead, pace=pace).bytes)
    assert found[0] < found[1] <= found[2]
    least = peak(*chain, ahead, hurry=False).bytes
    assert least <= found[0]


def test_freed_memory_serves_as_mlx_takes_it():
    freed = Freed(before=1000)
    assert freed.take(600) and not freed.take(600)  # what was there before
    for nbytes in (64, 4096, 1 << 20):
        freed.add(nbytes)
    assert freed.take(48) and not freed.take(48)  # the smallest that fits, once
    assert not freed.take(2000)  # 4096 would lose more than half
    assert freed.take(2100)
    assert freed.take((1 << 20) - 20_000) and not freed.take(1 << 20)
    freed.add(1 << 20)
    assert not freed.take((1 << 20) - 40_000)  # of large ones at most two pages


@pytest.mark.parametrize("graphs, elements", (("1", 10), ("0", sys.maxsize)))
def test_single_launches_are_counted_by_number_alone(graphs, elements, monkeypatch):
    """MLX counts the elements that its graphs read; without graphs there are none."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(devices, "compute_capability", lambda: (9, 0))
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "10")
    monkeypatch.delenv("MLX_MAX_OPS_PER_BUFFER", raising=False)
    monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", graphs)
    found = flight.current()
    assert (found.backend, found.launches, found.elements) == ("cuda", 100, elements)
