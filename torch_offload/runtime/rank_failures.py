"""Why the first rank ended, told by the others: of a rank that failed they only see that a connection was closed."""

import atexit
import logging
import sys

import torch

from torch_offload import _compat
from torch_offload.system.terminal import one_line, tell

logger = logging.getLogger(__name__)

KEY = "torch_offload/first failure"
MAX_CHARACTERS = 2000


def install() -> None:
    """When this process ends by an exception that nobody caught, tell the other ranks, or say what they told.

    What is told goes through the store by which torch's ranks found one another. Processes of one group only. Safe to
    call twice.
    """
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)  # set where Python shows a traceback because nobody caught it
    if error is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    own = f"rank {torch.distributed.get_rank()}: {type(error).__name__}: {error}"[:MAX_CHARACTERS]
    try:
        first = _compat.first_of_ranks(KEY, own)
    except (RuntimeError, ValueError) as failure:  # the process that had the store is gone
        logger.info("what ended this rank was not told to the others: %s", failure)
        return
    if first != own:
        tell(f"torch_offload: another rank had failed before. {one_line(first)}", sys.stderr)
