"""cumm.tensorview: conversions between NumPy's arrays and tensors.

A tensor is one of PyTorch, which has the methods that nets call: ``numpy()`` and
``cpu()``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["Tensor", "from_numpy", "zeros"]

Tensor = torch.Tensor


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares the array's memory."""
    return torch.from_numpy(array)


def zeros(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, device: int = -1
) -> torch.Tensor:
    """Return zeros on the CPU, which is device -1."""
    if device != -1:
        raise NotImplementedError(
            "cumm.tensorview.zeros makes tensors on the CPU (device=-1); use "
            "torch.zeros for other devices"
        )
    return torch.zeros(list(shape), dtype=dtype)
