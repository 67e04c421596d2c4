"""calibrate() for int8 features: scales, folded norms, and chains that stay in int8.

The float net runs twice. The first run samples magnitudes of features, and traces which
norms follow a layer and which layers read its result. The second run compares each
layer's integer result with its float one, on the same float input. What rounding adds
to the mean of an output channel is subtracted from its shift (Nagel et al., "Data-Free
Quantization Through Weight Equalization and Bias Correction", 2019).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx
import mlx.nn
from mlx.nn import Module

from ..integer_weight import fits_int32
from ..ops import observed
from ..ops.coordinates import joined
from ..quantized import padded
from ..relation import Relation
from ..routes import launch
from ..tensor import SparseTensor
from .calibration import (
    Calibration,
    CallCounter,
    ComparedCalls,
    LayerRecord,
    Samples,
    observe_calls,
    searched_weight,
)
from .fake_quantized import FakeQuant
from .fused import tracing
from .integer import (
    FoldedNorm,
    contracted,
    integers_of,
    put,
    rounded,
    set_output_scale,
    tie_scales,
    usable,
)
from .linear import each_row, has_twin, observable, twin_holding


def calibrate_integers(
    model: Module,
    batches: list,
    chosen: list[str],
    kept: dict[str, str],
    bits: int,
    group_size: int | None,
    method: str,
    call: Callable[[Module, object], object],
) -> tuple[Module, Calibration]:
    """Return an integer copy of a model, and its errors; see ``calibrate``.

    Args:
        model: the float model, or one with ``FakeQuant`` layers.
        batches: its inputs.
        chosen: paths of the layers that are to be integer.
        kept: reasons for the others.
        bits, group_size: of weights.
        method: of ``METHODS``.
        call: runs the model on a batch.
    """
    model = copy.deepcopy(model)
    layers = _layers(model, chosen, bits, group_size)
    known = {id(layer.module): layer for layer in layers}
    by_path = {path: layer.module for layer in layers for path in layer.paths}

    results: dict[int, Samples] = {}
    counter = CallCounter()

    def counted_call(model: Module, batch: object) -> object:
        counter.start()
        return call(model, batch)

    def sample(module: Module, feats: mx.array) -> None:
        turn = counter.next("result", module)
        results.setdefault(id(module), Samples()).add(feats, turn)

    tracer = Tracer(set(known), sample)

    def gather(module: Module, x: mx.array, relation, y) -> None:
        layer = known[id(module)]
        layer.inputs.add(x, counter.next("features", module))
        squares = mx.square(x.astype(mx.float32)).sum(axis=0)
        layer.squares = squares if layer.squares is None else layer.squares + squares
        layer.rows += x.shape[0]
        layer.calls += 1
        mx.eval(layer.squares)

    def norm_observer(fused: observed.Fused) -> None:
        if not tracer.is_paused:
            tracer.called_alone.add(id(fused.scope))

    with tracing(tracer), observed.norms.observe(norm_observer):
        observe_calls(model, by_path, batches, gather, counted_call)
    for layer in layers:
        _choose(layer, method)
    # A linear layer that is called by itself gives floats there in any case.
    tracer.keep_float(
        key
        for key, layer in known.items()
        if not isinstance(layer.module, mlx.nn.Linear)
        and not tracer.is_always_followed(key, layer.calls)
    )
    differ = _results_that_differ(tracer, known, results, method)
    tracer.keep_float(differ)
    paths = {id(module): path for path, module in model.named_modules()}
    writes = _int8_results(tracer, known, results, method, paths)
    _share_input_scales(tracer, known, writes)

    def compare(module: Module, x: mx.array, relation: Relation | None, y) -> None:
        _compare(known[id(module)], x, relation, y, counter.next("compared", module))

    observe_calls(model, by_path, batches, compare, counted_call)
    folded = _foldable(tracer, known)
    at = {path: layer for layer in layers for path in layer.paths}
    errors = tuple(
        layer.layer_error(path, id(layer.module) in writes)
        for path, layer in ((path, at[path]) for path in chosen)
    )
    norms = {id(norm) for norm in folded.values()}
    names = sorted(path for path, m in model.named_modules() if id(m) in norms)
    made = _integer_model(model, layers, writes, folded)
    return made, Calibration(bits, group_size, errors, kept, 8, method, tuple(names))


def not_integer(module: Module) -> str | None:
    """Return why a layer cannot multiply integers, or None if it can."""
    if isinstance(module, FakeQuant):
        return None
    if not has_twin(module):
        return f"{type(module).__name__} has no integer form"
    volume = prod(module.weight.shape[1:-1])
    if not fits_int32(volume, padded(module.weight.shape[-1], 128)):
        return "its sums could leave int32"
    return None


def _layers(
    model: Module, chosen: list[str], bits: int, group_size
) -> list[LayerRecord]:
    """Return records of the layers to convert; put the float layer for a FakeQuant."""
    modules, found = dict(model.named_modules()), {}
    for path in chosen:
        module, given = modules[path], {}
        key = id(module)
        if key in found:
            found[key].paths.append(path)
        elif isinstance(module, FakeQuant):
            given = {"trained": module.get("input_scale"), "fixed": True}
            facts = module.bits, module.group_size
            found[key] = LayerRecord(
                observable(module.float_layer()), [path], *facts, **given
            )
        else:
            found[key] = LayerRecord(observable(module), [path], bits, group_size)
    for layer in found.values():
        for path in layer.paths:
            put(model, path, layer.module)
    return list(found.values())


def _choose(layer: LayerRecord, method: str) -> None:
    """Choose the scale of features and the weight of a layer."""
    given = layer.bits, layer.group_size
    plain, path = integers_of(layer.module, *given), layer.paths[0]
    layer.plain = plain, usable(layer.inputs.scale("greatest"), path)
    if layer.fixed:
        layer.scale, layer.weight = usable(layer.trained, path), plain
        return
    layer.scale = usable(layer.inputs.scale(method), path)
    worst = None if layer.scale is None else layer.inputs.worst(layer.scale, method)
    if worst is not None:
        layer.scale, layer.by_row = None, True
        layer.notes.append(f"by row, as one scale makes features of {worst}")
    mean = None if layer.squares is None else layer.squares / max(1, layer.rows)
    layer.weight = searched_weight(layer.module, *given, mean)


def _compare(
    layer: LayerRecord, x: mx.array, relation: Relation | None, y: mx.array, turn: int
) -> None:
    """Add a call's errors: of plain rounding and of the chosen scales."""
    y = y.astype(mx.float32)
    relation = each_row(x.shape[0]) if relation is None else relation
    sums = []
    for weight, scale in (layer.plain, (layer.weight, layer.scale)):
        made = _result(layer.module, x, relation, weight, scale)
        sums.append(mx.square(y - made).sum())
    now = ComparedCalls(
        mx.stack([*sums, mx.square(y).sum()]), (y - made).sum(axis=0), y.shape[0]
    )
    layer.compared[turn] = now + layer.compared.get(turn)


