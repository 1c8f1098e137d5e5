"""What a page says of counts of ranks that were not there: counted of one rank, compared, and simulated."""

from typing import Any

from markdown_parts import table

Json = dict[str, Any]
CAUSES = ("computing", "link", "own disk", "other ranks")


def scale_tables(content: Json) -> str:
    """Return the tables of a result of benchmarks/scale.py."""
    return "\n".join(
        (
            "The first rank of many, whose others a fake process group makes up; a step, counted:\n",
            counted(content["one_of_many"]),
            "The model beside measured ranks on this machine:\n",
            compared(content["validation"]),
            "**Simulated**, two ranks to a machine like this one; nothing in this table is measured:\n",
            simulated(content["simulated"]),
            f"{tail(content['inputs']['works'])}\n",
        )
    )


def counted(rows: list[Json]) -> str:
    errors = ("error_of_bytes", "error_of_states", "error_of_peak")
    head = [
        "ranks",
        "layers",
        "parameters of the rank",
        "bytes moved",
        "by replay",
        "error",
        "of states",
        "of the peak",
    ]
    return table(
        head,
        [
            [
                f"{row['ranks']:,}",
                f"{row['layers']:,}",
                f"{row['shard_parameters']:,}",
                f"{row['replayed']['moved_bytes'] / 1e6:.1f} MB",
                f"{row['replayed']['least_bytes_beside_peaks'] / 1e6:.1f} MB",
                *(f"{row[name]:+.1%}" for name in errors),
            ]
            for row in rows
        ],
    )


def compared(rows: list[Json]) -> str:
    found = []
    for row in rows:
        seconds, model = row["measured_seconds"], row["model"]
        measured = f"{seconds['median']:.2f} s ({seconds['min']:.2f} to {seconds['max']:.2f})"
        found.append([str(row["ranks"]), measured, f"{model['step_seconds']:.2f} s", f"{row['error']:+.1%}"])
    return table(["ranks", "a step, measured", "a step, simulated", "error"], found)


def simulated(rows: list[Json]) -> str:
    found = []
    for row in rows:
        for name, title in (("today", "as today"), ("tail_margin", "longer for the tail")):
            step = row[name]
            whole = sum(step["seconds_by_cause"].values())
            found.append(
                [
                    f"{row['ranks']:,}",
                    title,
                    f"{step['margin_seconds'] * 1e3:.0f} ms",
                    f"{step['step_seconds']:.2f} s",
                    f"{step['over_two_ranks']:.2f}",
                    *(f"{step['seconds_by_cause'][cause] / whole:.0%}" for cause in CAUSES),
                    f"{step['share_of_budget_ahead']:.0%}",
                ]
            )
    shares = [f"simulated: {cause}" for cause in CAUSES]
    head = [
        "ranks",
        "margin of reads",
        "its length",
        "simulated step",
        "over that of two",
        *shares,
        "budget read ahead",
    ]
    return table(head, found)


def tail(works: Json) -> str:
    return " ".join(
        f"Of one of {ranks} ranks {work['tail']['reads_recorded']:,} reads were recorded; beyond the quantile "
        f"{work['tail']['from_quantile']} ({work['tail']['seconds'] * 1e3:.1f} ms) the model draws from a power law of "
        f"exponent {work['tail']['exponent']:.2f} fitted to the rest."
        for ranks, work in works.items()
    )
