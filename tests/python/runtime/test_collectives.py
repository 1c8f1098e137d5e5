"""Collectives of gloo on paged tensors: pages stay until the collective has ended, and every bit is plain torch's.

Method: two processes; the first begins, has what it uses sent away, and only then does the other begin. gloo's threads
use bare addresses in system calls, which fail where a page is absent and end the process.
"""

import contextlib
import os
import time
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from support import collectives
from support.bits import digest
from support.collectives import BUDGET_BYTES, ELEMENTS, MANY, RANKS, Outcome, in_each_rank, join_group, run_ranks
from support.isolation import in_child
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_offload
from torch_offload import Config
from torch_offload.runtime.process import PROCESS

BYTES = 4 * ELEMENTS
UNDER_WAY = [
    collectives.all_reduce,
    collectives.broadcast,
    collectives.all_gather,
    collectives.reduce_scatter,
    collectives.scatter,
    collectives.messages,
]


def check(outcomes: list[Outcome]) -> None:
    """Equal bits in every process, and pages that were away, read by no fault."""
    assert len(outcomes) == RANKS
    for outcome in outcomes:
        assert outcome.plain
        assert outcome.paged == outcome.plain
        assert outcome.statistics["faults"] == 0
        assert outcome.statistics["misses"] > 0


@pytest.mark.parametrize("program", UNDER_WAY, ids=lambda program: program.__name__)
def test_pages_stay_until_the_work_has_completed(scratch, program):
    """And may leave afterwards."""
    outcomes = run_ranks(program, scratch)
    check(outcomes)
    first, _ = outcomes
    assert first.stayed
    assert all(stayed >= BYTES for stayed in first.stayed), first.stayed
    assert all(outcome.stayed_afterwards == [0] for outcome in outcomes)


@pytest.mark.parametrize(
    "program", [collectives.functional_all_reduce, collectives.synchronous], ids=lambda program: program.__name__
)
def test_functional_and_synchronous_collectives(scratch, program):
    """Their inputs are used, or copied, before the call returns, or stay until it may be waited for."""
    check(run_ranks(program, scratch))


def test_more_at_once_than_the_budget_holds(scratch):
    """The next waits until one under way has ended."""
    assert MANY * BYTES > 2 * BUDGET_BYTES
    outcomes = run_ranks(collectives.many_at_once, scratch)
    check(outcomes)
    for outcome in outcomes:
        assert outcome.statistics["evictions"] > 0
        assert outcome.statistics["memory"]["peak_bytes"] <= BUDGET_BYTES


LAYERS, WIDTH = 24, 256
MODEL_BYTES = LAYERS * WIDTH * WIDTH * 4
"""Of the gradients, too, and of the buckets in which DistributedDataParallel reduces them."""
DATA_PARALLEL_STEPS = 3


@dataclass(frozen=True)
class DataParallel:
    """How DistributedDataParallel is used."""

    options: tuple[tuple[str, bool], ...] = ()
    micro_steps: int = 1
    has_hook: bool = False

    @property
    def budget_bytes(self) -> int:
        """The first step reduces all gradients at once, unless some may be unused, and a hook copies them: of a rank's
        state 30 %, 20 % and 45 %.
        """
        is_in_parts = dict(self.options).get("find_unused_parameters", False)
        return MODEL_BYTES * (4 if is_in_parts else 9 if self.has_hook else 6) // 5


def train_data_parallel(
    rank: int, case: DataParallel, folder: str
) -> tuple[list[list[str]], dict[str, int], tuple[int, int]]:
    """Train in memory and paged. Ranks begin with weights of their own: all have the first one's then."""
    join_group(rank, folder)
    trained = []
    for is_paged in (False, True):
        torch.manual_seed(rank)
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        if is_paged:
            config = Config(ram=case.budget_bytes, ssd=folder, min_paged_bytes=1 << 14, page_elements=1 << 14)
            torch_offload.wrap(module, config=config)
        parallel = DistributedDataParallel(module, bucket_cap_mb=1, **dict(case.options))
        if case.has_hook:
            parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
        optimizer = torch.optim.AdamW(parallel.parameters(), fused=True)
        for step in range(DATA_PARALLEL_STEPS):
            for micro_step in range(case.micro_steps):
                with contextlib.nullcontext() if micro_step + 1 == case.micro_steps else parallel.no_sync():
                    parallel(torch.full((4, WIDTH), 0.5 + step + rank + micro_step)).square().mean().backward()
            nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        trained.append([digest(parameter) for parameter in module.parameters()])
    report = torch_offload.report()
    figures = {
        "faults": report.faults,
        "norms": PROCESS.session.statistics()["norms_from_cache"],
        "read_bytes": report.ssd_read_bytes,
        "peak_bytes": report.host_peak_bytes,
    }
    engine = PROCESS.session.engine
    torch_offload.unwrap(module)
    left = engine.managed_count()
    parallel(torch.ones(4, WIDTH)).square().mean().backward()
    is_trained = int(all(parameter.grad is not None for parameter in module.parameters()))
    del parallel  # torch 2.13 may wait for ever where its reducer is the last to have the group
    dist.destroy_process_group()
    return trained, figures, (left, is_trained)


