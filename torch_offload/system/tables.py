"""Tables for the terminal. It imports rich, so import it where a table is made."""

from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from torch_offload.system.terminal import plain

Row = tuple[str, str]


class PlainTable(Table):
    """A table whose title, caption and cells are shown as they are."""

    def __init__(
        self, *headings: str, title: str, title_style: str = "table.title", caption: str = "", **options: Any
    ) -> None:
        """Take the options of rich."""
        super().__init__(
            *headings,
            title=plain(title, title_style) if title else None,
            title_justify="left",
            caption=plain(caption) if caption else None,
            caption_justify="left",
            **options,
        )

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row."""
        super().add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def two_columns(title: str, sections: Iterable[Iterable[Row]]) -> PlainTable:
    """Return a table of names and values."""
    table = PlainTable(title=title, title_style="bold", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for section in sections:
        for name, value in section:
            table.add_row(name, value)
        table.add_section()
    return table
