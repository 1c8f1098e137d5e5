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
# What a fake GPU does not have: storage of sparse tensors, generators, zeros without memory, a version of CUDA.
NOT_ON_A_FAKE = (
    *("sparse_mm_reduce", "sparse_sampled_addmm"),
    *("bernoulli", "multinomial", "normal", "normal_number_mean", "randn"),
    *("sgn", "linalg_ldl_factor", "linalg_ldl_factor_ex"),
)
# What plain torch itself answers differently from call to call: memory that nobody has written.
NOT_DETERMINISTIC = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass
class ShardResult:
    tallies: list[dict[str, Any]] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    misses: int = 0
    faults: int = 0


def run_worker(
    shard: int, start: int, scratch: str, library: Path | None
) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    command = [sys.executable, "-m"]
    command += ["support.operator_sweep"] if library is None else ["support.fake_gpu", "run", str(library)]
    command += [] if library is None else ["support.operator_sweep", "--device", "cuda", "--without", *NOT_ON_A_FAKE]
    command += ["--scratch", scratch]
    command += ["--shard", str(shard), "--shards", str(PARTS * WORKERS), "--start", str(start)]
    quiet = os.environ | {"KINETO_LOG_LEVEL": "5"}
    folder = Path(__file__).parents[1]
    worker = subprocess.run(command, cwd=folder, env=quiet, capture_output=True, text=True, check=False)
    return [json.loads(line) for line in worker.stdout.splitlines()], worker


def sweep_shard(shard: int, scratch: str, library: Path | None = None) -> ShardResult:
    """Sweep a shard; after a crash go on behind the operator that crashed."""
    result = ShardResult()
    start = 0
    while True:
        lines, worker = run_worker(shard, start, scratch, library)
        finished = [line for line in lines if "tally" in line]
        result.tallies += [line["tally"] for line in finished]
        result.misses += finished[-1]["statistics"]["misses"] if finished else 0
        result.faults += finished[-1]["statistics"]["faults"] if finished else 0
        if worker.returncode == 0:
            return result
        assert lines, worker.stderr
        result.crashes.append(f"{lines[-1]['operator']}: {describe_exit(worker.returncode)}\n{worker.stderr[-2000:]}")
        start = lines[-1]["position"] + 1


@dataclass
class Sums:
    """What the shards of a part say together."""

    shards: list[ShardResult]

    @classmethod
    def of(cls, part: int, scratch: str, library: Path | None = None) -> "Sums":
        of_part = range(part * WORKERS, (part + 1) * WORKERS)
        with ThreadPoolExecutor(WORKERS) as pool:
            return cls(list(pool.map(lambda shard: sweep_shard(shard, scratch, library), of_part)))

    @property
    def tallies(self) -> list[dict[str, Any]]:
        return [tally for shard in self.shards for tally in shard.tallies]

    @property
    def unstable(self) -> set[str]:
        return {tally["operator"] for tally in self.tallies if tally["unstable_calls"]}

    def total(self, name: str) -> int:
        return sum(tally[name] for tally in self.tallies)

    def check(self) -> None:
        """Nothing differed, crashed, was refused or used without a pin; and there was something to see."""
        assert [crash for shard in self.shards for crash in shard.crashes] == []
        assert [problem for tally in self.tallies for problem in tally["problems"]] == []
        assert [line for tally in self.tallies for line in tally["refused"]] == []
        assert sum(shard.faults for shard in self.shards) == 0
        assert len(self.tallies) >= MIN_OPERATORS
        assert self.total("paged_calls") >= MIN_PAGED_CALLS
        assert sum(shard.misses for shard in self.shards) >= MIN_PAGED_CALLS

    def describe(self) -> str:
        counted = ", ".join(f"{self.total(name)} {name}" for name in ("calls", "paged_calls", "listed_calls"))
        return f"{len(self.tallies)} operators, {counted}; not deterministic by themselves: {sorted(self.unstable)}"


@pytest.mark.rotating
@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_with_each_argument_evicted(part, scratch, capsys):
    """Each operator's results, gradients and arguments afterwards are those of plain torch, bit for bit."""
    sums = Sums.of(part, str(scratch))
    with capsys.disabled():
        sys.stdout.write(f"\n{sums.describe()}\n")
    sums.check()
    assert sums.total("listed_calls") >= MIN_LISTED_CALLS
    assert sums.unstable <= NOT_DETERMINISTIC


@pytest.mark.rotating
@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_on_a_gpu(part, scratch, capsys, fake_gpu):
    """No operator asks for the address of a page without a pin, on a fake GPU where torch refuses that."""
    sums = Sums.of(part, str(scratch), fake_gpu)
    with capsys.disabled():
        sys.stdout.write(f"\n{sums.describe()}\n")
    sums.check()
