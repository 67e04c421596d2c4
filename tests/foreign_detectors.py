"""OpenPCDet's CenterPoint and VoxelNeXt in float64, from their own state dicts.

A kernel of a sparse layer is (C_out, z, y, x, C_in), one of a dense layer PyTorch's.
Norms are by their batch, as in training; ``p`` may be changed between calls.
"""

import numpy as np
import reference as ref


class Detector:
    """Layers by their published names; edges are searched once a scene."""

    def __init__(self, state):
        self.p = {
            n: np.array(ref.to_numpy(a), np.float64, order="C")
            for n, a in state.items()
        }
        self.found = {}

    def norm(self, name, x, eps=1e-3):
        axes = tuple(range(x.ndim - 1))
        x = (x - x.mean(axes)) / np.sqrt(x.var(axes) + eps)
        return x * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]

    def conv(self, name, rows, x, shape, **how):
        kernel = self.p[f"{name}.weight"]
        size, (c_out, c_in) = kernel.shape[1:-1], (kernel.shape[0], kernel.shape[-1])
        strided = {"kind": "forward", "support": "reach", "spatial_shape": shape}
        if "target" not in how:
            how = {"kind": "submanifold"} | ((strided | how) if how else {})
        onto = how.get("target", rows)
        key = size, rows.tobytes(), str(how), onto.tobytes()
        if key not in self.found:
            self.found[key] = ref.relation(coords=rows, kernel_size=size, **how)
        relation = self.found[key]
        w = kernel.reshape(c_out, -1, c_in).transpose(1, 2, 0)
        w = kernel.reshape(1, c_in, c_out) if len(w) == 1 else w
        y = np.zeros((len(relation.out_coords), c_out))
        for k in range(len(w)):
            i, o, _ = relation.edges[relation.edges[:, 2] == k].T
            y[o] += x[i] @ w[k]
        if how["kind"] == "forward":
            facts = size, how["stride"], how["padding"], 1
            shape = ref.conv_shape(shape, *facts)
        return relation.out_coords, y + self.p.get(f"{name}.bias", 0), shape

    def active(self, name, rows, x, shape, eps=1e-3, **how):
        rows, y, shape = self.conv(f"{name}.0", rows, x, shape, **how)
        return rows, np.maximum(self.norm(f"{name}.1", y, eps), 0), shape

    def block(self, name, rows, x, shape):
        y = self.conv(f"{name}.conv1", rows, x, shape)[1]
        y = np.maximum(self.norm(f"{name}.bn1", y), 0)
        y = self.norm(f"{name}.bn2", self.conv(f"{name}.conv2", rows, y, shape)[1])
        return np.maximum(x + y, 0)

    def stages(self, rows, x, shape, count, paddings):
        """The residual stages, each as rows, features and the grid's shape."""
        here = self.active("backbone_3d.conv_input", rows, x, shape)
        made = []
        for i in range(1, count + 1):
            name, first = f"backbone_3d.conv{i}", 0
            if i > 1:
                down = {"stride": 2, "padding": paddings[i]}
                here, first = self.active(f"{name}.0", *here, **down), 1
            for j in (first, first + 1):
                here = here[0], self.block(f"{name}.{j}", *here), here[2]
            made.append(here)
        return made

    def dense(self, conv, norm, x, stride=1, eps=1e-3):
        """A dense convolution, its norm, a ReLU; without ``norm`` the first alone."""
        w = self.p[f"{conv}.weight"]
        reach = w.shape[2] // 2
        x = np.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)))
        seen = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(1, 2))
        seen = seen[:, ::stride, ::stride]
        y = np.einsum("byxcij,ocij->byxo", seen, w) + self.p.get(f"{conv}.bias", 0)
        return np.maximum(self.norm(norm, y, eps), 0) if norm else y

    def enlarged(self, name, x):
        w = self.p[f"{name}.0.weight"]  # (C_in, C_out, stride, stride)
        y = np.einsum("byxc,coij->byixjo", x, w)
        b, high, s, wide, _, c = y.shape
        y = y.reshape(b, high * s, wide * s, c)
        return np.maximum(self.norm(f"{name}.1", y), 0)


