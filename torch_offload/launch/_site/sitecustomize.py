"""Found by the child processes of a launcher through PYTHONPATH: paging begins when such a process imports torch.

A process that never does pays for one entry of `sys.meta_path`. The `sitecustomize` that would have been found without
this one is run as well.
"""

import importlib.machinery
import importlib.util
import os
import sys
import warnings
from pathlib import Path

LAUNCH = "TORCH_OFFLOAD_LAUNCH"
PACKAGE = Path(__file__).resolve().parents[2]


def watch_torch() -> None:
    """Begin to page once torch is imported; the watcher is loaded by path, since torch_offload imports torch."""
    spec = importlib.util.spec_from_file_location(
        "_torch_offload_import_watcher", PACKAGE / "hooks" / "import_watcher.py"
    )
    if spec is None or spec.loader is None:
        warnings.warn(f"torch_offload pages nothing in this child process: {PACKAGE} is incomplete", stacklevel=2)
        return
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ImportWatcher("torch", page_from_now_on).install()


def page_from_now_on() -> None:
    """Begin to page in this process. Where that is impossible it warns and goes on, in memory."""
    if importlib.util.find_spec("torch_offload") is None:
        sys.path.append(str(PACKAGE.parent))
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
    watch_torch()
run_the_next_one()
