"""A search as one HTML page without network: seconds against memory, the roofline, what each candidate waits for."""

import html
import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch_offload.config import format_size
from torch_offload.diagnostics.probe import Probe
from torch_offload.planning.search_result import Candidate, Search
from torch_offload.planning.step_time import COMPUTE, SSD
from torch_offload.planning.what_if import Machine, WhatIf
from torch_offload.reporting.html_page import libraries_needed, rendered
from torch_offload.system.atomic_files import write_whole

TEMPLATE = "search.html.j2"
HEADINGS = ("machine", "rows x accumulation", "way", "step", "SSD a step", "most memory", "binds")
MAX_BARS = 40
COLORS: Mapping[str, str] = {COMPUTE: "#4c9f70", SSD: "#3572b0"}
OTHER_COLOR = "#d9822b"
LINE_COLORS = ("#222222", "#c0392b", "#8e44ad", "#17a2b8", "#f0a35e")


def write_page(path: str | os.PathLike[str], found: WhatIf, *, probe: Probe) -> None:
    """Write the page, whole or not at all.

    Raises:
        OffloadError: If jinja2 or plotly is missing.
        OSError: If the file cannot be written.
    """
    write_whole(path, page_of(found, probe=probe).encode())


def page_of(found: WhatIf, *, probe: Probe) -> str:
    """Return the page.

    Args:
        found: One search or more.
        probe: Rates of the machine at hand, for the roof of computing.

    Raises:
        OffloadError: If jinja2 or plotly is missing.
    """
    with libraries_needed():
        import plotly  # noqa: F401
    replayed = [(machine, each) for machine, search in found.searches for each in search.candidates if each.plan]
    charts = []
    if replayed:
        charts = [
            _chart(
                "Seconds per step against memory",
                "Each point is a candidate at the most memory that it takes; a line joins the best of each budget.",
                _memory_figure(found, replayed),
            ),
            _chart(
                "Roofline",
                "Operations per byte of SSD traffic, and operations per second. The sloped lines are the disks, the "
                "level one is the fastest matrix product; what moves nothing stands at the right edge.",
                _roofline_figure(found, replayed, probe),
            ),
            _chart(
                "What every candidate waits for",
                "How long each resource is busy in a step; the longest binds.",
                _resource_figure(replayed),
            ),
        ]
    return rendered(
        TEMPLATE,
        charts,
        title="torch_offload plan: the choice",
        cards=_cards(found),
        choices=[(str(machine), _choice(search)) for machine, search in found.searches],
        headings=HEADINGS,
        rows=[_row(machine, each) for machine, search in found.searches for each in _all_of(search)],
    )


def _choice(search: Search) -> str:
    if search.best is None:
        return search.advice
    return f"{search.best.seconds:.3g} s a step with {search.advice}"


def _all_of(search: Search) -> list[Candidate]:
    return [*search.candidates, *search.refused]


def _cards(found: WhatIf) -> list[tuple[str, str]]:
    searches = [search for _, search in found.searches]
    best = min((each.best for each in searches if each.best), key=lambda each: each.seconds, default=None)
    cards = [
        ("tokens per step", f"{searches[0].tokens_per_step:,}"),
        ("candidates", str(sum(len(_all_of(search)) for search in searches))),
        ("search", f"{sum(search.search_seconds for search in searches):.3g} s"),
    ]
    if best is None or best.plan is None:
        return [*cards, ("fits", "nothing")]
    return [*cards, ("at best", f"{best.seconds:.3g} s a step"), ("tokens", f"{best.plan.tokens_per_second:.4g} per s")]


def _row(machine: Machine, each: Candidate) -> list[str]:
    plan = each.plan
    begin = [str(machine), each.setup.split, each.setup.way]
    if plan is None:
        return [*begin, f"at least {each.seconds:.3g} s", "", "", ""]
    if not plan.fits:
        missing = max(plan.missing_bytes.values())
        return [*begin, "does not fit", "", f"{format_size(missing)} missing", ""]
    sizes = [format_size(each.ssd_bytes), format_size(each.peak_bytes)]
    return [*begin, f"{each.seconds:.3g} s", *sizes, plan.bottleneck]


def _chart(title: str, explanation: str, figure: Any) -> dict[str, Any]:
    figure.update_layout(
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 10, "b": 50},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    return {"title": title, "explanation": explanation, "figure": figure}


