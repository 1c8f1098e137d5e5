"""What an examination of a machine says: one finding per line, with a remedy where one is needed."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


class State(str, Enum):
    """How good a finding is. Training cannot run where there is a problem."""

    ok = "ok"
    warning = "warning"
    problem = "problem"


@dataclass(frozen=True, kw_only=True)
class Finding:
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
class Diagnosis:
    """All findings about a machine."""

    findings: list[Finding]

    @property
    def can_train(self) -> bool:
        """Whether there is no problem."""
        return all(finding.state is not State.problem for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return it as what JSON knows."""
        return {
            "can_train": self.can_train,
            "findings": [asdict(finding) | {"state": finding.state.value} for finding in self.findings],
        }

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Return it as a table for rich."""
        from rich.table import Table

        table = Table(show_header=False, box=None, padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, style="bold")
        table.add_column(overflow="fold")
        for finding in self.findings:
            table.add_row(_MARKS[finding.state], finding.name, finding.what)
            if finding.remedy:
                table.add_row("", "", f"[cyan]→ {_escaped(finding.remedy)}[/cyan]")
        yield table
        yield f"\n{self.summary()}"

    def summary(self) -> str:
        """Say in one line how it stands."""
        problems = list(_names(self.findings, State.problem))
        if problems:
            return f"Training cannot run here: see {', '.join(problems)}."
        warnings = ", ".join(_names(self.findings, State.warning))
        return f"Training runs here; could be better: {warnings}." if warnings else "Training runs here."


_MARKS = {
    State.ok: "[green]ok[/green]",
    State.warning: "[yellow]warning[/yellow]",
    State.problem: "[red]problem[/red]",
}


def _names(findings: list[Finding], state: State) -> Iterator[str]:
    return (finding.name for finding in findings if finding.state is state)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
