"""Trains a Llama that need not fit in memory: built within the budget, then stepped on request as workers/step.py is.

Takes workers/step.py's options; --budget-bytes or --process-limit-bytes is needed.
"""

import json
import time
from typing import Any

import torch
from harness.process_memory import forget_peak, peak_resident_bytes
from harness.worker_process import serve
from torch import nn
from transformers import LlamaForCausalLM
from workers.step import Worker, base_resident_bytes, limit_budget, make_configuration, make_optimizer, make_parser

import torch_offload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INITIAL_DEVIATION = 0.02


def build(options: Any) -> LlamaForCausalLM:
    """Build the model as pages; it is never in memory as a whole."""
    config = torch_offload.Config(ram=options.budget_bytes, ssd=options.ssd, page_elements=options.page_elements)
    torch.manual_seed(0)
    loading = getattr(torch_offload, "loading", None)
    if callable(loading):
        with loading(config=config):
            model = LlamaForCausalLM._from_config(make_configuration(options), dtype=DTYPES[options.dtype])
        return torch_offload.wrap(model.train())
    with torch.device("meta"):
        model = LlamaForCausalLM(make_configuration(options)).train()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    torch_offload.wrap(model, config=config)
    for module in model.modules():
        materialise(module, DTYPES[options.dtype])
    return model


def materialise(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace the empty parameters of one module by random ones, which become pages as they are registered."""
    for name, empty in list(module.named_parameters(recurse=False)):
        filled = torch.empty(empty.shape, dtype=dtype)
        nn.init.ones_(filled) if empty.dim() == 1 else nn.init.normal_(filled, std=INITIAL_DEVIATION)
        setattr(module, name, nn.Parameter(filled))


class SizeWorker(Worker):
    """A model that was built within the budget."""

    def __init__(self, options: Any) -> None:
        self.base_bytes = base_resident_bytes(options)
        limit_budget(options, self.base_bytes)
        self.paged = True
        self.budget_bytes = options.budget_bytes
        forget_peak()
        started = time.perf_counter()
        self.model = build(options)
        if options.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.build_seconds = time.perf_counter() - started
        self.build_peak_bytes = peak_resident_bytes()
        self.optimizer = make_optimizer(self.model, options)
        self.ids = torch.randint(0, options.vocabulary, (options.batch, options.sequence))
        self.traffic_so_far = self.traffic()

    def describe(self) -> dict[str, Any]:
        built = {"build_seconds": self.build_seconds, "build_peak_resident_bytes": self.build_peak_bytes}
        return super().describe() | built

    def finish(self) -> dict[str, Any]:
        """Describe the run without reading the weights: that would be another pass over the SSD."""
        return {"report": json.loads(torch_offload.report().to_json())}


if __name__ == "__main__":
    serve(lambda: SizeWorker(make_parser().parse_args()))
