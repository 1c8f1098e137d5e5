"""How much computing a processor loses to the pages that it moves: measured in a process of its own."""

import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from torch_offload.errors import OffloadError

TIMEOUT_SECONDS = 300


class PagingCost(BaseModel):
    """Seconds of computing that are lost to a byte. Frozen.

    Attributes:
        read: That a page brings from the SSD.
        written: That it takes there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    read: float
    written: float


def measure(directory: Path) -> PagingCost:
    """Measure in a process of its own, about 20 s.

    Raises:
        OffloadError: If it fails. The message ends with what it said.
    """
    command = [sys.executable, "-m", "torch_offload.diagnostics.paging_turns", str(directory)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)
        return PagingCost.model_validate_json(ended.stdout)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip()[-1000:]
        raise OffloadError(
            f"measuring what paging costs failed with exit status {error.returncode}: {reason}"
        ) from None
    except (subprocess.TimeoutExpired, ValidationError) as error:
        raise OffloadError(f"measuring what paging costs failed: {error}") from None
