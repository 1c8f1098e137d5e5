"""Damage to what the scratch file holds."""

import os
import re
from pathlib import Path


def flip_bits(directory: Path, content: bytes) -> None:
    """One in each place where the nameless file of the directory holds the content, or once held it."""
    entries = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    [path] = {entry for entry in entries if entry.is_symlink() and os.readlink(entry).startswith(f"{directory}/#")}
    with path.open("r+b") as file:
        pages = bytearray(file.read())
        places = [match.start() for match in re.finditer(re.escape(content), pages)]
        assert places, "the tensor is not in the file"
        for place in places:
            pages[place + len(content) // 2] ^= 0x10
            file.seek(place)
            file.write(pages[place : place + len(content)])
        file.flush()
        os.fsync(file.fileno())
