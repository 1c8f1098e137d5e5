"""A discrete-event model of ranks that train together: their reads, disks, cores and collectives. Nothing it says is
measured.

A rank takes stages in turn, one for each collective of a step. A stage begins when this rank's pages for it are in
memory and the stage before is computed on every rank; then bytes cross the link, and the rank computes. Pages come from
the disk of the host, which serves so many requests at once, each for a time drawn from recorded ones; what arrives
takes some time of a core before it can be used. Reads begin as the engine's do: as late as the mean rate of the disk
allows, less a margin, and no more of them ahead than a window holds. Each page that is read sends another one away.
"""

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from random import Random

SLICE_SECONDS = 3e-3  # of a core, after which another thread may have it
SOON_SECONDS = 1e-6  # what is due within so short a time is due
CAUSES = ("computing", "link", "own disk", "other ranks")


@dataclass(frozen=True)
class Stage:
    """What a rank does from one collective to the next."""

    pages_read: int
    pages_written: int
    link_seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class Host:
    """A machine with one disk, and the ranks on it."""

    cores: int
    ranks: int
    disk_slots: int
    write_seconds: float  # that a page has one of the slots for
    page_cpu_seconds: float  # of a core for each page that moves


@dataclass(frozen=True)
class Policy:
    """When the engine reads ahead."""

    page_seconds: float  # of a page at the mean rate
    margin_seconds: float  # that reads begin before the mean rate says they must
    window_pages: int  # that may be ahead of the stage under way


@dataclass(frozen=True)
class ReadTimes:
    """Draws times of reads: the recorded ones, and beyond one of their quantiles a power law fitted to the rest."""

    ends: tuple[float, ...]  # of bins, seconds
    begins: tuple[float, ...]
    cumulated: tuple[float, ...]  # shares
    tail_from: float  # the quantile
    tail_seconds: float  # at that quantile
    tail_exponent: float
    scale: float = 1.0

    def draw(self, random: Random) -> float:
        share = random.random()
        if share >= self.tail_from:
            left = (1 - share) / (1 - self.tail_from)
            return self.scale * self.tail_seconds * left ** (-1 / self.tail_exponent)
        index = bisect_left(self.cumulated, share)
        begin, end = self.begins[index], self.ends[index]
        return self.scale * (begin + (end - begin) * random.random())


class Servers:
    """So many take requests at once, the rest wait in turn; who is `urgent` goes first."""

    def __init__(self, events: "Events", count: int) -> None:
        self._events, self._free = events, count
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()

    def take(self, seconds: float, then: Callable[[], None], *, urgent: bool = False) -> None:
        if self._free > 0:
            self._free -= 1
            self._events.after(seconds, lambda: self._end(then))
        elif urgent:
            self._waiting.appendleft((seconds, then))
        else:
            self._waiting.append((seconds, then))

    def _end(self, then: Callable[[], None]) -> None:
        if self._waiting:
            seconds, following = self._waiting.popleft()
            self._events.after(seconds, lambda: self._end(following))
        else:
            self._free += 1
        then()


class Events:
    """What happens, in the order of its times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, then))

    def run(self) -> None:
        while self._queue:
            self.now, _, then = heapq.heappop(self._queue)
            then()


class Machine:
    """A host in the model: its disk and its cores."""

    def __init__(self, events: Events, host: Host, times: ReadTimes, random: Random) -> None:
        self.host, self._times, self._random = host, times, random
        self._disk = Servers(events, host.disk_slots)
        self.cores = Servers(events, host.cores)

    def read(self, then: Callable[[], None]) -> None:
        seconds = self._times.draw(self._random)
        self._disk.take(seconds, lambda: self.cores.take(self.host.page_cpu_seconds, then, urgent=True))

    def write(self) -> None:
        """Take the core's time, then the disk's; nobody waits for it."""
        write_seconds = self.host.write_seconds
        self.cores.take(self.host.page_cpu_seconds, lambda: self._disk.take(write_seconds, _nothing), urgent=True)


class Barrier:
    """Lets all ranks go on once all have come."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waiting: list[Callable[[], None]] = []

    def meet(self, then: Callable[[], None]) -> None:
        self._waiting.append(then)
        if len(self._waiting) == self._ranks:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each()


