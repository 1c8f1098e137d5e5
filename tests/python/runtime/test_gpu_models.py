"""Models of transformers on a GPU, the fake one: what saves them."""

from pathlib import Path

from support.fake_gpu import in_gpu_child
from support.models import tiny_model

import torch_offload
from torch_offload import Config
from torch_offload.hooks.replaced_functions import REPLACED_FUNCTIONS, Until


def config(scratch: str) -> Config:
    """Less than the model in the GPU's pages, and less than that in memory."""
    sizes = {"gpu": 1024 << 10, "gpu_reserved": 512 << 10, "ram": 256 << 10}
    return Config(**sizes, ssd=scratch, page_elements=4096, min_paged_bytes=1024)


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
