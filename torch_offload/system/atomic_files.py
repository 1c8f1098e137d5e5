"""Files that appear complete or not at all."""

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, in place of the one that is there.

    Raises:
        OSError: If it cannot be written; what was there stays.
    """
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(target)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
