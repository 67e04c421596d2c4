"""MLX's graphs of CUDA launches end early: importing this says so to MLX.

What a graph's launches read is held until it is done, and several are ahead of the GPU.
On an H200 MLX ends one after 100 launches, or 1000 million elements read: a training
step of MinkUNet34 with 100 000 rows then holds up to 1.3 GB at once, with a hundredth
of the elements 0.7, and takes as long. MLX reads the variable as it first uses a GPU;
one that is set stays.
"""

from __future__ import annotations

import os
import sys

MILLIONS = "10"  # of elements

if sys.platform != "darwin":  # where Metal's own are of 40 or 50
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", MILLIONS)
