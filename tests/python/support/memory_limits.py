"""Runs a command under a limit on its memory that the system enforces: a memory cgroup of version 1 or 2.

Where neither can be made (an ordinary user, a container without delegation), a supervisor stands in: it samples the
proportional set size of the process and kills it above the limit. It sees a peak only if that lasts a few
milliseconds, so it proves less; `kind` says which one it was.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60
SAMPLE_SECONDS = 0.005
REMOVAL_SECONDS = 20.0


@dataclass(frozen=True)
class LimitedRun:
    """What became of the command."""

    kind: str
    status: int
    output: str
    errors: str
    peak_bytes: int

    @property
    def was_killed(self) -> bool:
        return self.status in (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class CgroupFiles:
    """Names of the files of one version of the memory controller."""

    kind: str
    limits: tuple[str, ...]
    peak: str


VERSION_1 = CgroupFiles(
    "cgroup v1", ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), "memory.max_usage_in_bytes"
)
VERSION_2 = CgroupFiles("cgroup v2", ("memory.max",), "memory.peak")


class MemoryGroup:
    """A memory cgroup for processes that enter it; what they had before counts elsewhere."""

    def __init__(self, limit_bytes: int = UNLIMITED) -> None:
        """Make one.

        Raises:
            OSError: If this machine lets us make none.
        """
        for files, parent in _writable_parents():
            self.files, self.folder = files, parent / f"torch-offload-group-{os.getpid()}"
            with suppress(OSError):
                self.folder.mkdir()
                if _set_limits(self.folder, files, limit_bytes):
                    return
                self.folder.rmdir()
        raise OSError("no memory cgroup can be made here")

    @property
    def peak_bytes(self) -> int:
        return int((self.folder / self.files.peak).read_text())

    def enter(self) -> None:
        """Count what this process takes from now on."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def leave(self) -> None:
        """Count what this process takes from now on where the group's maker counts."""
        (self.folder.parent / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Remove it, once the last of its processes has ended, which those around them may not have seen yet."""
        deadline = time.monotonic() + REMOVAL_SECONDS
        while True:
            try:
                return self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(SAMPLE_SECONDS)


def run_limited(command: Sequence[str], limit_bytes: int = UNLIMITED, *, cwd: Path | None = None) -> LimitedRun:
    """Run the command, with no swap, under the hardest limit that this machine lets us set."""
    for files, parent in _writable_parents():
        folder = parent / f"torch-offload-test-{os.getpid()}"
        with suppress(OSError):
            folder.mkdir()
            try:
                if _set_limits(folder, files, limit_bytes):
                    return _run_in_cgroup(command, folder, files, cwd)
            finally:
                folder.rmdir()
    return _run_supervised(command, limit_bytes, cwd)


def _writable_parents() -> list[tuple[CgroupFiles, Path]]:
    """Folders under which this process may be able to make a memory cgroup: its own one and the ones above it."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, files = Path("/sys/fs/cgroup/memory"), VERSION_1
        elif controllers == "":
            root, files = Path("/sys/fs/cgroup"), VERSION_2
        else:
            continue
        own = root / path.lstrip("/")
        parents = [own, *(folder for folder in own.parents if folder.is_relative_to(root))]
        found += [(files, folder) for folder in parents if os.access(folder, os.W_OK) and _delegates(folder, files)]
    return found


def _delegates(folder: Path, files: CgroupFiles) -> bool:
    if files is VERSION_1:
        return True
    control = folder / "cgroup.subtree_control"
    with suppress(OSError):
        control.write_text("+memory")
    return control.exists() and "memory" in control.read_text().split()


def _set_limits(folder: Path, files: CgroupFiles, limit_bytes: int) -> bool:
    """Set the limit of memory, and of memory and swap together where the kernel counts swap."""
    if not all((folder / name).exists() for name in (files.limits[0], files.peak)):
        return False
    if files is VERSION_2 and (folder / "memory.swap.max").exists():
        (folder / "memory.swap.max").write_text("0")
    for name in files.limits:
        if limit_bytes != UNLIMITED and (folder / name).exists():
            (folder / name).write_text(str(limit_bytes))
    return True


def _run_in_cgroup(command: Sequence[str], folder: Path, files: CgroupFiles, cwd: Path | None) -> LimitedRun:
    enter = ["sh", "-c", f'echo $$ > "{folder}/cgroup.procs" && exec "$@"', "sh"]
    ended = subprocess.run([*enter, *command], cwd=cwd, capture_output=True, text=True, check=False)
    peak_bytes = int((folder / files.peak).read_text())
    return LimitedRun(files.kind, ended.returncode, ended.stdout, ended.stderr, peak_bytes)


def _run_supervised(command: Sequence[str], limit_bytes: int, cwd: Path | None) -> LimitedRun:
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak_bytes = 0
    while True:
        try:
            output, errors = process.communicate(timeout=SAMPLE_SECONDS)
        except subprocess.TimeoutExpired:
            peak_bytes = max(peak_bytes, _proportional_set_bytes(process.pid))
            if peak_bytes > limit_bytes:
                process.kill()
            continue
        return LimitedRun("supervisor", process.returncode, output, errors, peak_bytes)


def _proportional_set_bytes(pid: int) -> int:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return 0
