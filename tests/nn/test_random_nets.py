"""Nets that are drawn by chance against float64: values and gradients of what waits,
is fused, kept, built ahead and compiled, wherever a user holds or reads it.
"""

import cases
import mlx.core as mx
import mlx.nn
import mlx.utils
import numpy as np
import pytest
from exact_rows import doubled
from net_draws import CONDITION
from random_nets import ExactNet, Net, sets_of

import mlx_lattice as ml
from mlx_lattice import devices

# Of outputs and of gradients, relative to the norm.
BOUNDS = {"float32": (2e-4, 4e-3), "float16": (5e-3, 0.05), "bfloat16": (3e-2, 0.2)}
# Where statistics are of one row, a gradient is what rounding leaves of it.
FEW, OF_FEW = 5, 10


def shaken(net: Net, seed: int) -> None:
    """Give it parameters that are not those it starts with."""
    rng = np.random.default_rng(seed)

    def made(name, a):
        if name.endswith("running_var") or (name.endswith("weight") and a.ndim == 1):
            values = rng.uniform(0.5, 1.5, a.shape)
        elif a.ndim == 1:
            values = rng.normal(0, 0.3, a.shape)
        else:
            values = rng.normal(0, 1.2 / np.sqrt(a[0].size), a.shape)
        return mx.array(values, mx.float32)

    net.update(mlx.utils.tree_map_with_path(made, net.parameters()))


class Scan:
    """What a net is given, once in each way."""

    def __init__(self, rows: int, channels: int, dtype, seed: int):
        rng = np.random.default_rng(seed)
        size = (rows, 1)
        width = (3, 6, 12)[seed % 3]
        batch = rng.integers(0, 1 + seed % 3, size)
        cells = rng.integers(-width, width, (rows, 3))
        coords = np.unique(np.concatenate([batch, cells], 1), axis=0)
        ordered = coords if seed % 2 else rng.permutation(coords)
        self.coords = ordered.astype(np.int32)
        elements = coords[:, 0].max(initial=0) + 1

        def drawn(*shape):
            return mx.array(rng.normal(size=shape), mx.float32).astype(dtype)

        self.feats = drawn(len(coords), channels)
        self.condition = drawn(int(elements), CONDITION)
        self.x = ml.SparseTensor(mx.array(self.coords), self.feats)

    def wraps(self, net: Net):
        """Return ways to call a function: as it is, and compiled where MLX can.

        What MLX compiles for CUDA divides by the size of its arrays.
        """
        is_whole = all(map(len, sets_of(net._draw, self.coords)))
        on_cuda = devices.current().backend == devices.CUDA
        return [lambda call: call, mx.compile][: 2 if is_whole or not on_cuda else 1]

    def wanted(self, net: Net, training: bool, seed: int):
        """Outputs, their cotangents, and gradients by parts, feats and condition.

        The net has float weights.
        """
        rng = np.random.default_rng(seed)
        with mx.stream(mx.cpu):
            oracle = ExactNet(net, self.coords, training)
            parts = mlx.utils.tree_map(doubled, net.parameters()["parts"])
            given = parts, doubled(self.feats), doubled(self.condition)
            outputs = oracle(*given)
            weights = [rng.normal(size=y.shape) for y in outputs]

            def loss(*given):
                pairs = zip(oracle(*given), weights, strict=True)
                return sum((y * doubled(w)).sum() for y, w in pairs)

            gradients = mx.grad(loss, argnums=(0, 1, 2))(*given)
            mx.eval(outputs, gradients)
        return outputs, weights, gradients


def assert_near(found, wanted, bound: float, least: float, what: str) -> None:
    """The error is within a share of the norm, or of the least one that matters."""
    found, wanted = np.array(found.astype(mx.float32), np.float64), np.array(wanted)
    assert found.shape == wanted.shape, what
    error = np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), least)
    assert error <= bound, f"{what}: {error:.2g} of {bound:.2g}"


