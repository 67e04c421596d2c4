"""Attributes of points that a net reads and a scan does not have, and how to say so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

FILLING = "give the attribute, or {} to read zeros"  # how to ask for them


class MissingAttribute(ValueError):
    """These points lack what a net reads.

    Args:
        name: the attribute.
        features: what the net reads.
        held: the attributes that there are.

    Attributes:
        lack: the sentence without what to do.
    """

    def __init__(self, name: str, features: Sequence[str], held: Iterable[str]):
        found = ", ".join(held) or "no attributes"
        self.lack = (
            f"the net reads {', '.join(features)}, and these points have no {name} "
            f"({found})"
        )
        super().__init__(f"{self.lack}: {FILLING.format('say fill=True')}")


@contextmanager
def of_scan(scan: object, option: str = "") -> Iterator[None]:
    """Name the scan in errors of its points, as a command says them.

    Args:
        scan: its path.
        option: of the command, that fills what is missing with zeros; "" for none.
    """
    try:
        yield
    except MissingAttribute as error:
        remedy = f": {FILLING.format(f'pass {option}')}" if option else ""
        raise ValueError(f"{scan}: {error.lack}{remedy}") from None
    except ValueError as error:
        raise ValueError(f"{scan}: {error}") from None