def _result(module: Module, x: mx.array, relation, weight, scale) -> mx.array:
    """Return a layer's float32 result of rounded features."""
    held = rounded(x.astype(mx.float32), scale)
    scales = weight.scale if scale is None else weight.scale * scale
    groups = 1 if isinstance(module, mlx.nn.Linear) else module.groups
    return contracted(held, weight, relation, scales, module.get("bias"), groups)


# The traced run


@dataclass(eq=False)
class Node:
    """One result of a layer, or of ``cat``.

    Attributes:
        layer: id of the layer that wrote it; None for joined tensors.
        is_float: whether a reader needs floats.
        readers: ids of the integer layers that read it as features.
        is_residual: whether an integer layer adds it.
        parts: the results of layers that were joined.
        is_joined: whether it is part of a joined tensor.
    """

    layer: int | None = None
    is_float: bool = False
    readers: set[int] = field(default_factory=set)
    is_residual: bool = False
    parts: tuple[Node, ...] = ()
    is_joined: bool = False


class Tracer:
    """Traces which layers read the results of others while the float model runs.

    A layer may write int8 if only integer layers read its result: as features, as the
    residual of a convolution, or joined with others by ``cat`` for such readers.

    Args:
        layers: ids of the layers that are to multiply integers.
        sample: called with a layer and the features of its result, after what is
            fused into an integer layer, or after all that follows a float one.
    """

    def __init__(
        self,
        layers: set[int],
        sample: Callable[[Module, mx.array], None],
    ):
        self.layers, self._sample = layers, sample
        self.nodes: list[Node] = []
        self.norms: dict[int, list[Module | None]] = {}  # by layer, for each call
        self.called_alone: set[int] = set()  # norms
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Trace nothing inside the block."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def read(self, node: Node) -> None:
        """Record that the layer of this scope reads features."""
        if self.is_paused:
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
        """Record a layer with what follows it; return its result, traced."""
        if launch.is_planning():  # the results are zeros
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
            self.called_alone.add(id(norm))
        if integer and not fits:
            return y  # what follows reads floats
        self._sample(conv, y.feats)
        return self._traced(y, Node(id(conv)))

    def joined(self, tensors: list[TracedTensor]) -> SparseTensor:
        """Record that tensors are joined; return them joined, traced."""
        first = tensors[0]
        with self.paused():
            y = SparseTensor.trusted(
                first.manager,
                first.key,
                first.coords,
                mx.concatenate([x.feats for x in tensors], axis=1),
            )
        parts = [part for x in tensors for part in x.node.parts or (x.node,)]
        for x in tensors:
            x.node.is_joined = True
        return self._traced(y, Node(parts=tuple(parts)))

    def _traced(self, y: SparseTensor, node: Node) -> TracedTensor:
        self.nodes.append(node)
        return TracedTensor.of_node(y, self, node)

    def is_always_followed(self, layer: int, calls: int) -> bool:
        """Whether all calls of a layer were calls of ``fused.convolved``."""
        return len(self.norms.get(layer, ())) == calls

    def keep_float(self, layers: Iterable[int]) -> None:
        """Mark all results of layers as float."""
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
        """Mark nodes that depend on float nodes; return whether there were new ones."""
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