class UNetV2(Detector):
    """Features of the rows, and those of the encoded tensor."""

    def __call__(self, rows, x, shape):
        here, levels = self.active("conv_input", rows, x, shape), []
        for i in range(1, 5):
            for j in range(3 if i > 1 else 1):
                down = {"stride": 2, "padding": (0, 1, 1) if i == 4 else 1}
                down = down if i > 1 and j == 0 else {}
                here = self.active(f"conv{i}.{j}", *here, **down)
            levels.append(here)
        encoded = self.active("conv_out", *here, stride=(2, 1, 1), padding=0)[1]
        y = here[1]
        for i in (4, 3, 2, 1):
            rows, lateral, shape = levels[i - 1]
            across = self.block(f"conv_up_t{i}", rows, lateral, shape)
            both = np.concatenate([y, across], axis=1)
            y = self.active(f"conv_up_m{i}", rows, both, shape)[1]
            y = y + both.reshape(len(both), y.shape[1], -1).sum(2)
            if i > 1:
                up = {"kind": "transposed", "target": levels[i - 2][0], "stride": 2}
                up["padding"] = (0, 1, 1) if i == 4 else 1
                y = self.active(f"inv_conv{i}", rows, y, shape, **up)[1]
        return self.active("conv5.0", rows, y, shape)[1], encoded


class VoxelNeXt(Detector):
    def __call__(self, rows, x, shape, heads, branches):
        same = dict.fromkeys(range(7), 1)
        levels = self.stages(rows, x, shape, 6, same)[3:]
        scaled = [
            np.concatenate([r[:, :1], r[:, 2:] * 2**i], axis=1)
            for i, (r, _, _) in enumerate(levels)
        ]
        rows, where = np.unique(np.concatenate(scaled), axis=0, return_inverse=True)
        y = np.zeros((len(rows), levels[0][1].shape[1]))
        np.add.at(y, where.reshape(-1), np.concatenate([f for _, f, _ in levels]))
        here = rows, y, levels[0][2][1:]
        here = self.active("backbone_3d.conv_out", *here, stride=1, padding=1)
        here = self.active("backbone_3d.shared_conv", *here, eps=1e-5)
        made = []
        for i in range(heads):
            head = {}
            for name in branches:
                branch = f"dense_head.heads_list.{i}.{name}"
                y = self.active(f"{branch}.0", *here, eps=1e-5)
                head[name] = self.conv(f"{branch}.1", *y)[1]
            made.append(head)
        return here[0], made


class CenterPoint(Detector):
    def __call__(self, rows, x, shape, heads, branches):
        pads = {2: 1, 3: 1, 4: (0, 1, 1)}
        here = self.stages(rows, x, shape, 4, pads)[-1]
        out = {"stride": (2, 1, 1), "padding": 0}
        rows, y, shape = self.active("backbone_3d.conv_out", *here, **out)
        x = np.zeros((rows[:, 0].max() + 1, *shape[1:], y.shape[1], shape[0]))
        x[rows[:, 0], rows[:, 2], rows[:, 3], :, rows[:, 1]] = y
        x, maps = x.reshape(*x.shape[:3], -1), []
        for i in range(2):
            block = f"backbone_2d.blocks.{i}"
            x = self.dense(f"{block}.1", f"{block}.2", x, stride=i + 1)
            x = self.dense(f"{block}.4", f"{block}.5", x)
            maps.append(self.enlarged(f"backbone_2d.deblocks.{i}", x))
        x, name = np.concatenate(maps, axis=-1), "dense_head.shared_conv"
        x = self.dense(f"{name}.0", f"{name}.1", x, eps=1e-5)
        made = []
        for i in range(heads):
            head = {}
            for name in branches:
                branch = f"dense_head.heads_list.{i}.{name}"
                y = self.dense(f"{branch}.0.0", f"{branch}.0.1", x, eps=1e-5)
                y = self.dense(f"{branch}.1", None, y)
                head[name] = y.reshape(-1, y.shape[-1])
            made.append(head)
        cells = np.indices(x.shape[:3]).reshape(3, -1).T
        return cells, made


def loss(cells, heads, wanted, weight=2.0) -> float:
    """Focal loss of heat maps and L1 of boxes, from what each head is to say.

    Args:
        cells: (N, 3) batch, y and x.
        heads: arrays of branches.
        wanted: of each head a list of (batch, cell's y, x, class, sigma, values).
    """
    total = 0.0
    for head, boxes in zip(heads, wanted, strict=True):
        heat, apart = np.zeros(head["hm"].shape), 0.0
        for batch, y, x, label, sigma, values in boxes:
            away = (cells[:, 1] - y) ** 2 + (cells[:, 2] - x) ** 2
            peak = np.exp(-away / (2 * sigma**2)) * (cells[:, 0] == batch)
            heat[:, label] = np.maximum(heat[:, label], peak)
            row = np.flatnonzero((cells == (batch, y, x)).all(1)).item()
            apart += sum(np.abs(head[n][row] - v).sum() for n, v in values.items())
        chance = 1 / (1 + np.exp(-head["hm"]))
        at = (1 - chance) ** 2 * np.log(chance)
        off = (1 - heat) ** 4 * chance**2 * np.log(1 - chance)
        focal = -np.where(heat == 1, at, off).sum()
        total += (focal + weight * apart) / max(1, len(boxes))
    return total
