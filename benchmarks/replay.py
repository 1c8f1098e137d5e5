"""The least SSD traffic that a recorded run could have had: its uses of pages, replayed with the best eviction.

The page whose next use is furthest away goes (Belady 1966). What is replayed is what the engine did, in this order:
pins, updates, new gradients and their end. At each use pages may have what the budget leaves beside the activations
and temporaries of that moment.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

NEVER = 1 << 60
DROPPED = NEVER + 1  # the next thing that happens to it is its end
LoggedUse = tuple[str, int, int, int, int, int, int]
PageKey = tuple[int, int]  # segment, page


@dataclass(frozen=True)
class PageUse:
    """One use of one page; pages of the same segment are never evicted for each other."""

    kind: str
    page: PageKey
    size_bytes: int
    other_bytes: int


def page_uses(log: Sequence[LoggedUse]) -> Iterator[PageUse]:
    """Yield the uses of single pages, and the ends of steps."""
    for kind, segment, first, count, page_bytes, segment_bytes, other_bytes in log:
        if kind == "step":
            yield PageUse(kind, (-1, -1), 0, 0)
        for page in range(first, first + count):
            size_bytes = min(page_bytes, segment_bytes - page * page_bytes)
            yield PageUse(kind, (segment, page), size_bytes, other_bytes)


class LoggedReplay:
    """Memory of `limit_bytes` over an SSD on which everything lies at first."""

    def __init__(self, uses: Sequence[PageUse], limit_bytes: int) -> None:
        self.uses = uses
        self.limit_bytes = limit_bytes
        self.next_use = self._next_uses()
        self.created = {use.page for use in uses if use.kind == "create"}
        self.resident: dict[PageKey, int] = {}  # size in bytes
        self.next_of: dict[PageKey, int] = {}
        self.furthest: list[tuple[int, PageKey]] = []
        self.dirty: set[PageKey] = set()
        self.stored: set[PageKey] = {use.page for use in uses} - self.created
        self.used_bytes = 0
        self.read_bytes = 0
        self.written_bytes = 0

    def _next_uses(self) -> list[int]:
        following: dict[PageKey, int] = defaultdict(lambda: NEVER)
        result = [NEVER] * len(self.uses)
        for time in range(len(self.uses) - 1, -1, -1):
            use = self.uses[time]
            result[time] = following[use.page]
            following[use.page] = DROPPED if use.kind == "drop" else time
        return result

    def run(self) -> list[tuple[int, int]]:
        """Return the bytes read and written in each step."""
        steps = []
        before = (0, 0)
        for time, use in enumerate(self.uses):
            if use.kind == "step":
                steps.append((self.read_bytes - before[0], self.written_bytes - before[1]))
                before = (self.read_bytes, self.written_bytes)
            elif use.kind == "drop":
                self._forget(use.page)
                self.stored.discard(use.page)
            else:
                self._use(time, use)
        return steps

    def _use(self, time: int, use: PageUse) -> None:
        if use.page not in self.resident:
            self._make_room(use.size_bytes, use)
            if use.kind != "create" and use.page in self.stored:
                self.read_bytes += use.size_bytes
            self.resident[use.page] = use.size_bytes
            self.used_bytes += use.size_bytes
        if use.kind != "read":
            self.dirty.add(use.page)
        self.next_of[use.page] = self.next_use[time]
        heappush(self.furthest, (-self.next_use[time], use.page))

    def _make_room(self, wanted_bytes: int, use: PageUse) -> None:
        room_bytes = self.limit_bytes - use.other_bytes - wanted_bytes
        held = []
        while self.used_bytes > room_bytes and self.furthest:
            rank, page = heappop(self.furthest)
            if page not in self.resident or self.next_of[page] != -rank:
                continue
            if page[0] == use.page[0]:
                held.append((rank, page))
                continue
            if page in self.dirty and self.next_of[page] != DROPPED:
                self.written_bytes += self.resident[page]
                self.stored.add(page)
            self._forget(page)
        for entry in held:
            heappush(self.furthest, entry)

    def _forget(self, page: PageKey) -> None:
        self.used_bytes -= self.resident.pop(page, 0)
        self.dirty.discard(page)


def least_traffic(log: Sequence[LoggedUse], limit_bytes: int) -> tuple[int, int]:
    """Return the bytes that the last but one recorded step had to read and write.

    Args:
        log: What the engine listed over at least three steps. The first starts cold, after the last comes nothing.
        limit_bytes: The budget.
    """
    steps = LoggedReplay(list(page_uses(log)), limit_bytes).run()
    if len(steps) < 3:
        raise ValueError(f"a replay needs three recorded steps, got {len(steps)}")
    return steps[-2]
