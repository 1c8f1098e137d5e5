"""Fine-tunes SmolLM2-135M on rows of one length, step by step on request, as workers/step.py does.

    python -m workers.activations --model FOLDER --context 4096 [--budget-bytes N --ssd DIR --activations ssd]

With --find the answer to each command is instead the largest context, in whole steps of --context tokens, of which a
step can be taken within the budget.

The loss is computed over parts of the row and recomputed in backward, in plain torch and paged alike: the logits of a
long row are larger than everything else that a step keeps.
"""

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch
from harness.machine import CpuSeconds
from harness.process_memory import forget_peak, peak_resident_bytes
from harness.worker_process import serve
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from demo_measure import weight_hashes
from demo_model import training_rows

LEARNING_RATE = 1e-5
PART_TOKENS = 256  # of the row, whose loss is computed at once
KINDS_OF_STATE = 4  # weights, gradients, two moments


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens of a row")
    parser.add_argument("--budget-bytes", type=int, default=0, help="0: plain torch, nothing paged")
    parser.add_argument("--activations", default="keep")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--find", action="store_true")
    parser.add_argument("--layers", type=int, help="use only the first so many")
    parser.add_argument("--ssd")
    return parser.parse_args()


def part_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum up the loss of some tokens; `hidden` [rows, tokens, width], `labels` [rows, tokens]."""
    return functional.cross_entropy(functional.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="sum")


class LongRows(nn.Module):
    """A language model that returns the mean loss of a row."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss over the tokens that are predicted; `ids` [1, tokens]."""
        hidden = self.model.model(input_ids=ids).last_hidden_state[:, :-1]
        labels = ids[:, 1:]
        parts = zip(hidden.split(PART_TOKENS, dim=1), labels.split(PART_TOKENS, dim=1), strict=True)
        sums = [checkpoint(part_loss, h, self.model.lm_head.weight, y, use_reentrant=False) for h, y in parts]
        return torch.stack(sums).sum() / labels.numel()


class ActivationsWorker:
    """The model in training, and what it counts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
        model.config.use_cache = False
        if options.layers:
            del model.model.layers[options.layers :]
        if options.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.parameters = model.num_parameters()
        self.model = LongRows(model)
        if options.budget_bytes:
            import torch_offload

            config = torch_offload.Config(activations=options.activations)
            torch_offload.wrap(self.model, ram=options.budget_bytes, ssd=options.ssd, config=config)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        self.rows = [torch.tensor(row["input_ids"]) for row in training_rows(tokenizer, rows=8, tokens=1 << 13)]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.steps = 0

    def ids(self, tokens: int) -> torch.Tensor:
        """Return the next row of so many tokens, [1, tokens]; long ones are put together from several."""
        text = torch.cat(self.rows)
        start = (self.steps * tokens) % max(1, text.numel() - tokens)
        return text[start : start + tokens].unsqueeze(0)

    def train_once(self, tokens: int) -> float:
        """Take a step and return its loss, the mean over the tokens that are predicted."""
        loss = self.model(self.ids(tokens))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def step(self) -> dict[str, Any]:
        if self.options.find:
            return {"largest_context": self.largest_context()}
        forget_peak()
        earlier = self.traffic()
        before = CpuSeconds.now()
        loss = self.train_once(self.options.context)
        measured: dict[str, Any] = CpuSeconds.now().since(before)
        self.steps += 1
        moved = {name: count - earlier[name] for name, count in self.traffic().items()}
        return measured | moved | {"peak_resident_bytes": float(peak_resident_bytes()), "loss": loss.hex()}

    def largest_context(self) -> int:
        """Grow the row until a step runs out of memory, then search between; needs a budget."""
        from torch_offload import OutOfTierMemory

        def fits(steps: int) -> bool:
            try:
                self.train_once(steps * self.options.context)
            except OutOfTierMemory:
                self.optimizer.zero_grad()
                gc.collect()
                return False
            return True

        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * self.options.context

    def traffic(self) -> dict[str, float]:
        """Bytes that the engine moved so far."""
        if not self.options.budget_bytes:
            return {}
        import torch_offload

        report = torch_offload.report()
        return {
            "ssd_read_bytes": report.ssd_read_bytes,
            "ssd_written_bytes": report.ssd_written_bytes,
            "activation_read_bytes": report.read_bytes["activation"],
            "activation_written_bytes": report.written_bytes["activation"],
        }

    def finish(self) -> dict[str, Any]:
        """Describe the run; reading the weights applies what is pending on them."""
        summary: dict[str, Any] = {"weights": weight_hashes(self.model)}
        if self.options.budget_bytes:
            import torch_offload

            report = torch_offload.report()
            summary |= {"peak_bytes": report.host_peak_bytes, "budget_bytes": report.budget_bytes}
        return summary

    def describe(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "state_bytes": KINDS_OF_STATE * 4 * self.parameters}


if __name__ == "__main__":
    serve(lambda: ActivationsWorker(parse_options()))
