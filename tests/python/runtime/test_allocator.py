"""Torch's allocator under a budget without a module: what autograd saves leaves memory, what does not fit is refused.

Method: plain functions on plain tensors, beside the same without it, bit for bit, with the engine's counters.
"""

import threading
from typing import Any

import pytest
import torch
from support.bits import digest
from support.fake_gpu import in_gpu_child
from support.isolation import in_child
from torch import nn

import torch_offload
from torch_offload import _C, Config, ConfigError, OffloadError, OutOfTierMemory

WIDTH = 256
ROWS = 512
LAYERS = 12
SAVED_BYTES = LAYERS * ROWS * WIDTH * 4
Results = tuple[list[str], dict[str, str]]


def train(place: str = "cpu") -> Results:
    """Return every loss of some steps of a function without a module, and hashes of its weights."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator).mul_(WIDTH**-0.5).to(place) for _ in range(LAYERS)]
    batch = torch.randn(ROWS, WIDTH, generator=generator).to(place)
    for weight in weights:
        weight.requires_grad_()
    losses = []
    for _ in range(3):
        value = batch
        for weight in weights:
            value = torch.tanh(value @ weight)
        loss = value.square().mean()
        loss.backward()
        losses.append(loss.item().hex())
        with torch.no_grad():
            for weight in weights:
                weight -= 0.1 * weight.grad
                weight.grad = None
    return losses, {str(number): digest(weight) for number, weight in enumerate(weights)}


def config_of(scratch: str, **settings: Any) -> Config:
    """Room for the weights, their gradients and half of what is saved."""
    defaults = {"ram": 2 * LAYERS * WIDTH * WIDTH * 4 + SAVED_BYTES // 2, "ssd": scratch}
    return Config(**{**defaults, "min_paged_bytes": 4096, "page_elements": 8192, **settings})


def train_both(scratch: str) -> tuple[Results, Results, torch_offload.Report]:
    plain = train()
    with torch_offload.register_allocator(config=config_of(scratch)):
        paged = train()
        report = torch_offload.report()
    return plain, paged, report


def test_what_a_function_saves_leaves_memory(scratch):
    """With the bits of the run without it, within the budget."""
    plain, paged, report = in_child(train_both, str(scratch))
    assert paged == plain
    assert report.counters["saved_bytes"] > 0
    assert report.written_bytes["activation"] > SAVED_BYTES // 4
    assert report.read_bytes["activation"] > SAVED_BYTES // 4
    assert report.host_peak_bytes <= report.budget_bytes


def train_on_a_gpu(scratch: str) -> tuple[Results, Results, torch_offload.Report, list[float]]:
    plain = train("cuda")
    caps: list[float] = []
    torch.cuda.set_per_process_memory_fraction = lambda fraction, *_: caps.append(fraction)
    sizes = {"gpu": (4 << 20) + SAVED_BYTES // 4, "gpu_reserved": 4 << 20, "ram": SAVED_BYTES // 4}
    with torch_offload.register_allocator(config=config_of(scratch, **sizes)):
        paged = train("cuda")
        report = torch_offload.report()
    return plain, paged, report, caps


def test_on_a_gpu_torchs_own_stays(scratch, fake_gpu):
    """It is capped; what is saved goes to the host and to the disk, with the same bits."""
    plain, paged, report, caps = in_gpu_child(fake_gpu, train_on_a_gpu, str(scratch))
    assert paged == plain
    assert report.device.to_host_bytes["activation"] > SAVED_BYTES // 4
    assert report.device.to_device_bytes["activation"] > SAVED_BYTES // 4
    assert report.written_bytes["activation"] > 0
    assert report.device.peak_bytes <= report.device.budget_bytes
    assert caps == [(4 << 20) / torch_fake_bytes(), 1.0]


def torch_fake_bytes() -> int:
    from support.fake_gpu import MEMORY_BYTES

    return MEMORY_BYTES


def test_what_the_program_holds_is_no_page(config):
    """The third of three tensors that do not fit is refused; once one has gone there is room. Afterwards there is no
    budget, and what was made stays.
    """
    with torch_offload.register_allocator(config=config) as registered:
        size = registered.config.ram // 10
        held = [torch.full((size,), 1.0) for _ in range(2)]
        with pytest.raises(OutOfTierMemory, match="host memory tier: out of memory"):
            torch.full((size,), 2.0)
        del held[0]
        held.append(torch.full((size,), 2.0))
        assert torch_offload.report().host_bytes["temporaries"] >= 8 * size
    assert [float(tensor.sum()) for tensor in held] == [size, 2 * size]
    assert torch.full((4 * size,), 3.0).sum() == 12 * size


def test_kept_activations_stay_in_memory(config):
    with torch_offload.register_allocator(config=config.replace(activations="keep")):
        weight = torch.randn(256, 256, requires_grad=True)
        (torch.tanh(torch.randn(256, 256) @ weight) ** 2).sum().backward()
        assert torch_offload.report().counters["saved_bytes"] == 0


def test_modules_join_it(config):
    """In either order of their ends; the engine goes with the last."""
    registered = torch_offload.register_allocator(config=config)
    module = torch_offload.wrap(nn.Linear(128, 128))
    with torch_offload.register_allocator() as inner:
        assert inner.config == registered.config
        module(torch.randn(256, 128)).square().sum().backward()
    registered.close()
    registered.close()
    assert _C.engine_of(module.weight) is not None
    torch_offload.unwrap(module)
    with torch_offload.register_allocator(config=config.replace(ram="16MiB")) as other:
        assert other.config.ram == 16 << 20


def test_another_budget_is_refused_while_it_lasts(config):
    with torch_offload.register_allocator(config=config):
        with pytest.raises(ConfigError, match="the engine runs with ram=8388608, not 16777216"):
            torch_offload.register_allocator(config=config.replace(ram="16MiB"))
        with pytest.raises(ConfigError, match=r"register_allocator\(\) has no argument 'device'"):
            torch_offload.register_allocator(device="cpu")


def test_it_is_closed_in_its_thread(config):
    """Whose hooks it has; from another one they could not be taken away."""
    said: list[str] = []

    def close() -> None:
        try:
            registered.close()
        except OffloadError as error:
            said.append(str(error))

    with torch_offload.register_allocator(config=config) as registered:
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
    assert said == ["register_allocator: close it in the thread that registered it"]
