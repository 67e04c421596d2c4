"""Published nets in float64, from the state dicts that their own libraries save.

Nothing here knows our names or our order of offsets: a kernel is (K, C_in, C_out) as
the library keeps it, and the relation lists its offsets in that library's order.
"""

import mlx.core as mx
import numpy as np
import reference as ref
from foreign import offsets


class Net:
    """A state dict's convolutions and norms, in evaluation."""

    def __init__(self, state, library: str):
        self.p = {
            n: np.array(ref.to_numpy(a), np.float64, order="C")
            for n, a in state.items()
        }
        self.minkowski, self.training = library == "minkowski", False
        self.found = {}  # relations, once a scene

    def conv(self, name, kind, rows, x, size=3, stride=1, target=None):
        kernel = self.p[f"{name}.kernel"]
        kernel = kernel[None] if kernel.ndim == 2 else kernel
        first = self.minkowski or size % 2 == 1
        places = np.array(offsets((size,) * 3, first)) - (size // 2 if size % 2 else 0)
        onto = None if target is None else target.tobytes()
        key = kind, size, stride, rows.tobytes(), onto
        if key not in self.found:
            self.found[key] = ref.relation(
                kind, rows, offsets=places, stride=stride, target=target
            )
        relation = self.found[key]
        bias = self.p.get(f"{name}.bias")
        return relation.out_coords, ref.conv(x, kernel, relation, bias)

    def norm(self, name, x):
        name = f"{name}.bn" if self.minkowski else name
        mean, var = self.p[f"{name}.running_mean"], self.p[f"{name}.running_var"]
        if self.training:
            mean, var = x.mean(0), x.var(0)
        x = (x - mean) / np.sqrt(var + 1e-5)
        return x * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]

    def active(self, conv, norm, kind, rows, x, **kernel):
        rows, y = self.conv(conv, kind, rows, x, **kernel)
        return rows, np.maximum(self.norm(norm, y), 0)

    def residual(self, name, rows, x):
        """Convolutions beside a shortcut, which may have a kernel of one."""
        if f"{name}.conv3.kernel" in self.p:
            return self.bottleneck(name, rows, x)
        names = ("conv1", "norm1", "conv2", "norm2")
        if not self.minkowski:
            names = ("net.0", "net.1", "net.3", "net.4")
        first, norm, second, last = (f"{name}.{part}" for part in names)
        y = self.active(first, norm, "submanifold", rows, x)[1]
        y = self.norm(last, self.conv(second, "submanifold", rows, y)[1])
        down = f"{name}.downsample"
        if f"{down}.0.kernel" in self.p:
            x = self.conv(f"{down}.0", "submanifold", rows, x, size=1)[1]
            x = self.norm(f"{down}.1", x)
        return np.maximum(x + y, 0)

    def bottleneck(self, name, rows, x):
        """MinkowskiEngine's Bottleneck: kernels of 1, 3 and 1 beside a shortcut."""
        y = x
        for i, size in enumerate((1, 3, 1)):
            y = np.maximum(y, 0) if i else y
            y = self.conv(f"{name}.conv{i + 1}", "submanifold", rows, y, size)[1]
            y = self.norm(f"{name}.norm{i + 1}", y)
        if f"{name}.downsample.0.kernel" in self.p:
            x = self.conv(f"{name}.downsample.0", "submanifold", rows, x, size=1)[1]
            x = self.norm(f"{name}.downsample.1", x)
        return np.maximum(x + y, 0)


class SPVNAS(Net):
    """The parts of SPVNAS's nets, and its MinkUNet."""

    trimmed = False  # whether cells above (largest - 1) // 2 of an axis are left out

    def __init__(self, state):
        super().__init__(state, "torchsparse")

    def stem(self, rows, x):
        for conv, norm in ((0, 1), (3, 4)):
            x = self.active(f"stem.{conv}", f"stem.{norm}", "submanifold", rows, x)[1]
        return x

    def stage(self, name, rows, x):
        pair, net = {"size": 2, "stride": 2}, f"{name}.0.net"
        last = (rows[:, 1:].max(0) - 1) // 2
        rows, y = self.active(f"{net}.0", f"{net}.1", "forward", rows, x, **pair)
        if self.trimmed:
            keep = (rows[:, 1:] <= last).all(1)
            rows, y = rows[keep], y[keep]
        for block in (1, 2):
            y = self.residual(f"{name}.{block}", rows, y)
        return rows, y

    def up(self, name, rows, x, fine, skip):
        pair, net = {"size": 2, "stride": 2, "target": fine}, f"{name}.0.net"
        y = self.active(f"{net}.0", f"{net}.1", "transposed", rows, x, **pair)[1]
        y = np.concatenate([y, skip], 1)
        for block in (0, 1):
            y = self.residual(f"{name}.1.{block}", fine, y)
        return y

    def classify(self, x):
        return x @ self.p["classifier.0.weight"].T + self.p["classifier.0.bias"]

    def __call__(self, rows, x):
        skips = [(rows, self.stem(rows, x))]
        for i in range(4):
            skips.append(self.stage(f"stage{i + 1}", *skips[-1]))
        rows, y = skips.pop()
        for i in range(4):
            fine, skip = skips.pop()
            rows, y = fine, self.up(f"up{i + 1}", rows, y, fine, skip)
        return self.classify(y)


