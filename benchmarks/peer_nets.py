"""MinkUNets of PyTorch on the CPU: spconv's layers, and gather, matmul and scatter.

    python benchmarks/peer_nets.py COORDS.npy [--depth 34] [--net spconv gather]

It needs torch and spconv in an environment of their own, and neither this library nor
MLX. Its times stand beside those of ``nets.py --net minkunet18 --dtype float32`` on the
coordinates that ``nets.py --save-coordinates`` wrote: the same net, kept relations, a
forward pass and a training step of SGD with momentum. One JSON line a step.

Where others load the machine, processor time of one thread, of both programs:

    OMP_NUM_THREADS=1 python benchmarks/peer_nets.py COORDS.npy --cpu-time
    MLX_LATTICE_THREADS=1 python benchmarks/nets.py --net minkunet18 --cpu-time ...
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import nn

# Channels, and blocks, of the four stages down and the four up.
PLANES = {
    18: (32, 64, 128, 256, 128, 128, 96, 96),
    34: (32, 64, 128, 256, 256, 128, 64, 64),
}
BLOCKS = {18: (2,) * 8, 34: (2, 3, 4, 6, 2, 2, 2, 2)}
STEM, CLASSES = 32, 20


def rows_of(coords: np.ndarray, sites: np.ndarray) -> np.ndarray:
    """Return where each (B, x, y, z) of ``coords`` is in sorted ``sites``, or -1."""

    def keys(c: np.ndarray) -> np.ndarray:
        key = np.zeros(len(c), np.int64)
        for column in c.T:
            key = key << 15 | (column.astype(np.int64) + 16)
        return key

    table, wanted = keys(sites), keys(coords)
    at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return np.where(table[at] == wanted, at, -1)


class Maps:
    """Levels of a scene, and (input, output) rows of each kernel offset."""

    def __init__(self, coords: np.ndarray):
        self.levels = [coords[np.lexsort(coords.T[::-1])]]
        for _ in range(4):
            finer = self.levels[-1]
            halved = np.concatenate([finer[:, :1], finer[:, 1:] >> 1], axis=1)
            self.levels.append(np.unique(halved, axis=0))
        self.kept: dict[tuple, list] = {}

    def around(self, level: int, size: int) -> list:
        """Return the pairs of a submanifold convolution."""
        name = "around", level, size
        if name not in self.kept:
            sites, reach, pairs = (
                self.levels[level],
                range(-(size // 2), size // 2 + 1),
                [],
            )
            for offset in product(reach, repeat=3):
                found = rows_of(sites + np.array((0, *offset)), sites)
                out = np.flatnonzero(found >= 0)
                pairs.append((torch.from_numpy(found[out]), torch.from_numpy(out)))
            self.kept[name] = pairs
        return self.kept[name]

    def between(self, level: int) -> list:
        """Return the pairs of a 2x2x2 convolution from a level to the next."""
        name = "between", level
        if name not in self.kept:
            fine, coarse, pairs = self.levels[level], self.levels[level + 1], []
            for offset in product((0, 1), repeat=3):
                sites = np.concatenate(
                    [coarse[:, :1], 2 * coarse[:, 1:] + offset], axis=1
                )
                found = rows_of(sites, fine)
                out = np.flatnonzero(found >= 0)
                pairs.append((torch.from_numpy(found[out]), torch.from_numpy(out)))
            self.kept[name] = pairs
        return self.kept[name]


class Gathered(nn.Module):
    """A convolution that gathers, multiplies and scatters an offset at a time."""

    def __init__(self, pairs: Callable[[], tuple[list, int]], c_in: int, c_out: int):
        super().__init__()
        self.pairs = pairs
        volume = len(pairs()[0])
        scale = (c_in * volume) ** -0.5
        self.weight = nn.Parameter(torch.randn(volume, c_in, c_out) * scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, c_out)."""
        pairs, rows = self.pairs()
        y = x.new_zeros(rows, self.weight.shape[2])
        for (i, o), w in zip(pairs, self.weight, strict=True):
            y = y.index_add(0, o, x[i] @ w)
        return y


