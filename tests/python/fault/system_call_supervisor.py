"""Has system calls of another process fail by number: the Nth of a kind in a phase, and all others go on.

A filter in that process (seccomp's user notification) stops it at each call of the kind. A thread of this process, told
of the call, answers it with an error or lets it continue. So calls of every library are seen, io_uring's as well, and
nothing is loaded before the C library. Filters are inherited by threads: they are set while there is one thread.
"""

import fcntl
import os
import re
import select
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from support.refused_calls import ALLOW, ANSWER, IS_EQUAL, LOAD, Line, set_filter

from fault.case_runner import Child, Report, Verdict

SYSTEM = "x86_64"
"""The machine whose numbers of system calls these are."""
CALLS: dict[str, tuple[int, ...]] = {
    "mmap": (9,),
    "mremap": (25,),
    "pread": (17, 295, 327),  # pread64, preadv, preadv2
    "pwrite": (18,),  # Python's own
    "pwritev": (296, 328),  # and pwritev2: the engine's
    "fsync": (74,),
    "fdatasync": (75,),
    "ftruncate": (77,),
    "rename": (82, 264, 316),  # and renameat, renameat2
    "unlink": (87, 263),  # and unlinkat
    "openat": (257,),
    "linkat": (265,),
    "fallocate": (285,),
    "io_uring_setup": (425,),
    "io_uring_enter": (426,),
    "io_uring_register": (427,),
}
_KIND_OF = {number: kind for kind, numbers in CALLS.items() for number in numbers}


_NOTIFY = 0x7FC00000
_NEW_LISTENER, _WAIT_KILLABLE = 8, 32
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif
_RESPONSE = struct.Struct("=QqiI")  # struct seccomp_notif_resp
_CONTINUE = 1


def _ioctl_number(direction: int, number: int, size_bytes: int) -> int:
    return direction << 30 | size_bytes << 16 | ord("!") << 8 | number


_RECEIVE = _ioctl_number(3, 0, _NOTIFICATION.size)
_SEND = _ioctl_number(3, 1, _RESPONSE.size)