class Rank:
    """One rank: its program, and what reads ahead for it."""

    def __init__(
        self, events: Events, machine: Machine, barrier: Barrier, stages: list[Stage], policy: Policy, steps: int
    ) -> None:
        self._events, self._machine, self._barrier, self._policy = events, machine, barrier, policy
        self._stages, self._steps = stages, steps
        self._due = [0.0, *accumulate(stage.compute_seconds + stage.link_seconds for stage in stages)]
        self._stage = self._asked = 0  # counted over all steps; stages before `asked` have their reads under way
        self._begun = 0  # reads of the stage that is next to be asked for
        self._missing = [stage.pages_read for stage in stages] * steps
        self._pages_ahead = 0
        self._computed_at = 0.0  # when the stage before was done
        self._is_waiting = False
        self._begun_at: float | None = None  # when what the stage computes began; None while the program waits
        self._next_look = float("inf")
        self.waited = dict.fromkeys(CAUSES, 0.0)
        self.step_ends: list[float] = []
        self.most_ahead = 0

    def begin_stage(self) -> None:
        """The stage before is computed; wait for this one's pages."""
        self._computed_at = self._events.now
        if self._stage % len(self._stages) == 0 and self._stage:
            self.step_ends.append(self._events.now)
        if self._stage < len(self._missing):
            self._is_waiting = True
            self._look_ahead()
            self._go_on_if_ready()

    def _go_on_if_ready(self) -> None:
        if not self._is_waiting or self._asked <= self._stage or self._missing[self._stage] > 0:
            return
        self._is_waiting = False
        self._pages_ahead -= self._current.pages_read
        ready_at = self._note("own disk", self._computed_at)
        self._barrier.meet(lambda: self._gather(ready_at))

    def _gather(self, ready_at: float) -> None:
        met_at = self._begun_at = self._note("other ranks", ready_at)
        self._work(self._current.link_seconds, lambda: self._compute(met_at))

    def _compute(self, met_at: float) -> None:
        sent_at = self._note("link", met_at)
        self._look_ahead()
        self._work(self._current.compute_seconds, lambda: self._end_stage(sent_at))

    def _end_stage(self, sent_at: float) -> None:
        self._note("computing", sent_at)
        self._begun_at = None
        self._stage += 1
        self.begin_stage()

    def _work(self, seconds: float, then: Callable[[], None]) -> None:
        """Have a core for so long, a slice at a time."""
        if seconds <= SLICE_SECONDS:
            self._machine.cores.take(seconds, then)
        else:
            self._machine.cores.take(SLICE_SECONDS, lambda: self._work(seconds - SLICE_SECONDS, then))

    def _note(self, cause: str, since: float) -> float:
        self.waited[cause] += self._events.now - since
        return self._events.now

    @property
    def _current(self) -> Stage:
        return self._stages[self._stage % len(self._stages)]

    def _look_ahead(self) -> None:
        """Begin the reads that cannot wait any longer; come again when the next one cannot."""
        pages = sum(self._missing[self._stage : self._asked])
        while self._asked < len(self._missing):
            stage = self._stages[self._asked % len(self._stages)]
            is_ahead = self._asked > self._stage
            pages += self._missing[self._asked]
            left = self._seconds_until(self._asked) - pages * self._policy.page_seconds - self._policy.margin_seconds
            if is_ahead and left > SOON_SECONDS:
                if self._begun_at is not None:  # else the program's time stands still
                    self._look_after(left)
                return
            wanted = stage.pages_read - self._begun
            room = max(0, self._policy.window_pages - self._pages_ahead) if is_ahead else wanted
            self._begin_reads(stage, min(wanted, room))
            if room < wanted:
                return
            self._asked, self._begun = self._asked + 1, 0

    def _begin_reads(self, stage: Stage, count: int) -> None:
        index, before = self._asked, self._begun
        self._begun += count
        self._pages_ahead += count
        self.most_ahead = max(self.most_ahead, self._pages_ahead)
        whole = max(1, stage.pages_read)
        written = [stage.pages_written * begun // whole for begun in (before, self._begun)]
        for _ in range(written[1] - written[0] if stage.pages_read else stage.pages_written):
            self._machine.write()
        for _ in range(count):
            self._machine.read(lambda: self._arrive(index))

    def _arrive(self, index: int) -> None:
        self._missing[index] -= 1
        if self._missing[index] == 0 and index == self._stage:
            self._go_on_if_ready()

    def _seconds_until(self, index: int) -> float:
        """Return what the program needs until a stage begins, as far as is known: no waits."""
        count, whole = len(self._stages), self._due[-1]
        begin = self._stage // count * whole + self._due[self._stage % count]
        due = index // count * whole + self._due[index % count]
        return due - begin - (0.0 if self._begun_at is None else self._events.now - self._begun_at)

    def _look_after(self, seconds: float) -> None:
        at = self._events.now + seconds
        if at < self._next_look:
            self._next_look = at
            self._events.after(seconds, self._look_again)

    def _look_again(self) -> None:
        self._next_look = float("inf")
        self._look_ahead()


@dataclass(frozen=True)
class Simulated:
    """What the model says of a step, after the first."""

    step_seconds: list[float]
    seconds_by_cause: dict[str, float]  # of a step, the mean of all ranks
    most_pages_ahead: int


def simulate(
    ranks: int, host: Host, stages: list[Stage], times: ReadTimes, policy: Policy, *, steps: int, seed: int
) -> Simulated:
    """Return what steps take of ranks that are on as many hosts as they fill.

    Args:
        ranks: A multiple of those of a host, or fewer.
        host: Of each so many ranks, all alike.
        stages: Of a step of each rank.
        times: That reads take.
        policy: Of each rank's engine.
        steps: Beside the first, which begins with nothing in memory and is not counted.
        seed: Of the times that are drawn.
    """
    events, random, barrier = Events(), Random(seed), Barrier(ranks)
    machines = [Machine(events, host, times, random) for _ in range(0, ranks, host.ranks)]
    every = [
        Rank(events, machines[number // host.ranks], barrier, stages, policy, steps + 1) for number in range(ranks)
    ]
    for rank in every:
        events.after(0.0, rank.begin_stage)
    events.run()
    ends = [max(ends) for ends in zip(*(rank.step_ends for rank in every), strict=True)]
    causes = {cause: sum(rank.waited[cause] for rank in every) / ranks / (steps + 1) for cause in CAUSES}
    return Simulated(
        step_seconds=[after - before for before, after in pairwise(ends)],
        seconds_by_cause=causes,
        most_pages_ahead=max(rank.most_ahead for rank in every),
    )


def _nothing() -> None:
    return
