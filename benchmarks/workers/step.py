"""Trains a random-init Llama step by step on request: one worker is plain torch, others are paged.

Reads one command per line from stdin ("step", "replay" or "finish") and answers each with a JSON line on stdout.
"""

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from harness.machine import CpuSeconds
from harness.process_memory import forget_peak, huge_page_bytes, peak_resident_bytes, resident_bytes, swapped_bytes
from harness.worker_process import serve
from models.mixed_precision import MasterAdamW
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from torch_offload import Config

REPLAYED_STEPS = 4
KINDS_OF_STATE = 4  # weights, gradients, two moments
LEARNING_RATE = 1e-4
LIMIT_TOLERANCE = 1.02  # of the memory that a process may take beside what it holds before the model


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("hidden", "intermediate", "layers", "heads", "vocabulary", "batch", "sequence"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--checkpointing", type=int, default=0)
    parser.add_argument("--budget-bytes", type=int, default=0, help="0: plain torch, nothing paged")
    parser.add_argument("--process-limit-bytes", type=int, default=0, help="sets the budget: this less what is taken")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 weights have fp32 masters")
    parser.add_argument("--optimizer", choices=("stock", "offload"), default="stock")
    parser.add_argument("--max-grad-norm", type=float, default=0, help="0: gradients are not clipped")
    parser.add_argument("--page-elements", type=int, default=1 << 20)
    parser.add_argument("--activations", default="", help="a mode of Config.activations; default: the package's")
    parser.add_argument("--update", default="", help="a value of Config.update; default: the package's")
    parser.add_argument("--ssd")
    return parser


def make_configuration(options: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
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


def make_model(options: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(make_configuration(options)).train()
    if options.dtype == "bf16":
        model = model.to(torch.bfloat16)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def make_optimizer(model: LlamaForCausalLM, options: argparse.Namespace) -> Any:
    if options.optimizer == "offload":
        import torch_offload

        return torch_offload.AdamW(model.parameters(), lr=LEARNING_RATE)
    if options.dtype == "bf16":
        return MasterAdamW(model.parameters(), lr=LEARNING_RATE)
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def limit_budget(options: argparse.Namespace, base_bytes: int) -> None:
    """Turn a limit on the process into a budget."""
    if options.process_limit_bytes:
        options.budget_bytes = int(options.process_limit_bytes / LIMIT_TOLERANCE) - base_bytes
        if options.budget_bytes <= 0:
            raise SystemExit(
                f"a process limit of {options.process_limit_bytes} bytes is below the base of {base_bytes}"
            )


def base_resident_bytes(options: argparse.Namespace) -> int:
    """Return what a process holds without the model: libraries in use, found by a step of a tiny one."""
    import torch_offload  # noqa: F401  its code counts

    small = {"hidden": 64, "intermediate": 64, "layers": 1, "heads": 1, "vocabulary": 64}
    model = make_model(argparse.Namespace(**{**vars(options), **small}))
    optimizer = make_optimizer(model, options)
    ids = torch.zeros(1, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return resident_bytes()


class Worker:
    """A model in training, and what it counts."""

    max_grad_norm: float = 0  # 0: gradients are not clipped

    def __init__(self, options: argparse.Namespace) -> None:
        self.base_bytes = base_resident_bytes(options) if options.process_limit_bytes else 0
        limit_budget(options, self.base_bytes)
        self.paged = options.budget_bytes > 0
        self.max_grad_norm = options.max_grad_norm
        self.budget_bytes = options.budget_bytes
        self.model = self.paged_model(options) if self.paged else self.new_model(options)
        self.optimizer = make_optimizer(self.model, options)
        self.ids = torch.randint(0, options.vocabulary, (options.batch, options.sequence))
        self.traffic_so_far = self.traffic()

    def new_model(self, options: argparse.Namespace) -> LlamaForCausalLM:
        """Return what is trained, in memory."""
        return make_model(options)

    def paged_model(self, options: argparse.Namespace) -> LlamaForCausalLM:
        """Return the same, paged."""
        import torch_offload

        return torch_offload.wrap(self.new_model(options), config=self.config(options))

    def own_part(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what this process has of a weight."""
        return weight

    def config(self, options: argparse.Namespace) -> "Config":
        """Return the settings of a paged worker."""
        from torch_offload import Config

        config = Config(ram=options.budget_bytes, ssd=options.ssd, page_elements=options.page_elements)
        chosen = {"activations": options.activations, "update": options.update}
        return config.replace(**{name: value for name, value in chosen.items() if value})

    def step(self) -> dict[str, Any]:
        """Take a step. Its traffic includes what the engine finished after the step before, told apart as such."""
        between = self.traffic_since_last_call()
        forget_peak()
        before = CpuSeconds.now()
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        forward_seconds, forward_traffic = CpuSeconds.now().wall - before.wall, self.traffic_since_last_call()
        loss.backward()
        backward_seconds = CpuSeconds.now().wall - before.wall - forward_seconds
        if self.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        measured = CpuSeconds.now().since(before)
        measured |= {"forward_seconds": forward_seconds, "backward_seconds": backward_seconds}
        later = self.traffic_since_last_call()
        traffic = {name: between[name] + forward_traffic[name] + count for name, count in later.items()}
        traffic |= {f"{name}_forward": count for name, count in forward_traffic.items()}
        outside = {f"{name}_between_steps": count for name, count in between.items()}
        memory = {"peak_resident_bytes": float(peak_resident_bytes()), "huge_page_bytes": float(huge_page_bytes())}
        return measured | traffic | outside | memory | {"loss": loss.item().hex()}

    def replay(self) -> dict[str, Any]:
        """Take steps with every use of a page listed, and replay the list under the best eviction there is.

        A plain worker takes the steps as well, so that the weights at the end can be compared.
        """
        from harness.belady_check import least_traffic

        from torch_offload.runtime.process import PROCESS

        current = PROCESS.session
        if current is not None:
            current.engine.start_use_log()
        for _ in range(REPLAYED_STEPS):
            step = self.step()
        if current is None:
            return {}
        log, budget_bytes = current.engine.take_use_log(), current.config.ram or 0
        least_read, least_written = least_traffic(log, budget_bytes)
        return {
            "least_read_bytes": least_read,
            "least_written_bytes": least_written,
            "least_bytes_beside_peaks": sum(least_traffic(log, budget_bytes, beside_peaks=True)),
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
        totals |= swapped_bytes()
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
            weights.update(self.own_part(weight.detach()).view(torch.uint8).numpy())
        summary: dict[str, Any] = {"weights_sha256": weights.hexdigest()}
        if self.paged:
            import torch_offload

            with tempfile.TemporaryDirectory() as folder:  # older builds, which builds.py compares, only write it
                torch_offload.report().write_json(Path(folder, "report.json"))
                summary["report"] = json.loads(Path(folder, "report.json").read_text())
            summary["package"] = str(Path(torch_offload.__file__).resolve().parent)
        return summary

    def describe(self) -> dict[str, Any]:
        layers = [*self.model.model.layers, self.model.model.embed_tokens, self.model.lm_head]
        sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
        parts = [sizes[-2], *sizes[:-2], sizes[-1]]  # in the order of the forward
        total = sum(weight.numel() for weight in self.model.parameters())
        state_bytes = KINDS_OF_STATE * sum(weight.nbytes for weight in self.model.parameters())
        memory = {"base_bytes": self.base_bytes, "budget_bytes": self.budget_bytes}
        memory["start_peak_resident_bytes"] = peak_resident_bytes()
        sizes = {"parameters": total, "part_elements": parts, "state_bytes": state_bytes}
        return sizes | memory | {"torch": torch.__version__}


if __name__ == "__main__":
    serve(lambda: Worker(make_parser().parse_args()))
