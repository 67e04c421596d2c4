"""prepare(): build kernel maps and compile kernels before a net's first call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from threading import RLock
from time import perf_counter
from weakref import ref

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from . import devices, settings
from .backends import cuda_compile, cuda_geometry
from .coordinate_set import stride_text
from .geometry import sync
from .inspect.cost import size
from .module_state import Own, reached
from .nn.convolution import Conv, ConvTranspose, GenerativeConvTranspose
from .nn.pooling import AvgPool, MaxPool, SumPool
from .relation import Relation
from .routes import launch, measure, proof
from .routes.launch import Launch
from .routes.plan import Plan
from .shared_views import building
from .tensor import SparseTensor, features_of

_is_preparing: ContextVar[bool] = ContextVar("is_preparing", default=False)
# Held while a net has other arrays: of two threads the second would take the stand-ins
# of the first for the net's own, and give it these back.
_standing_in = RLock()


@dataclass(frozen=True)
class Preparation:
    """What ``prepare`` built. Prints as a table.

    Attributes:
        levels: (stride, rows) of each coordinate set.
        relations: (relation, names of its views, their bytes) of each; bytes of views
            that two share count for the first.
        kernels: entry symbols of the GPU kernels that the plans launch.
        compiled: CUDA kernels that were compiled or read from the disk, or plans whose
            Metal kernels were compiled.
        seconds: how long it took.
    """

    levels: tuple[tuple[tuple, int], ...]
    relations: tuple[tuple[str, tuple[str, ...], int], ...]
    kernels: tuple[str, ...]
    compiled: int
    seconds: float

    @property
    def bytes(self) -> int:
        """Bytes of all views."""
        return sum(held for _, _, held in self.relations)

    def __str__(self) -> str:
        """Return the table: levels, relations with their views, kernels."""
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
    net: Callable, *inputs: object, training: bool = False, **options: object
) -> Preparation:
    """Build the relations that a net reads on some inputs, without its features.

    The coordinate levels are made first, and their sizes are read at once: by the
    strides that ``net.strides`` lists, or else by those of the strided layers of a
    Sequential or a U-net (``support="cell"``). Then the net is called once with its
    contractions planned and not run, which builds the kernel maps and the views that
    the plans read; they are evaluated together. Kernels are compiled in threads, on
    CUDA and on Metal: there each is launched once on zeros. Matrix kernels that are new
    to this machine prove themselves; if one is refused, the net is planned once more.
    Nothing of the net changes, its running statistics and attributes included, nor of
    the modules that a function calls.

    A net that chooses rows by its features (pruning, say) is prepared as it goes where
    they are zeros; what it reads beyond is built at its call.

    Args:
        net: a module, or any function of sparse tensors.
        *inputs: what it is called with: sparse tensors, and anything else.
        training: whether its gradients are planned too, with respect to its trainable
            parameters, or to the features of a function; and its evaluation, in which
            norms are parts of convolutions.
        **options: keyword arguments of the call.

    Returns:
        What was built.

    Raises:
        TypeError: there is no SparseTensor among the inputs; or with ``training`` no
            features among the results.
    """
    return _prepare(net, net, inputs, training, options)


def _prepare(
    net: Callable, call: Callable, inputs: tuple, training: bool, options: dict
) -> Preparation:
    """Prepare ``call(*inputs, **options)``, which calls the net."""
    begun = perf_counter()
    tensors = [x for x in leaves((inputs, options)) if isinstance(x, SparseTensor)]
    if isinstance(net, SparseTensor):
        raise TypeError(
            "prepare takes the net first and then its input: ml.prepare(net, x)"
        )
    if not tensors:
        raise TypeError(
            "prepare needs the sparse tensors that the net is called with; got "
            f"{', '.join(type(x).__name__ for x in inputs) or 'none'}"
        )
    kernels: dict[str, None] = {}
    if len(tensors) == 1 and inputs and inputs[0] is tensors[0]:
        _make_levels(tensors[0], strides_of(net))
    if cuda_compile.compiles():
        for dims in {x.dims for x in tensors}:
            cuda_geometry.rehearse(dims)

    launches: dict[tuple, Launch] = {}  # the first launch of each kernel

    def run(launched: Launch) -> None:
        plan = launched.choice.plan
        kernels.update(dict.fromkeys(_symbols(plan)))
        if launched.problem.n_in and launched.problem.n_out:
            if not _is_ready(plan):
                launches.setdefault((plan.gpu, plan.add), launched)
            launched.run(plan, *launched.inputs, *launched.bias)  # never evaluated

    compiled, is_right = 0, False
    # All views are evaluated at the end of the block. `_plan` takes `_standing_in`
    # inside it, so it is taken first, as by `prepare_scan`.
    with _standing_in, building:
        while not is_right:
            kernels.clear(), launches.clear()
            with proof.put_off() as waiting:
                _plan(net, call, inputs, options, training, run)
            # What does not compile is refused, if it can be; the rest raises when
            # launched.
            compiled += cuda_compile.finish(raises=not waiting)
            is_right = proof.prove_all(waiting)
    if devices.current().backend == devices.METAL:
        compiled += _launch_each(list(launches.values()))
    return _prepared(tensors, kernels, compiled, begun)


def _symbols(plan: Plan) -> list[str]:
    """Return the entry symbols of the GPU kernels that a plan launches."""
    return [kernel.symbol for kernel in (plan.gpu, plan.add) if kernel is not None]


def _is_ready(plan: Plan) -> bool:
    """Whether the kernels of a plan were launched before, in this process."""
    return all(kernel is None or kernel.is_built for kernel in (plan.gpu, plan.add))


def _prepared(
    tensors: list[SparseTensor],
    kernels: dict[str, None],
    compiled: int,
    begun: float,
) -> Preparation:
    """Say what was built of the relations of some tensors."""
    managers = list({id(x.manager): x.manager for x in tensors}.values())
    held = [(r, arrays_of(r)) for manager in managers for r in manager.relations]
    sets = [each for manager in managers for each in manager.sets]
    return Preparation(
        levels=tuple((each.stride, len(each)) for each in sets),
        relations=_listed(held),
        kernels=tuple(kernels),
        compiled=compiled,
        seconds=perf_counter() - begun,
    )


DOWN = Conv, MaxPool, SumPool, AvgPool  # layers that make coarser rows
# What nets were prepared for in this process: (the net, {(dtype, training)}) by id.
_compiled: dict[int, tuple[ref, set[tuple]]] = {}


def prepare_scan(
    net: mlx.nn.Module,
    x: SparseTensor,
    *inputs: object,
    call: Callable | None = None,
    **options: object,
) -> None:
    """Prepare a call of ``net`` on ``x``: the nets of ``models`` begin with it.

    The first call for a dtype and mode compiles the net's kernels, where that is done
    ahead. Every new scan gets its coordinate levels with one read. Nothing is done for
    a scan that was prepared, an empty scan, under a memory limit, while MLX transforms
    a function that traces the coordinates, and inside of ``prepare``.

    Args:
        net: the module that is called.
        x: its input.
        *inputs, **options: other arguments of the call.
        call: the method that the net calls with these arguments; by default itself.
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
        _make_levels(x, getattr(net, "strides", ()))
    x.manager.prepared.add(prepared)


