"""A budget is a promise to the system: a process limited to its base, its budget and 2 % is never killed.

Base is what the same script peaks at with a model of a few kilobytes, wrapped alike; the limit is set by a memory
cgroup where the machine lets us (support/memory_limits.py says what else). Plain torch under the same limit is killed:
the limit is real.
"""

import json
import sys
from pathlib import Path

import pytest
from support.memory_limits import UNLIMITED, LimitedRun, run_limited
from support.models import state_bytes, tiny_model

pytestmark = [pytest.mark.alone, pytest.mark.any_torch]

BUDGET_SHARE = 0.30
SLACK = 1.02
SMALLEST = (16, 1)  # hidden, layers
MIN_BUDGET_BYTES = 8 << 20
SIZES = [(256, 8), (512, 8)]


def train(scratch: Path, size: tuple[int, int], budget_bytes: int, limit_bytes: int = UNLIMITED) -> LimitedRun:
    command = [sys.executable, "-m", "support.memory_worker", "--scratch", str(scratch)]
    command += ["--hidden", str(size[0]), "--layers", str(size[1]), "--budget-bytes", str(budget_bytes)]
    return run_limited(command, limit_bytes, cwd=Path(__file__).parents[1])


def measure_base_bytes(scratch: Path) -> int:
    """Peak of the script with next to no model. The first run also pays for files that nobody had read yet."""
    runs = [train(scratch, SMALLEST, MIN_BUDGET_BYTES) for _ in range(2)]
    assert all(run.status == 0 for run in runs), runs[0].errors
    return min(run.peak_bytes for run in runs)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"hidden{size[0]}x{size[1]}")
def test_limited_process_is_never_killed(size, scratch, capsys):
    """Paged, it ends, with the losses and weights of plain training without a limit; plain torch is killed."""
    state = state_bytes(tiny_model("llama", tied=True, hidden=size[0], layers=size[1]), moments=2)
    budget = int(BUDGET_SHARE * state)
    base = measure_base_bytes(scratch)
    limit = int((base + budget) * SLACK)
    paged = train(scratch, size, budget, limit)
    figures = {"base": base, "state": state, "budget": budget, "limit": limit, "peak": paged.peak_bytes}
    with capsys.disabled():
        megabytes = ", ".join(f"{name} {count / 1e6:.1f} MB" for name, count in figures.items())
        sys.stdout.write(f"\n{paged.kind}: {megabytes}\n")
    assert paged.status == 0, paged.errors[-3000:]
    engine = json.loads(paged.output)
    assert engine.pop("peak_bytes") <= budget
    assert engine.pop("ssd_read_bytes") > 0
    assert len(set(engine["losses"])) > 1
    assert engine == json.loads(train(scratch, size, 0).output)
    plain = train(scratch, size, 0, limit)
    assert plain.was_killed
    assert plain.kind == paged.kind
    if not paged.kind.startswith("cgroup"):
        pytest.skip(f"a {paged.kind} watched the limit: no memory cgroup can be made here, which would enforce it")
