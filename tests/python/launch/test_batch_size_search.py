"""What looks for a batch size by running out of memory sees that ours did.

Method: a paged model whose activations stay in memory, and rows of which a few fit the budget.
"""

import pytest
import torch
from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size
from support.models import tiny_model
from transformers import Trainer, TrainingArguments

import torch_offload
from torch_offload import Config, OutOfTierMemory

ROWS = 64


@pytest.fixture
def model(scratch):
    model = tiny_model("llama", tied=False)
    config = Config(ram="12MiB", ssd=scratch, min_paged_bytes=0, page_elements=4096, activations="keep")
    torch_offload.wrap(model, config=config)
    return model


def test_a_decorated_function_is_called_with_fewer_rows(model):
    """Until they fit; every failure is one of ours."""
    tried, failures = [], []

    @find_executable_batch_size(starting_batch_size=ROWS, reduce_batch_size_fn=lambda: tried[-1] // 2)
    def step(rows: int) -> float:
        tried.append(rows)
        ids = torch.ones(rows, 32, dtype=torch.long)
        try:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        except OutOfTierMemory as error:
            failures.append(should_reduce_batch_size(error))  # the error itself would hold the activations
            raise
        return loss.item()

    assert step() > 0
    assert ROWS in tried
    assert 1 <= tried[-1] < ROWS
    assert len(failures) == len(tried) - 1 >= 1
    assert all(failures)


def test_a_trainer_finds_its_batch_size(model, tmp_path):
    rows = [{"input_ids": torch.ones(32, dtype=torch.long), "labels": torch.ones(32, dtype=torch.long)}] * ROWS
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=ROWS,
        auto_find_batch_size=True,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer._train_batch_size < ROWS
