"""What a search found: the best way to train a step, all others with their figures, and why."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch_offload.config import format_size
from torch_offload.planning.plan import Plan
from torch_offload.planning.setups import Setup
from torch_offload.reporting.result import Result

if TYPE_CHECKING:
    from rich.table import Table

Replay = Literal["exact", "coarse", "none"]
SHOWN = 10  # rows of a table


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One setup, and what a step of it would take.

    Attributes:
        setup: What it is.
        lower_bound_seconds: No replay of it can be faster.
        replay: How its plan was made: with the pages of a run, with larger ones, or not at all, since it could not have
            been the best.
        plan: None where there was no replay.
        operations: Floating-point operations of a step.
    """

    setup: Setup
    lower_bound_seconds: float
    replay: Replay = "none"
    plan: Plan | None = None
    operations: int = 0

    @property
    def seconds(self) -> float:
        """Of a step; where it was not replayed, at least."""
        return self.lower_bound_seconds if self.plan is None else self.plan.predicted_seconds

    @property
    def fits(self) -> bool:
        """Whether it can run; what was not replayed counts as such."""
        return self.plan is None or self.plan.fits

    @property
    def ssd_bytes(self) -> int:
        """Read and written in a step; 0 where it was not replayed."""
        return 0 if self.plan is None else sum(self.plan.ssd_read.values()) + sum(self.plan.ssd_written.values())

    @property
    def missing_bytes(self) -> int:
        """What the tier lacks that lacks most."""
        return 0 if self.plan is None else max(self.plan.missing_bytes.values(), default=0)

    @property
    def peak_bytes(self) -> int:
        """The most memory that a step has where the module computes; 0 where it was not replayed."""
        if self.plan is None:
            return 0
        return self.plan.peak_bytes.get("device", self.plan.peak_bytes["ram"])

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows."""
        plan = self.plan
        figures: dict[str, Any] = {}
        if plan is not None:
            figures |= {"bottleneck": plan.bottleneck, "missing_bytes": plan.missing_bytes}
            figures |= {"resource_seconds": plan.resource_seconds, "tokens_per_second": plan.tokens_per_second}
            figures |= {"ssd_read_bytes": sum(plan.ssd_read.values())}
            figures |= {"ssd_written_bytes": sum(plan.ssd_written.values())}
        own = {
            "seconds": self.seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "replay": self.replay,
            "fits": self.fits,
            "ssd_bytes": self.ssd_bytes,
            "peak_bytes": self.peak_bytes,
            "operations": self.operations,
        }
        return dataclasses.asdict(self.setup) | own | figures


@dataclass(frozen=True, kw_only=True)
class Search(Result):
    """The ways to train one step on a machine, the best first.

    Experimental: may change in a minor release.

    Attributes:
        best: None where nothing fits.
        candidates: Those that fit, the fastest first; then those that cannot be as fast as `best`, by their lower
            bounds.
        refused: Those that do not fit, what lacks least first.
        tokens_per_step: Of all of them.
        budget_bytes: Of each tier.
        search_seconds: What the search took.
    """

    best: Candidate | None
    candidates: list[Candidate]
    refused: list[Candidate]
    tokens_per_step: int
    budget_bytes: dict[str, int]
    search_seconds: float

    def find(self, setup: Setup) -> Candidate | None:
        """Return the candidate of a setup, None where it was not among those searched."""
        return next((each for each in [*self.candidates, *self.refused] if each.setup == setup), None)

    @property
    def advice(self) -> str:
        """What to change for the best, or what to give where nothing fits."""
        if self.best is not None:
            return advice_of(self.best.setup)
        if not self.refused:
            return "nothing to choose from"
        least = self.refused[0]
        remedy = "" if least.plan is None else f"; {least.plan.remedy}"
        return f"nothing fits; {least.setup} lacks least: {lacks_of(least)}{remedy}"

    def why(self) -> Iterator[str]:
        """Yield one line for each candidate: what makes it the best, slower, or impossible."""
        if self.best is not None:
            yield f"{self.best.setup}: {_reason_of_best(self.best)}"
        for each in self.candidates:
            if each is not self.best:
                yield f"{each.setup}: {_reason_against(each, self.best)}"
        for each in self.refused:
            yield f"{each.setup}: does not fit, {lacks_of(each)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the search as values that JSON knows; the plan of the best is whole."""
        best = None if self.best is None else self.best.to_dict()
        plan = None if self.best is None or self.best.plan is None else self.best.plan.to_dict()
        return {
            "best": best,
            "plan": plan,
            "advice": self.advice,
            "candidates": [each.to_dict() for each in self.candidates],
            "refused": [each.to_dict() for each in self.refused],
            "tokens_per_step": self.tokens_per_step,
            "budget_bytes": self.budget_bytes,
            "search_seconds": self.search_seconds,
        }

    def __rich__(self) -> "Table":
        """Return the search as a table for rich."""
        return table_of(self)

    def __str__(self) -> str:
        """Return a summary of a few lines."""
        counts = f"{len(self.candidates)} fit, {len(self.refused)} do not"
        if self.best is None:
            return f"{self.advice} ({counts})"
        return f"best of {len(self.candidates) + len(self.refused)} ({counts}): {self.best.setup}\n{self.best.plan}"


