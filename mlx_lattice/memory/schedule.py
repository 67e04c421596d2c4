"""What is allocated at each step of an evaluation: MLX's memory, played through."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from .flight import Flight
from .freed import Freed
from .graph import Holders, Layout, Node
from .order import order, with_its_own
from .pace import FREED, HOST, MAPPED, Pace
from .rules import Input, taken

Ran = tuple[Sequence[int], Sequence[int]]  # the outputs and inputs of a primitive


@dataclass(frozen=True)
class Stage:
    """One evaluation.

    Attributes:
        roots: the places of what is evaluated.
        holders: who holds what besides the graph, at that moment.
        active: bytes that are allocated before it, lazy arrays not counted.
        boundaries: of the pass, up to its end.
        waits_above: bytes above which the host, when it has launched this, waits for
            the oldest of what is launched, stage by stage: 0 of one that is waited for.
        is_finished: whether it is waited for whatever else is.
    """

    roots: tuple[int, ...]
    holders: Holders
    active: int
    boundaries: int = 0
    waits_above: int = 0
    is_finished: bool = False


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory: its bytes, the arrays and launches that hold it, the node it was for."""

    nbytes: int
    holders: int = 0
    maker: int = -1


@dataclass(eq=False, slots=True)
class Task:
    """Launches that are done together.

    Attributes:
        held: what they read.
        counts: whether it is one of those of which MLX lets only so many be under way.
            What is left where a stage ends is not.
        ends_stage: whether a stage ends with it.
        seconds: that the device takes for it.
        free: when what it held is free, on the host's clock.
    """

    held: list[Buffer] = field(default_factory=list)
    counts: bool = True
    ends_stage: bool = False
    seconds: float = 0.0
    free: float = 0.0


@dataclass(frozen=True)
class Step:
    """What is allocated while one primitive runs.

    Attributes:
        at: the node that it computes; -1 before a stage's first.
        bytes: all that is allocated.
        buffers: what the evaluations have allocated of that.
    """

    at: int
    bytes: int
    buffers: frozenset[Buffer] = field(repr=False, default=frozenset())


def steps(
    nodes: Sequence[Node],
    stages: Sequence[Stage],
    flight: Flight,
    *,
    hurry: bool = True,
    pace: Pace | None = None,
) -> Iterator[tuple[int, int, Player]]:
    """Yield, of each step of the evaluations, its node, its bytes and the player.

    Args:
        nodes: the graph.
        stages: the evaluations, in order.
        flight: how far the host runs ahead.
        hurry: whether the device works only when the host waits for it: the most that
            can be allocated. Else a GPU's task is done as soon as it is launched, and
            on the CPU each operation: MLX's worker lets go of what each held by itself,
            and only counts them by tens.
        pace: how fast host and device are; the device then works while the host does.
    """
    player = Player(nodes, flight, hurry, pace)
    for stage in stages:
        player.begin(stage)
        yield -1, player.active, player
        for at in order(nodes, stage.roots, player.layout.__contains__):
            yield at, player.compute(at), player
        player.end(stage)


def peak(nodes, stages, flight: Flight, **pace) -> Step:
    """Return the step at which most is allocated. Arguments: see ``steps``."""
    most, when = -1, 0
    for count, (_, active, _) in enumerate(steps(nodes, stages, flight, **pace)):
        if active > most:
            most, when = active, count
    # Once more up to there: who holds what is kept of one moment alone.
    for count, (at, _, player) in enumerate(steps(nodes, stages, flight, **pace)):
        if count == when:
            return Step(at, most, frozenset(player.alive))
    raise ValueError("a peak needs at least one stage")


@dataclass
class Growth:
    """What a stage does to memory when the host has waited for those before.

    Attributes:
        before: bytes that are allocated when it begins.
        added: the most that it adds to them. What is made of coordinates meanwhile
            counts, on GPUs twice: tables and what is sorted of them are there together.
        launches: of its work.
    """

    before: int
    added: int = 0
    launches: int = 0


def growths(nodes, stages, flight: Flight) -> list[Growth]:
    """Return what each stage does. Arguments: see ``steps``."""
    found: list[Growth] = []
    tables = 0
    for at, active, player in steps(nodes, stages, flight, hurry=True):
        if at < 0:
            last = stages[max(0, len(found) - 1)].active
            made = stages[len(found)].active - last
            tables = max(0, made) if flight.elements is not None else 0
            found.append(Growth(active if player.left is None else player.left))
        stage = found[-1]
        stage.added = max(stage.added, active + tables - stage.before)
        stage.launches += player.launches
    return found


