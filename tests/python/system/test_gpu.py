"""What is chosen for a GPU, of which torch does not have to see one."""

import re
from contextlib import nullcontext

import pytest
import torch

from torch_offload import ConfigError
from torch_offload.system import gpu

MI, GI = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("gpu_bytes", "ram_bytes", "elements"),
    [
        pytest.param(13 * GI, 64 * GI, 16 * MI, id="largest"),
        pytest.param(6 * GI, 64 * GI, 8 * MI, id="fewer of the GPU"),
        pytest.param(13 * GI, 1 * GI, 4 * MI, id="fewer of the host"),
        pytest.param(128 * MI, 64 * GI, 2 * MI, id="smallest"),
        pytest.param(1, 1, 2 * MI, id="next to no memory"),
    ],
)
def test_pages_are_as_large_as_memory_holds_enough_of(gpu_bytes: int, ram_bytes: int, elements: int) -> None:
    assert gpu.page_elements(gpu_bytes, ram_bytes) == elements


@pytest.mark.parametrize(
    ("visible", "built_for", "words"),
    [
        pytest.param(None, None, "built without CUDA: install one", id="a torch without CUDA"),
        pytest.param("", "13.0", "CUDA_VISIBLE_DEVICES='' leaves none: unset it", id="none is visible"),
        pytest.param("7", "13.0", "CUDA_VISIBLE_DEVICES='7' leaves none: unset it", id="one that is not there"),
        pytest.param(None, "13.0", "older than CUDA 13.0, .* update the driver", id="an old driver, or none"),
    ],
)
def test_why_there_is_no_gpu_is_said(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, built_for: str | None, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    why_not = gpu.why_not_available()
    assert why_not is not None
    assert re.search(words, why_not)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu.why_not_available() is None


@pytest.mark.parametrize(
    ("rank", "current", "there", "is_refused"),
    [
        pytest.param(1, 0, 2, True, id="nobody chose"),
        pytest.param(1, 1, 2, False, id="chosen"),
        pytest.param(0, 0, 2, False, id="the first"),
        pytest.param(1, 0, 1, False, id="the launcher shows each one"),
    ],
)
def test_a_process_does_not_take_the_first_ones_gpu(
    monkeypatch: pytest.MonkeyPatch, rank: int, current: int, there: int, *, is_refused: bool
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    with pytest.raises(ConfigError, match=r"set_device\(1\)") if is_refused else nullcontext():
        gpu.check_choice()
