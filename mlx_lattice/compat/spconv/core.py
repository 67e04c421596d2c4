"""spconv.core: names of algorithms, which layers take and ignore."""

from __future__ import annotations

from enum import Enum


class ConvAlgo(Enum):
    """An algorithm of spconv; the route table of mlx_lattice chooses instead."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


class AlgoHint(Enum):
    """A pass that spconv tunes for."""

    NoHint = 0
    Fowrard = 1  # spconv's spelling
    BackwardInput = 2
    BackwardWeight = 4
