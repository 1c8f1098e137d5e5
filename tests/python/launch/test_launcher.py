"""The launcher runs a script as Python does: same arguments, same `__main__`, same exit status, same traceback.

Method: small scripts in processes of their own, beside Python itself where the two can be compared.
"""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.script_runs import SCRIPTS, Ended, Running, start, start_paged
from torch import nn

from torch_offload import Config, ConfigError
from torch_offload.launch import autopage
from torch_offload.system import environment

pytestmark = pytest.mark.any_torch

WORLD = """
import json, os, sys, pickle, multiprocessing
class Kept: pass
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "main": main.Kept is Kept,
    "pickled": pickle.loads(pickle.dumps(Kept)) is Kept, "package": __package__ or "",
}))
"""


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def paged(command: list[str], scratch: Path, *, ram: str = "2MiB") -> Ended:
    return start_paged(command, ram=ram, ssd=scratch).end()


def test_a_script_sees_the_world_of_python(tmp_path, scratch):
    """Arguments that look like options included."""
    command = [script(tmp_path, WORLD), "--ram", "x", "-m"]
    expected, found = start(command).end(), paged(command, scratch)
    assert (found.status, json.loads(found.output)) == (0, json.loads(expected.output))


def test_a_module_sees_the_world_of_python(tmp_path, scratch, monkeypatch):
    """Found where `python -m` finds it."""
    package = tmp_path / "package_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text(WORLD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = ["-m", "package_of_a_test.inner", "-x", "y"]
    expected, found = start(command).end(), paged(command, scratch)
    assert (found.status, json.loads(found.output)) == (0, json.loads(expected.output))


