"""No operator of torch's own test database sees a page that is not there: bits are equal, and nothing is refused.

Nothing faults, so no page is used without a pin, and each call leads to the operators that it leads to in memory.

Method: workers call every operator with each tensor argument paged out in turn (and all at once), forward, backward, in
place and into `out`; plain torch runs twice to find what is not deterministic in itself. A worker that dies names its
operator, and the rest goes on.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.isolation import describe_exit

WORKERS = 2
PARTS = 3  # of one test each, since one of them is enough on a newer torch
MIN_OPERATORS = 650 // PARTS
MIN_PAGED_CALLS = 8_000 // PARTS
MIN_LISTED_CALLS = 3_500 // PARTS
# What plain torch itself answers differently from call to call: memory that nobody has written.
NOT_DETERMINISTIC = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass
class ShardResult:
    tallies: list[dict[str, Any]] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    misses: int = 0
    faults: int = 0


def run_worker(shard: int, start: int, scratch: str) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    command = [sys.executable, "-m", "support.operator_sweep", "--scratch", scratch]
    command += ["--shard", str(shard), "--shards", str(PARTS * WORKERS), "--start", str(start)]
    quiet = os.environ | {"KINETO_LOG_LEVEL": "5"}
    folder = Path(__file__).parents[1]
    worker = subprocess.run(command, cwd=folder, env=quiet, capture_output=True, text=True, check=False)
    return [json.loads(line) for line in worker.stdout.splitlines()], worker


def sweep_shard(shard: int, scratch: str) -> ShardResult:
    """Sweep a shard; after a crash go on behind the operator that crashed."""
    result = ShardResult()
    start = 0
    while True:
        lines, worker = run_worker(shard, start, scratch)
        finished = [line for line in lines if "tally" in line]
        result.tallies += [line["tally"] for line in finished]
        result.misses += finished[-1]["statistics"]["misses"] if finished else 0
        result.faults += finished[-1]["statistics"]["faults"] if finished else 0
        if worker.returncode == 0:
            return result
        assert lines, worker.stderr
        result.crashes.append(f"{lines[-1]['operator']}: {describe_exit(worker.returncode)}\n{worker.stderr[-2000:]}")
        start = lines[-1]["position"] + 1


@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_with_each_argument_evicted(part, scratch, capsys):
    """Each operator's results, gradients and arguments afterwards are those of plain torch, bit for bit."""
    of_part = range(part * WORKERS, (part + 1) * WORKERS)
    with ThreadPoolExecutor(WORKERS) as pool:
        shards = list(pool.map(lambda shard: sweep_shard(shard, str(scratch)), of_part))
    tallies = [tally for shard in shards for tally in shard.tallies]
    counted = ("calls", "paged_calls", "unstable_calls", "listed_calls")
    total = {name: sum(tally[name] for tally in tallies) for name in counted}
    refused = [line for tally in tallies for line in tally["refused"]]
    misses = sum(shard.misses for shard in shards)
    unstable = {tally["operator"] for tally in tallies if tally["unstable_calls"]}
    with capsys.disabled():
        sys.stdout.write(f"\n{len(tallies)} operators, {total}, {len(refused)} typed errors, {misses} page-ins\n")
        sys.stdout.write(f"not deterministic in plain torch: {', '.join(sorted(unstable))}\n")
    assert [crash for shard in shards for crash in shard.crashes] == []
    assert [problem for tally in tallies for problem in tally["problems"]] == []
    assert len(tallies) >= MIN_OPERATORS
    assert total["paged_calls"] >= MIN_PAGED_CALLS
    assert misses >= MIN_PAGED_CALLS
    assert total["listed_calls"] >= MIN_LISTED_CALLS
    assert sum(shard.faults for shard in shards) == 0
    assert refused == []
    assert unstable <= NOT_DETERMINISTIC
