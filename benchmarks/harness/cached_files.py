"""Files of a benchmark that the next call goes on with."""

from collections.abc import Callable
from pathlib import Path


def kept(path: Path, write: Callable[[Path], object]) -> Path:
    """Have a file written, unless there is one; it appears only when it is complete."""
    if not path.exists():
        unfinished = path.with_name(f"{path.name}.unfinished")
        write(unfinished)
        unfinished.rename(path)
    return path
