"""Files in which the kernel says something of this machine, read as what they are: they may be missing, of another
version, or hold paths in any encoding.
"""

import re
from pathlib import Path

_NUMBER = re.compile(r"[0-9]{1,20}")


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file, none where it cannot be read. Bytes that are no UTF-8 are as in ``os.fsdecode``."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def first_word(path: Path) -> str | None:
    """Return the first word of a file; None where it has none or cannot be read."""
    words = " ".join(lines_of(path)).split()
    return words[0] if words else None


def number_in(text: str | None) -> int | None:
    """Return the number of decimal digits that a text begins with; None if it begins with another word."""
    words = (text or "").split(maxsplit=1)
    return int(words[0]) if words and _NUMBER.fullmatch(words[0]) else None


def field_of(path: Path, name: str) -> str | None:
    """Return what the first line ``name: ...`` of a file has behind the colon; None where there is no such line."""
    for line in lines_of(path):
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None
