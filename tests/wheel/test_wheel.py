"""A wheel in an environment of its own, used outside of the source tree.

Method: `make wheel-test` builds the wheel, installs it with nothing but its requirements and pytest, and runs this file
in an empty folder. What is shown is what packaging can break: files that are missing, paths, metadata, entry points.
"""

import json
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch

import torch_offload

TRAINING = """
import json, subprocess, sys
import torch

if sys.argv[1:] == ["parent"]:
    sys.exit(subprocess.run([sys.executable, __file__]).returncode)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for _ in range(3):
    loss = model(torch.ones(4, 512)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
pages = "torch_offload" in sys.modules
if pages:
    import torch_offload
    torch_offload.report().write_html("report.html")
print(json.dumps([losses, torch_offload.report().ssd_read_bytes if pages else 0]))
"""


def run(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINING)
    return "train.py"


def command_line_tool() -> str:
    found = shutil.which("torch-offload", path=str(Path(sys.executable).parent))
    assert found is not None, "the wheel has installed no torch-offload command"
    return found


def test_the_package_comes_from_the_wheel():
    assert "site-packages" in Path(torch_offload.__file__).parts
    assert distribution("torch-offload").version == torch_offload.__version__


def test_the_wheel_asks_for_the_torch_it_was_built_against():
    major, minor = torch.__version__.split(".")[:2]
    assert f"torch=={major}.{minor}.*" in (distribution("torch-offload").requires or [])


def test_type_information_is_in_it():
    folder = Path(torch_offload.__file__).parent
    assert (folder / "py.typed").is_file()
    assert (folder / "_C.pyi").is_file()


def test_a_child_of_a_launched_script_pages_and_computes_the_same(script, tmp_path):
    """A report as a page, too: its template and the libraries that draw it are there."""
    plain = json.loads(run(sys.executable, script))
    options = ["--ram", "8MiB", "--ssd", str(tmp_path)]
    paged = json.loads(run(command_line_tool(), "run", *options, script, "parent").splitlines()[-1])
    assert paged[0] == plain[0]
    assert paged[1] > 0
    assert "plotly" in Path("report.html").read_text()


def test_the_command_says_its_version():
    assert run(command_line_tool(), "--version").strip() == f"torch-offload {torch_offload.__version__}"
