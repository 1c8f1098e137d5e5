"""Files that appear complete or not at all: no other module of the package makes any.

A file is made without a name in the folder that it will be in, written and synced, given a random name and then, in one
rename, its own; the folder is synced last. Where a file system has no nameless files it begins under a random name that
nobody can have made before. So a link that somebody planted is not followed, two writers do not meet in one file, and
all that a killed process may leave is a hidden file with a random name.
"""

import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch_offload.errors import OffloadError

logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 255
NEWEST_MODE = 0o666  # less the umask, as every program makes files
_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_OPEN_FILES = "/proc/self/fd"


@contextmanager
def appearing(path: str | os.PathLike[str]) -> Iterator[int]:
    """Give a new file its name once the block has ended without an exception.

    The file that has the name is replaced, a link as well; its mode stays that of a regular file that was there.

    Yields:
        The descriptor of the new file, empty and open for reading and writing.

    Raises:
        OSError: If it cannot be made, synced or named; what was there is as it was.
    """
    target = Path(path)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor, temporary = _make(folder, target.name)
        try:
            _keep_mode(descriptor, folder, target.name)
            yield descriptor
            os.fsync(descriptor)
            if temporary is None:
                temporary = _random_name(target.name)
                os.link(f"{_OPEN_FILES}/{descriptor}", temporary, dst_dir_fd=folder, follow_symlinks=True)
            os.replace(temporary, target.name, src_dir_fd=folder, dst_dir_fd=folder)
            temporary = None
        except OSError as error:
            if error.filename is None and not isinstance(error, OffloadError):
                error.filename = os.fspath(target)  # of a call that was given a descriptor
            raise
        finally:
            os.close(descriptor)
            if temporary is not None:
                with suppress(FileNotFoundError):  # it had not got its name yet
                    os.unlink(temporary, dir_fd=folder)
        _sync(folder, target)
    finally:
        os.close(folder)


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, in place of the one that is there.

    Raises:
        OSError: If it cannot be written; what was there stays.
    """
    with appearing(path) as file:
        left = memoryview(content)
        while left:
            left = left[os.write(file, left) :]


def readable_path(descriptor: int) -> str:
    """Return a path under which this process may open a file of :func:`appearing` before it has its name."""
    return f"{_OPEN_FILES}/{descriptor}"


def _make(folder: int, name: str) -> tuple[int, str | None]:
    """Return a new file of a folder, and the name that it has for now."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        if os.path.isdir(_OPEN_FILES):
            return os.open(".", flags | os.O_TMPFILE, NEWEST_MODE, dir_fd=folder), None
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES:
            raise
    temporary = _random_name(name)
    flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.open(temporary, flags, NEWEST_MODE, dir_fd=folder), temporary


def _random_name(name: str) -> str:
    ending = f".{secrets.token_hex(8)}.partial"
    begin = os.fsdecode(os.fsencode(name)[: MAX_NAME_BYTES - len(ending) - 1])
    return f".{begin}{ending}"


def _keep_mode(descriptor: int, folder: int, name: str) -> None:
    with suppress(FileNotFoundError):
        before = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(before.st_mode):
            os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _sync(folder: int, target: Path) -> None:
    """Make the new name outlive a power cut. The file is whole and in place already."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # of file systems that have nothing to sync there
            logger.warning("%s is complete; its folder cannot be synced (%s): a power cut may undo it", target, error)
