"""Loads a model under a budget, wraps it, saves it again, and prints what each took: a process of load_save.py.

python -m workers.load_save MODEL_FOLDER OUTPUT_FOLDER BUDGET_BYTES SSD_DIRECTORY
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from harness.cached_files import forget_cached
from harness.machine import CpuSeconds
from transformers import LlamaForCausalLM

import torch_offload


class Phase:
    """What happened between its making and :meth:`end`."""

    def __init__(self) -> None:
        self.before = self.traffic()
        self.started = CpuSeconds.now()

    def end(self) -> dict[str, Any]:
        measured = CpuSeconds.now().since(self.started)
        return measured | {name: count - self.before[name] for name, count in self.traffic().items()}

    @staticmethod
    def traffic() -> dict[str, int]:
        """Bytes of pages so far; none before there is an engine."""
        try:
            report = torch_offload.report()
        except torch_offload.OffloadError:
            return {"ssd_read_bytes": 0, "ssd_written_bytes": 0}
        return {"ssd_read_bytes": report.ssd_read_bytes, "ssd_written_bytes": report.ssd_written_bytes}


def main() -> None:
    folder, output, budget, ssd = sys.argv[1:]
    torch.set_num_threads(os.cpu_count() or 1)
    forget_cached(Path(folder))
    loading = Phase()
    with torch_offload.loading(ram=int(budget), ssd=ssd):
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch_offload.wrap(model)
    load = loading.end()
    torch_offload.flush()
    saving = Phase()
    model.save_pretrained(output)
    result = {"load": load, "save": saving.end(), "peak_bytes": torch_offload.report().host_peak_bytes}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
