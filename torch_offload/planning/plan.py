"""The plan of a step, an evaluation or a generation: its memory, its traffic and its time."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from torch_offload.activations.recompute import ActivationChoice
from torch_offload.config import format_size
from torch_offload.planning.page_uses import UpdateTier
from torch_offload.reporting.bottleneck import Wear, wear_of
from torch_offload.reporting.prediction import Prediction
from torch_offload.reporting.result import Result

if TYPE_CHECKING:
    from rich.table import Table

    from torch_offload.system.tables import Row

Work = Literal["train", "evaluate", "generate"]
STEP_NAMES = MappingProxyType({"train": "step", "evaluate": "evaluation", "generate": "generation"})
"""What is planned, by the kind of work."""

SECONDS_PER_DAY = 86400
DAYS_PER_YEAR = 365.25


@dataclass(frozen=True, kw_only=True)
class PlannedPhase:
    """A part of the step: a forward, a backward, a prompt, all further tokens of a generation.

    Attributes:
        name: Which one.
        seconds: How long it takes: its slowest resource.
        resource_seconds: How long each resource is busy.
    """

    name: str
    seconds: float
    resource_seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Plan(Result):
    """Predicted memory, traffic and time of a step. Tiers are ``device``, ``ram`` and ``ssd``.

    Of a real GPU the tier ``reserved`` is what torch's own allocator needs beside the pages, without what it loses to
    fragments and what libraries take for workspaces.

    Experimental: may change in a minor release.

    Attributes:
        work: What a step is: ``train``, ``evaluate`` (a forward of the batch) or ``generate`` (its prompt and all new
            tokens).
        fits: Whether training can run with these budgets. Where not, the other figures are those of a run in which
            what is missing were there.
        missing_bytes: What each tier lacks; empty where it fits.
        remedy: One thing to change; None where it fits.
        budget_bytes: What each tier may hold; of ``ssd`` what is free there.
        needed_bytes: What each tier must hold at least.
        peak_bytes: The most that each tier will hold.
        placement: Where the bytes lie when a step ends, by tier and kind of page. ``checkpoint``: loaded weights that
            nothing has written since; they take no room on ``ssd``.
        parameters: Count of all elements of parameters and buffers.
        state_bytes: Parameters, gradients and optimizer states together.
        ssd_read: Bytes read from the SSD in a step, by kind of page.
        ssd_written: Bytes written to it.
        to_device: Bytes that come to the device; empty without one.
        to_host: Bytes that leave it.
        update_tier: Where deferred updates run: ``device`` (where the module computes) or ``host``.
        activations: Which layers compute their activations again and why; None where none may.
        phases: The parts of a step, in order.
        resource_seconds: How long each resource is busy in a step.
        paging_seconds: Of the seconds of ``compute``, those in which moving pages keeps the processor from computing.
        bottleneck: The resource that a step waits for most.
        lower_bound_seconds: A step cannot be faster: the busiest resource.
        predicted_seconds: What a step will take: the sum of its phases, each as long as its slowest resource.
        timed_share: Part of the seconds of the computation that was timed here; the rest was estimated.
        tokens_per_step: Elements of the batch's first tensor of integers, else its rows; all micro-batches together.
        processes: How many share the machine; all figures are of one of them.
        break_even_tokens: Tokens per step from which on the computation takes longer than the slowest link.
        endurance_bytes: What the SSD is rated to have written in its life.
        steps_per_day: As many as will run.
    """

    work: Work
    fits: bool
    missing_bytes: dict[str, int]
    remedy: str | None
    budget_bytes: dict[str, int]
    needed_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    placement: dict[str, dict[str, int]]
    parameters: int
    state_bytes: int
    ssd_read: dict[str, int]
    ssd_written: dict[str, int]
    to_device: dict[str, int]
    to_host: dict[str, int]
    update_tier: UpdateTier
    activations: ActivationChoice | None
    phases: list[PlannedPhase]
    resource_seconds: dict[str, float]
    paging_seconds: float
    bottleneck: str
    lower_bound_seconds: float
    predicted_seconds: float
    timed_share: float
    tokens_per_step: int
    processes: int
    break_even_tokens: int
    endurance_bytes: int
    steps_per_day: float

    @property
    def tokens_per_second(self) -> float:
        """Speed: tokens trained on, looked at or generated."""
        return self.tokens_per_step / self.predicted_seconds

    @property
    def wear(self) -> Wear | None:
        """Wear of the SSD by training, None where a step takes no time."""
        written_bytes = sum(self.ssd_written.values())
        return wear_of(written_bytes, steps=1, seconds=SECONDS_PER_DAY / self.steps_per_day)

    @property
    def endurance_years(self) -> float | None:
        """For how many years of such training the SSD is rated, None where nothing is written."""
        days = None if self.wear is None else self.wear.days(self.endurance_bytes)
        return None if days is None else days / DAYS_PER_YEAR

    @property
    def prediction(self) -> Prediction:
        """What the report of a run can be held against."""
        tier = "device" if "device" in self.peak_bytes else "ram"
        return Prediction(
            seconds=self.predicted_seconds,
            computing_seconds=sum(min(phase.seconds, phase.resource_seconds["compute"]) for phase in self.phases),
            ssd_read_bytes=sum(self.ssd_read.values()),
            ssd_written_bytes=sum(self.ssd_written.values()),
            peak_bytes=self.peak_bytes[tier],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as values that JSON knows, what follows from it included."""
        derived: dict[str, Any] = {"tokens_per_second": self.tokens_per_second, "endurance_years": self.endurance_years}
        derived["prediction"] = self.prediction.model_dump()
        wear = {} if self.wear is None else {"ssd_bytes_per_day": self.wear.bytes_per_day}
        return dataclasses.asdict(self) | derived | wear

    def __rich__(self) -> "Table":
        """Return the plan as a table for rich."""
        return table_of(self)

    def __str__(self) -> str:
        """Return a summary of a few lines."""
        lines = [
            f"{STEP_NAMES[self.work]:<7} {self.predicted_seconds:.3g} s ({self.tokens_per_second:.4g} tokens/s), "
            f"at best {self.lower_bound_seconds:.3g} s; {self.bottleneck} is the bottleneck",
            f"ssd     read {format_size(sum(self.ssd_read.values()))}, "
            f"written {format_size(sum(self.ssd_written.values()))} per {STEP_NAMES[self.work]}",
            *(f"{tier:<7} peak {format_size(peak)}" for tier, peak in self.peak_bytes.items()),
        ]
        if not self.fits:
            lacks = ", ".join(f"{tier} lacks {count} bytes" for tier, count in self.missing_bytes.items())
            lines.insert(0, f"does not fit: {lacks}; {self.remedy}")
        return "\n".join(lines)


