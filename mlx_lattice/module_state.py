"""What modules have of their own, to be put back after a call that computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType

from mlx.nn import Module

__all__ = ["Keeps", "Kept", "Own", "reached"]


class Keeps:
    """What the library keeps with a module, which is no state of it."""

    __slots__ = ()


class Kept(Keeps, dict):
    """What a layer made of its arrays; copies and pickles of the layer have none."""

    def __reduce__(self) -> tuple:
        return type(self), ()


class Own:
    """Arrays and attributes of modules as they are now, lists and dicts in them too.

    Args:
        modules: those that they are of, and of all modules inside of these.
    """

    def __init__(self, modules: Iterable[Module]):
        self._held: dict[int, tuple[dict | list | set, dict | list | set]] = {}
        for module in modules:
            self._hold(module)

    def _hold(self, value: object) -> None:
        if isinstance(value, Module):
            parts = value, vars(value)
        elif type(value) in (dict, list) or isinstance(value, set):
            parts = (value,)
        else:
            for each in value if type(value) is tuple else ():
                self._hold(each)
            return
        for part in parts:
            if id(part) in self._held:
                continue
            copied = dict(part) if isinstance(part, dict) else part.copy()
            self._held[id(part)] = part, copied
            for each in copied.values() if isinstance(copied, dict) else copied:
                self._hold(each)

    def restore(self) -> None:
        """Put all back that has changed."""
        for part, copied in self._held.values():
            if isinstance(part, list):
                part[:] = copied
            elif isinstance(part, set):
                part.intersection_update(copied)
                part.update(copied)
            else:
                _restore(part, copied)


def _restore(part: dict, copied: dict) -> None:
    """Give a dict its items back, those alone that are others: threads may read it."""
    for name, value in list(part.items()):
        if name not in copied and not isinstance(value, Keeps):
            dict.pop(part, name)
    for name, value in copied.items():
        if name not in part or part[name] is not value:
            dict.__setitem__(part, name, value)


def reached(value: object, depth: int = 4) -> Iterator[Module]:
    """Yield the modules that a function reaches: bound, closed over, or by their names.

    Running statistics of theirs would be left with what has no value.
    """
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
