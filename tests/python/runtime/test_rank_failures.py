"""One rank fails: the others end soon, each with the text of what ended the first.

Method: processes as a launcher starts them, the store in one of them or in the test.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "scripts" / "failing_rank.py"
RANKS = 3
PATIENCE_SECONDS = 120


def run_rank(rank: int, port: int, folder: str, failing: int) -> subprocess.CompletedProcess[str]:
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    command = [sys.executable, str(SCRIPT), folder, str(failing)]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


@pytest.mark.parametrize("failing", [0, 2])
def test_the_others_say_what_ended_the_first(scratch, failing):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(RANKS) as pool:
        ended = list(pool.map(lambda rank: run_rank(rank, store.port, str(scratch), failing), range(RANKS)))
    for rank, process in enumerate(ended):
        assert process.returncode == 1, process.stderr
        said = [line for line in process.stderr.splitlines() if line.startswith("torch_offload: another rank")]
        if rank == failing:
            assert "OutOfTierMemory" in process.stderr
            assert said == []
        else:
            (line,) = said
            assert f"had failed before. rank {failing}: OutOfTierMemory: host memory tier: out of memory." in line
