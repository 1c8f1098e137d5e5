"""The least SSD traffic that a recorded run could have had: its uses of pages, replayed with the best eviction.

What is replayed is what the engine did, in this order: pins, updates, new gradients and their end. At each use pages
may have what the budget leaves beside the activations and temporaries of that moment. A replay `beside_peaks` also lets
pages give way to what they were at most between two uses, such as the logits of a loss.
"""

from collections import deque
from collections.abc import Sequence

from torch_offload.planning.belady import Memory, Pages, PageUse, Use

LoggedUse = tuple[str, int, int, int, int, int, int, int]
USES = {"read": Use.read, "write": Use.update, "create": Use.create, "drop": Use.drop}


def events_of(log: Sequence[LoggedUse], *, beside_peaks: bool) -> tuple[Pages, list[PageUse]]:
    """Return the uses of single pages; pages of the same segment are in use together."""
    pages = Pages()
    numbers: dict[tuple[int, int], int] = {}
    events = []
    for kind, segment, first, count, page_bytes, segment_bytes, other_bytes, most_other_bytes in log:
        if kind == "pass":
            events.append(PageUse(Use.mark))
        elif beside_peaks and most_other_bytes > other_bytes:
            events.append(PageUse(Use.temporaries, other_bytes=most_other_bytes))
        for index in range(first, first + count):
            if (segment, index) not in numbers:
                size_bytes = min(page_bytes, segment_bytes - index * page_bytes)
                numbers[segment, index] = pages.add("page", size_bytes)
            page = numbers[segment, index]
            events.append(PageUse(USES[kind], page, group=segment + 1, other_bytes=other_bytes))
    return pages, events


def begun(log: Sequence[LoggedUse], limit_bytes: int, *, beside_peaks: bool) -> tuple[Memory, list[PageUse]]:
    """Return a memory that holds nothing yet, and what is to be replayed in it."""
    pages, events = events_of(log, beside_peaks=beside_peaks)
    created = {event.page for event in events if event.use is Use.create}
    return Memory(pages, limit_bytes, stored=set(range(len(pages.kinds))) - created), events


def peak_of_replay(log: Sequence[LoggedUse], limit_bytes: int) -> int:
    """Return the most memory in use at any moment of a replay beside peaks."""
    memory, events = begun(log, limit_bytes, beside_peaks=True)
    deque(memory.replay(events), maxlen=0)
    return memory.peak_bytes


def least_of_passes(log: Sequence[LoggedUse], limit_bytes: int, *, beside_peaks: bool = False) -> list[tuple[int, int]]:
    """Return the bytes that each recorded pass had to read and write.

    Args:
        log: What the engine listed over some passes, such as training steps. The first starts cold, after the last
            comes nothing.
        limit_bytes: The budget.
        beside_peaks: What memory outside of pages took between uses counts too.
    """
    memory, events = begun(log, limit_bytes, beside_peaks=beside_peaks)
    return [(each.read_bytes, each.written_bytes) for each in memory.replay(events)]


def least_traffic(log: Sequence[LoggedUse], limit_bytes: int, *, beside_peaks: bool = False) -> tuple[int, int]:
    """Return the bytes that the last but one of at least three passes had to read and write."""
    passes = least_of_passes(log, limit_bytes, beside_peaks=beside_peaks)
    if len(passes) < 3:
        raise ValueError(f"a replay needs three recorded passes, got {len(passes)}")
    return passes[-2]