def _compiled_for(net: mlx.nn.Module) -> set[tuple]:
    """Return the (dtype, training) pairs that a net was compiled for."""
    known = _compiled.get(id(net))
    if known is None or known[0]() is not net:
        name = id(net)
        known = _compiled[name] = ref(net, lambda _: _compiled.pop(name, None)), set()
    return known[1]


def _make_levels(x: SparseTensor, strides: Sequence) -> None:
    """Make coordinate levels in one chain; their sizes and the check are one read."""
    if strides and len(x) and settings.stage_end.get() is None:
        x.manager.cells(x.key, strides)


def strides_of(net: Callable) -> Sequence:
    """Return the strides of a net's coordinate levels, () if their order is unclear.

    ``net.strides`` says them, or else the strided layers do: those of a Sequential, or
    those of a U-net, which has as many strided transposed convolutions. All of them
    must keep to cells; those of a U-net must have one stride, so that their order does
    not matter.
    """
    strides = getattr(net, "strides", None)
    if strides is not None or not isinstance(net, mlx.nn.Module):
        return strides or ()
    modules = list(_modules_of(net))
    down = [m for m in modules if isinstance(m, DOWN) and set(m.stride) != {1}]
    up = [m for m in modules if isinstance(m, ConvTranspose) and set(m.stride) != {1}]
    if any(isinstance(m, GenerativeConvTranspose) for m in up):
        return ()
    if any(m.support != "cell" for m in down):
        return ()
    strides = [m.stride for m in down]
    if isinstance(net, mlx.nn.Sequential):
        direct = set(map(id, net.layers))
        return strides if all(id(m) in direct for m in down) else ()
    is_unet = len(up) == len(down) and len(set(strides)) == 1
    return strides if is_unet else ()


def _modules_of(part: object) -> Iterator[mlx.nn.Module]:
    """Yield the modules of a net in the order of their attributes."""
    if isinstance(part, mlx.nn.Module):
        yield part
    if isinstance(part, (dict, list, tuple)):
        for each in part.values() if isinstance(part, dict) else part:
            yield from _modules_of(each)


