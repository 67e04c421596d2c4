"""spconv.pytorch.constants: the version of PyTorch."""

from __future__ import annotations

import torch

PYTORCH_VERSION = [int(part) for part in torch.__version__.split("+")[0].split(".")[:2]]
TORCH_HAS_AMP = True


def is_amp_enabled() -> bool:
    """Return whether the caller is inside an autocast block."""
    return torch.is_autocast_enabled()
