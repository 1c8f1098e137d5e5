"""The charts of a report's page. What plotly shows is HTML to it, so names are escaped where they come in."""

import html
from collections.abc import Iterator, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from torch_offload.reporting.figures import Figures
from torch_offload.reporting.timeline import Interval, Sample, Timeline, intervals

COMPUTE_COLOR = "#4c9f70"
READ_COLOR = "#3572b0"
WRITE_COLOR = "#d9822b"
TO_DEVICE_COLOR = "#17a2b8"
TO_HOST_COLOR = "#b5406f"
BUDGET_COLOR = "#222222"
STALL_COLORS = ("#c0392b", "#8e44ad", "#f0a35e", "#7f8c8d", "#e377c2", "#5d4037")
PURPOSE_COLORS = {
    "pages": "#3572b0",
    "free_pages": "#a8c6e5",
    "temporaries": "#4c9f70",
    "idle_temporaries": "#b9dcc7",
    "small": "#999999",
}
MAX_STEPS_SHOWN = 400

Chart = dict[str, Any]


def charts_of(report: Figures) -> list[Chart]:
    """Return title, explanation and figure of each chart that there is something to show for."""
    charts = []
    if report.timeline is not None:
        charts += list(_charts_over_time(report, report.timeline))
    ssd = (("read", READ_COLOR, report.read_bytes), ("written", WRITE_COLOR, report.written_bytes))
    charts.append(_chart("Bytes by kind", "What was read from the SSD and written to it.", _kinds_figure(ssd)))
    if report.device is not None:
        link = (
            ("to the device", TO_DEVICE_COLOR, report.device.to_device_bytes),
            ("to the host", TO_HOST_COLOR, report.device.to_host_bytes),
        )
        explanation = "What went between the device's memory and the host's."
        charts.append(_chart("Bytes between device and host by kind", explanation, _kinds_figure(link)))
    return charts


def _charts_over_time(report: Figures, timeline: Timeline) -> Iterator[Chart]:
    last = timeline.last_steps()
    if intervals(last):
        yield _chart(
            "The last steps",
            "Above: where the time went; what is not a stall counts as compute. Below: what the SSD did meanwhile. "
            "A step ends at each dotted line.",
            _step_figure(last),
        )
    steps = timeline.steps()
    if len(steps) > 1:
        yield _chart("Step by step", "Seconds per step, stalls by cause.", _steps_figure(steps))
    if len(timeline.recent) > 1:
        yield _chart(
            "Memory over time",
            "What the budget was used for. The black line is the budget.",
            _memory_figure(timeline, report.budget_bytes),
        )
    if len(timeline.recent) > 1 and report.device is not None:
        yield _chart(
            "The device's memory over time",
            "What the device's budget was used for. The black line is the budget.",
            _device_memory_figure(timeline, report.device.budget_bytes),
        )


def _chart(title: str, explanation: str, figure: go.Figure) -> Chart:
    figure.update_layout(
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 10, "b": 50},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "traceorder": "normal"},
        hovermode="x unified",
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    return {"title": title, "explanation": explanation, "figure": figure}


def _causes(spans: Sequence[Interval]) -> list[tuple[str, str]]:
    """Return the causes that made anything wait, with a color that depends on the place among all causes."""
    known = list(spans[-1].stall_seconds)
    return [
        (cause, STALL_COLORS[index % len(STALL_COLORS)])
        for index, cause in enumerate(known)
        if any(span.stall_seconds.get(cause, 0) > 0 for span in spans)
    ]


def _stairs(samples: Sequence[Sample]) -> tuple[list[Interval], list[float]]:
    """Return spans and their starts in seconds since the first; the last span stands twice, to end the last stair."""
    spans = intervals(samples)
    origin = samples[0].seconds
    starts = [span.start_seconds - origin for span in spans]
    return [*spans, spans[-1]], [*starts, samples[-1].seconds - origin]


