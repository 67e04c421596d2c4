"""Other libraries' convolution kernels in Triton, a pass at a time: for peer_layers.py.

Nothing of theirs is built or copied: modules of their checkouts are imported without
the packages around them. ``peer_maps.py`` makes the maps that they read.
"""

from __future__ import annotations

import importlib
import math
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from layer_cases import KINDS
from peer_maps import Arrays, Table

PASSES = ("forward", "input_grad", "weight_grad")
MOST_SPLITS = 128


def stand_in(name: str, folder: Path, **known: object) -> None:
    """Make a package of a folder without its ``__init__``, which wants more than we."""
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    vars(package).update(known)


class FlexGEMM:
    """Its masked implicit GEMM, without and with split-K."""

    BASE, PRE = "flex_gemm.kernels.triton.spconv", "sparse_submanifold_conv_"
    STEMS = {"forward": "fwd", "input_grad": "bwd_input", "weight_grad": "bwd_weight"}

    def __init__(self, folder: Path, processors: int):
        no_cache = {"AUTOSAVE_AUTOTUNE_CACHE": False, "AUTOTUNE_CACHE_PATH": ""}
        stand_in("flex_gemm", folder / "flex_gemm", **no_cache)
        for name in ("kernels", "kernels.triton", "kernels.triton.spconv"):
            stand_in(f"flex_gemm.{name}", folder / "flex_gemm" / name.replace(".", "/"))
        utils = importlib.import_module("flex_gemm.kernels.triton.utils")
        utils.get_autotune_config = lambda platform, device: [
            *{str(c): c for c in (*platform["cuda"], *device["H100"])}.values()
        ]
        self.processors, self.kernels = processors, {}
        for pass_, split in product(PASSES, ("", "_splitk")):
            file = "fwd" if pass_ == "forward" else "bwd"
            tail = f"_masked_implicit_gemm{split}"
            module = importlib.import_module(f"{self.BASE}.{self.PRE}{file}{tail}")
            kernel = getattr(module, f"{self.PRE}{self.STEMS[pass_]}{tail}_kernel")
            self.kernels[pass_, bool(split)] = kernel.fn  # what its tuner runs
        config = importlib.import_module(f"{self.BASE}.config")
        self.configs = config.autotune_config

    def candidates(self, pass_: str, case: dict) -> Iterator[tuple]:
        """Yield (split, configuration)."""
        channels, rows, kind = case["channels"], case["rows"], KINDS[case["kind"]]
        if kind.stride > 1 and kind.writes_coarse == (pass_ == "forward"):
            rows //= 4  # about
        blocks, wide = -(-channels // 128), max(64, 2 * channels)
        is_weight = pass_ == "weight_grad"
        blocks *= blocks * kind.volume if is_weight else -(-rows // 128)
        least = max(0, int(math.log2(self.processors / blocks)))
        most = max(1, int(math.log2(32 * self.processors / blocks) + 1))
        for split in (2**i for i in range(least, most) if 2**i <= MOST_SPLITS):
            for config in self.configs:
                b1, b2 = config.kwargs["B1"], config.kwargs["B2"]
                few = split >= 8 and not is_weight  # few rows, for which it is tall
                if max(b2, b1 * is_weight) <= wide and (not few or max(b1, b2) <= 128):
                    yield split, config

    def call(self, pass_: str, a: Arrays, split: int, config, warm=False) -> Callable:
        """Return what runs a pass, or only compiles it."""
        c, logn = a.channels, 15  # by which it would look up what it has tuned
        back, sizes = pass_ == "input_grad", config.kwargs
        table = a.map.back if back else a.map.table
        rows, volume = table.rows.shape
        tiles = -(-c // sizes["B2"])
        more = dict(allow_tf32=True, warmup=warm, **config.all_kwargs())
        if pass_ == "weight_grad":
            pairs = (x.view(torch.uint32) for x in table.pairs)
            operands, shape = (a.dy, a.x, *pairs), (c, volume, c)
            tiles *= -(-c // sizes["B1"]) * volume
        else:
            unsigned, order = table.sorted
            tiles, shape = tiles * -(-rows // sizes["B1"]), (rows, c)
            more["valid_kernel"] = lambda size: table.blocks(size)[0]
            more["valid_kernel_seg"] = lambda size: table.blocks(size)[1]
            operands = (a.dy, a.w, unsigned, order)
            if not (back and a.map.is_mirror):
                # Without a mirror its forward kernel goes back, by turned weights.
                read = (a.dy, a.w_turned) if back else (a.x, a.w)
                pass_, operands = "forward", (*read, None, unsigned, order)
        run, grid = self.kernels[pass_, split > 1].run, (tiles,)
        if split > 1:
            more["SPLITK"], grid = split, (tiles, split)

        def call() -> torch.Tensor:
            like = dict(
                device=a.x.device, dtype=torch.float32 if split > 1 else a.dtype
            )
            y = torch.empty((split, *shape) if split > 1 else shape, **like)
            run(*operands, y, rows, logn, c, c, volume, grid=grid, **more)
            return y.sum(0).to(a.dtype) if split > 1 else y

        return call


class Pinned(NamedTuple):
    """A kernel under its tuner, with one configuration."""

    tuner: object
    config: object
    warm: bool

    def __getitem__(self, grid: object) -> Callable:
        given = dict(self.config.all_kwargs(), grid=grid, warmup=self.warm)
        return partial(self.tuner.fn.run, **given)


class SpconvTriton:
    """The functions of its gemm.py."""

    def __init__(self, folder: Path, processors: int):
        for name in ("", ".pytorch", ".pytorch._impl"):
            inside = "spconv_triton" + name
            stand_in(inside, folder / inside.replace(".", "/"))
        constants = importlib.import_module("spconv_triton.constants")
        constants.SPCONV_ALLOW_TF32 = True
        self.gemm = importlib.import_module("spconv_triton.pytorch._impl.gemm")
        self.gemm._multiprocessor_count = lambda device: processors
        self.own_splits = self.gemm._dweight_splits
        self.tuners = {
            name: getattr(self.gemm, name)
            for name in ("_gather_gemm_kernel", "_dweight_masked_kernel")
        }

    def assume_pairs(self, count: int) -> None:
        """Split weight gradients as for so many pairs of rows."""
        own = self.own_splits
        self.gemm._dweight_splits = lambda *facts: own(*facts[:-1], count)

    def candidates(self, pass_: str, case: dict) -> Iterator[tuple]:
        """Yield (1, configuration)."""
        gather, weight = self.tuners.values()
        is_weight = pass_ == "weight_grad"
        names = ("BLOCK_K", "BLOCK_C") if is_weight else ("BLOCK_N", "BLOCK_R")
        for config in (weight if is_weight else gather).configs:
            sizes = [config.kwargs[name] for name in names]
            fits = min(case["channels"], 64) / 2 <= min(sizes)
            fits = fits and max(sizes) <= 2 * max(16, case["channels"])
            if fits and config.kwargs.get("GROUP_SIZE_M", 8) == 8:
                yield 1, config

    def call(self, pass_: str, a: Arrays, split: int, config, warm=False) -> Callable:
        """Return what runs a pass, or only compiles it."""
        gemm, (table, back) = self.gemm, a.map

        def masked(of: Table) -> dict:
            return dict(zip(("pair_mask", "mask_argsort"), of.by_mask[1:], strict=True))

        def call() -> torch.Tensor:
            for name, tuner in self.tuners.items():
                setattr(gemm, name, Pinned(tuner, config, warm))
            pairs = table.by_mask[0]
            if pass_ == "forward":
                return gemm.conv_forward(a.x, a.w, pairs, len(a.dy), **masked(table))
            if pass_ == "weight_grad":
                return gemm.conv_backward_weight(a.x, a.dy, pairs, a.w.shape)
            if a.map.is_mirror:  # it has no masks here
                return gemm.conv_backward_input(a.dy, a.w, table.mirrored, len(a.x))
            given = back.by_mask[0], len(a.x)
            return gemm.conv_backward_input(a.dy, a.w, *given, **masked(back))

        return call


LIBRARIES = {"FlexGEMM": FlexGEMM, "spconv-triton": SpconvTriton}