def packed(net: Net, bits: int) -> Net:
    """Pack what can be packed; give the net the weights that it then has."""
    made = Net(*net._made_of)
    made.update(net.parameters())
    # MLX's own linear layers stay as they are.
    mlx.nn.quantize(made, 32, bits, class_predicate=lambda _, m: hasattr(m, "twin"))
    own = dict(net.named_modules())
    for path, layer in made.named_modules():
        if hasattr(layer, "packed_weight"):
            dense = ml.dequantize_weight(layer.packed_weight(), mx.float32)
            own[path].weight = dense.reshape(own[path].weight.shape)
    return made.eval()


def check(seed: int, dtype: str = "float32", training: bool = False) -> None:
    """A net is right: at once and compiled, of a scan, and of a new one."""
    rng = np.random.default_rng(seed)
    rows, length = rng.choice([0, 1, 5, 30, 80, 200]), rng.choice([4, 8, 14, 20])
    if dtype != "float32":  # norms of few rows, one after the other, leave little of it
        rows, length = max(rows, 80), min(length, 8)
    net = Net(seed, int(length))
    shaken(net, seed)
    net.set_dtype(getattr(mx, dtype))
    net.train(training)
    before, channels = net.parameters(), net._draw.widths[0]
    bound, of_gradients = BOUNDS[dtype]
    of_gradients *= OF_FEW if rows <= FEW else 1
    for scan_seed in (seed, seed + 1):
        scan = Scan(int(rows), channels, getattr(mx, dtype), scan_seed)
        outputs, weights, wanted = scan.wanted(net, training, seed)
        least = float(np.sqrt(sum(np.sum(w**2) for w in weights))) or 1.0

        def values(feats, condition, x=scan.x):
            found = [y.feats for y in net(x.replace(feats=feats), condition)]
            net.update(before)
            return found

        def loss(parts, feats, condition, values=values, weights=weights):
            net.update({"parts": parts})
            found = values(feats, condition)
            return sum(
                (y.astype(mx.float32) * mx.array(w, mx.float32)).sum()
                for y, w in zip(found, weights, strict=True)
            )

        gradient = mx.grad(loss, argnums=(0, 1, 2))
        for wrap in scan.wraps(net):
            given = scan.feats, scan.condition
            for i, y in enumerate(wrap(values)(*given)):
                assert_near(y, outputs[i], bound, 1e-3 * least, f"output {i}")
            found = wrap(gradient)(net.trainable_parameters()["parts"], *given)
            mx.eval(found)
            pairs = dict(mlx.utils.tree_flatten(wanted))
            size = np.sqrt(sum(np.sum(np.square(g)) for g in pairs.values()))
            for name, g in mlx.utils.tree_flatten(found):
                assert_near(g, pairs[name], of_gradients, 0.1 * size + 1e-6, name)


def check_packed(seed: int, bits: int) -> None:
    """A net with packed weights is that of the weights that they stand for."""
    net = Net(seed, 14, ((32, 64), (96, 32), (64,)))
    shaken(net, seed)
    made = packed(net, bits)
    for scan_seed in (seed, seed + 1):
        scan = Scan(150, net._draw.widths[0], mx.float32, scan_seed)
        outputs, *_ = scan.wanted(net, False, seed)
        with ml.trace():  # told about, and not
            told = made(scan.x, scan.condition)
        for found in (told, made(scan.x, scan.condition)):
            for i, y in enumerate(found):
                bound = BOUNDS["float32"][0]
                assert_near(y.feats, outputs[i], bound, 1e-2, f"output {i}")


def seeds(first, last, emulated):
    """Return seeds; emulated kernels, slow to compile, run the first few only."""
    slow = (pytest.param(s, marks=pytest.mark.native) for s in range(first, last))
    return [*range(first, first + emulated), *list(slow)[emulated:]]


@pytest.mark.parametrize("seed", seeds(0, 8, 2))
@pytest.mark.parametrize("bits", (4, 8))
def test_a_packed_net_is_right(seed, bits):
    check_packed(seed, bits)


@pytest.mark.parametrize("seed", seeds(0, 30, 6))
@pytest.mark.parametrize("training", (False, True))
def test_a_net_is_right(seed, training):
    check(seed, training=training)


@pytest.mark.parametrize("seed", seeds(40, 48, 2))
@pytest.mark.parametrize("dtype", cases.DTYPES[1:])
def test_a_net_in_half_is_near(seed, dtype):
    check(seed, dtype)
