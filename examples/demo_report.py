"""What the demo found: the comparison of its two runs, the report, the table."""

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

FROM_PAGED = [
    "parameters",
    "state_bytes",
    "budget_bytes",
    "peak_bytes",
    "process_rss_peak_bytes",
    "step_seconds",
    "ssd_read_bytes",
    "ssd_written_bytes",
    "generated_before",
    "generated_after",
]


def make_report(paged: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Compare the runs. Losses were recorded as hexadecimal floats and weights as hashes: equal means equal bits."""
    return {name: paged[name] for name in FROM_PAGED} | {
        "losses": [float.fromhex(loss) for loss in paged["losses"]],
        "reference_losses": [float.fromhex(loss) for loss in plain["losses"]],
        "losses_bitwise_equal": paged["losses"] == plain["losses"] != [],
        "weights_bitwise_equal": paged["weights"] == plain["weights"] != {},
        "reference_step_seconds": plain["step_seconds"],
    }


def failures(report: dict[str, Any]) -> list[str]:
    """Say what the demo failed to show."""
    traffic = [report["ssd_read_bytes"], report["ssd_written_bytes"]]
    wrong = {
        "a loss differs": not report["losses_bitwise_equal"],
        "a weight differs": not report["weights_bitwise_equal"],
        "the budget was exceeded": report["peak_bytes"] > report["budget_bytes"],
        "nothing was paged": min(traffic) < report["state_bytes"],
    }
    return [what for what, is_so in wrong.items() if is_so]


def show(report: dict[str, Any], plain_rss_peak_bytes: int) -> None:
    """Print the table and the texts."""
    steps = len(report["step_seconds"])
    title = f"SmolLM2-135M, {report['parameters']:,} parameters, fp32, fused AdamW, {steps} optimizer steps"
    table = Table("", "in memory", "paged", title=title)

    def size(count: float) -> str:
        return f"{count / 1e9:.2f} GB"

    def losses(values: list[float]) -> str:
        return f"{values[0]:.6f} ... {values[-1]:.6f}"

    used = f"{size(report['peak_bytes'])} of {size(report['budget_bytes'])}"
    traffic = f"{size(report['ssd_read_bytes'] / steps)} + {size(report['ssd_written_bytes'] / steps)}"
    times = [statistics.median(report[name]) for name in ("reference_step_seconds", "step_seconds")]
    table.add_row("weights, gradients, moments", size(report["state_bytes"]), used)
    table.add_row("peak of the process", size(plain_rss_peak_bytes), size(report["process_rss_peak_bytes"]))
    table.add_row("seconds per step (median)", *(f"{seconds:.2f}" for seconds in times))
    table.add_row("SSD read + written per step", "-", traffic)
    table.add_row("first and last loss", losses(report["reference_losses"]), losses(report["losses"]))
    console = Console()
    console.print(table)
    for when in ("before", "after"):
        console.print(f"{when}: {report[f'generated_{when}']!r}", markup=False)
    wrong = failures(report)
    console.print(f"FAILED: {', '.join(wrong)}" if wrong else "Every loss and every final weight is bit-identical.")