class TracedTensor(SparseTensor):
    """A layer's result during the traced run: the tracer records who reads it."""

    tracer: Tracer
    node: Node

    @classmethod
    def of_node(cls, x: SparseTensor, tracer: Tracer, node: Node) -> TracedTensor:
        """Return a tensor, traced."""
        made = cls.__new__(cls)
        place = {"manager": x.manager, "key": x.key, "coords": x.coords}
        made.__dict__.update(place, _feats=x.feats, tracer=tracer, node=node)
        return made

    def _state(self) -> tuple[type, dict]:
        """Copy and pickle as a plain tensor."""
        return SparseTensor, {"feats": self.feats}

    @property
    def feats(self) -> mx.array:
        """The features; the tracer records who reads them."""
        self.tracer.read(self.node)
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
def _(first: TracedTensor, tensors: list[SparseTensor]) -> SparseTensor:
    if all(isinstance(x, TracedTensor) for x in tensors):
        return first.tracer.joined(tensors)
    return first.replace(mx.concatenate([x.feats for x in tensors], axis=1))


def _nodes(x: object) -> tuple[Node, ...]:
    return (x.node,) if isinstance(x, TracedTensor) else ()


# What stays in int8, and what is folded


def _int8_results(
    tracer: Tracer,
    known: dict[int, LayerRecord],
    results: dict[int, Samples],
    method: str,
    paths: dict[int, str],
) -> dict[int, mx.array]:
    """Return the scale of each layer that writes int8, by its id.

    If readers were trained with ``FakeQuant``, it is their scale, provided that all
    readers of the result, and of results joined with it, have the same scale.
    """
    writers = tracer.writers()
    shared = {key: {key} for key in writers}
    for node in tracer.nodes:
        if not node.is_float and node.parts:
            layers = {part.layer for part in node.parts}
            together = set().union(*(shared[key] for key in layers))
            shared |= {key: together for key in together}
    readers: dict[int, set[int]] = {}
    added = set()
    for node in tracer.nodes:
        for part in node.parts or (node,):
            readers.setdefault(part.layer, set()).update(node.readers)
            if node.is_residual:
                added.add(part.layer)
    scales: dict[int, mx.array] = {}
    for key in writers:
        together = shared[key]
        read = set().union(*(readers.get(each, set()) for each in together))
        near = (known[each] for each in {*read, *together} if each in known)
        if any(layer.fixed for layer in near):
            scale = _trained(known, read, bool(added & together))
        else:
            scale = results[key].scale(method)
        scale = usable(scale, paths[key])
        if scale is not None:
            scales[key] = scale
    _share_output_scales(tracer, scales)
    return scales


def _results_that_differ(
    tracer: Tracer,
    known: dict[int, LayerRecord],
    results: dict[int, Samples],
    method: str,
) -> list[int]:
    """Return the layers whose results in several calls differ too much for one scale.

    Results that a reader trained with ``FakeQuant`` rounds are left out.
    """
    trained = {key for key, layer in known.items() if layer.fixed}
    held = {
        part.layer
        for node in tracer.nodes
        if node.readers & trained
        for part in node.parts or (node,)
    }
    found = []
    for key in tracer.writers():
        if key in held | trained:
            continue
        scale = results[key].scale(method)
        worst = results[key].worst(scale, method)
        if worst is not None:
            found.append(key)
            if key in known:
                text = f"writes floats, as one scale makes results of {worst}"
                known[key].notes.append(text)
    return found


