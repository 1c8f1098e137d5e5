"""Scripts that know nothing of paging, under the launcher, leave the same files as without it, to the byte.

Method: tiny models and tokenizers made here, no network; each script runs plain and under the launcher with a fifth of
its state (parameters, gradients, moments) and no setting of activations. Reports that every process writes when it ends
say that bytes moved. On the fake GPU another fifth is in the GPU.
"""

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.folders import save_model, save_rows
from support.grpo_rewards import phases_of
from support.script_runs import (
    SCRIPTS,
    Ended,
    assert_paged,
    assert_paged_on_gpu,
    assert_same_files,
    logged,
    start,
    start_paged,
)

pytestmark = pytest.mark.any_torch

STEPS = 3
BUDGET_SHARE = 0.2
HALF_QUANTIZED = 0.073  # of the weights as they were: half of what they are in four bits with statistics
FULL_COPIES, LORA_COPIES, DPO_COPIES = 4, 1, 5  # of the weights: with gradients and moments; frozen; with a reference
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Models by kind, data sets by trainer."""
    root = tmp_path_factory.mktemp("folders")
    made = {kind: save_model(kind, root / kind) for kind in ("causal", "classification", "seq2seq", "reward")}
    made |= {"sft": save_rows(root / "texts", preference=False), "dpo": save_rows(root / "pairs", preference=True)}
    return made | {"grpo": made["dpo"]}


@pytest.fixture(params=["cpu", "gpu"])
def gpu(request) -> Path | None:
    """The library of the fake GPU, or none."""
    return request.getfixturevalue("fake_gpu") if request.param == "gpu" else None


def run_both(
    command: Sequence[str], output: Path, scratch: Path, *, ram: str, update: str = "step", gpu: Path | None = None
) -> Ended:
    """Run with OUTPUT replaced by a folder, plain and paged at once; compare the files, return the paged run."""

    def named(folder: Path) -> list[str]:
        return [str(folder) if word == "OUTPUT" else word for word in command]

    plain = start(named(output / "plain"), gpu=gpu)
    paged = start_paged(named(output / "paged"), ram=ram, ssd=scratch, update=update, gpu=gpu)
    ends = [plain.end(), paged.end()]
    for ended in ends:
        assert ended.status == 0, ended.errors[-5000:]
    assert ends[0].reports == []
    assert_same_files(output / "paged", output / "plain", "*.safetensors")
    assert_paged(ends[1])
    if gpu is not None:
        assert_paged_on_gpu(ends[1])
    assert list(scratch.glob("*torch*offload*")) == []
    return ends[1]


def share_of(weights_bytes: int, copies: int) -> str:
    return str(int(BUDGET_SHARE * copies * weights_bytes))


def share_of_model(folder: Path, copies: int) -> str:
    return share_of((folder / "model.safetensors").stat().st_size, copies)


def trl_options(trainer: str, folders: dict[str, Path], *, gpu: Path | None = None) -> list[str]:
    options = f"""--model_name_or_path {folders["causal"]} --dataset_name {folders[trainer]} --dtype float32
        --output_dir OUTPUT --max_steps {STEPS} --gradient_accumulation_steps 2
        --use_cpu {gpu is None} --bf16 false --report_to none --learning_rate 1e-3"""
    if trainer == "grpo":
        options += f""" --per_device_train_batch_size 2 --num_generations 2 --max_completion_length {NEW_TOKENS}
            --reward_funcs support.grpo_rewards.distinct_characters"""
        return [*options.split(), "--generation_kwargs", json.dumps({"min_new_tokens": NEW_TOKENS})]
    return [*options.split(), "--per_device_train_batch_size", "1", "--max_length", "48"]


def test_trl_sft_over_a_base_in_four_bits(folders, tmp_path, scratch):
    """The script of trl with --load_in_4bit: the base is quantized by bitsandbytes as it is loaded, and paged."""
    deep = folders | {"causal": save_model("causal", tmp_path / "deep", layers=20)}  # beside what its loss takes
    command = ["-m", "trl.scripts.sft", *trl_options("sft", deep), "--use_peft", "--load_in_4bit"]
    half_bytes = int(HALF_QUANTIZED * (deep["causal"] / "model.safetensors").stat().st_size)
    report = run_both(command, tmp_path, scratch, ram=str(half_bytes)).report
    assert report["faults"] == 0
    assert report["read_bytes"]["parameter"] > 2 * STEPS * half_bytes


@pytest.mark.rotating(parts=4)
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_trl_sft(folders, tmp_path, scratch, tuning, gpu):
    """The script of trl, all weights and adapters. The base of adapters is written at most once, as it first leaves."""
    options = [] if tuning == "full" else ["--use_peft", "--lora_r", "8"]
    command = ["-m", "trl.scripts.sft", *trl_options("sft", folders, gpu=gpu), *options]
    ram = share_of_model(folders["causal"], FULL_COPIES if tuning == "full" else LORA_COPIES)
    report = run_both(command, tmp_path, scratch, ram=ram, gpu=gpu).report
    if tuning == "lora":
        base_bytes = (folders["causal"] / "model.safetensors").stat().st_size
        assert report["clean_drops"] > 0
        assert report["read_bytes"]["parameter"] > base_bytes // 2
        assert report["written_bytes"]["parameter"] < 1.5 * base_bytes


def test_trl_dpo(folders, tmp_path, scratch):
    """Two models, the reference frozen."""
    ram = share_of_model(folders["causal"], DPO_COPIES)
    run_both(["-m", "trl.scripts.dpo", *trl_options("dpo", folders)], tmp_path, scratch, ram=ram)


@pytest.mark.parametrize("models", ["policy", "policy, reference and reward"])
def test_trl_grpo(folders, tmp_path, scratch, models):
    """It generates and trains in one process, and both phases page. Tokens are foreseen from the first one on: each
    reads what does not fit of the weights, moments are read once, for the updates that the first token applies."""
    more = [] if models == "policy" else ["--beta", "0.1", "--reward_model_name_or_path", str(folders["reward"])]
    command = ["-m", "trl.scripts.grpo", *trl_options("grpo", folders), *more]
    ended = run_both(command, tmp_path, scratch, ram=share_of_model(folders["causal"], FULL_COPIES))
    phases = phases_of(ended.output)
    assert [phase["name"] for phase in phases] == ["generated", "trained"] * STEPS
    weight_bytes = (folders["causal"] / "model.safetensors").stat().st_size
    for phase in phases:
        read = phase["read_bytes"]
        if phase["name"] == "generated":
            assert 0 < read["parameter"] < 0.75 * NEW_TOKENS * weight_bytes, "the weights were read for each token"
            assert read["state"] < 2.2 * weight_bytes
        else:
            assert read["parameter"] > 0
            assert phase["written_bytes"]["gradient"] > 0


def test_trl_command_trains_in_a_child(folders, tmp_path, scratch):
    """`trl sft`: the command line starts accelerate, which starts the script."""
    command = [str(Path(sys.executable).parent / "trl"), "sft", *trl_options("sft", folders)]
    run_both(command, tmp_path, scratch, ram=share_of_model(folders["causal"], FULL_COPIES))


def test_accelerate_launch_trains_in_a_child(folders, tmp_path, scratch):
    """`accelerate launch` of a stock Trainer script."""
    command = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", str(SCRIPTS / "fine_tune.py")]
    ram = share_of_model(folders["causal"], FULL_COPIES)
    run_both([*command, "causal", str(folders["causal"]), "OUTPUT"], tmp_path, scratch, ram=ram)


@pytest.mark.rotating(parts=6)
@pytest.mark.parametrize("kind", ["causal", "classification", "seq2seq"])
def test_stock_trainer(folders, tmp_path, scratch, kind, gpu):
    """Llama, BERT and T5 with evaluation and checkpoints; resumed from its own checkpoint the run ends the same."""
    command = [str(SCRIPTS / "fine_tune.py"), kind, str(folders[kind]), "OUTPUT"]
    ram = share_of_model(folders[kind], FULL_COPIES)
    ended = run_both(command, tmp_path, scratch, ram=ram, gpu=gpu)
    assert ended.report["written_bytes"]["activation"] > 0
    if kind == "causal":
        assert "offload/ssd_read_GB_per_step" in ended.output  # what a Trainer tells its trackers, it prints
        resumed = [*command[:-1], str(tmp_path / "resumed"), str(tmp_path / "paged" / "checkpoint-2")]
        ended = start_paged(resumed, ram=ram, ssd=scratch, gpu=gpu).end()
        assert ended.status == 0, ended.errors[-5000:]
        assert_paged(ended)
        name = "model.safetensors"
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


@pytest.mark.parametrize("script", ["plain_loop", "nano_gpt"])
def test_pytorch_alone(tmp_path, scratch, script):
    """A chain of layers; a GPT with dropout, accumulation, parameter groups and a schedule."""
    for run in ("plain", "paged"):
        (tmp_path / run).mkdir()
    command = [str(SCRIPTS / f"{script}.py"), "OUTPUT/w.safetensors"]
    plain = start([command[0], command[1].replace("OUTPUT", str(tmp_path / "plain"))]).end()
    assert plain.status == 0, plain.errors[-5000:]
    ram = share_of((tmp_path / "plain" / "w.safetensors").stat().st_size, FULL_COPIES)
    ended = start_paged([command[0], command[1].replace("OUTPUT", str(tmp_path / "paged"))], ram=ram, ssd=scratch).end()
    assert ended.status == 0, ended.errors[-5000:]
    assert_same_files(tmp_path / "paged", tmp_path / "plain", "*.safetensors")
    assert_paged(ended)


def test_the_first_call_pages_what_it_saves(tmp_path, scratch):
    """The launcher wraps a model as it is called for the first time; one that raises, and one inside another, too."""
    text = """
        import torch, torch_offload
        from torch import nn
        class Broken(nn.Module):
            def forward(self, x):
                raise ValueError
        torch.manual_seed(0)
        failing, deep = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))) for _ in range(2))
        failing.append(Broken())
        x = torch.randn(4096, 64)
        try:
            failing(x)
        except ValueError:
            pass
        saved = torch_offload.report().counters["saved_bytes"]
        assert saved >= 23 * x.nbytes, saved
        kept = x.clone().requires_grad_()
        (kept * kept).sum().backward()
        assert torch_offload.report().counters["saved_bytes"] == saved
        deep(x).sum().backward()
        report = torch_offload.report()
        assert report.written_bytes["activation"] > 20 * x.nbytes, report.written_bytes
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    ended = start_paged([str(path)], ram="8MiB", ssd=scratch).end()
    assert ended.status == 0, ended.errors[-5000:]