def listen(numbers: tuple[int, ...]) -> int:
    """Have this process stop at calls of these numbers; returns the descriptor that tells of them."""
    lines: list[Line] = [(LOAD, 0, 0, 0)]
    lines += [(IS_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    lines += [(ANSWER, 0, 0, ALLOW), (ANSWER, 0, 0, _NOTIFY)]
    return set_filter(lines, flags=_NEW_LISTENER | _WAIT_KILLABLE)


@dataclass(frozen=True)
class Fault:
    """Which calls of a kind fail, and how: `count` from the `first` in a phase on."""

    kind: str
    phase: str
    first: int
    count: int
    error: int


@dataclass
class Fate:
    """What became of a fault."""

    injected: int = 0
    callers: list[str] = field(default_factory=list)
    """Threads of the first and the last calls that failed, each with what is on its stack, innermost first."""


class Supervisor:
    """Counts the calls of one process, and has those of a fault fail.

    Threads: `watch` is for one of the parent, all else for the main one of the process.
    """

    def __init__(self, fault: Fault | None) -> None:
        """Without a fault all kinds are counted, with one only its own."""
        self.counts: Counter[tuple[str, str]] = Counter()  # by phase and kind
        self.fate = Fate()
        self._fault = fault
        self._phase = ""
        self._is_over = False
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def begin(self) -> None:
        """Have calls of this process be supervised from now on."""
        self._ours.close()
        kinds = CALLS if self._fault is None else (self._fault.kind,)
        listener = listen(tuple(number for kind in kinds for number in CALLS[kind]))
        socket.send_fds(self._theirs, [b"listener"], [listener])
        os.close(listener)
        self._theirs.recv(1)

    def enter(self, phase: str) -> None:
        """Begin to count from nothing."""
        self._theirs.send(f"phase {phase}".encode())
        self._theirs.recv(1)

    def leave(self) -> None:
        """End the phase, and the fault if it is of this phase; what follows is counted for no phase."""
        self._theirs.send(b"leave")
        self._theirs.recv(1)

    def end_fault(self) -> int:
        """Let all calls go on from now on; returns how many failed so far."""
        self._theirs.send(b"over")
        return int(self._theirs.recv(64))

    def watch(self, child: Child, report: Report) -> None:
        """Serve the process until it ends."""
        self._theirs.close()
        _, descriptors, _, _ = socket.recv_fds(self._ours, 64, 1)
        if descriptors:
            try:
                self._serve(child, descriptors[0])
            finally:
                os.close(descriptors[0])  # calls that wait fail then
        self._ours.close()
        report.injected = self.fate.injected
        report.text = f"failed calls: {'; '.join(self.fate.callers)}\n" if self.fate.callers else ""
        if not self.fate.injected:
            report.verdict = Verdict.UNREACHED

    def _serve(self, child: Child, listener: int) -> None:
        poll = select.poll()
        for descriptor in (listener, self._ours, child.descriptor):
            poll.register(descriptor, select.POLLIN)
        self._ours.send(b"!")
        while True:
            ready = dict(poll.poll())
            if ready.get(listener, 0) & select.POLLIN:
                self._answer_call(listener)
            elif self._ours.fileno() in ready:
                if not self._answer_message():
                    poll.unregister(self._ours)
            elif child.descriptor in ready:
                return

    def _answer_message(self) -> bool:
        """Returns whether there may be more."""
        message = self._ours.recv(64).decode()
        if message == "over":
            self._is_over = True
            self._ours.send(str(self.fate.injected).encode())
        elif message == "leave":
            self._is_over |= self._fault is not None and self._fault.phase == self._phase
            self._phase = ""
            self._ours.send(b"!")
        elif message:
            self._phase = message.removeprefix("phase ")
            self._ours.send(b"!")
        return bool(message)

    def _answer_call(self, listener: int) -> None:
        memory = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, memory)
        except FileNotFoundError:
            return  # the thread was killed meanwhile
        identity, thread, _, number, *_ = _NOTIFICATION.unpack(memory)
        kind = _KIND_OF[number]
        self.counts[self._phase, kind] += 1
        if self._must_fail(kind):
            self.fate.injected += 1
            del self.fate.callers[_MOST_CALLERS - 1 :]
            self.fate.callers.append(caller_of(thread))
            response = _RESPONSE.pack(identity, 0, -self._fault.error, 0)  # type: ignore[union-attr]
        else:
            response = _RESPONSE.pack(identity, 0, 0, _CONTINUE)
        try:
            fcntl.ioctl(listener, _SEND, response)
        except FileNotFoundError:
            return

    def _must_fail(self, kind: str) -> bool:
        fault = self._fault
        if fault is None or self._is_over or self.fate.injected >= fault.count:
            return False
        return self._phase == fault.phase and self.counts[fault.phase, kind] >= fault.first


_MOST_STACK_BYTES = 16 << 10
_MOST_OBJECTS = 6
_MOST_CALLERS = 4
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ..x. \S+ \S+ \S+ +(/.*)")
_OF_THE_SYSTEM = ("libc.", "libpthread", "ld-linux")


def caller_of(thread: int) -> str:
    """Return the name of a stopped thread and what is on its stack."""
    try:
        name = Path(f"/proc/{thread}/comm").read_text().strip()
    except OSError:
        return "a thread that has ended"
    return f"{name} ({' < '.join(objects_on_stack(thread))})"


def objects_on_stack(thread: int) -> list[str]:
    """Return the names of what has return addresses on the stack of a stopped thread, innermost first.

    What is left of earlier calls is among them, so this says who may have called, and names nobody who cannot have.
    """
    try:
        pointer = int(Path(f"/proc/{thread}/syscall").read_text().split()[-2], 16)
        mappings = Path(f"/proc/{thread}/maps").read_text()
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
            memory.seek(pointer)
            stack = memory.read(_MOST_STACK_BYTES)
    except (OSError, IndexError, ValueError):  # it runs: it was killed meanwhile
        return []
    code = [
        (int(found[1], 16), int(found[2], 16), os.path.basename(found[3]))
        for found in map(_MAPPING.match, mappings.splitlines())
        if found
    ]
    objects: list[str] = []
    for (word,) in struct.iter_unpack("=Q", stack[: len(stack) // 8 * 8]):
        name = next((name for begin, end, name in code if begin <= word < end), "")
        if name and not name.startswith(_OF_THE_SYSTEM) and name not in objects[-1:]:
            objects.append(name)
        if len(objects) == _MOST_OBJECTS:
            break
    return objects
