"""Calls of a GPU's driver that fail, one after the other: typed errors, nothing hangs, nothing is wrong or lost."""

import ctypes
import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.fake_gpu import driver, in_gpu_child
from torch import nn

import torch_offload
from torch_offload import _C, Config, OffloadError, TierIOError

LAYERS = 12
FAILURES_EACH = 250
# What a page's way takes, and what tells the end of kernels.
SYMBOLS = (
    *("cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"),
    *("cuEventRecord", "cuEventQuery", "cuEventSynchronize"),
)
# What memory and streams take once.
FIRST_SYMBOLS = (
    *("cuMemAddressReserve", "cuMemCreate", "cuMemHostRegister_v2", "cuStreamCreateWithPriority", "cuEventCreate"),
    *("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuMemGetAllocationGranularity"),
)
# Copies are slower, kernels are waited for.
DONE_WITHOUT = ("cuMemHostRegister_v2", "cuEventCreate")
PASSING_RESULTS = {"invalid value": 1, "out of memory": 2, "not permitted": 800, "captured elsewhere": 900}
LOSING_RESULTS = {"ECC": 214, "illegal address": 700, "launch failed": 719}


def config(scratch: str) -> Config:
    """A third of the model in the GPU, a third in memory."""
    sizes = {"gpu": 320 << 10, "gpu_reserved": 64 << 10, "ram": 256 << 10}
    return Config(**sizes, ssd=scratch, page_elements=4096, min_paged_bytes=1024)


class Model:
    """Layers whose weights are known, and what is done with them at random."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.choice = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(LAYERS))
        self.known = [layer.weight.detach().clone() for layer in self.layers]

    @classmethod
    def paged(cls, scratch: str, seed: int) -> "Model":
        model = cls(seed)
        torch_offload.wrap(model.layers, config=config(scratch))
        return model

    def use(self) -> None:
        """Read, write, send away or fetch a layer. A write that raised has happened or has not."""
        index = self.choice.randrange(LAYERS)
        weight = self.layers[index].weight
        match self.choice.randrange(4):
            case 0:
                assert same_bits(weight.detach().cpu(), self.known[index])
            case 1:
                self.write(index)
            case 2:
                torch_offload.evict(weight)
            case 3:
                torch_offload.prefetch(weight)

    def write(self, index: int) -> None:
        weight = self.layers[index].weight
        before, after = self.known[index], self.known[index] + 1
        try:
            with torch.no_grad():
                weight += 1
        except OffloadError:
            driver().fake_gpu_forgive()
            found = weight.detach().cpu()
            assert same_bits(found, before) or same_bits(found, after)
            self.known[index] = found
            raise
        self.known[index] = after

    def unwrap(self) -> None:
        """A write that failed earlier, and was tried again since, is told of once."""
        with suppress(OffloadError):
            torch_offload.flush()
        torch_offload.unwrap(self.layers)

    def check(self) -> None:
        for layer, known in zip(self.layers, self.known, strict=True):
            assert same_bits(layer.weight.detach().cpu(), known)


def fail(symbol: str, result: int, skip: int, *, loses_device: bool = False) -> None:
    ask: Any = driver().fake_gpu_fail
    ask(ctypes.c_char_p(symbol.encode()), result, ctypes.c_size_t(skip), loses_device)


def fail_often(scratch: str, symbol: str, seed: int) -> tuple[int, int]:
    """Return how many failures were met, and how many of them somebody was told of."""
    model = Model.paged(scratch, seed)
    told = 0
    before = int(driver().fake_gpu_calls(ctypes.c_char_p(symbol.encode())))
    for number in range(FAILURES_EACH):
        fail(symbol, model.choice.choice(list(PASSING_RESULTS.values())), number % 3)
        for _ in range(4):
            try:
                model.use()
            except OffloadError:
                told += 1
        driver().fake_gpu_forgive()
    model.check()
    model.unwrap()
    model.check()
    return int(driver().fake_gpu_calls(ctypes.c_char_p(symbol.encode()))) - before, told


def fail_at_first(scratch: str, symbol: str) -> int:
    """Return how many calls that fail somebody was told of."""
    told = 0
    for number in range(24):
        result = list(PASSING_RESULTS.values())[number % 4]
        fail(symbol, result, number // 4)
        model = Model(number)
        try:
            torch_offload.wrap(model.layers, config=config(scratch))
            for _ in range(20):
                model.use()
        except OffloadError:
            told += 1
        driver().fake_gpu_forgive()
        if _C.is_managed(model.layers[0].weight):
            model.check()
            model.unwrap()
        model.check()
    return told


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_call_that_fails_is_said_and_costs_nothing(scratch, fake_gpu, symbol):
    """Method: one of the next calls fails, 250 times, while layers are read, written, sent away and fetched at random;
    every byte is that of plain torch throughout, and unwrapping brings all of it back."""
    calls, _ = in_gpu_child(fake_gpu, fail_often, str(scratch), symbol, SYMBOLS.index(symbol), timeout_seconds=120)
    assert calls > 0


@pytest.mark.parametrize("symbol", FIRST_SYMBOLS)
def test_a_call_that_fails_at_first_is_said(scratch, fake_gpu, symbol):
    """Method: one of the calls fails while a module is wrapped or used at first; it is as it was, or paged."""
    told = in_gpu_child(fake_gpu, fail_at_first, str(scratch), symbol, timeout_seconds=120)
    assert told > 0 or symbol in DONE_WITHOUT


def lose(scratch: str, symbol: str, result: int, seed: int) -> bool:
    model = Model.paged(scratch, seed)
    fail(symbol, result, seed % 7, loses_device=True)
    is_lost = False
    for _ in range(200):
        try:
            model.use()
        except TierIOError:
            is_lost = True
            break
    if not is_lost:
        return False
    with pytest.raises(TierIOError, match="is lost"):
        model.check()
    with suppress(TierIOError):  # raised if anything was only on the device
        torch_offload.unwrap(model.layers)
    assert any(not layer.weight.is_cuda for layer in model.layers)
    for layer, known in zip(model.layers, model.known, strict=True):
        assert layer.weight.is_cuda or same_bits(layer.weight, known)
    return True


@pytest.mark.rotating
@pytest.mark.parametrize("symbol", SYMBOLS)
@pytest.mark.parametrize("result", LOSING_RESULTS.values(), ids=LOSING_RESULTS.keys())
def test_a_device_that_is_lost_there_ends_quietly(scratch, fake_gpu, symbol, result):
    """Said at the access that meets it and at every later one; what is intact below comes back, equal."""
    was_met = in_gpu_child(fake_gpu, lose, str(scratch), symbol, result, result + len(symbol), timeout_seconds=60)
    assert was_met