def _by_bottleneck(replayed: list[tuple[Machine, Candidate]]) -> Iterator[tuple[str, list[tuple[Machine, Candidate]]]]:
    names = {each.plan.bottleneck for _, each in replayed if each.plan is not None}
    for name in sorted(names):
        yield name, [(on, each) for on, each in replayed if each.plan is not None and each.plan.bottleneck == name]


def _labels(points: list[tuple[Machine, Candidate]]) -> list[str]:
    return [html.escape(f"{each.setup} ({machine})") for machine, each in points]


def _memory_figure(found: WhatIf, replayed: list[tuple[Machine, Candidate]]) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, points in _by_bottleneck(replayed):
        figure.add_trace(
            go.Scatter(
                x=[each.peak_bytes / 2**30 for _, each in points],
                y=[each.seconds for _, each in points],
                text=_labels(points),
                mode="markers",
                name=html.escape(f"{name} binds"),
                marker={"color": COLORS.get(name, OTHER_COLOR), "size": 8, "opacity": 0.7},
            )
        )
    for number, rate in enumerate(dict.fromkeys(machine.ssd_rate for machine, _ in found.searches)):
        best = [
            (machine.ram_bytes / 2**30, search.best.seconds)
            for machine, search in found.searches
            if machine.ssd_rate == rate and search.best is not None
        ]
        disk = "this disk" if rate is None else f"{rate / 1e9:.4g} GB/s"
        figure.add_trace(
            go.Scatter(
                x=[memory for memory, _ in best],
                y=[seconds for _, seconds in best],
                mode="lines+markers",
                name=f"best by budget, {disk}",
                line={"color": LINE_COLORS[number % len(LINE_COLORS)], "width": 2},
            )
        )
    figure.update_xaxes(title_text="GiB of memory", rangemode="tozero")
    figure.update_yaxes(title_text="seconds per step", rangemode="tozero")
    return figure.update_layout(height=420)


def _roofline_figure(found: WhatIf, replayed: list[tuple[Machine, Candidate]], probe: Probe) -> Any:
    import plotly.graph_objects as go

    moving = [each.operations / each.ssd_bytes for _, each in replayed if each.ssd_bytes]
    edges = [min(moving, default=1.0) / 4, max(moving, default=1000.0) * 10]
    figure = go.Figure()
    for name, points in _by_bottleneck(replayed):
        figure.add_trace(
            go.Scatter(
                x=[each.operations / each.ssd_bytes if each.ssd_bytes else edges[1] for _, each in points],
                y=[each.operations / each.seconds / 1e9 for _, each in points],
                text=_labels(points),
                mode="markers",
                name=html.escape(f"{name} binds"),
                marker={"color": COLORS.get(name, OTHER_COLOR), "size": 8, "opacity": 0.7},
            )
        )
    peak = max(probe.gemm.values()) / 1e9
    for number, machine in enumerate({machine.ssd_rate: machine for machine, _ in found.searches}.values()):
        rate = machine.probe(probe).ssd_mixed / 1e9
        turn = peak / rate
        places = sorted({edges[0], min(max(turn, edges[0]), edges[1]), edges[1]})
        figure.add_trace(
            go.Scatter(
                x=places,
                y=[min(peak, place * rate) for place in places],
                mode="lines",
                name=f"roof of {rate:.3g} GB/s",
                line={"color": LINE_COLORS[number % len(LINE_COLORS)], "width": 2},
            )
        )
    figure.update_xaxes(title_text="operations per byte of the SSD", type="log")
    figure.update_yaxes(title_text="GFLOP/s", type="log")
    return figure.update_layout(height=420)


def _resource_figure(replayed: list[tuple[Machine, Candidate]]) -> Any:
    import plotly.graph_objects as go

    shown = sorted(replayed, key=lambda pair: pair[1].seconds)[:MAX_BARS]
    names = list(dict.fromkeys(name for _, each in shown if each.plan for name in each.plan.resource_seconds))
    figure = go.Figure()
    labels = _labels(shown)
    for name in names:
        seconds = [each.plan.resource_seconds.get(name, 0.0) if each.plan else 0.0 for _, each in shown]
        if any(seconds):
            color = COLORS.get(name, OTHER_COLOR)
            figure.add_bar(y=labels, x=seconds, name=html.escape(name), marker_color=color, orientation="h")
    figure.update_xaxes(title_text="seconds per step")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure.update_layout(barmode="group", height=160 + 34 * len(shown))
