"""torchsparse.backend: the table of coordinates that nets use by themselves."""

from __future__ import annotations

import torch

from .points import kernel_positions, make_divisible, row_places, sphashquery

__all__ = ["GPUHashTable"]

_ROWS = 128  # results have a multiple of so many rows


class GPUHashTable:
    """Finds the index of coordinates or hashes, plus 1; 0 if they are not stored.

    Args:
        hashmap_keys, hashmap_vals: memory of torchsparse, not used.
    """

    def __init__(
        self,
        hashmap_keys: torch.Tensor | None = None,
        hashmap_vals: torch.Tensor | None = None,
    ):
        self._rows: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def insert_coords(self, coords: torch.Tensor) -> None:
        """Set the (N, 4) rows: x, y, z, batch."""
        self._rows = coords.detach().clone()

    def lookup_coords(
        self,
        coords: torch.Tensor,
        kernel_size: torch.Tensor,
        strides: torch.Tensor,
        kernel_volume: int,
    ) -> torch.Tensor:
        """Return the index of each row under a centred kernel, plus 1; 0 without a row.

        Args:
            coords: (N, 4): x, y, z, batch, multiplied by the strides.
            kernel_size: 3 sizes.
            strides: 3 strides.
            kernel_volume: their product.

        Returns:
            (M, kernel_volume), M the least multiple of 128 from N on.
        """
        size = [int(each) for each in kernel_size]
        first = torch.tensor([(n - 1) // 2 for n in size])
        offsets = torch.tensor(kernel_positions(size)) - first
        offsets = torch.nn.functional.pad(offsets, (0, 1)).to(coords.device)
        steps = [*(int(each) for each in strides), 1]
        queries = coords.long() * torch.tensor(steps, device=coords.device)
        found = row_places(queries[:, None] + offsets, self._rows) + 1
        more = make_divisible(len(found), _ROWS) - len(found)
        return torch.nn.functional.pad(found, (0, 0, 0, more)).int()

    def insert_vals(self, values: torch.Tensor) -> None:
        """Set (N,) int64 hashes."""
        self._values = values.detach().clone()

    def lookup_vals(self, values: torch.Tensor) -> torch.Tensor:
        """Return the int32 index of each hash, plus 1; 0 if it is not stored."""
        return (sphashquery(values, self._values) + 1).int()
