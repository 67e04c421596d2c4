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
from typing import NamedTuple
from weakref import ref

import mlx.core as mx
from mlx.nn import Module

from . import devices, settings
from .coordinate_set import CoordinateKey
from .coordinates import CoordinateManager
from .routes import launch
from .sync import TracedError, is_of_tracing
from .tensor import SparseTensor

# A net has hundreds of modules, and Module.training is a function.
_mode = attrgetter("_training" if hasattr(Module(), "_training") else "training")
CONSTANTS = (bool, int, float, str, bytes, type(None), mx.Dtype)


class _Made(NamedTuple):
    """Where the features of a result belong: a place among the managers, or its own."""

    manager: int | CoordinateManager
    key: CoordinateKey
    coords: mx.array


_ARRAY = object()  # in the place of an array of a result


def compile(  # noqa: A001 - as mx.compile
    function: Callable,
    inputs: object = None,
    outputs: object = None,
    *,
    keep: int = 8,
) -> Compiled:
    """Return a function that runs as one compiled graph where coordinates come again.

    It takes what the function takes, and returns alike: sparse tensors, arrays,
    constants (None, bool, int, float, str, bytes, dtypes), and lists, tuples and dicts
    of them. The first call with new coordinates builds kernel maps and compiles the
    function for them; later calls run the same graph, and give the same bits.
    Other shapes, dtypes, constants, devices and forced routes count as new, and so do
    modules (``function``, those that it calls, and those in ``inputs`` and ``outputs``)
    that were put into ``train`` or ``eval`` mode. Where launches are observed
    (``ml.trace``, ``ml.verify``) the function runs as it is, and so it does on CUDA
    where an array has no elements: what MLX compiles there divides by their number.

    Args:
        function: a module, whose state is captured by itself; or any function.
        inputs: of a function: state that it reads, as ``mx.compile`` takes it, such as
            ``[net.state, optimizer.state, mx.random.state]``.
        outputs: of a function: state that it changes.
        keep: how many coordinate sets and shapes are kept. The one that was not used
            for longest is dropped, and each with its coordinates.

    Returns:
        The function; threads that call it wait for each other. Its ``len`` says how
        many are kept; ``clear()`` drops them, which is needed after layers of a module
        were replaced, frozen or unfrozen, or numbers of theirs (a momentum) were set.

    Raises:
        TypeError: an argument or result is none of these; or ``inputs`` or ``outputs``
            were given with a module.
        ValueError: the function reads values of features, to prune rows by them, say,
            which no trace can; or ``keep`` is below 1.
    """
    return Compiled(function, inputs, outputs, keep)


