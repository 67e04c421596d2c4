"""Mappings of a checkpoint's names: prefixes, patterns or a function."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from .errors import shown

Names = Mapping[str, str | None] | Callable[[str], str | None] | None

# DataParallel puts this before every name of a model.
PARALLEL = "module."
_DEPTH = 8  # of a prefix that is suggested


class Renamer:
    """A mapping of names, and which of its keys matched none.

    A key is a dotted prefix of names. A ``*`` in it stands for what there is up to the
    next dot, and at its end for all that is left; each ``*`` of the new name takes what
    that of the key stood for. The key with the most other letters wins.

    Args:
        mapping: prefixes to prefixes, ``""`` for none, None for names to drop; or a
            function of a name, which returns a name or None.
        names: all names of the checkpoint. Where each begins with ``module.``, that is
            taken off before the mapping sees them.
    """

    def __init__(self, mapping: Names, names: Collection[str]):
        self.parallel = bool(names) and all(n.startswith(PARALLEL) for n in names)
        self.function = mapping if callable(mapping) else None
        self.keys: dict[str, re.Pattern] = {}
        self.used: set[str] = set()
        if self.function is None:
            if not isinstance(mapping, Mapping | None):
                raise TypeError(
                    "mapping must be a dict of prefixes or a function of a name; got "
                    f"{type(mapping).__name__}"
                )
            self.new = dict(mapping or {})
            weight = {key: len(key) - key.count("*") for key in self.new}
            for key in sorted(self.new, key=weight.get, reverse=True):
                self.keys[key] = _pattern(key, self.new[key])

    def seen(self, name: str) -> str:
        """Return a name as the mapping sees it."""
        return name.removeprefix(PARALLEL) if self.parallel else name

    def __call__(self, name: str) -> str | None:
        """Return the new name, or None for one to drop."""
        name = self.seen(name)
        if self.function is not None:
            return _checked(self.function(name), name)
        for key, pattern in self.keys.items():
            if found := pattern.match(name):
                self.used.add(key)
                new = _checked(self.new[key], name)
                if new is None:
                    return None
                for part in found.groups():
                    new = new.replace("*", part, 1)
                rest = name[found.end() :].removeprefix(".")
                return ".".join(filter(None, (new, rest)))
        return name

    @property
    def idle(self) -> tuple[str, ...]:
        """The keys that no name had."""
        return tuple(key for key in self.keys if key not in self.used)


def _pattern(key: str, new: str | None) -> re.Pattern:
    """Return what a key matches at the start of a name."""
    if not isinstance(key, str):
        raise TypeError(f"the mapping's keys must be names; got {key!r}")
    if isinstance(new, str) and new.count("*") != key.count("*"):
        raise ValueError(
            f"the mapping makes {new!r} of {key!r}: each * of a key stands for a part "
            "of the new name, so both must have as many"
        )
    if not key:
        return re.compile("")
    whole = key.endswith("*")
    parts = [re.escape(part) for part in key.split("*")]
    if whole:
        return re.compile("([^.]*)".join(parts[:-1]) + "(.+)$")
    return re.compile("([^.]*)".join(parts) + r"(?=\.|$)")


def _checked(new: object, name: str) -> str | None:
    """Return what a mapping made of a name: a name or None, else raise."""
    if not isinstance(new, str | None):
        raise TypeError(
            f"the mapping makes {new!r} of {shown(name)}; expected a name or None"
        )
    return new


def suggestion(
    left: Collection[str], wanted: Collection[str], place: Callable[[str], str | None]
) -> str:
    """Return the prefix with which most left-over names would fit, as a sentence.

    Args:
        left: names of the checkpoint that no parameter was for.
        wanted: parameters that no name was for.
        place: from a name to the parameter that it means.
    """
    less, more = Counter(), Counter()
    for name in left:
        less.update(prefix for prefix, end in _cuts(name) if place(end) in wanted)
    for parameter in wanted:
        more.update(prefix for prefix, end in _cuts(parameter) if end in left)
    ((key, count),) = less.most_common(1) or ((None, 0),)
    ((prefix, added),) = more.most_common(1) or ((None, 0),)
    if not (count or added):
        return ""
    if count >= added:
        how, mapping = f"without {shown(key)!r}", {key: ""}
    else:
        how, mapping = f"with {prefix!r} before them", {"": prefix}
    return f"{max(count, added)} of {len(left)} left over fit {how}: mapping={mapping}"


def _cuts(name: str) -> Iterable[tuple[str, str]]:
    """Return the ways to cut a name at one of its first dots."""
    at = name.find(".")
    for _ in range(_DEPTH):
        if at < 0:
            return
        yield name[:at], name[at + 1 :]
        at = name.find(".", at + 1)
