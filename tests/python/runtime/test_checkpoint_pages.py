"""Pages of weights stay in the checkpoint's file until they are written.

Method: tiny models under a budget of a third of them, counters of the engine, digests of the weights.
"""

import os
import shutil

import pytest
import torch
from safetensors import safe_open
from support.bits import digest
from support.models import tiny_model
from support.paging import assert_bitwise_equal
from torch import nn
from transformers import AutoModelForCausalLM

import torch_offload
from torch_offload import Config, PageCorruptError

IDS = torch.arange(8)[None]


@pytest.fixture
def folder(scratch):
    """A model's folder on a disk."""
    tiny_model("llama", tied=False, layers=8).save_pretrained(scratch / "model")
    return scratch / "model"


def file_bytes(folder) -> int:
    return (folder / "model.safetensors").stat().st_size


def weights(model) -> dict[str, str]:
    return {name: digest(weight) for name, weight in model.named_parameters()}


def loaded(folder, config, **options):
    """Return the model, wrapped, under a budget of a third of its file."""
    with torch_offload.loading(config=config, ram=file_bytes(folder) // 3) as block:
        return block.wrap(AutoModelForCausalLM.from_pretrained(folder, **options))


def logits(model) -> str:
    with torch.no_grad():
        return digest(model(input_ids=IDS).logits)


def train_one_step(model) -> dict[str, str]:
    model(input_ids=IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return weights(model)


def test_loading_neither_reads_nor_writes_and_frozen_pages_are_never_written(folder, config):
    """But for what no direct read reaches, in the last sectors of the file. The bits of plain torch, twice."""
    plain = AutoModelForCausalLM.from_pretrained(folder)
    expected, size_bytes = logits(plain), sum(weight.nbytes for weight in plain.parameters())
    page_bytes = config.page_elements * 4
    model = loaded(folder, config).requires_grad_(requires_grad=False)
    report = torch_offload.report()
    assert (report.ssd_read_bytes, report.ssd_written_bytes) == (0, 0)
    assert size_bytes - 2 * page_bytes <= report.counters["left_in_file_bytes"] <= size_bytes
    assert [logits(model), logits(model)] == [expected, expected]
    report = torch_offload.report()
    assert report.ssd_read_bytes > 1.5 * size_bytes, "pages were not read again"
    assert report.ssd_written_bytes <= page_bytes
    assert report.ssd_bytes <= page_bytes
    assert report.counters["home_bytes"] >= size_bytes - 2 * page_bytes
    assert report.faults == 0
    assert_bitwise_equal(weights(model), weights(plain))


def test_pages_that_are_trained_leave_the_file_which_stays_as_it_is(folder, config):
    before = (folder / "model.safetensors").read_bytes()
    expected = train_one_step(AutoModelForCausalLM.from_pretrained(folder))
    model = loaded(folder, config)
    assert_bitwise_equal(train_one_step(model), expected)
    torch_offload.evict(model)
    counters = torch_offload.report().counters
    assert counters["left_in_file_bytes"] > 0
    assert counters["home_bytes"] == 0
    after = (folder / "model.safetensors").read_bytes()
    assert after == before


@pytest.mark.parametrize(
    ("setting", "options"), [("copy", {}), ("in_place", {"dtype": torch.bfloat16})], ids=["copied", "converted"]
)
def test_what_is_copied_or_converted_does_not_lie_in_the_file(folder, config, setting, options):
    expected = weights(AutoModelForCausalLM.from_pretrained(folder, **options))
    model = loaded(folder, config.replace(checkpoint_pages=setting), **options)
    report = torch_offload.report()
    assert report.counters["left_in_file_bytes"] == report.counters["home_bytes"] == 0
    assert report.ssd_written_bytes > 0
    assert_bitwise_equal(weights(model), expected)


def test_a_checkpoint_that_is_deleted_is_used_all_the_same(folder, config):
    expected = weights(AutoModelForCausalLM.from_pretrained(folder))
    model = loaded(folder, config)
    shutil.rmtree(folder)
    assert_bitwise_equal(weights(model), expected)


def test_a_model_is_saved_over_the_checkpoint_that_it_lies_in(folder, config):
    """The new file takes the old one's name when it is complete; pages stay in the old one."""
    expected = weights(AutoModelForCausalLM.from_pretrained(folder))
    model = loaded(folder, config)
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5)
    model.save_pretrained(folder)
    assert torch_offload.report().counters["home_bytes"] > 0
    expected["lm_head.weight"] = digest(torch.full_like(model.lm_head.weight, 0.5))
    assert_bitwise_equal(weights(model), expected)
    assert_bitwise_equal(weights(AutoModelForCausalLM.from_pretrained(folder)), expected)


def test_a_checkpoint_that_was_written_to_is_not_used(folder, config):
    """The error names the file and the setting; another model is not concerned."""
    model = loaded(folder, config)
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        assert "lm_head.weight" in file.keys()  # noqa: SIM118 (not a mapping)
    with path.open("r+b") as file:
        file.seek(file_bytes(folder) // 2)
        file.write(b"!")
        os.fsync(file.fileno())
    with pytest.raises(PageCorruptError, match=r"model\.safetensors.*the file was changed.*checkpoint_pages=\"copy\""):
        logits(model)


@pytest.mark.parametrize("protocol", ["safetensors", "torch"])
def test_a_state_dict_that_is_mapped_lies_in_its_file(scratch, config, protocol):
    """Also of ``torch.load(mmap=True)``."""
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    expected = weights(layers)
    if protocol == "torch":
        torch.save(layers.state_dict(), scratch / "layers.pt")
        mapped = torch.load(scratch / "layers.pt", mmap=True)
    else:
        from safetensors.torch import load_file, save_file

        save_file(layers.state_dict(), scratch / "layers.safetensors")
        mapped = load_file(scratch / "layers.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    with torch_offload.loading(config=config, ram="640KiB") as block:
        model.load_state_dict(mapped, assign=True)
        block.wrap(model)
    assert torch_offload.report().counters["left_in_file_bytes"] > 3 * 256 * 256 * 4
    del mapped
    assert_bitwise_equal(weights(model), expected)


def test_a_setting_that_does_not_exist_is_refused():
    with pytest.raises(torch_offload.ConfigError, match="checkpoint_pages: expected 'in_place' or 'copy'"):
        Config(checkpoint_pages="elsewhere")
