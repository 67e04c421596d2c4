"""Dense masked attention and rotary positions in float64."""

import cases
import mlx.core as mx
import numpy as np
import reference as ref

import mlx_lattice as ml


def tensor(name="batches", n=60, d=3, **options):
    coords = cases.geometry(name, d, n)
    feats = cases.features(len(coords), 1)
    return ml.SparseTensor(mx.array(coords), mx.array(feats), **options)


def dense(q, k, v, found, scale=None):
    """softmax(q k^T + mask) v in float64, and the probabilities."""
    q, k, v = (ref.to_numpy(a).astype(np.float64) for a in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = (np.repeat(a, repeats, axis=1) for a in (k, v))
    scale = q.shape[2] ** -0.5 if scale is None else scale
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    together = np.array([[a == b for b in found] for a in found]).reshape(2 * [len(q)])
    scores = np.where(together, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", p, v), p


def turned(array, coords, base=10000.0, frequency=1.0):
    """Complex rotation in float64, positions from the least coordinates."""
    dims, pairs = coords.shape[1] - 1, array.shape[2] // 2
    each = pairs // dims
    cells = coords[:, 1:].astype(np.float64) - coords[:, 1:].min(0)
    angle = np.zeros((len(array), pairs))
    for axis in range(dims):
        for j in range(each):
            speed = frequency / base ** (j / each)
            angle[:, axis * each + j] = cells[:, axis] * speed
    z = array[..., 0::2] + 1j * array[..., 1::2]
    z = z * np.exp(1j * angle)[:, None]
    return np.stack([z.real, z.imag], -1).reshape(array.shape)
