"""Loads a model under a budget, wraps it, runs it once, saves it, and prints what each took: a process of load_save.py.

python -m workers.load_save MODEL_FOLDER OUTPUT_FOLDER BUDGET_BYTES SSD_DIRECTORY CHECKPOINT_PAGES
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

    @classmethod
    def traffic(cls) -> dict[str, int]:
        """Bytes of pages so far, none before there is an engine; and what the process had the disk read, files too."""
        storage = {"storage_read_bytes": cls.storage_read_bytes()}
        try:
            report = torch_offload.report()
        except torch_offload.OffloadError:
            return storage | {"ssd_read_bytes": 0, "ssd_written_bytes": 0}
        return storage | {"ssd_read_bytes": report.ssd_read_bytes, "ssd_written_bytes": report.ssd_written_bytes}

    @staticmethod
    def storage_read_bytes() -> int:
        """As in proc_pid_io(5)."""
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["read_bytes"])


def main() -> None:
    folder, output, budget, ssd, checkpoint_pages = sys.argv[1:]
    torch.set_num_threads(os.cpu_count() or 1)
    forget_cached(Path(folder))
    loading = Phase()
    settings = {"ram": int(budget), "ssd": ssd, "checkpoint_pages": checkpoint_pages}
    with torch_offload.loading(config=settings):
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch_offload.wrap(model)
    load = loading.end()
    token = Phase()
    with torch.no_grad():
        first_token = int(model(torch.ones(1, 1, dtype=torch.int64)).logits.argmax())
    results = {"load": load, "token": token.end(), "first_token": first_token}
    torch_offload.flush()
    saving = Phase()
    model.save_pretrained(output)
    results |= {"save": saving.end(), "peak_bytes": torch_offload.report().host_peak_bytes}
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
