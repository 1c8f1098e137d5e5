"""A report as a table for the terminal."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch_offload.config import format_size
from torch_offload.reporting.figures import Figures, ShareReport
from torch_offload.reporting.timeline import Interval

if TYPE_CHECKING:
    from rich.table import Table

    from torch_offload.system.tables import Row


def table_of(report: Figures) -> "Table":
    """Return the report as a table of two columns, in sections."""
    from torch_offload.system.tables import two_columns

    sections = (_device_rows, _memory_rows, _ssd_rows, _page_rows, _activation_rows, _step_rows, _plan_rows)
    return two_columns("torch_offload report", (rows(report) for rows in sections))


def _device_rows(report: Figures) -> "Iterator[Row]":
    device = report.device
    if device is None:
        return
    yield "device", f"{format_size(sum(device.used_bytes.values()))} in use of {format_size(device.budget_bytes)}"
    yield "peak", format_size(device.peak_bytes)
    yield "from the host", _total_and_parts(device.to_device_bytes)
    yield "to the host", _total_and_parts(device.to_host_bytes)
    yield "device kind", device.name
    if device.updates_on is not None:
        bits = ", with other last bits than on the GPU" if device.has_other_bits else ""
        yield "updates run on", f"the {device.updates_on.upper()}{bits}"


def _total_and_parts(by_kind: dict[str, int]) -> str:
    return f"{format_size(sum(by_kind.values()))} ({_named_sizes(by_kind)})"


def share_text(share: ShareReport) -> str:
    """Say what a process has of a budget that it shares."""
    return (
        f"{format_size(share.shared_bytes)} with other processes, an even part is {format_size(share.equal_bytes)}; "
        f"{format_size(share.guaranteed_bytes)} guaranteed, {format_size(share.leased_bytes)} leased, at most "
        f"{format_size(share.most_leased_bytes)}; {format_size(share.given_back_bytes)} given back"
    )


def _memory_rows(report: Figures) -> "Iterator[Row]":
    used_bytes = sum(report.host_bytes.values())
    yield "memory", f"{format_size(used_bytes)} in use of {format_size(report.budget_bytes)}"
    yield "peak", format_size(report.host_peak_bytes)
    yield "breakdown", _named_sizes(report.host_bytes)
    if report.share is not None:
        yield "shared", share_text(report.share)


def _ssd_rows(report: Figures) -> "Iterator[Row]":
    yield "SSD", f"{format_size(report.ssd_bytes)} stored, scratch file {format_size(report.ssd_file_bytes)}"
    yield "read", _total_and_parts(report.read_bytes)
    yield "written", _total_and_parts(report.written_bytes)
    yield "single reads", str(report.read_times)
    yield "I/O engine", report.io_engine
    counted = report.counters
    retries = counted.get("retried_reads", 0) + counted.get("retried_writes", 0)
    healed, quarantined = counted.get("healed_mismatches", 0), counted.get("quarantined_bytes", 0)
    if retries or healed or quarantined:
        yield (
            "SSD errors",
            (
                f"{retries} transfers tried again, {healed} reads whose bytes differed at first, "
                f"{format_size(quarantined)} of the scratch file not used again: replace this disk"
            ),
        )


def _page_rows(report: Figures) -> "Iterator[Row]":
    yield "page accesses", f"{report.pins}, {report.hit_rate:.1%} without a read"
    yield "prefetched", str(report.prefetches)
    yield "evictions", f"{report.evictions}, {report.clean_drops} of them without a write"
    yield "faults", str(report.faults)
    yield "stalls", ", ".join(f"{cause} {seconds:.3g} s" for cause, seconds in report.stall_seconds.items()) or "none"


def _activation_rows(report: Figures) -> "Iterator[Row]":
    if report.activations is not None:
        yield "activations", report.activations.explanation


def _step_rows(report: Figures) -> "Iterator[Row]":
    steady = None if report.timeline is None else report.timeline.steady()
    if steady is None:
        yield "steps", "none recorded; record them with torch-offload run --report FILE, or Config(report=FILE)"
        return
    yield "step time", _step(steady)
    bottleneck, wear = report.bottleneck, report.wear
    if bottleneck is not None:
        yield "bottleneck", f"{bottleneck.description} ({bottleneck.share:.0%} of the time)"
        yield "suggestion", bottleneck.suggestion
    if wear is not None:
        yield "SSD wear", f"{wear.bytes_per_step / 1e9:.3g} GB per step, {wear.bytes_per_day / 1e9:.4g} GB per day"


def _plan_rows(report: Figures) -> "Iterator[Row]":
    comparison = report.comparison
    if comparison is None:
        return
    for figure in comparison.figures:
        yield f"plan, {figure.name}", str(figure)
    yield "plan, wrong input", comparison.wrong_input or "none: the time is as predicted"


def _step(steady: Interval) -> str:
    seconds = steady.seconds / steady.steps
    return (
        f"{seconds:.3g} s, {steady.stall_share:.1%} of it stalled; "
        f"read {steady.ssd_read_bytes / steady.steps / 1e9:.3g} GB, "
        f"written {steady.ssd_written_bytes / steady.steps / 1e9:.3g} GB"
    )


def _named_sizes(sizes: dict[str, int]) -> str:
    there = {name.replace("_", " "): size for name, size in sizes.items() if size > 0}
    return ", ".join(f"{name} {format_size(size)}" for name, size in there.items()) or "nothing"