class Compiled:
    """What ``compile`` returns."""

    def __init__(self, function: Callable, inputs: object, outputs: object, keep: int):
        if not callable(function):
            raise TypeError(f"compile takes a function; got {type(function).__name__}")
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep must be an int of 1 or more; got {keep!r}")
        if isinstance(function, Module) and not inputs is outputs is None:
            raise TypeError(
                "inputs and outputs are for functions: a module's own state is captured"
            )
        self.function, self.keep = function, keep
        self._state = inputs, outputs
        self._traces: OrderedDict[tuple, _Trace] = OrderedDict()
        self._modules: list[Module] | None = None
        self._one_at_a_time = RLock()

    def __call__(self, *args, **kwargs):
        """Call the function, or what was compiled of it."""
        with self._one_at_a_time:  # where one is traced, a state is MLX's stand-ins
            return self._call(*args, **kwargs)

    def _call(self, *args, **kwargs):
        if launch.observed():
            return self.function(*args, **kwargs)
        given = args, kwargs
        arrays, tensors, signature = [], [], []
        for leaf in _leaves(given, signature, "arguments"):
            array = leaf
            if isinstance(leaf, SparseTensor):
                tensors.append(leaf)
                signature.append(leaf.key.serial)
                array = leaf.feats
            arrays.append(array)
            signature += array.shape, array.dtype
        is_empty = not all([array.size for array in arrays])
        if is_empty and devices.current().backend == devices.CUDA:
            return self.function(*args, **kwargs)
        key = (*signature, *self._modes(), devices.current(), settings.version())
        managers = list({id(x.manager): x.manager for x in tensors}.values())
        trace = self._traces.get(key)
        if trace is not None:
            self._traces.move_to_end(key)
            return trace(given, arrays, managers)
        trace = _Trace(self.function, *self._captured())
        result = trace(given, arrays, managers)
        self._remember(key, trace, managers)
        return result

    def __reduce__(self) -> tuple:
        if not isinstance(self.function, Module):
            raise TypeError(
                "a compiled function is not copied or pickled: which copies its state "
                "would be of is not known. Copy what it reads, and compile a function "
                "of that: ml.compile(function, inputs, outputs)"
            )
        return Compiled, (self.function, None, None, self.keep)

    def __len__(self) -> int:
        return len(self._traces)

    def clear(self) -> None:
        """Drop all that is kept."""
        self._traces.clear()
        self._modules = None

    def _remember(
        self, key: tuple, trace: _Trace, managers: list[CoordinateManager]
    ) -> None:
        drop = partial(_dropped, ref(self), key)
        trace.held = [ref(manager, drop) for manager in managers]
        self._traces[key] = trace
        while len(self._traces) > self.keep:
            self._traces.popitem(last=False)

    def _captured(self) -> tuple[object, object]:
        """Return the state that a trace reads, and that it changes."""
        if not isinstance(self.function, Module):
            return self._state
        state = [self.function.state, mx.random.state]
        # A net in evaluation may have parts that train, and draw random numbers.
        return state, state if any(self._modes()) else state[1:]

    def _modes(self) -> Iterable[bool]:
        """Return the modes, train or eval, of all modules that are known."""
        if self._modules is None:
            roots = *reached(self.function), *_roots(self._state)
            modules = [module for root in roots for module in root.modules()]
            self._modules = list({id(module): module for module in modules}.values())
        return map(_mode, self._modules)


def _dropped(compiled: ref[Compiled], key: tuple, _: ref) -> None:
    """Drop a trace whose coordinates are gone."""
    if (held := compiled()) is not None:
        held._traces.pop(key, None)


class _Trace:
    """One compiled graph and the state that it captured."""

    def __init__(self, function: Callable, inputs, outputs):
        self._function, self._inputs = function, inputs
        self.held: list[ref] = []
        self._given, self._managers, self._result = None, (), None
        # By a weak reference: MLX would not see a circle.
        trace = ref(self)
        self._compiled = mx.compile(
            lambda arrays: trace()._traced(arrays), inputs=inputs, outputs=outputs
        )

    def __call__(self, given, arrays: list[mx.array], managers: list) -> object:
        self._given, self._managers = given, managers
        state = list(_restorers(self._inputs)) if self._result is None else ()
        try:
            made = self._compiled(arrays)
            return _filled(self._result, made, managers)
        except Exception as error:
            # MLX leaves its stand-ins in a state that it was tracing.
            for restore in state:
                restore()
            if not is_of_tracing(error):
                raise
            name = _name(self._function)
            if isinstance(error, TracedError) and error.coordinates:
                raise ValueError(f"{name} is compiled: {error}") from error
            raise ValueError(
                f"{name} reads values of its arguments while it is compiled: "
                "it chooses rows by features, or by points, masks or edges, or "
                "evaluates. Compile what comes before that step, and what comes after"
            ) from error
        finally:
            self._given, self._managers = None, ()

    def _traced(self, arrays: list[mx.array]) -> list[mx.array]:
        rest, made = iter(arrays), []
        args, kwargs = _replaced(self._given, rest)
        result = self._function(*args, **kwargs)
        for _ in _leaves(result, [], "results"):  # checks them
            pass
        self._result = _emptied(result, made, self._managers)
        return made


def _restorers(tree) -> Iterator[Callable[[], None]]:
    """Yield for each array of a state what puts it back there."""
    if isinstance(tree, dict):
        yield partial(_drop_others, tree, frozenset(tree.keys()))
    if isinstance(tree, (dict, list)):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(value, mx.array):
                yield partial(tree.__setitem__, name, value)
            else:
                yield from _restorers(value)
    elif isinstance(tree, tuple):
        for value in tree:
            yield from _restorers(value)
    elif isinstance(tree, type(mx.random.state)):
        yield partial(_seed, tree[0])


