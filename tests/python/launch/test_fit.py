"""`torch-offload run --fit`: a stock Trainer trains the same rows, split as the plan says; all else runs as it is.

Method: tiny models on a made-up machine; the choice in this process with what a Trainer was given, and once in a
launched script beside the same script without it.
"""

import json
import logging
import random

import numpy as np
import pytest
import torch
from support.figures import MACHINE
from support.folders import save_model
from support.models import tiny_model
from support.script_runs import SCRIPTS, assert_paged, start_paged
from transformers import Trainer, TrainingArguments

from torch_offload import Config
from torch_offload.launch import fit as fits
from torch_offload.launch.fit import Fit, Given

pytestmark = pytest.mark.any_torch

SLOW = MACHINE.model_copy(update={"ssd_read": 1e7, "ssd_write": 1e7, "ssd_mixed": 1e7})
ROWS = 8


@pytest.fixture
def fit(monkeypatch, scratch):
    """A choice for a budget of a quarter of the state, in force."""
    monkeypatch.setattr(fits, "probe", lambda *_: SLOW)
    monkeypatch.setattr(fits, "TIMING_SECONDS", 0.0)
    chosen = Fit(Config(ram="2MiB", ssd=scratch, min_paged_bytes=0, page_elements=4096))
    chosen.install()
    yield chosen
    chosen.uninstall()


def rows_of(*lengths: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.ones(n, dtype=torch.long), "labels": torch.ones(n, dtype=torch.long)} for n in lengths]


def arguments_of(folder, **options) -> TrainingArguments:
    usual = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS, "max_steps": 2}
    rest = {"use_cpu": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    return TrainingArguments(output_dir=str(folder), **(usual | rest | options))


def made(folder, data=None, *, kind=Trainer, model=None, **options) -> Trainer:
    model = tiny_model("llama", tied=False) if model is None else model
    return kind(
        model=model, args=arguments_of(folder, **options), train_dataset=rows_of(*[16] * 32) if data is None else data
    )


def split_of(trainer: Trainer) -> tuple[int, int]:
    return trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps


def test_a_trainer_trains_the_same_rows_in_one_batch(fit, tmp_path, capsys):
    """The disk binds, so the weights come once; the data loader has the new rows; it says what it did."""
    trainer = made(tmp_path)
    assert split_of(trainer) == (ROWS, 1)
    assert trainer._train_batch_size == ROWS
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape == (ROWS, 16)
    said = capsys.readouterr().err
    assert said.startswith("torch-offload: --fit: per_device_train_batch_size 1 -> 8, gradient_accumulation_steps 8 ->")
    assert "8 rows a step as before; plan: " in said
    assert "sums are in another order" in said
    assert fit.is_used


def test_nothing_else_of_the_arguments_changes(fit, tmp_path):
    fitted = made(tmp_path).args.to_dict()
    fit.uninstall()
    plain = made(tmp_path).args.to_dict()
    changed = {name for name, value in plain.items() if fitted[name] != value}
    assert changed == {"per_device_train_batch_size", "gradient_accumulation_steps"}


def test_what_is_best_already_stays(fit, tmp_path, capsys):
    trainer = made(tmp_path, per_device_train_batch_size=ROWS, gradient_accumulation_steps=1)
    assert split_of(trainer) == (ROWS, 1)
    assert "8 x 1 stays, 8 rows a step as before" in capsys.readouterr().err


def test_random_numbers_are_left_as_they_are(fit, tmp_path):
    """Data sets and collators may draw some. Method: the choice for a data set that does, and how often it did."""

    class Drawing:
        drawn = 0

        def __len__(self) -> int:
            return 16

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            Drawing.drawn += 1
            ids = torch.randint(0, 256, (16,)) * 0 + random.randrange(256) * 0 + int(np.random.randint(256))
            return {"input_ids": ids, "labels": ids}

    def states() -> tuple[object, ...]:
        return torch.random.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    model = tiny_model("llama", tied=False)
    options = {"model": model, "args": arguments_of(tmp_path), "train_dataset": Drawing()}
    before = states()
    fit.apply(object.__new__(Trainer), Given.of((), options))
    assert Drawing.drawn > 0
    assert states() == before


def test_the_longest_row_is_planned_and_a_longer_one_is_warned_of_once(fit, tmp_path, monkeypatch, caplog):
    """Method: rows of which only some are read for the plan; the longest is not among them."""
    monkeypatch.setattr(fits, "MAX_ROWS_READ", 4)
    data = rows_of(*[16, 8, 8, 8] * 4, 32, *[16] * 7)  # every sixth is read
    with caplog.at_level(logging.WARNING, logger="torch_offload"):
        trainer = made(tmp_path, data, per_device_train_batch_size=1, gradient_accumulation_steps=1, max_steps=24)
        trainer.train()
    warnings = [record.message for record in caplog.records if "--fit planned rows" in record.message]
    assert len(warnings) == 1
    assert "rows of 16 tokens" in warnings[0]
    assert "a batch with 32 came" in warnings[0]


class OwnStep(Trainer):
    """Not stock."""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": OwnStep}, "a step of OwnStep is its own; plans know those of Trainer"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size changes the rows by itself"),
        ({"optim": "sgd"}, "plans know AdamW, and the script asks for optim='sgd'"),
        ({"dataloader_drop_last": True, "data": rows_of(*[8] * 20)}, "dataloader_drop_last would drop other rows: 20"),
        ({"data": [{"text": "a"}, {"text": "b"}]}, "takes no column of the data set"),
    ],
)
def test_what_cannot_be_chosen_for_runs_as_it_is(fit, tmp_path, capsys, options, reason):
    trainer = made(tmp_path, **options)
    assert split_of(trainer) == (1, ROWS)
    said = capsys.readouterr().err
    assert said.startswith("torch-offload: --fit: nothing is changed: ")
    assert reason in said
    assert said.count("\n") == 1


