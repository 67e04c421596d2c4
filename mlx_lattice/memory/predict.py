"""predict_peak(): the most memory that a forward pass takes, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from .. import devices
from ..backends import cpu_extension
from ..compiled import Compiled
from ..inspect.cost import size
from ..inspect.explain import LayerNames
from ..module_state import reached
from ..ops import attended, fusion
from ..preparation import arrays_of, leaves, unchanged
from ..routes import launch
from ..routes.launch import Launch
from ..tensor import SparseTensor
from . import flight, limit, schedule, stages
from .graph import Graph, Node
from .pace import Pace, operations
from .schedule import Stage, Step


@dataclass(frozen=True)
class Held:
    """A buffer at the peak.

    Attributes:
        bytes: how large it is.
        shape: of the array that it was allocated for.
        primitive: what computes it.
        layer: the layer that it belongs to; "" where that can't be told.
    """

    bytes: int
    shape: tuple[int, ...]
    primitive: str
    layer: str

    def __str__(self) -> str:
        """Return it as people read it."""
        where = f" of {self.layer}" if self.layer else ""
        shape = " x ".join(map(str, self.shape)) or "a number"
        return f"{size(self.bytes)}, {shape} by {self.primitive}{where}"


@dataclass(frozen=True)
class Peak:
    """What ``predict_peak`` says. Prints as a table.

    Attributes:
        bytes: what ``mx.get_peak_memory`` will show, where host and device are as fast
            as they usually are.
        most: what it shows where the device works only when the host waits for it.
        least: what it shows where the device is done with each task at once, the CPU
            with each operation.
        weights: bytes of the net's parameters, as far as they are computed.
        relations: bytes of coordinates and of the relations' views.
        features: bytes of arrays that the pass has computed and holds at the peak.
        other: what else is allocated: the inputs' features, and all that is not the
            net's.
        largest: the largest buffers of ``features``, at most five.
        layer: the layer at which the peak is; "" where that can't be told.
        backend: "cpu", "metal" or "cuda".
        stages: evaluations of the pass; 1 without a limit.
    """

    bytes: int
    most: int
    least: int
    weights: int
    relations: int
    features: int
    other: int
    largest: tuple[Held, ...]
    layer: str
    backend: str
    stages: int

    def __str__(self) -> str:
        """Return the table."""
        at = f", at {self.layer}" if self.layer else ""
        parts = {
            "weights": self.weights,
            "relations": self.relations,
            "features": self.features,
            "other": self.other,
        }
        lines = [
            f"peak {size(self.bytes)} on {self.backend}{at} "
            f"({size(self.least)} to {size(self.most)}, by how far the host runs ahead)"
        ]
        lines += [f"  {name:<10} {size(nbytes)}" for name, nbytes in parts.items()]
        lines += [f"  holds      {held}" for held in self.largest]
        return "\n".join(lines)

    __repr__ = __str__


class UnknownRows(ValueError):
    """The net reads values of features before it knows a size."""


def predict_peak(net: Callable, *inputs: object, **options: object) -> Peak:
    """Say the peak memory of a forward pass before it runs.

    The net is called once on features whose values are withheld, which computes nothing
    of them: MLX is lazy. Its graph is then played through as MLX evaluates it: in its
    order, each buffer from its allocation to its last reader, buffers that are reused
    or shared, sizes as the allocator rounds them, and how far the host may run ahead of
    the device. Relations and coordinates are built for real: the pass that comes after
    finds them. Nothing of the net changes, nor of the modules that a function reads.
    Of what ``ml.compile`` returned, the peak is that of its compiled calls. Under
    ``ml.memory_limit`` it is that of a pass that waits for each of its stages, which is
    the least room that it needs; where the limit leaves more, more is queued.

    The peak counts all that is allocated in the process, as ``mx.get_peak_memory``
    does, of a pass that starts with what is allocated now.

    Args:
        net: a module, or any function of sparse tensors and arrays.
        *inputs: what it is called with.
        **options: keyword arguments of the call.

    Returns:
        The peak. On a GPU what is held depends on how far the host runs ahead:
        ``bytes`` is what is usual, between ``least`` and ``most``. A pass that finds
        MLX's cache empty (the first one, or after ``mx.clear_cache``) holds less: the
        bytes that are cached now decide which it is.

    Raises:
        RuntimeError: the compiled extension is not there.
        ValueError: the net reads values of features, to choose rows by them.
    """
    record = recorded(net, inputs, options)
    now = flight.current()
    found = record.graph.nodes, record.stages, now
    most, least = (schedule.peak(*found, hurry=hurry) for hurry in (True, False))
    usual = most  # an operation takes the CPU's host microseconds, its worker more
    if now.elements is not None:
        pace = Pace(devices.current(), mx.get_cache_memory())
        usual = schedule.peak(*found, pace=pace)
    return _peak(usual, (most.bytes, least.bytes), record, net, (inputs, options))


def recorded(net: Callable, inputs: Sequence[object], options: dict) -> Record:
    """Return the graph and the stages of a pass, by a dry run. See ``predict_peak``."""
    if cpu_extension.extension is None:
        raise RuntimeError(
            "predict_peak reads MLX's graph by the compiled extension, which can't be "
            f"used: {cpu_extension.absence}. To get it, {cpu_extension.repair}"
        )
    record = Record(Graph(cpu_extension.extension))
    with ExitStack() as block:
        block.enter_context(unchanged(net))
        block.enter_context(stages.recording(record))
        if not isinstance(net, Compiled):  # it runs as it is where it is observed
            block.enter_context(record.layers(net))
        try:
            result = net(*_withheld(inputs), **_withheld(options))
        except RuntimeError as error:
            if "needed in a dry run" not in str(error):
                raise
            raise UnknownRows(
                "predict_peak can't say the memory of this pass: the net reads values "
                "of features before it knows a size. Give it the coordinates that it "
                "would choose (a decoder takes coordinates=...)"
            ) from error
        record.end(tuple(_arrays(result)))
    return record


def _peak(step: Step, bounds: tuple[int, int], record: Record, net, given) -> Peak:
    """Return a step with the words for what is allocated there."""
    most, least = bounds
    nodes = record.graph.nodes
    features = sum(buffer.nbytes for buffer in step.buffers)
    trees = (module.parameters() for module in reached(net))
    arrays = [a for tree in trees for _, a in tree_flatten(tree)]
    places = record.graph.add(arrays)  # the pass computes what is lazy: a feature
    pairs = zip(arrays, places, strict=True)
    weights = _bytes(a for a, at in pairs if not nodes[at].is_lazy)
    relations = _bytes(_geometry(given))
    held = sorted(step.buffers, key=lambda b: (-b.nbytes, b.maker))[:5]
    return Peak(
        bytes=step.bytes,
        most=most,
        least=least,
        weights=weights,
        relations=relations,
        features=features,
        other=step.bytes - features - weights - relations,
        largest=tuple(_held(buffer, nodes) for buffer in held),
        layer=nodes[step.at].layer if step.at >= 0 else "",
        backend=flight.current().backend,
        stages=len(record.stages),
    )


def _held(buffer: schedule.Buffer, nodes: Sequence[Node]) -> Held:
    node = nodes[buffer.maker]
    return Held(buffer.nbytes, node.shape, node.primitive, node.layer)


class Record:
    """The stages of a dry run, each as it finds the graph."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.stages: list[Stage] = []
        self._lazy, self._boundaries = limit.LazyResults(), 0

    def append(self, arrays: tuple[mx.array, ...]) -> None:
        """Keep a stage, where the limit that holds here would queue it."""
        if self._queues(arrays):
            self.end(arrays)

    def finish(self, arrays: tuple[mx.array, ...]) -> None:
        """Keep a stage that is waited for, however little it leaves."""
        self._queues(arrays)
        self.end(arrays, is_finished=True)

    def _queues(self, arrays: tuple[mx.array, ...]) -> bool:
        self._boundaries += 1
        held = limit.active()
        return self._lazy.queues(arrays, 0 if held is None else held.share("lazy"))

    def end(self, arrays: tuple[mx.array, ...], is_finished: bool = False) -> None:
        """Keep a stage that evaluates some arrays."""
        roots = tuple(self.graph.add(arrays))
        mx.synchronize()
        holders = self.graph.holders()
        active = mx.get_active_memory()
        self.stages.append(
            Stage(roots, holders, active, self._boundaries, is_finished=is_finished)
        )

    @contextmanager
    def layers(self, net: Callable) -> Iterator[None]:
        """Give nodes the names of their layers inside the block."""
        names = LayerNames(net if isinstance(net, mlx.nn.Module) else None)

        def tell(launched: Launch) -> None:
            name = names.of(launched.scope)
            self.graph.add(launched.inputs, f"what {name} reads")
            (at,) = self.graph.add([launched.result], name)
            self.graph.nodes[at].flops = operations(launched)

        silent = fusion.silent(), attended.observers.silent()
        with launch.observe(tell, alone=True), silent[0], silent[1]:
            yield


