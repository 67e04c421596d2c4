"""A script in one of several processes that share a GPU: run by mlx.launch.

    python tests/one_gpu.py SCRIPT ARGUMENTS...

NCCL refuses two processes on one GPU of one host, so each says that its host is another
one. What they exchange goes through sockets then: right, and slow.
"""

import os
import runpy
import sys
from pathlib import Path


def main(script: str, *arguments: str) -> None:
    """Run a script as Python does, as on a host of its own."""
    os.environ["NCCL_HOSTID"] = f"process {os.environ['MLX_RANK']}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
