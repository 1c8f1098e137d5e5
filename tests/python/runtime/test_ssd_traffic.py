"""What a step of a small fixed model reads and writes, to 3 %: the one figure of speed that other programs leave alone.

Method: counters of the engine, the median of twelve steps in which a recorded step is followed, and the same uses of
pages replayed with the best eviction. A change of these figures is a change of the traffic of every training. The
budget holds many times the transfers in flight: with a quarter of these layers the traffic depends by 6 % on how busy
the machine is.
"""

import itertools
import statistics
import sys
from pathlib import Path

import pytest
import torch
from support.isolation import in_child
from torch import nn

from torch_offload import Config

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from harness.belady_check import least_traffic

pytestmark = [pytest.mark.alone, pytest.mark.any_torch]

LAYERS, WIDTH = 96, 256
FIRST_STEPS = 6
COUNTED_STEPS = 12
STATE_BYTES_PER_PARAMETER = 16


def train(scratch: str, budget_share: float, update: str) -> tuple[list[float], list[float]]:
    """Return bytes read and written per step and parameter, as counted and as the replay had to."""
    import torch_offload
    from torch_offload.runtime.process import PROCESS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    parameters = LAYERS * WIDTH * WIDTH
    budget_bytes = int(budget_share * STATE_BYTES_PER_PARAMETER * parameters)
    config = Config(ram=budget_bytes, ssd=scratch, min_paged_bytes=0, page_elements=4096, update=update)
    torch_offload.wrap(module, config=config)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    batch = torch.ones(4, WIDTH)
    counts = []
    for step in range(FIRST_STEPS + COUNTED_STEPS):
        if step == FIRST_STEPS:
            PROCESS.session.engine.start_use_log()
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report = torch_offload.report()
        counts.append((report.ssd_read_bytes, report.ssd_written_bytes))
    least = least_traffic(PROCESS.session.engine.take_use_log(), budget_bytes)
    steps = itertools.pairwise(counts[FIRST_STEPS - 1 :])
    moved = [[end - start for start, end in zip(before, after, strict=True)] for before, after in steps]
    counted = [statistics.median(counts) for counts in zip(*moved, strict=True)]
    return [count / parameters for count in counted], [count / parameters for count in least]


@pytest.mark.parametrize(
    ("budget_share", "read", "written", "over_the_least"), [(0.3, 11.79, 11.78, 1.05), (0.5, 8.63, 8.63, 1.02)]
)
def test_a_step_moves_what_it_moved_before(budget_share, read, written, over_the_least, scratch):
    """Each direction by itself, and both together against the best eviction."""
    counted, least = in_child(train, str(scratch), budget_share, "step")
    assert counted == [pytest.approx(read, rel=0.03), pytest.approx(written, rel=0.03)]
    assert sum(least) <= sum(counted) <= over_the_least * sum(least)


def test_a_step_that_updates_in_the_backward_moves_no_gradient(scratch):
    """Each moment comes and goes once. 16 bytes would do if nothing but pages took memory; 26.8 move otherwise."""
    counted, least = in_child(train, str(scratch), 0.25, "backward")
    assert counted == [pytest.approx(9.27, rel=0.03), pytest.approx(9.27, rel=0.03)]
    assert sum(least) <= sum(counted) <= 1.08 * sum(least)
