"""Filled patches by a launch of each GPU: what MLX's operations give, to a slot."""

import mlx.core as mx
import numpy as np
import pytest
from cuda_emulation import Emulator, emulated, emulating
from emulated_cuda import EMULATED, place_of
from places import HERE, agreed

import mlx_lattice as ml
from mlx_lattice import backends, ops
from mlx_lattice.backends.gpu.nvrtc import rehearsal, rehearsed
from mlx_lattice.ops.attention import filled_patches
from mlx_lattice.ops.attention_calls import PADDING

GPUS = [place for place in HERE if place.name in ("metal", "cuda")]


@pytest.fixture(params=[*GPUS, EMULATED], ids=lambda place: place.name)
def place(request):
    return place_of(request)


def scan(sizes, seed=0):
    """Rows in mixed order, so many of each batch element."""
    rng, parts = np.random.default_rng(seed), []
    for batch, n in enumerate(sizes):
        flat = rng.choice(16**3, n, replace=False)
        cells = np.stack(np.unravel_index(flat, (16,) * 3), axis=1)
        parts.append(np.insert(cells, 0, batch, axis=1))
    rows = np.concatenate(parts).astype(np.int32)
    rows = rng.permutation(rows)
    return ml.SparseTensor(mx.array(rows), mx.ones((len(rows), 1)))


@pytest.mark.parametrize("padding", ("cpu", "cuda"))
@pytest.mark.parametrize("patch", (1, 8, 33, 500))
@pytest.mark.parametrize(
    "sizes", ((300,), (1,), (64, 8, 3), (100, 0, 7, 16, 250), (33, 66, 34, 32))
)
def test_slots(place, sizes, patch, padding):
    x, names = scan(sizes), ("row", "slot", "again", "own", "place")
    with backends.portable_only():
        wanted = filled_patches(x, patch, "z-trans", None, PADDING[padding])

    def run():
        groups = filled_patches(x, patch, "z-trans", None, PADDING[padding])
        return [getattr(groups, name) for name in names]

    for name, got in zip(names, agreed(place, run), strict=True):
        right = getattr(wanted, name)
        assert (got is None) == (right is None), name
        if got is not None:
            np.testing.assert_array_equal(np.array(got), np.array(right), name)


@emulated
def test_what_a_rehearsal_keeps_is_right(cuda_programs):
    """Patches, weights of upsampling and places of a mean are kept with their rows: a
    rehearsal has them computed.
    """
    emulator = Emulator(cuda_programs)
    launch, left_out = emulator.launch, []

    def leave_out(kernel, **given):
        made = launch(kernel, **given)
        if rehearsed() and not kernel.geometry:
            left_out.append(kernel.name)
            return [mx.zeros_like(array) for array in made]
        return made

    emulator.launch = leave_out
    x = scan((300, 200))
    with backends.portable_only():
        wanted = filled_patches(x, 64, "z", None, PADDING["cuda"])
        coarse = ops.avg_pool3d(x, 2)
        expected = ops.upsample_linear3d(coarse, 2, x)
        means = ops.avg_pool3d(x, 3, 2).feats
    x = scan((300, 200))  # nothing is kept of these rows
    with emulating(emulator):
        coarse = ops.avg_pool3d(x, 2)
        mx.eval(coarse.feats)
        with rehearsal():
            got = filled_patches(x, 64, "z", None, PADDING["cuda"])
            mx.eval(ops.upsample_linear3d(coarse, 2, x).feats)
            mx.eval(ops.avg_pool3d(x, 3, 2).feats)
        pooled = ops.avg_pool3d(x, 3, 2).feats
        y = ops.upsample_linear3d(coarse, 2, x)
        mx.eval(y.feats, got.row, pooled)
    assert left_out  # features were
    np.testing.assert_array_equal(np.array(got.row), np.array(wanted.row))
    np.testing.assert_allclose(np.array(y.feats), np.array(expected.feats), 1e-5)
    np.testing.assert_allclose(np.array(pooled), np.array(means), 1e-5)
