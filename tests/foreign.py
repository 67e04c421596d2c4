"""State dicts of our models as other libraries would have them, written apart.

And a small model with random parameters, and rows, to try them on.
"""

import re

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import nn
from mlx_lattice.io import LIBRARIES


def offsets(size: tuple[int, ...], first_fastest: bool) -> list[tuple[int, ...]]:
    """The positions of a kernel, in either order."""
    box = [size[::-1], size][not first_fastest]
    positions = [tuple(map(int, p)) for p in np.ndindex(*box)]
    return [p[::-1] for p in positions] if first_fastest else positions


def foreign(weight: np.ndarray, library: str, transposed: bool) -> np.ndarray:
    """A weight of ours as a library would keep it: the inverse, written apart."""
    layout = LIBRARIES[library]
    size = weight.shape[1:-1]
    volume = int(np.prod(size))
    axes = layout.transposed if transposed else layout.axes
    axes = "kOI" if library == "spconv2.1" and volume > 32 else axes
    if axes == "kOI":
        return np.moveaxis(weight, 0, -2)
    if axes == "OkI":
        return weight
    canonical = np.moveaxis(weight, 0, -1)  # kernel, C_in, C_out
    if axes == "kIO":
        return canonical
    first = {"always": True, "odd": volume % 2 == 1, "never": False}
    order = offsets(size, first[layout.first_fastest])
    flat = np.stack([canonical[place] for place in order])
    if axes == "KOI":
        flat = flat.swapaxes(1, 2)
    if axes == "K1IO":
        flat = flat[:, None]
    return flat[0] if layout.unit and volume == 1 else flat


def exported(model, library: str, rename=lambda name: name) -> dict[str, mx.array]:
    """The state dict that a library's twin of the model would have."""
    layout = LIBRARIES[library]
    modules, state = dict(model.named_modules()), {}
    for name, value in tree_flatten(model.parameters()):
        path, _, leaf = name.rpartition(".")
        module, value = modules[path], np.array(value)
        path = rename(path.replace(".layers.", "."))
        if isinstance(module, nn.BatchNorm):
            path += ".bn" if library == "minkowski" else ""
            state[f"{path}.num_batches_tracked"] = mx.array(9)
        elif isinstance(module, nn.Linear):
            path += ".linear" if library in ("minkowski", "ocnn") else ""
            value = value.T if library == "paddle" and leaf == "weight" else value
        elif leaf == "weight":
            value = foreign(value, library, "ConvTranspose" in type(module).__name__)
            leaf = layout.leaf
        elif library == "minkowski":
            value = value[None]
        state[f"{path}.{leaf}"] = mx.array(value)
    return state


def minkunet_name(path: str) -> str:
    """A path of ours as MinkowskiEngine's examples/minkunet.py has it."""
    path = {"stem.0.conv": "conv0p1s1", "stem.0.norm": "bn0", "head": "final"}.get(
        path, path
    )
    path = re.sub(r"\.conv([12])\.conv$", r".conv\1", path)
    path = re.sub(r"\.conv([12])\.norm$", r".norm\1", path)
    path = path.replace("shortcut.conv", "downsample.0")
    path = path.replace("shortcut.norm", "downsample.1")
    kind, _, rest = path.partition(".")
    if kind not in ("encoder", "decoder"):
        return path
    stage, _, rest = rest.partition(".")
    i, encoder = int(stage), kind == "encoder"
    stride = 2**i if encoder else 2 ** (4 - i)
    names = {
        "down.conv": f"conv{i + 1}p{stride}s2",
        "down.norm": f"bn{i + 1}",
        "up.conv": f"convtr{i + 4}p{stride}s2",
        "up.norm": f"bntr{i + 4}",
    }
    block = f"block{i + 1 if encoder else i + 5}"
    return names[rest] if rest in names else rest.replace("blocks", block)


def torchsparse_name(path: str) -> str:
    """A path of ours as SPVNAS's minkunet.py and spvcnn.py have it."""
    if path == "head":
        return "classifier.0"
    kind, _, rest = path.partition(".")
    place, _, rest = rest.partition(".")
    if kind == "stem":
        return f"stem.{3 * int(place) + (rest == 'norm')}"
    if kind not in ("encoder", "decoder"):
        return path
    stage = f"{'stage' if kind == 'encoder' else 'up'}{int(place) + 1}"
    if not rest.startswith("blocks"):
        return f"{stage}.0.net.{int(rest.endswith('norm'))}"
    _, block, branch, leaf = rest.split(".")
    block = f"{int(block) + 1}" if kind == "encoder" else f"1.{block}"
    norm = int(leaf == "norm")
    if branch == "shortcut":
        return f"{stage}.{block}.downsample.{norm}"
    return f"{stage}.{block}.net.{3 * (branch == 'conv2') + norm}"


def minkunet_state(model) -> dict[str, mx.array]:
    return exported(model, "minkowski", minkunet_name)


def numbers(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


class Net(nn.Module):
    """One of each: a stem, a strided and a transposed convolution, norm, linear."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.SubmConv3d(3, 4, (3, 1, 3)), nn.BatchNorm(4), nn.ReLU()
        )
        self.down = nn.Conv3d(4, 6, 2, 2)
        self.up = nn.ConvTranspose3d(6, 4, 2, 2, bias=False)
        self.out = nn.Linear(4, 5)

    def __call__(self, x):
        x = self.body(x)
        return self.out(self.up(self.down(x), x))


def randomised(model, weights=0.2):
    """The model with parameters that are no defaults, running statistics too.

    The mean weight of convolutions is small in deep nets, whose sums would overflow.
    """
    mx.random.seed(3)
    new = [
        (name, mx.random.uniform(0.5, 1.5, p.shape) * (weights if p.ndim > 1 else 0.2))
        for name, p in tree_flatten(model.parameters())
    ]
    return model.load_weights(new).eval()


def scene(channels: int) -> ml.SparseTensor:
    rng = np.random.default_rng(0)
    cells = np.argwhere(rng.random((2, 8, 8, 8)) < 0.3).astype(np.int32)
    feats = rng.normal(size=(len(cells), channels)).astype(np.float32)
    return ml.SparseTensor(mx.array(cells), mx.array(feats))
