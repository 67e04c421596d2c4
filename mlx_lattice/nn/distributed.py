"""Gradients averaged over processes while the backward pass still runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..ops.exchanges import Exchanges, joined

__all__ = ["average_gradients"]

BUCKET_BYTES = 16 * 2**20
MOST_ARRAYS = 256  # of a bucket: one launch joins them


def average_gradients(
    gradients: Any,
    group: mx.distributed.Group | None = None,
    all_reduce_size: int = BUCKET_BYTES,
    communication_stream: mx.Stream | None = None,
) -> Any:
    """Average gradients over the processes of a group, and start to compute them.

    Takes the place of ``mlx.nn.average_gradients``. Gradients are joined into buckets
    from the last layer to the first, the order in which the backward pass finds them.
    Nothing waits for a result. Exchanges start in the order of this call on every
    process, also where their graphs differ.

    MLX's backends exchange on a stream of the CPU, beside the GPU's: the backward pass
    is started in parts, and each bucket is on its way while the GPU computes the next
    one. NCCL's exchanges are launches among those of the backward pass, in one graph
    with what does not need them: a second stream would end that graph twice a bucket.

    Inside ``mx.compile`` nothing can be started: the exchanges are part of the graph,
    after those of ``SyncBatchNorm``, and run with it.

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
    """
    group = group or mx.distributed.init()
    if group.size() == 1:
        return gradients
    arrays = [gradient for _, gradient in tree_flatten(gradients)]
    buckets = _buckets(arrays, all_reduce_size)
    if not buckets:
        return gradients
    parts = [[arrays[i] for i in bucket] for bucket in buckets]
    inline = communication_stream is None and _by_nccl()
    exchange = _in_line if inline else _in_parts
    totals = exchange(parts, group, communication_stream)
    for bucket, total in zip(buckets, totals, strict=True):
        end = 0
        for i in bucket:
            begin, end = end, end + arrays[i].size
            arrays[i] = mx.as_strided(total, arrays[i].shape, offset=begin)
    averages = iter(arrays)
    return tree_map(lambda _: next(averages), gradients)


# Gradients are divided before they are added up: a sum of half values may overflow.


def _in_line(
    parts: list[list[mx.array]],
    group: mx.distributed.Group,
    stream: mx.Stream | None,
) -> list[mx.array]:
    """Return the averages of buckets, exchanged where the graph has them."""
    exchanges = Exchanges(group, stream=stream)
    totals = [exchanges.add(*arrays, factor=1 / group.size()) for arrays in parts]
    _started(*totals)
    return totals


def _in_parts(
    parts: list[list[mx.array]],
    group: mx.distributed.Group,
    stream: mx.Stream | None,
) -> list[mx.array]:
    """Return the averages of buckets, each exchanged beside what finds the next."""
    totals = []
    for arrays in parts:
        own = joined(arrays, 1 / group.size())
        if not _started(own):
            return _in_line(parts, group, stream)
        total = mx.distributed.all_sum(own, group=group, stream=stream)
        del own  # so that the sum may take its place
        mx.async_eval(total)
        totals.append(total)
    # The compute stream waits for a bucket once here, not again for each of its parts.
    return mx.depends(totals, totals[-1:])


def _buckets(arrays: list[mx.array], size: int) -> list[list[int]]:
    """Return indices of arrays, from the last one, in buckets of a size and dtype."""
    closed, open_, held = [], {}, {}
    for i in reversed(range(len(arrays))):
        array = arrays[i]
        if not array.size:
            continue
        open_.setdefault(array.dtype, []).append(i)
        held[array.dtype] = held.get(array.dtype, 0) + array.nbytes
        full = len(open_[array.dtype]) == MOST_ARRAYS
        if full or held[array.dtype] >= size:
            closed.append(open_.pop(array.dtype))
            del held[array.dtype]
    return [*closed, *open_.values()]


def _started(*arrays: mx.array) -> bool:
    """Start to compute arrays; ``False`` inside a transformation, which cannot."""
    try:
        mx.async_eval(*arrays)
    except ValueError as error:
        if "transformation" not in str(error):
            raise
        return False
    return True


@cache
def _by_nccl() -> bool:
    """Whether processes exchange by NCCL."""
    nccl = mx.distributed.is_available("nccl")
    return nccl and mx.distributed.init(backend="nccl").size() > 1
