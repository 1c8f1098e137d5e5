"""What ``Engine.dump`` returned, as text for a person who wants to know why nothing moves."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch_offload.config import format_size

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "read": "a read",
        "memory": "memory, or for a page to leave it",
        "update": "another thread to let go of a page",
        "fault": "an access behind the dispatcher",
        "network": "other ranks, in a collective",
    }
)
"""What is waited for, by the engine's word."""


def dump_text(dump: Mapping[str, Any]) -> str:
    """Return some lines for each tier."""
    return "\n".join(line for tier, part in dump.items() for line in _tier_lines(tier, part))


def waits_of(dump: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the waits in all tiers, the oldest first."""
    waits = [wait for part in dump.values() for wait in part["waits"]]
    return sorted(waits, key=lambda wait: -wait["seconds"])


def wait_text(wait: Mapping[str, Any]) -> str:
    """Return who waits, how long, and for what."""
    name = f" ({wait['thread_name']})" if wait["thread_name"] else ""
    page = f": {wait['page']}" if wait["page"] else ""
    return f"thread {wait['thread_id']}{name} has waited {wait['seconds']:.1f} s for {CAUSES[wait['cause']]}{page}"


def _tier_lines(tier: str, part: Mapping[str, Any]) -> Iterator[str]:
    yield f"{tier} tier:"
    if part["pages"] is None:
        yield "  pages and memory: not known, a thread has kept the pager's lock for more than a second"
    else:
        yield f"  memory: {_memory(part['memory'])}"
        yield f"  pages: {_pages(part['pages'])}"
    yield f"  transfers: {part['moving_pages']} pages on their way, {part['late_pages']} of them late"
    yield from (f"    {transfer}" for transfer in part["transfers"])
    yield (
        f"  waits: {len(part['waits'])}, of them {part['program_waiters']} of the program and {part['memory_waiters']} "
        f"for memory; {part['transients']} threads hold memory for a moment, {part['uses_in_flight']} uses in flight"
    )
    yield from (f"    {wait_text(wait)}" for wait in part["waits"])


def _memory(memory: Mapping[str, int]) -> str:
    parts = {name: format_size(memory[f"{name}_bytes"]) for name in ("limit", "used", "available", "peak")}
    return ", ".join(f"{size} {name}" for name, size in parts.items())


def _pages(pages: Mapping[str, Any]) -> str:
    states = [f"{count} {state}" for state, count in pages["by_state"].items() if count]
    return (
        f"{', '.join(states) or 'none'}; {pages['pinned']} pinned, {pages['dirty']} dirty, {pages['pending']} with "
        f"deferred work, {pages['failed_transfer']} whose transfer failed or is late"
    )
