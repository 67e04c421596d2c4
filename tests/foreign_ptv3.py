"""Point Transformer V3 in float64, from the state dict that Pointcept saves.

Nothing here knows our names: cells, curves and patches are worked out row by row, and
``p`` may be changed between calls.
"""

import math

import numpy as np
import reference as ref
import reference_curves

ORDERS = ("z", "z-trans", "hilbert", "hilbert-trans")
_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x):
    return x * (1 + _erf(x / math.sqrt(2))) / 2 if x.size else x


class Scene:
    """One level's rows, with what is worked out of them once."""

    def __init__(self, rows, bits):
        self.rows, self.bits, self.found = np.asarray(rows, np.int64), bits, {}

    def edges(self, size):
        if size not in self.found:
            made = ref.relation("submanifold", self.rows, kernel_size=size)
            self.found[size] = np.asarray(made.edges)
        return self.found[size]

    def patches(self, curve, patch, flash):
        batch = self.rows[:, 0].tolist()
        if not flash:
            patch = min(patch, *np.unique(batch, return_counts=True)[1].tolist())
        if (curve, patch) not in self.found:
            along = reference_curves.order(curve, self.rows, self.bits)
            made, done = [], set()
            for rows in reference_curves.filled(along, batch, patch):
                own = [row for row in rows if row not in done]  # the first ones
                made.append((rows, len(own)))
                done |= set(own)
            self.found[curve, patch] = made
        return self.found[curve, patch]


