"""Traffic of a list of page uses between a memory and the tier below it, under furthest-next-use replacement.

The replacement is Belady's (IBM Systems Journal, 1966), with the rules of the engine: what is dirty is written when it
leaves, what is clean is dropped, pages that are in use together are never evicted for each other, and temporaries take
from the same memory. A memory lists what it asks of the tier below, so that the next memory can replay that list.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import NamedTuple

NEVER = 1 << 60
WORTHLESS = NEVER + 1  # the next thing that happens to it is its end
NO_PAGE = -1
ACTIVATION = "activation"


class Use(Enum):
    """The kinds of page use."""

    read = "read"
    update = "update"  # read and written
    create = "create"  # written without being read
    drop = "drop"  # its bytes are worthless from here on
    sink = "sink"  # goes to the tier below, which is about to use it
    temporaries = "temporaries"  # no page: temporaries take memory
    mark = "mark"  # no page: the end of a part that is counted by itself


_ENDING = frozenset({Use.drop, Use.sink})


class PageUse(NamedTuple):
    """One use of one page.

    Attributes:
        use: What happens.
        page: Number of the page.
        group: Pages used one after the other in the same group are in use together.
        subgroup: Not 0: the page is in use only together with the pages of this subgroup, a part of the group.
        other_bytes: Memory that temporaries have at this moment.
        room_bytes: Memory that is kept free for more of them.
        is_below: It happens in the tier below, and takes no memory here.
    """

    use: Use
    page: int = NO_PAGE
    group: int = 0
    subgroup: int = 0
    other_bytes: int = 0
    room_bytes: int = 0
    is_below: bool = False


@dataclass(frozen=True)
class Pages:
    """Every page that a list of uses names: its bytes, and what it is a page of."""

    size_bytes: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def add(self, kind: str, size_bytes: int) -> int:
        """Return the number of a new page."""
        self.size_bytes.append(size_bytes)
        self.kinds.append(kind)
        return len(self.kinds) - 1


@dataclass(frozen=True)
class Moved:
    """Bytes that came from the tier below and went to it, by kind of page."""

    read: dict[str, int]
    written: dict[str, int]

    @property
    def read_bytes(self) -> int:
        """All that came."""
        return sum(self.read.values())

    @property
    def written_bytes(self) -> int:
        """All that went."""
        return sum(self.written.values())


class Memory:
    """A budget of memory over a tier that holds what is `stored` at first.

    Where a budget cannot hold what is in use at once, the replay goes on beyond it: `needed_bytes` then says how much
    would do.
    """

    def __init__(
        self,
        pages: Pages,
        limit_bytes: int,
        *,
        stored: Iterable[int] = (),
        homes: Iterable[int] = (),
        staying: Collection[str] = (),
    ) -> None:
        """Begin empty.

        Args:
            pages: What the uses will name.
            limit_bytes: The budget, temporaries included.
            stored: Pages whose bytes lie below.
            homes: Pages whose bytes lie in a file of somebody else's until they are first written.
            staying: Kinds of pages that never leave.
        """
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0  # the most that was ever in use
        self.needed_bytes = 0  # the most that was ever in use at once
        self.has_evicted = False
        self.asked: list[PageUse] = []  # of the tier below
        self.resident: set[int] = set()
        self.dirty: set[int] = set()
        self.stored = set(stored)
        self.stored_bytes = sum(pages.size_bytes[page] for page in self.stored)
        self.peak_stored_bytes = self.stored_bytes
        self.homes = set(homes)
        self._staying = frozenset(staying)
        self._staying_bytes = 0
        self._size_bytes, self._kinds = pages.size_bytes, pages.kinds
        self._used_bytes = 0
        self._next_use: dict[int, int] = {}
        self._furthest: list[tuple[int, int]] = []
        self._group = self._subgroup = 0
        self._in_group: list[int] = []
        self._in_subgroup: list[int] = []
        self._pinned: set[int] = set()
        self._pinned_bytes = 0
        self._read: dict[str, int] = defaultdict(int)
        self._written: dict[str, int] = defaultdict(int)

    def replay(self, events: Sequence[PageUse]) -> Iterator[Moved]:
        """Yield what moved up to each mark since the one before it."""
        for now, (event, following) in enumerate(zip(events, _following_uses(events), strict=True)):
            if event.use is Use.mark:
                self.asked.append(event)
                yield Moved(dict(self._read), dict(self._written))
                self._read.clear()
                self._written.clear()
            elif event.is_below:
                self.asked.append(event._replace(is_below=False))
            elif event.use is Use.temporaries:
                self._end_group()
                self._evict_for(0, event)
            elif event.use in _ENDING:
                self._end(event)
            else:
                self._use(event, self._rank_of(event.page, now, following))

    def _rank_of(self, page: int, now: int, following: int) -> int:
        """Return when a page counts as used next: an activation, which is written and read where it leaves, after half
        of the distance, as in the engine.
        """
        is_costly = self._kinds[page] == ACTIVATION and following < NEVER
        return now + (following - now) // 2 if is_costly else following

    def _use(self, event: PageUse, following: int) -> None:
        page = event.page
        self._begin(event)
        if page not in self._pinned:
            self._pinned.add(page)
            self._pinned_bytes += self._pinnable_bytes(page)
            (self._in_subgroup if event.subgroup else self._in_group).append(page)
        if page not in self.resident:
            self._evict_for(self._size_bytes[page], event)
            if event.use is not Use.create and (page in self.stored or page in self.homes):
                self._read_below(page)
            self.resident.add(page)
            self._used_bytes += self._size_bytes[page]
            self._staying_bytes += self._size_bytes[page] - self._pinnable_bytes(page)
        if event.use is not Use.read:
            self.dirty.add(page)
        self._next_use[page] = following
        self.needed_bytes = max(self.needed_bytes, self._pinned_bytes + self._staying_bytes + event.other_bytes)
        self.peak_bytes = max(self.peak_bytes, self._used_bytes + event.other_bytes)

    def _pinnable_bytes(self, page: int) -> int:
        """Return the bytes that a use keeps from leaving: none of a page that never does."""
        return 0 if self._kinds[page] in self._staying else self._size_bytes[page]

    def _begin(self, event: PageUse) -> None:
        """Let go of what is no longer in use together with this page."""
        if event.group != self._group:
            self._end_group()
            self._group = event.group
        if event.subgroup and event.subgroup != self._subgroup:
            self._release(self._in_subgroup)
            self._subgroup = event.subgroup

    def _end_group(self) -> None:
        self._release(self._in_subgroup)
        self._release(self._in_group)
        self._group = self._subgroup = 0

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self._pinned.discard(page)
            self._pinned_bytes -= self._pinnable_bytes(page)
            if page in self.resident and self._kinds[page] not in self._staying:
                heappush(self._furthest, (-self._next_use[page], page))
        pages.clear()

    def _end(self, event: PageUse) -> None:
        """Its bytes are not needed here any more, or not at all."""
        page = event.page
        if event.use is Use.sink:
            if page in self.dirty:
                self._write_below(page)
            self._forget(page)
            return
        self._forget(page)
        if page in self.stored:
            self.stored.discard(page)
            self.stored_bytes -= self._size_bytes[page]
        self.asked.append(event)

    def _evict_for(self, wanted_bytes: int, event: PageUse) -> None:
        self.needed_bytes = max(self.needed_bytes, event.other_bytes)
        free_bytes = self.limit_bytes - event.other_bytes - event.room_bytes - wanted_bytes
        while self._used_bytes > free_bytes and self._furthest:
            rank, page = heappop(self._furthest)
            is_current = page in self.resident and page not in self._pinned and self._next_use[page] == -rank
            if not is_current:
                continue
            self.has_evicted = True
            if page in self.dirty and rank != -WORTHLESS:
                self._write_below(page)
            self._forget(page)
        self.peak_bytes = max(self.peak_bytes, self._used_bytes + event.other_bytes)

    def _read_below(self, page: int) -> None:
        self._read[self._kinds[page]] += self._size_bytes[page]
        self.asked.append(PageUse(Use.read, page, group=len(self.asked) + 1))

    def _write_below(self, page: int) -> None:
        self._written[self._kinds[page]] += self._size_bytes[page]
        self.asked.append(PageUse(Use.create, page, group=len(self.asked) + 1))
        self.homes.discard(page)
        if page not in self.stored:
            self.stored.add(page)
            self.stored_bytes += self._size_bytes[page]
            self.peak_stored_bytes = max(self.peak_stored_bytes, self.stored_bytes)

    def _forget(self, page: int) -> None:
        if page in self.resident:
            self.resident.discard(page)
            self._used_bytes -= self._size_bytes[page]
            self._staying_bytes -= self._size_bytes[page] - self._pinnable_bytes(page)
        self.dirty.discard(page)


def _following_uses(events: Sequence[PageUse]) -> list[int]:
    """Return for each event when its page is used next."""
    following: dict[int, int] = {}
    result = [NEVER] * len(events)
    for time in range(len(events) - 1, -1, -1):
        event = events[time]
        if event.page == NO_PAGE or event.is_below:
            continue
        result[time] = following.get(event.page, NEVER)
        following[event.page] = WORTHLESS if event.use is Use.drop else NEVER if event.use is Use.sink else time
    return result
