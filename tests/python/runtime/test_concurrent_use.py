"""Threads that share a wrapped module see the bits of one thread, while another one sends its pages away and back."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from support.bits import digest
from support.paging import assert_was_paged
from torch import nn

import torch_offload
from torch_offload import Config

THREADS = 4
CALLS = 25
WIDTH = 256


def test_forwards_beside_evictions_give_the_same_bits(config: Config) -> None:
    """Method: four threads call the module, a fifth evicts and prefetches it and its parts until they have ended."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).requires_grad_(False)
    batches = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(index)) for index in range(THREADS)]
    expected = [digest(module(batch)) for batch in batches]
    torch_offload.wrap(module, config=config.replace(ram="1536KiB"))
    ended = threading.Event()
    evictions = itertools.count()

    def disturb() -> None:
        while not ended.is_set():
            for target in (module, module[2], module[4].weight):
                torch_offload.evict(target)
                torch_offload.prefetch(target)
                next(evictions)

    def call(index: int) -> set[str]:
        return {digest(module(batches[index])) for _ in range(CALLS)}

    with ThreadPoolExecutor(THREADS + 1) as pool:
        disturbing = pool.submit(disturb)
        try:
            found = [work.result(timeout=120) for work in [pool.submit(call, index) for index in range(THREADS)]]
        finally:
            ended.set()
        disturbing.result(timeout=120)
    assert found == [{one} for one in expected]
    assert next(evictions) > THREADS
    assert_was_paged()
