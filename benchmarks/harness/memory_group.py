"""Limits on memory that the system enforces, and a swap file: both are removed whatever happens.

A memory cgroup of version 1 or 2, made beside or below our own one; only root can do that on most machines.
"""

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

MARK = "torch-offload-benchmark"
MIN_SPARE_BYTES = 1 << 30  # stays free on the disk of a swap file


class LimitsUnavailable(RuntimeError):
    """This machine lets us make no cgroup or no swap file."""


def scratch_directory(parent: str) -> "tempfile.TemporaryDirectory[str]":
    """Return a folder that `remove_leftovers` recognises if its process is killed."""
    return tempfile.TemporaryDirectory(dir=Path(parent).resolve(), prefix=f"{MARK}-{os.getpid()}-")


def remove_leftovers(parent: str) -> None:
    """Remove swap files, folders and groups of runs that were killed before they could."""
    for line in Path("/proc/swaps").read_text().splitlines()[1:]:
        path = Path(line.split()[0])
        if path.name.startswith(MARK) and not _is_alive(path.name):
            subprocess.run(["swapoff", str(path)], check=True)
    for folder in Path(parent).glob(f"{MARK}-*"):
        if not _is_alive(folder.name):
            shutil.rmtree(folder)
    for above, _ in _parents():
        for folder in above.glob(f"{MARK}-*"):
            if not _is_alive(folder.name):
                with suppress(OSError):  # a process of that run is still in it
                    folder.rmdir()


def _is_alive(name: str) -> bool:
    return Path("/proc", name.removeprefix(f"{MARK}-").split("-")[0]).exists()


def end_cleanly_on_signals() -> None:
    """Make SIGTERM and SIGHUP end the process like an exception, so that everything is removed."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


class SwapFile:
    """A swap file in use while the object is entered."""

    def __init__(self, directory: str, size_bytes: int) -> None:
        self.path = Path(directory).resolve() / f"{MARK}-{os.getpid()}-swap"
        self.size_bytes = size_bytes

    def __enter__(self) -> "SwapFile":
        free_bytes = shutil.disk_usage(self.path.parent).free
        if free_bytes < self.size_bytes + MIN_SPARE_BYTES:
            raise LimitsUnavailable(f"a swap file of {self.size_bytes} bytes does not fit: {free_bytes} bytes are free")
        atexit.register(self.remove)
        try:
            with self.path.open("xb") as file:
                os.fchmod(file.fileno(), 0o600)
                os.posix_fallocate(file.fileno(), 0, self.size_bytes)
            for command in (["mkswap", "-q", str(self.path)], ["swapon", str(self.path)]):
                ended = subprocess.run(command, capture_output=True, text=True, check=False)
                if ended.returncode != 0:
                    raise LimitsUnavailable(f"{' '.join(command)}: {ended.stderr.strip()}")
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        if not self.path.exists():
            return
        if str(self.path) in Path("/proc/swaps").read_text():
            subprocess.run(["swapoff", str(self.path)], check=True)
        self.path.unlink()


class MemoryGroup:
    """A memory cgroup with a hard limit; `may_swap` says whether what is beyond it may go to swap."""

    def __init__(self, name: str, limit_bytes: int, *, may_swap: bool) -> None:
        parents = _parents()
        if not parents:
            raise LimitsUnavailable("no memory cgroup can be made here; run as root where cgroups are writable")
        parent, self.version = parents[0]
        self.folder = parent / f"{MARK}-{os.getpid()}-{name}"
        try:
            self.folder.mkdir()
        except OSError as error:
            raise LimitsUnavailable(f"no memory cgroup can be made here: {error}") from error
        atexit.register(self.remove)
        try:
            self._limit(limit_bytes, may_swap=may_swap)
        except OSError as error:
            self.remove()
            raise LimitsUnavailable(f"the memory cgroup {self.folder} takes no limit: {error}") from error

    def _limit(self, limit_bytes: int, *, may_swap: bool) -> None:
        if self.version == 1:
            (self.folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
            if not may_swap:
                (self.folder / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
            return
        (self.folder / "memory.max").write_text(str(limit_bytes))
        if not may_swap:
            (self.folder / "memory.swap.max").write_text("0")

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that does the same inside the group."""
        return ["sh", "-c", f'echo $$ > "{self.folder}/cgroup.procs" && exec "$@"', "sh", *command]

    def peak_bytes(self) -> int:
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int((self.folder / name).read_text())

    def remove(self) -> None:
        """Remove the group once its processes are gone; waits a little for them."""
        for _ in range(50):
            with suppress(OSError):
                self.folder.rmdir()
            if not self.folder.exists():
                return
            time.sleep(0.1)  # the kernel takes the last process out of a group a moment after it was reaped


def _parents() -> list[tuple[Path, int]]:
    """Return folders under which a memory cgroup may be made, with the version of the controller."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append((Path("/sys/fs/cgroup/memory") / path.lstrip("/"), 1))
        elif controllers == "":
            found += [(folder, 2) for folder in (Path("/sys/fs/cgroup") / path.lstrip("/")).parents[:1]]
    return [(folder, version) for folder, version in found if os.access(folder, os.W_OK) and _limits(folder, version)]


def _limits(folder: Path, version: int) -> bool:
    if version == 1:
        return (folder / "memory.memsw.limit_in_bytes").exists()
    control = folder / "cgroup.subtree_control"
    with suppress(OSError):
        control.write_text("+memory")
    return control.exists() and "memory" in control.read_text().split()
