"""PyTorch tensors through MLX functions: conversion by DLPack, autograd, autocast.

Conversion. On MPS both directions share memory. A tensor on the CPU is copied into MLX,
or shared if MLX runs on Metal and can address its memory; a result is shared. Each call
waits for PyTorch's device once and evaluates its results before it returns, so that a
change of a tensor in place, by either library, never reaches a computation of the
other.

Autograd. ``call`` wraps an MLX function, ``convolve`` a contraction over a relation.
Each is one node of PyTorch's graph. Its backward pass cannot be differentiated again:
PyTorch then raises its own error, as for the libraries that ``compat`` stands for.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Generic, TypeVar

import mlx.core as mx
import torch
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from .. import contraction, memory
from ..problem import INPUT_GRAD, MLX_LAYOUT, WEIGHT_GRAD, weight_axes
from ..relation import Relation
from ..routes import launch
from ..routes.launch import Layer, Request
from ..settings import requested_precision

Function = TypeVar("Function", bound=Callable)
Derived = TypeVar("Derived")


def not_compiled(function: Function) -> Function:
    """Return a function that ``torch.compile`` calls as it is, and does not trace."""
    # torch.compiler.disable imports the compiler, which takes seconds; this one waits
    # for the first call.
    disabled = torch._disable_dynamo(function)

    @wraps(function)
    def call_outside(*args, **kwargs):
        if torch.compiler.is_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call_outside


# Dtypes that both libraries compute with.
FLOATS = torch.float32, torch.float16, torch.bfloat16
# From this version on PyTorch hands out MPS tensors by DLPack.
_MPS_BY_DLPACK = (2, 12)
_CPU = 1, 0  # DLPack's name of the device; Metal's memory is the CPU's too
_version = tuple(int(part) for part in torch.__version__.split(".")[:2])


class ByTensor(Generic[Derived]):
    """Values derived from tensors: each until its tensor is gone or has changed."""

    def __init__(self, derive: Callable[[torch.Tensor], Derived]):
        self._derive = derive
        self._derived: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __getitem__(self, tensor: torch.Tensor) -> Derived:
        state, value = self._derived.get(tensor, (None, None))
        if tensor.is_inference():  # such tensors do not count changes in place
            is_same = state is not None and torch.equal(state, tensor)
            now = state if is_same else tensor.clone()
        else:
            now = tensor._version
            is_same = state == now
        if not is_same:
            value = self._derive(tensor)
            self._derived[tensor] = now, value
        return value


def device_of(*tensors: torch.Tensor | None) -> torch.device:
    """Return the device that all tensors are on.

    Raises:
        RuntimeError: tensors are on different devices.
        NotImplementedError: MLX cannot read memory of the device.
    """
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            devices = sorted({str(t.device) for t in tensors if t is not None})
            raise RuntimeError(
                f"expected all tensors to be on one device; got {' and '.join(devices)}"
                ". Move the module and its inputs to the same device with .to(device)"
            )
    if device is None:
        raise TypeError("expected a tensor; got none")
    if device.type not in ("cpu", "mps", "cuda"):
        raise NotImplementedError(
            f"mlx_lattice.compat reads tensors on cpu, mps and cuda; got {device}"
        )
    return device


def to_mlx(*tensors: torch.Tensor | None, copy: bool = False) -> list[mx.array | None]:
    """Return tensors as arrays of the same shape and dtype, detached.

    None stays None. Waits once for PyTorch's work on their device.

    Args:
        *tensors: tensors of one device, of any strides.
        copy: whether arrays must have memory of their own, for arrays that outlive the
            call.

    Raises:
        TypeError: a tensor is float64, which MLX would round to float32.
        RuntimeError: tensors are on different devices.
    """
    device = device_of(*tensors)
    for tensor in tensors:
        if tensor is not None and tensor.dtype == torch.float64:
            raise TypeError(
                "a tensor is float64, which MLX does not compute with; cast it with "
                ".float()"
            )
    if device.type == "mps":
        torch.mps.synchronize()
        if _version < _MPS_BY_DLPACK:
            tensors = tuple(t if t is None else t.cpu() for t in tensors)
    elif device.type == "cuda":  # MLX reads no memory of CUDA by DLPack
        tensors = tuple(t if t is None else t.cpu() for t in tensors)
    return [None if t is None else _array(t, copy) for t in tensors]


def _array(tensor: torch.Tensor, copy: bool) -> mx.array:
    tensor = tensor.detach().contiguous()
    if not tensor.numel():
        # MLX loops for ever over an empty array with the strides of an expanded one.
        tensor = tensor.new_empty(tensor.shape)
    return mx.from_dlpack(tensor, copy=True if copy else None)


def to_torch(
    array: mx.array, device: torch.device | str = "cpu", *, copy: bool = False
) -> torch.Tensor:
    """Return an array as a tensor on a device; evaluates the array.

    The tensor shares the array's memory if the device can read it.

    Args:
        array: the array.
        device: the tensor's device.
        copy: whether the tensor must have memory of its own: for arrays that the
            library keeps, such as coordinates.
    """
    mx.eval(array)
    device = torch.device(device)
    if device.type == "mps" and _version >= _MPS_BY_DLPACK:
        tensor = torch.from_dlpack(array)
    else:
        tensor = torch.from_dlpack(array.__dlpack__(dl_device=_CPU))
    if tensor.device.type != device.type:
        return tensor.to(device)
    return tensor.clone() if copy else tensor


def autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Cast floating tensors to the dtype of the autocast block around the call.

    As PyTorch does for convolutions: float32, half and bfloat16 tensors are cast, and
    gradients are cast back. Outside of such a block the tensors are returned.
    """
    kind = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t is not None and t.dtype in FLOATS else t
                 for t in tensors)  # fmt: skip


# An MLX function, and one that returns its gradients:
# vjp(needed, arrays, cotangents), in which needed has a bool for each array.
Forward = Callable[..., mx.array | Sequence[mx.array]]
Vjp = Callable[
    [Sequence[bool], Sequence[Any], Sequence[Any]], Sequence[mx.array | None]
]


class Operation:
    """An MLX function as a node of PyTorch's graph.

    The backward pass runs under the settings of the forward pass (``ml.routes.only``,
    ``ml.trace``) if PyTorch runs it on another thread, which does not see the blocks
    around the call.
    """

    def __init__(self, forward: Forward, vjp: Vjp | None, layer: object):
        self.forward: Forward = forward
        self.vjp: Vjp | None = vjp
        self.layer: object = layer
        self.thread: int = threading.get_ident()
        self.context: Any = None

    def run(self, arrays: Sequence[Any]) -> tuple[list[mx.array], bool]:
        """Return the evaluated results, and whether there is just one."""
        with launch.scope(self.layer):
            results = self.forward(*arrays)
        is_one = isinstance(results, mx.array)
        results = [results] if is_one else list(results)
        mx.eval(results)
        return results, is_one

    def gradients(
        self, needed: Sequence[bool], arrays: Sequence[Any], cotangents: Sequence[Any]
    ) -> Sequence[mx.array | None]:
        """Return evaluated gradients by the arrays that need one."""
        if threading.get_ident() != self.thread and self.context is not None:
            return self.context.copy().run(self._gradients, needed, arrays, cotangents)
        return self._gradients(needed, arrays, cotangents)

    def _gradients(self, needed, arrays, cotangents) -> Sequence[mx.array | None]:
        with launch.scope(self.layer):
            by = self.vjp or self._composed
            results = by(needed, arrays, cotangents)
            mx.eval([each for each in results if each is not None])
        return results

    def _composed(self, needed, arrays, cotangents) -> Sequence[mx.array | None]:
        places = [i for i, need in enumerate(needed) if need]

        def function(*some: mx.array) -> list[mx.array]:
            full = list(arrays)
            for place, each in zip(places, some, strict=True):
                full[place] = each
            results = self.forward(*full)
            return [results] if isinstance(results, mx.array) else list(results)

        _, found = mx.vjp(function, [arrays[i] for i in places], list(cotangents))
        results: list[mx.array | None] = [None] * len(needed)
        for place, each in zip(places, found, strict=True):
            results[place] = each
        return results


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operation: Operation, *tensors: torch.Tensor | None):
        device = device_of(*tensors)
        results, is_one = operation.run(to_mlx(*tensors))
        if any(ctx.needs_input_grad):
            ctx.operation = operation
            operation.context = contextvars.copy_context()
            ctx.save_for_backward(*tensors)
        results = [to_torch(each, device) for each in results]
        fixed = [each for each in results if not each.is_floating_point()]
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        return results[0] if is_one else tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *cotangents: torch.Tensor):
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        device = device_of(*tensors)
        arrays = to_mlx(*tensors, *cotangents)
        count = len(tensors)
        results = ctx.operation.gradients(needed, arrays[:count], arrays[count:])
        return None, *[None if g is None else to_torch(g, device) for g in results]


