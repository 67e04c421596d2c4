"""``mx.compile`` for functions of sparse tensors: a trace for each coordinate set.

Features and parameters are inputs of a trace; relations are its constants. So a trace
belongs to the coordinates that it was made with, and ends with them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from operator import attrgetter
from threading import RLock
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import ref

import mlx.core as mx
from mlx.nn import Module
from mlx.utils import tree_flatten

from . import devices, settings
from .coordinates import CoordinateManager
from .nn.layers import ModuleCache
from .routes import launch
from .sync import is_of_tracing
from .tensor import SparseTensor

# A net has hundreds of modules, and Module.training is a function.
_mode = attrgetter("_training" if hasattr(Module(), "_training") else "training")
CONSTANTS = (bool, int, float, str, bytes, type(None), mx.Dtype)


def compile(  # noqa: A001 - as mx.compile
    function: Callable[..., Any],
    inputs: object = None,
    outputs: object = None,
    *,
    keep: int = 8,
) -> Compiled:
    """Return a function that runs as one compiled graph for coordinates seen before.

    The compiled function takes and returns sparse tensors, arrays, constants (None,
    bool, int, float, str, bytes, dtypes), and lists, tuples and dicts of these. The
    first call with new coordinates builds kernel maps and compiles the function for
    them. Later calls run the same graph and give the same bits.

    The function is compiled again for other shapes, dtypes, constants, devices and
    forced routes, and if its modules change between ``train`` and ``eval`` mode. It
    runs uncompiled inside ``ml.trace`` and ``ml.verify``, and on CUDA if an array has
    no elements.

    Args:
        function: a module, whose state is captured, or any function.
        inputs: the state that a function reads, as for ``mx.compile``, such as
            ``[net.state, optimizer.state, mx.random.state]``.
        outputs: the state that a function changes.
        keep: the number of coordinate sets and shapes that are cached. The least
            recently used is dropped.

    Returns:
        The compiled function. Threads that call it wait for each other. Its ``len`` is
            the number of cached traces. Call ``clear()`` to drop them after you
            replaced, froze or unfroze layers of a module, or set one of their numbers
            (such as a momentum).

    Raises:
        TypeError: an argument or result has another type; or ``inputs`` or ``outputs``
            were given with a module.
        ValueError: the function reads values of features, for example to prune rows by
            them, which a trace cannot do; or ``keep`` is below 1.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> net = nn.Sequential(nn.SubmConv3d(8, 8, 3), nn.ReLU())
        >>> fast = ml.compile(net)
        >>> fast(x).shape, fast(x).shape, len(fast)  # one graph for both calls
        ((64, 8), (64, 8), 1)
    """
    return Compiled(function, inputs, outputs, keep)


class Compiled:
    """Run a function as cached compiled graphs; made by ``compile``."""

    def __init__(
        self, function: Callable[..., Any], inputs: object, outputs: object, keep: int
    ):
        if not callable(function):
            raise TypeError(f"compile takes a function; got {type(function).__name__}")
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep must be an int of 1 or more; got {keep!r}")
        if isinstance(function, Module) and not inputs is outputs is None:
            raise TypeError(
                "inputs and outputs are for functions: a module's own state is captured"
            )
        self.function: Callable[..., Any] = function
        self.keep: int = keep
        self._state = inputs, outputs
        self._traces: OrderedDict[tuple, _Trace] = OrderedDict()
        self._modules: list[Module] | None = None
        self._lock = RLock()  # during a trace, a state is MLX's placeholders

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function compiled."""
        with self._lock:
            return self._call(*args, **kwargs)

    def _call(self, *args, **kwargs):
        if launch.observed():
            return self.function(*args, **kwargs)
        signature, leaves = _flattened((args, kwargs), "arguments")
        tensors = [leaf for leaf in leaves if isinstance(leaf, SparseTensor)]
        arrays = [x.feats if isinstance(x, SparseTensor) else x for x in leaves]
        is_empty = not all([array.size for array in arrays])
        if is_empty and devices.current().backend == devices.CUDA:
            return self.function(*args, **kwargs)
        key = (
            signature,
            *((array.shape, array.dtype) for array in arrays),
            *(x.key.serial for x in tensors),
            *self._modes(),
            devices.current(),
            settings.version(),
        )
        managers = list({id(x.manager): x.manager for x in tensors}.values())
        trace = self._traces.get(key)
        if trace is not None:
            self._traces.move_to_end(key)
            return trace(leaves, arrays, managers)
        trace = _Trace(self.function, signature, *self._captured())
        result = trace(leaves, arrays, managers)
        drop = partial(_dropped, ref(self), key)
        trace.managers = [ref(manager, drop) for manager in managers]
        self._traces[key] = trace
        while len(self._traces) > self.keep:
            self._traces.popitem(last=False)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        if not isinstance(self.function, Module):
            raise TypeError(
                "a compiled function cannot be copied or pickled: its state is that of "
                "other objects. Copy what it reads, and compile a function of the "
                "copies: ml.compile(function, inputs, outputs)"
            )
        return Compiled, (self.function, None, None, self.keep)

    def __len__(self) -> int:
        return len(self._traces)

    def clear(self) -> None:
        """Drop all traces."""
        self._traces.clear()
        self._modules = None

    def _captured(self) -> tuple[object, object]:
        if not isinstance(self.function, Module):
            return self._state
        state = [self.function.state, mx.random.state]
        # A net in evaluation may have parts that train, and draw random numbers.
        return state, state if any(self._modes()) else state[1:]

    def _modes(self) -> Iterable[bool]:
        """Return the modes, train or eval, of all modules that are known."""
        if self._modules is None:
            state = tree_flatten(self._state, is_leaf=Module.is_module)
            roots = [x for _, x in state if isinstance(x, Module)]
            roots += reached(self.function)
            modules = [module for root in roots for module in root.modules()]
            self._modules = list({id(module): module for module in modules}.values())
        return map(_mode, self._modules)


