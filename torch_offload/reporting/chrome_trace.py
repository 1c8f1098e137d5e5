"""Trace files for Perfetto and chrome://tracing: the activities of each resource over time.

Source: "Trace Event Format", Google, 2016: complete events ("X") in microseconds. Those of one row must not overlap, so
a lane on which several transfers are under way has several rows.
"""

import gzip
import heapq
import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_offload.system.atomic_files import write_whole

if TYPE_CHECKING:
    from torch_offload import _C

logger = logging.getLogger(__name__)

STEPS = "steps"
COMPUTE = "compute"
STALL = "stall"
TITLES = {
    STEPS: "steps",
    COMPUTE: "compute",
    STALL: "stall",
    "update": "update",
    "to_device": "to device",
    "to_host": "to host",
    "ssd_read": "SSD read",
    "ssd_write": "SSD write",
}
"""Lanes from top to bottom, and how they are called."""
ROWS_PER_LANE = 1 << 16
GZIP_LEVEL = 5

Event = dict[str, Any]


class Activity(NamedTuple):
    """One thing that was done, as ``ActivityRecord.activities`` has it."""

    lane: str
    thread: int
    begin_ns: int
    end_ns: int
    size_bytes: int
    label: str


class Slice(NamedTuple):
    """An interval of the trace."""

    begin_ns: int
    end_ns: int
    name: str
    arguments: Event


def write_trace(record: "_C.ActivityRecord", path: str | os.PathLike[str]) -> None:
    """Write what was recorded, compressed where the name ends in ``.gz``.

    Raises:
        OSError: If the file cannot be written.
    """
    if record.dropped_count > 0:
        logger.warning("the trace is cut off: %d activities came when its recording was full", record.dropped_count)
    text = json.dumps(trace_of(record), separators=(",", ":")).encode()
    write_whole(path, gzip.compress(text, GZIP_LEVEL) if Path(path).suffix == ".gz" else text)


def trace_of(record: "_C.ActivityRecord") -> dict[str, Any]:
    """Return the content of the file."""
    activities = [Activity(*fields) for fields in record.activities()]
    end_ns = record.end_ns
    if record.dropped_count > 0:
        end_ns = max(activity.end_ns for activity in activities)
    slices: dict[str, list[Slice]] = defaultdict(list)
    for activity in activities:
        lane, shown = _lane_of(activity)
        slices[lane].append(shown)
    slices[COMPUTE] = list(_computing(activities, record.begin_ns, end_ns))
    slices[STEPS] += _steps(slices[STEPS], record.begin_ns)
    events = [event for lane in TITLES for event in _in_rows(lane, slices[lane], record.begin_ns)]
    return {
        "traceEvents": [*events, *_marks(slices[STEPS], record.begin_ns)],
        "displayTimeUnit": "ms",
        "otherData": {"clock": "CLOCK_MONOTONIC", "begin_ns": record.begin_ns, "dropped": record.dropped_count},
    }


def _lane_of(activity: Activity) -> tuple[str, Slice]:
    """Return an activity's lane in the trace, and what it is there."""
    arguments: Event = {"thread": activity.thread}
    if activity.size_bytes > 0:
        arguments["bytes"] = activity.size_bytes
    if activity.lane == "optimizer_step":
        lane, name = STEPS, "optimizer step"
    elif activity.lane.startswith("stall_"):
        lane, name = STALL, f"stall: {activity.lane.removeprefix('stall_')}"
    else:
        lane, name = activity.lane, activity.label or TITLES[activity.lane]
    return lane, Slice(activity.begin_ns, activity.end_ns, name, arguments)


def _computing(activities: Iterable[Activity], begin_ns: int, end_ns: int) -> Iterator[Slice]:
    """Yield what lies between the stalls of each thread of the program.

    Of the main thread that is all of the time, of others what lies between their first stall and their last.
    """
    main = os.getpid()
    stalls: dict[int, list[Activity]] = {main: []}
    for activity in activities:
        if activity.lane.startswith("stall_"):
            stalls.setdefault(activity.thread, []).append(activity)
    for thread, waits in stalls.items():
        waits.sort(key=lambda wait: wait.begin_ns)
        edges = [edge for wait in waits for edge in (wait.begin_ns, wait.end_ns)]
        edges = [begin_ns, *edges, end_ns] if thread == main else edges[1:-1]
        spans = zip(edges[::2], edges[1::2], strict=True)
        yield from (Slice(begin, end, COMPUTE, {"thread": thread}) for begin, end in spans if end > begin)


def _steps(optimizer_steps: Iterable[Slice], begin_ns: int) -> list[Slice]:
    """Return the steps, each of which ends with its optimizer step."""
    steps = []
    for number, last_part in enumerate(sorted(optimizer_steps), start=1):
        steps.append(Slice(begin_ns, last_part.end_ns, f"step {number}", {}))
        begin_ns = last_part.end_ns
    return steps


def _marks(steps: Iterable[Slice], origin_ns: int) -> Iterator[Event]:
    """Yield a line through all lanes at the end of each step."""
    for step in steps:
        if step.name.startswith("step "):
            mark = {"s": "g", "cat": STEPS, "name": f"end of {step.name}", "ts": (step.end_ns - origin_ns) / 1000}
            yield _event("i", 0, mark)


def _in_rows(lane: str, slices: list[Slice], origin_ns: int) -> Iterator[Event]:
    """Yield the slices of a lane, each on the first of its rows that is free, and what the rows are called."""
    first = list(TITLES).index(lane) * ROWS_PER_LANE + 1
    count = 0
    for row, shown in _nested(slices) if lane == STEPS else _side_by_side(slices):
        if row >= count:
            count = row + 1
            name = TITLES[lane] if row == 0 else f"{TITLES[lane]} {count}"
            yield _event("M", first + row, {"name": "thread_name", "args": {"name": name}})
            yield _event("M", first + row, {"name": "thread_sort_index", "args": {"sort_index": first + row}})
        times = {"ts": (shown.begin_ns - origin_ns) / 1000, "dur": (shown.end_ns - shown.begin_ns) / 1000}
        yield _event("X", first + row, {"cat": lane, "name": shown.name, **times, "args": shown.arguments})


def _nested(slices: Iterable[Slice]) -> Iterator[tuple[int, Slice]]:
    """Yield all on one row, what lasts longer before what lies in it."""
    yield from ((0, shown) for shown in sorted(slices, key=lambda shown: (shown.begin_ns, -shown.end_ns)))


def _side_by_side(slices: Iterable[Slice]) -> Iterator[tuple[int, Slice]]:
    """Yield each with the first row on which nothing else is under way."""
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    count = 0
    for shown in sorted(slices, key=lambda shown: shown.begin_ns):
        while busy and busy[0][0] <= shown.begin_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else count
        count = max(count, row + 1)
        heapq.heappush(busy, (shown.end_ns, row))
        yield row, shown


def _event(phase: str, row: int, content: Event) -> Event:
    return {"ph": phase, "pid": os.getpid(), "tid": row, **content}