def test_a_model_built_on_the_gpu_is_paged(tmp_path, scratch, fake_gpu):
    """Nothing of it is ever on the host."""
    text = """
        import torch
        from torch import nn
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False, device="cuda") for _ in range(48)))
        for _ in range(2):
            model(torch.ones(4, 128, device="cuda")).sum().backward()
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    ended = start_paged([str(path)], ram=str(512 << 10), ssd=scratch, gpu=fake_gpu).end()
    assert ended.status == 0, ended.errors[-5000:]
    assert_paged(ended)
    assert_paged_on_gpu(ended)


def test_stock_trainer_that_updates_in_the_backward(folders, tmp_path, scratch):
    """Without clipping: equal weights, the same norms in its log, and resumed it ends the same."""
    command = [str(SCRIPTS / "fine_tune.py"), "causal", str(folders["causal"]), "OUTPUT", "--max_grad_norm", "0"]
    ram = share_of_model(folders["causal"], FULL_COPIES)
    ended = run_both(command, tmp_path, scratch, ram=ram, update="backward")
    assert ended.report["counters"]["gradients_applied"] > 0
    folder = str(tmp_path / "paged" / "checkpoint-2")
    resumed = [*command[:3], str(tmp_path / "resumed"), folder, *command[4:]]
    ended = start_paged(resumed, ram=ram, ssd=scratch, update="backward").end()
    assert ended.status == 0, ended.errors[-5000:]
    name = "model.safetensors"
    assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert len(logged(tmp_path / "plain")) == 4
    assert logged(tmp_path / "paged") == logged(tmp_path / "plain")


def test_a_stock_trainer_that_clips_is_told_what_is_in_the_way(folders, tmp_path, scratch):
    """Its defaults clip and this script accumulates: neither goes with updates in the backward."""
    command = [str(SCRIPTS / "fine_tune.py"), "causal", str(folders["causal"]), str(tmp_path / "out")]
    ram = share_of_model(folders["causal"], FULL_COPIES)
    ended = start_paged(command, ram=ram, ssd=scratch, update="backward").end()
    assert ended.status == 1
    assert 'update="backward"' in ended.errors
