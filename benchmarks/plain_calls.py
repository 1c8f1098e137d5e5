"""How many instructions more does a call on plain tensors take where torch_offload pages others?

    python benchmarks/plain_calls.py --json > benchmarks/results/plain_calls.json     (a minute)
    python benchmarks/plain_calls.py --smoke

One process calls each operator before torch_offload is imported and while an engine pages a module that has trained,
and is run one instruction at a time (ptrace(2), x86-64) from one call to the next. Counted are those of torch's
libraries and of the extension; what the interpreter and the C library do varies by itself. Nothing is measured that a
busy machine could change; of the calls of each kind the fewest instructions count. A call that makes a tensor gets its
memory from the engine's allocator: what that takes is counted beside, and judged in no bar.
"""

import ctypes
import os
import platform
import signal
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import at_most, emit, progress
from harness.worker_process import WorkerFailed, WorkerProcess, option_words, worker_command

PTRACE_PEEKUSER, PTRACE_CONT, PTRACE_SINGLESTEP = 3, 7, 9
RIP = 16 * 8
"""Where user_regs_struct of x86-64 has the address of the next instruction."""
PAGE_BITS = 12
TORCH, OURS, OTHERS = "torch", "torch_offload", "others"
WITHOUT_MEMORY = ("add in place", "view", "matrix product into a tensor", "additions of lists")
"""Calls that make no bytes of a tensor."""


@dataclass(frozen=True)
class Plan:
    """How often each call is made, before and while something is paged."""

    repeats: int = 9


SMOKE = Plan(repeats=1)


class Tracer:
    """Runs a stopped process on: for the thread that started it, which is its parent."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self._ptrace.restype = ctypes.c_long

    def run_to_stop(self) -> None:
        """Wait until it stops itself, running it on for whatever else stops it."""
        while (other := self._wait()) != signal.SIGSTOP:
            self._go_on(PTRACE_CONT, 0 if other == signal.SIGTRAP else other)

    def run_on(self) -> None:
        self._go_on(PTRACE_CONT, 0)

    def count_to_stop(self) -> dict[str, int]:
        """Return how many instructions it runs until it stops itself again, by whose they are."""
        pages: Counter[int] = Counter()
        signal_number = 0
        while True:
            self._go_on(PTRACE_SINGLESTEP, signal_number)
            stopped_by = self._wait()
            if stopped_by == signal.SIGSTOP:
                break
            pages[self._ptrace(PTRACE_PEEKUSER, self._pid, RIP, None) >> PAGE_BITS] += 1
            signal_number = 0 if stopped_by == signal.SIGTRAP else stopped_by
        counts = Counter({TORCH: 0, OURS: 0, OTHERS: 0})
        owners = owners_of_code(self._pid)
        for page, count in pages.items():
            counts[next((owner for pages, owner in owners if page in pages), OTHERS)] += count
        return dict(counts)

    def _wait(self) -> int:
        _, status = os.waitpid(self._pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise WorkerFailed(f"the process that was traced ended with status {os.waitstatus_to_exitcode(status)}")
        return os.WSTOPSIG(status)

    def _go_on(self, request: int, signal_number: int) -> None:
        if self._ptrace(request, self._pid, None, signal_number) != 0:
            raise OSError(ctypes.get_errno(), "ptrace")


def owners_of_code(pid: int) -> list[tuple[range, str]]:
    """Return the pages of the libraries of a process that are torch's or ours."""
    owners = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, *_, path = line.split()
        begin, end = (int(address, 16) >> PAGE_BITS for address in addresses.split("-"))
        name = Path(path).name
        if name.startswith(("libtorch", "libc10")):
            owners.append((range(begin, end), TORCH))
        elif Path(path).parent.name == OURS:
            owners.append((range(begin, end), OURS))
    return owners


def measure(plan: Plan, folder: str) -> dict[str, Any]:
    """Return the instructions of each call, before and while something else is paged."""
    words = option_words({"ssd": folder, "repeats": plan.repeats})
    with WorkerProcess("calls", [*worker_command("plain_calls"), *words], log_directory=folder) as worker:
        tracer = Tracer(worker.process.pid)
        rows = [{"call": name} for name in worker.description["calls"]]
        for moment in ("before", "paging"):
            for row in rows:
                tracer.run_to_stop()
                row[moment] = [tracer.count_to_stop() for _ in range(plan.repeats)]
                tracer.run_on()
                progress(f"{moment} {row['call']}: {row[moment]}")
    return {"plan": asdict(plan), "rows": [summed_up(row) for row in rows]}


def summed_up(row: dict[str, Any]) -> dict[str, Any]:
    """Add what is the fewest of torch's instructions and ours together."""
    fewest = {moment: min(count[TORCH] + count[OURS] for count in row[moment]) for moment in ("before", "paging")}
    return row | {"instructions": fewest, "added": fewest["paging"] - fewest["before"]}


def bars_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    added = {row["call"]: row["added"] for row in result["rows"]}
    return [at_most(f"instructions added to: {name}", added[name], 0) for name in WITHOUT_MEMORY]


def main() -> None:
    parser = driver_parser(__doc__, smoke="one call of each kind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        result = measure(SMOKE if options.smoke else Plan(), scratch)
    told = {"benchmark": "plain_calls", "machine": machine(options.ssd) | {"architecture": platform.machine()}}
    emit(told | result | {"bars": bars_of(result)}, as_json=options.json)


if __name__ == "__main__":
    main()
