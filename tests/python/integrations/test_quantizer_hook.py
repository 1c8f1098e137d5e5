"""Folders of coded experts are opened by scripts that do not know of them, wherever the package is in the process."""

import gc
from pathlib import Path

import pytest
import torch
from support.coded_models import coded
from support.folders import save_rows, save_tokenizer
from support.script_runs import assert_paged, start, start_paged
from transformers import AutoModelForCausalLM

from torch_offload.moe import checkpoint
from torch_offload.runtime.process import PROCESS

pytestmark = pytest.mark.any_torch

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
    "launcher, transformers first": "import transformers.modeling_utils" + OPEN,
    "child": "import subprocess, sys; subprocess.run([sys.executable, sys.argv[2], sys.argv[1]], check=True)",
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("how", SCRIPTS)
def test_scripts_open_coded_folders(how, tmp_path, scratch):
    """Method: what the model says is said again by a script that imports the package before transformers, after it, or
    not at all, under the launcher and in a child process of one. Without it transformers makes up the experts."""
    model = coded("mixtral")
    checkpoint.save(model, tmp_path / "model")
    with torch.no_grad():
        expected = model(input_ids=torch.arange(8)[None]).logits.double().sum().item()
    paths = {name: tmp_path / f"{number}.py" for number, name in enumerate(SCRIPTS)}
    for name, path in paths.items():
        path.write_text(SCRIPTS[name])
    command = [str(paths[how]), str(tmp_path / "model"), str(paths["launcher"])]
    is_paged = how not in ("before", "after")
    ended = (start_paged(command, ram="1MiB", ssd=scratch) if is_paged else start(command)).end()
    assert ended.status == 0, ended.errors[-3000:]
    assert f"sum {expected!r}" in ended.output
    assert not is_paged or ended.report["host_peak_bytes"] > 100_000


def test_without_the_package_experts_would_be_made_up(tmp_path):
    """That the test above can tell."""
    checkpoint.save(coded("mixtral"), tmp_path / "model")
    (tmp_path / "script.py").write_text(OPEN)
    ended = start([str(tmp_path / "script.py"), str(tmp_path / "model")]).end()
    assert "MISSING" in ended.errors


def test_trl_trains_adapters_over_coded_experts(tmp_path, scratch):
    """Method: the script of trl, with a budget below what one layer of dense experts would ask for and with one that is
    never short; the same adapters."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 16}
    checkpoint.save(coded("mixtral", **sizes), tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    save_rows(tmp_path / "data", preference=False)
    options = f"""-m trl.scripts.sft --model_name_or_path {tmp_path}/model --dataset_name {tmp_path}/data --use_cpu
        --dtype float32 --bf16 false --max_steps 3 --per_device_train_batch_size 1 --max_length 48 --report_to none
        --use_peft --lora_r 4 --lora_target_modules q_proj coded.up coded.down""".split()
    runs = {ram: [*options, "--output_dir", str(tmp_path / ram)] for ram in ("6MiB", "64MiB")}
    ended = {ram: start_paged(command, ram=ram, ssd=scratch).end() for ram, command in runs.items()}
    for one in ended.values():
        assert one.status == 0, one.errors[-3000:]
    assert_paged(ended["6MiB"])
    assert ended["6MiB"].report["budget_bytes"] < 2 * 16 * 2 * 256 * 128 * 4
    assert ended["64MiB"].report["evictions"] == 0
    found, expected = (Path(tmp_path / ram / "adapter_model.safetensors").read_bytes() for ram in runs)
    assert found == expected


def test_a_load_leaves_dense_models_judged(tmp_path):
    """Method: with a device map transformers asks the quantizer again when the model is laid out."""
    checkpoint.save(coded("mixtral"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    assert model.hf_quantizer is not None
    assert not PROCESS.provisional_layers.include(torch.empty(1, 1, 1, device="meta"))


def test_a_load_that_fails_leaves_dense_models_judged(tmp_path):
    """Method: transformers lays out dense experts, which are not held against the budget, until coded ones replace
    them; in between it meets an activation that it does not know."""
    checkpoint.save(coded("mixtral"), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "none of them"'))
    with pytest.raises(KeyError, match="none of them"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    gc.collect()
    assert not PROCESS.provisional_layers.include(torch.empty(1, 1, 1, device="meta"))
