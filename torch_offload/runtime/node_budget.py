"""The memory that the processes of a launch on this machine share: each has a part, and what others do not need."""

from dataclasses import dataclass

from torch_offload.config import Config
from torch_offload.system import environment, node_ledger
from torch_offload.system.node_ledger import NodeLedger

GUARANTEED_SHARE = 4
"""Of a part, where it is not known what a process needs: the rest of it the others give back when it is wanted."""


@dataclass(frozen=True)
class NodeBudget:
    """A budget of this machine, and what one of its processes needs of it.

    Attributes:
        launch: The same in all its processes.
        budget_bytes: Of all together.
        rank_count: How many they are.
        needed_bytes: What this process cannot work without; 0: that is not known.
    """

    launch: str
    budget_bytes: int
    rank_count: int
    needed_bytes: int = 0

    def join(self) -> "JoinedBudget | None":
        """Take part in it. None where there is no ledger: each process then keeps to its part."""
        found = node_ledger.join(self.launch, budget_bytes=self.budget_bytes, rank_count=self.rank_count)
        return None if found is None else JoinedBudget(found, self.needed_bytes)


class JoinedBudget:
    """The budget of a machine, for one of its processes.

    Attributes:
        ledger: Through which its engine takes memory and gives it back.
        budget_bytes: What it can have where the others need nothing.
        part_bytes: What it can have whatever the others do.
        guaranteed_bytes: What it always has.
    """

    def __init__(self, found: NodeLedger, needed_bytes: int) -> None:
        self._found = found
        self.ledger = found.ledger
        self.budget_bytes = found.ledger.budget_bytes
        self.part_bytes = found.ledger.equal_bytes
        self.guaranteed_bytes = min(self.part_bytes, needed_bytes or self.part_bytes // GUARANTEED_SHARE)

    def close(self) -> None:
        """Let later processes find it through others. What the engine has it keeps."""
        self._found.close()


def of_machine(config: Config, *, launch: str | None, needed_bytes: int = 0) -> NodeBudget | None:
    """Return the budget of which a process has a part.

    Args:
        config: Of the process, with its part as ``ram``.
        launch: What its processes here have in common; None: nothing is known that they have.
        needed_bytes: What this one cannot work without; 0: that is not known.

    Returns:
        None for a process that trains alone, and for one that computes on a GPU.
    """
    rank_count = environment.process_count()
    if rank_count == 1 or launch is None or config.ram is None or config.gpu is not None:
        return None
    return NodeBudget(launch, config.ram * rank_count, rank_count, needed_bytes)


def of_usual_budget(asked: Config, decided: Config, *, needed_bytes: int = 0) -> NodeBudget | None:
    """Return the budget of the machine for a call that names none: one that is given holds for the process alone."""
    rank = environment.rank()
    if asked.ram is not None or rank is None:
        return None
    return of_machine(decided, launch=rank.launch, needed_bytes=needed_bytes)
