"""ConsumedSets: coordinate sets, and what each was computed from, to go back up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .coordinate_set import CoordinateKey, CoordinateSet, finer, stride_text
from .copies import Links
from .held_sets import HeldSets


class ConsumedSets(HeldSets):
    """Coordinate sets, and the finer ones that strided operations consumed."""

    def __init__(self):
        super().__init__()
        # For each coarse set the finer sets it was computed from, latest last.
        self._consumed: dict[CoordinateSet, list[CoordinateSet]] = {}

    def _keepers(self) -> Iterator[tuple[CoordinateSet, CoordinateSet]]:
        yield from super()._keepers()
        for coarse, sets in self._consumed.items():
            for fine in {each.stride: each for each in sets}.values():
                yield coarse, fine  # the latest of each stride

    def _keep(self, living: set[CoordinateSet]) -> None:
        super()._keep(living)
        self._consumed = {
            coarse: [fine for fine in sets if fine in living]
            for coarse, sets in self._consumed.items()
            if coarse in living
        }

    def links(self, held: CoordinateSet) -> Links:
        """Return a set as it is copied, and what it was computed from."""
        fine = tuple(each.serial for each in self._consumed.get(held, ()))
        return super().links(held)._replace(fine=fine)

    def link(self, sets: dict[int, CoordinateSet], links: Sequence[Links]) -> None:
        """Take over what is known of sets that were copied."""
        super().link(sets, links)
        for held, *_, fine in links:
            if known := [sets[serial] for serial in fine if serial in sets]:
                self._consumed[held] = known

    def _note_consumed(self, coarse: CoordinateSet, fine: CoordinateSet) -> None:
        if coarse is not fine:
            sets = self._consumed.setdefault(coarse, [])
            if fine not in sets:
                sets.append(fine)
                self._version += 1

    def finer(self, key: CoordinateKey, steps: Sequence[int]) -> CoordinateKey:
        """Return the set that a strided operation of these steps made ``key`` of.

        Raises:
            ValueError: there is none, or it is not known which.
        """
        return self._finer(self[key], steps).key

    def _finer(self, coarse: CoordinateSet, steps: Sequence[int]) -> CoordinateSet:
        wanted = finer(coarse.stride, steps)
        found = [s for s in self._consumed.get(coarse, ()) if s.stride == wanted]
        if not found:
            found = [s for s in self.sets if s.stride == wanted and s is not coarse]
        if not found and set(steps) == {1}:
            return coarse
        if len(found) == 1:
            return found[0]
        stride = stride_text(wanted)
        if not found:
            raise ValueError(
                f"no coordinates of stride {stride} are known to upsample "
                f"{coarse.key!r} onto; pass coordinates=, or use a generative "
                "transposed convolution"
            )
        raise ValueError(
            f"several coordinate sets of stride {stride} could be the target of "
            f"{coarse.key!r}: {', '.join(repr(each.key) for each in found)}; pass "
            "coordinates= to say which"
        )