class GatherLayers:
    """Layers of gather, matmul and scatter, on plain (N, C) features."""

    def __init__(self, coords: np.ndarray):
        self.maps = Maps(coords)

    def tensor(self, feats: torch.Tensor) -> torch.Tensor:
        """Return what the net is called with."""
        return feats

    def around(self, level: int, size: int, c_in: int, c_out: int) -> nn.Module:
        """Return a submanifold convolution."""
        if size == 1:
            return nn.Linear(c_in, c_out, bias=False)
        rows = len(self.maps.levels[level])
        return Gathered(lambda: (self.maps.around(level, size), rows), c_in, c_out)

    def down(self, level: int, c_in: int, c_out: int) -> nn.Module:
        """Return a 2x2x2 convolution with stride 2."""
        rows = len(self.maps.levels[level + 1])
        return Gathered(lambda: (self.maps.between(level), rows), c_in, c_out)

    def up(self, level: int, c_in: int, c_out: int) -> nn.Module:
        """Return its inverse."""
        rows = len(self.maps.levels[level])

        def pairs() -> tuple[list, int]:
            return [(o, i) for i, o in self.maps.between(level)], rows

        return Gathered(pairs, c_in, c_out)

    def on_rows(self, function: Callable, *tensors: torch.Tensor) -> torch.Tensor:
        """Apply a function of features."""
        return function(*tensors)

    features = staticmethod(lambda x: x)


