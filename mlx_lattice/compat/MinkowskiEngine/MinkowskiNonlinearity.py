"""Layers of PyTorch on features, and norms."""

from __future__ import annotations

import torch
from torch import nn

from ... import ops
from .. import bridge
from .MinkowskiCommon import MinkowskiModuleBase, expect
from .MinkowskiTensor import SparseTensor, Tensor

ACTIVATIONS = [
    "ELU", "Hardshrink", "Hardsigmoid", "Hardtanh", "Hardswish", "LeakyReLU",
    "LogSigmoid", "PReLU", "ReLU", "ReLU6", "RReLU", "SELU", "CELU", "GELU",
    "Sigmoid", "SiLU", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
    "Threshold", "Softmin", "Softmax", "LogSoftmax", "Dropout", "AlphaDropout",
]  # fmt: skip

__all__ = [
    "MinkowskiBatchNorm", "MinkowskiInstanceNorm", "MinkowskiSinusoidal",
    "MinkowskiStableInstanceNorm", "MinkowskiSyncBatchNorm", *(f"Minkowski{name}"
    for name in ACTIVATIONS),
]  # fmt: skip


class MinkowskiNonlinearityBase(MinkowskiModuleBase):
    """Applies a layer of PyTorch, in ``module``, to the features.

    Arguments are those of the layer.
    """

    MODULE: type[nn.Module]

    def __init__(self, *args: object, **kwargs: object):
        super().__init__()
        self.module: nn.Module = self.MODULE(*args, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        """Return other features on the same rows."""
        return input._like(self.module(input.F))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _layers() -> dict[str, type]:
    """Return a class for each layer of PyTorch, as ``MinkowskiReLU`` for ``ReLU``."""
    made = {}
    for name in ACTIVATIONS:
        facts = {"__module__": __name__, "MODULE": getattr(nn, name)}
        facts["__doc__"] = f"Applies ``torch.nn.{name}`` to the features."
        made[f"Minkowski{name}"] = type(
            f"Minkowski{name}", (MinkowskiNonlinearityBase,), facts
        )
    return made


globals().update(_layers())


class MinkowskiSinusoidal(MinkowskiModuleBase):
    """Returns ``sin(x @ kernel + bias) * coef``.

    Args:
        in_channel, out_channel: channels.
    """

    def __init__(self, in_channel: int, out_channel: int):
        super().__init__()
        self.in_channel: int = in_channel
        self.out_channel: int = out_channel
        self.kernel: torch.Tensor = nn.Parameter(torch.rand(in_channel, out_channel))
        self.bias: torch.Tensor = nn.Parameter(torch.rand(1, out_channel))
        self.coef: torch.Tensor = nn.Parameter(torch.rand(1, out_channel))

    def forward(self, input: Tensor) -> Tensor:
        """Return other features on the same rows."""
        return input._like(torch.sin(input.F @ self.kernel + self.bias) * self.coef)


# Norms


class MinkowskiBatchNorm(nn.Module):
    """Batch normalisation of the features, in ``bn``.

    Args:
        num_features: channels.
        eps, momentum, affine, track_running_stats: of ``torch.nn.BatchNorm1d``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ):
        super().__init__()
        facts = num_features, eps, momentum, affine, track_running_stats
        self.bn: nn.Module = nn.BatchNorm1d(*facts)

    def forward(self, input: Tensor) -> Tensor:
        """Return other features on the same rows."""
        return input._like(self.bn(input.F))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.bn.extra_repr()})"


class MinkowskiSyncBatchNorm(MinkowskiBatchNorm):
    """Batch normalisation over processes, in ``bn``.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as above.
        process_group: of ``torch.nn.SyncBatchNorm``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: object = None,
    ):
        nn.Module.__init__(self)
        facts = num_features, eps, momentum, affine, track_running_stats
        self.bn: nn.Module = nn.SyncBatchNorm(*facts, process_group)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: object = None
    ) -> nn.Module:
        """Return a net with its ``MinkowskiBatchNorm`` layers replaced."""
        made = module
        if isinstance(module, MinkowskiBatchNorm):
            old = module.bn
            facts = old.num_features, old.eps, old.momentum, old.affine
            made = cls(*facts, old.track_running_stats, process_group)
            for name in ("weight", "bias"):
                if old.affine:
                    setattr(made.bn, name, getattr(old, name))
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                setattr(made.bn, name, getattr(old, name))
            made.train(module.training)
            return made
        for name, child in module.named_children():
            made.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return made


class MinkowskiInstanceNorm(MinkowskiModuleBase):
    """Normalises each channel over the rows of each batch element.

    ``weight`` and ``bias`` are (1, C).

    Args:
        num_features: channels.
        dimension: ignored.
    """

    eps: float = 1e-8

    def __init__(self, num_features: int, dimension: int | None = None):
        super().__init__()
        self.num_features = num_features
        self.weight: torch.Tensor = nn.Parameter(torch.ones(1, num_features))
        self.bias: torch.Tensor = nn.Parameter(torch.zeros(1, num_features))

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    @bridge.not_compiled
    def forward(self, input: SparseTensor) -> SparseTensor:
        """Return other features on the same rows."""
        expect(
            isinstance(input, SparseTensor),
            f"{type(self).__name__} takes a SparseTensor; got {type(input).__name__}",
        )
        held = input.coordinate_manager.map_of(input.coordinate_map_key)

        def function(feats, weight, bias):
            return ops.instance_norm(held.tensor(feats), weight, bias, self.eps).feats

        lines = self.weight.reshape(-1), self.bias.reshape(-1)
        lines = [each.to(input.dtype) for each in lines]
        return input._like(bridge.call(function, input.F, *lines, layer=self))

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the layer."""
        return f"nchannels={self.num_features}"


class MinkowskiStableInstanceNorm(MinkowskiInstanceNorm):
    """The same, with an epsilon of 1e-6."""

    eps: float = 1e-6
