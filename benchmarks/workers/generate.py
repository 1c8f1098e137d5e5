"""Generates with a saved model, or evaluates it, step by step on request: a process of generate.py.

Reads one command per line from stdin ("step", "replay" or "finish") and answers each with a JSON line on stdout.
"""

import argparse
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from harness.belady_check import least_of_passes
from harness.machine import CpuSeconds, read_bytes_of_process
from harness.process_memory import forget_peak, peak_resident_bytes
from harness.worker_process import serve
from transformers import LlamaForCausalLM

VARIANTS = ("plain", "paged", "mapped", "disk")
REPLAYED_STEPS = 3  # the first to begin with, the second to judge, the third for what the second keeps


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, help="the saved model")
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--budget-bytes", type=int, default=0, help="of the variant that is paged")
    parser.add_argument("--page-elements", type=int, default=1 << 20)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--prompt", type=int, required=True, help="tokens of each row")
    parser.add_argument("--new-tokens", type=int, required=True, help="0: the loss of the rows instead")
    parser.add_argument("--ssd", required=True)
    return parser


def load(options: argparse.Namespace, scratch: str) -> LlamaForCausalLM:
    """Return the model: in memory, as pages, as the mapped file, or on the disk by accelerate's hooks."""
    if options.variant == "paged":
        import torch_offload

        config = torch_offload.Config(ram=options.budget_bytes, ssd=scratch, page_elements=options.page_elements)
        with torch_offload.loading(config=config):
            model = LlamaForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16)
        return torch_offload.wrap(model)
    if options.variant == "disk":
        return LlamaForCausalLM.from_pretrained(
            options.folder, dtype=torch.bfloat16, device_map={"": "disk"}, offload_folder=scratch
        )
    model = LlamaForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16)
    if options.variant == "plain":
        for weight in model.parameters():
            weight.data = weight.data.clone()  # else it is the mapped file
    return model


class PassClock:
    """Notes when the model's forward passes begin and what was read by then: what lies between belongs to the first."""

    def __init__(self, model: torch.nn.Module, pages_read: Callable[[], int]) -> None:
        self.pages_read = pages_read
        self.begun: list[tuple[float, int]] = []
        model.register_forward_pre_hook(lambda *_: self.note())

    def note(self) -> None:
        self.begun.append((time.perf_counter(), self.pages_read()))

    def take(self) -> list[dict[str, float]]:
        """Return the seconds and the bytes of each pass, the last until now."""
        self.note()
        parts = [
            {"seconds": after[0] - before[0], "ssd_read_bytes": after[1] - before[1]}
            for before, after in itertools.pairwise(self.begun)
        ]
        self.begun.clear()
        return parts


class GenerateWorker:
    """A model that only runs forward."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self.options = options
        self.scratch = tempfile.TemporaryDirectory(dir=options.ssd)
        self.model = load(options, self.scratch.name).eval()
        torch.manual_seed(1)
        self.ids = torch.randint(0, self.model.config.vocab_size, (options.rows, options.prompt))
        self.passes = PassClock(self.model, self.pages_read)

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        if self.options.new_tokens == 0:
            return self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        count = self.options.new_tokens
        settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return self.model.generate(self.ids, attention_mask=torch.ones_like(self.ids), **settings)

    def pages_read(self) -> int:
        if self.options.variant != "paged":
            return 0
        import torch_offload

        return torch_offload.report().ssd_read_bytes

    def step(self) -> dict[str, Any]:
        forget_peak()
        from_disk, pages = read_bytes_of_process(), self.pages_read()
        started = CpuSeconds.now()
        result = self.run()
        measured = CpuSeconds.now().since(started)
        return measured | {
            "passes": self.passes.take(),
            "result_sha256": hashlib.sha256(result.reshape(-1).view(torch.uint8).numpy()).hexdigest(),
            "read_bytes": read_bytes_of_process() - from_disk,
            "ssd_read_bytes": self.pages_read() - pages,
            "peak_resident_bytes": peak_resident_bytes(),
        }

    def replay(self) -> dict[str, Any]:
        """Return the bytes that one more step reads, and that the best eviction reads for the same uses."""
        from torch_offload.runtime.process import PROCESS

        session = PROCESS.session
        if session is None:
            raise SystemExit("only a model that is paged has uses to replay")
        session.engine.start_use_log()
        read_bytes = [self.step()["ssd_read_bytes"] for _ in range(REPLAYED_STEPS)]
        log, budget_bytes = session.engine.take_use_log(), session.config.ram or 0
        least = {}
        for name, beside_peaks in (("least_read_bytes", False), ("least_read_bytes_beside_peaks", True)):
            passes = least_of_passes(log, budget_bytes, beside_peaks=beside_peaks)
            each = len(passes) // REPLAYED_STEPS  # what was before the first is one, what is after the last is none
            least[name] = sum(read for read, _ in passes[1 + each : 1 + 2 * each])
        return {"passes": each, "read_bytes": read_bytes[1], **least}

    def finish(self) -> dict[str, Any]:
        if self.options.variant != "paged":
            return {}
        import torch_offload

        return {"report": json.loads(torch_offload.report().to_json())}

    def describe(self) -> dict[str, Any]:
        size_bytes = sum(weight.nbytes for weight in self.model.parameters())
        return {"weight_bytes": size_bytes, "peak_resident_bytes": peak_resident_bytes(), "torch": torch.__version__}


if __name__ == "__main__":
    serve(lambda: GenerateWorker(make_parser().parse_args()))
