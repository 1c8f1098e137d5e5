"""Makes a system call fail for this process, as a container's profile or another kernel would.

As tests/cpp/support/refuse_system_call.h does it.
"""

import ctypes
import errno
import os
import platform
import struct
from dataclasses import dataclass

PR_SET_NO_NEW_PRIVS = 38
SECCOMP = {"x86_64": 317, "aarch64": 277}  # the number of the call
SECCOMP_SET_MODE_FILTER = 1
LOAD, MASK, IS_EQUAL, ANSWER = 0x20, 0x54, 0x15, 0x06  # a word; by a constant; by a constant; with a constant
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
ARGUMENTS_OFFSET = 16  # of struct seccomp_data

NUMBERS = {
    "x86_64": {"pwrite": 18, "mremap": 25, "madvise": 28, "fcntl": 72, "openat": 257, "fallocate": 285, "memfd": 319},
    "aarch64": {"fcntl": 25, "fallocate": 47, "openat": 56, "pwrite": 68, "mremap": 216, "madvise": 233, "memfd": 279},
}
EVERYWHERE = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}


Line = tuple[int, int, int, int]
"""Operation, where to go on if it holds and if not, constant: struct sock_filter."""


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("count", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


@dataclass(frozen=True)
class RefusedCall:
    """A call by its name, and which of them: those whose argument has `value` under `mask`; all by default."""

    name: str
    error: int
    argument: int = 0
    mask: int = 0
    value: int = 0


O_TMPFILE_BIT = 0o20000000
NO_NAMELESS_FILE = RefusedCall("openat", errno.EOPNOTSUPP, argument=2, mask=O_TMPFILE_BIT, value=O_TMPFILE_BIT)
NO_DIRECT_SWITCH = RefusedCall("fcntl", errno.EINVAL, argument=2, mask=os.O_DIRECT, value=os.O_DIRECT)
NO_FALLOCATE = RefusedCall("fallocate", errno.EOPNOTSUPP)


def refuse(call: RefusedCall) -> None:
    """Refuse it to this thread and what it starts from now on, for good.

    Raises:
        OSError: If no filter can be set here.
        KeyError: If the numbers of this architecture's calls are not known.
    """
    lines = [
        (LOAD, 0, 0, 0),
        (IS_EQUAL, 0, 4, {**NUMBERS[platform.machine()], **EVERYWHERE}[call.name]),
        (LOAD, 0, 0, ARGUMENTS_OFFSET + 8 * call.argument),
        (MASK, 0, 0, call.mask),
        (IS_EQUAL, 0, 1, call.value),
        (ANSWER, 0, 0, REFUSE | call.error),
        (ANSWER, 0, 0, ALLOW),
    ]
    set_filter(lines)


def set_filter(lines: list[Line], *, flags: int = 0) -> int:
    """Have this thread's calls filtered, and those of what it starts; returns what seccomp(2) returns for the flags.

    Raises:
        OSError: If no filter can be set here.
    """
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    memory = ctypes.create_string_buffer(code, len(code))
    program = Program(len(lines), ctypes.cast(memory, ctypes.c_void_p))
    system = ctypes.CDLL(None, use_errno=True)
    result: int = system.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if result == 0:
        number = SECCOMP[platform.machine()]
        result = system.syscall(number, SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(program))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"no filter of system calls: {os.strerror(ctypes.get_errno())}")
    return result
