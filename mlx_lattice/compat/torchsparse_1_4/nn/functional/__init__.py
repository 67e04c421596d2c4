"""torchsparse.nn.functional."""

from ....torchsparse.layers import (
    global_avg_pool,
    global_max_pool,
    leaky_relu,
    relu,
    spcrop,
)
from ....torchsparse.points import (
    spcount,
    spdevoxelize,
    sphash,
    sphashquery,
    spvoxelize,
)
from ...version1 import calc_ti_weights, conv3d, spdownsample

__all__ = [
    "calc_ti_weights", "conv3d", "global_avg_pool", "global_max_pool", "leaky_relu",
    "relu", "spcount", "spcrop", "spdevoxelize", "spdownsample", "sphash",
    "sphashquery", "spvoxelize",
]  # fmt: skip
