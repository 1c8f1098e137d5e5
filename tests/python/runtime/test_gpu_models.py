"""Models of transformers on a GPU, the fake one: how they are loaded, and what saves them."""

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from support.bits import digest
from support.fake_gpu import in_gpu_child
from support.models import tiny_model

import torch_offload
from torch_offload import _C, Config
from torch_offload.hooks.replaced_functions import REPLACED_FUNCTIONS, Until
from torch_offload.runtime import preflight

DEVICE_MAPS: tuple[Any, ...] = ("auto", "sequential", "cuda", "cpu", 0, {"": "cuda:0"}, {"model": 0, "lm_head": "cpu"})


def config(scratch: str) -> Config:
    """Less than the model in the GPU's pages, and less than that in memory."""
    sizes = {"gpu": 1024 << 10, "gpu_reserved": 512 << 10, "ram": 256 << 10}
    return Config(**sizes, ssd=scratch, page_elements=4096, min_paged_bytes=1024)


def refuse_memory(*_: object) -> NoReturn:
    raise torch.OutOfMemoryError("the whole model at once")


def load_with_maps(scratch: str, folder: str) -> None:
    from transformers import AutoModelForCausalLM, modeling_utils

    expected = {name: digest(weight) for name, weight in tiny_model("llama", tied=False).named_parameters()}
    take_memory = modeling_utils.caching_allocator_warmup
    for device_map in DEVICE_MAPS:
        modeling_utils.caching_allocator_warmup = refuse_memory
        model = torch_offload.from_pretrained(
            AutoModelForCausalLM, folder, config=config(scratch), dtype=torch.float32, device_map=device_map
        )
        assert all(weight.is_cuda and _C.is_managed(weight) for weight in model.parameters() if weight.nbytes > 1024)
        assert {name: digest(weight) for name, weight in model.named_parameters()} == expected
        report = torch_offload.report()
        assert report.device.peak_bytes <= report.device.budget_bytes
        assert report.device.to_host_bytes["parameter"] > 0
        modeling_utils.caching_allocator_warmup = take_memory
        beside = AutoModelForCausalLM.from_pretrained(folder, device_map=0)
        assert all(weight.is_cuda and not _C.is_managed(weight) for weight in beside.parameters())
        torch_offload.unwrap(model)


def test_a_device_map_brings_no_whole_model(scratch, tmp_path, fake_gpu):
    """Whatever it says, the model becomes pages as it is read. What nobody pages is loaded as transformers would."""
    tiny_model("llama", tied=False).save_pretrained(tmp_path / "model")
    in_gpu_child(fake_gpu, load_with_maps, str(scratch), str(tmp_path / "model"))


def save_tied_weights(scratch: str, folder: str) -> None:
    import safetensors.torch

    model = tiny_model("llama", tied=True)
    torch_offload.wrap(model, config=config(scratch))
    for target in (model, model.model):
        torch_offload.evict(model)
        assert not torch_offload.is_resident(model.lm_head.weight)
        target.save_pretrained(Path(folder, type(target).__name__))
    safetensors.torch.save_model(model, Path(folder, "model.safetensors"))


def test_tied_weights_are_saved(scratch, tmp_path, fake_gpu):
    """Which weights are one is found out by their addresses. Files are those of a model in memory, to the byte."""
    import safetensors.torch

    plain = tiny_model("llama", tied=True)
    for folder in (tmp_path / "plain", tmp_path / "paged"):
        folder.mkdir()
    for target in (plain, plain.model):
        target.save_pretrained(tmp_path / "plain" / type(target).__name__)
    safetensors.torch.save_model(plain, tmp_path / "plain" / "model.safetensors")
    in_gpu_child(fake_gpu, save_tied_weights, str(scratch), str(tmp_path / "paged"))
    files = [path.relative_to(tmp_path / "plain") for path in (tmp_path / "plain").rglob("*.safetensors")]
    assert len(files) == 3
    for file in files:
        assert (tmp_path / "paged" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def functions_for_a_gpu() -> dict[str, object]:
    listed = [function for function in REPLACED_FUNCTIONS if function.until is Until.ENGINE_OF_GPU_CLOSES]
    return {function.path: getattr(function.resolve_owner(), function.name) for function in listed}


def replace_and_put_back(scratch: str) -> None:
    before = functions_for_a_gpu()
    model = torch_offload.wrap(tiny_model("llama", tied=True), config=config(scratch))
    during = functions_for_a_gpu()
    assert all(during[path] is not before[path] for path in before)
    torch_offload.unwrap(model)
    assert functions_for_a_gpu() == before


def test_functions_are_put_back(scratch, fake_gpu):
    """Those that are replaced for a GPU only."""
    in_gpu_child(fake_gpu, replace_and_put_back, str(scratch))


def say_where_updates_run(scratch: str, choice: str) -> tuple[str, str, list[str]]:
    """Return where they do, what the report says of it, and what was warned of."""
    model = tiny_model("llama", tied=False)
    said = []
    preflight.logger.addFilter(lambda record: said.append(record.getMessage()) or True)
    torch_offload.wrap(model, config=config(scratch).replace(optimizer_device=choice))
    report = torch_offload.report()
    return report.device.updates_on, f"{report}", [line for line in said if line.startswith("optimizer_device")]


@pytest.mark.parametrize(("choice", "chosen"), [("auto", "cpu"), ("cpu", "cpu"), ("gpu", "gpu")])
def test_other_bits_are_no_secret(scratch, fake_gpu, choice, chosen):
    """Updates on the CPU have other kernels than those of a run in the GPU: warned of unless asked for, reported."""
    where, said, warned = in_gpu_child(fake_gpu, say_where_updates_run, str(scratch), choice)
    assert where == chosen
    assert f", updates on the {chosen.upper()})" in said
    assert len(warned) == (choice == "auto")
