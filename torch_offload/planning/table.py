"""A plan as a table for the terminal."""

from collections.abc import Iterator

from rich.table import Table

from torch_offload.config import format_size
from torch_offload.planning.plan import Plan

Row = tuple[str, str]


def table_of(plan: Plan) -> Table:
    """Return the plan as a table of two columns, in sections."""
    title = "torch_offload plan: fits" if plan.fits else "torch_offload plan: does not fit"
    table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for section in (_missing_rows, _step_rows, _tier_rows, _traffic_rows, _wear_rows):
        for name, value in section(plan):
            table.add_row(name, value)
        table.add_section()
    return table


def _missing_rows(plan: Plan) -> Iterator[Row]:
    for tier, missing_bytes in plan.missing_bytes.items():
        needed_bytes, there_bytes = plan.needed_bytes[tier], plan.budget_bytes[tier]
        lacks = f"{missing_bytes} bytes missing ({format_size(missing_bytes)})"
        yield tier, f"{lacks}: {format_size(needed_bytes)} needed, {format_size(there_bytes)} there"
    if plan.remedy is not None:
        yield "to change it", plan.remedy


def _step_rows(plan: Plan) -> Iterator[Row]:
    yield "a step", f"{plan.predicted_seconds:.3g} s, at best {plan.lower_bound_seconds:.3g} s"
    yield "speed", f"{plan.tokens_per_second:.4g} tokens/s ({plan.tokens_per_step} tokens per step)"
    yield "what binds", plan.binding
    for phase in plan.phases:
        busy = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in phase.resource_seconds.items() if seconds > 0)
        yield phase.name, f"{phase.seconds:.3g} s ({busy})"
    yield "computing binds from", f"{plan.break_even_tokens} tokens per step on"
    yield "timed", f"{plan.timed_share:.0%} of the computation; the rest is estimated"


def _tier_rows(plan: Plan) -> Iterator[Row]:
    yield "model", f"{plan.parameters / 1e6:.4g} M parameters, {format_size(plan.state_bytes)} of state"
    for tier, peak_bytes in plan.peak_bytes.items():
        of = f"{format_size(peak_bytes)} at most of {format_size(plan.budget_bytes[tier])}"
        yield tier, f"{of}; between steps {_named_sizes(plan.placement[tier])}"


def _traffic_rows(plan: Plan) -> Iterator[Row]:
    for name, by_kind in (
        ("to the device", plan.to_device),
        ("to the host", plan.to_host),
        ("SSD read", plan.ssd_read),
        ("SSD written", plan.ssd_written),
    ):
        if by_kind or name.startswith("SSD"):
            yield name, f"{format_size(sum(by_kind.values()))} a step ({_named_sizes(by_kind)})"
    yield "updates run on", "the host" if plan.update_tier == "host" else "what computes"


def _wear_rows(plan: Plan) -> Iterator[Row]:
    years = plan.endurance_years
    if plan.wear is not None and years is not None:
        day = f"{plan.wear.bytes_per_day / 1e12:.3g} TB written per day ({plan.steps_per_day:.4g} steps)"
        yield "SSD wear", f"{day}; {plan.endurance_bytes / 1e12:.4g} TB last {years:.2g} years"


def _named_sizes(sizes: dict[str, int]) -> str:
    there = {name: size for name, size in sizes.items() if size > 0}
    return ", ".join(f"{name} {format_size(size)}" for name, size in there.items()) or "nothing"
