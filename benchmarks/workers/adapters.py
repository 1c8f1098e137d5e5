"""Trains LoRA adapters over a frozen random-init Llama, step by step on request, as workers/step.py does.

Takes workers/step.py's options and --rank; with --budget-bytes base and adapters are paged, otherwise it is plain PEFT.
"""

import argparse
import hashlib
import json
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from workers.step import LEARNING_RATE, Worker, make_model, make_parser, serve

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class AdaptersWorker(Worker):
    """A frozen base with adapters in training."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.paged = options.budget_bytes > 0
        base = make_model(options)
        self.base_bytes = sum(weight.nbytes for weight in base.parameters())
        if options.checkpointing:
            base.enable_input_require_grads()  # so that a block whose inputs need no gradient is recomputed as well
        config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=TARGETS, task_type="CAUSAL_LM")
        self.model = get_peft_model(base, config)
        if self.paged:
            import torch_offload

            torch_offload.wrap(self.model, config=self.config(options))
        self.adapters = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.adapters, lr=LEARNING_RATE, fused=True)
        self.ids = torch.randint(0, options.vocabulary, (options.batch, options.sequence))
        self.traffic_so_far = self.traffic()

    def finish(self) -> dict[str, Any]:
        """Describe the run; reading the adapters applies what is pending on them."""
        weights = hashlib.sha256()
        for weight in self.adapters:
            weights.update(weight.detach().view(torch.uint8).numpy())
        summary: dict[str, Any] = {"adapters_sha256": weights.hexdigest()}
        if self.paged:
            import torch_offload

            summary["report"] = json.loads(torch_offload.report().to_json())
        return summary

    def describe(self) -> dict[str, Any]:
        trained = sum(weight.numel() for weight in self.adapters)
        return {"base_bytes": self.base_bytes, "adapter_parameters": trained, "torch": torch.__version__}


if __name__ == "__main__":
    parser = make_parser()
    parser.add_argument("--rank", type=int, default=8)
    serve(lambda: AdaptersWorker(parser.parse_args()))
