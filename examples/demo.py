"""Fine-tunes a real language model inside a third of its memory and shows that nothing changed: `make demo`.

Two processes run the same stock Trainer, one in memory and one paged. Every loss and every final weight must be equal
bit for bit. Writes demo-report.json and exits non-zero if anything differs or the budget was not kept.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from demo_report import failures, make_report, show

HERE = Path(__file__).resolve().parent
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
BUDGET_SHARE = 0.35


def run(script: str, *arguments: str) -> None:
    subprocess.run([sys.executable, HERE / script, *arguments], check=True, env=OFFLINE)


def train(*arguments: str) -> dict[str, Any]:
    """Run demo_train.py in a process of its own and return what it noted."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "run.json")
        run("demo_train.py", "--output", str(output), *arguments)
        return dict(json.loads(output.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".cache/smollm2-135m", help="a folder, made if it is missing")
    parser.add_argument("--report", type=Path, default=Path("demo-report.json"))
    parser.add_argument("--steps", default="20")
    parser.add_argument("--budget-share", type=float, default=BUDGET_SHARE, help="of the state of the training run")
    options = parser.parse_args()
    run("demo_model.py", options.model)
    arguments = ["--model", options.model, "--steps", options.steps]
    print(f"Training {options.steps} steps in memory, then with {options.budget_share:.0%} of the memory.", flush=True)
    plain = train(*arguments)
    paged = train(*arguments, "--budget-share", str(options.budget_share))
    report = make_report(paged, plain)
    options.report.write_text(json.dumps(report, indent=1) + "\n")
    show(report, plain["process_rss_peak_bytes"])
    return 1 if failures(report) else 0


if __name__ == "__main__":
    sys.exit(main())
