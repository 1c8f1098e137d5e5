"""Check results, and the table that `torch-offload doctor` prints."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch_offload.reporting.result import Result
from torch_offload.system.terminal import plain

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


class State(str, Enum):
    """State of a check. Training cannot run where there is a problem."""

    ok = "ok"
    warning = "warning"
    problem = "problem"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One line.

    Attributes:
        name: What was looked at.
        state: How good it is.
        what: What is so.
        remedy: What to do about it; empty where there is nothing to do.
    """

    name: str
    state: State
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class DoctorReport(Result):
    """All results about a machine."""

    results: list[CheckResult]

    @property
    def can_train(self) -> bool:
        """Whether there is no problem."""
        return all(result.state is not State.problem for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows."""
        return {
            "can_train": self.can_train,
            "results": [asdict(result) | {"state": result.state.value} for result in self.results],
        }

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Return it as a table for rich."""
        from torch_offload.system.tables import PlainTable

        table = PlainTable(title="", show_header=False, box=None, padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, style="bold")
        table.add_column(overflow="fold")
        for result in self.results:
            table.add_row(plain(result.state.value, _COLORS[result.state]), result.name, result.what)
            if result.remedy:
                table.add_row("", "", plain(f"→ {result.remedy}", "cyan"))
        yield table
        yield plain(f"\n{self.summary()}")

    def summary(self) -> str:
        """Say in one line how it stands."""
        problems = list(_names(self.results, State.problem))
        if problems:
            return f"Training cannot run here: see {', '.join(problems)}."
        warnings = ", ".join(_names(self.results, State.warning))
        return f"Training runs here; could be better: {warnings}." if warnings else "Training runs here."


_COLORS = {State.ok: "green", State.warning: "yellow", State.problem: "red"}


def _names(results: list[CheckResult], state: State) -> Iterator[str]:
    return (result.name for result in results if result.state is state)
