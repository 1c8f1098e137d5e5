"""Trains LoRA adapters over a frozen base, step by step on request, as workers/step.py does.

Takes workers/step.py's options and --rank; with --budget-bytes base and adapters are paged, otherwise it is plain PEFT.
The base is a random-init Llama, or with --folder the model from there in --dtype, --quantized to NF4 as it is loaded.
"""

import argparse
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from harness.worker_process import serve
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from workers.step import LEARNING_RATE, Worker, make_model, make_parser

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class AdaptersWorker(Worker):
    """A frozen base with adapters in training."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.paged = options.budget_bytes > 0
        with self.loading(options):
            base = load_model(options) if options.folder else make_model(options)
        self.base_bytes = bytes_of(base)
        if options.checkpointing:
            base.enable_input_require_grads()  # so that a block whose inputs need no gradient is recomputed as well
        config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=TARGETS, task_type="CAUSAL_LM")
        torch.manual_seed(1)
        self.model = get_peft_model(base, config)
        if self.paged:
            import torch_offload

            torch_offload.wrap(self.model, config=self.config(options))
        self.adapters = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.adapters, lr=LEARNING_RATE, fused=True)
        self.ids = torch.randint(0, options.vocabulary, (options.batch, options.sequence))
        self.traffic_so_far = self.traffic()

    def loading(self, options: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
        """Page what a folder brings as it comes."""
        if not (self.paged and options.folder):
            return contextlib.nullcontext()
        import torch_offload

        return torch_offload.loading(config=self.config(options))

    def traffic(self) -> dict[str, float]:
        """Also of weights and all that is written, by what it is of."""
        totals = super().traffic()
        if self.paged:
            import torch_offload

            report = torch_offload.report()
            totals["weights_read_bytes"] = report.read_bytes["parameter"]
            totals |= {f"{kind}_written_bytes": count for kind, count in report.written_bytes.items()}
        return totals

    def finish(self) -> dict[str, Any]:
        """Describe the run; reading the adapters applies what is pending on them."""
        weights = hashlib.sha256()
        for weight in self.adapters:
            weights.update(weight.detach().view(torch.uint8).numpy())
        summary: dict[str, Any] = {"adapters_sha256": weights.hexdigest()}
        if self.paged:
            import torch_offload

            summary["report"] = json.loads(torch_offload.report().to_json())
            summary["package"] = str(Path(torch_offload.__file__).resolve().parent)
        return summary

    def describe(self) -> dict[str, Any]:
        trained = sum(weight.numel() for weight in self.adapters)
        largest = max(weight.nbytes for weight in self.model.parameters())
        sizes = {"base_bytes": self.base_bytes, "largest_bytes": largest, "adapter_parameters": trained}
        return sizes | {"torch": torch.__version__}


def load_model(options: argparse.Namespace) -> Any:
    """Load the model of a folder; quantized, linear layers but the head are NF4 with nested statistics."""
    chosen = {"quantization_config": nf4()} if options.quantized else {}
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=DTYPES[options.dtype], use_cache=False, **chosen)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def nf4() -> BitsAndBytesConfig:
    """Return how a base is quantized."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def bytes_of(base: Any) -> int:
    """Bytes of a base, with the statistics of what is quantized."""
    total = 0
    for weight in base.parameters():
        state = getattr(weight, "quant_state", None)
        nested = getattr(state, "state2", None)
        total += weight.nbytes + sum(part.absmax.nbytes for part in (state, nested) if part is not None)
    return total


def make_adapters_parser() -> argparse.ArgumentParser:
    """Return the options of a worker that trains adapters."""
    parser = make_parser()
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--folder", default="", help="of the base; default: random weights in fp32")
    parser.add_argument("--quantized", type=int, default=0, help="1: the folder's model in NF4")
    return parser


if __name__ == "__main__":
    serve(lambda: AdaptersWorker(make_adapters_parser().parse_args()))
