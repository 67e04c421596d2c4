"""ConsumedSets: coordinate sets, and what each was computed from, to go back up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .coordinate_set import CoordinateKey, CoordinateSet, finer, stride_text
from .copies import Links
from .held_sets import HeldSets
from .shared_views import building, built_by_one


class ConsumedSets(HeldSets):
    """Coordinate sets, and the finer ones that strided operations consumed."""

    def __init__(self):
        super().__init__()
        # For each set, by stride: the set that it was computed from, None for several.
        self._consumed: dict[CoordinateSet, dict[tuple, CoordinateSet | None]] = {}
        self._version = 0  # counts the changes of that

    def _keepers(self) -> Iterator[tuple[CoordinateSet, CoordinateSet]]:
        yield from super()._keepers()
        for coarse, sets in self._consumed.items():
            for fine in sets.values():
                if fine is not None:
                    yield coarse, fine

    def _keep(self, living: set[CoordinateSet]) -> None:
        super()._keep(living)
        for coarse in self._consumed.keys() - living:
            del self._consumed[coarse]

    @built_by_one
    def links(self, held: CoordinateSet) -> Links:
        """Return a set as it is copied, and what it was computed from."""
        fine = tuple(
            (stride, None if fine is None else fine.serial)
            for stride, fine in self._consumed.get(held, {}).items()
        )
        return super().links(held)._replace(fine=fine)

    @built_by_one
    def link(self, sets: dict[int, CoordinateSet], links: Sequence[Links]) -> None:
        """Take over what is known of sets that were copied."""
        super().link(sets, links)
        for held, *_, fine in links:
            known = {s: sets.get(n) for s, n in fine if n is None or n in sets}
            if known:
                self._consumed[held] = known

    def _note_consumed(self, coarse: CoordinateSet, fine: CoordinateSet) -> None:
        if coarse is fine or self._consumed.get(coarse, {}).get(fine.stride) is fine:
            return
        with building:
            sets = self._consumed.setdefault(coarse, {})
            one = fine if sets.get(fine.stride, fine) is fine else None
            if fine.stride not in sets or sets[fine.stride] is not one:
                sets[fine.stride] = one
                self._version += 1

    def finer(self, key: CoordinateKey, steps: Sequence[int]) -> CoordinateKey:
        """Return the set that ``key`` was computed from by strides of these steps.

        Steps of 1 return ``key`` itself.

        Raises:
            ValueError: ``key`` was not computed from such a set, or from several.
        """
        return self._finer(self[key], steps).key

    def _finer(self, coarse: CoordinateSet, steps: Sequence[int]) -> CoordinateSet:
        if set(steps) == {1}:
            return coarse
        wanted = finer(coarse.stride, steps)
        found, above = [], [coarse]
        for each in above:  # the list grows: a set of stride 4 goes back to stride 1
            sets = self._consumed.get(each, {})
            near = [sets[wanted]] if wanted in sets else list(sets.values())
            for fine in near:
                if fine is None or fine.stride == wanted:
                    found.append(fine)
                elif fine not in above:
                    above.append(fine)
        if len(set(found)) == 1 and found[0] is not None:
            return found[0]
        stride = stride_text(wanted)
        if not found:
            raise ValueError(
                f"no coordinates of stride {stride} are known to upsample "
                f"{coarse.key!r} onto: no strided operation computed its rows from "
                "such a set. Pass coordinates=, or use a generative transposed "
                "convolution"
            )
        raise ValueError(
            f"several coordinate sets of stride {stride} could be the target of "
            f"{coarse.key!r}, whose rows were computed from more than one set; pass "
            "coordinates= to say which"
        )