def _dropped(compiled: ref[Compiled], key: tuple, _: ref) -> None:
    if (alive := compiled()) is not None:
        alive._traces.pop(key, None)


class _Trace:
    """One compiled graph and the state that it captured."""

    def __init__(self, function: Callable, signature: tuple, inputs, outputs):
        self._function, self._signature, self._inputs = function, signature, inputs
        self.managers: list[ref] = []
        self._leaves: list = []
        # Signature and leaves of the result. A tensor is (manager, key, coords), the
        # manager as its place among those of the arguments; an array is None.
        self._result: tuple[tuple, list] | None = None
        # A weak reference: the garbage collector does not see through MLX.
        trace = ref(self)
        self._compiled = mx.compile(
            lambda arrays: trace()._traced(arrays), inputs=inputs, outputs=outputs
        )

    def __call__(
        self, leaves: list, arrays: list[mx.array], managers: list[CoordinateManager]
    ) -> object:
        self._leaves = leaves
        snapshot = Snapshot(self._inputs) if self._result is None else None
        try:
            results = self._compiled(arrays)
        except Exception as error:
            # MLX leaves its placeholders in a state that it was tracing.
            if snapshot is not None:
                snapshot.restore()
            if not is_of_tracing(error):
                raise
            name = getattr(self._function, "__name__", type(self._function).__name__)
            raise ValueError(
                f"{name} reads values of its arguments while it is compiled: "
                "it chooses rows by features, or by points, masks or edges, makes a "
                "tensor of coordinates, or evaluates. Compile what comes before that "
                "step, and what comes after; pass the tensor, not its coordinates"
            ) from error
        finally:
            self._leaves = []
        signature, places = self._result
        made = []
        for place, array in zip(places, results, strict=True):
            if place is not None:
                manager, key, coords = place
                manager = managers[manager] if isinstance(manager, int) else manager
                array = SparseTensor.trusted(manager, key, coords, array)
            made.append(array)
        return _unflattened(signature, iter(made))

    def _traced(self, arrays: list[mx.array]) -> list[mx.array]:
        tensors = [x for x in self._leaves if isinstance(x, SparseTensor)]
        managers = list({id(x.manager): None for x in tensors})
        leaves = [
            leaf.replace(array) if isinstance(leaf, SparseTensor) else array
            for leaf, array in zip(self._leaves, arrays, strict=True)
        ]
        args, kwargs = _unflattened(self._signature, iter(leaves))
        result = self._function(*args, **kwargs)
        signature, leaves = _flattened(result, "results")
        places = []
        for leaf in leaves:
            place = None
            if isinstance(leaf, SparseTensor):
                manager = leaf.manager
                if id(manager) in managers:
                    manager = managers.index(id(manager))
                place = manager, leaf.key, leaf.coords
            places.append(place)
        self._result = signature, places
        return [x.feats if isinstance(x, SparseTensor) else x for x in leaves]


