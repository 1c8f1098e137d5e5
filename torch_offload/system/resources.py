"""Free memory under cgroups, free disk space and scratch directories, as the system reports them.

Every function takes the root of the file system it reads, so that tests can show it another machine.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torch_offload.errors import ConfigError
from torch_offload.system.kernel_files import field_of, first_word, lines_of, number_in

DEFAULT_SHARE = 0.8
RESERVE_BYTES = 256 << 20
MAPPINGS_PER_PAGE = 3
"""Measured for pages in memory at their addresses: docs/adr/0001."""
KEPT_SHARE = 0.05
MIN_KEPT_BYTES = 1 << 30
"""Of a file system, what pages leave free where nothing else is said."""
REMOTE_FILESYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3"})
IN_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})

_SYSTEM_ROOT = Path("/")


@dataclass(frozen=True)
class Mount:
    """One line of ``/proc/self/mountinfo``."""

    root: str
    point: str
    filesystem: str
    options: frozenset[str]


def default_ram_bytes(*, root: Path = _SYSTEM_ROOT) -> int:
    """Return the budget used where none is given: 80 % of the free memory less a reserve, at least half of it.

    Units: bytes.
    Raises: ConfigError: If the system does not say how much memory is free.
    """
    free_bytes = free_memory_bytes(root=root)
    return max(int(free_bytes * DEFAULT_SHARE) - RESERVE_BYTES, free_bytes // 2)


def free_memory_bytes(*, root: Path = _SYSTEM_ROOT) -> int:
    """Return what this process may still allocate: the least of the system's and every memory cgroup's free bytes.

    Raises:
        ConfigError: If neither ``/proc/meminfo`` nor a cgroup says it.
    """
    known = [*_system_free_bytes(root), *(group.free_bytes for group in _memory_cgroups(root))]
    if not known:
        raise ConfigError("the system does not say how much memory is free; give a budget, such as ram='8GiB'")
    return max(0, min(known))


def memory_limit_bytes(*, root: Path = _SYSTEM_ROOT) -> int | None:
    """Return what this process may have in all: the least of the system's memory and its cgroups' limits.

    None where the system does not say.
    """
    total = number_in(field_of(root / "proc/meminfo", "MemTotal"))
    limits = [group.limit_bytes for group in _memory_cgroups(root)]
    known = limits if total is None else [total * 1024, *limits]
    return min(known, default=None)


def filesystem_of(directory: Path, *, root: Path = _SYSTEM_ROOT) -> str | None:
    """Return the type of the file system that `directory` lies on, None where the system does not say."""
    resolved = PurePosixPath(os.path.realpath(directory))
    best: Mount | None = None
    for mount in _mounts(root):
        longer = best is None or len(mount.point) >= len(best.point)
        if longer and resolved.is_relative_to(mount.point):
            best = mount
    return None if best is None else best.filesystem


def scratch_refusal(directory: Path, *, root: Path = _SYSTEM_ROOT) -> str | None:
    """Say why `directory` cannot hold pages, or return None where nothing speaks against it."""
    if not directory.exists():
        return f"{directory} does not exist; create it or name another directory on a disk"
    if not directory.is_dir():
        return f"{directory} is not a directory"
    filesystem = filesystem_of(directory, root=root)
    if filesystem in IN_MEMORY_FILESYSTEMS:
        return f"{directory} is on {filesystem}, which is memory; name a directory on a disk"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory} cannot be written to; name a directory that can"
    return None


def scratch_warnings(directory: Path, *, root: Path = _SYSTEM_ROOT) -> Iterator[str]:
    """Say what speaks against pages in a directory that can hold them."""
    filesystem = filesystem_of(directory, root=root) or ""
    if filesystem in REMOTE_FILESYSTEMS:
        yield f"{directory} is on {filesystem}: where its server goes away, training waits for it; name a local disk"
    if filesystem.startswith("fuse"):
        yield f"{directory} is on {filesystem}, which a program serves that may end or be slow; name a local disk"
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        yield f"anybody may rename what is in {directory}: it has no sticky bit; chmod +t it, or name another directory"


def default_scratch_directory(*, needed_bytes: int, keep_free: int | None = None, root: Path = _SYSTEM_ROOT) -> Path:
    """Return the first usual directory for temporary files on a real disk with room for `needed_bytes`.

    Where none has the room, the one with the most is returned: the caller knows best what to say.

    Raises:
        ConfigError: If none of them is on a disk that can be written to. The message gives every reason.
    """
    refusals = []
    usable: list[tuple[int, Path]] = []
    for directory in _usual_directories():
        reason = scratch_refusal(directory, root=root)
        if reason is not None:
            refusals.append(reason)
            continue
        room_bytes = room_for_pages((directory,), keep_free=keep_free)
        if room_bytes >= needed_bytes:
            return directory
        usable.append((room_bytes, directory))
    if not usable:
        raise ConfigError("no directory for pages: " + "; ".join(refusals) + ". Give one, such as ssd='/mnt/nvme'")
    return max(usable)[1]


def free_disk_bytes(directory: Path) -> int:
    """Return the bytes that an ordinary user may still write under `directory`."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def kept_bytes(directory: Path, *, keep_free: int | None) -> int:
    """Return what pages leave free on the file system of `directory`.

    Args:
        directory: On it.
        keep_free: As in ``Config``.
    """
    if keep_free is not None:
        return keep_free
    status = os.statvfs(directory)
    return max(int(status.f_blocks * status.f_frsize * KEPT_SHARE), MIN_KEPT_BYTES)


