"""Limits of memory, of addresses, of locked memory and of mappings: exact within them, or an error that names them.

    python -m fault.limited_memory RECORD.json

Base is what the same program takes with a model of a few kilobytes; a control group allows a share of base and budget
together. Below both the kernel may end the program, which is said and counted as lost. MATRIX=full tries sixty cases,
over budgets. What a machine cannot make is named; with REQUIRE_ALL=1 it fails.
"""

import ctypes
import logging
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from support.memory_limits import MemoryGroup

import torch_offload
from fault.case_runner import CaseRunner, Child, DefectError, Report, Verdict
from fault.paged_training import (
    TOLD_BYTES,
    Plain,
    Training,
    begin_case,
    case_folder,
    check_paged,
    config_for,
    in_child,
    is_full,
    told_by,
)
from torch_offload.errors import OffloadError
from torch_offload.system import resources

LEAST = 6
STEPS = 4
OPTIMIZER = "fused"
MIB = 1 << 20
KIB = 1 << 10
WIDE, NARROW = 1024, 16  # layers of 4 MiB, and a model of next to nothing
STATE_BYTES = 4 * 6 * WIDE * WIDE * 4
SHARES = (0.8, 1.0, 1.02, 1.2)  # of base and budget
BUDGETS = (0.3, 0.15, 0.2, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8)  # of the state
PRESSING_BYTES = 128 * MIB
PR_SET_PDEATHSIG = 1
CAP_IPC_LOCK = 14
CAPABILITY_VERSION = 0x20080522
UNREGISTERED_WORDS = "raise the limit on locked memory"


@dataclass
class Scene:
    """One case, and what training comes to in memory."""

    folder: Path
    wide: Plain
    small: Plain
    base_bytes: int = 0

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch"

    def begin(self) -> None:
        begin_case(self.folder)
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")


# --- A control group ------------------------------------------------------------------------------------------------


def train_wide(scene: Scene, ram: int | None, width: int = WIDE) -> Training:
    config = config_for(scene.scratch, ram=ram, page_elements=1 << 16, keep_free=0)
    with torch_offload.loading(config=config):  # the model itself is more than some budgets
        training = Training(OPTIMIZER, config, width=width)
    for number in range(STEPS):
        training.step(number)
    return training


def train_narrow(scene: Scene, group: MemoryGroup) -> None:
    group.enter()
    scene.begin()
    train_wide(scene, 8 * MIB, NARROW)


def base_bytes(scene: Scene) -> int:
    """The most of two: the program is the same, what it finds in caches is not."""
    peaks = []
    for _ in range(2):
        group = MemoryGroup()
        in_child(partial(train_narrow, scene, group))
        peaks.append(group.peak_bytes)
        group.remove()
    return max(peaks)


def in_group(runner: CaseRunner, name: str, scene: Scene, *, ram: int | None, share: float, presses: bool) -> None:
    """Train wide layers under a limit; below base and budget the kernel may kill it, which is said then."""
    limit_bytes = int((scene.base_bytes + (ram or 48 * MIB)) * share)
    group = MemoryGroup(limit_bytes)

    def train(report: Report) -> None:
        group.enter()
        scene.begin()
        report.injected = 1
        reader = start_pressing(scene.folder) if presses else None
        while presses and group.peak_bytes < limit_bytes - MIB:  # until the reader has filled it
            time.sleep(0.001)
        try:
            training = train_wide(scene, ram)
        except OffloadError:
            if share > 1:
                raise
            report.verdict, report.raised = Verdict.TYPED, 1
            return
        if reader is not None:
            os.kill(reader, signal.SIGKILL)
            os.waitpid(reader, 0)
        group.leave()  # what compares is not what is limited
        check_paged()
        scene.wide.check(training, STEPS)

    def look(child: Child, report: Report) -> None:
        child.wait(120)
        report.text += f"{group.files.kind}, limit {limit_bytes >> 20} MiB, peak {group.peak_bytes >> 20} MiB\n"
        report.text += told_by(scene.folder)[-TOLD_BYTES:]
        if group.peak_bytes > limit_bytes:
            raise DefectError(Verdict.WRONG, f"{group.peak_bytes} bytes at the peak, {limit_bytes} allowed")
        if child.has_ended() and child.is_killed():
            report.verdict, report.injected = Verdict.LOST, 1
            sys.stdout.write(f"{name}: the kernel ended it\n")

    runner.run(name, train, beside=look, ends=(0, -signal.SIGKILL) if share < 1 else 0)
    group.remove()