def _share_output_scales(tracer: Tracer, scales: dict[int, mx.array]) -> None:
    """Give results that are only joined with others the greatest of their scales.

    ``cat`` would round them to that scale; so they are rounded once, by their layer.
    """
    met: dict[int, list[mx.array]] = {}
    apart = set()
    for node in tracer.nodes:
        parts = [part.layer for part in node.parts]
        if parts and all(layer in scales for layer in parts):
            most = max((scales[layer] for layer in parts), key=mx.array.item)
            for layer in parts:
                met.setdefault(layer, []).append(most)
        if not parts and (node.readers or node.is_residual):
            apart.add(node.layer)
    for layer in met.keys() - apart:
        first = met[layer][0]
        if all(most is first for most in met[layer]):
            scales[layer] = first


def _share_input_scales(
    tracer: Tracer, known: dict[int, LayerRecord], writes: dict[int, mx.array]
) -> None:
    """Give layers that read only int8 results of one scale that scale.

    A joined tensor has the greatest scale of its parts.
    """
    met: dict[int, list[mx.array | None]] = {}
    for node in tracer.nodes:
        scales = [writes.get(part.layer) for part in node.parts or (node,)]
        whole = all(scale is not None for scale in scales)
        scale = max(scales, key=lambda scale: scale.item()) if whole else None
        for reader in node.readers:
            met.setdefault(reader, []).append(scale)
    for reader, scales in met.items():
        is_one = scales[0] is not None and all(each is scales[0] for each in scales)
        if is_one and not known[reader].by_row:
            known[reader].scale = scales[0]


def _trained(known: dict[int, LayerRecord], readers: set[int], added: bool):
    """Return the scale that all readers were trained with, or None."""
    scales = [known[key].trained for key in readers]
    if added or not scales or any(scale is None for scale in scales):
        return None
    return scales[0] if len({scale.item() for scale in scales}) == 1 else None


def _foldable(tracer: Tracer, known: dict[int, LayerRecord]) -> dict[int, Module]:
    """Return the norms that can be folded into the layer before them, by layer.

    The norm follows each call of the layer, and is called nowhere else.
    """
    users: dict[int, set[int]] = {}
    for key, norms in tracer.norms.items():
        for norm in norms:
            users.setdefault(id(norm), set()).add(key)
    found = {}
    for key, norms in tracer.norms.items():
        norm = norms[0]
        if norm is None or any(each is not norm for each in norms):
            continue
        if users[id(norm)] != {key} or id(norm) in tracer.called_alone:
            continue
        # A bare call of the layer must not compute the norm.
        if key in known and tracer.is_always_followed(key, known[key].calls):
            found[key] = norm
    return found


def _integer_model(
    model: Module,
    layers: list[LayerRecord],
    writes: dict[int, mx.array],
    folded: dict[int, Module],
) -> Module:
    """Put integer twins into the model, and a ``FoldedNorm`` for each folded norm."""
    paths = {id(m): [] for m in folded.values()}
    for path, module in model.named_modules():
        if id(module) in paths:
            paths[id(module)].append(path)
    for layer in layers:
        key, module = id(layer.module), layer.module
        twin = twin_holding(module, layer.weight)
        shift = module.get("bias")
        shift = None if shift is None else shift.astype(mx.float32)
        mean = layer.mean
        if mean is not None:
            shift = mean if shift is None else shift + mean
        if key in folded:
            norm = folded[key]
            scale, moved = norm.scale_shift()
            twin.scales = twin.scales * scale
            shift = moved if shift is None else shift * scale + moved
            for path in paths[id(norm)]:
                put(model, path, FoldedNorm(type(norm).__name__))
        if shift is not None:
            twin.bias = shift
        twin.calibrated(layer.scale, writes.get(key), layer.after)
        for path in layer.paths:
            put(model, path, twin)
    integer = {id(layer.module) for layer in layers}
    for module in model.modules():  # float stems, which round their results
        if id(module) in writes and id(module) not in integer:
            set_output_scale(module, writes[id(module)])
    tie_scales(model)
    mx.eval(model.parameters())
    return model
