"""Words on the terminal: no other module of the package writes there, but for the frame of the status line.

Names come from files that somebody else wrote. What a terminal would obey in them is spelled out, and they are no
markup.
"""

import re
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# C0 but the newline, DEL and C1; what turns the direction of a line or ends it; halves of characters, which no stream
# encodes.
_OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
PLAIN_WIDTH = 160
"""Columns of a table where the output is no terminal; lines are not broken there."""


def printable(text: str) -> str:
    r"""Return a text with ``\xNN``, or ``\uNNNN``, for each character that a terminal obeys instead of showing it."""
    return _OBEYED.sub(_spelled, text)


def one_line(text: str) -> str:
    r"""Return the same in one line, newlines as ``\x0a``."""
    return printable(text).replace("\n", "\\x0a")


def _spelled(match: "re.Match[str]") -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def echo(text: str, *, err: bool = False) -> None:
    """Write a text and a newline to stdout, or to stderr."""
    import typer

    typer.echo(printable(text), err=err)


def tell(text: str, stream: TextIO | None) -> None:
    """Write a text and a newline to a stream at once, from any thread; nothing where the stream is gone.

    It imports nothing: another thread may be stuck in an import.
    """
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = f"{printable(text)}\n".encode(encoding, errors="backslashreplace").decode(encoding)
    try:
        stream.write(shown)
        stream.flush()
    except (OSError, ValueError):
        return


def plain(text: str, style: str = "") -> "Text":
    """Return a text for rich as it is, without markup, in one style."""
    from rich.text import Text

    return Text(printable(text), style=style)


def error_console() -> "Console":
    """Return what shows progress on stderr."""
    from rich.console import Console

    return Console(stderr=True, markup=False, emoji=False, highlight=False)


def show(*results: object) -> None:
    """Print tables and lines on stdout."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else PLAIN_WIDTH
    console = Console(width=width, soft_wrap=not is_terminal, markup=False, emoji=False, highlight=False)
    for result in results:
        console.print(plain(result) if isinstance(result, str) else result)