def room_for_pages(directories: Sequence[Path], *, keep_free: int | None, max_spill: int | None = None) -> int:
    """Return the bytes that scratch files may take in `directories` now.

    Args:
        directories: On disks of their own.
        keep_free: As in ``Config``.
        max_spill: The same.
    """
    rooms = [
        max(0, free_disk_bytes(directory) - kept_bytes(directory, keep_free=keep_free)) for directory in directories
    ]
    if max_spill is not None:
        rooms = [min(room, max_spill // len(directories)) for room in rooms]
    return sum(rooms)


def max_mappings(*, root: Path = _SYSTEM_ROOT) -> int | None:
    """Return how many memory mappings a process may have, or None where the system does not say."""
    return number_in(first_word(root / "proc/sys/vm/max_map_count"))


def _usual_directories() -> Iterator[Path]:
    """The order of ``tempfile``, with the disk-backed ones before ``/tmp``, each directory once."""
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    candidates = [name for name in named if name]
    candidates += ["/var/tmp", "/tmp", os.path.expanduser("~/.cache"), os.getcwd()]
    yield from (Path(name) for name in dict.fromkeys(candidates))


def _system_free_bytes(root: Path) -> Iterator[int]:
    available = number_in(field_of(root / "proc/meminfo", "MemAvailable"))
    if available is not None:
        yield available * 1024


@dataclass(frozen=True)
class _MemoryCgroup:
    limit_bytes: int
    free_bytes: int


def _memory_cgroups(root: Path) -> Iterator[_MemoryCgroup]:
    """Yield this process's memory cgroups and all their parents that have a limit, version 1 and 2."""
    mounts = list(_mounts(root))
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not path:
            continue
        if controllers == "":
            mount = _first(mounts, filesystem="cgroup2", option=None)
            limit_name, usage_name, cache_name = "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount = _first(mounts, filesystem="cgroup", option="memory")
            limit_name, usage_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_name = "total_inactive_file"
        else:
            continue
        if mount is None:
            continue
        for folder in _folders_upwards(root, mount, path):
            limit = number_in(first_word(folder / limit_name))
            usage = number_in(first_word(folder / usage_name))
            if limit is not None and usage is not None:
                yield _MemoryCgroup(limit, limit - usage + _statistic(folder / "memory.stat", cache_name))


def _folders_upwards(root: Path, mount: Mount, path: str) -> Iterator[Path]:
    """Yield the folders of a cgroup and of its parents, as far as this mount shows them."""
    point = root / mount.point.lstrip("/")
    own = PurePosixPath(path)
    # In a container the path is often the host's, while only the container's own part is mounted.
    inside = own.relative_to(mount.root) if own.is_relative_to(mount.root) else PurePosixPath()
    for part in (inside, *inside.parents):
        if (point / part).is_dir():
            yield point / part


def _first(mounts: Iterable[Mount], *, filesystem: str, option: str | None) -> Mount | None:
    for mount in mounts:
        if mount.filesystem == filesystem and (option is None or option in mount.options):
            return mount
    return None


def _mounts(root: Path) -> Iterator[Mount]:
    for line in lines_of(root / "proc/self/mountinfo"):
        left, separator, right = line.partition(" - ")
        source, kind = left.split(), right.split()
        if not separator or len(source) < 5 or len(kind) < 3:
            continue
        yield Mount(
            root=_unescape(source[3]),
            point=_unescape(source[4]),
            filesystem=kind[0],
            options=frozenset(kind[2].split(",")),
        )


def _unescape(path: str) -> str:
    """Undo the octal escapes that the kernel writes for spaces, tabs, line ends and backslashes."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


def _statistic(path: Path, name: str) -> int:
    for line in lines_of(path):
        key, _, value = line.partition(" ")
        if key == name:
            return number_in(value) or 0
    return 0
