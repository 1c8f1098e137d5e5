"""Found by the child processes of a launcher through PYTHONPATH: paging begins when such a process imports torch.

A process that never does pays for one entry of `sys.meta_path`. The `sitecustomize` that would have been found without
this one is run as well.
"""

import importlib.machinery
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

LAUNCH = "TORCH_OFFLOAD_LAUNCH"
PACKAGE_PARENT = Path(__file__).resolve().parents[3]


class TorchWatcher:
    """Finds nothing; sees that torch is about to be imported and has paging begin right after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find torch as it would have been found, with a loader that calls :func:`page_from_now_on` when it is done."""
        if name != "torch":
            return None
        spec = self._found_without(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        load = loader.exec_module

        def load_and_page(module: ModuleType) -> None:
            sys.meta_path.remove(self)  # not before: many ask where torch is and do not import it
            vars(loader).pop("exec_module", None)
            load(module)
            page_from_now_on()

        loader.exec_module = load_and_page  # type: ignore[method-assign]
        return spec

    def _found_without(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        return next((spec for spec in specs if spec is not None), None)


def page_from_now_on() -> None:
    """Begin to page in this process. Where that is impossible it says so and goes on, in memory."""
    if importlib.util.find_spec("torch_offload") is None:
        sys.path.append(str(PACKAGE_PARENT))
    try:
        from torch_offload.launch import autopage
    except ImportError as error:
        warnings.warn(f"torch_offload pages nothing in this child process: {error}", RuntimeWarning, stacklevel=2)
        return
    autopage.begin_in_child()


def run_the_next_one() -> None:
    """Run the `sitecustomize` that this one hides."""
    here = str(Path(__file__).resolve().parent)
    rest = [path for path in sys.path if os.path.realpath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if LAUNCH in os.environ:
    sys.meta_path.insert(0, TorchWatcher())
run_the_next_one()