@not_compiled
def call(
    function: Forward,
    *tensors: torch.Tensor | None,
    vjp: Vjp | None = None,
    layer: object = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return what an MLX function returns, as tensors, differentiable by autograd.

    Args:
        function: takes the arrays of ``tensors``, in their order, and returns an array
            or several. It must not return an argument, nor an array that is kept
            elsewhere: results share memory with PyTorch.
        *tensors: tensors of one device, or None, which the function gets as None.
        vjp: ``vjp(needed, arrays, cotangents)`` returns a gradient or None for each
            array; by default ``mx.vjp`` of the function, which runs it again.
        layer: the module that calls, by which ``ml.trace(net)`` names the layer.

    Raises:
        RuntimeError: tensors are on different devices.
        TypeError: a tensor is float64.
    """
    return _Node.apply(Operation(function, vjp, layer), *tensors)


@not_compiled
def convolve(
    features: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    relation: Relation,
    *,
    groups: int = 1,
    layer: object = None,
) -> torch.Tensor:
    """Return ``y[o] = sum over edges (i, o, k) of x[i] @ w[k] + bias``.

    Casts under autocast, as PyTorch's convolutions do.

    Args:
        features: (N_in, C_in) float32, float16 or bfloat16.
        weight: (K, C_in / groups, C_out), or (C_out, spatial..., C_in / groups) with at
            least two spatial axes; of the features' dtype.
        bias: (C_out,) of that dtype, or None.
        relation: the edges.
        groups: channel groups.
        layer: the module that calls.

    Returns:
        (N_out, C_out) in the features' dtype.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: shapes do not fit.
        RuntimeError: tensors are on different devices.
    """
    device_of(features, weight, bias)
    features, weight, bias = autocast(features, weight, bias)
    _expect_one_dtype(features, weight, bias)

    def forward(x: mx.array, w: mx.array, b: mx.array | None) -> mx.array:
        if memory.active() is not None:
            return memory.conv(x, w, relation, b, groups)
        return contraction.conv(x, w, relation, groups=groups, bias=b)

    def vjp(needed, arrays, cotangents):
        return _contraction_gradients(relation, groups, needed, arrays, *cotangents)

    return call(forward, features, weight, bias, vjp=vjp, layer=layer)


def _expect_one_dtype(features, weight, bias) -> None:
    for name, tensor in (("the weight", weight), ("the bias", bias)):
        if tensor is not None and tensor.dtype != features.dtype:
            raise TypeError(
                f"features are {features.dtype} and {name} is {tensor.dtype}; cast one "
                "with .to(dtype), or call the layer under torch.autocast"
            )


def _contraction_gradients(relation, groups, needed, arrays, dy) -> list:
    """Return gradients by x, w and bias, without running the forward pass again."""
    x, w, _ = arrays
    layout, volume, c_in, c_out = weight_axes(w.shape)
    facts = x.shape[1], c_out, x.dtype, groups, requested_precision(), None, layout
    layer, dx, dw, db = Layer(*facts), None, None, None
    if needed[0]:
        flat = w.reshape(c_out, volume, c_in) if layout == MLX_LAYOUT else w
        dx = contraction.contracted(Request(INPUT_GRAD, layer), relation, dy, flat)
    if needed[1]:
        dw = contraction.contracted(
            Request(WEIGHT_GRAD, layer), relation, x, dy
        ).reshape(w.shape)
    if needed[2]:
        db = dy.astype(mx.float32).sum(axis=0).astype(dy.dtype)
    return [dx, dw, db]
