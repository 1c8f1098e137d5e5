"""The socket by which ``torch-offload dump PID`` asks a process what it does.

It lies in the user's runtime directory, or in a folder of the user's own among the temporary files, has mode 0600, and
answers the user's own processes only. It takes no input: who connects is sent a text.
"""

import errno
import logging
import os
import pwd
import socket
import stat
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch_offload.errors import ConfigError
from torch_offload.system import environment

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
SEND_SECONDS = 5.0
_PEER = struct.Struct("3i")  # pid, uid, gid: see SO_PEERCRED in socket(7)


class DumpSocket:
    """Listens while it is open. Threads: one at a time."""

    def __init__(self) -> None:
        """Make nothing before :meth:`open`."""
        self._process = os.getpid()
        self._socket: socket.socket | None = None
        self._path: Path | None = None

    @property
    def path(self) -> Path | None:
        """Where it listens; None: it does not."""
        return self._path

    def open(self) -> None:
        """Listen from now on. A socket that an ended process of this number left behind is replaced.

        Raises:
            OSError: If there is no directory for it, or its path is longer than a socket's may be.
        """
        path = _directory() / socket_name(self._process)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(listening.fileno(), 0o600)  # before it has a name: what bind makes has this mode
            path.unlink(missing_ok=True)
            listening.bind(os.fspath(path))
            listening.listen()
            listening.settimeout(0)  # who connected may be gone again
        except OSError:
            listening.close()
            raise
        self._socket, self._path = listening, path

    def fileno(self) -> int | None:
        """Return what is readable when somebody asks; None: it does not listen."""
        return None if self._socket is None else self._socket.fileno()

    def answer(self, text: Callable[[], str]) -> None:
        """Send `text()` to one who asks, if there is one and it is a process of the same user."""
        if self._socket is None:
            return
        try:
            connection, _ = self._socket.accept()
            with connection:
                if peer_user(connection) != os.geteuid():
                    logger.warning("a process of another user asked for a dump and was refused")
                    return
                connection.settimeout(SEND_SECONDS)
                connection.sendall(text().encode(errors="backslashreplace"))
        except OSError as error:
            logger.debug("a dump was not sent: %s", error)

    def close(self) -> None:
        """Listen no more and remove the socket. Safe to call twice; nothing in a forked child."""
        listening, self._socket = self._socket, None
        path, self._path = self._path, None
        if listening is None:
            return
        listening.close()
        if path is not None and self._process == os.getpid():
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.debug("%s stays: %s", path, error)


def request(process: int) -> str:
    """Return what a process says of itself.

    Raises:
        ConfigError: If there is no such process, or it does not answer. The message says what to do.
    """
    for directory in _candidates():
        try:
            _check_is_own(directory)
            return _received(directory / socket_name(process), process)
        except (FileNotFoundError, ConnectionRefusedError, PermissionError, NotADirectoryError):
            continue
    raise ConfigError(_silence(process))


def _received(path: Path, process: int) -> str:
    chunks = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(os.fspath(path))
            while chunk := connection.recv(1 << 16):
                chunks.append(chunk)
        except TimeoutError:
            raise ConfigError(
                f"process {process} has not answered for {ANSWER_SECONDS:.0f} s: its interpreter is busy or stuck; "
                f"kill -USR1 {process} has it write the Python stacks of its threads to its stderr"
            ) from None
    if not chunks:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no answer", os.fspath(path))
    return b"".join(chunks).decode(errors="replace")


def _silence(process: int) -> str:
    """Return why nobody may answer for a process, and what to do."""
    try:
        owner = os.stat(f"/proc/{process}").st_uid
    except OSError:
        return f"there is no process {process}"
    if owner != os.geteuid():
        return f"process {process} belongs to {_user_name(owner)}; only that user may ask it"
    return (
        f"process {process} does not listen: it pages nothing now, or runs without the watchdog; start it with "
        "torch-offload run, or with torch_offload.Config(watchdog=True)"
    )


def _user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def socket_name(process: int) -> str:
    """Return the name of a process's socket in its directory."""
    return f"torch_offload-{process}.sock"


def peer_user(connection: socket.socket) -> int:
    """Return the user whose process has connected."""
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(user)


def _directory() -> Path:
    """Return the first directory that is the user's own; the last one is made where it is missing.

    Raises:
        OSError: If there is none.
    """
    *others, last = _candidates()
    for directory in others:
        try:
            _check_is_own(directory)
        except OSError as error:
            logger.debug("no socket for dumps in the runtime directory: %s", error)
        else:
            return directory
    last.mkdir(mode=0o700, exist_ok=True)
    _check_is_own(last)
    return last


def _candidates() -> list[Path]:
    """Return where sockets may be: a process may have been started with another environment than who asks it."""
    runtime = environment.runtime_directory()
    temporary = Path(tempfile.gettempdir()) / f"torch_offload-{os.geteuid()}"
    return [temporary] if runtime is None else [runtime, temporary]


def _check_is_own(directory: Path) -> None:
    """Refuse a directory in which another user could plant something.

    Raises:
        OSError: If it is none, is a link, belongs to somebody else, or others may enter it.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is no directory", os.fspath(directory))
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EACCES, "is not this user's alone", os.fspath(directory))
