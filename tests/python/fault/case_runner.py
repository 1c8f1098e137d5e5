"""Runs cases of a fault in processes of their own, so that one that crashes or hangs is counted and the rest go on.

A harness is a program that has imported what its cases need, and has no thread but the main one when it forks them:

    python -m fault.NAME RECORD.json

A case's process ends by leaving the harness's functions from within `run`: nothing around that call may clean up what
the other cases need. A harness records the counts of how its cases ended, in the form of `tools/fault_page.py`, and
ends with status 1 where one ended in a defect or fewer than it must came to pass. OFFLOAD_FAULT_CASE=part of a name
runs only such cases and shows what they say.
"""

import atexit
import gc
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from support.isolation import describe_exit


class Verdict(str, Enum):
    """How a case ended; the words are those of docs/reliability.md. All behind UNREACHED are defects."""

    EXACT = "exact"  # the program saw no error, and every byte is right
    TYPED = "typed"  # it saw typed errors, lost nothing, and went on exactly once the fault was over
    LOST = "lost"  # the same, but bytes were lost: it was told so whenever it asked for them
    UNREACHED = "unreached"  # the fault did not come to pass
    WRONG = "wrong"  # bytes that are not what was written, and no error
    UNTYPED = "untyped"  # an error of another type
    STUCK = "stuck"  # it did not go on
    LEAKED = "leaked"  # descriptors, threads or files are left
    CRASHED = "crashed"  # or ended with a status that it must not end with
    HUNG = "hung"


GOOD = (Verdict.EXACT, Verdict.TYPED, Verdict.LOST, Verdict.UNREACHED)


class DefectError(Exception):
    """A case found a defect; what is raised otherwise is UNTYPED."""

    def __init__(self, verdict: Verdict, why: str) -> None:
        super().__init__(why)
        self.verdict = verdict


@dataclass
class Report:
    """What a case says of itself."""

    verdict: Verdict = Verdict.EXACT
    injected: int = 0  # faults that came to pass
    raised: int = 0  # typed errors that the program saw
    text: str = ""  # notes, and why it is a defect


class Child:
    """The process of a running case, as the parent's thread beside it sees it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)  # readable once it has ended

    def has_ended(self) -> bool:
        return self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within that time."""
        return bool(select.select([self.descriptor], [], [], seconds)[0])

    def is_killed(self) -> bool:
        """Whether it has ended by SIGKILL. Pre: it has ended."""
        ended = os.waitid(os.P_PIDFD, self.descriptor, os.WEXITED | os.WNOWAIT)
        return ended is not None and ended.si_code == os.CLD_KILLED and ended.si_status == signal.SIGKILL

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)


Body = Callable[[Report], None]
Beside = Callable[[Child, Report], None]
"""Runs in a thread of the parent while the case runs, with a report of its own that is added to the case's. What it
raises is a defect, as in the case; so it can also look at what an ended process left behind."""


