"""torchsparse.nn.functional."""

from ...convolution import *
from ...layers import (
    global_avg_pool,
    global_max_pool,
    leaky_relu,
    relu,
    silu,
    spcrop,
)
from ...points import (
    calc_ti_weights,
    spcount,
    spdevoxelize,
    sphash,
    sphashquery,
    spvoxelize,
)

__all__ = [
    "calc_ti_weights", "global_avg_pool", "global_max_pool", "leaky_relu", "relu",
    "silu", "spcount", "spcrop", "spdevoxelize", "sphash", "sphashquery", "spvoxelize",
]  # fmt: skip
