"""Functions of other packages replaced for a while, and put back exactly as they were."""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch_offload.hooks.replaced_functions import ReplacedFunction


@dataclass(frozen=True)
class _Patch:
    function: ReplacedFunction
    owner: Any
    replacement: Any
    original: Any
    was_inherited: bool


class Patches:
    """A set of replacements that is undone as a whole.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._applied: list[_Patch] = []

    def replace(self, function: ReplacedFunction, replacement: Callable[..., Any]) -> None:
        """Replace a function by `replacement`, which gets the original as its first argument.

        Args:
            function: From the list of :mod:`torch_offload.hooks.replaced_functions`.
            replacement: Called as ``replacement(original, *args, **options)``.

        Raises:
            OffloadError: If the function has another signature than `replacement` was written for.
        """
        function.check_signature()
        owner, name = function.resolve_owner(), function.name
        original = getattr(owner, name)

        @functools.wraps(original)
        def ours(*args: Any, **options: Any) -> Any:
            return replacement(original, *args, **options)

        was_inherited = name not in vars(owner)
        stored = original if was_inherited else vars(owner)[name]
        placed = staticmethod(ours) if isinstance(stored, staticmethod) else ours
        self._applied.append(_Patch(function, owner, placed, stored, was_inherited))
        setattr(owner, name, placed)

    def undo(self) -> None:
        """Put every original back, last first. Safe to call twice.

        A function that another package replaced after this one is left: it still ends in the original.
        """
        while self._applied:
            patch = self._applied.pop()
            if vars(patch.owner).get(patch.function.name) is not patch.replacement:
                continue
            if patch.was_inherited:
                delattr(patch.owner, patch.function.name)
            else:
                setattr(patch.owner, patch.function.name, patch.original)

    @property
    def functions(self) -> tuple[ReplacedFunction, ...]:
        """The functions that are replaced, in order."""
        return tuple(patch.function for patch in self._applied)


@contextmanager
def replaced(function: ReplacedFunction, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace one function while the context is open; see :meth:`Patches.replace`."""
    patches = Patches()
    patches.replace(function, replacement)
    try:
        yield
    finally:
        patches.undo()


class LivingPatches:
    """Replacements that last while any of the objects they serve is alive.

    Threads: any; the garbage collector ends them.
    """

    def __init__(self) -> None:
        self._patches = Patches()
        self._installers: list[Callable[[Patches], None]] = []
        self._alive = 0

    def provide(self, install: Callable[[Patches], None]) -> None:
        """Have `install` make its replacements for the first object that is kept, at once if one is alive."""
        self._installers.append(install)
        if self._alive:
            install(self._patches)

    def keep_for(self, owner: object) -> None:
        """Keep the replacements until `owner`, and all others, are gone.

        Raises:
            OffloadError: If a function has another signature than its replacement was written for.
        """
        if not self._alive:
            for install in self._installers:
                install(self._patches)
        self._alive += 1
        weakref.finalize(owner, self._release).atexit = False

    def _release(self) -> None:
        self._alive -= 1
        if not self._alive:
            self._patches.undo()
