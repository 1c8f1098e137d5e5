"""Runs a function right after a module of another package was imported. Needs nothing but the standard library.

`launch/_site/sitecustomize.py` loads this file by its path, before torch_offload can be imported.
"""

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class ImportWatcher:
    """An entry of ``sys.meta_path`` that finds no module itself. It leaves once the module was imported."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        """Watch nothing before :meth:`install`.

        Args:
            name: Of the module.
            action: Called once, when the module has been imported without an error.
        """
        self._name = name
        self._action = action

    def install(self) -> None:
        """Watch from now on, or call the action at once where the module is there already."""
        if self._name in sys.modules:
            self._action()
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Watch no more. Safe to call twice, and after the module was imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders give, with a loader that calls the action afterwards."""
        if name != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        load = loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            load(module)  # an import that fails is tried again, and watched again
            if self in sys.meta_path:  # another finder may have looked for the module meanwhile
                self.remove()
                self._action()

        loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec
