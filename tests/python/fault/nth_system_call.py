"""The Nth system call of a program fails, end to end: typed errors, nothing lost, old files whole, nothing left.

    python -m fault.nth_system_call RECORD.json [--folder FOLDER_ON_A_DISK]

Method: a clean run of each variant counts the calls by phase and kind; OFFLOAD_TEST_SEED draws which of them fail, how
often and with which error. MATRIX=full: every one.
"""

import argparse
import errno
import os
import platform
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from support.refused_calls import NO_DIRECT_SWITCH, NO_FALLOCATE, NO_NAMELESS_FILE, RefusedCall, refuse

from fault.case_runner import CaseRunner, Child, DefectError, Report, Verdict
from fault.paged_program import PHASES, Disturbance, Expected, PagedProgram, check_folder
from fault.system_call_supervisor import SYSTEM, Fault, Supervisor

ROOT = Path(__file__).resolve().parents[3]
LEAST_CASES = 96
USUAL_CASES = 112
FOREVER = 1 << 30
MOST_PASSING = 100
"""Times that an error which asks for another try comes in a row."""
PASSING = (errno.EINTR, errno.EAGAIN, errno.EBUSY)
ERRORS: dict[str, tuple[int, ...]] = {
    "mmap": (errno.ENOMEM, errno.EAGAIN),
    "mremap": (errno.ENOMEM, errno.EAGAIN),
    "pread": (errno.EIO, errno.EINTR),
    "pwrite": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR),
    "pwritev": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR),
    "fsync": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "fdatasync": (errno.EIO, errno.ENOSPC),
    "ftruncate": (errno.EIO, errno.EFBIG, errno.EPERM),
    "rename": (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS),
    "unlink": (errno.EIO, errno.EACCES, errno.EROFS),
    "openat": (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOSPC, errno.EIO),
    "linkat": (errno.EIO, errno.ENOSPC, errno.EMLINK, errno.EPERM),
    "fallocate": (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EOPNOTSUPP, errno.EINTR),
    "io_uring_setup": (errno.ENOMEM, errno.EPERM, errno.EMFILE, errno.ENOSYS),
    "io_uring_enter": (errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOMEM, errno.EIO),
    "io_uring_register": (errno.ENOMEM, errno.EINVAL, errno.EPERM),
}
OLD_FILE_SYSTEM = (NO_NAMELESS_FILE, NO_DIRECT_SWITCH, NO_FALLOCATE)


@dataclass(frozen=True)
class Variant:
    """A way in which the program reaches the disk."""

    name: str
    io_engine: str
    refusals: tuple[RefusedCall, ...] = ()


VARIANTS = (
    Variant("io_uring", "auto"),
    Variant("threads", "threads"),
    Variant("threads, old file system", "threads", OLD_FILE_SYSTEM),
)


@dataclass(frozen=True)
class Numbered:
    """The calls of a kind in a phase of a variant's program, of which there are so many."""

    variant: Variant
    phase: str
    kind: str
    calls: int

    def fault(self, number: int, random_numbers: random.Random) -> Fault:
        error = random_numbers.choice(ERRORS[self.kind])
        lasting = MOST_PASSING if error in PASSING else FOREVER
        return Fault(self.kind, self.phase, number, random_numbers.choice((1, lasting)), error)