def start_pressing(folder: Path) -> int:
    """Fork a reader of a file that is larger than the group's memory, which ends with this process at the latest.

    By single pages: what is read ahead cannot be given back while it is on its way, and the kernel would rather end a
    process, one without torch too, than wait for it.
    """
    path = folder / "pressing"
    with path.open("wb") as file:
        file.write(bytes(PRESSING_BYTES))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    reader = os.fork()
    if reader == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        file_number = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file_number, 0, 0, os.POSIX_FADV_RANDOM)
        while True:
            for offset in range(0, PRESSING_BYTES, mmap.PAGESIZE):
                os.pread(file_number, mmap.PAGESIZE, offset)
    return reader


# --- Limits of the process ------------------------------------------------------------------------------------------


def with_locked_memory(limit_bytes: int, scene: Scene, report: Report) -> None:
    """What may be registered with the kernel, of a program without privileges: less than all, which is said once."""
    scene.begin()
    drop_locking()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limit_bytes))
    training = train_wide(scene, int(0.3 * STATE_BYTES))
    report.injected = 1
    check_paged()
    registered_bytes = pinned_bytes()
    if registered_bytes > limit_bytes:
        raise DefectError(Verdict.UNTYPED, f"{registered_bytes} bytes are registered: the case shows nothing")
    scene.wide.check(training, STEPS)
    report.text = f"{registered_bytes} bytes registered\n{told_by(scene.folder)[-TOLD_BYTES:]}"
    said = [line for line in told_by(scene.folder).splitlines() if UNREGISTERED_WORDS in line]
    if len(said) != 1:
        raise DefectError(Verdict.UNTYPED, f"not all memory can be registered, which is said {len(said)} times")


