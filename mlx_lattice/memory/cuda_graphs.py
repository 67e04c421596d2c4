"""How MLX keeps graphs of CUDA launches: importing this tells it, before it reads them.

What a graph's launches read is held until it is done, and several are ahead of the GPU.
On an H200 MLX ends one after 100 launches, or 1000 million elements read: a training
step of MinkUNet34 with 100 000 rows then holds up to 1.3 GB at once, with a hundredth
of the elements 0.7, and takes as long.

MLX keeps the last graphs, and plans of attention and dense convolutions, by what is in
them. It raises once a process has made twice as many as are kept, 800 graphs: a sign
of a mistake where shapes repeat, but each scan has its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

SETTINGS = {
    "MLX_MAX_MB_PER_BUFFER": "10",  # million elements
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}


def tell_mlx(
    variables: MutableMapping[str, str] = os.environ, platform: str = sys.platform
) -> None:
    """Set what the user has not set; importing the package does it.

    Args:
        variables: of the process, which MLX reads when it first uses a GPU.
        platform: not macOS, where Metal keeps graphs of 40 or 50 million elements.
    """
    if platform != "darwin":
        for name, value in SETTINGS.items():
            variables.setdefault(name, value)


tell_mlx()
