"""Gradients averaged over processes while the backward pass still runs."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

__all__ = ["average_gradients"]

BUCKET_BYTES = 16 * 2**20


def average_gradients(
    gradients: Any,
    group: mx.distributed.Group | None = None,
    all_reduce_size: int = BUCKET_BYTES,
    communication_stream: mx.Stream | None = None,
) -> Any:
    """Average gradients over the processes of a group, and start to compute them.

    Takes the place of ``mlx.nn.average_gradients``. That one adds exchanges to the
    graph, which run after the backward pass. This one starts the backward pass in
    parts: gradients are joined into buckets from the last layer to the first, the
    order in which the backward pass finds them, and each bucket is on its way while
    the GPU computes the next one. Nothing waits for a result. Exchanges start in the
    order of this call on every process, also where their graphs differ.

    With NCCL the exchanges have a stream of their own. The CPU's stream, on which
    MLX's other backends communicate, is beside the GPU's as it is.

    Args:
        gradients: a tree of arrays, of the same structure and shapes on every process.
        group: the processes; by default all. In a group of one process the gradients
            are returned as they are.
        all_reduce_size (int): Close a bucket when it has this many bytes; 0 exchanges
            each array by itself. Default: 16 MiB.
        communication_stream: the stream of the exchanges. With the ring it must be
            the one of all other exchanges.

    Returns:
        The tree of averages, of the gradients' dtypes.

    Raises:
        RuntimeError: the call is inside ``mx.compile`` or another transformation,
            where nothing can be computed yet.
    """
    group = group or mx.distributed.init()
    size = group.size()
    if size == 1:
        return gradients
    stream = communication_stream or _communication_stream()
    leaves = tree_flatten(gradients)
    averages = [gradient for _, gradient in leaves]
    sums = []
    for bucket in _buckets(averages, all_reduce_size):
        # Divided before they are added up: a sum of half values may overflow.
        joined = mx.concatenate([averages[i].reshape(-1) for i in bucket]) * (1 / size)
        _start(joined)
        total = mx.distributed.all_sum(joined, group=group, stream=stream)
        del joined  # so that the sum may take its place
        mx.async_eval(total)
        sums.append((bucket, total))
    if not sums:
        return gradients
    # The compute stream waits for a bucket once here, not again for each of its parts.
    totals = [total for _, total in sums]
    totals = mx.depends(totals, totals[-1:])
    for (bucket, _), total in zip(sums, totals, strict=True):
        end = 0
        for i in bucket:
            begin, end = end, end + averages[i].size
            averages[i] = total[begin:end].reshape(averages[i].shape)
    names = [name for name, _ in leaves]
    return tree_unflatten(list(zip(names, averages, strict=True)))


def _buckets(arrays: list[mx.array], size: int) -> list[list[int]]:
    """Return indices of arrays, from the last one, in buckets of a size and dtype."""
    closed, open_, held = [], {}, {}
    for i in reversed(range(len(arrays))):
        array = arrays[i]
        if not array.size:
            continue
        open_.setdefault(array.dtype, []).append(i)
        held[array.dtype] = held.get(array.dtype, 0) + array.nbytes
        if held[array.dtype] >= size:
            closed.append(open_.pop(array.dtype))
            del held[array.dtype]
    return [*closed, *open_.values()]


def _start(array: mx.array) -> None:
    try:
        mx.async_eval(array)
    except ValueError as error:
        raise RuntimeError(
            "average_gradients starts the backward pass, which cannot be done inside "
            "mx.compile or another transformation: call it outside, compile the "
            "gradients and the optimizer's update apart; or call "
            "mlx.nn.average_gradients inside"
        ) from error


def _communication_stream() -> mx.Stream | None:
    """Return a GPU stream for NCCL, None where MLX has another for exchanges.

    By default NCCL's exchanges run on the GPU's compute stream, in line with it.
    """
    distributed = mx.distributed
    if (
        not distributed.is_available("nccl")
        or distributed.init(backend="nccl").size() < 2
    ):
        return None
    return _gpu_stream(threading.get_ident())


@cache
def _gpu_stream(thread: int) -> mx.Stream:
    return mx.new_stream(mx.gpu)  # a stream is its thread's