class Player:
    """The state of MLX's memory while it evaluates."""

    def __init__(self, nodes, flight: Flight, hurry: bool = True, pace=None):
        self._nodes, self._flight, self._hurry = nodes, flight, hurry
        self._pace, self._freed = pace, Freed(pace.cached if pace else 0)
        # Seconds: where the host is, and until when the device has work.
        self._now = self._busy = 0.0
        self.active = 0
        self.launches = 0  # of the last step
        self.left: int | None = None  # active when the last stage was waited for
        self.alive: set[Buffer] = set()  # of what was computed here
        self.layout: dict[int, Layout] = {}  # of all that is computed, here or before
        self._buffer: dict[int, Buffer] = {}
        self._given: dict[int, Buffer] = {}  # by its identity, of evaluated arrays
        self._computed: set[int] = set()
        self._references: list[int] = []
        self._queue: deque[Task] = deque()  # those under way, the last one open
        self._places = self._elements = 0  # of the open task
        self._seen: set[Buffer] = set()  # of it too

    def begin(self, stage: Stage) -> None:
        """Start an evaluation: count who holds what now."""
        self.launches = 0
        self._references = list(stage.holders.arrays)
        for at in self._lazy(stage):
            for other in (*self._nodes[at].inputs, *self._nodes[at].siblings):
                self._references[other] += 1
        for at in range(len(stage.holders.arrays)):
            node = self._nodes[at]
            if at in self._computed or node.is_lazy:
                continue
            self.layout[at] = node.layout
            buffer = self._given.setdefault(node.data, Buffer(node.data_bytes))
            self._buffer[at] = buffer
            buffer.holders = stage.holders.data[at]
        for buffer in self.alive:
            buffer.holders = 0
        tasks = (task.held for task in self._queue)
        for buffer in chain(self._buffer.values(), *tasks):
            buffer.holders += 1
        self.active = stage.active + sum(buffer.nbytes for buffer in self.alive)
        for at in [at for at in self._buffer if not self._references[at]]:
            self._drop(at)
        for at in stage.roots:
            self._references[at] += 1
        if not self._queue:
            self._queue.append(Task())

    def _lazy(self, stage: Stage) -> set[int]:
        """Return what is still to be computed, and held: the graph holds more."""
        holders = stage.holders.arrays
        open_ = [at for at in range(len(holders)) if holders[at] > 0]
        open_ += stage.roots
        found: set[int] = set()
        while open_:
            at = open_.pop()
            node = self._nodes[at]
            if at not in found and node.is_lazy and at not in self._computed:
                found.add(at)
                open_ += node.inputs
                open_ += node.siblings
        return found

    def compute(self, at: int) -> int:
        """Run a node's primitive; return what is allocated while it runs.

        What the node computes itself is one launch with it, and held until it is done.
        """
        held: set[Buffer] = set()
        ran: list[Ran] = []
        launches = 0
        for each in with_its_own(self._nodes, at):
            if each in self.layout:
                continue  # another output of one that ran
            outputs, count = self._run(each, held)
            ran.append((outputs, self._nodes[each].inputs))
            launches += count
        node = self._nodes[at]
        held.update(self._buffer[x] for x in (*node.inputs, *node.siblings))
        held.discard(self._buffer[at])
        active, self.launches = self.active, launches
        if self._pace is not None:
            self._now += HOST * launches
        self._launch(held, launches, ran)
        for outputs, inputs in ran:
            self._detach(outputs, inputs)
        return active

    def _run(self, at: int, held: set[Buffer]) -> tuple[tuple[int, ...], int]:
        """Allocate what a primitive makes; return its outputs and launches."""
        node = self._nodes[at]
        outputs = (*node.siblings[: node.position], at, *node.siblings[node.position :])
        inputs = [self._input(read) for read in node.inputs]
        takes = taken([self._nodes[out] for out in outputs], inputs)
        for out, source in zip(outputs, takes.outputs, strict=True):
            if source.of is None:
                buffer = self._allocate(source.nbytes, out)
            else:
                buffer = self._buffer[node.inputs[source.of]]
            buffer.holders += 1
            self._buffer[out], self.layout[out] = buffer, source.layout
            self._computed.add(out)
        held.update(self._allocate(nbytes, at) for nbytes in takes.temporaries)
        if self._pace is not None:
            made = [self._nodes[out] for out in outputs]
            self._queue[-1].seconds += self._pace.seconds(made, inputs, takes.launches)
        return outputs, takes.launches

    def end(self, stage: Stage) -> None:
        """Close the open task; finish the oldest stages while too much is allocated."""
        # MLX holds what an evaluation returns until all of it is done.
        self._launch({self._buffer[at] for at in stage.roots}, 0, ())
        self._queue[-1].counts, self._queue[-1].ends_stage = False, True
        self._close()
        if self._flight.elements is not None:
            self._places = self._elements = 0
            self._seen.clear()
        above = 0 if stage.is_finished else stage.waits_above
        while self.active > above and len(self._queue) > 1:
            while not self._finish_one().ends_stage:
                pass
        self.left = self.active
        self._wait_as_needed()

    def _input(self, at: int) -> Input:
        buffer = self._buffer[at]
        may_go = self._references[at] == 1 and buffer.holders == 1
        return Input(self._nodes[at], self.layout[at], buffer.nbytes, may_go)

    def _allocate(self, nbytes: int, maker: int) -> Buffer:
        buffer = Buffer(self._flight.rounded(nbytes), maker=maker)
        if self._pace is not None and not self._freed.take(buffer.nbytes):
            self._now += MAPPED * buffer.nbytes
        self.active += buffer.nbytes
        self.alive.add(buffer)
        return buffer

    def _release(self, buffer: Buffer) -> None:
        buffer.holders -= 1
        if not buffer.holders:
            self.active -= buffer.nbytes
            if buffer in self.alive:
                self._freed.add(buffer.nbytes)
            self.alive.discard(buffer)

    def _drop(self, at: int) -> None:
        """An array that nothing refers to lets go of its memory."""
        self._release(self._buffer.pop(at))

    def _detach(self, outputs: Sequence[int], inputs: Sequence[int]) -> None:
        """Each output lets go of the inputs and of its siblings."""
        for _ in outputs:
            for read in inputs:
                self._references[read] -= 1
        for out in outputs:
            self._references[out] -= len(outputs) - 1
        for at in {*inputs, *outputs}:
            if not self._references[at]:
                self._drop(at)

    def _launch(self, held: set[Buffer], launches: int, ran: Sequence[Ran]) -> None:
        """Put launches into tasks, which hold buffers, and wait where MLX waits."""
        for buffer in held:
            buffer.holders += 1
        if self._flight.elements is None:
            # On the CPU what a primitive held is released by a place of its own.
            tasks, self._places = divmod(
                self._places + launches + 1, self._flight.launches
            )
            if tasks and self._places:
                self._close()
            self._queue[-1].held.extend(held)
            if tasks and not self._places:
                self._close()
        else:
            self._queue[-1].held.extend(held)
            self._places += launches
            if launches:
                self._elements += sum(self._counted(*each) for each in ran)
            is_full = self._places > self._flight.launches
            if is_full or self._elements >> 20 > self._flight.elements:
                self._places = self._elements = 0
                self._seen.clear()
                self._close()
        self._wait_as_needed()

    def _counted(self, outputs: Sequence[int], inputs: Sequence[int]) -> int:
        """Return the elements that a GPU's task grows by.

        CUDA counts what every launch reads, Metal each buffer of a task once.
        """
        if self._flight.backend == "cuda":
            return sum(self.layout[at].span for at in inputs)
        count = 0
        for at in (*inputs, *outputs):
            if self._buffer[at] not in self._seen:
                self._seen.add(self._buffer[at])
                count += self.layout[at].span
        return count

    def _close(self) -> None:
        """Launch the open task."""
        task = self._queue[-1]
        self._busy = max(self._busy, self._now) + task.seconds
        task.free = self._busy + FREED
        self._queue.append(Task())

    def _wait_as_needed(self) -> None:
        """Finish tasks while the host waits, or at once where it never does."""
        flight, queue = self._flight, self._queue
        if self._pace is not None:
            while len(queue) > 1 and queue[0].free <= self._now:
                self._finish_one()
        if not self._hurry:
            if flight.elements is None:
                queue.append(Task())
            while len(queue) > 1:
                self._finish_one()
        while self._under_way() > flight.tasks:
            self._finish_counted()
        while self.active > flight.limit and self._under_way():
            self._finish_counted()

    def _under_way(self) -> int:
        """Return how many tasks MLX counts that are launched and not done."""
        return sum(task.counts for task in self._queue) - 1

    def _finish_counted(self) -> None:
        """Finish the oldest task that MLX counts, and what was launched before it."""
        while not self._finish_one().counts:
            pass

    def _finish_one(self) -> Task:
        task = self._queue.popleft()
        self._now = max(self._now, task.free)
        for buffer in task.held:
            self._release(buffer)
        return task
