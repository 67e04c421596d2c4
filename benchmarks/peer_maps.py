"""Maps of layers for other libraries' kernels, and what each keeps of them.

For peer_layers.py: NumPy finds the rows, PyTorch holds them.
"""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from layer_cases import Kind

TORCH = {"float16": torch.float16, "tf32": torch.float32}


class Table:
    """(N, V) int32 rows of what is read by each row that is written, -1 where none."""

    def __init__(self, rows: torch.Tensor):
        self.rows, self.kept = rows, {}

    @cached_property
    def masks(self) -> torch.Tensor:
        """Return (N,) int64, a bit for each offset."""
        offsets = torch.arange(self.rows.shape[1], device=self.rows.device)
        return ((self.rows >= 0).to(torch.int64) << offsets).sum(1)

    @cached_property
    def sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uint32 rows and FlexGEMM's order of them, by the mask's Gray code."""
        binary = self.masks.clone()
        for shift in range(1, self.rows.shape[1]):
            binary ^= self.masks >> shift
        return self.rows.contiguous().view(torch.uint32), torch.argsort(binary)

    def blocks(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the offsets that blocks of sorted rows have, and where each starts."""
        if size not in self.kept:
            masks = self.masks[self.sorted[1]]
            masks = torch.nn.functional.pad(masks, (0, -len(masks) % size))
            offsets = torch.arange(self.rows.shape[1], device=masks.device)
            there = (masks.reshape(-1, size, 1) >> offsets & 1).any(1)
            starts = torch.nn.functional.pad(there.sum(1).cumsum(0), (1, 0))
            found = torch.nonzero(there)[:, 1].to(torch.int32).contiguous()
            self.kept[size] = found, starts.to(torch.int32)
        return self.kept[size]

    @cached_property
    def pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows read and written by offset, and where each offset starts."""
        by_offset = self.rows.T
        offset, written = torch.nonzero(by_offset >= 0, as_tuple=True)
        read = by_offset[offset, written]
        counts = torch.bincount(offset, minlength=len(by_offset))
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        return tuple(x.to(torch.int32) for x in (read, written, starts))

    @cached_property
    def by_mask(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return spconv-triton's (V, N) rows, sorted masks and their order."""
        masks, order = torch.sort(self.masks.to(torch.int32), stable=True)
        return self.rows.T.contiguous(), masks, order.to(torch.int32)

    @cached_property
    def mirrored(self) -> torch.Tensor:
        """Return (V, N) rows, each offset's those of the opposite one."""
        return self.rows.T.flip(0).contiguous()


class Map(NamedTuple):
    """The table of a layer and that of the way back: one, where it is a mirror."""

    table: Table
    back: Table

    @property
    def is_mirror(self) -> bool:
        """Return whether input gradients read the forward table."""
        return self.table is self.back


def keys(coords: np.ndarray) -> np.ndarray:
    """Return an int64 for each (x, y, z), in their order."""
    wide = coords.astype(np.int64) + 4
    return wide[:, 0] << 42 | wide[:, 1] << 21 | wide[:, 2]


def found(wanted: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return where each of ``wanted`` is in sorted ``known``, or -1."""
    at = np.minimum(np.searchsorted(keys(known), keys(wanted)), len(known) - 1)
    return np.where(keys(known)[at] == keys(wanted), at, -1).astype(np.int32)


def make_map(coords: np.ndarray, kind: Kind, device: str) -> Map:
    """Return the map of a layer that reads or, of an inverse, writes ``coords``."""
    fine = coords[np.lexsort(coords.T[::-1])].astype(np.int64)
    steps = np.array([*np.ndindex(kind.size)])
    steps -= [n // 2 if n % 2 else 0 for n in kind.size]
    if kind.stride == 1:
        rows = np.stack([found(fine + step, fine) for step in steps], axis=1)
        return Map(*[Table(torch.from_numpy(rows).to(device))] * 2)
    # Multiples of 16 share what Triton compiles: at most 15 voxels are left out.
    coarse = np.unique(fine // kind.stride, axis=0)
    coarse = coarse[: max(16, len(coarse) // 16 * 16)]
    read = [found(kind.stride * coarse + step, fine) for step in steps]
    written = []
    for step in steps:
        cell, rest = np.divmod(fine - step, kind.stride)
        written.append(np.where(rest.any(axis=1), -1, found(cell, coarse)))
    down, up = (
        Table(torch.from_numpy(np.stack(rows, axis=1)).to(device))
        for rows in (read, written)
    )
    return Map(down, up) if kind.writes_coarse else Map(up, down)


class Arrays:
    """Features, weights (C, V, C) and gradients of a case."""

    def __init__(self, of: Map, case: dict):
        device, dtype = of.table.rows.device, TORCH[case["dtype"]]
        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=generator, device=device)
        channels, (rows, volume) = case["channels"], of.table.rows.shape
        self.map, self.dtype, self.channels = of, dtype, channels
        self.x = normal(len(of.back.rows), channels).to(dtype)
        self.dy = normal(rows, channels).to(dtype)
        scale = math.sqrt(4 * channels)
        self.w = (normal(channels, volume, channels) / scale).to(dtype)
        self.w_turned = self.w.permute(2, 1, 0).contiguous()