class SpconvLayers:
    """Layers of spconv, on its tensors."""

    def __init__(self, coords: np.ndarray):
        import spconv.pytorch
        from spconv.pytorch import ops

        # Its way back on the CPU asks for CUDA's stream, which it does not use.
        ops.get_current_stream = lambda: 0
        self.spconv = spconv.pytorch
        self.coords = torch.from_numpy(Maps(coords).levels[0].astype(np.int32))
        self.shape = [int(c) + 1 for c in self.coords[:, 1:].amax(dim=0)]
        self.batch = int(self.coords[:, 0].max()) + 1
        self.pairs: dict = {}

    def tensor(self, feats: torch.Tensor) -> object:
        """Return a tensor on the scene, with the pairs that were found before."""
        x = self.spconv.SparseConvTensor(feats, self.coords, self.shape, self.batch)
        x.indice_dict = self.pairs
        return x

    def around(self, level: int, size: int, c_in: int, c_out: int) -> nn.Module:
        """Return a submanifold convolution."""
        key, algo = f"around{level}.{size}", self.spconv.ConvAlgo.Native
        given = {"bias": False, "indice_key": key, "algo": algo}
        return self.spconv.SubMConv3d(c_in, c_out, size, padding=size // 2, **given)

    def down(self, level: int, c_in: int, c_out: int) -> nn.Module:
        """Return a 2x2x2 convolution with stride 2."""
        given = {"bias": False, "indice_key": f"between{level}"}
        algo = self.spconv.ConvAlgo.Native
        return self.spconv.SparseConv3d(c_in, c_out, 2, stride=2, algo=algo, **given)

    def up(self, level: int, c_in: int, c_out: int) -> nn.Module:
        """Return its inverse."""
        given = {"bias": False, "indice_key": f"between{level}"}
        algo = self.spconv.ConvAlgo.Native
        return self.spconv.SparseInverseConv3d(c_in, c_out, 2, algo=algo, **given)

    def on_rows(self, function: Callable, *tensors: object) -> object:
        """Apply a function of features."""
        y = function(*(x.features for x in tensors))
        return tensors[0].replace_feature(y)

    features = staticmethod(lambda x: x.features)


class ConvNorm(nn.Module):
    """A convolution and a BatchNorm."""

    def __init__(self, layers: object, conv: nn.Module, channels: int):
        super().__init__()
        self.conv, self.norm = conv, nn.BatchNorm1d(channels)
        self.layers = layers

    def forward(self, x: object) -> object:
        """Return normalised features, before an activation."""
        return self.layers.on_rows(self.norm, self.conv(x))


class BasicBlock(nn.Module):
    """Two 3x3x3 convolutions beside a shortcut."""

    def __init__(self, layers: object, level: int, c_in: int, c_out: int):
        super().__init__()
        self.layers = layers
        self.conv1 = ConvNorm(layers, layers.around(level, 3, c_in, c_out), c_out)
        self.conv2 = ConvNorm(layers, layers.around(level, 3, c_out, c_out), c_out)
        self.shortcut = None
        if c_in != c_out:
            conv = layers.around(level, 1, c_in, c_out)
            self.shortcut = ConvNorm(layers, conv, c_out)

    def forward(self, x: object) -> object:
        """Return features on the rows of ``x``."""
        y = self.layers.on_rows(torch.relu, self.conv1(x))
        x = x if self.shortcut is None else self.shortcut(x)
        return self.layers.on_rows(lambda a, b: torch.relu(a + b), self.conv2(y), x)


class MinkUNet(nn.Module):
    """The net of ``models.MinkUNet18`` or ``MinkUNet34``, plan A."""

    def __init__(self, layers: object, depth: int, c_in: int = 4):
        super().__init__()
        planes, blocks = PLANES[depth], BLOCKS[depth]
        self.layers = layers
        self.stem = ConvNorm(layers, layers.around(0, 5, c_in, STEM), STEM)
        widths = [STEM, *planes[:4]]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.enc, self.dec = nn.ModuleList(), nn.ModuleList()

        def stage(level: int, a: int, b: int, count: int) -> nn.Module:
            inputs = [a, *[b] * (count - 1)]
            return nn.Sequential(*(BasicBlock(layers, level, c, b) for c in inputs))

        for i in range(4):
            conv = layers.down(i, widths[i], widths[i])
            self.down.append(ConvNorm(layers, conv, widths[i]))
            self.enc.append(stage(i + 1, widths[i], widths[i + 1], blocks[i]))
        deeper = [widths[4], *planes[4:]]
        for i in range(4):
            conv = layers.up(3 - i, deeper[i], deeper[i + 1])
            self.up.append(ConvNorm(layers, conv, deeper[i + 1]))
            wide = deeper[i + 1] + widths[3 - i]
            self.dec.append(stage(3 - i, wide, deeper[i + 1], blocks[4 + i]))
        self.head = nn.Linear(planes[-1], CLASSES)

    def forward(self, x: object) -> torch.Tensor:
        """Return (N, 20) scores."""
        on_rows = self.layers.on_rows
        skips = [on_rows(torch.relu, self.stem(x))]
        for down, enc in zip(self.down, self.enc, strict=True):
            skips.append(enc(on_rows(torch.relu, down(skips[-1]))))
        x = skips.pop()
        for up, dec in zip(self.up, self.dec, strict=True):
            x = on_rows(torch.relu, up(x))
            x = dec(on_rows(lambda a, b: torch.cat([a, b], 1), x, skips.pop()))
        return self.head(self.layers.features(x))


def median_ms(
    run: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> float:
    """Return the median time of a call after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        begin = clock()
        run()
        times.append(clock() - begin)
    return statistics.median(times[1:]) * 1e3


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = {"spconv": SpconvLayers, "gather": GatherLayers}
    parser.add_argument("coordinates", type=Path, help="(N, 4) int32 .npy, batch first")
    parser.add_argument("--net", choices=kinds, nargs="+", default=list(kinds))
    parser.add_argument("--depth", type=int, choices=PLANES, nargs="+", default=[18])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="not wall time")
    given = parser.parse_args()
    clock = time.process_time if given.cpu_time else time.perf_counter
    unit = "processor_ms" if given.cpu_time else "wall_ms"
    coords = np.load(given.coordinates)
    for depth, name in product(given.depth, given.net):
        torch.manual_seed(0)
        layers = kinds[name](coords)
        net = MinkUNet(layers, depth)
        feats = torch.randn(len(coords), 4)
        labels = torch.randint(0, CLASSES, (len(coords),))
        optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)

        def train(net=net, layers=layers, optimizer=optimizer, feats=feats, y=labels):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(layers.tensor(feats)), y)
            loss.backward()
            optimizer.step()

        @torch.no_grad()
        def kept(net=net, layers=layers, feats=feats):
            net(layers.tensor(feats))

        for step, run in (("kept", kept), ("training", train)):
            net.train(step == "training")
            ms = round(median_ms(run, given.repeats, clock), 1)
            row = {"net": f"minkunet{depth} {name}", "rows": len(coords), "step": step}
            print(json.dumps({**row, unit: ms}), flush=True)


if __name__ == "__main__":
    main()
