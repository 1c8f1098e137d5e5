"""Are the ranks that train together alike? What differs slows all of them down, or changes what they compute."""

import json
import logging

import torch

from torch_offload import _compat
from torch_offload.config import format_size

logger = logging.getLogger(__name__)

FACTS_KEY = "torch_offload/facts of the first rank"
DIFFERENCE_KEY = "torch_offload/first difference"


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
        own = {"rank": torch.distributed.get_rank(), **self._facts()}
        try:
            first = json.loads(_compat.first_of_ranks(FACTS_KEY, json.dumps(own)))
            difference = _difference(own, first)
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

    def _facts(self) -> dict[str, str]:
        return {
            "torch": torch.__version__,
            "torch_offload": _compat.package_version(),
            "instructions of the CPU": torch.backends.cpu.get_cpu_capability(),
            "ram": format_size(self._budget_bytes),
        }

    def _give_up(self, failure: Exception) -> None:
        """The process that had the store is gone, or there is none."""
        self._is_settled = True
        logger.info("ranks were not compared: %s", failure)


def _has_others() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _difference(own: dict[str, object], first: dict[str, object]) -> str:
    """Return a sentence, empty where both are alike."""
    named = [
        f"{name} {own[name]} and {first.get(name)}" for name in own if name != "rank" and own[name] != first.get(name)
    ]
    if not named:
        return ""
    return (
        f"ranks {own['rank']} and {first['rank']} differ: {', '.join(named)}; other versions and instructions round "
        "otherwise, and all ranks wait for the one with the least memory"
    )
