"""Normalisation modules in the manner of mlx.nn, over active rows only.

Statistics are float32 and results have the input's dtype, whatever the dtype of the
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_

import mlx.core as mx
import mlx.nn

from .. import ops
from ..checks import dtype_name, flag, real, whole
from ..epilogue import Epilogue
from ..ops.attention_calls import inside
from ..ops.channels import activation_of
from ..ops.norms import expect_lines, normalized_by, normalized_by_rows, residual_of
from ..registry import Activation
from ..tensor import SparseTensor, features_of
from .layers import ModuleCache, Parameters

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]

Features = SparseTensor | mx.array
_LINES = "running_mean", "running_var", "weight", "bias"


class BatchNorm(Parameters, mlx.nn.BatchNorm):
    """Applies batch normalization over the active rows of all batch elements.

    In training it normalises by the statistics of the input's rows and updates the
    running statistics as ``mlx.nn.BatchNorm`` does. An input without rows leaves them
    unchanged. A single row has no variance: it moves the running mean only.

    The running statistics are float32 in a net of any dtype: ``set_dtype``,
    ``load_weights`` and assignments cast them.

    Args:
        num_features (int): The number of channels.
        eps (float): Added to the variance. Default: ``1e-5``.
        momentum (float): How far the running statistics move. Default: ``0.1``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``True``.
        track_running_stats (bool): If ``True`` keep running statistics and use them
            in evaluation. Default: ``True``.
    """

    never_trained = "running_mean", "running_var"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ):
        if momentum is None:
            raise TypeError(
                "momentum must be a number; got None, PyTorch's cumulative average, "
                "which is not here. Set layer.momentum = 1 / (1 + n) before batch n, "
                "from 0"
            )
        super().__init__(
            whole(num_features, "num_features", 1),
            real(eps, "eps", 0.0),
            real(momentum, "momentum", 0.0),
            flag(affine, "affine"),
            flag(track_running_stats, "track_running_stats"),
        )

    def __setitem__(self, name: str, value: object) -> None:
        # Training makes them float32: kernels compiled for another dtype would be of
        # no use after the first step.
        is_statistic = name in self.never_trained
        if is_statistic and getattr(value, "dtype", mx.float32) != mx.float32:
            value = value.astype(mx.float32)
        super().__setitem__(name, value)

    def __call__(
        self,
        x: Features,
        *,
        residual: Features | None = None,
        activation: str | Activation | Callable | None = None,
        lines: mx.array | None = None,
    ) -> Features:
        """Normalise a tensor, or (N, C) features.

        ``residual`` is added before the activation, in the same launch, as in
        ``ops.batch_norm``. ``lines``: statistics of the rows, if the convolution that
        wrote them summed them (see ``Moments``).
        """
        feats = features_of(x)
        if feats.ndim != 2 or feats.shape[1] != self.num_features:
            raise ValueError(
                f"expected features of shape (N, {self.num_features}); got "
                f"{tuple(feats.shape)}"
            )
        dtype_name(feats.dtype)
        self._expect_lines(*map(self.get, _LINES))
        with inside(self):
            added, act = residual_of(x, residual), activation_of(activation)
            y = self._normalized(feats, added, act, lines)
        return x.replace(y) if isinstance(x, SparseTensor) else y

    def _expect_lines(self, *lines: mx.array | None) -> None:
        """Raise unless arrays have the layer's channels: kernels do not check them."""
        names = "running statistics, weight and bias"
        expect_lines(names, self.num_features, *lines)

    def _normalized(
        self,
        x: mx.array,
        residual: mx.array | None,
        act: Activation,
        lines: mx.array | None = None,
        **shared,
    ) -> mx.array:
        """Return the rows of (N, C); ``shared`` replaces arguments of the norm."""
        parameters = self.get("weight"), self.get("bias"), residual
        how = {"act": act, "eps": self.eps}
        if not self.is_by_rows:
            mean, var = map(mx.stop_gradient, (self.running_mean, self.running_var))
            return normalized_by(x, mean, var, *parameters, **how)
        is_moved, rows = self.track_running_stats and self.training, x.shape[0]
        how |= {"lines": lines, "momentum": self.momentum, **shared}
        if is_moved:
            how["running"] = self["running_mean"], self["running_var"]
        y, mean, var = normalized_by_rows(x, *parameters, **how)
        if is_moved and (rows or shared):
            # As items: a module takes as long to set an attribute as a launch.
            self["running_mean"] = mean
            if rows > 1 or shared:
                self["running_var"] = var
        return y

    def as_epilogue(self, dtype: mx.Dtype, activation: str = "") -> Epilogue | None:
        """Return a norm with fixed statistics, and an activation, as an epilogue.

        None if its arrays have other dtypes than float32 and ``dtype``. The layer keeps
        the last epilogue, since convolutions look up launches by its ``key``.
        """
        own = (*map(self.get, _LINES),)
        facts = self.eps, dtype, activation
        known = getattr(self, "_epilogue", None)
        if known is None:
            known = ModuleCache()
            object.__setattr__(self, "_epilogue", known)  # not a parameter
        arrays, last, made = known.get("last", ((None,) * 4, None, None))
        if last == facts and all(map(is_, arrays, own)):
            return made
        self._expect_lines(*own)
        made, (mean, var, scale, shift) = None, own
        if all([a is None or a.dtype in (mx.float32, dtype) for a in own]):
            facts_of_norm = mean, var, self.eps, "BatchNorm"
            made = Epilogue(scale, shift, None, activation, *facts_of_norm)
        known["last"] = own, facts, made
        return made

    @property
    def is_by_rows(self) -> bool:
        """Whether it normalises by statistics of its rows, not by running ones."""
        return self._training or not self.track_running_stats

    def scale_shift(self) -> tuple[mx.array, mx.array]:
        """Return (C,) float32 a and b: in evaluation the norm is ``a * x + b``.

        Raises:
            ValueError: there are no running statistics.
        """
        if not self.track_running_stats:
            raise ValueError(
                "scale_shift needs running statistics; this norm has "
                "track_running_stats=False"
            )
        scale = mx.rsqrt(self.running_var + self.eps)
        if "weight" in self:
            scale = scale * self.weight.astype(mx.float32)
        shift = -self.running_mean * scale
        if "bias" in self:
            shift = shift + self.bias.astype(mx.float32)
        return scale, shift