def advice_of(setup: Setup) -> str:
    """Return what to give a ``Trainer`` and this package for a setup."""
    words = [f"per_device_train_batch_size={setup.rows}", f"gradient_accumulation_steps={setup.accumulation}"]
    words += ["gradient_checkpointing=True"] if setup.checkpointing else []
    words += ["weights in bf16 with torch_offload.AdamW"] if "bf16" in setup.precisions else []
    words += ["torch_offload.AdamW with moments='8bit'"] if "8bit-moments" in setup.precisions else []
    words += [f"activations={setup.activations!r}"]
    words += [] if setup.optimizer_device == "auto" else [f"optimizer_device={setup.optimizer_device!r}"]
    return ", ".join(words)


def lacks_of(candidate: Candidate) -> str:
    """Say what the tiers lack."""
    missing = {} if candidate.plan is None else candidate.plan.missing_bytes
    return ", ".join(f"{tier} lacks {count} bytes ({format_size(count)})" for tier, count in missing.items())


def _reason_of_best(best: Candidate) -> str:
    if best.plan is None:
        return "it is the only one"
    shares = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in _busy(best.plan))
    return f"{best.seconds:.3g} s a step, {best.plan.bottleneck} binds ({shares}), {format_size(best.ssd_bytes)} of SSD"


def _reason_against(candidate: Candidate, best: Candidate | None) -> str:
    if best is None or best.plan is None:
        return "it fits"
    if candidate.plan is None:
        return f"cannot be faster than {candidate.seconds:.3g} s ({candidate.seconds / best.seconds:.2f}x)"
    slower = f"{candidate.seconds:.3g} s ({candidate.seconds / best.seconds:.2f}x), {candidate.plan.bottleneck} binds"
    more = list(_more_than(candidate.plan, best.plan))
    return f"{slower}{': ' if more else ''}{', '.join(more)}"


def _more_than(plan: Plan, best: Plan) -> Iterator[str]:
    """Yield what a plan has more than another one: seconds of computing, bytes by kind."""
    seconds = plan.resource_seconds["compute"] - best.resource_seconds["compute"]
    if seconds > 0.02 * best.predicted_seconds:
        yield f"{seconds:.3g} s more computing"
    for way, ours, theirs in (
        ("read", plan.ssd_read, best.ssd_read),
        ("written", plan.ssd_written, best.ssd_written),
    ):
        for kind in sorted({*ours, *theirs}):
            more_bytes = ours.get(kind, 0) - theirs.get(kind, 0)
            if more_bytes > 0.02 * (sum(theirs.values()) + 1):
                yield f"{format_size(more_bytes)} more of {kind}s {way}"


def _busy(plan: Plan) -> Sequence[tuple[str, float]]:
    return [(name, seconds) for name, seconds in plan.resource_seconds.items() if seconds > 0]


def table_of(search: Search) -> "Table":
    """Return the candidates as a table, the fastest first; what to do is its caption."""
    from torch_offload.system.tables import PlainTable

    headings = ("#", "rows x accumulation", "way", "step", "tokens/s", "SSD a step", "most memory", "binds")
    title = f"torch_offload plan --search: {search.tokens_per_step} tokens per step"
    table = PlainTable(*headings, title=title, title_style="bold", caption=_caption(search))
    for number, each in enumerate(search.candidates[:SHOWN], start=1):
        table.add_row(str(number), each.setup.split, each.setup.way, *_figures(each))
    table.add_section()
    for each in search.refused[: SHOWN if search.best is None else 3]:
        table.add_row("", each.setup.split, each.setup.way, "does not fit", "", "", "", lacks_of(each))
    return table


def _caption(search: Search) -> str:
    left = max(0, len(search.candidates) - SHOWN)
    more = f" {left} more candidates are slower." if left else ""
    return f"{'Use: ' if search.best else ''}{search.advice}.{more}"


def _figures(candidate: Candidate) -> list[str]:
    plan = candidate.plan
    if plan is None:
        return [f"at least {candidate.seconds:.3g} s", "", "", "", ""]
    sign = "" if candidate.replay == "exact" else "~"
    return [
        f"{sign}{candidate.seconds:.3g} s",
        f"{plan.tokens_per_second:.4g}",
        f"{sign}{format_size(candidate.ssd_bytes)}",
        format_size(candidate.peak_bytes),
        plan.bottleneck,
    ]