class PTv3:
    """A state dict's net: form, patches and heads by level as they are configured."""

    def __init__(self, state, variant, enc, dec=(), flash=True, base=None, **more):
        self.p = {n: ref.to_numpy(a).astype(np.float64) for n, a in state.items()}
        self.variant, self.flash, self.base = variant, flash, base
        self.enc, self.dec = enc, dec  # (patch, heads) by level
        self.stride = more.get("stride", (2,) * (len(enc) - 1))
        self.dec_rope = more.get("dec_rope", True)
        self.legacy = more.get("legacy", False)  # Pointcept 1.5.1 and older
        self.training, self.scenes = False, None

    def linear(self, name, x):
        return x @ self.p[f"{name}.weight"].T + self.p.get(f"{name}.bias", 0)

    def layer_norm(self, name, x):
        mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
        x = (x - mean) / np.sqrt(var + 1e-5)
        return x * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]

    def norm(self, name, x):
        """The norm outside blocks: a batch norm in the first form."""
        if self.variant != "m1":
            return self.layer_norm(name, x)
        if self.training:
            mean, var = x.mean(0), x.var(0)
        else:
            mean, var = self.p[f"{name}.running_mean"], self.p[f"{name}.running_var"]
        x = (x - mean) / np.sqrt(var + 1e-3)
        return x * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]

    def conv(self, name, scene, x):
        kernel = self.p[f"{name}.weight"]
        w = kernel.reshape(kernel.shape[0], -1, kernel.shape[-1]).transpose(1, 2, 0)
        y, edges = np.zeros((len(x), w.shape[2])), scene.edges(kernel.shape[1])
        for k in range(len(w)):
            i, o, _ = edges[edges[:, 2] == k].T
            y[o] += x[i] @ w[k]
        return y + self.p.get(f"{name}.bias", 0)

    def turned(self, x, at):
        """Rotary positions: of an axis' channels the halves are pairs."""
        y, n = x.copy(), x.shape[-1] // 3
        for axis in range(3):
            speed = self.base ** (-2 * np.arange(n // 2) / n)
            angle = at[:, axis, None, None] * speed
            a, b = (slice(axis * n + h, axis * n + h + n // 2) for h in (0, n // 2))
            z = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle)
            y[..., a], y[..., b] = z.real, z.imag
        return y

    def attention(self, name, scene, x, at, curve, patch, heads, rope):
        width = x.shape[1] // heads
        qkv = self.linear(f"{name}.qkv", x).reshape(len(x), 3, heads, width)
        q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
        if rope:
            q, k = self.turned(q, at), self.turned(k, at)
        y = np.zeros((len(x), heads, width))
        for rows, own in scene.patches(curve, patch, self.flash):
            scores = np.einsum("ihd,jhd->hij", q[rows[:own]], k[rows]) * width**-0.5
            if f"{name}.rpe.rpe_table" in self.p:
                table = self.p[f"{name}.rpe.rpe_table"].reshape(3, -1, heads)
                cells, bound = scene.rows[:, 1:], table.shape[1] // 2
                apart = cells[rows[:own], None] - cells[None, rows]
                apart = np.clip(apart, -bound, bound) + bound
                for axis in range(3):
                    scores += table[axis][apart[..., axis]].transpose(2, 0, 1)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            y[rows[:own]] = np.einsum("hij,jhd->ihd", p, v[rows])
        return self.linear(f"{name}.proj", y.reshape(x.shape))

    def block(self, name, scene, x, at, i, patch, heads, rope, convolved=None):
        y = self.conv(f"{name}.cpe.0", scene, x if convolved is None else convolved)
        y = self.linear(f"{name}.cpe.1", y)
        x = x + self.layer_norm(f"{name}.cpe.2", y)
        y, curve = self.layer_norm(f"{name}.norm1.0", x), ORDERS[i % len(ORDERS)]
        more = at, curve, patch, heads, rope
        y = self.attention(f"{name}.attn", scene, y, *more)
        x = x + y * self.p.get(f"{name}.ls1.0.gamma", 1)
        y = gelu(
            self.linear(f"{name}.mlp.0.fc1", self.layer_norm(f"{name}.norm2.0", x))
        )
        y = self.linear(f"{name}.mlp.0.fc2", y)
        return x, y * self.p.get(f"{name}.ls2.0.gamma", 1)

    def blocks(self, name, *given, convolved=None):
        scene, x, *more = given
        for i in range(64):
            if f"{name}.block{i}.cpe.1.weight" not in self.p:
                return x
            at, *rest = more
            before, branch = self.block(
                f"{name}.block{i}", scene, x, at, i, *rest, convolved=convolved
            )
            x = before + branch
            convolved = branch if self.legacy else x

    def worked_out(self, rows, at):
        """Scenes, parents and positions of every level; the same for every call."""
        rows = np.asarray(rows, np.int64)
        bits = int(rows[:, 1:].max() + (not self.legacy)).bit_length()
        made = []
        for stride in (1, *self.stride):
            cells = rows // np.array([1, stride, stride, stride])
            rows, parent = np.unique(cells, axis=0, return_inverse=True)
            parent = parent.reshape(-1)
            if stride == 1 and not made:
                rows, parent = cells, np.arange(len(cells))
            if self.variant == "m1":
                bits = max(0, bits - int(math.log2(stride)))
            else:
                bits = int(rows[:, 1:].max() + 1).bit_length()
            here = parent == np.arange(len(rows))[:, None]
            at = here @ at / here.sum(1, keepdims=True)
            made.append((Scene(rows, bits), parent, at))
        return made

    def __call__(self, rows, x, at=None, training=False):
        """Features of every encoder level, and scores or decoder features."""
        self.training, x = training, np.asarray(x, np.float64)
        at = np.zeros((len(x), 3)) if at is None else np.asarray(at, np.float64)
        if self.scenes is None:
            self.scenes = self.worked_out(rows, at)
        stem, rope = "embedding.stem", self.variant == "m3"
        if self.variant == "m1":
            x = self.conv(f"{stem}.conv", self.scenes[0][0], x)
        else:
            x = self.linear(f"{stem}.linear", x)
        x, found = gelu(self.norm(f"{stem}.norm", x)), []
        for s, (scene, parent, at) in enumerate(self.scenes):
            if s:
                x = self.linear(f"enc.enc{s}.down.proj", x)
                x = np.stack([x[parent == c].max(0) for c in range(len(scene.rows))])
                x = gelu(self.norm(f"enc.enc{s}.down.norm.0", x))
            x = self.blocks(f"enc.enc{s}", scene, x, at, *self.enc[s], rope)
            found.append(x)
        for s in reversed(range(len(self.dec))):
            scene, _, at = self.scenes[s]
            name, parent = f"dec.dec{s}", self.scenes[s + 1][1]
            up = gelu(
                self.norm(f"{name}.up.proj.1", self.linear(f"{name}.up.proj.0", x))
            )
            skip = self.linear(f"{name}.up.proj_skip.0", found[s])
            skip = gelu(self.norm(f"{name}.up.proj_skip.1", skip))
            alone = skip if self.variant == "m1" else None
            given = scene, skip + up[parent], at, *self.dec[s], rope and self.dec_rope
            x = self.blocks(name, *given, convolved=alone)
        if self.dec and "seg_head.weight" in self.p:
            x = self.linear("seg_head", x)
        return found, x
