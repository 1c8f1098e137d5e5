"""The tests that need a GPU can at least be imported and collected without one, so that a renamed helper is seen."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_torch

ROOT = Path(__file__).resolve().parents[2]
# Says that there is a GPU and a CUDA build, which is all that the start of tests/gpu asks for.
COLLECT = """
import sys, types, pytest, torch, torch_offload
torch.cuda.is_available = lambda: True
real = torch_offload._C
pretended = types.SimpleNamespace(**{name: getattr(real, name) for name in dir(real) if not name.startswith("__")})
pretended.built_with_cuda = True
torch_offload._C = pretended
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests/gpu"]))
"""


def test_they_are_collected():
    """Every file has tests, and none fails to be imported."""
    ended = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    collected = {line.split(":")[0]: int(line.split(": ")[1]) for line in ended.stdout.splitlines() if ": " in line}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {path for path, count in collected.items() if count > 0} == expected, ended.stdout


CONTACT = ROOT / "tools" / "gpu_contact.py"


def contact_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: dict[str, str], *options: str) -> int:
    """Run first contact with stages that are one line of shell each; return its exit status."""
    spec = importlib.util.spec_from_file_location("gpu_contact", CONTACT)
    assert spec is not None
    assert spec.loader is not None
    contact = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_contact", contact)
    spec.loader.exec_module(contact)
    made = [contact.Stage(name, lambda _, line=line: [["sh", "-c", line]], 2) for name, line in stages.items()]
    monkeypatch.setattr(contact, "STAGES", tuple(made))
    monkeypatch.setattr(sys, "argv", [str(CONTACT), "--out", str(tmp_path), *options])
    try:
        contact.main()
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


def endings(folder: Path) -> dict[str, str]:
    return {path.stem: json.loads(path.read_text())["ended"] for path in sorted(folder.glob("*.json"))}


@pytest.mark.parametrize("cut", ["first", "second", "third"])
def test_contact_is_cut_and_goes_on(monkeypatch, tmp_path, cut):
    """A stage that hangs ends with what it started; the others are run, and only what did not pass is run again."""
    lines = {name: f"echo {name} >> {tmp_path}/runs" for name in ("first", "second", "third")}
    hanging = lines | {cut: "echo begun; sleep 3210 & wait"}
    assert contact_with(monkeypatch, tmp_path, hanging) == 1
    assert endings(tmp_path) == {name: "cut" if name == cut else "passed" for name in lines}
    assert (tmp_path / f"{cut}.log").read_text() == "begun\n"
    assert contact_with(monkeypatch, tmp_path, lines) == 0
    assert endings(tmp_path) == dict.fromkeys(lines, "passed")
    assert sorted((tmp_path / "runs").read_text().split()) == sorted(lines)


def test_contact_keeps_its_time_and_what_fails(monkeypatch, tmp_path):
    """What fails is said and does not stop the rest; once the time is over nothing begins."""
    lines = {"broken": "echo no; exit 3", "whole": "true"}
    assert contact_with(monkeypatch, tmp_path, lines) == 1
    assert endings(tmp_path) == {"broken": "failed", "whole": "passed"}
    assert contact_with(monkeypatch, tmp_path / "late", lines, "--minutes", "0") == 1
    assert endings(tmp_path / "late") == {}


def test_a_rehearsal_leaves_out_what_needs_a_gpu(monkeypatch, tmp_path):
    assert contact_with(monkeypatch, tmp_path, {"real": "true"}, "--rehearsal") == 0
    assert endings(tmp_path) == {}
