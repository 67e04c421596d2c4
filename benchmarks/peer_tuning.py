"""Triton's kernels of another library, tuned for a net: for peer_nets.py.

Triton compiles one candidate after another, which takes a net half an hour. Here
processes compile them side by side, each a share of them, into Triton's cache on the
disk, before one process alone times them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch
from zlib import crc32

import torch
from peer_layers import event_ms
from triton.runtime import Autotuner

# Of a tile: the sizes that go over channels, and the channels that they go over.
SIDES = {
    "_gather_gemm_kernel": (("BLOCK_N", "N_dim"), ("BLOCK_R", "R_dim")),
    "_dweight_masked_kernel": (("BLOCK_K", "K_dim"), ("BLOCK_C", "C_dim")),
}
CALLS = 5


def spconv_triton(folder: Path) -> object:
    """Return ``spconv_triton.pytorch`` of a checkout, its kernels ready to be tuned.

    The package itself asks pip for its version, which a checkout does not tell.
    """
    sys.path.insert(0, str(folder))
    with patch("importlib.metadata.version", lambda _: "checkout"):
        library = importlib.import_module("spconv_triton.pytorch")
    gemm = importlib.import_module("spconv_triton.pytorch._impl.gemm")
    for name, sides in SIDES.items():
        getattr(gemm, name).early_config_prune = _near(sides)
    Autotuner.do_bench = staticmethod(_timed)
    return library


def compile_ahead(run: Callable, given: Sequence, workers: int) -> None:
    """Compile what ``run(*given)`` would tune, in as many processes."""
    context = multiprocessing.get_context("spawn")
    jobs = [
        context.Process(target=_share, args=(run, given, at, workers))
        for at in range(workers)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()


def _near(sides: tuple) -> Callable:
    """Return what leaves out tiles much wider or narrower than the channels."""

    def prune(configs: list, named: dict, **more: object) -> list:
        facts = {**named, **more}

        def fits(config) -> bool:
            if config.kwargs.get("GROUP_SIZE_M", 8) != 8:
                return False
            pairs = [(config.kwargs[size], facts[c]) for size, c in sides]
            return all(min(c, 64) / 2 <= n <= 2 * max(16, c) for n, c in pairs)

        return [config for config in configs if fits(config)] or configs

    return prune


def _timed(call: Callable, quantiles: Sequence[float]) -> list[float]:
    """Return ms of a call, as many times as Triton asks for quantiles."""
    return [event_ms(call, CALLS)] * len(quantiles)


def _share(run: Callable, given: Sequence, at: int, workers: int) -> None:
    """Run with tuners that compile one process's share and time nothing."""
    torch.set_num_threads(1)

    def compiled(tuner: Autotuner, *args: object, config, **more: object) -> list:
        tuner.cache_results = False
        facts = [a for a in (*args, *more.values()) if isinstance(a, int)]
        named = repr((tuner.base_fn.__name__, facts, str(config)))
        if crc32(named.encode()) % workers != at:
            return [2.0] * 3
        try:
            tuner.fn.run(*args, **more, **config.all_kwargs())
        except Exception:  # too much shared memory, say: the tuner will see it
            return [3.0] * 3
        return [1.0] * 3

    def tuned(tuner: Autotuner, *args: object, **more: object) -> object:
        tuner.cache_results = False
        return own(tuner, *args, **more)

    own = Autotuner.run
    Autotuner.run, Autotuner._bench = tuned, compiled
    run(*given)
