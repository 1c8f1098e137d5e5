"""What starting a thread comes to where the system has no room for one; in place of `_thread.start_new_thread`."""

from typing import Any


def refuse_thread(*arguments: Any) -> None:
    raise RuntimeError("can't start new thread")


def die_at_birth(*arguments: Any) -> int:
    """A thread without memory for its first call: what it was given is let go, and nobody is told."""
    return 1