def _launch_each(launches: Sequence[Launch]) -> int:
    """Compile Metal kernels in threads: each is launched once, on zeros.

    Returns:
        How many plans were launched.
    """

    def launch_one(launched: Launch) -> None:
        arrays = [
            mx.zeros(a.shape, a.dtype) for a in (*launched.inputs, *launched.bias)
        ]
        mx.eval(launched.run(launched.choice.plan, *arrays))

    if launches:
        with ThreadPoolExecutor() as pool:
            jobs = [pool.submit(copy_context().run, launch_one, x) for x in launches]
        for job in jobs:
            job.result()
    return len(launches)


def _plan(net, call, inputs: tuple, options: dict, training: bool, observer: Callable):
    """Call a net with its contractions planned, and its kernels begun to compile."""
    # A measured choice runs kernels, which a rehearsal leaves out.
    rehearsal = nullcontext() if measure.enabled() else cuda_compile.rehearsal()
    token = _is_preparing.set(True)
    try:
        # What a layer keeps of a weight it then keeps of an array that nobody has.
        apart = unchanged(net, _zeros_for)
        with rehearsal, launch.planned(observer), apart:
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
    """Plan the net and its gradients; nothing is computed."""
    if isinstance(net, mlx.nn.Module):
        trained = dict(tree_flatten(net.trainable_parameters()))
        names, arrays = list(trained), list(trained.values())
    else:
        names = [at for at, x in enumerate(inputs) if isinstance(x, SparseTensor)]
        arrays = [inputs[at].feats for at in names]

    def total(*arrays: mx.array) -> mx.array:
        given = inputs
        if isinstance(net, mlx.nn.Module):
            net.update(tree_unflatten(list(zip(names, arrays, strict=True))))
        else:
            replaced = dict(zip(names, arrays, strict=True))
            given = [
                x.replace(replaced[at]) if at in replaced else x
                for at, x in enumerate(inputs)
            ]
        result = call(*given, **options)
        made = [
            features_of(x)
            for x in leaves(result)
            if isinstance(x, (SparseTensor, mx.array))
        ]
        sums = [x.astype(mx.float32).sum() for x in made if _is_floating(x)]
        if not sums:
            raise TypeError(
                "training=True takes a net that returns tensors or arrays, or lists, "
                "tuples and dicts of them, to differentiate their sum; got "
                f"{type(result).__name__}"
            )
        return sum(sums)

    if arrays:
        mx.grad(total, argnums=tuple(range(len(arrays))))(*arrays)
    else:
        call(*inputs, **options)


@contextmanager
def unchanged(net: Callable, stand_in: Callable | None = None) -> Iterator[None]:
    """Give modules back what is their own after the block, and MLX its random state.

    Another thread's block waits for this one.

    Args:
        net: a module, or a function that reaches some.
        stand_in: what each parameter is replaced by inside the block; by default
            itself.
    """
    with _standing_in:
        random, modules = mx.random.state[0], list(reached(net))
        own = Own(modules)
        try:
            for module in modules:
                module.update(tree_map(stand_in or _counts, module.parameters()))
            yield
        finally:
            own.restore()
            if mx.random.state[0] is not random:  # a layer has drawn from it
                high, low = random.tolist()
                mx.random.seed((high << 32) | low)


def _zeros_for(array: mx.array) -> mx.array:
    is_floating = _is_floating(array)
    return mx.zeros(array.shape, array.dtype) if is_floating else _counts(array)


def _counts(array: mx.array) -> mx.array:
    """Return the array; of a count another one, since ``count += 1`` changes it."""
    return array if _is_floating(array) or array.size > 1 else array.__copy__()


def _is_floating(x: object) -> bool:
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)


def leaves(tree: object) -> Iterator[object]:
    """Yield what stands in lists, tuples and dictionaries."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, (list, tuple)):
        for each in tree:
            yield from leaves(each)
    else:
        yield tree


def arrays_of(relation: Relation) -> list[mx.array]:
    """Return the arrays of a relation's views, each once."""
    views = relation.built.values()
    return list({id(x): x for view in views for x in sync.arrays_in(view)}.values())


def _listed(
    held: list[tuple[Relation, list[mx.array]]],
) -> tuple[tuple[str, tuple[str, ...], int], ...]:
    """Return each relation as text, its views, and bytes that none before it has."""
    lines, seen = [], set()
    for relation, arrays in held:
        new = [array for array in arrays if id(array) not in seen]
        seen.update(map(id, new))
        added = sum([array.nbytes for array in new])
        lines.append((repr(relation), _views(relation), added))
    return tuple(lines)


def _views(relation: Relation) -> tuple[str, ...]:
    """Return the names of a relation's views that are arrays."""
    return tuple(
        f"{name} of its transpose" if swapped else name
        for (name, swapped), view in relation.built.items()
        if isinstance(name, str) and sync.arrays_in(view)
    )
