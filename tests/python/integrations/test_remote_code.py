"""Code that comes with a model runs only where the user says so, and nobody is asked."""

import json
import os
import pty
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from support.command import run_main
from support.folders import save_tokenizer
from support.models import tiny_config, tiny_model
from support.moe_models import tiny_moe

from torch_offload import moe
from torch_offload.compression.compress import compress_folder
from torch_offload.errors import CheckpointError
from torch_offload.integrations import hf_models
from torch_offload.moe import checkpoint, ternary

pytestmark = pytest.mark.any_torch

CODE = """
import pathlib
pathlib.Path({ran!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_model"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""

# Answers yes to whatever is asked; each command begins as a new process would.
COMMANDS = """
    import sys
    from torch_offload.cli import app
    for command in {commands!r}:
        sys.argv = ["torch-offload", *command]
        try:
            app.main()
        except SystemExit as ended:
            print("status", ended.code, flush=True)
"""


def bring_code(folder: Path) -> Path:
    """Have a folder's model need code that lies in the folder; returns what that code makes when it runs."""
    ran = folder.parent / "ran"
    (folder / "own.py").write_text(CODE.format(ran=str(ran)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_model", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    return ran


def on_a_terminal(source: str, *, answers: bytes) -> str:
    """Run Python on a terminal at which somebody has typed the answers already."""
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", textwrap.dedent(source)])
    os.write(terminal, answers)
    written = b""
    while True:
        try:
            written += os.read(terminal, 65536)
        except OSError:
            break
    os.close(terminal)
    os.waitpid(process, 0)
    return written.decode()


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small model with a tokenizer."""
    tiny_config("llama", tied=False, hidden=128, layers=2).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def test_nobody_is_asked_and_no_code_runs(folder, tmp_path, scratch, monkeypatch):
    """Method: models whose code leaves a file, each command on a terminal at which yes is typed."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    coded = tmp_path / "coded"
    model = tiny_moe("mixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_local_experts=2)
    moe.code_experts(model, lambda weight: ternary.in_planes(weight, [0.5]))
    checkpoint.save(model, coded)
    ran = bring_code(folder)
    assert bring_code(coded) == ran
    texts = tmp_path / "texts.txt"
    texts.write_text("words " * 100)
    commands = [
        ["plan", str(folder), "--ssd", str(scratch)],
        ["plan", str(folder / "config.json"), "--ssd", str(scratch)],
        ["compress", str(folder), "--calibration", str(texts), "--out", str(tmp_path / "out"), "--ssd", str(scratch)],
        ["verify", str(coded)],
        ["inspect", str(coded)],
    ]
    said = on_a_terminal(COMMANDS.format(commands=commands), answers=b"y\n" * 20)
    assert "[y/N]" not in said
    assert not ran.exists()
    assert [line for line in said.splitlines() if line.startswith("status")] == ["status 2"] * 5, said
    assert said.count("give --trust-remote-code if you trust it") == 3
    assert said.count("needs code of its own, which is never run here") == 2


def test_code_runs_where_the_user_trusts_it(folder, tmp_path, monkeypatch):
    """Method: the same model, from its folder and from its config.json."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    ran = bring_code(folder)
    for model in (folder, folder / "config.json"):
        made = hf_models.model_from(model, dtype="float32", uses_checkpointing=False, trust_remote_code=True).module
        assert type(made).__name__ == "OwnModel"
    assert ran.exists()


@pytest.mark.parametrize("trusts", [True, False])
def test_the_option_reaches_what_loads(folder, monkeypatch, trusts):
    """Of both commands that have it."""
    given = []

    def keep(*_, **options):
        given.append((options["trust_remote_code"], options.get("pickled_weights")))
        raise CheckpointError("enough")

    monkeypatch.setattr("torch_offload.integrations.hf_models.model_from", keep)
    monkeypatch.setattr("torch_offload.compression.compress.compress_folder", keep)
    flags = ["--trust-remote-code"] if trusts else []
    pickles = ["--pickled-weights"] if trusts else []
    assert run_main(monkeypatch, "plan", str(folder), *flags) == 2
    assert run_main(monkeypatch, "compress", str(folder), "--calibration", "x", "--out", "y", *flags, *pickles) == 2
    assert given == [(trusts, None), (trusts, trusts)]


def test_weights_that_are_pickles_are_read_only_when_told(folder, tmp_path):
    """Method: a model whose only file of weights is a pickle."""
    model = tiny_model("llama", tied=False)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    texts = tmp_path / "texts.txt"
    texts.write_text("words")
    with pytest.raises(CheckpointError, match=r"has no weights in safetensors.*--pickled-weights"):
        hf_models.loaded_model(folder)
    with pytest.raises(CheckpointError, match="--pickled-weights"):
        compress_folder(folder, bits=0.8, calibration=texts, out=tmp_path / "out", rows=1)
    read = hf_models.loaded_model(folder, pickled_weights=True)
    assert {name for name, _ in read.named_parameters()} == {name for name, _ in model.named_parameters()}
