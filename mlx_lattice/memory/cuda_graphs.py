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

SETTINGS = {
    "MLX_MAX_MB_PER_BUFFER": "10",  # million elements
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}

if sys.platform != "darwin":  # where Metal's own are of 40 or 50
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
