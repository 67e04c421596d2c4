"""MinkUNets, and a ConvNeXt, in PyTorch of other libraries' layers: for peer_nets.py.

spconv's layers, of any library that has its interface, and gather, matmul and scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

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
        self.pairs = self.maps.kept

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
    """Layers of spconv, or of a library with its interface, on its tensors.

    Args:
        coords: (N, 4) int32, batch first.
        library: its module, ``spconv.pytorch``.
        device: where tensors are.
    """

    def __init__(self, coords: np.ndarray, library: object, device: str = "cpu"):
        self.library, self.pairs = library, KeptPairs(library.ops)
        self.algo = library.ConvAlgo.Native if device == "cpu" else None
        if device == "cpu":
            # Its way back on the CPU asks for CUDA's stream, which it does not use.
            library.ops.get_current_stream = lambda: 0
        self.coords = torch.from_numpy(coords).to(device)
        # Whole cells of the last level: others would be left out on the way there.
        ends = self.coords[:, 1:].amax(dim=0).tolist()
        self.shape = [(end // 16 + 1) * 16 for end in ends]
        self.batch = int(self.coords[:, 0].max()) + 1

    def tensor(self, feats: torch.Tensor) -> object:
        """Return a tensor on the scene."""
        given = self.coords, self.shape, self.batch
        return self.library.SparseConvTensor(feats, *given)

    def around(self, level: int, size: int, c_in: int, c_out: int, **more) -> nn.Module:
        """Return a submanifold convolution."""
        given = {"indice_key": f"around{level}.{size}", "padding": size // 2}
        return self._conv("SubMConv3d", c_in, c_out, size, **given, **more)

    def down(self, level: int, c_in: int, c_out: int, **more) -> nn.Module:
        """Return a 2x2x2 convolution with stride 2."""
        given = {"indice_key": f"between{level}", "stride": 2}
        return self._conv("SparseConv3d", c_in, c_out, 2, **given, **more)

    def up(self, level: int, c_in: int, c_out: int, **more) -> nn.Module:
        """Return its inverse."""
        key = f"between{level}"
        return self._conv("SparseInverseConv3d", c_in, c_out, 2, indice_key=key, **more)

    def _conv(self, kind: str, *sizes: int, bias: bool = False, **given) -> nn.Module:
        layer = getattr(self.library, kind)
        return layer(*sizes, bias=bias, algo=self.algo, **given)

    def on_rows(self, function: Callable, *tensors: object) -> object:
        """Apply a function of features."""
        y = function(*(x.features for x in tensors))
        return tensors[0].replace_feature(y)

    features = staticmethod(lambda x: x.features)


class KeptPairs:
    """The pairs of rows of each layer, searched once.

    spconv's layers keep theirs for one call of a net alone.

    Args:
        ops: the module whose functions find them.
    """

    SEARCHES = "get_indice_pairs", "get_indice_pairs_implicit_gemm"

    def __init__(self, ops: object):
        self._found: dict[tuple, object] = {}
        for name in self.SEARCHES:
            search = getattr(ops, name)
            search = getattr(search, "of", search)
            setattr(ops, name, self._kept(search))

    def clear(self) -> None:
        """Have all of them searched anew."""
        self._found.clear()

    def _kept(self, search: Callable) -> Callable:
        def find(indices: torch.Tensor, *facts: object, **named: object) -> object:
            # What a tensor allocates or times by is not a fact.
            given = facts, {k: v for k, v in named.items() if k not in _BESIDE}
            key = search.__name__, len(indices), torch.is_grad_enabled(), repr(given)
            if key not in self._found:
                self._found[key] = search(indices, *facts, **named)
            return self._found[key]

        find.of = search
        return find


_BESIDE = "alloc", "timer"


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


class ConvNeXt(nn.Module):
    """The net of ``net_kinds.ConvNeXt``, of layers of a library with a bias."""

    WIDTHS = 32, 64, 128, 256

    def __init__(self, layers: SpconvLayers, c_in: int = 4):
        super().__init__()
        widths, with_bias = self.WIDTHS, {"bias": True}
        self.layers = layers
        self.stem = layers.around(0, 3, c_in, widths[0], **with_bias)
        self.blocks, self.down, self.up = (nn.ModuleList() for _ in range(3))
        for level, c in enumerate(widths):
            self.blocks.append(nn.ModuleList())
            for _ in range(2):
                conv = layers.around(level, 3, c, c, **with_bias)
                wide = nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c)
                rows = nn.Sequential(nn.LayerNorm(c), *wide)
                self.blocks[-1].append(nn.ModuleList([conv, rows]))
        for level, (a, b) in enumerate(pairwise(widths)):
            conv = layers.down(level, a, b, **with_bias)
            self.down.append(nn.ModuleList([nn.LayerNorm(a), conv]))
            self.up.append(layers.up(level, b, a, **with_bias))
        self.head = nn.Linear(widths[0], CLASSES)

    def forward(self, x: object) -> torch.Tensor:
        """Return (N, 20) scores."""
        on_rows, x, skips = self.layers.on_rows, self.stem(x), []
        for level, blocks in enumerate(self.blocks):
            for conv, rows in blocks:
                x = on_rows(torch.add, on_rows(rows, conv(x)), x)
            if level < len(self.down):
                skips.append(x)
                norm, conv = self.down[level]
                x = conv(on_rows(norm, x))
        for up, skip in zip(self.up[::-1], skips[::-1], strict=True):
            x = on_rows(torch.add, up(x), skip)
        return self.head(self.layers.features(x))
