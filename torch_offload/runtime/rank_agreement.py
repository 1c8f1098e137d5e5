"""Are the ranks that train together alike? What differs slows all of them down, or changes what they compute."""

import logging

import torch
from pydantic import BaseModel

from torch_offload import _compat
from torch_offload.config import format_size

logger = logging.getLogger(__name__)

FACTS_KEY = "torch_offload/facts of the first rank"
DIFFERENCE_KEY = "torch_offload/first difference"
MAX_BUDGET_RATIO = 1.1
"""Of the budgets of two ranks: what is free changes while processes start."""


class Facts(BaseModel, frozen=True):
    """What ranks should have in common."""

    rank: int
    torch: str
    torch_offload: str
    instructions: str
    budget_bytes: int

    @classmethod
    def of_this_rank(cls, budget_bytes: int) -> "Facts":
        """Return those of this process, which is in a group."""
        return cls(
            rank=torch.distributed.get_rank(),
            torch=torch.__version__,
            torch_offload=_compat.package_version(),
            instructions=torch.backends.cpu.get_cpu_capability(),
            budget_bytes=budget_bytes,
        )

    def difference(self, other: "Facts") -> str:
        """Return a sentence, empty where both are alike."""
        pairs = {
            "torch": (self.torch, other.torch),
            "torch_offload": (self.torch_offload, other.torch_offload),
            "instructions of the CPU": (self.instructions, other.instructions),
        }
        budgets = (self.budget_bytes, other.budget_bytes)
        if max(budgets) > MAX_BUDGET_RATIO * min(budgets):
            pairs["ram"] = (format_size(self.budget_bytes), format_size(other.budget_bytes))
        named = [f"{name} {own} and {others}" for name, (own, others) in pairs.items() if own != others]
        if not named:
            return ""
        return (
            f"ranks {self.rank} and {other.rank} differ: {', '.join(named)}; other versions and instructions round "
            "otherwise, and all ranks wait for the one with the least memory"
        )


class RankAgreement:
    """Compares this rank with the one whose module was called first, once, through the store by which torch's ranks
    found one another: it sends nothing that others have to answer.

    Threads: the one that trains.
    """

    def __init__(self, *, budget_bytes: int) -> None:
        """Compare nothing yet: the ranks may not have met.

        Args:
            budget_bytes: Of this rank.
        """
        self._budget_bytes = budget_bytes
        self._has_told = False
        self._is_settled = False

    def begin_forward(self) -> None:
        """A wrapped module is called: tell the others what this rank is, and warn where the first one is not so."""
        if self._has_told or not _has_others():
            return
        self._has_told = True
        own = Facts.of_this_rank(self._budget_bytes)
        try:
            kept = _compat.first_of_ranks(FACTS_KEY, own.model_dump_json())
            difference = own.difference(Facts.model_validate_json(kept))
            if difference:
                self._is_settled = True
                logger.warning("%s", difference)
                _compat.first_of_ranks(DIFFERENCE_KEY, difference)
        except (RuntimeError, ValueError) as failure:
            self._give_up(failure)

    def end_step(self) -> None:
        """An optimizer has stepped, so all ranks have run: warn of what another one found."""
        if self._is_settled or not self._has_told:
            return
        self._is_settled = True
        try:
            difference = _compat.kept_of_ranks(DIFFERENCE_KEY)
        except (RuntimeError, ValueError) as failure:
            self._give_up(failure)
            return
        if difference is not None:
            logger.warning("%s", difference)

    def _give_up(self, failure: Exception) -> None:
        """The process that had the store is gone, or there is none; or another version of the package wrote there."""
        self._is_settled = True
        logger.info("ranks were not compared: %s", failure)


def _has_others() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
