"""Loader: batches of a data set, prepared by threads during the training step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import mlx.core as mx

from ..checks import whole
from ..ops import collate
from ..tensor import SparseTensor


class Dataset(Protocol):
    """The input of a loader: a list, or a map-style ``Dataset`` of PyTorch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Loader:
    """Iterate over the batches of a data set; each iteration is one epoch.

    Threads make the next batches while a step runs. They compute the arrays of a batch
    before they hand it over, since MLX computes an array only in the thread that made
    it. The order depends on ``seed`` and the number of the epoch alone. PyTorch's
    ``DataLoader`` takes the same data set and ``collate_fn``.

    Args:
        dataset: has ``len(dataset)`` and ``dataset[i]``, which several threads call at
            once.
        batch_size: scans of a batch.
        shuffle: whether each epoch has another order.
        seed: of the order.
        drop_last: whether to leave out a last batch that is smaller.
        collate_fn: joins a list of scans into a batch.
        threads: number of threads; with 0 the batches are made in the loop itself. By
            default 2, and 0 on NVIDIA GPUs, where MLX ends the process if several
            threads compute.

    Attributes:
        epoch: number of the next epoch. Set it to resume a training.

    Raises:
        TypeError: ``dataset`` has no length or items, or a number is not an int.
        ValueError: ``batch_size`` is less than 1, or there are threads on NVIDIA GPUs.

    Examples:
        >>> scans = [
        ...     ml.SparseTensor.from_points(mx.full((2, 3), i), voxel_size=1.0).eval()
        ...     for i in range(5)
        ... ]
        >>> loader = io.Loader(scans, batch_size=2)
        >>> [x.batch_size for x in loader]
        [2, 2, 1]
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] = collate,
        threads: int | None = None,
    ):
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                "dataset must have __len__ and __getitem__, as a list has; got "
                f"{type(dataset).__name__}"
            )
        is_cuda = mx.cuda.is_available()
        threads = (
            (0 if is_cuda else 2) if threads is None else whole(threads, "threads")
        )
        if threads and is_cuda:
            raise ValueError(
                "threads must be 0 on NVIDIA GPUs, where MLX ends the process if "
                f"several threads compute; got {threads}"
            )
        self.dataset: Dataset = dataset
        self.batch_size: int = whole(batch_size, "batch_size", 1)
        self.shuffle: bool = shuffle
        self.seed: int = whole(seed, "seed")
        self.drop_last: bool = drop_last
        self.collate_fn: Callable[[list[Any]], Any] = collate_fn
        self.threads: int = threads
        self.epoch: int = 0

    def __len__(self) -> int:
        """Return the number of batches."""
        count, size = len(self.dataset), self.batch_size
        return count // size if self.drop_last else -(-count // size)

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        self.epoch += 1
        size = self.batch_size
        return self._batches(
            [order[i * size : (i + 1) * size] for i in range(len(self))]
        )

    def _batches(self, groups: list[list[int]]) -> Iterator[Any]:
        """Yield the batches of lists of indices, in their order."""
        if not self.threads:
            yield from map(self._batch, groups)
            return
        pool = ThreadPoolExecutor(self.threads, "mlx_lattice_loader")
        begun: deque[Future] = deque()
        try:
            for group in groups:
                begun.append(pool.submit(self._batch, group))
                if len(begun) > self.threads:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _batch(self, indices: list[int]) -> Any:
        batch = self.collate_fn([self.dataset[i] for i in indices])
        _compute(batch)
        return batch


def _compute(batch: object) -> None:
    """Compute the arrays and tensors in lists, tuples and dicts."""
    if isinstance(batch, SparseTensor):
        batch.eval()
    elif isinstance(batch, mx.array):
        mx.eval(batch)
    elif isinstance(batch, dict | list | tuple):
        for part in batch.values() if isinstance(batch, dict) else batch:
            _compute(part)
