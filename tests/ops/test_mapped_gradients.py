"""``mx.vmap`` of gradients: those of each, one after the other, at every call.

On the CPU, as docs/limits.md has it.
"""

import cases
import mlx.core as mx
import numpy as np
import pytest
from conftest import mappable

import mlx_lattice as ml
from mlx_lattice import devices, nn, ops

C, COUNT, CALLS = 4, 3, 3
COORDS = mx.array(cases.geometry("batches", 3, 60))
LINE = mx.arange(1, C + 1) / 2
KERNEL = mx.array(cases.features(27 * C, C, 5)).reshape(27, C, C)
mx.random.seed(0)
NET = nn.Sequential(
    nn.SubmConv3d(C, 8, 3), nn.BatchNorm(8), nn.ReLU(), nn.Conv3d(8, 8, 2, 2),
    nn.BatchNorm(8), nn.GELU(), nn.ConvTranspose3d(8, C),
)  # fmt: skip
NET.eval()
FUNCTIONS = {
    "batch_norm": lambda x: ops.batch_norm(x, weight=LINE, bias=LINE),
    "batch_norm, fixed": lambda x: ops.batch_norm(x, LINE - 1, LINE, LINE, LINE),
    "group_norm": lambda x: ops.group_norm(x, 2, LINE, LINE),
    "instance_norm": lambda x: ops.instance_norm(x),
    "layer_norm": lambda x: ops.layer_norm(x, LINE, LINE),
    "gate": lambda x: ops.gate(x, LINE[None] * mx.ones((x.batch_size, 1))),
    "gelu": lambda x: ops.gelu(x),
    "max_pool3d": lambda x: ops.max_pool3d(x, 2, 2),
    "global_max_pool": lambda x: x.replace(
        mx.tile(ops.global_max_pool(x).sum(axis=0), (len(x), 1))
    ),
    "subm_conv3d": lambda x: ops.subm_conv3d(x, KERNEL),
    "net": NET,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_mapped(name):
    if name == "net" and devices.current().backend != devices.CPU:
        pytest.skip("MLX has no rule for its GatherMM, a portable route")
    function = FUNCTIONS[name]
    x = ml.SparseTensor(COORDS, mx.zeros((len(COORDS), C)))
    batch = mx.array(cases.features(COUNT * len(x), C, 1)).reshape(COUNT, len(x), C)

    def total(feats):
        made = function(x.replace(feats)).feats
        by = mx.array(cases.features(len(made), C, 9))
        return (mx.square(made) * by + made).sum()

    with mappable():
        wanted = mx.stack([mx.grad(total)(each) for each in batch])
        for _ in range(CALLS):  # later ones repeat launches
            found = mx.vmap(mx.grad(total))(batch)
            limit = 1e-5 * np.abs(np.array(wanted)).max()
            np.testing.assert_allclose(np.array(found), np.array(wanted), 1e-5, limit)
            values, each = mx.vmap(total)(batch), mx.stack([*map(total, batch)])
            np.testing.assert_allclose(np.array(values), np.array(each), 1e-5)
