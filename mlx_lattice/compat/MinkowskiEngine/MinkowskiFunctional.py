"""Functions of torch.nn.functional on sparse tensors and fields, and losses of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from .MinkowskiTensor import Tensor

FUNCTIONS = [
    "threshold", "relu", "hardtanh", "hardswish", "relu6", "elu", "selu", "celu",
    "leaky_relu", "prelu", "rrelu", "glu", "gelu", "logsigmoid", "hardshrink",
    "tanhshrink", "softsign", "softplus", "softmin", "softmax", "softshrink",
    "gumbel_softmax", "log_softmax", "tanh", "sigmoid", "hardsigmoid", "silu",
    "normalize", "linear", "dropout", "alpha_dropout",
]  # fmt: skip
LOSSES = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss",
    "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss", "mse_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss",
    "nll_loss", "smooth_l1_loss", "soft_margin_loss",
]  # fmt: skip


def _on_features(function: Callable) -> Callable:
    """Return a function of a tensor that gives other features on the same rows."""

    def call(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        return input._like(function(input.F, *args, **kwargs))

    return call


def _loss(function: Callable) -> Callable:
    """Return a loss of a tensor's features."""

    def call(input: Tensor, target: object, *args, **kwargs) -> torch.Tensor:
        return function(input.F, target, *args, **kwargs)

    return call


for _names, _wrap in ((FUNCTIONS, _on_features), (LOSSES, _loss)):
    globals().update({name: _wrap(getattr(functional, name)) for name in _names})
__all__ = [*FUNCTIONS, *LOSSES]
