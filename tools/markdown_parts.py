"""How tables and spreads look in the documents that programs write."""

from collections.abc import Iterable, Mapping


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def times(spread: Mapping[str, float]) -> str:
    """Return a median with its range."""
    return f"{spread['median']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})"
