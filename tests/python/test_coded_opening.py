"""Folders of coded experts are opened by scripts that do not know of them, wherever the package is in the process."""

import pytest
import torch
from support.script_runs import start, start_paged
from test_coded_experts import coded

from torch_offload import coded_files

OPEN = """
import sys
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    print("sum", model(input_ids=torch.arange(8)[None]).logits.double().sum().item())
"""
SCRIPTS = {
    "before": "import torch_offload, sys; assert 'transformers' not in sys.modules" + OPEN,
    "after": "from transformers import AutoModelForCausalLM; import torch_offload" + OPEN,
    "launcher": OPEN,
    "child": "import subprocess, sys; subprocess.run([sys.executable, sys.argv[2], sys.argv[1]], check=True)",
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("how", SCRIPTS)
def test_scripts_open_coded_folders(how, tmp_path, scratch):
    """Method: what the model says is said again by a script that imports the package before transformers, after it, or
    not at all, under the launcher and in a child process of one. Without it transformers makes up the experts."""
    model = coded("mixtral")
    coded_files.save(model, tmp_path / "model")
    with torch.no_grad():
        expected = model(input_ids=torch.arange(8)[None]).logits.double().sum().item()
    paths = {name: tmp_path / f"{name}.py" for name in SCRIPTS}
    for name, path in paths.items():
        path.write_text(SCRIPTS[name])
    command = [str(paths[how]), str(tmp_path / "model"), str(paths["launcher"])]
    is_paged = how in ("launcher", "child")
    ended = (start_paged(command, ram="1MiB", ssd=scratch) if is_paged else start(command)).end()
    assert ended.status == 0, ended.errors[-3000:]
    assert f"sum {expected!r}" in ended.output
    assert not is_paged or ended.report["host_peak_bytes"] > 100_000


def test_without_the_package_experts_would_be_made_up(tmp_path):
    """That the test above can tell."""
    coded_files.save(coded("mixtral"), tmp_path / "model")
    (tmp_path / "script.py").write_text(OPEN)
    ended = start([str(tmp_path / "script.py"), str(tmp_path / "model")]).end()
    assert "MISSING" in ended.errors