def _withheld(tree):
    """Return a tree whose features, of sparse tensors and floats, have no values."""
    withhold = cpu_extension.extension.withheld
    if isinstance(tree, dict):
        return {key: _withheld(each) for key, each in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(_withheld, tree))
    if isinstance(tree, SparseTensor):
        feats = withhold(tree.feats)
        return SparseTensor.trusted(tree.manager, tree.key, tree.coords, feats)
    if isinstance(tree, mx.array) and mx.issubdtype(tree.dtype, mx.floating):
        return withhold(tree)
    return tree


def _arrays(tree: object) -> Iterator[mx.array]:
    """Yield the arrays that evaluating a result evaluates."""
    for each in leaves(tree):
        if isinstance(each, SparseTensor):
            yield each.feats
        elif isinstance(each, mx.array):
            yield each


def _geometry(given: object) -> Iterator[mx.array]:
    """Yield the coordinates and the views that the inputs' managers hold."""
    tensors = [x for x in leaves(given) if isinstance(x, SparseTensor)]
    for manager in {id(x.manager): x.manager for x in tensors}.values():
        for each in manager.sets:
            yield each.coords
        for relation in manager.relations:
            yield from arrays_of(relation)


def _bytes(arrays: Iterator[mx.array]) -> int:
    """Return the bytes of arrays, each once."""
    return sum(array.nbytes for array in {id(a): a for a in arrays}.values())
