"""Who reads what a layer wrote: watched while a float net runs for calibration.

A layer may write int8 only where integer layers alone read it: as features, as the
residual of a convolution, or joined with others by ``cat`` for such readers. Tensors
that convolutions and linear layers make are ``Seen`` inside a watch: reading their
features is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.nn import Module

from ..ops import on_features
from ..ops.coordinates import joined
from ..routes import launch
from ..tensor import SparseTensor


@dataclass(eq=False)
class Node:
    """One tensor that a layer, or ``cat``, made.

    Attributes:
        layer: id of the layer that wrote it; None of joined tensors.
        is_float: whether something reads it that takes no integers.
        readers: ids of the integer layers that read it as features.
        is_residual: whether an integer layer adds it.
        parts: what was joined: results of layers.
        is_joined: whether it is part of another.
    """

    layer: int | None = None
    is_float: bool = False
    readers: set[int] = field(default_factory=set)
    is_residual: bool = False
    parts: tuple[Node, ...] = ()
    is_joined: bool = False


class Watch:
    """What is noticed while a model runs.

    Args:
        layers: ids of those that are to multiply integers.
        sample: called with a layer and the features of what it returns, with
            all that is fused into it; of float ones, with all that follows.
    """

    def __init__(
        self,
        layers: set[int],
        sample: Callable[[Module, mx.array], None],
    ):
        self.layers, self._sample = layers, sample
        self.nodes: list[Node] = []
        self.norms: dict[int, list[Module | None]] = {}  # of each call of a layer
        self.apart: set[int] = set()  # norms that were called by themselves
        self.is_quiet = False

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Notice nothing inside the block."""
        before, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = before

    def read(self, node: Node) -> None:
        """Notice that features are read, by the layer whose scope this is."""
        if self.is_quiet:
            return
        layer = id(launch.current_scope())
        if layer in self.layers:
            node.readers.add(layer)
        else:
            node.is_float = True

    def convolved(
        self,
        conv: Module,
        norm: Module | None,
        x: SparseTensor,
        residual: SparseTensor | None,
        fits: bool,
        y: SparseTensor,
    ) -> SparseTensor:
        """Notice a layer with what follows it; return its result, watched.

        Args:
            conv, norm: the layers.
            x, residual: what they read.
            fits: whether an integer layer has all that follows in its launch.
            y: the result.
        """
        if launch.is_planning():  # a rehearsal, of zeros
            return y
        integer = id(conv) in self.layers
        for node in _nodes(x):
            if integer:
                node.readers.add(id(conv))
            else:
                node.is_float = True
        for node in _nodes(residual):
            node.is_residual = True
            node.is_float |= not (integer and fits)
        self.norms.setdefault(id(conv), []).append(norm if fits else None)
        if not fits and norm is not None:
            self.apart.add(id(norm))
        if integer and not fits:
            return y  # what follows takes it in float
        self._sample(conv, y.feats)
        return self._seen(y, Node(id(conv)))

    def joined(self, tensors: list[Seen]) -> SparseTensor:
        """Notice that tensors are joined; return them joined, watched."""
        with self.quiet():
            y = SparseTensor.trusted(
                *tensors[0].place, mx.concatenate([x.feats for x in tensors], axis=1)
            )
        parts = [part for x in tensors for part in x.node.parts or (x.node,)]
        for x in tensors:
            x.node.is_joined = True
        return self._seen(y, Node(parts=tuple(parts)))

    def _seen(self, y: SparseTensor, node: Node) -> Seen:
        self.nodes.append(node)
        return Seen.made(y, self, node)

    def saw_all(self, layer: int, calls: int) -> bool:
        """Whether a layer was never called without what may be fused into it."""
        return len(self.norms.get(layer, ())) == calls

    def keep_float(self, layers: Iterable[int]) -> None:
        """Have layers write float."""
        kept = set(layers)
        for node in self.nodes:
            node.is_float |= node.layer in kept

    def writers(self) -> list[int]:
        """Return the layers whose results may be int8, in order."""
        while self._spread():
            pass
        found = (node.layer for node in self.nodes if not node.is_float)
        return list(dict.fromkeys(layer for layer in found if layer is not None))

    def _spread(self) -> bool:
        """Make float what belongs to something that is; return whether anything did."""
        count = sum(node.is_float for node in self.nodes)
        for node in self.nodes:
            node.is_float |= not (node.readers or node.is_residual or node.is_joined)
            if node.is_float or any(part.is_float for part in node.parts):
                for each in (node, *node.parts):
                    each.is_float = True
        floats = {node.layer for node in self.nodes if node.is_float} - {None}
        for node in self.nodes:
            node.is_float |= node.layer in floats
        return count < sum(node.is_float for node in self.nodes)


class Seen(SparseTensor):
    """A tensor whose readers are noticed."""

    watch: Watch
    node: Node

    @classmethod
    def made(cls, x: SparseTensor, watch: Watch, node: Node) -> Seen:
        """Return a tensor, watched."""
        made = cls.__new__(cls)
        place = {"manager": x.manager, "key": x.key, "coords": x.coords}
        made.__dict__.update(place, _feats=x.feats, watch=watch, node=node)
        return made

    def _state(self) -> tuple[type, dict]:
        """Copy and pickle as a plain tensor, unwatched."""
        return SparseTensor, {"feats": self.feats}

    @property
    def place(self) -> tuple:
        """What ``SparseTensor.trusted`` takes beside features."""
        return self.manager, self.key, self.coords

    @property
    def feats(self) -> mx.array:
        """The features; reading them is noticed."""
        self.watch.read(self.node)
        return self._feats

    @property
    def shape(self) -> tuple[int, int]:
        """(N, C)."""
        return tuple(self._feats.shape)

    @property
    def channels(self) -> int:
        """Number of feature channels."""
        return self._feats.shape[1]

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the features."""
        return self._feats.dtype


@joined.register
def _(first: Seen, tensors: list[SparseTensor]) -> SparseTensor:
    if all(isinstance(x, Seen) for x in tensors):
        return first.watch.joined(tensors)
    return first.replace(mx.concatenate([x.feats for x in tensors], axis=1))


def _nodes(x: object) -> tuple[Node, ...]:
    return (x.node,) if isinstance(x, Seen) else ()


class Tap(Module):
    """Stands in for a linear layer, which runs no contraction on most devices.

    Args:
        layer: the layer.
        see: called with it, the rows that it gets, None and its result.
    """

    def __init__(self, layer: Module, see: Callable[..., None]):
        super().__init__()
        self.layer, self._see = layer, see

    def __getattr__(self, name: str):
        # Models ask their layers for sizes.
        held = self if name in self else self.get("layer", {})
        return super().__getattr__(name) if held is self else getattr(held, name)

    def __call__(self, x):
        """Call the layer, and show it."""

        def rows(x):
            y = self.layer(x)
            if not launch.is_planning():
                self._see(self.layer, x.reshape(-1, x.shape[-1]), None, y)
            return y

        with launch.scope(self.layer):
            return on_features(rows, x)


def behind(layer: object) -> object:
    """Return the layer that a tap stands in for; of any other, itself."""
    return layer.layer if type(layer) is Tap else layer


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


# The watch that this runs in, or None.
now: Callable[[], Watch | None] = _watch.get


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Watch the layers inside the block."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)
