"""Places where less is allowed: a container's system calls, an ordinary user, small disks.

As a program it runs a command without io_uring: ``python confined.py COMMAND ARGS...``.
"""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOBODY = "65534"
MEMLOCK_KIB = 8192

PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
IO_URING_CALLS = (425, 426, 427)  # the same numbers on every architecture
EPERM = 1


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("count", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def forbid_io_uring() -> None:
    """Make this process and its children get EPERM from io_uring's system calls, as Docker's default profile does."""
    load_number, is_equal, answer = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | EPERM
    lines = [(load_number, 0, 0, 0)]
    for index, number in enumerate(IO_URING_CALLS):
        lines.append((is_equal, len(IO_URING_CALLS) - index, 0, number))
    lines += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    memory = ctypes.create_string_buffer(code, len(code))
    program = Program(len(lines), ctypes.cast(memory, ctypes.c_void_p))
    system = ctypes.CDLL(None, use_errno=True)
    if system.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if system.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


def without_io_uring() -> list[str]:
    """Return the beginning of a command that runs under such a profile."""
    probe = subprocess.run([sys.executable, __file__, "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no seccomp filter can be set here: {probe.stderr.strip()[-200:]}")
    return [sys.executable, __file__]


def as_ordinary_user() -> list[str]:
    """Return the beginning of a command that runs as nobody with 8 MiB of lockable memory.

    The user may read everything, since the interpreter may lie in somebody's home; nothing else is granted.
    """
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user needs root and setpriv")
    limits = ["bash", "-c", f'ulimit -l {MEMLOCK_KIB} && exec "$@"', "bash"]
    reading = ["--inh-caps", "-all,+dac_read_search", "--ambient-caps", "+dac_read_search", "--bounding-set"]
    user = ["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
    return [*limits, "setpriv", *user, *reading, "-all,+dac_read_search"]


@contextmanager
def small_disk(folder: Path, *, free_mib: int) -> Iterator[Path]:
    """Mount a disk image with that much free space; any user may write there."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting a disk image needs root and mkfs.ext4")
    image, point = folder / "disk.img", folder / "disk"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate((free_mib + 12) << 20)  # the file system takes some of it
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)], check=True)
    mounted = subprocess.run(
        ["mount", "-o", "loop", str(image), str(point)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no disk image can be mounted here: {mounted.stderr.strip()}")
    try:
        point.chmod(0o1777)
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def command_line(
    *arguments: str, inside: list[str] | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run ``torch-offload`` with these arguments, in one of those places."""
    command = [*(inside or []), sys.executable, "-m", "torch_offload", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


if __name__ == "__main__":
    forbid_io_uring()
    os.execvp(sys.argv[1], sys.argv[1:])
