"""Documents with parts that a program writes: each stands between `<!-- generated: NAME -->` and `<!-- end -->`."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

PART = re.compile(r"(<!-- generated: ([\w -]+) -->\n)((?:(?!<!-- generated: ).)*?)(<!-- end -->)", re.DOTALL)

Document = tuple[Path, str]
"""A file, and what it should hold."""


def replace_parts(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return a document in which each part that `parts` names is what its function returns; others stay."""
    return PART.sub(lambda part: f"{part[1]}{parts[part[2]]()}{part[4]}" if part[2] in parts else part[0], text)


def names_of_parts(text: str) -> list[str]:
    return [part[2] for part in PART.finditer(text)]


def write(documents: Iterable[Document]) -> None:
    """Write the documents that are not as they should be; folders are made."""
    for path, text in documents:
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def differences(documents: Iterable[Document], root: Path) -> str:
    """Return in which lines the files are not as they should be, as a diff without context; empty if in none."""
    lines: list[str] = []
    for path, text in documents:
        now = path.read_text(encoding="utf-8") if path.is_file() else ""
        name = path.relative_to(root).as_posix()
        lines += difflib.unified_diff(now.splitlines(), text.splitlines(), name, f"{name} as generated", "", "", 0, "")
    return "\n".join(lines)