def table_of(plan: Plan) -> "Table":
    """Return the plan as a table of two columns, in sections."""
    from torch_offload.system.tables import two_columns

    title = "torch_offload plan: fits" if plan.fits else "torch_offload plan: does not fit"
    sections = (_missing_rows, _step_rows, _tier_rows, _traffic_rows, _wear_rows)
    return two_columns(title, (rows(plan) for rows in sections))


def _missing_rows(plan: Plan) -> "Iterator[Row]":
    for tier, missing_bytes in plan.missing_bytes.items():
        needed_bytes, available_bytes = plan.needed_bytes[tier], plan.budget_bytes[tier]
        lacks = f"{missing_bytes} bytes missing ({format_size(missing_bytes)})"
        yield tier, f"{lacks}: {format_size(needed_bytes)} needed, {format_size(available_bytes)} available"
    if plan.remedy is not None:
        yield "suggestion", plan.remedy


def _step_rows(plan: Plan) -> "Iterator[Row]":
    name = STEP_NAMES[plan.work]
    yield f"{name} time", f"{plan.predicted_seconds:.3g} s, at best {plan.lower_bound_seconds:.3g} s"
    yield "speed", f"{plan.tokens_per_second:.4g} tokens/s ({plan.tokens_per_step} tokens per {name})"
    if plan.processes > 1:
        yield "processes", f"{plan.processes} share this machine; memory, bytes and times are those of one"
    yield "bottleneck", plan.bottleneck
    for phase in plan.phases:
        busy = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in phase.resource_seconds.items() if seconds > 0)
        yield phase.name, f"{phase.seconds:.3g} s ({busy})"
    if plan.activations is not None:
        yield "activations", plan.activations.explanation
    if plan.work != "generate":
        yield "compute-bound above", f"{plan.break_even_tokens} tokens/{name}"
    yield "timed", f"{plan.timed_share:.0%} of the computation; the rest is estimated"


def _tier_rows(plan: Plan) -> "Iterator[Row]":
    yield "model", f"{plan.parameters / 1e6:.4g} M parameters, {format_size(plan.state_bytes)} of state"
    for tier, peak_bytes in plan.peak_bytes.items():
        of = f"{format_size(peak_bytes)} at most of {format_size(plan.budget_bytes[tier])}"
        placed = plan.placement.get(tier)
        yield tier, of if placed is None else f"{of}; between steps {_named_sizes(placed)}"
    if plan.placement.get("checkpoint"):
        yield (
            "checkpoint",
            f"{_named_sizes(plan.placement['checkpoint'])} lie in its file, until something writes to them",
        )


def _traffic_rows(plan: Plan) -> "Iterator[Row]":
    for name, by_kind in (
        ("to the device", plan.to_device),
        ("to the host", plan.to_host),
        ("SSD read", plan.ssd_read),
        ("SSD written", plan.ssd_written),
    ):
        if by_kind or name.startswith("SSD"):
            yield name, f"{format_size(sum(by_kind.values()))} a {STEP_NAMES[plan.work]} ({_named_sizes(by_kind)})"
    if plan.work == "train":
        yield "updates run on", "the host" if plan.update_tier == "host" else "what computes"


def _wear_rows(plan: Plan) -> "Iterator[Row]":
    years = plan.endurance_years
    if plan.wear is not None and years is not None:
        day = f"{plan.wear.bytes_per_day / 1e12:.3g} TB written per day ({plan.steps_per_day:.4g} steps)"
        yield "SSD wear", f"{day}; {plan.endurance_bytes / 1e12:.4g} TB last {years:.2g} years"


def _named_sizes(sizes: dict[str, int]) -> str:
    present = {name: size for name, size in sizes.items() if size > 0}
    return ", ".join(f"{name} {format_size(size)}" for name, size in present.items()) or "nothing"
