"""Traffic of steady steps between the tiers: memory over the SSD, or a GPU over memory over the SSD."""

from collections.abc import Collection
from dataclasses import dataclass

from torch_offload.planning.belady import Memory, Moved, Pages, PageUse, Use
from torch_offload.planning.page_uses import PagedStep

STEPS = 5  # the last but one is counted: the first ones fill the memory, after the last comes nothing
COUNTED = -2
RESERVED = "reserved"  # of a GPU, for what is no page
CHECKPOINT = "checkpoint"  # of a placement: pages that nothing has written since they were loaded
SPARE_SHARE = 32  # of a budget, which the engine keeps free of reads ahead
MAX_SPARE_BYTES = 16 << 20
RESERVE_SHARE = 16  # of a budget, which it keeps free for small allocations
MAX_RESERVE_BYTES = 4 << 20
READS_SHARE = 48  # of a budget, in pages that are on their way
MIN_READS = 2
MAX_READS = 8


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes of each tier; `device` is None where the module computes in the host's memory.

    What is no page has memory of its own where `reserved` is not None: what torch's allocator may take of a GPU. Pages
    of the kinds that are `staying` go no further than the host's memory.
    """

    ram: int
    device: int | None = None
    reserved: int | None = None
    staying: frozenset[str] = frozenset()

    @property
    def compute_tier(self) -> str:
        """Where the module computes."""
        return "ram" if self.device is None else "device"


@dataclass(frozen=True, kw_only=True)
class TierTraffic:
    """Traffic of one step.

    Attributes:
        ssd: By phase, between the host's memory and the SSD.
        link: By phase, between the device's memory and the host's; empty without a device.
        peak_bytes: The most that is in use, by tier.
        needed_bytes: The most that is in use at once and cannot leave, by tier with a budget.
        placement: Where the latest bytes lie when the step ends, by tier and kind of page.
    """

    ssd: list[Moved]
    link: list[Moved]
    peak_bytes: dict[str, int]
    needed_bytes: dict[str, int]
    placement: dict[str, dict[str, int]]


def traffic_of(uses: PagedStep, budgets: Budgets) -> TierTraffic:
    """Replay some steps and return what the counted one moves."""
    events = list(uses.events(steps=STEPS))
    tiers: dict[str, _Tier] = {}
    reserved: dict[str, int] = {}
    if budgets.reserved is not None:
        reserved = {RESERVED: max(event.other_bytes for event in events)}
        events = [event._replace(other_bytes=0) for event in events]
    if budgets.device is not None:
        tiers["device"] = _Tier(uses, budgets.device, events)
        events = tiers["device"].memory.asked
    host = tiers["ram"] = _Tier(uses, budgets.ram, events, staying=budgets.staying)
    peak_bytes = {name: tier.peak_bytes for name, tier in tiers.items()}
    return TierTraffic(
        ssd=host.moved,
        link=tiers["device"].moved if "device" in tiers else [],
        peak_bytes=peak_bytes | reserved | {"ssd": host.memory.peak_stored_bytes},
        needed_bytes={name: tier.memory.needed_bytes for name, tier in tiers.items()} | reserved,
        placement=_placement(uses.pages, tiers),
    )


def _kept_free(budget_bytes: int, page_bytes: int) -> int:
    """Return the bytes of a budget in which the engine keeps no pages: free ones, and reads on their way."""
    spare_bytes = min(budget_bytes // SPARE_SHARE, MAX_SPARE_BYTES)
    reads = min(max(budget_bytes // READS_SHARE // max(page_bytes, 1), MIN_READS), MAX_READS)
    return spare_bytes + _reserve_of(budget_bytes) + reads * page_bytes


def _reserve_of(budget_bytes: int) -> int:
    """Return the bytes of a budget for small allocations."""
    return min(budget_bytes // RESERVE_SHARE, MAX_RESERVE_BYTES)


class _Tier:
    """A memory after its replay: what moved in the step that counts, and what lay where when it ended."""

    def __init__(
        self, uses: PagedStep, budget_bytes: int, events: list[PageUse], *, staying: Collection[str] = ()
    ) -> None:
        kept_bytes = _kept_free(budget_bytes, max(uses.pages.size_bytes, default=0))
        self.memory = Memory(uses.pages, budget_bytes - kept_bytes, homes=uses.homes, staying=staying)
        phase_count = sum(event.use is Use.mark for event in events)
        self._budget_bytes = budget_bytes
        per_step = phase_count // STEPS
        first, end = phase_count + COUNTED * per_step, phase_count + (COUNTED + 1) * per_step
        self.moved: list[Moved] = []
        for number, moved in enumerate(self.memory.replay(events), start=1):
            if first < number <= end:
                self.moved.append(moved)
            if number == end:
                self.resident, self.stored = set(self.memory.resident), set(self.memory.stored)
                self.homes = set(self.memory.homes)

    @property
    def peak_bytes(self) -> int:
        """The most that is in use; memory that pages have to leave fills up, with pages that are free as well."""
        full_bytes = self._budget_bytes - _reserve_of(self._budget_bytes) if self.memory.has_evicted else 0
        return max(self.memory.peak_bytes, full_bytes)


def _placement(pages: Pages, tiers: dict[str, _Tier]) -> dict[str, dict[str, int]]:
    placement: dict[str, dict[str, int]] = {name: {} for name in [*tiers, "ssd"]}
    if tiers["ram"].homes:
        placement[CHECKPOINT] = {}
    for page, kind in enumerate(pages.kinds):
        home = _home(page, tiers)
        if home is not None:
            placement[home][kind] = placement[home].get(kind, 0) + pages.size_bytes[page]
    return placement


def _home(page: int, tiers: dict[str, _Tier]) -> str | None:
    """Return the highest tier that holds a page, or the checkpoint."""
    for name, tier in tiers.items():
        if page in tier.resident:
            return name
    if page in tiers["ram"].homes:
        return CHECKPOINT
    return "ssd" if page in tiers["ram"].stored else None
