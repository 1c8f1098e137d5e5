"""Progress of a measurement or a long computation: a bar on a terminal, lines or nothing elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch_offload.system.terminal import plain, printable

if TYPE_CHECKING:
    from rich.console import Console

Show = Callable[[str, int, int], None]
"""Called with the name of the next step, the number of steps done and the number of all."""


@contextmanager
def progress(console: "Console", task: str, *, uses_lines: bool) -> Iterator[Show]:
    """Give what shows the steps of a task.

    Args:
        console: Where; a bar if it is a terminal.
        task: What is done, such as ``coding experts``.
        uses_lines: Write one line per step where the console is no terminal; otherwise nothing is written there.
    """
    if not console.is_terminal:

        def print_line(name: str, done: int, total: int) -> None:
            if uses_lines and done < total:
                console.print(plain(f"{task}: {done + 1} of {total}, {name}"), soft_wrap=True)

        yield print_line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(task),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        identifier = bar.add_task("", total=None)

        def move_bar(name: str, done: int, total: int) -> None:
            bar.update(identifier, description=printable(name), completed=done, total=total)

        yield move_bar