class MinkowskiUNet(Net):
    """MinkowskiEngine's examples/minkunet.py, of any number of blocks."""

    def __init__(self, state):
        super().__init__(state, "minkowski")

    def blocks(self, name, rows, x):
        count = len({n.split(".")[1] for n in self.p if n.startswith(f"{name}.")})
        for i in range(count):
            x = self.residual(f"{name}.{i}", rows, x)
        return x

    def __call__(self, rows, x):
        x = self.active("conv0p1s1", "bn0", "submanifold", rows, x, size=5)[1]
        skips, pair = [(rows, x)], {"size": 2, "stride": 2}
        for i in range(4):
            conv = f"conv{i + 1}p{2**i}s2", f"bn{i + 1}"
            rows, x = self.active(*conv, "forward", *skips[-1], **pair)
            skips.append((rows, self.blocks(f"block{i + 1}", rows, x)))
        rows, x = skips.pop()
        for i in range(4):
            fine, skip = skips.pop()
            conv = f"convtr{i + 4}p{2 ** (4 - i)}s2", f"bntr{i + 4}"
            x = self.active(*conv, "transposed", rows, x, target=fine, **pair)[1]
            x = np.concatenate([x, skip], 1)
            rows, x = fine, self.blocks(f"block{i + 5}", fine, x)
        return self.conv("final", "submanifold", rows, x, size=1)[1]


def spvnas_shapes(cs, inputs, classes) -> dict[str, tuple[int, ...]]:
    """Names and shapes of SPVNAS's MinkUNet and SPVCNN, which are the same.

    Its MinkUNet saves the point branch too, which it never calls.
    """
    shapes = {
        "classifier.0.weight": (classes, cs[8]),
        "classifier.0.bias": (classes,),
    }

    def conv(name, volume, a, b, norm):
        shapes[f"{name}.kernel"] = (a, b) if volume == 1 else (volume, a, b)
        statistics(norm, b)

    def statistics(name, width):
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.{leaf}"] = (width,)
        shapes[f"{name}.num_batches_tracked"] = ()

    def residual(name, a, b):
        conv(f"{name}.net.0", 27, a, b, f"{name}.net.1")
        conv(f"{name}.net.3", 27, b, b, f"{name}.net.4")
        if a != b:
            conv(f"{name}.downsample.0", 1, a, b, f"{name}.downsample.1")

    conv("stem.0", 27, inputs, cs[0], "stem.1")
    conv("stem.3", 27, cs[0], cs[0], "stem.4")
    for i in range(4):
        stage, up = f"stage{i + 1}", f"up{i + 1}"
        conv(f"{stage}.0.net.0", 8, cs[i], cs[i], f"{stage}.0.net.1")
        residual(f"{stage}.1", cs[i], cs[i + 1])
        residual(f"{stage}.2", cs[i + 1], cs[i + 1])
        conv(f"{up}.0.net.0", 8, cs[4 + i], cs[5 + i], f"{up}.0.net.1")
        residual(f"{up}.1.0", cs[5 + i] + cs[3 - i], cs[5 + i])
        residual(f"{up}.1.1", cs[5 + i], cs[5 + i])
    for i, (a, b) in enumerate(((0, 4), (4, 6), (6, 8))):
        shapes[f"point_transforms.{i}.0.weight"] = (cs[b], cs[a])
        shapes[f"point_transforms.{i}.0.bias"] = (cs[b],)
        statistics(f"point_transforms.{i}.1", cs[b])
    return shapes


def minkowski_shapes(
    planes, layers, inputs, classes, bottleneck=False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of MinkowskiEngine's MinkUNet."""
    wide = 4 if bottleneck else 1
    shapes = {
        "final.kernel": (wide * planes[7], classes),
        "final.bias": (1, classes),
    }

    def conv(name, volume, a, b, norm):
        shapes[f"{name}.kernel"] = (a, b) if volume == 1 else (volume, a, b)
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{norm}.bn.{leaf}"] = (b,)
        shapes[f"{norm}.bn.num_batches_tracked"] = ()

    def blocks(name, a, b, count):
        for i in range(count):
            block, c, out = f"{name}.{i}", wide * b if i else a, wide * b
            conv(f"{block}.conv1", 1 if bottleneck else 27, c, b, f"{block}.norm1")
            conv(f"{block}.conv2", 27, b, b, f"{block}.norm2")
            if bottleneck:
                conv(f"{block}.conv3", 1, b, out, f"{block}.norm3")
            if c != out:
                conv(f"{block}.downsample.0", 1, c, out, f"{block}.downsample.1")

    conv("conv0p1s1", 125, inputs, 32, "bn0")
    down = (32, *(wide * c for c in planes[:4]))
    for i in range(4):
        conv(f"conv{i + 1}p{2**i}s2", 8, down[i], down[i], f"bn{i + 1}")
        blocks(f"block{i + 1}", down[i], planes[i], layers[i])
    for i in range(4):
        low, out = wide * planes[3 + i], planes[4 + i]
        conv(f"convtr{i + 4}p{2 ** (4 - i)}s2", 8, low, out, f"bntr{i + 4}")
        blocks(f"block{i + 5}", out + down[3 - i], out, layers[4 + i])
    return shapes


def filled(shapes, seed=0):
    """Arrays for names and shapes, such that activations keep their size."""
    rng, state = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        if name.endswith("num_batches_tracked"):
            state[name] = mx.array(9)
            continue
        if name.endswith("running_var") or ("weight" in name and len(shape) == 1):
            value = rng.uniform(0.6, 1.4, shape)
        elif len(shape) == 1 or name.endswith("bias"):
            value = rng.normal(size=shape) * 0.2
        else:
            kernel = shape[1:] if name.endswith("weight") else shape[:-1]
            fan = np.prod(kernel)
            value = rng.normal(size=shape) * (3 / fan) ** 0.5
        state[name] = mx.array(value.astype(np.float32))
    return state