class LayerNorm(Parameters, mlx.nn.LayerNorm):
    """Applies layer normalization to each row, over its channels.

    Args:
        dims (int): The number of channels.
        eps (float): Added to the variance. Default: ``1e-5``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``True``.
        bias (bool): If ``False`` learn no shift. Default: ``True``.
    """

    def __init__(
        self, dims: int, eps: float = 1e-5, affine: bool = True, bias: bool = True
    ):
        affine, bias = flag(affine, "affine"), flag(bias, "bias")
        super().__init__(whole(dims, "dims", 1), real(eps, "eps", 0.0), affine, bias)

    def __call__(
        self,
        x: Features,
        *,
        residual: Features | None = None,
        activation: str | Activation | Callable | None = None,
    ) -> Features:
        """Normalise a tensor, or an array over its last axis; then what follows.

        ``residual`` and ``activation`` are as of ``ops.layer_norm``.
        """
        given = self.get("weight"), self.get("bias"), self.eps
        more = {"residual": residual, "activation": activation}
        with inside(self):
            return ops.layer_norm(x, *given, **more)


class RMSNorm(Parameters, mlx.nn.RMSNorm):
    """Applies root mean square normalization to each row, over its channels.

    Args:
        dims (int): The number of channels.
        eps (float): Added to the mean square. Default: ``1e-5``.
    """

    def __init__(self, dims: int, eps: float = 1e-5):
        super().__init__(whole(dims, "dims", 1), real(eps, "eps", 0.0))

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Normalise a tensor, or an array over its last axis."""
        return ops.rms_norm(x, self.weight, self.eps)


class GroupNorm(Parameters, mlx.nn.Module):
    """Applies group normalization to the active rows of each batch element.

    Groups are neighbouring channels, as in PyTorch (``mlx.nn.GroupNorm`` with
    ``pytorch_compatible=True``).

    Args:
        num_groups (int): The number of groups.
        dims (int): The number of channels, a multiple of ``num_groups``.
        eps (float): Added to the variance. Default: ``1e-5``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``True``.
    """

    def __init__(
        self, num_groups: int, dims: int, eps: float = 1e-5, affine: bool = True
    ):
        super().__init__()
        eps, affine = real(eps, "eps", 0.0), flag(affine, "affine")
        if eps == 0.0:
            raise ValueError(f"[GroupNorm] 'eps' must be positive but got {eps}.")
        num_groups, dims = whole(num_groups, "num_groups"), whole(dims, "dims")
        if num_groups < 1 or dims < 1 or dims % num_groups:
            raise ValueError(
                f"The number of features ({dims}) must be positive and divisible by "
                f"the number of groups ({num_groups})."
            )
        if affine:
            self.bias = mx.zeros((dims,))
            self.weight = mx.ones((dims,))
        self.num_groups = num_groups
        self.dims = dims
        self.eps = eps

    def _extra_repr(self) -> str:
        return (
            f"{self.num_groups}, {self.dims}, eps={self.eps}, affine={'weight' in self}"
        )

    def __call__(
        self,
        x: SparseTensor,
        *,
        residual: SparseTensor | None = None,
        activation: str | Activation | Callable | None = None,
    ) -> SparseTensor:
        """Normalise a tensor; what follows is as of ``BatchNorm``."""
        given = self.get("weight"), self.get("bias"), self.eps
        more = {"residual": residual, "activation": activation}
        with inside(self):
            return ops.group_norm(x, self.num_groups, *given, **more)


class InstanceNorm(Parameters, mlx.nn.InstanceNorm):
    """Applies instance normalization: each channel over each batch element's rows.

    Args:
        dims (int): The number of channels.
        eps (float): Added to the variance. Default: ``1e-5``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``False``.
    """

    def __init__(self, dims: int, eps: float = 1e-5, affine: bool = False):
        affine = flag(affine, "affine")
        super().__init__(whole(dims, "dims", 1), real(eps, "eps", 0.0), affine)

    def __call__(
        self,
        x: SparseTensor,
        *,
        residual: SparseTensor | None = None,
        activation: str | Activation | Callable | None = None,
    ) -> SparseTensor:
        """Normalise a tensor; what follows is as of ``BatchNorm``."""
        given = self.get("weight"), self.get("bias"), self.eps
        more = {"residual": residual, "activation": activation}
        with inside(self):
            return ops.instance_norm(x, *given, **more)