def _step_figure(samples: Sequence[Sample]) -> go.Figure:
    spans, starts = _stairs(samples)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.5, 0.5])
    shares = [("compute", COMPUTE_COLOR, [100 * (1 - span.stall_share) for span in spans])]
    for cause, color in _causes(spans):
        shares.append((html.escape(f"stall: {cause}"), color, [_share_percent(span, cause) for span in spans]))
    for name, color, percents in shares:
        figure.add_trace(_area(starts, percents, name=name, color=color), row=1, col=1)
    for name, color, rates in (
        ("SSD read", READ_COLOR, [span.ssd_read_bytes / span.seconds / 1e9 for span in spans]),
        ("SSD write", WRITE_COLOR, [span.ssd_written_bytes / span.seconds / 1e9 for span in spans]),
        *(_link_rates(spans) if samples[-1].device_bytes else ()),
    ):
        line = {"shape": "hv", "color": color, "width": 2}
        figure.add_trace(go.Scatter(x=starts, y=rates, name=name, mode="lines", line=line), row=2, col=1)
    for sample in samples:
        if sample.is_step_end:
            figure.add_vline(x=sample.seconds - samples[0].seconds, line={"dash": "dot", "width": 1, "color": "#888"})
    figure.update_yaxes(title_text="% of time", range=[0, 100], row=1, col=1)
    figure.update_yaxes(title_text="GB/s", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    return figure.update_layout(height=520)


def _link_rates(spans: Sequence[Interval]) -> Iterator[tuple[str, str, list[float]]]:
    yield "to device", TO_DEVICE_COLOR, [span.to_device_bytes / span.seconds / 1e9 for span in spans]
    yield "to host", TO_HOST_COLOR, [span.to_host_bytes / span.seconds / 1e9 for span in spans]


def _share_percent(span: Interval, cause: str) -> float:
    """Return the cause's share; together with the others at most 100 %, though threads may stall side by side."""
    stalled = sum(span.stall_seconds.values())
    return 100 * span.stall_share * span.stall_seconds.get(cause, 0) / stalled if stalled > 0 else 0.0


def _area(x: Sequence[float], y: Sequence[float], *, name: str, color: str) -> go.Scatter:
    line = {"shape": "hv", "width": 0, "color": color}
    return go.Scatter(x=x, y=y, name=name, mode="lines", line=line, stackgroup="one", fillcolor=color)


def _steps_figure(steps: Sequence[Interval]) -> go.Figure:
    shown = steps[:: max(1, len(steps) // MAX_STEPS_SHOWN)]
    numbers = list(range(2, 2 + len(steps)))[:: max(1, len(steps) // MAX_STEPS_SHOWN)]
    figure = go.Figure()
    per_step = [max(1, span.steps) for span in shown]
    compute = [span.compute_seconds / count for span, count in zip(shown, per_step, strict=True)]
    figure.add_bar(x=numbers, y=compute, name="compute", marker_color=COMPUTE_COLOR)
    for cause, color in _causes(shown):
        seconds = [span.stall_seconds.get(cause, 0) / count for span, count in zip(shown, per_step, strict=True)]
        figure.add_bar(x=numbers, y=seconds, name=html.escape(f"stall: {cause}"), marker_color=color)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="seconds")
    return figure.update_layout(barmode="stack", height=340, bargap=0.1)


def _memory_figure(timeline: Timeline, budget_bytes: int) -> go.Figure:
    samples = _all_samples(timeline)
    figure = _budget_figure(samples, [sample.host_bytes for sample in samples], budget_bytes)
    stored = [sample.stored_bytes / 2**30 for sample in samples]
    dashes = {"color": WRITE_COLOR, "width": 2, "dash": "dash"}
    seconds = [sample.seconds for sample in samples]
    return figure.add_trace(go.Scatter(x=seconds, y=stored, name="stored on SSD", mode="lines", line=dashes))


def _device_memory_figure(timeline: Timeline, budget_bytes: int) -> go.Figure:
    samples = _all_samples(timeline)
    return _budget_figure(samples, [sample.device_bytes for sample in samples], budget_bytes)


def _all_samples(timeline: Timeline) -> list[Sample]:
    """Return the ends of early steps, then everything that is closely spaced."""
    recent = timeline.recent
    return [*(sample for sample in timeline.step_ends if sample.seconds < recent[0].seconds), *recent]


def _budget_figure(samples: Sequence[Sample], used_bytes: Sequence[dict[str, int]], budget_bytes: int) -> go.Figure:
    seconds = [sample.seconds for sample in samples]
    figure = go.Figure()
    for purpose in used_bytes[-1]:
        sizes = [used.get(purpose, 0) / 2**30 for used in used_bytes]
        color = PURPOSE_COLORS.get(purpose, "#cccccc")
        figure.add_trace(_area(seconds, sizes, name=html.escape(purpose.replace("_", " ")), color=color))
    budget = budget_bytes / 2**30
    line = {"color": BUDGET_COLOR, "width": 2}
    ends = [seconds[0], seconds[-1]]
    figure.add_trace(go.Scatter(x=ends, y=[budget, budget], name="budget", mode="lines", line=line))
    figure.update_xaxes(title_text="seconds")
    figure.update_yaxes(title_text="GiB", rangemode="tozero")
    return figure.update_layout(height=360)


def _kinds_figure(parts: Sequence[tuple[str, str, dict[str, int]]]) -> go.Figure:
    """Return bars by kind of page for each (name, color, bytes by kind)."""
    figure = go.Figure()
    kinds = list(parts[0][2])
    for name, color, sizes in parts:
        gigabytes = [sizes.get(kind, 0) / 1e9 for kind in kinds]
        figure.add_bar(x=[html.escape(kind) for kind in kinds], y=gigabytes, name=name, marker_color=color)
    figure.update_yaxes(title_text="GB")
    return figure.update_layout(barmode="group", height=320)