def pinned_bytes() -> int:
    """Return what the kernel counts as registered with rings."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith("VmPin:"))


def drop_locking() -> None:
    """Give up the privilege to lock any amount of memory."""
    system = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice
    if system.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for index in range(3):
        sets[index] &= ~(1 << CAP_IPC_LOCK)
    if system.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def with_addresses(spare_bytes: int, scene: Scene, report: Report) -> None:
    """Few addresses are left: refused in words where they are too few, exact otherwise and once there are more."""
    scene.begin()
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + spare_bytes, hard))
    report.injected = 1
    try:
        training = small_training(scene)
    except OffloadError as error:
        report.verdict, report.raised, report.text = Verdict.TYPED, 1, f"{type(error).__name__}: {error}\n"
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        training = small_training(scene)
    finish_small(scene, training, 0)


def with_few_mappings(spare: int, scene: Scene, report: Report) -> None:
    """Few mappings are left when it begins: as with addresses."""
    scene.begin()
    report.injected = 1
    with mappings_taken(spare):
        try:
            training = small_training(scene)
            training.step(0)
            done = 1
        except (OffloadError, MemoryError) as error:
            check_words(error, "vm.max_map_count")
            report.verdict, report.raised, report.text = Verdict.TYPED, 1, f"{type(error).__name__}: {error}\n"
            done = 0
    if not done:
        training = small_training(scene)
    finish_small(scene, training, done)


def with_mappings_that_go(spare: int, scene: Scene, report: Report) -> None:
    """They become few while it trains: the step ends as any that fails, and training goes on once there are more."""
    scene.begin()
    training = small_training(scene)
    training.step(0)
    report.injected = 1
    try:
        with mappings_taken(spare):
            training.step(1)
    except (OffloadError, MemoryError) as error:
        check_words(error, "vm.max_map_count")
        report.verdict, report.raised = Verdict.TYPED, 1
        report.text = f"{scene.small.judge(training, 1, error)} {type(error).__name__}: {error}\n"
        check_paged()
    else:
        finish_small(scene, training, 2)


def check_words(error: BaseException, words: str) -> None:
    if words not in str(error):
        raise DefectError(Verdict.UNTYPED, f"the error does not say {words}: {error}") from error


def small_training(scene: Scene) -> Training:
    return Training(OPTIMIZER, config_for(scene.scratch))


def finish_small(scene: Scene, training: Training, done: int) -> None:
    for number in range(done, STEPS):
        training.step(number)
    check_paged()
    scene.small.check(training, STEPS)


@contextmanager
def mappings_taken(spare: int) -> Iterator[None]:
    """Take all of this process's mappings but so many: pages of alternating protection are one each."""
    allowed = resources.max_mappings()
    if allowed is None:
        raise RuntimeError("this system does not say how many mappings it allows")
    system = ctypes.CDLL(None, use_errno=True)
    system.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    count = allowed - spare - len(Path("/proc/self/maps").read_text().splitlines())
    with mmap.mmap(-1, (count + 1) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = ctypes.c_char.from_buffer(memory)
        begin = ctypes.addressof(view)
        for index in range(1, count, 2):
            if system.mprotect(begin + index * mmap.PAGESIZE, mmap.PAGESIZE, 0) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            yield
        finally:
            del view


# --- The harness ----------------------------------------------------------------------------------------------------


def grouped(ram_share: float | None, share: float, *, presses: bool = False) -> Callable[..., None]:
    ram = None if ram_share is None else int(ram_share * STATE_BYTES)
    return partial(in_group, ram=ram, share=share, presses=presses)


def alone(body: Callable[[int, Scene, Report], None], limit: int) -> Callable[..., None]:
    def case(runner: CaseRunner, name: str, scene: Scene) -> None:
        runner.run(name, partial(body, limit, scene))

    return case


def cases() -> dict[str, Callable[..., None]]:
    """Return the cases of this run by name."""
    spares = (40, 90, 140, 200, 300) if is_full() else (40, 140)
    found = {
        f"group of {share} at {budget}": grouped(budget, share)
        for budget in BUDGETS[: None if is_full() else 1]
        for share in SHARES
    }
    found["group, budget left open"] = grouped(None, 1.02)
    for budget in BUDGETS[: None if is_full() else 1]:
        found[f"group under pressure at {budget}"] = grouped(budget, 1.2, presses=True)
    for limit in (0, 64 * KIB, 8 * MIB):
        found[f"locked memory of {limit >> 10} KiB"] = alone(with_locked_memory, limit)
    for gib in (1, 8, 40, 400) if is_full() else (8, 40):
        found[f"addresses for {gib} GiB"] = alone(with_addresses, gib << 30)
    for spare in spares:
        found[f"{spare} mappings left"] = alone(with_few_mappings, spare)
    for spare in (0, 2, 6, 10, 20, 40) if is_full() else (0, 10):
        found[f"{spare} mappings left in a step"] = alone(with_mappings_that_go, spare)
    return found


def main(record: Path) -> None:
    runner = CaseRunner(hang_seconds=120)
    wide = Plain(OPTIMIZER, STEPS, width=WIDE)
    small = Plain(OPTIMIZER, STEPS + 1, saved_states=STEPS)
    found, base = cases(), 0
    try:
        with case_folder(record.parent, "base") as folder:
            base = base_bytes(Scene(folder, wide, small))
    except OSError as error:
        sys.stderr.write(f"groups are not to be had here: {error}\n")
    else:
        sys.stdout.write(f"base {base >> 20} MiB, state {STATE_BYTES >> 20} MiB\n")
    for name, case in found.items():
        if name.startswith("group") and not base:
            continue
        with case_folder(record.parent, "limit") as folder:
            case(runner, name, Scene(folder, wide, small, base))
    runner.finish(record, least=len(found) if os.environ.get("REQUIRE_ALL") == "1" else LEAST)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