@pytest.mark.parametrize(
    "case",
    [
        DataParallel(),
        DataParallel((("gradient_as_bucket_view", True),)),
        DataParallel((("static_graph", True),)),
        DataParallel((("find_unused_parameters", True),), micro_steps=2),
        DataParallel(has_hook=True),
    ],
    ids=["usual", "views of buckets", "static graph", "accumulation", "hook"],
)
def test_data_parallel_training_in_less_than_gradients_and_buckets(scratch, case):
    """DistributedDataParallel is made without the model beside a copy of it in memory, and its buckets are pages: it
    trains with equal bits where gradients and buckets do not fit at once, and goes on when nothing is paged any more.

    The norms are those of the reduced gradients, kept as these are copied over the process's own. Views of buckets have
    none.
    """
    outcomes = in_each_rank(train_data_parallel, case, str(scratch))
    (weights, _), _, _ = outcomes[0]
    has_views = dict(case.options).get("gradient_as_bucket_view", False)
    for trained, figures, after in outcomes:
        assert trained == [weights, weights]
        assert figures["faults"] == 0
        assert figures["read_bytes"] > MODEL_BYTES
        assert figures["norms"] == (0 if has_views else LAYERS * DATA_PARALLEL_STEPS)
        assert figures["peak_bytes"] <= case.budget_bytes
        assert after == (0, True)


def waited(rank: int, folder: str) -> list[float]:
    """Return the seconds for which this rank had waited for the other: after forwards, a collective, an own wait."""
    join_group(rank, folder)
    module = nn.Linear(WIDTH, WIDTH)
    torch_offload.wrap(module, config=Config(ram="8MiB", ssd=folder, min_paged_bytes=0, page_elements=1 << 14))
    found = []

    def note() -> None:
        found.append(torch_offload.report().stall_seconds["network"])

    module(torch.ones(1, WIDTH))
    note()
    dist.all_reduce(torch.ones(1))
    note()
    dist.all_reduce(module.weight.detach(), async_op=True).wait()
    note()
    dist.destroy_process_group()
    return found


def test_waits_for_other_ranks_are_stalls_of_their_own(scratch):
    for before, after_collective, after_wait in in_each_rank(waited, str(scratch)):
        assert before == 0
        assert 0 < after_collective < after_wait


LATE_SECONDS = 2.0


def waited_in_backward(rank: int, folder: str) -> float:
    """Return the seconds for which this rank waited in backwards, which the first rank begins late."""
    join_group(rank, folder)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    torch_offload.wrap(module, config=Config(ram=MODEL_BYTES * 3, ssd=folder, min_paged_bytes=1 << 14))
    parallel = DistributedDataParallel(module, bucket_cap_mb=1)
    before = torch_offload.report().stall_seconds["network"]
    for _ in range(2):
        loss = parallel(torch.ones(1, WIDTH)).sum()
        if rank == 0:
            time.sleep(LATE_SECONDS)  # what is measured: how late this rank is; nothing has to happen meanwhile
        loss.backward()
    waited_seconds = torch_offload.report().stall_seconds["network"] - before
    torch_offload.unwrap(module)
    del parallel
    dist.destroy_process_group()
    return waited_seconds


def test_data_parallel_waits_at_the_end_of_a_backward_are_seen(scratch):
    """Who comes first waits for who comes late: torch does so in C++, out of a callback."""
    late, early = in_each_rank(waited_in_backward, str(scratch))
    assert late < early
    assert early > LATE_SECONDS


def train_sharded(folder: str, is_sharded_first: bool) -> list[str]:
    """Shard and wrap a module whose shards stay in memory, in a group of one process, train it for three steps and
    return what was warned of.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{folder}/group", rank=0, world_size=1)
    config = Config(ram="8MiB", ssd=folder, min_paged_bytes=0, page_elements=4096, update="backward")
    module = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64)))
    if is_sharded_first:
        fully_shard(module[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_offload.wrap(module, config=config)
        if not is_sharded_first:
            fully_shard(module[1])
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        for _ in range(3):
            module(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {label for label, _ in PROCESS.session.tensors()} == {"0.weight", "0.bias"}
    dist.destroy_process_group()
    return [str(warning.message) for warning in caught if "torch_offload" in str(warning.message)]


@pytest.mark.parametrize("is_sharded_first", [True, False])
def test_shards_that_stay_in_memory_are_named_once(scratch, is_sharded_first):
    """An update in the backward does not know of them; the other parameters are paged."""
    said = in_child(train_sharded, str(scratch), is_sharded_first)
    assert said == [
        "torch_offload leaves these tensors in memory: 2 parameters are sharded by fully_shard, which "
        'update="backward" does not know'
    ]