def _drop_others(tree: dict, names: frozenset) -> None:
    """Drop what a failed trace added to a state, as an optimizer's first step does."""
    for name in tree.keys() - names:
        del tree[name]


def _seed(key: mx.array) -> None:
    """Make a key MLX's own, of which a seed is the two words."""
    high, low = key.tolist()
    mx.random.seed(high << 32 | low)


def _leaves(tree, signature: list, where: str) -> Iterator[mx.array | SparseTensor]:
    """Yield arrays and tensors in order; the rest goes into the signature."""
    if isinstance(tree, Module):
        raise TypeError(
            f"{where} of a compiled function have no modules in them; the function "
            "knows its own, and inputs= and outputs= take their state"
        )
    if isinstance(tree, (mx.array, SparseTensor)):
        signature.append(type(tree))
        yield tree
    elif isinstance(tree, dict):
        signature.append((dict, *tree))
        for value in tree.values():
            yield from _leaves(value, signature, where)
    elif isinstance(tree, (list, tuple)):
        signature.append((type(tree), len(tree)))
        for value in tree:
            yield from _leaves(value, signature, where)
    elif isinstance(tree, CONSTANTS):
        # By their bits: 0.0 equals -0.0, and a NaN nothing.
        same = tree.hex() if isinstance(tree, float) else tree
        signature.append((type(tree), same))
    else:
        raise TypeError(
            f"{where} of a compiled function are sparse tensors, arrays, constants, "
            f"and lists, tuples and dicts of them; got {type(tree).__name__}"
        )


def _mapped(tree, leaf: Callable) -> object:
    """Return a tree with ``leaf`` of each leaf."""
    if isinstance(tree, _Made):
        return leaf(tree)
    if isinstance(tree, dict):
        return {name: _mapped(value, leaf) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [_mapped(value, leaf) for value in tree]
        named = hasattr(tree, "_fields")
        return type(tree)(*values) if named else type(tree)(values)
    return leaf(tree)


def _replaced(tree, arrays: Iterator[mx.array]) -> object:
    """Return arguments with other arrays."""

    def leaf(value):
        if isinstance(value, SparseTensor):
            return value.replace(next(arrays))
        return next(arrays) if isinstance(value, mx.array) else value

    return _mapped(tree, leaf)


def _emptied(tree, made: list[mx.array], managers: list) -> object:
    """Return a result without its arrays, which are appended to ``made``."""

    def leaf(value):
        if isinstance(value, SparseTensor):
            made.append(value.feats)
            at = [i for i, each in enumerate(managers) if each is value.manager]
            return _Made(at[0] if at else value.manager, value.key, value.coords)
        if not isinstance(value, mx.array):
            return value
        made.append(value)
        return _ARRAY

    return _mapped(tree, leaf)


def _filled(tree, made: list[mx.array], managers: list) -> object:
    """Return a result with the arrays of this call."""
    rest = iter(made)

    def leaf(value):
        if value is _ARRAY:
            return next(rest)
        if not isinstance(value, _Made):
            return value
        manager = value.manager
        manager = managers[manager] if isinstance(manager, int) else manager
        return SparseTensor.trusted(manager, value.key, value.coords, next(rest))

    return _mapped(tree, leaf)


def _roots(tree) -> Iterator[Module]:
    """Yield the modules in a tree, not those inside of them."""
    if isinstance(tree, Module):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _roots(value)


def reached(value: object, depth: int = 4) -> Iterator[Module]:
    """Yield the modules that a function reaches: bound, closed over, or by name."""
    if isinstance(value, Module):
        yield value
        return
    if isinstance(value, (list, tuple)):
        held = list(value)
    else:
        names = ("__self__", "__wrapped__", "func", "args", "function")
        held = [getattr(value, name, None) for name in names]
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty one
                held.append(cell.cell_contents)
        held += map(value.__globals__.get, _names(value.__code__))
    if depth:
        for each in held:
            if each is not None and not isinstance(each, ModuleType):
                yield from reached(each, depth - 1)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function asks for, and those inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)
