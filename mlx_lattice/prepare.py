"""prepare(): build kernel maps and compile kernels before a net's first call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from threading import RLock
from time import perf_counter
from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from . import devices, settings, sync
from .backends.cuda import geometry as cuda_geometry
from .backends.gpu import nvrtc as cuda_compile
from .compiled import Snapshot, reached
from .coordinate_set import Stride, stride_text
from .inspect.explain import size
from .relation import Relation
from .routes import launch, proof, selection
from .routes.launch import Launch
from .sync import building
from .tensor import SparseTensor, features_of

_is_preparing: ContextVar[bool] = ContextVar("is_preparing", default=False)
# Held while a net has zeros for parameters: a second thread would snapshot the zeros
# and restore them.
_standing_in = RLock()


@dataclass(frozen=True)
class Preparation:
    """Report what ``prepare`` built. Prints as a table.

    Attributes:
        levels: (stride, rows) of each coordinate set.
        relations: (relation, names of its views, their bytes). The bytes of views that
            two relations share count for the first.
        kernels: entry symbols of the GPU kernels that the plans launch.
        compiled: the number of CUDA kernels, or plans of Metal kernels, that were
            compiled.
        seconds: duration.
    """

    levels: tuple[tuple[Stride, int], ...]
    relations: tuple[tuple[str, tuple[str, ...], int], ...]
    kernels: tuple[str, ...]
    compiled: int
    seconds: float

    @property
    def bytes(self) -> int:
        """Bytes of all views."""
        return sum(held for _, _, held in self.relations)

    def __str__(self) -> str:
        lines = [
            f"prepared in {1e3 * self.seconds:.3g} ms: {len(self.relations)} relations "
            f"of {len(self.levels)} coordinate sets, {size(self.bytes)}, "
            f"{len(self.kernels)} GPU kernels ({self.compiled} compiled or read)"
        ]
        for stride, rows in self.levels:
            lines.append(f"  stride {stride_text(stride):<6} {rows:>12,} rows")
        for relation, views, held in self.relations:
            lines.append(
                f"  {relation}: {', '.join(views) or 'no views'}, {size(held)}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def prepare(
    net: Callable[..., Any], *inputs: object, training: bool = False, **options: object
) -> Preparation:
    """Build the kernel maps that a net needs for some inputs, without features.

    If the net has an attribute ``strides`` (the strides of its coordinate levels, the
    finest first), all levels are built first, and their sizes are one read. Then the
    net is called once with its contractions planned but not run, which builds kernel
    maps and compiles kernels. Matrix kernels that are new to this machine are tested
    against the floor route. Parameters, running statistics and attributes of the net,
    and of modules that a function calls, do not change.

    If a net chooses rows by its features (``ops.prune``), the kernel maps are those for
    features of zeros.

    Args:
        net: a module, or any function of sparse tensors.
        *inputs: the arguments of the call: sparse tensors and any others.
        training: whether to plan the gradients of a module's trainable parameters, and
            the evaluation, which fuses norms.
        **options: keyword arguments of the call.

    Returns:
        A report of the relations and kernels.

    Raises:
        TypeError: no input is a SparseTensor; or with ``training`` the net is not a
            module, or no result has features.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> net = nn.Sequential(nn.Conv3d(8, 16, 2, stride=2), nn.SubmConv3d(16, 16, 3))
        >>> len(ml.prepare(net, x).relations)
        2
    """
    return _prepare(net, net, inputs, training, options)


def _prepare(
    net: Callable, call: Callable, inputs: tuple, training: bool, options: dict
) -> Preparation:
    begin = perf_counter()
    given = [x for _, x in tree_flatten((inputs, options))]
    tensors = [x for x in given if isinstance(x, SparseTensor)]
    if isinstance(net, SparseTensor):
        raise TypeError(
            "prepare takes the net first and then its input: ml.prepare(net, x)"
        )
    if not tensors:
        raise TypeError(
            "prepare needs the sparse tensors that the net is called with; got "
            f"{', '.join(type(x).__name__ for x in inputs) or 'none'}"
        )
    if training and not isinstance(net, mlx.nn.Module):
        raise TypeError(
            "training=True takes the module whose parameters are trained; got "
            f"{type(net).__name__}"
        )
    if len(tensors) == 1 and inputs and inputs[0] is tensors[0]:
        _make_levels(tensors[0], net)
    if cuda_compile.compiles():
        for dims in {x.dims for x in tensors}:
            cuda_geometry.rehearse(dims)

    symbols: dict[str, None] = {}
    launches: dict[tuple, Launch] = {}  # the first launch of each kernel to compile

    def compile_kernels(planned: Launch) -> None:
        plan = planned.choice.plan
        kernels = [kernel for kernel in (plan.gpu, plan.add) if kernel is not None]
        symbols.update({kernel.symbol: None for kernel in kernels})
        if planned.problem.n_in and planned.problem.n_out:
            if not all(kernel.is_built for kernel in kernels):
                launches.setdefault((plan.gpu, plan.add), planned)
            launch_plan = planned.cache()
            # The result is never evaluated: kernels start to compile.
            launch_plan(planned.relation, *planned.inputs, *planned.bias)

    compiled, is_right = 0, False
    # The block evaluates all views at its end. The lock comes first, as in
    # `prepare_scan`, since `_plan` takes it inside the block.
    with _standing_in, building:
        while not is_right:
            symbols.clear(), launches.clear()
            with proof.put_off() as waiting:
                _plan(net, call, inputs, options, training, compile_kernels)
            # A kernel that does not compile is refused if a proof waits for it; any
            # other raises here.
            compiled += cuda_compile.finish(raises=not waiting)
            is_right = proof.prove_all(waiting)
    if launches and devices.current().backend == devices.METAL:
        _launch_each(list(launches.values()))
        compiled += len(launches)
    levels, relations = [], []
    seen: set[int] = set()
    for manager in {id(x.manager): x.manager for x in tensors}.values():
        levels += [(each.stride, len(each)) for each in manager.sets]
        relations += [_report(relation, seen) for relation in manager.relations]
    seconds = perf_counter() - begin
    facts = tuple(levels), tuple(relations), tuple(symbols)
    return Preparation(*facts, compiled, seconds)


def _report(relation: Relation, seen: set[int]) -> tuple[str, tuple[str, ...], int]:
    """Return a relation, its views and their bytes, without arrays that were seen."""
    names, nbytes = [], 0
    for (name, swapped), view in relation.built.items():
        arrays = sync.arrays_in(view)
        if isinstance(name, str) and arrays:
            names.append(f"{name} of its transpose" if swapped else name)
        for array in arrays:
            nbytes += 0 if id(array) in seen else array.nbytes
            seen.add(id(array))
    return repr(relation), tuple(names), nbytes


# Nets that were prepared in this process: (the net, {(dtype, training)}) by id.
_compiled: dict[int, tuple[ref, set[tuple]]] = {}


def prepare_scan(
    net: mlx.nn.Module,
    x: SparseTensor,
    *inputs: object,
    call: Callable[..., Any] | None = None,
    **options: object,
) -> None:
    """Prepare a call of ``net`` on ``x``: the nets of ``models`` begin with it.

    On CUDA the first call for a dtype and mode compiles the net's kernels. Every new
    scan gets its coordinate levels with one read. A no-op for prepared and empty scans,
    under a memory limit, and inside ``prepare``. ``call`` is the method that the net
    calls with these arguments; by default itself.
    """
    if not isinstance(x, SparseTensor):
        return  # the first layer raises
    facts = x.dtype, net.training
    prepared = id(net), x.key.serial, *facts
    if prepared in x.manager.prepared or _is_preparing.get():
        return
    if not len(x) or settings.stage_end.get() is not None:
        return
    if cuda_compile.compiles() and facts not in _compiled_for(net):
        with _standing_in:  # a second thread waits: the net has zeros for parameters
            known = _compiled_for(net)
            if facts not in known:
                _prepare(net, call or net, (x, *inputs), net.training, options)
                known.add(facts)
                if not sync.is_known_to_differentiate():
                    known.add((x.dtype, False))
    else:
        _make_levels(x, net)
    x.manager.prepared.add(prepared)


def _compiled_for(net: mlx.nn.Module) -> set[tuple]:
    known = _compiled.get(id(net))
    if known is None or known[0]() is not net:
        key = id(net)
        known = _compiled[key] = ref(net, lambda _: _compiled.pop(key, None)), set()
    return known[1]


def _make_levels(x: SparseTensor, net: Callable) -> None:
    strides = getattr(net, "strides", ())
    if strides and len(x) and settings.stage_end.get() is None:
        x.manager.cells(x.key, strides)


def _launch_each(launches: Sequence[Launch]) -> None:
    """Launch each Metal plan once on zeros, in threads."""

    def launch_one(planned: Launch) -> None:
        arrays = (*planned.inputs, *planned.bias)
        zeros = [mx.zeros(array.shape, array.dtype) for array in arrays]
        mx.eval(planned.run(planned.choice.plan, *zeros))

    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(copy_context().run, launch_one, x) for x in launches]
    for job in jobs:
        job.result()


def _plan(net, call, inputs: tuple, options: dict, training: bool, observer: Callable):
    """Call a net with its contractions planned; ``observer`` gets each Launch."""
    # A measured choice runs kernels, which a dry run leaves out.
    dry_run = nullcontext() if selection.is_tuning() else cuda_compile.rehearsal()
    token = _is_preparing.set(True)
    try:
        with dry_run, launch.planned(observer), unchanged(net):
            if training:
                _differentiate(net, call, inputs, options)
                if sync.is_known_to_differentiate():
                    return  # norms are no parts of convolutions in this gradient
                for module in reached(net):
                    module.eval()
            call(*inputs, **options)
    finally:
        _is_preparing.reset(token)


def _differentiate(net, call: Callable, inputs: tuple, options: dict) -> None:
    """Plan the net and the gradients of its parameters."""
    sources = dict(tree_flatten(net.trainable_parameters()))

    def total(*arrays: mx.array) -> mx.array:
        net.update(tree_unflatten(list(zip(sources, arrays, strict=True))))
        result = call(*inputs, **options)
        given = [x for _, x in tree_flatten(result)]
        tensors = [x for x in given if isinstance(x, SparseTensor | mx.array)]
        results = filter(_is_floating, map(features_of, tensors))
        sums = [x.astype(mx.float32).sum() for x in results]
        if not sums:
            raise TypeError(
                "training=True takes a net that returns tensors or arrays, or lists, "
                "tuples and dicts of them, to differentiate their sum; got "
                f"{type(result).__name__}"
            )
        return sum(sums)

    if sources:
        mx.grad(total, argnums=tuple(range(len(sources))))(*sources.values())
    else:
        call(*inputs, **options)


@contextmanager
def unchanged(net: Callable[..., Any]) -> Iterator[None]:
    """Restore modules and random state after a block, in which parameters are zeros."""
    with _standing_in:
        modules = list(reached(net))
        snapshot = Snapshot(modules)
        try:
            for module in modules:
                module.update(tree_map(_stand_in, module.parameters()))
            yield
        finally:
            snapshot.restore()


def _stand_in(array: mx.array) -> mx.array:
    """Return zeros for floats, a copy of a count, which ``count += 1`` would change."""
    if _is_floating(array):
        return mx.zeros(array.shape, array.dtype)
    return array if array.size > 1 else array.__copy__()


def _is_floating(x: object) -> bool:
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)
