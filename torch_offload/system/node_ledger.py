"""How the processes of a launch on this machine find the ledger of the budget that they share.

Each keeps a socket without connections, whose name says which process has the ledger of which launch: the system lists
such names, and forgets one with its process. The ledger itself is a file of memory without a name, found among the open
files of any of these processes. So nothing has to be removed, however processes end.
"""

import hashlib
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch_offload.errors import OffloadError

if TYPE_CHECKING:
    from torch_offload import _C

logger = logging.getLogger(__name__)

LOCK_SECONDS = 10.0
_LOCK_SLICE_SECONDS = 0.005  # another process makes or opens the ledger meanwhile
_SYSTEM_ROOT = Path("/")


class NodeLedger:
    """This process's hold on a ledger: others find it while it is open."""

    def __init__(self, ledger: "_C.BudgetLedger", note: socket.socket) -> None:
        self.ledger = ledger
        self._note = note

    def close(self) -> None:
        """Let it be found no more. Who has a share keeps that."""
        self._note.close()


def join(launch: str, *, budget_bytes: int, rank_count: int) -> NodeLedger | None:
    """Open the ledger of a launch, or make it where this process is the first.

    Args:
        launch: The same text in all its processes on this machine, and another in another launch.
        budget_bytes: What they share, if this process is the first.
        rank_count: How many they are.

    Returns:
        The ledger; None where there can be none, which the log explains: a budget has to be divided evenly then.
    """
    from torch_offload import _C

    name = f"torch-offload-{hashlib.sha256(f'{os.geteuid()} {launch}'.encode()).hexdigest()[:32]}"
    try:
        with _bound(f"{name}-lock", seconds=LOCK_SECONDS):
            note = _bound(f"{name}-{os.getpid()}")
            try:
                path = _file_of_others(name)
                ledger = (
                    _C.BudgetLedger.make(name=name, budget_bytes=budget_bytes, rank_count=rank_count)
                    if path is None
                    else _C.BudgetLedger.open(str(path))
                )
            except BaseException:
                note.close()
                raise
    except (OSError, OffloadError) as error:
        logger.info("ram: the processes of this machine share no pool of memory: %s", error)
        return None
    return NodeLedger(ledger, note)


def _bound(name: str, *, seconds: float = 0.0) -> socket.socket:
    """Return a socket of that name, which only one process can have at a time.

    Raises:
        OSError: If another has it all the time.
    """
    until = time.monotonic() + seconds
    while True:
        note = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            note.bind(f"\0{name}")
            return note
        except OSError:
            note.close()
            if time.monotonic() >= until:
                raise
        time.sleep(_LOCK_SLICE_SECONDS)


def _file_of_others(name: str, *, root: Path = _SYSTEM_ROOT) -> Path | None:
    """Return the path of the ledger in some other process that has it, None where none has."""
    own = str(os.getpid())
    prefix = f"@{name}-"
    listed = (root / "proc/net/unix").read_text(errors="replace").splitlines()
    names = [words[-1] for line in listed if (words := line.split()) and words[-1].startswith(prefix)]
    for process in sorted({found.removeprefix(prefix) for found in names} - {own}):
        if not process.isdigit():
            continue
        try:
            for link in (root / f"proc/{process}/fd").iterdir():
                if os.readlink(link).startswith(f"/memfd:{name} "):
                    return link
        except OSError as error:  # it has ended, or is another user's
            logger.debug("process %s was not asked for the ledger: %s", process, error)
    return None
