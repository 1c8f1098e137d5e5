"""The reports of all ranks of a launch, side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from torch_offload.config import format_size
from torch_offload.reporting.report import Report
from torch_offload.reporting.result import Result

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class RankFigure:
    """One figure of all ranks.

    Attributes:
        name: Of the figure.
        values: By rank, in the order of the reports.
        is_size: Whether they are bytes; else they are seconds.
    """

    name: str
    values: tuple[float, ...]
    is_size: bool

    def cells(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the name, the smallest, the median and the largest, and the rank of that."""
        least, most = min(self.values), max(self.values)
        shown = (self._text(value) for value in (least, median(self.values), most))
        return (self.name, *shown, str(ranks[self.values.index(most)]))

    def _text(self, value: float) -> str:
        return format_size(round(value)) if self.is_size else f"{value:.3g} s"


@dataclass(frozen=True, kw_only=True)
class RankReports(Result):
    """What the ranks of one launch reported.

    Attributes:
        reports: At most one for each rank, in their order; all have a rank, of the same launch.
    """

    reports: tuple[Report, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of the ranks."""
        return tuple(report.rank.number for report in self.reports if report.rank is not None)

    @property
    def count(self) -> int:
        """How many ranks there were, with a report or without."""
        return max((report.rank.count for report in self.reports if report.rank is not None), default=0)

    @property
    def waited_for(self) -> int | None:
        """The rank that the others waited for: it waited least for them. None where no rank waited for another."""
        waits = [report.stall_seconds.get("network", 0.0) for report in self.reports]
        return self.ranks[waits.index(min(waits))] if max(waits, default=0.0) > min(waits, default=0.0) else None

    def figures(self) -> tuple[RankFigure, ...]:
        """Return the figures in which ranks may differ; seconds of a step only where all recorded steps."""
        steps = [None if report.timeline is None else report.timeline.steady() for report in self.reports]
        seconds = tuple(step.seconds / step.steps for step in steps if step is not None)
        causes = dict.fromkeys(cause for report in self.reports for cause in report.stall_seconds)
        return (
            *((RankFigure("step time", seconds, is_size=False),) if len(seconds) == len(self.reports) else ()),
            self._of("peak", lambda report: report.host_peak_bytes, is_size=True),
            self._of("read", lambda report: report.ssd_read_bytes, is_size=True),
            self._of("written", lambda report: report.ssd_written_bytes, is_size=True),
            *(self._of(f"stalled: {cause}", _stalled_by(cause), is_size=False) for cause in causes),
        )

    def _of(self, name: str, figure: Callable[[Report], float], *, is_size: bool) -> RankFigure:
        return RankFigure(name, tuple(figure(report) for report in self.reports), is_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the reports and what follows from them together."""
        return {
            "ranks": self.count,
            "waited_for": self.waited_for,
            "figures": {figure.name: dict(zip(self.ranks, figure.values, strict=True)) for figure in self.figures()},
            "reports": [report.to_dict() for report in self.reports],
        }

    def __rich__(self) -> "Table":
        """Return a table for rich."""
        from torch_offload.system.tables import PlainTable

        there = f"{len(self.reports)} of {self.count} ranks"
        table = PlainTable(
            "",
            "smallest",
            "median",
            "largest",
            "rank",
            title=f"torch_offload report of {there}",
            caption=self._caption(),
        )
        for figure in self.figures():
            table.add_row(*figure.cells(self.ranks))
        return table

    def _caption(self) -> str:
        return "" if self.waited_for is None else f"The others waited for rank {self.waited_for}."


def _stalled_by(cause: str) -> Callable[[Report], float]:
    return lambda report: report.stall_seconds.get(cause, 0.0)
