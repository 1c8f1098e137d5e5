"""Trains a random-init Llama step by step on request: one worker is plain torch, others are paged.

Reads one command per line from stdin ("step", "replay" or "finish") and answers each with a JSON line on stdout.
"""

import argparse
import hashlib
import json
import os
import sys
from typing import Any

import torch
from machine import CpuSeconds
from replay import least_traffic
from transformers import LlamaConfig, LlamaForCausalLM

REPLAYED_STEPS = 4
KINDS_OF_STATE = 4  # weights, gradients, two moments


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("hidden", "intermediate", "layers", "heads", "vocabulary", "batch", "sequence"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--checkpointing", type=int, default=0)
    parser.add_argument("--budget-bytes", type=int, default=0, help="0: plain torch, nothing paged")
    parser.add_argument("--page-elements", type=int, default=1 << 20)
    parser.add_argument("--ssd")
    return parser.parse_args()


def make_model(options: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=max(2048, options.sequence),
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).train()
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class Worker:
    """A model in training, and what it counts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.paged = options.budget_bytes > 0
        self.model = make_model(options)
        if self.paged:
            import torch_offload

            config = torch_offload.Config(page_elements=options.page_elements)
            torch_offload.wrap(self.model, ram=options.budget_bytes, ssd=options.ssd, config=config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(0, options.vocabulary, (options.batch, options.sequence))
        self.traffic_so_far = self.traffic()

    def step(self) -> dict[str, Any]:
        """Take a step. Its traffic includes what the engine finished after the step before, told apart as such."""
        between = self.traffic_since_last_call()
        before = CpuSeconds.now()
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        measured = CpuSeconds.now().since(before)
        traffic = {name: between[name] + count for name, count in self.traffic_since_last_call().items()}
        outside = {f"{name}_between_steps": count for name, count in between.items()}
        return measured | traffic | outside | {"loss": loss.item().hex()}

    def replay(self) -> dict[str, Any]:
        """Take steps with every use of a page listed, and replay the list under the best eviction there is."""
        from torch_offload import session

        current = session.current()
        if current is None:
            return {}
        self.traffic_since_last_call()
        current.engine.start_use_log()
        for _ in range(REPLAYED_STEPS):
            step = self.step()
        least_read, least_written = least_traffic(current.engine.take_use_log(), current.config.ram or 0)
        return {
            "least_read_bytes": least_read,
            "least_written_bytes": least_written,
            "ssd_read_bytes": step["ssd_read_bytes"],
            "ssd_written_bytes": step["ssd_written_bytes"],
        }

    def traffic_since_last_call(self) -> dict[str, float]:
        earlier, self.traffic_so_far = self.traffic_so_far, self.traffic()
        return {name: count - earlier[name] for name, count in self.traffic_so_far.items()}

    def traffic(self) -> dict[str, float]:
        """What the kernel and the engine counted so far."""
        with open("/proc/self/io") as file:
            counted = dict(line.split(": ") for line in file.read().splitlines())
        totals = {f"process_{name}": float(counted[name]) for name in ("read_bytes", "write_bytes")}
        if not self.paged:
            return totals
        import torch_offload

        report = torch_offload.report()
        totals |= {"ssd_read_bytes": report.ssd_read_bytes, "ssd_written_bytes": report.ssd_written_bytes}
        return totals | {f"stall_{cause}_seconds": seconds for cause, seconds in report.stall_seconds.items()}

    def finish(self) -> dict[str, Any]:
        """Describe the run. Hashing the weights applies what is pending on them."""
        weights = hashlib.sha256()
        for weight in self.model.parameters():
            weights.update(weight.detach().numpy())
        summary: dict[str, Any] = {"weights_sha256": weights.hexdigest()}
        if self.paged:
            import torch_offload

            summary["report"] = json.loads(torch_offload.report().json())
        return summary

    def describe(self) -> dict[str, Any]:
        layers = [*self.model.model.layers, self.model.model.embed_tokens, self.model.lm_head]
        sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
        parts = [sizes[-2], *sizes[:-2], sizes[-1]]  # in the order of the forward
        total = sum(weight.numel() for weight in self.model.parameters())
        state_bytes = KINDS_OF_STATE * sum(weight.nbytes for weight in self.model.parameters())
        return {"parameters": total, "part_elements": parts, "state_bytes": state_bytes, "torch": torch.__version__}


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else prints must not look like an answer
    worker = Worker(parse_options())
    answers.write(json.dumps(worker.describe()) + "\n")
    for line in sys.stdin:
        answer = {"step": worker.step, "replay": worker.replay, "finish": worker.finish}[line.strip()]()
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
