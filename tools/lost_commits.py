"""Commits that results name and that the history does not have: which one holds what was measured."""

from types import MappingProxyType

HELD_BY = MappingProxyType(
    dict.fromkeys(
        (
            "1686efec4cb9ccc0b1987772f4cc31def91ad1c0",
            "2c9b336742e2128e2f7f89a29a7d1927a5f047ae",
            "669885c74356fee119d5a9c62db53d1cee300844",
            "6eb0fe10a7ce6a13113fa7424fc6b19d91728459",
            "927bf147c0cb4113efcda2a9f2ee3c48e2408020",
            "a8911e59072a8db06f56754989ff29b0d46813ac",
        ),
        "7518aa199a663d32ef5ba16ec9157779e32dff8e",
    )
)
"""They were on their way to the history when a test was red, and their changes were committed again together."""


def named(commit: str) -> str:
    """Return what a document calls a commit."""
    held_by = HELD_BY.get(commit)
    return commit[:12] if held_by is None else f"{commit[:12]} (lost; its changes are in {held_by[:12]})"