ENDINGS = {
    "nothing": "pass",
    "exit": "import sys; sys.exit()",
    "exit 7": "import sys; sys.exit(7)",
    "exit 300": "import sys; sys.exit(300)",
    "exit with words": "import sys; sys.exit('that was that')",
    "exceptions": "try:\n    1 / 0\nexcept ArithmeticError as error:\n    raise KeyError('as ever') from error",
    "syntax error": "def fail(:",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_end_of_a_script_passes_through(tmp_path, scratch, ending):
    """Exit status and everything on stderr, tracebacks to the letter."""
    command = [script(tmp_path, ENDINGS[ending])]
    expected, found = start(command).end(), paged(command, scratch)
    assert (found.status, found.errors) == (expected.status, expected.errors)


def test_what_is_not_there_is_said(tmp_path, scratch):
    """A script and a module, with the exit status of Python."""
    for command in ([str(tmp_path / "missing.py")], ["-m", "no_such_module"], ["-m", "no_such_package.module"]):
        expected, found = start(command).end(), paged(command, scratch)
        assert found.status == expected.status
        assert command[-1] in found.errors
        assert "Traceback" not in found.errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_step_is_a_clean_end(scratch, number):
    """While pages move. Nothing stays in the directory; the report is still written."""
    running = start_paged([str(SCRIPTS / "endless_loop.py")], ram="1MiB", ssd=scratch)
    wait_for(running, "step 3")
    running.signal(number)
    ended = running.end()
    assert ended.status == 128 + number, ended.errors
    assert ("KeyboardInterrupt" in ended.errors) == (number == signal.SIGINT)
    assert ended.report["evictions"] > 0
    assert list(scratch.iterdir()) == []


def wait_for(running: Running, line: str) -> None:
    assert running.process.stdout is not None
    for text in running.process.stdout:
        if text.strip() == line:
            return
    raise AssertionError(f"the process ended before {line!r}: {running.end().errors}")


def test_a_tensor_larger_than_the_budget_ends_the_script_before_it_is_read(tmp_path, scratch):
    """Known from the layout: nothing was allocated, no engine opened."""
    text = """
        import torch
        with torch.device("meta"):
            torch.nn.Linear(2048, 2048)
        print("not reached")
    """
    ended = paged([script(tmp_path, text)], scratch, ram="16MiB")
    assert (ended.status, ended.output, ended.reports) == (1, "", [])
    assert "Linear.weight (16777216 bytes)" in ended.errors
    assert "give a ram of at least" in ended.errors


def test_every_module_that_is_called_is_wrapped_once(tmp_path, scratch):
    """A second model, adapters that came later, a module that is called from inside: hooks on all that trains."""
    text = """
        import torch, torch_offload
        from torch import nn
        from torch.nn.modules import module as internals
        from torch_offload import _C
        from torch_offload.runtime.process import PROCESS
        first, second, frozen = (nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)) for _ in range(3))
        frozen.requires_grad_(False)
        x = torch.ones(1, 128)
        first(x).sum().backward()
        assert len(internals._global_forward_pre_hooks) == 1
        first[0].adapter = nn.Linear(128, 128)
        first(x).sum().backward()
        second(frozen(x)).sum().backward()
        first(x)
        assert len(internals._global_forward_pre_hooks) == 0
        wrapped = [PROCESS.session.is_wrapped(module) for module in (first, second, frozen, first[0])]
        assert wrapped == [True, True, True, False], wrapped
        weights = [*first.parameters(), *second.parameters()]
        assert all(_C.is_managed(weight) for weight in weights)
        assert all(_C.is_managed(weight.grad) for weight in weights if weight.grad is not None)
        assert all(weight._post_accumulate_grad_hooks for weight in weights)
    """
    ended = paged([script(tmp_path, text)], scratch)
    assert ended.status == 0, ended.errors


def test_helpers_open_no_engine(tmp_path, scratch):
    """Workers of a data loader, forked and spawned, and children that never import torch."""
    text = """
        import subprocess, sys, torch
        class Rows(torch.utils.data.Dataset):
            def __init__(self, method): self.method = method
            def __len__(self): return 4
            def __getitem__(self, index):
                return torch.nn.Linear(64, 64).weight.detach()[index] if self.method == "fork" else torch.zeros(64)
        if __name__ == "__main__":
            model = torch.nn.Linear(128, 128)
            model(torch.ones(1, 128))
            for method in ("fork", "spawn"):
                loader = torch.utils.data.DataLoader(Rows(method), num_workers=1, multiprocessing_context=method)
                assert len(list(loader)) == 4
            check = "import sys; sys.exit('torch' in sys.modules or 'torch_offload' in sys.modules)"
            sys.exit(subprocess.run([sys.executable, "-c", check]).returncode)
    """
    ended = paged([script(tmp_path, text)], scratch)
    assert ended.status == 0, ended.errors
    assert len(ended.reports) == 1


def test_a_child_whose_first_import_of_torch_fails_pages_once_it_works(tmp_path, scratch):
    """Method: the child finds a module named torch that raises; then that is taken off the path."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('half installed')")
    (tmp_path / "child.py").write_text(
        textwrap.dedent("""
            import sys
            sys.path.insert(0, sys.argv[1])
            try:
                import torch
                sys.exit("the broken module was not found")
            except ImportError:
                sys.path.remove(sys.argv[1])
            import torch
            torch.nn.Linear(128, 128)(torch.ones(1, 128))
        """)
    )
    text = """
        import pathlib, subprocess, sys
        here = pathlib.Path(__file__).parent
        sys.exit(subprocess.run([sys.executable, str(here / "child.py"), str(here / "broken")]).returncode)
    """
    ended = paged([script(tmp_path, text)], scratch)
    assert ended.status == 0, ended.errors
    assert len(ended.reports) == 1


def test_a_second_process_under_the_budget_is_told_of(tmp_path, scratch):
    """Parent and child both train."""
    text = """
        import subprocess, sys, torch
        model = torch.nn.Linear(128, 128)
        if len(sys.argv) == 1:
            sys.exit(subprocess.run([sys.executable, __file__, "child"]).returncode)
    """
    ended = paged([script(tmp_path, text)], scratch)
    assert ended.status == 0, ended.errors
    assert len(ended.reports) == 2
    assert ended.errors.count("1 other process(es) of this run use the same --ram budget") == 1


def test_processes_that_train_together_share_the_budget(scratch, monkeypatch):
    """As torchrun says it: each takes its part."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = Config(ram="8MiB", ssd=scratch, min_paged_bytes=0)
    watching = autopage.Autopage(environment.Launch("a test", config))
    try:
        module = nn.Linear(128, 128)
        assert watching._session.config.ram == 2 << 20
        del module
    finally:
        watching._listening.remove()
        watching._budget_note.close()


@pytest.mark.parametrize(
    ("handed", "problem"),
    [
        ("{", "Invalid JSON"),
        ("null", "Input should be an object"),
        ('{"name": "a", "config": {}}', "Field required"),
        ('{"name": "a", "config": {"ramm": 1}, "optimizer": null}', "unknown setting 'ramm'"),
    ],
)
def test_what_no_launcher_of_this_version_wrote_is_refused(monkeypatch, handed, problem):
    """The message names the variable."""
    monkeypatch.setenv(environment.LAUNCH, handed)
    with pytest.raises(ConfigError, match=rf"{environment.LAUNCH}: .*{problem}.*; unset it, or start both with one"):
        environment.launch_of_parent()


def test_children_inherit_settings_and_nothing_else(scratch, monkeypatch):
    """A setting that was left open is left open in the child."""
    for name in (environment.LAUNCH, "PYTHONPATH", *environment.LOADING_IN_SEQUENCE):
        monkeypatch.setenv(name, "before")
    launch = environment.Launch("a test", Config(ssd=scratch, queue_depth=4))
    environment.hand_to_children(launch)
    assert environment.launch_of_parent() == launch
    command = [sys.executable, "-c", "import sys; print([type(finder).__name__ for finder in sys.meta_path][0])"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "ImportWatcher"
