"""Files of a benchmark that the next call goes on with, and those that the system is not to have read already."""

import os
from collections.abc import Callable
from pathlib import Path


def kept(path: Path, write: Callable[[Path], object]) -> Path:
    """Have a file written, unless there is one; it appears only when it is complete."""
    if not path.exists():
        unfinished = path.with_name(f"{path.name}.unfinished")
        write(unfinished)
        unfinished.rename(path)
    return path


def forget_cached(path: Path) -> None:
    """Have the system read a file from the disk, or the weights of a folder."""
    for part in path.glob("*.safetensors") if path.is_dir() else (path,):
        file = os.open(part, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