class Snapshot:
    """MLX's random state, and the arrays and attributes of modules, dicts and lists."""

    def __init__(self, tree: object):
        self._random = mx.random.state[0]
        self._copies: dict[int, tuple] = {}
        self._add(tree)

    def _add(self, value: object) -> None:
        if isinstance(value, Module):
            parts = value, vars(value)
        elif type(value) in (dict, list) or isinstance(value, set):
            parts = (value,)
        else:
            for each in value if type(value) is tuple else ():
                self._add(each)
            return
        for part in parts:
            if id(part) in self._copies:
                continue
            copied = dict(part) if isinstance(part, dict) else part.copy()
            self._copies[id(part)] = part, copied
            for each in copied.values() if isinstance(copied, dict) else copied:
                self._add(each)

    def restore(self) -> None:
        """Undo all changes; unchanged values are not written: other threads read."""
        if mx.random.state[0] is not self._random:
            high, low = self._random.tolist()  # a seed is its two words
            mx.random.seed(high << 32 | low)
        for part, copied in self._copies.values():
            if isinstance(part, list):
                part[:] = copied
            elif isinstance(part, set):
                part.intersection_update(copied)
                part.update(copied)
            else:
                for name, value in list(part.items()):
                    if name not in copied and not isinstance(value, ModuleCache):
                        dict.pop(part, name)
                for name, value in copied.items():
                    if name not in part or part[name] is not value:
                        dict.__setitem__(part, name, value)


def _flattened(tree, where: str) -> tuple[tuple, list[mx.array | SparseTensor]]:
    """Return a hashable signature of a tree, and its arrays and tensors in order."""
    leaves: list[mx.array | SparseTensor] = []

    def signature(tree) -> tuple:
        if isinstance(tree, (mx.array, SparseTensor)):
            leaves.append(tree)
            return (type(tree),)
        if isinstance(tree, Module):
            raise TypeError(
                f"{where} of a compiled function have no modules in them; the function "
                "knows its own, and inputs= and outputs= take their state"
            )
        if isinstance(tree, dict):
            return dict, tuple(tree), tuple(map(signature, tree.values()))
        if isinstance(tree, (list, tuple)):
            return type(tree), len(tree), tuple(map(signature, tree))
        if isinstance(tree, CONSTANTS):
            # Floats by their bits: 0.0 equals -0.0, and a NaN equals nothing.
            return type(tree), tree.hex() if isinstance(tree, float) else tree
        raise TypeError(
            f"{where} of a compiled function are sparse tensors, arrays, constants, "
            f"and lists, tuples and dicts of them; got {type(tree).__name__}"
        )

    return signature(tree), leaves


def _unflattened(signature: tuple, leaves: Iterator) -> object:
    """Return the tree of a signature with other arrays and tensors."""
    kind, *parts = signature
    if not parts:
        return next(leaves)
    if len(parts) == 1:
        return kind.fromhex(parts[0]) if issubclass(kind, float) else parts[0]
    values = [_unflattened(part, leaves) for part in parts[1]]
    if kind is dict:
        return dict(zip(parts[0], values, strict=True))
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def reached(value: object, depth: int = 4) -> Iterator[Module]:
    """Yield the modules that a function reaches: bound, closed over, or by name."""
    if isinstance(value, Module):
        yield value
        return
    if isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        names = ("__self__", "__wrapped__", "func", "args", "function")
        parts = [getattr(value, name, None) for name in names]
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty one
                parts.append(cell.cell_contents)
        parts += map(value.__globals__.get, _names(value.__code__))
    if depth:
        for part in parts:
            if part is not None and not isinstance(part, ModuleType):
                yield from reached(part, depth - 1)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
