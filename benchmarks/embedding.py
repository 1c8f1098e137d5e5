"""What it takes to look rows up in a table of sixteen times the memory.

    python benchmarks/embedding.py --json --ssd /mnt/nvme > benchmarks/results/embedding.json     (some 3 minutes)
    python benchmarks/embedding.py --smoke

A frozen bf16 embedding of 8.6 GB with a small network behind it, loaded from one safetensors file: in memory as plain
torch, and within 512 MiB. Both take turns at looking up 256 random rows. Tokens must be equal, and at most two pages
may be read for each distinct row; accelerate and transformers have no way to read less than the whole table.
"""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness.disk import DiskProbe
from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import at_most, emit, progress, spread, usable
from harness.rounds import Workers
from harness.worker_process import WorkerProcess, option_words, worker_command

BF16_BYTES = 2
MOST_PAGES_PER_ROW = 2
ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Plan:
    """The table, what is asked of it, and how often."""

    rows: int = 1 << 22
    width: int = 1024
    vocabulary: int = 32000
    asked: int = 256
    budget_bytes: int = 512 << 20
    page_elements: int = 1 << 20
    rounds: int = 7
    most_rounds: int = 12
    probe_bytes: int = 256 << 20


SMOKE = Plan(1 << 14, 256, 512, asked=32, budget_bytes=1 << 20, page_elements=1 << 13, rounds=1, most_rounds=1)


def write_weights(plan: Plan, path: Path) -> None:
    """Write a safetensors file without holding the table: its header, then one tensor after the other."""
    shapes = {
        "table.weight": (plan.rows, plan.width),
        "mixed.weight": (plan.width, plan.width),
        "head.weight": (plan.vocabulary, plan.width),
    }
    header: dict[str, Any] = {}
    end = 0
    for name, (rows, width) in shapes.items():
        begin, end = end, end + BF16_BYTES * rows * width
        header[name] = {"dtype": "BF16", "shape": [rows, width], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for rows, width in shapes.values():
            for first in range(0, rows, ROWS_AT_ONCE):
                count = min(ROWS_AT_ONCE, rows - first)
                values = torch.randint(-(1 << 14), 1 << 14, (count, width), generator=generator, dtype=torch.int16)
                file.write((values.float() / (1 << 14)).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())


def measure(plan: Plan, root: Path) -> dict[str, Any]:
    """Let both take turns."""
    weights = root / "model.safetensors"
    progress("write the table")
    write_weights(plan, weights)
    probe = DiskProbe(str(root), probe_bytes=plan.probe_bytes)
    with Workers() as workers:
        for name, budget_bytes in (("plain", 0), ("paged", plan.budget_bytes)):
            shape = {key: getattr(plan, key) for key in ("rows", "width", "vocabulary", "asked", "page_elements")}
            shape |= {"file": weights, "ssd": root, "budget_bytes": budget_bytes}
            words = option_words(shape)
            workers[name] = WorkerProcess(name, [*worker_command("embedding"), *words], log_directory=str(root))
        rounds = workers.take_turns(wanted=plan.rounds, most=plan.most_rounds, probe=probe)
        report = workers["paged"].ask("finish")["report"]
    used, is_disturbed = usable(rounds, wanted=plan.rounds)
    pages = [row["steps"]["paged"]["ssd_read_bytes"] / (BF16_BYTES * plan.page_elements) for row in rounds]
    rows = [row["steps"]["paged"]["distinct_rows"] for row in rounds]
    read_rates = [step["ssd_read_bytes"] / step["seconds"] for step in (row["steps"]["paged"] for row in used)]
    disk_rates = [row["disk"]["read_bytes_per_second"] for row in used]
    return {
        "plan": asdict(plan),
        "table_bytes": workers["paged"].description["table_bytes"],
        "disturbed": is_disturbed,
        "report": report,
        "peak_resident_bytes": workers["paged"].peak_resident_bytes,
        "seconds": {name: spread([row["steps"][name]["seconds"] for row in used]) for name in workers},
        "pages_per_row": spread([count / distinct for count, distinct in zip(pages, rows, strict=True)]),
        "share_of_disk_rate": spread([rate / disk for rate, disk in zip(read_rates, disk_rates, strict=True)]),
        "rounds": rounds,
    }


def bars_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    steps = [row["steps"] for row in result["rounds"]]
    differing = sum(step["paged"]["tokens_sha256"] != step["plain"]["tokens_sha256"] for step in steps)
    report = result["report"]
    return [
        at_most("steps with other tokens than plain", differing, 0),
        at_most("pages read for each distinct row, at most", result["pages_per_row"]["max"], MOST_PAGES_PER_ROW),
        at_most("paged peak over budget", report["host_peak_bytes"] / report["budget_bytes"], 1),
    ]


def main() -> None:
    parser = driver_parser(__doc__, smoke="a tiny table for seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        result = measure(SMOKE if options.smoke else Plan(), Path(scratch).resolve())
    told = {"benchmark": "embedding", "machine": machine(options.ssd)} | result
    emit(told | {"bars": bars_of(result)}, as_json=options.json)


if __name__ == "__main__":
    main()