def test_a_budget_that_holds_nothing_changes_nothing(monkeypatch, scratch, tmp_path, capsys):
    monkeypatch.setattr(fits, "probe", lambda *_: SLOW)
    chosen = Fit(Config(ram="64KiB", ssd=scratch, min_paged_bytes=0, page_elements=4096))
    chosen.install()
    try:
        assert split_of(made(tmp_path)) == (1, ROWS)
    finally:
        chosen.uninstall()
    assert "nothing is changed: nothing fits; 1 x 8, page lacks least: ram lacks" in capsys.readouterr().err


def test_a_launched_script_is_fitted(tmp_path, scratch):
    """The stock script has 2 rows, 2 times accumulated. Fewer bytes move than without, and it ends as usual."""
    save_model("causal", tmp_path / "model")
    command = [str(SCRIPTS / "fine_tune.py"), "causal", str(tmp_path / "model")]
    plain = start_paged([*command, str(tmp_path / "plain")], ram="14MiB", ssd=scratch)
    fitted = start_paged(["--fit", *command, str(tmp_path / "fitted")], ram="14MiB", ssd=scratch)
    ends = {"plain": plain.end(), "fitted": fitted.end()}
    for ended in ends.values():
        assert ended.status == 0, ended.errors[-5000:]
        assert_paged(ended)
    assert (
        "--fit: per_device_train_batch_size 2 -> 4, gradient_accumulation_steps 2 -> 1; 4 rows" in ends["fitted"].errors
    )
    assert "--fit" not in ends["plain"].errors
    assert ends["fitted"].report["ssd_read_bytes"] < 0.9 * ends["plain"].report["ssd_read_bytes"]
    states = {name: json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text()) for name in ends}
    losses = {name: [row["loss"] for row in state["log_history"] if "loss" in row] for name, state in states.items()}
    assert losses["fitted"] == pytest.approx(losses["plain"], rel=1e-3)
    assert states["fitted"]["max_steps"] == states["plain"]["max_steps"] == 4
    assert states["fitted"]["epoch"] == states["plain"]["epoch"]


def test_a_script_without_a_trainer_runs_as_it_is_and_is_told_so(tmp_path, scratch):
    command = [str(SCRIPTS / "plain_loop.py")]
    ends = {}
    for name, options in (("plain", []), ("fitted", ["--fit"])):
        ends[name] = start_paged([*options, *command, str(tmp_path / name)], ram="1MiB", ssd=scratch).end()
        assert ends[name].status == 0, ends[name].errors[-5000:]
    assert (tmp_path / "fitted").read_bytes() == (tmp_path / "plain").read_bytes()
    lines = [line for line in ends["fitted"].errors.splitlines() if "--fit" in line]
    assert len(lines) == 1
    assert "--fit had no effect: the script makes no Trainer, so it ran as it is" in lines[0]
    assert "plan MODEL --search --tokens-per-step" in lines[0]
