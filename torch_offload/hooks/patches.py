"""Functions of other packages replaced for a while, and put back exactly as they were."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Patch:
    owner: Any
    name: str
    ours: Any
    before: Any
    was_inherited: bool


class Patches:
    """A set of replacements that is undone as a whole.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._applied: list[_Patch] = []

    def replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replace ``owner.name`` (a class or a module) by `replacement`, which gets the original as first argument."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def ours(*args: Any, **options: Any) -> Any:
            return replacement(original, *args, **options)

        was_inherited = name not in vars(owner)
        before = original if was_inherited else vars(owner)[name]
        put = staticmethod(ours) if isinstance(before, staticmethod) else ours
        self._applied.append(_Patch(owner, name, put, before, was_inherited))
        setattr(owner, name, put)

    def undo(self) -> None:
        """Put everything back, last first. What somebody replaced after us is left: it still ends in the original."""
        while self._applied:
            patch = self._applied.pop()
            if vars(patch.owner).get(patch.name) is not patch.ours:
                continue
            if patch.was_inherited:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.before)