class CaseRunner:
    """One harness: its cases, counted by how they ended."""

    def __init__(self, *, hang_seconds: float = 60) -> None:
        gc.collect()
        gc.freeze()  # what there is by now is never garbage: a search of it would copy all of its pages in each case
        self._hang_seconds = hang_seconds
        self._began = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._defects: Counter[str] = Counter()
        self._injected = self._raised = 0
        self._slowest_seconds = 0.0
        self._only = os.environ.get("OFFLOAD_FAULT_CASE", "")

    def run(
        self,
        name: str,
        body: Body,
        *,
        beside: Beside | None = None,
        ends: int | tuple[int, ...] = 0,
        is_torn_down: bool = True,
        is_needed: bool = False,
    ) -> Report | None:
        """Run a case, return how it ended, or nothing if it was left out.

        Unless `is_torn_down`, a process that ends with 0 does what is registered for its exit and leaves out what the
        interpreter does then, which takes longer than a short case. One that `is_needed` for others is never left out.
        `ends` is the status that its process must end with, negative for a signal, or several that are right. A process
        that must not end with 0 need not report: where none comes, the verdict is what was seen beside it, or EXACT.
        """
        if self._only not in name and not is_needed:
            return None
        began = time.monotonic()
        report = self._run_in_child(
            body, beside, ends if isinstance(ends, tuple) else (ends,), is_torn_down=is_torn_down
        )
        self._slowest_seconds = max(self._slowest_seconds, time.monotonic() - began)
        self._counts["cases"] += 1
        self._counts[report.verdict.value] += 1
        self._injected += report.injected
        self._raised += report.raised
        if report.verdict not in GOOD:
            self._defects[report.verdict.value] += 1
            sys.stderr.write(f"{name}: {report.verdict.value}\n{report.text}\n")
        elif self._only:
            sys.stderr.write(f"{name}: {asdict(report)}\n")
        return report

    def finish(self, record: Path, *, least: int) -> None:
        """Write the record; exits with 1 where there were defects or fewer than `least` cases were reached."""
        counts = {verdict.value: self._counts[verdict.value] for verdict in Verdict}
        reached = self._counts["cases"] - counts["unreached"]
        has_failed = bool(self._defects) or reached < least
        content = {
            "time": round(time.monotonic() - self._began, 3),
            "cases": self._counts["cases"],
            "reached": reached,
            "injected": self._injected,
            "raised": self._raised,
            **counts,
            "slowest_seconds": f"{self._slowest_seconds:.6f}",
            "transitions": "",
            "defects": "; ".join(f"{count} {what}" for what, count in self._defects.items()),
            "has_failed": has_failed,
        }
        record.write_text(json.dumps(content, indent=1) + "\n")
        sys.stdout.write(f"{record.stem}: {reached} cases in {content['time']:.0f} s\n")
        if reached < least and not self._only:
            sys.exit(f"{record.stem}: {reached} cases came to pass, {least} have to")
        if self._defects:
            sys.exit(f"{record.stem}: {content['defects']}")

    def _run_in_child(self, body: Body, beside: Beside | None, ends: tuple[int, ...], *, is_torn_down: bool) -> Report:
        receiving, sending = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(receiving)
            if not is_torn_down:
                atexit.register(_leave)  # the first to be registered is the last to be called
            _run_body(body, sending)
        os.close(sending)
        child, seen = Child(pid), Report()
        watching = threading.Thread(target=_note, args=(seen, beside, child, seen)) if beside else None
        if watching:
            watching.start()
        has_hung = not child.wait(self._hang_seconds)
        waits = _waits_of(pid) if has_hung else ""
        if has_hung:
            child.send(signal.SIGKILL)
        if watching:
            watching.join()
        seen.text += waits
        _, status = os.waitpid(pid, 0)
        os.close(child.descriptor)
        with open(receiving, "rb") as pipe:
            said = pipe.read()
        return _report_of(said, seen, os.waitstatus_to_exitcode(status), ends, has_hung=has_hung)


def _run_body(body: Body, sending: int) -> None:
    """Run a case in its process and end it as a program ends, that is with what it does at exit."""
    report = Report()
    _note(report, body, report)
    os.write(sending, json.dumps(asdict(report)).encode())
    os.close(sending)
    sys.exit(0)


def _note(report: Report, function: Callable[..., None], *arguments: object) -> None:
    """Call a function and write down in the report what it raises."""
    try:
        function(*arguments)
    except DefectError as defect:
        report.verdict, report.text = defect.verdict, f"{report.text}{traceback.format_exc()}"
    except Exception:  # noqa: BLE001 (the runner says it)
        report.verdict, report.text = Verdict.UNTYPED, f"{report.text}{traceback.format_exc()}"


def _waits_of(pid: int) -> str:
    """Say what each thread of a process and of its children waits for in the kernel."""
    text = ""
    with suppress(OSError):  # of what has ended meanwhile
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (str(pid), *children):
            for thread in Path("/proc", process, "task").iterdir():
                name, place = ((thread / file).read_text().strip() for file in ("comm", "wchan"))
                text += f"{process} {name}: {place}\n"
    return text


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _report_of(said: bytes, seen: Report, code: int, ends: tuple[int, ...], *, has_hung: bool) -> Report:
    """Put together what the case said, what was seen of it and how it ended."""
    report = Report(**json.loads(said)) if said else Report(seen.verdict)
    report.verdict = Verdict(report.verdict)
    report.injected += seen.injected
    report.raised += seen.raised
    report.text += seen.text
    right = " or ".join(map(str, ends))
    has_crashed = code not in ends or (code == 0 and not said)
    if has_hung:
        report.verdict = Verdict.HUNG
    elif has_crashed and report.verdict in GOOD:
        report.verdict, report.text = Verdict.CRASHED, f"{report.text}{describe_exit(code)} instead of {right}"
    elif seen.verdict not in GOOD and report.verdict in GOOD:
        report.verdict = seen.verdict
    elif report.verdict in GOOD:
        report.verdict = max(report.verdict, seen.verdict, key=GOOD.index)
    return report
