"""The action runs once, right after the module was imported, whatever else looks for it or fails meanwhile."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from torch_offload.hooks.import_watcher import ImportWatcher


@pytest.fixture
def watched(tmp_path, monkeypatch) -> Path:
    """The file of a module that can be imported as `watched_one`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "watched_one", raising=False)
    file = tmp_path / "watched_one.py"
    file.write_text("value = 3")
    return file


def test_a_finder_that_asks_again_breaks_no_import(watched):
    """Method: a finder of another package looks for every module itself before it is found, as some tracers do."""
    asked: list[object] = []

    class Asking:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "watched_one" and not asked:
                asked.append(None)
                asked.append(importlib.util.find_spec(name))

    acted: list[int] = []
    sys.meta_path.insert(0, Asking())
    watcher = ImportWatcher("watched_one", lambda: acted.append(1))
    watcher.install()
    assert importlib.import_module("watched_one").value == 3
    assert acted == [1]
    assert asked[1] is not None
    assert watcher not in sys.meta_path


def test_an_import_that_failed_is_watched_again(watched):
    watched.write_text("raise RuntimeError('not yet')")
    acted: list[int] = []
    ImportWatcher("watched_one", lambda: acted.append(1)).install()
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module("watched_one")
    assert acted == []
    watched.write_text("value = 4  # another size, so that no cached code is taken")
    importlib.invalidate_caches()
    assert importlib.import_module("watched_one").value == 4
    assert acted == [1]


def test_a_module_that_is_there_needs_no_watching(watched):
    importlib.import_module("watched_one")
    acted: list[int] = []
    before = list(sys.meta_path)
    ImportWatcher("watched_one", lambda: acted.append(1)).install()
    assert acted == [1]
    assert sys.meta_path == before
