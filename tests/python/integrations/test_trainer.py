"""The engine's figures among a Trainer's logs: every tracker gets them, wherever it stands."""

import tempfile

import pytest
import torch
from support.models import tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers import trainer as trainers

import torch_offload
from torch_offload.integrations import trainer as callbacks

FIGURES = {
    "offload/seconds_per_step",
    "offload/ssd_read_GB_per_step",
    "offload/ssd_written_GB_per_step",
    "offload/stall_share",
    "offload/memory_GB",
}


class Tracker(TrainerCallback):
    """Stands for any of transformers' trackers: takes what it is told."""

    def __init__(self):
        self.told = []

    def on_log(self, args, state, control, logs=None, **others):
        self.told.append((state.global_step, dict(logs)))


class ReadBytes(TrainerCallback):
    """Notes what the engine has read, by event; the last of each counts."""

    def __init__(self):
        self.at = {}

    def on_train_begin(self, args, state, control, **others):
        self.at["begin"] = torch_offload.report().ssd_read_bytes

    def on_step_end(self, args, state, control, **others):
        self.at["step end"] = torch_offload.report().ssd_read_bytes

    def on_log(self, args, state, control, logs=None, **others):
        if "loss" in logs:
            self.at["log"] = torch_offload.report().ssd_read_bytes


def train(model, *callbacks, steps=4):
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (16, 8))]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        logging_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))
    trainer.train()
    return trainer


@pytest.fixture
def model(config):
    model = tiny_model("llama", tied=True)
    torch_offload.wrap(model, config=config.replace(ram="3MiB"))
    return model


def test_a_tracker_gets_them_though_it_was_added_before(model, capsys):
    """Method: the bytes of all logs together lie between what the engine counts shortly before and after."""
    tracker, earlier, later = Tracker(), ReadBytes(), ReadBytes()
    train(model, tracker, earlier, torch_offload.ReportCallback(), later)
    after = torch_offload.report()
    capsys.readouterr()
    steps = [(step, logs) for step, logs in tracker.told if "loss" in logs]
    assert [step for step, _ in steps] == [2, 4]
    for _, logs in steps:
        assert set(logs) >= FIGURES
        assert {f"offload/stall_share_{cause}" for cause in after.stall_seconds} <= set(logs)
        assert all(isinstance(logs[name], float) for name in FIGURES)
        assert 0 <= logs["offload/stall_share"] <= 1
        assert 0 < logs["offload/memory_GB"] <= 3 * 2**20 / 1e9
    read_bytes = round(sum(2 * logs["offload/ssd_read_GB_per_step"] for _, logs in steps) * 1e9)
    assert 0 < later.at["step end"] - later.at["begin"] <= read_bytes <= earlier.at["log"] - earlier.at["begin"]


def test_other_logs_are_left_alone(model, capsys):
    tracker = Tracker()
    train(model, tracker, torch_offload.ReportCallback())
    capsys.readouterr()
    summary = [logs for _, logs in tracker.told if "loss" not in logs]
    assert summary
    assert not any(name.startswith("offload/") for logs in summary for name in logs)


def test_without_a_wrapped_model_nothing_is_added(capsys):
    tracker = Tracker()
    train(tiny_model("llama", tied=True), tracker, torch_offload.ReportCallback())
    capsys.readouterr()
    assert tracker.told
    assert not any(name.startswith("offload/") for _, logs in tracker.told for name in logs)


def test_every_trainer_has_one_where_that_is_installed(model, capsys):
    callbacks.uninstall()  # the autopage of another test may have installed it
    defaults = list(trainers.DEFAULT_CALLBACKS)
    callbacks.install()
    callbacks.install()
    try:
        tracker = Tracker()
        trainer = train(model, tracker)
        capsys.readouterr()
        ours = [one for one in trainer.callback_handler.callbacks if isinstance(one, torch_offload.ReportCallback)]
        assert len(ours) == 1
        assert set(tracker.told[0][1]) >= FIGURES
    finally:
        callbacks.uninstall()
    assert defaults == trainers.DEFAULT_CALLBACKS
