"""Stock Trainer scripts on two ranks, under the launcher, leave the same files as without it, to the byte.

Method: torchrun over gloo, plain and paged at once. The ranks share the launcher's budget, and each rank reports that
bytes moved.
"""

import shutil
from pathlib import Path

import pytest
import torch
from support.bits import digest
from support.folders import save_model, save_rows
from support.script_runs import SCRIPTS, assert_report_paged, assert_same_files, logged, start, start_paged

pytestmark = pytest.mark.rotating(among="file", parts=2)

RANKS = 2
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]


@pytest.fixture(autouse=True)
def _loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model("causal", tmp_path_factory.mktemp("model") / "causal")


def run_both(command: list[str], folder: Path, scratch: Path, *, ram_of_rank: int) -> None:
    """Run with OUTPUT replaced by a folder, plain and paged at once."""
    plain_words, paged_words = (
        [str(folder / name) if word == "OUTPUT" else word for word in [*TORCHRUN, *command]]
        for name in ("plain", "paged")
    )
    plain = start(plain_words)
    run_paged(paged_words, scratch, ram_of_rank=ram_of_rank)
    ended = plain.end()
    assert ended.status == 0, ended.errors[-5000:]


def run_paged(command: list[str], scratch: Path, *, ram_of_rank: int) -> None:
    """Run under the launcher; every rank pages, to a directory of its own."""
    for rank in range(RANKS):
        (scratch / f"disk{rank}").mkdir(exist_ok=True)
    ended = start_paged(command, ram=str(RANKS * ram_of_rank), ssd=scratch / "disk{local_rank}").end()
    assert ended.status == 0, ended.errors[-5000:]
    assert len(ended.reports) == RANKS
    for report in ended.reports:
        assert_report_paged(report)
        assert report["share"]["equal_bytes"] <= ram_of_rank
        assert report["budget_bytes"] <= report["share"]["shared_bytes"] <= RANKS * ram_of_rank
        assert report["faults"] == 0


def test_data_parallel_trainer(model, tmp_path, scratch):
    """DDP, which keeps all gradients in its buckets: gradients and 15 % of a rank's state."""
    weights_bytes = (model / "model.safetensors").stat().st_size
    command = [str(SCRIPTS / "fine_tune.py"), "causal", str(model), "OUTPUT"]
    run_both(command, tmp_path, scratch, ram_of_rank=int(weights_bytes * (1 + 0.15 * 4)))
    assert len(assert_same_files(tmp_path / "paged", tmp_path / "plain", "*.safetensors")) == 3
    assert len(logged(tmp_path / "plain")) == 4
    assert logged(tmp_path / "paged") == logged(tmp_path / "plain")


def resume_sharded(command: list[str], folder: Path, scratch: Path, *, ram_of_rank: int) -> None:
    """Begin once more, from the first checkpoint of a run that `run_both` made, and leave only what follows it."""
    shutil.move(folder / "paged", folder / "unbroken")
    words = [str(folder / "paged") if word == "OUTPUT" else word for word in command]
    run_paged([*TORCHRUN, *words, str(folder / "unbroken" / "checkpoint-2")], scratch, ram_of_rank=ram_of_rank)
    shutil.rmtree(folder / "plain" / "checkpoint-2")


def test_sharded_trainer(model, tmp_path, scratch):
    """FSDP2 by accelerate's plugin, each rank in 40 % of its state; its checkpoints are of shards, and it resumes."""
    ram_of_rank = int((model / "model.safetensors").stat().st_size * 4 / RANKS * 0.4)
    command = [str(SCRIPTS / "fine_tune_sharded.py"), str(model), "OUTPUT", "SHARDED_STATE_DICT"]
    run_both(command, tmp_path, scratch, ram_of_rank=ram_of_rank)
    assert len(assert_same_files(tmp_path / "paged", tmp_path / "plain", "*.distcp")) == 2 * 2 * RANKS
    assert len(logged(tmp_path / "plain")) == 4
    assert logged(tmp_path / "paged") == logged(tmp_path / "plain")
    resume_sharded(command, tmp_path, scratch, ram_of_rank=ram_of_rank)
    assert len(assert_same_files(tmp_path / "paged", tmp_path / "plain", "*.distcp")) == 2 * RANKS


def test_sharded_trainer_with_full_checkpoints(model, tmp_path, scratch):
    """The first rank gathers weights and moments of all, more than its budget, and gives them out as it resumes."""
    ram_of_rank = int((model / "model.safetensors").stat().st_size * 4 / RANKS * 0.4)
    command = [str(SCRIPTS / "fine_tune_sharded.py"), str(model), "OUTPUT", "FULL_STATE_DICT"]
    run_both(command, tmp_path, scratch, ram_of_rank=ram_of_rank)
    for name, count in (("pytorch_model_fsdp.bin", 2), ("optimizer.bin", 2), ("model.safetensors", 3)):
        assert len(assert_same_files(tmp_path / "paged", tmp_path / "plain", name)) == count
    assert logged(tmp_path / "paged") == logged(tmp_path / "plain")
    resume_sharded(command, tmp_path, scratch, ram_of_rank=ram_of_rank)
    assert len(assert_same_files(tmp_path / "paged", tmp_path / "plain", "pytorch_model_fsdp.bin")) == 1
    assert len(assert_same_files(tmp_path / "paged", tmp_path / "plain", "*.safetensors")) == 1 + 1
    # What torch resumes from a full state dict has lists for tuples among the optimizer's settings, in memory as well.
    plain, paged = (torch.load(tmp_path / name / "checkpoint-4" / "optimizer.bin") for name in ("plain", "paged"))
    assert digests_by_path(paged["state"]) == digests_by_path(plain["state"])
    assert len(plain["state"]) > 0


def digests_by_path(states: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, str]]:
    return {path: {name: digest(tensor) for name, tensor in state.items()} for path, state in states.items()}


def test_trl_sft_with_adapters(model, tmp_path, scratch):
    """TRL's own script with LoRA, under DDP: each rank pages the frozen base, with two fifths of it in memory."""
    rows = save_rows(tmp_path / "texts", preference=False)
    options = f"""--model_name_or_path {model} --dataset_name {rows} --dtype float32 --output_dir OUTPUT --max_steps 3
        --gradient_accumulation_steps 2 --per_device_train_batch_size 1 --max_length 48 --use_peft --lora_r 8
        --use_cpu --bf16 false --report_to none --learning_rate 1e-3"""
    ram_of_rank = int(0.4 * (model / "model.safetensors").stat().st_size)
    run_both(["-m", "trl.scripts.sft", *options.split()], tmp_path, scratch, ram_of_rank=ram_of_rank)
    assert_same_files(tmp_path / "paged", tmp_path / "plain", "*.safetensors")
