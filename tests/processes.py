"""Run several processes on this machine by mlx.launch, over the ring or NCCL."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import mlx.core as mx
import one_gpu
import pytest

# The code of the script mlx.launch, which not every installation of MLX has.
LAUNCH = "from mlx._distributed_utils.launch import main; main()"
RING, NCCL = "ring", "nccl"
# Under Metal's emulator each process would compile its kernels first.
on_the_cpu_alone = pytest.mark.skipif(
    os.environ.get("MLX_LATTICE_METAL") == "host", reason="runs on the CPU alone"
)


def _why_not(backend: str) -> str | None:
    if sys.platform == "win32":
        return "mlx.launch does not run here"
    if backend == RING and mx.cuda.is_available():
        # Two trainings over it did not end in four minutes on an H200's machine.
        return "on NVIDIA GPUs processes exchange by NCCL"
    if not mx.distributed.is_available(backend):
        return f"this MLX is built without {backend}"
    if backend == NCCL and not mx.device_count(mx.gpu):
        return "NCCL needs a GPU; this machine has none"
    return None


def needs(backend: str) -> pytest.MarkDecorator:
    """Skip a test if two processes cannot talk by a backend, and say why."""
    reason = _why_not(backend)
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def environment() -> dict[str, str]:
    """The environment without the variables of an outer launch or a forced route."""
    outer = ("MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "NCCL_HOST_IP", "NCCL_PORT")
    dropped = (*outer, "MLX_LATTICE_ROUTE")
    return {k: v for k, v in os.environ.items() if k not in dropped}


def run(*command, folder: Path) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    # mlx.launch returns 0 even if one of its processes failed.
    failed = done.returncode or "exited with code" in done.stderr
    assert not failed, done.stdout + done.stderr
    return done.stdout


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive free ports of localhost."""
    for _ in range(100):
        with ExitStack() as held:
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                for later in range(port + 1, port + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", later))
            except (OSError, OverflowError):
                continue
            return port
    raise RuntimeError("no consecutive ports of localhost are free")


def launch(
    script: Path, *arguments, folder: Path, processes: int = 2, backend: str = RING
) -> str:
    """Run a script on several processes over localhost.

    With NCCL each process has its own GPU, or all share one if there are too few.
    """
    command = [sys.executable, "-c", LAUNCH, "--backend", backend]
    if backend == NCCL and mx.device_count(mx.gpu) < processes:
        hosts = ",".join(["127.0.0.1"] * processes)
        command += ["--hosts", hosts, "-n", 1]
        script, arguments = Path(one_gpu.__file__), (script, *arguments)
    else:
        command += ["-n", processes]
    ports = "--starting-port" if backend == RING else "--nccl-port"
    command += ["--python", sys.executable, ports, free_ports(processes)]
    return run(*command, script, *arguments, folder=folder)
