"""`torch-offload run --optimizer`: a Trainer creates torch_offload.AdamW; fp32 weights get the bits of torch's."""

import pytest
import torch
from support.folders import save_model
from support.script_runs import SCRIPTS, assert_paged, start, start_paged
from transformers import Trainer, TrainingArguments

from torch_offload import AdamW, ConfigError
from torch_offload.integrations.trainer_optimizer import OPTIMIZERS, TrainerOptimizer

pytestmark = pytest.mark.any_torch

CHECKPOINT = "checkpoint-4"


@pytest.fixture
def chosen():
    """The choice of adamw-8bit, in force."""
    optimizer = TrainerOptimizer("adamw-8bit")
    optimizer.install()
    yield optimizer
    optimizer.uninstall()


def test_a_launched_trainer_creates_the_chosen_optimizer(tmp_path, scratch):
    """Method: a script that says nothing of optimizers, plain and launched; the checkpoint tells which one it had."""
    save_model("causal", tmp_path / "model")
    command = [str(SCRIPTS / "fine_tune.py"), "causal", str(tmp_path / "model")]
    runs = {"plain": start([*command, str(tmp_path / "plain")])}
    for name in OPTIMIZERS:
        runs[name] = start_paged(["--optimizer", name, *command, str(tmp_path / name)], ram="7MiB", ssd=scratch)
    for name, running in runs.items():
        ended = running.end()
        assert ended.status == 0, ended.errors[-5000:]
        if name != "plain":
            assert_paged(ended)
            assert "had no effect" not in ended.errors
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in runs}
    assert weights["adamw"] == weights["plain"]
    assert weights["adamw-8bit"] != weights["plain"]
    saved = {name: torch.load(tmp_path / name / CHECKPOINT / "optimizer.pt") for name in runs}
    assert "moments" not in saved["plain"]["param_groups"][0]
    assert saved["adamw"]["param_groups"][0]["moments"] == "fp32"
    dtypes = {state["exp_avg"].dtype for state in saved["adamw-8bit"]["state"].values()}
    assert torch.uint8 in dtypes


def test_an_optimizer_that_no_trainer_asked_for_is_said_to_have_no_effect(tmp_path, scratch):
    command = ["--optimizer", "adamw", str(SCRIPTS / "plain_loop.py"), str(tmp_path / "w.safetensors")]
    ended = start_paged(command, ram="1MiB", ssd=scratch).end()
    assert ended.status == 0, ended.errors[-5000:]
    assert_paged(ended)
    assert "--optimizer adamw had no effect: the script made its optimizer itself, in a loop of its own" in ended.errors
    assert "or by a Trainer's optimizers or optimizer_cls_and_kwargs; create torch_offload.AdamW" in ended.errors


def test_arguments_of_the_script_are_kept(chosen):
    arguments = TrainingArguments(learning_rate=3e-4, adam_beta1=0.8, adam_epsilon=1e-6, use_cpu=True, report_to=[])
    found, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    assert found is AdamW
    assert options == {"lr": 3e-4, "betas": (0.8, 0.999), "eps": 1e-6, "moments": "8bit"}
    assert chosen.is_used


def test_a_script_that_asks_for_another_optimizer_is_refused(chosen):
    arguments = TrainingArguments(optim="sgd", use_cpu=True, report_to=[])
    with pytest.raises(
        ConfigError, match=r"--optimizer adamw-8bit takes the place of .* the script asks for SGD; leave"
    ):
        Trainer.get_optimizer_cls_and_kwargs(arguments)
    assert not chosen.is_used


def test_a_trainer_that_was_given_its_optimizer_keeps_it(chosen):
    """By `optimizer_cls_and_kwargs`, which is also how a script chooses torch_offload.AdamW itself."""
    arguments = TrainingArguments(use_cpu=True, report_to=[])
    model = torch.nn.Linear(2, 2)
    given = (AdamW, {"lr": 0.5, "max_grad_norm": 2.0})
    optimizer = Trainer(model=model, args=arguments, optimizer_cls_and_kwargs=given).create_optimizer()
    assert (type(optimizer), optimizer.defaults["lr"], optimizer.defaults["moments"]) == (AdamW, 0.5, "fp32")
    assert optimizer.defaults["max_grad_norm"] == 2.0
    assert not chosen.is_used
