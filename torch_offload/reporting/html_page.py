"""A report as one HTML page that needs no network: figures, timelines, bottleneck, suggestion, wear."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from typing import Any

from torch_offload.config import format_size
from torch_offload.errors import OffloadError
from torch_offload.reporting.figures import DeviceReport, Figures
from torch_offload.reporting.timeline import Interval

TEMPLATE = "report.html.j2"


def page_of(report: Figures, *, endurance_bytes: int | None = None) -> str:
    """Return the page.

    Args:
        report: With a timeline, or there are no charts over time.
        endurance_bytes: What the drive is rated to have written in its life.

    Raises:
        OffloadError: If jinja2 or plotly is missing.
    """
    with libraries_needed():
        from torch_offload.reporting import charts

        drawn = charts.charts_of(report)
    return rendered(
        TEMPLATE,
        drawn,
        title="torch_offload report",
        cards=_cards(report),
        bottleneck=report.bottleneck,
        wear=_wear_rows(report, endurance_bytes),
        totals=_totals(report),
    )


def rendered(template: str, charts: Iterable[Mapping[str, Any]], **content: Any) -> str:
    """Return a page with charts that needs no network.

    Args:
        template: Name of one that extends the one of all pages.
        charts: Title, explanation and figure of each.
        **content: What the template names beside them.

    Raises:
        OffloadError: If jinja2 or plotly is missing.
    """
    with libraries_needed():
        import jinja2
        from plotly.offline import get_plotlyjs
    folder = resources.files("torch_offload.reporting") / "templates"
    loader = jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    inlined = [{**chart, "figure": _inline(chart["figure"])} for chart in charts]
    return environment.get_template(template).render(charts=inlined, plotly=get_plotlyjs(), **content)


@contextmanager
def libraries_needed() -> Iterator[None]:
    """Turn a failed import into an OffloadError that names what to install."""
    try:
        yield
    except ImportError as error:
        raise OffloadError(
            f"an HTML report needs jinja2 and plotly ({error}); install them with: pip install 'torch-offload[report]'"
        ) from None


def _inline(figure: Any) -> str:
    """Return a figure as JSON that may stand inside a script element."""
    return json.dumps(json.loads(figure.to_json())).replace("<", "\\u003c")


def _cards(report: Figures) -> list[tuple[str, str]]:
    """Return the figures at the head of the page."""
    memory = [
        *_device_cards(report.device),
        (f"peak, of {format_size(report.budget_bytes)} of memory", format_size(report.host_peak_bytes)),
    ]
    steady = None if report.timeline is None else report.timeline.steady()
    if steady is None:
        return [
            *memory,
            ("read from SSD", format_size(report.ssd_read_bytes)),
            ("written to SSD", format_size(report.ssd_written_bytes)),
            ("pages without a read", f"{report.hit_rate:.1%}"),
        ]
    cards = [
        ("per step", f"{steady.seconds / steady.steps:.3g} s"),
        ("stalled", f"{steady.stall_share:.1%}"),
        ("read per step", f"{steady.ssd_read_bytes / steady.steps / 1e9:.3g} GB"),
        ("written per step", f"{steady.ssd_written_bytes / steady.steps / 1e9:.3g} GB"),
        *_link_cards(report.device, steady),
        *memory,
    ]
    return [*cards, ("tokens", f"{steady.tokens / steady.seconds:.0f} per s")] if steady.tokens > 0 else cards


def _device_cards(device: DeviceReport | None) -> list[tuple[str, str]]:
    if device is None:
        return []
    return [(f"peak, of {format_size(device.budget_bytes)} of the device", format_size(device.peak_bytes))]


def _link_cards(device: DeviceReport | None, steady: Interval) -> list[tuple[str, str]]:
    if device is None:
        return []
    return [
        ("to the device per step", f"{steady.to_device_bytes / steady.steps / 1e9:.3g} GB"),
        ("to the host per step", f"{steady.to_host_bytes / steady.steps / 1e9:.3g} GB"),
    ]


def _device_totals(device: DeviceReport | None) -> list[tuple[str, str]]:
    if device is None:
        return []
    return [
        ("device", device.name),
        ("peak of the device's memory", format_size(device.peak_bytes)),
        ("from the host to the device", format_size(sum(device.to_device_bytes.values()))),
        ("from the device to the host", format_size(sum(device.to_host_bytes.values()))),
    ]


def _wear_rows(report: Figures, endurance_bytes: int | None) -> list[tuple[str, str]]:
    wear = report.wear
    if wear is None:
        return []
    rows = [
        ("written per step", f"{wear.bytes_per_step / 1e9:.3g} GB"),
        ("written per day of training", f"{wear.bytes_per_day / 1e9:.4g} GB"),
    ]
    days = None if endurance_bytes is None else wear.days(endurance_bytes)
    if endurance_bytes is None:
        rows.append(("days that a drive rated for 600 TB lasts", _days(wear.days(600 * 10**12))))
    else:
        rows.append((f"days that a drive rated for {endurance_bytes / 1e12:.4g} TB lasts", _days(days)))
    return rows


def _days(days: float | None) -> str:
    return "no limit: nothing is written" if days is None else f"{days:,.0f}"


def _totals(report: Figures) -> list[tuple[str, str]]:
    """Return what the table at the foot says: everything that the report counts."""
    counted: list[tuple[str, Any]] = [
        *_device_totals(report.device),
        ("I/O engine", report.io_engine),
        ("page accesses", f"{report.pins:,}"),
        ("of these with a read first", f"{report.misses:,}"),
        ("prefetched", f"{report.prefetches:,}"),
        ("evictions", f"{report.evictions:,}"),
        ("of these without a write", f"{report.clean_drops:,}"),
        ("faults", f"{report.faults:,}"),
        ("stored on SSD", format_size(report.ssd_bytes)),
        ("read from SSD", format_size(report.ssd_read_bytes)),
        ("written to SSD", format_size(report.ssd_written_bytes)),
    ]
    counted += [(f"stalled: {cause}", f"{seconds:.3g} s") for cause, seconds in report.stall_seconds.items()]
    return counted + [(name.replace("_", " "), _as_text(value)) for name, value in report.counters.items()]


def _as_text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