class FailingCalls(Disturbance):
    """A disturbance by a supervisor of system calls."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def enter(self, phase: str) -> None:
        self._supervisor.enter(phase)

    def leave(self) -> None:
        self._supervisor.leave()

    def end(self, error: Exception) -> str:
        injected = self._supervisor.end_fault()
        if not injected:
            raise DefectError(Verdict.UNTYPED, "an error, and no call has failed") from error
        return f"{injected} calls had failed"


class Cases:
    """Runs the program in folders of its own."""

    def __init__(self, folder: Path, runner: CaseRunner) -> None:
        self._folder = folder
        self._runner = runner
        self._expected = Expected.of_plain_torch()
        self.verdicts: Counter[tuple[str, str]] = Counter()

    def run(self, name: str, variant: Variant, fault: Fault | None) -> Supervisor:
        supervisor = Supervisor(fault)
        folder = Path(tempfile.mkdtemp(dir=self._folder))

        def body(report: Report) -> None:
            program = PagedProgram(folder, variant.io_engine, self._expected, FailingCalls(supervisor))
            for refusal in variant.refusals:
                refuse(refusal)
            supervisor.begin()
            program.run(report)

        def beside(child: Child, report: Report) -> None:
            supervisor.watch(child, report)
            if report.verdict in (Verdict.EXACT, Verdict.UNREACHED):
                check_folder(
                    folder,
                    report,
                    may_lack_report=fault is not None and fault.phase == "exit" and supervisor.fate.injected > 0,
                    may_leave=fault is not None and fault.kind == "unlink",
                )

        is_torn_down = fault is None or fault.phase in ("close", "exit")
        report = self._runner.run(name, body, beside=beside, is_torn_down=is_torn_down, is_needed=fault is None)
        if report is not None and fault is not None:
            self.verdicts[fault.kind, report.verdict.value] += 1
        shutil.rmtree(folder)
        return supervisor


def counted(cases: Cases) -> list[Numbered]:
    """Return what a program without a fault calls."""
    found = []
    for variant in VARIANTS:
        counts = cases.run(f"{variant.name}, clean", variant, None).counts
        found += [
            Numbered(variant, phase, kind, calls) for (phase, kind), calls in sorted(counts.items()) if phase in PHASES
        ]
    return found


def drawn(numbered: list[Numbered], random_numbers: random.Random, *, wanted: int) -> Iterator[tuple[Numbered, int]]:
    """Yield calls that are to fail: of each entry one, then the others, so that kinds come up evenly."""
    left = {entry: random_numbers.sample(range(1, entry.calls + 1), entry.calls) for entry in numbered}
    by_kind: dict[str, list[Numbered]] = {}
    for entry in random_numbers.sample(numbered, len(numbered)):
        by_kind.setdefault(entry.kind, []).append(entry)
    given = 0
    while by_kind:
        for kind, entries in list(by_kind.items()):
            if given == wanted:
                return
            given += 1
            entry = entries.pop(0)
            yield entry, left[entry].pop()
            if left[entry]:
                entries.append(entry)
            if not entries:
                del by_kind[kind]


def run_all(cases: Cases) -> None:
    """Nothing here may clean up: the process of a case leaves through it."""
    random_numbers = random.Random(int(os.environ.get("OFFLOAD_TEST_SEED") or "0", 16))
    numbered = counted(cases)
    wanted = sum(entry.calls for entry in numbered) if os.environ.get("MATRIX") == "full" else USUAL_CASES
    for entry, number in drawn(numbered, random_numbers, wanted=wanted):
        fault = entry.fault(number, random_numbers)
        lasting = "" if fault.count == 1 else " on"
        name = f"{entry.variant.name}, {entry.phase}, {entry.kind} {number}{lasting}, {errno.errorcode[fault.error]}"
        cases.run(name, entry.variant, fault)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fault", help="on a disk, for files of cases")
    options = parser.parse_args()
    if platform.machine() != SYSTEM:
        sys.exit(f"numbers of system calls are known for {SYSTEM}, this machine is {platform.machine()}")
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    runner = CaseRunner(hang_seconds=30)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="nth-system-call-"))
    cases = Cases(folder, runner)
    run_all(cases)
    shutil.rmtree(folder)
    for kind, number in sorted(Counter(kind for kind, _ in cases.verdicts.elements()).items()):
        ends = ", ".join(f"{count} {end}" for (of, end), count in sorted(cases.verdicts.items()) if of == kind)
        sys.stdout.write(f"{kind}: {number} cases, {ends}\n")
    runner.finish(options.record, least=LEAST_CASES)


if __name__ == "__main__":
    main()
